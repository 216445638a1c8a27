"""The questions that a client asks a cache server, one after the other, and how the server answers them.

Messages are msgpack in frames (`channel.py`), and come after a greeting (`greeting.py`). A frame that is none of these
messages ends the connection. Bytes of chunks are never sent: they lie in slots of a slab that both sides have mapped.
"""

from array import array
from itertools import chain, islice
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import msgspec

from lmc.documents.known import KnownDocument, KnownDocuments
from lmc.documents.learn_queue import Unlearned
from lmc.keys import LONGEST_MODEL, LONGEST_NAME, TENANT_DIGITS, ChunkKey
from lmc.server.channel import BrokenProtocol
from lmc.storage.change_log import Change, Chunk
from lmc.storage.contract import Pin, Reservation
from lmc.storage.stats import StoreStats
from lmc.storage.tiers.record import RecordMeta

if TYPE_CHECKING:  # A client needs none of what the server imports.
    from lmc.server.lease import Lease

Digest = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
WholeKey = Annotated[ChunkKey, msgspec.Meta(min_length=32, max_length=32)]
Keys = Annotated[list[WholeKey], msgspec.Meta(max_length=1 << 16)]  # so that nobody waits long behind one question
Leases = Annotated[list[int], msgspec.Meta(max_length=1 << 16)]
LISTED = 500  # records in one answer
MOST_OFFERED = 64  # documents in one message


class Attached(msgspec.Struct, frozen=True):
    """What a client gets to know of its slab, whose descriptor comes with it."""

    slots: int
    shared_places: frozenset[str]
    lifeline: str  # a file, see `lifelines.py`
    page_locked: bool = False  # see `Slab`; servers before this was sent had no such memory
    pins_yield: bool = False  # see `ChunkStore`


class Beat(msgspec.Struct, frozen=True):
    """What a client asks for every second."""

    stats: StoreStats  # see `Lease.stats`
    speeds: dict[str, tuple[float, float]]  # of tiers: seconds for each record and for each byte
    pinned: int  # chunks of pinned documents
    wanted: list[Unlearned]  # documents that the client should learn, if it can


class Request(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A question. Most are named like the method of `ChunkStore` that they ask for."""

    answered: ClassVar[bool] = True  # false if the server sends no answer
    decoder: ClassVar[msgspec.msgpack.Decoder[Any]]  # of the answer, as a method's annotation says

    def __init_subclass__(cls, **given: Any) -> None:
        super().__init_subclass__(**given)
        cls.decoder = msgspec.msgpack.Decoder(cls.asked.__annotations__["return"])

    def asked(self, lease: "Lease") -> Any:
        """Answer the question of the client that has this lease."""
        raise NotImplementedError


class Offered(msgspec.Struct, frozen=True):
    """A document that a client has to learn, and that others may learn if they have time first."""

    namespace: Digest
    tokens: Annotated[bytes, msgspec.Meta(min_length=4)]  # uint32, little-endian
    name: Annotated[str, msgspec.Meta(max_length=LONGEST_NAME)] = ""


class Ping(Request, frozen=True):
    """Every second. It shows the server that the client is alive."""

    offered: Annotated[list[Offered], msgspec.Meta(max_length=MOST_OFFERED)] = []
    namespaces: Annotated[list[Digest], msgspec.Meta(max_length=1 << 12)] = []  # of tenants that it knows, new ones
    has_time: bool = False  # to learn documents that others have met

    def asked(self, lease: "Lease") -> Beat:
        """Return what changes all the time."""
        arena = lease.arena
        lease.offer([(one.namespace, _uint32(one.tokens), one.name) for one in self.offered], self.namespaces)
        wanted = arena.waiting.take(lease, lease.namespaces, has_time=self.has_time)
        return Beat(lease.stats(), lease.store.cost.speeds(), arena.keeper.pinned_chunks, wanted)


class LookUp(Request, frozen=True):
    """`lookup`."""

    keys: Keys
    shared: bool

    def asked(self, lease: "Lease") -> list[str | None]:
        """Return places."""
        return lease.store.lookup(self.keys, shared=self.shared)


class PinKeys(Request, frozen=True):
    """`pin`."""

    keys: Keys
    places: list[str | None] | None

    def asked(self, lease: "Lease") -> list[Pin | None]:
        """Return pins."""
        return lease.pin(self.keys, self.places)


class Release(Request, frozen=True):
    """`release`."""

    answered: ClassVar[bool] = False
    leases: Leases

    def asked(self, lease: "Lease") -> None:
        """Give pins back."""
        lease.release(self.leases)


class Begin(Request, frozen=True):
    """`begin`."""

    metas: Annotated[list[RecordMeta], msgspec.Meta(max_length=1 << 16)]

    def asked(self, lease: "Lease") -> list[Reservation | None]:
        """Reserve slots."""
        return lease.begin(self.metas)


class Commit(Request, frozen=True):
    """`commit`."""

    answered: ClassVar[bool] = False
    leases: Leases

    def asked(self, lease: "Lease") -> None:
        """Let chunks be found."""
        lease.commit(self.leases)


class Abort(Request, frozen=True):
    """`abort`."""

    answered: ClassVar[bool] = False
    lease: int

    def asked(self, lease: "Lease") -> None:
        """Give a slot back."""
        lease.abort(self.lease)


class Forget(Request, frozen=True):
    """`forget`."""

    key: WholeKey
    wait: bool
    shared: bool

    def asked(self, lease: "Lease") -> None:
        """Remove a chunk."""
        lease.store.forget(self.key, wait=self.wait, shared=self.shared)


class CopiesOf(Request, frozen=True):
    """`copies`."""

    keys: Keys

    def asked(self, lease: "Lease") -> list[str]:
        """Return places."""
        return lease.store.copies(self.keys)


class Introduce(Request, frozen=True):
    """What the client's model is called, and where its tokenizer lies, for people; and how its documents are cut.

    `admin` is the address at which the client is administered, and explains prompts if it is asked with the
    `explain_token`, which it has made for this server.
    """

    answered: ClassVar[bool] = False
    model: Annotated[str, msgspec.Meta(max_length=LONGEST_MODEL)]
    tokenizer: Annotated[str, msgspec.Meta(max_length=4096)]
    chunk_size: Annotated[int, msgspec.Meta(ge=0, le=1 << 20)] = 0  # tokens; 0 if it does not say
    admin: Annotated[str, msgspec.Meta(max_length=4096)] = ""
    explain_token: Annotated[str, msgspec.Meta(max_length=128, pattern=r"^[A-Za-z0-9_-]*$")] = ""

    def asked(self, lease: "Lease") -> None:
        """Note it."""
        lease.introduce(self.model, self.tokenizer, self.chunk_size, self.admin, self.explain_token)


class Described(msgspec.Struct, frozen=True):
    """A document that a client knows."""

    namespace: Digest
    tokens: Annotated[bytes, msgspec.Meta(min_length=4)]  # uint32, little-endian
    keys: Annotated[list[WholeKey], msgspec.Meta(min_length=1, max_length=1 << 16)]
    name: Annotated[str, msgspec.Meta(max_length=LONGEST_NAME)]
    model: Annotated[str, msgspec.Meta(max_length=LONGEST_MODEL)]
    tenant: Annotated[str, msgspec.Meta(max_length=TENANT_DIGITS)]

    def noted(self, known: KnownDocuments) -> KnownDocument:
        """Note it among others; raise `BrokenProtocol` for tokens that are none, or keys that cannot be its own."""
        tokens = _uint32(self.tokens)
        if len(self.keys) > len(tokens):
            raise BrokenProtocol("fewer tokens than chunks")
        document = known.note(self.namespace, tokens, self.keys, model=self.model, tenant=self.tenant)
        document.name = document.name or self.name
        return document


class Keep(Request, frozen=True):
    """What a `DocumentKeeper` does with documents; `seconds` are those of `expire`."""

    documents: Annotated[list[Described], msgspec.Meta(max_length=1 << 14)]
    how: Literal["pin", "unpin", "expire", "remove"]
    seconds: Annotated[float, msgspec.Meta(gt=0, lt=1 << 33)] | None = None

    def asked(self, lease: "Lease") -> str:
        """Do it, and return why it cannot be done."""
        return lease.keep([one.noted(lease.arena.known) for one in self.documents], self.how, self.seconds)


class Kept(Request, frozen=True):
    """`DocumentKeeper.refresh`."""

    ids: Annotated[list[str], msgspec.Meta(max_length=1 << 16)]

    def asked(self, lease: "Lease") -> list[tuple[bool, float]]:
        """Return which documents are pinned, and when they are removed."""
        found = map(lease.arena.known.get, self.ids)
        return [(one.pinned, one.expires) if one is not None else (False, 0.0) for one in found]


class Records(Request, frozen=True):
    """`records`, some at a time; none means that there are no more. The `first` question begins anew."""

    first: bool

    def asked(self, lease: "Lease") -> list[tuple[str, RecordMeta]]:
        """Return the next ones: those in memory, and then those on tiers."""
        if self.first:
            lease.listed = chain(lease.store.in_memory(), lease.store.records())
        return list(islice(lease.listed, LISTED))


class LastUses(Request, frozen=True):
    """`last_uses`."""

    def asked(self, lease: "Lease") -> dict[ChunkKey, float]:
        """Return times."""
        return lease.store.last_uses()


class KnownKeys(Request, frozen=True):
    """`known_keys`."""

    def asked(self, lease: "Lease") -> set[ChunkKey]:
        """Return keys."""
        return lease.store.known_keys()


class HeldSlots(Request, frozen=True):
    """`held`."""

    def asked(self, lease: "Lease") -> int:
        """Return how many slots are held, by any client."""
        return lease.store.held()


class Flush(Request, frozen=True):
    """`flush`."""

    def asked(self, lease: "Lease") -> None:
        """Wait until everything is written."""
        lease.store.flush()


class Since(Request, frozen=True):
    """`changes.since`."""

    number: int

    def asked(self, lease: "Lease") -> tuple[list[Change], bool]:
        """Return changes."""
        return lease.store.changes.since(self.number)


class Present(Request, frozen=True):
    """`changes.present`."""

    def asked(self, lease: "Lease") -> tuple[int, dict[str, list[Chunk]]]:
        """Return chunks."""
        return lease.store.changes.present()


def _uint32(tokens: bytes) -> "array[int]":
    if len(tokens) % 4:
        raise BrokenProtocol("tokens that are no uint32")
    return array("I", tokens)


Question = (
    Ping | LookUp | PinKeys | Release | Begin | Commit | Abort | Forget | CopiesOf | Introduce | Keep | Kept
    | Records | LastUses | KnownKeys | HeldSlots | Flush | Since | Present
)  # fmt: skip
