"""What one client of a cache server holds, and what becomes of it when the client is gone."""

import logging
import os
from collections.abc import Iterator, Sequence
from typing import TypeVar

from lmc.keys import ChunkKey
from lmc.service.arenas import ProtectedKeys
from lmc.service.channel import BrokenProtocol
from lmc.storage.contract import Pin, Reservation
from lmc.storage.record import NO_CODEC, RecordMeta
from lmc.storage.store import Store

log = logging.getLogger(__name__)
T = TypeVar("T")

DIGEST = 32  # bytes of a key and of a namespace
LONGEST_LABEL = 1 << 20  # characters


class Lease:
    """The pins and reservations of one client. One thread uses it.

    The client and all its processes that map the slab hold the writing end of a pipe, the lifeline. While one of them
    lives it may write into slots that the client has reserved, whatever the client says. So after the end of a lease
    these slots are given to nobody until the pipe has no writer any more.
    """

    def __init__(self, store: Store, guard: ProtectedKeys) -> None:
        self.store, self._guard = store, guard
        self.listed: Iterator[tuple[str, RecordMeta]] = iter(())  # what `Records` has still to tell
        self._pins: dict[int, Pin] = {}
        self._reservations: dict[int, Reservation] = {}
        self._protected: set[ChunkKey] = set()
        self._gone, self.lifeline = os.pipe2(os.O_CLOEXEC)  # `lifeline` is for the client.

    def pin(self, keys: Sequence[ChunkKey], places: Sequence[str | None] | None) -> list[Pin | None]:
        """See `ChunkStore.pin`."""
        pins = self.store.pin(keys, places)
        self._pins.update({pin.lease: pin for pin in pins if pin is not None})
        return pins

    def release(self, leases: Sequence[int]) -> None:
        """Give pins back; raise `BrokenProtocol` for one that the client does not have."""
        self.store.release([_taken(self._pins, lease) for lease in leases], wait=False)

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
        self.store.commit(_taken(self._reservations, lease))

    def abort(self, lease: int) -> None:
        """See `ChunkStore.abort`; raise `BrokenProtocol` for a reservation that the client does not have."""
        self.store.abort(_taken(self._reservations, lease))

    def protect(self, keys: Sequence[ChunkKey], *, pinned: bool) -> None:
        """Pin chunks of documents for as long as the client is there, or until it does not want that any more."""
        if pinned:
            self._guard.add(set(keys) - self._protected)
            self._protected.update(keys)
        else:
            self._guard.remove(self._protected & set(keys))
            self._protected.difference_update(keys)

    def sent_lifeline(self) -> None:
        """Close the server's own copy of the writing end, which the client has now."""
        os.close(self.lifeline)
        self.lifeline = -1

    def end(self) -> None:
        """Give everything back; wait until nobody can write into reserved slots any more, if there are some."""
        if self.lifeline >= 0:
            self.sent_lifeline()
        self.store.release(list(self._pins.values()), wait=False)
        self._guard.remove(self._protected)
        if self._reservations:
            log.info("%d unfilled slots of a client wait until its processes have ended", len(self._reservations))
            while os.read(self._gone, 1):  # It returns nothing when all writing ends are closed.
                pass
        os.close(self._gone)
        for reservation in self._reservations.values():
            self.store.abort(reservation)


def _taken(held: dict[int, T], lease: int) -> T:
    try:
        return held.pop(lease)
    except KeyError:
        raise BrokenProtocol(f"lease {lease}, which it does not have") from None
