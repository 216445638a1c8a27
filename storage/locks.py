"""The order of the storage layer's locks: a thread that holds a lock may take only locks of a higher rank.

Tests replace `new_lock` with a version whose locks check this rule.
"""

import threading
from enum import IntEnum


class Rank(IntEnum):
    """The ranks of locks, in the order in which a thread may take them."""

    STATE = 1  # the store's bookkeeping
    TIER = 2  # a tier's own index
    LEAF = 3  # counters and the change log; a holder takes no other lock


def new_lock(rank: Rank) -> threading.Lock:
    """Return a new lock of this rank."""
    return threading.Lock()
