"""What one client of a cache server holds, and what becomes of it when the client is gone."""

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

from lmc.keys import ChunkKey
from lmc.service.arenas import ProtectedKeys
from lmc.service.channel import BrokenProtocol
from lmc.service.lifelines import wait_until_gone
from lmc.storage.contract import Pin, Reservation
from lmc.storage.record import HEADER_LIMIT, NO_CODEC, RecordMeta
from lmc.storage.store import Store

log = logging.getLogger(__name__)

DIGEST = 32  # bytes of a key and of a namespace
LONGEST_LABEL = HEADER_LIMIT // 8  # characters, which the header of a record may need several bytes for


class Lease:
    """The pins and reservations of one client. One thread uses it.

    While one of the client's processes lives it may write into slots that the client has reserved. So these slots are
    not used again after the end of the lease, until no process has the client's lifeline locked.
    """

    def __init__(self, store: Store, pinned_keys: ProtectedKeys, lifeline: Path) -> None:
        self.store, self._pinned_keys, self.lifeline = store, pinned_keys, lifeline
        self.listed: Iterator[tuple[str, RecordMeta]] = iter(())  # what `Records` has still to tell
        self._pins: dict[int, Pin] = {}
        self._reservations: dict[int, Reservation] = {}
        self._protected: set[ChunkKey] = set()

    def pin(self, keys: Sequence[ChunkKey], places: Sequence[str | None] | None) -> list[Pin | None]:
        """See `ChunkStore.pin`; raise `BrokenProtocol` if there is not a place for each key."""
        if places is not None and len(places) != len(keys):
            raise BrokenProtocol("keys and places that do not belong together")
        pins = self.store.pin(keys, places)
        self._pins.update({pin.lease: pin for pin in pins if pin is not None})
        return pins

    def release(self, leases: Sequence[int]) -> None:
        """Give pins back; raise `BrokenProtocol` for one that the client does not have."""
        if len(set(leases)) < len(leases) or not self._pins.keys() >= set(leases):
            raise BrokenProtocol("leases to release that it does not have")
        self.store.release([self._pins.pop(lease) for lease in leases], wait=False)

    def begin(self, meta: RecordMeta) -> Reservation | None:
        """See `ChunkStore.begin`; raise `BrokenProtocol` for metadata that no client of ours sends."""
        slab = self.store.slab
        fits = meta.parts == slab.parts and 0 < meta.part_bytes <= slab.part_bytes
        plain = not meta.sizes and not meta.checksums and meta.codec == NO_CODEC
        named = len(meta.key) == len(meta.namespace) == DIGEST and len(meta.label) <= LONGEST_LABEL
        if not (fits and plain and named and meta.tokens > 0 and meta.first >= 0):
            raise BrokenProtocol("metadata of an impossible chunk")
        reservation = self.store.begin(meta)
        if reservation is not None:
            self._reservations[reservation.lease] = reservation
        return reservation

    def commit(self, lease: int) -> None:
        """See `ChunkStore.commit`; raise `BrokenProtocol` for a reservation that the client does not have."""
        self.store.commit(self._reserved(lease))

    def abort(self, lease: int) -> None:
        """See `ChunkStore.abort`; raise `BrokenProtocol` for a reservation that the client does not have."""
        self.store.abort(self._reserved(lease))

    def protect(self, keys: Sequence[ChunkKey], *, pinned: bool) -> None:
        """Pin chunks of documents for as long as the client is there, or until it does not want that any more."""
        if pinned:
            self._pinned_keys.add(set(keys) - self._protected)
            self._protected.update(keys)
        else:
            self._pinned_keys.remove(self._protected & set(keys))
            self._protected.difference_update(keys)

    def _reserved(self, lease: int) -> Reservation:
        try:
            return self._reservations.pop(lease)
        except KeyError:
            raise BrokenProtocol(f"lease {lease}, which it does not have") from None

    def end(self) -> None:
        """Give everything back; wait until nobody can write into reserved slots any more, if there are some."""
        self.store.release(list(self._pins.values()), wait=False)
        self._pinned_keys.remove(self._protected)
        if self._reservations:
            log.info("%d unfilled slots of a client wait until its processes have ended", len(self._reservations))
            wait_until_gone(self.lifeline)
        self.lifeline.unlink(missing_ok=True)
        for reservation in self._reservations.values():
            self.store.abort(reservation)
