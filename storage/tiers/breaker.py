"""A circuit breaker: a tier that does not answer is left alone until a thread in the background gets an answer.

It opens after one timeout, or after three other failures in a row. So whoever needs an answer waits for a silent server
once, and not for every question.
"""

import logging
import threading
import time
from collections.abc import Callable

from lmc.errors import TierUnusable

log = logging.getLogger(__name__)

FAILURES = 3  # in a row
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 10.0  # seconds between two trials
CALM = 60.0  # seconds without trouble after which the next trouble is logged again, and tried again soon


class Breaker:
    """Decides whether the tier `name` is asked, or a server of it."""

    def __init__(self, name: str, greet: Callable[[], None]) -> None:
        """`greet` makes a first contact.

        It raises `OSError` if there is no answer, and `TierUnusable` if the answer is a refusal that will not change by
        itself.
        """
        self.name, self.usable = name, True
        self._greet = greet
        self._failures = 0
        self._pause = FIRST_PAUSE
        self._opened = self._logged = float("-inf")
        self._mutex = threading.Lock()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Make the first contact; without an answer, open."""
        try:
            self._greet()
        except OSError as error:
            self.open(error)

    def worked(self) -> None:
        """Note that an answer has come."""
        self._failures = 0

    def failed(self, error: OSError) -> None:
        """Note that there was no answer, or a useless one."""
        self._failures += 1
        # A timeout has cost somebody the whole deadline, and must not cost the next one as much.
        if self._failures >= FAILURES or isinstance(error, TimeoutError):
            self.open(error)

    def open(self, error: Exception) -> None:
        """Let nobody ask from now on, but for the thread that tries."""
        with self._mutex:
            if not self.usable or self._closed.is_set():
                return
            self.usable = False
            now = time.monotonic()
            # A server that greets and then is silent would cost a deadline each time: the pauses become longer.
            self._pause = FIRST_PAUSE if now - self._opened > CALM else min(2 * self._pause, LONGEST_PAUSE)
            self._opened = now
            logs = now - self._logged > CALM
            thread = threading.Thread(target=self._try_again, args=(logs,), name="lmc-breaker", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # No thread can be started now. The next failure tries again.
                self.usable = True
                return
            self._thread = thread
            if logs:
                self._logged = now
                why = str(error).removeprefix(f"{self.name}: ")
                log.warning("lmc: no answer from %s (%s); its chunks are misses until it answers", self.name, why)

    def close(self, seconds: float = 0.0) -> None:
        """Let nobody ask any more, and wait for the thread for at most `seconds`."""
        self._closed.set()
        self.usable = False
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(seconds)

    def _try_again(self, logs: bool) -> None:
        pause, refusal = self._pause, ""
        while not self._closed.wait(pause):
            try:
                self._greet()
            except OSError:
                pause = min(2 * pause, LONGEST_PAUSE)
            except TierUnusable as error:
                if str(error) != refusal:
                    refusal = str(error)
                    log.error("lmc: %s; trying again", refusal)
                pause = LONGEST_PAUSE
            else:
                self._failures = 0
                self.usable = not self._closed.is_set()
                if logs:
                    log.warning("lmc: %s answers again", self.name)
                return
