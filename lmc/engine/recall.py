"""Recall: an engine reads at its start what earlier processes have stored.

A directory or a cache server may have a million chunks, and reading what they are takes tens of seconds. So a thread
reads, most recently used chunks first, and the engine waits for it for `START_SECONDS` only. Chunks are found by their
keys meanwhile. What is not found yet are documents in prompts that have no separators around them, and parts of chunks.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable

from lmc.background import Background
from lmc.errors import StorageError
from lmc.storage.contract import StoredChunk

log = logging.getLogger(__name__)

START_SECONDS = 0.2
BATCH = 256  # New documents can be found in prompts after each batch of this many chunks.


class Recall:
    """One reading of all stored chunks."""

    def __init__(
        self,
        chunks: Iterable[StoredChunk],
        take: Callable[[StoredChunk], None],
        prepare: Callable[[], None],
        background: Background,
    ) -> None:
        """Begin to read, and wait for `START_SECONDS` or until the end. The thread makes way for the engine's steps.

        Each chunk is given to `take`. After every `BATCH` chunks, `prepare` makes the documents among them findable.
        An error ends the reading, and is logged.
        """
        self._chunks, self._take, self._prepare, self._background = chunks, take, prepare, background
        self.count = 0  # chunks that were read
        self._stopped, self._mutex = False, threading.Lock()  # The lock is held while a chunk is taken.
        self._thread = threading.Thread(target=self._read, name="lmc-recall", daemon=True)
        self._thread.start()
        self._thread.join(START_SECONDS)

    @property
    def ended(self) -> bool:
        """Whether all chunks were read."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Wait until all chunks were read."""
        self._thread.join()

    def stop(self) -> None:
        """End the reading. Nothing is taken any more after this returns; the thread may wait for the store longer."""
        with self._mutex:
            self._stopped = True

    def _read(self) -> None:
        began = time.monotonic()
        try:
            for chunk in self._background.gently(self._chunks):
                with self._mutex:
                    if self._stopped:
                        return
                    self._take(chunk)
                    self.count += 1
                if self.count % BATCH == 0:
                    self._prepare()
            self._prepare()
        except (OSError, StorageError) as error:
            if not self._stopped:
                log.warning("%s; documents after the first %d chunks are found when they are used", error, self.count)
        except Exception:
            log.exception("lmc: reading what is stored failed unexpectedly after %d chunks", self.count)
        if (seconds := time.monotonic() - began) > START_SECONDS:
            log.info("lmc: read what is stored, %d chunks in %.0f s", self.count, seconds)
