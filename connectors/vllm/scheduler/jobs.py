"""Converts a plan into a job for the workers: which stored pages and document parts go into which blocks."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from lmc.blend.strategies import NEEDS_QUESTION
from lmc.connectors.vllm.messages import BlendJob, LoadJob, PageCopy, passed_blocks
from lmc.connectors.vllm.scheduler.request_state import RequestState
from lmc.engine import Piece, Plan
from lmc.engine.pieces import OWN
from lmc.keys import ChunkKey, RecordKind
from lmc.storage.contract import Pin


def job_of(
    state: RequestState,
    plan: Plan,
    tables: Sequence[Sequence[int]],
    block_size: int,
    *,
    ready: bool,
    learned_after: int,
) -> LoadJob | BlendJob:
    """Return the job for a plan whose chunks are pinned.

    `ready` means that all parts are already in their slots. Documents are learned after `learned_after` tokens.
    """
    request, local = state.request, plan.match.local
    copies = page_copies(plan.exact, state.chunks.pins, tables, block_size)
    if not is_blend(plan):
        return LoadJob(request=state.id, copies=copies, ready=ready)
    documents = [(piece, state.chunks.pins[piece.key]) for piece in plan.pieces if piece.kind is RecordKind.DOCUMENT]
    policy, revision = state.policy, state.revision
    assert policy is not None
    first = revision.first_block(end_of_pages(plan)) if revision else 0
    length = plan.stop if policy.strategy in NEEDS_QUESTION else min(plan.stop, request.num_prompt_tokens)
    return BlendJob(
        request=state.id,
        tokens=tuple(request.prompt_token_ids[:length]),
        tables=tuple(tuple(table[: -(-length // block_size)]) for table in tables),
        start=local,
        exact=end_of_pages(plan),
        stop=min(plan.stop, request.num_prompt_tokens - 1),
        question=min(state.question, length),
        learned_after=learned_after,
        copies=copies,
        documents=tuple(replace(piece, slot=pin.slot, tag=pin.tag) for piece, pin in documents),
        own=own_pieces(plan),
        copied=tuple((block.block_id, new) for block, new in zip(state.copied, tables[0][first:], strict=False)),
        ready=ready,
        policy=policy,
    )


def is_blend(plan: Plan) -> bool:
    """Return whether workers place or recompute documents for a plan, and do not only copy pages."""
    return bool(plan.documents) or any(piece.kind is RecordKind.DOCUMENT for piece in plan.exact)


def own_pieces(plan: Plan) -> tuple[Piece, ...]:
    """Return the pieces of a plan that are in blocks of an earlier blend."""
    return tuple(piece for piece in plan.documents if piece.place == OWN)


def end_of_pages(plan: Plan) -> int:
    """Return the position up to which the engine's own blocks and loaded pages have the KV of a prompt."""
    return max([plan.match.local, *(piece.stop for piece in plan.exact if piece.kind is RecordKind.PAGES)])


def page_copies(
    pieces: Sequence[Piece], pins: Mapping[ChunkKey, Pin], tables: Sequence[Sequence[int]], block_size: int
) -> tuple[PageCopy, ...]:
    """Return the page copies of exact chunks, without copies into null blocks that a sliding window has passed."""
    copies = []
    for group, table in enumerate(tables):
        passed = passed_blocks(table)
        for piece in pieces:
            at, page, stop = piece.at // block_size, piece.skip // block_size, piece.stop // block_size
            skip = max(0, passed - at)
            if piece.kind is RecordKind.PAGES and at + skip < stop:
                pin, wanted = pins[piece.key], tuple(table[at + skip : stop])
                copies.append(PageCopy(slot=pin.slot, tag=pin.tag, blocks=wanted, first=page + skip, group=group))
    return tuple(copies)


def sources_of(pieces: Sequence[Piece], pins: Mapping[ChunkKey, Pin]) -> Counter[str]:
    """Return how many tokens come from each tier."""
    sources: Counter[str] = Counter()
    for piece in pieces:
        if piece.place != OWN:
            sources[pins[piece.key].place] += piece.tokens
    return sources
