"""What a prefill takes from the store, and what it gives back: logits, a cache, and what it took."""

from dataclasses import dataclass, field
from typing import Literal

import torch
from transformers import DynamicCache

from lmc.blend.segments import Span
from lmc.engine import Piece

How = Literal["blend", "reuse", "exact", "full"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """What of a prompt is taken from the store."""

    exact: list[Piece] = field(default_factory=list)  # from the start
    documents: list[Piece] = field(default_factory=list)  # behind it
    unknown: list[Span] = field(default_factory=list)
    skipped: int = 0  # tokens that are stored and left out
    note: str = ""

    @property
    def pieces(self) -> list[Piece]:
        """All of them."""
        return self.exact + self.documents

    @property
    def tokens(self) -> int:
        """In them."""
        return sum(piece.tokens for piece in self.pieces)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What one prefill took. Tokens are counted per layer, bytes by where they came from."""

    how: str
    tokens: int
    computed: tuple[int, ...]  # tokens computed in each layer, over all passes
    exact: int  # tokens whose KV was taken as full prefill would give it
    reused: int  # tokens whose KV came from documents computed alone
    charged_budget: float  # of the reused tokens, the share that was computed anyway, over all layers
    loaded: dict[str, int]  # bytes from "device", "host", "disk", …
    unknown: int  # documents that were not stored, and are learned afterwards, or that memory had no room for
    seconds: float  # until the logits were there
    skipped: int = 0  # tokens that are stored and were not loaded, as computing them was expected to be faster
    # per layer, positions of reused tokens computed anew
    repaired: tuple[torch.Tensor, ...] = field(default=(), repr=False)
    note: str = ""  # why something else was done than was asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefilled:
    """The logits of a prompt's last token, and the KV of all tokens before it: what `model.generate` continues from."""

    logits: torch.Tensor  # [V]
    cache: DynamicCache  # [1, H, T - 1, D] per layer; generate computes the last prompt token itself
    report: Report
