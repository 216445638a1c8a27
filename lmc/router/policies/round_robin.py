"""The policy `round_robin`: the engines in turn."""

from collections.abc import Sequence

from lmc.router.policy import Candidate, PromptRequest, RoutingChoice


class RoundRobin:
    """The engines in turn: the one that was sent a request the longest time ago, and new ones first, by name.

    Source: the policies `roundrobin` of vLLM's production-stack and `round_robin` of SGLang's router. Both count
    requests, and take the number modulo the number of engines. Here the turn of each engine is noted instead, because
    a count skips engines when the candidates change, and always meets the same engine of a model whose requests
    alternate with another one's.
    """

    def __init__(self) -> None:
        self._turns: dict[str, int] = {}
        self._turn = 0

    def choose(self, request: PromptRequest, candidates: Sequence[Candidate]) -> RoutingChoice:
        """Return the engine whose turn it is."""
        names = (candidate.name for candidate in candidates)
        return RoutingChoice(min(names, key=lambda name: (self._turns.get(name, 0), name)), "next in turn")

    def sent(self, request: PromptRequest, engine: str) -> None:
        """Note that an engine has had its turn."""
        self._turn += 1
        self._turns[engine] = self._turn

    def forget(self, engine: str) -> None:
        """Take an engine for a new one."""
        self._turns.pop(engine, None)
