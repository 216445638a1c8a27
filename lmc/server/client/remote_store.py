"""An engine's chunk store that uses a cache server.

It implements the contract of `lmc.storage.contract`. Chunks are read and filled in the slab that the server shares.
The slot's label shows which parts of a chunk have arrived, so this needs no request. If the server ends or does not
respond in time, every lookup is a miss, and the loads in flight are lost. A thread attaches again when a server is
available and all pins and reservations of the old server are released.
"""

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import msgspec
import torch

from lmc.documents.server import DocumentServer, FollowingEngine, LearningEngine
from lmc.errors import ChunkLost, LmcError, StorageError, TierUnusable
from lmc.http.address import is_local_url
from lmc.keys import ChunkKey
from lmc.server import messages as m
from lmc.server.client.attachment import Attachment
from lmc.server.client.connection import Gone
from lmc.server.client.remote_keeper import RemoteKeeper
from lmc.server.client.remote_learning import RemoteLearning
from lmc.storage.change_log import Change, Changes, Chunk, by_place
from lmc.storage.chunk_layout import ChunkLayout
from lmc.storage.contract import ChunkStore, Pin, PinState, Reservation, StoredChunk
from lmc.storage.cost_model import CostModel
from lmc.storage.memory.slab import LOST, Slab
from lmc.storage.stats import RunningCounts, StoreStats
from lmc.storage.tiers.record import RecordMeta

log = logging.getLogger(__name__)

BEAT_SECONDS = 1.0  # between two heartbeats
WARNING_SECONDS = 60.0  # between two warnings about the server
SLOW_REQUEST_SECONDS = 300.0  # seconds; timeout for slow requests, such as the list of all records
CHANGE_NUMBERS = 1 << 40  # change numbers reserved for each attachment
MIN_POLL_SECONDS, MAX_POLL_SECONDS = 2e-5, 1e-3  # seconds between two reads of a label
T = TypeVar("T")


class RemoteStore(ChunkStore, DocumentServer):
    """A chunk store in a cache server."""

    slab: Slab | None

    def __init__(
        self,
        path: Path,
        layout: ChunkLayout,
        *,
        deadline: float,
        model: str = "",
        tokenizer: str = "",
        chunk_size: int = 0,
    ) -> None:
        """Attach to the server that listens at `path`.

        The store drops a server that does not respond within `deadline` seconds. The server shows `model` and the path
        of its `tokenizer` to administrators. Documents are cut into chunks of `chunk_size` tokens. Raises
        `TierUnusable`, `ConfigError` or `StorageError`.
        """
        self._path, self._layout, self._deadline = path, layout, deadline
        self._introduction = m.Introduce(model, tokenizer, chunk_size)
        self._lock = threading.Lock()
        self._held: set[int] = set()  # lease numbers of pins and reservations
        self._lost: set[int] = set()  # leases of a lost server whose pins and reservations are still in use
        self._leasing_requests = 0  # requests in flight whose responses may contain leases
        self._pinned_chunks = 0  # chunks of pinned documents in the server, for all clients
        self._learning: RemoteLearning | None = None  # None if this process learns no documents
        self._keeper: RemoteKeeper | None = None
        self._counts = RunningCounts()
        self._ended = threading.Event()
        self.cost, self.changes = CostModel(), _RemoteChanges(self)
        self.attachment: Attachment | None = None
        self._last: Attachment | None = None  # the attachment whose slab may still be mapped
        self._complained = float("-inf")
        try:
            at = self._attach()
            self._changes_at_start = at.changes
            self._take(at)
        except Gone as error:
            raise TierUnusable(f"the cache server at {path} closed the connection ({error})") from error
        self._thread = threading.Thread(target=self._keep_attached, name="lmc-server", daemon=True)
        self._thread.start()

    # -- finding and reading -----------------------------------------------------------------------------------------

    def lookup(self, keys: Sequence[ChunkKey], *, shared: bool = True) -> list[str | None]:
        """See `ChunkStore.lookup`."""
        return [
            place
            for batch in m.batches(keys)
            for place in self.ask(m.LookUp(batch, shared), list[str | None]([None]) * len(batch))
        ]

    def unanswered(self, keys: Sequence[ChunkKey]) -> bool:
        """See `ChunkStore.unanswered`."""
        return any(self.ask(m.Unanswered(batch), False) for batch in m.batches(keys))

    def pin(self, keys: Sequence[ChunkKey], places: Sequence[str | None] | None = None) -> list[Pin | None]:
        """See `ChunkStore.pin`."""
        if not keys:
            return []
        request = m.PinKeys(list(keys), None if places is None else list(places))
        with self._leasing() as at:
            pins: list[Pin | None] = self._response(at, request, [None] * len(keys))
            self._hold(at, [pin.lease for pin in pins if pin is not None])
        return pins

    def state(self, pin: Pin) -> PinState:
        """See `ChunkStore.state`."""
        ready = self._ready(pin)
        return {self._layout.parts: PinState.READY, LOST: PinState.LOST}.get(ready, PinState.COMING)

    def arrived(self, pin: Pin) -> int:
        """See `ChunkStore.arrived`."""
        return max(0, self._ready(pin))

    def part(self, pin: Pin, part: int) -> torch.Tensor:
        """See `ChunkStore.part`."""
        pause = MIN_POLL_SECONDS
        while (ready := self._ready(pin)) <= part:
            if ready == LOST:
                raise ChunkLost([pin.key])
            time.sleep(pause)
            pause = min(2 * pause, MAX_POLL_SECONDS)
        assert self.slab is not None, "a slab stays mapped while something is held"
        return self.slab.part(pin.slot, part)

    def release(self, pins: Sequence[Pin], *, wait: bool = True) -> None:
        """See `ChunkStore.release`. It does not wait for loads: the server keeps their slots until they end."""
        if leases := self._forget_leases([pin.lease for pin in pins]):
            self._send(m.Release(leases))

    # -- storing -----------------------------------------------------------------------------------------------------

    def begin(self, metas: Sequence[RecordMeta]) -> list[Reservation | None]:
        """See `ChunkStore.begin`."""
        if not metas:
            return []
        with self._leasing() as at:
            reservations: list[Reservation | None] = self._response(at, m.Begin(list(metas)), [None] * len(metas))
            self._hold(at, [reservation.lease for reservation in reservations if reservation is not None])
        return reservations

    def view(self, reservation: Reservation) -> torch.Tensor:
        """See `ChunkStore.view`."""
        assert self.slab is not None, "a slab stays mapped while something is held"
        return self.slab.slot(reservation.slot)

    def commit(self, reservations: Sequence[Reservation]) -> None:
        """See `ChunkStore.commit`. While the server is away, the chunks are not stored."""
        if leases := self._forget_leases([reservation.lease for reservation in reservations]):
            self._send(m.Commit(leases))

    def abort(self, reservation: Reservation) -> None:
        """See `ChunkStore.abort`."""
        for lease in self._forget_leases([reservation.lease]):
            self._send(m.Abort(lease))

    def forget(self, key: ChunkKey, *, wait: bool = True, shared: bool = True) -> None:
        """See `ChunkStore.forget`; raise `StorageError` if the server is away, because it may have the chunk."""
        if self.attachment is None:
            raise StorageError(f"the cache server at {self._path} is unreachable: chunks were not removed")
        self.ask_slowly(m.Forget(key, wait, shared), None)

    def copies(self, keys: Sequence[ChunkKey]) -> list[str]:
        """See `ChunkStore.copies`."""
        of_batches = [self.ask_slowly(m.CopiesOf(batch), list[str]()) for batch in m.batches(keys)]
        return [place for place in of_batches[0] if all(place in places for places in of_batches)] if keys else []

    # -- contents and counts -----------------------------------------------------------------------------------------

    def records(self) -> Iterator[StoredChunk]:
        """See `ChunkStore.records`."""
        batch: list[StoredChunk] = self.ask_slowly(m.Records(first=True), [])
        while batch:
            yield from batch
            batch = self.ask_slowly(m.Records(first=False), [])

    def known_keys(self) -> set[ChunkKey]:
        """See `ChunkStore.known_keys`."""
        return self.ask_slowly(m.KnownKeys(), set())

    def held(self) -> int:
        """See `ChunkStore.held`. All clients are counted."""
        return self.ask(m.HeldSlots(), len(self._held))

    def stats(self) -> StoreStats:
        """Return this client's hits and misses, and the server's other counts, since this store was opened.

        The counts are at most about a second old.
        """
        return self._counts.total

    @property
    def connection(self) -> int:
        """See `DocumentServer.connection`."""
        at = self.attachment
        return at.serial if at is not None else 0

    def keeper(self, engine: FollowingEngine) -> RemoteKeeper:
        """See `DocumentServer.keeper`."""
        self._keeper = RemoteKeeper(self.ask_slowly, lambda: self._pinned_chunks, engine, self._changes_at_start)
        return self._keeper

    def share_learning(self, engine: LearningEngine) -> None:
        """See `DocumentServer.share_learning`."""
        self._learning = RemoteLearning(engine)

    def administered_at(self, address: str, explain_token: str) -> None:
        """See `DocumentServer.administered_at`."""
        if not is_local_url(address):
            log.warning(
                "the cache server cannot request explanations at %s: set LMC_ADMIN to a loopback address", address
            )
            return
        self._introduction = msgspec.structs.replace(self._introduction, admin=address, explain_token=explain_token)
        self._send(self._introduction)

    def trim(self) -> None:
        """Do nothing: the server trims its tiers when it opens an arena."""

    def flush(self) -> None:
        """See `ChunkStore.flush`."""
        self.ask_slowly(m.Flush(), None)

    def close(self) -> None:
        """Close the connection. The server keeps all chunks, and writes them to its tiers."""
        self._ended.set()
        self.held()  # The server responds after it has handled all earlier messages, such as commits.
        with self._lock:
            at, self.attachment = self.attachment, None
        if at is not None:
            at.hang_up()
        self._thread.join()
        if self._last is not None:
            self._last.release_lifeline()

    # -- the server --------------------------------------------------------------------------------------------------

    def ask(self, request: m.Request, default: T) -> T:
        """Return the response to a quick request, or `default` if the server is away."""
        return self._response(self.attachment, request, default)

    def ask_slowly(self, request: m.Request, default: T) -> T:
        """Return the response to a request that may take long, or `default` if the server is away."""
        self.held()  # The server responds after it has handled all earlier messages of the quick connection.
        return self._response(self.attachment, request, default, slowly=True)

    def _send(self, request: m.Request) -> None:
        at = self.attachment
        if at is not None:
            with self._without(at):
                at.quick.send(request)

    def _response(self, at: Attachment | None, request: m.Request, default: T, *, slowly: bool = False) -> T:
        if at is not None:
            try:
                with self._without(at):
                    response: T = (at.slow if slowly else at.quick).ask(request)
                    return response
            except StorageError as error:
                if slowly:
                    raise
                self._complain("a request to the cache server at %s failed: %s", error)
        return default

    @contextmanager
    def _without(self, at: Attachment) -> Iterator[None]:
        """Drop a server if the block raises `Gone`: its leases are lost, and every lookup is a miss."""
        try:
            yield
        except Gone as error:
            with self._lock:
                lost = self.attachment is at
                if lost:
                    self.attachment, self._lost, self._held = None, self._lost | self._held, set()
            at.hang_up()
            if lost:
                self._counts.lose()
            if lost and not self._ended.is_set():
                reason = str(error)  # The error itself, in a log record, would keep the memory mapped.
                log.warning("lost the cache server at %s (%s): no KV is reused until it is back", self._path, reason)

    def _attach(self) -> Attachment:
        return Attachment.open(self._path, self._layout, deadline=self._deadline, patience=SLOW_REQUEST_SECONDS)

    def _take(self, at: Attachment) -> bool:
        """Use a new attachment from now on, and return whether this store is still open.

        If the store was closed in the meantime, the attachment is closed, so the server keeps no lease.
        Raises `Gone` if the server has ended already.
        """
        try:
            beat = at.quick.ask(m.Ping())
            at.quick.send(self._introduction)
        except BaseException:
            at.hang_up()
            at.release_lifeline()
            raise
        if self._learning is not None:
            self._learning.begin()
        if self._keeper is not None:
            self._keeper.attached_again()
        self._counts.begin(beat.stats)
        self._pinned_chunks = beat.pinned
        with self._lock:
            closed = self._ended.is_set()
            if not closed:
                self.slab, self.slots = at.slab, at.slab.slots
                self.shared_places, self.pins_yield = at.shared_places, at.pins_yield
                self._last = self.attachment = at
        if closed:
            at.hang_up()
            at.release_lifeline()
        return not closed

    def _keep_attached(self) -> None:
        """Send heartbeats until the store is closed, and attach again after the server was lost."""
        while not self._ended.wait(BEAT_SECONDS):
            at = self.attachment
            try:
                if at is not None:
                    with self._without(at):
                        self._beat(at)
                elif self._unused() and self._take(self._attach()):
                    log.info("the cache server at %s is back", self._path)
            except (TierUnusable, Gone) as error:  # The server has not started yet, or has ended again.
                log.debug("no cache server at %s: %s", self._path, str(error))
            except LmcError as error:
                self._complain("could not attach to the cache server at %s: %s", error)
            except Exception as error:  # noqa: BLE001 - only this thread attaches again, so no error may end it
                self._complain("the cache server at %s cannot be used now: %s", error)

    def _beat(self, at: Attachment) -> None:
        learning = self._learning
        ping = learning.news() if learning else m.Ping()
        if self._keeper is not None:
            ping = msgspec.structs.replace(ping, named=self._keeper.take_named())
        try:
            beat = at.quick.ask(ping)
        except Gone:
            if self._keeper is not None:
                self._keeper.not_sent(ping.named)
            raise
        self._counts.update(beat.stats)
        self._pinned_chunks = beat.pinned
        if learning:
            learning.got(beat.wanted)
        self.cost.take_speeds(beat.speeds)
        at.slow.ask_if_idle(m.Ping())
        while self._keeper is not None and self._keeper.follow(at.quick.ask, beat.changes):
            at.slow.ask_if_idle(m.Ping())  # Each of the two connections must not be silent for long.

    def _unused(self) -> bool:
        """Return whether nothing of the last server is held; if so, unmap its memory."""
        with self._lock:
            unused = not (self._held or self._lost or self._leasing_requests)
            if unused and self._last is not None:
                self._last.release_lifeline()
                self._last = self.slab = None
            return unused

    def _complain(self, text: str, error: Exception) -> None:
        """Log a warning about the server, at most once a minute."""
        if time.monotonic() - self._complained > WARNING_SECONDS:
            self._complained = time.monotonic()
            log.warning(text, self._path, str(error))

    # -- leases ------------------------------------------------------------------------------------------------------

    @contextmanager
    def _leasing(self) -> Iterator[Attachment | None]:
        """Yield the current attachment for a request that returns leases.

        No new server is attached until the block ends, which must record the leases.
        """
        with self._lock:
            self._leasing_requests += 1
            at = self.attachment
        try:
            yield at
        finally:
            with self._lock:
                self._leasing_requests -= 1

    def _hold(self, at: Attachment | None, leases: Sequence[int]) -> None:
        """Record the leases that came over an attachment, which may have been lost in the meantime."""
        with self._lock:
            (self._held if self.attachment is at else self._lost).update(leases)

    def _forget_leases(self, leases: Sequence[int]) -> list[int]:
        """Forget leases, and return those that the current server still holds."""
        with self._lock:
            alive = [lease for lease in leases if lease in self._held]
            self._held.difference_update(alive)
            self._lost.difference_update(leases)
            return alive

    def _ready(self, pin: Pin) -> int:
        """Return how many parts of a pinned chunk have arrived, or `LOST`."""
        slab = self.slab
        return LOST if slab is None or pin.lease not in self._held else slab.ready(pin.slot, pin.tag)


class _RemoteChanges(Changes):
    """The change log of a server. Each attachment has its own numbers, from serial * `CHANGE_NUMBERS` on."""

    def __init__(self, store: RemoteStore) -> None:
        self._store = store
        self._listing = threading.Lock()  # The server has one listing for each client.

    def since(self, number: int) -> tuple[list[Change], bool]:
        """See `Changes.since`. After a change of the server, the result is incomplete, and readers must start again."""
        at, unchanged = self._store.attachment, (list[Change](), True)
        if at is None:
            return unchanged
        base = at.serial * CHANGE_NUMBERS
        if not base <= number < base + CHANGE_NUMBERS:
            return [], False
        changes, complete = self._store.ask(m.Since(number - base), unchanged)
        return [change._replace(number=base + change.number) for change in changes], complete

    def present(self) -> tuple[int, dict[str, list[Chunk]]]:
        """See `Changes.present`."""
        unknown = 0, list[tuple[str, Chunk]]()
        with self._listing:
            connection = self._store.connection
            number, batch = self._store.ask_slowly(m.Present(first=True), unknown)
            chunks = list(batch)
            while batch:
                _, batch = self._store.ask_slowly(m.Present(first=False), unknown)
                chunks += batch
        return connection * CHANGE_NUMBERS + number, by_place(chunks)
