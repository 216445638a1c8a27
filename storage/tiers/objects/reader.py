"""Read a record from an object: one request streams it, and each part is copied into the slab and verified."""

from collections.abc import Callable, Sequence
from typing import Any

from lmc.errors import CorruptRecord
from lmc.keys import ChunkKey
from lmc.shapes import ALIGN
from lmc.storage.tiers.objects.calls import Calls
from lmc.storage.tiers.record import (
    RecordMeta,
    checksum,
    compare,
    decode_header,
    header_size,
    removed_if_corrupt,
    split_parts,
)

PIECE_BYTES = 256 << 10  # The library collects at least this much before it hands over bytes.


class ObjectStream:
    """The bytes of an object, from its beginning on, as they arrive."""

    def __init__(self, size: int, stream: Any) -> None:
        self.size, self.position = size, 0  # bytes of the object, and offset of the next byte
        self._stream, self._rest = stream, memoryview(b"")

    @classmethod
    async def of(cls, store: Any, path: str) -> "ObjectStream":
        """Request an object, and return its stream with the first bytes."""
        result = await store.get_async(path)
        stream = cls(result.meta["size"], result.stream(min_chunk_size=PIECE_BYTES).__aiter__())
        await stream.arrive()
        return stream

    async def arrive(self) -> None:
        """Wait for the next bytes, if all others have been taken. There are none at the end of the object."""
        if not self._rest:
            try:
                self._rest = memoryview(await self._stream.__anext__())
            except StopAsyncIteration:
                self._rest = memoryview(b"")

    @property
    def has_bytes(self) -> bool:
        """Whether `take` returns bytes without waiting."""
        return bool(self._rest)

    def take(self, most: int) -> memoryview:
        """Return the next bytes, `most` of them at most; none if they have not arrived."""
        taken, self._rest = self._rest[:most], self._rest[most:]
        self.position += len(taken)
        return taken


class ObjectReader:
    """An open record."""

    def __init__(
        self,
        store: Any,
        path: str,
        key: ChunkKey,
        stream: ObjectStream,
        calls: Calls,
        discard: Callable[[ChunkKey], object],
    ) -> None:
        """Read and verify the header. `discard` removes a record if a later read finds a corrupt part."""
        self._store, self._path, self._stream, self._calls, self._discard = store, path, stream, calls, discard
        header = bytearray(min(ALIGN, stream.size))
        self._fill([memoryview(header)])
        self._start = header_size(bytes(header[:8]))
        if self._start > stream.size:
            raise CorruptRecord(f"a header of {self._start} bytes in an object of {stream.size}")
        rest = bytearray(self._start - len(header))
        self._fill([memoryview(rest)])
        self.meta: RecordMeta = decode_header(bytes(header + rest))
        if self.meta.key != key:
            raise CorruptRecord("the record of another key")
        if stream.size != self._start + self.meta.offset(self.meta.parts):
            raise CorruptRecord("object size is not what the header says")

    def request(self, first: int, count: int) -> None:
        """Do nothing: the stream has all parts in order."""

    def read(self, first: int, count: int, into: Sequence[memoryview]) -> None:
        """Fill `into` with `count` parts, and verify each part. A corrupt part deletes the record."""
        with removed_if_corrupt(self._discard, self.meta.key):
            self.verified(first, count, into)

    def verified(self, first: int, count: int, into: Sequence[memoryview]) -> None:
        """Fill `into` with `count` parts. Raises `CorruptRecord` for a corrupt part, without deleting the record."""
        parts = split_parts(into, self.meta.stored[first : first + count])
        start, stop = (self._start + self.meta.offset(part) for part in (first, first + count))
        if start == self._stream.position:
            self._fill(parts)
        else:  # Parts are usually read in order. Any other range is a request of its own.
            blob = memoryview(self._calls.call(self._store.get_range_async(self._path, start=start, end=stop)))
            if len(blob) != stop - start:
                raise CorruptRecord("object is shorter than its header says")
            for part in parts:
                part[:] = blob[: len(part)]
                blob = blob[len(part) :]
        compare(map(checksum, parts), self.meta.checksums[first : first + count], first)

    def close(self) -> None:
        """End the request."""
        self._stream = ObjectStream(0, None)

    def _fill(self, views: Sequence[memoryview]) -> None:
        """Fill views with the next bytes of the stream."""
        for view in views:
            at = 0
            while at < len(view):
                if not self._stream.has_bytes:
                    self._calls.call(self._stream.arrive())
                taken = self._stream.take(len(view) - at)
                if not taken:
                    raise CorruptRecord("object is shorter than its header says")
                view[at : at + len(taken)] = taken
                at += len(taken)
