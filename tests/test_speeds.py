"""Measured speeds that outlive a process."""

import json
from contextlib import closing
from dataclasses import replace

import pytest
import torch
from storage_fakes import note_load
from test_keeper import engine_of

from lmc.config.settings import Settings
from lmc.engine import speeds
from lmc.engine.speeds import FILE, SpeedFile, processor_of, setup_of
from lmc.keys import Namespace
from lmc.storage.cost_model import BlendOffer, CostModel, LoadPolicy, Offer

OFFER = Offer(records=[("redis", 1000)], exact=100, reused=0, ratio=0.15, prompt=100)
BLEND = BlendOffer(rows=100, tokens=400, length=400)


def measured() -> CostModel:
    """Loads of 1 s and prefills of 10 ms a token, of prompts of 100 tokens, and a blend of 400 tokens in 5 s."""
    cost = CostModel()
    for _ in range(3):
        note_load(cost, "redis", records=1, opening=0.5, bytes=1000, reading=0.5)
        cost.computed(100, 1.0, 100)
        cost.blended(BLEND, 5.0)
        cost.continued(100, 2.0, 2000)
    return cost


def saved(directory, setup="here") -> None:
    with closing(SpeedFile(directory, setup, measured())):
        pass


def restored(directory, setup="here") -> CostModel:
    cost = CostModel()
    with closing(SpeedFile(directory, setup, cost)):
        return cost


def test_the_next_process_decides_as_the_last_one_did(tmp_path):
    saved(tmp_path)
    before, after = measured(), restored(tmp_path)
    assert after.estimates() == before.estimates()
    assert after.choose(OFFER, LoadPolicy.AUTO) == before.choose(OFFER, LoadPolicy.AUTO)
    why = after.against_blend(BLEND, LoadPolicy.AUTO)
    assert why == before.against_blend(BLEND, LoadPolicy.AUTO) == "prefill takes about 4 s, and a blend about 5 s"


def test_new_measurements_replace_what_was_restored(tmp_path):
    saved(tmp_path)
    cost = restored(tmp_path)
    for _ in range(8):
        cost.computed(100, 0.1, 100)
    assert cost.prefill_pace() < 0.0015


def test_another_setup_measures_for_itself_and_leaves_the_speeds_of_others(tmp_path):
    saved(tmp_path)
    assert not any(restored(tmp_path, "elsewhere").estimates().values())
    saved(tmp_path, "elsewhere")
    assert any(restored(tmp_path).estimates().values())


def test_of_many_setups_those_saved_last_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(speeds, "MAX_SETUPS", 2)
    for setup in "abc":
        saved(tmp_path, setup)
    assert list(json.loads((tmp_path / FILE).read_text())) == ["b", "c"]


@pytest.mark.parametrize(
    "content",
    [
        "", "{", "[]", '{"here": []}', '{"here": {"computing": [[7, "fast", 1], [7], [7, -1, 2], [[], NaN, 1]]}}',
        '{"here": {"reading": 7}}',
        '{"here": {"computing": [["7", 1, 1], [null, 1, 1]], "opening": [[7, 1, 1]], "blending": [[[7], 1, 1]]}}',
        f'{{"here": {{"computing": [[7, 1{"0" * 400}, 1]]}}}}',
    ],
)  # fmt: skip
def test_a_file_that_is_not_right_is_ignored_and_replaced(tmp_path, content):
    (tmp_path / FILE).write_text(content)
    assert not any(restored(tmp_path).estimates().values())
    saved(tmp_path)
    assert any(restored(tmp_path).estimates().values())


def test_a_directory_that_cannot_be_written_loses_speeds_only(tmp_path):
    (tmp_path / FILE).mkdir()
    saved(tmp_path)
    assert not any(restored(tmp_path).estimates().values())


def test_speeds_are_saved_while_the_process_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(speeds, "SAVE_SECONDS", 0.001)
    with closing(SpeedFile(tmp_path, "here", measured())):
        while not (tmp_path / FILE).exists():
            pass


NAMESPACE = Namespace(model="m", dtype="float32", layers=2, kv_heads=1, head_dim=8, rope="r", chunk_size=16)
GIVEN = {"local_disk": "/somewhere", "remote_url": "redis://one:6379"}


@pytest.mark.parametrize(
    "other",
    [
        {"namespace": replace(NAMESPACE, model="another")}, {"processor": "another"},
        {"settings": Settings(**GIVEN | {"remote_url": "redis://two:6379"})},
        {"settings": Settings(**GIVEN | {"local_disk": "/elsewhere"})},
    ],
)  # fmt: skip
def test_the_setup_depends_on_model_processor_and_tiers(other):
    usual = {"settings": Settings(**GIVEN), "namespace": NAMESPACE, "processor": "this"}
    assert setup_of(**usual) == setup_of(**usual) != setup_of(**usual | other)


def test_an_engine_with_a_disk_goes_on_with_the_speeds_of_the_last_one(tmp_path):
    with closing(engine_of(tmp_path)) as engine:
        engine.store.cost.restore(measured().estimates())
    with closing(engine_of(tmp_path)) as engine:
        assert engine.store.cost.prefill_pace() == measured().prefill_pace()
    with closing(engine_of()) as engine:
        assert engine.store.cost.prefill_pace() is None


def test_a_processor_has_a_name():
    assert processor_of(torch.device("cpu")).endswith(f"{torch.get_num_threads()} threads")
