"""What differs between versions of vLLM: repeated handshakes, sleep, steps that do not save, and versions that lack
something.
"""

import logging
from types import SimpleNamespace

import pytest
import torch
from lab import DOCUMENTS, PLAIN, PROMPT, agree, answer, engine, facts, launch
from stepping import Clock, Gate, Steps, learning, only_on_disk, poison, threads_are_done, worker
from vllm import SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown, get_kv_transfer_group

from lmc.connectors.vllm import contract, entry, vllm_api
from lmc.connectors.vllm.connector import LMCConnector, Metadata
from lmc.connectors.vllm.contract import BASE
from lmc.connectors.vllm.messages import SaveJob, StepPlan
from lmc.connectors.vllm.plugin import loaded_model
from lmc.connectors.vllm.vllm_facts import Sources
from lmc.storage import loader

EXACT = {"strategy": "all", "ratio": 1.0}


@pytest.fixture(scope="module")
def lab(models, tmp_path_factory):
    """An engine with a disk tier, whose directory can be opened only once."""
    with engine(models("llama"), {"local_disk": tmp_path_factory.mktemp("disk")}) as found:
        yield found


def test_the_installed_version_fulfils_the_contract_and_reads_as_it_is():
    """Signatures in files are those of the imported classes."""
    installed = contract.facts_of(Sources(contract.installed_package()))
    assert contract.findings(installed) == []
    imported = contract.facts_of_imported()
    assert contract.objections(imported) == []
    assert imported.classes[BASE] == {name: installed.classes[BASE].get(name) for name in imported.classes[BASE]}
    assert imported.abstract == installed.abstract
    assert entry.LMCConnector is LMCConnector


def test_a_repeated_handshake_keeps_the_store(lab):
    """As an engine of 0.33 does when it wakes up. A second store could not open the directory of the first."""
    lab.learn(DOCUMENTS)
    before, chunks = lab.lmc, set(lab.store.known_keys())
    assert chunks
    lab.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): get_kv_transfer_group().get_handshake_metadata()})
    assert lab.lmc is before
    assert set(lab.store.known_keys()) == chunks
    assert facts(lab.ask(PROMPT.tokens, PROMPT.blend()))["reused_tokens"] > 0
    lab.check()


@pytest.mark.parametrize(("scheduled", "saved"), [(0, 1), (5, 0)])
def test_a_step_without_tokens_saves_also_if_vllm_does_not_ask_for_it(lab, monkeypatch, scheduled, saved):
    """0.30 does not. In a step with tokens only vLLM knows when all KV is written: a drafter may come last."""
    made = []
    recorder = SimpleNamespace(save=made.extend, ends_loads=False)
    connector = get_kv_transfer_group()
    monkeypatch.setattr(connector, "_worker", recorder)
    job = SaveJob(job=1, slot=0, tables=((1,),))
    connector.bind_connector_metadata(Metadata(StepPlan(scheduled=scheduled, saves=[job])))
    connector.get_finished(set())
    assert made == [job] * saved
    connector.wait_for_save()
    connector.wait_for_save()
    assert made == [job], "each save is made once"
    connector.clear_connector_metadata()


def test_an_engine_that_gives_up_its_kv_cache_computes_what_was_being_loaded(lab, monkeypatch):
    """0.33 says so when it goes to sleep, and loads may be under way."""
    monkeypatch.setattr(loader, "READ_AHEAD_BYTES", 1)
    disk, setup = lab.tiers[0], lab.setup
    clock = setup.clock
    wanted = lab.vanilla(PLAIN)
    lab.ask(PLAIN)
    lab.forget_prefixes()
    only_on_disk(lab)
    Clock(lab)  # at which no load is late
    gate, steps = Gate(lab, parts=1), Steps(lab)
    name = steps.add(PLAIN)
    steps.until(lambda: steps.loading(name))
    assert not worker().ends_loads
    get_kv_transfer_group().unregister_kv_caches()
    assert worker().ends_loads
    poison()
    gate.open()
    steps.run()
    threads_are_done(lab)
    lab.tiers[0], setup.clock = disk, clock
    assert "exact_tokens" not in facts(steps.outputs[name])
    assert agree(steps.outputs[name], wanted)
    lab.check()


def test_learning_ends_when_an_engine_gives_up_its_kv_cache(lab):
    lab.forget()
    learning()[1][0] = []  # of the tokens behind which documents are learned, if there is a tokenizer
    steps = Steps(lab)
    steps.add(DOCUMENTS[1], {"learn": True}, 1)
    steps.until(lambda: learning()[0])
    get_kv_transfer_group().unregister_kv_caches()
    assert learning() == ([], {})
    steps.run()
    lab.settle()
    lab.learn(DOCUMENTS)
    blend = lab.ask(PROMPT.tokens, PROMPT.blend(**EXACT))
    assert facts(blend)["reused_tokens"] > 0
    assert answer(blend) == answer(lab.vanilla(PROMPT.tokens))
    lab.check()


def test_after_a_sleep_with_other_weights_nothing_of_before_is_used(lab):
    before = lab.vanilla(PROMPT.tokens)
    lab.learn(DOCUMENTS)
    assert facts(lab.ask(PROMPT.tokens, PROMPT.blend(**EXACT)))["reused_tokens"] > 0
    lab.settle()
    lab.core.sleep(1)
    get_kv_transfer_group().unregister_kv_caches()  # a worker on a GPU
    # The CPU build keeps packed copies of matrices.
    weights = [weight for name, weight in loaded_model().named_parameters() if "input_layernorm" in name]
    scales = torch.linspace(-2, 2, weights[0].numel())
    for weight in weights:
        weight.data.mul_(scales)
    poison()
    lab.core.wake_up()
    try:
        assert not facts(lab.ask(PROMPT.tokens, PROMPT.blend(**EXACT))).get("reused_tokens")
        lab.settle()
        wanted = lab.vanilla(PROMPT.tokens)
        assert answer(wanted) != answer(before), "the control: other weights give another answer"
        lab.learn(DOCUMENTS)
        blend = lab.ask(PROMPT.tokens, PROMPT.blend(**EXACT))
        assert facts(blend)["reused_tokens"] > 0
        assert agree(blend, wanted)
        lab.check()
    finally:
        for weight in weights:
            weight.data.div_(scales)


def test_without_what_lmc_needs_an_engine_answers_as_without_lmc(models, monkeypatch, caplog):
    with engine(models("llama")) as lab:
        wanted = answer(lab.vanilla(PLAIN))
    monkeypatch.setattr(entry, "_chosen", {})
    monkeypatch.setitem(vllm_api.USED, "NameOfTomorrow", "vllm.config")
    caplog.clear()
    llm = None
    try:
        with caplog.at_level(logging.ERROR, "lmc"):
            llm = launch(models("llama"))
        lines = [record.getMessage() for record in caplog.records if record.name.startswith("lmc")]
        assert len(lines) == 1
        assert "vllm.config.NameOfTomorrow is missing. To use lmc, install 'vllm>=0.30,<0.34'" in lines[0]
        greedy = SamplingParams(max_tokens=8, temperature=0, detokenize=False, ignore_eos=True)
        for _ in range(2):  # computed, and from vLLM's own cache
            (out,) = llm.generate([{"prompt_token_ids": PLAIN}], greedy, use_tqdm=False)
            assert answer(out) == wanted
        assert llm.reset_prefix_cache(reset_connector=True)
    finally:
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()
        ensure_kv_transfer_shutdown()
        cleanup_dist_env_and_memory()
