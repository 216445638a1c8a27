"""The contract between engines and a chunk store. Its handles are plain data.

A handle can be sent to another process, so that a store in a service of its own fulfils the same contract: the bytes
are in slots of a slab that both processes have mapped, and the handle names the slot. `lmc.storage.store.Store` is the
driver for a store in the same process, and `lmc.server.client.remote_store.RemoteStore` the one for a cache server.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import NamedTuple, Protocol

import torch

from lmc.keys import ChunkKey
from lmc.storage.change_log import Changes
from lmc.storage.cost_model import CostModel
from lmc.storage.ledger import Slot
from lmc.storage.memory.slab import Slab
from lmc.storage.stats import StoreStats
from lmc.storage.tiers.record import RecordMeta


class PinState(Enum):
    """How much of a pinned chunk has arrived."""

    READY = "ready"
    COMING = "coming"  # Parts of it may have arrived.
    LOST = "lost"  # The rest of it will not arrive.


class Pin(NamedTuple):
    """A chunk that is not evicted until the pin is released. It is in memory, or is being loaded from a tier."""

    key: ChunkKey
    slot: Slot
    tag: int  # which the slot's label has while the chunk is in it
    level: str  # the memory that the slot belongs to: "device" or "host"
    place: str  # where the chunk was found: "device", "host", or a tier's name
    state: PinState  # when it was pinned; `ChunkStore.state` has the state now
    lease: int  # a number that no other pin or reservation gets


class Reservation(NamedTuple):
    """A slot to be filled, until `commit` or `abort`."""

    meta: RecordMeta
    slot: Slot
    level: str
    lease: int


class ChunkStore(Protocol):
    """Chunks under keys. Any thread may call any method."""

    changes: Changes
    cost: CostModel  # the estimates by which connectors choose between loading and computing
    slab: Slab | None  # in host memory; None without the cache server, and another one after it has come back
    slots: int  # how many chunks fit in host memory
    shared_places: frozenset[str]  # the tiers that other processes use as well
    pins_yield: bool  # whether pinned chunks may be evicted from host memory, because a tier of the store keeps them

    def lookup(self, keys: Sequence[ChunkKey], *, shared: bool = True) -> list[str | None]:
        """Return where each chunk is, or None. Nothing is held, so a chunk may have gone when it is pinned.

        Tiers that other processes share are asked only if `shared`, because that takes a round trip.
        """

    def pin(self, keys: Sequence[ChunkKey], places: Sequence[str | None] | None = None) -> list[Pin | None]:
        """Hold chunks, and begin to load those that are on tiers; return None for each chunk that is missing.

        `places` are those that `lookup` has just returned.
        """

    @contextmanager
    def pinned(self, keys: Sequence[ChunkKey]) -> Iterator[list[Pin | None]]:
        """Pin chunks inside the block. Leaving it early cancels the loads that nobody else waits for."""
        pins = self.pin(keys)
        try:
            yield pins
        finally:
            self.release([pin for pin in pins if pin is not None])

    def state(self, pin: Pin) -> PinState:
        """Return the state of a pinned chunk now, without waiting."""

    def arrived(self, pin: Pin) -> int:
        """Return how many parts of a pinned chunk have arrived, without waiting."""

    def part(self, pin: Pin, part: int) -> torch.Tensor:
        """Wait for a part and return a view of it, uint8 `[stride]`; raise `ChunkLost` if it will not arrive."""

    def release(self, pins: Sequence[Pin], *, wait: bool = True) -> None:
        """Release pins. Loads that nobody else needs are cancelled, and with `wait` have ended afterwards."""

    def begin(self, metas: Sequence[RecordMeta]) -> list[Reservation | None]:
        """Reserve a slot for each chunk; None if it is in memory, is being written or loaded, or if all slots are held.

        Those of several chunks are best asked for together, because a store in another process answers each question
        with a message.
        """

    def view(self, reservation: Reservation) -> torch.Tensor:
        """Return the slot to fill, uint8 `[parts, stride]`."""

    def commit(self, reservations: Sequence[Reservation]) -> None:
        """Let the chunks be found from now on."""

    def abort(self, reservation: Reservation) -> None:
        """Return the slot as if nothing had been begun."""

    def forget(self, key: ChunkKey, *, wait: bool = True, shared: bool = True) -> None:
        """Remove a chunk everywhere; without `shared`, tiers that other processes share keep it."""

    def copies(self, keys: Sequence[ChunkKey]) -> list[str]:
        """Return the places that have all of these chunks, without the tiers that other processes share."""

    def records(self) -> Iterator[tuple[str, RecordMeta]]:
        """Return the chunks that are there when an engine starts, with their places."""

    def last_uses(self) -> dict[ChunkKey, float]:
        """Return when each record in the tiers that are not shared was used last, in seconds since 1970."""

    def known_keys(self) -> set[ChunkKey]:
        """Return every key in memory and in the tiers that are not shared."""

    def held(self) -> int:
        """Return how many slots are held or being written; it is zero when nothing is going on."""

    def trim(self) -> None:
        """Evict what a tier has beyond its bound, which may be smaller than it was in an earlier process."""

    def flush(self) -> None:
        """Wait until everything that was queued has been written."""

    def close(self) -> None:
        """Write what is in memory only, and close everything."""

    def stats(self) -> StoreStats:
        """Return counts since the start."""
