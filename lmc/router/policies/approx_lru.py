"""The policy `approx_lru`: the engine whose simulated cache has the largest share of the prompt."""

from collections import OrderedDict
from collections.abc import Sequence

from lmc.router.policies.least_loaded import least_loaded
from lmc.router.policies.options import check_count
from lmc.router.policy import Candidate, PromptRequest, RoutingChoice, TakeBack
from lmc.router.prefix_hashes import CHARACTERS_PER_TOKEN, chained, character_blocks, leading


class LruIndex:
    """The blocks that each server is likely to have: those it was sent last, as many as its cache holds."""

    def __init__(self, server_blocks: int) -> None:
        """`server_blocks` is how many blocks a server's cache holds."""
        self._capacity = server_blocks
        self._servers: dict[str, OrderedDict[int, None]] = {}

    def add(self, server: str, hashes: Sequence[int]) -> TakeBack:
        """Note that a server has the blocks of a prompt, and return what takes back those that it did not have.

        They are used from the last to the first one, so that a block never goes before those that need it.
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

    def holders(self, block: int) -> list[str]:
        """Return the servers that have a block, by name."""
        return sorted(server for server, blocks in self._servers.items() if block in blocks)

    def leading(self, server: str, hashes: Sequence[int]) -> int:
        """Return how many blocks at the beginning of a prompt a server has."""
        blocks = self._servers.get(server)
        return leading(hashes, blocks.__contains__) if blocks else 0

    def remove(self, server: str) -> None:
        """Drop a server."""
        self._servers.pop(server, None)


class ApproximateLru:
    """The engine with the highest share of the prompt's blocks, the least loaded one of equal ones.

    Source: the approximate prefix cache plugin of the endpoint picker (EPP) of the Kubernetes Gateway API Inference
    Extension: xxhash64 over blocks of 16 tokens of 4 characters, chained and seeded with model and salt, at most 256
    blocks of a prompt, and for each server the 31,250 blocks that it was sent last. A part of a block at the end is
    hashed too, and a prompt shorter than one block has none.

    Different here: the EPP adds this score to those of its other scorers, by weights, and this policy has it alone.
    `max_blocks` is an option, because longer prefixes look alike to 256 blocks. Blocks of a prompt are noted from the
    last to the first one, so that the cache of a server never has the end of a prompt without its beginning.
    """

    def __init__(
        self,
        *,
        block_tokens: int = 16,
        characters_per_token: int = CHARACTERS_PER_TOKEN,
        max_blocks: int = 256,
        server_blocks: int = 31_250,
    ) -> None:
        """`server_blocks` is how many blocks an engine's cache holds."""
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
        most = max(matched.values())
        name = least_loaded(candidate for candidate in candidates if matched[candidate.name] == most).name
        return RoutingChoice(name, "largest share" if most else "no match", most * self._tokens)

    def scores(self, request: PromptRequest, candidates: Sequence[Candidate]) -> dict[str, float]:
        """Return the share of the prompt's blocks that each engine has."""
        hashes = self.hashes(request)
        return {one.name: self._index.leading(one.name, hashes) / max(len(hashes), 1) for one in candidates}

    def sent(self, request: PromptRequest, engine: str) -> TakeBack:
        """Note that an engine has seen a prompt."""
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
