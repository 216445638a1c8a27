"""Writing: the threads that copy chunks between the pools of memory, and write them as records to tiers.

    stored   a new chunk is sent to the next place at once: from the device to the host, from there to every tier
    read     a chunk that was read from the host is copied to the device

The threads report every step to the store's state, which decides where each chunk goes. A slot is held until the write
to its last tier has ended.

A record that cannot be deleted, because its tier does not respond, is deleted when the tier responds again. Until then
lookups do not find it.
"""

import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from itertools import chain

from lmc.errors import StorageError
from lmc.keys import ChunkKey
from lmc.storage.contract import Pin
from lmc.storage.slots import SlotPool
from lmc.storage.state import HeldChunk, Outgoing, StoreState, Todo
from lmc.storage.tiers.record import RecordMeta, header_fits
from lmc.storage.tiers.tier import Tier, Written
from lmc.storage.tiers.tier_guard import T, TierGuard, logged

log = logging.getLogger(__name__)

# The number of threads that write to a tier which only this process uses. With two threads, one computes checksums
# while the other writes. Measured on a disk (2 cores, direct I/O), two threads instead of one:
#     records of 1 MiB: 1.7 to 2.6 GiB/s instead of 1.4; of 8 MiB: 2.2 instead of 1.8; of 32 MiB: 2.2 instead of 2.1
# A Redis server on the same machine gains nothing: 0.8 to 1.3 GiB/s instead of 1.0, 1.30 instead of 1.35, 1.43 instead
# of 1.38.
WRITERS = 2
RETRY_SECONDS = 1.0  # interval between two attempts to delete records from a tier that did not respond
MAX_UNDELETED = 1 << 16  # records of a tier that wait to be deleted


class Writer:
    """The queues of one store, each with its own thread."""

    def __init__(self, state: StoreState, tiers: Sequence[Tier], guard: TierGuard) -> None:
        self._state, self._tiers, self._guard = state, tiers, guard
        self._copies = _thread("lmc-copy")
        writers = {tier.name: range(1 if tier.shared else WRITERS) for tier in tiers}
        self._queues = {name: [_thread(f"lmc-{name}-{i}") for i in numbers] for name, numbers in writers.items()}
        self._undeleted: dict[str, OrderedDict[ChunkKey, None]] = {tier.name: OrderedDict() for tier in tiers}
        self._mutex, self._closed = threading.Lock(), threading.Event()  # The mutex guards `_undeleted`.
        self._retrying: threading.Thread | None = None

    def do(self, todo: Todo) -> None:
        """Start the copies and writes of `todo`.

        Python stops thread pools before it calls exit handlers. What is stored from then on stays in memory, and
        `close` counts it as not written.
        """
        for held, target, ticket in todo.copies:
            try:
                self._copies.submit(self._carry, held, target, ticket)
            except RuntimeError:
                self._state.copied(held, ticket)
        for outgoing in todo.outgoing:
            self._send(outgoing, self._bytes_of(HeldChunk(outgoing.meta, self._state.host, outgoing.slot)))
        self._complain()

    def delete(self, key: ChunkKey, *, shared: bool) -> "list[Future[None]]":
        """Delete a record from the tiers, after its queued writes. The record must have left all slots before.

        Raises `StorageError` if the threads have been stopped.
        """
        tiers = [tier for tier in self._tiers if shared or not tier.shared]
        try:
            return [self._submit(tier, key, self._delete, tier, key) for tier in tiers]
        except RuntimeError as error:
            raise StorageError("the store is closed: remove records again after the next start") from error

    def will_delete(self, tier: Tier, key: ChunkKey) -> bool:
        """Return whether a record will be deleted from a tier when the tier responds."""
        return key in self._undeleted[tier.name]

    def write_again(self, pin: Pin, tiers: Sequence[Tier]) -> "list[Future[None]]":
        """Write a pinned chunk to tiers that have lost it. The caller keeps it pinned until the writes have ended."""
        return [self._submit(tier, pin.key, self._write_pinned, tier, pin) for tier in tiers]

    def close(self) -> None:
        """Write the chunks that are only in memory, and stop the threads. The state must be closed before.

        A tier that other processes share gets only the chunks that it missed before. It may have evicted the others,
        which are then not written again.
        """
        self._state.wait_until_flushed()
        self._copies.shutdown()
        resident, writes, late = self._state.resident(), list[Future[None]](), Counter[str]()
        for tier in self._tiers:
            keys = [key for key in resident if not tier.shared or key in self._state.queues.missed[tier.name]]
            there = self._guard(tier, "lookup", tier.contains, keys) if keys else None
            for key, present in zip(keys, there or [False] * len(keys), strict=True):
                if not present:
                    try:
                        writes.append(self._submit(tier, key, self._write_last, tier, resident[key]))
                    except RuntimeError:  # Python stops thread pools before it calls exit handlers.
                        late[tier.name] += 1
        wait(writes)  # An unexpected error of one has been logged, and must not keep the others from being written.
        for name, count in late.items():
            text = "%d chunks were not written to tier %s: shut the engine down before its process exits"
            log.warning(text, count, name)
        self._closed.set()
        if self._retrying is not None:
            self._retrying.join()
        with suppress(RuntimeError):  # for the same reason
            self._delete_again()
        for tier in self._tiers:
            if count := len(self._undeleted[tier.name]):
                log.warning("%d records could not be deleted from tier %s: remove them again later", count, tier.name)
        for thread in chain(*self._queues.values()):
            thread.shutdown()

    # -- in the threads ----------------------------------------------------------------------------------------------

    def _submit(self, tier: Tier, key: ChunkKey, job: Callable[..., T], *arguments: object) -> "Future[T]":
        """Run a job after all earlier jobs for `key` in this tier."""
        queues = self._queues[tier.name]
        return queues[key[-1] % len(queues)].submit(job, *arguments)

    def _delete(self, tier: Tier, key: ChunkKey) -> None:
        if tier.usable and logged(self._guard, tier, "write", tier.delete, key) is not None:
            self._is_deleted(tier, key)
            return
        with self._mutex:
            waiting = self._undeleted[tier.name]
            waiting[key] = None
            if len(waiting) > MAX_UNDELETED:
                waiting.popitem(last=False)
            if self._retrying is None and not self._closed.is_set():
                retrying = threading.Thread(target=self._retry, name="lmc-delete", daemon=True)
                with suppress(RuntimeError):  # No thread can be started now. The next failure will try to start one.
                    retrying.start()
                    self._retrying = retrying
        self._guard.complain(tier.name, f"tier {tier.name} did not delete a record; it will be tried again")

    def _delete_if_due(self, tier: Tier, key: ChunkKey) -> None:
        """Delete a record that was not deleted before, unless its chunk has been stored again since."""
        if self.will_delete(tier, key):
            self._delete(tier, key)

    def _is_deleted(self, tier: Tier, key: ChunkKey) -> None:
        with self._mutex:
            self._undeleted[tier.name].pop(key, None)

    def _retry(self) -> None:
        """Delete what tiers did not delete, until nothing is left or the writer is closed."""
        while not self._closed.wait(RETRY_SECONDS):
            with suppress(Exception):  # The error has been logged.
                self._delete_again()
            with self._mutex:
                if not any(self._undeleted.values()):
                    self._retrying = None
                    return

    def _delete_again(self) -> None:
        for tier in self._tiers:
            keys = list(self._undeleted[tier.name]) if tier.usable else []
            wait([self._submit(tier, key, self._delete_if_due, tier, key) for key in keys])

    def _send(self, outgoing: Outgoing, parts: Sequence[memoryview]) -> None:
        for tier in outgoing.tiers:
            try:
                self._submit(tier, outgoing.meta.key, self._write, tier, outgoing.meta, parts, outgoing)
            except RuntimeError:  # See `do`.
                self._state.written(tier, outgoing.meta, None, outgoing)

    def _carry(self, held: HeldChunk, target: SlotPool, ticket: int) -> None:
        try:
            logged(self._copy, held, target)
        finally:
            self._state.copied(held, ticket)

    def _copy(self, held: HeldChunk, target: SlotPool) -> None:
        """Copy a chunk to another pool, if that pool lacks it and has room."""
        reservation, todo = self._state.begin(held.meta, target)
        self.do(todo)
        if reservation is None:
            return
        try:
            target.slab.copy_from(reservation.slot, held.pool.slab, held.slot)
        except BaseException:
            self._state.abort(reservation)
            raise
        _, todo = self._state.commit(reservation, held)
        self.do(todo)

    def _write(self, tier: Tier, meta: RecordMeta, parts: Sequence[memoryview], outgoing: Outgoing | None) -> None:
        outcome: Written | None = None
        self._is_deleted(tier, meta.key)  # The chunk has been stored again since.
        try:
            if not header_fits(meta):
                outcome = Written.REFUSED
                text = "the last chunk of a document of %d tokens is not written to tiers: its label is too long"
                self._guard.complain("labels", text % (meta.first + meta.tokens))
            elif tier.usable:
                outcome = logged(self._guard, tier, "write", tier.write, meta, parts)
            else:  # The tier has become unusable since the record was queued.
                self._state.not_written(f"tier {tier.name} is not usable", meta.key, tier)
                self._complain()
        finally:
            self._state.written(tier, meta, outcome, outgoing)

    def _write_pinned(self, tier: Tier, pin: Pin) -> None:
        """Write a pinned chunk, unless it has been forgotten.

        The check is done in this thread: if the chunk is forgotten after it, its deletion runs after this write.
        """
        held = self._state.held_by(pin)
        if held is not None:
            self._write_last(tier, held)

    def _write_last(self, tier: Tier, held: HeldChunk) -> None:
        try:
            parts = self._bytes_of(held)
        except OSError as error:  # no memory for a copy
            self._state.not_written(f"what is in memory only cannot be copied ({error})", held.meta.key, tier)
            self._complain()
        else:
            self._write(tier, held.meta, parts, None)

    def _complain(self) -> None:
        for about, text in self._state.take_complaints() if self._state.queues.complaints else ():
            self._guard.complain(about, text)

    def _bytes_of(self, held: HeldChunk) -> list[memoryview]:
        slab, parts, size = held.pool.slab, held.meta.parts, held.meta.stored_part
        if held.pool is not self._state.host:
            return [slab.snapshot(held.slot, parts, size)]
        return slab.memory(held.slot, 0, parts, size)


def _thread(name: str) -> ThreadPoolExecutor:
    """Start a thread at once, so that a chunk that waits later cannot fail because no thread can be started."""
    pool = ThreadPoolExecutor(1, thread_name_prefix=name)
    pool.submit(int)
    return pool
