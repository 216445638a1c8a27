"""The order in which a place evicts entries: the least recently used one first, but documents have a share of it.

A share of each place belongs to documents. While they take no more than that, other entries are evicted before them. An
entry that somebody has pinned counts as a document, and is not evicted while pinned ones take no more than the share.
In memory over a disk, pinned entries are evicted if nothing else is left.
"""

import heapq
import itertools
from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterator
from enum import Enum
from typing import Generic, TypeVar

from lmc.keys import RecordKind

T = TypeVar("T", bound=Hashable)


class Standing(Enum):
    """What protects an entry."""

    OTHER = "other"
    DOCUMENT = "document"
    PINNED = "pinned"

    @classmethod
    def of(cls, kind: RecordKind | None, *, pinned: bool) -> "Standing":
        """Return the standing of a record of this kind."""
        return cls.PINNED if pinned else cls.DOCUMENT if kind is RecordKind.DOCUMENT else cls.OTHER


class EvictionOrder(Generic[T]):
    """The entries of a place that may be evicted now. All operations are O(1)."""

    def __init__(self, share: float = 0.0, *, pins_yield: bool = False) -> None:
        """`share` is how much belongs to documents, in the unit of `count`: slots of memory, or bytes of a disk.

        With `pins_yield`, pinned entries are evicted if there is nothing else, because they are on a tier as well.
        """
        self._share, self._pins_yield = share, pins_yield
        self._taken: Counter[Standing] = Counter()
        self._queues: dict[Standing, OrderedDict[T, int]] = {standing: OrderedDict() for standing in Standing}
        self._standing: dict[T, Standing] = {}
        self._clock = itertools.count(1)

    def __len__(self) -> int:
        return len(self._standing)

    def __contains__(self, entry: T) -> bool:
        return entry in self._standing

    def __iter__(self) -> Iterator[T]:
        """Return the entries by the time of their last use, whatever protects them."""
        aged = itertools.chain.from_iterable(queue.items() for queue in self._queues.values())
        return iter([entry for entry, _ in sorted(aged, key=lambda item: item[1])])

    def evictable(self) -> Iterator[T]:
        """Yield the entries that are not pinned by the time of their last use, without copying them."""
        queues = [queue.items() for standing, queue in self._queues.items() if standing is not Standing.PINNED]
        return (entry for entry, _ in heapq.merge(*queues, key=lambda item: item[1]))

    def count(self, standing: Standing, change: float) -> None:
        """Note that entries of this standing take so much more or less. Entries that are in use count too."""
        self._taken[standing] += change  # type: ignore[assignment]

    def move(self, entry: T, before: Standing, standing: Standing, size: float) -> None:
        """Change the standing of an entry, and count its `size` under the new one instead of the one `before`.

        Several have to be moved in the order of their use, which they keep.
        """
        self.count(before, -size)
        self.count(standing, size)
        queued = self._standing.get(entry, standing)
        if queued is not standing:
            self._queues[standing][entry] = self._queues[queued].pop(entry)
            self._standing[entry] = standing

    def add(self, entry: T, standing: Standing = Standing.OTHER, *, first: bool = False) -> None:
        """Let an entry be evicted as the last one of its standing, or before all others."""
        queue = self._queues[standing]
        queue[entry] = -next(self._clock) if first else next(self._clock)
        self._standing[entry] = standing
        if first:
            queue.move_to_end(entry, last=False)

    def remove(self, entry: T) -> None:
        """Let an entry not be evicted."""
        del self._queues[self._standing.pop(entry)][entry]

    def touch(self, entry: T) -> None:
        """Note a use of an entry."""
        queue = self._queues[self._standing[entry]]
        queue[entry] = next(self._clock)
        queue.move_to_end(entry)

    def first(self) -> T | None:
        """Return the entry that is to be evicted next; None if there is none."""
        pinned = self._taken[Standing.PINNED]
        evictable = [Standing.OTHER]
        if self._taken[Standing.DOCUMENT] + pinned > self._share:
            evictable.append(Standing.DOCUMENT)
        if pinned > self._share:
            evictable.append(Standing.PINNED)
        heads = [next(iter(queue.items())) for standing in evictable if (queue := self._queues[standing])]
        if heads:
            return min(heads, key=lambda head: head[1])[0]
        last = next(iter(self._queues[Standing.DOCUMENT]), None)  # There is nothing else.
        return next(iter(self._queues[Standing.PINNED]), None) if last is None and self._pins_yield else last
