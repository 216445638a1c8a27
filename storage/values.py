"""How a record's parts lie in values of Redis. Arithmetic on sizes and views; no connection.

Values have 1 to 4 MiB, just below a size that the allocator (jemalloc) has: one of exactly 1 MiB would take 1.25.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import xxhash

from lmc.storage.wire import PIECE, Wire

# Bytes of an allocation that Redis needs itself: its own header, a null, the line's end while it is received.
OVERHEAD = 64
CLASSES = tuple(quarters * (1 << 18) for quarters in (4, 5, 6, 7, 8, 10, 12, 14, 16))  # of jemalloc, 1 to 4 MiB
LARGEST = CLASSES[-1] - OVERHEAD
WORTH_CUTTING = 8  # cut a value that would waste more than an eighth of itself


def value_sizes(total: int) -> tuple[int, ...]:
    """Sizes of the values that `total` bytes are kept in: 1 to 4 MiB, each just below one of the allocator's classes."""
    sizes = []
    while total:
        size = min(total, LARGEST)
        whole = next(c for c in CLASSES if c - OVERHEAD >= size)
        fitting = [c - OVERHEAD for c in CLASSES if c - OVERHEAD <= size]
        if fitting and (whole - OVERHEAD - size) * WORTH_CUTTING > size:
            size = fitting[-1]
        sizes.append(size)
        total -= size
    return tuple(sizes)


def overlaps(sizes: Sequence[int], start: int, stop: int) -> list[tuple[int, int, int]]:
    """Which values hold bytes `[start, stop)`: number, first byte in it, how many."""
    found = []
    for number, end in enumerate(accumulate(sizes)):
        begin = end - sizes[number]
        if begin < stop and start < end:
            first = max(start, begin)
            found.append((number, first - begin, min(stop, end) - first))
    return found


@dataclass(frozen=True, slots=True)
class Names:
    """What a record's header and values are called."""

    header: bytes
    sizes: tuple[int, ...]
    final: tuple[bytes, ...]
    aside: tuple[bytes, ...] = ()  # while it is being written

    @classmethod
    def of(cls, header: bytes, sizes: tuple[int, ...], token: str = "") -> "Names":
        """`token` tells one writer from another; whoever only reads has none."""
        count = range(len(sizes))
        aside = tuple(b"%s:%s:%d" % (header, token.encode(), i) for i in count) if token else ()
        return cls(header, sizes, tuple(b"%s:%d" % (header, i) for i in count), aside)


class Cursor:
    """Goes through parts from the first byte to the last, hashing each part on the way."""

    def __init__(self, parts: Sequence[memoryview]) -> None:
        self._left = iter(parts)
        self._view = memoryview(b"")
        self._hashes: list[xxhash.xxh3_64] = []

    def pieces(self, size: int) -> Iterator[memoryview]:
        """The next `size` bytes, in pieces that are still in the processor's cache when they come."""
        for view in self._next(size):
            for at in range(0, len(view), PIECE):
                piece = view[at : at + PIECE]
                self._hashes[-1].update(piece)
                yield piece

    def receive(self, wire: Wire, size: int) -> None:
        """Fill the next `size` bytes."""
        for view in self._next(size):
            wire.receive(view, self._hashes[-1].update)

    def checksums(self) -> tuple[int, ...]:
        """Of the parts that were gone through."""
        return tuple(h.intdigest() for h in self._hashes)

    def _next(self, size: int) -> Iterator[memoryview]:
        while size:
            if not self._view:
                self._view = next(self._left)
                self._hashes.append(xxhash.xxh3_64())
            view = self._view[:size]
            self._view = self._view[len(view) :]
            size -= len(view)
            yield view
