"""The contract between engines and a chunk store. Its handles are plain data.

A handle can be sent to another process, so that a store in a service of its own can fulfil the same contract: the bytes
are in slots of a slab that both processes have mapped, and the handle names the slot. `lmc.storage.store.Store` is the
driver for a store in the same process.
"""

from collections.abc import Collection, Sequence
from enum import Enum
from typing import NamedTuple, Protocol

import torch

from lmc.keys import ChunkKey
from lmc.storage.change_log import ChangeLog
from lmc.storage.ledger import Slot
from lmc.storage.record import RecordMeta
from lmc.storage.stats import StoreStats


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

    changes: ChangeLog

    def lookup(self, keys: Sequence[ChunkKey], *, shared: bool = True) -> list[str | None]:
        """Return where each chunk is, or None. Nothing is held, so a chunk may have gone when it is pinned.

        Tiers that other processes share are asked only if `shared`, because that takes a round trip.
        """

    def pin(self, keys: Sequence[ChunkKey], places: Sequence[str | None] | None = None) -> list[Pin | None]:
        """Hold chunks, and begin to load those that are on tiers; return None for each chunk that is missing.

        `places` are those that `lookup` has just returned.
        """

    def state(self, pin: Pin) -> PinState:
        """Return the state of a pinned chunk now, without waiting."""

    def arrived(self, pin: Pin) -> int:
        """Return how many parts of a pinned chunk have arrived, without waiting."""

    def part(self, pin: Pin, part: int) -> torch.Tensor:
        """Wait for a part and return a view of it, uint8 `[stride]`; raise `ChunkLost` if it will not arrive."""

    def release(self, pins: Sequence[Pin], *, wait: bool = True) -> None:
        """Release pins. Loads that nobody else needs are cancelled, and with `wait` have ended afterwards."""

    def begin(self, meta: RecordMeta) -> Reservation | None:
        """Reserve a slot; None if the chunk is in memory, is being written or loaded, or if every slot is held."""

    def view(self, reservation: Reservation) -> torch.Tensor:
        """Return the slot to fill, uint8 `[parts, stride]`."""

    def commit(self, reservation: Reservation) -> None:
        """Let the chunk be found from now on."""

    def abort(self, reservation: Reservation) -> None:
        """Return the slot as if nothing had been begun."""

    def forget(self, key: ChunkKey, *, wait: bool = True, shared: bool = True) -> None:
        """Remove a chunk everywhere; without `shared`, tiers that other processes share keep it."""

    def copies(self, keys: Sequence[ChunkKey]) -> list[str]:
        """Return the places that have all of these chunks, without the tiers that other processes share."""

    def protect(self, keys: Collection[ChunkKey], *, pinned: bool) -> None:
        """Pin chunks of documents, so that they are not evicted, or let them be evicted again."""

    def spread(self, keys: Sequence[ChunkKey]) -> list[ChunkKey]:
        """Write chunks to the tiers that do not have them, and return those that are nowhere."""

    def stats(self) -> StoreStats:
        """Return counts since the start."""
