"""A level of memory (device or host), and the types of work that the store's state gives to threads.

The store's lock guards everything here. Threads do the work outside the lock, and report each step to the state.
"""

from collections.abc import Collection, Container, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple, Protocol

from lmc.keys import ChunkKey
from lmc.storage.change_log import ChangeLog
from lmc.storage.contract import PinState
from lmc.storage.eviction import Standing
from lmc.storage.fairness import FairShares, Owner
from lmc.storage.ledger import Ledger, MemoryClaims, Slot
from lmc.storage.memory.slab import Slab
from lmc.storage.tiers.record import RecordMeta
from lmc.storage.tiers.tier import Tier

TAKEN_AT_ONCE = 64  # the maximum number of chunks that one call of `Level.evict` evicts


class Level:
    """A slab, the ledger of its slots, and the metadata of the chunks in them."""

    def __init__(
        self,
        name: str,
        slab: Slab,
        changes: ChangeLog,
        document_share: float = 0.0,
        pinned: Container[ChunkKey] = (),
        *,
        pins_yield: bool = False,
        backing: "Backing | None" = None,
        fair: FairShares | None = None,
    ) -> None:
        """Create a level over `slab`.

        `pinned` holds the keys of the pinned chunks; the store updates it. With `pins_yield`, a tier also has these
        chunks, so they are evicted if no other chunk is left. With a `backing`, slots are used only as it allows. With
        `fair`, each owner of chunks has a fair share.
        """
        self.name, self.slab, self.changes, self._pinned, self._backing = name, slab, changes, pinned, backing
        self.fair, unsafe = fair, backing.unsafe if backing else ()
        self.ledger = Ledger(
            slab.slots, document_share, pins_yield=pins_yield, claims=backing, unsafe=unsafe, fair=fair
        )
        self.metas: dict[Slot, RecordMeta] = {}

    def reserve(self, todo: "Todo", *, used: bool = False) -> Slot | None:
        """Reserve a slot, and add the work that follows to `todo`. Returns None if every slot is held."""
        slot = self.ledger.reserve(used=used)
        if slot is not None:
            self._emptied(slot)
            if self.ledger.is_bare(slot):
                todo.bare.append(slot)
        return slot

    def evict(self, owners: Collection[Owner], size: int) -> tuple[list[Slot], int]:
        """Evict chunks of `owners` that are not pinned, least recently used first, and reserve their slots.

        Stops at `size` bytes or at `TAKEN_AT_ONCE` chunks, because other threads wait for the lock. Returns the slots,
        and the bytes of the evicted chunks.
        """
        slots: list[Slot] = []
        freed = 0
        for slot in islice(self.ledger.evictable(owners), TAKEN_AT_ONCE):
            if freed >= size:
                break
            freed += self.metas[slot].memory
            slots.append(slot)
        for slot in slots:
            self.ledger.take(slot)
            self._emptied(slot)
        return slots, freed

    def _emptied(self, slot: Slot) -> None:
        self.slab.lose(slot)  # Another process may still read a slot that was released too early.
        if (meta := self.metas.pop(slot, None)) is not None and self.ledger.find(meta.key) is None:
            self.changes.left(self.name, meta.key)

    def commit(self, slot: Slot, meta: RecordMeta) -> None:
        """Make the chunk in a filled slot visible."""
        owner = meta.owner if self.fair is not None else None
        self.ledger.commit(slot, meta.key, Standing.of(meta.kind, pinned=meta.key in self._pinned), owner)
        self.metas[slot] = meta
        self.slab.label(slot, meta.key, meta.parts)
        self.changes.appeared(self.name, meta)
        if self._backing is not None:
            self._backing.filled(slot, meta)

    def adopt(self, slot: Slot, meta: RecordMeta) -> None:
        """Make the chunk of a slot visible that was filled before this process started."""
        owner = meta.owner if self.fair is not None else None
        self.ledger.adopt(slot, meta.key, Standing.of(meta.kind, pinned=False), owner)
        self.metas[slot] = meta
        self.changes.appeared(self.name, meta)

    def drop(self, key: ChunkKey) -> None:
        """Forget a chunk in every slot that has it. Holders keep such a slot until they release it."""
        while (slot := self.ledger.find(key)) is not None:
            self.ledger.drop(slot)
            self.metas.pop(slot, None)
            self.slab.lose(slot)
        self.changes.left(self.name, key)


class Backing(MemoryClaims, Protocol):
    """The provider of a slab's memory, which is taken slot by slot and may outlive the process."""

    unsafe: Collection[Slot]  # Other processes may still write to these slots.

    def furnish(self, slots: Sequence[Slot]) -> set[Slot]:
        """Allocate the memory of slots before their first use. Returns the slots for which the system lacks memory.

        After such a failure, `claim` refuses for a while. This takes milliseconds, and is called without the store's
        lock.
        """

    def filled(self, slot: Slot, meta: RecordMeta) -> None:
        """Record that a slot has been filled. This is called with the store's lock held, and does not block."""


class Held(NamedTuple):
    """A chunk in a held slot, so that its bytes stay there until they have been copied or written."""

    meta: RecordMeta
    level: Level
    slot: Slot


@dataclass(slots=True, eq=False)
class Load:
    """A record that is being loaded from a tier into a host slot, for all its readers."""

    key: ChunkKey
    tier: Tier
    slot: Slot
    bare: bool  # whether the slot's memory must be taken first
    readers: int = 1
    ready: int = 0  # parts that have arrived and been verified
    started: bool = False  # whether a thread works on the load
    state: PinState = PinState.COMING


@dataclass(slots=True, eq=False)
class Outgoing:
    """A record that waits to be written to tiers, from a held host slot."""

    meta: RecordMeta
    slot: Slot
    tiers: list[Tier]
    left: int  # tiers that have not finished with the record
    ticket: int  # its ticket in the write queues


@dataclass(slots=True)
class Todo:
    """The work to do outside the lock after a step of the state, in this order."""

    bare: list[Slot] = field(default_factory=list)  # slots whose memory must be taken before they are written
    loads: list[Load] = field(default_factory=list)
    copies: list[tuple[Held, Level, int]] = field(default_factory=list)  # chunk, target level and ticket of each copy
    outgoing: list[Outgoing] = field(default_factory=list)
