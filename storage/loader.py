"""Loading: the threads that copy records from tiers into slots of host memory.

There is one load for each chunk, however many requests want it. The records of a batch are read in step: the first
parts of all of them before the second parts of any, so that a request can begin with layer 0. Every step is reported to
the store's state, which decides what becomes of it.
"""

import resource
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest

from lmc.errors import CorruptRecord
from lmc.storage.contract import PinState
from lmc.storage.cost_model import CostModel, LoadTiming, Spent
from lmc.storage.level import Load
from lmc.storage.state import StoreState
from lmc.storage.tier import RecordReader, Tier
from lmc.storage.tier_guard import T, TierGuard, logged

OPEN_FILES_SHARE = 4  # A batch opens at most a fourth of the files that a process may have open.
READ_AHEAD_BYTES = 1 << 20  # Smaller parts are read several at a time, because a request costs more than its bytes.


class Loader:
    """A pool of threads that load."""

    def __init__(self, state: StoreState, guard: TierGuard, threads: int) -> None:
        self.cost = CostModel()
        self._state, self._guard, self._slab = state, guard, state.host.slab
        self._threads = max(1, threads)
        self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="lmc-load")

    def run(self, loads: Sequence[Load]) -> None:
        """Divide a batch of loads among the threads."""
        threads = min(self._threads, len(loads))
        timing = LoadTiming(self.cost, threads)
        for share in range(threads):
            self._pool.submit(self._work, loads[share :: self._threads], timing)

    def close(self) -> None:
        """Wait for the loads under way, and stop the threads."""
        self._pool.shutdown()

    # -- in the threads ----------------------------------------------------------------------------------------------

    def _work(self, loads: Sequence[Load], timing: LoadTiming) -> None:
        spent, at_once = timing.begin(), max(1, _open_files() // OPEN_FILES_SHARE // self._threads)
        try:
            for first in range(0, len(loads), at_once):
                together = loads[first : first + at_once]
                logged(self._load_together, together, spent, then="chunks that had not arrived are misses")
        finally:
            for load in loads:
                self._state.ended(load, None)  # This changes nothing for loads that have ended well.
            timing.end(spent)

    def _load_together(self, loads: Sequence[Load], spent: Spent) -> None:
        readers: dict[Load, RecordReader] = {}
        try:
            loads = [load for load in loads if self._state.wanted(load)]
            self._announce(loads, spent)
            for load in loads:
                reader = self._timed(load.tier, "opening", spent, self._open, load)
                spent[load.tier.name, "records"] += 1
                if reader is None:
                    self._state.ended(load, None)
                else:
                    readers[load] = reader
            self._read_in_step(readers, spent)
        finally:
            for load, reader in readers.items():
                self._guard(load.tier, "read", reader.close)

    def _announce(self, loads: Sequence[Load], spent: Spent) -> None:
        """Tell each tier which records will be opened, and where their first parts go."""
        slab, (_, count) = self._slab, self._ranges()[0]
        for tier in {load.tier.name: load.tier for load in loads}.values():
            ours = [load for load in loads if load.tier is tier]
            keys, into = [load.key for load in ours], [slab.memory(load.slot, 0, count, slab.stride) for load in ours]
            self._timed(tier, "opening", spent, tier.announce, keys, into)

    def _open(self, load: Load) -> RecordReader | None:
        reader = load.tier.open(load.key)
        if reader is None or (reader.meta.parts == self._slab.parts and reader.meta.stored_part <= self._slab.stride):
            return reader
        reader.close()
        load.tier.delete(load.key)
        raise CorruptRecord("a record of another shape is stored under this key")

    def _read_in_step(self, readers: dict[Load, RecordReader], spent: Spent) -> None:
        ranges = self._ranges()
        self._request(readers, *ranges[0])
        for (first, count), ahead in zip_longest(ranges, ranges[1:]):
            if ahead is not None:  # The next parts are on their way while these are read.
                self._request(readers, *ahead)
            for load, reader in readers.items():
                if self._state.wanted(load):
                    self._read(load, reader, first, count, spent)

    def _read(self, load: Load, reader: RecordReader, first: int, count: int, spent: Spent) -> None:
        size = count * reader.meta.stored_part
        memory = self._slab.memory(load.slot, first, count, reader.meta.stored_part)
        if not self._timed(load.tier, "reading", spent, _done, reader.read, first, count, memory):
            self._state.ended(load, None)
            return
        spent[load.tier.name, "bytes"] += size
        self._state.part_arrived(load, first + count, size)
        if first + count == self._slab.parts:
            self._state.ended(load, reader.meta)

    def _request(self, readers: dict[Load, RecordReader], first: int, count: int) -> None:
        """Tell the readers what will be read next."""
        for load, reader in readers.items():
            coming = load.state is PinState.COMING
            if coming and not self._guard(load.tier, "read", _done, reader.request, first, count):
                self._state.ended(load, None)

    def _timed(self, tier: Tier, what: str, spent: Spent, work: Callable[..., T], *arguments: object) -> T | None:
        started = self.cost.clock()
        try:
            return self._guard(tier, "read", work, *arguments)
        finally:
            spent[tier.name, what] += self.cost.clock() - started

    def _ranges(self) -> list[tuple[int, int]]:
        """Return which parts are read together: the first of them, and how many."""
        parts, step = self._slab.parts, max(1, READ_AHEAD_BYTES // self._slab.stride)
        return [(first, min(step, parts - first)) for first in range(0, parts, step)]


def _done(operation: Callable[..., None], *arguments: object) -> bool:
    """Run an operation; true tells it from one that failed under the guard."""
    operation(*arguments)
    return True


def _open_files() -> int:
    """Return how many files a process may have open."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return limit if limit != resource.RLIM_INFINITY else 1 << 20
