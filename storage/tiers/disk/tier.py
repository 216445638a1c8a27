"""The disk tier: one safetensors file for each record, in a directory, with an index in SQLite.

    DIR/lock                           held by the only process that writes to the directory
    DIR/records/ab/abcd….safetensors   a record, named by its key
    DIR/tmp/                           records that are being written; emptied at the next start
    DIR/index.sqlite                   what the records are, and when they were last used (`index.py`)

The files decide what is stored, and the index saves reading them at each start. It is compared with the directory in
the background. If a process was killed or the index was lost, the start waits for that for half a second.

A record is written to `tmp` and renamed, so that a killed process leaves no incomplete record under a final name. After
a power failure, the checksums detect incomplete records. Files without a record's name are never read or removed.
"""

import contextlib
import errno
import logging
import os
import re
import stat
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from itertools import groupby, islice
from operator import itemgetter
from pathlib import Path

from lmc.background import repeat
from lmc.errors import CorruptRecord, TierUnusable
from lmc.keys import ChunkKey, RecordKind
from lmc.shapes import MIB
from lmc.storage.change_log import ChangeLog
from lmc.storage.eviction import EvictionClass, EvictionOrder, Facts
from lmc.storage.locks import Rank, new_lock
from lmc.storage.tiers.breaker import FAILURES, Breaker
from lmc.storage.tiers.disk import files
from lmc.storage.tiers.disk.index import DiskIndex, IndexLost, read_uses
from lmc.storage.tiers.disk.reader import DiskReader
from lmc.storage.tiers.record import (
    SUFFIX,
    RecordMeta,
    checksums,
    encode_header,
    file_of,
    is_removed,
    pages,
    removed_if_corrupt,
    verify_parts,
)
from lmc.storage.tiers.tier import Entry, Finding, Written

log = logging.getLogger(__name__)

FULL = (errno.ENOSPC, errno.EDQUOT)
# For records of at least this size, checksums are computed while the bytes are written, and the header is then written
# a second time. On 2 cores (NVMe over virtio, 2 writers) this gives 3.0 GB/s instead of 2.8 for 32 MiB. For smaller
# records the second request costs more than it saves: 2.4 GB/s instead of 2.8 for 4 MiB, 1.8 instead of 2.3 for 1 MiB.
BESIDE_BYTES = 16 * MIB
# Writing pauses for this time if the disk stays full after an eviction, and after three write errors in a row.
PAUSE_SECONDS = 30.0
TRIES = 4  # attempts to write a record to a full filesystem, with an eviction before each further attempt
CLOSING_SECONDS = 1.0  # `close` waits at most this long for a check of the directory that is in flight
SHARDS = 256  # folders of records, by the first byte of the key
LOGGED_RECORDS = 1000  # Reading this many records takes a noticeable time, and is logged.
TRIMMED_BYTES = 256 << 20  # evicted at once, while other threads wait, if a directory is above its bound
LOADED_TOGETHER = 1000  # records of the index
USES_SECONDS = 10.0  # Uses in memory are written to the disk's index after this time.
USES_TOGETHER = 256  # uses that are written at once, while other threads wait
START_SECONDS = 0.5  # longest wait of a start for the comparison of an incomplete index with the directory
REST_SECONDS = 0.05  # pause between two folders while a complete index is compared with the directory
_RECORD_NAME = re.compile(r"[0-9a-f]{64}" + re.escape(SUFFIX))
_TEMPORARY_NAME = re.compile(r"[0-9]+" + re.escape(SUFFIX))


class DiskTier:
    """Records of at most `capacity` bytes in a directory. The least recently used record is evicted first."""

    name = "disk"
    shared = False

    def __init__(
        self, root: Path | str, capacity: int, *, read_only: bool = False, document_share: float = 0.0
    ) -> None:
        """Lock the directory and read the index. Documents have a share of the capacity; see `eviction.py`.

        Raises `TierUnusable` if another process has locked the directory, or if it cannot be read or written.
        """
        self.root, self.capacity, self.read_only = Path(root), capacity, read_only
        self.corrupt = self.evictions = self.document_evictions = 0
        self.bytes = 0  # bytes of all records on disk
        self._records, self._tmp = self.root / "records", self.root / "tmp"
        self._breaker = Breaker(f"disk tier {self.root}", self._probe)
        self._lock = new_lock(Rank.TIER)
        self._changes: ChangeLog | None = None
        self._order: EvictionOrder[ChunkKey] = EvictionOrder(document_share * capacity)  # all records
        self._pinned: set[ChunkKey] = set()  # also of records that will be written later
        self._paused_until, self._failed_writes = 0.0, 0
        self._uses: dict[ChunkKey, int] = {}  # uses in memory that do not count yet: time of the last, in nanoseconds
        self._uses_lock = new_lock(Rank.LEAF)
        self._serial = 0
        self._thread = threading.local()  # `into`: the memory for the records that a thread opens next
        self._sums = ThreadPoolExecutor(2, thread_name_prefix="lmc-sums")
        if read_only and not self._records.is_dir():
            raise TierUnusable(f"no disk tier at {self.root}: it has no records directory")
        lock = -1 if read_only else files.take_directory(self.root, [self._records, self._tmp], capacity)
        self._lock_file = lock
        # The lock is released even without a call of `close`, for the next tier in this process.
        self._unlock = weakref.finalize(self, files.give_directory_back, lock)
        self._rows: DiskIndex | None = None
        self._loaded = False  # The index was complete, or has been compared with the directory.
        self._comparing: threading.Thread | None = None
        self._failure: OSError | None = None  # why the comparison ended early
        self._applying: threading.Thread | None = None
        self._closed = threading.Event()
        self._building = threading.Lock()  # held while the index is rebuilt; acquired before all others
        try:
            if read_only:
                for entry in self.entries():
                    self._remember(entry.key, entry.bytes, RecordKind.PAGES)
                return
            # This process has the lock, so no writer is active: the files were left by a killed writer.
            for leftover in self._leftovers():
                leftover.unlink(missing_ok=True)
            self._rows = DiskIndex(self.root)
            self._load(self._rows)
            self._applying = repeat(self.apply_uses, USES_SECONDS, self._closed, "lmc-disk-uses")
            if not document_share:  # With a share, the protected records are not known yet.
                self.trim()
        except OSError as error:
            self.close()
            raise TierUnusable(f"cannot read disk tier {self.root}: {error}") from error

    def _load(self, rows: DiskIndex) -> None:
        """Read the index, and begin to compare it with the directory.

        If the index is incomplete, this waits for the comparison, for `START_SECONDS` at most. What was found by then
        is served, and the rest follows.
        """
        os.scandir(self._records).close()  # Raises an error for a directory that cannot be read.
        try:
            for (size, kind), together in groupby(rows.records(), itemgetter(1, 2)):
                facts = Facts.of(EvictionClass.of(kind, pinned=False), size)
                while keys := [key for key, _, _ in islice(together, LOADED_TOGETHER)]:
                    self._order.fill(keys, facts)
                    self.bytes += size * len(keys)
        except IndexLost as error:
            log.warning("the index is rebuilt from the records: %s", error)
            rows.clear()
        self._loaded = rows.complete
        self._comparing = threading.Thread(target=self._compare_in_background, name="lmc-disk-compare", daemon=True)
        self._comparing.start()
        if not rows.complete:
            self._comparing.join(START_SECONDS)
            if self._failure is not None:
                raise self._failure

    def _compare_in_background(self) -> None:
        assert self._rows is not None
        try:
            self._compare(self._rows, gently=self._rows.complete)
        except IndexLost as error:
            self._build_anew(self._rows, error)
        except OSError as error:
            log.debug("the records in %s were not compared with the index: %s", self._records, error)
            self._failure = error

    def _build_anew(self, rows: DiskIndex, error: IndexLost) -> None:
        """Replace an index that cannot be read, by reading all records. What is known of it stays known meanwhile.

        This waits for another thread that does the same.
        """
        with self._building:
            if error.clears == rows.clears and not self._closed.is_set():
                log.warning("the index is rebuilt from the records: %s", error)
                self._loaded = False  # until all records were read again
                rows.clear()
                self._compare(rows)

    def _compare(self, rows: DiskIndex, *, gently: bool = False) -> None:
        """Add the records in the directory that the index lacks, and forget those whose files are gone.

        `gently` rests between two folders, and leaves a folder that cannot be read to the next start.
        """
        new: list[tuple[int, ChunkKey]] = []
        for shard in range(SHARDS):
            if self._closed.wait(REST_SECONDS if gently else 0):
                return
            try:
                new += self._differences(rows, shard)
            except IndexLost:
                raise
            except OSError as error:
                if not gently:
                    raise
                log.debug("records in folder %02x were not compared with the index: %s", shard, error)
        if len(new) >= LOGGED_RECORDS:
            log.info("disk tier %s: reading %d records that its index lacks", self.root, len(new))
        for used, key in sorted(new):
            if self._closed.is_set():
                return
            self._adopt(rows, key, used)
        self._loaded = True

    def _differences(self, rows: DiskIndex, shard: int) -> list[tuple[int, ChunkKey]]:
        """Forget a folder's records whose files are gone. Returns those that the index lacks, with their times."""
        known, there = rows.beginning_with(shard), self._keys_in(f"{shard:02x}")
        for key in known - there:
            with self._lock:
                if not self._path(key).exists():  # A writer may have written the file since.
                    self._forget(key)
        new = []
        for key in there - known:
            with contextlib.suppress(FileNotFoundError):
                status = self._path(key).lstat()
                if stat.S_ISREG(status.st_mode):
                    new.append((status.st_mtime_ns, key))
        return new

    def _keys_in(self, shard: str) -> set[ChunkKey]:
        """Return the keys of the files in a folder that are named like records."""
        try:
            names = os.listdir(self._records / shard)
        except FileNotFoundError:
            self._probe()  # Raises an error if all folders are missing, as without a mount.
            return set()
        return {
            ChunkKey(bytes.fromhex(name[:64])) for name in names if _RECORD_NAME.fullmatch(name) and name[:2] == shard
        }

    def _adopt(self, rows: DiskIndex, key: ChunkKey, used: int) -> None:
        """Add a file that the index lacks. A file that cannot be read as a record is found corrupt when it is used."""
        meta, size = None, 0
        try:
            size = self._path(key).lstat().st_size
            with contextlib.closing(self._read(key)) as reader:
                meta = reader.meta
        except FileNotFoundError:
            return
        except (CorruptRecord, OSError) as error:
            log.debug("the record %s cannot be read: %s", self._path(key), error)
        with self._lock:
            if not self._path(key).exists():
                return
            if key not in self._order.entries:
                self._remember(key, size, meta.kind if meta else RecordKind.PAGES)
            if meta is not None:
                rows.put(meta, size, used)
                if self._changes is not None:
                    self._changes.appeared(self.name, meta)

    @property
    def usable(self) -> bool:
        """Whether the directory can be read. While it cannot, every lookup is a miss without waiting."""
        return self._breaker.usable

    def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """Check keys in the index. A read-only tier checks the directory, because its owner may write to it."""
        if not self.usable:
            return [False] * len(keys)
        if self.read_only:
            return [self._path(key).exists() for key in keys]
        # The lock is not taken, because it is held while files are removed. So the result may be slightly stale.
        return list(map(self._order.entries.__contains__, keys))

    def unanswered(self, keys: Sequence[ChunkKey]) -> bool:
        """Return false: lookups wait for their answers."""
        return False

    def announce(self, keys: Sequence[ChunkKey], into: Sequence[Sequence[memoryview]] = ()) -> None:
        """Remember the memory for the first parts. They are read together with the header, which saves a request."""
        self._thread.into = dict(zip(keys, into, strict=False))

    def open(self, key: ChunkKey) -> DiskReader | None:
        """Open a record, and count this as a use. Returns None if it is missing, or if the tier is not usable."""
        path = self._path(key)
        if not self.usable:
            return None
        try:
            with removed_if_corrupt(self.discard, key):
                reader = DiskReader(path, key, self.discard, getattr(self._thread, "into", {}).pop(key, ()))
        except FileNotFoundError:
            try:
                self._probe()
            except OSError as error:
                self._breaker.open(error)
                return None
            with self._lock:
                if not path.exists():  # A writer may have written the file since. Otherwise the file was removed.
                    self._forget(key)
            return None
        except OSError as error:
            self._breaker.failed(error)
            raise
        self._breaker.worked()
        with self._lock, contextlib.suppress(KeyError):  # In a read-only tier the index may lack the record.
            self._order.touch(key)
        with self._uses_lock:
            self._uses.pop(key, None)  # This use is newer.
        if self._rows is not None:
            self._rows.use(key, time.time_ns())
        return reader

    def note_use(self, keys: Sequence[ChunkKey]) -> None:
        """Record uses, which count later. This does not wait for the lock, which is held while files are removed."""
        if self.read_only:
            return
        now = time.time_ns()
        with self._uses_lock:
            for key in filter(self._order.entries.__contains__, keys):
                self._uses.pop(key, None)  # so that the key moves to the end: the latest use is last
                self._uses[key] = now

    def write(self, meta: RecordMeta, parts: Sequence[memoryview]) -> Written:
        """Write a record to `tmp` and rename it. If the disk stays full after an eviction, the write is refused."""
        if self.contains([meta.key])[0]:
            return Written.PRESENT
        if self.read_only or not self.usable or time.monotonic() < self._paused_until:
            return Written.REFUSED
        if meta.offset(meta.parts) < BESIDE_BYTES:
            return self._store(meta, parts, None)
        sums = self._sums.submit(checksums, meta, parts)
        try:
            return self._store(meta, parts, sums)
        finally:  # `parts` may be in a slot that is filled again after this returns, so the checksums must have ended.
            if not sums.cancel():
                wait([sums])

    def _store(self, meta: RecordMeta, parts: Sequence[memoryview], sums: "Future[tuple[int, ...]] | None") -> Written:
        """Write a record. If `sums` is given, another thread computes its checksums meanwhile."""
        header = _header(meta, (0,) * meta.parts if sums else checksums(meta, parts))
        size = len(header) + meta.offset(meta.parts)
        if self.bytes + size > self.capacity:
            self.apply_uses()
        with self._lock:
            if size <= self.capacity:
                self._evict(self.bytes + size - self.capacity)
            if self.bytes + size > self.capacity:  # Records that are being written now cannot be evicted.
                return Written.REFUSED
            # The bytes are counted before the write, so that several writers together stay within the bound.
            self.bytes += size
            self._serial += 1
            temporary = self._tmp / f"{self._serial}{SUFFIX}"
        stored = False
        try:
            first = (lambda: _header(meta, sums.result())) if sums else None
            stored = self._write_file(temporary, meta, [header, *parts], first, size)
            self._failed_writes = 0
        except OSError as error:  # If the directory cannot be written, its records may still be readable.
            self._failed_writes += 1
            if self._failed_writes >= FAILURES:
                self._pause(f"cannot be written ({error.strerror})")
            raise
        finally:
            if not stored:
                with self._lock:
                    self.bytes -= size
        return Written.STORED if stored else Written.REFUSED

    def delete(self, key: ChunkKey) -> bool:
        """Remove the record's file. A read-only tier does nothing, because the owner removes its files."""
        if self.read_only:
            return False
        with self._lock:
            there = self._path(key).exists()
            if not there:
                self._probe()
            self._path(key).unlink(missing_ok=True)
            self._forget(key)
        return there

    def discard(self, key: ChunkKey) -> None:
        """Remove a corrupt record, and count it."""
        self.corrupt += 1
        self.delete(key)

    def entries(self) -> Iterator[Entry]:
        """Return the records in the directory now, least recently used first."""
        found, uses = [], self._last_uses()
        for shard in os.scandir(self._records) if self._records.is_dir() else ():
            for file in os.scandir(shard.path) if shard.is_dir(follow_symlinks=False) else ():
                named = _RECORD_NAME.fullmatch(file.name) and file.name[:2] == shard.name
                if named and file.is_file(follow_symlinks=False):
                    with contextlib.suppress(FileNotFoundError):  # The file may be removed meanwhile.
                        status, key = file.stat(), ChunkKey(bytes.fromhex(file.name[:64]))
                        found.append(Entry(key=key, bytes=status.st_size, used=uses.get(key, status.st_mtime)))
        return iter(sorted(found, key=lambda entry: entry.used))

    def all_keys(self) -> Collection[ChunkKey]:
        """Return the keys of all records."""
        with self._lock:
            return list(self._order.entries)

    def headers(self) -> Iterator[tuple[RecordMeta, float]]:
        """Yield the header of each record in the index, and report the record afterwards."""
        assert self._rows is not None, "only the owner of a directory has its index"
        was_complete = self._loaded
        try:
            yield from self._headers(self._rows)
            if not was_complete and self._comparing is not None:  # Records were added that the listing may have missed.
                self._comparing.join()
                yield from self._headers(self._rows)
        except IndexLost as error:
            self._build_anew(self._rows, error)
            with contextlib.suppress(IndexLost):  # Nothing more is known now; the next start builds it anew.
                yield from self._headers(self._rows)

    def _headers(self, rows: DiskIndex) -> Iterator[tuple[RecordMeta, float]]:
        for meta, used in rows.headers({key: key for key in self.all_keys()}):
            if meta.key not in self._order.entries:  # The record has been evicted since.
                continue
            yield meta, used
            with self._lock:  # A record that has been evicted must not be reported.
                if self._changes is not None and meta.key in self._order.entries:
                    self._changes.appeared(self.name, meta)

    def protect(self, keys: Collection[ChunkKey], *, pinned: bool) -> None:
        """Pin records of documents, or end that."""
        with self._lock:
            (self._pinned.update if pinned else self._pinned.difference_update)(keys)
            for key in filter(self._order.entries.__contains__, keys):
                self._order.reclassify(key, EvictionClass.of(RecordKind.DOCUMENT, pinned=pinned))
                self._order.touch(key)

    def trim(self) -> None:
        """Evict records until the tier is within its capacity, some at a time, so that others can use it meanwhile."""
        freed = 1
        while freed and not self._closed.is_set():
            self.apply_uses()
            with self._lock:
                freed = self._evict(min(self.bytes - self.capacity, TRIMMED_BYTES))

    def report_to(self, changes: ChangeLog) -> None:
        """Report to `changes` the records that are written, evicted and removed from now on."""
        self._changes = changes

    def faults(self) -> list[str]:
        """Compare the order of eviction with itself, and with the number of bytes."""
        with self._lock:
            found = list(self._order.faults(lambda _: False))
            if (taken := sum(facts.size for facts in self._order.entries.values())) > self.bytes:
                found.append(f"the records take {taken:.0f} bytes, counted as {self.bytes}")
        return found

    def check(self, fix: bool = False) -> list[Finding]:
        """Read and verify every record, and find the files that killed writers have left.

        A record that cannot be read at the moment (for example with too many open files) is reported, but not removed.
        """
        fix = fix and not self.read_only
        findings = []
        for entry in self.entries():
            try:
                with contextlib.closing(self._read(entry.key)) as reader:
                    verify_parts(reader.meta, reader.verified)
            except FileNotFoundError:
                continue  # The owner has evicted the record meanwhile.
            except (CorruptRecord, OSError) as error:
                fixed = fix and isinstance(error, CorruptRecord) and is_removed(self.discard, entry.key)
                findings.append(Finding(where=str(self._path(entry.key)), problem=str(error), fixed=fixed))
        unfinished = self._leftovers() if self.read_only else ()  # In the owner's process, these are being written.
        wrong = "record that was never finished"
        return [*findings, *(Finding(where=str(path), problem=wrong, fixed=False) for path in unfinished)]

    def close(self) -> None:
        """Stop the threads, record the last uses, and unlock the directory."""
        self._closed.set()
        self._breaker.close(CLOSING_SECONDS)
        self._sums.shutdown()
        for thread in (self._comparing, self._applying):
            if thread is not None:
                thread.join()
        if self._rows is not None:
            self.apply_uses()
            self._rows.close(complete=self._loaded)
        self._unlock()

    def _probe(self) -> None:
        """Raise `OSError` if the directory cannot be read, or if another one is in its place.

        While a file system is not mounted, no record of it is there, and none was removed.
        """
        os.scandir(self._records).close()
        if not (self.read_only or os.path.samestat(os.fstat(self._lock_file), (self.root / "lock").stat())):
            raise OSError(errno.ESTALE, "it is not the directory that was locked", str(self.root))

    def _leftovers(self) -> list[Path]:
        found = sorted(self._tmp.iterdir()) if self._tmp.is_dir() else []
        return [path for path in found if _TEMPORARY_NAME.fullmatch(path.name) and path.is_file()]

    def _path(self, key: ChunkKey) -> Path:
        return self._records / file_of(key)

    def _read(self, key: ChunkKey) -> DiskReader:
        return DiskReader(self._path(key), key, self.discard)

    def _last_uses(self) -> dict[ChunkKey, float]:
        """Return the time of the last use of each record, in seconds since 1970, as far as the index has it."""
        with contextlib.suppress(IndexLost):
            return read_uses(self.root) if self._rows is None else self._rows.uses()
        return {}

    def _remember(self, key: ChunkKey, size: int, kind: RecordKind) -> None:
        self.bytes += size
        self._order.insert(key, EvictionClass.of(kind, pinned=key in self._pinned), size)
        self._order.release(key)

    def _forget(self, key: ChunkKey) -> None:
        facts = self._order.entries.get(key)
        if facts is not None:
            self.bytes -= int(facts.size)
            self._order.remove(key)
            if self._rows is not None:
                self._rows.remove(key)
        with self._uses_lock:
            self._uses.pop(key, None)
        if self._changes is not None:
            self._changes.left(self.name, key)

    def _evict(self, excess: int) -> int:
        """Evict records, oldest first, until `excess` bytes are free. Returns the bytes freed.

        The caller has applied the uses, without the lock, because many of them take long.
        """
        freed = 0
        if excess > 0:
            self._probe()  # Otherwise records would be forgotten that are there when the file system is mounted again.
        while freed < excess and (key := self._order.first()) is not None:
            facts = self._order.entries[key]
            self._path(key).unlink(missing_ok=True)  # If this fails, the record stays in the index and can be read.
            if facts.eviction_class is not EvictionClass.OTHER:
                self._document_evicted()
            self._forget(key)
            self.evictions += 1
            freed += int(facts.size)
        return freed

    def apply_uses(self) -> None:
        """Move records that memory has served to the end of the eviction order, and record the times of these uses.

        Their order is that of these uses. Relative to records that were read since, the order is not exact.
        """
        if self._rows is None:  # Only the owner of a directory notes uses.
            return
        with self._uses_lock:
            uses, self._uses = self._uses, {}
        remaining = iter(uses.items())
        while some := list(islice(remaining, USES_TOGETHER)):
            with self._lock:
                for key, when in some:
                    if key in self._order.entries:
                        self._order.touch(key)
                        self._rows.use(key, when)

    def _document_evicted(self) -> None:
        if not self.document_evictions:
            log.warning(
                "disk tier %s is full, and documents are evicted from it: raise max_local_disk_size, or learn fewer "
                "documents (said once, counted as lmc:document_evictions)",
                self.root,
            )
        self.document_evictions += 1

    def _write_file(
        self, path: Path, meta: RecordMeta, views: list[memoryview], first: Callable[[], memoryview] | None, size: int
    ) -> bool:
        """Write and rename a file. If the disk is full, evict and retry. Returns false if it stays full.

        The index, or another user of the filesystem, may take the space of the evicted record before the retry.
        """
        for tries_left in reversed(range(TRIES)):
            try:
                self._write_new(path, views, first)
                with self._lock:  # The file and the index change together.
                    files.move(path, self._path(meta.key))
                    self._forget(meta.key)  # Another writer may have written the record before.
                    self.bytes -= size  # It was counted before the write.
                    self._remember(meta.key, size, meta.kind)
                    assert self._rows is not None, "a tier that is read only refuses writes"
                    self._rows.put(meta, size, time.time_ns())
                    if self._changes is not None:
                        self._changes.appeared(self.name, meta)
                return True
            except OSError as error:
                path.unlink(missing_ok=True)
                if error.errno not in FULL:
                    raise
            self.apply_uses()
            with self._lock:
                if not tries_left or not self._evict(size):
                    self._pause("has no space left")
                    break
        return False

    def _write_new(self, path: Path, views: list[memoryview], first: Callable[[], memoryview] | None) -> None:
        """Write a file in `tmp`, which a program that removes empty or old folders may have removed."""
        try:
            files.write_new(path, views, first)
        except FileNotFoundError:
            self._probe()  # Raises an error if the whole directory is missing, as without a mount.
            self._tmp.mkdir(mode=0o700, exist_ok=True)
            files.write_new(path, views, first)

    def _pause(self, why: str) -> None:
        if time.monotonic() >= self._paused_until:
            log.warning("disk tier %s %s; storing pauses for %.0f s, reading goes on", self.root, why, PAUSE_SECONDS)
        self._paused_until = time.monotonic() + PAUSE_SECONDS


def _header(meta: RecordMeta, sums: tuple[int, ...]) -> memoryview:
    blob = encode_header(replace(meta, checksums=sums))
    block = pages(len(blob))
    block[:] = blob
    return block
