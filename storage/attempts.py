"""Where a tier's failure becomes a miss: the store's only door to its tiers."""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

from lmc.errors import CorruptRecord
from lmc.storage.tier import Tier

log = logging.getLogger(__name__)
T = TypeVar("T")

COMPLAINT_SECONDS = 60.0  # between two log lines about the same tier


class Attempts:
    """Runs operations of tiers; a failure is counted, logged once in a while, and None."""

    def __init__(self) -> None:
        self.failed: Counter[str] = Counter()  # by tier
        self._complained: dict[str, float] = {}
        self._mutex = threading.Lock()

    def __call__(self, tier: Tier, operation: Callable[[], T]) -> T | None:
        """What `operation` answered, or None if the tier failed at it."""
        try:
            return operation()
        except (OSError, CorruptRecord) as error:
            now = time.monotonic()
            with self._mutex:
                self.failed[tier.name] += 1
                failures = self.failed[tier.name]
                silent = now - self._complained.get(tier.name, -COMPLAINT_SECONDS) < COMPLAINT_SECONDS
                if not silent:
                    self._complained[tier.name] = now
            if not silent:
                log.warning("tier %s: %s; treated as a miss (%d failures so far)", tier.name, error, failures)
            return None
