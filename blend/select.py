"""Which reused tokens to recompute: from per-token evidence to indices.

Strategies are functions of the evidence, so that they compose. Sources: `deviation` CacheBlend (arXiv 2405.16444), `head`
EPIC (2410.15332), `query` ProphetKV (2602.02579). `random`, `all` and `none` are controls.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from lmc.errors import ConfigError

HEAD_TOKENS = 8  # of each document, that `union` repairs whatever the question; published gains saturate near 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What is known of N reusable tokens, in order of position."""

    offset: torch.Tensor  # [N] position of each token in its own document
    deviation: torch.Tensor | None = None  # [N] squared L2 between fresh and re-rotated key, float32, over all KV heads
    magnitude: torch.Tensor | None = None  # [N] squared L2 of the re-rotated key
    attention: torch.Tensor | None = None  # [N] what the question pays to each token


def budget(tokens: int, ratio: float) -> int:
    """How many of `tokens` a ratio stands for: `max(int(n · ratio), 1)` as published, and none at 0."""
    return max(int(tokens * ratio), 1) if tokens and ratio > 0 else 0


def highest(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Ascending indices of the `count` highest scores; of equal ones the earlier, so that every rank chooses alike."""
    order = torch.argsort(scores, descending=True, stable=True)
    return order[:count].sort().values


def by_deviation(evidence: Evidence, count: int, threshold: float | None = None) -> torch.Tensor:
    """The most deviating tokens; with a threshold only those whose `‖Δk‖²/‖k‖²` reaches it, `count` at most."""
    assert evidence.deviation is not None
    chosen = highest(evidence.deviation, count)
    if threshold is None:
        return chosen
    assert evidence.magnitude is not None
    relative = evidence.deviation / evidence.magnitude.clamp_min(torch.finfo(torch.float32).tiny)
    return chosen[relative[chosen] >= threshold]


def by_head(evidence: Evidence, count: int) -> torch.Tensor:
    """The first tokens of each document, as many of each as the budget allows."""
    return highest(-evidence.offset, count)


def by_query(evidence: Evidence, count: int) -> torch.Tensor:
    """The tokens that the question attends to most."""
    assert evidence.attention is not None
    return highest(evidence.attention, count)


def by_union(evidence: Evidence, count: int) -> torch.Tensor:
    """The first `HEAD_TOKENS` of each document, for half of the budget at most, and what the question attends to for the rest.

    What a document takes over from the ones before it tends to sit in its first tokens, where no question looks.
    """
    assert evidence.attention is not None
    heads = by_head(evidence, count // 2)
    heads = heads[evidence.offset[heads] < HEAD_TOKENS]
    attention = evidence.attention.clone()
    attention[heads] = float("-inf")
    return torch.cat((heads, highest(attention, count - len(heads)))).sort().values


def by_chance(evidence: Evidence, count: int) -> torch.Tensor:
    """A control: the same random tokens every time."""
    generator = torch.Generator().manual_seed(len(evidence.offset))
    scores = torch.rand(len(evidence.offset), generator=generator)
    return highest(scores.to(evidence.offset.device), count)


def by_none(evidence: Evidence, count: int) -> torch.Tensor:
    """A control: blind reuse."""
    return evidence.offset.new_empty(0)


def by_all(evidence: Evidence, count: int) -> torch.Tensor:
    """A control: everything, which must equal full prefill."""
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
NEEDS_QUESTION = frozenset({"query", "union"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How much to recompute, chosen how. `check_layers`, a schedule of ratios and thresholds are the deviation's."""

    strategy: str
    ratios: tuple[float, ...] = (0.15,)
    check_layers: tuple[int, ...] = (1,)
    thresholds: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        """Raise `ConfigError` for what no blend could do."""
        if self.strategy not in STRATEGIES:
            raise ConfigError(f"blend strategy {self.strategy!r}: use one of {', '.join(STRATEGIES)}")
        if not self.ratios or not all(0 <= ratio <= 1 for ratio in self.ratios):
            raise ConfigError(f"blend ratios {self.ratios}: each must be between 0 and 1")
        if self.strategy != "deviation":
            return
        if not self.check_layers or min(self.check_layers) < 1:
            raise ConfigError(
                f"blend check layers {self.check_layers}: 1 is the first at which a stored key can deviate"
            )
        if len(self.ratios) != len(self.check_layers) or len(self.thresholds or self.ratios) != len(self.ratios):
            raise ConfigError("blend check layers, ratios and thresholds must be equally many")

    def check_depth(self, layers: int) -> None:
        """Raise `ConfigError` if a model of so many layers has no such check layer."""
        if self.strategy == "deviation" and max(self.check_layers) >= layers:
            raise ConfigError(
                f"blend_check_layers: {max(self.check_layers)}, but the model has layers 0 to {layers - 1}"
            )
