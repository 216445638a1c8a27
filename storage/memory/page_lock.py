"""Page-locking: a GPU can read and write page-locked host memory itself, so copies run in parallel with the model."""

import ctypes
import logging
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import torch

from lmc.shapes import GIB, MIB
from lmc.storage.memory.host_memory import THREADS

log = logging.getLogger(__name__)

LOCKED_AT_ONCE, LOCKED_BESIDE = GIB, 64 * MIB  # bytes per call; the second during the steps of an engine


class HostMemory(Protocol):
    """An owner of mapped host memory. The memory stays mapped as long as the owner lives."""

    locked_whole: bool  # set when all of the memory to lock is page-locked

    def stretch(self, start: int, stop: int) -> torch.Tensor:
        """Return the bytes from `start` to `stop`: uint8 `[stop - start]`."""


def lock(owner: HostMemory, start: int, stop: int, whole: int) -> None:
    """Page-lock memory until its owner is gone.

    Locking takes about a second for each GiB, so several threads do it. Each locks a stretch whose size is a multiple
    of `whole` bytes, because no copy may cross from one stretch into the next. If a stretch cannot be locked, copies
    from and to it are slower; one warning is logged for all of them.
    """
    _assert_no_capture()
    stretches = [owner.stretch(*one) for one in _divided(start, stop, whole, LOCKED_AT_ONCE)]
    here = (torch.cuda.current_device(),)  # By default a new thread would lock for device 0, and use memory there.
    with ThreadPoolExecutor(min(THREADS, len(stretches)), initializer=torch.cuda.set_device, initargs=here) as pool:
        found = list(pool.map(_registered, stretches))
    failed = [(stretch.numel(), error) for stretch, error in zip(stretches, found, strict=True) if error]
    for stretch, error in zip(stretches, found, strict=True):
        if not error:
            _release_with(owner, stretch)
    owner.locked_whole = not failed
    if failed:
        _complain(sum(size for size, _ in failed), failed[0][1])


def lock_beside(owner: HostMemory, start: int, stop: int, whole: int) -> None:
    """Page-lock memory as `lock` does, but in a background thread while the memory is in use.

    Copies of memory that is not locked yet are slower. The thread ends early when the owner is gone, or at the first
    stretch that cannot be locked.
    """
    _assert_no_capture()
    stretches = _divided(start, stop, whole, LOCKED_BESIDE)
    arguments = (weakref.ref(owner), stretches, torch.cuda.current_device())
    threading.Thread(target=_lock_each, args=arguments, name="lmc-lock", daemon=True).start()


def _lock_each(owned: "weakref.ref[HostMemory]", stretches: Sequence[tuple[int, int]], device: int) -> None:
    torch.cuda.set_device(device)
    for start, stop in stretches:
        owner = owned()
        if owner is None:
            return
        stretch = owner.stretch(start, stop)
        if error := _registered(stretch):
            _complain(stretches[-1][1] - start, error)
            return
        _release_with(owner, stretch)
        owner.locked_whole = stop == stretches[-1][1]
        del owner, stretch  # Otherwise these references would keep the owner alive while the next stretch is locked.


def _assert_no_capture() -> None:
    """Assert that no CUDA graph is being captured: page-locking, in any thread, would make the capture fail.

    vLLM captures its graphs before its first step, and workers map slabs in steps.
    """
    assert not torch.cuda.is_current_stream_capturing(), "memory is page-locked while a CUDA graph is captured"


def _divided(start: int, stop: int, whole: int, size: int) -> list[tuple[int, int]]:
    """Divide a range into stretches of about `size` bytes, each a multiple of `whole` except the last."""
    step = -(-size // whole) * whole
    return [(at, min(at + step, stop)) for at in range(start, stop, step)]


def _registered(stretch: torch.Tensor) -> int:
    """Page-lock a stretch of memory, and return CUDA's error code, 0 for success."""
    status = int(torch.cuda.cudart().cudaHostRegister(stretch.data_ptr(), stretch.numel(), 0))
    if status:
        _clear_cuda_error()
    return status


def _release_with(owner: HostMemory, stretch: torch.Tensor) -> None:
    """Unlock a stretch when its owner is gone. Otherwise the next owner could not lock the same address."""
    weakref.finalize(owner, torch.cuda.cudart().cudaHostUnregister, stretch.data_ptr()).atexit = False


def _complain(size: int, error: int) -> None:
    """Log a warning with the number of bytes that cannot be locked and CUDA's error."""
    what = f"{size / GIB:.2f} GiB of memory cannot be page-locked (CUDA error {error})"
    cure = "raise the limit of locked memory (ulimit -l), or lower max_local_cpu_size"
    log.warning("lmc: %s, so copies to and from the GPU are slower; %s", what, cure)


def _clear_cuda_error() -> None:
    """Reset CUDA's last error after a failed call. Otherwise one of torch's kernels would report it as its own."""
    maps = Path("/proc/self/maps")
    paths = {line.split()[-1] for line in maps.read_text().splitlines() if "libcudart" in line} if maps.exists() else ()
    for path in paths:
        ctypes.CDLL(path).cudaGetLastError()
