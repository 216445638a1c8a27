"""Locks that check the order in which they are taken. Import this before any module that makes locks.

lmc's own locks are plain, because the check would take a tenth of the time in which a chunk of 1 MiB is copied.
"""

import threading
from collections import Counter
from typing import ClassVar

from lmc.storage import locks
from lmc.storage.locks import Rank

_held = threading.local()  # `ranks`: those of the locks that a thread holds


class RankedLock:
    """A lock that is not re-entrant, and asserts the order of ranks."""

    made: ClassVar[Counter[Rank]] = Counter()  # the number of locks by rank

    def __init__(self, rank: Rank) -> None:
        self._rank, self._lock = rank, threading.Lock()
        self.made[rank] += 1

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


locks.new_lock = RankedLock  # type: ignore[assignment]
