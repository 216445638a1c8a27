"""The policy `precise`: routes to the engine with the longest prefix, according to the engines' KV events."""

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

from lmc.router.kv_index import BlockIndex, Run, chains
from lmc.router.policies.base import Needs, Policy, check, check_count
from lmc.router.policies.simple import least_loaded
from lmc.router.policy_types import Candidate, PromptRequest, RoutingChoice, TakeBack
from lmc.router.prefix_hashes import leading


class Precise(Policy):
    """The engine with the longest run of blocks, weighted by tier; of equal ones, the least loaded.

    Source: the precise prefix cache scorer of llm-d (its KV cache indexer): vLLM's events over ZMQ, blocks on GPUs
    count 1.0 and in CPU memory 0.8. The blocks of a request count for 2 seconds after it was sent, until events can
    have reported them.

    Different here: llm-d adds this score to those of its other scorers; this policy uses it alone. Blocks are found by
    their tokens, so engines need neither equal hash seeds nor equal block sizes. `lmc.router.follow` fills the index.
    """

    def __init__(
        self,
        *,
        tokenize: Callable[[str], Sequence[int]] | None = None,
        index: BlockIndex | None = None,
        expected_secs: float = 2.0,
        max_expected: int = 1 << 18,
        ranks: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`tokenize` returns the engines' tokens of a text, for requests whose tokens are unknown.

        For `expected_secs`, an engine is assumed to have what it was sent, up to `max_expected` blocks. `ranks` is the
        number of data-parallel ranks of each engine, whose publishers are at consecutive ports, as in vLLM.
        """
        check(expected_secs >= 0, "expected_secs", expected_secs, "0 or more")
        check_count("max_expected", max_expected)
        check_count("ranks", ranks)
        self.index = BlockIndex() if index is None else index
        self.needs = Needs(tokens=True, kv_events=True, blocks=self.index, ranks=ranks)
        self._tokenize, self._seconds, self._max_expected, self._clock = tokenize, expected_secs, max_expected, clock
        # The expiry time of each expected block, in the order of time.
        self._expected: OrderedDict[tuple[str, int], float] = OrderedDict()
        self._last: tuple[PromptRequest, Callable[[int], list[int]]] | None = None  # `sent` follows `choose`

    def choose(self, request: PromptRequest, candidates: Sequence[Candidate]) -> RoutingChoice:
        """Return the engine with the best run."""
        runs = self._runs(request, candidates)
        best = max(run.score for run in runs.values())
        name = least_loaded(candidate for candidate in candidates if runs[candidate.name].score == best).name
        return RoutingChoice(name, "longest run" if best else "no match", runs[name].tokens)

    def sent(self, request: PromptRequest, engine: str) -> TakeBack:
        """Expect the prompt's blocks at an engine for a while."""
        chain, now = self._chain(request), self._clock()
        blocks = [(engine, block) for size in self.index.block_sizes(engine) for block in reversed(chain(size))]
        new = [block for block in blocks if block not in self._expected]
        for block in blocks:
            self._expected.pop(block, None)
            self._expected[block] = now + self._seconds
        while self._expected and (
            next(iter(self._expected.values())) <= now or len(self._expected) > self._max_expected
        ):
            self._expected.popitem(last=False)
        self._last = None

        def take_back() -> None:
            for block in new:
                self._expected.pop(block, None)

        return take_back

    def forget(self, engine: str) -> None:
        """Drop what an engine has and is expected to have."""
        self.index.forget(engine)
        for expected in [expected for expected in self._expected if expected[0] == engine]:
            del self._expected[expected]

    def scores(self, request: PromptRequest, candidates: Sequence[Candidate]) -> dict[str, float]:
        """Return the tokens of each engine's run, weighted by tier."""
        return {engine: run.score for engine, run in self._runs(request, candidates).items()}

    def _runs(self, request: PromptRequest, candidates: Sequence[Candidate]) -> dict[str, Run]:
        chain, now = self._chain(request), self._clock()
        return {candidate.name: self._run(candidate.name, chain, now) for candidate in candidates}

    def _run(self, engine: str, chain: Callable[[int], Sequence[int]], now: float) -> Run:
        """Return the blocks of a prompt that an engine has, or is expected to have."""
        runs = [self.index.longest(engine, chain)]
        for size in self.index.block_sizes(engine):
            blocks = leading(chain(size), lambda block: self._expected.get((engine, block), 0.0) > now)
            runs.append(Run(float(blocks * size), blocks * size))
        return max(runs)

    def _chain(self, request: PromptRequest) -> Callable[[int], list[int]]:
        """Return a function from a block size to the prompt's hashes. It is made once for `choose` and `sent`."""
        if self._last is None or self._last[0] != request:
            tokens = request.tokens
            if tokens is None:
                tokens = self._tokenize(request.text) if self._tokenize else ()
            adapter = request.model if self.index.is_adapter(request.model) else ""
            self._last = request, chains(tokens, request.salt, adapter)
        return self._last[1]
