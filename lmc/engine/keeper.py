"""The keeper: what people want for documents. Pinned ones stay, those with a time limit go, and names are remembered.

It is noted in a file beside the disk tier, with a line of JSON for each change, and holds after a restart. A thread
removes documents whose time is over, and once a minute brings pinned documents back to tiers that have lost them.
"""

import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lmc.engine.known_documents import KnownDocument, pack_tokens, unpack_tokens
from lmc.errors import InputError
from lmc.keys import ChunkKey
from lmc.storage.contract import ChunkStore

log = logging.getLogger(__name__)

FILE = "documents.jsonl"  # in the directory of the disk tier
EXPIRY_SECONDS = 1.0  # between two looks for documents whose time is over
RESTORE_SECONDS = 60.0  # between two looks for pinned documents that a tier has lost
AT_ONCE = 32  # chunks that a tier is asked for together; nothing is removed meanwhile


class Keeper:
    """The wishes for the documents of one engine. Any thread may call any method."""

    def __init__(
        self,
        store: ChunkStore,
        path: Path | None,
        *,
        recall: Callable[[bytes, Sequence[int]], KnownDocument],
        learn: Callable[[KnownDocument], object],
        size: Callable[[KnownDocument], float],
    ) -> None:
        """Without a `path` nothing is noted, and the wishes end with the process.

        `recall` returns the document of a namespace with these tokens, `learn` has a document computed again, and
        `size` says which part of the room for pinned documents one takes.
        """
        self._store, self._path, self._recall, self._learn, self._size = store, path, recall, learn, size
        self._wanted: dict[str, KnownDocument] = {}  # those that are pinned, have a time limit or a name
        self._pinned = 0.0  # the part of the room that is taken
        self._mutex = threading.Lock()
        self._moving = threading.Lock()  # so that nothing that is removed is written again; taken before the other
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def load(self) -> None:
        """Read what earlier processes have noted. Pins for which there is no room any more are given up."""
        try:
            lines = self._path.read_text(encoding="utf-8", errors="replace").splitlines() if self._path else []
        except FileNotFoundError:
            return
        except OSError as error:
            log.warning("cannot read %s (%s): no document is pinned", self._path, error.strerror)
            return
        for line in lines:
            with suppress(ValueError, TypeError, KeyError):  # A process that was killed leaves half a line.
                self._take_over(json.loads(line))
        with self._mutex:
            given_up = 0
            for document in list(self._wanted.values()):
                if document.pinned and self._pinned + self._size(document) > 1:
                    document.pinned = False
                    given_up += 1
                elif document.pinned:
                    self._protect(document)
            if given_up:
                log.warning("%d documents are not pinned any more: there is no room (document_share)", given_up)
            if lines:
                self._rewrite()
            self._start()

    def pin(self, documents: Sequence[KnownDocument]) -> None:
        """Let documents not be evicted; raise `InputError` if there is no room for that."""
        with self._mutex:
            new = [document for document in documents if not document.pinned]
            share = self._pinned + sum(map(self._size, new))
            if share > 1:
                raise InputError(
                    f"there is no room to pin them: pinned documents would take {share:.0%} of the room for documents "
                    "(on the disk or, without a disk, in memory). Unpin some, or raise document_share, "
                    "max_local_disk_size or max_local_cpu_size"
                )
            for document in new:
                document.pinned = True
                self._protect(document)
            self._note(new)

    def unpin(self, documents: Sequence[KnownDocument]) -> None:
        """Let documents be evicted again."""
        with self._mutex:
            pinned = [document for document in documents if document.pinned]
            for document in pinned:
                document.pinned = False
                self._pinned -= self._size(document)
            shared = self._pinned_keys() if pinned else ()
            for document in pinned:
                self._store.protect([key for key in document.keys if key not in shared], pinned=False)
            self._note(pinned)

    def expire(self, documents: Sequence[KnownDocument], seconds: float | None) -> None:
        """Remove documents `seconds` from now, pinned or not; never, if it is None."""
        with self._mutex:
            for document in documents:
                document.expires = time.time() + seconds if seconds is not None else 0.0
            self._note(documents)

    def name(self, documents: Sequence[KnownDocument], name: str) -> None:
        """Give documents a name for people. Several may have the same."""
        with self._mutex:
            changed = [document for document in documents if document.name != name]
            for document in changed:
                document.name = name
            self._note(changed)

    def remove(self, documents: Iterable[KnownDocument]) -> None:
        """Remove documents from memory and all tiers."""
        with self._moving:
            gone = list(documents)
            self.unpin(gone)
            with self._mutex:
                shared = self._pinned_keys()  # Documents that begin alike share chunks.
            for document in gone:
                for key in document.keys:
                    if key not in shared:
                        self._store.forget(key)
                document.removed, document.expires, document.name = True, 0.0, ""
        with self._mutex:
            self._note(gone)

    def remove_expired(self) -> None:
        """Remove the documents whose time is over."""
        now = time.time()
        over = [document for document in self._all() if 0 < document.expires <= now]
        if over:
            self.remove(over)
            log.info("%d documents are removed, because their time is over", len(over))

    def restore(self) -> None:
        """Write pinned documents to tiers that have lost them, and have those computed again that are nowhere."""
        owners = {key: document for document in self._all() if document.pinned for key in document.keys}
        keys = list(owners)
        for first in range(0, len(keys), AT_ONCE):
            if self._ended.is_set():
                return
            with self._moving:
                nowhere = self._store.spread([key for key in keys[first : first + AT_ONCE] if owners[key].pinned])
            for document in {owners[key].id: owners[key] for key in nowhere}.values():
                self._learn(document)

    def close(self) -> None:
        """End the thread."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    # -- inside ------------------------------------------------------------------------------------------------------

    def _all(self) -> list[KnownDocument]:
        with self._mutex:
            return list(self._wanted.values())

    def _pinned_keys(self) -> set[ChunkKey]:
        return {key for document in self._wanted.values() if document.pinned for key in document.keys}

    def _protect(self, document: KnownDocument) -> None:
        self._pinned += self._size(document)
        self._store.protect(document.keys, pinned=True)

    def _take_over(self, noted: dict[str, Any]) -> None:
        document = self._wanted.get(noted["id"])
        if document is None and "tokens" in noted:
            document = self._recall(bytes.fromhex(noted["namespace"]), unpack_tokens(noted["tokens"]))
            if document.id != noted["id"]:  # chunk_size has changed, and with it the chunks.
                return
        if document is not None:
            document.name, document.pinned, document.expires = noted["name"], noted["pinned"], noted["expires"]
            self._remember(document)

    def _remember(self, document: KnownDocument) -> None:
        if document.wanted:
            self._wanted[document.id] = document
        else:
            self._wanted.pop(document.id, None)

    def _note(self, documents: Sequence[KnownDocument]) -> None:
        for document in documents:
            self._remember(document)
        self._start()
        self._write("a", documents)

    def _rewrite(self) -> None:
        """Replace the file by one with a line for each document."""
        if self._path is not None:
            self._write("w", list(self._wanted.values()), self._path.with_suffix(".tmp"))

    def _write(self, mode: str, documents: Sequence[KnownDocument], path: Path | None = None) -> None:
        if self._path is None or (mode == "a" and not documents):
            return
        try:
            with (path or self._path).open(mode, encoding="utf-8") as file:
                file.writelines(_line(document) for document in documents)
            if path is not None:
                path.replace(self._path)
        except OSError as error:
            wrong = "cannot write %s (%s): what is pinned, named or limited in time now ends with this process"
            log.warning(wrong, path or self._path, error.strerror)

    def _start(self) -> None:
        if self._thread is None and any(one.pinned or one.expires for one in self._wanted.values()):
            self._thread = threading.Thread(target=self._run, name="lmc-keeper", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        since = 0.0
        while not self._ended.wait(EXPIRY_SECONDS):
            try:
                self.remove_expired()
                since += EXPIRY_SECONDS
                if since >= RESTORE_SECONDS:
                    since = 0.0
                    self.restore()
            except Exception:
                log.exception("lmc: looking after pinned documents failed unexpectedly; it is tried again")


def _line(document: KnownDocument) -> str:
    noted = {"id": document.id, "name": document.name, "pinned": document.pinned, "expires": document.expires}
    if document.wanted:
        noted |= {"namespace": document.namespace.hex(), "tokens": pack_tokens(document.tokens)}
    return json.dumps(noted) + "\n"
