"""The index of the `documents` policy: which cache has which documents, and the beginnings of which prompts.

Engines say in events which documents are where. Until they do, and for documents whose tokens are not known, a cache is
taken to have what its engines have been sent last, as much of it as fits.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from math import ceil
from typing import Generic, NamedTuple, TypeVar

from lmc.router.cut import Cut, CutDocument
from lmc.router.policy import TakeBack

PREFIX_SHARE = 0.5  # of the tokens of a cache, those that the beginnings of prompts may have
LEARNING_SECONDS = 10.0  # for which a document that was sent to an engine may still be on its way into the cache
WEIGHTS = {"GPU": 1.0, "CPU": 1.0, "STORAGE": 0.7}  # what a reused token saves, by the medium that events name
LEFT = 10_000  # documents of a cache that have left it last
T = TypeVar("T", bound=Hashable)


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

    def weight(self, cache: str, document: CutDocument, tenant: str = "") -> float:
        """Return what a document's place is worth: 1 in memory, less below it, 0 if the cache does not have it."""
        known = self._caches.get(cache)
        return known.weight(document, tenant, self._clock()) if known else 0.0

    def prefix(self, cache: str, cut: Cut) -> float:
        """Return how many tokens of a prompt's beginning a cache has."""
        known = self._caches.get(cache)
        return known.prefix(cut.blocks) * cut.block_tokens if known else 0.0

    def room(self, cache: str) -> float:
        """Return how many tokens of documents a cache can take before others have to go."""
        known = self._caches.get(cache)
        return known.room if known else self._cache_tokens

    def note(self, cache: str, cut: Cut) -> TakeBack:
        """Note that a prompt has been sent to an engine, whose cache will then have its documents.

        What is returned takes that back.
        """
        return self._of(cache).note(cut, self._clock())

    def moved(self, cache: str, told: Told, medium: str, *, stored: bool) -> None:
        """Note that a document has come to a medium of a cache, or has left it."""
        self._of(cache).moved(told, medium, self._clock(), stored=stored)

    def listed(self, cache: str, documents: Iterable[tuple[Told, str]]) -> None:
        """Note that a cache has exactly these documents on these media."""
        known = self._of(cache)
        known.told = {}
        for told, medium in documents:
            known.told.setdefault(told, set()).add(medium)

    def untold(self, cache: str) -> None:
        """Forget what events have said about a cache, because some of them are lost."""
        if cache in self._caches:
            self._caches[cache].told = None

    def told(self, cache: str) -> dict[Told, set[str]]:
        """Return the documents that events say are in a cache, and the media where they are."""
        known = self._caches.get(cache)
        return (known.told or {}) if known else {}

    def forget(self, cache: str) -> None:
        """Drop all that is known of a cache."""
        self._caches.pop(cache, None)

    def __len__(self) -> int:
        return sum(len(known) for known in self._caches.values())

    def _of(self, cache: str) -> "_Cache":
        if cache not in self._caches:
            self._caches[cache] = _Cache(self._cache_tokens)
        return self._caches[cache]


class _Cache:
    """What one cache has."""

    def __init__(self, tokens: float) -> None:
        self.told: dict[Told, set[str]] | None = None  # media of documents; None without events
        self._left: dict[Told, float] = {}  # when documents left the cache, the last ones
        self._chunk_tokens = 1
        self._sent = _Recent[bytes](tokens)
        self._blocks = _Recent[int](tokens * PREFIX_SHARE)

    @property
    def room(self) -> float:
        return self._sent.room

    def resize(self, tokens: float, chunk_tokens: int) -> None:
        self._chunk_tokens = chunk_tokens
        self._sent.resize(tokens)
        self._blocks.resize(tokens * PREFIX_SHARE)

    def weight(self, document: CutDocument, tenant: str, now: float) -> float:
        if self.told is None or not document.digest:
            return float(document.key in self._sent)
        told = Told(tenant, document.digest)
        media = self.told.get(told)
        if media:
            return max(WEIGHTS.get(medium, 0.0) for medium in media)
        came = self._sent.came(document.key)
        return float(came > max(now - LEARNING_SECONDS, self._left.get(told, 0.0)))

    def prefix(self, blocks: Sequence[int]) -> int:
        for at, block in enumerate(blocks):
            if block not in self._blocks:
                return at
        return len(blocks)

    def note(self, cut: Cut, now: float) -> TakeBack:
        new = [document.key for document in cut.documents if document.key not in self._sent]
        beginnings = [block for block in cut.blocks if block not in self._blocks]
        for document in cut.documents:
            again = self._left.get(Told(cut.tenant, document.digest), 0.0) >= self._sent.came(document.key)
            room = ceil(document.tokens / self._chunk_tokens) * self._chunk_tokens
            self._sent.use(document.key, room, now, again=again)
        for block in reversed(cut.blocks):  # The end of a prompt is forgotten first.
            self._blocks.use(block, cut.block_tokens, now)

        def take_back() -> None:
            self._sent.drop(new)
            self._blocks.drop(beginnings)

        return take_back

    def moved(self, told: Told, medium: str, now: float, *, stored: bool) -> None:
        if self.told is None:
            return  # Without a listing, nobody knows what else is there.
        media = self.told.setdefault(told, set())
        (media.add if stored else media.discard)(medium)
        if not media:
            del self.told[told]
            self._left[told] = now
            while len(self._left) > LEFT:
                del self._left[next(iter(self._left))]

    def __len__(self) -> int:
        return len(self.told or ()) + len(self._sent) + len(self._blocks)


class _Recent(Generic[T]):
    """The things that were used last, as many as fit."""

    def __init__(self, tokens: float) -> None:
        self._tokens, self._used = tokens, 0.0
        self._things: OrderedDict[T, tuple[float, float]] = OrderedDict()  # tokens, and when they came

    def use(self, thing: T, tokens: float, now: float, *, again: bool = False) -> None:
        """Note that a thing is used; it has come now if it is new, or has come `again`."""
        before, came = self._things.pop(thing, (0.0, now))
        self._used += tokens - before
        self._things[thing] = tokens, now if again else came
        self._shrink()

    @property
    def room(self) -> float:
        return self._tokens - self._used

    def came(self, thing: T) -> float:
        """Return when a thing came; the beginning of time if it is not here."""
        return self._things[thing][1] if thing in self._things else float("-inf")

    def drop(self, things: Iterable[T]) -> None:
        """Take things out again."""
        for thing in things:
            self._used -= self._things.pop(thing, (0.0, 0.0))[0]

    def resize(self, tokens: float) -> None:
        self._tokens = tokens
        self._shrink()

    def _shrink(self) -> None:
        while self._used > self._tokens and self._things:
            self._used -= self._things.popitem(last=False)[1][0]

    def __contains__(self, thing: T) -> bool:
        return thing in self._things

    def __len__(self) -> int:
        return len(self._things)
