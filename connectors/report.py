"""What a prefill gives back: logits, a cache, and what it took."""

from dataclasses import dataclass, field
from typing import Literal

import torch
from transformers import DynamicCache

How = Literal["blend", "reuse", "exact", "full"]


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
    # per layer, positions of reused tokens computed anew
    repaired: tuple[torch.Tensor, ...] = field(default=(), repr=False)
    note: str = ""  # why something else was done than was asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefilled:
    """The logits of a prompt's last token, and the KV of all tokens before it: what `model.generate` continues from."""

    logits: torch.Tensor  # [V]
    cache: DynamicCache  # [1, H, T - 1, D] per layer; generate computes the last prompt token itself
    report: Report
