"""The documents that an engine knows: those it has learned, found in prompts, or found on its disk at the start.

`lmc documents` lists them, `lmc explain` compares with them, and an engine finds them in prompts. They do not decide
what is reused: the store does, chunk by chunk.
"""

import base64
import threading
import time
import zlib
from array import array
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from heapq import nlargest

import numpy as np

from lmc.background import Background
from lmc.documents.finder import DocumentFinder, FoundRun
from lmc.keys import ChunkKey, chunk_bounds
from lmc.shapes import KVShape, aligned

# Upper bounds for a record's header: its metadata, one checksum per part, and one token in its label.
HEADER_BYTES, CHECKSUM_BYTES, LABEL_BYTES = 1024, 24, 6
COMPARED_DOCUMENTS = 64  # documents per batch of the first comparison
MAX_CANDIDATES = 16  # documents that are compared exactly
PREVIEW_CHARACTERS = 60  # characters of a document in lists
# Maximum number of tokens of all documents (64 MiB). Beyond it, the least recently used documents are forgotten, except
# those that are pinned or have a time limit.
MAX_KNOWN_TOKENS = 1 << 24
LONGEST_DOCUMENT = 1 << 22  # tokens
REMOVED_BY_USER = "lmc documents remove"  # reason for the removal of a document


@dataclass(slots=True)
class KnownDocument:
    """A document, under the namespace of its model and tenant."""

    namespace: bytes
    tokens: "array[int]" = field(repr=False)
    keys: tuple[ChunkKey, ...]
    uses: int = 0
    removed: str = ""  # why it was removed; empty if it was not; a removed document may be learned again
    used: float = field(default_factory=time.time)  # when it was last learned or used, in seconds since 1970
    name: str = ""  # name for users; several documents may have the same one
    begins: str = ""  # its first characters, set by the first list that shows them
    model: str = ""  # the model's name, for users
    tenant: str = ""  # digest of the cache salt
    pinned: bool = False  # Only the keeper sets `pinned` and `expires`.
    expires: float = 0.0  # when it expires, in seconds since 1970; 0 for never

    @property
    def id(self) -> str:
        """The key of its last chunk, which covers all of its tokens and its namespace."""
        return self.keys[-1].hex()

    @property
    def kept(self) -> bool:
        """Whether it must not be forgotten, because it is pinned or has a time limit."""
        return bool(self.pinned or self.expires)


class KnownDocuments:
    """All known documents. Any thread may call any method."""

    def __init__(self, background: Background | None = None, *, finds: bool = False) -> None:
        """Create an empty collection. With a `background`, long work makes way for the engine's steps.

        With `finds`, documents can be found in prompts.
        """
        self._background = background or Background()
        self._documents: OrderedDict[str, KnownDocument] = OrderedDict()  # least recently used first
        self._forgettable: OrderedDict[str, None] = OrderedDict()  # ids in the same order, without kept ones
        self._by_tenant: dict[str, dict[str, KnownDocument]] = {}
        self._tokens = 0
        self._finds = finds
        self._finders: dict[bytes, DocumentFinder[KnownDocument]] = {}  # by namespace
        self._new: defaultdict[bytes, list[KnownDocument]] = defaultdict(list)  # documents that the finder lacks
        self._mutex = threading.Lock()

    def note(
        self,
        namespace: bytes,
        tokens: Sequence[int],
        keys: Sequence[ChunkKey],
        *,
        used: bool = False,
        model: str = "",
        tenant: str = "",
    ) -> KnownDocument:
        """Record that a document was learned, or `used` by a prompt, and return it."""
        with self._mutex:
            document, name = self._noted(namespace, tokens, keys, model, tenant), keys[-1].hex()
            if document.removed and self._finds:
                self._new[namespace].append(document)
            document.uses, document.used, document.removed = document.uses + used, time.time(), ""
            self._queue(name, newest=True)
            while self._tokens > MAX_KNOWN_TOKENS and len(self._forgettable) > 1:
                oldest, _ = self._forgettable.popitem(last=False)
                if not self._documents[oldest].kept:
                    forgotten = self._documents.pop(oldest)
                    self._tokens -= len(forgotten.tokens)
                    self._no_longer_find(forgotten)
                    self._by_tenant[forgotten.tenant].pop(oldest)
                    if not self._by_tenant[forgotten.tenant]:
                        del self._by_tenant[forgotten.tenant]
            return document

    def recall(
        self,
        namespace: bytes,
        tokens: Sequence[int],
        keys: Sequence[ChunkKey],
        *,
        name: str,
        used: float,
        model: str = "",
        tenant: str = "",
    ) -> KnownDocument | None:
        """Record a document that an earlier process has learned, last `used` at a time in seconds since 1970.

        A document that was not known becomes the least recently used one. Returns None for one that exceeds
        `MAX_KNOWN_TOKENS`.
        """
        with self._mutex:
            is_new = keys[-1].hex() not in self._documents
            if is_new and self._tokens + len(tokens) > MAX_KNOWN_TOKENS:
                return None
            document = self._noted(namespace, tokens, keys, model, tenant)
            document.name = document.name or name
            if is_new:
                document.used = used or document.used
                self._queue(document.id, newest=False)
            return document

    def use(self, keys: Iterable[ChunkKey]) -> None:
        """Count a use of each document whose last chunk is among these."""
        with self._mutex:
            for key in keys:
                document = self._documents.get(key.hex())
                if document is not None:
                    document.uses, document.used = document.uses + 1, time.time()
                    self._documents.move_to_end(document.id)
                    if document.id in self._forgettable:
                        self._forgettable.move_to_end(document.id)

    def may_forget(self, documents: Iterable[KnownDocument]) -> None:
        """Allow these documents to be forgotten again, if they are not kept. They are forgotten first."""
        with self._mutex:
            for document in documents:
                if not document.kept and document.id in self._documents and document.id not in self._forgettable:
                    self._forgettable[document.id] = None
                    self._forgettable.move_to_end(document.id, last=False)

    def remove(self, documents: Iterable[KnownDocument], reason: str) -> None:
        """Mark documents as removed. They are not found in prompts any more, until they are noted again."""
        with self._mutex:
            for document in documents:
                if not document.removed:
                    self._no_longer_find(document)
                    document.removed = reason

    def unused(self, keys: Iterable[ChunkKey]) -> set[ChunkKey]:
        """Return which of these chunks belong to no document, except to removed ones."""
        unused = set(keys)
        for document in self.list():
            if not document.removed:
                unused.difference_update(document.keys)
        return unused

    def clear(self) -> None:
        """Forget all documents."""
        with self._mutex:
            self._documents.clear()
            self._forgettable.clear()
            self._by_tenant.clear()
            self._finders.clear()
            self._new.clear()
            self._tokens = 0

    def get(self, name: str) -> KnownDocument | None:
        """Return the document with this id; None if it is unknown."""
        with self._mutex:
            return self._documents.get(name)

    def list(self, tenant: str | None = None) -> "list[KnownDocument]":
        """Return all documents, or those of a tenant, most recently used first.

        The time for a tenant's documents does not depend on the number of other tenants' documents.
        """
        with self._mutex:
            if tenant is None:
                return list(reversed(self._documents.values()))
            documents = list(self._by_tenant.get(tenant, {}).values())
        return sorted(documents, key=lambda document: document.used, reverse=True)

    def count(self) -> int:
        """Return the number of known documents that were not removed."""
        with self._mutex:
            return len(self._documents) - sum(bool(document.removed) for document in self._documents.values())

    def with_tokens(self, tokens: "array[int]") -> Sequence[KnownDocument]:
        """Return the documents of all namespaces that have exactly these tokens."""
        return [document for document in self._background.gently(self.list()) if document.tokens == tokens]

    def find(self, namespace: bytes, tokens: Sequence[int], min_run: int) -> Sequence[FoundRun[KnownDocument]]:
        """Return the runs of a namespace's documents in a prompt; see `DocumentFinder.find`."""
        with self._mutex:
            if namespace not in self._finders and namespace not in self._new:
                return []  # Most tenants may have no documents, and need no finder.
            return self._finder(namespace).find(tokens, min_run)

    def prepare(self) -> None:
        """Insert all new documents into the finders now, so that the next prompt does not wait for it."""
        with self._mutex:
            for namespace in list(self._new):
                self._finder(namespace)

    def nearest(self, tokens: Sequence[int], namespace: bytes) -> KnownDocument | None:
        """Return the most similar document of a namespace: its Jaccard index with `tokens` is greatest and above 0.5.

        The Jaccard index is the share of distinct tokens that both have. It is computed only for the documents with the
        greatest shares of tokens that are among `tokens`. Returns None if no document is similar enough.
        """
        listed = self._background.gently(self.list())
        documents = [document for document in listed if document.namespace == namespace and not document.removed]
        distinct = set(tokens)
        is_in_prompt = np.zeros(max(distinct, default=0) + 2, np.bool_)  # Greater tokens are clipped to the last entry.
        is_in_prompt[list(distinct)] = True
        candidates: list[tuple[float, KnownDocument]] = []
        for start in self._background.gently(range(0, len(documents), COMPARED_DOCUMENTS)):
            batch = documents[start : start + COMPARED_DOCUMENTS]
            lengths = np.array([len(document.tokens) for document in batch])
            joined = np.concatenate([np.frombuffer(document.tokens, np.uint32) for document in batch])
            hits = is_in_prompt.take(joined, mode="clip")
            common = np.add.reduceat(hits, np.cumsum(lengths) - lengths, dtype=np.int64)
            rows = np.flatnonzero(2 * common > len(distinct))
            candidates += [(common[i] / lengths[i], batch[i]) for i in rows]
        candidates = nlargest(MAX_CANDIDATES, candidates, key=lambda document: document[0])
        shares = [
            (_common_share(distinct, set(document.tokens)), document)
            for _, document in self._background.gently(candidates)
        ]
        share, best = max(shares, key=lambda document: document[0], default=(0.0, None))
        return best if share > 0.5 else None

    def _noted(
        self, namespace: bytes, tokens: Sequence[int], keys: Sequence[ChunkKey], model: str, tenant: str
    ) -> KnownDocument:
        """Return the document with these keys. A new one becomes known."""
        name = keys[-1].hex()
        document = self._documents.get(name)
        if document is None:
            document = KnownDocument(namespace, array("I", tokens), tuple(keys), model=model, tenant=tenant)
            self._documents[name] = self._by_tenant.setdefault(tenant, {})[name] = document
            self._tokens += len(tokens)
            if self._finds:
                self._new[namespace].append(document)
        elif (model or tenant) and not (document.model or document.tenant):  # Older records have neither.
            self._by_tenant[""].pop(name)
            document.model, document.tenant = model, tenant
            self._by_tenant.setdefault(tenant, {})[name] = document
        return document

    def _queue(self, name: str, *, newest: bool) -> None:
        """Make a document the most or the least recently used one."""
        self._documents.move_to_end(name, last=newest)
        self._forgettable[name] = None
        self._forgettable.move_to_end(name, last=newest)

    def _no_longer_find(self, document: KnownDocument) -> None:
        """Remove a document from its finder. Tenants without documents have no finder."""
        if self._finds:
            finder = self._finder(document.namespace)
            finder.remove(document)
            if not len(finder):
                del self._finders[document.namespace]

    def _finder(self, namespace: bytes) -> DocumentFinder[KnownDocument]:
        """Return the finder of a namespace, with its new documents."""
        finder = self._finders.get(namespace)
        if finder is None:
            finder = self._finders[namespace] = DocumentFinder(lambda document: document.used)
        finder.insert(self._new.pop(namespace, ()))
        return finder


def _common_share(first: set[int], second: set[int]) -> float:
    """Return the Jaccard index of two sets."""
    return len(first & second) / len(first | second)


def document_bytes(tokens: int, chunk_size: int, shape: KVShape, parts: int) -> int:
    """Return the maximum number of bytes that a document of `tokens` tokens takes on disk, without a codec.

    Its chunks have `parts` parts.
    """
    size, header = 0, HEADER_BYTES + CHECKSUM_BYTES * parts
    for start, stop in chunk_bounds(tokens, chunk_size):
        label = LABEL_BYTES * tokens if stop == tokens else 0  # The last record's label holds all tokens.
        size += aligned(header + label) + parts * aligned(shape.part_bytes(stop - start))
    return size


def document_label(tokens: Sequence[int], name: str) -> str:
    """Return the label of a document's last record, from which later processes recover the document."""
    return f"{pack_tokens(tokens)} {name}".rstrip()


def parted_label(label: str) -> "tuple[array[int], str]":
    """Return the tokens and the name in a document's label. Raises `ValueError` for any other label."""
    packed, _, name = label.partition(" ")
    return unpack_tokens(packed), name


def pack_tokens(tokens: Sequence[int]) -> str:
    """Return tokens as text for the label of a record."""
    return base64.b64encode(zlib.compress(array("I", tokens).tobytes(), 1)).decode()  # b85 is a hundred times slower


def unpack_tokens(text: str) -> "array[int]":
    """Return the tokens in a text of `pack_tokens`. Raises `ValueError` for any other text."""
    try:
        unpacking = zlib.decompressobj()
        tokens = array("I", unpacking.decompress(base64.b64decode(text, validate=True), 4 * LONGEST_DOCUMENT))
        if not unpacking.eof:
            raise ValueError("packed tokens are incomplete, or more than a document can have")
        return tokens
    except zlib.error as error:
        raise ValueError("text is not packed tokens") from error
