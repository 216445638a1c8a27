"""Work beside an engine, in threads of its process, which must not slow its steps down."""

import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")

RUNNING_SECONDS = 1.0  # after a step, within which the next one is expected
WORK_SECONDS = 0.0002  # after which a thread rests
RESTS = 50  # seconds of rest for each second of work
LONGEST_REST = 0.5  # seconds


class Background:
    """Work that yields to the steps of one engine."""

    def __init__(self) -> None:
        self._stepped = float("-inf")

    def stepped(self) -> None:
        """Note that the engine makes a step now."""
        self._stepped = time.perf_counter()

    def gently(self, items: Iterable[T]) -> Iterator[T]:
        """Yield items; while the engine runs, rest after each fifth of a millisecond of work, fifty times as long.

        A thread that computes in Python keeps the interpreter for five milliseconds before another one gets it
        (`sys.getswitchinterval`). A step of an engine asks for it after each operation of torch, and would wait each
        time. While a thread rests, the others run at once.
        """
        since = time.thread_time()
        for item in items:
            yield item
            worked = time.thread_time() - since
            if worked > WORK_SECONDS:
                if time.perf_counter() - self._stepped < RUNNING_SECONDS:
                    time.sleep(min(RESTS * worked, LONGEST_REST))
                since = time.thread_time()
