"""Whatever fails, comes late, goes away or is preempted: right tokens, nothing held, no hang."""

import itertools
import re
import time
from array import array
from dataclasses import replace

import pytest
from amount import mostly_long
from lab import DOCUMENTS, PLAIN, PROMPT, Prompt, agree, answer, engine, facts
from stepping import SECONDS, Clock, Gate, Steps, layers_of_lmc, only_on_disk, poison, threads_are_done, worker
from tier_wrappers import Delayed
from vllm import envs

from lmc.connectors.vllm.messages import SaveJob, StepPlan
from lmc.connectors.vllm.scheduler.admission import Admission
from lmc.connectors.vllm.worker import memory
from lmc.connectors.vllm.worker import worker as worker_module
from lmc.connectors.vllm.worker.canvas import PagedCanvas
from lmc.connectors.vllm.worker.rank_slab import RankSlab
from lmc.errors import ChunkLost
from lmc.storage import loader

EXACT = {"ratio": 1.0}
SMALL = {"max_num_batched_tokens": 128, "long_prefill_token_threshold": 64, "max_num_seqs": 8}


@pytest.fixture(scope="module", params=mostly_long(["llama", "gemma3mixed", "mistralwindow"], "llama"))
def shared(request, models, tmp_path_factory):
    """An engine of small steps over a disk, and what it answers without any cache."""
    with engine(models(request.param), {"local_disk": str(tmp_path_factory.mktemp("disk"))}, **SMALL) as lab:
        lab.wanted = {len(tokens): lab.vanilla(tokens) for tokens in (PROMPT.tokens, PLAIN, PLAIN[:420])}
        yield lab


@pytest.fixture
def lab(shared):
    """The engine with empty caches, an honest disk and the documents learned; proven to hold nothing afterwards."""
    disk, clock = shared.tiers[0], shared.setup.clock
    shared.forget()
    shared.learn(DOCUMENTS)
    poison()
    yield shared
    shared.setup.clock = clock  # Idle work waits until time has passed.
    shared.settle()
    threads_are_done(shared)
    shared.tiers[0] = disk
    shared.check()


@pytest.fixture
def steps(lab):
    return Steps(lab)


def right(lab, out, tokens) -> bool:
    return agree(out, lab.wanted[len(tokens)])


def store_plain(lab) -> None:
    """Exact chunks of PLAIN in our store, and nowhere in the engine."""
    lab.ask(PLAIN)
    lab.forget_prefixes()
    poison()


# -- scarce memory ---------------------------------------------------------------------------------------------------


def test_a_blend_that_would_take_the_memory_of_the_engines_own_steps_is_computed(lab, monkeypatch, caplog):
    monkeypatch.setattr(memory, "_free", lambda device: 0)
    found = lab.ask(PROMPT.tokens, PROMPT.blend(**EXACT))
    assert right(lab, found, PROMPT.tokens)
    assert "reused_tokens" not in facts(found)
    assert "must stay free for the engine" in caplog.text
    monkeypatch.undo()
    lab.forget_prefixes()
    assert facts(lab.ask(PROMPT.tokens, PROMPT.blend(**EXACT)))["reused_tokens"]


# -- a slow disk ------------------------------------------------------------------------------------------------------


def test_a_disk_slower_than_the_deadline_is_not_waited_for(lab, steps):
    store_plain(lab)
    only_on_disk(lab)
    clock, gate = Clock(lab), Gate(lab)
    late, other = steps.add(PLAIN), steps.add(PROMPT.tokens, {"blend": False})
    steps.until(lambda: other in steps.outputs and steps.outputs[other].finished)
    assert late not in steps.outputs, "it waits"
    clock.now += 3.0
    steps.run()
    gate.open()
    assert right(lab, steps.outputs[late], PLAIN)
    assert right(lab, steps.outputs[other], PROMPT.tokens), "it did not wait for the slow one"
    assert "exact_tokens" not in facts(steps.outputs[late])


@pytest.mark.parametrize("what", ["pages", "documents"])
def test_a_load_that_stalls_in_its_middle_is_given_up(lab, steps, monkeypatch, what):
    monkeypatch.setattr(loader, "READ_AHEAD_BYTES", 1)  # one layer at a time
    store_plain(lab)
    only_on_disk(lab)
    clock, gate = Clock(lab), Gate(lab, parts=1)  # layer 0
    tokens, lmc = (PLAIN, None) if what == "pages" else (PROMPT.tokens, PROMPT.blend(**EXACT))
    name = steps.add(tokens, lmc)
    steps.until(lambda: steps.loading(name))
    steps.step(20)
    assert steps.loading(name)
    clock.now += 5.0
    steps.run()
    gate.open()
    assert right(lab, steps.outputs[name], tokens)
    assert not {"exact_tokens", "reused_tokens", "tokens_from"} & set(facts(steps.outputs[name]))


def test_a_load_that_stalls_is_given_up_though_others_still_wait_for_it(lab, steps, monkeypatch):
    """With a tier that hangs and a popular prefix there is always a newer request that reads the same chunk."""
    monkeypatch.setattr(loader, "READ_AHEAD_BYTES", 1)
    monkeypatch.setattr(Admission, "waits_for_same_load", lambda *_: False)  # It also loads something else.
    store_plain(lab)
    only_on_disk(lab)
    clock, gate = Clock(lab), Gate(lab, parts=1)
    first = steps.add(PLAIN)
    steps.until(lambda: steps.loading(first))
    clock.now += 1.5
    second = steps.add(PLAIN)
    steps.until(lambda: steps.loading(second))
    clock.now += 1.0
    steps.until(lambda: first in steps.outputs and steps.outputs[first].finished)
    assert steps.loading(second)
    clock.now += 1.5
    steps.run()
    gate.open()
    assert right(lab, steps.outputs[first], PLAIN)
    assert right(lab, steps.outputs[second], PLAIN)


def test_a_slow_disk_within_the_deadline_is_used_layer_by_layer(lab, steps, monkeypatch):
    monkeypatch.setattr(loader, "READ_AHEAD_BYTES", 1)
    only_on_disk(lab)
    tiers = lab.tiers
    tiers[0] = Delayed(tiers[0], per_part=0.005)
    out = lab.ask(PROMPT.tokens, PROMPT.blend(**EXACT))
    assert facts(out)["tokens_from"] == {"disk": sum(map(len, DOCUMENTS))}
    assert right(lab, out, PROMPT.tokens)


def test_the_exact_beginning_of_a_blend_is_waited_for_layer_by_layer_beside_its_documents(lab, steps, monkeypatch):
    """The first layer is computed when only that has arrived."""
    monkeypatch.setattr(loader, "READ_AHEAD_BYTES", 1)
    prompt = Prompt([DOCUMENTS[2], DOCUMENTS[0]], system=300)
    lab.ask(prompt.tokens[:300])
    lab.forget_prefixes()
    poison()
    only_on_disk(lab)
    ran, run = [], PagedCanvas.run
    monkeypatch.setattr(PagedCanvas, "run", lambda canvas, layer, *more: [ran.append(layer), run(canvas, layer, *more)])
    gate = Gate(lab, parts=1)
    name = steps.add(prompt.tokens, prompt.blend(**EXACT))
    steps.until(lambda: ran)
    steps.step(5)
    assert set(ran) == {0}
    assert steps.loading(name)
    gate.open()
    steps.run()
    found = facts(steps.outputs[name])
    assert (found["exact_tokens"], found["reused_tokens"]) == (288, 300)
    assert agree(steps.outputs[name], lab.vanilla(prompt.tokens))


# -- a full slab ------------------------------------------------------------------------------------------------------


def test_a_slab_full_of_pinned_chunks_stores_and_loads_nothing_more(lab):
    only_on_disk(lab)
    pool = lab.memory.host
    held = [pool.allocate() for _ in range(pool.slots - pool.held)]
    outs = [lab.ask(PROMPT.tokens, PROMPT.blend(**EXACT)), lab.ask(PLAIN)]
    lab.settle()
    for slot in held:
        pool.free([slot])
    assert right(lab, outs[0], PROMPT.tokens)
    assert right(lab, outs[1], PLAIN)
    assert lab.numbers["no_room"] > 0


# -- requests that are aborted ----------------------------------------------------------------------------------------


def test_an_abort_before_a_load_lets_go_of_its_chunks(lab, steps):
    only_on_disk(lab)
    gate = Gate(lab)
    name = steps.add(PROMPT.tokens, PROMPT.blend(**EXACT))
    steps.step(3)
    assert steps.state(name).chunks.pins
    steps.abort(name)
    gate.open()
    assert right(lab, lab.ask(PROMPT.tokens, PROMPT.blend(**EXACT)), PROMPT.tokens)


@pytest.mark.parametrize("what", ["pages", "documents"])
def test_an_abort_in_the_middle_of_a_load_ends_it(lab, steps, monkeypatch, what):
    monkeypatch.setattr(loader, "READ_AHEAD_BYTES", 1)
    store_plain(lab)
    only_on_disk(lab)
    gate = Gate(lab, parts=1)
    tokens, lmc = (PLAIN, None) if what == "pages" else (PROMPT.tokens, PROMPT.blend(**EXACT))
    name = steps.add(tokens, lmc)
    steps.until(lambda: steps.loading(name))
    steps.abort(name)
    lab.settle()  # the gate is still closed
    assert lab.pool.get_num_free_blocks() == lab.free_at_start
    gate.open()
    assert right(lab, lab.ask(tokens, lmc), tokens)


def test_an_abort_when_the_load_is_done_but_nothing_is_computed(lab, steps):
    store_plain(lab)
    name = steps.add(PLAIN)
    steps.step()
    assert steps.state(name).exact_tokens == 672
    assert not steps.loading(name)
    assert name not in steps.outputs
    steps.abort(name)
    lab.settle()
    lab.forget_prefixes()
    assert right(lab, lab.ask(PLAIN), PLAIN)


def test_an_abort_at_any_step_of_a_blend(lab, steps):
    """Also behind it, and while the engine answers: until the answer comes before the abort."""
    seen = []
    for count in itertools.count(1):
        name = steps.add(PROMPT.tokens, PROMPT.blend(**EXACT))
        steps.step(count)
        if name in steps.outputs and steps.outputs[name].finished:
            break
        seen.append(steps.loading(name))
        steps.abort(name)
        lab.check()
        lab.forget_prefixes()
    assert seen.count(True) >= 4, "a blend takes several steps"
    assert right(lab, steps.outputs[name], PROMPT.tokens)


def test_a_request_with_the_id_of_one_that_was_aborted_gets_its_own_blend(lab, monkeypatch):
    """The worker hears of the abort in the step in which the blend begins."""
    monkeypatch.setattr(envs, "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", True, raising=False)
    steps, again = Steps(lab), Steps(lab)
    steps.abort(steps.add(PLAIN))
    name = again.add(PROMPT.tokens, PROMPT.blend(**EXACT))
    again.run()
    assert facts(again.outputs[name])["reused_tokens"] == sum(map(len, DOCUMENTS))
    assert right(lab, again.outputs[name], PROMPT.tokens)


def test_an_abort_while_documents_are_learned(lab, steps):
    """Of a request that is a document, of one whose unknown documents are queued, and of one that runs beside the
    learning.
    """
    lab.forget()
    for count in (1, 2, 3, 4, 6):
        name = steps.add(DOCUMENTS[1], {"learn": True}, 2)
        steps.step(count)
        steps.abort(name)
    beside = steps.add(PROMPT.tokens, PROMPT.blend(**EXACT), 1)
    steps.run()
    assert right_start(lab, steps.outputs[beside])
    assert lab.lmc.busy
    name = steps.add(PLAIN)
    steps.step(2)
    steps.abort(name)
    lab.check()
    lab.forget_prefixes()
    lab.forget_pages()
    poison()
    out = lab.ask(PROMPT.tokens, PROMPT.blend(**EXACT))
    assert facts(out)["reused_tokens"] == sum(map(len, DOCUMENTS))
    assert right(lab, out, PROMPT.tokens)


def right_start(lab, out) -> bool:
    return answer(out) == answer(lab.wanted[len(PROMPT.tokens)])[: len(answer(out))]


# -- what a worker finds ----------------------------------------------------------------------------------------------


@pytest.fixture
def mislabel(lab, monkeypatch):
    """A function that gives every slot of later loads to another chunk before the worker runs one of its methods."""
    scheduler, slab, slots = lab.lmc, lab.store.slab, []
    plan, kept = scheduler.plan, slab.labels.tolist()

    def planned(*arguments):
        found = plan(*arguments)
        slots.extend(piece.slot for job in found.loads for piece in (*job.copies, *getattr(job, "documents", ())))
        return found

    def before(name, condition=lambda: True):
        run = getattr(worker(), name)

        def late(*arguments):
            if condition():
                for slot in slots:
                    slab.labels[2 * slot] = 7
            return run(*arguments)

        monkeypatch.setattr(worker(), name, late)

    monkeypatch.setattr(scheduler, "plan", planned)
    yield before
    slab.labels[:] = memoryview(array("q", kept))


@pytest.mark.parametrize("lmc", [None, PROMPT.blend(**EXACT)], ids=["pages", "documents"])
def test_a_slot_that_holds_another_chunk_than_promised_is_not_used(lab, mislabel, caplog, lmc):
    store_plain(lab)
    mislabel("work")
    failed = lab.numbers.get("failed_loads", 0)
    tokens = PROMPT.tokens if lmc else PLAIN
    out = lab.ask(tokens, lmc)
    assert re.search(r"a chunk for request \S+ was lost while it was loaded; the engine will compute it", caplog.text)
    assert right(lab, out, tokens)
    assert lab.numbers["failed_loads"] == failed + 1
    assert "exact_tokens" not in facts(out)


@pytest.mark.parametrize("lmc", [None, PROMPT.blend(**EXACT)], ids=["pages", "documents"])
def test_a_slot_that_is_given_to_another_chunk_during_the_copies_is_not_used(lab, mislabel, caplog, lmc):
    """The job has checked its slots when it issued its last copies, and a GPU may still read them."""
    store_plain(lab)
    mislabel("outcome", condition=lambda: worker().ends_loads)
    failed = lab.numbers.get("failed_loads", 0)
    tokens = PROMPT.tokens if lmc else PLAIN
    out = lab.ask(tokens, lmc)
    assert "was lost while it was loaded" not in caplog.text, "the slots were right when the copies were issued"
    assert right(lab, out, tokens)
    assert lab.numbers["failed_loads"] == failed + 1
    assert not {"exact_tokens", "reused_tokens", "tokens_from"} & set(facts(out))


def test_the_memory_of_a_server_that_has_ended_stays_mapped_until_saves_are_over(lab, monkeypatch):
    """Copies of a GPU may still write to it."""
    own, ends, pool = lab.store.slab.address, [], lab.memory.host
    monkeypatch.setattr(worker_module, "RankSlab", lambda at, on_end: [ends.append(on_end), RankSlab(at)][1])
    address = replace(own, serial=own.serial + 1)
    worker().work(StepPlan(slab=address))
    (on_end,) = ends
    slot = pool.allocate()
    worker().save([SaveJob(job=-2, slot=slot, tables=((1,),) * lab.setup.groups.count)])
    on_end(address)
    worker().part(slot, 0)
    assert worker().report().done == {-2: 1}
    on_end(own)
    worker().part(slot, 0)
    on_end(address)
    with pytest.raises(ChunkLost):
        worker().part(slot, 0)
    pool.free([slot])
    assert right(lab, lab.ask(PLAIN), PLAIN)


@pytest.mark.parametrize("method", ["run", "_replaced"])
@pytest.mark.parametrize("calls", [0, 1])
def test_an_exception_inside_a_blend_is_computed_over(lab, steps, method, calls):
    """Before a layer, and in its middle, where its attention is replaced."""
    layers, left = layers_of_lmc(), [calls]
    original = getattr(layers, method)

    def failing(*arguments):
        left[0] -= 1
        if left[0] == -1:
            raise RuntimeError("a kernel has failed")
        return original(*arguments)

    setattr(layers, method, failing)
    failed, other = steps.add(PROMPT.tokens, PROMPT.blend(**EXACT)), steps.add(PLAIN)
    steps.run()
    delattr(layers, method)
    assert left[0] < 0
    assert right(lab, steps.outputs[failed], PROMPT.tokens)
    assert right(lab, steps.outputs[other], PLAIN)
    lab.forget_prefixes()
    again = lab.ask(PROMPT.tokens, PROMPT.blend(**EXACT))
    assert right(lab, again, PROMPT.tokens)
    assert facts(again)["reused_tokens"] > 0


def test_after_a_reset_by_the_engine_nothing_of_before_is_loaded_from_the_disk(lab):
    lab.ask(PLAIN)
    lab.settle()
    lab.store.flush()
    assert lab.llm.reset_prefix_cache(reset_connector=True)
    end = time.monotonic() + SECONDS
    while list(lab.tiers[0].entries()):  # they are removed in the background
        assert time.monotonic() < end
        time.sleep(0.001)
    again = lab.ask(PLAIN)
    assert not facts(again)
    assert right(lab, again, PLAIN)


def test_an_exception_while_learning_loses_only_the_document(lab):
    lab.forget()
    layers = layers_of_lmc()

    def failing(*arguments):
        raise RuntimeError("a kernel has failed")

    layers.run = failing
    lab.ask(PROMPT.tokens, PROMPT.blend(**EXACT))
    lab.settle()
    del layers.run
    assert not any(document_places(lab))
    lab.forget_prefixes()
    lab.ask(PROMPT.tokens, PROMPT.blend(**EXACT))
    lab.settle()
    assert all(document_places(lab))


def document_places(lab):
    return lab.store.lookup([key for document in DOCUMENTS for key in lab.document_keys(document)])


def test_a_second_request_with_the_prefix_of_a_failed_load(lab, mislabel, steps):
    """The engine computes the first one's blocks again over several steps; the second must not find them before."""
    store_plain(lab)
    mislabel("work")
    first = steps.add(PLAIN[:420])
    steps.until(lambda: steps.state(first).given_up)
    seconds = []
    while first not in steps.outputs:
        seconds.append(steps.add(PLAIN))
        steps.step()
    steps.run()
    assert len(seconds) >= 4
    assert right(lab, steps.outputs[first], PLAIN[:420])
    assert [right(lab, steps.outputs[name], PLAIN) for name in seconds] == [True] * len(seconds)


# -- preemption -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ratio", [1.0, 0.0])
def test_a_preempted_blend_leaves_nothing_approximate_behind(lab, steps, ratio):
    """Preempted while it answers; its blocks are in the engine's cache under the blend's hashes, and part of them are
    taken away.
    """
    wish = PROMPT.blend(strategy="head", ratio=ratio)
    for empty in (False, True):
        name = steps.add(PROMPT.tokens, wish, 200)
        steps.until(lambda name=name: name in steps.outputs and len(answer(steps.outputs[name])) >= 100)
        steps.preempt(name)
        if empty:
            assert lab.llm.reset_prefix_cache()
            poison()
        steps.run()
        assert len(answer(steps.outputs[name])) == 200
        lab.settle()
        if ratio == 1.0:
            assert answer(steps.outputs[name])[:8] == answer(lab.wanted[len(PROMPT.tokens)])
        plain = lab.ask(PROMPT.tokens)
        assert right(lab, plain, PROMPT.tokens)
        lab.forget_prefixes()
        poison()
        plain = lab.ask(PROMPT.tokens)
        assert right(lab, plain, PROMPT.tokens)
        lab.forget_prefixes()
        lab.forget_pages()


def test_a_plain_request_that_is_preempted_loads_what_it_had_saved(lab, steps):
    name = steps.add(PLAIN, None, 200)
    steps.until(lambda: name in steps.outputs and len(answer(steps.outputs[name])) >= 100)
    before = answer(steps.outputs[name])
    steps.preempt(name)
    assert lab.llm.reset_prefix_cache()
    poison()
    steps.run()
    assert answer(steps.outputs[name])[: len(before)] == before
    assert facts(steps.outputs[name])["exact_tokens"] >= 768, "six chunks of 128, of which the last holds its own words"
    whole = answer(steps.outputs[name])
    assert whole == answer(lab.vanilla(PLAIN, 200))
