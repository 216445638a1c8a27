"""The budget of a cache server: how much memory its arenas may take, and which arena gives memory to others."""

import threading
from collections import Counter
from collections.abc import Collection

from lmc.shapes import MIB
from lmc.storage.chunk_layout import ChunkLayout
from lmc.storage.locks import Rank, new_lock

MOVED_AT_ONCE = 64 * MIB  # memory that moves from one arena to others in one step


class Budget:
    """Counts the bytes of memory of each arena against the limit for all arenas."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.taken: Counter[ChunkLayout] = Counter()
        self._users: Counter[ChunkLayout] = Counter()  # connections of clients
        self.wanting: set[ChunkLayout] = set()  # arenas whose request for memory was refused
        self.refused = threading.Event()
        self._lock = new_lock(Rank.LEAF)

    def take(self, layout: ChunkLayout, *, ahead: bool = False) -> bool:
        """Allocate the bytes of one slot from the budget; return whether they were available.

        With `ahead`, the slot is not used yet, and a refusal takes no memory from other arenas.
        """
        with self._lock:
            fits = self.taken.total() + layout.slot_bytes <= self.size
            wants = not fits and not ahead and layout not in self.wanting and self._below_share(layout)
            if fits:
                self.taken[layout] += layout.slot_bytes
                self.wanting.discard(layout)
            elif wants:
                self.wanting.add(layout)
        if wants:
            self.refused.set()
        return fits

    def use(self, layout: ChunkLayout, users: int) -> None:
        """Add `users`, which may be negative, to an arena's clients. Only arenas with clients have a share."""
        with self._lock:
            self._users[layout] += users

    def users(self, layout: ChunkLayout) -> int:
        """Return the number of connections of clients with an arena."""
        return self._users[layout]

    def forget(self, layout: ChunkLayout) -> None:
        """Give back all memory of a closed arena."""
        with self._lock:
            del self.taken[layout], self._users[layout]
            self.wanting.discard(layout)

    def count(self, layout: ChunkLayout, slots: int) -> None:
        """Add the bytes of `slots` slots, which may be negative, to an arena. A closed arena gives no slots back."""
        with self._lock:
            if slots >= 0 or layout in self.taken:
                self.taken[layout] += slots * layout.slot_bytes

    def owing(self, immovable: Collection[ChunkLayout] = ()) -> tuple[ChunkLayout, int] | None:
        """Return the arena that should give slots to others, and the number of slots.

        Returns None if no arena requests memory, or no arena has to give any. Arenas in `immovable` hold all their
        slots, and have nothing to give.
        """
        with self._lock:
            requested = max((layout.slot_bytes for layout in self.wanting if self._below_share(layout)), default=0)
            missing = min(max(MOVED_AT_ONCE, requested), self.size) - (self.size - self.taken.total())
            above = {each: used - self._share(each) for each, used in self.taken.items() if each not in immovable}
            layout = max(above, key=above.__getitem__, default=None)
            if not requested or missing <= 0 or layout is None or above[layout] <= 0:
                self.wanting.clear()
                return None
            return layout, -(-min(missing, above[layout]) // layout.slot_bytes)

    def _share(self, layout: ChunkLayout) -> int:
        """Return the bytes that an arena may keep when others request memory: an equal share, or 0 without clients."""
        users = sum(count > 0 for count in self._users.values())
        return self.size // max(1, users) if self._users[layout] > 0 else 0

    def _below_share(self, layout: ChunkLayout) -> bool:
        return self.taken[layout] + layout.slot_bytes <= self._share(layout)
