"""Whole reads and writes of files, with direct I/O where it is to be had, and the directory they are in. Knows nothing of records."""

import contextlib
import errno
import fcntl
import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from lmc.errors import CorruptRecord, TierUnusable
from lmc.shapes import ALIGN, GIB

_mine = threading.local()
_locks: set[int] = set()  # descriptors that this process has
VIEWS_A_CALL = 1000  # below the kernel's IOV_MAX of 1024


def take_directory(root: Path, folders: Sequence[Path]) -> int:
    """Make what is missing of `root` and `folders` in it, for nobody else to read, and lock it; return the lock's descriptor."""
    try:
        missing = [folder for folder in (root, *root.parents) if not folder.exists()]
        for folder in (*reversed(missing), *folders):  # one by one: mkdir's `parents` would be open to all
            folder.mkdir(mode=0o700, exist_ok=True)
        for folder in folders:
            if not os.access(folder, os.R_OK | os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids):
                raise PermissionError(errno.EACCES, f"{os.strerror(errno.EACCES)} ({folder})")
        lock = os.open(root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise TierUnusable(f"cannot write to disk tier {root}: {error.strerror}; choose another directory") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        if error.errno != errno.EWOULDBLOCK:
            raise TierUnusable(f"cannot lock disk tier {root}: {error.strerror}; choose another directory") from error
        raise TierUnusable(
            f"disk tier {root} is in use by another process, or was not closed in this one; give each a directory of its own"
        ) from error
    _locks.add(lock)
    return lock


def give_directory_back(lock: int) -> None:
    """Let go of what `take_directory` has locked."""
    if lock in _locks:
        _locks.remove(lock)
        os.close(lock)


def _in_a_child() -> None:
    """A lock is shared with children that are forked, and would last as long as the last of them."""
    for lock in list(_locks):
        give_directory_back(lock)


os.register_at_fork(after_in_child=_in_a_child)


def check_room(root: Path, capacity: int) -> None:
    """Raise `TierUnusable` if the filesystem could never hold `capacity` bytes, whoever has them now."""
    there = os.statvfs(root)
    whole, free = there.f_blocks * there.f_frsize, there.f_bavail * there.f_frsize
    if capacity > whole:
        raise TierUnusable(
            f"disk tier {root} may take {capacity / GIB:.3f} GiB (max_local_disk_size), but its filesystem "
            f"has {whole / GIB:.3f} GiB, of which {free / GIB:.3f} GiB are free; lower it, or choose another directory"
        )


def open_to_read(path: Path) -> int:
    """A descriptor with direct I/O where the filesystem has it: it leaves the page cache to those who need it.

    Something else under a record's name (a link, a pipe) is an `OSError`, and never waits.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    if hasattr(os, "O_DIRECT"):
        try:
            return os.open(path, flags | os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
    return os.open(path, flags)


def aligned_copy(blob: bytes) -> memoryview:
    """`blob` in memory that direct I/O takes."""
    block = mmap.mmap(-1, len(blob))
    block[:] = blob
    return memoryview(block)


def first_block() -> memoryview:
    """This thread's memory for the first block of a file, which direct I/O takes; good until the next call."""
    if not hasattr(_mine, "block"):
        _mine.block = memoryview(mmap.mmap(-1, ALIGN))
    return _mine.block  # type: ignore[no-any-return]


def touch(fd: int) -> None:
    """Set a file's time to now; the kernel's own idea of now is some milliseconds coarse."""
    now = time.time_ns()
    os.utime(fd, ns=(now, now))


def read_some(fd: int, into: Sequence[memoryview]) -> int:
    """Fill `into` from the start of a file, as far as one request goes; none at all if this memory is not for direct I/O."""
    try:
        return os.preadv(fd, into[:VIEWS_A_CALL], 0)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return 0


def read_all(fd: int, into: Sequence[memoryview], offset: int) -> None:
    """Fill `into` from `offset` on; raise `CorruptRecord` if the file ends before."""
    views = into
    while views:
        done = os.preadv(fd, views[:VIEWS_A_CALL], offset)
        if done == 0:
            raise CorruptRecord("file is shorter than its header says")
        offset += done
        views = _advance(views, done)


def write_new(path: Path, views: Sequence[memoryview], first: Callable[[], memoryview] | None = None) -> None:
    """Write `views` to a new file; then, if `first` is given, what it answers over the start of it."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    if hasattr(os, "O_DIRECT"):
        try:
            _write_all(os.open(path, flags | os.O_DIRECT, 0o600), views, first)
        except OSError as error:
            if error.errno != errno.EINVAL:  # memory or a filesystem that direct I/O does not take
                raise
        else:
            return
    _write_all(os.open(path, flags, 0o600), views, first)


def move(path: Path, to: Path) -> None:
    """Rename, into a folder that is mostly there already."""
    try:
        path.rename(to)
    except FileNotFoundError:  # to ask first would take a system call more every time
        to.parent.mkdir(mode=0o700, exist_ok=True)
        path.rename(to)


def _write_all(fd: int, views: Sequence[memoryview], first: Callable[[], memoryview] | None) -> None:
    try:
        _write(fd, views)
        if first is not None:
            _write(fd, [first()])
        with contextlib.suppress(OSError):  # it only makes a better order of eviction after a restart
            touch(fd)
    finally:
        os.close(fd)


def _write(fd: int, views: Sequence[memoryview]) -> None:
    offset = 0
    while views:
        done = os.pwritev(fd, views[:VIEWS_A_CALL], offset)
        if done == 0:
            raise OSError(errno.EIO, "nothing was written")
        offset += done
        views = _advance(views, done)


def _advance(views: Sequence[memoryview], done: int) -> Sequence[memoryview]:
    """What is left of `views` after `done` bytes."""
    skip = 0
    while skip < len(views) and done >= len(views[skip]):
        done -= len(views[skip])
        skip += 1
    return [views[skip][done:], *views[skip + 1 :]] if done else views[skip:]
