"""An arena: the chunks of one layout in a cache server, and their documents."""

import threading
import time
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice

from lmc.documents.keeper import Keeper, PinnedShare
from lmc.documents.kept import KeptDocuments
from lmc.documents.known import KnownDocument, KnownDocuments, parted_label
from lmc.documents.learn_queue import Unlearned
from lmc.documents.names import joined_names, names_in
from lmc.keys import ChunkKey, RecordKind, document_keys
from lmc.server.budget import Budget
from lmc.server.document_changes import DocumentChanges
from lmc.server.journal import Journal
from lmc.server.learning import WaitingDocuments
from lmc.server.quotas import Owners, Quota, Quotas
from lmc.shapes import GIB
from lmc.storage.change_log import ChangeLog, Chunk
from lmc.storage.chunk_layout import ChunkLayout
from lmc.storage.contract import Reservation, StoredChunk
from lmc.storage.eviction import FairShares, Owner
from lmc.storage.memory.slab import Slab, Slot
from lmc.storage.slots import Backing
from lmc.storage.store import Store
from lmc.storage.tiers.record import RecordMeta
from lmc.storage.tiers.tier import Tier, Wrapped, is_local
from lmc.storage.tiers.tier_guard import TierGuard

AHEAD_BYTES, AHEAD_SHARE = GIB, 8  # memory that an arena allocates ahead: at most this, and 1/8 of the budget
MAX_NAMESPACES = 1 << 14  # limit for remembered namespaces
AHEAD_SECONDS = 0.005  # delay between the first stored chunk and the allocation of memory for the next chunks
NO_MEMORY_SECONDS = 5.0  # pause of an arena's allocations after the system had no memory
CLEARED_TOGETHER = 256  # chunks; chunks that are stored meanwhile do not wait for more deletions
MAX_CHUNK_SIZES = 64  # limit for the different chunk sizes (in tokens) that are tried for a document

complain = TierGuard().complain  # logs each kind of problem at most once a minute


class Arena:
    """A store and its documents."""

    def __init__(
        self,
        slab: Slab,
        tiers: Sequence[Tier],
        *,
        layout: ChunkLayout,
        backing: "ArenaBacking",
        everything: ChangeLog,
        document_share: float,
        max_known_bytes: float,
        share: PinnedShare,
        room: int,
        kept: KeptDocuments | None,
        quotas: Quotas,
        neighbours: "Callable[[], Sequence[Arena]]",
    ) -> None:
        """The log `everything` receives all changes of this arena, too.

        Pinned documents may take `room` bytes in all arenas that have this `share`. `kept` has the rows of pins.
        `neighbours` returns all arenas, which share the quotas.
        """
        changes, self._fair = _ArenaChanges(everything), FairShares(quotas)
        self.layout, self._backing, self._quotas = layout, backing, quotas
        self.store = Store(
            slab, tiers, document_share=document_share, backing=backing, changes=changes, fair=self._fair
        )
        self.known = KnownDocuments(max_bytes=max_known_bytes)
        self._namespaces: set[bytes] = set()  # namespaces of documents that clients of this arena use
        self._neighbours = neighbours
        self._chunk_sizes: dict[bytes, int] = {}  # tokens of a full chunk, by namespace
        self._sizes_of_chunks = {1 << power for power in range(4, 13)}  # possible numbers of tokens in a full chunk
        self.waiting, self.changes = WaitingDocuments(), DocumentChanges(self.known)
        self.keeper = Keeper(
            self.store,
            self.known,
            kept,
            keys_of=lambda _, __, keys: keys,
            learn=lambda document: self.waiting.want(document.id, Unlearned.of(document)),
            removed=self._removed,
            size=lambda document: len(document.keys) * layout.slot_bytes / room if room else float("inf"),
            share=share,
        )

    @property
    def clients(self) -> int:
        """Number of connections of clients with this arena."""
        return self._backing.clients

    def cut_into(self, chunk_size: int) -> None:
        """Add a client's chunk size, in tokens, to the sizes that are tried for documents."""
        if chunk_size and len(self._sizes_of_chunks) < MAX_CHUNK_SIZES:
            self._sizes_of_chunks.add(chunk_size)

    def start(self) -> None:
        """Make the chunks of an earlier server available, in memory and on tiers, and restore pins."""
        chunks = self._backing.restored()
        self.store.adopt(chunks)
        self._backing.start(self.store.allocate_ahead)
        for _, meta in chunks:
            self.note(meta)
        self.keeper.load()
        threading.Thread(target=self._look_around, name="lmc-tiers", daemon=True).start()

    def note(self, meta: RecordMeta) -> KnownDocument | None:
        """Register a document from its last chunk, whose label contains all its tokens. Other chunks have none."""
        document = None
        if (labelled := self._labelled(meta)) is not None:
            tokens, keys, name = labelled
            document = self.known.note(meta.namespace, tokens, keys, name=name, model=meta.model, tenant=meta.tenant)
            self.changes.add(document)
        self.waiting.discard(meta.key.hex())
        return document

    def add_name(self, last_key: ChunkKey, name: str) -> None:
        """Add a name that a client has learned a stored document as again, and tell the other clients."""
        document = self.known.get(last_key.hex())
        if document is None or document.removed:
            return
        names = joined_names([*document.names, *names_in(name)])
        if names != document.name:
            self.known.rename(document, names)
            self.keeper.renamed([document])
            self.changes.add(document)

    def make_room(self, meta: RecordMeta) -> bool:
        """Evict the least recently used chunks of a chunk's owner until the new chunk fits into the quotas.

        Returns false if it still exceeds a quota.
        """
        self._evict_beyond(meta.model, meta.tenant, meta.memory)
        return not self._quotas.excess(meta.model, meta.tenant, meta.memory)

    def commit(self, reservation: Reservation) -> bool:
        """Make a chunk that a client has filled visible, and register its document. Returns whether it is visible.

        It is not if it was removed while the client filled it; then its document stays removed. Chunks of its owner
        that exceed the quotas are evicted.
        """
        if not self.store.commit_one(reservation):
            return False
        meta = reservation.meta
        self.used(meta.namespace)
        document = self.note(meta)
        # The document may have been removed after its chunk became visible, and before it was noted.
        if document is not None and self.store.lookup([meta.key], shared=False) == [None]:
            self.keeper.remove([document])
        self._evict_beyond(meta.model, meta.tenant, 0)
        return True

    def used(self, namespace: bytes) -> None:
        """Register a namespace that clients of this arena use."""
        if len(self._namespaces) < MAX_NAMESPACES:
            self._namespaces.add(namespace)

    def owns(self, document: KnownDocument) -> bool:
        """Return whether a document belongs to this arena, not to another arena with as many parts per chunk."""
        return document.kept or document.namespace in self._namespaces

    def quotas_changed(self) -> None:
        """Evict chunks that exceed the quotas of this arena's owners, and share memory by the new weights."""
        self._fair.change()
        for _, model, tenant in self.store.changes.held():
            self._evict_beyond(model, tenant, 0)

    def clear(self, owners: Owners) -> set[ChunkKey]:
        """Remove all chunks of some owners from all tiers, with their pins; return the keys of these chunks."""
        _, chunks = self.store.changes.listing()
        keys = {chunk.key for _, chunk in chunks if owners.cover(chunk.model, chunk.tenant)}
        documents = [document for document in self.known.list() if owners.cover(document.model, document.tenant)]
        self.keeper.remove(documents)  # This includes documents that wait to be learned again.
        remaining = iter(keys)
        while some := list(islice(remaining, CLEARED_TOGETHER)):
            for wait in (False, True):  # A chunk may have been loaded during its removal.
                for key in some:
                    self.store.forget(key, wait=wait)
        return keys

    def records(self) -> Iterator[StoredChunk]:
        """Return what is stored, without the last chunks of removed documents, which are being removed.

        A client that gets a document here, and reads the changes since before, knows whether it has been removed.
        """
        for chunk in self.store.records():
            document = self.known.get(chunk.meta.key.hex()) if chunk.meta.label else None
            if document is None or not document.removed:
                yield chunk

    def _removed(self, document: KnownDocument) -> None:
        """Stop clients from learning or finding a removed document."""
        self.waiting.discard(document.id)
        self.changes.add(document)

    def _evict_beyond(self, model: str, tenant: str, size: int) -> int:
        """Evict chunks until `size` more bytes of an owner fit into its quotas; return the number of evicted bytes.

        Chunks may be evicted from all arenas, from this arena first.
        """
        freed = 0
        for quota, excess in self._quotas.excess(model, tenant, size):
            remaining = excess
            for arena in (self, *(other for other in self._neighbours() if other is not self)):
                covers = partial(_covers, quota)
                while remaining > 0 and (evicted := arena.store.evict(covers, remaining)):
                    remaining -= evicted
            freed += excess - remaining
        return freed

    def close(self) -> None:
        """Write all chunks that are only in memory to the tiers, and write the journal."""
        self.keeper.close()
        self._backing.stop()
        self.store.close()
        self._backing.close(self.store.by_last_use())

    def leave(self) -> None:
        """Report the chunks in memory as removed, and delete their files, after the arena was closed for good."""
        for place, meta in self.store.in_memory():
            self.store.changes.left(place, meta.key)
        self._backing.remove()
        self.keeper.begin_anew()  # Its pins no longer take room of the shared pin quota.

    def _labelled(self, meta: RecordMeta) -> "tuple[array[int], Sequence[ChunkKey], str] | None":
        """Return the tokens, the keys and the name of the document whose last chunk this is; None if it is none."""
        if meta.kind is RecordKind.DOCUMENT and meta.label:
            with suppress(ValueError, IndexError):
                tokens, name = parted_label(meta.label)
                return tokens, self._keys(meta, tokens), name
        return None

    def _keys(self, meta: RecordMeta, tokens: Sequence[int]) -> Sequence[ChunkKey]:
        """Return the keys of a document; raise `ValueError` if its last chunk is not the chunk of the record.

        The record does not contain the number of tokens in a full chunk, so the clients' chunk sizes are tried.
        """
        first, chunk_size = meta.first, self._chunk_sizes.get(meta.namespace, 0)
        sizes = [chunk_size, *sorted(self._sizes_of_chunks, reverse=True)] if first else [meta.tokens]
        for size in sizes if len(tokens) == first + meta.tokens else ():
            fits = size and first % size == 0 and size >= meta.tokens
            if fits and (keys := document_keys(meta.namespace, tokens, size))[-1] == meta.key:
                if first and len(self._chunk_sizes) < MAX_NAMESPACES:
                    self._chunk_sizes[meta.namespace] = size
                return keys
        raise ValueError("the label belongs to another document")

    def _look_around(self) -> None:
        """Read which records the tiers have, register their documents, and evict records beyond a tier's size limit."""
        with suppress(OSError, RuntimeError):  # The server is shutting down, and its tiers are closed.
            for _, meta, used in self.store.records():
                if (labelled := self._labelled(meta)) is not None:
                    tokens, keys, name = labelled
                    self.known.recall(
                        meta.namespace, tokens, keys, name=name, used=used, model=meta.model, tenant=meta.tenant
                    )
            self.store.trim()


def _covers(quota: Quota, owner: Owner) -> bool:
    return quota.cover(*owner)


class ArenaBacking(Backing):
    """The memory of an arena: a part of the budget, allocated ahead, and a journal if it outlives the server."""

    def __init__(
        self, budget: Budget, layout: ChunkLayout, slab: Slab, journal: Journal | None, quarantined: Collection[Slot]
    ) -> None:
        self._budget, self._layout, self._slab, self._journal = budget, layout, slab, journal
        self.quarantined = quarantined
        self._goal = min(AHEAD_BYTES, budget.size // AHEAD_SHARE) // layout.slot_bytes  # empty slots
        self._used, self._stopped = threading.Event(), False
        self._pause = 0.0  # monotonic time until which no memory is claimed
        self._thread: threading.Thread | None = None

    def restored(self) -> list[tuple[Slot, RecordMeta]]:
        """Return the chunks that an earlier server has left in memory."""
        chunks = self._journal.restore() if self._journal is not None else []
        self._budget.count(self._layout, len(chunks))
        return chunks

    @property
    def clients(self) -> int:
        """Number of connections of clients with the arena."""
        return self._budget.users(self._layout)

    def start(self, allocate_ahead: Callable[[int], bool]) -> None:
        """Start the thread that allocates memory for slots before they are needed, from the first chunk on.

        `allocate_ahead` is the method of the store.
        """
        self._thread = threading.Thread(
            target=self._allocate_ahead, args=(allocate_ahead,), name="lmc-ahead", daemon=True
        )
        self._thread.start()

    def claim(self, *, ahead: bool = False) -> bool:
        """See `Backing.claim`. After the system had no memory, claims fail for `NO_MEMORY_SECONDS`."""
        if not ahead:
            self._used.set()
        return time.monotonic() >= self._pause and self._budget.take(self._layout, ahead=ahead)

    def unclaim(self) -> None:
        """See `Backing.unclaim`."""
        self._budget.count(self._layout, -1)

    def allocate(self, slots: Sequence[Slot]) -> set[Slot]:
        """See `Backing.allocate`. One thread is enough: the system allocates the memory for one thread at a time."""
        try:
            allocated = [self._slab.take(slot) for slot in slots]
        except BaseException:
            for slot in slots:
                self._slab.give_back(slot)
            raise
        lacking = {slot for slot, has_memory in zip(slots, allocated, strict=True) if not has_memory}
        if lacking:
            self._pause = time.monotonic() + NO_MEMORY_SECONDS
            complain("memory", "the system ran out of memory below max_local_cpu_size: lower it")
        return lacking

    def filled(self, slot: Slot, meta: RecordMeta) -> None:
        """See `Backing.filled`."""
        if not self._used.is_set():  # `set` takes a lock, and this runs for every chunk.
            self._used.set()
        if self._journal is not None:
            self._journal.filled(slot, meta)

    def stop(self) -> None:
        """Stop the thread that allocates memory ahead."""
        self._stopped = True
        self._used.set()
        if self._thread is not None:
            self._thread.join()

    def close(self, last_used: Iterable[Slot] = ()) -> None:
        """Write the journal: which chunks are in memory, in the order of their last use."""
        if self._journal is not None:
            self._journal.close(last_used)

    def remove(self) -> None:
        """Remove the files that would outlive the server."""
        if self._journal is not None:
            self._journal.remove()

    def _allocate_ahead(self, allocate_ahead: Callable[[int], bool]) -> None:
        while not self._stopped:
            self._used.wait()
            time.sleep(AHEAD_SECONDS)
            self._used.clear()
            while not self._stopped and allocate_ahead(self._goal):
                pass


class _ArenaChanges(ChangeLog):
    """The change log of one arena, which passes each change on to the server's log."""

    def __init__(self, everything: ChangeLog) -> None:
        super().__init__()
        self._everything = everything

    def note(self, place: str, key: ChunkKey, chunk: Chunk | None) -> None:
        """See `ChangeLog.note`."""
        super().note(place, key, chunk)
        self._everything.note(place, key, chunk)


class ArenaTier(Wrapped):
    """One arena's view of a tier that all arenas share."""

    def __init__(self, inner: Tier, logs: "ChangeLogs", layout: ChunkLayout) -> None:
        super().__init__(inner)
        self._logs, self._layout = logs, layout

    def headers(self) -> Iterator[tuple[RecordMeta, float]]:
        """Return the headers of records that fit in this arena, with their last uses."""
        assert is_local(self.inner)
        return (header for header in self.inner.headers() if self._layout.fit(header[0]))

    def report_to(self, changes: ChangeLog) -> None:
        """Report the tier's changes to another log."""
        self._logs.all.append((self._layout, changes))

    def close(self) -> None:
        """Do nothing: other arenas may still use the tier."""


class ChangeLogs(ChangeLog):
    """Passes changes on to the logs of the arenas with the chunk's size."""

    def __init__(self) -> None:
        super().__init__()
        self.all: list[tuple[ChunkLayout, ChangeLog]] = []

    def remove(self, changes: object) -> None:
        """Stop passing changes on to a log."""
        self.all = [entry for entry in self.all if entry[1] is not changes]

    def appeared(self, place: str, meta: RecordMeta) -> None:
        """See `ChangeLog.appeared`."""
        for layout, changes in self.all:
            if layout.fit(meta):
                changes.appeared(place, meta)

    def left(self, place: str, key: ChunkKey) -> None:
        """See `ChangeLog.left`."""
        for _, changes in self.all:
            changes.left(place, key)
