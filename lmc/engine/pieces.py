"""Pieces: stored chunks, or parts of them, and the positions of a prompt that they serve."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from lmc.blend.segments import Placement
from lmc.keys import ChunkKey, RecordKind
from lmc.storage.places import MEMORY

OWN = "engine"  # the place of tokens that are in the engine's own KV cache, in blocks of another request
AT_HAND = MEMORY | {OWN}  # places whose tokens can be used without a load from a slower tier


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece(Placement):
    """Tokens of one stored chunk, and the positions of a prompt where they are used.

    With the place `OWN`, the tokens are not in a chunk, and the key means nothing.
    """

    key: ChunkKey
    kind: RecordKind
    stored: int  # tokens in the chunk
    skip: int = 0  # leading tokens of the chunk that are not used
    place: str | None = None  # the chunk's tier at the time of the lookup; None if it was in no tier
    exact: bool = True
    ends: bool = True  # A prompt can continue after it; after some chunks, the state of a layer is missing.
    slot: int = -1  # the slot that holds the chunk once it is pinned
    tag: int = 0  # the tag that the slot must have; a different tag means that it holds another chunk

    @classmethod
    def whole(
        cls, kind: RecordKind, key: ChunkKey, tokens: int, at: int, first: int, place: str | None, *, exact: bool = True
    ) -> "Piece":
        """Return a piece that uses all tokens of a chunk."""
        return cls(key=key, kind=kind, stored=tokens, at=at, tokens=tokens, first=first, place=place, exact=exact)

    def at_place(self, place: str | None) -> "Piece":
        """Return the piece with this place."""
        return self if place == self.place else replace(self, place=place)

    @property
    def rows(self) -> slice:
        """The tokens of the chunk that are used."""
        return slice(self.skip, self.skip + self.tokens)

    @property
    def stop(self) -> int:
        """The position after the last used token."""
        return self.at + self.tokens


def up_to_end(pieces: Sequence["Piece"]) -> list["Piece"]:
    """Return `pieces` up to the last one after which a prompt can continue."""
    last = max((at for at, piece in enumerate(pieces, 1) if piece.ends), default=0)
    return list(pieces[:last])


def trim(pieces: Iterable[Piece], start: int, stop: int) -> list[Piece]:
    """Return `pieces` cut to the positions `[start, stop)`."""
    kept = []
    for piece in pieces:
        skip = max(0, start - piece.at)
        tokens = min(piece.stop, stop) - piece.at - skip
        if tokens == piece.tokens > 0:  # as most are
            kept.append(piece)
        elif tokens > 0:
            moved = replace(piece, skip=piece.skip + skip, tokens=tokens, at=piece.at + skip, first=piece.first + skip)
            kept.append(moved)
    return kept
