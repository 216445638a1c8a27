"""The result of a prefill: logits, a cache, and a report of what was computed and loaded."""

from dataclasses import dataclass, field
from typing import Literal

import torch
from transformers import DynamicCache

How = Literal["blend", "reuse", "exact", "full"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Facts about the computed and loaded tokens of one prefill."""

    how: str
    tokens: int
    computed: tuple[int, ...]  # number of tokens computed in each layer, over all passes
    exact: int  # number of tokens whose stored KV equals that of full prefill
    reused: int = 0  # number of tokens whose KV came from documents that were computed alone
    charged_budget: float = 0.0  # share of the reused tokens that was recomputed, over all layers
    loaded: dict[str, int]  # loaded bytes by tier: "device", "host", "disk", …
    unknown: int  # number of documents that were not stored; they are learned later if memory has room for them
    seconds: float  # time until the logits were computed
    skipped: int = 0  # number of stored tokens that were computed, because that was expected to be faster
    recomputed: tuple[torch.Tensor, ...] = field(default=(), repr=False)  # positions of recomputed tokens, by layer
    note: str = ""  # why the prefill differs from what the caller requested


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefilled:
    """The logits of a prompt's last token and the KV of all tokens before it, from which `model.generate` continues."""

    logits: torch.Tensor  # [V]
    cache: DynamicCache  # [1, H, T - 1, D] per layer; `generate` computes the last token of the prompt
    report: Report
