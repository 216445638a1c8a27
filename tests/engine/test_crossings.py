"""No memory of a worker is used or freed too early by a stream: saves, loads, learning and blends in a real engine."""

import pytest
import torch
from crossings import Crossings, streams_of
from lab import BLOCK, DOCUMENTS, PLAIN, PROMPT, agree, facts, words
from stepping import Steps, engine_pages, worker

from lmc.connectors.vllm.worker import paged, streams
from lmc.connectors.vllm.worker import worker as worker_module
from lmc.connectors.vllm.worker.streams import Streams
from lmc.connectors.vllm.worker.worker import EndedLoad

CPU, WISH = torch.device("cpu"), PROMPT.blend(strategy="union", ratio=0.15)


@pytest.fixture
def shared(shared_engine, models):
    return shared_engine(models("llama"))


@pytest.fixture(params=["one by one", "through GPU memory"])
def crossings(lab, monkeypatch, request):
    """The engine's worker, as if it had the streams of a GPU and a call for many copies."""
    found = Crossings(CPU, monkeypatch)
    monkeypatch.setattr(worker(), "_streams", streams_of(found))
    monkeypatch.setattr(engine_pages(), "_submit", found.submitted)
    monkeypatch.setattr(engine_pages(), "_stages", request.param == "through GPU memory")
    monkeypatch.setattr(paged, "can_submit", lambda memory: True)
    return found


@pytest.fixture
def events(crossings, monkeypatch):
    """By stream, whether what counts as copied when an event is over has been copied by then."""
    issued, make_event, copied = {}, Streams.event, {}

    def event(streams):
        made = make_event(streams)
        issued[made] = {stream: stream.over[stream] for stream in crossings.streams}
        return made

    def divided(entries):
        for entry in entries:
            stream = crossings.load if isinstance(entry, EndedLoad) else crossings.save
            copied[stream] = copied.get(stream, True) and entry[0].over.get(stream) == issued[entry[0]][stream]
        return streams.divided(entries)

    monkeypatch.setattr(Streams, "event", event)
    monkeypatch.setattr(worker_module, "divided", divided)
    return copied


def everything(lab, monkeypatch) -> None:
    """Save, load, learn, and blend; blend with copies of the engine's own blocks, and abort such a blend."""
    wanted = lab.vanilla(PLAIN)
    lab.ask(PLAIN)
    lab.forget_prefixes()
    out = lab.ask(PLAIN)
    assert facts(out)["exact_tokens"] > len(PLAIN) - BLOCK
    assert agree(out, wanted)
    lab.learn([*DOCUMENTS, words(200, 60)])
    lab.forget_pages()
    question = PROMPT.spans[-1][1]
    first, other, third = ([*PROMPT.tokens[:question], *words(40, seed)] for seed in (61, 62, 63))
    out = lab.ask(first, WISH)
    assert facts(out)["reused_tokens"] == sum(map(len, DOCUMENTS))
    lab.drop_backfills()  # In idle steps, the engine would compute the first prompt exactly.
    out = lab.ask(other, WISH)
    assert facts(out)["continued_tokens"] > 600
    lab.drop_backfills()
    steps = Steps(lab)
    name = steps.add(third, WISH)
    monkeypatch.setattr(worker(), "_step_tokens", 1)  # so that a step has one slice of the blend
    steps.until(lambda: steps.loading(name))
    assert steps.state(name).copied
    steps.abort(name)
    steps.step()
    lab.settle()


def test_no_memory_is_used_or_freed_too_early(lab, crossings, events, monkeypatch):
    with crossings:
        everything(lab, monkeypatch)
    assert events == {crossings.load: True, crossings.save: True}
    assert crossings.crossed, "the control: streams are in use"
    assert not crossings.found


def test_the_control_memory_that_is_not_recorded_is_found(lab, crossings, monkeypatch):
    monkeypatch.setattr(Crossings, "recorded", lambda *_: None)
    with crossings:
        everything(lab, monkeypatch)
    assert crossings.found
