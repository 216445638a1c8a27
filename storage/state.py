"""The store's state: everything that the store's one lock guards.

Each method is one atomic step: other threads see all of it or nothing. A step moves no bytes, calls no tier, starts no
thread and waits only for the lock. Only the methods named `wait_…` wait for other steps. A step returns the work that
its caller does after it, outside the lock.
"""

import itertools
import threading
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

from lmc.errors import ChunkLost
from lmc.keys import ChunkKey
from lmc.storage.contract import Pin, PinState, Reservation
from lmc.storage.eviction import Standing
from lmc.storage.ledger import Slot
from lmc.storage.level import Held, Level, Load, Outgoing, Todo
from lmc.storage.locks import Rank, new_lock
from lmc.storage.memory.slab import tag_of
from lmc.storage.stats import StoreStats
from lmc.storage.tiers.record import RecordMeta
from lmc.storage.tiers.tier import Tier, Written
from lmc.storage.write_queues import WriteQueues


class StoreState:
    """The slots, pins, loads and queues of one store."""

    def __init__(self, levels: Sequence[Level], tiers: Sequence[Tier], pinned: set[ChunkKey] | None = None) -> None:
        self._changed = threading.Condition(new_lock(Rank.STATE))
        self.levels, self.top, self.host = levels, levels[0], levels[-1]
        self._tiers, self._pinned = tiers, set() if pinned is None else pinned
        self.by_name = {level.name: level for level in levels}
        self._leases = itertools.count(1)
        self._held: dict[int, Load | None] = {}  # by lease; None for a chunk that was in memory
        self._writing: set[ChunkKey] = set()
        self._loads: dict[ChunkKey, Load] = {}
        self.queues = WriteQueues(levels, tiers)
        self._closed = self._told = False
        self._no_room = self._misses = 0
        self._hits: Counter[str] = Counter()  # by place

    @contextmanager
    def step(self) -> Iterator[None]:
        """Hold the lock during the block, so that the block is one step."""
        with self._changed:
            yield

    @property
    def closed(self) -> bool:
        """Whether the state is closed, so that it reserves no more slots."""
        return self._closed

    # -- pins --------------------------------------------------------------------------------------------------------

    def pin(self, keys: Sequence[ChunkKey], places: Sequence[str | None]) -> tuple[list[Pin | None], Todo]:
        """Hold chunks that are in memory, join loads that are in flight, and reserve slots for new loads."""
        todo = Todo()
        with self._changed:
            # Chunks in memory are held first, so that none of them is evicted to make room for a load.
            pins = [self._hold(key) or self._join(key) for key in keys]
            tiers = {tier.name: tier for tier in self._tiers}
            for i, (key, place) in enumerate(zip(keys, places, strict=True)):
                if pins[i] is None and place in tiers:
                    pins[i] = self._join(key) or self._load(key, tiers[place], todo)  # A key may be given twice.
            self._misses += pins.count(None)
            self._hits.update(pin.place for pin in pins if pin is not None)
        return pins, todo

    def state_of(self, pin: Pin) -> PinState:
        """Return the current state of a pinned chunk. This needs no lock."""
        load = self._held[pin.lease]
        return PinState.READY if load is None else load.state

    def arrived(self, pin: Pin) -> int:
        """Return how many parts of a pinned chunk have arrived."""
        load = self._held[pin.lease]
        return self.host.slab.parts if load is None else load.ready

    def wait_for_part(self, pin: Pin, part: int, patience: float | None = None) -> None:
        """Wait until a part has arrived.

        Raises `ChunkLost` if it will not arrive, and `TimeoutError` after `patience` seconds.
        """
        load = self._held[pin.lease]
        if load is not None and load.ready <= part:
            with self._changed:
                if not self._changed.wait_for(lambda: load.ready > part or load.state is PinState.LOST, patience):
                    raise TimeoutError
            if load.ready <= part:
                raise ChunkLost([pin.key])

    def release(self, pins: Sequence[Pin]) -> tuple[list[Load], Todo]:
        """Release pins. Returns the loads among them that are in flight or have failed, and the work to do."""
        left, read, todo = [], [], Todo()
        with self._changed:
            for pin in pins:
                load = self._held.pop(pin.lease)
                if load is None or load.state is PinState.READY:
                    read.append(pin)
                else:
                    self._leave(load)
                    left.append(load)
            for level in self.levels:
                slots = [pin.slot for pin in read if pin.level == level.name]
                if level is not self.top and not self._closed:
                    self._promote(slots, todo)
                level.ledger.release(slots)
        return left, todo

    def wait_until_left(self, loads: Sequence[Load]) -> None:
        """Wait until each of these loads has ended or has a new reader."""
        with self._changed:
            self._changed.wait_for(lambda: all(load.state is not PinState.COMING or load.readers for load in loads))

    # -- slots that are filled ---------------------------------------------------------------------------------------

    def begin(self, meta: RecordMeta, level: Level | None = None) -> tuple[Reservation | None, Todo]:
        """Reserve a slot for a chunk that is not in memory. With `level`, only this level is checked and used."""
        todo, key = Todo(), meta.key
        with self._changed:
            levels = [level] if level else self.levels
            for one in levels:
                if one.ledger.find(key) is not None:
                    return None, todo
            if key in self._writing or (level is None and key in self._loads):
                return None, todo
            # All slots of a small device may be held by chunks that are being copied to the host.
            for one in levels:
                slot = self._reserve(one, todo)
                if slot is not None:
                    self._writing.add(key)
                    return Reservation(meta, slot, one.name, next(self._leases)), todo
        return None, todo

    def commit(self, reservation: Reservation, source: Held | None = None) -> Todo:
        """Make the chunk in a filled slot visible, and send it to the next place.

        The slot is given back instead if the chunk was forgotten meanwhile. The same holds for a copy whose `source`
        slot has lost the chunk.
        """
        meta, slot, todo = reservation.meta, reservation.slot, Todo()
        level = self.by_name[reservation.level]
        with self._changed:
            forgotten = meta.key not in self._writing
            self._writing.discard(meta.key)
            if forgotten or (source is not None and source.level.ledger.key_of(source.slot) != meta.key):
                level.ledger.abort(slot)
                return todo
            level.commit(slot, meta)
            if not self._closed:
                if level is self.host:
                    self._send(meta, slot, todo)
                elif self.host.ledger.find(meta.key) is None and self.queues.has_room(meta.key):
                    self._copy(Held(meta, level, slot), self.host, todo)
            level.ledger.release([slot])
        return todo

    def abort(self, reservation: Reservation) -> None:
        """Give back a reserved slot that was not filled."""
        with self._changed:
            self._writing.discard(reservation.meta.key)
            self.by_name[reservation.level].ledger.abort(reservation.slot)

    def drop(self, key: ChunkKey) -> None:
        """Forget a chunk in memory, even if its slot is being filled or loaded."""
        with self._changed:
            self._loads.pop(key, None)
            self._writing.discard(key)
            for level in self.levels:
                level.drop(key)

    def protect(self, keys: Collection[ChunkKey], standing: Standing) -> None:
        """Set the standing of chunks, now and whenever they come into memory again."""
        with self._changed:
            (self._pinned.update if standing is Standing.PINNED else self._pinned.difference_update)(keys)
            for level in self.levels:
                for key in keys:
                    level.ledger.protect(key, standing)

    # -- reports of the loading threads ------------------------------------------------------------------------------

    def wanted(self, load: Load) -> bool:
        """Mark a load as started, and end it if it has no readers. Returns whether the load goes on."""
        with self._changed:  # in one step, because a new reader may join the load at any time
            load.started = True
            if load.readers == 0:
                self._end(load, None)
            return load.state is PinState.COMING

    def part_arrived(self, load: Load, ready: int, size: int) -> None:
        """Record that `ready` parts have arrived; `size` bytes of them are new."""
        with self._changed:
            self.host.slab.label(load.slot, load.key, ready)
            load.ready = ready
            self.queues.bytes[load.tier.name, "read"] += size
            self._changed.notify_all()

    def ended(self, load: Load, meta: RecordMeta | None) -> None:
        """End a load: with the record's metadata it succeeded, with None it failed. Only the first call counts."""
        with self._changed:
            self._end(load, meta)

    # -- reports of the writing threads ------------------------------------------------------------------------------

    def copied(self, held: Held, ticket: int) -> None:
        """Record that a copy to another level has ended, with success or without."""
        with self._changed:
            self._arrived(held.level, held.slot, ticket)

    def written(self, tier: Tier, meta: RecordMeta, outcome: Written | None, outgoing: Outgoing | None) -> None:
        """Record the `outcome` of writing a record to a tier, or None if the tier failed.

        `outgoing` is None for a record that was not queued.
        """
        with self._changed:
            self.queues.done(tier, meta, outcome, queued=outgoing is not None)
            if outgoing is not None:
                outgoing.left -= 1
                if outgoing.left == 0:
                    self._arrived(self.host, outgoing.slot, outgoing.ticket)

    def not_written(self, why: str, key: ChunkKey, *tiers: Tier) -> None:
        """Count a chunk whose planned write to these tiers is skipped. Without `tiers`, all tiers are skipped."""
        with self._changed:
            self.queues.drop(why, key, *tiers)

    def wait_until_flushed(self) -> None:
        """Wait until all chunks are written that wait now, including chunks that are being copied between levels."""
        with self._changed:
            for _ in self.levels:  # A chunk is written after it has been copied to the next level.
                last = self.queues.last_ticket
                self._changed.wait_for(lambda last=last: self.queues.oldest_ticket > last)  # type: ignore[misc]

    # -- shutdown and inspection -------------------------------------------------------------------------------------

    def close(self) -> bool:
        """Stop reserving slots and sending chunks. Returns false if the state was closed already."""
        with self._changed:
            closed, self._closed = self._closed, True
            return not closed

    def resident(self) -> dict[ChunkKey, Held]:
        """Return every chunk in memory. For a chunk on several levels, the host's slot is returned."""
        with self._changed:
            return {meta.key: Held(meta, level, slot) for level in self.levels for slot, meta in level.metas.items()}

    def held_by(self, pin: Pin) -> Held | None:
        """Return the level and slot of a pinned chunk, or None if the chunk has been forgotten."""
        level = self.by_name[pin.level]
        with self._changed:
            meta = level.metas.get(pin.slot)
        return Held(meta, level, pin.slot) if meta is not None else None

    def held(self) -> int:
        """Return the number of slots that are held or being written. It is 0 when the store is idle."""
        with self._changed:
            return sum(level.slab.slots - level.ledger.free for level in self.levels)

    def take_complaints(self) -> list[tuple[str, str]]:
        """Return and clear the warnings to log: subject and text of each."""
        with self._changed:
            complaints, self.queues.complaints = self.queues.complaints, []
        return complaints

    def counts(self) -> StoreStats:
        """Return the counts of the state. The tiers and the tier guard have the other counts."""
        with self._changed:
            return StoreStats(
                hits=dict(self._hits),
                misses=self._misses,
                bytes=dict(self.queues.bytes),
                writes=dict(self.queues.writes),
                dropped_writes=self.queues.dropped,
                no_room=self._no_room,
                evictions={level.name: level.ledger.evictions for level in self.levels},
                document_evictions={level.name: level.ledger.document_evictions for level in self.levels},
                queued=self.queues.length,
            )

    # -- inside, with the lock held ----------------------------------------------------------------------------------

    def _pin_of(self, key: ChunkKey, level: Level, slot: Slot, place: str, load: Load | None) -> Pin:
        lease = next(self._leases)
        self._held[lease] = load
        return Pin(key, slot, tag_of(key), level.name, place, PinState.COMING if load else PinState.READY, lease)

    def _hold(self, key: ChunkKey) -> Pin | None:
        for level in self.levels:
            slot = level.ledger.find(key)
            if slot is not None:
                level.ledger.hold(slot)
                return self._pin_of(key, level, slot, level.name, None)
        return None

    def _join(self, key: ChunkKey) -> Pin | None:
        load = self._loads.get(key)
        if load is None:
            return None
        if load.readers == 0:  # The label has been LOST since the last reader left, so it is set again.
            self.host.slab.label(load.slot, key, load.ready)
        load.readers += 1
        return self._pin_of(key, self.host, load.slot, load.tier.name, load)

    def _load(self, key: ChunkKey, tier: Tier, todo: Todo) -> Pin | None:
        slot = self._reserve(self.host, todo)
        if slot is None:
            return None
        self.host.slab.label(slot, key, 0)
        load = self._loads[key] = Load(key, tier, slot, bare=self.host.ledger.is_bare(slot))
        todo.loads.append(load)
        return self._pin_of(key, self.host, slot, tier.name, load)

    def _leave(self, load: Load) -> None:
        """Remove a reader from a load that is in flight or has failed."""
        load.readers -= 1  # Without readers, the thread stops before the next part.
        if load.readers == 0 and load.state is PinState.LOST:
            self.host.ledger.abort(load.slot)
        elif load.readers == 0 and not load.started:
            self._end(load, None)
        elif load.readers == 0:
            # The thread may hang in the tier. Other processes that read the label then need not wait for it.
            self.host.slab.lose(load.slot)

    def _end(self, load: Load, meta: RecordMeta | None) -> None:
        """End a load. With the record's metadata it is a hit from now on; with None, or if forgotten, it is a miss."""
        if load.state is not PinState.COMING:
            return
        ours, ledger = self._loads.get(load.key) is load, self.host.ledger
        load.state = PinState.LOST if meta is None or not ours else PinState.READY
        if ours:
            del self._loads[load.key]
        if meta is not None and ours:
            self.host.commit(load.slot, meta)
            for _ in range(load.readers):
                ledger.hold(load.slot)
            ledger.release([load.slot])
        else:
            self.host.slab.lose(load.slot)
            if load.readers == 0:
                ledger.abort(load.slot)
        self._changed.notify_all()

    def _reserve(self, level: Level, todo: Todo) -> Slot | None:
        if self._closed:
            return None
        slot = level.reserve(todo)
        self._no_room += slot is None
        if not self._tiers and level.ledger.document_evictions and level is self.host and not self._told:
            self._told = True
            text = "memory is full, and documents are evicted: raise max_local_cpu_size, or set local_disk (said once)"
            self.queues.complaints.append(("documents", text))
        return slot

    def _promote(self, slots: Sequence[Slot], todo: Todo) -> None:
        """Copy chunks that were read from the host to the device, so that the next request finds them there."""
        for slot in slots:
            if self.queues.room > 0 and slot in self.host.metas:  # The chunk may have been forgotten meanwhile.
                self._copy(Held(self.host.metas[slot], self.host, slot), self.top, todo)

    def _copy(self, held: Held, target: Level, todo: Todo) -> None:
        held.level.ledger.hold(held.slot)
        todo.copies.append((held, target, self.queues.begin()))

    def _send(self, meta: RecordMeta, slot: Slot, todo: Todo) -> None:
        """Queue a record for the tiers that accept one now, and hold its slot meanwhile."""
        takers = self.queues.enter(meta.key)
        if takers:
            self.host.ledger.hold(slot)
            todo.outgoing.append(Outgoing(meta, slot, takers, len(takers), self.queues.begin()))

    def _arrived(self, level: Level, slot: Slot, ticket: int) -> None:
        level.ledger.release([slot])
        self.queues.end(ticket)
        self._changed.notify_all()
