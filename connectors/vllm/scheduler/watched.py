"""Watched requests: those that a step may have to do something for.

A request that decodes has nothing to do until its next chunk may be full. To look at a request takes a microsecond,
because its state has left the processor's caches since the last step. A step with hundreds of them would wait for it,
so each of them is looked at only in the step that may fill its chunk.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Iterator

from lmc.connectors.vllm.scheduler.request_state import RequestState


class WatchedRequests:
    """The watched requests of one engine, in the order in which they arrived."""

    def __init__(self) -> None:
        self._states: dict[str, RequestState] = {}
        self._steps = 0  # number of steps until now
        self._due: defaultdict[int, list[RequestState]] = defaultdict(list)  # to be watched again, by their step

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._states.values())

    def add(self, state: RequestState) -> None:
        """Watch a request."""
        self._states[state.id] = state
        state.watched_at = math.inf

    def remove(self, state: RequestState) -> None:
        """Stop watching a request that has ended."""
        self._states.pop(state.id, None)
        state.watched_at = math.inf

    def begin_step(self, scheduled: Collection[str]) -> list[RequestState]:
        """Begin a step, and return the watched requests that it computes."""
        self._steps += 1
        for state in self._due.pop(self._steps, ()):
            if state.watched_at == self._steps:  # Otherwise it has ended, or was preempted and is watched already.
                self.add(state)
        return [state for name, state in self._states.items() if name in scheduled]

    def rest(self, state: RequestState, tokens: float, most: int) -> None:
        """Do not watch a request until it may have computed `tokens` tokens more, with at most `most` in each step."""
        del self._states[state.id]
        steps = tokens / most
        state.watched_at = math.inf
        if steps < math.inf:
            state.watched_at = self._steps + max(1, math.ceil(steps))
            self._due[int(state.watched_at)].append(state)
