"""The eviction order of a place: the least recently used entry first, with a share reserved for documents.

A share of each place belongs to documents. While documents do not exceed it, other entries are evicted before them. A
pinned entry counts as a document. It is not evicted while pinned entries do not exceed the share. In memory over a
disk, pinned entries are evicted if no other entry is left.

In a cache server each entry has an owner, a model and a tenant. The oldest entry stays if its owner does not exceed its
fair share (`fairness.py`). The oldest entry of an owner that exceeds its share is evicted instead.
"""

import heapq
import itertools
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Hashable, Iterator, Sequence
from enum import IntEnum
from typing import Generic, TypeVar

from lmc.keys import RecordKind
from lmc.storage.fairness import FairShares, Owner

T = TypeVar("T", bound=Hashable)


class Standing(IntEnum):  # Hashing a plain `Enum` took a tenth of the time of a store's bookkeeping.
    """How an entry is protected from eviction."""

    OTHER = 0
    DOCUMENT = 1
    PINNED = 2

    @classmethod
    def of(cls, kind: RecordKind, *, pinned: bool) -> "Standing":
        """Return the standing of a record of this kind."""
        return cls.PINNED if pinned else cls.DOCUMENT if kind is RecordKind.DOCUMENT else cls.OTHER


class EvictionOrder(Generic[T]):
    """The entries of a place that may be evicted now. All operations are O(1), except an occasional fair choice."""

    def __init__(self, share: float = 0.0, *, pins_yield: bool = False, fair: FairShares | None = None) -> None:
        """Create an empty order.

        `share` is the amount that belongs to documents, in the unit of `count`: slots of memory, or bytes of a disk.
        With `pins_yield`, pinned entries are evicted if no other entry is left, because a tier also has them. With
        `fair`, each owner has a fair share.
        """
        self._share, self._pins_yield, self.fair = share, pins_yield, fair
        self._taken = [0.0] * len(Standing)
        self._queues: dict[Standing, OrderedDict[T, int]] = {standing: OrderedDict() for standing in Standing}
        self._owned: defaultdict[Owner, dict[Standing, OrderedDict[T, int]]] = defaultdict(
            lambda: {standing: OrderedDict() for standing in Standing}
        )
        self._entries: dict[T, tuple[Standing, Owner | None]] = {}
        self._clock = itertools.count(1)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, entry: T) -> bool:
        return entry in self._entries

    def __iter__(self) -> Iterator[T]:
        """Return all entries, least recently used first, regardless of their standing."""
        aged = itertools.chain.from_iterable(queue.items() for queue in self._queues.values())
        return iter([entry for entry, _ in sorted(aged, key=lambda item: item[1])])

    def evictable(self, owners: Collection[Owner]) -> Iterator[T]:
        """Yield the entries of `owners` that are not pinned, least recently used first, without copying them."""
        of_owners = [self._owned[owner] for owner in owners if owner in self._owned]
        queues = [queues[standing].items() for queues in of_owners for standing in (Standing.OTHER, Standing.DOCUMENT)]
        return (entry for entry, _ in heapq.merge(*queues, key=lambda item: item[1]))

    def count(self, standing: Standing, change: float) -> None:
        """Add `change` to the amount that entries of this standing take. Entries in use count too."""
        self._taken[standing] += change

    def own(self, owner: Owner | None, change: float) -> None:
        """Add `change` to the amount that an owner's entries take, in use or not."""
        if self.fair is not None and owner is not None:
            self.fair.count(owner, change)

    def move(self, entry: T, before: Standing, standing: Standing, size: float) -> None:
        """Change the standing of an entry from `before` to `standing`, and move its `size` between their counts.

        An entry that may be evicted now must have the standing `before`. Several entries must be moved in the order of
        their last use, because the move keeps that order.
        """
        if before is standing:
            return
        self.count(before, -size)
        self.count(standing, size)
        queued, owner = self._entries.get(entry, (standing, None))
        if queued is not standing:
            self._queues[standing][entry] = self._queues[queued].pop(entry)
            if owner is not None:
                self._owned[owner][standing][entry] = self._owned[owner][queued].pop(entry)
            self._entries[entry] = standing, owner

    def add(
        self, entry: T, standing: Standing = Standing.OTHER, *, owner: Owner | None = None, first: bool = False
    ) -> None:
        """Make an entry evictable: as the last of its standing, or with `first` before all other entries."""
        at = -next(self._clock) if first else next(self._clock)
        self._entries[entry] = standing, owner
        for queue in self._queues_of(standing, owner):
            queue[entry] = at
            if first:
                queue.move_to_end(entry, last=False)
        self._use(owner)

    def remove(self, entry: T) -> None:
        """Make an entry not evictable."""
        standing, owner = self._entries.pop(entry)
        for queue in self._queues_of(standing, owner):
            del queue[entry]
        if owner is not None and not any(self._owned[owner].values()):
            del self._owned[owner]

    def touch(self, entry: T) -> None:
        """Record a use of an entry."""
        standing, owner = self._entries[entry]
        at = next(self._clock)
        for queue in self._queues_of(standing, owner):
            queue[entry] = at
            queue.move_to_end(entry)
        self._use(owner)

    def first(self) -> T | None:
        """Return the next entry to evict, or None if no entry may be evicted."""
        pinned = self._taken[Standing.PINNED]
        evictable = [Standing.OTHER]
        if self._taken[Standing.DOCUMENT] + pinned > self._share:
            evictable.append(Standing.DOCUMENT)
        if pinned > self._share:
            evictable.append(Standing.PINNED)
        oldest = _oldest(self._queues, evictable)
        if oldest is None:  # Only documents and pinned entries within the share are left, if any.
            oldest = _oldest(self._queues, [Standing.DOCUMENT])
            return _oldest(self._queues, [Standing.PINNED]) if oldest is None and self._pins_yield else oldest
        _, owner = self._entries[oldest]
        if self.fair is None or owner is None or self.fair.above(owner):
            return oldest
        found = (_oldest(self._owned[greedy], evictable) for greedy in self.fair.greediest() if greedy in self._owned)
        return next((entry for entry in found if entry is not None), oldest)

    def _use(self, owner: Owner | None) -> None:
        if self.fair is not None and owner is not None:
            self.fair.use(owner)

    def _queues_of(self, standing: Standing, owner: Owner | None) -> tuple[OrderedDict[T, int], ...]:
        queue = self._queues[standing]
        return (queue, self._owned[owner][standing]) if owner is not None else (queue,)


def _oldest(queues: dict[Standing, OrderedDict[T, int]], standings: Sequence[Standing]) -> T | None:
    if len(standings) == 1:  # the common case: documents take less than their share
        return next(iter(queues[standings[0]]), None)
    heads = [next(iter(queue.items())) for standing in standings if (queue := queues[standing])]
    return min(heads, key=lambda head: head[1])[0] if heads else None
