"""Read and write whole files, with direct I/O where the file system supports it, and lock a directory.

This module knows nothing about records.
"""

import errno
import fcntl
import os
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TypeAlias

from lmc.errors import TierUnusable
from lmc.shapes import GIB

_locks: set[int] = set()  # descriptors of the locks that this process holds
VIEWS_PER_CALL = 1000  # below the kernel's IOV_MAX of 1024
UNBOUNDED = 1 << 62  # a capacity in bytes so large that no record is evicted

VectoredIO: TypeAlias = Callable[[int, Sequence[memoryview], int], int]  # os.preadv or os.pwritev


def take_directory(root: Path, folders: Sequence[Path], capacity: int) -> int:
    """Lock a directory, and return the descriptor of the lock.

    The directory and the `folders` in it are created if they are missing, with access for this user only. Raises
    `TierUnusable` if that fails, or if the whole file system is smaller than `capacity` bytes.
    """
    lock = None
    try:
        missing = [folder for folder in (root, *root.parents) if not folder.exists()]
        for folder in (*reversed(missing), *folders):  # one at a time: with `parents`, mkdir ignores the mode
            folder.mkdir(mode=0o700, exist_ok=True)
        for folder in folders:
            if not os.access(folder, os.R_OK | os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids):
                raise PermissionError(errno.EACCES, f"{os.strerror(errno.EACCES)} ({folder})")
        _check_room(root, capacity)
        lock = os.open(root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if lock is not None:
            os.close(lock)
        if isinstance(error, BlockingIOError):
            raise TierUnusable(
                f"disk tier {root} is in use by another process, or was not closed in this one; stop that process "
                "(an engine may live on when its server was killed), or give each a directory of its own"
            ) from error
        doing = "write to" if lock is None else "lock"
        raise TierUnusable(f"cannot {doing} disk tier {root}: {error.strerror}; choose another directory") from error
    _locks.add(lock)
    return lock


def give_directory_back(lock: int) -> None:
    """Release the lock that `take_directory` returned."""
    if lock in _locks:
        _locks.remove(lock)
        os.close(lock)


def _in_a_child() -> None:
    """Close the locks in a forked child. Otherwise the child would hold them as long as it lives."""
    for lock in list(_locks):
        give_directory_back(lock)


os.register_at_fork(after_in_child=_in_a_child)


def _check_room(root: Path, capacity: int) -> None:
    there = os.statvfs(root)
    whole, free = there.f_blocks * there.f_frsize, there.f_bavail * there.f_frsize
    if whole < capacity < UNBOUNDED:
        raise TierUnusable(
            f"disk tier {root} may take {capacity / GIB:.3f} GiB (max_local_disk_size), but its filesystem "
            f"has {whole / GIB:.3f} GiB, of which {free / GIB:.3f} GiB are free; lower it, or choose another directory"
        )


def open_to_read(path: Path) -> int:
    """Open a file to read. A symbolic link raises `OSError`, and a pipe does not block."""
    return _open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)


def write_new(path: Path, views: Sequence[memoryview], first: Callable[[], memoryview] | None = None) -> None:
    """Write `views` to a new file. If `first` is given, then overwrite the start of the file with its result."""
    fd = _open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        _write(fd, views)
        if first is not None:
            _write(fd, [first()])
    finally:
        os.close(fd)


def transfer(operation: VectoredIO, fd: int, views: Sequence[memoryview], offset: int = 0) -> int:
    """Read or write all of `views`, starting at `offset`. Returns the number of bytes.

    The number is smaller than that of `views` only if a file that is read ends before. If direct I/O does not accept
    the memory, the page cache is used.
    """
    moved = 0
    while views:
        try:
            done = operation(fd, views[:VIEWS_PER_CALL], offset + moved)
        except OSError as error:
            flags = fcntl.fcntl(fd, fcntl.F_GETFL)
            if error.errno != errno.EINVAL or not flags & os.O_DIRECT:
                raise
            fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
            continue
        if done == 0:
            break
        moved += done
        views = _advance(views, done)
    return moved


def move(path: Path, to: Path) -> None:
    """Rename a file, and create the target folder if it is missing.

    Neither the file nor the folder is synced, because a sync for each record would make writes wait for the disk. After
    a power failure, the checksums detect a cut record, and a cut or lost record is a miss.
    """
    try:
        path.rename(to)
    except FileNotFoundError:  # The folder usually exists; a check before would cost a system call every time.
        to.parent.mkdir(mode=0o700, exist_ok=True)
        path.rename(to)


def _write(fd: int, views: Sequence[memoryview]) -> None:
    if transfer(os.pwritev, fd, views) < sum(map(len, views)):
        raise OSError(errno.EIO, "nothing was written")


def _open(path: Path, flags: int) -> int:
    """Open a file with direct I/O, which does not fill the page cache, or without if the file system has no support."""
    try:
        return os.open(path, flags | os.O_CLOEXEC | os.O_DIRECT, 0o600)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def _advance(views: Sequence[memoryview], done: int) -> Sequence[memoryview]:
    """Return the rest of `views` after the first `done` bytes."""
    for i, end in enumerate(accumulate(map(len, views))):
        if end > done:
            return [views[i][done - end :], *views[i + 1 :]]
    return []
