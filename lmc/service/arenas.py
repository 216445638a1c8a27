"""The memory of a cache server: one budget, and an arena for each geometry of chunks, which grows and shrinks.

The slab of an arena has addresses for the whole budget, and memory only for the slots in use. An arena that needs a
slot when the budget is spent evicts a chunk of its own. If it has less than its equal share, a thread takes slots from
the arena that is furthest above its share, so that the next chunks find room.
"""

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from lmc.config import Settings
from lmc.engine.tiers import coded, open_plain_tiers
from lmc.errors import NoMemory, StorageError
from lmc.keys import ChunkKey
from lmc.service.journal import Journal
from lmc.service.lifelines import Lifelines, wait_until_gone
from lmc.service.sizes import Sizes
from lmc.shapes import GIB, MIB
from lmc.storage.change_log import ChangeLog
from lmc.storage.ledger import Slot
from lmc.storage.level import Backing
from lmc.storage.locks import Rank, new_lock
from lmc.storage.record import RecordMeta
from lmc.storage.slab import Slab, memory_available
from lmc.storage.stats import WritePolicy
from lmc.storage.store import Store
from lmc.storage.tier import Tier, Wrapped

log = logging.getLogger(__name__)

MOVED_AT_ONCE = 64 * MIB  # from one arena to another
MEMORY_SECONDS = 10.0  # for which a server waits for memory
MOST_SLOTS = 1 << 22
BLOCK = 512  # bytes, in which the system counts what a file takes


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

    def __init__(self, store: Store, journal: Journal | None) -> None:
        self.store, self.protected, self._journal = store, ProtectedKeys(store), journal

    def close(self) -> None:
        """Write down what is in memory only."""
        self.store.close()
        if self._journal is not None:
            self._journal.close()


class _ArenaBacking(Backing):
    """The memory of an arena: a part of the budget, and a journal if it outlives the server."""

    def __init__(self, budget: Budget, sizes: Sizes, journal: Journal | None, unsafe: Collection[Slot]) -> None:
        self._budget, self._sizes, self._journal, self.unsafe = budget, sizes, journal, unsafe

    def room(self) -> bool:
        """See `Backing.room`."""
        return self._budget.take(self._sizes)

    def filled(self, slot: Slot, meta: RecordMeta) -> None:
        """See `Backing.filled`."""
        if self._journal is not None:
            self._journal.filled(slot, meta)


class Arenas:
    """All arenas of a server, which share tiers and memory."""

    def __init__(
        self,
        settings: Settings,
        lifelines: Lifelines,
        *,
        tiers: Sequence[Tier] | None = None,
        memory: Path | None = None,
        group: int | None = None,
    ) -> None:
        """Open the tiers, by default those of the settings, and what is left in `memory`, a directory on tmpfs.

        Raises `TierUnusable` or `ConfigError`, or `NoMemory` if there is less memory than the budget.
        """
        self._settings, self.budget = settings, Budget(int(settings.max_local_cpu_size * GIB))
        self._lifelines, self._memory, self._group = lifelines, memory, group
        kept = sum(path.stat().st_blocks * BLOCK for path in memory.glob("*.slab")) if memory else 0
        until = time.monotonic() + MEMORY_SECONDS  # Clients have the memory of a server that has ended for a moment.
        while self.budget.size > (room := memory_available() + kept) and time.monotonic() < until:
            time.sleep(0.1)
        if self.budget.size > room:
            there = f"{room / GIB:.2f} GiB of memory are available"
            raise NoMemory(f"max_local_cpu_size = {settings.max_local_cpu_size:g} GB: {there}; lower it")
        self._tiers = [(tier, _ChangeLogs()) for tier in (open_plain_tiers(settings) if tiers is None else tiers)]
        for tier, logs in self._tiers:
            tier.report_to(logs)
        self._arenas: dict[Sizes, Arena] = {}
        self._lock, self._closed = threading.Lock(), False
        for sizes in self._kept():
            self._arenas[sizes] = self._made(sizes)
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
                arena.close()
            for tier, _ in self._tiers:
                tier.close()
        self._mover.join()

    def _made(self, sizes: Sizes) -> Arena:
        settings, slots = self._settings, self.budget.size // sizes.slot_bytes
        if slots > MOST_SLOTS:
            raise StorageError(f"chunks of {sizes.slot_bytes} bytes are too small for a cache server")
        if not slots:
            taken = f"one takes {sizes.slot_bytes / MIB:.3f} MiB; raise max_local_cpu_size of the cache server"
            raise NoMemory(f"{self.budget.size / MIB:.3f} MiB of memory hold no chunk: {taken}")
        file = self._memory / f"{sizes.name}-{slots}.slab" if self._memory else None
        found = file is not None and file.exists()
        slab = Slab(slots, sizes.shares, sizes.part_bytes, shared=True, sparse=True, file=file)
        if file is not None and self._group is not None:
            os.chown(file, -1, self._group)
            file.chmod(0o660)
        own = [_ArenaTier(tier, logs, sizes) for tier, logs in self._tiers]
        tiers = coded(own, settings, sizes.item_bytes)
        self.budget.count(sizes, 0)
        policy, share = WritePolicy(settings.store_policy), settings.document_share
        journal = Journal(file.with_suffix(".chunks"), slab) if file else None
        backing = _ArenaBacking(self.budget, sizes, journal, list(map(Slot, range(slots))) if found else ())
        store = Store(slab, tiers, policy=policy, document_share=share, backing=backing)
        threading.Thread(target=_look_around, args=(store,), name="lmc-tiers", daemon=True).start()
        if journal is not None:
            chunks = journal.restore()
            self.budget.count(sizes, len(chunks))
            store.adopt(chunks)
            log.info("%d chunks are in memory from before", len(chunks))
            threading.Thread(target=self._make_safe, args=(store,), name="lmc-older", daemon=True).start()
        return Arena(store, journal)

    def _kept(self) -> list[Sizes]:
        """Return the geometries of which there is memory; remove memory of another size than it would have now."""
        found = []
        for path in sorted(self._memory.glob("*.slab")) if self._memory else ():
            name, _, slots = path.stem.rpartition("-")
            sizes = Sizes.named(name)
            if sizes is not None and slots == str(self.budget.size // sizes.slot_bytes):
                found.append(sizes)
            else:
                log.warning("%s was made with another max_local_cpu_size, and is removed", path)
                path.unlink()
                path.with_suffix(".chunks").unlink(missing_ok=True)
        return found

    def _make_safe(self, store: Store) -> None:
        """Let a store use its other slots when no client of the server before this one can write into them."""
        for path in self._lifelines.older:
            wait_until_gone(path)
        store.make_safe()

    def _move(self) -> None:
        """Take memory from arenas that have more than their share, as long as others want it."""
        while self.budget.refused.wait() and not self._closed:
            self.budget.refused.clear()
            while (owing := self.budget.owing()) and not self._closed:
                sizes, slots = owing
                given = self._arenas[sizes].store.shrink(slots)
                self.budget.count(sizes, -given)
                if not given:  # Everything there is held. The next refusal tries again.
                    break


def _look_around(store: Store) -> None:
    """Let a store know which records its tiers have, and evict those that are beyond their bound."""
    with suppress(OSError, RuntimeError):  # The server ends, and its tiers are closed.
        for _ in store.records():
            pass
        store.trim()


class _ArenaTier(Wrapped):
    """A tier that all arenas share, as one of them sees it."""

    def __init__(self, inner: Tier, logs: "_ChangeLogs", sizes: Sizes) -> None:
        super().__init__(inner)
        self._logs, self._sizes = logs, sizes

    def headers(self) -> Iterator[RecordMeta]:
        """Return the headers of records that fit in this arena."""
        return (meta for meta in self.inner.headers() if self._sizes.fit(meta))

    def report_to(self, changes: ChangeLog) -> None:
        """Report to one log more."""
        self._logs.all.append((self._sizes, changes))

    def close(self) -> None:
        """Do nothing: other arenas may still use the tier."""


class _ChangeLogs(ChangeLog):
    """Passes changes on to the logs of the arenas that a chunk fits into."""

    def __init__(self) -> None:
        super().__init__()
        self.all: list[tuple[Sizes, ChangeLog]] = []

    def appeared(self, place: str, meta: RecordMeta) -> None:
        """See `ChangeLog.appeared`."""
        for sizes, changes in self.all:
            if sizes.fit(meta):
                changes.appeared(place, meta)

    def left(self, place: str, key: ChunkKey) -> None:
        """See `ChangeLog.left`."""
        for _, changes in self.all:
            changes.left(place, key)
