"""The slots of one memory: allocate a slot, make its chunk visible, hold it, free it, evict its chunk.

Start here to see how the store manages memory. The store's lock (`state.py`) guards a pool. No method moves bytes or
waits. A slot is in one of these states:

    empty        it has no chunk, and is allocated next
    filling      it was allocated, and a caller or a load fills it
    held         it has a chunk, and callers use it; it is not evicted
    evictable    it has a chunk, and nothing uses it; lookups find the chunk until the slot is allocated again

Slots are allocated and freed in the order of vLLM's block pool in release 0.32.0, with a share for documents
(`eviction.py`). In a cache server, the memory of slots is allocated slot by slot, within a budget that arenas share.
Then a slot can also be

    unassigned   it has no memory
    unbacked     its memory is being allocated: it was allocated, or is prepared ahead of its use
    quarantined  processes of an earlier server may still write to it
"""

from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Protocol

from lmc.keys import ChunkKey, RecordKind
from lmc.storage.change_log import ChangeLog
from lmc.storage.eviction import EvictionClass, EvictionOrder, FairShares, Owner
from lmc.storage.memory.slab import Slab, Slot
from lmc.storage.tiers.record import RecordMeta

MAX_EVICTED_AT_ONCE = 64  # chunks that one call of `evict` evicts, because other threads wait for the lock


class Backing(Protocol):
    """The provider of a slab's memory, which is allocated slot by slot and may outlive the process.

    All methods except `allocate` are called with the store's lock held, and do not block.
    """

    quarantined: Collection[Slot]  # Processes of an earlier server may still write to these slots.

    def claim(self, *, ahead: bool = False) -> bool:
        """Claim the memory of one more slot, and return whether it is granted. `ahead`: before the slot is needed."""

    def unclaim(self) -> None:
        """Give back the claim of a slot whose memory was not allocated."""

    def allocate(self, slots: Sequence[Slot]) -> set[Slot]:
        """Allocate the memory of claimed slots. Returns the slots for which the system lacks memory.

        After such a failure, `claim` refuses for a while. This takes milliseconds.
        """

    def filled(self, slot: Slot, meta: RecordMeta) -> None:
        """Record that a slot has been filled."""


class SlotPool:
    """The slots of a slab, the chunk and the number of holders of each, and the order of eviction."""

    def __init__(
        self,
        name: str,
        slab: Slab,
        changes: ChangeLog,
        document_share: float = 0.0,
        pinned: Container[ChunkKey] = (),
        *,
        pins_yield: bool = False,
        backing: Backing | None = None,
        fair: FairShares | None = None,
    ) -> None:
        """Create a pool over `slab`. All slots are empty, or with a `backing` unassigned.

        `pinned` holds the keys of the pinned chunks; the store updates it. With `pins_yield`, a tier also has these
        chunks, so they are evicted if no other chunk is left. With `fair`, each owner of chunks has a fair share.
        """
        self.name, self.slab, self.slots = name, slab, slab.slots
        self.evictions = self.document_evictions = 0
        self.metas: list[RecordMeta | None] = [None] * self.slots  # the chunk in each slot
        self._changes, self._pinned, self._backing, self._has_owners = changes, pinned, backing, fair is not None
        # A key may be in several slots: two requests that computed the same chunk each keep their own copy.
        self._slots_of: dict[ChunkKey, list[Slot]] = {}
        self._holders = [0] * self.slots
        self._order: EvictionOrder[Slot] = EvictionOrder(self.slots * document_share, pins_yield=pins_yield, fair=fair)
        self._quarantined = set(backing.quarantined) if backing else set()
        self._unbacked: set[Slot] = set()
        slots = [slot for slot in map(Slot, reversed(range(self.slots))) if slot not in self._quarantined]
        self._empty, self._unassigned = ([], slots) if backing else (slots, [])  # The last slot is used next.

    # -- chunks ------------------------------------------------------------------------------------------------------

    def find(self, key: ChunkKey) -> Slot | None:
        """Return a slot with the chunk of `key`, held or evictable."""
        slots = self._slots_of.get(key)
        return slots[0] if slots else None

    def holds(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """Return for each of `keys` whether `find` would find it.

        This is the only method that may be called without the lock: no other thread runs between two keys.
        """
        return list(map(self._slots_of.__contains__, keys))

    def has(self, slot: Slot, key: ChunkKey) -> bool:
        """Return whether a slot has the chunk of `key`."""
        meta = self.metas[slot]
        return meta is not None and meta.key == key

    def keys(self) -> Iterable[ChunkKey]:
        """Return the keys of all chunks."""
        return self._slots_of.keys()

    def chunks(self) -> Iterator[tuple[Slot, RecordMeta]]:
        """Return every chunk, with a slot that has it."""
        return ((slots[0], self._chunk(slots[0])) for slots in self._slots_of.values())

    @property
    def held(self) -> int:
        """The number of slots that are held or being filled."""
        return self.slots - self._holders.count(0)

    @property
    def holders(self) -> int:
        """The number of holders of all slots; a slot that is being filled has one."""
        return sum(self._holders)

    # -- allocate, commit, hold, free --------------------------------------------------------------------------------

    def allocate(self, *, backed: bool = False) -> Slot | None:
        """Allocate a slot to fill: an empty slot, else an unassigned one, else the slot of the next chunk to evict.

        The memory of a slot that was unassigned must be allocated before it is filled (`is_unbacked`). With `backed`,
        no unassigned slot is used. Returns None if every slot is held.
        """
        slot: Slot | None
        if self._empty:
            slot = self._empty.pop()
        elif not backed and self._unassigned and self._claim():
            slot = self._unassigned.pop()
            self._unbacked.add(slot)
        elif (slot := self._order.first()) is not None:
            self._evict(slot)
        else:
            return None
        self._holders[slot] = 1
        self.slab.lose(slot)  # Another process may still read a slot that was released too early.
        return slot

    def commit(self, slot: Slot, meta: RecordMeta) -> None:
        """Make the chunk in a filled slot visible. The slot stays held until it is freed."""
        assert self._holders[slot] == 1
        self._insert(slot, meta)
        self.slab.label(slot, meta.key, meta.parts)
        if self._backing is not None:
            self._backing.filled(slot, meta)

    def hold(self, slot: Slot) -> None:
        """Add a holder to a slot with a chunk. The chunk is not evicted until all holders have freed the slot."""
        assert self.metas[slot] is not None, f"slot {slot} has no chunk"
        if self._holders[slot] == 0:
            self._order.hold(slot)
        self._holders[slot] += 1

    def free(self, slots: Sequence[Slot]) -> None:
        """Remove one holder of each slot. The slots are given in the order of a request's chunks.

        The last slot is evicted first, so that a prefix loses its end before its beginning. A slot without a chunk
        becomes empty.
        """
        for slot in reversed(slots):
            assert self._holders[slot] > 0, f"slot {slot} is not held"
            self._holders[slot] -= 1
            if self._holders[slot] > 0:
                continue
            if self.metas[slot] is not None:
                self._order.release(slot)
            elif slot in self._unbacked:
                self._give_up(slot)
            else:
                self._empty.append(slot)

    def drop(self, key: ChunkKey) -> None:
        """Forget a chunk in every slot that has it. Holders keep such a slot until they free it."""
        while (slot := self.find(key)) is not None:
            self._remove(slot)
            self.slab.lose(slot)
            if self._holders[slot] == 0:
                self._empty.append(slot)
        self._changes.left(self.name, key)

    # -- eviction ----------------------------------------------------------------------------------------------------

    def evict(self, covers: Callable[[Owner], bool], size: int) -> int:
        """Evict chunks of the owners that `covers` accepts and that are not pinned, least recently used first.

        Stops at `size` bytes or at `MAX_EVICTED_AT_ONCE` chunks. Returns the bytes of the evicted chunks.
        """
        slots, freed = list[Slot](), 0
        for slot in islice(self._order.owned_by(covers), MAX_EVICTED_AT_ONCE):
            if freed >= size:
                break
            freed += self._chunk(slot).memory
            slots.append(slot)
        for slot in slots:
            self._evict(slot)
            self.slab.lose(slot)
            self._empty.append(slot)
        return freed

    def protect(self, key: ChunkKey, *, pinned: bool) -> None:
        """Pin a document's chunk in all slots that have it, or end that, and count this as a use."""
        for slot in self._slots_of.get(key, ()):
            self._order.reclassify(slot, EvictionClass.of(RecordKind.DOCUMENT, pinned=pinned))
            self._order.touch(slot)

    def by_last_use(self) -> list[Slot]:
        """Return the evictable slots, least recently used first."""
        return list(self._order)

    def _evict(self, slot: Slot) -> None:
        self.evictions += 1
        self.document_evictions += self._order.entries[slot].eviction_class is not EvictionClass.OTHER
        key = self._remove(slot)
        if key not in self._slots_of:
            self._changes.left(self.name, key)

    def _insert(self, slot: Slot, meta: RecordMeta) -> None:
        assert self.metas[slot] is None, f"slot {slot} has a chunk"
        self.metas[slot] = meta
        self._slots_of.setdefault(meta.key, []).append(slot)
        eviction_class = EvictionClass.of(meta.kind, pinned=meta.key in self._pinned)
        self._order.insert(slot, eviction_class, owner=meta.owner if self._has_owners else None)
        self._changes.appeared(self.name, meta)

    def _remove(self, slot: Slot) -> ChunkKey:
        key = self._chunk(slot).key
        self.metas[slot] = None
        self._order.remove(slot)
        slots = self._slots_of[key]
        slots.remove(slot)
        if not slots:
            del self._slots_of[key]
        return key

    def _chunk(self, slot: Slot) -> RecordMeta:
        meta = self.metas[slot]
        assert meta is not None
        return meta

    # -- memory that is allocated slot by slot -----------------------------------------------------------------------

    @property
    def empty(self) -> int:
        """The number of slots that have memory, and no chunk."""
        return len(self._empty)

    @property
    def quarantined(self) -> list[Slot]:
        """The slots that are not used before `end_quarantine`, or until their chunk is adopted."""
        return sorted(self._quarantined)

    def is_unbacked(self, slot: Slot) -> bool:
        """Return whether the memory of an allocated slot must be allocated before it is filled."""
        return slot in self._unbacked

    def prepare(self, empty: int) -> Slot | None:
        """Choose an unassigned slot to allocate its memory before it is needed, unless `empty` slots are empty."""
        if len(self._empty) >= empty or not self._unassigned or not self._claim(ahead=True):
            return None
        slot = self._unassigned.pop()
        self._unbacked.add(slot)
        return slot

    def backed(self, slots: Iterable[Slot], lacking: Collection[Slot]) -> None:
        """Record that the memory of unbacked slots has been allocated, except of the slots in `lacking`.

        A prepared slot becomes empty, or unassigned again. An allocated slot without memory must be freed.
        """
        for slot in slots:
            prepared = self._holders[slot] == 0
            if slot not in lacking:
                self._unbacked.remove(slot)
                if prepared:
                    self._empty.append(slot)
            elif prepared:
                self._give_up(slot)

    def unassign(self, slot: Slot) -> None:
        """Return an allocated slot, whose memory has been given back, to the unassigned slots.

        The caller gives back its claim.
        """
        self._holders[slot] = 0
        self._unassigned.append(slot)

    def _give_up(self, slot: Slot) -> None:
        """Return an unbacked slot to the unassigned slots."""
        assert self._backing is not None
        self._unbacked.remove(slot)
        self._unassigned.append(slot)
        self._backing.unclaim()

    def adopt(self, slot: Slot, meta: RecordMeta) -> None:
        """Make the chunk in a quarantined slot visible. It was stored before this process started."""
        self._quarantined.remove(slot)
        self._insert(slot, meta)
        self._order.release(slot)

    def end_quarantine(self) -> None:
        """Allow the use of the quarantined slots, after their memory was freed."""
        self._unassigned += reversed(self.quarantined)
        self._quarantined = set()

    def _claim(self, *, ahead: bool = False) -> bool:
        return self._backing is not None and self._backing.claim(ahead=ahead)

    # -- integrity ---------------------------------------------------------------------------------------------------

    def faults(self) -> Iterator[str]:
        """Yield a sentence for each inconsistency of the bookkeeping."""
        states = {
            "empty": set(self._empty),
            "unassigned": set(self._unassigned),
            "quarantined": self._quarantined,
            "prepared": {slot for slot in self._unbacked if self._holders[slot] == 0},
            "evictable": set(self._order),
            "held or being filled": {Slot(slot) for slot, holders in enumerate(self._holders) if holders > 0},
        }
        times = Counter(chain.from_iterable(states.values()))
        for slot in (slot for slot in map(Slot, range(self.slots)) if times[slot] != 1):
            found = [state for state, slots in states.items() if slot in slots]
            yield f"slot {slot} is {' and '.join(found) or 'in no state'}"
        chunks = {Slot(slot) for slot, meta in enumerate(self.metas) if meta is not None}
        for slot in chunks - states["evictable"] - states["held or being filled"]:
            yield f"slot {slot} has the chunk {self._chunk(slot).key.hex()}, but is neither held nor evictable"
        for slot in chunks - set(chain.from_iterable(self._slots_of.values())):
            yield f"slot {slot} has the chunk {self._chunk(slot).key.hex()}, but lookups do not find it"
        for name, slots in ("empty", self._empty), ("unassigned", self._unassigned):
            if len(set(slots)) < len(slots):
                yield f"slots are {name} twice"
        for key, slots in self._slots_of.items():
            for slot in slots:
                if not self.has(slot, key):
                    yield f"lookups find the chunk {key.hex()} in slot {slot}, which has another one or none"
        yield from self._order.faults(lambda slot: self._holders[slot] > 0)
