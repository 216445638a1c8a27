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
            with self._mutex:
                self.failed[tier.name] += 1
                failures = self.failed[tier.name]
            self.complain(tier.name, f"tier {tier.name}: {error}; treated as a miss ({failures} failures so far)")
            return None

    def complain(self, about: str, text: str) -> None:
        """Log a warning, unless there was one about the same a short while ago."""
        now = time.monotonic()
        with self._mutex:
            silent = now - self._complained.get(about, -COMPLAINT_SECONDS) < COMPLAINT_SECONDS
            if not silent:
                self._complained[about] = now
        if not silent:
            log.warning("%s", text)
