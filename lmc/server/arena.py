"""An arena: the chunks of one geometry in a cache server, of all models that have it, and their documents."""

import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path

from lmc.documents.keeper import Keeper, PinnedShare
from lmc.documents.known import KnownDocument, KnownDocuments, parted_label
from lmc.documents.learn_queue import Unlearned
from lmc.keys import ChunkKey, RecordKind, document_keys
from lmc.server.budget import Budget
from lmc.server.journal import Journal
from lmc.server.learning import WaitingDocuments
from lmc.server.quotas import Owners, Quota, Quotas
from lmc.server.sizes import Sizes
from lmc.shapes import GIB
from lmc.storage.change_log import ChangeLog, Chunk
from lmc.storage.fairness import FairShares, Owner
from lmc.storage.ledger import Slot
from lmc.storage.level import Backing
from lmc.storage.memory.slab import Slab
from lmc.storage.store import Store
from lmc.storage.supply import SlotSupply
from lmc.storage.tiers.record import RecordMeta
from lmc.storage.tiers.tier import Tier, Wrapped
from lmc.storage.tiers.tier_guard import TierGuard

AHEAD_BYTES, AHEAD_SHARE = GIB, 8  # memory that an arena takes ahead, and the largest part of the budget for that
NAMESPACES = 1 << 14  # that are remembered
AHEAD_SECONDS = 0.005  # for which chunks are stored before memory for the next ones is looked for
PAUSE_SECONDS = 5.0  # for which an arena uses the slots that it has, when the system has had no memory
CHUNK_SIZES = 64  # in tokens, that are tried for a document

complain = TierGuard().complain  # at most once a minute about the same


class Arena:
    """A store, and the documents that are in it."""

    def __init__(
        self,
        slab: Slab,
        tiers: Sequence[Tier],
        *,
        sizes: Sizes,
        backing: "ArenaBacking",
        everything: ChangeLog,
        document_share: float,
        share: PinnedShare,
        room: int,
        noted: Path | None,
        quotas: Quotas,
        neighbours: "Callable[[], Sequence[Arena]]",
    ) -> None:
        """Changes are passed on to the log of `everything`.

        Pinned documents may take `room` bytes in all arenas that have this `share`, and are `noted` in a file.
        `neighbours` are all arenas, which share the quotas.
        """
        changes, self._fair = _ArenaChanges(everything), FairShares(quotas)
        self.sizes, self._backing, self._quotas = sizes, backing, quotas
        self.store = Store(
            slab, tiers, document_share=document_share, backing=backing, changes=changes, fair=self._fair
        )
        self.known = KnownDocuments()
        self._namespaces: set[bytes] = set()  # of documents that clients of this arena have
        self._neighbours = neighbours
        self._chunk_sizes: dict[bytes, int] = {}  # tokens, by namespace
        self._sizes_of_chunks = {1 << power for power in range(4, 13)}  # tokens, that a namespace may have
        self.waiting = WaitingDocuments()
        self.keeper = Keeper(
            self.store,
            self.known,
            noted,
            keys_of=lambda _, __, keys: keys,
            learn=lambda one: self.waiting.want(one.id, Unlearned.of(one)),
            unqueue=lambda one: self.waiting.discard(one.id),
            size=lambda document: len(document.keys) * sizes.slot_bytes / room if room else float("inf"),
            share=share,
        )

    @property
    def clients(self) -> int:
        """How many connections clients have with this arena."""
        return self._backing.clients

    def cut_into(self, chunk_size: int) -> None:
        """Note that a client cuts documents into chunks of so many tokens."""
        if chunk_size and len(self._sizes_of_chunks) < CHUNK_SIZES:
            self._sizes_of_chunks.add(chunk_size)

    def start(self) -> None:
        """Let what was in memory and on tiers before be found, and pinned."""
        chunks = self._backing.restored()
        self.store.supply.adopt(chunks)
        self._backing.go_ahead(self.store.supply)
        for _, meta in chunks:
            self.note(meta)
        self.keeper.load()
        threading.Thread(target=self._look_around, name="lmc-tiers", daemon=True).start()

    def note(self, meta: RecordMeta) -> None:
        """Note a document by the last one of its chunks, whose label has all of its tokens."""
        if meta.kind is not RecordKind.DOCUMENT or not meta.label:
            return
        with suppress(ValueError, IndexError):
            tokens, name = parted_label(meta.label)
            keys = self._keys(meta, tokens)
            document = self.known.note(meta.namespace, tokens, keys, model=meta.model, tenant=meta.tenant)
            document.name = document.name or name
        self.waiting.discard(meta.key.hex())

    def make_room(self, meta: RecordMeta) -> bool:
        """Evict what a chunk's owner has used longest ago, if a quota asks for that; false if that is not enough."""
        self._evict_beyond(meta.model, meta.tenant, meta.memory)
        return not self._quotas.excess(meta.model, meta.tenant, meta.memory)

    def committed(self, meta: RecordMeta) -> None:
        """Note a chunk that a client has just stored, and evict what exceeds its owner's quotas with it."""
        self.used(meta.namespace)
        self.note(meta)
        self._evict_beyond(meta.model, meta.tenant, 0)

    def used(self, namespace: bytes) -> None:
        """Note that clients of this arena use a namespace."""
        if len(self._namespaces) < NAMESPACES:
            self._namespaces.add(namespace)

    @property
    def ready_bytes(self) -> int:
        """Memory that was taken ahead, and that no chunk has used yet."""
        return self.store.supply.ready * self.sizes.slot_bytes

    def owns(self, document: KnownDocument) -> bool:
        """Whether a document belongs here, and not to another arena whose chunks have as many parts."""
        return document.kept or document.namespace in self._namespaces

    def quotas_changed(self) -> None:
        """Evict what exceeds the quotas of this arena's owners, and share memory by the new weights."""
        self._fair.change()
        for _, model, tenant in self.store.changes.held():
            self._evict_beyond(model, tenant, 0)

    def clear(self, owners: Owners) -> set[ChunkKey]:
        """Remove all chunks of some owners from memory and tiers, with their pins, and return their keys."""
        _, present = self.store.changes.present()
        chunks = chain.from_iterable(present.values())
        keys = {chunk.key for chunk in chunks if owners.cover(chunk.model, chunk.tenant)}
        documents = [one for one in self.known.list() if owners.cover(one.model, one.tenant)]
        self.keeper.remove(documents)  # also those that wait to be computed again
        for wait in (False, True):  # A chunk may have been loaded while it was removed.
            for key in keys:
                self.store.forget(key, wait=wait)
        return keys

    def _evict_beyond(self, model: str, tenant: str, size: int) -> int:
        """Evict chunks of an owner that has so many bytes more than its quotas, and return how many bytes they had."""
        freed = 0
        for quota, over in self._quotas.excess(model, tenant, size):
            left = over
            for arena in (self, *(other for other in self._neighbours() if other is not self)):
                covers = partial(_covers, quota)
                while left > 0 and (evicted := arena.store.evict(covers, left)):
                    left -= evicted
            freed += over - left
        return freed

    def close(self) -> None:
        """Write down what is in memory only."""
        self.keeper.close()
        self._backing.stop()
        self.store.close()
        self._backing.close(self.store.supply.by_last_use())

    def leave(self) -> None:
        """Note that the chunks in memory are gone, and keep nothing of them, when the arena was closed for good."""
        for place, meta in self.store.in_memory():
            self.store.changes.left(place, meta.key)
        self._backing.remove()
        self.keeper.begin_anew()  # Its pins take no room any more.

    def _keys(self, meta: RecordMeta, tokens: Sequence[int]) -> Sequence[ChunkKey]:
        """Return the keys of a document; raise `ValueError` if its last chunk is not the record's.

        The record does not say how many tokens a full chunk has, so the sizes that clients have are tried.
        """
        first = meta.first
        if len(tokens) != first + meta.tokens:
            raise ValueError("another document's label")
        known = self._chunk_sizes.get(meta.namespace, 0)
        sizes = [known, *sorted(self._sizes_of_chunks, reverse=True)] if first else [meta.tokens]
        for size in sizes:
            fits = size and first % size == 0 and size >= meta.tokens
            if fits and (keys := document_keys(meta.namespace, tokens, size))[-1] == meta.key:
                if first and len(self._chunk_sizes) < NAMESPACES:
                    self._chunk_sizes[meta.namespace] = size
                return keys
        raise ValueError("another document's label")

    def _look_around(self) -> None:
        """Let the store know which records its tiers have, and evict those that are beyond their bound."""
        with suppress(OSError, RuntimeError):  # The server ends, and its tiers are closed.
            uses = self.store.last_uses()
            for _, meta in self.store.records():
                self.note(meta)
                document = self.known.get(meta.key.hex())
                if document is not None:
                    document.used = uses.get(meta.key, document.used)
            self.store.trim()


def _covers(quota: Quota, owner: Owner) -> bool:
    return quota.cover(*owner)


class ArenaBacking(Backing):
    """The memory of an arena: a part of the budget, taken ahead of its use, and a journal if it outlives the server."""

    def __init__(
        self, budget: Budget, sizes: Sizes, slab: Slab, journal: Journal | None, unsafe: Collection[Slot]
    ) -> None:
        self._budget, self._sizes, self._slab, self._journal, self.unsafe = budget, sizes, slab, journal, unsafe
        goal = min(AHEAD_BYTES, budget.size // AHEAD_SHARE) // sizes.slot_bytes
        self._ahead, self._wanted, self._stopped = goal, threading.Event(), False
        self._pause = 0.0  # until when no memory is claimed
        self._thread: threading.Thread | None = None

    def restored(self) -> list[tuple[Slot, RecordMeta]]:
        """Return the chunks that are in memory from before this server."""
        chunks = self._journal.restore() if self._journal is not None else []
        self._budget.count(self._sizes, len(chunks))
        return chunks

    @property
    def clients(self) -> int:
        """How many connections clients have."""
        return self._budget.users(self._sizes)

    def go_ahead(self, supply: SlotSupply) -> None:
        """Take memory for some slots before they are needed, in a thread, from the first chunk on."""
        self._thread = threading.Thread(target=self._take_ahead, args=(supply,), name="lmc-ahead", daemon=True)
        self._thread.start()

    def claim(self) -> bool:
        """See `MemoryClaims.claim`. Where the system has just had no memory, nothing is claimed for a while."""
        self._wanted.set()
        return self._claimed(ahead=False)

    def unclaim(self) -> None:
        """See `MemoryClaims.unclaim`."""
        self._budget.count(self._sizes, -1)

    def furnish(self, slots: Sequence[Slot]) -> set[Slot]:
        """See `Backing.furnish`. One thread does it: the system does it for one at a time, whoever asks."""
        try:
            taken = [self._slab.take(slot) for slot in slots]
        except BaseException:
            for slot in slots:
                self._slab.give_back(slot)
            raise
        lacking = {slot for slot, there in zip(slots, taken, strict=True) if not there}
        if lacking:
            self._no_memory()
        return lacking

    def filled(self, slot: Slot, meta: RecordMeta) -> None:
        """See `Backing.filled`."""
        if not self._wanted.is_set():  # To set it takes a lock, and each chunk comes here.
            self._wanted.set()
        if self._journal is not None:
            self._journal.filled(slot, meta)

    def stop(self) -> None:
        """Take no more memory."""
        self._stopped = True
        self._wanted.set()
        if self._thread is not None:
            self._thread.join()

    def close(self, last_used: Iterable[Slot] = ()) -> None:
        """Write down what is in memory, and in which order it was used."""
        if self._journal is not None:
            self._journal.close(last_used)

    def remove(self) -> None:
        """Remove what would be kept for the next server."""
        if self._journal is not None:
            self._journal.remove()

    def _take(self, slot: Slot) -> bool:
        """Take memory for a slot that nobody uses yet; return whether there is some."""
        if not self._claimed(ahead=True):
            return False
        there = self._slab.take(slot)
        if not there:
            self.unclaim()
            self._no_memory()
        return there

    def _claimed(self, *, ahead: bool) -> bool:
        return time.monotonic() >= self._pause and self._budget.take(self._sizes, ahead=ahead)

    def _no_memory(self) -> None:
        self._pause = time.monotonic() + PAUSE_SECONDS
        complain("memory", "the system has no memory for chunks within max_local_cpu_size: lower it")

    def _take_ahead(self, supply: SlotSupply) -> None:
        while not self._stopped:
            self._wanted.wait()
            time.sleep(AHEAD_SECONDS)
            self._wanted.clear()
            while not self._stopped and (slot := supply.prepare(self._ahead)) is not None:
                taken = self._take(slot)
                supply.prepared(slot, ready=taken)
                if not taken:
                    break


class _ArenaChanges(ChangeLog):
    """The changes of one arena, which the server's log gets as well."""

    def __init__(self, everything: ChangeLog) -> None:
        super().__init__()
        self._everything = everything

    def note(self, place: str, key: ChunkKey, chunk: Chunk | None) -> None:
        """See `ChangeLog.note`."""
        super().note(place, key, chunk)
        self._everything.note(place, key, chunk)


class ArenaTier(Wrapped):
    """A tier that all arenas share, as one of them sees it."""

    def __init__(self, inner: Tier, logs: "ChangeLogs", sizes: Sizes) -> None:
        super().__init__(inner)
        self._logs, self._sizes = logs, sizes

    def headers(self) -> Iterator[RecordMeta]:
        """Return the headers of records that fit in this arena."""
        return (meta for meta in self.inner.headers() if self._sizes.fit(meta))

    def report_to(self, changes: ChangeLog) -> None:
        """Report to one log more."""
        self._logs.all.append((self._sizes, changes))

    def close(self) -> None:
        """Do nothing: other arenas may still use the tier."""


class ChangeLogs(ChangeLog):
    """Passes changes on to the logs of the arenas that a chunk fits into."""

    def __init__(self) -> None:
        super().__init__()
        self.all: list[tuple[Sizes, ChangeLog]] = []

    def remove(self, changes: object) -> None:
        """Pass nothing on to this log any more."""
        self.all = [one for one in self.all if one[1] is not changes]

    def appeared(self, place: str, meta: RecordMeta) -> None:
        """See `ChangeLog.appeared`."""
        for sizes, changes in self.all:
            if sizes.fit(meta):
                changes.appeared(place, meta)

    def left(self, place: str, key: ChunkKey) -> None:
        """See `ChangeLog.left`."""
        for _, changes in self.all:
            changes.left(place, key)
