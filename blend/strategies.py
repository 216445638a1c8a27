"""The strategies that choose which reused tokens are recomputed.

A strategy is a function from evidence about each token to ascending indices. Sources: `deviation` is CacheBlend (arXiv
2405.16444), `head` is EPIC (2410.15332), `query` is ProphetKV (2602.02579). `random`, `all` and `none` are controls.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from lmc.blend.kernels.attention import OverHeads
from lmc.config.settings import Settings
from lmc.errors import ConfigError

CHECK_LAYER = 1  # where `deviation` compares keys; at layer 0, re-rotated keys never deviate
# `union` recomputes tokens that were computed at these first positions, whatever the question is. A document has three
# of them if it was learned alone, two after an attention sink, and none after a primer.
HEAD_POSITIONS = 3
# `union` expects an answer to read this many tokens after each token. Each inherits a share of the previous score.
READ_ON, INHERITED = 2, 0.8
# `union` multiplies a token's score by its position in its document to this power. A later token attended to more of
# its own document when it was stored, so it depends less on others. From MassClosure, in IBM's fork of vLLM.
DEPTH_POWER = -0.15


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """The evidence about N reused tokens, in the order of their positions."""

    computed_at: torch.Tensor  # [N] position at which each token was computed when its document was learned
    learned_after: int = 0  # number of tokens before each document when it was learned
    deviation: torch.Tensor | None = None  # [N] squared L2 between fresh and re-rotated key, float32, over all KV heads
    attention: torch.Tensor | None = None  # [N] attention of the question to each token


def budget(tokens: int, ratio: float) -> int:
    """Return the number of tokens for a ratio: `max(int(n · ratio), 1)` as published, and 0 for ratio 0."""
    return max(int(tokens * ratio), 1) if tokens and ratio > 0 else 0


def highest(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Return ascending indices of the `count` highest scores. Earlier ones win ties, so that all ranks agree."""
    if count >= len(scores):
        return torch.arange(len(scores), device=scores.device)
    if not count:
        return torch.empty(0, dtype=torch.long, device=scores.device)
    # Selection takes a third of the time of sorting, in which a GPU would have nothing to do.
    lowest = scores.kthvalue(len(scores) - count + 1).values
    chosen = ~(scores <= lowest)  # including NaN
    equal = (scores == lowest).nonzero().flatten()[: max(count - int(chosen.sum()), 0)]
    return chosen.index_fill_(0, equal, value=True).nonzero().flatten()[:count]


def by_deviation(evidence: Evidence, count: int) -> torch.Tensor:
    """Choose the most deviating tokens."""
    assert evidence.deviation is not None
    return highest(evidence.deviation, count)


def by_head(evidence: Evidence, count: int) -> torch.Tensor:
    """Choose the first tokens of each document, as many per document as the budget allows."""
    return highest(-evidence.computed_at, count)


def by_query(evidence: Evidence, count: int) -> torch.Tensor:
    """Choose the tokens that the question attends to most."""
    assert evidence.attention is not None
    return highest(evidence.attention, count)


def by_union(evidence: Evidence, count: int) -> torch.Tensor:
    """Choose the first tokens of each document. Spend the rest of the budget on what the question and its answer read.

    The first tokens get at most a fourth of the budget. They may take information from earlier documents, although
    questions do not attend to them. An answer that is copied from a document attends to the tokens after those that the
    question attends to. So each of the next `READ_ON` tokens inherits a share of the score of the token before it. Then
    scores are weighted by depth.
    """
    assert evidence.attention is not None
    attention, follows = evidence.attention.clone(), evidence.computed_at[1:] == evidence.computed_at[:-1] + 1
    for _ in range(READ_ON):
        attention[1:] = torch.maximum(attention[1:], attention[:-1] * follows * INHERITED)
    attention *= (evidence.computed_at - evidence.learned_after + 1).to(attention.dtype) ** DEPTH_POWER
    heads = (evidence.computed_at < HEAD_POSITIONS).nonzero().flatten()
    attention[heads[highest(-evidence.computed_at[heads], count // 4)]] = float("inf")
    return highest(attention, count)


def by_chance(evidence: Evidence, count: int) -> torch.Tensor:
    """Choose random tokens, the same every time: a control."""
    generator = torch.Generator().manual_seed(len(evidence.computed_at))
    scores = torch.rand(len(evidence.computed_at), generator=generator)
    return highest(scores.to(evidence.computed_at.device), count)


def by_none(evidence: Evidence, count: int) -> torch.Tensor:
    """Choose no token, which is blind reuse: a control."""
    return evidence.computed_at.new_empty(0)


def by_all(evidence: Evidence, count: int) -> torch.Tensor:
    """Choose every token, which must equal full prefill: a control."""
    return torch.arange(len(evidence.computed_at), device=evidence.computed_at.device)


Strategy = Literal["deviation", "head", "query", "union", "random", "all", "none"]
STRATEGIES: dict[str, Callable[[Evidence, int], torch.Tensor]] = {
    "deviation": by_deviation,
    "head": by_head,
    "query": by_query,
    "union": by_union,
    "random": by_chance,
    "all": by_all,
    "none": by_none,
}
# The strategies that score by the question's attention: by its mean over heads, as published, or by its maximum. Heads
# attend to different things, and with a small budget the mean misses some of them.
NEEDS_QUESTION: dict[str, OverHeads] = {"query": "mean", "union": "max"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputePolicy:
    """The share of recomputed tokens, and the strategy that chooses them."""

    strategy: str
    ratio: float = 0.15
    correction: str = "none"  # or "shift" (`lmc.blend.shift`), not for `deviation`

    def share(self, layers: int) -> float:
        """Return the share of the reused tokens that is recomputed, as a mean over layers."""
        if self.strategy == "all":
            return 1.0
        if self.strategy != "deviation":
            return self.ratio if self.strategy != "none" else 0.0
        whole = min(CHECK_LAYER + 1, layers)  # The check layer computes all its tokens.
        return (whole + (layers - whole) * self.ratio) / layers

    @classmethod
    def of(cls, settings: Settings, strategy: str | None = None, ratio: float | None = None) -> "RecomputePolicy":
        """Return the policy of the settings, or with another strategy or ratio. May raise `ConfigError`."""
        published = settings.blend_method == "cacheblend"
        strategy = strategy or ("deviation" if published else settings.blend_method)
        correction = "none" if published or strategy == "deviation" else "shift"
        ratio = settings.blend_recompute_ratios if ratio is None else ratio
        return cls(strategy=strategy, ratio=ratio, correction=correction)

    def __post_init__(self) -> None:
        """Raise `ConfigError` if the policy is invalid."""
        if self.strategy not in STRATEGIES:
            raise ConfigError(f"invalid blend strategy {self.strategy!r}: use one of {', '.join(STRATEGIES)}")
        if not 0 <= self.ratio <= 1:
            raise ConfigError(f"invalid blend ratio {self.ratio}: use a number from 0 to 1")


BLIND_REUSE = RecomputePolicy(strategy="none", ratio=0.0)
