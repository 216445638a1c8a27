"""A tier on a directory: one safetensors file per record, direct I/O, an index that survives the process.

    DIR/lock                       held by the one process that writes here
    DIR/records/ab/abcd….safetensors   named by key; a file's time is its last use
    DIR/tmp/                       records being written; swept at start

A record is written aside and renamed, so a killed process leaves no torn record under a final name; after a power cut the checksums tell.
Files that are not named like a record are not ours: never read, never removed.
"""

import contextlib
import errno
import logging
import mmap
import os
import re
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from lmc.errors import CorruptRecord, TierUnusable
from lmc.keys import ChunkKey
from lmc.shapes import MIB
from lmc.storage.disk_reader import DiskReader
from lmc.storage.files import (
    aligned_copy,
    check_room,
    give_directory_back,
    move,
    take_directory,
    touch,
    write_new,
)
from lmc.storage.record import RecordMeta, checksum, encode_header, split_parts
from lmc.storage.tier import Entry, Finding, Written

log = logging.getLogger(__name__)

SUFFIX = ".safetensors"
FULL = (errno.ENOSPC, errno.EDQUOT)
UNBOUNDED = 1 << 62  # as a capacity: nothing is ever evicted, on a filesystem of any size
# From this size on checksums are computed while the bytes are written, and the header is written once more at the end: on 2 cores
# (NVMe behind virtio, 2 writers) 2.8 -> 3.0 GB/s at 32 MiB; at 4 MiB and 1 MiB the second request costs more (2.8 -> 2.4, 2.3 -> 1.8).
BESIDE_BYTES = 16 * MIB
PAUSE_SECONDS = 30.0  # of no writing, after a full disk could not be helped by eviction
_RECORD_NAME = re.compile(r"[0-9a-f]{64}" + re.escape(SUFFIX))
_TEMPORARY_NAME = re.compile(r"[0-9]+" + re.escape(SUFFIX))


class _Mine(threading.local):
    """What a thread has said of the records that it opens next."""

    def __init__(self) -> None:
        self.into: dict[ChunkKey, Sequence[memoryview]] = {}


class DiskTier:
    """Records in a directory of at most `capacity` bytes; the least recently used goes first."""

    name = "disk"
    shared = False
    usable = True

    def __init__(self, root: Path | str, capacity: int, *, read_only: bool = False) -> None:
        """Take the directory and rebuild the index; raise `TierUnusable` if another process has it or it cannot be written."""
        self.root, self.capacity, self.read_only = Path(root), capacity, read_only
        self.corrupt = 0  # records found wrong and deleted
        self.evictions = 0
        self._records, self._tmp = self.root / "records", self.root / "tmp"
        self._mutex = threading.Lock()
        self._index: OrderedDict[ChunkKey, int] = OrderedDict()  # key -> bytes, least recently used first
        self._bytes = 0
        self._paused_until = 0.0
        self._serial = 0
        self._mine = _Mine()
        self._sums = ThreadPoolExecutor(2, thread_name_prefix="lmc-sums")
        if read_only and not self._records.is_dir():
            raise TierUnusable(f"no disk tier at {self.root}: it has no records directory")
        lock = None if read_only else take_directory(self.root, [self._records, self._tmp])
        # Also when nobody calls close: a dropped tier must not keep its directory from the next one in this process.
        self._let_go = weakref.finalize(self, give_directory_back, lock) if lock is not None else lambda: None
        try:
            if not read_only and capacity < UNBOUNDED:
                check_room(self.root, capacity)
            self._start()
        except OSError as error:
            self.close()
            raise TierUnusable(f"cannot read disk tier {self.root}: {error}") from error
        except TierUnusable:
            self.close()
            raise

    @property
    def bytes(self) -> int:
        """What the records take on disk."""
        return self._bytes

    def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """From the index, in memory. (A read-only tier asks the directory: its owner writes on.)"""
        if self.read_only:
            return [self._path(key).exists() for key in keys]
        # Without the lock, which is held while files are removed: an answer from a moment before is as good.
        return list(map(self._index.__contains__, keys))

    def expect(self, keys: Sequence[ChunkKey], into: Sequence[Sequence[memoryview]] = ()) -> None:
        """Remember where their first parts go: they are read together with the header, which saves a request for each record."""
        self._mine.into = dict(zip(keys, into, strict=False))

    def open(self, key: ChunkKey) -> DiskReader | None:
        """A reader of the record; its use is remembered for eviction."""
        path = self._path(key)
        try:
            reader = DiskReader(path, key, self, self._mine.into.pop(key, ()))
        except FileNotFoundError:
            with self._mutex:
                if not path.exists():  # a writer may have brought it just now
                    self._forget(key)  # somebody removed the file behind our back
            return None
        except CorruptRecord:
            self.discard(key)
            raise
        with self._mutex:
            if key in self._index:
                self._index.move_to_end(key)
        if not self.read_only:
            with contextlib.suppress(OSError):  # it only makes a better order of eviction after a restart
                touch(reader.fd)
        return reader

    def write(self, meta: RecordMeta, parts: Sequence[memoryview]) -> Written:
        """Write aside, then rename. A full disk costs older records first, then this one; reading goes on."""
        if self.contains([meta.key])[0]:
            return Written.PRESENT
        if self.read_only or time.monotonic() < self._paused_until:
            return Written.REFUSED
        beside = meta.offset(meta.parts) >= BESIDE_BYTES
        sums = self._sums.submit(_checksums, meta, parts) if beside else None
        header = _header(meta, (0,) * meta.parts if sums else _checksums(meta, parts))
        size = len(header) + meta.offset(meta.parts)
        with self._mutex:
            if size > self.capacity:
                return Written.REFUSED
            self._evict(self._bytes + size - self.capacity)
            if self._bytes + size > self.capacity:  # the rest is being written right now, and cannot be evicted
                return Written.REFUSED
            # Counted before the bytes are there, so that several writers together stay within the bound.
            self._bytes += size
            self._serial += 1
            temporary = self._tmp / f"{self._serial}{SUFFIX}"
        stored = False
        try:
            first = (lambda: _header(meta, sums.result())) if sums else None
            stored = self._write_file(temporary, meta.key, [header, *parts], first, size)
        finally:
            if not stored:
                with self._mutex:
                    self._bytes -= size
        return Written.STORED if stored else Written.REFUSED

    def delete(self, key: ChunkKey) -> bool:
        """Remove the record's file. (A read-only tier leaves that to its owner.)"""
        if self.read_only:
            return False
        with self._mutex:
            try:
                self._path(key).unlink()
            except FileNotFoundError:
                return False
            finally:
                if not self._path(key).exists():
                    self._forget(key)
        return True

    def discard(self, key: ChunkKey) -> None:
        """Remove a record that was found wrong, and count it."""
        self.corrupt += 1
        self.delete(key)

    def entries(self) -> Iterator[Entry]:
        """What the directory holds now, least recently used first."""
        return iter(sorted(self._scan(), key=lambda entry: entry.used))

    def check(self, fix: bool = False) -> list[Finding]:
        """Read and verify every record; look for leftovers of killed writers.

        A record that cannot be read for the time being (too many open files, say) is reported and left.
        """
        fix = fix and not self.read_only
        findings = []
        for key in [entry.key for entry in self.entries()]:
            problem = self._problem(key)
            if problem is not None:
                wrong = isinstance(problem, CorruptRecord)
                findings.append(Finding(where=str(self._path(key)), problem=str(problem), fixed=fix and wrong))
                if fix and wrong:
                    self.discard(key)
        leftovers = self._leftovers() if self.read_only else []  # the owner's own are being written
        findings += [
            Finding(where=str(path), problem="record that was never finished", fixed=False) for path in leftovers
        ]
        return findings

    def close(self) -> None:
        """Let go of the directory."""
        self._sums.shutdown()
        self._let_go()

    def _start(self) -> None:
        """Remove what a killed writer left behind (nobody else can be writing, the lock is ours), and rebuild the index."""
        for leftover in [] if self.read_only else self._leftovers():
            leftover.unlink(missing_ok=True)
        for entry in sorted(self._scan(), key=lambda entry: entry.used):
            self._index[entry.key] = entry.bytes
            self._bytes += entry.bytes
        if not self.read_only:
            with self._mutex:
                self._evict(self._bytes - self.capacity)

    def _leftovers(self) -> list[Path]:
        files = sorted(self._tmp.iterdir()) if self._tmp.is_dir() else []
        return [path for path in files if _TEMPORARY_NAME.fullmatch(path.name) and path.is_file()]

    def _problem(self, key: ChunkKey) -> CorruptRecord | OSError | None:
        """What is wrong with a record, if anything; nothing is removed."""
        try:
            with contextlib.closing(DiskReader(self._path(key), key, self)) as reader:
                scratch = memoryview(mmap.mmap(-1, max(reader.meta.stored)))
                for part, size in enumerate(reader.meta.stored):
                    reader.verified(part, 1, [scratch[:size]])
        except FileNotFoundError:
            return None  # evicted by its owner meanwhile
        except (CorruptRecord, OSError) as error:
            return error
        return None

    def _scan(self) -> Iterator[Entry]:
        if not self._records.is_dir():
            return
        for shard in os.scandir(self._records):
            if not shard.is_dir(follow_symlinks=False):
                continue
            for file in os.scandir(shard.path):
                if (
                    _RECORD_NAME.fullmatch(file.name)
                    and file.name[:2] == shard.name
                    and file.is_file(follow_symlinks=False)
                ):
                    try:
                        status = file.stat()
                    except FileNotFoundError:
                        continue
                    key = ChunkKey(bytes.fromhex(file.name[:64]))
                    yield Entry(key=key, bytes=status.st_size, used=status.st_mtime)

    def _path(self, key: ChunkKey) -> Path:
        name = key.hex()
        return self._records / name[:2] / (name + SUFFIX)

    def _forget(self, key: ChunkKey) -> None:
        self._bytes -= self._index.pop(key, 0)

    def _evict(self, excess: int) -> int:
        """Remove records, oldest first, until `excess` bytes are free; return how many bytes that gave."""
        freed = 0
        while freed < excess and self._index:
            key, size = next(iter(self._index.items()))
            self._path(key).unlink(missing_ok=True)  # if that fails, the record stays, and can be read
            self._forget(key)
            self.evictions += 1
            freed += size
        return freed

    def _write_file(
        self,
        temporary: Path,
        key: ChunkKey,
        views: Sequence[memoryview],
        first: Callable[[], memoryview] | None,
        size: int,
    ) -> bool:
        """Write and rename; on a full disk evict and try once more. False if the disk stays full."""
        path = self._path(key)
        for last_try in (False, True):
            try:
                self._write_aside(temporary, views, first)
                with self._mutex:  # file and index change together
                    move(temporary, path)
                    self._forget(key)  # another writer was faster
                    self._index[key] = size
            except OSError as error:
                temporary.unlink(missing_ok=True)
                if error.errno not in FULL:
                    raise
                with self._mutex:
                    if last_try or not self._evict(size):
                        self._pause()
                        return False
            else:
                return True
        return False

    def _pause(self) -> None:
        if time.monotonic() >= self._paused_until:
            log.warning(
                "disk tier %s: no space left; storing pauses for %.0f s, reading goes on", self.root, PAUSE_SECONDS
            )
        self._paused_until = time.monotonic() + PAUSE_SECONDS

    def _write_aside(
        self, temporary: Path, views: Sequence[memoryview], first: Callable[[], memoryview] | None
    ) -> None:
        write_new(temporary, views, first)


def _checksums(meta: RecordMeta, parts: Sequence[memoryview]) -> tuple[int, ...]:
    return tuple(checksum(view) for view in split_parts(parts, meta.stored))


def _header(meta: RecordMeta, checksums: tuple[int, ...]) -> memoryview:
    return aligned_copy(encode_header(replace(meta, checksums=checksums)))
