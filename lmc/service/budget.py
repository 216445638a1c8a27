"""The budget of a cache server: how much memory its arenas may take, and which of them gives some to others."""

import threading
from collections import Counter

from lmc.service.sizes import Sizes
from lmc.shapes import MIB
from lmc.storage.locks import Rank, new_lock

MOVED_AT_ONCE = 64 * MIB  # from one arena to another


class Budget:
    """How many bytes of memory all arenas may take, and how many each takes."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.taken: Counter[Sizes] = Counter()
        self.wanting: set[Sizes] = set()  # arenas that were refused memory
        self.refused = threading.Event()
        self._lock = new_lock(Rank.LEAF)

    def take(self, sizes: Sizes) -> bool:
        """Take the bytes of a slot; return whether there were so many."""
        with self._lock:
            fits = self.taken.total() + sizes.slot_bytes <= self.size
            if fits:
                self.taken[sizes] += sizes.slot_bytes
                self.wanting.discard(sizes)
            elif self._below_share(sizes):
                self.wanting.add(sizes)
        if not fits:
            self.refused.set()
        return fits

    def count(self, sizes: Sizes, slots: int) -> None:
        """Count the bytes of so many slots more, or of fewer. An arena has a share from the first call on."""
        with self._lock:
            self.taken[sizes] += slots * sizes.slot_bytes

    def owing(self) -> tuple[Sizes, int] | None:
        """Return the arena that should give slots to others, and how many; None if none wants any, or none has to."""
        with self._lock:
            wanted = max((sizes.slot_bytes for sizes in self.wanting if self._below_share(sizes)), default=0)
            more = min(max(MOVED_AT_ONCE, wanted), self.size) - (self.size - self.taken.total())
            sizes, taken = max(self.taken.items(), key=lambda item: item[1], default=(None, 0))
            over = taken - self.size // max(1, len(self.taken))
            if not wanted or more <= 0 or over <= 0 or sizes is None:
                self.wanting.clear()
                return None
            return sizes, -(-min(more, over) // sizes.slot_bytes)

    def _below_share(self, sizes: Sizes) -> bool:
        return self.taken[sizes] + sizes.slot_bytes <= self.size // max(1, len(self.taken))
