"""The order of the storage layer's locks: a thread that holds a lock may take only locks of a higher rank."""

import threading
from enum import IntEnum


class Rank(IntEnum):
    """The ranks of locks, in the order in which they may be taken."""

    STATE = 1  # the store's bookkeeping
    TIER = 2  # a tier's own index
    LEAF = 3  # counters and the change log: nothing is called while one of these is held


class _HeldRanks(threading.local):
    def __init__(self) -> None:
        self.ranks: list[Rank] = []


_held = _HeldRanks()


class RankedLock:
    """A lock that is not re-entrant, and asserts the order of ranks."""

    def __init__(self, rank: Rank) -> None:
        self._rank, self._lock = rank, threading.Lock()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """As `threading.Lock.acquire`."""
        wrong = blocking and any(held >= self._rank for held in _held.ranks)
        assert not wrong, f"a lock of rank {self._rank.name} is taken while {_held.ranks} are held"
        taken = self._lock.acquire(blocking, timeout)
        if taken:
            _held.ranks.append(self._rank)
        return taken

    def release(self) -> None:
        """As `threading.Lock.release`."""
        _held.ranks.remove(self._rank)
        self._lock.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()
