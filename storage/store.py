"""The chunk store: slabs (device, host) over tiers (disk, …). The only place that decides where bytes are, and the only
place where a tier's failure becomes a miss.

    put:      newest slab first, then downwards in the background (write_through) or when evicted (write_back)
    pinned:   slots that nothing evicts while they are read; chunks of a tier are on their way, layer by layer, one load per key
              whoever asks (single flight)

Knows keys, parts and bytes; what a part means is its callers' affair. Thread-safe: one lock for the bookkeeping, none while bytes move
(but for the copy that saves a chunk of write_back from eviction).
"""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch

from lmc.keys import ChunkKey
from lmc.storage.attempts import Attempts
from lmc.storage.ledger import Slot
from lmc.storage.loads import Level, Loads, Pin, Writing
from lmc.storage.record import RecordMeta
from lmc.storage.slab import Slab
from lmc.storage.stats import Policy, StoreStats
from lmc.storage.tier import Tier, Written

log = logging.getLogger(__name__)


class Store:
    """Chunks under keys, in slabs over tiers."""

    def __init__(
        self,
        host: Slab,
        tiers: Sequence[Tier] = (),
        *,
        device: Slab | None = None,
        policy: Policy = Policy.WRITE_THROUGH,
        load_threads: int = 2,
    ) -> None:
        self._host = Level.of("host", host)
        self._levels = [*([Level.of("device", device)] if device else []), self._host]
        self._tiers = list(tiers)
        self._policy = policy
        self._changed = threading.Condition()
        self._try = Attempts()
        self._loads = Loads(self._host, self._changed, self._try, load_threads)
        self._being_written: set[ChunkKey] = set()
        self._queued = 0  # slots held by, or copied for, background work
        self._queue_limit = max(1, host.slots // 2)
        self._closed = False
        self._background = ThreadPoolExecutor(1, thread_name_prefix="lmc-spill")
        self._hits: Counter[str] = Counter()
        self._writes: Counter[str] = Counter()
        self._misses = self._dropped = self._no_room = 0

    # -- finding -----------------------------------------------------------------------------------------------------

    def lookup(self, keys: Sequence[ChunkKey]) -> list[str | None]:
        """Where each of `keys` is ("device", "host", a tier's name) or None. Holds nothing: it may be gone when it is read."""
        with self._changed:
            found = [self._place(key) for key in keys]
        for tier in self._tiers:
            asked = [i for i, place in enumerate(found) if place is None]
            for i, there in zip(asked, self._ask(tier, [keys[i] for i in asked]), strict=True):
                if there:
                    found[i] = tier.name
        return found

    @contextmanager
    def pinned(self, keys: Sequence[ChunkKey]) -> Iterator[list[Pin | None]]:
        """Pins of `keys` (None where missing), held inside the block; loads from tiers start at once, layers of all in step.

        Leaving early cancels the loads that nobody else waits for, and waits for them to stop.
        """
        pins = self.acquire(keys)
        try:
            yield pins
        finally:
            self.release([pin for pin in pins if pin is not None])

    def acquire(self, keys: Sequence[ChunkKey]) -> list[Pin | None]:
        """As `pinned`, for whoever cannot hold them inside one block: `release` must follow."""
        places = self.lookup(keys)
        tiers = {tier.name: tier for tier in self._tiers}
        with self._changed:
            # First all that is in memory: room for a load must not come from what this very call asks for.
            pins = [self._hold(key) or self._join(key) for key in keys]
            loads = []
            for i, (key, place) in enumerate(zip(keys, places, strict=True)):
                if pins[i] is None and place in tiers:
                    pins[i] = self._join(key)  # `key` may be in `keys` twice
                    if pins[i] is None and (slot := self._reserve(self._host)) is not None:
                        load = self._loads.start(key, tiers[place], slot)
                        pins[i] = Pin(key, place, self._host, slot, load, self._changed)
                        loads.append(load)
            self._loads.run(loads)
            for pin in pins:
                if pin is None:
                    self._misses += 1
                else:
                    self._hits[pin.source] += 1
        return pins

    def release(self, pins: Sequence[Pin], *, wait: bool = True) -> None:
        """Give pins back. Loads that nobody else waits for are cancelled, and waited for; do without only if no one reads the slots."""
        with self._changed:
            left = []
            held: dict[str, list[Slot]] = {level.name: [] for level in self._levels}
            for pin in pins:
                if pin.load is None or (pin.load.done and not pin.load.failed):
                    held[pin.level.name].append(pin.slot)
                else:
                    self._loads.leave(pin.load)
                    left.append(pin.load)
            self._promote(held["host"])
            for level in self._levels:
                level.ledger.release(held[level.name])
            self._changed.wait_for(lambda: not wait or all(load.done or load.readers for load in left))

    # -- storing -----------------------------------------------------------------------------------------------------

    @contextmanager
    def writing(self, meta: RecordMeta) -> Iterator[torch.Tensor | None]:
        """A slot to fill, uint8 `[L, stride]`, kept under `meta.key` when the block ends and given back if it raises.

        None if there is nothing to do: the key is in memory already, another thread is writing it, or every slot is held.
        """
        writing = self.begin(meta)
        if writing is None:
            yield None
            return
        try:
            yield writing.parts
        except BaseException:
            self.abort(writing)
            raise
        self.commit(writing)

    def begin(self, meta: RecordMeta) -> Writing | None:
        """As `writing`, for whoever cannot fill the slot inside one block: `commit` or `abort` must follow."""
        level = self._levels[0]
        assert meta.parts == level.slab.parts
        assert meta.part_bytes <= level.slab.part_bytes
        with self._changed:
            if meta.key in self._being_written or meta.key in self._loads or self._place(meta.key) is not None:
                return None
            for level in self._levels:  # a small device slab may be full of slots on their way down
                slot = self._reserve(level)
                if slot is not None:
                    self._being_written.add(meta.key)
                    return Writing(meta, level, slot)
        return None

    def commit(self, writing: Writing) -> None:
        """The bytes are there: the chunk is found from now on."""
        meta, level, slot = writing.meta, writing.level, writing.slot
        level.slab.seal(slot, meta.part_bytes)
        with self._changed:
            self._being_written.discard(meta.key)
            level.commit(slot, meta)
            if self._policy is Policy.WRITE_THROUGH:
                self._send_down(level, slot)
            level.ledger.release([slot])

    def abort(self, writing: Writing) -> None:
        """Give the slot back as if nothing had been begun."""
        with self._changed:
            self._being_written.discard(writing.meta.key)
            writing.level.ledger.abort(writing.slot)

    def forget(self, key: ChunkKey, *, wait: bool = True) -> None:
        """Remove a chunk everywhere: its bytes turned out not to be what its key says, or are of no use any more."""
        self._drop(key)
        deleted = self._background.submit(self._delete, key)  # in the queue, behind writes of it that are under way
        if wait:
            deleted.result()
            self._drop(key)  # what was loaded meanwhile

    def flush(self) -> None:
        """Wait until everything that was queued has been written."""
        with self._changed:
            self._changed.wait_for(lambda: self._queued == 0)

    def close(self) -> None:
        """Write down what only memory holds, stop the threads, close the tiers. Memory can still be read; nothing new is taken."""
        with self._changed:
            if self._closed:
                return
            self._closed = True  # from now on no slot changes, but for what is being filled
        self._loads.close()
        self.flush()
        self._background.shutdown()
        for level in self._levels:
            for slot in map(Slot, range(level.slab.slots)):
                if level.ledger.key_of(slot) is not None:
                    self._write_down(level.metas[slot], self._memory(level, slot))
        for tier in self._tiers:
            self._try(tier, tier.close)

    # -- looking at it -----------------------------------------------------------------------------------------------

    def stats(self) -> StoreStats:
        """Counts since start."""
        with self._changed:
            return StoreStats(
                hits=dict(self._hits),
                misses=self._misses,
                bytes_loaded=dict(self._loads.bytes),
                writes=dict(self._writes),
                dropped_writes=self._dropped,
                failed=dict(self._try.failed),
                no_room=self._no_room,
                evictions={level.name: level.ledger.evictions for level in self._levels},
            )

    def held(self) -> int:
        """Slots that are pinned or being written: zero when nobody is at work."""
        with self._changed:
            return sum(level.slab.slots - level.ledger.free for level in self._levels)

    def keys(self) -> set[ChunkKey]:
        """Every key in memory or in a tier that nobody else uses."""
        with self._changed:
            known: set[ChunkKey] = set().union(*(level.ledger.keys() for level in self._levels))
        for tier in (tier for tier in self._tiers if not tier.shared):
            known |= self._try(tier, lambda tier=tier: {entry.key for entry in tier.entries()}) or set()  # type: ignore[misc]
        return known

    def check(self) -> None:
        """Prove the ledgers' invariants."""
        with self._changed:
            for level in self._levels:
                level.ledger.check()

    # -- inside: memory (with the lock) ------------------------------------------------------------------------------

    def _place(self, key: ChunkKey) -> str | None:
        return next((level.name for level in self._levels if level.ledger.find(key) is not None), None)

    def _reserve(self, level: Level) -> Slot | None:
        if self._closed:
            return None
        if self._policy is Policy.WRITE_BACK:
            for slot, _ in level.ledger.peek(1):
                self._spill(level, slot)
        slots = level.ledger.reserve()
        if slots is None:
            self._no_room += 1
            return None
        level.metas.pop(slots[0], None)
        level.slab.lose(slots[0])  # other processes may still be reading what was let go too early
        return slots[0]

    def _send_down(self, level: Level, slot: Slot) -> None:
        """Queue the copy of `slot` to the next place; the slot is held meanwhile."""
        if self._closed or (level is self._host and not self._tiers) or self._full():
            return
        level.ledger.hold(slot)
        self._queue(self._copy_down, level, slot, level.metas[slot], level.slab.event())

    def _spill(self, level: Level, slot: Slot) -> None:
        """Save a slot that is about to be evicted: its bytes are copied now, and written in the background.

        It is not held meanwhile: a slot that is released goes to the tail of the queue, and another would be evicted in its place.
        """
        meta = level.metas[slot]
        if level is not self._host:
            copy = self._copy(level, slot, self._host, meta)
            self._host.ledger.release([copy] if copy is not None else [])
        elif self._tiers and not self._full():
            self._queue(self._write_down, meta, [level.slab.snapshot(slot, meta.parts, meta.stored_part)])

    def _full(self) -> bool:
        full = self._queued >= self._queue_limit
        self._dropped += full
        if full:
            self._try.complain(
                "spill", "the write queue is full: chunks stay in memory only, and are lost if evicted before the end"
            )
        return full

    def _drop(self, key: ChunkKey) -> None:
        with self._changed:
            self._loads.disown(key)
            for level in self._levels:
                level.drop(key)

    # -- inside: background work -------------------------------------------------------------------------------------

    def _queue(self, job: Callable[..., None], *arguments: object) -> None:
        self._queued += 1
        self._background.submit(self._work, job, *arguments)

    def _work(self, job: Callable[..., None], *arguments: object) -> None:
        try:
            job(*arguments)
        except Exception:
            log.exception("lmc background work failed; the chunk stays where it was")
            raise
        finally:
            with self._changed:
                self._queued -= 1
                self._changed.notify_all()

    def _copy_down(self, level: Level, slot: Slot, meta: RecordMeta, event: "torch.cuda.Event | None") -> None:
        try:
            if event is not None:
                event.synchronize()
            if level is self._host:
                self._write_down(meta, self._memory(level, slot))
            elif (copy := self._copy(level, slot, self._host, meta)) is not None:
                self._copy_down(self._host, copy, meta, None)
        finally:
            with self._changed:
                level.ledger.release([slot])

    def _copy_up(self, slot: Slot, meta: RecordMeta) -> None:
        try:
            copy = self._copy(self._host, slot, self._levels[0], meta)
            if copy is not None:
                with self._changed:
                    self._levels[0].ledger.release([copy])
        finally:
            with self._changed:
                self._host.ledger.release([slot])

    def _copy(self, source: Level, slot: Slot, target: Level, meta: RecordMeta) -> Slot | None:
        """Copy a slot that nobody evicts to another level; the new slot is held. None if it is there, or there is no room."""
        with self._changed:
            new = self._reserve(target) if target.ledger.find(meta.key) is None else None
        if new is None:
            return None
        try:
            target.slab.slot(new).copy_(source.slab.slot(slot))
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

    def _memory(self, level: Level, slot: Slot) -> list[memoryview]:
        """The stored parts of a slot, where a tier can read them."""
        meta = level.metas[slot]
        if level is self._host:
            return level.slab.memory(slot, 0, meta.parts, meta.stored_part)
        return [level.slab.snapshot(slot, meta.parts, meta.stored_part)]

    def _write_down(self, meta: RecordMeta, parts: Sequence[memoryview]) -> None:
        for tier in self._tiers:
            outcome = self._try(tier, lambda tier=tier: tier.write(meta, parts))  # type: ignore[misc]
            if outcome is Written.STORED:
                with self._changed:
                    self._writes[tier.name] += 1

    def _delete(self, key: ChunkKey) -> None:
        for tier in self._tiers:
            self._try(tier, lambda tier=tier: tier.delete(key))  # type: ignore[misc]

    def _ask(self, tier: Tier, keys: Sequence[ChunkKey]) -> list[bool]:
        answer = self._try(tier, lambda: tier.contains(keys)) if keys else []
        return [False] * len(keys) if answer is None else answer

    # -- inside: pins ------------------------------------------------------------------------------------------------

    def _hold(self, key: ChunkKey) -> Pin | None:
        for level in self._levels:
            slot = level.ledger.find(key)
            if slot is not None:
                level.ledger.hold(slot)
                return Pin(key, level.name, level, slot, None, self._changed)
        return None

    def _join(self, key: ChunkKey) -> Pin | None:
        load = self._loads.join(key)
        return Pin(key, load.tier.name, self._host, load.slot, load, self._changed) if load else None

    def _promote(self, slots: Sequence[Slot]) -> None:
        """What was read from the host goes up to the device, in the background, for the next time."""
        if self._levels[0] is self._host or self._closed:
            return
        for slot in slots:
            if self._queued >= self._queue_limit:
                break
            if self._host.ledger.key_of(slot) is not None:  # not forgotten meanwhile
                self._host.ledger.hold(slot)
                self._queue(self._copy_up, slot, self._host.metas[slot])
