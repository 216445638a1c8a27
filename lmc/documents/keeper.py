"""The keeper: pins and time limits of documents, and names that they got after they were learned.

These are recorded in a database in the disk tier's directory (`kept.py`), and survive a restart. A thread removes
expired documents. Once a minute it also restores pinned documents to tiers that lost them, and checks the integrity of
the store if `LMC_CHECK_INTEGRITY` is set.
"""

import logging
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from lmc.background import repeat
from lmc.config.sources import checks_integrity
from lmc.documents.kept import KeptDocument, KeptDocuments
from lmc.documents.known import REMOVED_BY_USER, KnownDocument, KnownDocuments
from lmc.errors import InputError
from lmc.keys import ChunkKey
from lmc.storage.store import Store

log = logging.getLogger(__name__)

EXPIRY_SECONDS = 1.0  # interval between two checks for expired documents
RESTORE_SECONDS = 60.0  # interval between two checks for pinned documents that a tier has lost, and of integrity
MAX_LOGGED_FAULTS = 10
MAX_REMOVED_CHUNKS = 128  # chunks of the documents that are removed at once
PAUSE_SECONDS = 1e-3  # between two batches of documents that are removed
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

    def renamed(self, documents: Sequence[KnownDocument], learned_as: str = "") -> None:
        """Record the names of documents that have others than before. They may be written later.

        `learned_as` is the name that they got because they were learned again.
        """

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
        rows: KeptDocuments | None,
        *,
        keys_of: Callable[[bytes, Sequence[int], Sequence[ChunkKey]], Sequence[ChunkKey]],
        learn: Callable[[KnownDocument], object],
        removed: Callable[[KnownDocument], object],
        size: Callable[[KnownDocument], float],
        share: PinnedShare | None = None,
    ) -> None:
        """Create a keeper. Without `rows`, pins and time limits end with the process.

        `keys_of` returns a document's keys, given its namespace, its tokens and the keys recorded in its row. `learn`
        queues a document to be computed again. `removed` is called with each removed document, and takes it from that
        queue. `size` returns the part of the pin quota that a document takes.
        """
        self._share = share or PinnedShare()
        self._store, self._known, self._rows = store, known, rows
        self._keys_of, self._learn, self._removed, self._size = keys_of, learn, removed, size
        self._kept: dict[str, KnownDocument] = {}  # id -> document that is pinned or has a time limit
        self._pins: Counter[ChunkKey] = Counter()  # counts documents, because those with the same prefix share chunks
        self._unwritten: dict[str, KnownDocument] = {}  # id -> document whose row could not be written yet
        self._names: dict[str, str] = {}  # id -> names of a document that was renamed, as they are in its row
        self._renamed: dict[str, KnownDocument] = {}  # id -> document whose row the thread will write
        self._mutex = threading.Lock()  # guards the fields above; held only for a moment
        # Prevents that a document is pinned or learned again while it is removed. Acquired before the other locks.
        self.moving = threading.RLock()
        self._writing = (
            threading.Lock()
        )  # held while rows are written, so that they agree with `_kept`; before the mutex
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._unrestored = 0.0  # seconds since pinned documents were restored; only the thread uses it
        self._checks_integrity = checks_integrity()
        self._start()

    @property
    def pinned_chunks(self) -> int:
        """Number of pinned chunks."""
        return len(self._pins)

    def load(self) -> None:
        """Read the rows of earlier processes. Pins that exceed the quota are given up."""
        if self._rows is None:
            return
        given_up, gone = list[KnownDocument](), list[str]()
        try:
            for row in self._rows.read():
                if not (keys := self._keys_in(row)):
                    continue  # An earlier process used another chunk_size.
                if not (row.pinned or row.expires) and None in self._store.lookup(keys, shared=False):
                    gone.append(row.id)  # It has names only, and its chunks were evicted.
                    continue
                document = self._known_from(row, keys)
                if not self._take_over(document, row):
                    given_up.append(document)
            self._rows.remove(gone)
        except (OSError, sqlite3.Error) as error:
            aside = self._rows.set_aside(error)
            renamed = f"; it is renamed to {aside.name}" if aside else ""
            log.warning("cannot read all pins in %s (%s)%s", self._rows.path, error, renamed)
        if given_up:
            log.warning("unpinned %d documents: they exceed the pin quota (document_share)", len(given_up))
            self._write(given_up)
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
        with self.moving:
            documents = [document for document in documents if not document.removed]
            with self._mutex:
                for document in documents:
                    document.expires = time.time() + seconds if seconds is not None else 0.0
            self._note(documents)

    def remove(self, documents: Sequence[KnownDocument]) -> None:
        """Remove documents from memory, from all tiers, and from the queue of documents to learn."""
        for batch in _batches(documents):
            with self.moving:
                self._remove(batch, REMOVED_BY_USER)

    def remove_expired(self) -> None:
        """Remove the expired documents."""
        now, count = time.time(), 0
        for batch in _batches([document for document in self._all() if 0 < document.expires <= now]):
            if self._ended.is_set():
                break
            with self.moving:  # The time limits of some may have been changed since, or all have been forgotten.
                with self._mutex:
                    kept = [document for document in batch if self._kept.get(document.id) is document]
                expired = [document for document in kept if 0 < document.expires <= now]
                self._remove(expired, "its time limit expired")
            count += len(expired)
        if count:
            log.info("removed %d expired documents", count)

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
                # `spread` may have written chunks of removed documents again.
                removed = {owners[key].id: owners[key] for key in batch if owners[key].removed}
                for key in self._known.unused(removed.values()):
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

    def renamed(self, documents: Sequence[KnownDocument], learned_as: str = "") -> None:
        """Record the names of documents that have others than before. The thread writes them within a second."""
        if self._rows is None:
            return
        with self._mutex:
            for document in documents:
                if document.renamed and not document.removed and self._names.get(document.id) != document.name:
                    self._renamed[document.id] = document
                    self._names[document.id] = document.name
        self._start()

    def forget_names(self) -> None:
        """Remove the rows of documents that have names only, and are neither known nor stored any more."""
        with self._mutex:
            named = self._names.keys() - self._kept.keys()
        unknown = [name for name in named if self._known.get(name) is None]
        places = self._store.lookup([ChunkKey(bytes.fromhex(name)) for name in unknown], shared=False)
        gone = [name for name, place in zip(unknown, places, strict=True) if place is None]
        if gone and self._rows is not None:
            with self._writing:
                self._rows.remove(gone)
                with self._mutex:
                    for name in gone:
                        self._names.pop(name, None)

    def refresh(self, documents: Sequence[KnownDocument]) -> None:
        """Do nothing: only this keeper changes the documents of this process."""

    def begin_anew(self) -> None:
        """Forget all pins and time limits of this process: no later process finds the keys of its documents."""
        with self.moving, self._mutex:
            self._share.give(sum(self._size(document) for document in self._kept.values() if document.pinned))
            self._kept.clear()
            self._pins.clear()
            self._names.clear()
            self._renamed.clear()
            self._rows = None

    def close(self) -> None:
        """Stop the keeper's background work."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        self._write_rest()

    # -- inside ------------------------------------------------------------------------------------------------------

    def _remove(self, documents: Sequence[KnownDocument], reason: str) -> None:
        """Remove documents. The caller holds `moving`.

        Their rows are removed first: if the process is killed meanwhile, the next one has no pins without chunks.
        """
        self._unpin(documents)
        for document in documents:
            document.expires, document.renamed = 0.0, False
        self._note(documents)
        remaining = documents
        while remaining:
            self._known.remove(remaining, reason)
            for document in remaining:
                self._removed(document)
            for key in self._known.unused(remaining):  # Versions of a text begin with the same chunks.
                self._store.forget(key)
            # An engine may have learned some of them again before all of their chunks were removed.
            remaining = [document for document in documents if not document.removed]

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

    def _keys_in(self, row: KeptDocument) -> Sequence[ChunkKey]:
        """Return the keys of a row's document; empty if they are not those of this chunk_size."""
        try:
            keys = self._keys_of(row.namespace, row.tokens, row.keys)
        except (ValueError, IndexError):
            return ()
        return keys if keys and keys[-1].hex() == row.id else ()

    def _known_from(self, row: KeptDocument, keys: Sequence[ChunkKey]) -> KnownDocument:
        """Return the known document of a row, with its names."""
        before = self._known.get(row.id)  # The recall of records may have been here first.
        at = before.used if before is not None else None
        document = self._known.note(row.namespace, row.tokens, keys, model=row.model, tenant=row.tenant, at=at)
        if row.name:
            self._known.rename(document, row.name)
            self._names[document.id] = row.name
        return document

    def _take_over(self, document: KnownDocument, row: KeptDocument) -> bool:
        """Restore a document's pin and time limit. Returns False if its pin exceeds the quota."""
        document.expires = row.expires
        fits = not row.pinned or self._share.take(self._size(document)) <= 1
        if row.pinned and fits:
            self._pin(document)
            self._store.protect(document.keys, pinned=True)
        if document.kept:
            self._kept[document.id] = document
        return fits

    def _note(self, documents: Sequence[KnownDocument]) -> None:
        """Write the rows of those documents that have, or had until now, a pin, a time limit or a name in a row."""
        with self._writing:
            with self._mutex:
                changed = [one for one in documents if one.kept or one.id in self._kept or one.id in self._names]
                new = any(document.kept and document.id not in self._kept for document in changed)
                for document in changed:
                    if document.kept:
                        self._kept[document.id] = document
                    else:
                        self._kept.pop(document.id, None)
                    self._renamed.pop(document.id, None)
                    if document.renamed:
                        self._names[document.id] = document.name
                    else:
                        self._names.pop(document.id, None)
            if changed:
                self._write(changed)
        if self._rows is None and new:
            log.warning("pins and time limits will end with this process: set local_disk to keep them")
        self._start()

    def _write(self, documents: Sequence[KnownDocument]) -> None:
        """Write the rows of documents, and those that could not be written before."""
        if (rows := self._rows) is None:
            return
        failed_before = bool(self._unwritten)
        self._unwritten |= {document.id: document for document in documents}
        try:
            rows.write(self._unwritten.values())
            self._unwritten.clear()
        except (OSError, sqlite3.Error) as error:
            if not failed_before:
                log.warning("cannot write the pins to %s (%s): they will end with this process", rows.path, error)

    def _write_rest(self) -> None:
        """Write the rows of renamed documents, and those that could not be written before."""
        with self._writing:
            with self._mutex:
                renamed, self._renamed = list(self._renamed.values()), {}
            if renamed or self._unwritten:
                self._write(renamed)

    def _start(self) -> None:
        with self._mutex:
            needed = self._kept or self._unwritten or self._renamed or self._checks_integrity
            if self._thread is None and needed and not self._ended.is_set():
                self._thread = repeat(self._check, EXPIRY_SECONDS, self._ended, "lmc-keeper")

    def _check(self) -> None:
        """Remove expired documents. Every `RESTORE_SECONDS`, restore pinned ones, forget names, check the integrity."""
        try:
            self.remove_expired()
            self._write_rest()
            self._unrestored += EXPIRY_SECONDS
            if self._unrestored >= RESTORE_SECONDS:
                self._unrestored = 0.0
                self.check_integrity()
                self.forget_names()
                self.restore()
        except Exception:
            log.exception("lmc: expiring or restoring documents failed unexpectedly and will be retried")


def _batches(documents: Sequence[KnownDocument]) -> Iterator[list[KnownDocument]]:
    """Yield documents in batches of up to `MAX_REMOVED_CHUNKS` chunks, or of one document with more.

    The pause between two batches lets other threads acquire `moving`, which a thread that acquires it again at once
    would not.
    """
    batch, chunks = list[KnownDocument](), 0
    for document in documents:
        if batch and chunks + len(document.keys) > MAX_REMOVED_CHUNKS:
            yield batch
            time.sleep(PAUSE_SECONDS)
            batch, chunks = [], 0
        batch.append(document)
        chunks += len(document.keys)
    if batch:
        yield batch
