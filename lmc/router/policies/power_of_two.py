"""The policy `power_of_two`: the less loaded one of two engines."""

import random
from collections.abc import Sequence

from lmc.router.policies.without_memory import WithoutMemory
from lmc.router.policy import Candidate, PromptRequest, RoutingChoice


class PowerOfTwo(WithoutMemory):
    """The less loaded one of two engines that are drawn at random; the first drawn if both have the same load.

    Source: the policy `power_of_two` of SGLang's router, after Mitzenmacher's power of two choices. A seed makes the
    draws the same in each run. Equal loads are not decided by name, as an idle fleet would then favour its first names.
    """

    def __init__(self, *, seed: int | None = None) -> None:
        """Without a `seed`, each run is different."""
        self._random = random.Random(seed)

    def choose(self, request: PromptRequest, candidates: Sequence[Candidate]) -> RoutingChoice:
        """Return the less loaded one of two engines."""
        if len(candidates) == 1:
            return RoutingChoice(candidates[0].name, "only one")
        by_name = sorted(candidates, key=lambda candidate: candidate.name)
        drawn = self._random.sample(by_name, 2)
        return RoutingChoice(min(drawn, key=lambda candidate: candidate.load).name, "less loaded of two")
