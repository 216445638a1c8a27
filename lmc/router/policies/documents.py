"""The `documents` policy: the engine with the least expected time to first token, by the documents that it has.

No other router that we know routes by documents. The time that an engine is expected to need is

    (backlog + prompt − beginning that it has − Σ documents that it has · (1 − ratio) · weight of their place) / rate

`ratio` is the share of a reused document that an engine computes again. A document or a beginning that an engine was
sent, and of which it has not said that it has it, counts as much as its last answers have shown such ones to be there.

To this comes a surcharge for engines that have more than their share of the requests, so that a few popular documents
do not fill one engine. A bound on the load, as consistent hashing with bounded loads has it, was measured and lost a
tenth to a fifth of the reuse (docs/log.md).

Documents that no engine has go to the one that the heaviest of them hashes to, so that the corpus spreads by itself and
several routers agree.
"""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import xxhash

from lmc.router.cut import Cut, Cutter, tenant
from lmc.router.document_index import LEARNING_SECONDS, Beginning, DocumentIndex
from lmc.router.fair_lru import FairLru
from lmc.router.kv_index import BlockIndex, chains
from lmc.router.policies.options import check, check_count
from lmc.router.policy import Candidate, PromptRequest, RoutingChoice, TakeBack, Usage

CACHE_TOKENS = 1_000_000.0  # that fit into an engine's cache, if nobody says how many
SURCHARGE = 0.3  # of the prompt, for each mean load by which an engine's load is above the mean
DISPLACEMENT = 0.6  # of the new documents for which others have to leave a cache
ALIKE = 1.1  # times the least expected time, up to which engines are alike for a prompt without documents
STAY = 1.5  # how much cheaper another engine has to be before a conversation moves
CONVERSATIONS = 100_000  # that are remembered


class Documents:
    """Chooses by documents. What it knows of the engines is in `index`."""

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
        """`cache_tokens` fit into an engine's cache, unless it says otherwise, and `conversations` are remembered.

        `ratio` takes the place of what engines say. `ranks` is how many publishers of KV events each engine has.
        """
        check(cache_tokens > 0, "cache_tokens", cache_tokens, "above 0")
        check(ratio is None or 0 <= ratio <= 1, "ratio", ratio, "from 0 to 1")
        check(surcharge >= 0, "surcharge", surcharge, "0 or more")
        check(displacement >= 0, "displacement", displacement, "0 or more")
        check(stay >= 1, "stay", stay, "1 or more")
        check_count("conversations", conversations)
        check_count("ranks", ranks)
        self.blocks, self.ranks = BlockIndex(), ranks  # what KV events say of the beginnings of prompts
        self.cutter, self.index = Cutter(special_string), DocumentIndex(cache_tokens, clock)
        self._ratio, self._surcharge, self._displacement = ratio, surcharge, displacement
        self._stay = stay
        self._engine_of = FairLru[str, str](conversations)  # by scope and session
        self._cache_of: dict[str, str] = {}  # by engine
        self._last: tuple[PromptRequest, Cut, Callable[[int], list[int]]] | None = (
            None  # A request is chosen for, and then sent.
        )

    def choose(self, request: PromptRequest, candidates: Sequence[Candidate]) -> RoutingChoice:
        """Return the engine with the least expected time to first token, and what it is expected to reuse."""
        cut, offers = self._cut(request), self.offers(request, candidates)
        least, home = min(offer.seconds for offer in offers), self._home(request, cut, offers)
        if home is not None and home.seconds <= self._stay * least:
            chosen, why = home, "conversation"
        else:
            alike = [offer for offer in offers if offer.seconds <= least * (1 if cut.documents else ALIKE)]
            chosen = min(alike, key=lambda offer: self._order(cut, offer.candidate))
            why = "documents" if chosen.documents else "beginning" if chosen.reused else "least time"
        assumed = chosen.beginning, chosen.assumed, chosen.assumed_beginning
        return RoutingChoice(chosen.candidate.name, why, chosen.reused, chosen.cost, *assumed)

    def sent(self, request: PromptRequest, engine: str) -> TakeBack:
        """Note that an engine will have the documents of a request."""
        take_back = self.index.note(self._cache_of.get(engine, engine), self._cut(request))
        if not request.session:
            return take_back
        scope, session = request.scope, request.session
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
        """Drop what is known of an engine's cache, unless other engines use it as well."""
        cache = self._cache_of.pop(engine, engine)
        self.blocks.forget(engine)
        if cache not in self._cache_of.values():
            self.index.forget(cache)
        self._engine_of.drop_values(engine)

    def answered(self, request: PromptRequest, choice: RoutingChoice, said: Usage) -> None:
        """Take note of how many tokens a prompt has turned out to have, and how many of those assumed were reused."""
        if said.prompt_tokens and request.tokens is None and not request.media:
            self.cutter.counted(request.scope, len(request.text), said.prompt_tokens)
        cache, asking = self._cache_of.get(choice.engine, choice.engine), tenant(request)
        reused: float | None = said.document_tokens
        if said.cached_tokens is not None:
            beginning = said.cached_tokens - (reused or 0)  # If nobody says which, the first ones are of the beginning.
            self.index.answered_beginning(cache, asking, choice.assumed_beginning, beginning)
            reused = max(0.0, said.cached_tokens - choice.beginning_tokens) if reused is None else reused
        if reused is not None:
            self.index.answered(cache, asking, choice.assumed_tokens, reused, said.places)

    def scores(self, request: PromptRequest, candidates: Sequence[Candidate]) -> dict[str, float]:
        """Return the tokens that each engine is expected to reuse."""
        return {offer.candidate.name: round(offer.reused, 1) for offer in self.offers(request, candidates)}

    def offers(self, request: PromptRequest, candidates: Sequence[Candidate]) -> list["EngineOffer"]:
        """Return what sending a request to each of the engines would mean."""
        cut, mean = self._cut(request), (sum(one.load for one in candidates) + 1) / len(candidates)
        return [self._offer(request, cut, one, mean) for one in candidates]

    def _beginning(self, request: PromptRequest, cut: Cut, candidate: Candidate) -> Beginning:
        """Return what of a prompt's beginning an engine has: as KV events say, if there are any.

        They need the tokens of the prompt. What was sent a moment ago they cannot have said yet.
        """
        if request.tokens is None or not self.blocks.block_sizes(candidate.name):
            return self.index.beginning(candidate.cache, cut)
        assert self._last is not None
        told = self.blocks.longest(candidate.name, self._last[2]).tokens
        return Beginning(max(told, self.index.prefix(candidate.cache, cut, LEARNING_SECONDS)))

    def _offer(self, request: PromptRequest, cut: Cut, candidate: Candidate, mean_load: float) -> "EngineOffer":
        self._cache_of[candidate.name] = candidate.cache
        ratio = candidate.ratio if self._ratio is None else self._ratio
        start, most = self._beginning(request, cut, candidate), max(cut.tokens - 1, 0.0)
        sent = min(start.tokens, most)
        beginning = sent * start.certainty
        blended = worth = coming = new = assumed = 0.0
        documents = 0
        all_found = self.index.find(candidate.cache, cut.documents, cut.tenant)
        for document, found in zip(cut.documents, all_found, strict=True):
            behind = min(document.tokens, document.stop - beginning)  # tokens that are not in the beginning
            if behind <= 0:
                continue
            if not (found.is_there or found.is_coming):  # as in most engines
                new += document.tokens
                continue
            blended += behind * found.certainty
            worth += behind * found.certainty * found.weight
            coming += behind * found.is_coming
            documents += found.is_there
            if found.is_assumed:
                assumed += max(0.0, min(behind, document.stop - sent))
        if blended < candidate.blend_min_tokens:
            blended = worth = assumed = 0.0
            documents = 0
        cost = max(cut.tokens - beginning - worth * (1 - ratio), 1.0)
        displaced = min(new, max(0.0, new - self.index.room(candidate.cache)))
        excess = max(0.0, candidate.load / mean_load - 1)
        # Where documents are about to be learned they need not be learned again, though they may come too late for this
        # prompt.
        work = candidate.backlog + max(cost - coming * (1 - ratio), 1.0)
        work += self._surcharge * excess * cut.tokens + self._displacement * displaced
        reused = min(beginning + blended, cut.tokens)
        assumed_beginning = min(start.assumed, most)
        return EngineOffer(candidate, work / candidate.rate, cost, reused, sent, documents, assumed, assumed_beginning)

    def _home(self, request: PromptRequest, cut: Cut, offers: Sequence["EngineOffer"]) -> "EngineOffer | None":
        """Return the engine where a conversation is: that of its session, or the only one with most of the prompt."""
        engine = self._engine_of.get(request.scope, request.session) if request.session else None
        if engine is None:
            found = [offer for offer in offers if offer.beginning > cut.tokens / 2]
            return found[0] if len(found) == 1 else None
        return next((offer for offer in offers if offer.candidate.name == engine), None)

    def _order(self, cut: Cut, candidate: Candidate) -> tuple[float, int]:
        """Return what decides between engines that are alike.

        Documents go where the heaviest of them hashes to, and a new conversation to the cache whose oldest beginning
        has not been used for longest, so that it displaces what is least likely to be asked for again.
        """
        return 0.0 if cut.documents else self.index.oldest(candidate.cache), _distance(cut, candidate)

    def _cut(self, request: PromptRequest) -> Cut:
        if self._last is None or self._last[0] is not request:
            adapter = request.model if self.blocks.is_adapter(request.model) else ""
            self._last = request, self.cutter.cut(request), chains(request.tokens or (), request.salt, adapter)
        return self._last[1]


class EngineOffer(NamedTuple):
    """What sending a request to an engine would mean."""

    candidate: Candidate
    seconds: float  # until the first token, with the surcharge
    cost: float  # tokens that it would compute
    reused: float  # tokens
    beginning: float  # tokens at the start of the prompt that it was sent before, or has
    documents: int  # that it has
    assumed: float  # tokens of those that it was only sent before
    assumed_beginning: float  # tokens at the start of the prompt that it was only sent before


def _distance(cut: Cut, candidate: Candidate) -> int:
    """Return how far an engine is from the heaviest document: rendezvous hashing (Thaler and Ravishankar, 1996)."""
    heaviest = max(cut.documents, key=lambda one: (one.tokens, one.key), default=None)
    key = heaviest.key if heaviest else cut.blocks[0].to_bytes(8, "little") if cut.blocks else b""
    return -xxhash.xxh3_64_intdigest(candidate.cache.encode() + b"\0" + key)
