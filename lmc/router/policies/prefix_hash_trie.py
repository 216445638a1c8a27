"""The policy `prefix_hash_trie`: the engine that has seen the longest prefix, in chunks of characters."""

import random
from collections.abc import Collection, Sequence
from typing import Literal, NamedTuple

from lmc.router.policies.least_loaded import least_loaded
from lmc.router.policies.options import check, check_count
from lmc.router.policy import Candidate, PromptRequest, RoutingChoice, TakeBack
from lmc.router.prefix_hashes import CHARACTERS_PER_TOKEN, PrefixTable, chained, character_blocks


class TrieMatch(NamedTuple):
    """The engines with the longest match, and its length in characters; it counts whole chunks, as published."""

    length: int
    engines: list[str]  # by name; all that were asked for if nothing matches


class PrefixHashTrie:
    """The engine with the longest match in a trie of chunk hashes.

    Source: the HashTrie of vLLM's production-stack (RFC on prefix-aware routing, policy `prefixaware`): xxh64 of each
    128 characters, the engines at each node, one at random of those at the deepest node, and the least loaded engine if
    the match is shorter than a minimum, which is 0.

    Different here: the trie has a maximal number of nodes, of which the least recently used leaves go, and an engine
    that has gone leaves it (theirs grows until the process runs out of memory). Each scope has a trie of its own. With
    `ties` of "least_loaded", the least loaded engine of the deepest node gets the request.
    """

    def __init__(
        self,
        *,
        chunk_characters: int = 128,
        min_match_characters: int = 0,
        ties: Literal["random", "least_loaded"] = "random",
        max_nodes: int = 1 << 18,
        seed: int | None = None,
    ) -> None:
        """`max_nodes` of about 500 bytes are kept for all scopes together. `seed` makes random choices repeatable."""
        check_count("chunk_characters", chunk_characters)
        check(min_match_characters >= 0, "min_match_characters", min_match_characters, "0 or more")
        check(ties in ("random", "least_loaded"), "ties", ties, "random or least_loaded")
        check_count("max_nodes", max_nodes)
        self._chunk, self._minimum, self._ties = chunk_characters, min_match_characters, ties
        self._nodes, self._random = PrefixTable(max_nodes), random.Random(seed)

    def choose(self, request: PromptRequest, candidates: Sequence[Candidate]) -> RoutingChoice:
        """Return one of the engines with the longest match."""
        by_name = {candidate.name: candidate for candidate in candidates}
        match = self.match(request, by_name)
        if match.length < self._minimum:
            return RoutingChoice(least_loaded(candidates).name, "match too short")
        if self._ties == "random":
            name = self._random.choice(match.engines)
        else:
            name = least_loaded(by_name[name] for name in match.engines).name
        expected = min(match.length, len(request.text)) / CHARACTERS_PER_TOKEN
        return RoutingChoice(name, "longest prefix" if match.length else "no match", expected)

    def scores(self, request: PromptRequest, candidates: Sequence[Candidate]) -> dict[str, float]:
        """Return the characters that match of each engine, in whole chunks."""
        hashes = self._hashes(request)
        return {one.name: float(self._nodes.leading(hashes, one.name) * self._chunk) for one in candidates}

    def sent(self, request: PromptRequest, engine: str) -> TakeBack:
        """Note that an engine has seen a prompt."""
        return self._nodes.add(self._hashes(request), engine)

    def forget(self, engine: str) -> None:
        """Take an engine out of the trie."""
        self._nodes.forget(engine)

    def match(self, request: PromptRequest, engines: Collection[str]) -> TrieMatch:
        """Return those of the engines that have seen the longest prefix of a prompt."""
        hashes = self._hashes(request)
        chunks = {engine: self._nodes.leading(hashes, engine) for engine in sorted(engines)}
        most = max(chunks.values())
        return TrieMatch(most * self._chunk, [engine for engine, count in chunks.items() if count == most])

    def _hashes(self, request: PromptRequest) -> list[int]:
        return chained(character_blocks(request.text, self._chunk), request.scope)
