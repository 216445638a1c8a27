"""A level of memory (device or host), and the work that the store's state leaves to threads.

The store's lock guards all of this. Threads do the work outside of the lock, and report each step to the state.
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

TAKEN_AT_ONCE = 64  # chunks of one owner that are to be evicted


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
        """`pinned` are the chunks that are not to be evicted; the store adds some and removes some.

        With `pins_yield` they are on a tier as well, and are evicted if nothing else is left. With a `backing`, slots
        are used as it allows. With `fair`, the owners of chunks have shares.
        """
        self.name, self.slab, self.changes, self._pinned, self._backing = name, slab, changes, pinned, backing
        self.fair, unsafe = fair, backing.unsafe if backing else ()
        self.ledger = Ledger(
            slab.slots, document_share, pins_yield=pins_yield, claims=backing, unsafe=unsafe, fair=fair
        )
        self.metas: dict[Slot, RecordMeta] = {}

    def reserve(self, todo: "Todo", *, used: bool = False) -> Slot | None:
        """Reserve a slot, and note what follows from that; None if every slot is held."""
        slot = self.ledger.reserve(used=used)
        if slot is not None:
            self._emptied(slot)
            if self.ledger.is_bare(slot):
                todo.bare.append(slot)
        return slot

    def evict(self, owners: Collection[Owner], size: int) -> tuple[list[Slot], int]:
        """Reserve slots of chunks of some owners that are not pinned, with `size` bytes together if there are enough.

        Returns the slots, and how many bytes their chunks had. Those that were used longest ago go first, and only so
        many of them that nobody waits for long.
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
        """Note that a reserved slot has been filled."""
        owner = meta.owner if self.fair is not None else None
        self.ledger.commit(slot, meta.key, Standing.of(meta.kind, pinned=meta.key in self._pinned), owner)
        self.metas[slot] = meta
        self.slab.label(slot, meta.key, meta.parts)
        self.changes.appeared(self.name, meta)
        if self._backing is not None:
            self._backing.filled(slot, meta)

    def adopt(self, slot: Slot, meta: RecordMeta) -> None:
        """Note that a slot has been filled before this process began."""
        owner = meta.owner if self.fair is not None else None
        self.ledger.adopt(slot, meta.key, Standing.of(meta.kind, pinned=False), owner)
        self.metas[slot] = meta
        self.changes.appeared(self.name, meta)

    def drop(self, key: ChunkKey) -> None:
        """Forget a chunk in every slot that has it. Whoever holds such a slot keeps it until it is released."""
        while (slot := self.ledger.find(key)) is not None:
            self.ledger.drop(slot)
            self.metas.pop(slot, None)
            self.slab.lose(slot)
        self.changes.left(self.name, key)


class Backing(MemoryClaims, Protocol):
    """What stands behind a slab whose memory is taken slot by slot, and may outlive the process."""

    unsafe: Collection[Slot]  # Others may still write into these slots.

    def furnish(self, slots: Sequence[Slot]) -> set[Slot]:
        """Take the memory of slots that are used for the first time; return those for which the system has none.

        If there are such slots, `claim` refuses for a while. This takes milliseconds, and is called without the store's
        lock.
        """

    def filled(self, slot: Slot, meta: RecordMeta) -> None:
        """Note that a slot has been filled. This is called with the store's lock held, and returns at once."""


class Held(NamedTuple):
    """A chunk whose bytes stay in its slot until something has been done with them."""

    meta: RecordMeta
    level: Level
    slot: Slot


@dataclass(slots=True, eq=False)
class Load:
    """A record on its way from a tier to a slot of the host, for everybody who wants it."""

    key: ChunkKey
    tier: Tier
    slot: Slot
    bare: bool  # The slot's memory has to be taken first.
    readers: int = 1
    ready: int = 0  # parts that have arrived and been verified
    started: bool = False  # A thread works on it.
    state: PinState = PinState.COMING


@dataclass(slots=True, eq=False)
class Outgoing:
    """A record on its way to tiers, from a slot of the host that is held."""

    meta: RecordMeta
    slot: Slot
    tiers: list[Tier]
    left: int  # tiers that are not done with it
    ticket: int  # in the queue


@dataclass(slots=True)
class Todo:
    """What has to be done outside of the lock after a step of the state, in this order."""

    bare: list[Slot] = field(default_factory=list)  # whose memory has to be taken before they are written
    loads: list[Load] = field(default_factory=list)
    copies: list[tuple[Held, Level, int]] = field(default_factory=list)  # to another level, each with its ticket
    outgoing: list[Outgoing] = field(default_factory=list)
