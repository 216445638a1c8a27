"""The store's state: everything that the store's one lock guards.

Each method is one atomic step: other threads see all of it or nothing. A step moves no bytes, calls no tier, starts no
thread and waits only for the lock. Only the methods named `wait_…` wait for other steps, and `allocate_memory` works
outside the lock. A step returns the work that its caller does after it, outside the lock. The threads of `loader.py`
and `writer.py` report each part of that work to the state.
"""

import itertools
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from lmc.errors import ChunkLost
from lmc.keys import ChunkKey
from lmc.storage.contract import Pin, PinState, Reservation
from lmc.storage.eviction import Owner
from lmc.storage.locks import Rank, new_lock
from lmc.storage.memory.slab import Slot, tag_of
from lmc.storage.slots import Backing, SlotPool
from lmc.storage.stats import StoreStats, Verb
from lmc.storage.tiers.record import RecordMeta
from lmc.storage.tiers.tier import Tier, Written


class HeldChunk(NamedTuple):
    """A chunk in a held slot, so that its bytes stay there until they have been copied or written."""

    meta: RecordMeta
    pool: SlotPool
    slot: Slot


@dataclass(slots=True, eq=False)
class Load:
    """A record that is being loaded from a tier into a host slot, for all its readers."""

    key: ChunkKey
    tier: Tier
    slot: Slot
    unbacked: bool  # whether the slot's memory must be allocated first
    readers: int = 1
    ready: int = 0  # parts that have arrived and been verified
    started: bool = False  # whether a thread works on the load
    state: PinState = PinState.COMING


@dataclass(slots=True, eq=False)
class Outgoing:
    """A record that waits to be written to tiers, from a held host slot."""

    meta: RecordMeta
    slot: Slot
    tiers: list[Tier]
    left: int  # tiers that have not finished with the record
    ticket: int  # its ticket in the write queues


@dataclass(slots=True)
class Todo:
    """The work to do outside the lock after a step of the state, in this order."""

    unbacked: list[Slot] = field(default_factory=list)  # slots whose memory must be allocated before they are filled
    loads: list[Load] = field(default_factory=list)
    copies: list[tuple[HeldChunk, SlotPool, int]] = field(default_factory=list)  # with the target pool and the ticket
    outgoing: list[Outgoing] = field(default_factory=list)


class StoreState:
    """The slots, pins, loads and queues of one store."""

    def __init__(
        self,
        pools: Sequence[SlotPool],
        tiers: Sequence[Tier],
        pinned: set[ChunkKey] | None = None,
        backing: Backing | None = None,
    ) -> None:
        """Create the state over `pools`: the device's slots, if any, and then the host's.

        `pinned` is the set of pinned keys that the pools read. `backing` allocates the memory of the host's slots.
        """
        self._changed = threading.Condition(new_lock(Rank.STATE))
        self.pools = {pool.name: pool for pool in pools}
        self.top, self.host = pools[0], pools[-1]
        self._tiers, self._pinned, self._backing = tiers, set() if pinned is None else pinned, backing
        self._numbers = itertools.count(1)
        self._leases: dict[int, Load | None] = {}  # of pins; None for a chunk that was in memory
        self._filling: dict[ChunkKey, int] = {}  # the lease of the reservation whose chunk may become visible
        self._loads: dict[ChunkKey, Load] = {}
        self.queues = WriteQueues(pools, tiers)
        self._closed = self._warned = False
        self._no_room = self._misses = 0
        self._hits: Counter[str] = Counter()  # by place

    # -- pins --------------------------------------------------------------------------------------------------------

    def pin(self, keys: Sequence[ChunkKey], places: Sequence[str | None]) -> tuple[list[Pin | None], Todo]:
        """Hold chunks that are in memory, join loads that are in flight, and allocate slots for new loads."""
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
        load = self._leases[pin.lease]
        return PinState.READY if load is None else load.state

    def arrived(self, pin: Pin) -> int:
        """Return how many parts of a pinned chunk have arrived."""
        load = self._leases[pin.lease]
        return self.host.slab.parts if load is None else load.ready

    def wait_for_part(self, pin: Pin, part: int, patience: float | None = None) -> None:
        """Wait until a part has arrived.

        Raises `ChunkLost` if it will not arrive, and `TimeoutError` after `patience` seconds.
        """
        load = self._leases[pin.lease]
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
                load = self._leases.pop(pin.lease)
                if load is None or load.state is PinState.READY:
                    read.append(pin)
                else:
                    self._leave(load)
                    left.append(load)
            for pool in self.pools.values():
                slots = [pin.slot for pin in read if pin.level == pool.name]
                if pool is not self.top and not self._closed:
                    self._promote(slots, todo)
                pool.free(slots)
        return left, todo

    def wait_until_left(self, loads: Sequence[Load]) -> None:
        """Wait until each of these loads has ended or has a new reader."""
        with self._changed:
            self._changed.wait_for(lambda: all(load.state is not PinState.COMING or load.readers for load in loads))

    # -- slots that are filled ---------------------------------------------------------------------------------------

    def begin(self, meta: RecordMeta, pool: SlotPool | None = None) -> tuple[Reservation | None, Todo]:
        """Reserve a slot for a chunk that is not in memory. With `pool`, only this pool is checked and used."""
        todo, key = Todo(), meta.key
        with self._changed:
            pools = [pool] if pool else self.pools.values()
            if any(one.find(key) is not None for one in pools):
                return None, todo
            if key in self._filling or (pool is None and key in self._loads):
                return None, todo
            # All slots of a small device may be held by chunks that are being copied to the host.
            for one in pools:
                slot = self._allocate(one, todo)
                if slot is not None:
                    lease = self._filling[key] = next(self._numbers)
                    return Reservation(meta, slot, one.name, lease), todo
        return None, todo

    def commit(self, reservation: Reservation, source: HeldChunk | None = None) -> tuple[bool, Todo]:
        """Make the chunk in a filled slot visible, and send it to the next place. Returns whether it is visible.

        The slot is freed instead if the chunk was forgotten meanwhile. The same holds for a copy whose `source` slot
        has lost the chunk.
        """
        meta, slot, todo = reservation.meta, reservation.slot, Todo()
        pool = self.pools[reservation.level]
        with self._changed:
            visible = self._end_filling(reservation) and (source is None or source.pool.has(source.slot, meta.key))
            if visible:
                pool.commit(slot, meta)
                if not self._closed:
                    if pool is self.host:
                        self._send(meta, slot, todo)
                    elif self.host.find(meta.key) is None and self.queues.has_room(meta.key):
                        self._copy(HeldChunk(meta, pool, slot), self.host, todo)
            pool.free([slot])
        return visible, todo

    def abort(self, reservation: Reservation) -> None:
        """Free a reserved slot that was not filled."""
        with self._changed:
            self._end_filling(reservation)
            self.pools[reservation.level].free([reservation.slot])

    def drop(self, key: ChunkKey) -> None:
        """Forget a chunk in memory, even if its slot is being filled or loaded."""
        with self._changed:
            self._loads.pop(key, None)
            self._filling.pop(key, None)
            for pool in self.pools.values():
                pool.drop(key)

    def protect(self, keys: Collection[ChunkKey], *, pinned: bool) -> None:
        """Pin chunks of documents, or end that, now and whenever they come into memory again."""
        with self._changed:
            (self._pinned.update if pinned else self._pinned.difference_update)(keys)
            for pool in self.pools.values():
                for key in keys:
                    pool.protect(key, pinned=pinned)

    # -- the host's memory, if it is allocated slot by slot ----------------------------------------------------------

    def allocate_memory(self, slots: Sequence[Slot]) -> set[Slot]:
        """Allocate the memory of unbacked slots. Returns the slots for which the system lacks memory.

        The lock is not held meanwhile, because this takes milliseconds. A slot without memory must be freed.
        """
        if not slots:
            return set()
        assert self._backing is not None, "without a backing, all slots have memory"
        lacking = self._backing.allocate(slots)
        with self._changed:
            self.host.backed(slots, lacking)
        return lacking

    def allocate_ahead(self, empty: int) -> bool:
        """Allocate the memory of one more slot before it is needed, unless `empty` slots are empty.

        Returns false if nothing was allocated.
        """
        with self._changed:
            slot = None if self._closed else self.host.prepare(empty)
        return slot is not None and not self.allocate_memory([slot])

    def take_memory(self) -> Slot | None:
        """Allocate a slot whose memory can be given back to the system. It must be unassigned then."""
        with self._changed:
            return None if self._closed else self.host.allocate(backed=True)

    def unassign(self, slot: Slot) -> None:
        """Return a slot whose memory has been given back to the unassigned slots; see `SlotPool.unassign`."""
        with self._changed:
            self.host.unassign(slot)

    def evict(self, covers: Callable[[Owner], bool], size: int) -> int:
        """Evict chunks of some owners; see `SlotPool.evict`."""
        with self._changed:
            return self.host.evict(covers, size)

    def by_last_use(self) -> list[Slot]:
        """Return the host's evictable slots, least recently used first."""
        with self._changed:
            return self.host.by_last_use()

    def adopt(self, chunks: Iterable[tuple[Slot, RecordMeta]]) -> None:
        """Make chunks visible that were stored before this process started, least recently used first."""
        with self._changed:
            for slot, meta in chunks:
                self.host.adopt(slot, meta)

    def end_quarantine(self) -> None:
        """Allow the use of the quarantined slots, whose memory has been given back to the system."""
        with self._changed:
            self.host.end_quarantine()

    # -- reports of the loading threads ------------------------------------------------------------------------------

    def goes_on(self, load: Load) -> bool:
        """Mark a load as started, and end it if it has no readers. Returns whether it continues."""
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

    def copied(self, held: HeldChunk, ticket: int) -> None:
        """Record that a copy to another pool has ended, with success or without."""
        with self._changed:
            self._finish(held.pool, held.slot, ticket)

    def written(self, tier: Tier, meta: RecordMeta, outcome: Written | None, outgoing: Outgoing | None) -> None:
        """Record the `outcome` of writing a record to a tier, or None if the tier failed.

        `outgoing` is None for a record that was not queued.
        """
        with self._changed:
            self.queues.done(tier, meta, outcome, queued=outgoing is not None)
            if outgoing is not None:
                outgoing.left -= 1
                if outgoing.left == 0:
                    self._finish(self.host, outgoing.slot, outgoing.ticket)

    def not_written(self, why: str, key: ChunkKey, *tiers: Tier) -> None:
        """Count a chunk whose planned write to these tiers is skipped. Without `tiers`, all tiers are skipped."""
        with self._changed:
            self.queues.drop(why, key, *tiers)

    def wait_until_flushed(self) -> None:
        """Wait until all chunks are written that wait now, including chunks that are being copied between pools."""
        with self._changed:
            for _ in self.pools:  # A chunk is written after it has been copied to the next pool.
                last = self.queues.last_ticket
                self._changed.wait_for(lambda last=last: self.queues.oldest_ticket > last)  # type: ignore[misc]

    # -- shutdown and inspection -------------------------------------------------------------------------------------

    def close(self) -> bool:
        """Stop allocating slots and sending chunks. Returns false if the state was closed already."""
        with self._changed:
            closed, self._closed = self._closed, True
            return not closed

    def resident(self) -> dict[ChunkKey, HeldChunk]:
        """Return every chunk in memory. For a chunk in several pools, the host's slot is returned."""
        with self._changed:
            return {meta.key: HeldChunk(meta, pool, at) for pool in self.pools.values() for at, meta in pool.chunks()}

    def held_by(self, pin: Pin) -> HeldChunk | None:
        """Return the pool and slot of a pinned chunk, or None if the chunk has been forgotten."""
        pool = self.pools[pin.level]
        meta = pool.metas[pin.slot]
        return HeldChunk(meta, pool, pin.slot) if meta is not None else None

    def held(self) -> int:
        """Return the number of slots that are held or being filled. It is 0 when the store is idle."""
        with self._changed:
            return sum(pool.held for pool in self.pools.values())

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
                evictions={name: pool.evictions for name, pool in self.pools.items()},
                document_evictions={name: pool.document_evictions for name, pool in self.pools.items()},
                queued=self.queues.length,
            )

    def faults(self) -> list[str]:
        """Return a sentence for each inconsistency of the bookkeeping."""
        with self._changed:
            found = [f"{name}: {fault}" for name, pool in self.pools.items() for fault in pool.faults()]
            readers = Counter(load for load in self._leases.values() if load is not None)
            # The readers of a load that has succeeded are not counted any more: each holds the slot.
            loads = {load for load in {*readers, *self._loads.values()} if load.state is not PinState.READY}
            found += [
                f"the load of {load.key.hex()}: readers {readers[load]}, counted as {load.readers}"
                for load in loads
                if load.readers != readers[load]
            ]
            found += [
                f"the load of {key.hex()} into slot {load.slot} has ended, but new readers join it"
                for key, load in self._loads.items()
                if load.key != key or load.state is not PinState.COMING or self.host.metas[load.slot] is not None
            ]
            pins = sum(load is None or load.state is PinState.READY for load in self._leases.values())
            holders = pins + len(loads) + self.queues.length
            if (held := sum(pool.holders for pool in self.pools.values())) < holders:
                found.append(f"pins, loads, copies and writes hold slots {holders} times, counted as {held}")
        return [*found, *self.queues.faults()]

    # -- inside, with the lock held ----------------------------------------------------------------------------------

    def _pin_of(self, key: ChunkKey, pool: SlotPool, slot: Slot, place: str, load: Load | None) -> Pin:
        lease = next(self._numbers)
        self._leases[lease] = load
        return Pin(key, slot, tag_of(key), pool.name, place, PinState.COMING if load else PinState.READY, lease)

    def _hold(self, key: ChunkKey) -> Pin | None:
        for pool in self.pools.values():
            slot = pool.find(key)
            if slot is not None:
                pool.hold(slot)
                return self._pin_of(key, pool, slot, pool.name, None)
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
        slot = self._allocate(self.host, todo)
        if slot is None:
            return None
        self.host.slab.label(slot, key, 0)
        load = self._loads[key] = Load(key, tier, slot, unbacked=self.host.is_unbacked(slot))
        todo.loads.append(load)
        return self._pin_of(key, self.host, slot, tier.name, load)

    def _leave(self, load: Load) -> None:
        """Remove a reader from a load that is in flight or has failed."""
        load.readers -= 1  # Without readers, the thread stops before the next part.
        if load.readers == 0 and load.state is PinState.LOST:
            self.host.free([load.slot])
        elif load.readers == 0 and not load.started:
            self._end(load, None)
        elif load.readers == 0:
            # The thread may hang in the tier. Other processes that read the label then need not wait for it.
            self.host.slab.lose(load.slot)

    def _end(self, load: Load, meta: RecordMeta | None) -> None:
        """End a load. With the record's metadata it is a hit from now on; with None, or if forgotten, it is a miss."""
        if load.state is not PinState.COMING:
            return
        ours = self._loads.get(load.key) is load
        load.state = PinState.LOST if meta is None or not ours else PinState.READY
        if ours:
            del self._loads[load.key]
        if meta is not None and ours:
            self.host.commit(load.slot, meta)
            for _ in range(load.readers):
                self.host.hold(load.slot)
            self.host.free([load.slot])
        else:
            self.host.slab.lose(load.slot)
            if load.readers == 0:
                self.host.free([load.slot])
        self._changed.notify_all()

    def _end_filling(self, reservation: Reservation) -> bool:
        """Return whether a chunk is still wanted: it may have been forgotten, and reserved again, since its begin."""
        key = reservation.meta.key
        is_wanted = self._filling.get(key) == reservation.lease
        if is_wanted:
            del self._filling[key]
        return is_wanted

    def _allocate(self, pool: SlotPool, todo: Todo) -> Slot | None:
        if self._closed:
            return None
        slot = pool.allocate()
        if slot is None:
            self._no_room += 1
        elif pool.is_unbacked(slot):
            todo.unbacked.append(slot)
        if not self._tiers and pool.document_evictions and pool is self.host and not self._warned:
            self._warned = True
            text = "memory is full, and documents are evicted: raise max_local_cpu_size, or set local_disk (said once)"
            self.queues.complaints.append(("documents", text))
        return slot

    def _promote(self, slots: Sequence[Slot], todo: Todo) -> None:
        """Copy chunks that were read from the host to the device, so that the next request finds them there."""
        for slot in slots:
            meta = self.host.metas[slot]
            if self.queues.room > 0 and meta is not None:  # The chunk may have been forgotten meanwhile.
                self._copy(HeldChunk(meta, self.host, slot), self.top, todo)

    def _copy(self, held: HeldChunk, target: SlotPool, todo: Todo) -> None:
        held.pool.hold(held.slot)
        todo.copies.append((held, target, self.queues.begin()))

    def _send(self, meta: RecordMeta, slot: Slot, todo: Todo) -> None:
        """Queue a record for the tiers that accept one now, and hold its slot meanwhile."""
        takers = self.queues.enter(meta.key)
        if takers:
            self.host.hold(slot)
            todo.outgoing.append(Outgoing(meta, slot, takers, len(takers), self.queues.begin()))

    def _finish(self, pool: SlotPool, slot: Slot, ticket: int) -> None:
        """End a copy or a write."""
        pool.free([slot])
        self.queues.end(ticket)
        self._changed.notify_all()


class WriteQueues:
    """The number of chunks that wait to be copied or written, and the outcomes of the writes.

    At most half of the host's slots may wait at a time. Each tier has an equal share of these, so that a slow tier does
    not delay the others. If the queue is full, a chunk is not written; it stays in memory and is counted as dropped.
    """

    def __init__(self, pools: Sequence[SlotPool], tiers: Sequence[Tier]) -> None:
        slots = pools[-1].slots
        self._pools, self._tiers, self._remembered = pools, tiers, 2 * slots
        self._limit = max(1, slots // 2)
        self._share = max(1, self._limit // max(1, len(tiers)))
        self._waiting: Counter[str] = Counter()  # by tier, including the chunks that are being written
        self._tickets: dict[int, None] = {}  # the tickets that wait, oldest first
        self.last_ticket = self.dropped = 0
        self.missed: defaultdict[str, set[ChunkKey]] = defaultdict(set)  # by tier, the chunks that it did not get
        self.complaints: list[tuple[str, str]] = []  # warnings to log: subject and text
        self.writes: Counter[str] = Counter()  # records, by tier
        self.bytes: Counter[tuple[str, Verb]] = Counter()

    @property
    def length(self) -> int:
        """The number of waiting chunks."""
        return len(self._tickets)

    @property
    def oldest_ticket(self) -> int:
        """The oldest waiting ticket. If no ticket waits, the next ticket."""
        return next(iter(self._tickets), self.last_ticket + 1)

    def begin(self) -> int:
        """Add a waiting copy or write, and return its ticket, which is higher than all earlier tickets."""
        self.last_ticket += 1
        self._tickets[self.last_ticket] = None
        return self.last_ticket

    def end(self, ticket: int) -> None:
        """Remove a ticket whose copy or write has ended."""
        del self._tickets[ticket]

    @property
    def room(self) -> int:
        """The number of further chunks that may wait."""
        return self._limit - self.length

    def has_room(self, key: ChunkKey) -> bool:
        """Return whether a chunk may wait. If not, count it as dropped."""
        if self.room < 1:
            self.drop("the write queue is full", key)
        return self.room > 0

    def enter(self, key: ChunkKey) -> list[Tier]:
        """Queue a chunk for the tiers that accept one now, and return these tiers."""
        takers: list[Tier] = []
        if not self._tiers or not self.has_room(key):
            return takers
        for tier in self._tiers:
            if tier.usable and self._waiting[tier.name] < self._share:
                takers.append(tier)
            else:
                self.drop(f"tier {tier.name} is {'behind' if tier.usable else 'not usable'}", key, tier)
        self._waiting.update([tier.name for tier in takers])
        return takers

    def done(self, tier: Tier, meta: RecordMeta, outcome: Written | None, *, queued: bool) -> None:
        """Record the `outcome` of writing a record to a tier, or None if the tier failed."""
        self._waiting[tier.name] -= queued
        if outcome is Written.STORED:
            self.writes[tier.name] += 1
            self.bytes[tier.name, "write"] += meta.offset(meta.parts)
        elif outcome is not Written.PRESENT:
            self.dropped += outcome is Written.REFUSED
            self._note_missed(tier, meta.key)

    def drop(self, why: str, key: ChunkKey, *tiers: Tier) -> None:
        """Count a chunk that is not written to these tiers. Without `tiers`, it is written to no tier."""
        self.dropped += 1
        for tier in tiers or self._tiers:
            self._note_missed(tier, key)
        text = f"{why}: chunks are not written there, and are lost if they are evicted before the end"
        self.complaints.append((" ".join(["writes", *(tier.name for tier in tiers)]), text))

    def faults(self) -> list[str]:
        """Return a sentence for each inconsistency of the counts."""
        wrong = {name: count for name, count in self._waiting.items() if not 0 <= count <= self._share}
        return [f"{count} chunks wait for tier {name}; the limit is {self._share}" for name, count in wrong.items()]

    def _note_missed(self, tier: Tier, key: ChunkKey) -> None:
        missed = self.missed[tier.name]
        missed.add(key)
        if len(missed) > self._remembered:  # Chunks that have left memory cannot be written at shutdown.
            missed &= set().union(*(pool.keys() for pool in self._pools))
