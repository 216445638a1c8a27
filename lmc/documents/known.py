"""The documents that an engine knows: those it has learned, found in prompts, or found on its disk at the start.

`lmc documents` lists them, `lmc explain` compares with them, and an engine finds them in prompts. They do not decide
what is reused: the store does, chunk by chunk.
"""

import base64
import logging
import threading
import time
import zlib
from array import array
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from heapq import nlargest
from string import hexdigits

import numpy as np

from lmc.background import Background
from lmc.documents.by_chunk import DocumentsByChunk
from lmc.documents.finder import WHOLE, DocumentFinder, FoundRun, without_overlaps
from lmc.documents.names import joined_names, names_in
from lmc.documents.table import ALL, DocumentTable, Filter, Ids, Use, id_number
from lmc.keys import ChunkKey, chunk_bounds
from lmc.shapes import GIB, KVShape, aligned

log = logging.getLogger(__name__)

# Upper bounds for a record's header: its metadata, one checksum per part, and one token in its label.
HEADER_BYTES, CHECKSUM_BYTES, LABEL_BYTES = 1024, 24, 6
COMPARED_DOCUMENTS = 64  # documents per batch of the first comparison
MAX_CANDIDATES = 16  # documents that are compared exactly
PREVIEW_CHARACTERS = 60  # characters of a document in lists
# Memory of a known document: of its entries here, of each of its keys, and of each of its tokens with its share of the
# finder's blocks. `bench/known.py` measures it.
DOCUMENT_BYTES, KEY_BYTES, TOKEN_BYTES = 700, 100, 5
FINDER_BYTES = 2700  # of an empty finder; each tenant with documents has one
JOINED_NAMES = 256  # names that are searched at once
BATCHES = 64  # The documents to forget are chosen in batches, each of one in 64 documents.
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
    name: str = ""  # names for users, one on each line; several documents may have the same one
    begins: str = ""  # its first characters, set by the first list that shows them
    model: str = ""  # the model's name, for users
    tenant: str = ""  # digest of the cache salt
    pinned: bool = False  # Only the keeper sets `pinned` and `expires`.
    expires: float = 0.0  # when it expires, in seconds since 1970; 0 for never
    renamed: bool = False  # whether it may have names that its record lacks
    row: int = field(default=-1, repr=False)  # see `DocumentTable`
    lacks_blocks: bool = field(default=False, repr=False)  # whether the finder could not take all of its blocks

    @property
    def id(self) -> str:
        """The key of its last chunk, which covers all of its tokens and its namespace."""
        return self.keys[-1].hex()

    @property
    def names(self) -> list[str]:
        """Its names for users."""
        return names_in(self.name)

    @property
    def first_name(self) -> str:
        """The first of its names; empty without one."""
        return next(iter(self.names), "")

    @property
    def kept(self) -> bool:
        """Whether it must not be forgotten, because it is pinned or has a time limit."""
        return bool(self.pinned or self.expires)

    @property
    def memory(self) -> int:
        """About how many bytes of memory it takes while it is known."""
        return known_bytes(len(self.tokens), len(self.keys))


def known_bytes(tokens: int, chunks: int) -> int:
    """Return about how many bytes of memory a known document of `tokens` tokens in `chunks` chunks takes."""
    return DOCUMENT_BYTES + KEY_BYTES * chunks + TOKEN_BYTES * tokens


class KnownDocuments:
    """All known documents. Any thread may call any method."""

    def __init__(
        self, background: Background | None = None, *, finds: bool = False, max_bytes: float = float("inf")
    ) -> None:
        """Create an empty collection. With a `background`, long work makes way for the engine's steps.

        With `finds`, documents can be found in prompts. Beyond `max_bytes` of memory, the least recently used documents
        are forgotten, except those that are pinned or have a time limit.
        """
        self._background = background or Background()
        self._documents: dict[ChunkKey, KnownDocument] = {}  # by their last key
        self._by_tenant: dict[str, dict[ChunkKey, KnownDocument]] = {}
        self._by_first = DocumentsByChunk[KnownDocument]()  # by their first chunk
        self._table = DocumentTable[KnownDocument]()
        self._bytes, self._max_bytes = 0, max_bytes
        self._allowed_bytes = max_bytes  # more than `max_bytes` if kept documents take more
        self._oldest: deque[tuple[float, KnownDocument]] = deque()  # with the times of their last use; forgotten next
        self._too_many = False  # whether a document was forgotten, or did not become known, because of `max_bytes`
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
        name: str = "",
        model: str = "",
        tenant: str = "",
        at: float | None = None,
    ) -> KnownDocument:
        """Record that a document was learned, or `used` by a prompt, and return it. Adds `name` to its names.

        `at` is the time of this in seconds since 1970, by default now.
        """
        with self._mutex:
            known = self._documents.get(keys[-1])
            if known is not None and known.removed and name:
                known.name = ""  # The names that it had were removed with it.
            before = known.name if known is not None and not known.removed else name
            document = self._noted(namespace, tokens, keys, name, model, tenant)
            document.renamed |= document.name != before
            if known is not None and self._finds:
                self._find_again(document)
            document.uses, document.removed = document.uses + used, ""
            document.used = time.time() if at is None else at
            self._table.update(document)
            self._forget_oldest(document)
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
        again: bool = False,
    ) -> KnownDocument | None:
        """Record a document that an earlier process has learned, last `used` at a time in seconds since 1970.

        A removed document stays removed, unless it was stored `again`. Returns None for one that exceeds `max_bytes`.
        """
        with self._mutex:
            known = self._documents.get(keys[-1])
            if known is not None and known.renamed:
                known.renamed, name = known.name != name, ""  # Its names are those of its row.
            if known is None and self._bytes + known_bytes(len(tokens), len(keys)) > self._max_bytes:
                self._note_too_many()
                return None
            document = self._noted(namespace, tokens, keys, name, model, tenant)
            document.renamed |= bool(name) and document.name != name
            if known is None:
                document.used = used or document.used
            elif used and not (again or document.uses):  # A pin was read earlier, and says nothing of its use.
                document.used = min(document.used, used)
            elif again and document.removed:
                if self._finds:
                    self._find_again(document)
                document.removed = ""
            self._table.update(document)
            return document

    def use(self, keys: Iterable[ChunkKey]) -> None:
        """Count a use of each document whose last chunk is among these."""
        with self._mutex:
            for key in keys:
                document = self._documents.get(key)
                if document is not None:
                    document.uses, document.used = document.uses + 1, time.time()
                    self._table.update(document)

    def remove(self, documents: Iterable[KnownDocument], reason: str) -> None:
        """Mark documents as removed. They are not found in prompts any more, until they are noted again."""
        for document in documents:
            with self._mutex:  # The engine waits for it, and a collection has many documents.
                if not document.removed:
                    self._no_longer_find(document)
                    document.removed = reason
                    if self._documents.get(document.keys[-1]) is document:
                        self._table.update(document)

    def unused(self, documents: Iterable[KnownDocument]) -> set[ChunkKey]:
        """Return which chunks of these documents belong to no document, except to removed ones.

        Documents that share a chunk share the first one, too, so other documents are not looked at.
        """
        documents = list(documents)
        unused = {key for document in documents for key in document.keys}
        with self._mutex:
            for first in {document.keys[0] for document in documents}:
                for document in self._by_first.of(first):
                    if not document.removed:
                        unused.difference_update(document.keys)
        return unused

    def clear(self) -> None:
        """Forget all documents."""
        with self._mutex:
            self._documents.clear()
            self._by_tenant.clear()
            self._by_first = DocumentsByChunk()
            self._table = DocumentTable()
            self._oldest.clear()
            self._finders.clear()
            self._new.clear()
            self._bytes, self._allowed_bytes = 0, self._max_bytes

    def get(self, name: str) -> KnownDocument | None:
        """Return the document with this id; None if it is unknown."""
        with suppress(ValueError), self._mutex:
            return self._documents.get(ChunkKey(bytes.fromhex(name)))
        return None

    def list(self, tenant: str | None = None) -> "list[KnownDocument]":
        """Return all documents, or those of a tenant, also removed ones, in no order.

        The time for a tenant's documents does not depend on the number of other tenants' documents.
        """
        with self._mutex:
            return list((self._documents if tenant is None else self._by_tenant.get(tenant, {})).values())

    def latest(
        self, limit: int, after: Use | None = None, only: Filter = ALL, tenant: str | None = None
    ) -> tuple[int, Sequence[KnownDocument]]:
        """Return how many documents pass a filter, and up to `limit` of them, most recently used first.

        The list begins after a last use, the number does not. A page of a million documents takes a hundredth of a
        second, unless the filter has a `name`. The time for a `tenant` does not depend on other tenants' documents.
        """
        if tenant is None and not only.name:
            with self._mutex:
                return self._table.latest(limit, after, only)
        documents = list(self._passing(self.list(tenant), only))
        later = (one for one in self._background.gently(documents) if after is None or Use.of(one) < after)
        return len(documents), nlargest(limit, later, key=Use.of)

    def ids(self, only: Filter = ALL, tenant: str | None = None) -> Ids:
        """Return the first digits of the ids of the documents that pass a filter, as numbers, in no order."""
        if tenant is None and not only.name:
            with self._mutex:
                return self._table.ids(only)
        return np.array([id_number(document.id) for document in self._passing(self.list(tenant), only)], np.uint64)

    def named(self, name: str, tenant: str | None = None) -> Sequence[KnownDocument]:
        """Return the documents with this name, of all tenants or of one, without removed ones."""
        if tenant is None:
            with self._mutex:
                return self._table.named(name)
        return [one for one in self._background.gently(self.list(tenant)) if name in one.names and not one.removed]

    def with_digits(self, digits: str, tenant: str | None = None) -> Sequence[KnownDocument]:
        """Return the documents whose id begins with these digits, of all tenants or of one, without removed ones."""
        if not set(digits) <= set(hexdigits.lower()):
            return []
        if tenant is None:
            with self._mutex:
                return self._table.with_digits(digits)
        documents = self._background.gently(self.list(tenant))
        return [document for document in documents if document.id.startswith(digits) and not document.removed]

    def rename(self, document: KnownDocument, name: str) -> None:
        """Give a document a name instead of those that it has, or several ones, each on a line."""
        with self._mutex:
            document.renamed |= document.name != name
            document.name = name
            if self._documents.get(document.keys[-1]) is document:
                self._table.update(document)

    def count(self) -> int:
        """Return the number of known documents that were not removed."""
        with self._mutex:
            return self._table.count()

    def with_tokens(self, tokens: "array[int]") -> Sequence[KnownDocument]:
        """Return the documents of all namespaces that have exactly these tokens."""
        return [document for document in self._background.gently(self.list()) if document.tokens == tokens]

    def find(self, namespace: bytes, tokens: Sequence[int], min_run: int) -> Sequence[FoundRun[KnownDocument]]:
        """Return the runs of a namespace's documents in a prompt; see `DocumentFinder.find`."""
        return without_overlaps(self.all_runs(namespace, tokens, min_run), min_run)

    def all_runs(self, namespace: bytes, tokens: Sequence[int], min_run: int) -> Sequence[FoundRun[KnownDocument]]:
        """Return the runs of a namespace's documents in a prompt, which may overlap; see `DocumentFinder.all_runs`."""
        with self._mutex:
            if namespace not in self._finders and namespace not in self._new:
                return []  # Most tenants may have no documents, and need no finder.
            return self._finder(namespace).all_runs(tokens, min_run)

    def prepare(self) -> None:
        """Insert all new documents into the finders now, so that the next prompt does not wait for it."""
        with self._mutex:
            for namespace in list(self._new):
                self._finder(namespace)

    def nearest(self, tokens: Sequence[int], namespace: bytes) -> KnownDocument | None:
        """Return the most similar document of a namespace: its Jaccard index with `tokens` is greatest and above 0.5.

        The Jaccard index is the share of distinct tokens that both have. It is computed for the documents that have
        runs of `tokens`. If none of these is similar enough, it is computed for the documents with the greatest shares
        of tokens that are among `tokens`. Returns None if no document is similar enough.
        """
        runs = self.find(namespace, tokens, WHOLE) if self._finds else ()
        near = self._most_similar(tokens, (run.document for run in runs))
        if near is not None:
            return near
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
        return self._most_similar(tokens, (document for _, document in candidates))

    def _most_similar(self, tokens: Sequence[int], documents: Iterable[KnownDocument]) -> KnownDocument | None:
        """Return the document whose Jaccard index with `tokens` is greatest; None if it is not above 0.5."""
        distinct = set(tokens)
        shares = [
            (_common_share(distinct, set(document.tokens)), document.used, document)
            for document in self._background.gently(documents)
        ]
        share, _, best = max(shares, key=lambda one: one[:2], default=(0.0, 0.0, None))
        return best if share > 0.5 else None

    def _passing(self, documents: Sequence[KnownDocument], only: Filter) -> Iterator[KnownDocument]:
        """Yield the documents that pass a filter. Names are joined, because Python searches long texts fast."""
        for start in self._background.gently(range(0, len(documents), JOINED_NAMES)):
            batch = documents[start : start + JOINED_NAMES]
            if only.name in "\0".join([document.name for document in batch]):
                yield from filter(only.passes, batch)

    def _noted(
        self, namespace: bytes, tokens: Sequence[int], keys: Sequence[ChunkKey], name: str, model: str, tenant: str
    ) -> KnownDocument:
        """Return the document with these keys. A new one becomes known. The table does not know of changes yet."""
        document = self._documents.get(keys[-1])
        if document is None:
            document = KnownDocument(namespace, array("I", tokens), tuple(keys), model=model, tenant=tenant)
            self._documents[keys[-1]] = self._by_tenant.setdefault(tenant, {})[keys[-1]] = document
            self._by_first.add(keys[0], document)
            self._table.add(document)
            self._bytes += document.memory
            if self._finds:
                self._new[namespace].append(document)
        elif (model or tenant) and not (document.model or document.tenant):  # Older records have neither.
            self._by_tenant[""].pop(keys[-1])
            document.model, document.tenant = model, tenant
            self._by_tenant.setdefault(tenant, {})[keys[-1]] = document
        if name and name != document.name:
            document.name = joined_names([*document.names, *names_in(name)])
        return document

    def _forget_oldest(self, newest: KnownDocument) -> None:
        """Forget the least recently used documents beyond the limit, except the `newest` one and those that are kept.

        They are chosen in batches, so that most calls choose none.
        """
        batches = iter((len(self._documents) // BATCHES + 1, len(self._documents)))
        while self._bytes > self._allowed_bytes:
            if not self._oldest:
                if (batch := next(batches, None)) is None:  # All are kept. They are not all looked at in each call.
                    self._allowed_bytes = self._bytes + self._max_bytes / BATCHES
                    return
                self._oldest.extend((document.used, document) for document in self._table.oldest(batch))
            used, document = self._oldest.popleft()
            is_known = self._documents.get(document.keys[-1]) is document
            if is_known and document is not newest and not document.kept and document.used == used:
                self._forget(document)
                self._allowed_bytes = self._max_bytes

    def _forget(self, document: KnownDocument) -> None:
        key = document.keys[-1]
        del self._documents[key], self._by_tenant[document.tenant][key]
        if not self._by_tenant[document.tenant]:
            del self._by_tenant[document.tenant]
        self._by_first.discard(document.keys[0], document)
        self._table.discard(document)
        self._bytes -= document.memory
        if not document.removed:
            self._no_longer_find(document)
        self._note_too_many()

    def _note_too_many(self) -> None:
        if not self._too_many:
            self._too_many = True
            log.warning(
                "the known documents take %.1f GB: the least recently used ones are forgotten, and are not found in "
                "prompts any more; to know more, raise max_document_index_size",
                self._max_bytes / GIB,
            )

    def _find_again(self, document: KnownDocument) -> None:
        """Insert a document into its finder again, if it was removed or if the finder can take more of its blocks."""
        if not document.removed:
            finder = self._finder(document.namespace)
            if not document.lacks_blocks or not finder.has_room_for_more_of(document):
                return
            self._no_longer_find(document)
        self._new[document.namespace].append(document)

    def _no_longer_find(self, document: KnownDocument) -> None:
        """Remove a document from its finder. Tenants without documents have no finder."""
        if self._finds:
            finder = self._finder(document.namespace)
            finder.remove(document)
            if not len(finder):
                del self._finders[document.namespace]
                self._bytes -= FINDER_BYTES

    def _finder(self, namespace: bytes) -> DocumentFinder[KnownDocument]:
        """Return the finder of a namespace, with its new documents."""
        finder = self._finders.get(namespace)
        if finder is None:
            finder = self._finders[namespace] = DocumentFinder(lambda document: document.used)
            self._bytes += FINDER_BYTES
        new = self._new.pop(namespace, ())
        for document in new:
            document.lacks_blocks = False
        for document in finder.insert(new):
            document.lacks_blocks = True
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
