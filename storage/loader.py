"""Loading: the threads that copy records from tiers into slots of host memory.

Each chunk has one load, even if several requests need it. The records of a batch are read in step: the first parts of
all records before the second parts of any. So a request can start with layer 0. The threads report every step to the
store's state, which decides what follows.

Each tier has its own threads, so that a tier that hangs delays no other. In a cache server several clients load at
once. Each client has at most a share of a tier's threads, and their batches take turns. So a client with many loads
delays another client by at most one batch.

A disk or a mount that hangs raises no error, and has no deadline. A tier with an operation that has not returned for
`STALLED_SECONDS` is stalled: its chunks are misses until the operation returns.
"""

import resource
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import zip_longest
from typing import NamedTuple

from lmc.errors import CorruptRecord
from lmc.storage.contract import PinState
from lmc.storage.cost_model import CostModel, LoadTiming, Spent
from lmc.storage.state import Load, StoreState
from lmc.storage.tiers.record import removed_if_corrupt
from lmc.storage.tiers.tier import RecordReader, Tier
from lmc.storage.tiers.tier_guard import T, TierGuard, logged

OPEN_FILES_SHARE = 4  # All loads together open at most a fourth of the files that a process may have open.
MOST_IN_TURN = 128  # the maximum number of records in one job, if several clients may load
READ_AHEAD_BYTES = 1 << 20  # Smaller parts are read in groups of this size, because each read has a fixed cost.
STALLED_SECONDS = 10.0  # Reading a megabyte takes much less; tiers on other hosts have shorter deadlines of their own.


class Job(NamedTuple):
    """A part of a batch, which one thread loads."""

    loads: Sequence[Load]
    timing: LoadTiming


class Turns:
    """The threads that load from one tier, and the jobs that wait for them."""

    def __init__(self, tier: str, threads: int, clients: int, work: Callable[[Job], None]) -> None:
        """Create `threads` × `clients` threads for `work`. Each client uses at most `threads` of them at a time."""
        self._threads, self._work = threads, work
        self._pool = ThreadPoolExecutor(threads * clients, thread_name_prefix=f"lmc-load-{tier}")
        self._mutex = threading.Lock()
        self._waiting: OrderedDict[object, deque[Job]] = OrderedDict()  # by client; the next client in turn is first
        self._busy: Counter[object] = Counter()  # the number of busy threads, by client
        self.close = self._pool.shutdown  # waits for the jobs that are queued or in flight

    def add(self, client: object, jobs: Sequence[Job]) -> None:
        """Queue a client's jobs."""
        with self._mutex:
            self._waiting.setdefault(client, deque()).extend(jobs)
        for _ in jobs[: self._threads]:
            self._pool.submit(self._take_turns)

    def _take_turns(self) -> None:
        """Run jobs in turn, until none is left except those of clients that use all their threads."""
        while (turn := self._next()) is not None:
            client, job = turn
            try:
                with suppress(Exception):  # The error has been logged, and other jobs wait for this thread.
                    self._work(job)
            finally:
                with self._mutex:
                    self._busy[client] -= 1
                    if not self._busy[client]:
                        del self._busy[client]  # A client that is gone must not be kept.

    def _next(self) -> "tuple[object, Job] | None":
        with self._mutex:
            for client, jobs in self._waiting.items():
                if self._busy[client] < self._threads:
                    job = jobs.popleft()
                    self._waiting.pop(client)
                    if jobs:
                        self._waiting[client] = jobs
                    self._busy[client] += 1
                    return client, job
        return None


class Loader:
    """The threads that load records from the tiers of a store."""

    def __init__(
        self, state: StoreState, tiers: Sequence[Tier], guard: TierGuard, threads: int, clients: int = 1
    ) -> None:
        """Create `threads` × `clients` threads for each tier. Each client uses at most `threads` of them at a time."""
        self.cost = CostModel()
        self._state, self._guard, self._slab = state, guard, state.host.slab
        self._threads, self._clients = max(1, threads), clients
        self._turns = {tier.name: Turns(tier.name, self._threads, clients, self._work) for tier in tiers}
        self._began: dict[tuple[str, int], float] = {}  # start of the operation in flight, by tier and thread

    def run(self, loads: Sequence[Load], client: object = None) -> None:
        """Divide a client's batch of loads among its threads."""
        jobs = {name: self._divided([load for load in loads if load.tier.name == name]) for name in _tiers_of(loads)}
        timing = LoadTiming(self.cost, sum(map(len, jobs.values())))
        for name, parts in jobs.items():
            self._turns[name].add(client, [Job(part, timing) for part in parts])

    def stalled(self, tier: Tier) -> bool:
        """Return whether an operation of a tier has not returned for a long time."""
        due = self.cost.clock() - STALLED_SECONDS
        return any(began < due for (name, _), began in self._began.copy().items() if name == tier.name)

    def close(self) -> None:
        """Wait for the loads that are queued or in flight, and stop the threads."""
        for turns in self._turns.values():
            turns.close()

    # -- inside ------------------------------------------------------------------------------------------------------

    def _divided(self, loads: Sequence[Load]) -> list[Sequence[Load]]:
        """Return the parts of a batch of loads from one tier, of which each thread loads one at a time."""
        shares = [loads[share :: self._threads] for share in range(min(self._threads, len(loads)))]
        most = len(loads) if self._clients == 1 else MOST_IN_TURN
        return [share[first : first + most] for share in shares for first in range(0, len(share), most)]

    def _work(self, job: Job) -> None:
        loads, spent = job.loads, job.timing.begin()
        at_once = max(1, _open_files() // OPEN_FILES_SHARE // (self._threads * self._clients * len(self._turns)))
        try:
            for first in range(0, len(loads), at_once):
                together = loads[first : first + at_once]
                logged(self._load_together, together, spent, then="chunks that had not arrived are misses")
        finally:
            for load in loads:
                self._state.ended(load, None)  # This changes nothing for loads that have ended.
            job.timing.end(spent)

    def _load_together(self, loads: Sequence[Load], spent: Spent) -> None:
        readers: dict[Load, RecordReader] = {}
        try:
            loads = self._with_memory([load for load in loads if self._state.goes_on(load)])
            self._announce(loads, spent)
            for load in loads:
                if not self._state.goes_on(load):  # Its request has given up while others were opened.
                    continue
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
            if len(readers) < len(loads):  # What was fetched ahead for records that were not opened is dropped.
                self._guard(loads[0].tier, "read", loads[0].tier.announce, ())

    def _with_memory(self, loads: Sequence[Load]) -> list[Load]:
        """Allocate the memory of unbacked slots. Returns the loads whose slots have memory; the others have failed."""
        lacking = self._state.allocate_memory([load.slot for load in loads if load.unbacked])
        for load in loads:
            if load.slot in lacking:
                self._state.ended(load, None)
        return [load for load in loads if load.slot not in lacking]

    def _announce(self, loads: Sequence[Load], spent: Spent) -> None:
        """Announce to the tier the records that will be opened, and the memory for their first parts."""
        if loads:
            tier, slab, (_, count) = loads[0].tier, self._slab, self._ranges()[0]
            keys, into = [load.key for load in loads], [slab.memory(load.slot, 0, count, slab.stride) for load in loads]
            self._timed(tier, "opening", spent, tier.announce, keys, into)

    def _open(self, load: Load) -> RecordReader | None:
        reader = load.tier.open(load.key)
        if reader is None or (reader.meta.parts == self._slab.parts and reader.meta.stored_part <= self._slab.stride):
            return reader
        reader.close()
        with removed_if_corrupt(load.tier.delete, load.key):
            raise CorruptRecord("a record of another shape is stored under this key")

    def _read_in_step(self, readers: dict[Load, RecordReader], spent: Spent) -> None:
        ranges = self._ranges()
        self._request(readers, *ranges[0])
        for (first, count), ahead in zip_longest(ranges, ranges[1:]):
            if ahead is not None:  # The next parts are requested before these are read, so that both overlap.
                self._request(readers, *ahead)
            for load, reader in readers.items():
                if self._state.goes_on(load):
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
        """Announce to the readers the parts that will be read next."""
        for load, reader in readers.items():
            coming = load.state is PinState.COMING
            if coming and not self._guard(load.tier, "read", _done, reader.request, first, count):
                self._state.ended(load, None)

    def _timed(self, tier: Tier, what: str, spent: Spent, work: Callable[..., T], *arguments: object) -> T | None:
        started, here = self.cost.clock(), (tier.name, threading.get_ident())
        self._began[here] = started
        try:
            return self._guard(tier, "read", work, *arguments)
        finally:
            del self._began[here]
            spent[tier.name, what] += self.cost.clock() - started

    def _ranges(self) -> list[tuple[int, int]]:
        """Return the ranges of parts that are read together: the first part and the count of each."""
        parts, step = self._slab.parts, max(1, READ_AHEAD_BYTES // self._slab.stride)
        return [(first, min(step, parts - first)) for first in range(0, parts, step)]


def _tiers_of(loads: Sequence[Load]) -> list[str]:
    """Return the names of the tiers from which records are loaded."""
    return list(dict.fromkeys(load.tier.name for load in loads))


def _done(operation: Callable[..., None], *arguments: object) -> bool:
    """Run an operation and return true. Under the guard, a failed operation returns None instead."""
    operation(*arguments)
    return True


def _open_files() -> int:
    """Return how many files this process may have open."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return limit if limit != resource.RLIM_INFINITY else 1 << 20
