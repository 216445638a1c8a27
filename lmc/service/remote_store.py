"""The chunk store of a cache server, as an engine sees it.

It fulfils the contract of `lmc.storage.contract`. Chunks are read and filled in the slab that the server shares;
whether a chunk has arrived stands in the slot's label, so that nobody has to be asked. If the server ends or does not
answer in time, everything is a miss, and what was being loaded is lost. A thread attaches again when there is a server,
and when nothing of the old one is held any more.
"""

import logging
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from lmc.errors import ChunkLost, ConfigError, StorageError, TierUnusable
from lmc.keys import ChunkKey
from lmc.service import messages as m
from lmc.service.attachment import Attachment, Gone
from lmc.storage.change_log import Change, Changes, Chunk
from lmc.storage.contract import ChunkStore, Pin, PinState, Reservation
from lmc.storage.cost_model import CostModel
from lmc.storage.record import RecordMeta
from lmc.storage.slab import LOST
from lmc.storage.stats import StoreStats

log = logging.getLogger(__name__)

BEAT_SECONDS = 1.0
PATIENCE = 300.0  # seconds for questions such as the list of all records
FIRST_PAUSE, LONGEST_PAUSE = 2e-5, 1e-3  # seconds between two looks at a label


class RemoteStore(ChunkStore):
    """A chunk store in a cache server."""

    def __init__(self, path: Path, sizes: m.Attach, *, deadline: float) -> None:
        """Attach to the server that listens at `path`.

        A server that does not answer within `deadline` seconds is left. Raises `TierUnusable`, `ConfigError` or
        `StorageError`.
        """
        self._path, self._sizes, self._deadline = path, sizes, deadline
        self._lock = threading.Lock()
        self._held: set[int] = set()  # leases
        self._lost: set[int] = (
            set()
        )  # leases of a server that has gone; pins and reservations that have them exist still
        self._ended = threading.Event()
        self.cost, self.changes = CostModel(), _RemoteChanges(self)
        self.attachment: Attachment | None = None
        self._take(self._attach())
        self._thread = threading.Thread(target=self._look_after, name="lmc-server", daemon=True)
        self._thread.start()

    # -- finding and reading -----------------------------------------------------------------------------------------

    def lookup(self, keys: Sequence[ChunkKey], *, shared: bool = True) -> list[str | None]:
        """See `ChunkStore.lookup`."""
        found: list[str | None] = self.ask(m.LookUp(list(keys), shared), [None] * len(keys)) if keys else []
        return found

    def pin(self, keys: Sequence[ChunkKey], places: Sequence[str | None] | None = None) -> list[Pin | None]:
        """See `ChunkStore.pin`."""
        if not keys:
            return []
        at, asked = self.attachment, m.PinKeys(list(keys), None if places is None else list(places))
        found: list[Pin | None] = self.ask(asked, [None] * len(keys))
        self._hold(at, [pin.lease for pin in found if pin is not None])
        return found

    def state(self, pin: Pin) -> PinState:
        """See `ChunkStore.state`."""
        ready = self._ready(pin)
        return {self.slab.parts: PinState.READY, LOST: PinState.LOST}.get(ready, PinState.COMING)

    def arrived(self, pin: Pin) -> int:
        """See `ChunkStore.arrived`."""
        return max(0, self._ready(pin))

    def part(self, pin: Pin, part: int) -> torch.Tensor:
        """See `ChunkStore.part`."""
        pause = FIRST_PAUSE
        while (ready := self._ready(pin)) <= part:
            if ready == LOST:
                raise ChunkLost([pin.key])
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        return self.slab.part(pin.slot, part)

    def release(self, pins: Sequence[Pin], *, wait: bool = True) -> None:
        """See `ChunkStore.release`. Loads are not waited for: the server gives their slots to nobody meanwhile."""
        if leases := self._let_go([pin.lease for pin in pins]):
            self._tell(m.Release(leases))

    # -- storing -----------------------------------------------------------------------------------------------------

    def begin(self, meta: RecordMeta) -> Reservation | None:
        """See `ChunkStore.begin`."""
        at = self.attachment
        found: Reservation | None = self.ask(m.Begin(meta), None)
        self._hold(at, [found.lease] if found is not None else [])
        return found

    def view(self, reservation: Reservation) -> torch.Tensor:
        """See `ChunkStore.view`."""
        return self.slab.slot(reservation.slot)

    def commit(self, reservation: Reservation) -> None:
        """See `ChunkStore.commit`. Without the server, the chunk is not kept."""
        for lease in self._let_go([reservation.lease]):
            self._tell(m.Commit(lease))

    def abort(self, reservation: Reservation) -> None:
        """See `ChunkStore.abort`."""
        for lease in self._let_go([reservation.lease]):
            self._tell(m.Abort(lease))

    def forget(self, key: ChunkKey, *, wait: bool = True, shared: bool = True) -> None:
        """See `ChunkStore.forget`; raise `StorageError` without the server, which may have the chunk."""
        if self.attachment is None:
            raise StorageError(f"the cache server at {self._path} is away, so nothing can be removed there")
        self.ask_slowly(m.Forget(key, wait, shared), None)

    def copies(self, keys: Sequence[ChunkKey]) -> list[str]:
        """See `ChunkStore.copies`."""
        found: list[str] = self.ask_slowly(m.CopiesOf(list(keys)), [])
        return found

    def protect(self, keys: Collection[ChunkKey], *, pinned: bool) -> None:
        """See `ChunkStore.protect`. It holds for as long as this process is attached."""
        self.ask_slowly(m.Protect(list(keys), pinned), None)

    def spread(self, keys: Sequence[ChunkKey]) -> list[ChunkKey]:
        """See `ChunkStore.spread`."""
        found: list[ChunkKey] = self.ask_slowly(m.Spread(list(keys)), [])
        return found

    # -- what is there -----------------------------------------------------------------------------------------------

    def records(self) -> Iterator[tuple[str, RecordMeta]]:
        """See `ChunkStore.records`."""
        some = self.ask_slowly(m.Records(first=True), [])
        while some:
            yield from some
            some = self.ask_slowly(m.Records(first=False), [])

    def last_uses(self) -> dict[ChunkKey, float]:
        """See `ChunkStore.last_uses`."""
        found: dict[ChunkKey, float] = self.ask_slowly(m.LastUses(), {})
        return found

    def known_keys(self) -> set[ChunkKey]:
        """See `ChunkStore.known_keys`."""
        found: set[ChunkKey] = self.ask_slowly(m.KnownKeys(), set())
        return found

    def held(self) -> int:
        """See `ChunkStore.held`. All clients are counted."""
        found: int = self.ask(m.HeldSlots(), len(self._held))
        return found

    def stats(self) -> StoreStats:
        """Return the counts of the server for all clients, a second old at most."""
        return self._beat.stats

    def trim(self) -> None:
        """Do nothing: the server has done that at its start."""

    def flush(self) -> None:
        """See `ChunkStore.flush`."""
        self.ask_slowly(m.Flush(), None)

    def close(self) -> None:
        """End the connection. The server keeps everything, and writes it down."""
        self._ended.set()
        self._thread.join()
        with self._lock:
            at, self.attachment = self.attachment, None
        if at is not None:
            at.hang_up()
            at.let_go()

    # -- the server --------------------------------------------------------------------------------------------------

    def ask(self, question: m.Request, otherwise: Any) -> Any:
        """Return the answer to a quick question, or `otherwise` without the server."""
        at = self.attachment
        return otherwise if at is None else self._asked(at, at.quick.ask, question, otherwise)

    def ask_slowly(self, question: m.Request, otherwise: Any) -> Any:
        """Return the answer to a question that may take long, or `otherwise` without the server."""
        self.held()  # The answer comes after everything that the server was told to do before.
        at = self.attachment
        return otherwise if at is None else self._asked(at, at.slow.ask, question, otherwise)

    def _tell(self, question: m.Request) -> None:
        at = self.attachment
        if at is not None:
            self._asked(at, at.quick.tell, question, None)

    def _asked(self, at: Attachment, ask: Any, question: m.Request, otherwise: Any) -> Any:
        try:
            return ask(question)
        except Gone as error:
            self._lose(at, error)
            return otherwise

    def _attach(self) -> Attachment:
        return Attachment.open(self._path, self._sizes, deadline=self._deadline, patience=PATIENCE)

    def _take(self, at: Attachment) -> None:
        self._beat: m.Beat = at.quick.ask(m.Ping())
        self.slab, self.slots, self.shared_places = at.slab, at.slots, at.shared_places
        self._last, self.attachment = at, at

    def _lose(self, at: Attachment, error: Exception) -> None:
        """Do without a server from now on."""
        with self._lock:
            if self.attachment is not at:
                return
            self.attachment = None
            self._lost, self._held = self._lost | self._held, set()
        at.hang_up()
        if not self._ended.is_set():
            log.warning("the cache server at %s is away (%s): nothing is reused until it is back", self._path, error)

    def _look_after(self) -> None:
        """Notice that the server has gone, and attach again."""
        while not self._ended.wait(BEAT_SECONDS):
            at = self.attachment
            if at is not None:
                self._asked(at, at.slow.ask_if_idle, m.Ping(), None)
                beat = self._asked(at, at.quick.ask, m.Ping(), None)
                if beat is not None:
                    self._beat = beat
                    self.cost.take_speeds(beat.speeds)
            elif not (self._held or self._lost):  # Workers may still copy from and to the old slab otherwise.
                self._last.let_go()
                try:
                    self._take(self._attach())
                except (TierUnusable, ConfigError, Gone) as error:
                    log.debug("%s", error)
                else:
                    log.info("the cache server at %s is back", self._path)

    # -- leases ------------------------------------------------------------------------------------------------------

    def _hold(self, at: Attachment | None, leases: Sequence[int]) -> None:
        """Note what was asked for over an attachment, which may have been lost since."""
        with self._lock:
            (self._held if self.attachment is at else self._lost).update(leases)

    def _let_go(self, leases: Sequence[int]) -> list[int]:
        """Forget leases, and return those that the server still has."""
        with self._lock:
            alive = [lease for lease in leases if lease in self._held]
            self._held.difference_update(alive)
            self._lost.difference_update(leases)
            return alive

    def _ready(self, pin: Pin) -> int:
        """Return how many parts of a pinned chunk are there, or `LOST`."""
        return LOST if pin.lease not in self._held else self.slab.ready(pin.slot, pin.tag)


class _RemoteChanges(Changes):
    """The change log of a server. A reader has to begin again when another server answers."""

    def __init__(self, store: RemoteStore) -> None:
        self._store = store
        self._told: Attachment | None = None

    def since(self, number: int) -> tuple[list[Change], bool]:
        """See `Changes.since`."""
        at = self._store.attachment
        if at is None:
            return [], True
        found: tuple[list[Change], bool] = self._store.ask(m.Since(number), ([], True))
        return found if at is self._told else ([], False)

    def present(self) -> tuple[int, dict[str, list[Chunk]]]:
        """See `Changes.present`."""
        at = self._store.attachment
        found: tuple[int, dict[str, list[Chunk]]] = self._store.ask_slowly(m.Present(), (0, {}))
        self._told = at
        return found
