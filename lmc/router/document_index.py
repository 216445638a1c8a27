"""The index of the `documents` policy: which cache has which documents, and the beginnings of which prompts.

Engines say in events which documents are where. Until they do, and for documents whose tokens are not known, a cache is
taken to have what its engines have been sent last, as much of it as fits. The same holds for the beginnings of prompts.
How much of that turns out to be there, and in which place, their answers say.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import ceil
from typing import NamedTuple

from lmc.router.cut import BLOCK_TOKENS, Cut, CutDocument
from lmc.router.fair_lru import FairLru
from lmc.router.policy import TakeBack
from lmc.router.prefix_hashes import leading
from lmc.storage.places import place_of

PREFIX_SHARE = 0.5  # of the tokens of a cache, those that the beginnings of prompts may have
LEARNING_SECONDS = 10.0  # for which a document that was sent to an engine may still be on its way into the cache
FAR = 0.7  # what a reused token saves that is not in memory
WEIGHTS = {"GPU": 1.0, "CPU": 1.0, "STORAGE": FAR}  # by the medium that events name
LEFT = 10_000  # documents of a cache that have left it last
TENANTS = 10_000  # of a cache, whose answers are remembered
ANSWER_SHARE = 0.1  # of what is assumed of a cache, what the last answer counts
NO_PLACES: Mapping[str, int] = {}
NEVER = (float("inf"), float("inf"))  # when a block comes that is not there


class Found(NamedTuple):
    """What is known of a document in a cache."""

    certainty: float  # that the cache has it
    weight: float  # what its place is worth: 1 in memory, and less below it
    is_there: bool = True
    is_assumed: bool = False  # because it was sent there
    is_coming: bool = False  # It was sent there a moment ago, and has not been stored yet.


NOTHING, ASSUMED = Found(0.0, 0.0, is_there=False), Found(1.0, 1.0, is_assumed=True)
COMING = NOTHING._replace(is_coming=True)


class Beginning(NamedTuple):
    """What is known of the beginning of a prompt in a cache."""

    tokens: float = 0.0  # that were sent there
    certainty: float = 1.0  # that the cache has them
    assumed: float = 0.0  # of the tokens, those that were sent so long ago that the cache should have them


NO_BEGINNING = Beginning()


class Told(NamedTuple):
    """A document of a tenant, as events of engines name it."""

    tenant: str
    digest: str


class DocumentIndex:
    """What caches have. Each of them is an engine's, or that of a cache server which several engines use."""

    def __init__(self, cache_tokens: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`cache_tokens` tokens fit into a cache, unless `resize` says otherwise."""
        self._cache_tokens, self._clock = cache_tokens, clock
        self._caches: dict[str, _Cache] = {}

    def resize(self, cache: str, tokens: float, chunk_tokens: int = 1) -> None:
        """Say how many tokens fit into a cache, and into each of the chunks in which it keeps documents."""
        self._of(cache).resize(tokens, chunk_tokens)

    def find(self, cache: str, documents: Sequence[CutDocument], tenant: str = "") -> list[Found]:
        """Return what is known of documents of a tenant in a cache."""
        known = self._caches.get(cache)
        return known.find(documents, tenant, self._clock()) if known else [NOTHING] * len(documents)

    def answered(self, cache: str, tenant: str, assumed: float, reused: float, places: Mapping[str, int]) -> None:
        """Note how many tokens of a tenant's documents were assumed to be in a cache, and how many of them were reused.

        `places` has the tokens of the prompt that came from the cache, by place. Where events say what is in the cache,
        nothing is assumed.
        """
        if assumed > 0 and cache in self._caches and not self.is_told(cache):  # Its engine may have gone meanwhile.
            self._caches[cache].documents.learn(tenant, min(reused / assumed, 1.0), places)

    def answered_beginning(self, cache: str, tenant: str, assumed: float, reused: float) -> None:
        """Note the same of the beginning of a prompt."""
        if assumed > 0 and cache in self._caches:
            self._caches[cache].beginnings.learn(tenant, min(max(reused, 0.0) / assumed, 1.0))

    def beginning(self, cache: str, cut: Cut) -> Beginning:
        """Return what is known of the beginning of a prompt in a cache, from what was sent there."""
        known = self._caches.get(cache)
        if known is None or not (sent := known.prefix(cut)):
            return NO_BEGINNING
        long_ago = known.prefix_until(cut, sent, self._clock() - LEARNING_SECONDS)
        certainty = known.beginnings.of(cut.tenant).certainty
        return Beginning(sent * cut.block_tokens, certainty, long_ago * cut.block_tokens)

    def prefix(self, cache: str, cut: Cut, within: float) -> float:
        """Return how many tokens of a prompt's beginning were sent to a cache within so many seconds."""
        known = self._caches.get(cache)
        return known.prefix(cut, self._clock() - within) * cut.block_tokens if known else 0.0

    def oldest(self, cache: str) -> float:
        """Return when the beginning of a prompt that leaves a cache next was used; minus infinity if none has to."""
        known = self._caches.get(cache)
        return known.oldest if known else float("-inf")

    def room(self, cache: str) -> float:
        """Return how many tokens of documents a cache can take before others have to go."""
        known = self._caches.get(cache)
        return known.room if known else self._cache_tokens

    def note(self, cache: str, cut: Cut) -> TakeBack:
        """Note that a prompt has been sent to an engine, whose cache will then have its documents.

        What is returned takes that back.
        """
        return self._of(cache).note(cut, self._clock())

    def moved(self, cache: str, told: Told, medium: str, *, stored: bool, source: str = "") -> None:
        """Note that a document has come to a medium of a cache, or has left it, as the engine `source` says."""
        self._of(cache).moved(told, medium, self._clock(), stored=stored, source=source)

    def listed(self, cache: str, documents: Iterable[tuple[Told, str]], source: str = "") -> None:
        """Note that a cache has exactly these documents on these media, as far as the engine `source` knows."""
        listing = self._of(cache).told[source] = {}
        for told, medium in documents:
            listing.setdefault(told, set()).add(medium)

    def untold(self, cache: str, source: str = "") -> None:
        """Forget what events of an engine have said about a cache, because some of them are lost.

        What other engines of the same cache say stays.
        """
        if cache in self._caches:
            self._caches[cache].told.pop(source, None)

    def told(self, cache: str) -> dict[Told, set[str]]:
        """Return the documents that events say are in a cache, and the media where they are."""
        known = self._caches.get(cache)
        return {told: known.media(told) for of in known.told.values() for told in of} if known else {}

    def is_told(self, cache: str) -> bool:
        """Return whether events say what is in a cache. Otherwise it is assumed from what was sent there."""
        return cache in self._caches and bool(self._caches[cache].told)

    def sizes(self, cache: str) -> dict[str, int]:
        """Return how many things are known of a cache, by how they are known."""
        known = self._caches.get(cache)
        return known.sizes() if known else {}

    def forget(self, cache: str) -> None:
        """Drop all that is known of a cache."""
        self._caches.pop(cache, None)

    def __len__(self) -> int:
        return sum(sum(known.sizes().values()) for known in self._caches.values())

    def _of(self, cache: str) -> "_Cache":
        if cache not in self._caches:
            self._caches[cache] = _Cache(self._cache_tokens)
        return self._caches[cache]


class Worth:
    """What things that were sent to a cache are worth, by tenant, as the answers of engines have shown it.

    Beginnings of prompts have a certainty only; documents have a place, too.
    """

    def __init__(self) -> None:
        self._shown: OrderedDict[str, Found] = OrderedDict()  # the last ones

    def of(self, tenant: str) -> Found:
        """Return what is to be assumed of things that a tenant has sent."""
        return self._shown.get(tenant, ASSUMED)

    def learn(self, tenant: str, share: float, places: Mapping[str, int] = NO_PLACES) -> None:
        """Note which share of what was assumed has been reused, and how many tokens have come from which places."""
        before = self._shown.pop(tenant, ASSUMED)
        certainty, weight = before.certainty, before.weight
        certainty += (share - certainty) * ANSWER_SHARE
        if tokens := sum(places.values()):
            worths = [count * WEIGHTS.get(place_of(place).medium, FAR) for place, count in places.items()]
            weight += (sum(worths) / tokens - weight) * ANSWER_SHARE
        self._shown[tenant] = before._replace(certainty=certainty, weight=weight)
        if len(self._shown) > TENANTS:
            self._shown.popitem(last=False)


class _Cache:
    """What one cache has."""

    def __init__(self, tokens: float) -> None:
        self.told: dict[str, dict[Told, set[str]]] = {}  # media of documents, by the engine that has said it
        self._left: dict[Told, float] = {}  # when documents left the cache, the last ones
        self._chunk_tokens = 1
        self._sent = FairLru[bytes, float](tokens)  # when documents came, by tenant
        self._blocks = FairLru[int, tuple[float, float]](tokens * PREFIX_SHARE)  # when they came, and were used last
        self.documents, self.beginnings = Worth(), Worth()

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

    def find(self, documents: Sequence[CutDocument], tenant: str, now: float) -> list[Found]:
        found, is_told = [], bool(self.told)
        for document in documents:
            if is_told and document.digest:
                found.append(self._find_told(document, tenant, now))
            elif (came := self._sent.get(tenant, document.key)) is None:
                found.append(NOTHING)
            else:  # What was sent a moment ago may not have been learned, which shows nothing about the others.
                found.append(self.documents.of(tenant)._replace(is_assumed=now - came >= LEARNING_SECONDS))
        return found

    def _find_told(self, document: CutDocument, tenant: str, now: float) -> Found:
        told = Told(tenant, document.digest)
        if media := self.media(told):
            return Found(1.0, max(WEIGHTS.get(medium, 0.0) for medium in media))
        on_its_way = self._came(tenant, document.key) > max(now - LEARNING_SECONDS, self._left.get(told, 0.0))
        return COMING if on_its_way else NOTHING

    def prefix(self, cut: Cut, since: float = float("-inf")) -> int:
        for at, block in enumerate(cut.blocks):
            sent = self._blocks.get(cut.tenant, block)
            if sent is None or sent[1] < since:
                return at
        return len(cut.blocks)

    def prefix_until(self, cut: Cut, sent: int, time: float) -> int:
        """Return how many of the first `sent` blocks came before a time. None comes earlier than the one before it."""
        return leading(cut.blocks[:sent], lambda block: (self._blocks.get(cut.tenant, block) or NEVER)[0] <= time)

    def note(self, cut: Cut, now: float) -> TakeBack:
        tenant = cut.tenant
        new = [document.key for document in cut.documents if self._sent.get(tenant, document.key) is None]
        came_before = {block: sent[0] for block in cut.blocks if (sent := self._blocks.get(tenant, block))}
        for document in cut.documents:
            came = self._came(tenant, document.key)
            again = came <= self._left.get(Told(tenant, document.digest), float("-inf"))
            room = ceil(document.tokens / self._chunk_tokens) * self._chunk_tokens
            self._sent.put(tenant, document.key, room, now if again else came)
        for block in reversed(cut.blocks):  # The end of a prompt is forgotten first.
            self._blocks.put(tenant, block, cut.block_tokens, (came_before.get(block, now), now))

        def take_back() -> None:
            for key in new:
                self._sent.drop(tenant, key)
            for block in cut.blocks:
                if block not in came_before:
                    self._blocks.drop(tenant, block)

        return take_back

    def _came(self, tenant: str, key: bytes) -> float:
        """Return when a document came; the beginning of time if it has not."""
        came = self._sent.get(tenant, key)
        return float("-inf") if came is None else came

    def media(self, told: Told) -> set[str]:
        return set().union(*(of[told] for of in self.told.values() if told in of))

    def moved(self, told: Told, medium: str, now: float, *, stored: bool, source: str) -> None:
        if source not in self.told:
            return  # Without a listing, nobody knows what else is there.
        listing = self.told[source]
        media = listing.setdefault(told, set())
        (media.add if stored else media.discard)(medium)
        if not media:
            del listing[told]
        if not self.media(told):
            self._left[told] = now
            while len(self._left) > LEFT:
                del self._left[next(iter(self._left))]

    def sizes(self) -> dict[str, int]:
        told = sum(map(len, self.told.values()))
        return {"documents told": told, "documents sent": len(self._sent), "beginnings sent": len(self._blocks)}
