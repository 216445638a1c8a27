"""The policy `chwbl`: consistent hashing with bounded loads on the prefix of the prompt."""

from collections.abc import Sequence

from lmc.router.policies.base import Policy, check, check_count
from lmc.router.policies.simple import Ring
from lmc.router.policy_types import Candidate, PromptRequest, RoutingChoice


def within_bound(load: int, total: int, engines: int, factor: float) -> bool:
    """Return whether an engine may get one more request and stay within `factor` times the mean load."""
    return total == 0 or load <= (total + 1) / engines * factor


class BoundedLoads(Policy):
    """The first engine within the load bound, in ring order from the hash of the prompt's prefix.

    Source: KubeAI's prefix hashing (its document on load balancing), after Mirrokni, Thorup and Zadimoghaddam's
    consistent hashing with bounded loads: the first 100 characters and the LoRA adapter's name are the key, each engine
    has 256 points, and loads are bounded by 1.25 times their mean. If all engines are above the bound, the first one
    gets the request. KubeAI has a ring for each model. Here the candidates are those of the model, and the scope is in
    the key, because tenants with the same prefix share nothing in the engines' caches.
    """

    def __init__(self, *, prefix_characters: int = 100, replicas: int = 256, mean_load_factor: float = 1.25) -> None:
        """`mean_load_factor` bounds an engine's load, in multiples of the mean load."""
        check_count("prefix_characters", prefix_characters)
        check_count("replicas", replicas)
        check(mean_load_factor >= 1, "mean_load_factor", mean_load_factor, "1 or more")
        self._characters, self._factor = prefix_characters, mean_load_factor
        self._ring = Ring(replicas)

    def choose(self, request: PromptRequest, candidates: Sequence[Candidate]) -> RoutingChoice:
        """Return the first engine on the ring that is within the bound."""
        loads = {candidate.name: candidate.load for candidate in candidates}
        total = sum(loads.values())
        walk = list(self._ring.walk(f"{request.scope}\0{request.text[: self._characters]}", loads))
        for name in walk:
            if within_bound(loads[name], total, len(loads), self._factor):
                return RoutingChoice(name, "first on the ring" if name == walk[0] else "next on the ring")
        return RoutingChoice(walk[0], "all above the bound")

    def forget(self, engine: str) -> None:
        """Remove an engine from the ring. It returns to its place when it is a candidate again."""
        self._ring.remove(engine)
