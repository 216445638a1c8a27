"""An error in any hook of either side is a miss: the answers are right, nothing is held, and the engine lives."""

import logging

import pytest
from amount import mostly_long
from lab import DOCUMENTS, PLAIN, PROMPT, agree, words
from stepping import Steps, engine_pages, poison, worker
from vllm.config import KVEventsConfig
from vllm.distributed.kv_transfer import get_kv_transfer_group

from lmc.connectors.vllm import guard
from lmc.connectors.vllm.scheduler.scheduler import Scheduler

EXACT = words(600, 77)
EVERYTHING = PROMPT.blend(strategy="union", ratio=1.0)  # A blend that repairs everything is as full prefill.
SCHEDULER = ["arrive", "claim", "allocated", "sources", "plan", "reported", "finished"]
SCHEDULER += ["numbers", "take_observed", "take_events"]
WORKER = ["work", "save", "cancel", "outcome", "report"]


class PlantedError(Exception):
    """What no code of lmc expects."""


@pytest.fixture(scope="module", params=mostly_long(["llama", "gemma3mixed"], "llama"))
def shared(request, models, shared_engine):
    # With statistics and events, vLLM calls all hooks.
    events = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    lab = shared_engine(models(request.param), disable_log_stats=False, kv_events_config=events)
    return lab, {name: lab.vanilla(tokens) for name, tokens in ASKED.items()}


ASKED = {"exact": EXACT, "blend": PROMPT.tokens, "plain": PLAIN}


def guards_of(lab):
    """What catches errors on the scheduler's side and on the worker's."""
    return [side._guard for side in (lab.connector, get_kv_transfer_group())]


@pytest.fixture
def lab(shared):
    """The engine, with documents and a prefix stored, and nothing in its own cache."""
    lab, _ = shared
    guards = guards_of(lab)
    lab.forget()
    lab.learn(DOCUMENTS)
    lab.ask(EXACT)
    lab.forget_prefixes()
    poison()
    yield lab
    for one in guards:
        for hook in one.errors:
            one.errors[hook] = 0
        one.new_errors()
    lab.lmc.off = False
    lab.lmc.has_news = True
    lab.connector.get_kv_connector_stats()  # The engine's counters never decrease.
    lab.check()


def plant(monkeypatch, owner, name, when, times=1):
    """Let the method raise `times` times, before or after it has done its work; return what counts the errors."""
    original, raised = getattr(owner, name), []

    def raising(*arguments, **named):
        if len(raised) >= times:
            return original(*arguments, **named)
        raised.append(name)
        if when == "after":
            original(*arguments, **named)
        raise PlantedError(name)

    monkeypatch.setattr(owner, name, raising)
    return raised


def ask_all(lab):
    return lab.ask_all([(EXACT, None), (PROMPT.tokens, EVERYTHING), (PLAIN, None), (words(300, 5), None)])[:3]


# What a method returns last cannot be lost by an error of its own, and is planted before.
LAST = {"plan", "outcome", "report"}


@pytest.mark.parametrize(
    ("name", "when"),
    [
        *((name, "before") for name in (*SCHEDULER, *WORKER, "take_plan")),
        *((name, "after") for name in (*SCHEDULER, *WORKER) if name not in LAST),
    ],
)
def test_an_error_in_a_hook_is_a_miss(shared, lab, monkeypatch, name, when):
    raised = plant(monkeypatch, worker() if name in WORKER else lab.lmc, name, when)
    found = ask_all(lab)
    lab.settle()
    assert raised
    assert guards_of(lab)[name in WORKER].errors.total() == 1
    assert all(agree(one, wanted) for one, wanted in zip(found, shared[1].values(), strict=True))
    assert all(agree(one, wanted) for one, wanted in zip(ask_all(lab), shared[1].values(), strict=True))


def test_a_chunk_that_cannot_be_saved_fails_alone(lab, monkeypatch, caplog):
    """The chunks of a step are saved together."""
    tokens, pages, failed = words(600, 78), engine_pages(), []
    copy = pages.save

    def failing(layer, blocks, part):
        failed[:] = failed or [tuple(blocks)]  # the first chunk of the first step
        if tuple(blocks) in failed:
            raise PlantedError("save")
        copy(layer, blocks, part)

    monkeypatch.setattr(pages, "save", failing)
    before = lab.lmc.numbers()["stored_chunks"]
    lab.ask(tokens)
    lab.settle()
    assert lab.lmc.numbers()["stored_chunks"] - before == -(-len(tokens) // lab.lmc.engine.chunk_size) - 1
    assert caplog.text.count("lmc could not save a chunk") == 1
    assert failed


@pytest.mark.parametrize(
    "name", mostly_long(["arrive", "claim", "allocated", "plan", "reported", "finished"], "claim", "plan")
)
def test_lmc_switches_itself_off_if_errors_go_on(shared, lab, monkeypatch, caplog, name):
    plant(monkeypatch, lab.lmc, name, "before", times=1000)
    lab.lmc.engine.learning.clear()
    with caplog.at_level(logging.ERROR, "lmc"):
        for _ in range(guard.MAX_ERRORS):
            found = ask_all(lab)
            lab.forget_prefixes()
            assert all(agree(one, wanted) for one, wanted in zip(found, shared[1].values(), strict=True))
    assert lab.lmc.off
    assert guards_of(lab)[0].status.startswith("off: ")
    assert sum("switched itself off" in record.message for record in caplog.records) == 1
    assert sum("lmc failed in" in record.message for record in caplog.records) == 1
    monkeypatch.undo()
    loads = lab.numbers.get("loads", 0)
    found = ask_all(lab)
    assert all(agree(one, wanted) for one, wanted in zip(found, shared[1].values(), strict=True))
    assert lab.numbers.get("loads", 0) == loads
    assert lab.numbers["switched_off"] == 1


def test_a_reset_that_fails_switches_lmc_off_at_once(lab, monkeypatch):
    """What it has may be of other weights."""
    plant(monkeypatch, lab.lmc, "reset", "before")
    lab.settle()
    assert lab.connector.reset_cache() is False
    assert lab.lmc.off


def test_an_error_while_a_load_is_under_way_is_a_miss(shared, lab, monkeypatch):
    steps = Steps(lab)
    name = steps.add(PROMPT.tokens, EVERYTHING, 8)
    steps.until(lambda: steps.loading(name))
    plant(monkeypatch, worker(), "_advance", "before")
    steps.run()
    assert agree(steps.outputs[name], shared[1]["blend"])


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_error_while_loads_are_ended_for_a_sleep_is_a_miss(shared, lab, monkeypatch, when):
    """vLLM 0.33 frees its KV cache after this hook, so no load may continue."""
    steps = Steps(lab)
    name = steps.add(PROMPT.tokens, EVERYTHING, 8)
    steps.until(lambda: steps.loading(name))
    raised = plant(monkeypatch, worker(), "end_all", when)
    get_kv_transfer_group().unregister_kv_caches()
    assert raised
    assert worker().ends_loads
    poison()
    steps.run()
    assert agree(steps.outputs[name], shared[1]["blend"])


def test_whether_lmc_needs_steps_is_false_after_an_error(lab, monkeypatch):
    monkeypatch.setattr(Scheduler, "busy", property(lambda self: 1 / 0))
    assert lab.connector.has_pending_push_work() is False
