"""Promotion: chunks on a slow tier are loaded into memory in the background.

A request computes stored tokens if their tier is slower than that, and each later request would compute them again. So
if a chunk was skipped before, a thread loads it when the engine rests, and the next request finds it in memory. Chunks
that are skipped once are left where they are: they would take the place of others, and may never be requested again.
The load also measures the tier, so that no request needs to wait to find out whether it has become faster.
"""

import logging
import threading
import time
from collections.abc import Mapping, Sequence

from cachetools import LRUCache

from lmc.background import RUNNING_SECONDS, Background
from lmc.errors import StorageError
from lmc.keys import ChunkKey
from lmc.storage.contract import ChunkStore, PinState
from lmc.storage.places import MEMORY

log = logging.getLogger(__name__)

REMEMBERED = 4096  # chunks that were skipped once
# A promotion waits for the engine to rest for this many seconds at most. Its load needs few instructions, and an engine
# that never rests would otherwise compute the same documents each time.
LONGEST_WAIT = 10.0
FIRST_WAIT = RUNNING_SECONDS
POLL_SECONDS = 0.05
ANSWER_SECONDS = 5.0  # timeout for a slow tier to say that it still has the chunks
MAX_SECONDS = 600.0  # timeout for a load, which may hang
SLOTS_SHARE = 4  # A promotion holds at most a fourth of the slots that are free.


class Promotion:
    """Loads of one engine, one batch at a time. A batch ends early if a request loads something."""

    def __init__(self, store: ChunkStore, background: Background) -> None:
        self._store, self._background = store, background
        self._skipped: LRUCache[ChunkKey, None] = LRUCache(REMEMBERED)
        self._ended, self._thread = threading.Event(), threading.Thread()
        self._stopped = False

    def begin(self, keys: Sequence[ChunkKey]) -> None:
        """Begin to load the chunks that were skipped before, unless a promotion is under way. A thread loads them."""
        again = [key for key in dict.fromkeys(keys) if key in self._skipped]
        self._skipped.update(dict.fromkeys(keys))
        if again and not self._thread.is_alive() and not self._stopped:
            self._ended = threading.Event()
            given = again, self._ended
            self._thread = threading.Thread(target=self._run, args=given, name="lmc-promotion", daemon=True)
            self._thread.start()

    def cancel(self) -> None:
        """End the promotion that is under way: its load would delay others, or its chunks are removed."""
        self._ended.set()

    def stop(self) -> None:
        """End the promotion that is under way, and begin nothing more."""
        self._stopped = True
        self.cancel()
        self.wait()

    def wait(self) -> None:
        """Wait until nothing is being loaded."""
        if self._thread.is_alive():
            self._thread.join()

    def _run(self, keys: Sequence[ChunkKey], ended: threading.Event) -> None:
        try:
            if ended.wait(FIRST_WAIT):  # The engine has not begun to compute the request that skipped the chunks.
                return
            due = time.monotonic() + LONGEST_WAIT
            while self._background.is_running and time.monotonic() < due:
                if ended.wait(POLL_SECONDS):
                    return
            due = time.monotonic() + ANSWER_SECONDS
            places = self._store.lookup(keys)
            while self._store.unanswered(keys) and time.monotonic() < due:
                if ended.wait(POLL_SECONDS):
                    return
                places = self._store.lookup(keys)
            on_tiers = {key: place for key, place in zip(keys, places, strict=True) if place and place not in MEMORY}
            self._load(on_tiers, ended)
        except StorageError as error:
            log.debug("lmc: chunks on a slow tier were not loaded: %s", error)
        except Exception:
            log.exception("lmc: loading chunks from a slow tier failed unexpectedly")

    def _load(self, places: Mapping[ChunkKey, str], ended: threading.Event) -> None:
        store, due = self._store, time.monotonic() + MAX_SECONDS
        room = max(0, store.slots - store.held()) // SLOTS_SHARE
        keys = list(places)[:room]
        if ended.is_set():
            return
        pins = [pin for pin in store.pin(keys, [places[key] for key in keys]) if pin is not None]
        try:
            while any(store.state(pin) is PinState.COMING for pin in pins) and time.monotonic() < due:
                if ended.wait(POLL_SECONDS):
                    return
            store.cost.tried({places[pin.key] for pin in pins if store.state(pin) is PinState.READY})
        finally:
            store.release(pins, wait=False)
