"""The `documents` policy: routes to the engine with the least expected time to first token, by the documents it has.

We know of no other router that routes by documents. The expected time of an engine is

    (backlog + prompt − cached prefix − Σ cached documents · (1 − ratio) · weight of their tier) / rate

`ratio` is the share of a reused document that an engine recomputes. Documents and prefixes that were routed to an
engine but not confirmed by its events are weighted by how often such assumptions were right in its last answers.

Engines with more than their share of the requests get a surcharge, so that a few popular documents do not fill one
engine. A bound on the load, as in consistent hashing with bounded loads, was measured and lost a tenth to a fifth of
the reuse (docs/decisions/015-router.md).

Documents that no engine has go to the engine that the heaviest of them hashes to. The corpus spreads by itself, and
several routers agree.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import xxhash

from lmc.router.cut import SEPARATED, Cut, Cutter, tenant
from lmc.router.document_index import LEARNING_SECONDS, CachedPrefix, DocumentIndex
from lmc.router.fair_lru import FairLru
from lmc.router.kv_index import BlockIndex, chains
from lmc.router.policies.base import Needs, Policy, check, check_count
from lmc.router.policy_types import Candidate, PromptRequest, RoutingChoice, TakeBack, Usage
from lmc.router.prefix_hashes import encoded

CACHE_TOKENS = 1_000_000.0  # assumed size of an engine's cache until the engine reports it
SURCHARGE = 0.3  # share of the prompt's tokens; an engine at twice the mean load pays it once, at three times twice
DISPLACEMENT = 0.6  # surcharge at a full cache: share of the tokens of new documents, which evict others
TIE_FACTOR = 1.1  # without documents, engines up to this factor above the least expected time are a tie
STAY = 1.5  # a conversation moves if another engine is cheaper by this factor
CONVERSATIONS = 100_000  # whose engines are remembered


class Documents(Policy):
    """Chooses by documents. `index` has what is known about the engines' caches."""

    def __init__(
        self,
        *,
        special_string: str = " # # ",
        cache_tokens: float = CACHE_TOKENS,
        ratio: float | None = None,
        surcharge: float = SURCHARGE,
        displacement: float = DISPLACEMENT,
        stay: float = STAY,
        conversations: int = CONVERSATIONS,
        ranks: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Check the options.

        `cache_tokens` is the size of an engine's cache until the engine reports it. `ratio` overrides what engines
        report. `conversations` limits the remembered ones. `ranks` is the number of KV event publishers per engine.
        """
        check(cache_tokens > 0, "cache_tokens", cache_tokens, "above 0")
        check(ratio is None or 0 <= ratio <= 1, "ratio", ratio, "from 0 to 1")
        check(surcharge >= 0, "surcharge", surcharge, "0 or more")
        check(displacement >= 0, "displacement", displacement, "0 or more")
        check(stay >= 1, "stay", stay, "1 or more")
        check_count("conversations", conversations)
        check_count("ranks", ranks)
        self.blocks = BlockIndex()  # the prefixes of prompts, according to KV events
        self.cutter, self.index = Cutter(special_string), DocumentIndex(cache_tokens, clock)
        self.needs = Needs(blocks=self.blocks, ranks=ranks, documents=self.index, cutter=self.cutter)
        self._ratio, self._surcharge, self._displacement = ratio, surcharge, displacement
        self._stay = stay
        self._engine_of = FairLru[str, str](conversations)  # by scope and session
        self._cache_of: dict[str, str] = {}  # by engine
        # The cut of the last request, which `choose` and then `sent` use.
        self._last: tuple[PromptRequest, Cut, Callable[[int], list[int]]] | None = None

    def choose(self, request: PromptRequest, candidates: Sequence[Candidate]) -> RoutingChoice:
        """Return the engine with the least expected time to first token, and its expected reuse."""
        cut, offers = self._cut(request), self.offers(request, candidates)
        shortest, home = min(offer.seconds for offer in offers), self._home(request, cut, offers)
        if home is not None and home.seconds <= self._stay * shortest:
            chosen, reason = home, "conversation"
        else:
            tied = [offer for offer in offers if offer.seconds <= shortest * (1 if cut.documents else TIE_FACTOR)]
            chosen = min(tied, key=lambda offer: self._order(request, cut, offer.candidate))
            reason = "documents" if chosen.documents else "beginning" if chosen.reused else "least time"
        assumed = chosen.prefix, chosen.assumed, chosen.assumed_prefix
        return RoutingChoice(chosen.candidate.name, reason, chosen.reused, chosen.cost, *assumed)

    def sent(self, request: PromptRequest, engine: str) -> TakeBack:
        """Record that an engine will have the documents of a request."""
        take_back = self.index.note(self._cache_of.get(engine, engine), self._cut(request))
        if not request.session:
            return take_back
        scope, session = request.scope, request.session_key
        before = self._engine_of.get(scope, session)
        self._engine_of.put(scope, session, 1.0, engine)

        def take_all_back() -> None:
            take_back()
            if before is None:
                self._engine_of.drop(scope, session)
            else:
                self._engine_of.put(scope, session, 1.0, before)

        return take_all_back

    def forget(self, engine: str) -> None:
        """Drop what is known about an engine, and about its cache unless other engines use it too."""
        cache = self._cache_of.pop(engine, engine)
        self.blocks.forget(engine)
        if cache not in self._cache_of.values():
            self.index.forget(cache)
        self._engine_of.drop_values(engine)

    def answered(self, request: PromptRequest, choice: RoutingChoice, usage: Usage) -> None:
        """Learn how many tokens the prompt had, and how many of the assumed tokens were reused."""
        if usage.prompt_tokens and request.tokens is None and not request.media:
            self.cutter.counted(request.scope, len(request.text), usage.prompt_tokens)
        cache, owner = self._cache_of.get(choice.engine, choice.engine), tenant(request)
        reused: float | None = usage.document_tokens
        if usage.cached_tokens is not None:
            # Without a number for documents, the first cached tokens count as the prefix.
            prefix = usage.cached_tokens - (reused or 0)
            self.index.answered_prefix(cache, owner, choice.assumed_prefix, prefix)
            reused = max(0.0, usage.cached_tokens - choice.prefix_tokens) if reused is None else reused
        if reused is not None:
            self.index.answered(cache, owner, choice.assumed_tokens, reused, usage.places)

    def scores(self, request: PromptRequest, candidates: Sequence[Candidate]) -> dict[str, float]:
        """Return the tokens that each engine is expected to reuse."""
        return {offer.candidate.name: round(offer.reused, 1) for offer in self.offers(request, candidates)}

    def explain(self, request: PromptRequest, candidates: Sequence[Candidate]) -> Mapping[str, Mapping[str, Any]]:
        """Return the expected reuse, cost and time of each engine, and how they are known."""
        return {
            offer.candidate.name: {
                "expected_tokens": round(offer.reused),
                "documents": offer.documents,
                "known_by": "events" if self.index.is_reported(offer.candidate.cache) else "history",
                "assumed_tokens": round(offer.assumed),
                "cost_tokens": round(offer.cost),
                "seconds": round(offer.seconds, 4),
            }
            for offer in self.offers(request, candidates)
        }

    def offers(self, request: PromptRequest, candidates: Sequence[Candidate]) -> list["EngineOffer"]:
        """Return the expected cost and reuse of a request at each engine."""
        cut, mean = self._cut(request), (sum(candidate.load for candidate in candidates) + 1) / len(candidates)
        return [self._offer(request, cut, candidate, mean) for candidate in candidates]

    def _cached_prefix(self, request: PromptRequest, cut: Cut, candidate: Candidate) -> CachedPrefix:
        """Return the prefix of a prompt that an engine has, according to KV events if the engine publishes them.

        KV events need the prompt's tokens. They do not cover yet what was sent a moment ago.
        """
        if request.tokens is None or not self.blocks.block_sizes(candidate.name):
            return self.index.cached_prefix(candidate.cache, cut)
        assert self._last is not None
        confirmed = self.blocks.longest(candidate.name, self._last[2]).tokens
        return CachedPrefix(max(confirmed, self.index.prefix(candidate.cache, cut, LEARNING_SECONDS)))

    def _offer(self, request: PromptRequest, cut: Cut, candidate: Candidate, mean_load: float) -> "EngineOffer":
        self._cache_of[candidate.name] = candidate.cache
        ratio = candidate.ratio if self._ratio is None else self._ratio
        start, limit = self._cached_prefix(request, cut, candidate), max(cut.tokens - 1, 0.0)
        sent = min(start.tokens, limit)
        prefix = sent * start.certainty
        blended = worth = coming = new = assumed = 0.0
        documents = 0
        matches = self.index.find(candidate.cache, cut.documents, cut.tenant)
        for document, match in zip(cut.documents, matches, strict=True):
            outside = min(document.tokens, document.stop - prefix)  # tokens that are not in the prefix
            is_separated = document.how == SEPARATED
            if outside <= 0 or not (is_separated or candidate.finds):
                continue
            if not (match.is_stored or match.is_coming):  # the case of most engines
                new += document.tokens * is_separated
                continue
            blended += outside * match.certainty
            worth += outside * match.certainty * match.weight
            coming += outside * match.is_coming
            documents += match.is_stored
            if match.is_assumed:
                assumed += max(0.0, min(outside, document.stop - sent))
        if blended < candidate.blend_min_tokens:
            blended = worth = assumed = 0.0
            documents = 0
        cost = max(cut.tokens - prefix - worth * (1 - ratio), 1.0)
        displaced = min(new, max(0.0, new - self.index.room(candidate.cache)))
        excess = max(0.0, candidate.load / mean_load - 1)
        # Documents that are being learned need not be learned again, though they may come too late for this prompt.
        work = candidate.backlog + max(cost - coming * (1 - ratio), 1.0)
        work += self._surcharge * excess * cut.tokens + self._displacement * displaced
        reused = min(prefix + blended, cut.tokens)
        assumed_prefix = min(start.assumed, limit)
        return EngineOffer(candidate, work / candidate.rate, cost, reused, sent, documents, assumed, assumed_prefix)

    def _home(self, request: PromptRequest, cut: Cut, offers: Sequence["EngineOffer"]) -> "EngineOffer | None":
        """Return the engine of a conversation: that of its session, or the only one with most of the prompt."""
        engine = self._engine_of.get(request.scope, request.session_key) if request.session else None
        if engine is None:
            continued = [offer for offer in offers if offer.prefix > cut.tokens / 2]
            return continued[0] if len(continued) == 1 else None
        return next((offer for offer in offers if offer.candidate.name == engine), None)

    def _order(self, request: PromptRequest, cut: Cut, candidate: Candidate) -> tuple[float, int]:
        """Return the sort key between tied engines.

        Documents go to the engine that the heaviest of them hashes to. A new conversation goes to the cache whose
        oldest prefix has been unused for the longest time, because that is the least likely to be requested again.
        A prompt without a whole block, about which nothing is stored, goes to the engine with the fewest requests.
        """
        if cut.documents:
            key = max(cut.documents, key=lambda document: (document.tokens, document.key)).key
            return 0.0, _distance(key, candidate)
        if cut.blocks:
            return self.index.oldest(candidate.cache), _distance(cut.blocks[0].to_bytes(8, "little"), candidate)
        short = request.text or " ".join(map(str, request.tokens or ()))
        return candidate.load, _distance(encoded(short), candidate)

    def _cut(self, request: PromptRequest) -> Cut:
        if self._last is None or self._last[0] is not request:
            adapter = request.model if self.blocks.is_adapter(request.model) else ""
            self._last = request, self.cutter.cut(request), chains(request.tokens or (), request.salt, adapter)
        return self._last[1]


class EngineOffer(NamedTuple):
    """The expected cost and reuse of a request at an engine."""

    candidate: Candidate
    seconds: float  # expected time to the first token, with surcharges
    cost: float  # tokens to compute
    reused: float  # tokens expected to be reused
    prefix: float  # tokens at the start of the prompt, routed there before or confirmed by events
    documents: int  # number of the prompt's documents in its cache
    assumed: float  # document tokens routed there but not confirmed by events
    assumed_prefix: float  # tokens at the start of the prompt, routed there but not confirmed by events


def _distance(key: bytes, candidate: Candidate) -> int:
    """Return the rendezvous hash of an engine and a key (Thaler and Ravishankar, 1996)."""
    return -xxhash.xxh3_64_intdigest(candidate.cache.encode() + b"\0" + key)
