"""Where the bytes are: one allocation per device, made at start, cut into equal slots of L parts.

A slab knows nothing of who uses a slot (that is the ledger's). Where other processes read and fill slots, the slab is shared memory
without a name: they open it through its owner (`Slab.attach`), and it goes with the last process that maps it, however that ends.
Behind the slots it then has a label for each: which chunk it holds, and how many of its parts have arrived.
"""

import ctypes
import errno
import mmap
import os
import re
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from lmc.errors import NoMemory, StorageError
from lmc.keys import ChunkKey
from lmc.shapes import GIB, MIB, aligned
from lmc.storage.ledger import Slot

CONTAINER = Path("/sys/fs/cgroup")
MADV_POPULATE_WRITE = 23  # Linux 5.14; Python has no name for it yet
POPULATED_AT_ONCE = 256 * MIB
LOST = -1  # as a count of parts: what was promised will not arrive


@dataclass(frozen=True, slots=True, kw_only=True)
class SlabAt:
    """Where a shared slab is, for another process of this host."""

    path: str  # the owner's open file, under /proc
    slots: int
    parts: int
    part_bytes: int


def tag_of(key: ChunkKey) -> int:
    """What a label says of a chunk: the first 63 bits of its key."""
    return int.from_bytes(key[:8], "little") >> 1


class Slab:
    """`slots` × `[L parts]` of uint8 on one device. On the host, parts are page-aligned (for direct I/O) and pinned under CUDA."""

    def __init__(
        self,
        slots: int,
        parts: int,
        part_bytes: int,
        device: torch.device | str = "cpu",
        *,
        shared: bool = False,
        at: SlabAt | None = None,
    ) -> None:
        """Raise `NoMemory` with the sum that was asked and what is there. `at` maps the slab of another process."""
        assert min(slots, parts, part_bytes) > 0
        self.slots, self.parts, self.part_bytes = slots, parts, part_bytes
        self.stride = aligned(part_bytes)
        self.device = torch.device(device)
        self.bytes = (
            slots  # chunks
            * parts  # layers of one
            * self.stride  # one part, rounded up to whole blocks
        )
        self.labels: torch.Tensor | None = None  # int64 [slots, 2]: tag, parts that have arrived
        if at is None:
            _check_room(self.bytes, self.device)
        if self.device.type == "cpu":
            self._map = self._shared_map(at) if shared or at else _private_map(self.bytes)
            self._view = memoryview(self._map)
            flat = torch.frombuffer(self._map, dtype=torch.uint8, count=self.bytes)
            if shared or at:
                self.labels = torch.frombuffer(self._map, dtype=torch.int64, offset=self.bytes).view(slots, 2)
                # The same, for single numbers: of a tensor each takes 2 µs.
                self._labels = self._view[self.bytes :].cast("q")
            # Of a shared slab workers copy to and from the GPU; its owner does not, and would take a context on one for nothing.
            if torch.cuda.is_available() and not shared:
                _pin(flat)
                # An address that is still registered could not be page-locked again by the next slab.
                weakref.finalize(self, torch.cuda.cudart().cudaHostUnregister, flat.data_ptr()).atexit = False
        else:
            flat = torch.zeros(self.bytes, dtype=torch.uint8, device=self.device)
        self._parts = flat.view(slots, parts, self.stride)
        self._rows = flat.view(slots * parts, self.stride)  # one index is half as dear as two, and layers are many
        self._written: dict[Slot, torch.cuda.Event] = {}  # on a GPU: what was last issued into each slot

    @classmethod
    def attach(cls, at: SlabAt) -> "Slab":
        """The shared slab of another process; raise `StorageError` if it cannot be opened."""
        return cls(at.slots, at.parts, at.part_bytes, at=at)

    @property
    def at(self) -> SlabAt:
        """Where other processes find this shared slab."""
        path = f"/proc/{os.getpid()}/fd/{self._file}"
        return SlabAt(path=path, slots=self.slots, parts=self.parts, part_bytes=self.part_bytes)

    def label(self, slot: Slot, key: ChunkKey, ready: int) -> None:
        """Say to other processes what is in `slot` and how many of its parts have arrived."""
        if self.labels is not None:
            self._labels[2 * slot + 1] = 0  # never new parts under an old tag, nor old ones under a new tag
            self._labels[2 * slot] = tag_of(key)
            self._labels[2 * slot + 1] = ready

    def lose(self, slot: Slot) -> None:
        """Say to other processes that what was in `slot` is no more."""
        if self.labels is not None:
            self._labels[2 * slot + 1] = LOST

    def ready(self, slot: Slot, tag: int) -> int:
        """How many parts of the chunk `tag` have arrived in `slot`; `LOST` if it holds another or they never will."""
        assert self.labels is not None
        # The count first: a new one is never taken under an old tag.
        ready, found = self._labels[2 * slot + 1], self._labels[2 * slot]
        return ready if found == tag else LOST

    @classmethod
    def of_size(
        cls, budget: float, parts: int, part_bytes: int, device: torch.device | str = "cpu", *, shared: bool = False
    ) -> "Slab":
        """As many slots as `budget` bytes hold; raise `NoMemory` if that is none."""
        slot_bytes = parts * aligned(part_bytes)
        if budget < slot_bytes:
            raise NoMemory(
                f"a slab of {budget / MIB:.3f} MiB holds no chunk: one takes {slot_bytes / MIB:.3f} MiB; raise its size"
            )
        return cls(int(budget // slot_bytes), parts, part_bytes, device, shared=shared)

    def slot(self, slot: Slot) -> torch.Tensor:
        """All parts of `slot`: uint8 `[L, stride]`."""
        return self._parts[slot]

    def part(self, slot: Slot, part: int) -> torch.Tensor:
        """Part `part` of `slot`: uint8 `[stride]`, of which the first `part_bytes` mean something."""
        return self._rows[slot * self.parts + part]

    def memory(self, slot: Slot, first: int, count: int, size: int) -> list[memoryview]:
        """The first `size` bytes of `count` parts from `first`, writable, host slabs only: one view if they adjoin."""
        start = (slot * self.parts + first) * self.stride
        if size == self.stride:
            return [self._view[start : start + count * size]]
        return [self._view[start + i * self.stride : start + i * self.stride + size] for i in range(count)]

    def seal(self, slot: Slot, size: int) -> None:
        """A slot was filled: zero what lies behind `size` bytes in each part's last block, so that no older bytes travel with a record."""
        end = aligned(size)
        if end != size:
            self._parts[slot, :, size:end] = 0
        self.written(slot)

    def written(self, slot: Slot) -> None:
        """What this thread has issued into `slot` until now, which on a GPU may be on its way, comes before what is copied in or out."""
        if self.device.type == "cuda":
            event = self._written.setdefault(slot, torch.cuda.Event())
            event.record(torch.cuda.current_stream(self.device))

    def copy_from(self, slot: Slot, source: "Slab", there: Slot) -> None:
        """Copy a whole slot of another slab, and wait for it. To and from a GPU on a stream of its own, beside the model's work."""
        stream = self._stream or source._stream
        if stream is None:
            self._parts[slot].copy_(source._parts[there])
            return
        with torch.cuda.stream(stream):
            for event in (source._written.get(there), self._written.get(slot)):
                if event is not None:
                    stream.wait_event(event)
            self._parts[slot].copy_(source._parts[there], non_blocking=True)
        stream.synchronize()

    def snapshot(self, slot: Slot, parts: int, size: int) -> memoryview:
        """A copy of the first `size` bytes of `parts` parts, side by side and aligned, in host memory that is not page-locked."""
        if slot in self._written:
            self._written[slot].synchronize()
        copy = mmap.mmap(-1, parts * size)
        torch.frombuffer(copy, dtype=torch.uint8).view(parts, size).copy_(self._parts[slot, :parts, :size])
        return memoryview(copy)

    @cached_property
    def _stream(self) -> "torch.cuda.Stream | None":
        return torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    def _shared_map(self, at: SlabAt | None) -> mmap.mmap:
        size = self.bytes + self.slots * 16  # two int64 a label
        if at is None:
            # A file without a name: neither a container's small /dev/shm nor a killed process can get in the way.
            self._file = os.memfd_create("lmc-slab", os.MFD_CLOEXEC)
            weakref.finalize(self, os.close, self._file)
            try:
                os.ftruncate(self._file, size)
                memory = mmap.mmap(self._file, size)
            except (OSError, OverflowError) as error:
                raise _not_mapped(size, error) from error
            _populate(memory)
            return memory
        try:
            file = os.open(at.path, os.O_RDWR | os.O_CLOEXEC)
            try:
                memory = mmap.mmap(file, size)
            finally:
                os.close(file)
        except (OSError, ValueError) as error:  # the latter: a file of another size, which is no slab of this shape
            raise StorageError(
                f"cannot open the slab of the scheduler at {at.path} ({error}): its workers must run on the same host, "
                "in the same PID namespace and as the same user"
            ) from error
        # The pages are there; mapping them goes on beside the first steps.
        threading.Thread(target=_populate, args=(memory,), name="lmc-map", daemon=True).start()
        return memory


def _populate(memory: mmap.mmap) -> None:
    """Take and map all pages now: a first touch costs ten times what a copy does (1.7 against 16 GB/s), and would be paid in a step."""
    size, address = len(memory), ctypes.addressof(ctypes.c_char.from_buffer(memory))
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int)

    def take(start: int) -> int:
        failed = madvise(address + start, min(POPULATED_AT_ONCE, size - start), MADV_POPULATE_WRITE)
        return ctypes.get_errno() if failed else 0

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        errors = set(pool.map(take, range(0, size, POPULATED_AT_ONCE)))
    if errors & {errno.ENOMEM, errno.EFAULT}:  # anything else: a kernel before 5.14, which populates on first touch
        raise NoMemory(f"a slab of {size / GIB:.2f} GiB: the system has no such memory; lower max_local_cpu_size")


def _private_map(size: int) -> mmap.mmap:
    """Anonymous pages: aligned, zero, and charged to the process only when first touched."""
    try:
        return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:  # a limit on address space, or no overcommit
        raise _not_mapped(size, error) from error


def _not_mapped(size: int, error: Exception) -> NoMemory:
    return NoMemory(f"a slab of {size / GIB:.2f} GiB: the system has no such memory ({error})")


def _pin(flat: torch.Tensor) -> None:
    """Page-lock a host slab, so that copies to and from the GPU can overlap with compute."""
    status = torch.cuda.cudart().cudaHostRegister(flat.data_ptr(), flat.numel(), 0)
    if int(status) != 0:
        raise NoMemory(
            f"cannot page-lock {flat.numel() / GIB:.2f} GiB of host memory (CUDA error {int(status)}); ask for less"
        )


def _check_room(size: int, device: torch.device) -> None:
    room = _room(device)
    if size > room:
        raise NoMemory(
            f"a slab of {size / GIB:.2f} GiB does not fit on {device}: {room / GIB:.2f} GiB are available; "
            f"lower {'max_local_cpu_size' if device.type == 'cpu' else 'max_local_device_size'}"
        )


def _room(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type != "cpu":
        return 1 << 62  # no portable question to ask; the allocation itself will answer
    for line in Path("/proc/meminfo").read_text().splitlines() if os.path.exists("/proc/meminfo") else []:
        if line.startswith("MemAvailable:"):
            return min(int(line.split()[1]) * 1024, _container_limit())
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _container_limit() -> int:
    """What a container (cgroup v2) leaves us, which /proc/meminfo does not know. Page cache that nobody uses counts as free."""
    try:
        limit = (CONTAINER / "memory.max").read_text().strip()
        used = int((CONTAINER / "memory.current").read_text())
        idle = re.search(r"^inactive_file (\d+)$", (CONTAINER / "memory.stat").read_text(), re.MULTILINE)
    except (OSError, ValueError):
        return 1 << 62
    return 1 << 62 if limit == "max" else int(limit) - used + (int(idle[1]) if idle else 0)
