"""The policy `cache_aware`: routes to the engine with the longest prefix, unless loads are unbalanced."""

import time
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, ClassVar, Literal, TypedDict

from lmc.router.policies.base import Policy, check, check_count
from lmc.router.policies.published.radix_tree import RadixTree
from lmc.router.policies.simple import least_loaded
from lmc.router.policy_types import Candidate, PromptRequest, RoutingChoice, TakeBack
from lmc.router.prefix_hashes import CHARACTERS_PER_TOKEN


class CacheAwareOptions(TypedDict):
    """The options that have published values."""

    cache_threshold: float
    balance_abs_threshold: int
    balance_rel_threshold: float
    eviction_interval_secs: float
    max_tree_size: int
    no_match: Literal["smallest_tree", "least_loaded"]


PYTHON_ARGUMENTS: CacheAwareOptions = {  # defaults of the router's Python arguments, and of `CacheAware`
    "cache_threshold": 0.3,
    "balance_abs_threshold": 64,
    "balance_rel_threshold": 1.5,
    "eviction_interval_secs": 120,
    "max_tree_size": 1 << 26,
    "no_match": "least_loaded",
}
LOG_OF_2025_06: CacheAwareOptions = {  # as shown in a router's log of June 2025
    "cache_threshold": 0.5,
    "balance_abs_threshold": 32,
    "balance_rel_threshold": 1.0001,
    "eviction_interval_secs": 60,
    "max_tree_size": 1 << 24,
    "no_match": "smallest_tree",
}


class Rule(Enum):
    """The rule that decides about a request."""

    SHORTEST_QUEUE = "shortest_queue"
    MATCHED = "matched"
    NO_MATCH = "smallest"


def decide(loads: Sequence[int], rate: float, threshold: float, balance_abs: float, balance_rel: float) -> Rule:
    """Return the rule for these loads and this share of matching characters. Thresholds are exclusive."""
    if max(loads) - min(loads) > balance_abs and max(loads) > balance_rel * min(loads):
        return Rule.SHORTEST_QUEUE
    return Rule.MATCHED if rate > threshold else Rule.NO_MATCH


class CacheAware(Policy):
    """The engine that was sent the longest prefix of the prompt, found in an approximate tree of sent texts.

    Source: the policy `cache_aware` of SGLang's router (sgl-router, later model gateway). If loads are unbalanced, the
    shortest queue gets the request. Otherwise it is the engine with the longest match, if that is more than
    `cache_threshold` of the characters. Else it is the engine with the smallest tree (older releases) or the least load
    (newer ones). Every `eviction_interval_secs`, engines with more than `max_tree_size` characters lose their least
    recently used leaves.

    Different here: only candidates are compared, so an engine that is away is never chosen. Of several with the same
    match, the least loaded one gets the request instead of the first of a hash map. Each tenant has a tree of its own.
    Eviction runs with the next request instead of in a thread. Memory is bounded for any traffic: an engine that has
    twice its characters before the interval has passed, or too many nodes, loses leaves at once.
    """

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "python_arguments": PYTHON_ARGUMENTS, "log_of_2025_06": LOG_OF_2025_06,
    }  # fmt: skip

    def __init__(
        self,
        *,
        cache_threshold: float = PYTHON_ARGUMENTS["cache_threshold"],
        balance_abs_threshold: int = PYTHON_ARGUMENTS["balance_abs_threshold"],
        balance_rel_threshold: float = PYTHON_ARGUMENTS["balance_rel_threshold"],
        eviction_interval_secs: float = PYTHON_ARGUMENTS["eviction_interval_secs"],
        max_tree_size: int = PYTHON_ARGUMENTS["max_tree_size"],
        no_match: Literal["smallest_tree", "least_loaded"] = PYTHON_ARGUMENTS["no_match"],
        max_nodes: int = 1 << 18,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`max_tree_size` limits an engine's characters in all scopes, `max_nodes` its nodes of about 500 bytes."""
        check(0 <= cache_threshold <= 1, "cache_threshold", cache_threshold, "from 0 to 1")
        check(balance_abs_threshold >= 0, "balance_abs_threshold", balance_abs_threshold, "0 or more")
        check(balance_rel_threshold >= 0, "balance_rel_threshold", balance_rel_threshold, "0 or more")
        check(eviction_interval_secs > 0, "eviction_interval_secs", eviction_interval_secs, "above 0")
        check_count("max_tree_size", max_tree_size)
        check(no_match in ("smallest_tree", "least_loaded"), "no_match", no_match, "smallest_tree or least_loaded")
        check_count("max_nodes", max_nodes)
        self._thresholds = cache_threshold, balance_abs_threshold, balance_rel_threshold
        self._interval, self._max_size, self._no_match = eviction_interval_secs, max_tree_size, no_match
        self._clock, self._evicted = clock, clock()
        self._tree = RadixTree(max_nodes)

    def choose(self, request: PromptRequest, candidates: Sequence[Candidate]) -> RoutingChoice:
        """Return the engine by the rule that follows from the loads and the match."""
        by_name = {candidate.name: candidate for candidate in candidates}
        match = self._tree.match(request.text, request.scope, by_name)
        rate = match.length / len(request.text) if request.text else 0.0
        rule = decide([candidate.load for candidate in candidates], rate, *self._thresholds)
        if rule is Rule.SHORTEST_QUEUE:
            return RoutingChoice(least_loaded(candidates).name, "loads out of balance")
        if rule is Rule.MATCHED:
            name = least_loaded(by_name[worker] for worker in match.workers).name
            return RoutingChoice(name, "longest prefix", match.length / CHARACTERS_PER_TOKEN)
        if self._no_match == "least_loaded":
            return RoutingChoice(least_loaded(candidates).name, "match too short")
        counts = self._tree.counts(request.scope)
        return RoutingChoice(min(by_name, key=lambda name: (counts.get(name, 0), name)), "smallest tree")

    def scores(self, request: PromptRequest, candidates: Sequence[Candidate]) -> dict[str, float]:
        """Return the share of the prompt's characters that match, for each engine."""
        lengths = {
            candidate.name: self._tree.match(request.text, request.scope, (candidate.name,)).length
            for candidate in candidates
        }
        return {name: length / max(len(request.text), 1) for name, length in lengths.items()}

    def sent(self, request: PromptRequest, engine: str) -> TakeBack:
        """Add a prompt to the tree of an engine, and evict if the interval has passed."""
        take_back = self._tree.insert(request.text, engine, request.scope)
        now = self._clock()
        if now - self._evicted >= self._interval or self._tree.characters(engine) > 2 * self._max_size:
            self._evicted = now
            self._tree.evict(self._max_size)
        return take_back

    def forget(self, engine: str) -> None:
        """Remove an engine from the trees."""
        self._tree.remove(engine)
