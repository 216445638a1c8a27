"""What goes down and up behind the store's back: chunks from slab to slab, and records to tiers.

    write_through   a new chunk goes to the next place at once: device -> host -> every tier
    write_back      a chunk goes to the next place when its slot is taken for another
    always          what was read from the host goes up to the device

Part of the store, whose lock it shares. A slot is held until its last tier is done. No more than half of the host's slots are on
their way, and of these each tier has its share, so that a slow one holds up no other: what does not fit stays in memory only,
and is counted. Not in here: what comes up from tiers (`loads`).
"""

import logging
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from lmc.keys import ChunkKey
from lmc.storage.attempts import Attempts
from lmc.storage.ledger import Slot
from lmc.storage.loads import Level
from lmc.storage.record import RecordMeta
from lmc.storage.stats import Policy, Verb
from lmc.storage.tier import Tier, Written

log = logging.getLogger(__name__)
T = TypeVar("T")

# Threads that write to a tier of this process alone. Two against one, on a disk (2 cores, direct I/O): 1.4 -> 1.7-2.6 GiB/s at
# records of 1 MiB, 1.8 -> 2.2 at 8 MiB, 2.1 -> 2.2 at 32 MiB: one's checksums are computed while the other's bytes are written.
# A server on the same machine takes no more from two (0.8-1.3 against 1.0 GiB/s, 1.30 against 1.35, 1.43 against 1.38).
WRITERS = 2


@dataclass(slots=True, eq=False)
class Errand:
    """A record on its way to tiers: from its slot of the host, which is held, or from a copy of its bytes."""

    meta: RecordMeta
    parts: Sequence[memoryview]
    slot: Slot | None
    left: int = 0  # tiers that are not done


class Line:
    """What waits for one tier. Work on one key is done in the order in which it came."""

    def __init__(self, tier: Tier) -> None:
        self.waiting = 0  # writes, with those that are under way
        writers = 1 if tier.shared else WRITERS
        self._threads = [_thread(f"lmc-{tier.name}-{i}") for i in range(writers)]

    def submit(self, key: ChunkKey, job: Callable[..., None], *arguments: object) -> "Future[None]":
        """Do this after whatever is in line for `key`."""
        return self._threads[key[-1] % len(self._threads)].submit(job, *arguments)

    def close(self) -> None:
        """Finish, and stop the threads."""
        for thread in self._threads:
            thread.shutdown()


def _thread(name: str) -> ThreadPoolExecutor:
    """One that is there already: what is counted as on its way must not fail for want of a thread."""
    pool = ThreadPoolExecutor(1, thread_name_prefix=name)
    pool.submit(int)
    return pool


class Spill:
    """Slots to fill, and what becomes of those that were filled. Every method but `flush` and `close` wants the store's lock held."""

    def __init__(
        self,
        levels: Sequence[Level],
        tiers: Sequence[Tier],
        policy: Policy,
        changed: threading.Condition,
        attempt: Attempts,
    ) -> None:
        self.queued = 0  # chunks on their way
        self.dropped = self.no_room = 0
        self.writes: Counter[str] = Counter()  # by tier
        self.bytes: Counter[tuple[str, Verb]] = Counter()
        self._top, self._host, self._levels, self._tiers = levels[0], levels[-1], levels, tiers
        self._policy, self._changed, self._attempt = policy, changed, attempt
        self._limit = max(1, self._host.slab.slots // 2)
        self._share = max(1, self._limit // max(1, len(tiers)))
        self._copies = _thread("lmc-copy")
        self._lines = [Line(tier) for tier in tiers]
        self._missed: defaultdict[str, set[ChunkKey]] = defaultdict(set)  # by tier: what it did not get
        self._closed = False

    def reserve(self, level: Level) -> Slot | None:
        """A slot to fill, or None if every one is held. With write_back, what it held is saved first."""
        if self._closed:
            return None
        if self._policy is Policy.WRITE_BACK:
            for slot, _ in level.ledger.peek(1):
                try:
                    self._save(level, slot)
                except OSError as error:  # no memory for a copy
                    self._drop(f"what is evicted cannot be copied ({error})", level.metas[slot].key)
        slots = level.ledger.reserve()
        if slots is None:
            self.no_room += 1
            return None
        level.metas.pop(slots[0], None)
        level.slab.lose(slots[0])  # other processes may still be reading what was let go too early
        return slots[0]

    def committed(self, level: Level, slot: Slot) -> None:
        """A slot was filled: with write_through its chunk goes to the next place."""
        if self._policy is not Policy.WRITE_THROUGH or self._closed:
            return
        meta = level.metas[slot]
        if level is self._host:
            self._send(meta, slot)
        elif not self._full(meta.key):
            self._copy_later(level, slot, self._host)

    def read(self, slots: Sequence[Slot]) -> None:
        """These slots of the host were read: their chunks go up to the device, for the next time."""
        if self._top is self._host or self._closed:
            return
        for slot in slots:
            if self.queued >= self._limit:
                break
            if self._host.ledger.key_of(slot) is not None:  # not forgotten meanwhile
                self._copy_later(self._host, slot, self._top)

    def delete(self, key: ChunkKey, *, shared: bool) -> "list[Future[None]]":
        """Remove a record, which no slot has any more, from the tiers: behind the writes of it that are in line."""
        tiers = [pair for pair in zip(self._tiers, self._lines, strict=True) if shared or not pair[0].shared]
        return [line.submit(key, self._delete, tier, key) for tier, line in tiers]

    def flush(self) -> None:
        """Wait until everything that is on its way has arrived."""
        with self._changed:
            self._changed.wait_for(lambda: self.queued == 0)

    def stop(self) -> None:
        """From now on no slot is reserved, and nothing is sent."""
        self._closed = True

    def close(self) -> None:
        """After `stop`: write down what only memory holds, and stop the threads.

        A tier that others share gets only what it did not get before: the rest may have been let go of on purpose.
        """
        self.flush()
        self._copies.shutdown()
        with self._changed:  # what is on the device and on the host is taken from the host
            rest = {
                level.metas[slot].key: (level, slot)
                for level in self._levels
                for slot in map(Slot, range(level.slab.slots))
                if level.ledger.key_of(slot) is not None
            }
        writes = []
        for tier, line in zip(self._tiers, self._lines, strict=True):
            through = tier.shared and self._policy is Policy.WRITE_THROUGH
            missed = {key: place for key, place in rest.items() if not through or key in self._missed[tier.name]}
            there = self._attempt(tier, "lookup", partial(tier.contains, list(missed))) if missed else None
            for (key, place), present in zip(missed.items(), there or [False] * len(missed), strict=True):
                if not present:
                    writes.append(line.submit(key, self._write_slot, tier, *place))
        for write in writes:
            write.result()
        for line in self._lines:
            line.close()

    # -- what is sent, and what is not (with the lock) -----------------------------------------------------------------

    def _send(self, meta: RecordMeta, slot: Slot, *, copied: bool = False) -> None:
        """Queue a record for every tier that takes one now. Its slot is held meanwhile, unless its bytes are to be `copied`."""
        takers = self._takers(meta.key)
        if not takers:
            return
        host = self._host
        if copied:
            errand = Errand(meta, [host.slab.snapshot(slot, meta.parts, meta.stored_part)], None, len(takers))
        else:
            host.ledger.hold(slot)
            errand = Errand(meta, host.slab.memory(slot, 0, meta.parts, meta.stored_part), slot, len(takers))
        self.queued += 1
        for tier, line in takers:
            line.waiting += 1
            line.submit(meta.key, self._write_errand, tier, line, errand)

    def _takers(self, key: ChunkKey) -> list[tuple[Tier, Line]]:
        if not self._tiers or self._full(key):
            return []
        takers = []
        for tier, line in zip(self._tiers, self._lines, strict=True):
            if tier.usable and line.waiting < self._share:
                takers.append((tier, line))
            else:
                self._drop(f"tier {tier.name} is {'behind' if tier.usable else 'not usable'}", key, tier)
        return takers

    def _full(self, key: ChunkKey) -> bool:
        full = self.queued >= self._limit
        if full:
            self._drop("the write queue is full", key)
        return full

    def _drop(self, why: str, key: ChunkKey, *tiers: Tier) -> None:
        """A chunk is not sent: to these tiers, or to any."""
        self.dropped += 1
        for tier in tiers or self._tiers:
            self._note_missed(tier, key)
        about = " ".join(["spill", *(tier.name for tier in tiers)])
        self._attempt.complain(about, f"{why}: chunks are not written there, and are lost if evicted before the end")

    def _note_missed(self, tier: Tier, key: ChunkKey) -> None:
        missed = self._missed[tier.name]
        missed.add(key)
        if len(missed) > 2 * self._host.slab.slots:  # what is not in memory any more cannot be written at the end
            missed &= set().union(*(level.ledger.keys() for level in self._levels))

    def _save(self, level: Level, slot: Slot) -> None:
        """Save a slot that is about to be evicted: its bytes are copied now, and written in the background.

        It is not held meanwhile: a slot that is released goes to the tail of the queue, and another would be evicted in its place.
        """
        meta = level.metas[slot]
        if level is self._host:
            self._send(meta, slot, copied=True)
        elif (copy := self._copy(level, slot, self._host, meta)) is not None:
            self._host.ledger.release([copy])

    def _copy_later(self, source: Level, slot: Slot, target: Level) -> None:
        source.ledger.hold(slot)
        self.queued += 1
        self._copies.submit(self._carry, source, slot, target, source.metas[slot])

    def _arrived(self, level: Level, slot: Slot | None) -> None:
        if slot is not None:
            level.ledger.release([slot])
        self.queued -= 1
        self._changed.notify_all()

    # -- in the threads --------------------------------------------------------------------------------------------------

    def _carry(self, source: Level, slot: Slot, target: Level, meta: RecordMeta) -> None:
        """Copy a slot that is held to another level; what comes to the host so goes on to the tiers."""
        copy = None
        try:
            copy = _logged(self._copy, source, slot, target, meta)
        finally:
            with self._changed:
                self._arrived(source, slot)
                if copy is not None:
                    if target is self._host and target.ledger.key_of(copy) is not None:  # not forgotten meanwhile
                        self._send(meta, copy)
                    target.ledger.release([copy])

    def _copy(self, source: Level, slot: Slot, target: Level, meta: RecordMeta) -> Slot | None:
        """Copy a slot that nobody evicts to another level; the new slot is held. None if it is there, or there is no room."""
        with self._changed:
            new = self.reserve(target) if target.ledger.find(meta.key) is None else None
        if new is None:
            return None
        try:
            target.slab.copy_from(new, source.slab, slot)
        except BaseException:
            with self._changed:
                target.ledger.abort(new)
            raise
        with self._changed:
            if source.ledger.key_of(slot) != meta.key:  # forgotten meanwhile
                target.ledger.abort(new)
                return None
            target.commit(new, meta)
            return new

    def _write_errand(self, tier: Tier, line: Line, errand: Errand) -> None:
        outcome = None
        try:
            outcome = _logged(self._write, tier, errand.meta, errand.parts)
        finally:
            with self._changed:
                self._count(tier, errand.meta, outcome)
                line.waiting -= 1
                errand.left -= 1
                if errand.left == 0:
                    self._arrived(self._host, errand.slot)

    def _write_slot(self, tier: Tier, level: Level, slot: Slot) -> None:
        meta = level.metas[slot]
        if level is self._host:
            parts = level.slab.memory(slot, 0, meta.parts, meta.stored_part)
        else:
            parts = [level.slab.snapshot(slot, meta.parts, meta.stored_part)]
        outcome = _logged(self._write, tier, meta, parts)
        with self._changed:
            self._count(tier, meta, outcome)

    def _write(self, tier: Tier, meta: RecordMeta, parts: Sequence[memoryview]) -> Written | None:
        if tier.usable:
            return self._attempt(tier, "write", lambda: tier.write(meta, parts))
        with self._changed:  # it was when the record was put in line
            self._drop(f"tier {tier.name} is not usable", meta.key, tier)
        return None

    def _count(self, tier: Tier, meta: RecordMeta, outcome: Written | None) -> None:
        if outcome is Written.STORED:
            self.writes[tier.name] += 1
            self.bytes[tier.name, "write"] += meta.offset(meta.parts)
        elif outcome is not Written.PRESENT:
            self.dropped += outcome is Written.REFUSED
            self._note_missed(tier, meta.key)

    def _delete(self, tier: Tier, key: ChunkKey) -> None:
        _logged(self._attempt, tier, "write", lambda: tier.delete(key))


def _logged(work: Callable[..., T], *arguments: object) -> T:
    """Do it; say what went wrong before anyone who waits for it goes on."""
    try:
        return work(*arguments)
    except Exception:
        log.exception("lmc background work failed; the chunk stays where it was")
        raise
