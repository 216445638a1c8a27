"""The tier guard: the only code that turns a tier's failure into a miss. The store calls its tiers only through it."""

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import TypeVar

from lmc.errors import CorruptRecord
from lmc.storage.locks import Rank, new_lock
from lmc.storage.stats import Verb
from lmc.storage.tiers.tier import Tier

log = logging.getLogger(__name__)
T = TypeVar("T")

COMPLAINT_SECONDS = 60.0  # between two log lines about the same tier


class TierGuard:
    """Runs operations of tiers, and measures their duration.

    A failure is counted, and the result is then None. It is logged at most once a minute for each tier.
    """

    def __init__(self) -> None:
        self.failed: Counter[str] = Counter()  # by tier
        self.corrupt: Counter[str] = Counter()
        self.seconds: defaultdict[tuple[str, Verb], float] = defaultdict(float)
        self._complained: dict[str, float] = {}
        self._lock = new_lock(Rank.LEAF)

    def __call__(self, tier: Tier, verb: Verb, operation: Callable[..., T], *arguments: object) -> T | None:
        """Run `operation` and return its result, or None if the tier fails."""
        started = time.perf_counter()
        try:
            return operation(*arguments)
        except (OSError, CorruptRecord) as error:
            if verb == "read" and isinstance(error, FileNotFoundError):
                return None  # The record was evicted while it was read. This is not a failure.
            with self._lock:
                self.failed[tier.name] += 1
                self.corrupt[tier.name] += isinstance(error, CorruptRecord)
                failures = self.failed[tier.name]
            self.complain(tier.name, f"tier {tier.name}: {error}; treated as a miss ({failures} failures so far)")
            return None
        finally:
            with self._lock:
                self.seconds[tier.name, verb] += time.perf_counter() - started

    def complain(self, about: str, text: str) -> None:
        """Log a warning, unless a warning with the same subject was logged less than a minute ago."""
        now = time.monotonic()
        with self._lock:
            if now - self._complained.get(about, -COMPLAINT_SECONDS) < COMPLAINT_SECONDS:
                return
            self._complained[about] = now
        log.warning("%s", text)


def logged(work: Callable[..., T], *arguments: object, then: str = "the chunk stays where it was") -> T:
    """Run a thread's work. An unexpected error is logged with its consequence `then`, before any waiter sees it."""
    try:
        return work(*arguments)
    except Exception:
        log.exception("lmc: background work failed unexpectedly; %s", then)
        raise
