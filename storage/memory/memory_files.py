"""Files that several processes use: locks that end with their processes, and memory that is given back."""

import ctypes
import errno
import fcntl
import os
from contextlib import suppress
from pathlib import Path

KEEP_SIZE, PUNCH_HOLE = 1, 2  # of fallocate(2)
IN_MEMORY = 0x01021994, 0x958458F6, 0x858458F6  # of statfs(2): tmpfs, hugetlbfs, ramfs


def locked(path: Path | str, *, alone: bool = False, new: bool = True) -> int:
    """Open a file, which may be `new`, and lock it, together with others or `alone`; return the descriptor.

    The lock ends when the descriptor is closed. Raises `BlockingIOError` if others are in the way, or have removed the
    file meanwhile, and somebody else may lock another one.
    """
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | (os.O_CREAT if new else 0), 0o600)
    try:
        fcntl.flock(file, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        if not _is_at(path, file):
            raise BlockingIOError(errno.EAGAIN, "the file was removed while it was locked", str(path))
    except BaseException:
        os.close(file)
        raise
    return file


def _is_at(path: Path | str, file: int) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(os.stat(path), os.fstat(file))
    return False


def wait_until_unlocked(path: str) -> bool:
    """Return true when nobody has locked a file alone any more, and false if it cannot be opened."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_SH)
    finally:
        os.close(file)
    return True


def seal_size(file: int) -> None:
    """Let nobody change the size of a file without a name.

    Whoever gets its descriptor could cut it otherwise, and a process that touches a page behind its end is killed.
    """
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)


def whole_pages(file: int, size: int) -> int:
    """Return a size that is a multiple of the pages of a file, which are huge ones in a hugetlbfs."""
    page = os.fstatvfs(file).f_bsize
    return -(-size // page) * page


def is_in_memory(directory: Path) -> bool:
    """Return whether files in a directory are in memory, and not on a disk; true if the system does not say."""
    statfs = ctypes.CDLL(None).statfs
    about = (ctypes.c_long * 32)()  # The kind of file system comes first, and there is room for all that follows.
    return bool(statfs(str(directory).encode(), about)) or about[0] in IN_MEMORY


def take_pages(file: int, start: int, size: int) -> bool:
    """Take pages of a file in memory, which read as zeros; return whether the system had them."""
    try:
        os.posix_fallocate(file, start, size)
    except OSError:
        return False
    return True


def punch(file: int, start: int, size: int) -> None:
    """Give the pages of a file in memory back to the system; of huge ones those that are in these bytes as a whole."""
    fallocate = ctypes.CDLL(None, use_errno=True).fallocate
    fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    if fallocate(file, PUNCH_HOLE | KEEP_SIZE, start, size):
        raise OSError(ctypes.get_errno(), "cannot give memory back")
