"""The requests that a client sends to a cache server, one at a time, and how the server responds.

Messages are msgpack in frames (`channel.py`), and follow the handshake (`handshake.py`). Any other frame ends the
connection. Bytes of chunks are never sent: they are in slots of a slab that both sides have mapped.
"""

from array import array
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar

import msgspec

from lmc.documents.known import KnownDocument, KnownDocuments
from lmc.documents.learn_queue import Unlearned
from lmc.keys import LONGEST_MODEL, LONGEST_NAME, TENANT_DIGITS, ChunkKey
from lmc.server.channel import BrokenProtocol
from lmc.storage.change_log import Change, Chunk
from lmc.storage.contract import Pin, Reservation, StoredChunk
from lmc.storage.memory.slab import SlabAddress
from lmc.storage.stats import StoreStats
from lmc.storage.tiers.record import RecordMeta

if TYPE_CHECKING:  # A client does not need the imports of the server.
    from lmc.server.lease import Lease

T = TypeVar("T")

Digest = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
WholeKey = Annotated[ChunkKey, msgspec.Meta(min_length=32, max_length=32)]
MAX_KEYS = 1 << 16  # in one message, so that other callers do not wait long; clients send more in several messages
MAX_KEPT_DOCUMENTS = 1 << 14  # in one message
Keys = Annotated[list[WholeKey], msgspec.Meta(max_length=MAX_KEYS)]
Leases = Annotated[list[int], msgspec.Meta(max_length=1 << 16)]
MAX_LISTED_RECORDS = 500  # records in one response
MAX_LISTED_CHUNKS = 2000  # chunks in one response; decoding them takes some milliseconds
MAX_OFFERED_DOCUMENTS = 64  # documents in one message
MAX_NAMED_DOCUMENTS = 1024  # names in one message


class Attached(msgspec.Struct, frozen=True):
    """The response to a client that attaches. The slab's file descriptor comes with it."""

    slab: SlabAddress  # with the client's lifeline; its path is of the server's process
    shared_places: frozenset[str]
    pins_yield: bool  # see `ChunkStore`
    changes: int  # number of the last change of documents, which is earlier than every list of them


class Described(msgspec.Struct, frozen=True):
    """A document that a client knows."""

    namespace: Digest
    tokens: Annotated[bytes, msgspec.Meta(min_length=4)]  # uint32, little-endian
    keys: Annotated[list[WholeKey], msgspec.Meta(min_length=1, max_length=1 << 16)]
    name: Annotated[str, msgspec.Meta(max_length=LONGEST_NAME)]
    model: Annotated[str, msgspec.Meta(max_length=LONGEST_MODEL)]
    tenant: Annotated[str, msgspec.Meta(max_length=TENANT_DIGITS)]

    @classmethod
    def of(cls, document: KnownDocument) -> "Described":
        """Describe a document to the other side."""
        tokens = document.tokens.tobytes()
        return cls(document.namespace, tokens, list(document.keys), document.name, document.model, document.tenant)

    def noted(self, known: KnownDocuments) -> KnownDocument:
        """Register the document; raise `BrokenProtocol` for invalid tokens, or for more keys than tokens."""
        tokens = _uint32(self.tokens)
        if len(self.keys) > len(tokens):
            raise BrokenProtocol("sent a document with fewer tokens than chunks")
        return known.note(self.namespace, tokens, self.keys, name=self.name, model=self.model, tenant=self.tenant)


class Beat(msgspec.Struct, frozen=True):
    """The response to a client's `Ping`, every second."""

    stats: StoreStats  # see `Lease.stats`
    speeds: dict[str, tuple[float, float]]  # by tier: seconds for each record and for each byte
    pinned: int  # chunks of pinned documents
    wanted: list[Unlearned]  # documents that the client should learn, if it can
    changes: int  # number of the last change of documents


class ChangedDocuments(msgspec.Struct, frozen=True):
    """The next documents that were learned or removed after a change; see `DocumentChanges.since`."""

    learned: list[Described]
    removed: dict[str, str]  # why each was removed, by its id
    number: int
    more: bool
    complete: bool


class Request(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A request. Most request types are named after the method of `ChunkStore` that they call."""

    answered: ClassVar[bool] = True  # whether the server sends a response
    decoder: ClassVar[msgspec.msgpack.Decoder[Any]]  # decodes the response; its type is the return type of `handle`

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.decoder = msgspec.msgpack.Decoder(cls.handle.__annotations__["return"])

    def handle(self, lease: "Lease") -> Any:
        """Handle the request of the client with this lease, and return the response."""
        raise NotImplementedError


class Offered(msgspec.Struct, frozen=True):
    """A document in a client's learn queue, which another idle client may learn first."""

    namespace: Digest
    tokens: Annotated[bytes, msgspec.Meta(min_length=4)]  # uint32, little-endian
    name: Annotated[str, msgspec.Meta(max_length=LONGEST_NAME)] = ""


class Named(msgspec.Struct, frozen=True, array_like=True):
    """A name that a stored document was learned as again."""

    last_key: WholeKey
    name: Annotated[str, msgspec.Meta(min_length=1, max_length=LONGEST_NAME)]


class Ping(Request, frozen=True):
    """The heartbeat of a client, sent every second. It shows the server that the client is alive."""

    offered: Annotated[list[Offered], msgspec.Meta(max_length=MAX_OFFERED_DOCUMENTS)] = []
    namespaces: Annotated[list[Digest], msgspec.Meta(max_length=1 << 12)] = []  # new namespaces of the client's tenants
    has_time: bool = False  # whether the client is idle, and can learn documents of other clients
    named: Annotated[list[Named], msgspec.Meta(max_length=MAX_NAMED_DOCUMENTS)] = []

    def handle(self, lease: "Lease") -> Beat:
        """Return the current counts, tier speeds, pinned chunks, documents to learn, and the last change."""
        arena = lease.arena
        lease.offer(
            [(document.namespace, _uint32(document.tokens), document.name) for document in self.offered],
            self.namespaces,
        )
        for named in self.named:
            arena.add_name(named.last_key, named.name)
        documents = arena.waiting.take(lease, lease.namespaces, has_time=self.has_time)
        speeds, pinned = lease.store.cost.speeds(), arena.keeper.pinned_chunks
        return Beat(lease.stats(), speeds, pinned, documents, arena.changes.last)


class DocumentsSince(Request, frozen=True):
    """Requests the documents that were learned or removed after the change `number`."""

    number: int

    def handle(self, lease: "Lease") -> ChangedDocuments:
        """Return the next of these documents."""
        changes = lease.arena.changes.since(self.number)
        learned = [Described.of(document) for document in changes.documents if not document.removed]
        removed = {document.id: document.removed for document in changes.documents if document.removed}
        return ChangedDocuments(learned, removed, changes.number, changes.more, changes.complete)


class LookUp(Request, frozen=True):
    """Calls `ChunkStore.lookup`."""

    keys: Keys
    shared: bool

    def handle(self, lease: "Lease") -> list[str | None]:
        """Return the tier of each chunk, or None."""
        return lease.store.lookup(self.keys, shared=self.shared)


class Unanswered(Request, frozen=True):
    """Calls `ChunkStore.unanswered`."""

    keys: Keys

    def handle(self, lease: "Lease") -> bool:
        """Return whether a slow tier has yet to answer."""
        return lease.store.unanswered(self.keys)


class PinKeys(Request, frozen=True):
    """Calls `ChunkStore.pin`."""

    keys: Keys
    places: list[str | None] | None

    def handle(self, lease: "Lease") -> list[Pin | None]:
        """Return a pin for each key, or None."""
        return lease.pin(self.keys, self.places)


class Release(Request, frozen=True):
    """Calls `ChunkStore.release`."""

    answered: ClassVar[bool] = False
    leases: Leases

    def handle(self, lease: "Lease") -> None:
        """Release the pins."""
        lease.release(self.leases)


class Begin(Request, frozen=True):
    """Calls `ChunkStore.begin`."""

    metas: Annotated[list[RecordMeta], msgspec.Meta(max_length=1 << 16)]

    def handle(self, lease: "Lease") -> list[Reservation | None]:
        """Reserve a slot for each chunk; return a reservation or None for each."""
        return lease.begin(self.metas)


class Commit(Request, frozen=True):
    """Calls `ChunkStore.commit`."""

    answered: ClassVar[bool] = False
    leases: Leases

    def handle(self, lease: "Lease") -> None:
        """Make the filled chunks visible."""
        lease.commit(self.leases)


class Abort(Request, frozen=True):
    """Calls `ChunkStore.abort`."""

    answered: ClassVar[bool] = False
    lease: int

    def handle(self, lease: "Lease") -> None:
        """Release the reserved slot."""
        lease.abort(self.lease)


class Forget(Request, frozen=True):
    """Calls `ChunkStore.forget`."""

    key: WholeKey
    wait: bool
    shared: bool

    def handle(self, lease: "Lease") -> None:
        """Remove the chunk."""
        lease.store.forget(self.key, wait=self.wait, shared=self.shared)


class CopiesOf(Request, frozen=True):
    """Calls `ChunkStore.copies`."""

    keys: Keys

    def handle(self, lease: "Lease") -> list[str]:
        """Return the tiers that have all of the chunks, except tiers that other processes share."""
        return lease.store.copies(self.keys)


class Introduce(Request, frozen=True):
    """The client's model name and tokenizer path, which administrators see, and the chunk size of its documents.

    `admin` is the address of the client's administration endpoint. It explains prompts to callers with the
    `explain_token`, which the client has made for this server.
    """

    answered: ClassVar[bool] = False
    model: Annotated[str, msgspec.Meta(max_length=LONGEST_MODEL)]
    tokenizer: Annotated[str, msgspec.Meta(max_length=4096)]
    chunk_size: Annotated[int, msgspec.Meta(ge=0, le=1 << 20)] = 0  # tokens; 0 if unknown
    admin: Annotated[str, msgspec.Meta(max_length=4096)] = ""
    explain_token: Annotated[str, msgspec.Meta(max_length=128, pattern=r"^[A-Za-z0-9_-]*$")] = ""

    def handle(self, lease: "Lease") -> None:
        """Store the introduction in the client's lease."""
        lease.introduce(self.model, self.tokenizer, self.chunk_size, self.admin, self.explain_token)


class Keep(Request, frozen=True):
    """Calls a method of `DocumentKeeper` for documents; `seconds` is the argument of `expire`."""

    documents: Annotated[list[Described], msgspec.Meta(max_length=MAX_KEPT_DOCUMENTS)]
    operation: Literal["pin", "unpin", "expire", "remove"]
    seconds: Annotated[float, msgspec.Meta(gt=0, lt=1 << 33)] | None = None

    def handle(self, lease: "Lease") -> str:
        """Call the method; return the reason if this fails, else ""."""
        if self.operation == "remove":  # It lets others work between two batches of documents.
            return self._keep(lease)
        with lease.arena.keeper.moving:  # Once for all documents: others hold it while they write to the disk.
            return self._keep(lease)

    def _keep(self, lease: "Lease") -> str:
        return lease.keep([self._noted(document, lease) for document in self.documents], self.operation, self.seconds)

    @staticmethod
    def _noted(described: Described, lease: "Lease") -> KnownDocument:
        """Return the server's document. One that the server has removed stays removed: the client has yet to hear it.

        One that the server did not know becomes known to all clients.
        """
        arena = lease.arena
        before = arena.known.get(described.keys[-1].hex())
        if before is not None and before.removed:
            return before
        document = described.noted(arena.known)
        if before is None:
            arena.changes.add(document)
        return document


class Kept(Request, frozen=True):
    """Calls `DocumentKeeper.refresh`."""

    ids: Annotated[list[str], msgspec.Meta(max_length=MAX_KEYS)]

    def handle(self, lease: "Lease") -> list[tuple[bool, float]]:
        """Return for each document whether it is pinned, and when it expires (seconds since 1970, or 0 for never)."""
        documents = map(lease.arena.known.get, self.ids)
        return [(document.pinned, document.expires) if document is not None else (False, 0.0) for document in documents]


class Records(Request, frozen=True):
    """Calls `Arena.records`, up to `MAX_LISTED_RECORDS` at a time. The `first` request starts a new listing.

    An empty response ends the listing.
    """

    first: bool

    def handle(self, lease: "Lease") -> list[StoredChunk]:
        """Return the next chunks."""
        if self.first:
            lease.listed = lease.arena.records()
        return list(islice(lease.listed, MAX_LISTED_RECORDS))


class KnownKeys(Request, frozen=True):
    """Calls `ChunkStore.known_keys`."""

    def handle(self, lease: "Lease") -> set[ChunkKey]:
        """Return the keys of all chunks in memory and in tiers that other processes do not share."""
        return lease.store.known_keys()


class HeldSlots(Request, frozen=True):
    """Calls `ChunkStore.held`."""

    def handle(self, lease: "Lease") -> int:
        """Return the number of slots that are held or being written, of all clients together."""
        return lease.store.held()


class Flush(Request, frozen=True):
    """Calls `ChunkStore.flush`."""

    def handle(self, lease: "Lease") -> None:
        """Wait until all queued chunks are written."""
        lease.store.flush()


class Since(Request, frozen=True):
    """Calls `Changes.since`."""

    number: int

    def handle(self, lease: "Lease") -> tuple[list[Change], bool]:
        """Return the changes after `number`, and whether they are complete."""
        return lease.store.changes.since(self.number)


class Present(Request, frozen=True):
    """Calls `Changes.present`. The `first` request starts a new listing, and an empty response ends it."""

    first: bool

    def handle(self, lease: "Lease") -> tuple[int, list[tuple[str, Chunk]]]:
        """Return the number of the last change before the listing, and the next chunks with their places."""
        if self.first:
            lease.present = lease.store.changes.listing()
        number, chunks = lease.present
        return number, list(islice(chunks, MAX_LISTED_CHUNKS))


def batches(items: Sequence[T], size: int = MAX_KEYS) -> Iterator[list[T]]:
    """Yield the items in lists that fit into messages: of `size` items, and a shorter one at the end."""
    for at in range(0, len(items), size):
        yield list(items[at : at + size])


def _uint32(tokens: bytes) -> "array[int]":
    if len(tokens) % 4:
        raise BrokenProtocol("sent token ids that are not uint32")
    return array("I", tokens)


AnyRequest = (
    Ping | LookUp | Unanswered | PinKeys | Release | Begin | Commit | Abort | Forget | CopiesOf | Introduce | Keep
    | Kept | DocumentsSince | Records | KnownKeys | HeldSlots | Flush | Since | Present
)  # fmt: skip
