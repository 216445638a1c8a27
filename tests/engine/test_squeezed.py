"""Too few blocks and too few slots for what is asked at once: the engine preempts, lmc stores and loads what it can,
tokens are right.
"""

import random

import pytest
from lab import Prompt, answer, engine, facts, words
from stepping import Steps, only_on_disk, poison, threads_are_done
from tier_wrappers import Faulty

pytestmark = pytest.mark.long

DOCUMENTS = [words(150, 1), words(300, 2), words(150, 3), words(90, 4)]
PROMPT = Prompt([DOCUMENTS[i] for i in (2, 0, 3, 1)])
PLAIN = [words(360, 10), words(330, 11), words(200, 12)]
COUNT = 150
EXACT = PROMPT.blend(ratio=1.0)
SIZES = {
    "max_model_len": 1024,
    "max_num_batched_tokens": 128,
    "max_num_seqs": 8,
    "long_prefill_token_threshold": 64,
}


@pytest.fixture(scope="module", params=["llama", "gemma3mixed"])
def shared(request, models, tmp_path_factory):
    """So few blocks of 32 tokens that requests preempt each other, 12 chunks of 128 in memory, a disk."""
    # With a table for windows, a block has half of the layers, and requests take fewer blocks for windows.
    sizes = {**SIZES, "num_gpu_blocks_override": 76 if request.param == "gemma3mixed" else 52}
    settings = {"local_disk": str(tmp_path_factory.mktemp("disk")), "max_local_cpu_size": 12.5 * (1 << 19) / (1 << 30)}
    with engine(models(request.param), settings, **sizes) as lab:
        assert lab.store.slots == 12
        lab.preempting = {}
        lab.wanted = {len(tokens): answer(lab.vanilla(tokens, COUNT)) for tokens in (PROMPT.tokens, *PLAIN)}
        yield lab


@pytest.fixture
def lab(shared, monkeypatch):
    """The engine with the documents on disk; proven to hold nothing afterwards."""
    shared.forget()
    shared.learn(DOCUMENTS)
    only_on_disk(shared)
    poison()
    shared.preempted = []
    original = shared.scheduler._preempt_request

    def preempt(request, *arguments, **named):
        shared.preempted.append(request.num_prompt_tokens)
        return original(request, *arguments, **named)

    monkeypatch.setattr(shared.scheduler, "_preempt_request", preempt)
    yield shared
    monkeypatch.undo()
    shared.settle()
    threads_are_done(shared)
    shared.check()


def right(lab, outs) -> list[bool]:
    return [answer(out) == lab.wanted[len(out.prompt_token_ids)] for out in outs]


ORDERS = [(0, None, 1), (1, None, 2), (None, 0, 1, 2), (0, 1, 2, None, 0)]


@pytest.mark.parametrize("order", ORDERS)
def test_blends_and_plain_requests_preempt_each_other(lab, order):
    """None is a blend. Twice: the second time much of it is on disk, and some in the engine."""
    asked = [(PROMPT.tokens, EXACT) if i is None else (PLAIN[i], None) for i in order]
    for _ in range(2):
        outs = lab.ask_all(asked, COUNT)
        assert right(lab, outs) == [True] * len(order)
    lab.preempting[order] = bool(lab.preempted)
    lab.settle()


def test_most_of_these_orders_have_led_to_preemption(shared):
    """Not each: on a busy machine chunks may arrive so late that requests no longer meet."""
    assert sum(shared.preempting.values()) > len(ORDERS) // 2


def test_a_running_request_is_preempted_while_another_is_loaded(lab):
    steps = Steps(lab)
    runs = steps.add(PLAIN[0], None, COUNT)
    steps.until(lambda: runs in steps.outputs)
    blends = steps.add(PROMPT.tokens, EXACT, COUNT)
    steps.until(lambda: steps.loading(blends))
    steps.preempt(runs)
    assert steps.loading(blends)
    steps.run()
    assert right(lab, steps.outputs.values()) == [True, True]
    assert facts(steps.outputs[blends])["reused_tokens"] > 0


def test_learning_leaves_blocks_for_requests(lab):
    """Documents are learned beside requests that need nearly all blocks, and all are known at the end."""
    lab.forget()
    outs = lab.ask_all([(PLAIN[0], None), (PROMPT.tokens, EXACT), (PLAIN[1], None)], COUNT)
    assert right(lab, outs) == [True] * 3
    lab.settle()
    assert all(lab.store.lookup([key for d in DOCUMENTS for key in lab.document_keys(d)]))


def act(lab, steps: Steps, draw: random.Random, alive: dict) -> None:
    """One thing that may happen to an engine."""
    running = [name for name in alive if name in steps.outputs and steps.request(name) in lab.scheduler.running]
    drawn = draw.random()
    if drawn < 0.35 or not alive:
        tokens, lmc = draw.choice([(PROMPT.tokens, EXACT), (PROMPT.tokens, None), *((plain, None) for plain in PLAIN)])
        if draw.random() < 0.3:
            tokens, lmc = draw.choice([(PROMPT.tokens, PROMPT.blend(strategy="none")), (DOCUMENTS[0], {"learn": True})])
        alive[steps.add(tokens, lmc, draw.randrange(1, COUNT), salt=draw.choice([None, None, "tenant"]))] = lmc
    elif drawn < 0.42:
        steps.abort(draw.choice(list(alive)))
    elif drawn < 0.5 and running:
        steps.preempt(draw.choice(running))
    elif drawn < 0.55:
        only_on_disk(lab)
    else:
        steps.step(draw.choice([1, 2, 5, 20]))
    for name in list(alive):
        if not any(key.rsplit("-", 1)[0] == name for key in lab.scheduler.requests):
            del alive[name]


@pytest.mark.parametrize("seed", range(4))
def test_anything_in_any_order(lab, seed):
    """Requests of all kinds and two tenants, aborts, preemptions, a disk that fails now and then: exact answers are
    right.
    """
    draw, steps, exact, alive = random.Random(seed), Steps(lab), {}, {}
    tiers = lab.tiers
    honest, faults = tiers[0], random.Random(seed)
    tiers[0] = Faulty(honest, lambda verb, key: OSError("no luck") if faults.random() < 0.05 else None)
    for _ in range(80):
        act(lab, steps, draw, alive)
        exact |= {name: True for name, lmc in alive.items() if lmc in (None, EXACT)}
    steps.run()
    tiers[0] = honest
    outs = [steps.outputs[name] for name in exact if name in steps.outputs]
    assert len(outs) > 5
    for out in outs:
        assert answer(out) == lab.wanted[len(out.prompt_token_ids)][: len(answer(out))]
