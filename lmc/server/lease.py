"""Everything that one client of a cache server holds, and its release after the client has disconnected."""

import json
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
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
from lmc.storage.change_log import Chunk
from lmc.storage.contract import Pin, Reservation, StoredChunk
from lmc.storage.stats import StoreStats
from lmc.storage.tiers.record import HEADER_LIMIT, NO_CODEC, RecordMeta

log = logging.getLogger(__name__)

MAX_CLIENT_SHARE = 0.75  # share of an arena's slots that one client may hold if there are other clients
CONNECTIONS = 2  # connections of one client
MAX_LEARN_NAMESPACES = 1 << 13  # limit for the namespaces whose documents a client can learn
DIGEST_BYTES = 32  # bytes of a key and of a namespace
MAX_LABEL_LENGTH = HEADER_LIMIT // 2  # characters of a label in a record's header


class Lease:
    """The pins and reservations of one client. One thread uses it.

    Every live process of the client may write into slots that the client has reserved. Therefore, after the end of the
    lease, these slots are reused only when no process has the client's lifeline locked.
    """

    def __init__(self, arena: Arena, lifeline: Path, introduced: Callable[[str, str], object]) -> None:
        self.arena, self.store, self.lifeline = arena, arena.store, lifeline
        self.model: str | None = None  # None until the client has introduced itself
        self.admin = ""  # address of the client's administration endpoint on this host; empty without one
        self.explain_token = ""  # token for explain requests to the client
        self._introduced = introduced
        self.namespaces: set[bytes] = set()  # namespaces whose documents the client can learn
        self._chunk_size = 0  # tokens of a document's full chunk; 0 if unknown
        self.hits: Counter[str] = Counter()  # chunks, by tier
        self.misses = self.stored = self.refused = 0  # chunks
        self.listed: Iterator[StoredChunk] = iter(())  # chunks that `Records` has not sent yet
        # The number of the last change of a listing, and the chunks that `Present` has not sent yet, by place.
        self.present: tuple[int, Iterator[tuple[str, Chunk]]] = 0, iter(())
        self._lifeline_file: int | None = None  # the descriptor of the lifeline, opened before the first reservation
        self._pins: dict[int, Pin] = {}
        self._reservations: dict[int, Reservation] = {}

    def introduce(self, model: str, tokenizer: str, chunk_size: int, admin: str, explain_token: str) -> None:
        """Store the client's model name, tokenizer path, chunk size for documents, and address for explain requests.

        An address of another host is ignored: a client must not redirect operators' prompts to another host.
        """
        self.model, self._chunk_size = model, chunk_size
        if admin and not is_local_url(admin):
            log.warning("ignored the address %r of a client of model %r: it is not on this host", admin, model)
            admin = ""
        self.admin, self.explain_token = admin, explain_token
        self._introduced(model, tokenizer)
        self.arena.cut_into(chunk_size)

    def offer(self, documents: Sequence[tuple[bytes, Sequence[int], str]], namespaces: Sequence[bytes]) -> None:
        """Queue documents for learning by any client; each has a namespace, tokens and a name.

        The client itself can learn documents of `namespaces`.
        """
        self.namespaces.update(namespaces[: MAX_LEARN_NAMESPACES - len(self.namespaces)])
        for namespace, tokens, name in documents if self._chunk_size else ():
            last = document_keys(namespace, tokens, self._chunk_size)[-1]
            self.arena.waiting.offer(last.hex(), Unlearned(namespace, tuple(tokens), name), self)

    def pin(self, keys: Sequence[ChunkKey], places: Sequence[str | None] | None) -> list[Pin | None]:
        """See `ChunkStore.pin`; raise `BrokenProtocol` if the numbers of keys and tiers differ."""
        if places is not None and len(places) != len(keys):
            raise BrokenProtocol("sent different numbers of keys and tiers")
        count = min(len(keys), max(0, self._may_hold))
        self.refused += len(keys) - count
        pins = self.store.pin(keys[:count], places[:count] if places is not None else None, client=self)
        self.misses += pins.count(None)
        self.hits.update(pin.place for pin in pins if pin is not None)
        self._pins.update({pin.lease: pin for pin in pins if pin is not None})
        self.arena.known.use(pin.key for pin in pins if pin is not None)
        return pins + [None] * (len(keys) - count)

    def release(self, leases: Sequence[int]) -> None:
        """Release pins; raise `BrokenProtocol` for a lease that the client does not have."""
        if len(set(leases)) < len(leases) or not self._pins.keys() >= set(leases):
            raise BrokenProtocol("released leases that it does not have")
        self.store.release([self._pins.pop(lease) for lease in leases], wait=False)

    def begin(self, metas: Sequence[RecordMeta]) -> list[Reservation | None]:
        """See `ChunkStore.begin`; raise `BrokenProtocol` for invalid metadata."""
        storable = [meta for meta in metas if self._may_be_stored(meta)]
        accepted = storable[: max(0, self._may_hold)]
        self.refused += len(storable) - len(accepted)
        if self._lifeline_file is None:
            with suppress(OSError):  # With too many open files, the path of the lifeline has to do.
                self._lifeline_file = os.open(self.lifeline, os.O_RDONLY | os.O_CLOEXEC)
        reservations: dict[ChunkKey, Reservation] = {}  # A repeated key is reserved once.
        for reservation in filter(None, self.store.begin(accepted, self.arena.make_room)):
            self._reservations[reservation.lease] = reservations[reservation.meta.key] = reservation
        return [reservations.pop(meta.key, None) for meta in metas]

    def _may_be_stored(self, meta: RecordMeta) -> bool:
        """Return whether a chunk fits into a record; raise `BrokenProtocol` for invalid metadata."""
        fits = self.arena.layout.fit(meta) and meta.part_bytes > 0
        plain = not meta.sizes and not meta.checksums and meta.codec == NO_CODEC
        named = len(meta.key) == len(meta.namespace) == DIGEST_BYTES
        named &= len(meta.model) <= LONGEST_MODEL and len(meta.tenant) <= TENANT_DIGITS
        if not (fits and plain and named and meta.tokens > 0 and meta.first >= 0):
            raise BrokenProtocol("sent invalid metadata of a chunk")
        # A longer label would not fit into the header of a record.
        return not meta.label or len(json.dumps(meta.label)) <= MAX_LABEL_LENGTH

    def commit(self, leases: Sequence[int]) -> None:
        """See `ChunkStore.commit`; raise `BrokenProtocol` for a reservation that the client does not have."""
        for lease in leases:
            self.stored += self.arena.commit(self._reserved(lease))

    def abort(self, lease: int) -> None:
        """See `ChunkStore.abort`; raise `BrokenProtocol` for a reservation that the client does not have."""
        self.store.abort(self._reserved(lease))

    def keep(self, documents: Sequence[KnownDocument], operation: str, seconds: float | None) -> str:
        """Pin, unpin, expire or remove documents, as `operation` says; return the reason if this fails, else ""."""
        keeper, documents = self.arena.keeper, list({document.id: document for document in documents}.values())
        for document in documents:
            self.arena.used(document.namespace)
        try:
            if operation == "expire":
                keeper.expire(documents, seconds)
            else:
                {"pin": keeper.pin, "unpin": keeper.unpin, "remove": keeper.remove}[operation](documents)
        except InputError as error:
            return str(error)
        return ""

    def stats(self) -> StoreStats:
        """Return the counts of the store, with the client's own hits and misses.

        Hits and misses can be summed over clients. The other counts belong to all clients together, because the store
        evicts, loads and writes for all of them.
        """
        return replace(self.store.stats(), hits=dict(self.hits), misses=self.misses)

    @property
    def _may_hold(self) -> int:
        """Number of further chunks that the client may hold. Some chunks are left for other clients, if any."""
        limit = self.store.slots * (MAX_CLIENT_SHARE if self.arena.clients > CONNECTIONS else 1.0)
        return int(limit) - len(self._pins) - len(self._reservations)

    @property
    def held(self) -> tuple[int, int]:
        """Number of chunks that the client has pinned, and of slots that it has reserved."""
        return len(self._pins), len(self._reservations)

    def _reserved(self, lease: int) -> Reservation:
        try:
            return self._reservations.pop(lease)
        except KeyError:
            raise BrokenProtocol(f"used lease {lease}, which it does not have") from None

    def end(self) -> None:
        """Release everything. If slots are reserved, wait until no process of the client can write into them."""
        self.arena.waiting.left(self)
        self.store.release(list(self._pins.values()), wait=False)
        if self._reservations:
            log.info("waiting for a client's processes to end, to reuse %d slots", len(self._reservations))
            wait_until_gone(self.lifeline, self._lifeline_file)
        self.lifeline.unlink(missing_ok=True)
        if self._lifeline_file is not None:
            os.close(self._lifeline_file)
        for reservation in self._reservations.values():
            self.store.abort(reservation)
        self._reservations.clear()
