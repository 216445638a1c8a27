"""The index of the `documents` policy: the documents and the prefixes of prompts that each cache has.

Engines report documents in events. Without events, and for documents whose tokens are unknown, a cache is assumed to
have what its engines were sent last, as much as fits. The same holds for the prefixes of prompts. The engines'
answers show how often this assumption is right, and which tiers the tokens came from.
"""

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import ceil
from typing import NamedTuple

from lmc.router.cut import BLOCK_TOKENS, SEPARATED, Cut, CutDocument
from lmc.router.fair_lru import FairLru
from lmc.router.policy_types import TakeBack
from lmc.router.prefix_hashes import leading
from lmc.storage.places import place_of

PREFIX_SHARE = 0.5  # share of a cache's tokens that prefixes of prompts may take in this index
LEARNING_SECONDS = 10.0  # time in which a document should be stored after its request was sent
FAR = 0.7  # weight of a reused token that is not in memory
MEDIUM_WEIGHTS = {"GPU": 1.0, "CPU": 1.0, "STORAGE": FAR}  # weight by medium, as in events
MAX_EVICTED = 10_000  # recently evicted documents that are remembered per cache
MAX_TENANTS = 10_000  # whose answers are remembered per cache
ANSWER_SHARE = 0.1  # weight of the last answer in a certainty
NO_PLACES: Mapping[str, int] = {}
NEVER = (float("inf"), float("inf"))  # the times of a missing block


class DocumentState(NamedTuple):
    """What is known about a document in a cache."""

    certainty: float  # probability that the cache has it
    weight: float  # of its tier: 1 in memory, less below
    is_stored: bool = True
    is_assumed: bool = False  # routed there but not confirmed by events
    is_coming: bool = False  # routed there a moment ago, not stored yet


NOT_STORED, ASSUMED = DocumentState(0.0, 0.0, is_stored=False), DocumentState(1.0, 1.0, is_assumed=True)
COMING = NOT_STORED._replace(is_coming=True)


class CachedPrefix(NamedTuple):
    """What is known about the prefix of a prompt in a cache."""

    tokens: float = 0.0  # routed there before
    certainty: float = 1.0  # probability that the cache has them
    assumed: float = 0.0  # of these tokens, those routed long enough ago to be stored


NO_PREFIX = CachedPrefix()


class ReportedDocument(NamedTuple):
    """A document of a tenant, as named in engines' events."""

    tenant: str
    digest: str


class DocumentIndex:
    """The contents of all caches. A cache belongs to one engine, or to a cache server that several engines share."""

    def __init__(self, cache_tokens: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`cache_tokens` is the size of a cache until `resize` is called."""
        self._cache_tokens, self._clock = cache_tokens, clock
        self._caches: dict[str, _Cache] = {}
        self._unknown = _Cache(cache_tokens)  # stands for caches without entries, and stays empty
        self.noted = Counter[str]()  # documents of prompts that were routed, by how they were found

    def resize(self, cache: str, tokens: float, chunk_tokens: int = 1) -> None:
        """Set the size of a cache, and of the chunks in which it stores documents, in tokens."""
        self._of(cache).resize(tokens, chunk_tokens)

    def find(self, cache: str, documents: Sequence[CutDocument], tenant: str = "") -> list[DocumentState]:
        """Return what is known about a tenant's documents in a cache."""
        return self._read(cache).find(documents, tenant, self._clock())

    def answered(self, cache: str, tenant: str, assumed: float, reused: float, places: Mapping[str, int]) -> None:
        """Learn from an answer how many of a tenant's assumed document tokens were reused.

        `places` has the prompt's cached tokens by tier. Nothing is learned for a cache with events, because nothing is
        assumed there.
        """
        if assumed > 0 and cache in self._caches and not self.is_reported(cache):  # Its engine may have been removed.
            self._caches[cache].documents.learn(tenant, min(reused / assumed, 1.0), places)

    def answered_prefix(self, cache: str, tenant: str, assumed: float, reused: float) -> None:
        """Learn the same about the prefix of a prompt."""
        if assumed > 0 and cache in self._caches:
            self._caches[cache].prefixes.learn(tenant, min(max(reused, 0.0) / assumed, 1.0))

    def cached_prefix(self, cache: str, cut: Cut) -> CachedPrefix:
        """Return what is known about the prefix of a prompt in a cache, from what was routed there."""
        contents = self._read(cache)
        if not (sent := contents.prefix(cut)):
            return NO_PREFIX
        learned_blocks = contents.prefix_until(cut, sent, self._clock() - LEARNING_SECONDS)
        certainty = contents.prefixes.of(cut.tenant).certainty
        return CachedPrefix(sent * cut.block_tokens, certainty, learned_blocks * cut.block_tokens)

    def prefix(self, cache: str, cut: Cut, within: float) -> float:
        """Return the tokens of a prompt's prefix that were routed to a cache in the last `within` seconds."""
        return self._read(cache).prefix(cut, self._clock() - within) * cut.block_tokens

    def oldest(self, cache: str) -> float:
        """Return when the prefix that is evicted next was last used; minus infinity if nothing is evicted."""
        return self._read(cache).oldest

    def room(self, cache: str) -> float:
        """Return the tokens of documents that a cache can take before it evicts others."""
        return self._read(cache).room

    def note(self, cache: str, cut: Cut) -> TakeBack:
        """Record that a prompt was routed to a cache. Returns a function that undoes this."""
        self.noted.update(document.how for document in cut.documents)
        return self._of(cache).note(cut, self._clock())

    def moved(self, cache: str, document: ReportedDocument, medium: str, *, stored: bool, source: str = "") -> None:
        """Apply an event of the engine `source`: a document was stored on a medium or removed from it."""
        self._of(cache).moved(document, medium, self._clock(), stored=stored, source=source)

    def listed(self, cache: str, documents: Iterable[tuple[ReportedDocument, str]], source: str = "") -> None:
        """Replace what the engine `source` reported: the documents in a cache with their media."""
        listing = self._of(cache).reports[source] = {}
        for document, medium in documents:
            listing.setdefault(document, set()).add(medium)

    def drop_reports(self, cache: str, source: str = "") -> None:
        """Drop what an engine reported about a cache, because some of its events are lost.

        Reports of other engines about the same cache stay.
        """
        self._read(cache).reports.pop(source, None)

    def reports(self, cache: str) -> dict[ReportedDocument, set[str]]:
        """Return the documents that engines reported in a cache, with their media."""
        contents = self._read(cache)
        return {document: contents.media(document) for listing in contents.reports.values() for document in listing}

    def is_reported(self, cache: str) -> bool:
        """Return whether an engine reports the documents of a cache. Otherwise its contents are assumed."""
        return bool(self._read(cache).reports)

    def sizes(self, cache: str) -> dict[str, int]:
        """Return the number of entries of a cache by kind."""
        return self._caches[cache].sizes() if cache in self._caches else {}

    def forget(self, cache: str) -> None:
        """Drop all entries of a cache."""
        self._caches.pop(cache, None)

    def __len__(self) -> int:
        return sum(sum(contents.sizes().values()) for contents in self._caches.values())

    def _read(self, cache: str) -> "_Cache":
        return self._caches.get(cache, self._unknown)

    def _of(self, cache: str) -> "_Cache":
        if cache not in self._caches:
            self._caches[cache] = _Cache(self._cache_tokens)
        return self._caches[cache]


class Reliability:
    """How reliable assumptions about a cache are, by tenant, learned from the engines' answers.

    Prefixes have a certainty; documents have the weight of a tier too.
    """

    def __init__(self) -> None:
        self._shown: OrderedDict[str, DocumentState] = OrderedDict()  # the last tenants that answers were for

    def of(self, tenant: str) -> DocumentState:
        """Return the certainty and the weight for what a tenant has sent."""
        return self._shown.get(tenant, ASSUMED)

    def learn(self, tenant: str, share: float, places: Mapping[str, int] = NO_PLACES) -> None:
        """Learn from the share of assumed tokens that was reused, and from the cached tokens by tier."""
        before = self._shown.pop(tenant, ASSUMED)
        certainty, weight = before.certainty, before.weight
        certainty += (share - certainty) * ANSWER_SHARE
        if tokens := sum(places.values()):
            worths = [count * MEDIUM_WEIGHTS.get(place_of(place).medium, FAR) for place, count in places.items()]
            weight += (sum(worths) / tokens - weight) * ANSWER_SHARE
        self._shown[tenant] = before._replace(certainty=certainty, weight=weight)
        if len(self._shown) > MAX_TENANTS:
            self._shown.popitem(last=False)


class _Cache:
    """The contents of one cache."""

    def __init__(self, tokens: float) -> None:
        self.reports: dict[str, dict[ReportedDocument, set[str]]] = {}  # media of documents, by reporting engine
        self._left: dict[ReportedDocument, float] = {}  # eviction times of recently evicted documents
        self._chunk_tokens = 1
        self._sent = FairLru[bytes, float](tokens)  # arrival times of documents, by tenant
        self._blocks = FairLru[int, tuple[float, float]](tokens * PREFIX_SHARE)  # arrival and last use
        self.documents, self.prefixes = Reliability(), Reliability()

    @property
    def room(self) -> float:
        return self._sent.room

    @property
    def oldest(self) -> float:
        block = self._blocks.next_out if self._blocks.room < BLOCK_TOKENS else None
        return block[1] if block else float("-inf")

    def resize(self, tokens: float, chunk_tokens: int) -> None:
        self._chunk_tokens = chunk_tokens
        self._sent.resize(tokens)
        self._blocks.resize(tokens * PREFIX_SHARE)

    def find(self, documents: Sequence[CutDocument], tenant: str, now: float) -> list[DocumentState]:
        results, is_reported = [], bool(self.reports)
        for document in documents:
            if is_reported and document.digest:
                results.append(self._find_reported(document, tenant, now))
            elif (arrived := self._sent.get(tenant, document.key)) is None:
                results.append(NOT_STORED)
            else:  # A recent one may not be learned yet, which shows nothing about others.
                results.append(self.documents.of(tenant)._replace(is_assumed=now - arrived >= LEARNING_SECONDS))
        return results

    def _find_reported(self, document: CutDocument, tenant: str, now: float) -> DocumentState:
        reported = ReportedDocument(tenant, document.digest)
        if media := self.media(reported):
            return DocumentState(1.0, max(MEDIUM_WEIGHTS.get(medium, 0.0) for medium in media))
        on_its_way = self._came(tenant, document.key) > max(now - LEARNING_SECONDS, self._left.get(reported, 0.0))
        return COMING if on_its_way else NOT_STORED

    def prefix(self, cut: Cut, since: float = float("-inf")) -> int:
        for at, block in enumerate(cut.blocks):
            sent = self._blocks.get(cut.tenant, block)
            if sent is None or sent[1] < since:
                return at
        return len(cut.blocks)

    def prefix_until(self, cut: Cut, sent: int, time: float) -> int:
        """Return how many of the first `sent` blocks arrived by `time`. No block arrives before its predecessor."""
        return leading(cut.blocks[:sent], lambda block: (self._blocks.get(cut.tenant, block) or NEVER)[0] <= time)

    def note(self, cut: Cut, now: float) -> TakeBack:
        tenant = cut.tenant
        learned = [document for document in cut.documents if document.how == SEPARATED]
        new = [document.key for document in learned if self._sent.get(tenant, document.key) is None]
        earlier_blocks = {block: sent[0] for block in cut.blocks if (sent := self._blocks.get(tenant, block))}
        for document in cut.documents:
            self._sent.touch(tenant, document.key)
        for document in learned:
            arrived = self._came(tenant, document.key)
            was_evicted = arrived <= self._left.get(ReportedDocument(tenant, document.digest), float("-inf"))
            room = ceil(document.tokens / self._chunk_tokens) * self._chunk_tokens
            self._sent.put(tenant, document.key, room, now if was_evicted else arrived)
        for block in reversed(cut.blocks):  # The end of a prompt is evicted first.
            self._blocks.put(tenant, block, cut.block_tokens, (earlier_blocks.get(block, now), now))

        def take_back() -> None:
            for key in new:
                self._sent.drop(tenant, key)
            for block in cut.blocks:
                if block not in earlier_blocks:
                    self._blocks.drop(tenant, block)

        return take_back

    def _came(self, tenant: str, key: bytes) -> float:
        """Return when a document arrived; minus infinity if it did not."""
        arrived = self._sent.get(tenant, key)
        return float("-inf") if arrived is None else arrived

    def media(self, document: ReportedDocument) -> set[str]:
        return set().union(*(listing[document] for listing in self.reports.values() if document in listing))

    def moved(self, document: ReportedDocument, medium: str, now: float, *, stored: bool, source: str) -> None:
        if source not in self.reports:
            return  # Without a listing, other documents would be unknown.
        listing = self.reports[source]
        media = listing.setdefault(document, set())
        (media.add if stored else media.discard)(medium)
        if not media:
            del listing[document]
        if not self.media(document):
            self._left[document] = now
            while len(self._left) > MAX_EVICTED:
                del self._left[next(iter(self._left))]

    def sizes(self) -> dict[str, int]:
        reported = sum(map(len, self.reports.values()))
        return {"documents reported": reported, "documents sent": len(self._sent), "beginnings sent": len(self._blocks)}
