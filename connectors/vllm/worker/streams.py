"""The GPU streams on which a worker copies in parallel with the model's work. A CPU has no streams.

Here, "GPU" means a CUDA or ROCm device. On other devices, copies are issued like the model's work.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from lmc.copies import settle

E = TypeVar("E", bound=tuple[Any, ...])


class Streams:
    """One stream for loads and one for saves."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._cuda = device, device.type == "cuda"
        self.load = torch.cuda.Stream(device) if self._cuda else None
        self.save = torch.cuda.Stream(device) if self._cuda else None

    @contextmanager
    def behind(self, stream: "torch.cuda.Stream | None", *used: torch.Tensor) -> Iterator[None]:
        """Issue copies on a stream, after all model work that has been issued until now.

        The memory of the model's tensors `used` is not reused before the copies are complete.
        """
        if stream is None:
            yield
            return
        for tensor in used:
            tensor.record_stream(stream)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            yield

    def wait_for(self, event: "torch.cuda.Event | None") -> None:
        """Make the model's work wait for an event, without blocking the host."""
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)

    def event(self) -> "torch.cuda.Event | None":
        """Return an event that is complete when all copies issued until now are; None if they are already complete.

        On devices other than CUDA devices, the host waits for the copies.
        """
        if not self._cuda:
            settle(self._device)
        return torch.cuda.current_stream(self._device).record_event() if self._cuda else None


class LayerLoads:
    """Loads of whole pages, layer by layer; the model's work waits for one layer at a time."""

    def __init__(
        self, load: Callable[[int], None], cost: int, streams: Streams, used: Sequence[torch.Tensor] = ()
    ) -> None:
        """Prepare loads without issuing them.

        `load` issues the copies of a layer, for which it reads the tensors `used`. `cost` is the number of rows whose
        computation would take the same time.
        """
        self._load, self.cost, self._streams, self._used = load, cost, streams, used
        self._issued: dict[int, torch.cuda.Event | None] = {}  # by layer

    def begin(self, layer: int) -> None:
        """Issue the copies of a layer after the model work issued until now, unless they have been issued."""
        if layer not in self._issued:
            with self._streams.behind(self._streams.load, *self._used):
                self._load(layer)
                self._issued[layer] = self._streams.event()

    def finish(self, layer: int) -> None:
        """Make the model's work wait for the copies of a layer."""
        self.begin(layer)
        self._streams.wait_for(self._issued[layer])


def seconds_of(work: Callable[[], None]) -> float:
    """Run some work on a GPU, wait for it, and return its seconds."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000


def divided(entries: list[E]) -> tuple[list[E], list[E]]:
    """Split entries by whether their event, the first item, is complete; return complete and waiting entries."""
    over: list[E] = []
    waiting: list[E] = []
    for entry in entries:
        (over if entry[0] is None or entry[0].query() else waiting).append(entry)
    return over, waiting
