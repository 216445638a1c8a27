"""The journal: which chunk is in which slot of a slab that outlives its server, and the checksums of its parts.

It is a file beside the slab's, on tmpfs. Each frame of msgpack has a slot and the metadata of the chunk that was put
there, with checksums, and the last frame of a slot counts. A thread writes it, because checksums take time. Whether
the slot still has the chunk stands in its label in the slab; the label of a slot that is being written names no chunk.
"""

import logging
import os
import queue
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import msgspec

from lmc.storage.ledger import Slot
from lmc.storage.record import RecordMeta, checksum
from lmc.storage.slab import Slab, tag_of

log = logging.getLogger(__name__)

THREADS = min(8, os.cpu_count() or 1)  # that verify chunks at the start

_encode = msgspec.msgpack.Encoder().encode
_entry: msgspec.msgpack.Decoder[tuple[int, RecordMeta]] = msgspec.msgpack.Decoder(tuple[int, RecordMeta])


class Journal:
    """What is in the slots of one slab."""

    def __init__(self, path: Path, slab: Slab) -> None:
        self._path, self._slab = path, slab
        self._filled: queue.SimpleQueue[tuple[Slot, RecordMeta] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write, name="lmc-journal", daemon=True)

    def restore(self) -> list[tuple[Slot, RecordMeta]]:
        """Return the chunks that are in the slab and right, every byte of which is read; then begin to write."""
        noted = dict(self._read())
        with ThreadPoolExecutor(THREADS) as pool:
            right = list(pool.map(self._is_right, noted, noted.values()))
        found = [(slot, meta) for (slot, meta), good in zip(noted.items(), right, strict=True) if good]
        whole = self._path.with_suffix(".new")
        whole.write_bytes(b"".join(_frame(slot, meta) for slot, meta in found))
        whole.replace(self._path)
        self._thread.start()
        return [(slot, replace(meta, checksums=())) for slot, meta in found]

    def filled(self, slot: Slot, meta: RecordMeta) -> None:
        """Note that a chunk is in a slot."""
        self._filled.put((slot, meta))

    def close(self) -> None:
        """Write everything that was noted."""
        self._filled.put(None)
        self._thread.join()

    def _read(self) -> Iterator[tuple[Slot, RecordMeta]]:
        """Yield what was written, up to a frame that a killed server has left unfinished."""
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
        with self._path.open("ab", buffering=0) as file:
            while (filled := self._filled.get()) is not None:
                slot, meta = filled
                sums = self._sums(slot, meta)
                if self._has(slot, meta):  # Otherwise it has been evicted meanwhile, and the sums are of anything.
                    file.write(_frame(slot, replace(meta, checksums=sums)))

    def _has(self, slot: Slot, meta: RecordMeta) -> bool:
        return slot < self._slab.slots and self._slab.ready(slot, tag_of(meta.key)) == self._slab.parts == meta.parts

    def _is_right(self, slot: Slot, meta: RecordMeta) -> bool:
        fits = self._has(slot, meta) and meta.part_bytes <= self._slab.part_bytes
        return fits and self._sums(slot, meta) == meta.checksums

    def _sums(self, slot: Slot, meta: RecordMeta) -> tuple[int, ...]:
        parts = (self._slab.memory(slot, part, 1, meta.stored_part)[0] for part in range(meta.parts))
        return tuple(map(checksum, parts))


def _frame(slot: Slot, meta: RecordMeta) -> bytes:
    entry = _encode((slot, meta))
    return len(entry).to_bytes(4, "little") + entry
