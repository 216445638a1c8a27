"""The chunk store: slabs (device, host) over tiers (disk, …). The only place that decides where bytes are, and the only
place where a tier's failure becomes a miss.

    put:      newest slab first, then downwards in the background (write_through) or when evicted (write_back)
    pinned:   slots that nothing evicts while they are read; chunks of a tier are on their way, layer by layer, one load per key
              whoever asks (single flight)

Knows keys, parts and bytes; what a part means is its callers' affair. Thread-safe: one lock for the bookkeeping, none while bytes move
(but for the copy that saves a chunk of write_back from eviction), and none to look up what is in memory.
"""

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from lmc.keys import ChunkKey
from lmc.storage.attempts import Attempts
from lmc.storage.ledger import Slot
from lmc.storage.loads import Level, Loads, Pin, Writing
from lmc.storage.record import RecordMeta
from lmc.storage.slab import Slab
from lmc.storage.speed import Speeds
from lmc.storage.spill import Spill
from lmc.storage.stats import Policy, StoreStats
from lmc.storage.tier import Tier


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
        self._changed = threading.Condition()
        self._try = Attempts()
        self._loads = Loads(self._host, self._changed, self._try, load_threads)
        self._spill = Spill(self._levels, self._tiers, policy, self._changed, self._try)
        self._being_written: set[ChunkKey] = set()
        self._closed = False
        self._hits: Counter[str] = Counter()
        self._misses = 0

    # -- finding -----------------------------------------------------------------------------------------------------

    def lookup(self, keys: Sequence[ChunkKey], *, shared: bool = True) -> list[str | None]:
        """Where each of `keys` is ("device", "host", a tier's name) or None. Holds nothing: it may be gone when it is read.

        Tiers that other processes use are asked, which takes a round trip, only if `shared`.
        """
        found = self._in_memory(keys)
        for tier in self._tiers if shared else [tier for tier in self._tiers if not tier.shared]:
            asked = [i for i, place in enumerate(found) if place is None]
            if not asked:
                break
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

    def acquire(self, keys: Sequence[ChunkKey], places: Sequence[str | None] | None = None) -> list[Pin | None]:
        """As `pinned`, for whoever cannot hold them inside one block: `release` must follow. `places`: what `lookup` has just said."""
        places = self.lookup(keys) if places is None else places
        tiers = {tier.name: tier for tier in self._tiers}
        with self._changed:
            # First all that is in memory: room for a load must not come from what this very call asks for.
            pins = [self._hold(key) or self._join(key) for key in keys]
            loads = []
            try:
                for i, (key, place) in enumerate(zip(keys, places, strict=True)):
                    if pins[i] is None and place in tiers:
                        pins[i] = self._join(key)  # `key` may be in `keys` twice
                        if pins[i] is None and (slot := self._spill.reserve(self._host)) is not None:
                            load = self._loads.start(key, tiers[place], slot)
                            pins[i] = Pin(key, place, self._host, slot, load, self._changed)
                            loads.append(load)
                self._loads.run(loads)
            except BaseException:
                # No memory, no thread: a load that nobody runs would be waited for by all who join it.
                self.release([pin for pin in pins if pin is not None], wait=False)
                raise
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
            held: list[Pin] = []
            for pin in pins:
                load = pin.load
                if load is None or (load.done and not load.failed):
                    held.append(pin)
                else:
                    self._loads.leave(load)
                    left.append(load)
            for level in self._levels:
                slots = [pin.slot for pin in held if pin.level is level]
                if level is self._host:
                    self._spill.read(slots)
                level.ledger.release(slots)
            if wait and left:
                self._changed.wait_for(lambda: all(load.done or load.readers for load in left))

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
            if meta.key in self._being_written or meta.key in self._loads or self._find(meta.key):
                return None
            for level in self._levels:  # a small device slab may be full of slots on their way down
                slot = self._spill.reserve(level)
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
            self._spill.committed(level, slot)
            level.ledger.release([slot])

    def abort(self, writing: Writing) -> None:
        """Give the slot back as if nothing had been begun."""
        writing.level.slab.written(writing.slot)
        with self._changed:
            self._being_written.discard(writing.meta.key)
            writing.level.ledger.abort(writing.slot)

    def forget(self, key: ChunkKey, *, wait: bool = True, shared: bool = True) -> None:
        """Remove a chunk: its bytes turned out not to be what its key says, or are of no use any more.

        Everywhere, or but for the tiers that other processes use (not `shared`).
        """
        with self._changed:  # at once, so that nothing can be sent to a tier behind its deletion
            self._drop(key)
            deletions = self._spill.delete(key, shared=shared)
        if wait:
            for deletion in deletions:
                deletion.result()
            with self._changed:
                self._drop(key)  # what was loaded meanwhile

    def flush(self) -> None:
        """Wait until everything that was queued has been written."""
        self._spill.flush()

    def close(self) -> None:
        """Write down what only memory holds, stop the threads, close the tiers. Memory can still be read; nothing new is taken."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._spill.stop()  # from now on no slot changes, but for what is being filled
        self._loads.close()
        self._spill.close()
        for tier in self._tiers:
            self._try(tier, "write", tier.close)

    # -- looking at it -----------------------------------------------------------------------------------------------

    def stats(self) -> StoreStats:
        """Counts since start."""
        moved = self._spill
        with self._changed:
            own = {tier.name: tier.evictions for tier in self._tiers}
            return StoreStats(
                hits=dict(self._hits),
                misses=self._misses,
                bytes={**moved.bytes, **{(tier, "read"): count for tier, count in self._loads.bytes.items()}},
                seconds=dict(self._try.seconds),
                writes=dict(moved.writes),
                dropped_writes=moved.dropped,
                failed=dict(self._try.failed),
                corrupt=dict(self._try.corrupt),
                no_room=moved.no_room,
                evictions={**{level.name: level.ledger.evictions for level in self._levels}, **own},
                queued=moved.queued,
                usable={tier.name: tier.usable for tier in self._tiers},
            )

    @property
    def speeds(self) -> Speeds:
        """How fast tiers have been, for whoever chooses between loading and computing."""
        return self._loads.speeds

    def held(self) -> int:
        """Slots that are pinned or being written: zero when nobody is at work."""
        with self._changed:
            return sum(level.slab.slots - level.ledger.free for level in self._levels)

    def keys(self) -> set[ChunkKey]:
        """Every key in memory or in a tier that nobody else uses."""
        with self._changed:
            known: set[ChunkKey] = set().union(*(level.ledger.keys() for level in self._levels))
        for tier in (tier for tier in self._tiers if not tier.shared):
            known |= self._try(tier, "lookup", lambda tier=tier: {entry.key for entry in tier.entries()}) or set()  # type: ignore[misc]
        return known

    def check(self) -> None:
        """Prove the ledgers' invariants."""
        with self._changed:
            for level in self._levels:
                level.ledger.check()

    # -- inside --------------------------------------------------------------------------------------------------------

    def _in_memory(self, keys: Sequence[ChunkKey]) -> list[str | None]:
        """Without the lock: a request's question does not wait for whoever stores and loads."""
        found: list[str | None] = [None] * len(keys)
        for level in self._levels:
            name = level.name
            there = level.ledger.holds(keys)
            found = [place or (name if held else None) for place, held in zip(found, there, strict=True)]
        return found

    def _ask(self, tier: Tier, keys: Sequence[ChunkKey]) -> list[bool]:
        answer = self._try(tier, "lookup", lambda: tier.contains(keys))
        return [False] * len(keys) if answer is None else answer

    def _find(self, key: ChunkKey) -> tuple[Level, Slot] | None:
        for level in self._levels:
            slot = level.ledger.find(key)
            if slot is not None:
                return level, slot
        return None

    def _hold(self, key: ChunkKey) -> Pin | None:
        found = self._find(key)
        if found is None:
            return None
        level, slot = found
        level.ledger.hold(slot)
        return Pin(key, level.name, level, slot, None, self._changed)

    def _join(self, key: ChunkKey) -> Pin | None:
        load = self._loads.join(key)
        return Pin(key, load.tier.name, self._host, load.slot, load, self._changed) if load else None

    def _drop(self, key: ChunkKey) -> None:
        self._loads.disown(key)
        for level in self._levels:
            level.drop(key)
