"""Read a record from an object: one request streams it, and each part is copied into the slab and verified."""

import asyncio
import math
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, suppress
from typing import Any

from obstore import exceptions

from lmc.errors import CorruptRecord
from lmc.keys import ChunkKey
from lmc.shapes import ALIGN
from lmc.storage.tiers.objects.calls import Calls
from lmc.storage.tiers.pool import PoolReader
from lmc.storage.tiers.record import header_of, header_size

PIECE_BYTES = 256 << 10  # The library collects at least this much before it hands over bytes.
# An object that is expected to arrive within this time is received in one piece. Its first parts are then a little
# later, and its load takes two thirds of the processor's time.
ONE_PIECE_SECONDS = 0.1


class Pace:
    """How fast objects of a store arrive. Only the event loop's thread uses it."""

    def __init__(self) -> None:
        self._seconds = math.inf  # for a byte of the last object

    def received(self, size: int, seconds: float) -> None:
        """Record how long an object took to arrive; infinity if it did not."""
        self._seconds = seconds / max(1, size)

    def in_one_piece(self, size: int) -> bool:
        """Return whether an object of `size` bytes is expected to arrive quickly."""
        return size * self._seconds < ONE_PIECE_SECONDS


class ObjectStream:
    """The bytes of an object, from its beginning on. The event loop receives them ahead of the reader's thread."""

    def __init__(self, size: int, ahead: int) -> None:
        self.size, self.position = size, 0  # bytes of the object, and offset of the next byte
        self._limit = ahead  # With this number of bytes that the reader has not taken, the stream pauses.
        self._pieces: deque[memoryview] = deque()
        self._ahead, self._ended = 0, False
        self._error: Exception | None = None
        self._changed = threading.Condition()
        self._loop, self._room = asyncio.get_running_loop(), asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @classmethod
    async def of(cls, store: Any, path: str, ahead: int, pace: Pace) -> "ObjectStream":
        """Request an object, and begin to receive it, about `ahead` bytes before they are read."""
        result = await store.get_async(path)
        stream = cls(result.meta["size"], ahead)
        stream._task = asyncio.create_task(stream._receive(result, pace))
        return stream

    def read_into(self, view: memoryview, seconds: float) -> int:
        """Fill a view with the next bytes. Returns their number, which is smaller only at the end of the object.

        Raises `TimeoutError` if nothing arrives for `seconds` seconds, and the error that has ended the stream.
        """
        at = 0
        while at < len(view):
            with self._changed:
                if not self._changed.wait_for(lambda: self._pieces or self._ended, seconds):
                    raise TimeoutError
                if not self._pieces:
                    if self._error is not None:
                        raise self._error
                    break
                piece = self._pieces.popleft()
                taken = min(len(piece), len(view) - at)
                if taken < len(piece):
                    self._pieces.appendleft(piece[taken:])
                was_full, self._ahead = self._ahead >= self._limit, self._ahead - taken
                resumes = was_full and self._ahead < self._limit
            view[at : at + taken] = piece[:taken]
            at += taken
            if resumes:
                self._loop.call_soon_threadsafe(self._room.set)
        self.position += at
        return at

    def close(self) -> None:
        """End the request."""
        if self._task is not None and not self._ended:
            with suppress(RuntimeError):  # The tier is closed, and the loop with it.
                self._loop.call_soon_threadsafe(self._task.cancel)

    async def _receive(self, result: Any, pace: Pace) -> None:
        fits, began, left = self.size <= self._limit, time.monotonic(), self.size
        try:
            async for piece in self._arriving(result, in_one_piece=fits and pace.in_one_piece(self.size)):
                self._add(piece)
                left -= len(piece)
                if fits and not left:  # Now, because the reader may close the stream before it ends.
                    pace.received(self.size, time.monotonic() - began)
                await self._room.wait()
        except Exception as error:  # noqa: BLE001 - The reader raises it.
            self._error = error
            pace.received(self.size, math.inf)
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify()

    async def _arriving(self, result: Any, *, in_one_piece: bool) -> AsyncIterator[Any]:
        if in_one_piece:
            yield await result.bytes_async()
            return
        async for piece in result.stream(min_chunk_size=min(PIECE_BYTES, self._limit)):
            yield piece

    def _add(self, piece: Any) -> None:
        with self._changed:
            self._pieces.append(memoryview(piece))
            self._ahead += len(piece)
            self._changed.notify()
            if self._ahead >= self._limit:
                self._room.clear()
            else:
                self._room.set()


class ObjectReader(PoolReader):
    """An open record."""

    def __init__(
        self,
        store: Any,
        path: str,
        key: ChunkKey,
        stream: ObjectStream,
        calls: Calls,
        discard: Callable[[ChunkKey], object],
        reported: Callable[[], AbstractContextManager[None]],
        *,
        streams: bool,
    ) -> None:
        """Read and verify the header.

        If not `streams`, only the header is read from the stream, and parts by requests for ranges.
        """
        super().__init__(discard, reported)
        self._store, self._path, self._stream, self._calls = store, path, stream, calls
        self._streams = streams
        self._requested: dict[tuple[int, int], Future[memoryview]] = {}  # answers with the bytes of parts
        header = bytearray(min(ALIGN, stream.size))
        self._fill([memoryview(header)])
        self._start = header_size(bytes(header[:8]), stream.size)
        rest = bytearray(self._start - len(header))
        self._fill([memoryview(rest)])
        self.meta = header_of(bytes(header + rest), key, stream.size)
        if not streams:
            stream.close()

    def request(self, first: int, count: int) -> None:
        """Request these parts, to be read later. A stream has all parts in order."""
        if not self._streams:
            self._requested[first, count] = self._range(first, count)

    def _receive(self, first: int, count: int, parts: Sequence[memoryview]) -> None:
        if self._streams and self._start + self.meta.offset(first) == self._stream.position:
            self._fill(parts)
        else:  # Parts of a stream are usually read in order. Any other range is a request of its own.
            answer = self._requested.pop((first, count), None) or self._range(first, count)
            with self._reported():
                blob = self._calls.answer(answer)
            if len(blob) != sum(map(len, parts)):
                raise CorruptRecord("object is shorter than its header says")
            for part in parts:
                part[:] = blob[: len(part)]
                blob = blob[len(part) :]

    def close(self) -> None:
        """End all requests."""
        self._stream.close()
        for answer in self._requested.values():
            answer.cancel()
        self._requested.clear()

    def _range(self, first: int, count: int) -> "Future[memoryview]":
        """Begin a request for the bytes of parts."""
        start, stop = (self._start + self.meta.offset(part) for part in (first, first + count))
        return self._calls.begin(_bytes_of(self._store, self._path, start, stop))

    def _fill(self, views: Sequence[memoryview]) -> None:
        """Fill views with the next bytes of the stream."""
        for view in views:
            with self._reported(), self._calls.translated():
                filled = self._stream.read_into(view, self._calls.deadline)
            if filled < len(view):
                raise CorruptRecord("object is shorter than its header says")


async def _bytes_of(store: Any, path: str, start: int, stop: int) -> memoryview:
    """Return a range of an object's bytes.

    Some servers, such as rclone's, answer a request for a range without status 206, and the library refuses that
    answer. Then the object is read from its beginning.
    """
    try:
        return memoryview(await store.get_range_async(path, start=start, end=stop))
    except exceptions.GenericError as error:
        if "non-partial response" not in str(error):
            raise
    result, received = await store.get_async(path), bytearray()
    async for piece in result.stream(min_chunk_size=PIECE_BYTES):
        received += piece
        if len(received) >= stop:
            break
    return memoryview(received)[start:stop]
