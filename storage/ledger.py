"""Who is in which slot: a block pool of fixed slots with O(1) touch, take and release.

Pure bookkeeping: no bytes, no tensors, no lock (the store that owns a ledger holds one). Slots are made once. A slot is
*free* (it may still hold a key, and is then a hit until somebody takes it), *writing* (reserved, its bytes are not there yet)
or *pinned* (committed, somebody reads it). Taking a free slot evicts what it held. The order of the free queue and the
two variants of returning slots follow vLLM's block pool (its documentation, and release 0.32.0, which differ).
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import NewType

from lmc.keys import ChunkKey

Slot = NewType("Slot", int)


class FreeOrder(Enum):
    """Where released slots enter the free queue; its head is taken next."""

    DOCUMENTED = "documented"  # all at the tail
    KEYLESS_FIRST = "keyless_first"  # slots without a key, which nobody can hit, at the head


class Ledger:
    """Fixed slots, their keys, their pins, and the queue of free ones."""

    def __init__(self, slots: int, order: FreeOrder = FreeOrder.KEYLESS_FIRST) -> None:
        assert slots > 0
        self.slots = slots
        self.evictions = 0
        self._order = order
        self._pins = [0] * slots
        self._keys: list[ChunkKey | None] = [None] * slots
        self._writing: set[Slot] = set()
        # One key may be in several slots: two requests that computed the same chunk keep their own (tables are append-only).
        self._holders: dict[ChunkKey, list[Slot]] = {}
        # Doubly linked queue in two lists; index `slots` is the sentinel: its next is the head, its previous the tail.
        self._next = [*range(1, slots + 1), 0]
        self._previous = [slots, *range(slots)]
        self._free = slots

    @property
    def free(self) -> int:
        """How many slots can be taken."""
        return self._free

    def find(self, key: ChunkKey) -> Slot | None:
        """The committed slot that holds `key`, pinned or free."""
        holders = self._holders.get(key)
        return holders[0] if holders else None

    def holds(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """Which of `keys` would be found. The one question that needs no lock: no other thread gets in between two keys."""
        return list(map(self._holders.__contains__, keys))

    def key_of(self, slot: Slot) -> ChunkKey | None:
        """What `slot` holds."""
        return self._keys[slot]

    def pins(self, slot: Slot) -> int:
        """How often `slot` is held."""
        return self._pins[slot]

    def free_queue(self) -> Iterator[Slot]:
        """Free slots from the head: the order in which they will be taken."""
        slot = self._next[self.slots]
        while slot != self.slots:
            yield Slot(slot)
            slot = self._next[slot]

    def keys(self) -> Iterator[ChunkKey]:
        """Every key that a lookup would hit."""
        return iter(self._holders)

    def hold(self, slot: Slot) -> None:
        """Pin a committed slot once more: it leaves the free queue, and nothing evicts it until it is released."""
        assert self._keys[slot] is not None, f"slot {slot} holds nothing"
        if self._pins[slot] == 0:
            self._unlink(slot)
        self._pins[slot] += 1

    def reserve(self, count: int = 1) -> list[Slot] | None:
        """Take `count` slots for writing, evicting what they held; None (and nothing taken) if fewer are free."""
        if count > self._free:
            return None
        taken = []
        for _ in range(count):
            slot = Slot(self._next[self.slots])
            self._unlink(slot)
            if self._keys[slot] is not None:
                self._forget(slot)
                self.evictions += 1
            self._pins[slot] = 1
            self._writing.add(slot)
            taken.append(slot)
        return taken

    def peek(self, count: int) -> list[tuple[Slot, ChunkKey]]:
        """What `reserve(count)` would evict now, for whoever wants to save it first."""
        doomed = []
        for position, slot in enumerate(self.free_queue()):
            if position == count:
                break
            key = self._keys[slot]
            if key is not None:
                doomed.append((slot, key))
        return doomed

    def commit(self, slot: Slot, key: ChunkKey) -> None:
        """The bytes of a reserved slot are there: from now on `key` is found. The slot stays held until released."""
        self._writing.remove(slot)
        self._keys[slot] = key
        self._holders.setdefault(key, []).append(slot)

    def abort(self, slot: Slot) -> None:
        """Give a reserved slot back without a key."""
        assert slot in self._writing
        self.release([slot])

    def release(self, slots: Sequence[Slot]) -> None:
        """Return a request's slots, in its order; the last becomes evictable first, so a chain loses its tail before its head."""
        for slot in reversed(slots):
            assert self._pins[slot] > 0, f"slot {slot} is not held"
            self._pins[slot] -= 1
            if self._pins[slot]:
                continue
            self._writing.discard(slot)
            keyless = self._keys[slot] is None
            self._link(slot, head=keyless and self._order is FreeOrder.KEYLESS_FIRST)

    def drop(self, slot: Slot) -> None:
        """Forget what `slot` holds (its bytes turned out wrong); whoever holds the slot keeps it until released."""
        self._forget(slot)

    @contextmanager
    def pinned(self, keys: Iterable[ChunkKey]) -> Iterator[list[Slot | None]]:
        """Slots of `keys` (None where missing), none of which is evicted inside the block."""
        slots = [self.find(key) for key in keys]
        held = [slot for slot in slots if slot is not None]
        for slot in held:
            self.hold(slot)
        try:
            yield slots
        finally:
            self.release(held)

    def check(self) -> None:
        """Prove the invariants: each slot exactly once in {free, pinned, writing}; links, keys and counts agree."""
        queue = list(self.free_queue())
        free = set(queue)
        assert len(queue) == len(free) == self._free, "free queue and its count disagree"
        assert all(self._previous[self._next[s]] == s for s in [*queue, self.slots]), "links disagree"
        for slot in map(Slot, range(self.slots)):
            assert (self._pins[slot] == 0) == (slot in free), f"slot {slot} is both free and held, or neither"
            assert slot not in self._writing or (self._pins[slot] == 1 and self._keys[slot] is None)
        held = {slot for holders in self._holders.values() for slot in holders}
        assert held == {s for s in range(self.slots) if self._keys[s] is not None}, "keys and holders disagree"
        assert all(self._keys[s] == key for key, holders in self._holders.items() for s in holders)

    def _forget(self, slot: Slot) -> None:
        key = self._keys[slot]
        assert key is not None
        self._keys[slot] = None
        holders = self._holders[key]
        holders.remove(slot)
        if not holders:
            del self._holders[key]

    def _unlink(self, slot: Slot) -> None:
        before, after = self._previous[slot], self._next[slot]
        self._next[before], self._previous[after] = after, before
        self._free -= 1

    def _link(self, slot: Slot, *, head: bool) -> None:
        before = self.slots if head else self._previous[self.slots]
        after = self._next[before]
        self._next[before] = self._previous[after] = slot
        self._previous[slot], self._next[slot] = before, after
        self._free += 1
