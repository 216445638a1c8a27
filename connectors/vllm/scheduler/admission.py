"""Admission: which waiting requests do not begin yet, because of what lmc does for others.

vLLM admits waiting requests as long as tokens and blocks are left in a step. Loads and blends do not count there, so
lmc bounds them itself. A wait ends with the loads and blends under way, or at a time limit. A request that waits holds
no chunks.
"""

from collections.abc import Mapping
from typing import Any

from lmc.connectors.vllm.scheduler.claims import Claims
from lmc.connectors.vllm.scheduler.jobs import end_of_pages, is_blend
from lmc.connectors.vllm.scheduler.request_state import RequestState
from lmc.connectors.vllm.start import Setup
from lmc.engine import Plan

STEPS_OF_BLENDS = 2  # The prompts of the blends under way have at most as many tokens as this number of steps.
MAX_BLEND_WAIT_SECONDS = 20.0  # A prompt waits no longer than this for the blends of earlier requests.


class Admission:
    """The loads and blends under way in one engine, and the requests that wait for them."""

    def __init__(self, setup: Setup, claims: Claims, states: Mapping[str, RequestState]) -> None:
        """Begin without loads. `states` are the requests of the engine, by id."""
        self._setup, self._groups, self._claims, self._states = setup, setup.groups, claims, states
        self._blending: dict[str, RequestState] = {}  # requests that workers blend now, with all chunks in memory
        self._blended_tokens: dict[str, int] = {}  # of the prompts of all blends under way, by request
        # Requests with exact loads, by the hash of their first loaded block, until the engine computes them.
        self._exact_loads: dict[bytes, RequestState] = {}
        self._first: set[str] = set()  # requests whose blends go first in this step
        self._waiting_blocks = 0  # blocks for prompts that wait, in this step, for blends of earlier requests
        self._a_blend_waits = False  # In this step, a blend waits because enough others are under way.

    def waits(self, state: RequestState, local: int) -> bool:
        """Return whether a request waits for the loads or blends of others. The engine has `local` of its tokens."""
        return self._awaits_load(state) or self.waits_its_turn(state, local) or self.waits_for_blends(state, local)

    def waits_its_turn(self, state: RequestState, local: int) -> bool:
        """Return whether blends of earlier requests go first; if so, release its chunks and reserve blocks for it.

        If prefill fills a step, blends get a tenth of it. A prompt that fills a tenth of a step or more therefore
        begins after the blends of earlier requests. Workers end the step when these blends are done. Until then, later
        requests leave enough free blocks for the prompt. A prompt that waits holds no chunks.
        """
        if not self._blending and not self._waiting_blocks:
            return False
        first, has_time = set[str](), self.has_time_to_wait(state)
        if state.waiting.is_long and has_time:
            first = {blend.id for blend in self._blending.values() if self._comes_before(blend.request, state.request)}
        blocks = self._groups.kept(state.request.num_tokens - local)
        lacks_blocks = self._waiting_blocks and self._waiting_blocks + blocks > self._groups.pool.get_num_free_blocks()
        if not first and not lacks_blocks:
            return False
        self._first |= first
        self._waiting_blocks += blocks
        self._claims.release(state)
        return True

    def waits_for_blends(self, state: RequestState, local: int) -> bool:
        """Return whether a blend waits because those under way fill the next steps; if so, release its chunks.

        The engine's steps admit prompts up to a limit of tokens, to which loads do not count. Without a limit of its
        own, a burst of blends would take all blocks, and running requests would be preempted. A prompt that waits holds
        no chunks. Blends that the engine asks about after it in this step wait, too, so that it is not overtaken.
        """
        under_way = sum(self._blended_tokens.values())
        if not state.is_blend or not under_way:
            return False
        tokens = state.request.num_prompt_tokens - local
        if not self._a_blend_waits and under_way + tokens <= STEPS_OF_BLENDS * self._setup.batch_tokens:
            return False
        self._a_blend_waits = True
        self._claims.release(state)
        return True

    def waits_for_same_load(self, state: RequestState, plan: Plan) -> bool:
        """Return whether a request waits because another one loads the same; if so, release its chunks.

        Requests that arrive at once with the same prompt, such as samples of it, share blocks in vLLM alone: one of
        them computes the prompt. If each had its own load, each would also compute what follows it. A request that
        waits finds the other's blocks in the engine's cache. It holds no chunks.
        """
        size = self._groups.block_size
        block, last = plan.match.local // size, plan.stop // size - 1
        hashes = state.request.block_hashes
        if plan.approximate or not block <= last < len(hashes) or not self._setup.caches_prefixes:
            return False
        other = self._exact_loads.get(hashes[block])
        if other is None or other is state or other.request.block_hashes[last : last + 1] != hashes[last : last + 1]:
            return False
        state.waiting.awaited = other
        if not self._awaits_load(state):
            return False
        self._claims.release(state)
        return True

    def lacks_blocks(self, state: RequestState, plan: Plan) -> bool:
        """Return whether too few blocks are free for a prompt and for what its blend borrows."""
        if not (self._groups.windowed and is_blend(plan)):
            return False
        need = self._groups.lacking(end_of_pages(plan), plan.stop)
        return need + self._groups.kept(state.request.num_tokens) > int(self._groups.pool.get_num_free_blocks())

    def may_wait(self, state: RequestState) -> bool:
        """Return whether a request can wait, for a limited time, for the blocks of requests that run."""
        has_time = self.has_time_to_wait(state)
        return has_time and any(other.scheduled or other.loading for other in self._states.values())

    def has_time_to_wait(self, state: RequestState, seconds: float = MAX_BLEND_WAIT_SECONDS) -> bool:
        """Return whether a request may wait longer: `seconds` in all. The first call starts its clock."""
        now = self._setup.clock()
        state.waiting.since = now if state.waiting.since is None else state.waiting.since
        return now - state.waiting.since < seconds

    def begin_blend(self, state: RequestState, tokens: int, *, ready: bool) -> None:
        """Record a blend of `tokens` tokens of a prompt. It is `ready` if all chunks are in memory."""
        self._blended_tokens[state.id] = tokens
        if ready:
            self._blending[state.id] = state

    def end_blend(self, request: str) -> None:
        """Record that the blend of a request has ended, if it had one."""
        self._blending.pop(request, None)
        self._blended_tokens.pop(request, None)

    def begin_exact_load(self, state: RequestState, local: int) -> None:
        """Record a load that begins after `local` tokens, so that requests that would load the same wait for it."""
        for block in state.request.block_hashes[local // self._groups.block_size :][:1]:
            self._exact_loads[block] = state
            state.waiting.loads_from = block

    def end_exact_load(self, state: RequestState) -> None:
        """Record that requests need not wait for the load of this one any more."""
        if state.waiting.loads_from is not None and self._exact_loads.get(state.waiting.loads_from) is state:
            del self._exact_loads[state.waiting.loads_from]
        state.waiting.loads_from = None

    @property
    def blends(self) -> bool:
        """Whether workers blend now, with all chunks in memory."""
        return bool(self._blending)

    def end_step(self) -> set[str]:
        """End a step, and return the requests whose blends go first in it."""
        first, self._first, self._waiting_blocks, self._a_blend_waits = self._first, set(), 0, False
        return first

    # -- inside --------------------------------------------------------------------------------------------------------

    def _awaits_load(self, state: RequestState) -> bool:
        """Return whether a request goes on waiting for a load under way. If not, forget this load."""
        other = state.waiting.awaited
        if other is None or other.waiting.loads_from is None or other.has_begun or not self.has_time_to_wait(state):
            state.waiting.awaited = None
        return state.waiting.awaited is not None

    def _comes_before(self, request: Any, other: Any) -> bool:
        """Return whether the engine serves a request before another one that waits as well."""
        if self._setup.by_priority and request.priority != other.priority:
            return bool(request.priority < other.priority)
        return bool(request.arrival_time < other.arrival_time)
