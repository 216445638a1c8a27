"""Watched requests: those that a step may have to do something for.

A request that decodes has nothing to do until its next chunk may be full. To look at a request takes a microsecond,
because its state has left the processor's caches since the last step. A step with hundreds of them would wait for it,
so each of them is looked at only in the step that may fill its chunk.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping

from lmc.connectors.vllm.scheduler.request_state import RequestState


class WatchedRequests:
    """The watched requests of one engine, in the order in which the engine first asked about them."""

    def __init__(self, most: int) -> None:
        """Watch no request. A request that decodes computes at most `most` tokens in a step."""
        self._most = most
        self._states: dict[str, RequestState] = {}
        self._resting: dict[str, RequestState] = {}
        self._steps = 0  # number of steps until now
        self._due: defaultdict[int, list[str]] = defaultdict(list)  # requests to watch again, by their step

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._states.values())

    def add(self, state: RequestState) -> None:
        """Watch a request."""
        self._resting.pop(state.id, None)
        self._states[state.id] = state

    def remove(self, state: RequestState) -> None:
        """Stop watching a request that has ended."""
        self._resting.pop(state.id, None)
        self._states.pop(state.id, None)

    def begin_step(self, scheduled: Mapping[str, int]) -> list[RequestState]:
        """Begin a step of `scheduled` tokens by request, and return the watched requests that it computes.

        A resting request computes more tokens than `most` if it got further input. Then it has a prompt again.
        """
        self._steps += 1
        due = [self._resting[name] for name in self._due.pop(self._steps, ()) if name in self._resting]
        for state in due:
            if state.watched_at == self._steps:  # Otherwise it was watched in between, and rests again.
                self.add(state)
        if max(scheduled.values(), default=0) > self._most:
            for name in [name for name, tokens in scheduled.items() if tokens > self._most and name in self._resting]:
                state = self._resting[name]
                state.decodes, state.saving.next_at = False, 0
                self.add(state)
        return [state for name, state in self._states.items() if name in scheduled]

    def rest(self, state: RequestState, tokens: float) -> None:
        """Do not watch a request that decodes until it may have computed `tokens` tokens more."""
        del self._states[state.id]
        self._resting[state.id] = state
        state.watched_at = math.inf
        if tokens < math.inf:
            at = self._steps + max(1, math.ceil(tokens / self._most))
            state.watched_at = at
            self._due[at].append(state.id)
