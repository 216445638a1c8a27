"""The planner decides what of a prompt is taken from the store.

One snapshot of lookups goes in, one plan comes out, and nothing else is asked or changed.

A plan has an exact part, from the start of the prompt, and after it parts of documents anywhere. It uses everything
that is stored; or, if loading would take longer than computing, only what is in memory; or, if a blend would take
longer than prefill, only the exact part.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import dropwhile, takewhile

from lmc.blend.segments import Span
from lmc.engine.pieces import Piece, trim
from lmc.keys import ChunkKey
from lmc.storage.cost_model import BlendOffer, CostModel, LoadPolicy, Offer
from lmc.storage.places import MEMORY


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentLookup:
    """A document of a prompt, and where its chunks are."""

    span: Span
    pieces: tuple[Piece, ...]  # all of its chunks, stored or not
    learnable: bool = True  # False for text that may or may not be a document.


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookup:
    """What is stored of a prompt, at one time."""

    exact: tuple[Piece, ...] = ()  # the longest run from the start
    documents: tuple[DocumentLookup, ...] = ()  # in the order of the prompt

    @property
    def pieces(self) -> list[Piece]:
        """The pieces that are stored somewhere."""
        everything = [*self.exact, *(piece for document in self.documents for piece in document.pieces)]
        return [piece for piece in everything if piece.place is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What a request wants of a plan, and what its engine can use."""

    prompt: int  # tokens
    local: int = 0  # leading tokens whose KV the engine has itself
    exact_stop: int  # nothing is reused exactly behind this position
    document_stop: int  # no document is reused behind this position
    min_tokens: int = 0  # of stored documents, below which there is no blend
    ratio: float = 0.0  # of the reused tokens, the share that is computed all the same
    whole_prompt: bool = True  # A blend computes the prompt to its end, where the question chooses tokens to repair.
    # Tokens of the question that a blend computes in both of its passes. None: a blend is made without asking whether
    # prefill would be faster.
    twice: int | None = None
    block_size: int = 1  # Approximate KV must begin in a block that the prompt fills.
    refused: str = ""  # why documents are not reused; empty if they may be
    memory_only: bool = False  # Chunks on tiers are not loaded.
    lost: frozenset[ChunkKey] = frozenset()  # chunks that did not come

    def usable(self, piece: Piece) -> bool:
        """Return whether a piece is stored where it can be taken from."""
        there = piece.place in MEMORY if self.memory_only else piece.place is not None
        return there and piece.key not in self.lost


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What of a prompt is taken from the store."""

    exact: tuple[Piece, ...] = ()  # from the start, one behind the other
    documents: tuple[Piece, ...] = ()  # behind them
    reach: int = 0  # where the exact part ends, the engine's own tokens included
    stop: int = 0  # where the KV ends that the plan and its blend provide
    unknown: tuple[Span, ...] = ()  # documents to learn
    skipped: int = 0  # stored tokens that are left out because computing them is expected to be faster
    note: str = ""  # why the plan is not what was asked for

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """The pieces of both parts."""
        return self.exact + self.documents

    @property
    def tokens(self) -> int:
        """How many tokens are taken from the store."""
        return sum(piece.tokens for piece in self.pieces)

    @property
    def approximate(self) -> tuple[Piece, ...]:
        """The pieces that a blend repairs."""
        return tuple(piece for piece in self.documents if not piece.exact)


def make_plan(found: Lookup, wish: Wish) -> Plan:
    """Return the plan for a prompt of which `found` is stored."""
    behind = (piece for piece in found.exact if piece.stop > wish.local)  # What the engine has need not be usable.
    exact = trim(takewhile(wish.usable, behind), wish.local, wish.exact_stop)
    pieces = [piece for document in found.documents for piece in filter(wish.usable, document.pieces)]
    for piece in pieces:
        reach = max(wish.local, _stop(exact))
        if piece.exact and piece.at <= reach:
            exact += trim([piece], reach, wish.exact_stop)
    reach = max(wish.local, _stop(exact))
    documents = trim(pieces, reach, wish.document_stop)
    refused = (documents and wish.refused) or _too_little(documents, wish)
    # Nothing needs an explanation if the rest of the documents is in the beginning, which is there without a blend.
    explained = not wish.refused and _too_few(documents, wish) and not _too_few(pieces, wish)
    if refused or all(piece.exact for piece in documents):
        documents = []
    stop = (wish.prompt if wish.whole_prompt else _stop(documents)) if documents else reach
    stored = replace(wish, memory_only=False).usable
    unknown = tuple(one.span for one in found.documents if one.learnable and not all(map(stored, one.pieces)))
    note = "" if explained else refused
    return Plan(exact=tuple(exact), documents=tuple(documents), reach=reach, stop=stop, unknown=unknown, note=note)


def choose_plan(
    found: Lookup, wish: Wish, size_of: Callable[[Piece], int], cost: CostModel, policy: LoadPolicy
) -> tuple[Plan, Wish]:
    """Return the plan with everything that is stored, or without what is expected to take longer than to compute it.

    The wish that led to it is returned as well. `size_of` is the number of bytes that a piece's chunk has on a tier.
    """
    plan = make_plan(found, wish)
    offer = _offer(plan, wish, size_of)
    choice = cost.choose(offer, policy)
    if not choice.load:
        near = replace(wish, memory_only=True)
        if offer.records:
            rest = make_plan(found, near)
            note = "; ".join(filter(None, (rest.note, choice.why)))
            # Without the exact chunks on tiers, documents may be worth a blend that are not with them.
            plan = replace(rest, skipped=max(0, plan.tokens - rest.tokens), note=note)
        wish = near
    return without_slow_blend(found, plan, wish, size_of, cost, policy)


def without_slow_blend(
    found: Lookup, plan: Plan, wish: Wish, size_of: Callable[[Piece], int], cost: CostModel, policy: LoadPolicy
) -> tuple[Plan, Wish]:
    """Return a plan as it is, or without its blend if prefill is expected to be faster, and the wish for it."""
    offer = blend_offer(plan, wish, size_of)
    why = cost.against_blend(offer, policy) if offer is not None else ""
    if not why:
        return plan, wish
    exact = replace(wish, refused=f"stored documents were computed: {why}")
    rest = make_plan(found, exact)
    note = "; ".join(filter(None, dict.fromkeys((plan.note, rest.note))))
    return replace(rest, skipped=plan.skipped + plan.tokens - rest.tokens, note=note), exact


def blend_offer(plan: Plan, wish: Wish, size_of: Callable[[Piece], int]) -> BlendOffer | None:
    """Return what the blend of a plan computes and loads; None if it has none, or if that is not asked."""
    reused = sum(piece.tokens for piece in plan.approximate)
    if not reused or wish.twice is None:
        return None
    tokens = wish.prompt - plan.reach
    fresh = tokens - sum(piece.tokens for piece in plan.documents)
    away = {piece.key: piece for piece in plan.pieces if piece.place not in MEMORY}
    return BlendOffer(
        rows=fresh + wish.ratio * reused + min(wish.twice, fresh),
        tokens=tokens,
        length=wish.prompt + plan.reach,
        records=[(str(piece.place), size_of(piece)) for piece in away.values()],
    )


def _offer(plan: Plan, wish: Wish, size_of: Callable[[Piece], int]) -> Offer:
    """Return which records a plan would load, and how many tokens of prefill that would save.

    Without its first record, all of the exact part behind it is lost.
    """
    away = {piece.key: piece for piece in plan.pieces if piece.place not in MEMORY}
    return Offer(
        records=[(str(piece.place), size_of(piece)) for piece in away.values()],
        exact=sum(piece.tokens for piece in dropwhile(lambda piece: piece.key not in away, plan.exact)),
        reused=sum(piece.tokens for piece in plan.documents if piece.key in away),
        ratio=wish.ratio,
        prompt=wish.prompt,
    )


def _stop(pieces: Sequence[Piece]) -> int:
    return pieces[-1].stop if pieces else 0


def _too_little(documents: Sequence[Piece], wish: Wish) -> str:
    """Return why documents are not worth a blend, or cannot be blended; nothing if they are."""
    approximate = [piece for piece in documents if not piece.exact]
    if tokens := _too_few(documents, wish):
        return f"{tokens} tokens of stored documents are fewer than blend_min_tokens={wish.min_tokens}"
    if approximate and (approximate[0].at // wish.block_size + 1) * wish.block_size > wish.prompt:
        return "stored documents begin in the prompt's last block, which the engine does not fill before it answers"
    return ""


def _too_few(documents: Sequence[Piece], wish: Wish) -> int:
    """Return how many tokens a blend would repair if they are too few for one, otherwise 0."""
    tokens = sum(piece.tokens for piece in documents if not piece.exact)
    return tokens if tokens < wish.min_tokens else 0
