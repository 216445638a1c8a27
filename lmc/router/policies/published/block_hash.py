"""The policy `block_hash`: routes to the engine with the most leading blocks, unless loads are unbalanced."""

import statistics
import time
from collections.abc import Callable, Sequence

from lmc.router.policies.base import Policy, check, check_count
from lmc.router.policies.published.prefix_hash_trie import PrefixTable
from lmc.router.policies.simple import least_loaded
from lmc.router.policy_types import Candidate, PromptRequest, RoutingChoice, TakeBack
from lmc.router.prefix_hashes import CHARACTERS_PER_TOKEN, byte_blocks, chained, encoded


def match_percent(matched: int, blocks: int) -> int:
    """Return the share of blocks that match as a whole percentage, rounded down."""
    return matched * 100 // blocks if blocks else 0


class BlockHash(Policy):
    """The engine with the highest match among those whose load is not far above the mean.

    Source: the prefix-cache policy of AIBrix with its hash table. If the largest load is more than 8 above the
    smallest, the least loaded engine gets the request. Otherwise it is the engine with the highest percentage of blocks
    whose load is at most the mean plus one standard deviation; of equal ones, the less loaded. Without a match, it is
    the least loaded one. The table has 200,000 blocks, and drops blocks not used for 20 minutes. AIBrix has blocks of 4
    bytes in its code and of 128 in its documentation. The default here is 128, because a table of that many 4-byte
    blocks holds only 800 kB of text.

    Different here: ties are decided by name and not at random, and each scope has hashes of its own.
    """

    def __init__(
        self,
        *,
        block_bytes: int = 128,
        max_blocks: int = 200_000,
        max_imbalance: int = 8,
        deviations: float = 1.0,
        idle_secs: float = 1200.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`max_imbalance` is in requests; `deviations` limits a load, in standard deviations above the mean."""
        check_count("block_bytes", block_bytes)
        check_count("max_blocks", max_blocks)
        check(max_imbalance >= 0, "max_imbalance", max_imbalance, "0 or more")
        check(deviations >= 0, "deviations", deviations, "0 or more")
        check(idle_secs > 0, "idle_secs", idle_secs, "above 0")
        self._block, self._imbalance, self._deviations = block_bytes, max_imbalance, deviations
        self._idle, self._clock = idle_secs, clock
        self._blocks = PrefixTable(max_blocks)

    def choose(self, request: PromptRequest, candidates: Sequence[Candidate]) -> RoutingChoice:
        """Return the engine with the highest match whose load is within the bounds."""
        self._blocks.drop_older(self._clock() - self._idle)
        loads = [candidate.load for candidate in candidates]
        if max(loads) - min(loads) > self._imbalance:
            return RoutingChoice(least_loaded(candidates).name, "loads out of balance")
        hashes = self.hashes(request)
        matched = {candidate.name: self._blocks.leading(hashes, candidate.name) for candidate in candidates}
        bound = statistics.fmean(loads) + self._deviations * statistics.pstdev(loads)
        matching = [candidate for candidate in candidates if matched[candidate.name] and candidate.load <= bound]
        if not matching:
            return RoutingChoice(least_loaded(candidates).name, "no match")
        percent = {candidate.name: match_percent(matched[candidate.name], len(hashes)) for candidate in matching}
        highest = max(percent.values())
        name = least_loaded(candidate for candidate in matching if percent[candidate.name] == highest).name
        # Blocks are bytes. In most prompts, a token has about as many bytes of UTF-8 as characters.
        return RoutingChoice(name, "highest match", matched[name] * self._block / CHARACTERS_PER_TOKEN)

    def scores(self, request: PromptRequest, candidates: Sequence[Candidate]) -> dict[str, float]:
        """Return the percentage of the prompt's blocks that match, for each engine."""
        hashes = self.hashes(request)
        matched = {candidate.name: self._blocks.leading(hashes, candidate.name) for candidate in candidates}
        return {name: float(match_percent(count, len(hashes))) for name, count in matched.items()}

    def sent(self, request: PromptRequest, engine: str) -> TakeBack:
        """Add a prompt to the table for an engine."""
        return self._blocks.add(self.hashes(request), engine, self._clock())

    def forget(self, engine: str) -> None:
        """Remove an engine from the table."""
        self._blocks.forget(engine)

    def hashes(self, request: PromptRequest) -> list[int]:
        """Return the hashes of a prompt's whole blocks."""
        return chained(byte_blocks(encoded(request.text), self._block), request.scope)
