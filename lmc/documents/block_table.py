"""A hash table of the document finder: numbers of blocks by the blocks' hashes.

A bucket has `SLOTS` entries, and a full one continues in the next one. A Bloom filter of one hash function says for
most of a prompt's hashes that no block has them.

A table that is full grows while it is used, so that no insertion takes long: a larger table takes new blocks, and every
insertion moves a part of the older table's blocks to it (incremental rehashing, as Redis does it).
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

MAX_HOLDERS = 4  # blocks with the same hash that are kept
SLOTS = 8  # entries of a bucket
MIN_BUCKETS = 16
MAX_LOAD = 0.8  # share of the slots that may be in use
# Largest share of the slots in use after growing, and buckets of the older table that are moved for each new block.
# The older table has at most twice as many buckets as the new one, so that the move ends before the new one is full.
GROWN_LOAD = 0.6
MOVED_BUCKETS = 2

DEAD = 0xFFFFFFFF  # number of a removed block

Array = npt.NDArray[np.uint32]
Positions = npt.NDArray[np.int64]


class BlockTable:
    """Numbers of blocks, below `DEAD`, by hash. Not safe for several threads at once."""

    def __init__(self) -> None:
        self._table = _Table(MIN_BUCKETS)
        self._older: _Table | None = None  # whose blocks are being moved to the other table
        self._moved = 0  # buckets of the older table that were moved

    @property
    def bytes(self) -> int:
        """Number of bytes that the table takes."""
        return sum(table.bytes for table in self._tables())

    def insert(self, hashes: Array, numbers: Array) -> npt.NDArray[np.bool_]:
        """Add blocks, at most `MAX_HOLDERS` with the same hash. Returns which blocks were added."""
        order = np.argsort(hashes, kind="stable")
        hashes, numbers = hashes[order], numbers[order]
        same, _ = self.find(hashes)
        fits = np.bincount(same, minlength=len(hashes)) + _ranks(hashes) < MAX_HOLDERS
        hashes, numbers = hashes[fits], numbers[fits]
        if self._older is not None:
            self._move(MOVED_BUCKETS * len(hashes))
        if self._table.size + len(hashes) > MAX_LOAD * self._table.slots:
            self._grow(len(hashes))
        self._table.place(hashes, numbers)
        added = np.empty(len(order), np.bool_)
        added[order] = fits
        return added

    def find(self, hashes: Array) -> tuple[Positions, Array]:
        """Return the blocks with these hashes: indices into `hashes`, and the blocks' numbers."""
        found = [table.find(hashes) for table in self._tables()]
        if len(found) == 1:
            return found[0]
        at, numbers = map(np.concatenate, zip(*found, strict=True))
        return at, numbers

    def remove(self, hashes: Array, are_gone: Callable[[Array], npt.NDArray[np.bool_]]) -> None:
        """Remove those blocks with these hashes whose numbers `are_gone`."""
        for table in self._tables():
            table.remove(hashes, are_gone)

    def _tables(self) -> "tuple[_Table, ...]":
        return (self._table,) if self._older is None else (self._table, self._older)

    def _grow(self, more: int) -> None:
        """Replace the table by one with room for `more` blocks, and begin to move its blocks, without removed ones."""
        if self._older is not None:  # One insertion may be as large as the table.
            self._move(self._older.buckets)
        alive, buckets = self._table.alive, max(MIN_BUCKETS, self._table.buckets // 2)
        while alive + more > GROWN_LOAD * buckets * SLOTS:
            buckets *= 2
        self._older, self._moved, self._table = self._table, 0, _Table(buckets)
        self._move(MOVED_BUCKETS * more)

    def _move(self, buckets: int) -> None:
        """Move the blocks of the next buckets of the older table."""
        older = self._older
        assert older is not None
        self._table.place(*older.take(self._moved, self._moved + buckets))
        self._moved += buckets
        if self._moved >= older.buckets:
            self._older = None


class _Table:
    """A hash table of a fixed size."""

    def __init__(self, buckets: int) -> None:
        """Create a table of this number of buckets, a power of 2."""
        self.buckets, self.slots = buckets, buckets * SLOTS
        self.size = self._dead = 0  # slots in use, and slots of removed blocks among them
        self._hashes = np.zeros((buckets, SLOTS), np.uint32)
        self._numbers = np.zeros((buckets, SLOTS), np.uint32)
        self._used = np.zeros(buckets, np.uint8)  # slots in use by bucket
        self._filter = np.zeros(buckets * SLOTS, np.uint8)  # 8 bits for each slot

    @property
    def bytes(self) -> int:
        return self._hashes.nbytes + self._numbers.nbytes + self._used.nbytes + self._filter.nbytes

    @property
    def alive(self) -> int:
        """Number of blocks."""
        return self.size - self._dead

    def find(self, hashes: Array) -> tuple[Positions, Array]:
        at, buckets, slots = self._locate(hashes)
        numbers = self._numbers[buckets, slots]
        return at[numbers != DEAD], numbers[numbers != DEAD]

    def remove(self, hashes: Array, are_gone: Callable[[Array], npt.NDArray[np.bool_]]) -> None:
        _, buckets, slots = self._locate(np.unique(hashes))
        found = self._numbers[buckets, slots]
        gone = (found != DEAD) & are_gone(found)
        self._numbers[buckets[gone], slots[gone]] = DEAD
        self._dead += int(gone.sum())

    def take(self, start: int, stop: int) -> tuple[Array, Array]:
        """Remove the blocks of the buckets from `start` to `stop`, and return their hashes and numbers."""
        numbers = self._numbers[start:stop]
        alive = (np.arange(SLOTS) < self._used[start:stop, None]) & (numbers != DEAD)
        taken = self._hashes[start:stop][alive], numbers[alive]
        numbers[alive] = DEAD
        return taken

    def place(self, hashes: Array, numbers: Array) -> None:
        """Add blocks. There has to be room for them."""
        mask = self.buckets - 1
        np.bitwise_or.at(self._filter, *self._in_filter(hashes))
        self.size += len(hashes)
        buckets = (hashes & np.uint32(mask)).astype(np.int64)
        while len(hashes):
            order = np.argsort(buckets, kind="stable")
            hashes, numbers, buckets = hashes[order], numbers[order], buckets[order]
            slots = self._used[buckets] + _ranks(buckets)
            fits = slots < SLOTS
            self._hashes[buckets[fits], slots[fits]] = hashes[fits]
            self._numbers[buckets[fits], slots[fits]] = numbers[fits]
            self._used[buckets[fits]] = slots[fits] + 1  # The last assignment to a bucket is that of its last slot.
            hashes, numbers, buckets = hashes[~fits], numbers[~fits], (buckets[~fits] + 1) & mask

    def _locate(self, hashes: Array) -> tuple[Positions, Positions, Positions]:
        """Return the slots with these hashes: indices into `hashes`, buckets, and slots of buckets."""
        mask = self.buckets - 1
        places, bits = self._in_filter(hashes)
        at = np.flatnonzero(self._filter[places] & bits)
        wanted, found = hashes[at], list[tuple[Positions, Positions, Positions]]()
        buckets = (wanted & np.uint32(mask)).astype(np.int64)
        while True:
            used = self._used[buckets]
            rows, slots = np.nonzero(self._hashes[buckets] == wanted[:, None])
            if len(rows):
                inside = slots < used[rows]  # An unused slot has the hash 0.
                rows, slots = rows[inside], slots[inside]
            found.append((at[rows], buckets[rows], slots))
            full = used == SLOTS
            if not full.any():
                break
            at, wanted, buckets = at[full], wanted[full], (buckets[full] + 1) & mask
        if len(found) == 1:
            return found[0]
        at, buckets, slots = map(np.concatenate, zip(*found, strict=True))
        return at, buckets, slots

    def _in_filter(self, hashes: Array) -> tuple[Positions, npt.NDArray[np.uint8]]:
        """Return the byte and the bit of each hash in the filter."""
        places = (hashes >> np.uint32(3)) & np.uint32(len(self._filter) - 1)
        return places.astype(np.int64), np.uint8(1) << (hashes & np.uint32(7)).astype(np.uint8)


def _ranks(ascending: npt.NDArray[np.generic]) -> Positions:
    """Return the number of equal elements before each element of a sorted array."""
    starts = np.flatnonzero(np.r_[True, ascending[1:] != ascending[:-1]]) if len(ascending) else np.zeros(0, np.int64)
    return np.arange(len(ascending)) - np.repeat(starts, np.diff(np.r_[starts, len(ascending)]))
