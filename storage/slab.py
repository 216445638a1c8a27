"""Where the bytes are: one allocation per device, made at start, cut into equal slots of L parts.

A slab knows nothing of keys or of who uses a slot (that is the ledger's), nor of what has arrived in it (that is a load's).
"""

import mmap
import os
import re
import weakref
from pathlib import Path

import torch

from lmc.errors import NoMemory
from lmc.shapes import GIB, MIB, aligned
from lmc.storage.ledger import Slot

CONTAINER = Path("/sys/fs/cgroup")


class Slab:
    """`slots` × `[L parts]` of uint8 on one device. On the host, parts are page-aligned (for direct I/O) and pinned under CUDA."""

    def __init__(self, slots: int, parts: int, part_bytes: int, device: torch.device | str = "cpu") -> None:
        """Raise `NoMemory` with the sum that was asked and what is there."""
        assert min(slots, parts, part_bytes) > 0
        self.slots, self.parts, self.part_bytes = slots, parts, part_bytes
        self.stride = aligned(part_bytes)
        self.device = torch.device(device)
        self.bytes = (
            slots  # chunks
            * parts  # layers of one
            * self.stride  # one part, rounded up to whole blocks
        )
        _check_room(self.bytes, self.device)
        if self.device.type == "cpu":
            # Anonymous pages: aligned, zero, and charged to the process only when first touched.
            try:
                self._map = mmap.mmap(-1, self.bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            except (OSError, OverflowError) as error:  # a limit on address space, or no overcommit
                raise NoMemory(
                    f"a slab of {self.bytes / GIB:.2f} GiB: the system has no such memory ({error})"
                ) from error
            self._view = memoryview(self._map)
            flat = torch.frombuffer(self._map, dtype=torch.uint8)
            if torch.cuda.is_available():
                _pin(flat)
                # An address that is still registered could not be page-locked again by the next slab.
                weakref.finalize(self, torch.cuda.cudart().cudaHostUnregister, flat.data_ptr()).atexit = False
        else:
            flat = torch.zeros(self.bytes, dtype=torch.uint8, device=self.device)
        self._parts = flat.view(slots, parts, self.stride)

    @classmethod
    def of_size(cls, budget: float, parts: int, part_bytes: int, device: torch.device | str = "cpu") -> "Slab":
        """As many slots as `budget` bytes hold; raise `NoMemory` if that is none."""
        slot_bytes = parts * aligned(part_bytes)
        if budget < slot_bytes:
            raise NoMemory(
                f"a slab of {budget / MIB:.3f} MiB holds no chunk: one takes {slot_bytes / MIB:.3f} MiB; raise its size"
            )
        return cls(int(budget // slot_bytes), parts, part_bytes, device)

    def slot(self, slot: Slot) -> torch.Tensor:
        """All parts of `slot`: uint8 `[L, stride]`."""
        return self._parts[slot]

    def part(self, slot: Slot, part: int) -> torch.Tensor:
        """Part `part` of `slot`: uint8 `[stride]`, of which the first `part_bytes` mean something."""
        return self._parts[slot, part]

    def memory(self, slot: Slot, first: int, count: int, size: int) -> list[memoryview]:
        """The first `size` bytes of `count` parts from `first`, writable, host slabs only: one view if they adjoin."""
        start = (slot * self.parts + first) * self.stride
        if size == self.stride:
            return [self._view[start : start + count * size]]
        return [self._view[start + i * self.stride : start + i * self.stride + size] for i in range(count)]

    def seal(self, slot: Slot, size: int) -> None:
        """Zero what lies behind `size` bytes in each part's last block, so that no older bytes travel with a record."""
        end = aligned(size)
        if end != size:
            self._parts[slot, :, size:end] = 0

    def snapshot(self, slot: Slot, parts: int, size: int) -> memoryview:
        """A copy of the first `size` bytes of `parts` parts, side by side and aligned, in host memory that is not page-locked."""
        copy = mmap.mmap(-1, parts * size)
        torch.frombuffer(copy, dtype=torch.uint8).view(parts, size).copy_(self._parts[slot, :parts, :size])
        return memoryview(copy)

    def event(self) -> "torch.cuda.Event | None":
        """When the copies into a CUDA slab that were issued until now are done."""
        if self.device.type != "cuda":
            return None
        event = torch.cuda.Event()
        event.record()
        return event


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
