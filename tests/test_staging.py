"""Staging, in whatever order a GPU's streams get on with what was issued to them."""

import random
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from lmc.blend.canvas import KV
from lmc.blend.kernels import place
from lmc.blend.staging import AHEAD, Staging
from lmc.shapes import KVShape

DEVICE, CPU = torch.device("cuda", 1), torch.device("cpu")
LAYERS, TOKENS = 6, 5
# Every other layer has longer keys than values.
SHAPES = [
    KVShape(layers=LAYERS, kv_heads=1, head_dim=2 + layer % 2, value_dim=2, dtype=torch.float32)
    for layer in range(LAYERS)
]


class Machine:
    """Streams that do what they are given in order, each at its own pace, when they are told to go on."""

    def __init__(self, seed: int) -> None:
        self._random, self._work = random.Random(seed), {}
        self.model, self.copies = Stream(self), Stream(self)
        self.current = self.model

    def installed(self, monkeypatch) -> None:
        """Stand in for the GPU."""
        monkeypatch.setattr(torch.cuda, "current_stream", self.current_stream)
        monkeypatch.setattr(torch.cuda, "stream", self.stream)
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)

    def current_stream(self, device):
        assert device == DEVICE, "the GPU of the copies need not be the current one"
        return self.current

    def issue(self, stream, what) -> None:
        self._work.setdefault(stream, []).append(what)

    def go_on(self, steps: int) -> None:
        """Do so many things that can be done, in any order."""
        for _ in range(steps):
            able = [stream for stream, work in self._work.items() if work and work[0].ready()]
            if not able:
                return
            self._work[self._random.choice(able)].pop(0).run()

    def finish(self) -> None:
        self.go_on(10**6)
        assert not any(self._work.values()), "streams wait for each other"

    def some(self) -> None:
        self.go_on(self._random.randrange(4))

    @contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before


class Task:
    """Something that a stream does when it may."""

    def __init__(self, run=lambda: None, ready=lambda: True) -> None:
        self.run, self.ready = run, ready


class Stream:
    """As much of a CUDA stream as staging and copies use."""

    device = DEVICE

    def __init__(self, machine: Machine, number: int = 1) -> None:
        self.machine, self.cuda_stream = machine, number

    def record_event(self):
        event = SimpleNamespace(over=False)
        self.machine.issue(self, Task(run=lambda: setattr(event, "over", True)))
        return event

    def wait_event(self, event) -> None:
        self.machine.issue(self, Task(ready=lambda: event.over))

    def wait_stream(self, other) -> None:
        self.wait_event(other.record_event())


def placed(monkeypatch, seed: int) -> list[KV]:
    """Stage and place all layers, and return what was placed."""
    machine, found = Machine(seed), [shape.empty(TOKENS, CPU) for shape in SHAPES]
    machine.installed(monkeypatch)

    def stage(layer, into) -> None:
        machine.issue(machine.current, Task(run=lambda: place.stage(parts_of(layer), into)))

    staging = Staging(stage, SHAPES, TOKENS, CPU, machine.copies)
    for layer in range(LAYERS):
        with staging.parts(layer) as parts:
            copy = Task(run=lambda into=found[layer], parts=parts: place.stage([parts], into))
            machine.issue(machine.current, copy)
        machine.some()
        for later in range(layer + 1, min(layer + 1 + seed % (AHEAD + 1), LAYERS)):  # the others have not arrived yet
            staging.begin(later)
        machine.some()
    machine.finish()
    return found


def parts_of(layer: int) -> list[KV]:
    """The parts of two documents."""
    keys, values = (torch.arange(5.0 * dim).add(100 * layer).view(5, 1, dim) for dim in SHAPES[layer].dims)
    return [(keys[:2], values[:2]), (keys[2:], values[2:])]


def right(found: list[KV]) -> bool:
    return all(
        torch.equal(one, torch.cat(halves))
        for layer, kv in enumerate(found)
        for one, halves in zip(kv, zip(*parts_of(layer), strict=True), strict=True)
    )


def test_every_layer_gets_its_own_parts_in_whatever_order_streams_go_on(monkeypatch):
    assert all(right(placed(monkeypatch, seed)) for seed in range(300))


@pytest.mark.parametrize("who", ["model", "copies"])
def test_the_control_a_stream_that_does_not_wait_gets_wrong_parts(monkeypatch, who):
    wait = Stream.wait_event

    def careless(stream, event) -> None:
        if stream is not getattr(stream.machine, who):
            wait(stream, event)

    monkeypatch.setattr(Stream, "wait_event", careless)
    assert not all(right(placed(monkeypatch, seed)) for seed in range(300))


def test_the_next_two_layers_are_copied_while_the_model_computes_one(monkeypatch):
    assert AHEAD == 2
    machine, staged = Machine(0), []
    machine.installed(monkeypatch)

    def stage(layer, into) -> None:
        machine.issue(machine.current, Task(lambda: staged.append(layer)))

    staging = Staging(stage, SHAPES, TOKENS, CPU, machine.copies)
    with staging.parts(0):
        pass
    machine.issue(machine.model, Task(ready=lambda: False))  # a long computation
    staging.begin(1)
    staging.begin(2)
    machine.go_on(100)
    assert staged == [0, 1, 2]


def test_a_buffer_is_not_given_to_a_layer_before_it_is_placed(monkeypatch):
    machine = Machine(0)
    machine.installed(monkeypatch)
    staging = Staging(lambda layer, into: None, SHAPES, TOKENS, CPU, machine.copies)
    staging.begin(1)
    with pytest.raises(KeyError):
        staging.begin(2)
