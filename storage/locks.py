"""The order of the storage layer's locks: a thread that holds a lock may take only locks of a higher rank.

Tests replace `new_lock` by one whose locks check that.
"""

import threading
from enum import IntEnum


class Rank(IntEnum):
    """The ranks of locks, in the order in which they may be taken."""

    STATE = 1  # the store's bookkeeping
    TIER = 2  # a tier's own index
    LEAF = 3  # counters and the change log: nothing is called while one of these is held


def new_lock(rank: Rank) -> threading.Lock:
    """Return a lock of this rank."""
    return threading.Lock()
