"""The layout of a record's parts in Redis values, and the script that makes the values a record.

Apart from the script, this is arithmetic on sizes and views, without a connection.

A value has at most 4 MiB, and is slightly smaller than a size class of the allocator (jemalloc). A value of exactly
1 MiB would occupy 1.25 MiB.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate

import xxhash

from lmc.storage.tiers.redis.resp import PIECE, Connection

OVERHEAD = 64  # bytes of an allocation that Redis itself needs: a header, a zero, and the end of line while it receives
CLASSES = tuple(quarters * (1 << 18) for quarters in (4, 5, 6, 7, 8, 10, 12, 14, 16))  # jemalloc's from 1 to 4 MiB
LARGEST = CLASSES[-1] - OVERHEAD
WORTH_CUTTING = 8  # A value that would waste more than an eighth of its size is cut.

# A script that makes a record visible, or removes all of it. The header is set first, because only this command can be
# refused for lack of memory. The header expires before the values.
COMPLETE = """
local count, ttl = (#KEYS - 1) / 2, tonumber(ARGV[2])
local present = redis.call('EXISTS', KEYS[1]) == 1
if present or redis.call('EXISTS', unpack(KEYS, 2, count + 1)) < count then
    redis.call('UNLINK', unpack(KEYS, 2, count + 1))
    return present and 2 or 0
end
if ttl > 0 then redis.call('SET', KEYS[1], ARGV[1], 'EX', ttl) else redis.call('SET', KEYS[1], ARGV[1]) end
for i = 2, count + 1 do
    redis.call('RENAME', KEYS[i], KEYS[i + count])
    if ttl > 0 then redis.call('EXPIRE', KEYS[i + count], ttl + tonumber(ARGV[3]))
    else redis.call('PERSIST', KEYS[i + count]) end
end
return 1
"""
COMPLETED, OTHERS = 1, 2  # results of the script: the record is visible; another writer's record was there already


def value_sizes(total: int) -> tuple[int, ...]:
    """Return the sizes of the values that together hold `total` bytes."""
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
    """Return the ranges of values that hold bytes `[start, stop)`: value number, first byte in the value, length."""
    found = []
    for number, end in enumerate(accumulate(sizes)):
        begin = end - sizes[number]
        if begin < stop and start < end:
            first = max(start, begin)
            found.append((number, first - begin, min(stop, end) - first))
    return found


def value_names(start: bytes, count: int) -> list[bytes]:
    """Return the names of a record's `count` values. `start` is the name of its header, or this name and a token."""
    return [b"%s:%d" % (start, number) for number in range(count)]


class Cursor:
    """A pass over parts from the first byte to the last, which computes the checksum of each part on the way."""

    def __init__(self, parts: Sequence[memoryview]) -> None:
        self._left = iter(parts)
        self._view = memoryview(b"")
        self._hashes: list[xxhash.xxh3_64] = []

    def pieces(self, size: int) -> Iterator[memoryview]:
        """Yield the next `size` bytes in pieces. Each piece is in the processor's cache when it is yielded."""
        for piece in self._next(size):
            self._hashes[-1].update(piece)
            yield piece

    def receive(self, connection: Connection, size: int) -> None:
        """Fill the next `size` bytes from a connection."""
        for piece in self._next(size):
            connection.receive(piece)
            self._hashes[-1].update(piece)

    def checksums(self) -> tuple[int, ...]:
        """Return the checksums of the parts that the cursor has passed."""
        return tuple(h.intdigest() for h in self._hashes)

    def _next(self, size: int) -> Iterator[memoryview]:
        while size:
            if not self._view:
                self._view = next(self._left)
                self._hashes.append(xxhash.xxh3_64())
            piece = self._view[: min(size, PIECE)]
            self._view = self._view[len(piece) :]
            size -= len(piece)
            yield piece
