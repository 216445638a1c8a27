"""Background work in threads: work that must not slow down an engine's steps, and methods that are called regularly."""

import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")

RUNNING_SECONDS = 1.0  # an engine counts as running for this long after its last step
WORK_SECONDS = 0.0002  # thread time between two rests
RESTS = 50  # seconds of rest for each second of work
LONGEST_REST = 0.5  # seconds


class Background:
    """Work that yields to the steps of one engine."""

    def __init__(self) -> None:
        self._stepped = float("-inf")

    def stepped(self) -> None:
        """Record the time of an engine step."""
        self._stepped = time.perf_counter()

    @property
    def is_running(self) -> bool:
        """Whether the engine has made a step a moment ago."""
        return time.perf_counter() - self._stepped < RUNNING_SECONDS

    def gently(self, items: Iterable[T]) -> Iterator[T]:
        """Yield items, and rest regularly while the engine runs.

        After each `WORK_SECONDS` of work, the rest takes `RESTS` times as long, and `LONGEST_REST` at most.
        A thread that computes in Python keeps the interpreter for five milliseconds before another thread gets it
        (`sys.getswitchinterval`). An engine step needs the interpreter after each torch operation, and would wait
        each time. While this thread rests, the other threads run at once.
        """
        since = time.thread_time()
        for item in items:
            yield item
            worked = time.thread_time() - since
            if worked > WORK_SECONDS:
                if self.is_running:
                    time.sleep(min(RESTS * worked, LONGEST_REST))
                since = time.thread_time()


def repeat(method: Callable[[], object], seconds: float, ended: threading.Event, name: str) -> threading.Thread:
    """Call a method every `seconds` in a thread, until `ended` is set or the method's object is garbage-collected."""
    thread = threading.Thread(target=_repeat, args=(weakref.WeakMethod(method), seconds, ended), name=name, daemon=True)
    thread.start()
    return thread


def _repeat(reference: "weakref.WeakMethod[Callable[[], object]]", seconds: float, ended: threading.Event) -> None:
    while not ended.wait(seconds):
        method = reference()
        if method is None:
            return
        method()
        del method  # The object must not be kept while this waits.
