"""Files that several processes use: locks that end with their processes, and memory in tmpfs or without a name."""

import ctypes
import errno
import fcntl
import os
from contextlib import suppress
from pathlib import Path

KEEP_SIZE, PUNCH_HOLE = 1, 2  # flags of fallocate(2)
IN_MEMORY = 0x01021994, 0x958458F6, 0x858458F6  # types of statfs(2): tmpfs, hugetlbfs, ramfs


def locked(path: Path | str, *, alone: bool = False, new: bool = True) -> int:
    """Open and lock a file, shared with other lockers or `alone`, and return its descriptor.

    With `new`, a missing file is created. The lock ends when the descriptor is closed. Raises `BlockingIOError` if
    other lockers prevent the lock. The same error is raised if the file was removed meanwhile: another process could
    then create and lock a new file at the same path.
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
    """Wait until no process has locked a file alone, and return true. Returns false if it cannot be opened."""
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
    """Fix the size of a file without a name.

    Without the seal, any process with the descriptor could cut the file. A process that touches a page after the end of
    the file is killed.
    """
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)


def whole_pages(file: int, size: int) -> int:
    """Round a size up to a multiple of a file's page size, which is that of huge pages in a hugetlbfs."""
    page = os.fstatvfs(file).f_bsize
    return -(-size // page) * page


def is_in_memory(directory: Path) -> bool:
    """Return whether files in a directory are in memory, and not on a disk. True if the system does not report it."""
    statfs = ctypes.CDLL(None).statfs
    about = (ctypes.c_long * 32)()  # The first field is the type of the file system; 32 fields are enough for all.
    return bool(statfs(str(directory).encode(), about)) or about[0] in IN_MEMORY


def take_pages(file: int, start: int, size: int) -> bool:
    """Allocate pages of a file in memory, which read as zeros. Returns whether the system had enough memory."""
    try:
        os.posix_fallocate(file, start, size)
    except OSError:
        return False
    return True


def punch(file: int, start: int, size: int) -> None:
    """Give pages of a file in memory back to the system. A huge page is given back only if the range covers it."""
    fallocate = ctypes.CDLL(None, use_errno=True).fallocate
    fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    if fallocate(file, PUNCH_HOLE | KEEP_SIZE, start, size):
        raise OSError(ctypes.get_errno(), "cannot give memory back")
