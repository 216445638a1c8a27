"""Whole reads and writes of files, with direct I/O where it is to be had. Knows nothing of records."""

import errno
import mmap
import os
import time
from collections.abc import Sequence
from pathlib import Path

from lmc.errors import CorruptRecord

VIEWS_A_CALL = 1000  # below the kernel's IOV_MAX of 1024


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


def touch(fd: int) -> None:
    """Set a file's time to now; the kernel's own idea of now is some milliseconds coarse."""
    now = time.time_ns()
    os.utime(fd, ns=(now, now))


def read_all(fd: int, into: Sequence[memoryview], offset: int) -> None:
    """Fill `into` from `offset` on; raise `CorruptRecord` if the file ends before."""
    views = list(into)
    while views:
        done = os.preadv(fd, views[:VIEWS_A_CALL], offset)
        if done == 0:
            raise CorruptRecord("file is shorter than its header says")
        offset += done
        views = _advance(views, done)


def write_all(fd: int, views: Sequence[memoryview]) -> None:
    """Write everything to `fd` and close it."""
    try:
        offset, left = 0, list(views)
        while left:
            done = os.pwritev(fd, left[:VIEWS_A_CALL], offset)
            if done == 0:
                raise OSError(errno.EIO, "nothing was written")
            offset += done
            left = _advance(left, done)
        touch(fd)
    finally:
        os.close(fd)


def _advance(views: list[memoryview], done: int) -> list[memoryview]:
    """What is left of `views` after `done` bytes."""
    skip = 0
    while skip < len(views) and done >= len(views[skip]):
        done -= len(views[skip])
        skip += 1
    rest = views[skip:]
    if done:
        rest[0] = rest[0][done:]
    return rest
