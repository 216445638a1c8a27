"""The chunk store of one process: chunks under keys, in memory (device, host) over tiers (disk, Redis).

It fulfils the contract in `contract.py`. `state.py` has everything that the one lock guards; the threads of `loader.py`
and `writer.py` move bytes outside of the lock. Chunks in memory are looked up without the lock. The store knows keys,
parts and bytes, and not what a part means.
"""

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from lmc.errors import ChunkLost
from lmc.keys import ChunkKey
from lmc.storage.change_log import ChangeLog
from lmc.storage.contract import ChunkStore, Pin, PinState, Reservation
from lmc.storage.eviction import Standing
from lmc.storage.fairness import FairShares, Owner
from lmc.storage.ledger import Slot
from lmc.storage.level import Backing, Level
from lmc.storage.loader import Loader
from lmc.storage.memory.slab import Slab
from lmc.storage.places import MEMORY
from lmc.storage.state import StoreState
from lmc.storage.stats import StoreStats
from lmc.storage.supply import SlotSupply
from lmc.storage.tiers.record import RecordMeta
from lmc.storage.tiers.tier import Tier
from lmc.storage.tiers.tier_guard import TierGuard
from lmc.storage.writer import Writer

SPREAD_SECONDS = 30.0  # that a chunk may take to be read and written again
LOADING_CLIENTS = 2  # of a cache server, for which there are threads at the same time


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
        """Documents have a share of the slots, from 0 to 1; see `eviction.py`. Tiers have theirs already.

        If there is only a host, a `backing` says each time whether one more of its slots may be used, and `fair` gives
        the owners of chunks their shares of it.
        """
        self.changes, pinned = changes or ChangeLog(), set[ChunkKey]()
        slabs = {"device": device, "host": host}
        self.pins_yield = any(not tier.shared for tier in tiers)
        assert (backing is None and fair is None) or device is None
        served: dict[str, Any] = {"backing": backing, "fair": fair}
        self._levels = [
            Level(
                name,
                slab,
                self.changes,
                document_share,
                pinned,
                pins_yield=self.pins_yield or name == "device",
                **served,
            )
            for name, slab in slabs.items()
            if slab is not None
        ]
        self._tiers, self._guard = list(tiers), TierGuard()
        self._state = StoreState(self._levels, self._tiers, pinned)
        self.supply = SlotSupply(self._state, backing)
        self._loader = Loader(self._state, self.supply, self._guard, load_threads, LOADING_CLIENTS if backing else 1)
        self._writer = Writer(self._state, self._tiers, self._guard)
        self.cost, self.slab, self.slots = self._loader.cost, host, host.slots
        self.shared_places = frozenset(tier.name for tier in tiers if tier.shared)
        for tier in tiers:
            tier.report_to(self.changes)

    # -- finding and reading -----------------------------------------------------------------------------------------

    def lookup(self, keys: Sequence[ChunkKey], *, shared: bool = True) -> list[str | None]:
        """Return where each chunk is ("device", "host" or a tier's name), or None."""
        found = self._in_memory(keys)
        for tier in self._tiers if shared else [tier for tier in self._tiers if not tier.shared]:
            missing = [i for i, place in enumerate(found) if place is None]
            if not missing:
                break
            there = self._guard(tier, "lookup", tier.contains, [keys[i] for i in missing])
            for i, present in zip(missing, there or (), strict=False):  # no answers if the tier failed
                found[i] = tier.name if present else None
        return found

    def pin(
        self, keys: Sequence[ChunkKey], places: Sequence[str | None] | None = None, client: object = None
    ) -> list[Pin | None]:
        """Hold chunks; those on tiers begin to load. Loads of several clients take turns."""
        pins, todo = self._state.pin(keys, self.lookup(keys) if places is None else places)
        try:
            self._writer.do(todo)
            self._loader.run(todo.loads, client)
        except BaseException:
            # There was no memory, or no thread. Whoever joined a load that no thread runs would wait for ever.
            self.release([pin for pin in pins if pin is not None], wait=False)
            raise
        used = [pin.key for pin in pins if pin is not None and pin.place in MEMORY]
        for tier in self._tiers if used else ():
            self._guard(tier, "lookup", tier.note_use, used)
        return pins

    def state(self, pin: Pin) -> PinState:
        """Return how far a pinned chunk has come."""
        return self._state.state_of(pin)

    def arrived(self, pin: Pin) -> int:
        """Return how many parts of a pinned chunk are there."""
        return self._state.arrived(pin)

    def part(self, pin: Pin, part: int) -> torch.Tensor:
        """Wait for part `part` and return a view of it: uint8 `[stride]`; raise `ChunkLost` if it never comes."""
        self._state.wait_for_part(pin, part)
        return self._state.by_name[pin.level].slab.part(pin.slot, part)

    def release(self, pins: Sequence[Pin], *, wait: bool = True) -> None:
        """Give pins back."""
        left, todo = self._state.release(pins)
        self._writer.do(todo)
        if wait and left:
            self._state.wait_until_left(left)

    # -- storing -----------------------------------------------------------------------------------------------------

    def begin(
        self, metas: Sequence[RecordMeta], may: Callable[[RecordMeta], bool] = lambda _: True
    ) -> list[Reservation | None]:
        """Reserve slots for new chunks that `may` be stored, which is asked when a slot is reserved."""
        slab, found, bare = self._levels[0].slab, list[Reservation | None](), list[Slot]()
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
                    bare += todo.bare
            lacking = self.supply.furnish(bare)
        except BaseException:
            for begun in filter(None, found):
                self.abort(begun)
            raise
        if not lacking:
            return found
        without = {at: one for at, one in enumerate(found) if one is not None and one.slot in lacking}
        for reservation in without.values():
            self.abort(reservation)
        # For a while nothing more is claimed. So these chunks get slots that have memory, or none.
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
        """Return the slot to fill: uint8 `[L, stride]`."""
        return self._state.by_name[reservation.level].slab.slot(reservation.slot)

    def commit(self, reservations: Sequence[Reservation]) -> None:
        """Let the chunks be found from now on, and send them to the next place."""
        for reservation in reservations:
            self._state.by_name[reservation.level].slab.seal(reservation.slot, reservation.meta.part_bytes)
            self._writer.do(self._state.commit(reservation))

    def abort(self, reservation: Reservation) -> None:
        """Give the slot back."""
        self._state.by_name[reservation.level].slab.written(reservation.slot)
        self._state.abort(reservation)

    def forget(self, key: ChunkKey, *, wait: bool = True, shared: bool = True) -> None:
        """Remove a chunk everywhere, or everywhere but from tiers that other processes share."""
        self._state.drop(key)  # first, so that it cannot be sent to a tier after it was deleted there
        deletions = self._writer.delete(key, shared=shared)
        if wait:
            for deletion in deletions:
                deletion.result()
            self._state.drop(key)  # It may have been loaded meanwhile.

    def copies(self, keys: Sequence[ChunkKey]) -> list[str]:
        """Return the places that have all of these chunks, without the tiers that other processes share."""
        found = [level.name for level in self._levels if all(level.ledger.holds(keys))]
        for tier in self._tiers:
            there = self._guard(tier, "lookup", tier.contains, keys) if not tier.shared else None
            found += [tier.name] if there and all(there) else []
        return found

    def protect(self, keys: Collection[ChunkKey], *, pinned: bool) -> None:
        """Pin chunks of documents, or let them be evicted again, in memory and in the tiers that only we use."""
        standing = Standing.PINNED if pinned else Standing.DOCUMENT
        self._state.protect(keys, standing)
        for tier in self._tiers:
            tier.protect(keys, standing)

    def trim(self) -> None:
        """Evict what a tier has beyond its bound, which may be smaller than it was in an earlier process."""
        for tier in self._tiers:
            self._guard(tier, "write", tier.trim)

    def spread(self, keys: Sequence[ChunkKey], patience: float = SPREAD_SECONDS) -> list[ChunkKey]:
        """Write chunks to the tiers that do not have them, and return those that are nowhere.

        A tier that fails is left out, and then nothing is said to be nowhere. Returns when everything is written, or
        raises `TimeoutError` if one chunk takes longer than `patience` seconds.
        """
        lacking: dict[ChunkKey, list[Tier]] = {key: [] for key in keys}
        answered = True
        for tier in self._tiers if keys else ():
            there = self._guard(tier, "lookup", tier.contains, keys) if tier.usable else None
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

    def _write_again(self, pin: Pin, tiers: Sequence[Tier], patience: float) -> None:
        """Write a pinned chunk to tiers, and release the pin; raise `TimeoutError` if that takes too long."""
        writes: list[Future[None]] = []
        try:
            with suppress(ChunkLost):
                self._state.wait_for_part(pin, self._levels[0].slab.parts - 1, patience)
                writes = self._writer.write_again(pin, tiers)
            if wait(writes, patience).not_done:
                raise TimeoutError
        finally:
            # A tier that hangs still reads the slot, which nobody else may get until it has done so.
            ended = threading.Thread(target=self._release_after, args=(pin, writes), name="lmc-late", daemon=True)
            (ended.start if writes and not all(one.done() for one in writes) else ended.run)()

    def _release_after(self, pin: Pin, writes: "Sequence[Future[None]]") -> None:
        wait(writes)
        self.release([pin], wait=False)

    def shrink(self, slots: int) -> int:
        """Give the memory of up to so many slots back to the system; return how many of them could be evicted."""
        for done in range(slots):
            retired = self.supply.retire()
            if retired is None:
                return done
            self.slab.give_back(retired)
            self.supply.retired([retired], unused=True)
        return slots

    def evict(self, covers: Callable[[Owner], bool], size: int) -> int:
        """Evict chunks of memory of some owners, those that were used longest ago, and return how many bytes.

        A call evicts some of them only, so that nobody waits for long; 0 means that there are no more.
        """
        slots, freed = self.supply.evict(covers, size)
        self.supply.retired(slots, unused=False)
        return freed

    def make_safe(self) -> None:
        """Let slots be used that were unsafe, without what is in them."""
        for slot in self._state.host.ledger.unsafe:  # Nobody changes them meanwhile.
            self.slab.give_back(slot)
        self.supply.make_safe()

    def flush(self) -> None:
        """Wait until everything that was queued has been written."""
        self._state.wait_until_flushed()

    def close(self) -> None:
        """Write what is in memory only, stop the threads, and close the tiers.

        Memory can still be read afterwards; nothing new is stored.
        """
        if not self._state.close():
            return
        self._loader.close()
        self._writer.close()
        for tier in self._tiers:
            self._guard(tier, "write", tier.close)

    # -- what is there -----------------------------------------------------------------------------------------------

    def stats(self) -> StoreStats:
        """Return counts since the start."""
        counts = self._state.counts()
        return replace(
            counts,
            evictions={**counts.evictions, **{tier.name: tier.evictions for tier in self._tiers}},
            document_evictions={
                **counts.document_evictions,
                **{tier.name: tier.document_evictions for tier in self._tiers},
            },
            seconds=dict(self._guard.seconds),
            failed=dict(self._guard.failed),
            corrupt=dict(self._guard.corrupt),
            usable={tier.name: tier.usable for tier in self._tiers},
            present={place: (held.chunks, held.tokens) for place, held in self.changes.counts().items()},
        )

    def records(self) -> Iterator[tuple[str, RecordMeta]]:
        """Read the header of every record in the tiers that only this process uses, and enter it in the change log.

        Yields the tier's name and what the header says.
        """
        for tier in self._tiers:
            for meta in tier.headers():
                # It may have been evicted since its header was read, and would be listed for ever.
                if tier.if_present(meta.key, partial(self.changes.appeared, tier.name, meta)):
                    yield tier.name, meta

    def in_memory(self) -> Iterator[tuple[str, RecordMeta]]:
        """Yield every chunk in memory, with its place."""
        return ((held.level.name, held.meta) for held in self._state.resident().values())

    def last_uses(self) -> dict[ChunkKey, float]:
        """Return when each record in the tiers that only this process uses was used last, in seconds since 1970."""
        ours = [tier for tier in self._tiers if not tier.shared]
        listed = [self._guard(tier, "lookup", lambda one: list(one.entries()), tier) or () for tier in ours]
        return {entry.key: entry.used for entries in listed for entry in entries}

    def held(self) -> int:
        """Return how many slots are held or being written; it is zero when nothing is going on."""
        return self._state.held()

    def known_keys(self) -> set[ChunkKey]:
        """Return every key in memory and in the tiers that only this process uses."""
        return {*self._state.resident(), *self.last_uses()}

    # -- inside ------------------------------------------------------------------------------------------------------

    def _in_memory(self, keys: Sequence[ChunkKey]) -> list[str | None]:
        """Look in memory without the lock, so that a lookup waits for nobody who stores or loads."""
        found: list[str | None] = [None] * len(keys)
        for level in self._levels:
            name, there = level.name, level.ledger.holds(keys)
            found = [place or (name if held else None) for place, held in zip(found, there, strict=True)]
        return found
