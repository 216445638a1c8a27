"""Work beside an engine, in threads of its process, which must not slow its steps down."""

import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")

RUNNING_SECONDS = 1.0  # after a step, within which the next one is expected
WORK_SECONDS, REST_SECONDS = 0.0002, 0.01


class Background:
    """Work that yields to the steps of one engine."""

    def __init__(self) -> None:
        self._stepped = float("-inf")

    def stepped(self) -> None:
        """Note that the engine makes a step now."""
        self._stepped = time.perf_counter()

    def gently(self, items: Iterable[T]) -> Iterator[T]:
        """Yield items; while the engine runs, rest for ten milliseconds after each fifth of one of work on them.

        A thread that computes in Python keeps the interpreter for five milliseconds before another one gets it
        (`sys.getswitchinterval`). A step of an engine asks for it after each operation of torch, and would wait each
        time. While a thread rests, the others run at once.
        """
        since = time.perf_counter()
        for item in items:
            yield item
            now = time.perf_counter()
            if now - since > WORK_SECONDS:
                if now - self._stepped < RUNNING_SECONDS:
                    time.sleep(REST_SECONDS)
                since = time.perf_counter()
