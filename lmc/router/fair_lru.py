"""Things that were used last, as many as fit, of several owners: who has most of the room gives some to others.

An owner that fills the room displaces its own things, and never those of owners that have less.
"""

import heapq
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
SPARE = 64  # entries of the heap that are out of date, beside those of the owners


class FairLru(Generic[K, V]):
    """A table with a room. Each of its things has an owner and a weight."""

    def __init__(self, room: float) -> None:
        """All things together weigh `room` at most."""
        self._total, self._used = room, 0.0
        self._things: dict[str, OrderedDict[K, tuple[float, V]]] = {}
        self._weights: dict[str, float] = {}  # of all things of an owner
        self._heaviest: list[tuple[float, str]] = []  # a heap of negative weights, some of which are out of date

    @property
    def room(self) -> float:
        """How much more fits."""
        return self._total - self._used

    @property
    def next_out(self) -> V | None:
        """The value of the thing that leaves next when there is no room; None if there is nothing."""
        if not self._things:
            return None
        return next(iter(self._things[self._of_most()].values()))[1]

    def get(self, owner: str, key: K) -> V | None:
        """Return the value of a thing; None if it is not here."""
        things = self._things.get(owner)
        return things[key][1] if things and key in things else None

    def put(self, owner: str, key: K, weight: float, value: V) -> None:
        """Note that a thing is used now."""
        things = self._things.setdefault(owner, OrderedDict())
        before, _ = things.pop(key, (0.0, value))
        things[key] = weight, value
        self._weigh(owner, weight - before)
        self._shrink()

    def drop(self, owner: str, key: K) -> None:
        """Take a thing out, if it is here."""
        if key in (things := self._things.get(owner, OrderedDict())):
            self._weigh(owner, -things.pop(key)[0])

    def drop_values(self, value: V) -> None:
        """Take out all things with a value."""
        for owner, things in list(self._things.items()):
            for key in [key for key, (_, found) in things.items() if found == value]:
                self.drop(owner, key)

    def resize(self, room: float) -> None:
        """Let all things together weigh `room` at most."""
        self._total = room
        self._shrink()

    def _weigh(self, owner: str, more: float) -> None:
        self._used += more
        self._weights[owner] = self._weights.get(owner, 0.0) + more
        if self._things[owner]:
            heapq.heappush(self._heaviest, (-self._weights[owner], owner))
        else:  # Sums of fractions are not exact, and nothing weighs nothing.
            self._used -= self._weights.pop(owner)
            del self._things[owner]
        if len(self._heaviest) > 2 * len(self._weights) + SPARE:
            self._heaviest = [(-weight, owner) for owner, weight in self._weights.items()]
            heapq.heapify(self._heaviest)

    def _shrink(self) -> None:
        while self._used > self._total and self._things:
            owner = self._of_most()
            self.drop(owner, next(iter(self._things[owner])))

    def _of_most(self) -> str:
        """Return the owner whose things weigh most."""
        while (found := self._heaviest[0]) and self._weights.get(found[1]) != -found[0]:
            heapq.heappop(self._heaviest)
        return found[1]

    def __len__(self) -> int:
        return sum(map(len, self._things.values()))
