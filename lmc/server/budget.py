"""The budget of a cache server: how much memory its arenas may take, and which of them gives some to others."""

import threading
from collections import Counter
from collections.abc import Collection

from lmc.server.sizes import Sizes
from lmc.shapes import MIB
from lmc.storage.locks import Rank, new_lock

MOVED_AT_ONCE = 64 * MIB  # from one arena to another


class Budget:
    """How many bytes of memory all arenas may take, and how many each takes."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.taken: Counter[Sizes] = Counter()
        self._users: Counter[Sizes] = Counter()  # clients
        self.wanting: set[Sizes] = set()  # arenas that were refused memory
        self.refused = threading.Event()
        self._lock = new_lock(Rank.LEAF)

    def take(self, sizes: Sizes, *, ahead: bool = False) -> bool:
        """Take the bytes of a slot, `ahead` of its use or because it is used now; return whether there were so many."""
        with self._lock:
            fits = self.taken.total() + sizes.slot_bytes <= self.size
            wants = not fits and not ahead and sizes not in self.wanting and self._below_share(sizes)
            if fits:
                self.taken[sizes] += sizes.slot_bytes
                self.wanting.discard(sizes)
            elif wants:
                self.wanting.add(sizes)
        if wants:
            self.refused.set()
        return fits

    def use(self, sizes: Sizes, users: int) -> None:
        """Note that an arena has so many clients more, or fewer. Only arenas with clients have a share."""
        with self._lock:
            self._users[sizes] += users

    def users(self, sizes: Sizes) -> int:
        """Return how many connections clients have with an arena."""
        return self._users[sizes]

    def used(self, sizes: Sizes) -> bool:
        """Return whether an arena has clients."""
        return self._users[sizes] > 0

    def forget(self, sizes: Sizes) -> None:
        """Give back everything that an arena has, which is closed."""
        with self._lock:
            del self.taken[sizes], self._users[sizes]
            self.wanting.discard(sizes)

    def count(self, sizes: Sizes, slots: int) -> None:
        """Count the bytes of so many slots more, or of fewer. An arena that was forgotten has nothing to give back."""
        with self._lock:
            if slots >= 0 or sizes in self.taken:
                self.taken[sizes] += slots * sizes.slot_bytes

    def owing(self, held: Collection[Sizes] = ()) -> tuple[Sizes, int] | None:
        """Return the arena that should give slots to others, and how many; None if none wants any, or none has to.

        Those of which everything is `held` have nothing to give.
        """
        with self._lock:
            wanted = max((sizes.slot_bytes for sizes in self.wanting if self._below_share(sizes)), default=0)
            more = min(max(MOVED_AT_ONCE, wanted), self.size) - (self.size - self.taken.total())
            above = {sizes: taken - self._share(sizes) for sizes, taken in self.taken.items() if sizes not in held}
            sizes = max(above, key=above.__getitem__, default=None)
            if not wanted or more <= 0 or sizes is None or above[sizes] <= 0:
                self.wanting.clear()
                return None
            return sizes, -(-min(more, above[sizes]) // sizes.slot_bytes)

    def _share(self, sizes: Sizes) -> int:
        """Return how many bytes an arena may keep when others want some: an equal share, if it has clients."""
        users = sum(count > 0 for count in self._users.values())
        return self.size // max(1, users) if self._users[sizes] > 0 else 0

    def _below_share(self, sizes: Sizes) -> bool:
        return self.taken[sizes] + sizes.slot_bytes <= self._share(sizes)
