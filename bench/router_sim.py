"""A simulator of a router's engines: virtual time, real policies.

An engine computes prompts one after the other. On its GPU it has the prefixes of prompts that it met last, and in
memory and on a disk the documents, each as much as fits. A pool, if there is one, has all documents from the start, as
after `lmc learn`, for all engines. An engine reads them if that is faster than computing. It blends. A document that it
did not have is learned after the answer has begun, which keeps it busy as long as computing the document does. What an
answer says of reuse goes to the policy, as from real engines, and so do events of documents, if engines publish them.
When an engine dies, requests whose answers have not begun go to others; its memory is empty when it is back, and its
disk is not.
"""

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from statistics import mean
from typing import NamedTuple

import xxhash
from router_traces import LETTERS, SPECIAL, Arrival

from lmc.keys import tenant_of
from lmc.router.cut import Cut, CutDocument, Cutter
from lmc.router.document_index import ReportedDocument
from lmc.router.policies.base import Policy
from lmc.router.policies.documents import Documents
from lmc.router.policy_types import Candidate, RoutingChoice, TakeBack, Usage
from lmc.storage.places import place_of

MEMORY, DISK, POOL = "host", "disk", "objects"  # as answers name them
EVERYBODY = tenant_of("")  # The requests name no tenant.
Changed = Callable[[str, str, bool], None]  # A document has come to a place, or has left it.


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """The engines, which are all alike. Rates are those of a model of 8 billion weights on one H100, about."""

    engines: int = 8
    gpu: float = 93_750.0  # tokens of prefixes of prompts that one engine keeps
    memory: float = 187_500.0  # tokens of documents in its memory
    disk: float = 0.0  # tokens of documents on its disk
    rate: float = 20_000.0  # tokens computed in a second
    disk_rate: float = 60_000.0  # tokens read from the disk in a second
    pool_rate: float = 0.0  # tokens that one engine reads from the pool in a second; 0 without a pool
    ratio: float = 0.15  # of reused documents, what is computed again
    answer: float = 2.0  # seconds from the first to the last token of an answer
    idle_learning: bool = False  # whether they learn in idle time alone, which is then not counted
    pooled: bool = False  # one cache of all
    events: bool = False  # whether they publish where their documents are


class Clock:
    """The virtual time. Policies that look at a clock get this one."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Death(NamedTuple):
    """An engine that ends and is started again."""

    at: float
    seconds: float  # until it is back


@dataclass(slots=True)
class Answered:
    """What became of one request."""

    at: float  # when it came
    ttft: float
    reused: float  # tokens of documents and beginnings
    document_tokens: float
    reused_documents: float  # tokens
    lost_documents: float  # tokens of those that died with an engine, and have not been asked for since
    engine: str
    places: Mapping[str, int] = field(default_factory=dict)  # tokens of reused documents after the beginning, by tier


@dataclass(slots=True)
class Outcome:
    """What became of all requests that are counted."""

    answered: list[Answered] = field(default_factory=list)
    engines: Sequence[str] = ()
    broken: int = 0  # answers that had begun when their engine died

    @property
    def document_share(self) -> float:
        """Of the tokens of documents, what was reused."""
        wanted = sum(one.document_tokens for one in self.answered)
        return sum(one.reused_documents for one in self.answered) / wanted if wanted else 0.0

    @property
    def lost_share(self) -> float:
        """Of the tokens of documents, those that died with an engine and were asked for again for the first time."""
        return sum(one.lost_documents for one in self.answered) / sum(one.document_tokens for one in self.answered)

    @property
    def max_over_mean_load(self) -> float:
        """Requests of the busiest engine, of the mean."""
        served = [sum(one.engine == engine for one in self.answered) for engine in self.engines]
        return max(served) / mean(served)

    @property
    def ttft(self) -> float:
        """The mean, in seconds."""
        return mean(one.ttft for one in self.answered)

    def share_of(self, place: str) -> float:
        """Of the tokens of documents, what came from a tier."""
        return sum(one.places.get(place, 0) for one in self.answered) / sum(
            one.document_tokens for one in self.answered
        )

    @property
    def reused(self) -> float:
        """The mean of a request, in tokens."""
        return mean(one.reused for one in self.answered)


class _Lru:
    """What was used last, as many tokens as fit."""

    def __init__(self, room: float, changed: Callable[[Hashable, bool], None] = lambda *_: None) -> None:
        """`changed` is told what has come and what has left."""
        self._room, self._tokens, self._changed = room, 0.0, changed
        self._held: OrderedDict[Hashable, float] = OrderedDict()

    def __contains__(self, key: Hashable) -> bool:
        return key in self._held

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self._held)

    def put(self, key: Hashable, tokens: float) -> None:
        if key not in self:
            self._changed(key, True)
        self._tokens += tokens - self._held.pop(key, 0.0)
        self._held[key] = tokens
        while self._tokens > self._room:
            last, freed = self._held.popitem(last=False)
            self._tokens -= freed
            self._changed(last, False)


class _Cache:
    """What an engine has, or several that share one cache. Documents are known by their digests."""

    def __init__(self, fleet: Fleet, changed: Changed, sharing: int = 1) -> None:
        self._fleet, self._changed, self._sharing = fleet, changed, sharing
        self.disk = self._documents(DISK, fleet.disk)
        self.start()

    def start(self) -> None:
        """Begin with nothing but what is on the disk."""
        self.memory, self.gpu = self._documents(MEMORY, self._fleet.memory), _Lru(self._fleet.gpu * self._sharing)

    def _documents(self, place: str, tokens: float) -> _Lru:
        return _Lru(tokens * self._sharing, lambda key, stored: self._changed(str(key), place, stored))

    def place(self, document: CutDocument) -> str:
        """Return where a document is; an empty text if it is nowhere, or slower to read than to compute."""
        if document.digest in self.memory:
            return MEMORY
        pays = self._fleet.pool_rate * (1 - self._fleet.ratio) > self._fleet.rate
        return DISK if document.digest in self.disk else POOL if pays else ""

    def keep(self, cut: Cut) -> None:
        """Add the documents and blocks of an answered prompt to the cache."""
        for block in reversed(cut.blocks):
            self.gpu.put(block, cut.block_tokens)
        for document in cut.documents:
            self.memory.put(document.digest, document.tokens)
            self.disk.put(document.digest, document.tokens)


class _Work(NamedTuple):
    """What an engine has to do for a prompt."""

    cost: float  # tokens that it computes before the answer
    learned: float  # tokens that it computes after the answer
    beginning: float  # tokens of a beginning that it had
    documents: float  # tokens of documents that were reused, in the beginning too
    places: Mapping[str, int]  # tokens of reused documents after the prefix, by tier


@dataclass(slots=True, eq=False)
class _Sent:
    """A request at an engine."""

    arrival: Arrival
    cut: Cut
    choice: RoutingChoice
    take_back: TakeBack | None
    began: bool = False

    @property
    def expected_cost(self) -> float:
        """What the router thinks that the engine has to compute, in tokens."""
        return self.choice.cost or max(self.cut.tokens - self.choice.expected_tokens, 1.0)


class _Engine:
    def __init__(self, name: str, fleet: Fleet, cache: _Cache, cache_name: str) -> None:
        self.candidate, self._fleet, self.cache = Candidate(name, cache=cache_name, rate=fleet.rate), fleet, cache
        self.up = True
        self.waiting: deque[_Sent] = deque()
        self.computing: _Sent | None = None
        self.requests: set[_Sent] = set()  # that are there, waiting, computed or being answered

    def work(self, cut: Cut) -> _Work:
        """Return what a prompt means for it now."""
        known = next((at for at, block in enumerate(cut.blocks) if block not in self.cache.gpu), len(cut.blocks))
        beginning = min(known * cut.block_tokens, cut.tokens - 1)
        places = dict.fromkeys((MEMORY, DISK, POOL), 0.0)
        whole = learned = 0.0
        for one in cut.documents:
            behind = max(0.0, min(one.tokens, one.stop - beginning))  # tokens that are not in the beginning
            whole += one.tokens - behind
            if behind and (place := self.cache.place(one)):
                places[place] += behind
            elif behind and not self._fleet.idle_learning:
                learned += one.tokens
        loaded = sum(places.values())
        cost = cut.tokens - beginning - loaded * (1 - self._fleet.ratio)
        return _Work(cost, learned, beginning, whole + loaded, {name: round(n) for name, n in places.items() if n})

    def seconds(self, work: _Work) -> float:
        """Return how long it takes until the first token."""
        read = work.places.get(DISK, 0) / self._fleet.disk_rate
        if POOL in work.places:
            read += work.places[POOL] / self._fleet.pool_rate
        return work.cost / self._fleet.rate + read

    def add(self, sent: _Sent) -> None:
        """Start a request."""
        self.candidate.load += 1
        self.candidate.backlog += sent.expected_cost
        self.requests.add(sent)
        self.waiting.append(sent)

    def die(self) -> list[_Sent]:
        """End, and return the requests that were there."""
        self.up, self.computing = False, None
        self.candidate.load, self.candidate.backlog = 0, 0.0
        gone = sorted(self.requests, key=lambda sent: sent.arrival.at)
        self.requests.clear()
        self.waiting.clear()
        return gone


class Simulation:
    """Requests at engines, one run of a policy."""

    def __init__(self, policy: Policy, fleet: Fleet, counted_from: float, clock: Clock) -> None:
        """Requests that come before `counted_from` are not in the outcome. The `clock` is the policy's, too."""
        self._policy, self._fleet, self._counted_from, self._clock = policy, fleet, counted_from, clock
        pool = _Cache(fleet, lambda *_: None, fleet.engines) if fleet.pooled else None
        self._engines: dict[str, _Engine] = {}
        for name in (f"http://engine-{number}:8000" for number in range(fleet.engines)):
            cache = pool or _Cache(fleet, partial(self._moved, name))
            self._engines[name] = _Engine(name, fleet, cache, "pool" if pool else name)
        self._happenings: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._lost: set[Hashable] = set()  # documents that have died with an engine
        self._cutter, self.outcome = Cutter(SPECIAL, find=known), Outcome(engines=list(self._engines))
        self._told = policy if isinstance(policy, Documents) and fleet.events else None
        if self._told:
            self._told.cutter.find = known
        for engine in self._engines.values():
            self._list(engine)

    def run(self, arrivals: Sequence[Arrival], death: Death | None = None) -> Outcome:
        """Return what becomes of the requests."""
        for arrival in arrivals:
            self._at(arrival.at, partial(self._arrive, arrival))
        if death is not None:
            self._at(death.at, partial(self._die, next(iter(self._engines.values())), death.seconds))
        while self._happenings:
            self._clock.now, _, happens = heapq.heappop(self._happenings)
            happens()
        return self.outcome

    def _at(self, when: float, happens: Callable[[], None]) -> None:
        heapq.heappush(self._happenings, (when, next(self._numbers), happens))

    def _arrive(self, arrival: Arrival) -> None:
        choice = self._policy.choose(arrival.request, [one.candidate for one in self._engines.values() if one.up])
        take_back = self._policy.sent(arrival.request, choice.engine)
        engine = self._engines[choice.engine]
        engine.add(_Sent(arrival, self._cutter.cut(arrival.request), choice, take_back))
        self._compute(engine)

    def _compute(self, engine: _Engine) -> None:
        """Begin with the next prompt, if there is one and nothing else is computed."""
        if engine.waiting and engine.computing is None:
            sent = engine.computing = engine.waiting.popleft()
            work = engine.work(sent.cut)
            self._at(self._clock.now + engine.seconds(work), partial(self._begin_answer, engine, sent, work))

    def _begin_answer(self, engine: _Engine, sent: _Sent, work: _Work) -> None:
        if engine.computing is not sent:
            return  # The engine has died.
        sent.began = True
        engine.candidate.backlog -= sent.expected_cost
        engine.cache.keep(sent.cut)
        lost = [one for one in sent.cut.documents if one.digest in self._lost]
        self._lost.difference_update(one.digest for one in lost)
        if sent.arrival.at >= self._counted_from:
            documents, away = (sum(one.tokens for one in of) for of in (sent.cut.documents, lost))
            reused, ttft = work.beginning + sum(work.places.values()), self._clock.now - sent.arrival.at
            self.outcome.answered.append(
                Answered(
                    sent.arrival.at, ttft, reused, documents, work.documents, away, engine.candidate.name, work.places
                )
            )
        self._at(self._clock.now + work.learned / self._fleet.rate, partial(self._end_computing, engine, sent))
        self._at(self._clock.now + self._fleet.answer, partial(self._end_answer, engine, sent, work))

    def _end_computing(self, engine: _Engine, sent: _Sent) -> None:
        if engine.computing is sent:
            engine.computing = None
            self._compute(engine)

    def _end_answer(self, engine: _Engine, sent: _Sent, work: _Work) -> None:
        if sent not in engine.requests:
            return  # The engine has died.
        engine.requests.remove(sent)
        engine.candidate.load -= 1
        if isinstance(self._policy, Documents):
            behind = sum(work.places.values())
            said = Usage(round(sent.cut.tokens), round(work.beginning + behind), round(behind), work.places)
            self._policy.answered(sent.arrival.request, sent.choice, said)

    def _die(self, engine: _Engine, seconds: float) -> None:
        """End an engine. Requests that it has not begun to answer go to others at once."""
        gone = engine.die()
        if self._told:
            self._told.index.drop_reports(engine.candidate.cache, engine.candidate.name)
        self._lost = set(engine.cache.memory)
        engine.cache.start()
        self._at(self._clock.now + seconds, partial(self._come_back, engine))
        for sent in gone:
            if sent.began:
                self.outcome.broken += 1
                continue
            if sent.take_back:
                sent.take_back()
            self._arrive(sent.arrival)

    def _come_back(self, engine: _Engine) -> None:
        self._policy.forget(engine.candidate.name)
        self._list(engine)
        engine.up = True

    def _list(self, engine: _Engine) -> None:
        """Report all documents of an engine to the policy."""
        if self._told:
            there = [(ReportedDocument(EVERYBODY, str(digest)), place_of(DISK).medium) for digest in engine.cache.disk]
            self._told.index.listed(engine.candidate.cache, there, engine.candidate.name)

    def _moved(self, engine: str, digest: str, place: str, stored: bool) -> None:
        """Report to the policy that a document was stored at an engine, or removed from it."""
        if self._told:
            self._told.index.moved(
                engine, ReportedDocument(EVERYBODY, digest), place_of(place).medium, stored=stored, source=engine
            )


def known(_: str, text: str, __: str) -> tuple[str, int]:
    """Return the digest and the tokens of a document, as a router that has asked an engine for them."""
    return xxhash.xxh3_128_hexdigest(text.strip().encode()), len(text.strip()) // LETTERS


def simulate(
    policy: Policy,
    arrivals: Sequence[Arrival],
    fleet: Fleet,
    clock: Clock,
    *,
    warm: float = 0.3,
    death: Death | None = None,
) -> Outcome:
    """Return what becomes of requests after the first share `warm` of them. The `clock` is the policy's, too."""
    return Simulation(policy, fleet, arrivals[int(warm * len(arrivals))].at, clock).run(arrivals, death)
