"""The planner decides which parts of a prompt are loaded from the store.

Its input is one snapshot of lookups, its output one plan. It reads and changes nothing else.

A plan has an exact part, from the start of the prompt, and after it parts of documents at any position. A plan uses
everything that is stored. If loading would take longer than computing, it uses only what is in memory. If a blend would
take longer than prefill, it uses only the exact part.
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
    """A document of a prompt, with the tiers of its chunks."""

    span: Span
    pieces: tuple[Piece, ...]  # all chunks of the document, stored or not
    learnable: bool = True  # False for text that may not be a document


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookup:
    """The stored parts of a prompt at one moment."""

    exact: tuple[Piece, ...] = ()  # the longest run from the start
    documents: tuple[DocumentLookup, ...] = ()  # in the order of the prompt

    @property
    def pieces(self) -> list[Piece]:
        """The pieces that are stored in a tier."""
        everything = [*self.exact, *(piece for document in self.documents for piece in document.pieces)]
        return [piece for piece in everything if piece.place is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What a request requires of a plan, and what its engine can use."""

    prompt: int  # tokens of the prompt
    local: int = 0  # leading tokens whose KV is in the engine's own cache
    exact_stop: int  # end of exact reuse: a position
    document_stop: int  # end of the reuse of documents: a position
    min_tokens: int = 0  # minimum number of stored document tokens for a blend
    ratio: float = 0.0  # share of the reused tokens that a blend recomputes
    whole_prompt: bool = True  # A blend computes the prompt to its end: the question selects the recomputed tokens.
    # Tokens of the question that a blend computes in both of its passes. None: blend without comparing its time with
    # that of prefill.
    twice: int | None = None
    block_size: int = 1  # tokens per block; approximate KV must begin in a block that the prompt fills
    refused: str = ""  # why documents are not reused; empty if they may be
    memory_only: bool = False  # load no chunks from disk or Redis
    lost: frozenset[ChunkKey] = frozenset()  # chunks whose load failed

    def usable(self, piece: Piece) -> bool:
        """Return whether a piece is stored in a tier that the request may load from."""
        there = piece.place in MEMORY if self.memory_only else piece.place is not None
        return there and piece.key not in self.lost


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The parts of a prompt that are loaded from the store."""

    exact: tuple[Piece, ...] = ()  # contiguous, from the start of the prompt or the end of the engine's own tokens
    documents: tuple[Piece, ...] = ()  # after the exact pieces
    reach: int = 0  # end of the exact part, including the engine's own tokens
    stop: int = 0  # end of the KV that the plan and its blend provide
    unknown: tuple[Span, ...] = ()  # documents to learn
    skipped: int = 0  # stored tokens that are not loaded because computing them is expected to be faster
    note: str = ""  # why the plan differs from the request

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """The pieces of both parts."""
        return self.exact + self.documents

    @property
    def tokens(self) -> int:
        """Number of tokens that are loaded from the store."""
        return sum(piece.tokens for piece in self.pieces)

    @property
    def approximate(self) -> tuple[Piece, ...]:
        """The pieces that a blend partly recomputes."""
        return tuple(piece for piece in self.documents if not piece.exact)


def make_plan(found: Lookup, wish: Wish) -> Plan:
    """Return the plan for a prompt whose stored parts are `found`."""
    behind = (piece for piece in found.exact if piece.stop > wish.local)  # The engine's own tokens need no piece.
    exact = trim(takewhile(wish.usable, behind), wish.local, wish.exact_stop)
    pieces = [piece for document in found.documents for piece in filter(wish.usable, document.pieces)]
    for piece in pieces:
        reach = max(wish.local, _stop(exact))
        if piece.exact and piece.at <= reach:
            exact += trim([piece], reach, wish.exact_stop)
    reach = max(wish.local, _stop(exact))
    documents = trim(pieces, reach, wish.document_stop)
    refused = (documents and wish.refused) or _too_little(documents, wish)
    # No note is needed if the other document tokens lie in the exact part, which is reused without a blend.
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
    """Return the plan that is expected to be fastest, and the wish that led to it.

    The plan uses everything that is stored, except what is expected to load more slowly than it is computed. `size_of`
    returns the number of bytes that a piece's chunk has on a tier.
    """
    plan = make_plan(found, wish)
    offer = _offer(plan, wish, size_of)
    choice = cost.choose(offer, policy)
    if not choice.load:
        near = replace(wish, memory_only=True)
        if offer.records:
            rest = make_plan(found, near)
            note = "; ".join(filter(None, (rest.note, choice.why)))
            # Without the exact chunks on tiers, a blend may pay for documents for which it did not pay before.
            plan = replace(rest, skipped=max(0, plan.tokens - rest.tokens), note=note)
        wish = near
    return without_slow_blend(found, plan, wish, size_of, cost, policy)


def without_slow_blend(
    found: Lookup, plan: Plan, wish: Wish, size_of: Callable[[Piece], int], cost: CostModel, policy: LoadPolicy
) -> tuple[Plan, Wish]:
    """Remove a plan's blend if prefill is expected to be faster. Returns the plan and the wish for it."""
    offer = blend_offer(plan, wish, size_of)
    why = cost.against_blend(offer, policy) if offer is not None else ""
    if not why:
        return plan, wish
    exact = replace(wish, refused=f"stored documents were computed: {why}")
    rest = make_plan(found, exact)
    note = "; ".join(filter(None, dict.fromkeys((plan.note, rest.note))))
    return replace(rest, skipped=plan.skipped + plan.tokens - rest.tokens, note=note), exact


def blend_offer(plan: Plan, wish: Wish, size_of: Callable[[Piece], int]) -> BlendOffer | None:
    """Return what the blend of a plan computes and loads; None without a blend, or if `wish.twice` is None."""
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
    """Return the records that a plan would load, and the number of prefill tokens that they save.

    `exact` counts from the first loaded record on, because nothing after a missing record can be reused exactly.
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
    """Return why documents are not worth a blend or cannot be blended; empty if they can."""
    approximate = [piece for piece in documents if not piece.exact]
    if tokens := _too_few(documents, wish):
        return f"{tokens} tokens of stored documents are fewer than blend_min_tokens={wish.min_tokens}"
    if approximate and (approximate[0].at // wish.block_size + 1) * wish.block_size > wish.prompt:
        return "stored documents begin in the prompt's last block, which the engine does not fill before it answers"
    return ""


def _too_few(documents: Sequence[Piece], wish: Wish) -> int:
    """Return the number of approximate document tokens if it is too small for a blend, otherwise 0."""
    tokens = sum(piece.tokens for piece in documents if not piece.exact)
    return tokens if tokens < wish.min_tokens else 0
