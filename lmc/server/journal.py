"""The journal: which chunk is in which slot of a slab that outlives its server, and the checksums of its parts.

The journal is a file next to the slab's file, on tmpfs. Each msgpack frame contains a slot and the metadata of its
chunk, with checksums. The last frame of a slot is valid; earlier frames are stale. A thread writes the journal, because
checksums take time. It rewrites the file when most frames are stale. The slot's label in the slab shows whether the
slot still contains the chunk; the label of a slot that is being written names no chunk.
"""

import errno
import io
import logging
import os
import queue
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import msgspec

from lmc.small_files import replace_bytes
from lmc.storage.memory.slab import Slab, Slot, tag_of
from lmc.storage.tiers.record import RecordMeta, checksum

log = logging.getLogger(__name__)

VERIFY_THREADS = min(8, os.cpu_count() or 1)  # threads that verify chunks at the start
MAX_GROWTH, MIN_FILE_BYTES = 2, 1 << 16  # The file is rewritten above 2 times the valid frames' size plus 64 KiB.

_encode = msgspec.msgpack.Encoder().encode
_entry: msgspec.msgpack.Decoder[tuple[int, RecordMeta]] = msgspec.msgpack.Decoder(tuple[int, RecordMeta])


class Journal:
    """The journal of one slab."""

    def __init__(self, path: Path, slab: Slab) -> None:
        self._path, self._slab = path, slab
        self._frames: dict[Slot, bytes] = {}  # the last frame of each slot, the most recently written one at the end
        self._last_bytes = 0  # bytes of these frames
        self._filled: queue.SimpleQueue[tuple[Slot, RecordMeta] | None] = queue.SimpleQueue()
        self._size = 0  # bytes of the journal file
        self._complained = False
        self._thread = threading.Thread(target=self._write, name="lmc-journal", daemon=True)

    def restore(self) -> list[tuple[Slot, RecordMeta]]:
        """Return the valid chunks of the slab, the least recently recorded first, and start the writer thread.

        This reads every byte of the chunks and compares checksums.
        """
        entries: dict[Slot, RecordMeta] = {}
        for slot, meta in self._read():
            entries.pop(slot, None)
            entries[slot] = meta
        with ThreadPoolExecutor(VERIFY_THREADS) as pool:
            valid = list(pool.map(self._is_valid, entries, entries.values()))
        chunks = [chunk for chunk, is_valid in zip(entries.items(), valid, strict=True) if is_valid]
        self._frames = {slot: _frame(slot, meta) for slot, meta in chunks}
        self._last_bytes = sum(map(len, self._frames.values()))
        self._write_anew()
        self._thread.start()
        return [(slot, replace(meta, checksums=())) for slot, meta in chunks]

    def filled(self, slot: Slot, meta: RecordMeta) -> None:
        """Queue a filled slot and its chunk's metadata for the writer thread."""
        self._filled.put((slot, meta))

    def close(self, last_used: Iterable[Slot] = ()) -> None:
        """Write all queued entries and end the thread.

        Slots in `last_used` come last in the file, in this order.
        """
        self._filled.put(None)
        self._thread.join()
        for slot in last_used:
            if slot in self._frames:
                self._frames[slot] = self._frames.pop(slot)
        self._write_anew()

    def remove(self) -> None:
        """Remove the journal file and the slab's file."""
        for path in (self._path, self._path.with_suffix(".slab")):
            path.unlink(missing_ok=True)

    def _read(self) -> Iterator[tuple[Slot, RecordMeta]]:
        """Yield the entries of the file, up to a frame that a killed server has left unfinished."""
        content, at = self._path.read_bytes() if self._path.exists() else b"", 0
        while at < len(content):
            stop = at + 4 + int.from_bytes(content[at : at + 4], "little")
            try:
                slot, meta = _entry.decode(content[at + 4 : stop])
            except (msgspec.MsgspecError, ValueError):
                return
            yield Slot(slot), meta
            at = stop

    def _write(self) -> None:
        while (filled := self._filled.get()) is not None:
            slot, meta = filled
            sums = self._sums(slot, meta)
            if self._has(slot, meta):  # Otherwise the chunk was evicted in the meantime, and the sums are invalid.
                before = self._frames.pop(slot, b"")
                frame = self._frames[slot] = _frame(slot, replace(meta, checksums=sums))
                self._last_bytes += len(frame) - len(before)
                if self._size + len(frame) > MIN_FILE_BYTES + MAX_GROWTH * self._last_bytes:
                    self._write_anew()
                else:
                    self._append(frame)

    def _append(self, frame: bytes) -> None:
        try:
            with self._opened(self._path, os.O_APPEND) as file:
                if file.write(frame) < len(frame):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._size += len(frame)
        except OSError as error:
            self._fail(error)

    def _write_anew(self) -> None:
        content = b"".join(self._frames.values())
        try:
            replace_bytes(self._path, content, durable=False)  # The slab is on tmpfs and ends with the host.
            self._size, self._complained = len(content), False
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        """Continue without the frame, so the next server does not find its chunk.

        Frames after an incomplete frame are not read, so the next frame rewrites the file.
        """
        self._size = 1 << 62
        if not self._complained:
            self._complained = True
            log.warning(
                "cannot write %s (%s): the next server will not find the chunks stored from now on", self._path, error
            )

    @staticmethod
    def _opened(path: Path, flags: int) -> io.FileIO:
        """Open a file for writing that only this user may read, because labels contain the tokens of documents."""
        return io.FileIO(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | flags, 0o600), "w")

    def _has(self, slot: Slot, meta: RecordMeta) -> bool:
        return slot < self._slab.slots and self._slab.ready(slot, tag_of(meta.key)) == self._slab.parts == meta.parts

    def _is_valid(self, slot: Slot, meta: RecordMeta) -> bool:
        fits = self._has(slot, meta) and meta.part_bytes <= self._slab.part_bytes
        return fits and self._sums(slot, meta) == meta.checksums

    def _sums(self, slot: Slot, meta: RecordMeta) -> tuple[int, ...]:
        """Return the checksums of a chunk's parts.

        The chunk may have been evicted in the meantime, and its memory given back. An access to the mapped memory
        would allocate it again, beyond the budget; `Slab.read` avoids this.
        """
        return tuple(checksum(self._slab.read(slot, part, meta.stored_part)) for part in range(meta.parts))


def _frame(slot: Slot, meta: RecordMeta) -> bytes:
    entry = _encode((slot, meta))
    return len(entry).to_bytes(4, "little") + entry
