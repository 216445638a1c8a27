"""Copies the stored parts of the next layer to the GPU while the model works on one."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from lmc.blend.kernels.operations import Kernels

SIDES = 2  # While the parts in one buffer are placed, those of the next layer are copied into the other one.


class Staging:
    """Two buffers on the GPU for the stored parts of one prompt.

    Copies are issued on a stream of their own. It waits until what was in a buffer has been placed, and the model's
    stream waits until a layer's parts are there; nothing waits on the host, if the parts are in page-locked memory.
    The model's stream is the current one of that GPU, which need not be the current GPU.
    """

    def __init__(
        self,
        kernels: Kernels,
        parts_of: Callable[[int], Sequence[torch.Tensor]],
        make_buffer: Callable[[], torch.Tensor],
        stream: torch.cuda.Stream,
    ) -> None:
        """`parts_of` returns the parts of a layer, and `make_buffer` memory for them side by side, `[K, T, H, D]`."""
        self._stage, self._parts_of, self._stream = kernels.stage, parts_of, stream
        self._buffers = [make_buffer() for _ in range(SIDES)]
        for buffer in self._buffers:
            buffer.record_stream(stream)  # A blend that is given up leaves its memory to others only after the copies.
        stream.wait_stream(self._model)  # which may still use the memory for something else
        self._copied: dict[int, torch.cuda.Event] = {}  # by layer
        self._placed: dict[int, torch.cuda.Event] = {}  # by buffer

    @property
    def _model(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._stream.device)

    def begin(self, layer: int) -> None:
        """Issue the copies of a layer, unless that has been done."""
        side = layer % SIDES
        if layer in self._copied:
            return
        with torch.cuda.stream(self._stream):
            if side in self._placed:
                self._stream.wait_event(self._placed[side])
            self._stage(self._parts_of(layer), self._buffers[side])
            self._copied[layer] = self._stream.record_event()

    @contextmanager
    def parts(self, layer: int) -> Iterator[torch.Tensor]:
        """Yield the parts of a layer `[K, T, H, D]`, which have to be placed in this block."""
        self.begin(layer)
        self._model.wait_event(self._copied.pop(layer))
        yield self._buffers[layer % SIDES]
        self._placed[layer % SIDES] = self._model.record_event()
