"""Reading a record from its file: whole parts, by direct I/O into the slab, verified."""

import errno
import fcntl
import mmap
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lmc.errors import CorruptRecord
from lmc.keys import ChunkKey
from lmc.shapes import ALIGN
from lmc.storage.files import first_block, open_to_read, read_all, read_some
from lmc.storage.record import RecordMeta, checksum, compare, decode_header, header_size, split_parts

if TYPE_CHECKING:
    from lmc.storage.disk import DiskTier


class DiskReader:
    """An open record file."""

    def __init__(self, path: Path, key: ChunkKey, tier: "DiskTier", into: Sequence[memoryview] = ()) -> None:
        """Read and verify the header, and fill `into` with what follows it; raise `FileNotFoundError` or `CorruptRecord`."""
        self._tier = tier
        self._early = 0  # bytes of the first parts that may be where they belong already
        self.fd = open_to_read(path)
        try:
            status = os.fstat(self.fd)
            size = status.st_size
            if not stat.S_ISREG(status.st_mode):
                raise OSError(errno.ENXIO, "not a file, though named like a record", str(path))
            if size == 0 or size % ALIGN:  # direct I/O reads whole blocks only
                raise CorruptRecord(f"a file of {size} bytes")
            self.meta, self._start = self._header(size, into)
            if self.meta.key != key:
                raise CorruptRecord("the record of another key")
            if size != self._start + self.meta.offset(self.meta.parts):
                raise CorruptRecord("file size is not what the header says")
        except BaseException:
            os.close(self.fd)
            raise

    def ask(self, first: int, count: int) -> None:
        """Nothing: what is asked of a disk early only waits in another queue."""

    def read(self, first: int, count: int, into: Sequence[memoryview]) -> None:
        """Fill `into` with `count` parts and verify each; a wrong one deletes the record."""
        try:
            self.verified(first, count, into)
        except CorruptRecord:
            self._tier.discard(self.meta.key)
            raise

    def verified(self, first: int, count: int, into: Sequence[memoryview]) -> None:
        """Fill `into` with `count` parts; raise `CorruptRecord` for a wrong one, and leave it where it is."""
        sizes = self.meta.stored[first : first + count]
        assert sum(map(len, into)) == sum(sizes)
        parts, wanted = split_parts(into, sizes), self.meta.checksums[first : first + count]
        early, self._early = first == 0 and self._early == sum(sizes), 0
        # If they are not right they were put elsewhere, or are wrong: reading them again tells.
        if early and tuple(map(checksum, parts)) == wanted:
            return
        self._fill(into, self._start + self.meta.offset(first))
        compare(map(checksum, parts), wanted, first)

    def close(self) -> None:
        """Close the file."""
        os.close(self.fd)

    def _fill(self, into: Sequence[memoryview], offset: int) -> None:
        try:
            read_all(self.fd, into, offset)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            # Memory that is not aligned: this file through the page cache.
            fcntl.fcntl(self.fd, fcntl.F_SETFL, fcntl.fcntl(self.fd, fcntl.F_GETFL) & ~os.O_DIRECT)
            read_all(self.fd, into, offset)

    def _header(self, of: int, into: Sequence[memoryview]) -> tuple[RecordMeta, int]:
        block = first_block()
        read = read_some(self.fd, [block, *into]) if into else 0
        if read < ALIGN:
            read_all(self.fd, [block], 0)
        size = header_size(bytes(block[:8]))
        if size > of:
            raise CorruptRecord(f"a header of {size} bytes in a file of {of}")
        if size > ALIGN:
            block = memoryview(mmap.mmap(-1, size))
            read_all(self.fd, [block], 0)
        else:
            self._early = max(0, read - size)
        return decode_header(bytes(block)), size
