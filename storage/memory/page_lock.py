"""Page-locking: host memory that a GPU reads and writes by itself, so that copies run beside the model's work."""

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

LOCKED_AT_ONCE, LOCKED_BESIDE = GIB, 64 * MIB  # bytes; the latter beside the steps of an engine


class HostMemory(Protocol):
    """Whoever has host memory mapped, for as long as it lives."""

    def stretch(self, start: int, stop: int) -> torch.Tensor:
        """Return the bytes from `start` to `stop`: uint8 `[stop - start]`."""


def lock(owner: HostMemory, start: int, stop: int, whole: int) -> None:
    """Page-lock memory until its owner is gone.

    That takes about a second for each GiB, so several threads do it, for stretches of a multiple of `whole` bytes:
    no copy may reach from one stretch into the next. If some cannot be locked, copies from and to them are slower,
    which is said once.
    """
    stretches = [owner.stretch(*one) for one in _divided(start, stop, whole, LOCKED_AT_ONCE)]
    here = (torch.cuda.current_device(),)  # A new thread would lock for device 0, and take memory there.
    with ThreadPoolExecutor(min(THREADS, len(stretches)), initializer=torch.cuda.set_device, initargs=here) as pool:
        found = list(pool.map(_registered, stretches))
    failed = [(stretch.numel(), error) for stretch, error in zip(stretches, found, strict=True) if error]
    for stretch, error in zip(stretches, found, strict=True):
        if not error:
            _release_with(owner, stretch)
    if failed:
        _complain(sum(size for size, _ in failed), failed[0][1])


def lock_beside(owner: HostMemory, start: int, stop: int, whole: int) -> None:
    """Page-lock memory as `lock` does, in a thread, while it is used. What is not locked yet is copied more slowly.

    The thread ends early when the owner is gone, or after memory that cannot be locked.
    """
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
        del owner, stretch  # Otherwise it could not go before the next one is locked.


def _divided(start: int, stop: int, whole: int, size: int) -> list[tuple[int, int]]:
    """Cut bytes into stretches of about `size`, each a multiple of `whole` but for the last one."""
    step = -(-size // whole) * whole
    return [(at, min(at + step, stop)) for at in range(start, stop, step)]


def _registered(stretch: torch.Tensor) -> int:
    """Page-lock a stretch of memory, and return CUDA's error, which is 0 if there is none."""
    status = int(torch.cuda.cudart().cudaHostRegister(stretch.data_ptr(), stretch.numel(), 0))
    if status:
        _clear_cuda_error()
    return status


def _release_with(owner: HostMemory, stretch: torch.Tensor) -> None:
    """Release a stretch with its owner: an address that is still locked could not be locked again for the next one."""
    weakref.finalize(owner, torch.cuda.cudart().cudaHostUnregister, stretch.data_ptr()).atexit = False


def _complain(size: int, error: int) -> None:
    """Say how many bytes cannot be locked, with CUDA's error."""
    what = f"{size / GIB:.2f} GiB of memory cannot be page-locked (CUDA error {error})"
    cure = "raise the limit of locked memory (ulimit -l), or lower max_local_cpu_size"
    log.warning("lmc: %s, so copies to and from the GPU are slower; %s", what, cure)


def _clear_cuda_error() -> None:
    """Reset the error that a failed call leaves behind: one of torch's kernels would report it as its own."""
    maps = Path("/proc/self/maps")
    paths = {line.split()[-1] for line in maps.read_text().splitlines() if "libcudart" in line} if maps.exists() else ()
    for path in paths:
        ctypes.CDLL(path).cudaGetLastError()
