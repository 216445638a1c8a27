"""The cache engine: one model's chunks in a store.

It turns tokens into keys, and keys into stored bytes, for every connector. A request goes through these steps:

Match     what the request can use: its documents, which may be stored, and limits
look      finds what is stored, and in which tiers: one immutable snapshot
plan      the parts to load, decided by the planner from the snapshot alone
layers    the plan's KV, layer by layer, while the next layers are being loaded
begin_…   slots for new chunks, which the connector fills and commits
"""

from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import groupby

import torch

from lmc.background import Background
from lmc.blend.segments import Span
from lmc.config.settings import Settings
from lmc.copies import settle
from lmc.documents.finder import SEAM, FoundRun, stored_without_overlaps
from lmc.documents.keeper import DocumentKeeper, Keeper
from lmc.documents.kept import KeptDocuments
from lmc.documents.known import KnownDocument, KnownDocuments, document_bytes, document_label, parted_label
from lmc.documents.learn_queue import LearnQueue, Unlearned
from lmc.documents.repeats import NAME as REPEATED
from lmc.documents.server import DocumentServer, FollowingEngine, LearningEngine
from lmc.engine.index import BlockChain, CacheIndex, ExactChain, NewChunk, TokenChain, find_run
from lmc.engine.names import Names
from lmc.engine.pieces import Piece, trim
from lmc.engine.planner import DocumentMatch, FoundBy, Match, Plan, Planner
from lmc.engine.promotion import Promotion
from lmc.engine.recall import Recall
from lmc.engine.speeds import SpeedFile, processor_of, setup_of
from lmc.errors import ChunkLost
from lmc.keys import ChunkKey, Namespace, RecordKind, chunk_bounds, document_keys, tenant_of
from lmc.shapes import GIB, KVShape
from lmc.storage.chunk_layout import ChunkLayout
from lmc.storage.contract import ChunkStore, Pin, PinState, Reservation, StoredChunk
from lmc.storage.cost_model import BlendOffer, CostModel, LoadPolicy
from lmc.storage.secret_keys import read_keys
from lmc.storage.stats import StoreStats
from lmc.storage.store import Store
from lmc.storage.tiers.record import RecordMeta

Part = tuple[torch.Tensor, torch.Tensor]  # keys and values of a chunk's tokens in one layer

LEAST_AGAIN = 0.25  # A prompt with this share of an evicted document lets the whole document be learned again.
LEAST_PART = 16  # A document that fills a smaller part of its chunk is not worth the memory of a whole one.
SHORTER = 8  # A document that is given as a text may lack its first and its last word, of at most this many tokens.


class CacheEngine:
    """The chunks of one model, for all tenants."""

    def __init__(
        self,
        settings: Settings,
        store: ChunkStore,
        layout: ChunkLayout,
        shape: KVShape,
        namespace: Namespace,
        *,
        device: torch.device | str = "cpu",
        prefix: Sequence[int] = (),
        model: str = "",
        divisible: bool = True,
        states: bool = False,
        processor: str = "",
    ) -> None:
        """Find the documents of earlier processes in a store for chunks of `layout`.

        `shape` is the shape of a token's KV in documents; a shape without heads means that no token can be stored.
        `namespace` has the fields that all namespaces of the model share; kind and salt are set here. KV is read on
        `device`. Documents are learned after the tokens of `prefix`. `model` is the model's name for people.
        `divisible` and `states` describe chunks of pages, as in `BlockChain`. `processor` is the name of what computes,
        by default that of `device`.
        """
        self.prefix, self._device = tuple(prefix), torch.device(device)
        self._of_pages = {"divisible": divisible, "states": states}
        self.settings, self.names = settings, Names(namespace, prefix, model)
        self.layout, self.shape, self.chunk_size = layout, shape, settings.chunk_size
        self.store = store
        self.server = store if isinstance(store, DocumentServer) else None  # None for a store in this process
        self.index = CacheIndex()
        self.least_tokens = self.chunk_size // LEAST_PART  # A shorter document of a prompt is not learned.
        self.learning = LearnQueue(self.store.slots * self.chunk_size, self.chunk_size)
        self.recalled: dict[ChunkKey, str] = {}  # `NewChunk.details` of the records on disk
        self.background = Background()
        self.known = KnownDocuments(
            self.background, finds=settings.finds_known, max_bytes=settings.max_document_index_size * GIB
        )
        self._exact_pages = self.namespace(RecordKind.PAGES)
        self.recall = Recall(self.store.records(), self._take, self.known.prepare, self.background)
        self._recalls = [self.recall]  # and a later one of the documents of a cache server
        self.promotion = Promotion(store, self.background)
        self._speeds = self._open_speeds(namespace, processor)
        self.keeper = self._open_keeper()
        self.store.trim()  # only now, because it must know which documents are pinned

    # -- names -------------------------------------------------------------------------------------------------------

    def namespace(self, kind: RecordKind, salt: str = "") -> bytes:
        """Return the digest from which the keys of a tenant's chunks start."""
        return self.names.of(kind, salt)

    def salt_of(self, document: KnownDocument | Unlearned) -> str | None:
        """Return the salt of a document's tenant; None if the tenant has sent no request."""
        return self.names.salt_of(document.namespace)

    def token_chain(self, tokens: Sequence[int], salt: str = "", ends: Iterable[int] = ()) -> TokenChain:
        """Return a prompt as exact token chunks. Partly full chunks are also looked up at the prompt lengths `ends`."""
        return TokenChain(self.index, self.namespace(RecordKind.PREFIX, salt), tokens, self.chunk_size, ends)

    def block_chain(self, hashes: Sequence[bytes], block_size: int) -> BlockChain:
        """Return a prompt as exact chunks of pages, named by an engine's block hashes."""
        namespace = self.namespace(RecordKind.PAGES)
        return BlockChain(self.index, namespace, hashes, self.chunk_size, block_size, **self._of_pages)

    def documents(
        self,
        prompt: Sequence[int],
        spans: Iterable[Span],
        salt: str = "",
        *,
        start: Span | None = None,
        found_by: FoundBy = FoundBy.SEPARATORS,
    ) -> tuple[DocumentMatch, ...]:
        """Return the documents of a prompt, not looked up yet. Raises `InputError` for a token that is not a uint32.

        The text at the `start` of a prompt may be a document without a separator before it. It is never learned.
        """
        namespace = self.namespace(RecordKind.DOCUMENT, salt)
        found = [self._document(prompt, span, namespace, found_by=found_by) for span in spans]
        if start:
            start = Span(self._text_start(prompt), start.stop)
            found.insert(0, self._document(prompt, start, namespace, learnable=False))
        return tuple(found)

    def with_known(
        self, prompt: Sequence[int], documents: Sequence[DocumentMatch], salt: str = ""
    ) -> tuple[DocumentMatch, ...]:
        """Return the documents of a prompt, and the known documents or parts of them that it has anywhere.

        A document that is known with other tokens at its ends becomes the known one, so that it is stored once. Of
        documents that overlap, stored parts win: a document that is being learned, or whose chunks were evicted, hides
        no other.
        """
        if not self.settings.finds_known:
            return tuple(documents)
        namespace, min_run = self.namespace(RecordKind.DOCUMENT, salt), self.settings.blend_min_run
        known = stored_without_overlaps(self.known.all_runs(namespace, prompt, min_run), min_run, self._stored)
        found = [self._run(prompt, run) for run in known]
        by_name = {(one.span, one.pieces[-1].key) for one in documents if one.pieces}
        runs = [run for run in found if (run.span, run.pieces[-1].key) not in by_name]
        by_start, kept = {run.span.start: run for run in runs}, list[DocumentMatch]()
        for document in documents:
            same = next((run for run in _near(document, by_start) if _is_same(document, run)), None)
            if same is None:
                kept.append(document)
            else:
                by_start[same.span.start] = replace(same, found_by=document.found_by)
        return tuple(sorted((*kept, *by_start.values()), key=lambda one: one.span.start))

    def _run(self, prompt: Sequence[int], run: FoundRun[KnownDocument]) -> DocumentMatch:
        """Return a run of a known document in a prompt, not looked up yet.

        It is exact only if it begins with the document: otherwise the prompt has other tokens before it.
        """
        document, size, span = run.document, self.chunk_size, Span(run.at, run.stop)
        start, chunks = run.shift, self._chunks_of(run)
        bounds = [(number * size, min((number + 1) * size, len(document.tokens))) for number in chunks]
        exact = not run.first and self._is_where_learned(prompt, start)
        pieces = self._pieces(start, document.keys[chunks.start : chunks.stop], bounds, exact=exact)
        found_by = FoundBy.REPEATED if document.name == REPEATED else FoundBy.KNOWN
        pieces = trim(pieces, span.start, span.stop)
        return DocumentMatch(span=span, pieces=tuple(pieces), known=document, found_by=found_by)

    def _chunks_of(self, run: FoundRun[KnownDocument]) -> range:
        """Return the indices of the document's chunks that have tokens of a run."""
        return range(run.first // self.chunk_size, -(-(run.first + run.tokens) // self.chunk_size))

    def _stored(self, runs: Sequence[FoundRun[KnownDocument]]) -> list[FoundRun[KnownDocument]]:
        """Return the parts of runs that are stored. Tiers that other processes share are not queried."""
        keys = list({run.document.keys[number] for run in runs for number in self._chunks_of(run)})
        places = self.store.lookup(keys, shared=False)
        stored = {key for key, place in zip(keys, places, strict=True) if place is not None}
        return [part for run in runs for part in self._parts_in(run, stored)]

    def _parts_in(
        self, run: FoundRun[KnownDocument], stored: Collection[ChunkKey]
    ) -> Iterator[FoundRun[KnownDocument]]:
        """Yield the parts of a run whose chunks are among these."""
        keys, size = run.document.keys, self.chunk_size
        for is_stored, group in groupby(self._chunks_of(run), lambda number: keys[number] in stored):
            chunks = list(group)
            first, stop = max(chunks[0] * size, run.first), min((chunks[-1] + 1) * size, run.first + run.tokens)
            if is_stored:
                yield FoundRun(run.shift + first, run.document, first, stop - first)

    def document_span(self, prompt: Sequence[int]) -> Span:
        """Return the document of a prompt that consists of one document, with or without the tokens of `prefix`."""
        return Span(len(self.prefix) if self._begins(prompt) else self._text_start(prompt), len(prompt))

    def _begins(self, prompt: Sequence[int]) -> bool:
        """Return whether a prompt begins with the tokens after which documents are learned."""
        return tuple(prompt[: len(self.prefix)]) == self.prefix

    def _text_start(self, prompt: Sequence[int]) -> int:
        """Return the start of a prompt's text: 1 if the prompt begins with the first token of `prefix`, otherwise 0."""
        return int(bool(self.prefix) and prompt[0] == self.prefix[0])

    def _document(
        self,
        prompt: Sequence[int],
        span: Span,
        namespace: bytes,
        *,
        learnable: bool = True,
        found_by: FoundBy = FoundBy.SEPARATORS,
    ) -> DocumentMatch:
        keys = self.document_keys(prompt[span.start : span.stop], namespace)
        bounds = chunk_bounds(len(span), self.chunk_size)
        pieces = self._pieces(span.start, keys, bounds, exact=self._is_where_learned(prompt, span.start))
        met = self.known.get(keys[-1].hex()) if keys else None
        met = None if met is not None and met.removed else met
        return DocumentMatch(span=span, pieces=tuple(pieces), learnable=learnable, met=met, found_by=found_by)

    def _is_where_learned(self, prompt: Sequence[int], start: int) -> bool:
        """Return whether a document that begins at position `start` comes after the tokens at which it was learned."""
        return start == len(self.prefix) and self._begins(prompt)

    def _pieces(
        self, start: int, keys: Sequence[ChunkKey], bounds: Sequence[tuple[int, int]], *, exact: bool
    ) -> list[Piece]:
        """Return chunks of a document that begins at position `start`. `bounds` are their tokens in the document."""
        before = len(self.prefix)
        return [
            Piece.whole(RecordKind.DOCUMENT, key, stop - first, start + first, before + first, None, exact=exact)
            for key, (first, stop) in zip(keys, bounds, strict=True)
        ]

    def document_keys(self, tokens: Sequence[int], namespace: bytes) -> list[ChunkKey]:
        """Return the keys of a document's chunks."""
        return document_keys(namespace, tokens, self.chunk_size)

    def learn_later(
        self,
        prompt: Sequence[int],
        documents: Iterable[DocumentMatch],
        salt: str = "",
        name: str = "",
        *,
        wanted: bool = False,
    ) -> tuple[Unlearned, ...]:
        """Queue documents to be learned, each once, and not more of them than memory holds.

        A known document is learned whole if the prompt has `LEAST_AGAIN` of it, unless it has been removed. Documents
        that are not `wanted` are learned when the engine is idle, if they are not too short. Returns the queued ones.
        """
        found, new = Counter[Unlearned](), dict[Unlearned, bool]()  # tokens in the prompt; whether it was known
        for one in documents:
            if wanted or one.tokens >= self.least_tokens:
                document = self.unlearned(prompt, one, salt, name)
                found[document] += len(one.span)
                before = one.known or one.met
                if wanted or before is None or (not before.removed and found[document] >= LEAST_AGAIN * one.tokens):
                    new[document] = before is not None
        return tuple(one for one, again in new.items() if self.learning.add(one, wanted=wanted, again=again))

    def share_learning(self, has_time: Callable[[], bool]) -> None:
        """Share the queue with the other engines of a cache server, and learn their documents while `has_time()`."""
        if self.server is not None:
            namespaces = self.names.namespaces_of_documents
            self.server.share_learning(LearningEngine(self.learning, namespaces, has_time, self._learn_again))

    def unlearned(self, prompt: Sequence[int], document: DocumentMatch, salt: str, name: str = "") -> Unlearned:
        """Return a document of a prompt as an entry of the queue of documents to learn."""
        if document.known is not None:
            return Unlearned.of(document.known)
        span = document.span
        return Unlearned(self.namespace(RecordKind.DOCUMENT, salt), tuple(prompt[span.start : span.stop]), name)

    def note(
        self,
        prompt: Sequence[int],
        documents: Iterable[DocumentMatch],
        salt: str = "",
        *,
        used: bool = False,
        name: str = "",
    ) -> list[KnownDocument]:
        """Record documents of a prompt as stored, or as `used` by it. Returns their entries in `known`.

        Those without a name get `name`. A document that was removed while the prompt used it stays removed.
        """
        namespace, noted = self.namespace(RecordKind.DOCUMENT, salt), []
        model, tenant = self.names.model, tenant_of(salt)
        for document in documents:
            if document.known is not None:
                self.known.use(document.known.keys[-1:])
            elif tokens := prompt[document.span.start : document.span.stop]:
                keys = [piece.key for piece in document.pieces]
                if not (used and self._was_removed(keys)):
                    one = self.known.note(namespace, tokens, keys, used=used, name=name, model=model, tenant=tenant)
                    noted.append(one)
        if name:
            self.keeper.renamed(noted, learned_as=name)
        return noted

    def _was_removed(self, keys: Sequence[ChunkKey]) -> bool:
        """Return whether the document of these chunks was removed, and was not stored again."""
        document = self.known.get(keys[-1].hex())
        removed = document is not None and bool(document.removed)
        return removed and None in self.store.lookup(keys, shared=False)

    def begin_anew(self) -> None:
        """Switch to new keys, which no later process finds: the model's weights may have been replaced."""
        self._stop_reading()
        self.promotion.cancel()
        self.names.begin_anew()
        self.index = CacheIndex()
        self.known.clear()
        self.keeper.begin_anew()

    # -- plans -------------------------------------------------------------------------------------------------------

    def look(self, match: Match, chain: ExactChain, elsewhere: Mapping[ChunkKey, str] | None = None) -> Match:
        """Return a match with the stored exact chunks of `chain`, and with the tiers of its documents.

        Tiers that other processes share are queried, unless `elsewhere` has their answers: a tier for each chunk.
        """
        keys = [*chain.whole, *chain.inner, *(piece.key for document in match.documents for piece in document.pieces)]
        places = dict(zip(keys, self.lookup(keys, elsewhere), strict=True))
        exact = find_run(chain, self.chunk_size, places, lambda keys: self.lookup(keys, elsewhere))
        documents = [
            replace(document, pieces=tuple(piece.at_place(places[piece.key]) for piece in document.pieces))
            for document in match.documents
        ]
        return replace(match, exact=tuple(exact), documents=tuple(documents))

    def lookup(self, keys: Sequence[ChunkKey], elsewhere: Mapping[ChunkKey, str] | None = None) -> list[str | None]:
        """Return the tier of each chunk, or None; `elsewhere` as for `look`."""
        places = self.store.lookup(keys, shared=elsewhere is None)
        known = elsewhere or {}
        return [place or known.get(key) for key, place in zip(keys, places, strict=True)]

    def plan(self, match: Match, cost: CostModel | None = None) -> Plan:
        """Decide which stored parts are loaded, by `cost` or else the store's cost model; see `Planner.choose`."""
        return self._planner(cost).choose(match)

    def computing(self, plan: Plan) -> float | None:
        """Return the expected seconds of computing what a plan loads from tiers; see the planner."""
        return self._planner().computing(plan)

    def without_slow_blend(self, plan: Plan) -> Plan:
        """Return a plan without its blend if prefill is expected to be faster; see the planner."""
        return self._planner().without_slow_blend(plan)

    def blend_offer(self, plan: Plan) -> BlendOffer | None:
        """Return what the blend of a plan computes and loads; None without a blend."""
        return self._planner().blend_offer(plan)

    # -- KV ----------------------------------------------------------------------------------------------------------

    def layers(
        self, pieces: Sequence[Piece], loaded: "Counter[str] | None" = None
    ) -> Generator[tuple[int, list[Part]], None, None]:
        """Yield for each layer, in order, its number, and keys and values `[T, H, D]` for each piece.

        Later layers are loaded meanwhile. Without pieces, nothing is yielded. The tensors are views of slots and are
        valid until the generator ends, so use it under `contextlib.closing`. `loaded` is increased by the bytes that
        came from each tier. Raises `ChunkLost` if a chunk is missing or corrupt; the caller then calls `look` again.
        """
        if not pieces:
            return
        with self.store.pinned([piece.key for piece in pieces]) as found:
            pins = [pin for pin in found if pin is not None]
            if len(pins) < len(pieces):
                raise ChunkLost([piece.key for piece, pin in zip(pieces, found, strict=True) if pin is None])
            try:
                for layer in range(self.shape.layers):
                    pairs = zip(pieces, pins, strict=True)
                    yield layer, [self._part(piece, pin, layer, loaded) for piece, pin in pairs]
            finally:
                settle(self._device)  # Copies from slots on any stream must end before the slots are unpinned.
            # A cache server takes slots from a process that it believes dead. This process may not have noticed.
            if lost := [pin.key for pin in pins if self.store.state(pin) is PinState.LOST]:
                raise ChunkLost(list(lost))

    def begin_exact(self, chain: ExactChain, chunks: Sequence[NewChunk], salt: str = "") -> list[Reservation | None]:
        """Reserve a slot for each new chunk. Returns None for a chunk that is stored, or for which there is no room.

        Shared tiers are not queried, because that would cost a round trip. Of two equal records, a shared tier keeps
        only one.
        """
        namings = [chain.naming(one.chunk, one.tokens, inner=one.inner) for one in chunks]
        keys = [key for naming in namings for key in (naming.key, naming.longer) if key is not None]
        places = dict(zip(keys, self.store.lookup(keys, shared=False), strict=True))
        metas = {}
        for one, naming in zip(chunks, namings, strict=True):
            if places[naming.key] is None and (naming.longer is None or places[naming.longer] is None):
                size = self.layout.part_bytes * one.tokens // self.chunk_size  # The slot's other bytes are stale.
                label = " ".join(filter(None, (naming.label, one.details)))
                kept, at = (chain.kind, naming.key, chain.namespace, tenant_of(salt)), one.chunk * self.chunk_size
                metas[one] = self._meta(*kept, one.tokens, at, size, label)
        begun = dict(zip(metas, self.store.begin(list(metas.values())), strict=True))
        slots = [begun.get(one) for one in chunks]
        for one, slot in zip(chunks, slots, strict=True):
            if (slot is not None or chain.kind is RecordKind.PREFIX) and not one.inner:
                chain.remember(one.chunk, one.tokens)
        return slots

    def begin_document(
        self, namespace: bytes, tokens: Sequence[int], name: str = ""
    ) -> list[Reservation | None] | None:
        """Reserve a slot for each of a document's chunks. Returns None for a chunk that is already stored.

        Returns None instead of the list if all chunks are stored, if they do not all have room, or if the tenant
        of the namespace has been forgotten.
        """
        name = name.encode(errors="backslashreplace").decode()  # A file's name may have bytes that are not UTF-8.
        keys = self.document_keys(tokens, namespace)
        places = self.store.lookup(keys, shared=False)
        if all(places) or len(keys) > self.store.slots:
            return None
        salt = self.names.salt_of(namespace)
        if salt is None:  # The tenant's records would have neither its name nor its encryption.
            return None
        metas, tenant = [], tenant_of(salt)
        for key, place, (start, stop) in zip(keys, places, chunk_bounds(len(tokens), self.chunk_size), strict=True):
            size = self.shape.part_bytes(stop - start)
            label = document_label(tokens, name) if stop == len(tokens) else ""
            if place is None:
                metas.append(self._meta(RecordKind.DOCUMENT, key, namespace, tenant, stop - start, start, size, label))
        new = self.store.begin(metas[:1])  # The first chunk reserves the document for one engine.
        try:
            new += [] if None in new else self.store.begin(metas[1:])
        except BaseException:  # such as Ctrl-C
            self._abort(new)
            raise
        if None in new:
            self._abort(new)
            return None
        slots = [None if place else new.pop(0) for place in places]
        document = self.known.note(namespace, tokens, keys, name=name, model=self.names.model, tenant=tenant)
        self.keeper.renamed([document])  # It may have been known by other names.
        return slots

    def _abort(self, reservations: Iterable[Reservation | None]) -> None:
        for begun in filter(None, reservations):
            self.store.abort(begun)

    def owns(self, document: KnownDocument) -> bool:
        """Whether a document belongs here: always, for the documents that an engine knows."""
        return True

    def fits(self, tokens: int) -> bool:
        """Return whether all chunks of a document fit into memory at once, which their use requires.

        Pinned chunks reduce the available memory only without a disk tier, here or in the cache server.
        """
        pinned = 0 if self.store.pins_yield else self.keeper.pinned_chunks
        return len(chunk_bounds(tokens, self.chunk_size)) <= self.store.slots - pinned

    def capacity(self) -> dict[str, float]:
        """Return how many document tokens fit into memory, and into the disk tier if there is one."""
        token = (self.shape.token_bytes or self.layout.part_bytes / self.chunk_size) * self.layout.parts
        has_disk = self.settings.local_disk is not None and self.server is None
        disk = {"disk": self.settings.max_local_disk_size * GIB // token} if has_disk else {}
        return {"host": self.store.slots * self.chunk_size} | disk

    def forget_all(self, *, wait: bool = True) -> None:
        """Remove every chunk, even while it is read.

        Chunks in shared tiers or in a cache server stay, because other processes use them.
        """
        if self.server is not None:
            return
        self.promotion.cancel()
        with self.keeper.moving:  # Otherwise the keeper might restore a pinned chunk.
            for key in self.store.known_keys():
                self.store.forget(key, wait=wait, shared=False)

    def stats(self) -> StoreStats:
        """Return the store's counts since the start."""
        return self.store.stats()

    def close(self) -> None:
        """Write the chunks that the tiers lack, and close the keeper and the store."""
        self._stop_reading()
        self.promotion.stop()
        self.keeper.close()
        if self._speeds is not None:
            self._speeds.close()
        self.store.close()

    # -- inside ------------------------------------------------------------------------------------------------------

    def _part(self, piece: Piece, pin: Pin, layer: int, loaded: "Counter[str] | None") -> Part:
        if loaded is not None:
            loaded[pin.place] += self.shape.part_bytes(piece.stored)
        return self.shape.part(self.store.part(pin, layer), piece.stored, piece.rows)

    def _planner(self, cost: CostModel | None = None) -> Planner:
        return Planner(self._record_bytes, cost or self.store.cost, LoadPolicy(self.settings.load_policy))

    def _record_bytes(self, piece: Piece) -> int:
        if piece.kind is RecordKind.PAGES:
            return self.layout.part_bytes * self.layout.parts
        return self.shape.part_bytes(piece.stored) * self.layout.parts

    def _meta(
        self, kind: RecordKind, key: ChunkKey, namespace: bytes, tenant: str, tokens: int, at: int, size: int, note: str
    ) -> RecordMeta:
        return RecordMeta(
            key=key, namespace=namespace, tokens=tokens, first=at, parts=self.layout.parts, part_bytes=size,
            kind=kind, label=note, model=self.names.model, tenant=tenant,
        )  # fmt: skip

    def _learn_again(self, document: Unlearned, *, wanted: bool = False) -> None:
        """Queue a document if it belongs to this model and to a tenant that has sent a request."""
        if self.salt_of(document) is not None:
            self.learning.add(document, wanted=wanted)

    def _part_of_room(self, document: KnownDocument) -> float:
        """Return the share of the pin quota that a document takes: of the disk, or of memory without a disk."""
        need, room = float(len(document.keys)), self.settings.document_share * self.store.slots
        if self.settings.local_disk is not None:
            need = float(document_bytes(len(document.tokens), self.chunk_size, self.shape, self.layout.parts))
            room = self.settings.document_share * self.settings.max_local_disk_size * GIB
        return need / room if room else float("inf")

    def _open_speeds(self, namespace: Namespace, processor: str) -> SpeedFile | None:
        """Restore what an earlier process has measured, if this one has a disk tier."""
        directory = self.settings.local_disk
        if directory is None or self.server is not None:
            return None
        setup = setup_of(self.settings, namespace, processor or processor_of(self._device))
        return SpeedFile(directory, setup, self.store.cost)

    def _open_keeper(self) -> DocumentKeeper:
        def removed(document: KnownDocument) -> None:
            self.learning.discard(Unlearned.of(document))

        if self.server is not None:
            return self.server.keeper(FollowingEngine(self.known, removed, self._reads, self._read_again))
        assert isinstance(self.store, Store), "a store without a server is in this process"
        disk = self.settings.local_disk
        keeper = Keeper(
            self.store,
            self.known,
            KeptDocuments(disk, keys=read_keys(self.settings.encryption_key)) if disk else None,
            keys_of=lambda namespace, tokens, _: self.document_keys(tokens, namespace),
            learn=lambda one: self._learn_again(Unlearned.of(one), wanted=True),
            removed=removed,
            size=self._part_of_room,
        )
        keeper.load()
        return keeper

    def _reads(self) -> bool:
        """Return whether the engine is still reading what is stored."""
        return not all(recall.ended for recall in self._recalls)

    def _read_again(self) -> None:
        """Begin to read which documents a cache server has. Some may have been removed and learned again."""
        take = partial(self._take_document, again=True)
        recall = Recall(self.store.records(), take, self.known.prepare, self.background)
        self._recalls = [self.recall, recall]

    def _stop_reading(self) -> None:
        for recall in self._recalls:
            recall.stop()

    def _take_document(self, chunk: StoredChunk, *, again: bool = False) -> None:
        """Remember the document of a chunk that is its last one; see `KnownDocuments.recall`."""
        meta = chunk.meta
        if meta.kind is RecordKind.DOCUMENT and meta.label:
            with suppress(ValueError, IndexError):
                tokens, name = parted_label(meta.label)
                if (keys := self.document_keys(tokens, meta.namespace))[-1] != meta.key:
                    return  # An earlier process used another chunk_size.
                owner = {"model": meta.model, "tenant": meta.tenant}
                self.known.recall(meta.namespace, tokens, keys, name=name, used=chunk.used, again=again, **owner)

    def _take(self, chunk: StoredChunk) -> None:
        """Remember a chunk that an earlier process has stored."""
        meta = chunk.meta
        self._take_document(chunk)
        # Other models' pages are left out: their block hashes may be equal. Keys of token chunks differ by model.
        if meta.kind is RecordKind.PREFIX or meta.namespace == self._exact_pages:
            label, _, details = meta.label.partition(" ")
            with suppress(ValueError):  # lmc did not write this label.
                self.index.recall(meta.kind, meta.key, meta.tokens, label)
                if details:
                    self.recalled[meta.key] = details


def _near(document: DocumentMatch, by_start: Mapping[int, DocumentMatch]) -> Iterable[DocumentMatch]:
    """Return the runs that begin near a document of a prompt."""
    starts = range(document.span.start - SHORTER, document.span.start + SEAM + 1)
    return (by_start[start] for start in starts if start in by_start)


def _is_same(document: DocumentMatch, run: DocumentMatch) -> bool:
    """Return whether a document of a prompt is a whole known document, except for tokens at its end."""
    assert run.known is not None
    whole = len(run.span) >= len(run.known.tokens) - 2 * SEAM
    return whole and -SEAM <= run.span.stop - document.span.stop <= SHORTER
