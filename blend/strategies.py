"""The strategies that choose which reused tokens are recomputed.

A strategy is a function from evidence on each token to ascending indices. Sources: `deviation` is CacheBlend (arXiv
2405.16444), `head` is EPIC (2410.15332), `query` is ProphetKV (2602.02579). `random`, `all` and `none` are controls.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from lmc.blend.kernels.attention import OverHeads
from lmc.config.settings import Settings
from lmc.errors import ConfigError

# What `union` repairs whatever the question is: the tokens of a document that were computed at these first positions,
# which are three if it was learned alone, two behind an attention sink, and none behind a primer.
HEAD_POSITIONS = 3
# How many tokens behind each token `union` expects an answer to read, and with which share of its score.
READ_ON, INHERITED = 2, 0.8
# The power of a token's place in its document with which `union` weights scores. A later token has read more of its own
# document when it was stored, and less of what it says depends on others. MassClosure, of IBM's fork of vLLM, has it.
DEPTH = -0.15


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What is known of N reused tokens, in the order of their positions."""

    offset: torch.Tensor  # [N] position at which each token was computed in its own document
    deviation: torch.Tensor | None = None  # [N] squared L2 between fresh and re-rotated key, float32, over all KV heads
    magnitude: torch.Tensor | None = None  # [N] squared L2 of the re-rotated key
    attention: torch.Tensor | None = None  # [N] attention that the question pays to each token


def budget(tokens: int, ratio: float) -> int:
    """Return how many of `tokens` a ratio stands for: `max(int(n · ratio), 1)` as published, and none at 0."""
    return max(int(tokens * ratio), 1) if tokens and ratio > 0 else 0


def highest(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Return ascending indices of the `count` highest scores; of equal ones the earlier, as all ranks must agree."""
    order = torch.argsort(scores, descending=True, stable=True)
    return order[:count].sort().values


def by_deviation(evidence: Evidence, count: int, threshold: float | None = None) -> torch.Tensor:
    """Choose the most deviating tokens; with a threshold, at most `count` whose `‖Δk‖²/‖k‖²` reaches it."""
    assert evidence.deviation is not None
    chosen = highest(evidence.deviation, count)
    if threshold is None:
        return chosen
    assert evidence.magnitude is not None
    relative = evidence.deviation / evidence.magnitude.clamp_min(torch.finfo(torch.float32).tiny)
    return chosen[relative[chosen] >= threshold]


def by_head(evidence: Evidence, count: int) -> torch.Tensor:
    """Choose the first tokens of each document, as many of each as the budget allows."""
    return highest(-evidence.offset, count)


def by_query(evidence: Evidence, count: int) -> torch.Tensor:
    """Choose the tokens that the question attends to most."""
    assert evidence.attention is not None
    return highest(evidence.attention, count)


def by_union(evidence: Evidence, count: int) -> torch.Tensor:
    """Choose the first tokens of each document, and for the rest of the budget what the question and its answer read.

    The first tokens get at most a fourth of the budget. A document may take over information from the documents before
    it in its first tokens, to which questions do not attend. An answer that is copied from a document attends to the
    tokens behind those that the question finds, so `READ_ON` tokens inherit a share of the score of the one before.
    Then scores are weighted by depth.
    """
    assert evidence.attention is not None
    attention, follows = evidence.attention.clone(), evidence.offset[1:] == evidence.offset[:-1] + 1
    for _ in range(READ_ON):
        attention[1:] = torch.maximum(attention[1:], attention[:-1] * follows * INHERITED)
    attention *= (evidence.offset - evidence.offset.min() + 1).to(attention.dtype) ** DEPTH
    heads = by_head(evidence, count // 4)
    attention[heads[evidence.offset[heads] < HEAD_POSITIONS]] = float("inf")
    return highest(attention, count)


def by_chance(evidence: Evidence, count: int) -> torch.Tensor:
    """Choose random tokens, the same every time: a control."""
    generator = torch.Generator().manual_seed(len(evidence.offset))
    scores = torch.rand(len(evidence.offset), generator=generator)
    return highest(scores.to(evidence.offset.device), count)


def by_none(evidence: Evidence, count: int) -> torch.Tensor:
    """Choose no token, which is blind reuse: a control."""
    return evidence.offset.new_empty(0)


def by_all(evidence: Evidence, count: int) -> torch.Tensor:
    """Choose every token, which must equal full prefill: a control."""
    return torch.arange(len(evidence.offset), device=evidence.offset.device)


STRATEGIES: dict[str, Callable[[Evidence, int], torch.Tensor]] = {
    "deviation": by_deviation,
    "head": by_head,
    "query": by_query,
    "union": by_union,
    "random": by_chance,
    "all": by_all,
    "none": by_none,
}
# The strategies that score by the question's attention: by its mean over heads, as published, or by that of the head
# that attends most. Heads look for different things, and with a small budget the mean misses some of them.
NEEDS_QUESTION: dict[str, OverHeads] = {"query": "mean", "union": "max"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputePolicy:
    """How many tokens are recomputed, and how they are chosen.

    Only `deviation` uses check layers, several ratios and thresholds.
    """

    strategy: str
    ratios: tuple[float, ...] = (0.15,)
    check_layers: tuple[int, ...] = (1,)
    thresholds: tuple[float, ...] | None = None
    correction: str = "none"  # or "shift" (`lmc.blend.shift`), which `deviation` does not have

    def share(self, layers: int) -> float:
        """Return which share of the reused tokens is computed, as a mean over layers."""
        if self.strategy == "all":
            return 1.0
        if self.strategy != "deviation":
            return self.ratios[0] if self.strategy != "none" else 0.0
        bounds = [*(check + 1 for check in self.check_layers), layers]  # A check layer computes all that reached it.
        return sum(
            (stop - start) * ratio
            for start, stop, ratio in zip([0, *bounds], bounds, [1.0, *self.ratios], strict=False)
        ) / layers  # fmt: skip

    @classmethod
    def of(cls, settings: Settings, strategy: str | None = None, ratio: float | None = None) -> "RecomputePolicy":
        """Return the policy of the settings, or with another strategy or ratio; raise `ConfigError` as below."""
        strategy = strategy or settings.blend_strategy
        ratios = settings.blend_recompute_ratios
        ratios = ratios if ratio is None else (ratio,) * len(ratios)
        if strategy != "deviation":
            return cls(strategy=strategy, ratios=ratios[:1], correction=settings.blend_correction)
        layers, thresholds = settings.blend_check_layers, settings.blend_thresholds
        return cls(strategy=strategy, ratios=ratios, check_layers=layers, thresholds=thresholds)

    def __post_init__(self) -> None:
        """Raise `ConfigError` if no blend can follow this policy."""
        if self.strategy not in STRATEGIES:
            raise ConfigError(f"blend strategy {self.strategy!r}: use one of {', '.join(STRATEGIES)}")
        if not self.ratios or not all(0 <= ratio <= 1 for ratio in self.ratios):
            raise ConfigError(f"blend ratios {self.ratios}: each must be between 0 and 1")
        if self.strategy != "deviation":
            return
        if not self.check_layers or min(self.check_layers) < 1:
            raise ConfigError(f"blend check layers {self.check_layers}: a stored key can deviate from layer 1 on")
        if len(self.ratios) != len(self.check_layers) or len(self.thresholds or self.ratios) != len(self.ratios):
            raise ConfigError("blend check layers, ratios and thresholds must be equally many")

    def check_depth(self, layers: int) -> None:
        """Raise `ConfigError` if a model with so many layers does not have the check layers."""
        if self.strategy == "deviation" and max(self.check_layers) >= layers:
            deepest = max(self.check_layers)
            raise ConfigError(f"blend_check_layers: {deepest}, but the model has layers 0 to {layers - 1}")


BLIND_REUSE = RecomputePolicy(strategy="none", ratios=(0.0,))
