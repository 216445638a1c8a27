"""What one client of a cache server holds, and what becomes of it when the client is gone."""

import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from lmc.documents.known import KnownDocument
from lmc.documents.learn_queue import Unlearned
from lmc.errors import InputError
from lmc.http.address import is_local_url
from lmc.keys import LONGEST_MODEL, TENANT_DIGITS, ChunkKey, document_keys
from lmc.server.arena import Arena
from lmc.server.channel import BrokenProtocol
from lmc.server.lifelines import wait_until_gone
from lmc.storage.contract import Pin, Reservation
from lmc.storage.stats import StoreStats
from lmc.storage.tiers.record import HEADER_LIMIT, NO_CODEC, RecordMeta

log = logging.getLogger(__name__)

LARGEST_PART = 0.75  # of the chunks of an arena, which one of several clients may hold
CONNECTIONS = 2  # of a client
MOST_NAMESPACES = 1 << 13  # that a client can learn
DIGEST = 32  # bytes of a key and of a namespace
LONGEST_LABEL = HEADER_LIMIT // 2  # characters of a header


class Lease:
    """The pins and reservations of one client. One thread uses it.

    While one of the client's processes lives it may write into slots that the client has reserved. So these slots are
    not used again after the end of the lease, until no process has the client's lifeline locked.
    """

    def __init__(self, arena: Arena, lifeline: Path, introduced: Callable[[str, str], object]) -> None:
        self.arena, self.store, self.lifeline = arena, arena.store, lifeline
        self.model: str | None = None  # None until the client has introduced itself
        self.admin = ""  # address on this host at which the client is administered, if it is
        self.explain_token = ""  # with which the client is asked for explanations
        self._introduced = introduced
        self.namespaces: set[bytes] = set()  # of documents that the client can learn
        self._chunk_size = 0  # tokens; 0 if the client has not said how it cuts documents
        self.hits: Counter[str] = Counter()  # chunks, by place
        self.misses = self.stored = self.refused = 0  # chunks
        self.listed: Iterator[tuple[str, RecordMeta]] = iter(())  # what `Records` has still to tell
        self._pins: dict[int, Pin] = {}
        self._reservations: dict[int, Reservation] = {}

    def introduce(self, model: str, tokenizer: str, chunk_size: int, admin: str, explain_token: str) -> None:
        """Note what the client's model is called, where its tokenizer lies, how it cuts documents, and who explains.

        An address of another host is left out: the server must not send operators' prompts where a client points.
        """
        self.model, self._chunk_size = model, chunk_size
        if admin and not is_local_url(admin):
            log.warning(
                "a client of model %r named %r for explanations, which is no address of this host", model, admin
            )
            admin = ""
        self.admin, self.explain_token = admin, explain_token
        self._introduced(model, tokenizer)
        self.arena.cut_into(chunk_size)

    def offer(self, documents: Sequence[tuple[bytes, Sequence[int], str]], namespaces: Sequence[bytes]) -> None:
        """Let documents wait until somebody learns them, by namespaces, tokens and names.

        The client can learn those of `namespaces` itself.
        """
        self.namespaces.update(namespaces[: MOST_NAMESPACES - len(self.namespaces)])
        for namespace, tokens, name in documents if self._chunk_size else ():
            last = document_keys(namespace, tokens, self._chunk_size)[-1]
            self.arena.waiting.offer(last.hex(), Unlearned(namespace, tuple(tokens), name), self)

    def pin(self, keys: Sequence[ChunkKey], places: Sequence[str | None] | None) -> list[Pin | None]:
        """See `ChunkStore.pin`; raise `BrokenProtocol` if there is not a place for each key."""
        if places is not None and len(places) != len(keys):
            raise BrokenProtocol("keys and places that do not belong together")
        if len(keys) > self._may_hold:
            self.refused += len(keys)
            return [None] * len(keys)
        pins = self.store.pin(keys, places, client=self)
        self.misses += pins.count(None)
        self.hits.update(pin.place for pin in pins if pin is not None)
        self._pins.update({pin.lease: pin for pin in pins if pin is not None})
        self.arena.known.use(pin.key for pin in pins if pin is not None)
        return pins

    def release(self, leases: Sequence[int]) -> None:
        """Give pins back; raise `BrokenProtocol` for one that the client does not have."""
        if len(set(leases)) < len(leases) or not self._pins.keys() >= set(leases):
            raise BrokenProtocol("leases to release that it does not have")
        self.store.release([self._pins.pop(lease) for lease in leases], wait=False)

    def begin(self, metas: Sequence[RecordMeta]) -> list[Reservation | None]:
        """See `ChunkStore.begin`; raise `BrokenProtocol` for metadata that no client of ours sends."""
        wanted = [meta for meta in metas if self._may_be_stored(meta)]
        held = wanted[: max(0, self._may_hold)]
        self.refused += len(wanted) - len(held)
        begun: dict[ChunkKey, Reservation] = {}  # A key that is given twice is reserved once.
        for reservation in filter(None, self.store.begin(held, self.arena.make_room)):
            self._reservations[reservation.lease] = begun[reservation.meta.key] = reservation
        return [begun.pop(meta.key, None) for meta in metas]

    def _may_be_stored(self, meta: RecordMeta) -> bool:
        """Return whether a chunk fits into a record; raise `BrokenProtocol` for metadata of an impossible chunk."""
        slab = self.store.slab
        fits = meta.parts == slab.parts and 0 < meta.part_bytes <= slab.part_bytes
        plain = not meta.sizes and not meta.checksums and meta.codec == NO_CODEC
        named = len(meta.key) == len(meta.namespace) == DIGEST
        named &= len(meta.model) <= LONGEST_MODEL and len(meta.tenant) <= TENANT_DIGITS
        if not (fits and plain and named and meta.tokens > 0 and meta.first >= 0):
            raise BrokenProtocol("metadata of an impossible chunk")
        # A longer label would not fit into the header of a record.
        return not meta.label or len(json.dumps(meta.label)) <= LONGEST_LABEL

    def commit(self, leases: Sequence[int]) -> None:
        """See `ChunkStore.commit`; raise `BrokenProtocol` for a reservation that the client does not have."""
        for lease in leases:
            reservation = self._reserved(lease)
            self.store.commit([reservation])
            self.stored += 1
            self.arena.committed(reservation.meta)

    def abort(self, lease: int) -> None:
        """See `ChunkStore.abort`; raise `BrokenProtocol` for a reservation that the client does not have."""
        self.store.abort(self._reserved(lease))

    def keep(self, documents: Sequence[KnownDocument], how: str, seconds: float | None) -> str:
        """Pin documents, or do with them what else a keeper does; return why it cannot be done."""
        keeper, documents = self.arena.keeper, list({one.id: one for one in documents}.values())
        for one in documents:
            self.arena.used(one.namespace)
        try:
            if how == "expire":
                keeper.expire(documents, seconds)
            else:
                {"pin": keeper.pin, "unpin": keeper.unpin, "remove": keeper.remove}[how](documents)
        except InputError as error:
            return str(error)
        return ""

    def stats(self) -> StoreStats:
        """Return the counts of the store, with the client's own hits and misses, which can be added up over clients.

        The others belong to no client: the store evicts, loads and writes for all of them.
        """
        return replace(self.store.stats(), hits=dict(self.hits), misses=self.misses)

    @property
    def _may_hold(self) -> int:
        """How many chunks more the client may hold. It leaves some to the others, if there are any."""
        most = self.store.slots * (LARGEST_PART if self.arena.clients > CONNECTIONS else 1.0)
        return int(most) - len(self._pins) - len(self._reservations)

    @property
    def held(self) -> tuple[int, int]:
        """How many chunks the client has pinned, and how many slots it has reserved."""
        return len(self._pins), len(self._reservations)

    def _reserved(self, lease: int) -> Reservation:
        try:
            return self._reservations.pop(lease)
        except KeyError:
            raise BrokenProtocol(f"lease {lease}, which it does not have") from None

    def end(self) -> None:
        """Give everything back; wait until nobody can write into reserved slots any more, if there are some."""
        self.arena.waiting.left(self)
        self.store.release(list(self._pins.values()), wait=False)
        if self._reservations:
            log.info("%d unfilled slots of a client wait until its processes have ended", len(self._reservations))
            wait_until_gone(self.lifeline)
        self.lifeline.unlink(missing_ok=True)
        for reservation in self._reservations.values():
            self.store.abort(reservation)
