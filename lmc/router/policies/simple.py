"""The policies that need no knowledge of caches: turns, chance, load and sessions, and the ring of consistent hashing.

They are `round_robin`, `random`, `least_loaded`, `power_of_two` and `session`.
"""

import random
from bisect import bisect
from collections.abc import Collection, Iterable, Iterator, Sequence

from lmc.router.policies.base import Policy, check_count
from lmc.router.policy_types import Candidate, PromptRequest, RoutingChoice
from lmc.router.prefix_hashes import digest


def least_loaded(candidates: Iterable[Candidate]) -> Candidate:
    """Return the candidate with the least load; of equal ones, the first by name."""
    return min(candidates, key=lambda candidate: (candidate.load, candidate.name))


class RoundRobin(Policy):
    """The engine whose last request was sent the longest time ago; new engines first, by name.

    Source: the policies `roundrobin` of vLLM's production-stack and `round_robin` of SGLang's router. Both count
    requests, and take the number modulo the number of engines. Here the last turn of each engine is stored instead. A
    count skips engines when the candidates change, and always meets the same engine if the requests of two models
    alternate.
    """

    def __init__(self) -> None:
        self._turns: dict[str, int] = {}
        self._turn = 0

    def choose(self, request: PromptRequest, candidates: Sequence[Candidate]) -> RoutingChoice:
        """Return the engine whose turn it is."""
        names = (candidate.name for candidate in candidates)
        return RoutingChoice(min(names, key=lambda name: (self._turns.get(name, 0), name)), "next in turn")

    def sent(self, request: PromptRequest, engine: str) -> None:
        """Record that it was the turn of an engine."""
        self._turn += 1
        self._turns[engine] = self._turn

    def forget(self, engine: str) -> None:
        """Treat an engine as new from now on."""
        self._turns.pop(engine, None)


class RandomEngine(Policy):
    """Any engine, each with the same probability.

    Source: the policy `random` of SGLang's router. With a seed, the sequence of engines is the same in each run.
    """

    def __init__(self, *, seed: int | None = None) -> None:
        """Without a `seed`, each run is different."""
        self._random = random.Random(seed)

    def choose(self, request: PromptRequest, candidates: Sequence[Candidate]) -> RoutingChoice:
        """Return a random engine."""
        return RoutingChoice(self._random.choice(sorted(candidate.name for candidate in candidates)), "random")


class LeastLoaded(Policy):
    """The engine with the fewest requests in flight; of equal ones, the first by name.

    Source: least connections, as in common load balancers. vLLM's production-stack and SGLang's router fall back to it
    where their other policies have no match. They choose equal ones at random, which no test can predict.
    """

    def choose(self, request: PromptRequest, candidates: Sequence[Candidate]) -> RoutingChoice:
        """Return the least loaded engine."""
        return RoutingChoice(least_loaded(candidates).name, "least loaded")


class PowerOfTwo(Policy):
    """The less loaded of two engines that are drawn at random; the first one drawn if their loads are equal.

    Source: the policy `power_of_two` of SGLang's router, after Mitzenmacher's power of two choices. With a seed, the
    draws are the same in each run. Equal loads are not decided by name, because an idle fleet would then favour its
    first names.
    """

    def __init__(self, *, seed: int | None = None) -> None:
        """Without a `seed`, each run is different."""
        self._random = random.Random(seed)

    def choose(self, request: PromptRequest, candidates: Sequence[Candidate]) -> RoutingChoice:
        """Return the less loaded of two engines."""
        if len(candidates) == 1:
            return RoutingChoice(candidates[0].name, "only one")
        by_name = sorted(candidates, key=lambda candidate: candidate.name)
        drawn = self._random.sample(by_name, 2)
        return RoutingChoice(min(drawn, key=lambda candidate: candidate.load).name, "less loaded of two")


class Ring:
    """A ring for consistent hashing: removing an engine moves only its own keys.

    Engines stand at many points of the ring, and a key belongs to the engine at the next point. Points are hashes of
    names, so all routers with the same engines agree, also after a restart.
    """

    def __init__(self, replicas: int = 256) -> None:
        """`replicas` is the number of points per engine."""
        self._replicas = replicas
        self._names: set[str] = set()
        self._points: list[tuple[int, str]] = []

    def add(self, name: str) -> None:
        """Add an engine, unless it is on the ring already."""
        if name not in self._names:
            self._names.add(name)
            self._points += [(digest(f"{name}\0{replica}"), name) for replica in range(self._replicas)]
            self._points.sort()

    def remove(self, name: str) -> None:
        """Remove an engine, if it is on the ring."""
        if name in self._names:
            self._names.remove(name)
            self._points = [point for point in self._points if point[1] != name]

    def walk(self, key: str, among: Collection[str]) -> Iterator[str]:
        """Yield the engines of `among` in the order of a key, each once. Missing ones are added to the ring first.

        Other engines stay on the ring and are skipped, so an engine that is away for a while gets its keys back.
        """
        for name in among:
            self.add(name)
        waiting = set(among)
        place = bisect(self._points, (digest(key), ""))
        while waiting:
            name = self._points[place % len(self._points)][1]
            if name in waiting:
                waiting.remove(name)
                yield name
            place += 1


class SessionAffinity(Policy):
    """The engine that the session's name belongs to on a consistent ring; without a session, the least loaded engine.

    Source: the policy `session` of vLLM's production-stack, a ring on the value of a header. Here the scope is part of
    the key, so the same name of two tenants means two sessions. The ring depends on the engines' names alone: all
    routers agree without talking to each other, and removing an engine moves only its own sessions.
    """

    def __init__(self, *, replicas: int = 256) -> None:
        """`replicas` is the number of points of each engine on the ring."""
        check_count("replicas", replicas)
        self._ring = Ring(replicas)

    def choose(self, request: PromptRequest, candidates: Sequence[Candidate]) -> RoutingChoice:
        """Return the session's engine."""
        if not request.session:
            return RoutingChoice(least_loaded(candidates).name, "no session")
        names = {candidate.name for candidate in candidates}
        return RoutingChoice(next(self._ring.walk(f"{request.scope}\0{request.session}", names)), "session")

    def forget(self, engine: str) -> None:
        """Remove an engine from the ring. It returns to its place when it is a candidate again."""
        self._ring.remove(engine)
