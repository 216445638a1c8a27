"""The disk tier: one safetensors file for each record, in a directory, with an index that is rebuilt at the start.

    DIR/lock                           held by the one process that writes here
    DIR/records/ab/abcd….safetensors   a record, named by its key; the file's time is the time of its last use
    DIR/tmp/                           records that are being written; emptied at the next start

A record is written to `tmp` and renamed, so that a process that is killed leaves no incomplete record under a final
name. After a power failure the checksums tell. Files whose names are not those of records are never read or removed.
"""

import contextlib
import errno
import logging
import os
import re
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path

from lmc.errors import CorruptRecord, TierUnusable
from lmc.keys import ChunkKey, RecordKind
from lmc.shapes import MIB
from lmc.storage.change_log import ChangeLog
from lmc.storage.eviction import EvictionOrder, Standing
from lmc.storage.locks import Rank, new_lock
from lmc.storage.tiers.breaker import FAILURES, Breaker
from lmc.storage.tiers.disk import files
from lmc.storage.tiers.disk.reader import DiskReader
from lmc.storage.tiers.record import (
    RecordMeta,
    checksum,
    encode_header,
    pages,
    removed_if_corrupt,
    split_parts,
    verify_parts,
)
from lmc.storage.tiers.tier import Entry, Finding, Written

log = logging.getLogger(__name__)

SUFFIX = ".safetensors"
FULL = (errno.ENOSPC, errno.EDQUOT)
# From this size on, checksums are computed while the bytes are written, and the header is written once more at the end.
# On 2 cores (NVMe behind virtio, 2 writers) this gives 3.0 GB/s instead of 2.8 for 32 MiB. For smaller records the
# second request costs more than it saves: 2.4 GB/s instead of 2.8 for 4 MiB, 1.8 instead of 2.3 for 1 MiB.
BESIDE_BYTES = 16 * MIB
# seconds for which nothing is written after a full disk for which evicting did not help, or three errors in a row
PAUSE_SECONDS = 30.0
CLOSING_SECONDS = 1.0  # for which a trial of the directory under way is waited for
_RECORD_NAME = re.compile(r"[0-9a-f]{64}" + re.escape(SUFFIX))
_TEMPORARY_NAME = re.compile(r"[0-9]+" + re.escape(SUFFIX))


class DiskTier:
    """Records in a directory of at most `capacity` bytes. The least recently used one is evicted first."""

    name = "disk"
    shared = False

    def __init__(
        self, root: Path | str, capacity: int, *, read_only: bool = False, document_share: float = 0.0
    ) -> None:
        """Take the directory and rebuild the index. Documents have a share of the capacity; see `eviction.py`.

        Raises `TierUnusable` if another process has the directory, or it cannot be read or written.
        """
        self.root, self.capacity, self.read_only = Path(root), capacity, read_only
        self.corrupt = self.evictions = self.document_evictions = 0
        self.bytes = 0  # what the records take on disk
        self._records, self._tmp = self.root / "records", self.root / "tmp"
        self._breaker = Breaker(f"disk tier {self.root}", self._probe)
        self._lock = new_lock(Rank.TIER)
        self._changes: ChangeLog | None = None
        self._index: dict[ChunkKey, int] = {}  # key -> bytes
        self._order: EvictionOrder[ChunkKey] = EvictionOrder(document_share * capacity)
        self._standing: dict[ChunkKey, Standing] = {}  # of records that are or will be protected
        self._paused_until, self._failed_writes = 0.0, 0
        self._uses: dict[ChunkKey, int] = {}  # in memory, since the last eviction: when, in nanoseconds
        self._uses_lock = new_lock(Rank.LEAF)
        self._serial = 0
        self._thread = threading.local()  # `into`: where the records that a thread opens next will be read to
        self._sums = ThreadPoolExecutor(2, thread_name_prefix="lmc-sums")
        if read_only and not self._records.is_dir():
            raise TierUnusable(f"no disk tier at {self.root}: it has no records directory")
        lock = -1 if read_only else files.take_directory(self.root, [self._records, self._tmp], capacity)
        # The lock is released even if nobody calls `close`, for the next tier in this process.
        self._let_go = weakref.finalize(self, files.give_directory_back, lock)
        try:
            for entry in self.entries():
                self._remember(entry.key, entry.bytes)
                self.bytes += entry.bytes
            if not read_only:
                # The lock is ours, so nobody is writing: they are of a writer that was killed.
                for leftover in self._leftovers():
                    leftover.unlink(missing_ok=True)
                if not document_share:  # Otherwise it is not known yet what has to stay.
                    self.trim()
        except OSError as error:
            self.close()
            raise TierUnusable(f"cannot read disk tier {self.root}: {error}") from error

    @property
    def usable(self) -> bool:
        """False while the directory as a whole cannot be read; everything is a miss then, at once."""
        return self._breaker.usable

    def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """Look in the index. A read-only tier looks in the directory, because its owner goes on writing."""
        if not self.usable:
            return [False] * len(keys)
        if self.read_only:
            return [self._path(key).exists() for key in keys]
        # The lock is not taken: it is held while files are removed, and the answer may be a moment old.
        return list(map(self._index.__contains__, keys))

    def announce(self, keys: Sequence[ChunkKey], into: Sequence[Sequence[memoryview]] = ()) -> None:
        """Remember where the first parts go. They are read together with the header, which saves a request."""
        self._thread.into = dict(zip(keys, into, strict=False))

    def open(self, key: ChunkKey) -> DiskReader | None:
        """Open a record, and note its use for eviction. None is there while the directory cannot be read."""
        path = self._path(key)
        if not self.usable:
            return None
        try:
            with removed_if_corrupt(self.discard, key):
                reader = DiskReader(path, key, self.discard, getattr(self._thread, "into", {}).pop(key, ()))
        except FileNotFoundError:
            with self._lock:
                if not path.exists():  # Somebody has removed the file. A writer may also have brought it just now.
                    self._forget(key)
            return None
        except OSError as error:
            self._breaker.failed(error)
            raise
        self._breaker.worked()
        with self._lock, contextlib.suppress(KeyError):  # A reader of another's directory has no index.
            self._order.touch(key)
        with self._uses_lock:
            self._uses.pop(key, None)  # This use is later.
        if not self.read_only:
            with contextlib.suppress(OSError):  # The time only improves the order of eviction after a restart.
                files.touch(reader.fd)
        return reader

    def note_use(self, keys: Sequence[ChunkKey]) -> None:
        """Note uses for the next eviction. The lock is not waited for, because files may be removed under it."""
        if self.read_only:
            return
        now = time.time_ns()
        with self._uses_lock:
            for key in filter(self._index.__contains__, keys):
                self._uses.pop(key, None)  # The last use comes last.
                self._uses[key] = now

    def write(self, meta: RecordMeta, parts: Sequence[memoryview]) -> Written:
        """Write a record to `tmp` and rename it. If the disk stays full after an eviction, it is not kept."""
        if self.contains([meta.key])[0]:
            return Written.PRESENT
        if self.read_only or not self.usable or time.monotonic() < self._paused_until:
            return Written.REFUSED
        if meta.offset(meta.parts) < BESIDE_BYTES:
            return self._store(meta, parts, None)
        sums = self._sums.submit(_checksums, meta, parts)
        try:
            return self._store(meta, parts, sums)
        finally:  # `parts` may lie in a slot, which others may fill as soon as this returns, for whatever reason.
            if not sums.cancel():
                wait([sums])

    def _store(self, meta: RecordMeta, parts: Sequence[memoryview], sums: "Future[tuple[int, ...]] | None") -> Written:
        """Write a record, with checksums that a thread computes meanwhile if `sums` are given."""
        header = _header(meta, (0,) * meta.parts if sums else _checksums(meta, parts))
        size = len(header) + meta.offset(meta.parts)
        with self._lock:
            if size <= self.capacity:
                self._evict(self.bytes + size - self.capacity)
            if self.bytes + size > self.capacity:  # The rest is being written right now, and cannot be evicted.
                return Written.REFUSED
            # The bytes are counted before they are written, so that several writers together stay within the bound.
            self.bytes += size
            self._serial += 1
            temporary = self._tmp / f"{self._serial}{SUFFIX}"
        stored = False
        try:
            first = (lambda: _header(meta, sums.result())) if sums else None
            stored = self._write_file(temporary, meta, [header, *parts], first, size)
            self._failed_writes = 0
        except OSError as error:  # Records may still be readable if the directory cannot be written any more.
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
        """Remove the record's file. A read-only tier leaves that to its owner."""
        if self.read_only:
            return False
        with self._lock:
            there = self._path(key).exists()
            self._path(key).unlink(missing_ok=True)
            self._forget(key)
        return there

    def discard(self, key: ChunkKey) -> None:
        """Remove a record that was found to be corrupt, and count it."""
        self.corrupt += 1
        self.delete(key)

    def entries(self) -> Iterator[Entry]:
        """Return what the directory holds now, least recently used first."""
        found = []
        for shard in os.scandir(self._records) if self._records.is_dir() else ():
            for file in os.scandir(shard.path) if shard.is_dir(follow_symlinks=False) else ():
                named = _RECORD_NAME.fullmatch(file.name) and file.name[:2] == shard.name
                if named and file.is_file(follow_symlinks=False):
                    with contextlib.suppress(FileNotFoundError):  # It may be removed meanwhile.
                        status, key = file.stat(), ChunkKey(bytes.fromhex(file.name[:64]))
                        found.append(Entry(key=key, bytes=status.st_size, used=status.st_mtime))
        return iter(sorted(found, key=lambda entry: entry.used))

    def headers(self) -> Iterator[RecordMeta]:
        """Read the header of each record, without counting that as a use. Unreadable records are left alone."""
        for entry in self.entries():
            with contextlib.suppress(OSError, CorruptRecord), contextlib.closing(self._read(entry.key)) as reader:
                if reader.meta.kind is RecordKind.DOCUMENT and reader.meta.key not in self._standing:
                    with self._lock:
                        if reader.meta.key in self._index:  # It may have been evicted since.
                            self._stand(reader.meta.key, Standing.DOCUMENT)
                yield reader.meta

    def if_present(self, key: ChunkKey, then: Callable[[], object]) -> bool:
        """Call `then` while a record is sure to stay, if it is there; return whether it is."""
        with self._lock:
            there = key in self._index
            if there:
                then()
            return there

    def protect(self, keys: Collection[ChunkKey], standing: Standing) -> None:
        """Let records be evicted as entries of this standing."""
        with self._lock:
            for key in keys:
                self._stand(key, standing)
                if key in self._order:
                    self._order.touch(key)

    def trim(self) -> None:
        """Remove records beyond the bound."""
        with self._lock:
            self._evict(self.bytes - self.capacity)

    def _stand(self, key: ChunkKey, standing: Standing) -> None:
        self._order.move(key, self._standing.get(key, Standing.OTHER), standing, self._index.get(key, 0))
        self._standing[key] = standing

    def report_to(self, changes: ChangeLog) -> None:
        """Report what is written, evicted and removed from now on."""
        self._changes = changes

    def check(self, fix: bool = False) -> list[Finding]:
        """Read and verify every record, and look for what killed writers have left.

        A record that cannot be read for the time being (there may be too many open files) is reported and left alone.
        """
        fix = fix and not self.read_only
        findings = []
        for entry in self.entries():
            try:
                with contextlib.closing(self._read(entry.key)) as reader:
                    verify_parts(reader.meta, reader.verified)
            except FileNotFoundError:
                continue  # Its owner has evicted it meanwhile.
            except (CorruptRecord, OSError) as error:
                fixed = fix and isinstance(error, CorruptRecord)
                findings.append(Finding(where=str(self._path(entry.key)), problem=str(error), fixed=fixed))
                if fixed:
                    self.discard(entry.key)
        unfinished = self._leftovers() if self.read_only else ()  # What the owner finds there is being written.
        wrong = "record that was never finished"
        return [*findings, *(Finding(where=str(path), problem=wrong, fixed=False) for path in unfinished)]

    def close(self) -> None:
        """Let go of the directory."""
        self._breaker.close(CLOSING_SECONDS)
        self._sums.shutdown()
        if not self.read_only:
            with self._lock:
                self._apply_uses()
        self._let_go()

    def _probe(self) -> None:
        """Raise `OSError` if the directory cannot be read."""
        os.scandir(self._records).close()

    def _leftovers(self) -> list[Path]:
        found = sorted(self._tmp.iterdir()) if self._tmp.is_dir() else []
        return [path for path in found if _TEMPORARY_NAME.fullmatch(path.name) and path.is_file()]

    def _path(self, key: ChunkKey) -> Path:
        name = key.hex()
        return self._records / name[:2] / (name + SUFFIX)

    def _read(self, key: ChunkKey) -> DiskReader:
        return DiskReader(self._path(key), key, self.discard)

    def _remember(self, key: ChunkKey, size: int) -> None:
        standing = self._standing.get(key, Standing.OTHER)
        self._index[key] = size
        self._order.count(standing, size)
        self._order.add(key, standing)

    def _forget(self, key: ChunkKey) -> None:
        size = self._index.pop(key, None)
        if size is not None:
            self.bytes -= size
            standing = self._standing.get(key, Standing.OTHER)
            self._order.count(standing, -size)
            self._order.remove(key)
            if standing is Standing.DOCUMENT:  # A pinned record stays pinned if it is written again.
                del self._standing[key]
        with self._uses_lock:
            self._uses.pop(key, None)
        if self._changes is not None:
            self._changes.left(self.name, key)

    def _evict(self, excess: int) -> int:
        """Remove records, oldest first, until `excess` bytes are free; return how many bytes that gave."""
        freed = 0
        if excess > 0:
            self._apply_uses()
        while freed < excess and (key := self._order.first()) is not None:
            size = self._index[key]
            self._path(key).unlink(missing_ok=True)  # If this fails, the record stays and can be read.
            if self._standing.get(key):
                self._document_evicted()
            self._forget(key)
            self.evictions += 1
            freed += size
        return freed

    def _apply_uses(self) -> None:
        """Let records that memory has served be evicted last, in the order of these uses; set the times of their files.

        Among others that were read since, the order is not exact.
        """
        with self._uses_lock:
            uses, self._uses = self._uses, {}
        for key, when in uses.items():
            if key in self._order:
                self._order.touch(key)
                with contextlib.suppress(OSError):  # The time only improves the order of eviction after a restart.
                    os.utime(self._path(key), ns=(when, when))

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
        """Write and rename. If the disk is full, evict and try once more; return false if it stays full."""
        for last_try in (False, True):
            try:
                files.write_new(path, views, first)
                with self._lock:  # The file and the index change together.
                    files.move(path, self._path(meta.key))
                    self._forget(meta.key)  # Another writer may have been faster.
                    if meta.kind is RecordKind.DOCUMENT:
                        self._standing.setdefault(meta.key, Standing.DOCUMENT)
                    self._remember(meta.key, size)
                    if self._changes is not None:
                        self._changes.appeared(self.name, meta)
                return True
            except OSError as error:
                path.unlink(missing_ok=True)
                if error.errno not in FULL:
                    raise
            with self._lock:
                if last_try or not self._evict(size):
                    self._pause("has no space left")
                    break
        return False

    def _pause(self, why: str) -> None:
        if time.monotonic() >= self._paused_until:
            log.warning("disk tier %s %s; storing pauses for %.0f s, reading goes on", self.root, why, PAUSE_SECONDS)
        self._paused_until = time.monotonic() + PAUSE_SECONDS


def _checksums(meta: RecordMeta, parts: Sequence[memoryview]) -> tuple[int, ...]:
    return tuple(checksum(view) for view in split_parts(parts, meta.stored))


def _header(meta: RecordMeta, checksums: tuple[int, ...]) -> memoryview:
    blob = encode_header(replace(meta, checksums=checksums))
    block = pages(len(blob))
    block[:] = blob
    return block
