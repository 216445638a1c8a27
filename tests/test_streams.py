"""The streams of a worker, in whatever order a GPU gets on with what was issued to them."""

import torch
from test_staging import DEVICE, Machine, Stream, Task

from lmc.connectors.vllm.streams import Streams


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


def test_a_cpu_has_no_streams():
    streams = Streams(torch.device("cpu"))
    with streams.behind(streams.save, torch.zeros(1)):
        assert streams.event() is None
