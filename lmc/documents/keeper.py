"""The keeper: pins and time limits of documents.

Pins and time limits are recorded in a file in the disk tier's directory, one JSON line per change, and survive a
restart. A thread removes expired documents. Once a minute it also restores pinned documents to tiers that lost them,
and checks the integrity of the store if `LMC_CHECK_INTEGRITY` is set.
"""

import json
import logging
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from lmc.config.sources import checks_integrity
from lmc.documents import file as documents_file
from lmc.documents.known import REMOVED_BY_USER, KnownDocument, KnownDocuments, unpack_tokens
from lmc.errors import InputError
from lmc.keys import ChunkKey
from lmc.storage.store import Store

log = logging.getLogger(__name__)

EXPIRY_SECONDS = 1.0  # interval between two checks for expired documents
RESTORE_SECONDS = 60.0  # interval between two checks for pinned documents that a tier has lost, and of integrity
MAX_LOGGED_FAULTS = 10
TIDYING_RESTS = 10  # seconds of rest for each second in which stale lines are removed from the file
RESTORED_CHUNKS = 8  # chunks per request to a tier


class DocumentKeeper(Protocol):
    """Pins and time limits of documents, kept in this process or by a cache server. Any thread may call any method."""

    moving: threading.RLock  # while a thread holds it, no other one removes, pins or relearns documents

    @property
    def pinned_chunks(self) -> int:
        """Number of pinned chunks."""

    def pin(self, documents: Sequence[KnownDocument]) -> None:
        """Protect documents from eviction. Raises `InputError` if the pin quota is exceeded."""

    def unpin(self, documents: Sequence[KnownDocument]) -> None:
        """Allow the eviction of documents again."""

    def expire(self, documents: Sequence[KnownDocument], seconds: float | None) -> None:
        """Set documents to expire in `seconds`, pinned or not. None removes the time limit."""

    def remove(self, documents: Sequence[KnownDocument]) -> None:
        """Remove documents from memory, from all tiers, and from the queue of documents to learn."""

    def renamed(self, documents: Sequence[KnownDocument]) -> None:
        """Record the new names of those documents that are pinned or have a time limit."""

    def refresh(self, documents: Sequence[KnownDocument]) -> None:
        """Update the pins and time limits of these documents from where they are kept."""

    def begin_anew(self) -> None:
        """Forget all pins and time limits of this process: no later process finds the keys of its documents."""

    def close(self) -> None:
        """Stop the keeper's background work."""


class PinnedShare:
    """The used share of the pin quota. Several keepers may share it."""

    def __init__(self) -> None:
        self._taken, self._mutex = 0.0, threading.Lock()

    def take(self, part: float) -> float:
        """Use a part of the quota, from 0 to 1, if it is free. Returns the used share, above 1 if it is not free."""
        with self._mutex:
            used = self._taken + part
            if used <= 1:
                self._taken = used
            return used

    def give(self, part: float) -> None:
        """Free a part of the quota."""
        with self._mutex:
            self._taken -= part


class Keeper(DocumentKeeper):
    """The pins and time limits of the documents of a store in this process."""

    def __init__(
        self,
        store: Store,
        known: KnownDocuments,
        path: Path | None,
        *,
        keys_of: Callable[[bytes, Sequence[int], Sequence[ChunkKey]], Sequence[ChunkKey]],
        learn: Callable[[KnownDocument], object],
        unqueue: Callable[[KnownDocument], object],
        size: Callable[[KnownDocument], float],
        share: PinnedShare | None = None,
    ) -> None:
        """Create a keeper. Without a `path`, pins and time limits end with the process.

        `keys_of` returns a document's keys, given its namespace, its tokens and the keys recorded in the file. `learn`
        queues a document to be computed again, `unqueue` removes it from that queue, and `size` returns the part of the
        pin quota that a document takes.
        """
        self._share = share or PinnedShare()
        self._store, self._known, self._path = store, known, path
        self._keys_of, self._learn, self._unqueue, self._size = keys_of, learn, unqueue, size
        self._kept: dict[str, KnownDocument] = {}  # id -> document that is pinned or has a time limit
        self._pins: Counter[ChunkKey] = Counter()  # counts documents, because those with the same prefix share chunks
        self._foreign: dict[str, str] = {}  # id -> line about a document of other settings, which may be used again
        self._torn = False  # whether the file may end with half a line
        self._stale = False  # whether the file has lines about documents without a pin and a time limit
        self._next_tidying = 0.0  # time from which these lines may be removed again
        self._mutex = threading.Lock()  # guards the fields above; held only for a moment
        # Prevents that a document is pinned or learned again while it is removed. Acquired before the other locks.
        self.moving = threading.RLock()
        self._file = threading.Lock()  # guards the file, which must agree with `_kept`; acquired before the mutex
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._checks_integrity = checks_integrity()
        self._start()

    @property
    def pinned_chunks(self) -> int:
        """Number of pinned chunks."""
        return len(self._pins)

    def load(self) -> None:
        """Read the file of earlier processes. Pins that exceed the quota are given up."""
        try:
            lines = self._path.read_text(encoding="utf-8", errors="replace").splitlines() if self._path else []
        except FileNotFoundError:
            return
        except OSError as error:
            log.warning("cannot read the pins in %s (%s): started without pins", self._path, error.strerror)
            return
        entries: dict[str, dict[str, Any]] = {}
        for entry in filter(None, map(documents_file.parsed, lines)):
            entries[entry["id"]] = entries.get(entry["id"], {}) | entry
        given_up = sum(not self._take_over(entry) for entry in entries.values())
        if given_up:
            log.warning("unpinned %d documents: they exceed the pin quota (document_share)", given_up)
        if len(lines) != len(self._kept) + len(self._foreign):
            self._rewrite()
        self._start()

    def pin(self, documents: Sequence[KnownDocument]) -> None:
        """Protect documents from eviction. Raises `InputError` if the pin quota is exceeded."""
        with self.moving:
            with self._mutex:
                new = [document for document in documents if not document.pinned and not document.removed]
                share = self._share.take(sum(map(self._size, new)))
                if new and share > 1:
                    raise InputError(
                        f"pin quota exceeded: pinned documents would take {share:.0%} of the quota, which is the share "
                        "document_share of the disk or, without a disk, of memory. Unpin documents, or raise "
                        "document_share, max_local_disk_size or max_local_cpu_size"
                    )
                for document in new:
                    self._pin(document)
            for document in new:
                self._store.protect(document.keys, pinned=True)
            self._note(new)

    def unpin(self, documents: Sequence[KnownDocument]) -> None:
        """Allow the eviction of documents again."""
        with self.moving:
            self._unpin(documents)
            self._note(documents)

    def expire(self, documents: Sequence[KnownDocument], seconds: float | None) -> None:
        """Set documents to expire in `seconds`, pinned or not. None removes the time limit."""
        with self._mutex:
            for document in documents:
                document.expires = time.time() + seconds if seconds is not None else 0.0
        self._note(documents)

    def remove(self, documents: Sequence[KnownDocument]) -> None:
        """Remove documents from memory, from all tiers, and from the queue of documents to learn."""
        self._remove(documents, REMOVED_BY_USER)

    def _remove(self, documents: Sequence[KnownDocument], reason: str) -> None:
        with self.moving:
            self._unpin(documents)
            self._known.remove(documents, reason)
            for document in documents:
                self._unqueue(document)
                document.expires = 0.0
            # Versions of a text begin with the same chunks.
            for key in self._known.unused(key for document in documents for key in document.keys):
                self._store.forget(key)
            self._note(documents)
        self._tidy_if_due()

    def remove_expired(self) -> None:
        """Remove the expired documents."""
        now = time.time()
        expired = [document for document in self._all() if 0 < document.expires <= now]
        if expired:
            self._remove(expired, "its time limit expired")
            log.info("removed %d expired documents", len(expired))

    def restore(self) -> None:
        """Restore pinned documents to tiers that have lost them. Queue those in no tier to be computed again."""
        owners = {key: document for document in self._all() if document.pinned for key in document.keys}
        keys = list(owners)
        for first in range(0, len(keys), RESTORED_CHUNKS):
            if self._ended.is_set():
                return
            batch = [key for key in keys[first : first + RESTORED_CHUNKS] if owners[key].pinned]
            missing, timed_out = list[ChunkKey](), False
            try:  # Without a lock: a tier may take long.
                missing = self._store.spread(batch)
            except TimeoutError:
                timed_out = True
            with self.moving:
                removed = [key for key in batch if owners[key].removed]  # `spread` may have written them again.
                for key in self._known.unused(removed) if removed else ():
                    self._store.forget(key, wait=False)
                for document in {owners[key].id: owners[key] for key in missing}.values():
                    if document.pinned:
                        self._learn(document)
            if timed_out:
                log.warning("a tier timed out: pinned documents will be restored when it responds")
                return

    def check_integrity(self) -> None:
        """Check the bookkeeping of the store, and log its faults, if the environment requests this."""
        if self._checks_integrity and (faults := self._store.check_integrity()):
            log.error(
                "the store's bookkeeping has %d faults; restart the process and report them:\n%s",
                len(faults),
                "\n".join(faults[:MAX_LOGGED_FAULTS]),
            )

    def renamed(self, documents: Sequence[KnownDocument]) -> None:
        """Record the new names of those documents that are pinned or have a time limit."""
        self._note(documents)

    def refresh(self, documents: Sequence[KnownDocument]) -> None:
        """Do nothing: only this keeper changes the documents of this process."""

    def begin_anew(self) -> None:
        """Forget all pins and time limits of this process: no later process finds the keys of its documents."""
        with self.moving, self._mutex:
            self._share.give(sum(self._size(document) for document in self._kept.values() if document.pinned))
            self._kept.clear()
            self._pins.clear()
            self._path = None

    def close(self) -> None:
        """Stop the keeper's background work, and remove what is stale from the file."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        self._tidy()

    # -- inside ------------------------------------------------------------------------------------------------------

    def _all(self) -> list[KnownDocument]:
        with self._mutex:
            return list(self._kept.values())

    def _pin(self, document: KnownDocument) -> None:
        document.pinned = True
        self._pins.update(document.keys)

    def _unpin(self, documents: Iterable[KnownDocument]) -> None:
        with self._mutex:
            pinned = [document for document in documents if document.pinned]
            for document in pinned:
                document.pinned = False
                self._pins.subtract(document.keys)
                self._share.give(self._size(document))
            free = [key for document in pinned for key in document.keys if not self._pins[key]]
            for key in free:
                self._pins.pop(key, None)
        if free:
            self._store.protect(free, pinned=False)

    def _take_over(self, entry: dict[str, Any]) -> bool:
        """Restore a document's pin and time limit from the file. Returns False if its pin exceeds the quota."""
        pinned, expires = entry.get("pinned") is True, entry.get("expires")
        if not pinned and not expires:
            return True
        try:
            tokens, namespace = unpack_tokens(entry["tokens"]).tolist(), bytes.fromhex(entry["namespace"])
            keys = self._keys_of(namespace, tokens, documents_file.keys_of(entry.get("keys", "")))
            expires = float(expires or 0.0)
            if keys[-1].hex() != entry["id"]:  # An earlier process used another chunk_size.
                self._foreign[entry["id"]] = json.dumps(entry) + "\n"
                return True
        except (ValueError, TypeError, KeyError, IndexError):  # lmc did not write this line.
            return True
        model, tenant = str(entry.get("model", "")), str(entry.get("tenant", ""))
        document = self._known.note(namespace, tokens, keys, model=model, tenant=tenant)
        if name := str(entry.get("name", "")):
            self._known.rename(document, name)
        document.expires = expires
        fits = not pinned or self._share.take(self._size(document)) <= 1
        if pinned and fits:
            self._pin(document)
            self._store.protect(document.keys, pinned=True)
        if document.kept:
            self._kept[document.id] = document
        return fits

    def _note(self, documents: Sequence[KnownDocument]) -> None:
        """Append a line for each document that has, or had until now, a pin or a time limit."""
        with self._file:
            with self._mutex:
                changed = [document for document in documents if document.kept or document.id in self._kept]
                new = {document.id for document in changed} - self._kept.keys()
                for document in changed:
                    if document.kept:
                        self._kept[document.id] = document
                    else:
                        self._kept.pop(document.id, None)
                        self._stale = True
            if changed:
                self._write([documents_file.line_about(document, whole=document.id in new) for document in changed])
        if self._path is None and new:
            log.warning("pins and time limits will end with this process: set local_disk to keep them")
        self._start()

    def _rewrite(self) -> None:
        """Rewrite the file with one line per document."""
        with self._file:
            self._write()

    def _tidy_if_due(self) -> None:
        """Remove what is stale from the file, unless this has taken long a moment ago: the thread does it later."""
        if self._stale and time.monotonic() >= self._next_tidying:
            self._tidy()

    def _tidy(self) -> None:
        """Remove the lines about documents without a pin and a time limit, so that their tokens leave the file."""
        began = time.monotonic()
        with self._file:
            if not self._stale or self._path is None:
                return
            self._stale = False
            if self._torn:
                self._write()
                return
            with self._mutex:
                ids = {*self._kept, *self._foreign}
            try:
                documents_file.keep_lines(self._path, ids)
            except OSError as error:
                self._stale = True
                log.warning("cannot remove documents from %s: %s", self._path, error.strerror)
        now = time.monotonic()
        self._next_tidying = now + TIDYING_RESTS * (now - began)

    def _write(self, lines: Sequence[str] | None = None) -> None:
        """Append `lines`. Without them, or if the file ends with half a line, rewrite the whole file.

        A line appended to half a line could not be read.
        """
        if self._path is None:
            return
        try:
            if lines is None or self._torn:
                everything = [documents_file.line_about(document, whole=True) for document in self._all()]
                documents_file.replace(self._path, [*everything, *self._foreign.values()])
                self._torn = False
            else:
                documents_file.append(self._path, lines)
        except OSError as error:
            self._torn |= lines is not None
            message = "cannot write the pins to %s (%s): they will end with this process"
            log.warning(message, self._path, error.strerror)

    def _start(self) -> None:
        with self._mutex:
            if self._thread is None and (self._kept or self._checks_integrity) and not self._ended.is_set():
                arguments = weakref.ref(self), self._ended
                self._thread = threading.Thread(target=_check_documents, args=arguments, name="lmc-keeper", daemon=True)
                self._thread.start()


def _check_documents(reference: "weakref.ref[Keeper]", ended: threading.Event) -> None:
    """Remove and restore documents until the keeper is closed or garbage-collected."""
    since = 0.0
    while not ended.wait(EXPIRY_SECONDS):
        keeper = reference()
        if keeper is None:
            return
        try:
            keeper.remove_expired()
            keeper._tidy_if_due()
            since += EXPIRY_SECONDS
            if since >= RESTORE_SECONDS:
                since = 0.0
                keeper.check_integrity()
                keeper.restore()
        except Exception:
            log.exception("lmc: the check of pinned documents failed unexpectedly and will be retried")
        del keeper
