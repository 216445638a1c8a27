"""Whether blends pay, together with the requests that follow them.

A blend saves computing in its own request. A later turn of the conversation, or another question about the same
documents, may cost more because of it: vLLM's prefix cache would have the documents exactly, but after a blend the
later turn revises it, and the other question is computed from its start. On an engine that rests now and then,
backfill computes blends exactly before that (`backfill.py`). On an engine that never rests, conversations of several
turns cost more with blends than without them.

So both are counted, in tokens that the engine computes. While recent blends have cost more than they have saved, new
prompts are computed, except for one in `TRIAL_EVERY`: the traffic, or the engine's idle time, may have changed.

Requests that are alone in the engine are counted apart from those among others: after an hour of conversations at once,
a single request with known documents is blended as before. Tenants are counted apart, too, because each is an
application or a user with its own habits. Those with few blends are counted together: most may never have enough for a
count of their own.
"""

from cachetools import LRUCache

FIRST_BLENDS = 4  # number of blends before the counts are compared
FADE = 15 / 16  # Each blend multiplies the weight of what was counted before it by this.
TRIAL_EVERY = 16
MAX_TENANTS = 1024  # number of most recent tenants that are counted apart
MOST_COST = 2  # Costs count at most this many times what was saved, so that some trials without costs are enough.


class Balances:
    """What the recent blends of each tenant have saved and cost."""

    def __init__(self) -> None:
        self._small = Balance()  # of all tenants with few blends
        self._of_tenant: LRUCache[str, Balance] = LRUCache(MAX_TENANTS)

    def blended(self, tenant: str, saved: float) -> None:
        """Count a blend of a new prompt; see `Balance`."""
        own = self._of_tenant.setdefault(tenant, Balance())
        for balance in {own, self._deciding(tenant)}:
            balance.blended(saved)

    def followed(self, tenant: str, cost: float) -> None:
        """Count a request after a blend; see `Balance`."""
        deciding = self._deciding(tenant)
        for balance in {deciding, self._of_tenant.get(tenant, deciding)}:
            balance.followed(cost)

    def allows_blend(self, tenant: str) -> bool:
        """Return whether to blend a new prompt of a tenant with stored documents. A refused prompt counts."""
        return self._deciding(tenant).allows_blend()

    def _deciding(self, tenant: str) -> "Balance":
        own = self._of_tenant.get(tenant)
        return own if own is not None and own.decides else self._small


class Balance:
    """What some recent blends have saved and cost."""

    def __init__(self) -> None:
        self._blends = self._refused = 0
        self._saved = self._cost = 0.0  # tokens
        self._trial = False  # The next new prompt is blended, whatever was counted.

    @property
    def decides(self) -> bool:
        """Whether enough blends were counted."""
        return self._blends >= FIRST_BLENDS

    def blended(self, saved: float) -> None:
        """Count a blend of a new prompt. `saved` is the number of tokens by which it computes fewer than prefill."""
        self._blends += 1
        self._saved, self._cost = FADE * self._saved + max(0.0, saved), FADE * self._cost
        self._trial = False

    def followed(self, cost: float) -> None:
        """Count a request after a blend. `cost` is the number of tokens that it computes because of the blend."""
        self._cost = min(self._cost + cost, MOST_COST * max(self._saved, cost))

    def allows_blend(self) -> bool:
        """Return whether to blend a new prompt with stored documents. Counts refused prompts."""
        if not self.decides or self._cost <= self._saved:
            return True
        self._refused += 1
        self._trial = self._trial or self._refused % TRIAL_EVERY == 0
        return self._trial
