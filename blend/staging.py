"""Copies the stored parts of the next layers to the GPU while the model computes a layer."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from lmc.blend.canvas import KV
from lmc.shapes import KVShape

SIDES = 2  # buffers: the parts in one are placed while the next layer's are copied into the other
# Layers whose copies may be issued before their parts are placed. The bus then goes on while the host is busy with a
# layer. More than the number of buffers would overwrite parts that are not placed yet.
AHEAD = SIDES


class Staging:
    """Two buffers on the GPU for the stored parts of one prompt.

    Copies are issued on a separate stream. It waits until the previous parts in a buffer have been placed. The model's
    stream waits until a layer's parts have been copied. With parts in page-locked memory, the host never waits. The
    model's stream is the current stream of the copies' GPU, which need not be the current GPU.
    """

    def __init__(
        self,
        stage: Callable[[int, KV], None],
        shapes: Sequence[KVShape],
        tokens: int,
        device: torch.device,
        stream: torch.cuda.Stream,
    ) -> None:
        """Allocate the buffers.

        `stage` copies a layer's parts, of `tokens` tokens and of the shape in `shapes`, to keys and values `[T, H, D]`.
        """
        self._stage, self._stream = stage, stream
        self._shapes, self._tokens = shapes, tokens
        size = max(shape.part_bytes(tokens) for shape in shapes)
        self._buffers = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(SIDES)]
        for buffer in self._buffers:
            buffer.record_stream(stream)  # An aborted blend must not free its memory before the copies end.
        stream.wait_stream(self._model)  # The model's stream may still use the buffers' memory.
        self._copied: dict[int, torch.cuda.Event] = {}  # by layer
        self._placed: dict[int, torch.cuda.Event] = {}  # by layer

    @property
    def _model(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._stream.device)

    def begin(self, layer: int) -> None:
        """Issue the copies of a layer, unless they have been issued. The layer `SIDES` before it must be placed."""
        if layer in self._copied:
            return
        with torch.cuda.stream(self._stream):
            if layer >= SIDES:
                self._stream.wait_event(self._placed.pop(layer - SIDES))
            self._stage(layer, self._buffer(layer))
            self._copied[layer] = self._stream.record_event()

    def _buffer(self, layer: int) -> KV:
        """Return the buffer of a layer as one part."""
        return self._shapes[layer].part(self._buffers[layer % SIDES], self._tokens)

    @contextmanager
    def parts(self, layer: int) -> Iterator[KV]:
        """Yield the parts of a layer, as one part. The caller must place them in this block."""
        self.begin(layer)
        self._model.wait_event(self._copied.pop(layer))
        yield self._buffer(layer)
        self._placed[layer] = self._model.record_event()
