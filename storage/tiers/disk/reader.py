"""Read a record from its file: direct I/O reads parts straight into the slab, and each part is verified."""

import errno
import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path

from lmc.errors import CorruptRecord
from lmc.keys import ChunkKey
from lmc.shapes import ALIGN
from lmc.storage.tiers.disk.files import open_to_read, transfer
from lmc.storage.tiers.record import (
    checksum,
    compare,
    header_of,
    header_size,
    removed_if_corrupt,
    scratch,
    split_parts,
)


class DiskReader:
    """An open record file."""

    def __init__(
        self, path: Path, key: ChunkKey, discard: Callable[[ChunkKey], None], into: Sequence[memoryview] = ()
    ) -> None:
        """Read and verify the header, and fill `into` with the bytes after it.

        `discard` removes a record if a later read finds a corrupt part. Raises `FileNotFoundError` or `CorruptRecord`.
        """
        self._discard = discard
        self.fd = open_to_read(path)
        try:
            status = os.fstat(self.fd)
            size = status.st_size
            if not stat.S_ISREG(status.st_mode):
                raise OSError(errno.ENXIO, "not a file, though named like a record", str(path))
            if size == 0 or size % ALIGN:  # Direct I/O reads whole blocks only.
                raise CorruptRecord(f"a file of {size} bytes")
            block = scratch(ALIGN)
            read = self._fill([block, *into], 0, at_least=ALIGN)
            self._start = header_size(bytes(block[:8]), size)
            # The number of bytes of the first parts that may already be in `into`.
            self._early = read - ALIGN if self._start == ALIGN else 0
            if self._start > ALIGN:
                block = scratch(self._start)
                self._fill([block], 0, at_least=self._start)
            self.meta = header_of(bytes(block), key, size)
        except BaseException:
            os.close(self.fd)
            raise

    def request(self, first: int, count: int) -> None:
        """Do nothing: early requests to a disk would only wait in another queue."""

    def read(self, first: int, count: int, into: Sequence[memoryview]) -> None:
        """Fill `into` with `count` parts, and verify each part. A corrupt part deletes the record."""
        with removed_if_corrupt(self._discard, self.meta.key):
            self.verified(first, count, into)

    def verified(self, first: int, count: int, into: Sequence[memoryview]) -> None:
        """Fill `into` with `count` parts. Raises `CorruptRecord` for a corrupt part, without deleting the record."""
        sizes = self.meta.stored[first : first + count]
        assert sum(map(len, into)) == sum(sizes)
        parts, wanted = split_parts(into, sizes), self.meta.checksums[first : first + count]
        early, self._early = first == 0 and self._early == sum(sizes), 0
        # If the checksums differ, the parts were read to other memory or are corrupt. Reading them again decides.
        if early and tuple(map(checksum, parts)) == wanted:
            return
        self._fill(into, self._start + self.meta.offset(first), at_least=sum(sizes))
        compare(map(checksum, parts), wanted, first)

    def close(self) -> None:
        """Close the file."""
        os.close(self.fd)

    def _fill(self, into: Sequence[memoryview], offset: int, *, at_least: int) -> int:
        read = transfer(os.preadv, self.fd, into, offset)
        if read < at_least:
            raise CorruptRecord("file is shorter than its header says")
        return read
