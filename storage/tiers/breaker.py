"""A circuit breaker: a tier that does not respond is not used until a background thread gets a response.

It opens after one timeout, or after three other failures in a row. So callers wait for a silent server only once, and
not at every request.

A tier that refuses writes, for example because it is full, can still be read. Only its writing pauses.
"""

import logging
import threading
import time
from collections.abc import Callable

from lmc.errors import TierUnusable

log = logging.getLogger(__name__)

FAILURES = 3  # failures in a row that open the breaker
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 10.0  # seconds between two retries
CALM = 60.0  # seconds after which a new opening is logged again, and retried after `FIRST_PAUSE`


class WritePause:
    """Writing to a tier, which pauses after a refusal."""

    def __init__(self) -> None:
        self._until, self._logged = 0.0, float("-inf")

    @property
    def lasts(self) -> bool:
        """Whether writing pauses now."""
        return time.monotonic() < self._until

    def begin(self, error: Exception, seconds: float, said_every: float) -> None:
        """Pause for `seconds`, with a warning at most once in `said_every` seconds."""
        now = time.monotonic()
        if now - self._logged > said_every:
            self._logged = now
            log.warning("lmc: a write was refused (%s); storing there pauses, reading goes on", error)
        self._until = now + seconds


class Breaker:
    """Decides whether the tier or the server `name` may be used."""

    def __init__(self, name: str, greet: Callable[[], None]) -> None:
        """Create a closed breaker.

        `greet` makes the first contact. It raises `OSError` without a response, and `TierUnusable` for a permanent
        refusal.
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
        """Make the first contact. Without a response, open the breaker."""
        try:
            self._greet()
        except OSError as error:
            self.open(error)

    def worked(self) -> None:
        """Reset the count of failures after a response."""
        self._failures = 0

    def failed(self, error: OSError) -> None:
        """Count a missing or useless response, and open the breaker after `FAILURES` in a row or one timeout."""
        self._failures += 1
        # A timeout has cost one caller the whole deadline, and must not cost the next caller as much.
        if self._failures >= FAILURES or isinstance(error, TimeoutError):
            self.open(error)

    def open(self, error: Exception) -> None:
        """Stop all use of the tier, except by the thread that retries."""
        with self._mutex:
            if not self.usable or self._closed.is_set():
                return
            self.usable = False
            now = time.monotonic()
            # A server that greets and then is silent would cost a deadline each time. So the pauses become longer.
            self._pause = FIRST_PAUSE if now - self._opened > CALM else min(2 * self._pause, LONGEST_PAUSE)
            self._opened = now
            logs = now - self._logged > CALM
            thread = threading.Thread(target=self._try_again, args=(logs,), name="lmc-breaker", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # No thread can be started now. The next failure will try to start one.
                self.usable = True
                return
            self._thread = thread
            if logs:
                self._logged = now
                why = str(error).removeprefix(f"{self.name}: ")
                log.warning("lmc: no answer from %s (%s); its chunks are misses until it answers", self.name, why)

    def close(self, seconds: float = 0.0) -> None:
        """Stop all use of the tier for good, and wait for the thread for at most `seconds`."""
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
