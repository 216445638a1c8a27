"""Promotion: chunks on a slow tier are loaded into memory in the background.

A request computes stored tokens if their tier is slower than that, and each later request would compute them again. So
a thread loads their chunks when the engine rests, and the next request finds them in memory. The load also measures the
tier, so that no request needs to wait to find out whether it has become faster.
"""

import logging
import threading
import time
from collections.abc import Mapping

from lmc.background import Background
from lmc.errors import StorageError
from lmc.keys import ChunkKey
from lmc.storage.contract import ChunkStore, PinState

log = logging.getLogger(__name__)

# A promotion waits for the engine to rest for this many seconds at most. Its load needs few instructions, and an engine
# that never rests would otherwise compute the same documents each time.
LONGEST_WAIT = 10.0
POLL_SECONDS = 0.05
MAX_SECONDS = 600.0  # for a load, which may hang
SLOTS_SHARE = 4  # A promotion holds at most a fourth of the slots that are free.


class Promotion:
    """Loads of one engine, one batch at a time."""

    def __init__(self, store: ChunkStore, background: Background) -> None:
        self._store, self._background = store, background
        self._stopped, self._thread = threading.Event(), threading.Thread()

    def begin(self, places: Mapping[ChunkKey, str]) -> None:
        """Begin to load the chunks in these tiers, unless a promotion is under way. A thread loads them."""
        if places and not self._thread.is_alive() and not self._stopped.is_set():
            self._thread = threading.Thread(target=self._run, args=(places,), name="lmc-promotion", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Give up what is being loaded, and begin nothing more."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def wait(self) -> None:
        """Wait until nothing is being loaded."""
        if self._thread.is_alive():
            self._thread.join()

    def _run(self, places: Mapping[ChunkKey, str]) -> None:
        due = time.monotonic() + LONGEST_WAIT
        while self._background.is_running and time.monotonic() < due:
            if self._stopped.wait(POLL_SECONDS):
                return
        try:
            self._load(places)
        except StorageError as error:
            log.debug("lmc: chunks on a slow tier were not loaded: %s", error)
        except Exception:
            log.exception("lmc: loading chunks from a slow tier failed unexpectedly")

    def _load(self, places: Mapping[ChunkKey, str]) -> None:
        store, due = self._store, time.monotonic() + MAX_SECONDS
        room = max(0, store.slots - store.held()) // SLOTS_SHARE
        keys = list(places)[:room]
        pins = [pin for pin in store.pin(keys, [places[key] for key in keys]) if pin is not None]
        try:
            while any(store.state(pin) is PinState.COMING for pin in pins) and time.monotonic() < due:
                if self._stopped.wait(POLL_SECONDS):
                    return
            store.cost.tried(set(places.values()))
        finally:
            store.release(pins, wait=False)
