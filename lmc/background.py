"""Work beside an engine, in threads of its process, which must not slow its steps down."""

import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")

WORK_SECONDS, REST_SECONDS = 0.0002, 0.0001


def gently(items: Iterable[T]) -> Iterator[T]:
    """Yield items, and rest for a moment after each fifth of a millisecond of work on them.

    A thread that computes in Python lets others run only every five milliseconds (`sys.getswitchinterval`), and a step
    of an engine waits for that many times, after each operation of torch. A thread that rests lets them run at once.
    """
    since = time.perf_counter()
    for item in items:
        yield item
        if time.perf_counter() - since > WORK_SECONDS:
            time.sleep(REST_SECONDS)
            since = time.perf_counter()
