"""The streams of a worker, in whatever order a GPU gets on with what was issued to them."""

import pytest
import torch
from test_staging import DEVICE, Machine, Stream, Task

from lmc.connectors.vllm.worker.streams import LayerLoads, Streams
from lmc.storage.memory.slab import Slab, Slot

LAYERS = 5
SLOT = Slot(0)


class Kept(torch.Tensor):
    """Notes the streams for which its memory is kept."""

    def record_stream(self, stream) -> None:
        self.kept = [*getattr(self, "kept", []), stream]


def saved(monkeypatch, seed: int) -> list[float]:
    """Save what the model has computed, and let it be overwritten when the event says that it is saved."""
    machine = Machine(seed)
    machine.installed(monkeypatch)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream(machine))
    streams, blocks = Streams(DEVICE), torch.arange(2).as_subclass(Kept)
    page, slot = torch.zeros(3), torch.zeros(3)
    machine.issue(machine.model, Task(lambda: page.fill_(3)))
    with streams.behind(streams.save, blocks):
        machine.issue(machine.current, Task(lambda: slot.copy_(page)))
    with streams.behind(streams.save):
        event = streams.event()
    while not event.over:
        machine.go_on(1)
    machine.issue(machine.model, Task(lambda: page.fill_(5)))
    machine.finish()
    assert blocks.kept == [streams.save]
    return slot.tolist()


def test_a_save_sees_what_the_model_computed_and_is_over_before_its_event(monkeypatch):
    assert all(saved(monkeypatch, seed) == [3] * 3 for seed in range(100))


def test_the_control_a_save_that_does_not_wait_sees_other_bytes(monkeypatch):
    monkeypatch.setattr(Stream, "wait_event", lambda stream, event: None)
    assert not all(saved(monkeypatch, seed) == [3] * 3 for seed in range(100))


class Loads:
    """Pages of some layers that another request still reads, and what is loaded into them."""

    def __init__(self, monkeypatch, seed: int) -> None:
        self.machine = Machine(seed)
        self.machine.installed(monkeypatch)
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream(self.machine))
        self.pages, self.before, self.found = (torch.full((LAYERS, 3), -1.0) for _ in range(3))
        self.issue(lambda: self.before.copy_(self.pages))
        self.streams, self.blocks = Streams(DEVICE), torch.arange(2).as_subclass(Kept)
        self.layers = LayerLoads(self._load, 1, self.streams, used=[self.blocks])

    def issue(self, run, ready=lambda: True) -> None:
        self.machine.issue(self.machine.current, Task(run, ready))

    def _load(self, layer: int) -> None:
        self.issue(lambda: self.pages[layer].fill_(layer))

    def all_right(self) -> bool:
        """Use each layer when it is there, and load the next one meanwhile, unless that has not arrived."""
        for layer in range(LAYERS):
            self.layers.finish(layer)
            if layer % 3 and layer + 1 < LAYERS:
                self.layers.begin(layer + 1)
            self.machine.some()
            self.issue(lambda layer=layer: self.found[layer].copy_(self.pages[layer]))
            self.machine.some()
        self.machine.finish()
        assert self.blocks.kept == [self.streams.load] * LAYERS
        wanted = torch.arange(float(LAYERS))[:, None].expand(-1, 3)
        return torch.equal(self.found, wanted) and bool((self.before == -1).all())


def test_each_layer_of_a_load_is_there_when_it_is_used_and_no_page_is_overwritten_too_early(monkeypatch):
    assert all(Loads(monkeypatch, seed).all_right() for seed in range(100))


@pytest.mark.parametrize("who", ["model", "load"])
def test_the_control_loads_that_nobody_waits_for_are_wrong(monkeypatch, who):
    wait = Stream.wait_event

    def careless(stream, event) -> None:
        if (stream is stream.machine.model) != (who == "model"):
            wait(stream, event)

    monkeypatch.setattr(Stream, "wait_event", careless)
    assert not all(Loads(monkeypatch, seed).all_right() for seed in range(100))


def test_the_next_layer_is_loaded_while_the_model_computes_one(monkeypatch):
    loads = Loads(monkeypatch, 0)
    loads.layers.finish(0)
    loads.layers.begin(1)
    loads.issue(lambda: None, ready=lambda: False)  # a long computation
    loads.machine.go_on(100)
    assert loads.pages[:3, 0].tolist() == [0, 1, -1]


def test_a_cpu_has_no_streams():
    streams = Streams(torch.device("cpu"))
    with streams.behind(streams.save, torch.zeros(1)):
        assert streams.event() is None


def test_copies_of_a_gpu_without_cuda_are_done_when_no_event_is_left_to_wait_for(monkeypatch):
    """Chunks are let go of, and slots given to others, when there is no event. An Intel GPU copies beside the host."""
    waited = []
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    for kind, wanted in (("cpu", 0), ("xpu", 1)):
        streams = Streams(torch.device(kind))
        with streams.behind(streams.save):
            assert streams.event() is None
        assert len(waited) == wanted


class HostWaits(Stream):
    """A stream, or an event of one, for which the host waits."""

    def record(self, stream) -> None:
        self._event = stream.record_event()

    def synchronize(self) -> None:
        event = self._event if hasattr(self, "_event") else self.record_event()
        while not event.over:
            self.machine.go_on(1)

    @property
    def over(self) -> bool:
        return self._event.over


class Later:
    """A slot, to which bytes are copied when the current stream comes to that."""

    def __init__(self, machine: Machine, memory: torch.Tensor) -> None:
        self.machine, self.memory = machine, memory

    def fill_(self, value: int) -> None:
        self.machine.issue(self.machine.current, Task(lambda: self.memory.fill_(value)))

    def copy_(self, source: "Later", **_) -> None:
        self.machine.issue(self.machine.current, Task(lambda: self.memory.copy_(source.memory)))


class SimulatedSlab(Slab):
    """A slab of one slot in the memory of a simulated GPU, or of its host."""

    def __init__(self, machine: Machine, device: torch.device) -> None:
        super().__init__(1, 1, 4096)
        self.machine, self.device = machine, device

    def slot(self, slot: Slot) -> Later:
        return Later(self.machine, super().slot(slot))


def moved(monkeypatch, seed: int) -> tuple[int, int, bytes]:
    """Move what the model has written to a GPU's slab to the host, and back; then read what the model writes there."""
    machine = Machine(seed)
    machine.installed(monkeypatch)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: HostWaits(machine))
    monkeypatch.setattr(torch.cuda, "Event", lambda: HostWaits(machine))
    gpu, host = SimulatedSlab(machine, DEVICE), SimulatedSlab(machine, torch.device("cpu"))
    gpu.slot(SLOT).fill_(7)
    gpu.written(SLOT)
    host.copy_from(SLOT, gpu, SLOT)
    to_host = int(host.part(SLOT, 0)[0])
    gpu.slot(SLOT).fill_(1)
    gpu.written(SLOT)  # and given up
    gpu.copy_from(SLOT, host, SLOT)
    to_gpu = int(gpu.part(SLOT, 0)[0])
    gpu.slot(SLOT).fill_(5)
    gpu.written(SLOT)
    return to_host, to_gpu, bytes(gpu.snapshot(SLOT, 1, 1))


def test_copies_between_slabs_wait_for_the_model_and_the_host_waits_for_them(monkeypatch):
    assert all(moved(monkeypatch, seed) == (7, 7, b"\x05") for seed in range(100))


@pytest.mark.parametrize(("waits", "who"), [("wait_event", Stream), ("synchronize", HostWaits)])
def test_the_control_slabs_without_a_wait_have_other_bytes(monkeypatch, waits, who):
    monkeypatch.setattr(who, waits, lambda *_: None)
    assert not all(moved(monkeypatch, seed) == (7, 7, b"\x05") for seed in range(100))
