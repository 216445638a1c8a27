"""Fair shares of a place: models share it by their weights, and the tenants of a model share its part by theirs.

An owner is a model and a tenant. An owner that has stored or used nothing for a long time has no share. So no space is
kept for a tenant that does not return.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from heapq import nlargest
from typing import Protocol

Owner = tuple[str, str]  # the name of a model, and the digest of a tenant's cache salt

EVENTS = 256  # The shares are computed again after this number of uses.
LOOKED_AT = 256  # the maximum number of owners to search for one that exceeds its share
IDLE = 4  # An owner is idle if it uses nothing during EVENTS uses, plus this number of uses per entry of the place.


class Weights(Protocol):
    """The weights of models and of tenants. A weight that is not configured is 1."""

    def of_model(self, model: str) -> float:
        """Return the weight of a model among models."""

    def of_tenant(self, model: str, tenant: str) -> float:
        """Return the weight of a tenant among the tenants of a model."""


class FairShares:
    """What each owner takes of one place, and its fair share. Guarded by the lock of the place."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self._taken: Counter[Owner] = Counter()  # in the unit of the place: slots, or bytes
        self._entries = self._events = 0
        self._used: dict[Owner, int] = {}  # the number of the event of the last use
        self._fair: Mapping[Owner, float] = {}
        self._greedy: list[Owner] = []  # owners, highest multiple of their share first
        self._due = 0  # the event at which shares are computed again

    def count(self, owner: Owner, change: float) -> None:
        """Count a new entry of an owner with the size `change`, or remove an entry with a negative `change`."""
        self._entries += 1 if change > 0 else -1
        self._taken[owner] += change  # type: ignore[assignment]
        if self._taken[owner] <= 0:
            del self._taken[owner]

    def use(self, owner: Owner) -> None:
        """Record a use by an owner."""
        self._events += 1
        self._used[owner] = self._events

    def above(self, owner: Owner) -> bool:
        """Return whether an owner exceeds its fair share."""
        self._work_out()
        return self._taken[owner] > self._fair.get(owner, 0.0)

    def greediest(self) -> Iterator[Owner]:
        """Yield the owners that exceed their fair shares, highest multiple of the share first."""
        self._work_out()
        return (owner for owner in self._greedy if self.above(owner))

    def owners(self) -> list[Owner]:
        """Return all owners that have entries."""
        return list(self._taken)

    def change(self) -> None:
        """Compute the shares again when they are next needed, because weights have changed."""
        self._due = 0

    def _work_out(self) -> None:
        if self._events < self._due:
            return
        self._due = self._events + EVENTS
        oldest = self._events - IDLE * self._entries - EVENTS
        self._used = {owner: at for owner, at in self._used.items() if at >= oldest}
        tenants: defaultdict[str, dict[Owner, float]] = defaultdict(dict)
        for model, tenant in self._used:
            tenants[model][model, tenant] = self._weights.of_tenant(model, tenant)
        models = {model: self._weights.of_model(model) for model in tenants}
        whole = sum(self._taken.values()) / (sum(models.values()) or 1.0)
        self._fair = {
            owner: whole * models[model] * weight / sum(weights.values())
            for model, weights in tenants.items()
            for owner, weight in weights.items()
        }
        times = {owner: taken / (self._fair.get(owner) or 1e-9) for owner, taken in self._taken.items()}
        self._greedy = nlargest(LOOKED_AT, times, key=times.__getitem__)
