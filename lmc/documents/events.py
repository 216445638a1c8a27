"""Document events for routers: which documents are in lmc's memory or on its disk.

They have their own publisher, so that they do not mislead routers that know only prefixes. The store's change log
records which chunks appeared and left. A document is announced on a medium when all of its chunks are there, and
withdrawn when a chunk leaves.
"""

import hashlib
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from lmc.background import Background
from lmc.documents.known import KnownDocument
from lmc.keys import ChunkKey, RecordKind, tokens_digest
from lmc.storage.change_log import Changes, media_steps

MAX_UNKNOWN = 4096  # chunks that are looked up again
UNREAD = -1  # before all entries of a change log, which then lists everything that is stored


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


class DocumentEvents:
    """The documents that appeared and left since the last call of `take`."""

    def __init__(
        self,
        changes: Changes,
        find: Callable[[str], KnownDocument | None],
        salt_of: Callable[[KnownDocument], str | None],
        background: Background,
    ) -> None:
        """`find` returns a known document by its id, and `salt_of` the cache salt of its tenant, or None."""
        self._changes, self._find, self._salt_of, self._background = changes, find, salt_of, background
        self.begin_anew()

    def begin_anew(self) -> None:
        """Announce everything that is stored again with the next `take`, because subscribers have lost events."""
        self._read = UNREAD  # number of the last change that was read
        self._present: defaultdict[str, set[ChunkKey]] = defaultdict(set)  # medium -> chunks of documents
        self._owners: defaultdict[ChunkKey, dict[str, KnownDocument]] = defaultdict(dict)  # chunk -> documents, by id
        self._announced: dict[tuple[str, str], DocumentMoved] = {}  # by medium and id
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
        present = self._present[medium]
        (present.add if stored else present.discard)(key)
        ended = self._find(key.hex())  # A document's id is the key of its last chunk.
        if ended is not None:
            for part in ended.keys:
                self._owners[part][ended.id] = ended
                self._unknown.pop((part, medium), None)
        for document in list(self._owners[key].values()):
            complete = present.issuperset(document.keys)
            announced = (medium, document.id) in self._announced
            if complete and not announced:
                moved = self._announced[medium, document.id] = self._event(document, medium)
                yield moved
            elif announced and not complete:
                yield self._withdrawn(document, medium)
            if not any(document.keys[-1] in chunks for chunks in self._present.values()):
                for part in document.keys:
                    self._owners[part].pop(document.id, None)
                    if not self._owners[part]:
                        del self._owners[part]
        self._unknown.pop((key, medium), None)
        if not self._owners[key]:
            del self._owners[key]
            if stored:
                self._unknown[key, medium] = None
                if len(self._unknown) > MAX_UNKNOWN:
                    self._unknown.popitem(last=False)

    def _event(self, document: KnownDocument, medium: str) -> DocumentMoved:
        salt = self._salt_of(document)
        return DocumentMoved(
            stored=True,
            medium=medium,
            digest=tokens_digest(document.tokens),
            document=document.id,
            tokens=len(document.tokens),
            salt=hashlib.sha256(salt.encode()).hexdigest() if salt else salt,
            model=document.model,
            tenant=document.tenant,
        )

    def _withdrawn(self, document: KnownDocument, medium: str) -> DocumentMoved:
        before = self._announced.pop((medium, document.id))
        return DocumentMoved(
            stored=False,
            medium=medium,
            digest=before.digest,
            document=before.document,
            tokens=before.tokens,
            salt=before.salt,
            model=before.model,
            tenant=before.tenant,
        )
