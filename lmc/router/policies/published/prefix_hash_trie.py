"""The policy `prefix_hash_trie`: routes to the engine with the longest prefix, in chunks of characters."""

import random
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Literal, NamedTuple

from lmc.router.policies.base import Policy, check, check_count
from lmc.router.policies.simple import least_loaded
from lmc.router.policy_types import Candidate, PromptRequest, RoutingChoice, TakeBack
from lmc.router.prefix_hashes import CHARACTERS_PER_TOKEN, chained, character_blocks, leading


class PrefixTable:
    """The engines that were sent each block. The least recently used blocks are evicted when there are too many.

    It is a trie of blocks, stored flat: a chained hash stands for a path from the root. The blocks of a prompt are used
    from the last to the first, so the oldest block is always a leaf, and an engine that holds a block holds all blocks
    before it.

    This is an OrderedDict and not a `cachetools.LRUCache`, which takes 6 times as long for each of the many blocks.
    """

    def __init__(self, capacity: int) -> None:
        """`capacity` limits the blocks of all scopes together."""
        self._capacity = capacity
        self._blocks: OrderedDict[int, tuple[float, dict[str, None]]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def add(self, hashes: Sequence[int], engine: str, now: float = 0.0) -> Callable[[], None]:
        """Add an engine to the blocks of a prompt, and return a function that removes it from those new to it."""
        new = hashes[self.leading(hashes, engine) :]
        for block in reversed(hashes):
            _, engines = self._blocks.pop(block, (now, {}))
            engines[engine] = None
            self._blocks[block] = (now, engines)
        while len(self._blocks) > self._capacity:
            self._blocks.popitem(last=False)
        return lambda: self._drop(new, engine)

    def leading(self, hashes: Sequence[int], engine: str) -> int:
        """Return how many blocks of a prompt's prefix an engine has."""
        return leading(hashes, lambda block: block in self._blocks and engine in self._blocks[block][1])

    def drop_older(self, time: float) -> None:
        """Drop the blocks that were last used before `time`."""
        while self._blocks and next(iter(self._blocks.values()))[0] < time:
            self._blocks.popitem(last=False)

    def forget(self, engine: str) -> None:
        """Remove an engine, and the blocks that only this engine had."""
        self._drop(list(self._blocks), engine)

    def _drop(self, blocks: Iterable[int], engine: str) -> None:
        for block in blocks:
            if block in self._blocks:
                engines = self._blocks[block][1]
                engines.pop(engine, None)
                if not engines:
                    del self._blocks[block]


class TrieMatch(NamedTuple):
    """The engines with the longest match, and its length in characters of whole chunks, as published."""

    length: int
    engines: list[str]  # by name; all candidates if nothing matches


class PrefixHashTrie(Policy):
    """The engine with the longest match in a trie of chunk hashes.

    Source: the HashTrie of vLLM's production-stack (RFC on prefix-aware routing, policy `prefixaware`): xxh64 of each
    128 characters, the engines at each node, one at random of those at the deepest node, and the least loaded engine if
    the match is shorter than a minimum, which is 0.

    Different here: the number of nodes is limited and the least recently used leaves are evicted, and an engine that is
    removed leaves the trie (theirs grows until the process is out of memory). Each scope has a trie of its own. With
    `ties="least_loaded"`, the least loaded engine of the deepest node gets the request.
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
        """`max_nodes` limits the nodes of all scopes, of about 500 bytes each. A `seed` makes choices repeatable."""
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
        """Return the characters of the longest match of each engine, in whole chunks."""
        hashes = self._hashes(request)
        return {
            candidate.name: float(self._nodes.leading(hashes, candidate.name) * self._chunk) for candidate in candidates
        }

    def sent(self, request: PromptRequest, engine: str) -> TakeBack:
        """Add a prompt to the trie for an engine."""
        return self._nodes.add(self._hashes(request), engine)

    def forget(self, engine: str) -> None:
        """Remove an engine from the trie."""
        self._nodes.forget(engine)

    def match(self, request: PromptRequest, engines: Collection[str]) -> TrieMatch:
        """Return the engines that were sent the longest prefix of a prompt."""
        hashes = self._hashes(request)
        chunks = {engine: self._nodes.leading(hashes, engine) for engine in sorted(engines)}
        deepest = max(chunks.values())
        return TrieMatch(deepest * self._chunk, [engine for engine, count in chunks.items() if count == deepest])

    def _hashes(self, request: PromptRequest) -> list[int]:
        return chained(character_blocks(request.text, self._chunk), request.scope)
