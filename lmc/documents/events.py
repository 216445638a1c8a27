"""Document events for routers: which documents are in lmc's memory or on its disk.

They have their own publisher, so that they do not mislead routers that know only prefixes. The store's change log
records which chunks appeared and left. A document is announced on a medium when all of its chunks are there, and
withdrawn when a chunk leaves.

A document of two chunks takes 0.4 KB here while it is on one medium, and 0.55 KB on two. It may be known no longer.
"""

import hashlib
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from lmc.background import Background
from lmc.documents.by_chunk import DocumentsByChunk
from lmc.documents.known import KnownDocument
from lmc.keys import ChunkKey, RecordKind, tokens_digest
from lmc.storage.change_log import Changes, media_steps

MAX_UNKNOWN = 4096  # chunks that are looked up again
UNREAD = -1  # a number before all entries of a change log: reading from it lists everything that is stored


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentMoved:
    """A document appeared on a medium, or left it."""

    stored: bool
    medium: str  # as in the engine's KV events: CPU or STORAGE
    digest: str  # digest of the tokens alone (`tokens_digest`), which a router can compute
    document: str  # its id, as in `lmc documents`; also depends on the model and the tenant
    tokens: int
    salt: str | None  # SHA-256 of the tenant's cache_salt, empty without one; None if this process does not know it
    model: str  # the model's name, as the engine gives it
    tenant: str  # the tenant's name, from `lmc.keys.tenant_of`; empty without a cache_salt


@dataclass(frozen=True, slots=True)
class _StoredDocument:
    """What events say of a document that is stored, in whole or in part."""

    keys: Sequence[ChunkKey]
    namespace: bytes
    digest: bytes
    tokens: int
    model: str
    tenant: str

    @classmethod
    def of(cls, document: KnownDocument) -> "_StoredDocument":
        digest = bytes.fromhex(tokens_digest(document.tokens))
        owner = document.model, document.tenant
        return cls(document.keys, document.namespace, digest, len(document.tokens), *owner)


class DocumentEvents:
    """The documents that appeared and left since the last call of `take`."""

    def __init__(
        self,
        changes: Changes,
        find: Callable[[str], KnownDocument | None],
        salt_of: Callable[[bytes], str | None],
        background: Background,
    ) -> None:
        """`find` returns a known document by its id, and `salt_of` the cache salt of a namespace's tenant, or None."""
        self._changes, self._find, self._salt_of, self._background = changes, find, salt_of, background
        self.begin_anew()

    def begin_anew(self) -> None:
        """Announce everything that is stored again with the next `take`, because subscribers have lost events."""
        self._read = UNREAD  # number of the last change that was read
        self._present: defaultdict[str, set[ChunkKey]] = defaultdict(set)  # medium -> chunks of documents
        self._stored = DocumentsByChunk[_StoredDocument]()  # by each of their chunks
        # The hashed salts of announced documents, by medium and last chunk.
        self._announced: defaultdict[str, dict[ChunkKey, str | None]] = defaultdict(dict)
        # Stored chunks that belong to no known document, with their media. A document becomes known after its last one.
        self._unknown: OrderedDict[tuple[ChunkKey, str], None] = OrderedDict()

    def take(self) -> list[DocumentMoved]:
        """Return the changes since the last call, in order."""
        self._read, steps = media_steps(self._changes, self._read, self._seen, RecordKind.DOCUMENT)
        again = [(key, medium, True) for key, medium in self._unknown if self._find(key.hex()) is not None]
        return [moved for step in self._background.gently([*again, *steps]) for moved in self._moved(*step)]

    def _seen(self) -> set[tuple[ChunkKey, str]]:
        return {(key, medium) for medium, keys in self._present.items() for key in keys}

    def _moved(self, key: ChunkKey, medium: str, stored: bool) -> Iterator[DocumentMoved]:
        present, announced = self._present[medium], self._announced[medium]
        (present.add if stored else present.discard)(key)
        ended = self._find(key.hex())  # A document's id is the key of its last chunk.
        if ended is not None:
            if not any(document.keys[-1] == key for document in self._stored.of(key)):
                document = _StoredDocument.of(ended)
                for part in document.keys:
                    self._stored.add(part, document)
            for part in ended.keys:
                self._unknown.pop((part, medium), None)
        for document in self._stored.of(key):
            last = document.keys[-1]
            complete = present.issuperset(document.keys)
            if complete and last not in announced:
                announced[last] = _hashed(self._salt_of(document.namespace))
                yield _event(document, medium, announced[last], stored=True)
            elif last in announced and not complete:
                yield _event(document, medium, announced.pop(last), stored=False)
            if not any(last in chunks for chunks in self._present.values()):
                for part in document.keys:
                    self._stored.discard(part, document)
        self._unknown.pop((key, medium), None)
        if stored and not self._stored.of(key):
            self._unknown[key, medium] = None
            if len(self._unknown) > MAX_UNKNOWN:
                self._unknown.popitem(last=False)


@lru_cache(maxsize=1024)
def _hashed(salt: str | None) -> str | None:
    """Return the SHA-256 of a salt, so that the documents of a tenant share it. No salt and an unknown one stay."""
    return hashlib.sha256(salt.encode()).hexdigest() if salt else salt


def _event(document: _StoredDocument, medium: str, salt: str | None, *, stored: bool) -> DocumentMoved:
    return DocumentMoved(
        stored=stored,
        medium=medium,
        digest=document.digest.hex(),
        document=document.keys[-1].hex(),
        tokens=document.tokens,
        salt=salt,
        model=document.model,
        tenant=document.tenant,
    )
