"""The ledger: which chunk is in which slot, who holds it, and which slot is taken next. All operations are O(1).

This is bookkeeping only: it has no bytes, no tensors and no lock (the store's state guards it). A slot is *free* (it
may still hold a chunk, which is found until the slot is taken), *being written* (it was reserved), or *held* (somebody
reads it). Taking a free slot evicts the chunk in it. The order in which slots are taken and returned is that of vLLM's
block pool in release 0.32.0, as long as no documents are there, which have their share of the slots (`eviction.py`).

Where memory is taken slot by slot, a free slot may also be *unused* (it has no memory yet), *preparing* (memory for it
is being taken), or *ready* (it has memory, and no chunk was in it since). A slot that was unused until it was reserved
is *bare* until its memory has been taken.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NewType, Protocol

from lmc.keys import ChunkKey
from lmc.storage.eviction import EvictionOrder, Standing
from lmc.storage.fairness import FairShares, Owner

Slot = NewType("Slot", int)


class MemoryClaims(Protocol):
    """How many slots may have memory. Both methods are called with the store's lock held, and return at once."""

    def claim(self) -> bool:
        """Claim the memory of one slot more; return whether there may be so much."""

    def unclaim(self) -> None:
        """Give the claim of a slot back, whose memory was not taken."""


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
        """With `claims`, all slots are unused at first, and are used as they allow.

        Slots that are `unsafe` are not used until `make_safe` is called. With `fair`, owners of chunks have shares.
        """
        assert slots > 0
        self.slots, self.evictions, self.document_evictions = slots, 0, 0
        self._holders = [0] * slots
        self._keys: list[ChunkKey | None] = [None] * slots
        self._writing: set[Slot] = set()
        # A key may be in several slots: two requests that computed the same chunk each keep their own.
        self._slots_of: dict[ChunkKey, list[Slot]] = {}
        self._standing, self._owners = [Standing.OTHER] * slots, list[Owner | None]([None]) * slots
        # Free slots that have memory, but for the ready ones.
        self._queue: EvictionOrder[Slot] = EvictionOrder(slots * document_share, pins_yield=pins_yield, fair=fair)
        self._claims, self._unsafe = claims, set(unsafe)
        self._preparing: set[Slot] = set()
        self._ready: list[Slot] = []
        self._bare: set[Slot] = set()
        self._unused = [slot for slot in map(Slot, reversed(range(slots))) if slot not in self._unsafe]  # last one next
        while claims is None and self._unused:
            self._queue.add(self._unused.pop())

    @property
    def free(self) -> int:
        """How many slots are free, used or unused."""
        with_memory = len(self._queue) + len(self._ready)
        return with_memory + len(self._preparing) + len(self._unused) + len(self._unsafe)

    @property
    def ready(self) -> int:
        """How many slots are ready."""
        return len(self._ready)

    def find(self, key: ChunkKey) -> Slot | None:
        """Return a slot that holds `key`, whether it is free or held."""
        slots = self._slots_of.get(key)
        return slots[0] if slots else None

    def holds(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """Return which of `keys` would be found.

        This is the only method that may be called without the lock: no other thread runs between two keys.
        """
        return list(map(self._slots_of.__contains__, keys))

    def key_of(self, slot: Slot) -> ChunkKey | None:
        """Return the key in `slot`."""
        return self._keys[slot]

    def keys(self) -> Iterator[ChunkKey]:
        """Return every key that would be found."""
        return iter(self._slots_of)

    def hold(self, slot: Slot) -> None:
        """Add a holder to a slot that has a key: nothing evicts it until all its holders have released it."""
        assert self._keys[slot] is not None, f"slot {slot} holds nothing"
        if self._holders[slot] == 0:
            self._queue.remove(slot)
        self._holders[slot] += 1

    def reserve(self, *, used: bool = False) -> Slot | None:
        """Take a ready slot, or an unused one if there is room, or the one that is evicted next, to write to it.

        Returns None if no slot is free, or only pinned ones are. With `used` no unused slot is taken.
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
        """Return whether the memory of a reserved slot has still to be taken."""
        return slot in self._bare

    def furnished(self, slots: Iterable[Slot]) -> None:
        """Note that the memory of bare slots has been taken. A slot that is released before is unused again."""
        self._bare.difference_update(slots)

    def evictable(self, owners: Collection[Owner]) -> Iterator[Slot]:
        """Yield the slots of some owners that may be evicted, those that were used longest ago first."""
        return self._queue.evictable(owners)

    def by_last_use(self) -> list[Slot]:
        """Return the free slots that have a chunk, those that were used longest ago first."""
        return [slot for slot in self._queue if self._keys[slot] is not None]

    def prepare(self) -> Slot | None:
        """Let an unused slot be preparing, and return it; None if there is none."""
        if not self._unused:
            return None
        slot = self._unused.pop()
        self._preparing.add(slot)
        return slot

    def prepared(self, slot: Slot, *, ready: bool) -> None:
        """Let a slot that is preparing be `ready`, or unused again."""
        self._preparing.remove(slot)
        (self._ready if ready else self._unused).append(slot)

    def take(self, slot: Slot) -> None:
        """Evict the chunk in a slot that may be evicted, and reserve the slot."""
        self._queue.remove(slot)
        self._evict(slot)

    def lay_aside(self, slot: Slot) -> None:
        """Let a reserved slot be unused."""
        self._writing.remove(slot)
        self._holders[slot] = 0
        self._unused.append(slot)

    def commit(
        self, slot: Slot, key: ChunkKey, standing: Standing = Standing.OTHER, owner: Owner | None = None
    ) -> None:
        """Let `key` be found in a reserved slot from now on. The slot stays held until it is released."""
        self._writing.remove(slot)
        self._keys[slot], self._owners[slot] = key, owner
        self._queue.own(owner, 1)
        self._stand(slot, standing)
        self._slots_of.setdefault(key, []).append(slot)

    def adopt(self, slot: Slot, key: ChunkKey, standing: Standing, owner: Owner | None = None) -> None:
        """Let a key be found in an unsafe slot that has had it since before this ledger, and is free now."""
        self._unsafe.remove(slot)
        self._holders[slot] = 1
        self._writing.add(slot)
        self.commit(slot, key, standing, owner)
        self.release([slot])

    @property
    def unsafe(self) -> list[Slot]:
        """The slots that are not used because they are unsafe."""
        return sorted(self._unsafe)

    def make_safe(self) -> None:
        """Let the slots be used that were unsafe."""
        self._unused += reversed(self.unsafe)
        self._unsafe = set()

    def abort(self, slot: Slot) -> None:
        """Give back a reserved slot that was not written."""
        assert slot in self._writing
        self.release([slot])

    def release(self, slots: Sequence[Slot]) -> None:
        """Give back slots in the order of a request's chunks.

        The last one is evicted first, so that a prefix loses its end before its beginning. A slot without a key goes
        to the head of the queue, because nobody can find anything in it.
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
        """Change what protects a chunk in all slots that hold it."""
        for slot in self._slots_of.get(key, ()):
            self._stand(slot, standing)
            if slot in self._queue:
                self._queue.touch(slot)

    def drop(self, slot: Slot) -> None:
        """Forget the key in `slot`; whoever holds the slot keeps it until it is released."""
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
