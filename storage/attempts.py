"""Where a tier's failure becomes a miss: the store's only door to its tiers."""

import logging
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import TypeVar

from lmc.errors import CorruptRecord
from lmc.storage.stats import Verb
from lmc.storage.tier import Tier

log = logging.getLogger(__name__)
T = TypeVar("T")

COMPLAINT_SECONDS = 60.0  # between two log lines about the same tier


class Attempts:
    """Runs operations of tiers and times them; a failure is counted, logged once in a while, and None."""

    def __init__(self) -> None:
        self.failed: Counter[str] = Counter()  # by tier
        self.corrupt: Counter[str] = Counter()
        self.seconds: defaultdict[tuple[str, Verb], float] = defaultdict(float)
        self._complained: dict[str, float] = {}
        self._mutex = threading.Lock()

    def __call__(self, tier: Tier, verb: Verb, operation: Callable[[], T]) -> T | None:
        """What `operation` answered, or None if the tier failed at it."""
        started = time.perf_counter()
        try:
            return operation()
        except (OSError, CorruptRecord) as error:
            if verb == "read" and isinstance(error, FileNotFoundError):
                return None  # it was evicted while it was read: an answer
            with self._mutex:
                self.failed[tier.name] += 1
                self.corrupt[tier.name] += isinstance(error, CorruptRecord)
                failures = self.failed[tier.name]
            self.complain(tier.name, f"tier {tier.name}: {error}; treated as a miss ({failures} failures so far)")
            return None
        finally:
            with self._mutex:
                self.seconds[tier.name, verb] += time.perf_counter() - started

    def complain(self, about: str, text: str) -> None:
        """Log a warning, unless there was one about the same a short while ago."""
        now = time.monotonic()
        with self._mutex:
            silent = now - self._complained.get(about, -COMPLAINT_SECONDS) < COMPLAINT_SECONDS
            if not silent:
                self._complained[about] = now
        if not silent:
            log.warning("%s", text)
