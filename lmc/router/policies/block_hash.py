"""The policy `block_hash`: the engine with the most leading blocks of the prompt, unless loads are out of balance."""

import statistics
import time
from collections.abc import Callable, Sequence

from lmc.router.policies.least_loaded import least_loaded
from lmc.router.policies.options import check, check_count
from lmc.router.policy import Candidate, PromptRequest, RoutingChoice, TakeBack
from lmc.router.prefix_hashes import CHARACTERS_PER_TOKEN, PrefixTable, byte_blocks, chained, encoded


def match_percent(matched: int, blocks: int) -> int:
    """Return the share of blocks that match as a whole percentage, rounded down."""
    return matched * 100 // blocks if blocks else 0


class BlockHash:
    """The engine with the highest match among those whose load is not far above the mean.

    Source: the prefix-cache policy of AIBrix with its hash table. If the largest load is more than 8 above the
    smallest, the least loaded engine gets the request. Otherwise it is the engine with the highest percentage of blocks
    whose load is at most the mean and one standard deviation, the less loaded one of equal ones; without a match, the
    least loaded one. The table has 200,000 blocks, and drops those not used for 20 minutes. AIBrix has blocks of 4
    bytes in its code and of 128 in its documentation; 128 is the default here, as blocks of 4 let a table of that size
    hold 800 kB of text.

    Different here: equal engines are decided by name and not at random, and each scope has hashes of its own.
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
        """`max_imbalance` is in requests, `deviations` is how many standard deviations above the mean a load may be."""
        check_count("block_bytes", block_bytes)
        check_count("max_blocks", max_blocks)
        check(max_imbalance >= 0, "max_imbalance", max_imbalance, "0 or more")
        check(deviations >= 0, "deviations", deviations, "0 or more")
        check(idle_secs > 0, "idle_secs", idle_secs, "above 0")
        self._block, self._imbalance, self._deviations = block_bytes, max_imbalance, deviations
        self._idle, self._clock = idle_secs, clock
        self._blocks = PrefixTable(max_blocks)

    def choose(self, request: PromptRequest, candidates: Sequence[Candidate]) -> RoutingChoice:
        """Return the engine with the highest match within the bounds of load."""
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
        # Blocks are bytes, and a token has about as many bytes of UTF-8 as it has characters in most prompts.
        return RoutingChoice(name, "highest match", matched[name] * self._block / CHARACTERS_PER_TOKEN)

    def scores(self, request: PromptRequest, candidates: Sequence[Candidate]) -> dict[str, float]:
        """Return the percentage of the prompt's blocks that match of each engine."""
        hashes = self.hashes(request)
        matched = {one.name: self._blocks.leading(hashes, one.name) for one in candidates}
        return {name: float(match_percent(count, len(hashes))) for name, count in matched.items()}

    def sent(self, request: PromptRequest, engine: str) -> TakeBack:
        """Note that an engine has seen a prompt."""
        return self._blocks.add(self.hashes(request), engine, self._clock())

    def forget(self, engine: str) -> None:
        """Take an engine out of the table."""
        self._blocks.forget(engine)

    def hashes(self, request: PromptRequest) -> list[int]:
        """Return the hashes of a prompt's whole blocks."""
        return chained(byte_blocks(encoded(request.text), self._block), request.scope)
