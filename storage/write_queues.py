"""The number of chunks that wait to be written to each tier. Part of the store's state, guarded by its lock.

At most half of the host's slots may wait at a time. Each tier has an equal share of these, so that a slow tier does not
delay the others. If the queue is full, a chunk is not written; it stays in memory and is counted as dropped.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence

from lmc.keys import ChunkKey
from lmc.storage.level import Level
from lmc.storage.stats import Verb
from lmc.storage.tiers.record import RecordMeta
from lmc.storage.tiers.tier import Tier, Written


class WriteQueues:
    """The lengths of the queues to tiers and between levels, and the outcomes of the writes."""

    def __init__(self, levels: Sequence[Level], tiers: Sequence[Tier]) -> None:
        slots = levels[-1].slab.slots
        self._levels, self._tiers, self._remembered = levels, tiers, 2 * slots
        self._limit = max(1, slots // 2)
        self._share = max(1, self._limit // max(1, len(tiers)))
        self._waiting: Counter[str] = Counter()  # by tier, including the chunks that are being written
        self._tickets: dict[int, None] = {}  # the tickets that wait, oldest first
        self.last_ticket = self.dropped = 0
        self.missed: defaultdict[str, set[ChunkKey]] = defaultdict(set)  # by tier, the chunks that it did not get
        self.complaints: list[tuple[str, str]] = []  # warnings to log: subject and text
        self.writes: Counter[str] = Counter()  # records, by tier
        self.bytes: Counter[tuple[str, Verb]] = Counter()

    @property
    def length(self) -> int:
        """The number of waiting chunks."""
        return len(self._tickets)

    @property
    def oldest_ticket(self) -> int:
        """The oldest waiting ticket. If no ticket waits, the next ticket."""
        return next(iter(self._tickets), self.last_ticket + 1)

    def begin(self) -> int:
        """Add a waiting copy or write, and return its ticket, which is higher than all earlier tickets."""
        self.last_ticket += 1
        self._tickets[self.last_ticket] = None
        return self.last_ticket

    def end(self, ticket: int) -> None:
        """Remove a ticket whose copy or write has ended."""
        del self._tickets[ticket]

    @property
    def room(self) -> int:
        """The number of further chunks that may wait."""
        return self._limit - self.length

    def has_room(self, key: ChunkKey) -> bool:
        """Return whether a chunk may wait. If not, count it as dropped."""
        if self.room < 1:
            self.drop("the write queue is full", key)
        return self.room > 0

    def enter(self, key: ChunkKey) -> list[Tier]:
        """Queue a chunk for the tiers that accept one now, and return these tiers."""
        takers: list[Tier] = []
        if not self._tiers or not self.has_room(key):
            return takers
        for tier in self._tiers:
            if tier.usable and self._waiting[tier.name] < self._share:
                takers.append(tier)
            else:
                self.drop(f"tier {tier.name} is {'behind' if tier.usable else 'not usable'}", key, tier)
        self._waiting.update([tier.name for tier in takers])
        return takers

    def done(self, tier: Tier, meta: RecordMeta, outcome: Written | None, *, queued: bool) -> None:
        """Record the `outcome` of writing a record to a tier, or None if the tier failed."""
        self._waiting[tier.name] -= queued
        if outcome is Written.STORED:
            self.writes[tier.name] += 1
            self.bytes[tier.name, "write"] += meta.offset(meta.parts)
        elif outcome is not Written.PRESENT:
            self.dropped += outcome is Written.REFUSED
            self._note_missed(tier, meta.key)

    def drop(self, why: str, key: ChunkKey, *tiers: Tier) -> None:
        """Count a chunk that is not written to these tiers. Without `tiers`, it is written to no tier."""
        self.dropped += 1
        for tier in tiers or self._tiers:
            self._note_missed(tier, key)
        text = f"{why}: chunks are not written there, and are lost if they are evicted before the end"
        self.complaints.append((" ".join(["writes", *(tier.name for tier in tiers)]), text))

    def _note_missed(self, tier: Tier, key: ChunkKey) -> None:
        missed = self.missed[tier.name]
        missed.add(key)
        if len(missed) > self._remembered:  # Chunks that have left memory cannot be written at shutdown.
            missed &= set().union(*(level.ledger.keys() for level in self._levels))
