"""Records on their way from tiers to slots of the host: one load per key whoever asks, layer by layer.

Part of the store, which decides what to load, shares its lock, and says what a tier's failure means. A load's slot belongs to it until
it ends; a load that failed leaves its slot to those who read it, since parts that had arrived may still be in use.
"""

import logging
import resource
import threading
from collections import Counter, defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from itertools import zip_longest

import torch

from lmc.errors import ChunkLost, CorruptRecord
from lmc.keys import ChunkKey
from lmc.storage.attempts import Attempts
from lmc.storage.ledger import Ledger, Slot
from lmc.storage.record import RecordMeta
from lmc.storage.slab import Slab
from lmc.storage.speed import Batch, Speeds, Spent
from lmc.storage.tier import Reader, Tier

log = logging.getLogger(__name__)

OF_FILES = 4  # a batch opens no more than a fourth of what a process may have open: others need some too
READ_AHEAD_BYTES = 1 << 20  # parts smaller than this are read several at a time: a request costs more than its bytes


@dataclass(slots=True)
class Level:
    """A slab with its ledger: one kind of memory."""

    name: str
    slab: Slab
    ledger: Ledger
    metas: dict[Slot, RecordMeta] = field(default_factory=dict)

    @classmethod
    def of(cls, name: str, slab: Slab) -> "Level":
        """An empty level."""
        return cls(name, slab, Ledger(slab.slots))

    def commit(self, slot: Slot, meta: RecordMeta) -> None:
        """The bytes of a reserved slot are there."""
        self.ledger.commit(slot, meta.key)
        self.metas[slot] = meta
        self.slab.label(slot, meta.key, meta.parts)

    def drop(self, key: ChunkKey) -> None:
        """Forget `key`, in however many slots it is; who holds one keeps it until released."""
        while (slot := self.ledger.find(key)) is not None:
            self.ledger.drop(slot)
            self.slab.lose(slot)


@dataclass(slots=True, eq=False)
class Writing:
    """A slot that is being filled; ends with `commit` or `abort`, whoever fills it."""

    meta: RecordMeta
    level: Level
    slot: Slot

    @property
    def parts(self) -> torch.Tensor:
        """Where to write: uint8 `[L, stride]`."""
        return self.level.slab.slot(self.slot)


@dataclass(slots=True, eq=False)
class Load:
    """One record on its way from a tier to a slot."""

    key: ChunkKey
    tier: Tier
    slot: Slot
    readers: int = 1
    ready: int = 0  # parts that have arrived and were verified
    started: bool = False  # a thread is at it
    done: bool = False
    failed: bool = False


class PinState(Enum):
    """How far a pinned chunk has come."""

    READY = "ready"
    COMING = "coming"  # parts of it may be there
    LOST = "lost"


@dataclass(slots=True, eq=False)
class Pin:
    """A chunk that is held for reading: in memory, or arriving."""

    key: ChunkKey
    source: str  # where it was found: "device", "host", or a tier's name
    level: Level
    slot: Slot
    load: Load | None
    changed: threading.Condition

    def state(self) -> "PinState":
        """What a reader in another process may count on, without waiting."""
        if self.load is None or (self.load.done and not self.load.failed):
            return PinState.READY
        return PinState.LOST if self.load.failed else PinState.COMING

    def part(self, layer: int) -> torch.Tensor:
        """Part `layer`: uint8 `[stride]`. Waits until it has arrived; raise `ChunkLost` if it never will."""
        load = self.load
        if load is not None and load.ready <= layer:
            with self.changed:
                self.changed.wait_for(lambda: load.ready > layer or load.failed)
            if load.ready <= layer:
                raise ChunkLost([self.key])
        return self.level.slab.part(self.slot, layer)


def _open_files() -> int:
    """How many a process may have open."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return limit if limit != resource.RLIM_INFINITY else 1 << 20


class Loads:
    """All loads under way, and the threads that do them. Every method but `close` wants the store's lock held."""

    def __init__(self, host: Level, changed: threading.Condition, attempt: Attempts, threads: int) -> None:
        self.bytes: Counter[str] = Counter()  # loaded, by tier
        self.speeds = Speeds()
        self._host, self._changed, self._attempt = host, changed, attempt
        self._loads: dict[ChunkKey, Load] = {}
        self._threads = max(1, threads)
        self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="lmc-load")

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._loads

    def join(self, key: ChunkKey) -> Load | None:
        """The load of `key`, if there is one, with one reader more."""
        load = self._loads.get(key)
        if load is not None:
            if load.readers == 0:
                self._host.slab.label(load.slot, key, load.ready)
            load.readers += 1
        return load

    def start(self, key: ChunkKey, tier: Tier, slot: Slot) -> Load:
        """A new load into a reserved slot; nothing moves before `run`."""
        assert key not in self._loads
        self._host.slab.label(slot, key, 0)
        load = self._loads[key] = Load(key, tier, slot)
        return load

    def run(self, loads: Sequence[Load]) -> None:
        """Every thread walks its share layer by layer, so that layer 0 of all chunks is there before layer 1 of any."""
        threads = min(self._threads, len(loads))
        batch = Batch(self.speeds, threads)
        for share in range(threads):
            self._pool.submit(self._work, loads[share :: self._threads], batch)

    def leave(self, load: Load) -> None:
        """A reader goes before the load has ended well; the last one ends what no thread has begun, or frees the failed slot."""
        load.readers -= 1  # at zero its thread stops at the next part
        if load.readers == 0 and load.failed:
            self._host.ledger.abort(load.slot)
        elif load.readers == 0 and not load.started:
            self._end(load, None)
        elif load.readers == 0:
            # Its thread may hang in the tier: whoever still looks at the slot need not wait for that.
            self._host.slab.lose(load.slot)

    def disown(self, key: ChunkKey) -> None:
        """What arrives under `key` is not kept."""
        self._loads.pop(key, None)

    def close(self) -> None:
        """Wait for the loads under way, and stop the threads."""
        self._pool.shutdown()

    # -- in the threads ----------------------------------------------------------------------------------------------

    def _work(self, loads: Sequence[Load], batch: Batch) -> None:
        spent, step = batch.begin(), max(1, _open_files() // OF_FILES // self._threads)
        try:
            for first in range(0, len(loads), step):
                self._work_on(loads[first : first + step], spent)
        except Exception:
            log.exception("lmc loading failed; what had not arrived is a miss")
            raise
        finally:
            for load in loads:
                self._finish(load, None)  # nothing to do for those that ended well
            batch.end(spent)

    def _work_on(self, loads: Sequence[Load], spent: defaultdict[str, Spent]) -> None:
        readers: dict[Load, Reader] = {}
        clock = self.speeds.clock
        try:
            loads = [load for load in loads if self._begin(load)]
            self._expect(loads, spent)
            for load in loads:
                started = clock()
                reader = self._attempt(load.tier, "read", lambda load=load: self._open(load))  # type: ignore[misc]
                spent[load.tier.name].opened(clock() - started)
                if reader is None:
                    self._finish(load, None)
                else:
                    readers[load] = reader
            self._read_in_step(readers, spent)
        finally:
            for load, reader in readers.items():
                self._attempt(load.tier, "read", reader.close)

    def _expect(self, loads: Sequence[Load], spent: defaultdict[str, Spent]) -> None:
        tiers = {load.tier.name: load.tier for load in loads}
        slab, (_, count) = self._host.slab, self._ranges()[0]
        for tier in tiers.values():
            started = self.speeds.clock()
            ours = [load for load in loads if load.tier is tier]
            keys, into = [load.key for load in ours], [slab.memory(load.slot, 0, count, slab.stride) for load in ours]
            self._attempt(tier, "read", partial(tier.expect, keys, into))
            spent[tier.name].opening += self.speeds.clock() - started

    def _begin(self, load: Load) -> bool:
        with self._changed:
            load.started = True
            return not load.done

    def _open(self, load: Load) -> Reader | None:
        reader = load.tier.open(load.key)
        slab = self._host.slab
        if reader is not None and (reader.meta.parts != slab.parts or reader.meta.stored_part > slab.stride):
            reader.close()
            load.tier.delete(load.key)
            raise CorruptRecord("a record of another shape under this key")
        return reader

    def _read_in_step(self, readers: dict[Load, Reader], spent: defaultdict[str, Spent]) -> None:
        slab, clock, ranges = self._host.slab, self.speeds.clock, self._ranges()
        for (first, count), ahead in zip_longest(ranges, ranges[1:]):
            if first == 0:
                self._ask(readers, first, count)
            if ahead is not None:  # on their way while these are read
                self._ask(readers, *ahead)
            for load, reader in readers.items():
                if load.done or self._cancelled(load):
                    continue
                memory = slab.memory(load.slot, first, count, reader.meta.stored_part)
                started = clock()
                read = self._attempt(load.tier, "read", lambda r=reader, m=memory: r.read(first, count, m) or True)  # type: ignore[misc]  # noqa: B023
                size = count * reader.meta.stored_part
                spent[load.tier.name].read(clock() - started, size if read else 0)
                if not read:
                    self._finish(load, None)
                    continue
                with self._changed:
                    slab.label(load.slot, load.key, first + count)
                    load.ready = first + count
                    self.bytes[load.tier.name] += size
                    self._changed.notify_all()
                if load.ready == slab.parts:
                    self._finish(load, reader.meta)

    def _ranges(self) -> list[tuple[int, int]]:
        """Parts that are read together: the first, and how many."""
        parts, step = self._host.slab.parts, max(1, READ_AHEAD_BYTES // self._host.slab.stride)
        return [(first, min(step, parts - first)) for first in range(0, parts, step)]

    def _ask(self, readers: dict[Load, Reader], first: int, count: int) -> None:
        for load, reader in readers.items():
            if not load.done and self._attempt(load.tier, "read", lambda r=reader: r.ask(first, count) or True) is None:  # type: ignore[misc]
                self._finish(load, None)

    def _cancelled(self, load: Load) -> bool:
        with self._changed:  # asked and ended under one lock: somebody may be joining
            if load.readers == 0:
                self._end(load, None)
            return load.done

    def _finish(self, load: Load, meta: RecordMeta | None) -> None:
        with self._changed:
            self._end(load, meta)

    def _end(self, load: Load, meta: RecordMeta | None) -> None:
        """With the record's meta it is a hit from now on; with None, or disowned, a miss for all who wait."""
        if load.done:
            return
        ours = self._loads.get(load.key) is load
        load.failed = meta is None or not ours
        load.done = True  # after `failed`: a pin's state is read without the lock
        if ours:
            del self._loads[load.key]
        ledger = self._host.ledger
        if meta is not None and not load.failed:
            self._host.commit(load.slot, meta)
            for _ in range(load.readers):
                ledger.hold(load.slot)
            ledger.release([load.slot])
        else:
            self._host.slab.lose(load.slot)
            if load.readers == 0:
                ledger.abort(load.slot)
        self._changed.notify_all()
