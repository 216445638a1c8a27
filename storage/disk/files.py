"""Reading and writing whole files, with direct I/O where the file system has it, and locking a directory.

Nothing here knows of records.
"""

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

_thread = threading.local()
_locks: set[int] = set()  # descriptors of the locks that this process holds
DIRECT = getattr(os, "O_DIRECT", 0)
VIEWS_PER_CALL = 1000  # below the kernel's IOV_MAX of 1024


def take_directory(root: Path, folders: Sequence[Path]) -> int:
    """Lock a directory, and return the descriptor of the lock.

    The directory and the `folders` in it are made if they are missing, readable by nobody else.
    """
    try:
        missing = [folder for folder in (root, *root.parents) if not folder.exists()]
        for folder in (*reversed(missing), *folders):  # One by one: with `parents`, mkdir would ignore the mode.
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
            f"disk tier {root} is in use by another process, or was not closed in this one; "
            "give each a directory of its own"
        ) from error
    _locks.add(lock)
    return lock


def give_directory_back(lock: int) -> None:
    """Release the lock that `take_directory` returned."""
    if lock in _locks:
        _locks.remove(lock)
        os.close(lock)


def _in_a_child() -> None:
    """Close the locks in a forked child, which would otherwise keep them for as long as it lives."""
    for lock in list(_locks):
        give_directory_back(lock)


os.register_at_fork(after_in_child=_in_a_child)


def check_room(root: Path, capacity: int) -> None:
    """Raise `TierUnusable` if the file system is too small for `capacity` bytes, even if it were empty."""
    there = os.statvfs(root)
    whole, free = there.f_blocks * there.f_frsize, there.f_bavail * there.f_frsize
    if capacity > whole:
        raise TierUnusable(
            f"disk tier {root} may take {capacity / GIB:.3f} GiB (max_local_disk_size), but its filesystem "
            f"has {whole / GIB:.3f} GiB, of which {free / GIB:.3f} GiB are free; lower it, or choose another directory"
        )


def open_to_read(path: Path) -> int:
    """Open a file, with direct I/O where possible, which leaves the page cache to others.

    Anything but a file (a link, a pipe) raises `OSError`, and is never waited for.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    return _directly(lambda direct: os.open(path, flags | direct))


def aligned_copy(blob: bytes) -> memoryview:
    """Copy `blob` to memory that direct I/O accepts."""
    block = mmap.mmap(-1, len(blob))
    block[:] = blob
    return memoryview(block)


def first_block() -> memoryview:
    """Return this thread's memory for the first block of a file; it is good until the next call."""
    if not hasattr(_thread, "block"):
        _thread.block = memoryview(mmap.mmap(-1, ALIGN))
    return _thread.block  # type: ignore[no-any-return]


def touch(fd: int) -> None:
    """Set a file's time to now. The kernel would set it too, but with a resolution of some milliseconds."""
    now = time.time_ns()
    os.utime(fd, ns=(now, now))


def read_some(fd: int, into: Sequence[memoryview]) -> int:
    """Fill `into` from the start of a file with one request; return 0 if direct I/O does not accept the memory."""
    try:
        return os.preadv(fd, into[:VIEWS_PER_CALL], 0)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return 0


def read_all(fd: int, into: Sequence[memoryview], offset: int) -> None:
    """Fill `into` from `offset` on; raise `CorruptRecord` if the file ends before that."""
    while into:
        done = os.preadv(fd, into[:VIEWS_PER_CALL], offset)
        if done == 0:
            raise CorruptRecord("file is shorter than its header says")
        offset += done
        into = _advance(into, done)


def write_new(path: Path, views: Sequence[memoryview], first: Callable[[], memoryview] | None = None) -> None:
    """Write `views` to a new file, and then, if given, what `first` returns over the start of it."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    _directly(lambda direct: _write_all(os.open(path, flags | direct, 0o600), views, first))


def move(path: Path, to: Path) -> None:
    """Rename a file, into a folder that usually exists."""
    try:
        path.rename(to)
    except FileNotFoundError:  # Looking first would cost another system call every time.
        to.parent.mkdir(mode=0o700, exist_ok=True)
        path.rename(to)


def _directly(operation: Callable[[int], int]) -> int:
    """Run an operation with the flag for direct I/O, or without if the file system or the memory does not allow it."""
    try:
        return operation(DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL or not DIRECT:
            raise
    return operation(0)


def _write_all(fd: int, views: Sequence[memoryview], first: Callable[[], memoryview] | None) -> int:
    try:
        written = _write(fd, views)
        if first is not None:
            _write(fd, [first()])
        with contextlib.suppress(OSError):  # The time only improves the order of eviction after a restart.
            touch(fd)
        return written
    finally:
        os.close(fd)


def _write(fd: int, views: Sequence[memoryview]) -> int:
    offset = 0
    while views:
        done = os.pwritev(fd, views[:VIEWS_PER_CALL], offset)
        if done == 0:
            raise OSError(errno.EIO, "nothing was written")
        offset += done
        views = _advance(views, done)
    return offset


def _advance(views: Sequence[memoryview], done: int) -> Sequence[memoryview]:
    """Return what is left of `views` after `done` bytes."""
    skip = 0
    while skip < len(views) and done >= len(views[skip]):
        done -= len(views[skip])
        skip += 1
    return [views[skip][done:], *views[skip + 1 :]] if done else views[skip:]
