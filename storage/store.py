"""The chunk store of one process: chunks under keys, in memory (device, host) over tiers (disk, Redis).

It fulfils the contract in `contract.py`. `state.py` has everything that the one lock guards. The threads of `loader.py`
and `writer.py` move bytes outside the lock. Lookups of chunks in memory need no lock. The store knows keys, parts and
bytes, but not the meaning of a part.
"""

import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import replace

import torch

from lmc.errors import ChunkLost
from lmc.keys import ChunkKey
from lmc.storage.change_log import ChangeLog
from lmc.storage.contract import ChunkStore, Pin, PinState, Reservation, StoredChunk
from lmc.storage.eviction import FairShares, Owner
from lmc.storage.loader import Loader
from lmc.storage.memory.slab import Slab, Slot
from lmc.storage.places import MEMORY
from lmc.storage.slots import Backing, SlotPool
from lmc.storage.state import StoreState
from lmc.storage.stats import StoreStats
from lmc.storage.tiers.record import RecordMeta
from lmc.storage.tiers.tier import Tier, is_local
from lmc.storage.tiers.tier_guard import TierGuard
from lmc.storage.writer import Writer

SPREAD_SECONDS = 30.0  # the time limit to load one chunk, and again to write it to the tiers that lack it
ANSWER_SECONDS = 1.0  # time for which `spread` waits for a slow tier to say what it has
LOADING_CLIENTS = 2  # the number of a cache server's clients that can load at the same time with all their threads


class Store(ChunkStore):
    """A chunk store over slabs and tiers."""

    def __init__(
        self,
        host: Slab,
        tiers: Sequence[Tier] = (),
        *,
        device: Slab | None = None,
        load_threads: int = 2,
        document_share: float = 0.0,
        backing: Backing | None = None,
        changes: ChangeLog | None = None,
        fair: FairShares | None = None,
    ) -> None:
        """Create a store over a host slab, an optional device slab, and tiers.

        `document_share` is the documents' share of the slots, from 0 to 1; see `eviction.py`. Tiers have their own
        share. `backing` and `fair` need a store without a device slab. A `backing` decides whether one more host slot
        may be used. `fair` gives each owner of chunks a fair share of the host.
        """
        self.changes, pinned = changes or ChangeLog(), set[ChunkKey]()
        self.pins_yield = any(map(is_local, tiers))
        assert (backing is None and fair is None) or device is None
        common = self.changes, document_share, pinned
        pools = [SlotPool("host", host, *common, pins_yield=self.pins_yield, backing=backing, fair=fair)]
        if device is not None:
            pools.insert(0, SlotPool("device", device, *common, pins_yield=True))
        self._tiers, self._guard = list(tiers), TierGuard()
        self._state = StoreState(pools, self._tiers, pinned, backing)
        self._loader = Loader(self._state, self._tiers, self._guard, load_threads, LOADING_CLIENTS if backing else 1)
        self._writer = Writer(self._state, self._tiers, self._guard)
        self.cost, self.slab, self.slots = self._loader.cost, host, host.slots
        self.shared_places = frozenset(tier.name for tier in tiers if tier.shared)
        self._local = list(filter(is_local, tiers))
        for tier in self._local:
            tier.report_to(self.changes)

    # -- finding and reading -----------------------------------------------------------------------------------------

    def lookup(self, keys: Sequence[ChunkKey], *, shared: bool = True) -> list[str | None]:
        """Return the place of each chunk ("device", "host" or a tier's name), or None if it is missing."""
        found = self._in_memory(keys)
        for tier in self._tiers if shared else self._local:
            missing = [i for i, place in enumerate(found) if place is None]
            if not missing:
                break
            if self._stalled(tier):
                continue
            there = self._guard(tier, "lookup", tier.contains, [keys[i] for i in missing])
            for i, present in zip(missing, there or (), strict=False):  # no answers if the tier failed
                found[i] = tier.name if present and not self._writer.will_delete(tier, keys[i]) else None
        return found

    def _stalled(self, tier: Tier) -> bool:
        """Return whether a tier hangs, and log that."""
        stalled = self._loader.stalled(tier)
        if stalled:
            self._guard.complain(tier.name, f"tier {tier.name} does not respond; its chunks are misses until it does")
        return stalled

    def unanswered(self, keys: Sequence[ChunkKey]) -> bool:
        """Return whether a slow tier has yet to answer whether it has some of these chunks."""
        asked = [tier for tier in self._tiers if tier.shared and tier.usable]
        return any(self._guard(tier, "lookup", tier.unanswered, keys) for tier in asked)

    def pin(
        self, keys: Sequence[ChunkKey], places: Sequence[str | None] | None = None, client: object = None
    ) -> list[Pin | None]:
        """Hold chunks, and start to load those that are on tiers. Loads of several clients take turns."""
        pins, todo = self._state.pin(keys, self.lookup(keys) if places is None else places)
        try:
            self._writer.do(todo)
            self._loader.run(todo.loads, client)
        except BaseException:
            # There was no memory, or no thread. A caller that joins a load without a thread would wait forever.
            self.release([pin for pin in pins if pin is not None], wait=False)
            raise
        used = [pin.key for pin in pins if pin is not None and pin.place in MEMORY]
        for tier in self._local if used else ():
            self._guard(tier, "lookup", tier.note_use, used)
        return pins

    def state(self, pin: Pin) -> PinState:
        """Return the current state of a pinned chunk."""
        return self._state.state_of(pin)

    def arrived(self, pin: Pin) -> int:
        """Return how many parts of a pinned chunk have arrived."""
        return self._state.arrived(pin)

    def part(self, pin: Pin, part: int) -> torch.Tensor:
        """Wait for part `part` and return a view of it: uint8 `[stride]`. Raises `ChunkLost` if it will not arrive."""
        self._state.wait_for_part(pin, part)
        return self._state.pools[pin.level].slab.part(pin.slot, part)

    def release(self, pins: Sequence[Pin], *, wait: bool = True) -> None:
        """Release pins. With `wait`, wait until loads that no other caller needs have ended."""
        left, todo = self._state.release(pins)
        self._writer.do(todo)
        if wait and left:
            self._state.wait_until_left(left)

    # -- storing -----------------------------------------------------------------------------------------------------

    def begin(
        self, metas: Sequence[RecordMeta], may: Callable[[RecordMeta], bool] = lambda _: True
    ) -> list[Reservation | None]:
        """Reserve slots for new chunks. `may` is called for each reserved slot, and decides whether it is kept."""
        slab, found, unbacked = self.slab, list[Reservation | None](), list[Slot]()
        try:
            for meta in metas:
                assert meta.parts == slab.parts
                assert meta.part_bytes <= slab.part_bytes
                reservation, todo = self._state.begin(meta)
                found.append(reservation)
                self._writer.do(todo)
                if reservation is not None and not may(meta):
                    self.abort(reservation)
                    found[-1] = None
                else:
                    unbacked += todo.unbacked
            lacking = self._state.allocate_memory(unbacked)
        except BaseException:
            for begun in filter(None, found):
                self.abort(begun)
            raise
        if not lacking:
            return found
        without = {at: one for at, one in enumerate(found) if one is not None and one.slot in lacking}
        for reservation in without.values():
            self.abort(reservation)
        # Claims are refused for a while. So these chunks get slots that have memory, or none.
        try:
            again = self.begin([one.meta for one in without.values()], may)
        except BaseException:
            for at, kept in enumerate(found):
                if kept is not None and at not in without:
                    self.abort(kept)
            raise
        for at, other in zip(without, again, strict=True):
            found[at] = other
        return found

    def view(self, reservation: Reservation) -> torch.Tensor:
        """Return a view of the slot to fill: uint8 `[L, stride]`."""
        return self._state.pools[reservation.level].slab.slot(reservation.slot)

    def commit(self, reservations: Sequence[Reservation]) -> None:
        """Make the chunks visible to lookups, and send them to the next place."""
        for reservation in reservations:
            self.commit_one(reservation)

    def commit_one(self, reservation: Reservation) -> bool:
        """Make a chunk visible, and send it to the next place. Returns false if it was forgotten meanwhile."""
        self._state.pools[reservation.level].slab.seal(reservation.slot, reservation.meta.part_bytes)
        visible, todo = self._state.commit(reservation)
        self._writer.do(todo)
        return visible

    def abort(self, reservation: Reservation) -> None:
        """Give back a reserved slot that was not filled."""
        self._state.pools[reservation.level].slab.written(reservation.slot)
        self._state.abort(reservation)

    def forget(self, key: ChunkKey, *, wait: bool = True, shared: bool = True) -> None:
        """Remove a chunk from memory and all tiers. Without `shared`, tiers that other processes share keep it."""
        self._state.drop(key)  # first, so that it cannot be sent to a tier after it was deleted there
        deletions = self._writer.delete(key, shared=shared)
        if wait:
            for deletion in deletions:
                deletion.result()
            self._state.drop(key)  # again, because it may have been loaded meanwhile

    def copies(self, keys: Sequence[ChunkKey]) -> list[str]:
        """Return the places that have all of these chunks, without the tiers that other processes share."""
        found = [pool.name for pool in self._state.pools.values() if all(pool.holds(keys))]
        for tier in self._local:
            there = self._guard(tier, "lookup", tier.contains, keys)
            found += [tier.name] if there and all(there) else []
        return found

    def protect(self, keys: Collection[ChunkKey], *, pinned: bool) -> None:
        """Pin chunks of documents, or end that, in memory and in the tiers that evict under this store's control."""
        self._state.protect(keys, pinned=pinned)
        for tier in self._local:
            tier.protect(keys, pinned=pinned)

    def trim(self) -> None:
        """Evict records from tiers that exceed their bound, which may be smaller than in an earlier process."""
        for tier in self._local:
            self._guard(tier, "write", tier.trim)

    def spread(self, keys: Sequence[ChunkKey], patience: float = SPREAD_SECONDS) -> list[ChunkKey]:
        """Write chunks to the tiers that lack them. Returns the chunks that are missing from every place.

        A tier that fails is skipped; then no chunk is reported as missing. Returns after all writes. Raises
        `TimeoutError` if loading or writing one chunk takes longer than `patience` seconds.
        """
        lacking: dict[ChunkKey, list[Tier]] = {key: [] for key in keys}
        answered = True
        for tier in self._tiers if keys else ():
            there = self._answers(tier, keys) if tier.usable and not self._stalled(tier) else None
            answered = answered and there is not None
            for key, present in zip(keys, there or (), strict=False):
                lacking[key] += () if present else [tier]
        places = dict(zip(keys, self.lookup(keys), strict=True))
        nowhere = [key for key, place in places.items() if place is None and answered]
        for key, tiers in lacking.items():
            if tiers and places[key] is not None:
                (pin,) = self.pin([key])
                if pin is not None:
                    self._write_again(pin, tiers, patience)
        return nowhere

    def _answers(self, tier: Tier, keys: Sequence[ChunkKey]) -> list[bool] | None:
        """Return for each key whether a tier has it; None if the tier fails, or does not answer within a second."""
        due = time.monotonic() + ANSWER_SECONDS
        there = self._guard(tier, "lookup", tier.contains, keys)
        while there is not None and self._guard(tier, "lookup", tier.unanswered, keys):
            if time.monotonic() > due:
                return None
            time.sleep(ANSWER_SECONDS / 100)
            there = self._guard(tier, "lookup", tier.contains, keys)
        return there

    def _write_again(self, pin: Pin, tiers: Sequence[Tier], patience: float) -> None:
        """Write a pinned chunk to tiers, and release the pin. Raises `TimeoutError` after `patience` seconds."""
        writes: list[Future[None]] = []
        try:
            with suppress(ChunkLost):
                self._state.wait_for_part(pin, self.slab.parts - 1, patience)
                writes = self._writer.write_again(pin, tiers)
            if wait(writes, patience).not_done:
                raise TimeoutError
        finally:
            # A tier that hangs still reads the slot, so the slot stays held until that write has ended.
            ended = threading.Thread(target=self._release_after, args=(pin, writes), name="lmc-late", daemon=True)
            (ended.start if writes and not all(one.done() for one in writes) else ended.run)()

    def _release_after(self, pin: Pin, writes: "Sequence[Future[None]]") -> None:
        wait(writes)
        self.release([pin], wait=False)

    def shrink(self, slots: int) -> int:
        """Give the memory of up to `slots` slots back to the system. Returns the number of slots given back."""
        for done in range(slots):
            slot = self._state.take_memory()
            if slot is None:
                return done
            self.slab.give_back(slot)
            self._state.unassign(slot)
        return slots

    def evict(self, covers: Callable[[Owner], bool], size: int) -> int:
        """Evict the least recently used chunks in memory of the owners that `covers` accepts. Returns the bytes freed.

        One call evicts only a few chunks, so that other threads do not wait long. 0 means that none are left.
        """
        return self._state.evict(covers, size)

    def allocate_ahead(self, empty: int) -> bool:
        """Allocate the memory of one more slot before it is needed, unless `empty` slots are empty.

        Returns false if nothing was allocated.
        """
        return self._state.allocate_ahead(empty)

    @property
    def empty_slots(self) -> int:
        """The number of slots in host memory that have memory, and no chunk."""
        return self._state.host.empty

    def by_last_use(self) -> list[Slot]:
        """Return the slots of host memory whose chunks may be evicted, least recently used first."""
        return self._state.by_last_use()

    def adopt(self, chunks: Iterable[tuple[Slot, RecordMeta]]) -> None:
        """Make chunks visible that an earlier process has left in quarantined slots, least recently used first."""
        self._state.adopt(chunks)

    def end_quarantine(self) -> None:
        """Allow the use of the quarantined slots, and discard their contents."""
        for slot in self._state.host.quarantined:  # No other thread changes these slots.
            self.slab.give_back(slot)
        self._state.end_quarantine()

    def flush(self) -> None:
        """Wait until all queued chunks have been written."""
        self._state.wait_until_flushed()

    def close(self) -> None:
        """Write the chunks that are only in memory to the tiers, stop the threads, and close the tiers.

        Memory can still be read afterwards; no new chunks are stored.
        """
        if not self._state.close():
            return
        self._loader.close()
        self._writer.close()
        for tier in self._tiers:
            self._guard(tier, "write", tier.close)

    # -- contents and counts -----------------------------------------------------------------------------------------

    def stats(self) -> StoreStats:
        """Return counts since the start."""
        counts, shared = self._state.counts(), dict.fromkeys(self.shared_places, 0)  # These evict by themselves.
        of_documents = {tier.name: tier.document_evictions for tier in self._local}
        return replace(
            counts,
            evictions={**counts.evictions, **shared, **{tier.name: tier.evictions for tier in self._local}},
            document_evictions={**counts.document_evictions, **shared, **of_documents},
            seconds=dict(self._guard.seconds),
            failed=dict(self._guard.failed),
            corrupt=dict(self._guard.corrupt),
            usable={tier.name: tier.usable and not self._loader.stalled(tier) for tier in self._tiers},
            present={place: (held.chunks, held.tokens) for place, held in self.changes.counts().items()},
        )

    def check_integrity(self) -> list[str]:
        """Return a sentence for each inconsistency of the bookkeeping, in memory and in local tiers.

        No bytes of chunks are read. The store's lock is held meanwhile, a few milliseconds for a thousand slots.
        """
        of_tiers = [f"{tier.name}: {fault}" for tier in self._local for fault in tier.faults()]
        return [*self._state.faults(), *of_tiers]

    def records(self) -> Iterator[StoredChunk]:
        """See `ChunkStore.records`. Reading a record of a tier adds it to the change log."""
        for held in self._state.resident().values():
            if not any(tier.contains([held.meta.key])[0] for tier in self._local):
                yield StoredChunk(held.pool.name, held.meta, 0.0)
        for tier in self._local:
            for meta, used in tier.headers():
                yield StoredChunk(tier.name, meta, used)

    def in_memory(self) -> Iterator[tuple[str, RecordMeta]]:
        """Return an iterator over every chunk in memory, with its place."""
        return ((held.pool.name, held.meta) for held in self._state.resident().values())

    def held(self) -> int:
        """Return the number of slots that are held or being written. It is 0 when the store is idle."""
        return self._state.held()

    def known_keys(self) -> set[ChunkKey]:
        """Return every key in memory and in the tiers that only this process uses."""
        return {*self._state.resident(), *(key for tier in self._local for key in tier.all_keys())}

    # -- inside ------------------------------------------------------------------------------------------------------

    def _in_memory(self, keys: Sequence[ChunkKey]) -> list[str | None]:
        """Return the place of each chunk in memory, without the lock. So a lookup never waits for stores or loads."""
        found: list[str | None] = [None] * len(keys)
        for name, pool in self._state.pools.items():
            there = pool.holds(keys)
            found = [place or (name if held else None) for place, held in zip(found, there, strict=True)]
        return found
