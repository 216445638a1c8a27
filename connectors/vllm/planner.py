"""What can be reused for a request: exact chunks from its start, documents anywhere behind them. Pins what it plans with.

A plan is one of two. Exact: pages of leading blocks, whatever the model. Blend: these, and parts of documents' chunks, from the first
of which on KV is approximate; chosen if it reuses `blend_min_tokens` that are not exact. Either is made of what lies in memory alone
if loading the rest would take longer than computing it.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from lmc.blend.segments import Span
from lmc.blend.select import NEEDS_QUESTION
from lmc.config import Settings
from lmc.connectors.vllm.library import Library
from lmc.connectors.vllm.messages import DocumentPart, PageCopy
from lmc.connectors.vllm.prefixes import Hit
from lmc.connectors.vllm.served import Claim, Document, Role, Served
from lmc.engine import MEMORY
from lmc.keys import ChunkKey
from lmc.storage.loads import Pin, PinState
from lmc.storage.slab import tag_of
from lmc.storage.speed import LoadPolicy, Offer, Speeds

NULL = 0  # the engine's block that stands for none
DEADLINES = 10  # that a load may take altogether, if something of it comes within each
PROMPTS = 0.9  # share of a step's tokens that are prompts', so that its time is theirs
LIKE = 0.1  # by how much two such steps may differ, or how little a step has to do beside one


class Planner:
    """Plans for requests, from one library."""

    def __init__(self, settings: Settings, library: Library, clock: Callable[[], float]) -> None:
        self._settings, self._library, self._clock = settings, library, clock
        self._speeds = library.store.speeds
        self._pace = Pace(self._speeds)

    def plan(self, served: Served, local: int) -> Claim | None:
        """The best for a request of which the engine has `local` tokens; None if something is on its way and there is time to wait."""
        late = self.is_late(served)
        hits = self._hits(served, local)
        documents = self.known(served)
        keys = [hit.key for hit in hits] + [key for document in documents for key in document.keys]
        if late or served.memory_only:  # what would have to be loaded comes too late, or later than it is computed
            places = self._library.store.lookup(keys, shared=False)
            keys = [key for key, place in zip(keys, places, strict=True) if place in MEMORY]
        self._pin(served, keys)
        for key in [key for key, pin in served.pins.items() if not _usable(pin, late)]:
            served.lost.add(key)
            self._library.let_go([served.pins.pop(key)])
        if self.waits(served):
            return None
        hits = _leading(hits, served.pins)
        documents = [d for d in documents if all(key in served.pins for key in d.keys)]
        claim = self._blend(served, local, hits, documents) or self._exact(served, local, hits)
        used = {hit.key for hit in claim.hits} | set(claim.part_keys)
        self._library.let_go([served.pins.pop(key) for key in list(served.pins) if key not in used])
        return claim

    def is_late(self, served: Served) -> bool:
        """Whether nothing has come of what is waited for within a deadline, or not everything within `DEADLINES` of them."""
        if served.asked is None:
            return False
        now, deadline = self._clock(), self._settings.load_deadline
        arrived = sum(pin.load.ready for pin in served.pins.values() if pin.load is not None)
        if arrived != served.arrived:
            served.arrived, served.asked = arrived, now
        return now - served.asked > deadline or now - served.since > DEADLINES * deadline

    def waits(self, served: Served) -> bool:
        """Whether something is pinned of which nothing has arrived, and there is time."""
        return not self.is_late(served) and any(
            pin.state() is PinState.COMING and pin.load is not None and not pin.load.ready
            for pin in served.pins.values()
        )

    def prefetch(self, served: Served, local: int) -> None:
        """Start to load what lies on slower tiers, if that is worth it for a request of which the engine has `local` tokens now.

        Half of the slots at most are held for requests that wait.
        """
        hits, documents = self._hits(served, local), self.known(served)
        keys = [hit.key for hit in hits] + [key for document in documents for key in document.keys]
        places = dict(zip(keys, self._library.lookup(keys), strict=True))
        away = {key: place for key, place in places.items() if place is not None and place not in MEMORY}
        offer = self._offer(served, local, hits, documents, away)
        choice = self._speeds.choose(offer, LoadPolicy(self._settings.load_policy))
        if not choice.load:
            served.memory_only, served.skipped = True, offer.exact + offer.reused
            if served.skipped:
                served.note = "; ".join(filter(None, (served.note, choice.why)))
            return
        room = self._library.slots // 2 - self._library.store.held()
        self._pin(served, list(away)[: max(0, room)])

    def watch(self, served: Mapping[str, Served], scheduled: Mapping[str, int], *, alone: bool) -> None:
        """A step is planned: what the engine's own prefilling takes is learned, from steps beside which our workers compute nothing."""
        step = Step(at=self._clock(), alone=alone, requests=frozenset(scheduled), tokens=sum(scheduled.values()))
        for request in (served[name].request for name in scheduled if name in served):
            tokens, before = scheduled[request.request_id], request.num_computed_tokens
            if before < request.num_prompt_tokens:
                step.prompts += tokens
                step.reach += tokens * (2 * before + tokens)
        self._pace.add(step)

    def known(self, served: Served) -> list[Document]:
        """Documents all of whose chunks are stored; the others are noted as unknown."""
        if served.role is not Role.BLEND or served.request.num_preemptions:
            return []
        places = iter(self._library.lookup([key for document in served.documents for key in document.keys]))
        known, served.unknown = [], []
        for document in served.documents:
            there = [next(places) is not None for _ in document.keys]
            if all(there):
                known.append(document)
            else:
                served.unknown.append(document.span)
        return known

    def prospect(self, served: Served, local: int) -> tuple[int, list[Span]]:
        """What a blend behind `local` tokens would reuse, if all that is stored arrives: its first position, and the documents."""
        exact, last = max(local, self._reach(self._hits(served, local))), served.request.num_prompt_tokens - 1
        spans = [d.span for d in self.known(served) if min(d.span.stop, last) > max(d.span.start, exact)]
        return (max(spans[0].start, exact) if spans else 0), spans

    def copies(self, served: Served, claim: Claim, blocks: Sequence[int]) -> tuple[PageCopy, ...]:
        """Pages behind what the engine has, out of the exact chunks."""
        n, copies = self._library.prefixes.blocks, []
        # Where a sliding window has passed there is the null block, which is nobody's to write.
        passed = next((at for at, block in enumerate(blocks) if block != NULL), len(blocks))
        have = max(claim.local // self._library.block_size, passed)
        for hit in claim.hits:
            at = hit.chunk * n
            first = max(0, have - at)
            if first < hit.blocks:
                slot, wanted = served.pins[hit.key].slot, tuple(blocks[at + first : at + hit.blocks])
                copies.append(PageCopy(slot=slot, tag=tag_of(hit.key), blocks=wanted, first=first))
        return tuple(copies)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _hits(self, served: Served, local: int) -> list[Hit]:
        """Exact chunks that bring something behind what the engine has: it waits for no others."""
        found = self._library.prefixes.find(served.hashes, self._library.lookup)
        return [hit for hit in found if self._end(hit) > local]

    def _offer(
        self, served: Served, local: int, hits: list[Hit], documents: list[Document], away: dict[ChunkKey, str]
    ) -> Offer:
        """What would have to be loaded of what the engine does not have, and the computing that it spares."""
        chunk, prompt, slab = self._library.chunk, served.request.num_prompt_tokens, self._library.slab_at
        assert slab is not None
        size = slab.parts * slab.part_bytes  # of a full chunk
        first = next((i for i, hit in enumerate(hits) if hit.key in away), len(hits))
        reach, start = max(local, self._reach(hits)), max(local, self._reach(hits[:first]))
        wanted, reused = {hit.key: size for hit in hits[first:] if hit.key in away}, 0
        for document in documents:
            tokens = max(0, min(document.span.stop, prompt - 1) - max(document.span.start, reach))
            far = [(key, i) for i, key in enumerate(document.keys) if key in away] if tokens else []
            reused += tokens if far else 0
            wanted |= {key: size * min(chunk, len(document.span) - i * chunk) // chunk for key, i in far}
        ratio = served.policy.ratios[-1] if served.policy else 0.0
        sizes = [(away[key], count) for key, count in wanted.items()]
        return Offer.of(sizes, exact=reach - start, reused=reused, ratio=ratio, prompt=prompt)

    def _pin(self, served: Served, keys: Sequence[ChunkKey]) -> None:
        served.pins.update(
            self._library.pin([key for key in keys if key not in served.pins and key not in served.lost])
        )

    def _exact(self, served: Served, local: int, hits: list[Hit]) -> Claim:
        stop = max(local, min(self._reach(hits), served.request.num_tokens))
        claim = Claim(local=local, stop=stop, hits=hits if stop > local else [], exact=stop)
        self._count(served, claim)
        return claim

    def _blend(self, served: Served, local: int, hits: list[Hit], documents: list[Document]) -> Claim | None:
        """A blend, if enough tokens of documents can be reused behind what is exact."""
        exact = max(local, self._reach(hits))
        prompt, size = served.request.num_prompt_tokens, self._library.block_size
        claim = Claim(local=local, stop=prompt, hits=hits if exact > local else [], exact=exact)
        for document in documents:
            parts = self._parts(served, document, exact, prompt - 1)  # the last token is the engine's
            claim.parts += [part for part, _ in parts]
            claim.part_keys += [key for _, key in parts]
            claim.reused += [document.span] if parts else []
        if sum(part.tokens for part in claim.parts) < max(1, self._settings.blend_min_tokens):
            return None
        if (claim.parts[0].at // size + 1) * size > prompt:
            return None  # the first approximate block has to be one of the prompt: later ones get their hash later
        assert served.policy is not None
        if served.policy.strategy not in NEEDS_QUESTION:
            claim.stop = claim.parts[-1].at + claim.parts[-1].tokens
        claim.question = min(served.question, claim.stop)
        self._count(served, claim)
        return claim

    def _parts(self, served: Served, document: Document, start: int, stop: int) -> list[tuple[DocumentPart, ChunkKey]]:
        """The parts of a document's chunks that fall on positions `[start, stop)`."""
        chunk, found = self._library.chunk, []
        for index, key in enumerate(document.keys):
            first = document.span.start + index * chunk
            last = min(first + chunk, document.span.stop)
            skip = max(0, start - first)
            tokens = min(last, stop) - first - skip
            if tokens > 0:
                part = DocumentPart(
                    slot=served.pins[key].slot,
                    tag=tag_of(key),
                    at=first + skip,
                    tokens=tokens,
                    first=index * chunk + skip,
                    skip=skip,
                    stored=last - first,
                )
                found.append((part, key))
        return found

    def _end(self, hit: Hit) -> int:
        return hit.chunk * self._library.chunk + hit.blocks * self._library.block_size

    def _reach(self, hits: Sequence[Hit]) -> int:
        return self._end(hits[-1]) if hits else 0

    def _count(self, served: Served, claim: Claim) -> None:
        """Tokens by the place they come from."""
        size, n = self._library.block_size, self._library.prefixes.blocks
        for hit in claim.hits:
            start = hit.chunk * n * size
            tokens = min(start + hit.blocks * size, claim.stop) - max(start, claim.local)
            claim.sources[served.pins[hit.key].source] += max(0, tokens)
        for part, key in zip(claim.parts, claim.part_keys, strict=True):
            claim.sources[served.pins[key].source] += part.tokens


def _usable(pin: Pin, late: bool) -> bool:
    state = pin.state()
    return state is PinState.READY or (state is PinState.COMING and not late)


def _leading(hits: Sequence[Hit], pins: dict[ChunkKey, Pin]) -> list[Hit]:
    kept = []
    for hit in hits:
        if hit.key not in pins:
            break
        kept.append(hit)
    return kept


@dataclass(slots=True, kw_only=True)
class Step:
    """What the engine computes in one step; `alone` if our workers compute nothing beside it."""

    at: float  # when it was planned
    alone: bool
    requests: frozenset[str]
    tokens: int
    prompts: int = 0  # tokens of prompts
    reach: int = 0  # sum over these, of the length of a prompt whose tokens cost as much on average

    @property
    def prefills(self) -> bool:
        """Whether prompts are nearly all of it."""
        return self.alone and self.prompts >= max(1, PROMPTS * self.tokens)


class Pace:
    """What prefilling takes the engine, from the times at which steps are planned: the only ones that the scheduler's side sees.

    Two prefilling steps of one size, one after the other: from planning the second to planning the next is the time of one of them,
    whether the engine plans a step when the one before has ended, or while it runs (asynchronous scheduling).
    One prefilling step before two that do little (a prompt alone, then its decoding): it takes from its planning to that of the last of
    the three. That counts one small step too much in an engine that plans nothing ahead.
    All three must be steps of the same request, or the engine may have idled between them.
    """

    def __init__(self, speeds: Speeds) -> None:
        self._speeds = speeds
        self._steps: deque[Step] = deque(maxlen=3)

    def add(self, step: Step) -> None:
        """The next step is planned."""
        self._steps.append(step)
        if len(self._steps) < 3:
            return
        one, two, now = self._steps
        if not one.prefills or not (one.requests & two.requests and two.requests & now.requests):
            return
        if two.prefills and abs(one.prompts - two.prompts) <= LIKE * one.prompts:
            self._observe(two, now.at - two.at)
        elif two.alone and max(two.tokens, now.tokens) <= LIKE * one.tokens:
            self._observe(one, now.at - one.at)

    def _observe(self, step: Step, seconds: float) -> None:
        self._speeds.computed(step.prompts, seconds, length=step.reach / step.prompts)
