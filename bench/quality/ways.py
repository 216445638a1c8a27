"""The modes of answering a prompt: the prefix after which documents are learned, and the recomputed tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

from lmc.blend.strategies import BLIND_REUSE, STRATEGIES, RecomputePolicy, by_none
from lmc.config.settings import Settings

FULL, BLIND, ROUNDED = "full", "blind", "bfloat16"
ORACLE = "oracle"
STRATEGIES[ORACLE] = by_none  # for the checks of a policy; `quality.measure` puts in what it knows of each prompt
# A strategy, the prefix after which documents are learned, and the correction.
PUBLISHED = ("deviation", "none", "none")
MATRIX = (
    PUBLISHED, ("head", "none", "none"), ("query", "none", "none"), ("union", "none", "none"),
    ("none", "sink", "none"), ("none", "primer", "none"),
    ("union", "sink", "shift"), ("union", "primer", "none"), ("query", "primer", "shift"),
    ("random", "primer", "shift"), (ORACLE, "primer", "shift"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Way:
    """A way of answering. Its name is its strategy, +sink or +primer, +shift, and its ratio."""

    name: str
    behind: str
    policy: RecomputePolicy

    @property
    def ratio(self) -> float:
        """The share of the reused tokens that is computed anyway, as it was asked for."""
        return self.policy.ratio


def family(name: str) -> str:
    """Return a way's name without its ratio."""
    return name.rsplit(" ", 1)[0]


def way(strategy: str, behind: str, correction: str, ratio: float) -> Way:
    """Return a way by its parts."""
    added = "".join(f"+{name}" for name in (behind, correction) if name != "none")
    policy = RecomputePolicy(strategy=strategy, ratio=ratio, correction=correction)
    return Way(f"{strategy}{added} {ratio:g}", behind, policy)


def default(settings: Settings, ratio: float | None = None) -> Way:
    """Return the way of the settings, by default at their own ratio."""
    policy = RecomputePolicy.of(settings, ratio=ratio)
    return way(policy.strategy, "primer", policy.correction, policy.ratio)


def ways(settings: Settings, ratios: Sequence[float], matrix: bool) -> list[Way]:
    """Return blind reuse, the published method and the default at all ratios; with `matrix` all others, too."""
    parts = MATRIX if matrix else (("none", "primer", "none"),)
    found = [Way(BLIND, "none", BLIND_REUSE)]
    for strategy, behind, correction in parts:
        shares = ratios if strategy != "none" else (0.0,)
        found += [way(strategy, behind, correction, share) for share in shares]
    found += [default(settings, ratio) for ratio in ratios]
    found.append(way(*PUBLISHED, 0.15))
    return list({one.name: one for one in found}.values())
