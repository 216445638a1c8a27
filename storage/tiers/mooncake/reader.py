"""Read a record from a Mooncake Store: pieces are requested early, and their parts are copied and verified."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from lmc.keys import ChunkKey
from lmc.storage.tiers.mooncake.client import BUFFER_BYTES, MooncakeClient, RangeRequest
from lmc.storage.tiers.pool import PoolReader
from lmc.storage.tiers.record import header_of, header_size


class MooncakeReader(PoolReader):
    """An open record."""

    def __init__(
        self,
        client: MooncakeClient,
        name: str,
        key: ChunkKey,
        head: tuple[int, bytes],
        discard: Callable[[ChunkKey], object],
        reported: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Verify the header. `head` is the size of the object and its first bytes, with the whole header."""
        super().__init__(discard, reported)
        size, first = head
        self._client, self._name, self._size = client, name, size
        self._pieces: dict[int, RangeRequest] = {}  # requested pieces of `BUFFER_BYTES`, by number
        self._start = header_size(first[:8], size)
        self.meta = header_of(first[: self._start], key, size)

    def request(self, first: int, count: int) -> None:
        """Request these parts, to be read later, as far as there are buffers for them."""
        start, stop = (self._start + self.meta.offset(part) for part in (first, first + count))
        for number in _numbers(start, stop):
            if number not in self._pieces and (request := self._request(number, now=False)) is not None:
                self._pieces[number] = request

    def close(self) -> None:
        """End all requests."""
        for request in self._pieces.values():
            request.close()
        self._pieces.clear()

    def _request(self, number: int, *, now: bool) -> RangeRequest | None:
        start = number * BUFFER_BYTES
        return self._client.range(self._name, start, min(start + BUFFER_BYTES, self._size), now=now)

    def _receive(self, first: int, count: int, parts: Sequence[memoryview]) -> None:
        """Copy the bytes of parts. Pieces are kept until their ends were read."""
        start = self._start + self.meta.offset(first)
        for part in parts:
            stop = start + len(part)
            for number in _numbers(start, stop):
                if number not in self._pieces:
                    request = self._request(number, now=True)
                    assert request is not None
                    self._pieces[number] = request
                with self._reported():
                    blob = self._pieces[number].bytes()
                first = number * BUFFER_BYTES
                begin, end = max(start, first), min(stop, first + len(blob))
                part[begin - start : end - start] = blob[begin - first : end - first]
                if end == first + len(blob):
                    self._pieces.pop(number).close()
            start = stop


def _numbers(start: int, stop: int) -> range:
    """Return the numbers of the pieces that have bytes of a range."""
    return range(start // BUFFER_BYTES, -(-stop // BUFFER_BYTES))
