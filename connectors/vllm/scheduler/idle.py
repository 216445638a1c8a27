"""Jobs for idle steps: they are computed only in steps in which the engine computes nothing else.

Meanwhile they hold blocks of the engine, so that a job which waits for an idle step for a while is given up.
"""

from collections.abc import Callable

MAX_PAUSE_SECONDS = 5.0  # for which a job holds its blocks while requests run


class IdleJob:
    """A job for idle steps that is under way."""

    def __init__(self, number: int, clock: Callable[[], float]) -> None:
        """`number` is that of `PendingTransfers`."""
        self.number, self.given_up = number, False
        self._clock, self._idle_at = clock, clock()

    def gives_up(self, *, idle: bool, blocked: bool) -> bool:
        """Return whether the job is to be given up in this step: it is in the way, or has waited for too long."""
        if idle:
            self._idle_at = self._clock()
        self.given_up = self.given_up or blocked or self._clock() - self._idle_at > MAX_PAUSE_SECONDS
        return self.given_up
