"""Many copies between host memory and a GPU in one call.

A GPU's copy engine needs a descriptor for each contiguous range of memory. A separate call for each range costs more
than the transfer of a 16-token page over the bus. CUDA 12.8 accepts a list of copies (`cuMemcpyBatchAsync` of its
driver API); vLLM's extension offers the same as `swap_blocks_batch`.
"""

import ctypes
from collections.abc import Callable
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

Addresses = NDArray[np.int64]
VERSION = 12080  # the CUDA version whose `cuMemcpyBatchAsync` has the arguments below
ALIGNED = 64  # bytes; kernels read whole cache lines
STREAM_ORDER = 1  # Sources are read in the order of the stream (CU_MEMCPY_SRC_ACCESS_ORDER_STREAM).


class Copies(NamedTuple):
    """Contiguous ranges of memory to copy; each array is int64 `[n]`."""

    sources: Addresses
    targets: Addresses
    sizes: Addresses  # bytes

    def reversed(self) -> "Copies":
        """Return the copies in the other direction."""
        return Copies(self.targets, self.sources, self.sizes)


Submit = Callable[[Copies], None]


def merged(copies: Copies) -> Copies:
    """Merge successive copies whose sources and targets are both adjacent."""
    sources, targets, sizes = copies
    if not len(sizes):
        return copies
    adjoin = (sources[1:] == sources[:-1] + sizes[:-1]) & (targets[1:] == targets[:-1] + sizes[:-1])
    first = np.flatnonzero(np.concatenate(([True], ~adjoin)))
    return Copies(sources[first], targets[first], np.add.reduceat(sizes, first))


def stretches_of(view: torch.Tensor) -> tuple[Addresses, int]:
    """Return the offsets of a tensor's contiguous ranges from its first element, in order, and their length in bytes.

    All ranges have the same length. Offsets are in bytes.
    """
    itemsize, stretch, dims = view.element_size(), 1, list(zip(view.shape, view.stride(), strict=True))
    while dims and dims[-1][1] == stretch:
        stretch *= dims.pop()[0]
    offsets = np.zeros(1, np.int64)
    for size, stride in dims:
        offsets = (offsets[:, None] + np.arange(size) * stride).ravel()
    return offsets * itemsize, stretch * itemsize


def submit_of(device: torch.device) -> Submit | None:
    """Return a function that issues copies in one call, in the order of a device's current stream.

    Returns None if the device has no such call. Host memory must be page-locked; see `can_submit`.
    """
    if device.type != "cuda" or torch.version.hip:
        return None
    if hasattr(torch.ops, "_C_cache_ops") and hasattr(torch.ops._C_cache_ops, "swap_blocks_batch"):
        swap = torch.ops._C_cache_ops.swap_blocks_batch
        return partial(_in_order, device, lambda copies: swap(*map(torch.from_numpy, copies), False))
    call = _driver_call()
    return partial(_in_order, device, partial(_submit, call)) if call else None


def _in_order(device: torch.device, issue: Submit, copies: Copies) -> None:
    """Issue copies after all work on the current stream, and before all work that is queued there later.

    CUDA rejects lists of copies on its legacy default stream (0), which torch uses by default. In this case the
    copies run on a separate stream. It waits for the current stream, and the current stream waits for it.
    """
    if not len(copies.sizes):
        return
    with torch.cuda.device(device):
        current = torch.cuda.current_stream(device)
        if current.cuda_stream:
            issue(copies)
            return
        beside = _stream_beside(torch.cuda.current_device())
        beside.wait_stream(current)
        with torch.cuda.stream(beside):
            issue(copies)
        current.wait_stream(beside)


@lru_cache
def _stream_beside(device: int) -> torch.cuda.Stream:
    """Return a device's stream for copies that the default stream rejects."""
    return torch.cuda.Stream(device)


def sent(numbers: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy numbers from the host to a device. They are page-locked first, so that the host does not wait for a GPU."""
    return numbers.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else numbers.to(device)


class Uploads:
    """Numbers that are copied from the host to a device together.

    Each copy to a GPU takes the host some 10 us (an estimate), and a pass of a blend has about ten tensors of indices.
    They are collected side by side, and sent in one copy.
    """

    def __init__(self, device: torch.device, capacity: int = 1 << 16) -> None:
        """Prepare uploads to a device. Up to about `capacity` bytes are sent in one copy."""
        self._device, self._capacity = device, capacity
        # Bytes on the host, memory for them on the device, and the number of bytes that are used.
        self._full: list[tuple[torch.Tensor, torch.Tensor, int]] = []
        self._source = self._target = torch.empty(0, dtype=torch.uint8)
        self._used = self._size = 0

    def add(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return memory of the device for numbers of the host. It has the numbers after the next `send`."""
        start = self._used + -self._used % ALIGNED
        if not self._size or start + numbers.nbytes > self._size:
            self._allocate(numbers.nbytes)
            start = 0
        stop, kind = start + numbers.nbytes, numbers.dtype
        self._used = stop
        here, there = self._source[start:stop].view(kind), self._target[start:stop].view(kind)
        if numbers.ndim > 1:
            here, there = here.view(numbers.shape), there.view(numbers.shape)
        here.copy_(numbers)
        return there

    def _allocate(self, size: int) -> None:
        self._full.append((self._source, self._target, self._used))
        self._size = max(size, self._capacity)
        self._source = torch.empty(self._size, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        self._target = torch.empty(self._size, dtype=torch.uint8, device=self._device)

    def send(self) -> None:
        """Copy all numbers that were added since the last call. The host does not wait for a GPU."""
        locked = self._device.type == "cuda"
        for source, target, used in (*self._full, (self._source, self._target, self._used)):
            if used:
                target[:used].copy_(source[:used], non_blocking=locked)
        self._full, self._used, self._size = [], 0, 0  # What is added next gets memory of its own.


def can_submit(memory: torch.Tensor) -> bool:
    """Return whether a GPU can read and write this memory directly."""
    return memory.is_cuda or memory.is_pinned()


def settle(device: torch.device) -> None:
    """Wait until all work that was issued to a device is done.

    On every kind of GPU, a copy with `non_blocking` returns before it is done. A CPU works synchronously.
    """
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    _fields_ = (("order", ctypes.c_int), ("source", _Location), ("target", _Location), ("flags", ctypes.c_uint))


_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_size_t
# Arguments: targets, sources, sizes, number of copies; attributes, the first copy of each, number of attributes;
# index of the failed copy; stream.
_CALL = ctypes.CFUNCTYPE(
    ctypes.c_int, _POINTER, _POINTER, _POINTER, _SIZE, _POINTER, _POINTER, _SIZE, _POINTER, _POINTER
)


@lru_cache(1)
def _driver_call() -> Callable[..., int] | None:
    """Return the driver's `cuMemcpyBatchAsync`; None if the driver is missing or too old."""
    try:
        find = ctypes.CDLL("libcuda.so.1").cuGetProcAddress_v2
    except (OSError, AttributeError):
        return None
    address, state = ctypes.c_void_p(), ctypes.c_int()
    flags = ctypes.c_uint64(0)
    failed = find(b"cuMemcpyBatchAsync", ctypes.byref(address), VERSION, flags, ctypes.byref(state))
    return _CALL(address.value) if not failed and address.value else None


def _submit(call: Callable[..., int], copies: Copies) -> None:
    attributes, first, wrong = _Attributes(order=STREAM_ORDER), _SIZE(0), _SIZE(0)
    arrays = [np.ascontiguousarray(array) for array in (copies.targets, copies.sources, copies.sizes)]
    code = call(
        *(array.ctypes.data for array in arrays), len(copies.sizes),
        ctypes.byref(attributes), ctypes.byref(first), 1, ctypes.byref(wrong), torch.cuda.current_stream().cuda_stream,
    )  # fmt: skip
    if code:
        raise RuntimeError(f"cuMemcpyBatchAsync failed with error {code} of CUDA at copy {wrong.value}")
