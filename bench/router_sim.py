"""A simulator of engines behind a router: virtual time, real policies.

An engine computes prompts one after the other. It has the beginnings of prompts and the documents that it met last, as
many as fit into its memory, and blends. A document that it did not have is learned after the answer has begun, which
keeps it busy as long as computing the document does.
"""

import heapq
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from statistics import mean

from lmc.router.cut import Cut, Cutter
from lmc.router.document_index import DocumentIndex
from lmc.router.policy import Candidate, Policy, PromptRequest

SPECIAL = " # # "
LETTERS = 4  # of a token


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """The engines, which are all alike."""

    engines: int = 8
    memory: float = 187_500.0  # tokens of documents that one engine keeps
    rate: float = 20_000.0  # tokens computed in a second
    ratio: float = 0.15  # of reused documents, what is computed again
    answer: float = 2.0  # seconds from the first to the last token of an answer
    pooled: bool = False  # one memory of all


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request, when it comes."""

    at: float
    request: PromptRequest


@dataclass(slots=True)
class Outcome:
    """What became of all requests."""

    ttft: list[float] = field(default_factory=list)
    reused: list[float] = field(default_factory=list)  # tokens of documents and beginnings, by request
    shares: list[float] = field(default_factory=list)  # of the tokens of documents, what was reused, by request
    document_tokens: float = 0.0
    reused_documents: float = 0.0
    served: dict[str, int] = field(default_factory=dict)

    @property
    def max_over_mean_load(self) -> float:
        return max(self.served.values()) / mean(self.served.values())

    @property
    def document_share(self) -> float:
        return self.reused_documents / self.document_tokens if self.document_tokens else 0.0


class _Engine:
    def __init__(self, name: str, fleet: Fleet, index: DocumentIndex, cache: str) -> None:
        self.candidate, self.fleet, self.index = Candidate(name, cache=cache, rate=fleet.rate), fleet, index
        self.busy = 0.0  # until when

    def serve(self, now: float, cut: Cut) -> tuple[float, float, float, float]:
        """Return when the first token comes, the tokens reused of all and of documents, and the cost in tokens."""
        prefix = min(self.index.prefix(self.candidate.cache, cut), cut.tokens - 1)
        reused = saved = learned = whole = 0.0
        for one in cut.documents:
            if one.stop <= prefix:
                whole += one.tokens
            elif self.index.find(self.candidate.cache, one).weight:
                reused += one.tokens
                saved += one.tokens * (1 - self.fleet.ratio)
            else:
                learned += one.tokens
        cost = cut.tokens - prefix - saved
        first = max(now, self.busy) + cost / self.fleet.rate
        self.busy = first + learned / self.fleet.rate
        self.index.note(self.candidate.cache, cut)
        return first, prefix + reused, whole + reused, cost


def simulate(
    policy: Policy, arrivals: Sequence[Arrival], fleet: Fleet, *, warm: float = 0.3, dies: float | None = None
) -> Outcome:
    """Return what becomes of requests after the first share `warm` of them.

    After the share `dies`, one engine loses its memory, as one that was started anew.
    """
    index = DocumentIndex(fleet.memory * (fleet.engines if fleet.pooled else 1))
    engines = {
        name: _Engine(name, fleet, index, "pool" if fleet.pooled else name)
        for name in (f"http://engine-{number}:8000" for number in range(fleet.engines))
    }
    cutter, outcome, events = Cutter(special_string=SPECIAL), Outcome(served=dict.fromkeys(engines, 0)), []
    for number, arrival in enumerate(arrivals):
        while events and events[0][0] <= arrival.at:
            _, _, name, load, backlog = heapq.heappop(events)
            engines[name].candidate.load -= load
            engines[name].candidate.backlog -= backlog
        if dies is not None and number == int(dies * len(arrivals)):
            index.forget(next(iter(engines)))
            policy.forget(next(iter(engines)))
        candidates = [engine.candidate for engine in engines.values()]
        chosen = policy.choose(arrival.request, candidates).engine
        policy.sent(arrival.request, chosen)
        engine, cut = engines[chosen], cutter.cut(arrival.request)
        first, reused, documents, cost = engine.serve(arrival.at, cut)
        engine.candidate.load += 1
        engine.candidate.backlog += cost
        heapq.heappush(events, (first, number, chosen, 0, cost))
        heapq.heappush(events, (first + fleet.answer, number, chosen, 1, 0.0))
        if number >= warm * len(arrivals):
            outcome.ttft.append(first - arrival.at)
            outcome.reused.append(reused)
            outcome.shares.append(documents / max(1.0, sum(one.tokens for one in cut.documents)))
            outcome.document_tokens += sum(one.tokens for one in cut.documents)
            outcome.reused_documents += documents
            outcome.served[chosen] += 1
    return outcome


def zipf(count: int, exponent: float) -> list[float]:
    """Return cumulated weights of `count` things."""
    return list(accumulate((rank + 1) ** -exponent for rank in range(count)))


def letters(generator: random.Random, tokens: int) -> str:
    """Return a text of about so many tokens."""
    return "".join(generator.choices("abcdefghijklmnopqrstuvwxyz    ", k=tokens * LETTERS)).strip()


def rag(
    *,
    requests: int,
    per_second: float,
    documents: int = 5000,
    exponent: float = 0.6,
    in_prompt: int = 6,
    tokens: int = 300,
    topics: int = 0,
    seed: int = 0,
) -> Iterator[Arrival]:
    """Questions over documents. With `topics`, all documents of a prompt are of one topic."""
    generator = random.Random(seed)
    texts = [letters(generator, tokens) for _ in range(documents)]
    generator.shuffle(texts)
    system, now = "Answer from the documents.", 0.0
    every = zipf(documents if not topics else documents // topics, exponent)
    topical = zipf(topics, exponent) if topics else []
    for number in range(requests):
        now += generator.expovariate(per_second)
        chosen: list[int] = []
        topic = generator.choices(range(topics), cum_weights=topical)[0] if topics else 0
        while len(chosen) < in_prompt:
            one = generator.choices(range(len(every)), cum_weights=every)[0]
            one = one * topics + topic if topics else one
            if one not in chosen:
                chosen.append(one)
        question = f"question {number} {letters(generator, 30)}"
        yield Arrival(now, PromptRequest(text=SPECIAL.join([system, *(texts[one] for one in chosen), question])))


def chat(
    *, requests: int, per_second: float, sessions: int = 400, tokens: int = 150, seed: int = 0
) -> Iterator[Arrival]:
    """Conversations of several turns, each of which repeats all before it."""
    generator, now = random.Random(seed), 0.0
    talks: list[tuple[str, str]] = []
    for number in range(requests):
        now += generator.expovariate(per_second)
        if (len(talks) < sessions and generator.random() < 0.3) or not talks:
            talks.append((f"user-{number}", "\0system\0You help.\0"))
        at = generator.randrange(len(talks))
        name, text = talks[at]
        text += f"user\0{letters(generator, tokens)}\0"
        yield Arrival(now, PromptRequest(text=text + "assistant\0", session=""))
        talks[at] = name, text + f"assistant\0{letters(generator, tokens)}\0"
        if len(text) > 12_000:
            talks.pop(at)
