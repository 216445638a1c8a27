"""Host memory: how much is available, and how it is mapped and populated."""

import ctypes
import errno
import mmap
import os
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch

from lmc.errors import NoMemory
from lmc.shapes import GIB, MIB
from lmc.storage.memory.memory_files import whole_pages

CONTAINER = Path("/sys/fs/cgroup")
MADV_POPULATE_WRITE = 23  # Linux 5.14; Python has no name for it yet.
POPULATED_AT_ONCE = 256 * MIB
THREADS = min(8, os.cpu_count() or 1)  # threads that populate or page-lock memory
UNLIMITED = 1 << 62  # bytes


def new_memory(size: int, file: int | None = None) -> mmap.mmap:
    """Map `size` bytes of zeros: the pages of a file, or anonymous pages, which are allocated at the first touch."""
    try:
        if file is None:
            return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        os.ftruncate(file, whole_pages(file, size))
        return in_huge_pages(mmap.mmap(file, whole_pages(file, size)))
    except (OSError, OverflowError) as error:  # a limit on address space, or no overcommit
        raise NoMemory(f"a slab of {size / GIB:.2f} GiB: the system has no such memory ({error})") from error


def new_memory_file(size: int) -> int:
    """Return the descriptor of a new file without a name. It has huge pages if the system has reserved enough."""
    found = dict(re.findall(r"^(HugePages_Free|Hugepagesize): +(\d+)", _facts(), re.MULTILINE))
    there = int(found.get("HugePages_Free", 0)) * int(found.get("Hugepagesize", 0)) * 1024
    huge = os.MFD_HUGETLB if size <= there else 0
    return os.memfd_create("lmc-slab", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | huge)


def populate(memory: mmap.mmap, start: int, stop: int) -> bool:
    """Allocate and map the pages from `start` to `stop` now. Returns whether the system had enough memory.

    The first touch of a page costs ten times as much as a copy (1.7 against 16 GB/s), and would delay an engine step.
    """
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    start -= start % mmap.PAGESIZE

    def take(at: int) -> int:
        failed = _madvise()(address + at, min(POPULATED_AT_ONCE, stop - at), MADV_POPULATE_WRITE)
        return ctypes.get_errno() if failed else 0

    pieces = range(start, stop, POPULATED_AT_ONCE)
    if len(pieces) == 1:
        errors = {take(start)}
    else:
        with ThreadPoolExecutor(THREADS) as pool:
            errors = set(pool.map(take, pieces))
    # Any other error means a kernel before 5.14, which allocates pages at the first touch.
    return not errors & {errno.ENOMEM, errno.EFAULT}


@cache
def _madvise() -> Any:
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int)
    return madvise


def in_huge_pages(memory: mmap.mmap) -> mmap.mmap:
    """Request huge pages. The system uses them for shared memory if its administrator allows it (shmem_enabled)."""
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def memory_available() -> int:
    """Return how many bytes of host memory are available to this process."""
    return room_on(torch.device("cpu"))


def room_on(device: torch.device) -> int:
    """Return how many bytes of memory on a device are available to this process."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type != "cpu":
        return UNLIMITED  # Other devices lack a portable query; the allocation itself may fail.
    found = re.search(r"^MemAvailable: +(\d+) kB$", _facts(), re.MULTILINE)
    if found:
        return min(int(found[1]) * 1024, _container_limit())
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _facts() -> str:
    facts = Path("/proc/meminfo")
    return facts.read_text() if facts.exists() else ""


def _container_limit() -> int:
    """Return the bytes that a container (cgroup v2) has left, which /proc/meminfo does not report.

    Inactive page cache counts as free.
    """
    try:
        limit = (CONTAINER / "memory.max").read_text().strip()
        used = int((CONTAINER / "memory.current").read_text())
        idle = re.search(r"^inactive_file (\d+)$", (CONTAINER / "memory.stat").read_text(), re.MULTILINE)
    except (OSError, ValueError):
        return UNLIMITED
    return UNLIMITED if limit == "max" else int(limit) - used + (int(idle[1]) if idle else 0)
