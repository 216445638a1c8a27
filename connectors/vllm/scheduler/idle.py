"""Idle jobs: jobs that are computed only in steps in which the engine computes nothing else.

An idle job runs only after the engine has rested for a moment, because programs often send the next request at once,
and that request would wait for a slice of the job. Between idle steps it waits and keeps its blocks, because most
answers take seconds. It is given up if these blocks are needed, or if it waits too long.
"""

from collections.abc import Callable
from typing import Any

REST_SECONDS = 0.05  # how long the engine must have computed nothing before an idle job begins or continues
MAX_PAUSE_SECONDS = 60.0  # how long a job may hold its blocks while requests run


class IdleJob:
    """A job for idle steps that is under way."""

    def __init__(self, number: int, clock: Callable[[], float], pool: Any, spare: int) -> None:
        """Begin an idle job; `number` is the job number from `PendingTransfers`.

        `pool` is the engine's block pool, of which `spare` blocks stay free while requests run.
        """
        self.number, self.given_up = number, False
        self._clock, self._idle_at = clock, clock()
        self._pool, self._spare = pool, spare

    def gives_up(self, *, idle: bool, blocked: bool) -> bool:
        """Return whether to give up the job for good: it blocks other work, or has waited too long."""
        if idle:
            self._idle_at = self._clock()
        short = not idle and self._pool.get_num_free_blocks() < self._spare
        self.given_up = self.given_up or blocked or short or self._clock() - self._idle_at > MAX_PAUSE_SECONDS
        return self.given_up
