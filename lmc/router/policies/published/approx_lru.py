"""The policy `approx_lru`: routes to the engine whose simulated cache has the largest share of the prompt."""

from collections import OrderedDict
from collections.abc import Sequence

from lmc.router.policies.base import Policy, check_count
from lmc.router.policies.simple import least_loaded
from lmc.router.policy_types import Candidate, PromptRequest, RoutingChoice, TakeBack
from lmc.router.prefix_hashes import CHARACTERS_PER_TOKEN, chained, character_blocks, leading


class LruIndex:
    """The blocks that each server is likely to have: those it was sent last, as many as its cache holds.

    This is an OrderedDict and not a `cachetools.LRUCache`, which takes 6 times as long for each of the many blocks.
    """

    def __init__(self, server_blocks: int) -> None:
        """`server_blocks` is the number of blocks that a server's cache holds."""
        self._capacity = server_blocks
        self._servers: dict[str, OrderedDict[int, None]] = {}

    def add(self, server: str, hashes: Sequence[int]) -> TakeBack:
        """Add the blocks of a prompt to a server, and return a function that removes those new to it.

        Blocks are used from the last to the first, so a block is never evicted before those that need it.
        """
        new = hashes[self.leading(server, hashes) :]
        blocks = self._servers.setdefault(server, OrderedDict())
        for block in reversed(hashes):
            blocks[block] = None
            blocks.move_to_end(block)
        while len(blocks) > self._capacity:
            blocks.popitem(last=False)
        return lambda: self._drop(server, new)

    def _drop(self, server: str, hashes: Sequence[int]) -> None:
        for block in hashes:
            self._servers.get(server, OrderedDict()).pop(block, None)

    def leading(self, server: str, hashes: Sequence[int]) -> int:
        """Return how many blocks of a prompt's prefix a server has."""
        blocks = self._servers.get(server)
        return leading(hashes, blocks.__contains__) if blocks else 0

    def remove(self, server: str) -> None:
        """Remove a server."""
        self._servers.pop(server, None)


class ApproximateLru(Policy):
    """The engine with the highest share of the prompt's blocks; of equal ones, the least loaded.

    Source: the approximate prefix cache plugin of the endpoint picker (EPP) of the Kubernetes Gateway API Inference
    Extension: xxhash64 over blocks of 16 tokens of 4 characters, chained and seeded with model and salt, at most 256
    blocks of a prompt, and for each server the 31,250 blocks that it was sent last. An incomplete block at the end is
    hashed too, and a prompt shorter than one block has none.

    Different here: the EPP adds this score to those of its other scorers, by weights; this policy uses it alone.
    `max_blocks` is an option, because prompts that differ only after 256 blocks look alike. Blocks of a prompt are
    noted from the last to the first, so a server's cache never has the end of a prompt without its beginning.
    """

    def __init__(
        self,
        *,
        block_tokens: int = 16,
        characters_per_token: int = CHARACTERS_PER_TOKEN,
        max_blocks: int = 256,
        server_blocks: int = 31_250,
    ) -> None:
        """`server_blocks` is the number of blocks that an engine's cache holds."""
        check_count("block_tokens", block_tokens)
        check_count("characters_per_token", characters_per_token)
        check_count("max_blocks", max_blocks)
        check_count("server_blocks", server_blocks)
        self._tokens, self._characters, self._max_blocks = block_tokens, block_tokens * characters_per_token, max_blocks
        self._index = LruIndex(server_blocks)

    def choose(self, request: PromptRequest, candidates: Sequence[Candidate]) -> RoutingChoice:
        """Return the engine with the highest share."""
        hashes = self.hashes(request)
        matched = {candidate.name: self._index.leading(candidate.name, hashes) for candidate in candidates}
        longest = max(matched.values())
        name = least_loaded(candidate for candidate in candidates if matched[candidate.name] == longest).name
        return RoutingChoice(name, "largest share" if longest else "no match", longest * self._tokens)

    def scores(self, request: PromptRequest, candidates: Sequence[Candidate]) -> dict[str, float]:
        """Return the share of the prompt's blocks that each engine has."""
        hashes = self.hashes(request)
        return {
            candidate.name: self._index.leading(candidate.name, hashes) / max(len(hashes), 1)
            for candidate in candidates
        }

    def sent(self, request: PromptRequest, engine: str) -> TakeBack:
        """Add a prompt to an engine's simulated cache."""
        return self._index.add(engine, self.hashes(request))

    def forget(self, engine: str) -> None:
        """Drop an engine's simulated cache."""
        self._index.remove(engine)

    def hashes(self, request: PromptRequest) -> list[int]:
        """Return the hashes of a prompt's blocks."""
        if len(request.text) < self._characters:
            return []
        text = request.text[: self._max_blocks * self._characters]
        return chained(character_blocks(text, self._characters), request.scope)
