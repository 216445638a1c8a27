"""The memory of a cache server: one budget, and an arena for each geometry of chunks, which grows and shrinks.

The slab of an arena has addresses for the whole budget, and memory only for the slots in use. An arena that needs a
slot when the budget is spent evicts a chunk of its own. If it has less than its equal share, a thread takes slots from
the arena that is furthest above its share, so that the next chunks find room.
"""

import logging
import threading
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from lmc.config import Settings
from lmc.engine.tiers import coded, open_plain_tiers
from lmc.errors import NoMemory
from lmc.keys import ChunkKey
from lmc.shapes import GIB, MIB, aligned
from lmc.storage.change_log import ChangeLog
from lmc.storage.locks import Rank, new_lock
from lmc.storage.record import RecordMeta
from lmc.storage.shares import Shares
from lmc.storage.slab import Slab, memory_available
from lmc.storage.stats import WritePolicy
from lmc.storage.store import Store
from lmc.storage.tier import Tier, Wrapped

log = logging.getLogger(__name__)

MOVED_AT_ONCE = 64 * MIB  # from one arena to another


@dataclass(frozen=True, slots=True)
class Sizes:
    """What decides in which arena a chunk lies."""

    shares: Shares
    part_bytes: int
    item_bytes: int

    @property
    def slot_bytes(self) -> int:
        """Bytes of memory that a chunk takes."""
        return self.shares.parts * aligned(self.part_bytes)


class Budget:
    """How many bytes of memory all arenas may take, and how many each takes."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.taken: Counter[Sizes] = Counter()
        self.wanting: set[Sizes] = set()  # who was refused since the last look
        self.refused = threading.Event()
        self._lock = new_lock(Rank.LEAF)

    def take(self, sizes: Sizes) -> bool:
        """Take the bytes of a slot; return whether there were so many."""
        with self._lock:
            fits = self.taken.total() + sizes.slot_bytes <= self.size
            if fits:
                self.taken[sizes] += sizes.slot_bytes
            elif self._below_share(sizes):
                self.wanting.add(sizes)
        if not fits:
            self.refused.set()
        return fits

    def give(self, sizes: Sizes, slots: int) -> None:
        """Give the bytes of some slots back."""
        with self._lock:
            self.taken[sizes] -= slots * sizes.slot_bytes

    def owing(self) -> tuple[Sizes, int] | None:
        """Return who should give slots to another arena, and how many at once; None if nobody wants or has to."""
        with self._lock:
            wanted = max((sizes.slot_bytes for sizes in self.wanting if self._below_share(sizes)), default=0)
            if not wanted:
                self.wanting.clear()
                return None
            sizes, taken = self.taken.most_common(1)[0]
            over = taken - self.size // len(self.taken)
            return (sizes, min(-(-max(MOVED_AT_ONCE, wanted) // sizes.slot_bytes), -(-over // sizes.slot_bytes)))

    def _below_share(self, sizes: Sizes) -> bool:
        return self.taken[sizes] + sizes.slot_bytes <= self.size // max(1, len(self.taken))


class ProtectedKeys:
    """Chunks of pinned documents of one arena, each with how many clients want it to stay."""

    def __init__(self, store: Store) -> None:
        self._store, self._wanted, self._lock = store, Counter[ChunkKey](), threading.Lock()

    def add(self, keys: Collection[ChunkKey]) -> None:
        """Pin chunks for one client more."""
        with self._lock:
            self._wanted.update(keys)
            self._store.protect(keys, pinned=True)

    def remove(self, keys: Collection[ChunkKey]) -> None:
        """Let chunks that no other client has pinned be evicted again."""
        with self._lock:
            self._wanted.subtract(keys)
            free = [key for key in keys if not self._wanted[key]]
            for key in free:
                del self._wanted[key]
            self._store.protect(free, pinned=False)


class Arena:
    """The chunks of one geometry, of all models that have it."""

    def __init__(self, store: Store) -> None:
        self.store, self.protected = store, ProtectedKeys(store)


class Arenas:
    """All arenas of a server, which share tiers and memory."""

    def __init__(self, settings: Settings, tiers: Sequence[Tier] | None = None) -> None:
        """Open the tiers, by default those of the settings.

        Raises `TierUnusable` or `ConfigError`, or `NoMemory` if there is less memory than the budget.
        """
        self._settings, self.budget = settings, Budget(int(settings.max_local_cpu_size * GIB))
        if self.budget.size > (room := memory_available()):
            there = f"{room / GIB:.2f} GiB of memory are available"
            raise NoMemory(f"max_local_cpu_size = {settings.max_local_cpu_size:g} GB: {there}; lower it")
        self._tiers = [(tier, _ChangeLogs()) for tier in (open_plain_tiers(settings) if tiers is None else tiers)]
        for tier, logs in self._tiers:
            tier.report_to(logs)
        self._arenas: dict[Sizes, Arena] = {}
        self._lock, self._closed = threading.Lock(), False
        self._mover = threading.Thread(target=self._move, name="lmc-memory", daemon=True)
        self._mover.start()

    def open(self, sizes: Sizes) -> Arena:
        """Return the arena of a geometry; raise `NoMemory` if the budget does not hold one chunk of it."""
        with self._lock:
            if sizes not in self._arenas:
                self._arenas[sizes] = self._made(sizes)
            return self._arenas[sizes]

    def all(self) -> list[tuple[Sizes, Store]]:
        """Return the arenas that are open."""
        with self._lock:
            return [(sizes, arena.store) for sizes, arena in self._arenas.items()]

    def close(self) -> None:
        """Write down what is in memory only, and close the tiers."""
        with self._lock:
            self._closed = True
            self.budget.refused.set()
            for arena in self._arenas.values():
                arena.store.close()
            for tier, _ in self._tiers:
                tier.close()
        self._mover.join()

    def _made(self, sizes: Sizes) -> Arena:
        settings, slots = self._settings, self.budget.size // sizes.slot_bytes
        if not slots:
            taken = f"one takes {sizes.slot_bytes / MIB:.3f} MiB; raise max_local_cpu_size of the cache server"
            raise NoMemory(f"{self.budget.size / MIB:.3f} MiB of memory hold no chunk: {taken}")
        slab = Slab(slots, sizes.shares, sizes.part_bytes, shared=True, sparse=True)
        own = [_ArenaTier(tier, logs, sizes) for tier, logs in self._tiers]
        tiers = coded(own, settings, sizes.item_bytes)
        self.budget.taken[sizes] += 0  # It has a share from now on.
        policy, share = WritePolicy(settings.store_policy), settings.document_share
        allowed = partial(self.budget.take, sizes)
        return Arena(Store(slab, tiers, policy=policy, document_share=share, room=allowed))

    def _move(self) -> None:
        """Take memory from arenas that have more than their share, as long as others want it."""
        while self.budget.refused.wait() and not self._closed:
            self.budget.refused.clear()
            while (owing := self.budget.owing()) and not self._closed:
                sizes, slots = owing
                given = self._arenas[sizes].store.shrink(slots)
                self.budget.give(sizes, given)
                if not given:  # Everything there is held. The next refusal tries again.
                    break


class _ArenaTier(Wrapped):
    """A tier that all arenas share, as one of them sees it."""

    def __init__(self, inner: Tier, logs: "_ChangeLogs", sizes: Sizes) -> None:
        super().__init__(inner)
        self._logs, self._sizes = logs, sizes

    def headers(self) -> Iterator[RecordMeta]:
        """Return the headers of records that fit in this arena."""
        for meta in self.inner.headers():
            if meta.parts == self._sizes.shares.parts and meta.part_bytes <= self._sizes.part_bytes:
                yield meta

    def report_to(self, changes: ChangeLog) -> None:
        """Report to one log more."""
        self._logs.all.append(changes)

    def close(self) -> None:
        """Do nothing: other arenas may still use the tier."""


class _ChangeLogs(ChangeLog):
    """Passes changes on to the logs of all arenas. A chunk appears in each of them, whoever has stored it."""

    def __init__(self) -> None:
        super().__init__()
        self.all: list[ChangeLog] = []

    def appeared(self, place: str, meta: RecordMeta) -> None:
        """See `ChangeLog.appeared`."""
        for changes in self.all:
            changes.appeared(place, meta)

    def left(self, place: str, key: ChunkKey) -> None:
        """See `ChangeLog.left`."""
        for changes in self.all:
            changes.left(place, key)
