"""The result of a prefill: logits, a cache, and a report of what was computed and loaded."""

from dataclasses import dataclass, field
from typing import Literal

import torch
from transformers import DynamicCache

How = Literal["blend", "reuse", "exact", "full"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What one prefill has computed and loaded."""

    how: str
    tokens: int
    computed: tuple[int, ...]  # tokens computed in each layer, over all passes
    exact: int  # tokens whose stored KV is what full prefill would give
    reused: int = 0  # tokens whose KV came from documents that were computed alone
    charged_budget: float = 0.0  # of the reused tokens, the share that was computed anyway, over all layers
    loaded: dict[str, int]  # bytes by the place they came from: "device", "host", "disk", …
    unknown: int  # documents that were not stored; they are learned afterwards if memory has room for them
    seconds: float  # until the logits were computed
    skipped: int = 0  # tokens that are stored, and were computed because that was expected to be faster
    repaired: tuple[torch.Tensor, ...] = field(default=(), repr=False)  # per layer, positions of reused tokens computed
    note: str = ""  # why the prefill was not done as it was asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefilled:
    """The logits of a prompt's last token and the KV of all tokens before it, from which `model.generate` continues."""

    logits: torch.Tensor  # [V]
    cache: DynamicCache  # [1, H, T - 1, D] per layer; `generate` computes the last token of the prompt
    report: Report
