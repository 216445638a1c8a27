"""The order of the storage layer's locks: a thread that holds a lock may take only locks of a higher rank.

With `LMC_CHECK_LOCKS=1`, as in lmc's own tests, every lock checks the order. Otherwise locks are plain, because the
check would take a tenth of the time in which a chunk of 1 MiB is copied.
"""

import os
import threading
from enum import IntEnum


class Rank(IntEnum):
    """The ranks of locks, in the order in which they may be taken."""

    STATE = 1  # the store's bookkeeping
    TIER = 2  # a tier's own index
    LEAF = 3  # counters and the change log: nothing is called while one of these is held


_held = threading.local()  # `ranks`: those of the locks that a thread holds


class RankedLock:
    """A lock that is not re-entrant, and asserts the order of ranks."""

    def __init__(self, rank: Rank) -> None:
        self._rank, self._lock = rank, threading.Lock()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """As `threading.Lock.acquire`."""
        held: list[Rank] = _held.__dict__.setdefault("ranks", [])
        wrong = blocking and held and max(held) >= self._rank
        assert not wrong, f"a lock of rank {self._rank.name} is taken while {held} are held"
        taken = self._lock.acquire(blocking, timeout)
        if taken:
            held.append(self._rank)
        return taken

    def release(self) -> None:
        """As `threading.Lock.release`."""
        _held.ranks.remove(self._rank)
        self._lock.release()

    __enter__ = acquire

    def __exit__(self, *_: object) -> None:
        self.release()


def new_lock(rank: Rank) -> "RankedLock | threading.Lock":
    """Return a lock of this rank."""
    return RankedLock(rank) if os.environ.get("LMC_CHECK_LOCKS") == "1" else threading.Lock()
