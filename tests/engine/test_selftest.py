"""The self-test at start: it passes for a right model however the engine is set up, and finds each thing that could be
wrong.
"""

import pytest
import torch
from amount import mostly_long
from lab import SIZES, Prompt, answer, distance, words
from stepping import change_batches, engine_pages, layers_of_lmc

from lmc.blend.kernels import place
from lmc.connectors.vllm.worker.native import NativeLayers
from lmc.connectors.vllm.worker.selftest import FIRST_SHARE, prove_model, run_full_batch
from lmc.errors import UnsupportedModel

DOCUMENTS = [words(150, 1), words(300, 2)]


@pytest.fixture(scope="module", params=mostly_long(["llama", "gemma3mixed", "llama4", "deepseek2", "gemma4"], "llama"))
def lab(request, models, shared_engine):
    return shared_engine(models(request.param))


def prove(lab) -> None:
    """As at the start of the engine, in whose pages nothing is kept now."""
    lab.settle()
    prove_model(layers_of_lmc(), SIZES["vocab_size"], 1000, 2048)


def test_a_right_model_passes(lab):
    prove(lab)


@pytest.mark.parametrize("runs", [1, 2, 3])
def test_an_engine_for_few_requests_blends_all_the_same(lab, monkeypatch, runs):
    """With --max-num-seqs up to 3 a GPU's batches have few runs of rows: the self-test failed, and blending was off."""
    monkeypatch.setattr(layers_of_lmc(), "most_runs", runs)
    prove(lab)
    prompt = Prompt(DOCUMENTS)
    wanted = lab.vanilla(prompt.tokens)
    lab.learn(DOCUMENTS)
    found = lab.ask(prompt.tokens, prompt.blend(strategy="head", ratio=1.0))
    assert answer(found) == answer(wanted)
    assert distance(found, wanted) <= 1e-5


def one_run(batch, positions):
    """The attention of flash kernels: the last query is aligned with the last key, as if all rows were one run."""
    batch.query_start_loc = batch.query_start_loc_cpu = torch.tensor([0, len(positions)], dtype=torch.int32)
    last = torch.tensor([int(positions[-1]) + 1], dtype=torch.int32)
    batch.seq_lens = batch.seq_lens_cpu_upper_bound = last
    batch.num_reqs, batch.max_query_len = 1, len(positions)
    batch.block_table_tensor = batch.block_table_tensor[:1].contiguous()


def rows_before_a_run_are_hidden(batch, positions):
    if batch.num_reqs > 1:
        lengths = batch.query_start_loc[1:] - batch.query_start_loc[:-1]
        batch.seq_lens = batch.seq_lens_cpu_upper_bound = lengths.to(torch.int32)


def consecutive_slots(batch, positions):
    """Only where rows are scattered: slots that follow each other from the first one on."""
    if batch.num_reqs > 1:
        batch.slot_mapping = torch.arange(len(positions), device=positions.device) + batch.slot_mapping[0]


@pytest.mark.parametrize("fault", [one_run, rows_before_a_run_are_hidden, consecutive_slots])
def test_a_wrong_mask_and_a_wrong_slot_are_found(lab, monkeypatch, fault):
    if fault is rows_before_a_run_are_hidden and layers_of_lmc().attentions[0].latent:
        pytest.skip("several runs of MLA go to lmc's own attention, which does not read these lengths")
    change_batches(monkeypatch, fault)
    with pytest.raises(UnsupportedModel, match="differ from the model's"):
        prove(lab)


def test_a_rotation_that_turns_the_wrong_way_is_found(lab, monkeypatch):
    rotate = place.rotate
    monkeypatch.setattr(place, "rotate", lambda keys, by, out: rotate(keys, by._replace(sin=-by.sin), out))
    with pytest.raises(UnsupportedModel, match="differ from the model's"):
        prove(lab)


def test_the_blocks_are_as_they_were_afterwards(lab):
    prove(lab)
    for view in engine_pages().views:
        assert not view[1:3].any()  # 64 tokens in blocks of 32


def test_a_batch_of_full_size_is_run_and_leaves_nothing(lab, monkeypatch):
    layers, asked = layers_of_lmc(), []
    run = NativeLayers.run
    monkeypatch.setattr(NativeLayers, "run", lambda self, *what: [asked.append(what), run(self, *what)])
    lab.settle()
    run_full_batch(layers, 300)
    # A layer of each kind, since they may take memory for different things.
    assert [layer for layer, *_ in asked] == layers.samples
    assert all((len(rows.positions), batch.rows) == (300, slice(0, 300)) for _, rows, batch in asked)
    slots = layers.slots([torch.tensor([1])] * layers.group_count, torch.arange(layers.block_size))
    assert not any(one.any() for one in layers.access[0].gather(slots[0]))


def test_a_batch_that_does_not_fit_is_said_at_the_start(lab, monkeypatch):
    def full(self, *what):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(NativeLayers, "run", full)
    lab.settle()
    with pytest.raises(UnsupportedModel, match=r"a batch of 300 tokens does not fit .* lower --max-num-batched-tokens"):
        run_full_batch(layers_of_lmc(), 300)


def test_a_batch_that_does_not_fit_on_another_rank_is_not_run(lab, monkeypatch):
    """This rank would wait for that one in the middle of the layer."""
    asked, run = [], NativeLayers.run
    monkeypatch.setattr(NativeLayers, "run", lambda self, *what: [asked.append(what), run(self, *what)])
    monkeypatch.setattr("lmc.connectors.vllm.worker.selftest.several_ranks", lambda: True)
    monkeypatch.setattr("lmc.connectors.vllm.worker.memory.on_all_ranks", lambda good: False)
    lab.settle()
    with pytest.raises(UnsupportedModel, match=r"a batch of 300 tokens does not fit"):
        run_full_batch(layers_of_lmc(), 300)
    assert [len(rows.positions) for _, rows, _ in asked] == [300 // FIRST_SHARE] * len(layers_of_lmc().samples)
