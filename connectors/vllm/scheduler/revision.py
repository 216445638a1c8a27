"""Revision: a blend is made again for another question, from the engine's own blocks of the earlier blend.

A blend recomputes the tokens to which its question attends. The question of the next turn may attend to others, so a
turn that just continues from the blocks of the blend is answered worse than by a new blend. Backfill computes these
blocks exactly, but only when the engine is idle. Before that, a later turn continues from copies of the blocks, in
which the tokens that its own question needs are recomputed. That takes less time than a new blend, which computes the
earlier questions and answers, too. It is also better, because the tokens that the earlier questions needed have been
recomputed before. The blocks of the earlier blend stay as they are, for requests that share them.

A new prompt that begins with the documents of an earlier blend, in the same order, is served in the same way.

Layers with a window have only their last blocks in the engine's cache, so models with several KV cache groups have no
revisions.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from lmc.blend.segments import Span
from lmc.blend.strategies import NEEDS_QUESTION, RecomputePolicy
from lmc.connectors.vllm.scheduler.isolation import OwnBlend
from lmc.engine import DocumentMatch, Match, Piece
from lmc.engine.pieces import OWN, trim
from lmc.keys import ChunkKey, RecordKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Revision:
    """An earlier blend, and its blocks that the engine still has."""

    blend: OwnBlend
    hashes: Sequence[bytes]  # of all blocks from the beginning of the prompt on, as the earlier blend has salted them
    block_size: int
    continues: bool  # The prompt begins with the question of the earlier blend, and not just with its documents.

    @property
    def first(self) -> int:
        """The position of the first block with approximate tokens."""
        return self.blend.first

    @property
    def stop(self) -> int:
        """The end of the blocks, as a position."""
        return len(self.hashes) * self.block_size

    def blocks_after(self, exact: int) -> Sequence[bytes]:
        """Return the hashes of the blocks to copy, if the first `exact` tokens are cached or loaded exactly."""
        return self.hashes[self.first_block(exact) :]

    def first_block(self, exact: int) -> int:
        """Return the index of the first block to copy."""
        return max(self.first, exact) // self.block_size

    def match(self, found: Match) -> Match:
        """Return a match in which the tokens of the copied blocks take the place of the documents before their end.

        The end of a document that does not fill a block is computed.
        """
        later = (
            replace(document, pieces=tuple(trim(document.pieces, self.stop, found.prompt)))
            for document in found.documents
            if document.span.stop >= self.stop + self.block_size
        )
        own = DocumentMatch(span=Span(self.first, self.stop), pieces=tuple(self._pieces()), learnable=False)
        return replace(found, documents=(own, *later))

    def _pieces(self) -> Iterator[Piece]:
        """Yield the tokens of documents, and those between and after them, which are not recomputed."""
        at = self.first
        for one in self.blend.pieces:
            stop = min(one.at + one.tokens, self.stop)
            if at < one.at < self.stop:
                yield _own(one.at - at, at, at, exact=True)
            if one.at < stop:
                yield _own(stop - one.at, one.at, one.first, exact=False)
            at = max(at, one.at + one.tokens)
        if at < self.stop:
            yield _own(self.stop - at, at, at, exact=True)


def depends_on_question(policy: RecomputePolicy) -> bool:
    """Return whether a blend with this policy is revised for another question."""
    return policy.strategy in NEEDS_QUESTION and 0 < policy.ratio < 1


def _own(tokens: int, at: int, first: int, *, exact: bool) -> Piece:
    return Piece.whole(RecordKind.PAGES, ChunkKey(b""), tokens, at, first, OWN, exact=exact)
