"""The memory of a cache server: one budget, and an arena for each chunk layout, which grows and shrinks.

The slab of an arena reserves addresses for the whole budget, but memory only for the slots in use. When the budget is
spent, an arena that needs a slot evicts one of its own chunks. If it has less than its equal share, a thread takes
slots from the arena that is furthest above its share. This makes room for the next chunks.
"""

import logging
import os
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from lmc.config.settings import Settings
from lmc.documents.keeper import PinnedShare
from lmc.documents.kept import KeptDocuments
from lmc.documents.known import KnownDocument
from lmc.errors import NoMemory, StorageError
from lmc.server.arena import Arena, ArenaBacking, ArenaTier, ChangeLogs
from lmc.server.budget import Budget
from lmc.server.journal import Journal
from lmc.server.lifelines import Lifelines, wait_until_gone
from lmc.server.quotas import Quotas
from lmc.shapes import GIB, MIB
from lmc.storage.change_log import Amount, ChangeLog
from lmc.storage.chunk_layout import ChunkLayout
from lmc.storage.memory.host_memory import memory_available
from lmc.storage.memory.slab import Slab, Slot
from lmc.storage.secret_keys import read_keys
from lmc.storage.store import Store
from lmc.storage.tiers.opening import coded, open_plain_tiers
from lmc.storage.tiers.tier import Tier, is_local

log = logging.getLogger(__name__)

MEMORY_SECONDS = 10.0  # timeout for available memory at the start of a server
MAX_SLOTS = 1 << 22
MAX_ARENAS = 64  # Each arena needs a few threads, and addresses for the whole budget.
STAT_BLOCK_BYTES = 512  # bytes; the unit of `st_blocks`


class Arenas:
    """All arenas of a server, which share the memory and the other tiers."""

    def __init__(
        self,
        settings: Settings,
        lifelines: Lifelines,
        *,
        tiers: Sequence[Tier] | None = None,
        memory: Path | None = None,
        page_locked: bool = False,
        group: int | None = None,
    ) -> None:
        """Open the tiers, and the chunks that an earlier server left in `memory`, a directory on tmpfs.

        The default for `tiers` are those of the settings. With `page_locked`, GPU workers may page-lock memory.
        Therefore the server never gives memory back, and has only one arena. Raises `TierUnusable` or `ConfigError`,
        or `NoMemory` if the available memory is less than the budget.
        """
        self._settings, self.budget = settings, Budget(int(settings.max_local_cpu_size * GIB))
        self._lifelines, self._memory, self._group = lifelines, memory, group
        self.page_locked, self._most = page_locked, 1 if page_locked else MAX_ARENAS
        adopted_bytes = sum(path.stat().st_blocks * STAT_BLOCK_BYTES for path in memory.glob("*.slab")) if memory else 0
        until = time.monotonic() + MEMORY_SECONDS  # Clients of an ended server hold its memory briefly.
        if self.budget.size > (room := _room(memory) + adopted_bytes):
            sizes = room / GIB, self.budget.size / GIB
            log.info("found only %.2f of %.2f GiB of memory; waiting up to %g s for more", *sizes, MEMORY_SECONDS)
        while self.budget.size > room and time.monotonic() < until:
            time.sleep(0.1)
            room = _room(memory) + adopted_bytes
        if self.budget.size > room:
            available = f"only {room / GIB:.2f} GiB of memory are available{f' in {memory}' if memory else ''}"
            raise NoMemory(f"max_local_cpu_size = {settings.max_local_cpu_size:g} GB is too large: {available}")
        self.changes = ChangeLog()  # changes of all arenas
        self.quotas = Quotas(self.changes, settings.local_disk or memory)
        self._pinned = PinnedShare()
        self._tiers = [(tier, ChangeLogs()) for tier in (open_plain_tiers(settings) if tiers is None else tiers)]
        for tier, logs in self._tiers:
            if is_local(tier):
                tier.report_to(logs)
        self._arenas: dict[ChunkLayout, Arena] = {}
        self._lock, self._closed = threading.Condition(threading.Lock()), False
        self._making: set[ChunkLayout] = set()  # layouts whose new arena waits until others are closed for it
        self._closing: set[ChunkLayout] = set()  # layouts whose arena is being closed, outside the lock
        for layout in self._kept():
            self._arenas[layout] = self._made(layout)
        self._mover = threading.Thread(target=self._move, name="lmc-memory", daemon=True)
        self._mover.start()

    def open(self, layout: ChunkLayout) -> Arena:
        """Return the arena for a chunk layout, and count one more client for it.

        Raises `NoMemory` if one chunk is larger than the budget. Raises `StorageError` if clients already use too many
        other chunk layouts, or if the server is shutting down.
        """
        with self._lock:
            self._lock.wait_for(lambda: self._closed or layout not in self._making | self._closing)
            leaving = self._taken_out_for(layout)
            if layout in self._arenas and not leaving:
                self.budget.use(layout, 1)
                return self._arenas[layout]
            self._making.add(layout)
        try:
            with ExitStack() as closing:  # Closing may take long; other clients can attach in the meantime.
                for arena in leaving:
                    closing.callback(self._close, arena)
            with self._lock:
                if self._closed:
                    raise StorageError("the cache server is shutting down")
                if layout not in self._arenas:
                    self._arenas = {**self._arenas, layout: self._made(layout)}
                self.budget.use(layout, 1)
                return self._arenas[layout]
        finally:
            with self._lock:
                self._making.discard(layout)
                self._lock.notify_all()

    def left(self, arena: Arena) -> None:
        """Subtract a client from an arena's count."""
        self.budget.use(arena.layout, -1)

    def _taken_out_for(self, new: ChunkLayout) -> list[Arena]:
        """Remove arenas without clients from the list, if one more would be too many; return them to be closed.

        Raises `StorageError` if too few arenas are without clients, or if the server is shutting down. The caller
        holds the lock.
        """
        if self._closed:
            raise StorageError("the cache server is shutting down")
        others = {*self._arenas, *self._making} - {new}
        unused = [layout for layout in self._arenas if not self.budget.users(layout)]
        unused = [layout for layout in unused if layout != new and layout not in self._making]
        too_many = max(0, len(others) + 1 - self._most)
        if len(unused) < too_many:
            reason = f"clients already use the maximum number of chunk layouts ({self._most})"
            hint = ", or this server without --page-locked" if self.page_locked else ""
            raise StorageError(f"{reason}: start another server{hint}")
        leaving = unused[:too_many]
        self._closing.update(leaving)
        closed = [self._arenas[layout] for layout in leaving]
        self._arenas = {layout: arena for layout, arena in self._arenas.items() if layout not in leaving}
        return closed

    def _close(self, arena: Arena) -> None:
        """Close an arena that was removed from the list, with its memory.

        Chunks that are only in memory are written to the tiers.
        """
        log.info("closed the memory of a chunk layout without clients: there are too many layouts")
        try:
            arena.close()
            arena.leave()
        finally:
            with self._lock:
                self.budget.forget(arena.layout)
                for _, logs in self._tiers:
                    logs.remove(arena.store.changes)
                self._closing.discard(arena.layout)
                self._lock.notify_all()

    def all(self) -> list[Arena]:
        """Return the open arenas."""
        return list(self._arenas.values())  # without the lock, which is held while an earlier server's memory is read

    def document(self, name: str) -> KnownDocument | None:
        """Return the known document with this id, or None."""
        return next((document for arena in self.all() if (document := arena.known.get(name))), None)

    def close(self) -> None:
        """Write all chunks that are only in memory to the tiers, and close the tiers."""
        with self._lock:
            self._closed = True
            self.budget.refused.set()
            self._lock.notify_all()
            self._lock.wait_for(lambda: not self._closing)
            for arena in self._arenas.values():
                arena.close()
            for tier, _ in self._tiers:
                tier.close()
        self._mover.join()

    def _made(self, layout: ChunkLayout) -> Arena:
        settings, slots = self._settings, self.budget.size // layout.slot_bytes
        if slots > MAX_SLOTS:
            chunks = f"chunks of {layout.slot_bytes} bytes"
            raise StorageError(f"{chunks} are too small for a cache server: raise chunk_size")
        if not slots:
            lack = f"a chunk of {layout.slot_bytes / MIB:.3f} MiB does not fit into {self.budget.size / MIB:.3f} MiB"
            raise NoMemory(f"{lack} of memory: raise max_local_cpu_size of the cache server")
        file = self._memory / f"{layout.name}-{slots}.slab" if self._memory else None
        adopted = file is not None and file.exists()
        parts, size = layout.parallelism, layout.part_bytes
        slab = Slab(slots, parts, size, shared=True, sparse=True, page_locked=self.page_locked, file=file)
        if file is not None and self._group is not None:
            os.chown(file, -1, self._group)
            file.chmod(0o660)
        arena_tiers = [ArenaTier(tier, logs, layout) for tier, logs in self._tiers]
        tiers = coded(arena_tiers, settings, layout.item_bytes)
        self.budget.count(layout, 0)
        journal = Journal(file.with_suffix(".chunks"), slab) if file else None
        arena = Arena(
            slab,
            tiers,
            layout=layout,
            backing=ArenaBacking(self.budget, layout, slab, journal, list(map(Slot, range(slots))) if adopted else ()),
            everything=self.changes,
            document_share=settings.document_share,
            max_known_bytes=settings.max_document_index_size * GIB,
            share=self._pinned,
            room=self._room_for_pins(),
            kept=self._kept_documents(layout),
            quotas=self.quotas,
            neighbours=self.all,
        )
        arena.start()
        if journal is not None:
            log.info(
                "found %d chunks of an earlier server in memory",
                arena.store.changes.counts().get("host", Amount()).chunks,
            )
            threading.Thread(target=self._end_quarantine, args=(arena.store,), name="lmc-older", daemon=True).start()
        return arena

    def _room_for_pins(self) -> int:
        """Return the byte limit for pinned documents: a share of the disk, or of memory without a disk tier."""
        settings = self._settings
        room = settings.max_local_disk_size if settings.local_disk else settings.max_local_cpu_size
        return int(settings.document_share * room * GIB)

    def _kept_documents(self, layout: ChunkLayout) -> KeptDocuments | None:
        """Return the rows of an arena's pins; None if nothing outlives the server."""
        place = self._settings.local_disk or self._memory
        return KeptDocuments(place, layout.name, read_keys(self._settings.encryption_key)) if place else None

    def _kept(self) -> list[ChunkLayout]:
        """Return the layouts with memory of an earlier server; remove memory whose size differs from the budget."""
        layouts = []
        for path in sorted(self._memory.glob("*.slab")) if self._memory else ():
            name, _, slots = path.stem.rpartition("-")
            layout = ChunkLayout.named(name)
            if layout is not None and slots == str(self.budget.size // layout.slot_bytes):
                layouts.append(layout)
            else:
                log.warning("removed %s: it was made with another max_local_cpu_size", path)
                path.unlink()
                path.with_suffix(".chunks").unlink(missing_ok=True)
        return layouts

    def _end_quarantine(self, store: Store) -> None:
        """Release a store's quarantined slots for use, once no client of an earlier server can write into them."""
        for path in self._lifelines.older:
            wait_until_gone(path)
        store.end_quarantine()

    def _move(self) -> None:
        """Reclaim memory from arenas above their share while other arenas request it."""
        while not self._closed:  # `close` sets this before it wakes the thread.
            self.budget.refused.wait()
            self.budget.refused.clear()
            immovable: set[ChunkLayout] = set()
            while (owing := self.budget.owing(immovable)) and not self._closed:
                layout, slots = owing
                freed = self._shrunk(layout, slots)
                self.budget.count(layout, -freed)
                if not freed:
                    immovable.add(layout)

    def _shrunk(self, layout: ChunkLayout, slots: int) -> int:
        """Reclaim up to `slots` slots of an arena; return their number, which is 0 if the arena is being closed."""
        arena = self._arenas.get(layout)
        try:
            return arena.store.shrink(slots) if arena is not None else 0
        except Exception:  # Other arenas can still give memory.
            log.exception("reclaiming memory from a chunk layout failed")
            return 0


def _room(memory: Path | None) -> int:
    """Return the available memory in bytes, limited by the free space of the tmpfs.

    A client that writes to a full tmpfs would be killed.
    """
    tmpfs = os.statvfs(memory) if memory else None
    return min(memory_available(), tmpfs.f_bavail * tmpfs.f_frsize) if tmpfs else memory_available()
