"""The contract between engines and a chunk store. Its handles are plain data.

A handle can be sent to another process, so a store in a separate service can fulfil the same contract. The bytes are in
slots of a slab that both processes have mapped, and the handle names the slot. `lmc.storage.store.Store` is the driver
for a store in the same process. `lmc.server.client.remote_store.RemoteStore` is the driver for a cache server.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import NamedTuple, Protocol

import torch

from lmc.keys import ChunkKey
from lmc.storage.change_log import Changes
from lmc.storage.cost_model import CostModel
from lmc.storage.memory.slab import Slab, Slot
from lmc.storage.stats import StoreStats
from lmc.storage.tiers.record import RecordMeta


class PinState(Enum):
    """The loading state of a pinned chunk."""

    READY = "ready"
    COMING = "coming"  # The load is in flight; some parts may have arrived.
    LOST = "lost"  # The load failed; the missing parts will not arrive.


class Pin(NamedTuple):
    """A hold on a chunk that is in memory or is being loaded from a tier. The chunk is not evicted until release."""

    key: ChunkKey
    slot: Slot
    tag: int  # the tag in the slot's label while the slot holds this chunk
    level: str  # the memory that the slot belongs to: "device" or "host"
    place: str  # where the chunk was found: "device", "host", or a tier's name
    state: PinState  # at the time of pinning; `ChunkStore.state` returns the current state
    lease: int  # a number that is unique among all pins and reservations


class StoredChunk(NamedTuple):
    """A chunk that is stored when an engine starts."""

    place: str
    meta: RecordMeta  # without sizes and checksums of parts
    used: float  # when it was last used, in seconds since 1970; 0 if it is only in memory


class Reservation(NamedTuple):
    """A reserved slot that the caller fills before `commit` or `abort`."""

    meta: RecordMeta
    slot: Slot
    level: str
    lease: int


class ChunkStore(Protocol):
    """A store of chunks by key. Any thread may call any method."""

    changes: Changes
    cost: CostModel  # the estimates by which connectors choose between loading and computing
    slab: Slab | None  # in host memory; None while the cache server is gone, and a new slab after it has come back
    slots: int  # the number of chunks that fit in host memory
    shared_places: frozenset[str]  # the tiers that other processes also use
    pins_yield: bool  # whether pinned chunks may be evicted from host memory, because a tier of the store keeps them

    def lookup(self, keys: Sequence[ChunkKey], *, shared: bool = True) -> list[str | None]:
        """Return the place of each chunk, or None if it is missing.

        A lookup holds nothing, so a chunk may be evicted before it is pinned. Tiers that other processes share are
        asked only with `shared`, because that takes a round trip.
        """

    def unanswered(self, keys: Sequence[ChunkKey]) -> bool:
        """Return whether a slow tier has yet to answer whether it has some of these chunks."""

    def pin(self, keys: Sequence[ChunkKey], places: Sequence[str | None] | None = None) -> list[Pin | None]:
        """Hold chunks, and start to load those that are on tiers. The result has None for each missing chunk.

        `places` is the result of a `lookup` just before this call.
        """

    @contextmanager
    def pinned(self, keys: Sequence[ChunkKey]) -> Iterator[list[Pin | None]]:
        """Pin chunks inside the block. Leaving it early cancels the loads that no other caller waits for."""
        pins = self.pin(keys)
        try:
            yield pins
        finally:
            self.release([pin for pin in pins if pin is not None])

    def state(self, pin: Pin) -> PinState:
        """Return the current state of a pinned chunk, without waiting."""

    def arrived(self, pin: Pin) -> int:
        """Return how many parts of a pinned chunk have arrived, without waiting."""

    def part(self, pin: Pin, part: int) -> torch.Tensor:
        """Wait for a part and return a view of it: uint8 `[stride]`. Raises `ChunkLost` if it will not arrive."""

    def release(self, pins: Sequence[Pin], *, wait: bool = True) -> None:
        """Release pins, and cancel loads that no other caller needs. With `wait`, wait until these loads have ended."""

    def begin(self, metas: Sequence[RecordMeta]) -> list[Reservation | None]:
        """Reserve a slot for each chunk.

        The result has None for a chunk that is in memory or is being written or loaded, and if all slots are held.
        Reserve the slots of several chunks in one call: a store in another process needs one message per call.
        """

    def view(self, reservation: Reservation) -> torch.Tensor:
        """Return the slot to fill, uint8 `[parts, stride]`."""

    def commit(self, reservations: Sequence[Reservation]) -> None:
        """Make the chunks visible to lookups."""

    def abort(self, reservation: Reservation) -> None:
        """Give the slot back, as if `begin` had not reserved it."""

    def forget(self, key: ChunkKey, *, wait: bool = True, shared: bool = True) -> None:
        """Remove a chunk from memory and all tiers. Without `shared`, tiers that other processes share keep it."""

    def copies(self, keys: Sequence[ChunkKey]) -> list[str]:
        """Return the places that have all of these chunks, without the tiers that other processes share."""

    def records(self) -> Iterator[StoredChunk]:
        """Return the chunks in memory and in the tiers that are not shared.

        Of a tier, documents come first, and of each kind the most recently used chunk. A chunk in several places is
        listed once. One that is used or moved meanwhile may come twice.
        """

    def known_keys(self) -> set[ChunkKey]:
        """Return every key in memory and in the tiers that are not shared."""

    def held(self) -> int:
        """Return the number of slots that are held or being written. It is 0 when the store is idle."""

    def trim(self) -> None:
        """Evict records from tiers that exceed their bound, which may be smaller than in an earlier process."""

    def flush(self) -> None:
        """Wait until all queued chunks have been written."""

    def close(self) -> None:
        """Write the chunks that are only in memory to the tiers, and close the store and its tiers."""

    def stats(self) -> StoreStats:
        """Return counts since the start."""
