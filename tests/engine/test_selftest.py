"""The self-test at start: it passes for a right model however the engine is set up, and finds each thing that could be
wrong.
"""

import pytest
import torch
from lab import Prompt, answer, distance, words
from stepping import layers_of_lmc, pages, worker

from lmc.blend.kernels import place
from lmc.connectors.vllm.worker.native import NativeLayers
from lmc.connectors.vllm.worker.selftest import FIRST_SHARE, prove_model, run_full_batch
from lmc.errors import UnsupportedModel

DOCUMENTS = [words(150, 1), words(300, 2)]


@pytest.fixture(scope="module")
def lab(models, shared_engine):
    return shared_engine(models("llama"))


def prove(lab) -> None:
    """As at the start of the engine, in whose pages nothing is kept now."""
    lab.settle()
    mine = worker()
    prove_model(mine._layers, mine._config.model_config.get_vocab_size(), 1000)


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


def test_a_mask_that_lets_scattered_rows_see_the_future_is_found(lab, monkeypatch):
    """The attention of flash kernels: the last query is aligned with the last key, as if all rows were one run."""
    common = NativeLayers._common

    def one_run(self, positions, at, blocks):
        found = common(self, positions, at, blocks)
        count = torch.tensor([0, len(positions)], dtype=torch.int32)
        last = torch.tensor([int(positions[-1]) + 1], dtype=torch.int32)
        found.query_start_loc = found.query_start_loc_cpu = count
        found.seq_lens = found.seq_lens_cpu_upper_bound = last
        found.num_reqs, found.max_query_len = 1, len(positions)
        found.block_table_tensor = found.block_table_tensor[:1].contiguous()
        return found

    monkeypatch.setattr(NativeLayers, "_common", one_run)
    with pytest.raises(UnsupportedModel, match="differ from the model's"):
        prove(lab)


def test_a_mask_that_hides_the_rows_before_a_run_is_found(lab, monkeypatch):
    common = NativeLayers._common

    def short(self, positions, at, blocks):
        found = common(self, positions, at, blocks)
        if found.num_reqs > 1:
            lengths = found.query_start_loc[1:] - found.query_start_loc[:-1]
            found.seq_lens = found.seq_lens_cpu_upper_bound = lengths.to(torch.int32)
        return found

    monkeypatch.setattr(NativeLayers, "_common", short)
    with pytest.raises(UnsupportedModel, match="differ from the model's"):
        prove(lab)


def test_a_row_that_is_written_to_another_slot_is_found(lab, monkeypatch):
    """Only where rows are scattered: slots that follow each other from the first one on."""
    common = NativeLayers._common

    def consecutive(self, positions, at, blocks):
        found = common(self, positions, at, blocks)
        if found.num_reqs > 1:
            start = found.slot_mapping[0]
            found.slot_mapping = torch.arange(len(positions), device=positions.device) + start
        return found

    monkeypatch.setattr(NativeLayers, "_common", consecutive)
    with pytest.raises(UnsupportedModel, match="differ from the model's"):
        prove(lab)


def test_a_rotation_that_turns_the_wrong_way_is_found(lab, monkeypatch):
    rotate = place.rotate
    monkeypatch.setattr(place, "rotate", lambda keys, turn, out, **more: rotate(keys, (turn[0], -turn[1]), out, **more))
    with pytest.raises(UnsupportedModel, match="differ from the model's"):
        prove(lab)


def test_the_blocks_are_as_they_were_afterwards(lab):
    prove(lab)
    for view in pages():
        assert not view[1:3].any()  # 64 tokens in blocks of 32


def test_a_batch_of_full_size_is_run_and_leaves_nothing(lab, monkeypatch):
    layers, asked = layers_of_lmc(), []
    run = NativeLayers.run
    monkeypatch.setattr(NativeLayers, "run", lambda self, *what: [asked.append(what), run(self, *what)])
    lab.settle()
    run_full_batch(layers, 300)
    ((layer, rows, batch),) = asked
    assert (layer, len(rows.positions), batch.rows) == (0, 300, slice(0, 300))
    slots = layers.slots(torch.tensor([1]), torch.arange(layers.block_size))
    assert not any(one.any() for one in layers.access[0].gather(slots))


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
    assert [len(rows.positions) for _, rows, _ in asked] == [300 // FIRST_SHARE]
