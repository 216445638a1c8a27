"""Fair shares of a place: of models by their weights, and within each model of its tenants by theirs.

An owner is a model and a tenant. One that has stored or used nothing for a long time has no share, so that nothing is
kept for somebody who does not come back.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from heapq import nlargest
from typing import Protocol

Owner = tuple[str, str]  # the name of a model, and the digest of a tenant's cache salt

EVENTS = 256  # after which the shares are worked out again
LOOKED_AT = 256  # owners, of which one with too much is wanted
IDLE = 4  # An owner is idle when so many times more has happened since than there are entries in the place.


class Weights(Protocol):
    """How much the shares of models and of tenants weigh. It is 1 for those that nobody has said anything about."""

    def of_model(self, model: str) -> float:
        """Return the weight of a model among models."""

    def of_tenant(self, model: str, tenant: str) -> float:
        """Return the weight of a tenant among the tenants of a model."""


class FairShares:
    """What each owner has of one place, and what would be fair. Guarded by the lock of the place."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self._taken: Counter[Owner] = Counter()  # in the unit of the place: slots, or bytes
        self._entries = self._events = 0
        self._used: dict[Owner, int] = {}  # when, in events
        self._fair: Mapping[Owner, float] = {}
        self._greedy: list[Owner] = []  # those that had the most times their share
        self._due = 0  # the event at which shares are worked out again

    def count(self, owner: Owner, change: float) -> None:
        """Note that an entry of an owner takes so much, or, with a negative number, takes it no more."""
        self._entries += 1 if change > 0 else -1
        self._taken[owner] += change  # type: ignore[assignment]
        if self._taken[owner] <= 0:
            del self._taken[owner]

    def use(self, owner: Owner) -> None:
        """Note that an owner uses something."""
        self._events += 1
        self._used[owner] = self._events

    def above(self, owner: Owner) -> bool:
        """Return whether an owner has more than its fair share."""
        self._work_out()
        return self._taken[owner] > self._fair.get(owner, 0.0)

    def greediest(self) -> Iterator[Owner]:
        """Yield owners that have more than their fair shares, those that had the most times their share first."""
        self._work_out()
        return (owner for owner in self._greedy if self.above(owner))

    def owners(self) -> list[Owner]:
        """Return all owners that have something."""
        return list(self._taken)

    def change(self) -> None:
        """Work the shares out anew, because weights have changed."""
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
