"""The slab: the memory for chunks, allocated once at start, with equal slots of L parts.

The pool of slots (`storage/slots.py`), not the slab, knows the users of each slot. A slab that several processes use
is shared memory without a name. Other processes open it through the process that created it (`Slab.attach`). It
disappears with the last process that maps it, however that process ends. After its slots, such a slab has a label for
each slot: the chunk in the slot, and the number of its parts that have arrived.
"""

import mmap
import os
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NewType

import numpy as np
import torch
from numpy.typing import NDArray

from lmc.errors import NoMemory, StorageError
from lmc.keys import ChunkKey
from lmc.shapes import GIB, MIB, aligned
from lmc.storage.memory.host_memory import (
    UNLIMITED,
    in_huge_pages,
    new_memory,
    new_memory_file,
    populate,
    room_on,
)
from lmc.storage.memory.memory_files import locked, punch, seal_size, take_pages, whole_pages
from lmc.storage.memory.page_lock import lock, lock_beside
from lmc.storage.worker_parts import Parallelism, WorkerParts

Slot = NewType("Slot", int)

LABEL_BYTES = 16  # bytes of one slot's label
LOST = -1  # in a label instead of the number of parts: the rest of the chunk will not arrive


@dataclass(frozen=True, slots=True, kw_only=True)
class SlabAddress:
    """The address at which other processes of this host open a shared slab."""

    path: str  # the owner's open file, under /proc
    slots: int
    parallelism: Parallelism
    part_bytes: int
    sparse: bool = False  # see `Slab`
    page_locked: bool = False  # see `Slab`
    serial: int = 0  # distinguishes successive slabs whose file descriptors had the same number
    lifeline: str = ""  # a file that each process with the slab mapped locks, so that the owner notices when it ends
    owner: str = ""  # a file that the owner keeps locked alone as long as it lives


def tag_of(key: ChunkKey) -> int:
    """Return the tag of a chunk in a label: 63 of the first 64 bits of its key."""
    return int.from_bytes(key[:8], "little") >> 1


class Slab:
    """`slots` × `[L parts]` of uint8 on one device.

    In host memory, parts start at page boundaries, as direct I/O requires, and are page-locked if CUDA is available.
    The parts of one worker are contiguous, slot after slot; see `lmc.storage.worker_parts`.
    """

    def __init__(
        self,
        slots: int,
        parts: int | Parallelism,
        part_bytes: int,
        device: torch.device | str = "cpu",
        *,
        shared: bool = False,
        sparse: bool = False,
        page_locked: bool = False,
        file: Path | None = None,
        at: SlabAddress | None = None,
        worker: WorkerParts | None = None,
    ) -> None:
        """Allocate the memory, or map the slab of another process `at` its address, to use the parts of one `worker`.

        The memory of a `sparse` slab is taken slot by slot at the first write. Its owner limits how much is taken, and
        gives back slots that are not needed. A sparse slab is page-locked only with `page_locked`: then no memory is
        given back, and workers lock their parts of it. A `file` on tmpfs keeps the memory for the next process.
        Raises `NoMemory` with the requested and the available size.
        """
        self._parallelism = parts if isinstance(parts, Parallelism) else Parallelism((parts,))
        self.slots, self.parts, self.part_bytes = slots, self._parallelism.parts, part_bytes
        assert min(slots, self.parts, part_bytes) > 0
        self.stride = aligned(part_bytes)
        self.device = torch.device(device)
        self.bytes = slots * self.parts * self.stride
        self.labels: memoryview | None = None  # int64, two for each slot: the chunk's tag, and its parts that arrived
        self._sparse, self._page_locked, self._at_address, self._kept_in = sparse, page_locked, at, file
        self.locked_whole = False  # whether a GPU can access all parts of this worker by itself
        room = UNLIMITED if at or sparse else room_on(self.device)
        if self.bytes > room:
            lower = "max_local_cpu_size" if self.device.type == "cpu" else "max_local_device_size"
            there = f"does not fit on {device}: {room / GIB:.2f} GiB are available"
            raise NoMemory(f"a slab of {self.bytes / GIB:.2f} GiB {there}; lower {lower}")
        if self.device.type == "cpu":
            memory = self._shared_memory(at, worker) if shared or at else new_memory(self.bytes)
            self._view = memoryview(memory)
            flat = torch.frombuffer(memory, dtype=torch.uint8, count=self.bytes)
            if shared or at:
                self.labels = self._view[self.bytes : self.bytes + self.slots * LABEL_BYTES].cast("q")
        else:
            flat = torch.zeros(self.bytes, dtype=torch.uint8, device=self.device)
        self._rows = flat.view(slots * self.parts, self.stride)
        # The workers that attach to a shared slab copy to and from the GPU. The owner does not, and page-locking would
        # create a useless CUDA context in it.
        if self.device.type == "cpu" and not shared and torch.cuda.is_available():
            self._page_lock(worker)
        self._at = [(0, 0)] * self.parts  # by part: its row in slot 0, and the number of rows to the next slot
        self._of_workers: list[tuple[WorkerParts, torch.Tensor]] = []  # with the memory [slots, parts, stride] of each
        for one in self._parallelism.workers:
            row = self._bounds(one)[0] // self.stride
            self._at[one.numbers] = [(row + layer, one.count) for layer in range(one.count)]
            rows = self._rows[row : row + slots * one.count]
            self._of_workers.append((one, rows.view(slots, one.count, self.stride)))
        self._written: dict[Slot, torch.cuda.Event] = {}  # on a GPU: the last write that was issued to each slot

    @classmethod
    def of_size(
        cls,
        budget: float,
        parts: int | Parallelism,
        part_bytes: int,
        device: torch.device | str = "cpu",
        *,
        shared: bool = False,
    ) -> "Slab":
        """Create a slab with as many slots as fit in `budget` bytes. Raises `NoMemory` if none fits."""
        slot_bytes = (parts.parts if isinstance(parts, Parallelism) else parts) * aligned(part_bytes)
        if budget < slot_bytes:
            taken = f"one takes {slot_bytes / MIB:.3f} MiB"
            raise NoMemory(f"a slab of {budget / MIB:.3f} MiB holds no chunk: {taken}; raise its size")
        return cls(int(budget // slot_bytes), parts, part_bytes, device, shared=shared)

    # -- shared with other processes ---------------------------------------------------------------------------------

    @classmethod
    def attach(cls, at: SlabAddress, worker: WorkerParts | None = None) -> "Slab":
        """Map the shared slab of another process, to use the parts of one worker or all parts.

        Raises `StorageError` if it cannot be opened.
        """
        return cls(
            at.slots, at.parallelism, at.part_bytes, sparse=at.sparse, page_locked=at.page_locked, at=at, worker=worker
        )

    @cached_property
    def address(self) -> SlabAddress:
        """The address at which other processes open this shared slab."""
        return self._at_address or SlabAddress(
            path=f"/proc/{os.getpid()}/fd/{self.file}",
            slots=self.slots,
            parallelism=self._parallelism,
            part_bytes=self.part_bytes,
            sparse=self._sparse,
            page_locked=self._page_locked,
        )

    def label(self, slot: Slot, key: ChunkKey, ready: int) -> None:
        """Publish to other processes which chunk is in `slot`, and that `ready` of its parts have arrived."""
        if self.labels is not None:
            self.labels[2 * slot + 1] = 0  # so that no reader combines the new tag with the old chunk's number
            self.labels[2 * slot] = tag_of(key)
            self.labels[2 * slot + 1] = ready

    def lose(self, slot: Slot) -> None:
        """Publish to other processes that the chunk in `slot` is lost."""
        if self.labels is not None:
            self.labels[2 * slot + 1] = LOST

    def ready(self, slot: Slot, tag: int) -> int:
        """Return how many parts of the chunk `tag` have arrived in `slot`.

        Returns `LOST` if the slot holds another chunk, or if the other parts will not arrive.
        """
        assert self.labels is not None
        # The number is read before the tag, because the tag is written before the number.
        ready, found = self.labels[2 * slot + 1], self.labels[2 * slot]
        return ready if found == tag else LOST

    # -- bytes -------------------------------------------------------------------------------------------------------

    def slot(self, slot: Slot) -> torch.Tensor:
        """Return a view of all parts of `slot`: uint8 `[L, stride]`. The slab must be of one worker."""
        ((_, memory),) = self._of_workers
        return memory[slot]

    def part(self, slot: Slot, part: int) -> torch.Tensor:
        """Return a view of part `part` of `slot`: uint8 `[stride]`. The first `part_bytes` are data."""
        row, step = self._at[part]
        return self._rows[row + slot * step]

    def addresses(self, slots: Sequence[int], part: int) -> NDArray[np.int64]:
        """Return the addresses of part `part` of some slots."""
        row, step = self._at[part]
        return self._rows.data_ptr() + (row + np.array(slots, np.int64) * step) * self.stride

    def stretch(self, start: int, stop: int) -> torch.Tensor:
        """Return the bytes from `start` to `stop`, as `page_lock.HostMemory.stretch`."""
        return self._rows.view(-1)[start:stop]

    def memory(self, slot: Slot, first: int, count: int, size: int) -> list[memoryview]:
        """Return writable views of the first `size` bytes of `count` parts: one view if they are contiguous."""
        if size == self.stride and len(self._of_workers) == 1:
            start = (slot * self.parts + first) * size
            return [self._view[start : start + count * size]]
        starts = [(row + slot * step) * self.stride for row, step in self._at[first : first + count]]
        return [self._view[start : start + size] for start in starts]

    def read(self, slot: Slot, part: int, size: int) -> bytes:
        """Return a copy of the first `size` bytes of a part of a shared slab. Reading takes no memory for the slot."""
        row, step = self._at[part]
        return os.pread(self.file, size, (row + slot * step) * self.stride)

    def seal(self, slot: Slot, size: int) -> None:
        """Zero the padding of a slot that was filled with parts of `size` bytes.

        The padding is the rest of each part's last block. No bytes of an older chunk are then stored with the new one.
        """
        end = aligned(size)
        if end != size:
            for _, memory in self._of_workers:
                memory[slot, :, size:end] = 0
        self.written(slot)

    def written(self, slot: Slot) -> None:
        """Make later copies to and from `slot` wait for the writes that this thread has issued to a GPU."""
        if self.device.type == "cuda":
            event = self._written.setdefault(slot, torch.cuda.Event())
            event.record(torch.cuda.current_stream(self.device))

    def copy_from(self, slot: Slot, source: "Slab", there: Slot) -> None:
        """Copy a whole slot of another slab, and wait until the copy has ended.

        Copies to and from a GPU use their own stream, in parallel with the model's work.
        """
        stream = self._stream or source._stream
        if stream is None:
            self.slot(slot).copy_(source.slot(there))
            return
        with torch.cuda.stream(stream):
            for event in (source._written.get(there), self._written.get(slot)):
                if event is not None:
                    stream.wait_event(event)
            self.slot(slot).copy_(source.slot(there), non_blocking=True)
        stream.synchronize()

    def take(self, slot: Slot) -> bool:
        """Allocate the memory of a slot of a sparse slab now. Returns whether the system had enough memory.

        Without this, a process that writes to a page is killed if the tmpfs has no memory for it. The pages are not
        touched here: that takes two to three times as long, and the process that fills the slot maps them anyway.
        """
        if all(take_pages(self.file, start, size) for start, size in self._pages_of(slot)):
            return True
        self.give_back(slot)
        return False

    def give_back(self, slot: Slot) -> None:
        """Give the memory of a slot of a sparse slab back to the system. The slot then reads as zeros.

        A page-locked slab keeps its memory, because a GPU would continue to use the old pages.
        """
        for start, size in () if self._page_locked else self._pages_of(slot):
            punch(self.file, start, size)

    def snapshot(self, slot: Slot, parts: int, size: int) -> memoryview:
        """Copy the first `size` bytes of `parts` parts into contiguous, page-aligned host memory."""
        if slot in self._written:
            self._written[slot].synchronize()
        copy = mmap.mmap(-1, parts * size)
        whole = torch.frombuffer(copy, dtype=torch.uint8).view(parts, size)
        for worker, memory in self._of_workers:
            mine = whole[worker.numbers]
            mine.copy_(memory[slot, : len(mine), :size])
        return memoryview(copy)

    @cached_property
    def _stream(self) -> "torch.cuda.Stream | None":
        return torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    def _pages_of(self, slot: Slot) -> list[tuple[int, int]]:
        """Return the start and the size, in bytes, of each worker's parts of a slot."""
        workers, stride = self._parallelism.workers, self.stride
        return [(self._bounds(one)[0] + slot * one.count * stride, one.count * stride) for one in workers]

    def _bounds(self, worker: WorkerParts) -> tuple[int, int]:
        """Return the start and the end, in bytes, of a worker's parts of all slots."""
        workers = self._parallelism.workers
        start = sum(one.count for one in workers[: workers.index(worker)]) * self.slots * self.stride
        return start, start + worker.count * self.slots * self.stride

    def _page_lock(self, worker: WorkerParts | None) -> None:
        whole = self.stride * (worker.count if worker else self.parts)
        if not self._sparse:
            lock(self, *(self._bounds(worker) if worker else (0, self.bytes)), whole)
        elif self._page_locked and worker:
            lock_beside(self, *self._bounds(worker), whole)

    def _shared_memory(self, at: SlabAddress | None, worker: WorkerParts | None) -> mmap.mmap:
        size = self.bytes + self.slots * LABEL_BYTES
        if at is None:
            # A file without a name needs no room in a container's small /dev/shm, and disappears with its processes.
            if self._kept_in is None:
                self.file = new_memory_file(size)
            else:
                self.file = os.open(self._kept_in, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            weakref.finalize(self, os.close, self.file)
            memory = new_memory(size, self.file)
            if self._kept_in is None:
                seal_size(self.file)
            if not populate(memory, self.bytes if self._sparse else 0, size):
                raise NoMemory(
                    f"a slab of {size / GIB:.2f} GiB: the system has no such memory; lower max_local_cpu_size"
                )
            return memory
        try:
            if at.lifeline:  # A missing file is not created, because the server would not watch it.
                weakref.finalize(self, os.close, locked(at.lifeline, new=False))
            with open(at.path, "r+b", buffering=0) as file:
                memory = in_huge_pages(mmap.mmap(file.fileno(), whole_pages(file.fileno(), size)))
        except (OSError, ValueError) as error:  # `ValueError`: the file has another size, so it is not this slab.
            wanted = "workers must run on the scheduler's host, in the same PID namespace and as the same user"
            raise StorageError(f"cannot open the slab at {at.path} ({error}): {wanted}") from error
        if self._sparse:
            return memory
        # The owner has allocated the pages. This process maps them in a thread, during the first engine steps.
        bounds = self._bounds(worker) if worker else (0, size)
        threading.Thread(target=populate, args=(memory, *bounds), name="lmc-map", daemon=True).start()
        return memory
