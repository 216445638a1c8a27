"""A circuit breaker: something that does not answer is left alone, and tried again by a thread of its own until it does.

One timeout, or three other failures in a row, and nobody asks any more; so whoever needs an answer waits for it once, and not again.
"""

import logging
import threading
import time
from collections.abc import Callable

from lmc.errors import TierUnusable

log = logging.getLogger(__name__)

FAILURES = 3  # in a row
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 10.0  # seconds between two trials
CALM = 60.0  # seconds without trouble after which it is said, and tried again, as if for the first time


class Breaker:
    """Whether `name` is worth asking."""

    def __init__(self, name: str, meet: Callable[[], None]) -> None:
        """`meet` says hello: it raises `OSError` if there is no answer, and `TierUnusable` for what waiting does not mend."""
        self.name, self.usable = name, True
        self._meet = meet
        self._failures = 0
        self._pause = FIRST_PAUSE
        self._opened = self._said_at = float("-inf")
        self._mutex = threading.Lock()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Meet for the first time; without an answer, go on without it for now."""
        try:
            self._meet()
        except OSError as error:
            self.open(error)

    def worked(self) -> None:
        """An answer has come."""
        self._failures = 0

    def failed(self, error: OSError) -> None:
        """No answer, or none that is of use."""
        self._failures += 1
        # A timeout has cost somebody the whole deadline: once is enough.
        if self._failures >= FAILURES or isinstance(error, TimeoutError):
            self.open(error)

    def open(self, error: Exception) -> None:
        """From now on nobody asks, but for the thread that tries."""
        with self._mutex:
            if not self.usable or self._closed.is_set():
                return
            self.usable = False
            now = time.monotonic()
            # One that greets and then is silent would cost the deadline again and again: it is left alone for longer each time.
            self._pause = FIRST_PAUSE if now - self._opened > CALM else min(2 * self._pause, LONGEST_PAUSE)
            self._opened = now
            says = now - self._said_at > CALM
            self._said_at = now if says else self._said_at
            thread = threading.Thread(target=self._try_again, args=(says,), name="lmc-breaker", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # no thread is to be had now: whoever fails next may have more luck
                self.usable = True
                return
            self._thread = thread
        if says:
            log.warning("lmc: no answer from %s (%s); its chunks are misses until it answers", self.name, error)

    def stop(self) -> None:
        """Never again."""
        self._closed.set()
        self.usable = False

    def close(self, seconds: float) -> None:
        """Stop, and wait for the thread, but no longer than `seconds`."""
        self.stop()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(seconds)

    def _try_again(self, says: bool) -> None:
        pause, said = self._pause, ""
        while not self._closed.wait(pause):
            try:
                self._meet()
            except OSError:
                pause = min(2 * pause, LONGEST_PAUSE)
            except TierUnusable as error:
                if str(error) != said:
                    said = str(error)
                    log.error("lmc: %s; trying again", said)
                pause = LONGEST_PAUSE
            else:
                self._failures = 0
                self.usable = not self._closed.is_set()
                if says:
                    log.warning("lmc: %s answers again", self.name)
                return
