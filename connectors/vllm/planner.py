"""What can be reused for a request: exact chunks from its start, documents anywhere behind them. Pins what it plans with.

A plan is one of two. Exact: pages of leading blocks, whatever the model. Blend: these, and parts of documents' chunks, from the first
of which on KV is approximate; chosen if it reuses `blend_min_tokens` that are not exact.
"""

from collections.abc import Callable, Sequence

from lmc.blend.segments import Span
from lmc.blend.select import NEEDS_QUESTION
from lmc.config import Settings
from lmc.connectors.vllm.library import Library
from lmc.connectors.vllm.messages import DocumentPart, PageCopy
from lmc.connectors.vllm.prefixes import Hit
from lmc.connectors.vllm.served import Claim, Document, Role, Served
from lmc.keys import ChunkKey
from lmc.storage.loads import Pin, PinState
from lmc.storage.slab import tag_of

MEMORY = "host"
NULL = 0  # the engine's block that stands for none


class Planner:
    """Plans for requests, from one library."""

    def __init__(self, settings: Settings, library: Library, clock: Callable[[], float]) -> None:
        self._settings, self._library, self._clock = settings, library, clock

    def plan(self, served: Served, local: int) -> Claim | None:
        """The best for a request of which the engine has `local` tokens; None if something is on its way and there is time to wait."""
        late, store = self.is_late(served), self._library.store
        hits = self._hits(served)
        documents = self.known(served)
        keys = [hit.key for hit in hits] + [key for document in documents for key in document.keys]
        if late:  # what would have to be loaded comes too late
            keys = [key for key, place in zip(keys, store.lookup(keys), strict=True) if place == MEMORY]
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
        """Whether the time that a slow tier is waited for is over."""
        return served.asked is not None and self._clock() - served.asked > self._settings.load_deadline

    def waits(self, served: Served) -> bool:
        """Whether something is pinned of which nothing has arrived, and there is time."""
        return not self.is_late(served) and any(
            pin.state() is PinState.COMING and pin.load is not None and not pin.load.ready
            for pin in served.pins.values()
        )

    def prefetch(self, served: Served) -> None:
        """Start to load what lies on slower tiers; half of the slots at most are held for requests that wait."""
        keys = [hit.key for hit in self._hits(served)] + [key for d in self.known(served) for key in d.keys]
        places = self._library.store.lookup(keys)
        away = [key for key, place in zip(keys, places, strict=True) if place not in (None, MEMORY)]
        room = self._library.slots // 2 - self._library.store.held()
        self._pin(served, away[: max(0, room)])

    def known(self, served: Served) -> list[Document]:
        """Documents all of whose chunks are stored; the others are noted as unknown."""
        if served.role is not Role.BLEND or served.request.num_preemptions:
            return []
        places = iter(self._library.store.lookup([key for document in served.documents for key in document.keys]))
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
        exact, last = max(local, self._reach(self._hits(served))), served.request.num_prompt_tokens - 1
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

    def _hits(self, served: Served) -> list[Hit]:
        return self._library.prefixes.find(served.hashes, self._library.store.lookup)

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

    def _reach(self, hits: Sequence[Hit]) -> int:
        return sum(hit.blocks for hit in hits) * self._library.block_size

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
