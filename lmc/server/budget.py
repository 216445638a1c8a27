"""The budget of a cache server: how much memory its arenas may take, and which arena gives memory to others."""

import threading
from collections import Counter
from collections.abc import Collection

from lmc.server.sizes import Sizes
from lmc.shapes import MIB
from lmc.storage.locks import Rank, new_lock

MOVED_AT_ONCE = 64 * MIB  # memory that moves from one arena to others in one step


class Budget:
    """Counts the bytes of memory of each arena against the limit for all arenas."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.taken: Counter[Sizes] = Counter()
        self._users: Counter[Sizes] = Counter()  # connections of clients
        self.wanting: set[Sizes] = set()  # arenas whose request for memory was refused
        self.refused = threading.Event()
        self._lock = new_lock(Rank.LEAF)

    def take(self, sizes: Sizes, *, ahead: bool = False) -> bool:
        """Allocate the bytes of one slot from the budget; return whether they were available.

        With `ahead`, the slot is not used yet, and a refusal takes no memory from other arenas.
        """
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
        """Add `users`, which may be negative, to an arena's clients. Only arenas with clients have a share."""
        with self._lock:
            self._users[sizes] += users

    def users(self, sizes: Sizes) -> int:
        """Return the number of connections of clients with an arena."""
        return self._users[sizes]

    def used(self, sizes: Sizes) -> bool:
        """Return whether an arena has clients."""
        return self._users[sizes] > 0

    def forget(self, sizes: Sizes) -> None:
        """Give back all memory of a closed arena."""
        with self._lock:
            del self.taken[sizes], self._users[sizes]
            self.wanting.discard(sizes)

    def count(self, sizes: Sizes, slots: int) -> None:
        """Add the bytes of `slots` slots, which may be negative, to an arena. Forgotten arenas have nothing to give."""
        with self._lock:
            if slots >= 0 or sizes in self.taken:
                self.taken[sizes] += slots * sizes.slot_bytes

    def owing(self, immovable: Collection[Sizes] = ()) -> tuple[Sizes, int] | None:
        """Return the arena that should give slots to others, and the number of slots.

        Returns None if no arena requests memory, or no arena has to give any. Arenas in `immovable` hold all their
        slots, and have nothing to give.
        """
        with self._lock:
            requested = max((sizes.slot_bytes for sizes in self.wanting if self._below_share(sizes)), default=0)
            missing = min(max(MOVED_AT_ONCE, requested), self.size) - (self.size - self.taken.total())
            above = {sizes: used - self._share(sizes) for sizes, used in self.taken.items() if sizes not in immovable}
            sizes = max(above, key=above.__getitem__, default=None)
            if not requested or missing <= 0 or sizes is None or above[sizes] <= 0:
                self.wanting.clear()
                return None
            return sizes, -(-min(missing, above[sizes]) // sizes.slot_bytes)

    def _share(self, sizes: Sizes) -> int:
        """Return the bytes that an arena may keep when others request memory: an equal share, or 0 without clients."""
        users = sum(count > 0 for count in self._users.values())
        return self.size // max(1, users) if self._users[sizes] > 0 else 0

    def _below_share(self, sizes: Sizes) -> bool:
        return self.taken[sizes] + sizes.slot_bytes <= self._share(sizes)
