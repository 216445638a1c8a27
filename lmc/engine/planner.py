"""The planner decides which parts of a prompt are loaded from the store.

Its functions are pure: they make a plan from one match, a snapshot of lookups, and change nothing.

A plan has an exact part, from the start of the prompt, and after it parts of documents at any position. A plan uses
everything that is stored. If loading would take longer than computing, it uses only what is in memory. If a blend would
take longer than prefill, it uses only the exact part.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import dropwhile, takewhile

from lmc.blend.segments import Span
from lmc.documents.known import KnownDocument
from lmc.engine.pieces import AT_HAND, OWN, Piece, trim, up_to_end
from lmc.keys import ChunkKey
from lmc.storage.cost_model import BlendOffer, CostModel, LoadPolicy, Offer


class FoundBy(StrEnum):
    """How a document of a prompt was found."""

    SEPARATORS = "separators"
    REQUEST = "request"  # The request names its documents, as texts or as positions.
    KNOWN = "known"  # Its tokens are equal to those of a known document, or of a part of one.
    REPEATED = "repeated"  # The same, and the document was learned because prompts repeat it.


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentMatch:
    """A document of a prompt, or a part of one, with the tiers of its chunks."""

    span: Span
    pieces: tuple[Piece, ...]  # all chunks of the span, stored or not
    learnable: bool = True  # False for text that may not be a document
    known: KnownDocument | None = None  # the document to which tokens were found equal, token by token
    # The document with exactly these tokens, if it was known and not removed when the request came
    met: KnownDocument | None = field(default=None, compare=False, repr=False)
    found_by: FoundBy = FoundBy.SEPARATORS

    @property
    def tokens(self) -> int:
        """Number of tokens of the whole document."""
        return len(self.span if self.known is None else self.known.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """The stored parts of a prompt at one moment, and what of them its request can use."""

    prompt: int  # tokens of the prompt; an engine always computes the last one
    exact: tuple[Piece, ...] = ()  # the longest stored run from the start; found by `CacheEngine.look`
    documents: tuple[DocumentMatch, ...] = ()  # in the order of the prompt
    local: int = 0  # leading tokens whose KV is in the engine's own cache
    exact_stop: int  # end of exact reuse: a position
    min_tokens: int = 0  # minimum number of stored document tokens for a blend
    fewest: int = 0  # minimum number of stored tokens for a load without a blend
    ratio: float = 0.0  # share of the reused tokens that a blend recomputes
    whole_prompt: bool = True  # A blend computes the prompt to its end: the question selects the recomputed tokens.
    # Number of question tokens that both passes of a blend compute. None: the blend is not compared with prefill.
    question_rows: int | None = None
    block_size: int = 1  # tokens per block; approximate KV must begin in a block that the prompt fills
    refused: str = ""  # why documents are not reused; empty if they may be
    memory_only: bool = False  # load no chunks from disk or Redis
    lost: frozenset[ChunkKey] = frozenset()  # chunks whose load failed
    positions: int | None = None  # number of positions for which the model has RoPE angles; None if it has them for all

    @property
    def pieces(self) -> list[Piece]:
        """The pieces that are stored in a tier."""
        everything = [*self.exact, *(piece for document in self.documents for piece in document.pieces)]
        return [piece for piece in everything if piece.place is not None]

    def usable(self, piece: Piece) -> bool:
        """Return whether a piece is stored in a tier that the request may load from, and can be rotated."""
        stored = piece.place in AT_HAND if self.memory_only else piece.place is not None
        # An engine with a longer context may have learned a document that goes beyond these positions.
        rotates = self.positions is None or piece.first + piece.tokens <= self.positions
        return stored and rotates and piece.key not in self.lost


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The parts of a prompt that are loaded from the store."""

    match: Match  # the match that the plan was made from, perhaps without slow tiers or documents
    exact: tuple[Piece, ...] = ()  # contiguous, from the start of the prompt or the end of the engine's own tokens
    documents: tuple[Piece, ...] = ()  # after the exact pieces
    reach: int = 0  # end of the exact part, including the engine's own tokens
    stop: int = 0  # end of the KV that the plan and its blend provide
    unknown: tuple[DocumentMatch, ...] = ()  # documents to learn, also known ones that have been evicted
    skipped: int = 0  # stored tokens that are not loaded because computing them is expected to be faster
    slow: tuple[Piece, ...] = ()  # pieces that are not loaded because of their tiers
    note: str = ""  # why the plan differs from the request

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """The pieces of both parts."""
        return self.exact + self.documents

    @property
    def keys(self) -> list[ChunkKey]:
        """The chunks of the pieces."""
        return [piece.key for piece in self.pieces if piece.place != OWN]

    @property
    def tokens(self) -> int:
        """Number of tokens that are loaded from the store."""
        return sum(piece.tokens for piece in self.pieces)

    @property
    def approximate(self) -> tuple[Piece, ...]:
        """The pieces that a blend partly recomputes."""
        return tuple(piece for piece in self.documents if not piece.exact)


def make_plan(match: Match) -> Plan:
    """Return the plan that uses everything that a match allows."""
    if not match.exact and not match.documents:
        return Plan(match=match, reach=match.local, stop=match.local)
    behind = (piece for piece in match.exact if piece.stop > match.local)  # The engine's own tokens need no piece.
    exact = trim(up_to_end([*takewhile(match.usable, behind)]), match.local, match.exact_stop)
    pieces = _document_pieces(match)
    for piece in pieces:
        reach = max(match.local, _stop(exact))
        if piece.exact and piece.place != OWN and piece.at <= reach:
            exact += trim([piece], reach, match.exact_stop)
    reach = max(match.local, _stop(exact))
    documents = trim(pieces, reach, match.prompt - 1)
    refused = (documents and match.refused) or _too_little(documents, match)
    # No note is needed if the other document tokens lie in the exact part, which is reused without a blend.
    explained = not match.refused and _too_few(documents, match) and not _too_few(pieces, match)
    if refused or all(piece.exact for piece in documents):
        documents = []
    if not documents and reach - match.local < match.fewest:
        exact, reach = [], match.local
    stop = (match.prompt if match.whole_prompt else _stop(documents)) if documents else reach
    stored = replace(match, memory_only=False).usable
    unknown = tuple(one for one in match.documents if one.learnable and not all(map(stored, one.pieces)))
    return Plan(
        match=match,
        exact=tuple(exact),
        documents=tuple(documents),
        reach=reach,
        stop=stop,
        unknown=unknown,
        note="" if explained else refused,
    )


def _document_pieces(match: Match) -> list[Piece]:
    """Return the usable pieces of documents. A document between separators goes before parts that overlap it."""
    pieces, taken = list[Piece](), bytearray(match.prompt)
    for document in sorted(match.documents, key=lambda document: document.known is not None):
        for piece in filter(match.usable, document.pieces):
            if document.known is None or taken.find(1, piece.at, piece.stop) < 0:
                pieces.append(piece)
                taken[piece.at : piece.stop] = b"\1" * piece.tokens
    return sorted(pieces, key=lambda piece: piece.at)


@dataclass(frozen=True, slots=True)
class Planner:
    """Chooses plans by how long loading and computing are expected to take."""

    size_of: Callable[[Piece], int]  # returns the number of bytes that a piece's chunk has on a tier
    cost: CostModel
    policy: LoadPolicy

    def choose(self, match: Match) -> Plan:
        """Return the plan that is expected to be fastest.

        The plan uses everything that is stored, except what is expected to load more slowly than it is computed.
        """
        plan = make_plan(match)
        if not plan.pieces:
            return plan
        choice = self.cost.choose(self._offer(plan), self.policy)
        if not choice.load:
            rest = make_plan(replace(match, memory_only=True))
            note = "; ".join(filter(None, (rest.note, choice.why)))
            # Without the exact chunks on tiers, a blend may pay for documents for which it did not pay before.
            slow = tuple(piece for piece in plan.pieces if piece.place not in AT_HAND)
            plan = replace(rest, skipped=max(0, plan.tokens - rest.tokens), slow=slow, note=note)
        return self.without_slow_blend(plan)

    def computing(self, plan: Plan) -> float | None:
        """Return the expected seconds of computing what a plan loads from tiers.

        None if this is not known, and if the plan loads in any case.
        """
        return self.cost.computing(self._offer(plan)) if self.policy is LoadPolicy.AUTO else None

    def without_slow_blend(self, plan: Plan) -> Plan:
        """Return a plan without its blend if prefill is expected to be faster, otherwise the plan itself."""
        offer = self.blend_offer(plan)
        why = self.cost.against_blend(offer, self.policy) if offer is not None else ""
        if not why:
            return plan
        rest = make_plan(replace(plan.match, refused=f"stored documents were computed: {why}"))
        note = "; ".join(filter(None, dict.fromkeys((plan.note, rest.note))))
        return replace(rest, skipped=plan.skipped + plan.tokens - rest.tokens, slow=plan.slow, note=note)

    def blend_offer(self, plan: Plan) -> BlendOffer | None:
        """Return what the blend of a plan computes and loads; None without one, or if `Match.question_rows` is None."""
        reused, match = sum(piece.tokens for piece in plan.approximate), plan.match
        if not reused or match.question_rows is None:
            return None
        tokens = match.prompt - plan.reach
        fresh = tokens - sum(piece.tokens for piece in plan.documents)
        return BlendOffer(
            rows=fresh + match.ratio * reused + min(match.question_rows, fresh),
            tokens=tokens,
            length=match.prompt + plan.reach,
            revises=any(piece.place == OWN for piece in plan.documents),
            records=self._records(plan),
        )

    def _offer(self, plan: Plan) -> Offer:
        """Return the records that a plan would load, and the number of prefill tokens that they save.

        `exact` counts from the first loaded record on, because nothing after a missing record can be reused exactly.
        """
        return Offer(
            records=self._records(plan),
            exact=sum(piece.tokens for piece in dropwhile(lambda piece: piece.place in AT_HAND, plan.exact)),
            reused=sum(piece.tokens for piece in plan.documents if piece.place not in AT_HAND),
            ratio=plan.match.ratio,
            prompt=plan.match.prompt,
        )

    def _records(self, plan: Plan) -> list[tuple[str, int]]:
        """Return the tier and the size of each record that a plan loads, once."""
        away = {piece.key: piece for piece in plan.pieces if piece.place not in AT_HAND}
        return [(str(piece.place), self.size_of(piece)) for piece in away.values()]


def _stop(pieces: Sequence[Piece]) -> int:
    return pieces[-1].stop if pieces else 0


def _too_little(documents: Sequence[Piece], match: Match) -> str:
    """Return why documents are not worth a blend or cannot be blended; empty if they can."""
    approximate = [piece for piece in documents if not piece.exact]
    if tokens := _too_few(documents, match):
        return f"{tokens} tokens of stored documents are fewer than blend_min_tokens={match.min_tokens}"
    if approximate and (approximate[0].at // match.block_size + 1) * match.block_size > match.prompt:
        return "stored documents begin in the prompt's last block, which the engine does not fill before it answers"
    return ""


def _too_few(documents: Sequence[Piece], match: Match) -> int:
    """Return the number of approximate document tokens if it is too small for a blend, otherwise 0."""
    tokens = sum(piece.tokens for piece in documents if not piece.exact)
    return tokens if tokens < match.min_tokens else 0
