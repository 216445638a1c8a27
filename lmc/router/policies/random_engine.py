"""The policy `random`: any engine."""

import random
from collections.abc import Sequence

from lmc.router.policies.without_memory import WithoutMemory
from lmc.router.policy import Candidate, PromptRequest, RoutingChoice


class RandomEngine(WithoutMemory):
    """Any engine, each with the same probability.

    Source: the policy `random` of SGLang's router. A seed makes the sequence of engines the same in each run.
    """

    def __init__(self, *, seed: int | None = None) -> None:
        """Without a `seed`, each run is different."""
        self._random = random.Random(seed)

    def choose(self, request: PromptRequest, candidates: Sequence[Candidate]) -> RoutingChoice:
        """Return any engine."""
        return RoutingChoice(self._random.choice(sorted(candidate.name for candidate in candidates)), "random")
