"""The policy `least_loaded`: the engine with the fewest requests."""

from collections.abc import Iterable, Sequence

from lmc.router.policies.without_memory import WithoutMemory
from lmc.router.policy import Candidate, PromptRequest, RoutingChoice


def least_loaded(candidates: Iterable[Candidate]) -> Candidate:
    """Return the candidate with the least load, among equal ones the first by name."""
    return min(candidates, key=lambda candidate: (candidate.load, candidate.name))


class LeastLoaded(WithoutMemory):
    """The engine with the fewest requests that it has not finished; the first by name among equal ones.

    Source: the least connections of common load balancers. vLLM's production-stack and SGLang's router fall back to it
    where their other policies know nothing. They take any of equal ones, which no test can predict.
    """

    def choose(self, request: PromptRequest, candidates: Sequence[Candidate]) -> RoutingChoice:
        """Return the least loaded engine."""
        return RoutingChoice(least_loaded(candidates).name, "least loaded")
