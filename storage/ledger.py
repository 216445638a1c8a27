"""The ledger: the chunk in each slot, the number of its holders, and the next slot to take. All operations are O(1).

The ledger is bookkeeping only. It has no bytes, no tensors and no lock; the store's state guards it. A slot has one of
these states:

    free           nothing holds it; it may have a chunk, which lookups find until the slot is taken
    being written  it was reserved
    held           a caller reads it

Taking a free slot evicts its chunk. Without documents, slots are taken and returned in the order of vLLM's block pool
in release 0.32.0. Documents have a share of the slots (`eviction.py`).

If memory is taken slot by slot, a free slot can have more states:

    unused         it has no memory yet
    preparing      its memory is being taken
    ready          it has memory, and has had no chunk since

A reserved slot that was unused is *bare* until its memory has been taken.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NewType, Protocol

from lmc.keys import ChunkKey
from lmc.storage.eviction import EvictionOrder, Standing
from lmc.storage.fairness import FairShares, Owner

Slot = NewType("Slot", int)


class MemoryClaims(Protocol):
    """Decides how many slots may have memory. Both methods are called with the store's lock held, and do not block."""

    def claim(self) -> bool:
        """Claim the memory of one more slot, and return whether the claim is granted."""

    def unclaim(self) -> None:
        """Give back the claim of a slot whose memory was not taken."""


class Ledger:
    """A fixed number of slots, their keys and holders, and the queue of free slots."""

    def __init__(
        self,
        slots: int,
        document_share: float = 0.0,
        *,
        pins_yield: bool = False,
        claims: MemoryClaims | None = None,
        unsafe: Collection[Slot] = (),
        fair: FairShares | None = None,
    ) -> None:
        """Create a ledger of `slots` slots.

        With `claims`, all slots start unused, and each first use needs a claim. Slots that are `unsafe` are not used
        before `make_safe` is called. With `fair`, each owner of chunks has a fair share of the slots.
        """
        assert slots > 0
        self.slots, self.evictions, self.document_evictions = slots, 0, 0
        self._holders = [0] * slots
        self._keys: list[ChunkKey | None] = [None] * slots
        self._writing: set[Slot] = set()
        # A key may be in several slots: two requests that computed the same chunk each keep their own copy.
        self._slots_of: dict[ChunkKey, list[Slot]] = {}
        self._standing, self._owners = [Standing.OTHER] * slots, list[Owner | None]([None]) * slots
        # Free slots that have memory, except ready slots.
        self._queue: EvictionOrder[Slot] = EvictionOrder(slots * document_share, pins_yield=pins_yield, fair=fair)
        self._claims, self._unsafe = claims, set(unsafe)
        self._preparing: set[Slot] = set()
        self._ready: list[Slot] = []
        self._bare: set[Slot] = set()
        # Unused slots; the last entry is used next.
        self._unused = [slot for slot in map(Slot, reversed(range(slots))) if slot not in self._unsafe]
        while claims is None and self._unused:
            self._queue.add(self._unused.pop())

    @property
    def free(self) -> int:
        """The number of free slots, with or without memory."""
        with_memory = len(self._queue) + len(self._ready)
        return with_memory + len(self._preparing) + len(self._unused) + len(self._unsafe)

    @property
    def ready(self) -> int:
        """The number of ready slots."""
        return len(self._ready)

    def find(self, key: ChunkKey) -> Slot | None:
        """Return a slot that holds `key`, whether it is free or held."""
        slots = self._slots_of.get(key)
        return slots[0] if slots else None

    def holds(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """Return for each of `keys` whether `find` would find it.

        This is the only method that may be called without the lock: no other thread runs between two keys.
        """
        return list(map(self._slots_of.__contains__, keys))

    def key_of(self, slot: Slot) -> ChunkKey | None:
        """Return the key in `slot`, or None."""
        return self._keys[slot]

    def keys(self) -> Iterator[ChunkKey]:
        """Return every key that has a slot."""
        return iter(self._slots_of)

    def hold(self, slot: Slot) -> None:
        """Add a holder to a slot that has a key. The slot is not evicted before all holders have released it."""
        assert self._keys[slot] is not None, f"slot {slot} holds nothing"
        if self._holders[slot] == 0:
            self._queue.remove(slot)
        self._holders[slot] += 1

    def reserve(self, *, used: bool = False) -> Slot | None:
        """Reserve a slot to write to: a free slot without a chunk if possible, or else the next slot to evict.

        The order is: a queued slot without a chunk, a ready slot, an unused slot if `claims` grants it, the next slot
        to evict. With `used`, no unused slot is taken. Returns None if no slot can be reserved.
        """
        slot = self._queue.first()
        full = slot is None or self._keys[slot] is not None
        if full and self._ready:
            slot = self._ready.pop()
        elif full and self._unused and not used and self._claims and self._claims.claim():
            slot = self._unused.pop()
            self._bare.add(slot)
        elif slot is None:
            return None
        else:
            self._queue.remove(slot)
        self._evict(slot)
        return slot

    def is_bare(self, slot: Slot) -> bool:
        """Return whether a reserved slot has no memory yet."""
        return slot in self._bare

    def furnished(self, slots: Iterable[Slot]) -> None:
        """Record that the memory of bare slots has been taken. A slot released before that becomes unused again."""
        self._bare.difference_update(slots)

    def evictable(self, owners: Collection[Owner]) -> Iterator[Slot]:
        """Yield the slots of `owners` that may be evicted, least recently used first."""
        return self._queue.evictable(owners)

    def by_last_use(self) -> list[Slot]:
        """Return the free slots that have a chunk, least recently used first."""
        return [slot for slot in self._queue if self._keys[slot] is not None]

    def prepare(self) -> Slot | None:
        """Move an unused slot to the state preparing and return it. Returns None if no slot is unused."""
        if not self._unused:
            return None
        slot = self._unused.pop()
        self._preparing.add(slot)
        return slot

    def prepared(self, slot: Slot, *, ready: bool) -> None:
        """End the preparing of a slot: it becomes `ready`, or unused again."""
        self._preparing.remove(slot)
        (self._ready if ready else self._unused).append(slot)

    def take(self, slot: Slot) -> None:
        """Evict the chunk in an evictable slot, and reserve the slot."""
        self._queue.remove(slot)
        self._evict(slot)

    def lay_aside(self, slot: Slot) -> None:
        """Return a reserved slot to the unused slots."""
        self._writing.remove(slot)
        self._holders[slot] = 0
        self._unused.append(slot)

    def commit(
        self, slot: Slot, key: ChunkKey, standing: Standing = Standing.OTHER, owner: Owner | None = None
    ) -> None:
        """Make `key` visible in a reserved slot. The slot stays held until it is released."""
        self._writing.remove(slot)
        self._keys[slot], self._owners[slot] = key, owner
        self._queue.own(owner, 1)
        self._stand(slot, standing)
        self._slots_of.setdefault(key, []).append(slot)

    def adopt(self, slot: Slot, key: ChunkKey, standing: Standing, owner: Owner | None = None) -> None:
        """Make `key` visible in an unsafe slot, and free the slot. Its chunk is older than this ledger."""
        self._unsafe.remove(slot)
        self._holders[slot] = 1
        self._writing.add(slot)
        self.commit(slot, key, standing, owner)
        self.release([slot])

    @property
    def unsafe(self) -> list[Slot]:
        """The unsafe slots, which the ledger does not use."""
        return sorted(self._unsafe)

    def make_safe(self) -> None:
        """Allow the use of the slots that were unsafe."""
        self._unused += reversed(self.unsafe)
        self._unsafe = set()

    def abort(self, slot: Slot) -> None:
        """Release a reserved slot that was not written."""
        assert slot in self._writing
        self.release([slot])

    def release(self, slots: Sequence[Slot]) -> None:
        """Release one hold of each slot. The slots are given in the order of a request's chunks.

        The last slot is evicted first, so that a prefix loses its end before its beginning. A slot without a key goes
        to the head of the queue, because no lookup can find it.
        """
        for slot in reversed(slots):
            assert self._holders[slot] > 0, f"slot {slot} is not held"
            self._holders[slot] -= 1
            if self._holders[slot] > 0:
                continue
            self._writing.discard(slot)
            if slot in self._bare:
                assert self._claims is not None
                self._bare.remove(slot)
                self._unused.append(slot)
                self._claims.unclaim()
            else:
                self._queue.add(slot, self._standing[slot], owner=self._owners[slot], first=self._keys[slot] is None)

    def protect(self, key: ChunkKey, standing: Standing) -> None:
        """Set the standing of a chunk in all slots that hold it."""
        for slot in self._slots_of.get(key, ()):
            self._stand(slot, standing)
            if slot in self._queue:
                self._queue.touch(slot)

    def drop(self, slot: Slot) -> None:
        """Forget the key in `slot`. Holders keep the slot until they release it."""
        key, owner = self._keys[slot], self._owners[slot]
        assert key is not None
        self._keys[slot] = self._owners[slot] = None
        self._queue.own(owner, -1)
        if slot in self._queue and (owner is not None or self._standing[slot] is not Standing.OTHER):
            self._queue.remove(slot)
            self._queue.add(slot, first=True)
        self._stand(slot, Standing.OTHER)
        self._slots_of[key].remove(slot)
        if not self._slots_of[key]:
            del self._slots_of[key]

    def _evict(self, slot: Slot) -> None:
        if self._keys[slot] is not None:
            self.evictions += 1
            self.document_evictions += self._standing[slot] is not Standing.OTHER
            self.drop(slot)
        self._holders[slot] = 1
        self._writing.add(slot)

    def _stand(self, slot: Slot, standing: Standing) -> None:
        self._queue.move(slot, self._standing[slot], standing, 1)
        self._standing[slot] = standing
