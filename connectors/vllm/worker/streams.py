"""The streams of a GPU on which a worker copies beside the model's work. On a CPU there are none.

"GPU" means one of CUDA or ROCm here. On others, copies go where the model's work goes.
"""

from collections.abc import Callable, Iterator
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
        """Issue copies on a stream, which waits for what the model has been given to do until now.

        What they use of the model's own tensors is given to nobody else before they are over.
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
        """Let the model's work wait for an event; the host goes on."""
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)

    def event(self) -> "torch.cuda.Event | None":
        """Return an event that is over when the copies issued until now are done; None if they are done already.

        On GPUs of other kinds than CUDA's, the host waits for them.
        """
        if not self._cuda:
            settle(self._device)
        return torch.cuda.current_stream(self._device).record_event() if self._cuda else None


class LayerLoads:
    """Loads of whole pages, layer by layer, of which the model's work waits for one layer at a time."""

    def __init__(self, load: Callable[[int], None], cost: int, streams: Streams) -> None:
        """`load` issues the copies of a layer; `cost` is the number of rows that would take as long to compute."""
        self._load, self.cost, self._streams = load, cost, streams
        self._issued: dict[int, torch.cuda.Event | None] = {}  # by layer

    def begin(self, layer: int) -> None:
        """Issue the copies of a layer behind what the model has been given to do, unless that has been done."""
        if layer not in self._issued:
            with self._streams.behind(self._streams.load):
                self._load(layer)
                self._issued[layer] = self._streams.event()

    def finish(self, layer: int) -> None:
        """Let the model's work wait for the copies of a layer."""
        self.begin(layer)
        self._streams.wait_for(self._issued[layer])


def sent(numbers: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return numbers of the host on a device. The host does not wait for a GPU, because they are page-locked first."""
    return numbers.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else numbers


def seconds_of(work: Callable[[], None]) -> float:
    """Return how long a GPU takes for some work; wait for it."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000


def divided(entries: list[E]) -> tuple[list[E], list[E]]:
    """Return the entries whose event, their first item, is over, and the others."""
    over: list[E] = []
    waiting: list[E] = []
    for entry in entries:
        (over if entry[0] is None or entry[0].query() else waiting).append(entry)
    return over, waiting
