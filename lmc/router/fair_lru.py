"""An LRU table with weights that is fair to several owners: it evicts from the owner with the most weight.

An owner that fills the table evicts its own entries, and never those of owners that have less.
"""

import heapq
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
MAX_STALE_ENTRIES = 64  # stale heap entries that are kept before the heap is rebuilt


class FairLru(Generic[K, V]):
    """A table of limited total weight. Each entry has an owner, a weight and a value."""

    def __init__(self, room: float, evicted: Callable[[str, V], None] | None = None) -> None:
        """`room` limits the weight of all entries together. `evicted` gets the owner and value of evicted entries."""
        self._evicted = evicted
        self._total, self._used = room, 0.0
        self._entries: dict[str, OrderedDict[K, tuple[float, V]]] = {}
        self._weights: dict[str, float] = {}  # total weight by owner
        self._heaviest: list[tuple[float, str]] = []  # a heap of negative weights; some are stale

    @property
    def room(self) -> float:
        """The weight that still fits."""
        return self._total - self._used

    @property
    def next_out(self) -> V | None:
        """The value of the entry that is evicted next; None if the table is empty."""
        if not self._entries:
            return None
        return next(iter(self._entries[self._heaviest_owner()].values()))[1]

    def get(self, owner: str, key: K) -> V | None:
        """Return the value of an entry, or None."""
        entries = self._entries.get(owner)
        return entries[key][1] if entries and key in entries else None

    def put(self, owner: str, key: K, weight: float, value: V) -> None:
        """Add or replace an entry as the most recently used of its owner, and evict until all entries fit."""
        entries = self._entries.setdefault(owner, OrderedDict())
        before, _ = entries.pop(key, (0.0, value))
        entries[key] = weight, value
        self._weigh(owner, weight - before)
        self._shrink()

    def owns(self, owner: str) -> bool:
        """Return whether an owner has any entry."""
        return owner in self._entries

    def touch(self, owner: str, key: K) -> None:
        """Mark an entry as the most recently used of its owner, if it exists."""
        if key in (entries := self._entries.get(owner, OrderedDict())):
            entries.move_to_end(key)

    def drop(self, owner: str, key: K) -> None:
        """Remove an entry, if it exists."""
        if key in (entries := self._entries.get(owner, OrderedDict())):
            self._weigh(owner, -entries.pop(key)[0])

    def drop_values(self, value: V) -> None:
        """Remove all entries with a value."""
        for owner, entries in list(self._entries.items()):
            for key in [key for key, (_, stored) in entries.items() if stored == value]:
                self.drop(owner, key)

    def resize(self, room: float) -> None:
        """Change the weight limit, and evict until all entries fit."""
        self._total = room
        self._shrink()

    def _weigh(self, owner: str, change: float) -> None:
        self._used += change
        self._weights[owner] = self._weights.get(owner, 0.0) + change
        if self._entries[owner]:
            heapq.heappush(self._heaviest, (-self._weights[owner], owner))
        else:  # Sums of floats are inexact; without entries, the weight is 0.
            self._used -= self._weights.pop(owner)
            del self._entries[owner]
        if len(self._heaviest) > 2 * len(self._weights) + MAX_STALE_ENTRIES:
            self._heaviest = [(-weight, owner) for owner, weight in self._weights.items()]
            heapq.heapify(self._heaviest)

    def _shrink(self) -> None:
        while self._used > self._total and self._entries:
            owner = self._heaviest_owner()
            key, (_, value) = next(iter(self._entries[owner].items()))
            self.drop(owner, key)
            if self._evicted is not None:
                self._evicted(owner, value)

    def _heaviest_owner(self) -> str:
        """Return the owner with the most weight."""
        while (top := self._heaviest[0]) and self._weights.get(top[1]) != -top[0]:
            heapq.heappop(self._heaviest)
        return top[1]

    def __len__(self) -> int:
        return sum(map(len, self._entries.values()))
