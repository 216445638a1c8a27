"""The policy `session`: a session stays with its engine."""

from collections.abc import Sequence

from lmc.router.policies.least_loaded import least_loaded
from lmc.router.policies.options import check_count
from lmc.router.policy import Candidate, PromptRequest, RoutingChoice
from lmc.router.ring import Ring


class SessionAffinity:
    """The engine to which the session's name belongs on a consistent ring; the least loaded one without a session.

    Source: the policy `session` of vLLM's production-stack, a ring on the value of a header. The scope is part of the
    key here, so that the same name of two tenants is two sessions. The ring depends on the engines' names alone: all
    routers agree without talking to each other, and an engine that goes moves its own sessions only.
    """

    def __init__(self, *, replicas: int = 256) -> None:
        """`replicas` is how many points each engine has on the ring."""
        check_count("replicas", replicas)
        self._ring = Ring(replicas)

    def choose(self, request: PromptRequest, candidates: Sequence[Candidate]) -> RoutingChoice:
        """Return the session's engine."""
        if not request.session:
            return RoutingChoice(least_loaded(candidates).name, "no session")
        names = {candidate.name for candidate in candidates}
        return RoutingChoice(next(self._ring.walk(f"{request.scope}\0{request.session}", names)), "session")

    def sent(self, request: PromptRequest, engine: str) -> None:
        """Nothing depends on what was sent."""

    def forget(self, engine: str) -> None:
        """Take an engine off the ring. It comes back to its place when it is a candidate again."""
        self._ring.remove(engine)
