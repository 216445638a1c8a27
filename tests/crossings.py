"""Finds memory that crosses the streams of a GPU and is used too early or freed too early. A CPU is enough for it.

torch's allocator gives freed memory to the next tensor of the stream on which it was allocated, at once, although the
stream may still use it for the tensor before, and another stream as well. Another stream must therefore wait for the
tensor's own stream before it uses the tensor. The tensor must be recorded there (`record_stream`), or live until its
own stream has waited for that use.
"""

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from test_copies import execute
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lmc.connectors.vllm.worker.streams import Streams
from lmc.copies import Copies


class OneStream:
    """A stream, and for each stream the last operation that is over before this stream's next one."""

    cuda_stream = 1

    def __init__(self, name: str, crossings: "Crossings") -> None:
        self.name, self.over, self._crossings = name, defaultdict(int), crossings

    @property
    def device(self) -> torch.device:
        return self._crossings.device

    def record_event(self) -> "Event":
        return Event(dict(self.over), self._crossings)

    def wait_event(self, event: "Event") -> None:
        for stream, operation in event.over.items():
            self.over[stream] = max(self.over[stream], operation)

    def wait_stream(self, other: "OneStream") -> None:
        self.wait_event(other.record_event())


class Event:
    """What is over when a stream has come to this point. It is not over yet when the host asks for the first time."""

    def __init__(self, over: dict[OneStream, int], crossings: "Crossings") -> None:
        self.over, self._crossings, self._asked = over, crossings, False

    def query(self) -> bool:
        if self._asked:  # What the host issues from now on comes later, on every stream.
            for stream in self._crossings.streams:
                stream.wait_event(self)
        asked, self._asked = self._asked, True
        return asked


class Memory(NamedTuple):
    """A tensor's memory: its stream, the operation there that made it, and the last ones with it on other streams."""

    stream: OneStream
    made: int
    start: int
    bytes: int
    used: dict[OneStream, tuple[int, str]]
    recorded: set[OneStream]


def streams_of(crossings: "Crossings") -> Streams:
    """A worker's streams as a GPU has them, on a device that has none."""
    streams = Streams(crossings.device)
    streams._cuda, streams.load, streams.save = True, crossings.load, crossings.save
    return streams


def memory_of(tensor: torch.Tensor) -> int:
    """What torch knows a tensor's memory by, which all views of it share."""
    return tensor.untyped_storage()._cdata


class Crossings:
    """Notes, while it is entered, on which stream each operation uses which memory; `found` has what was too early.

    Host memory is not watched, nor memory that was allocated before: pages, weights and slabs are never freed. What is
    made on a device, or from a tensor on one, is the device's memory; the rest is on the host until it is sent.
    """

    def __init__(self, device: torch.device, monkeypatch: Any) -> None:
        self.device, self.found, self.crossed = device, [], 0
        self.model, self.load, self.save = self.streams = [OneStream(n, self) for n in ("model", "load", "save")]
        self.current, self.to_device, self._operations = self.model, False, 0
        self._host: set[int] = set()
        self._memory: dict[int, Memory] = {}
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: self.current)
        monkeypatch.setattr(torch.cuda, "stream", self._stream)
        monkeypatch.setattr(torch.Tensor, "record_stream", _recorder(self))

    def __enter__(self) -> "Crossings":
        self._modes = ExitStack()
        for mode in (_Calls(self), _Operations(self)):
            self._modes.enter_context(mode)
        return self

    def __exit__(self, *_: object) -> None:
        self._modes.close()

    @contextmanager
    def _stream(self, stream: OneStream):
        before, self.current = self.current, stream
        yield
        self.current = before

    def on_host(self, tensor: torch.Tensor) -> bool:
        return memory_of(tensor) in self._host

    def used(self, operation: str, *given: torch.Tensor) -> None:
        """An operation is issued on the current stream."""
        self._use(operation, [self._memory.get(memory_of(one)) for one in given])

    def made(self, tensor: torch.Tensor, *, on_host: bool) -> None:
        """An operation has returned a tensor, whose memory may be new."""
        storage, at = tensor.untyped_storage(), memory_of(tensor)
        if at in self._memory or at in self._host or not storage.nbytes():
            return
        if on_host:
            self._host.add(at)
        else:
            operation = self.current.over[self.current]
            self._memory[at] = Memory(self.current, operation, storage.data_ptr(), storage.nbytes(), {}, set())
        weakref.finalize(storage, self._freed, at).atexit = False

    def submitted(self, copies: Copies) -> None:
        """A list of copies by addresses is issued on the current stream, and executed."""
        ranges = [
            (at, at + size)
            for side in (copies.sources, copies.targets)
            for at, size in zip(side.tolist(), copies.sizes.tolist(), strict=True)
        ]
        inside = [
            memory
            for memory in self._memory.values()
            if any(start < memory.start + memory.bytes and memory.start < stop for start, stop in ranges)
        ]
        self._use("copies", inside)
        execute(copies)

    def recorded(self, tensor: torch.Tensor, stream: OneStream) -> None:
        if memory := self._memory.get(memory_of(tensor)):
            memory.recorded.add(stream)

    def _use(self, operation: str, given: Iterable[Memory | None]) -> None:
        self._operations += 1
        self.current.over[self.current] = self._operations
        for memory in given:
            if memory is not None and memory.stream is not self.current:
                self.crossed += 1
                memory.used[self.current] = self._operations, operation
                if self.current.over[memory.stream] < memory.made:
                    self._find("used", memory, operation, self.current)

    def _freed(self, at: int) -> None:
        self._host.discard(at)
        if (memory := self._memory.pop(at, None)) is None:
            return
        for stream, (last, operation) in memory.used.items():
            if stream not in memory.recorded and memory.stream.over[stream] < last:
                self._find("freed", memory, operation, stream)

    def _find(self, what: str, memory: Memory, operation: str, stream: OneStream) -> None:
        text = f"{memory.bytes} bytes of the {memory.stream.name} stream were {what} too early"
        self.found.append(f"{text}: {operation} of the {stream.name} stream")


class _Operations(TorchDispatchMode):
    """Sees each operation with the tensors that it is given and that it returns."""

    def __init__(self, crossings: Crossings) -> None:
        super().__init__()
        self._crossings = crossings

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        crossings, given = self._crossings, _tensors((args, kwargs))
        made = operation(*args, **(kwargs or {}))
        crossings.used(str(operation), *given)
        sources = given if operation is not torch.ops.aten.lift_fresh.default else []  # the call of `torch.tensor`
        on_host = not crossings.to_device and all(map(crossings.on_host, sources))
        for one in _tensors(made):
            crossings.made(one, on_host=on_host)
        return made


class _Calls(TorchFunctionMode):
    """Sees which calls name a device, which is that of the host here."""

    def __init__(self, crossings: Crossings) -> None:
        super().__init__()
        self._crossings = crossings

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs, crossings = kwargs or {}, self._crossings
        before, crossings.to_device = crossings.to_device, kwargs.get("device") is not None
        try:
            made = function(*args, **kwargs)
            if function is torch.Tensor.to and crossings.on_host(made) and _names_device(args[1:], kwargs):
                crossings.to_device = True
                made = made.clone()
            return made
        finally:
            crossings.to_device = before


def _recorder(crossings: Crossings) -> Callable[[torch.Tensor, OneStream], None]:
    """Return what takes the place of `Tensor.record_stream`. A bound method would not get the tensor."""

    def record_stream(tensor: torch.Tensor, stream: OneStream) -> None:
        crossings.recorded(tensor, stream)

    return record_stream


def _names_device(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    return any(isinstance(one, torch.device | str) for one in (*args, *kwargs.values()))


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [one for one in tree_leaves(tree) if isinstance(one, torch.Tensor)]
