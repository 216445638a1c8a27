"""Wrong use is answered with a message that says what would be right; no request's fault ends the engine."""

import logging
from contextlib import contextmanager
from copy import copy
from types import SimpleNamespace

import pytest
import torch
from lab import SETTINGS, Prompt, answer, cleanup_dist_env_and_memory, engine, facts, scheduler_of, setup_of, words
from stepping import layers_of_lmc
from vllm.config import CompilationConfig, KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.platforms import current_platform

from lmc.blend.markers import Markers
from lmc.config.settings import Settings
from lmc.connectors.vllm.connector import MAX_WAIT_STEPS, Handshake, LMCConnector, WorkerMetadata
from lmc.connectors.vllm.guard import HookGuard
from lmc.connectors.vllm.messages import StepPlan, StepReport, WorkerFacts
from lmc.connectors.vllm.plugin import loaded_model
from lmc.connectors.vllm.scheduler.admin import Administration
from lmc.connectors.vllm.start import layers_of_stages
from lmc.connectors.vllm.vllm_api import KVConnectorBase_V1, KVConnectorRole
from lmc.connectors.vllm.worker.native import NativeLayers
from lmc.connectors.vllm.worker.rank_slab import RankSlab
from lmc.errors import ConfigError, TierUnusable, UnsupportedModel
from lmc.storage.memory.slab import SlabAddress
from lmc.storage.worker_parts import Parallelism

DOCUMENTS = [words(150, 1), words(90, 2)]
BOS = 1


@pytest.fixture(scope="module")
def lab(models, shared_engine):
    """One engine for all requests: it has to live through every one of them."""
    found = shared_engine(models("llama"))
    # As a tokenizer would say.
    found.setup.markers = Markers(separators=((2, 2),), special=frozenset({BOS}))
    found.learn(DOCUMENTS)
    return found


# -- requests ---------------------------------------------------------------------------------------------------------

WRONG = {
    "a word instead of an object": ("blend", "kv_transfer_params['lmc'] must be an object, not 'blend'"),
    "unknown option": ({"ration": 0.3}, "has no 'ration'; there are blend, learn, name, strategy, ratio, documents"),
    "blend as text": ({"blend": "no"}, "lmc.blend must be true or false, not 'no'"),
    "learn as a number": ({"learn": 1}, "lmc.learn must be true or false, not 1"),
    "ratio above 1": ({"ratio": 15}, "lmc.ratio must be between 0 and 1, not 15"),
    "ratio below 0": ({"ratio": -0.1}, "lmc.ratio must be between 0 and 1, not -0.1"),
    "ratio that is no number": ({"ratio": float("nan")}, "lmc.ratio must be between 0 and 1, not nan"),
    "ratio as text": ({"ratio": "0.3"}, "lmc.ratio must be between 0 and 1, not '0.3'"),
    "unknown strategy": ({"strategy": "fancy"}, "'fancy'"),
    "strategy that is no text": ({"strategy": ["query"]}, "lmc.strategy must be one of"),
    "documents as text": (
        {"documents": "0-10"},
        "lmc.documents must be a list of [start, stop], or of texts, not '0-10'",
    ),
    "documents as a number": ({"documents": 7}, "lmc.documents must be a list of [start, stop], or of texts, not 7"),
    "a span as a number": ({"documents": [7]}, "lmc.documents: 7 is invalid: use [start, stop]"),
    "a span of three": ({"documents": [[1, 2, 3]]}, "[1, 2, 3] is invalid: use [start, stop]"),
    "a span of text": ({"documents": [["1", "9"]]}, "['1', '9'] is invalid: use [start, stop]"),
    "a span of fractions": ({"documents": [[1.0, 9.0]]}, "[1.0, 9.0] is invalid: use [start, stop]"),
    "a span behind the prompt": ({"documents": [[0, 10_000]]}, "[0, 10000] is not inside the prompt of 300 tokens"),
    "a span before the prompt": ({"documents": [[-5, 10]]}, "[-5, 10] is not inside the prompt"),
    "an empty span": ({"documents": [[9, 9]]}, "[9, 9] is not inside the prompt"),
    "a reversed span": ({"documents": [[90, 9]]}, "[90, 9] is not inside the prompt"),
    "a document to learn with documents in it": ({"learn": True, "documents": [[0, 9]]}, "exclude each other"),
    "overlapping spans": ({"documents": [[0, 50], [40, 90]]}, "[40, 90) overlaps what comes before it"),
    "spans in the wrong order": ({"documents": [[50, 90], [0, 40]]}, "[0, 40) overlaps what comes before it"),
}
PROMPT = Prompt(DOCUMENTS)


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_meant_is_answered_exactly_with_a_note(lab, name):
    wish, said = WRONG[name]
    wanted = answer(lab.ask(PROMPT.tokens, {"blend": False}))
    refused = lab.numbers.get("refused", 0)
    out = lab.ask(PROMPT.tokens, wish)
    assert said in facts(out)["note"]
    assert answer(out) == wanted
    assert lab.numbers["refused"] == refused + 1


@pytest.mark.parametrize("given", [{"other": 1}, {"lmc": None}, {}], ids=repr)
def test_parameters_of_other_connectors_are_nobody_s_fault(lab, given):
    parameters = lab.parameters()
    parameters.extra_args = {"kv_transfer_params": given}
    (out,) = lab.llm.generate([{"prompt_token_ids": PROMPT.tokens}], parameters, use_tqdm=False)
    assert "note" not in facts(out)


def test_a_document_to_learn_that_begins_with_bos_is_not_learned(lab):
    out = lab.ask([BOS, *words(150, 5)], {"learn": True})
    assert facts(out) == {"note": facts(out)["note"]}
    assert "must have no special tokens" in facts(out)["note"]


def test_after_all_that_a_blend_still_works(lab):
    prompt = Prompt(DOCUMENTS[::-1], seed=2000)
    assert facts(lab.ask(prompt.tokens, prompt.blend()))["reused_tokens"] > 0
    lab.check()


# -- the engine -------------------------------------------------------------------------------------------------------


def raise_error(*_, **__):
    """Raise what no code of lmc expects."""
    raise RuntimeError("planted")


FAILS_AT_START = ["connector.windows_of", "worker.worker.Worker.register", "connector.open_engine"]


@contextmanager
def started(lab, **settings):
    """One more connector for the scheduler of an engine that runs, as the engine has started its own."""
    config = copy(lab.llm.llm_engine.vllm_config)
    config.kv_transfer_config = copy(config.kv_transfer_config)
    config.kv_transfer_config.kv_connector_extra_config = SETTINGS | settings
    connector = LMCConnector(config, lab.connector.role, lab.scheduler.kv_cache_config)
    connector.bind_gpu_block_pool(lab.pool)
    connector.set_xfer_handshake_metadata_pp_aware({(0, 0): get_kv_transfer_group().get_handshake_metadata()})
    try:
        yield connector, LMCConnector(config, KVConnectorRole.WORKER, lab.scheduler.kv_cache_config)
    finally:
        connector.shutdown()


def caches_of(lab):
    """The engine's KV caches by layer, as it registers them."""
    layers = lab.llm.llm_engine.vllm_config.compilation_config.static_forward_context
    return {name: layer.kv_cache for name, layer in layers.items()}


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_error_while_lmc_ends_is_not_raised_to_the_engine(lab, monkeypatch, caplog, when):
    def fail():
        if when == "after":
            close()
        raise RuntimeError("planted")

    with caplog.at_level(logging.INFO, "lmc"), started(lab) as (connector, _):
        close = scheduler_of(connector).close
        monkeypatch.setattr(scheduler_of(connector), "close", fail)
    if when == "before":
        close()
    assert "lmc failed in shutdown" in caplog.text
    assert "closed the store" not in caplog.text


def test_a_version_of_vllm_that_was_not_tested_is_used_with_one_warning(lab, monkeypatch, caplog):
    monkeypatch.setattr("vllm.__version__", "0.47.0")
    with caplog.at_level(logging.WARNING, "lmc"), started(lab):
        pass
    assert [record.getMessage() for record in caplog.records if "0.47.0" in record.getMessage()] == [
        "lmc was tested with vLLM 0.30 to 0.33, but not with 0.47.0"
    ]


def test_without_enable_blending_a_model_that_could_be_blended_is_not(lab, monkeypatch):
    """The worker tells the scheduler, which asks workers and not the settings."""
    off = {"enable_blending": False}
    with started(lab, **off) as (connector, side):
        assert setup_of(connector).blends, "the control: the engine's own worker can"
    side.register_kv_caches(caches_of(lab))
    monkeypatch.setattr("test_wrong_use.get_kv_transfer_group", lambda: side)
    with started(lab, **off) as (connector, _):
        setup = setup_of(connector)
        assert (setup.blends, setup.refused) == (False, "blending is off (enable_blending)")
        found = Administration(setup, {}).explain({"prompt_token_ids": PROMPT.tokens, "lmc": PROMPT.blend()})
        assert (found["why"], found["reused_tokens"]) == (setup.refused, 0)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("impl.alibi_slopes", [0.5], "ALiBi"),
        ("has_sink", True, "attention sinks in an unknown form"),
        ("kv_sharing_target_layer_name", "model.layers.3", "the keys and values of another layer, and later"),
    ],
)
def test_attention_that_is_not_lmc_s_own_is_not_blended(lab, monkeypatch, name, value, said):
    """Of a model whose architecture is blended otherwise. The first pass would choose other tokens without a word."""
    *inside, name = name.split(".")
    attention = layers_of_lmc().attention[0]
    monkeypatch.setattr(attention.impl if inside else attention, name, value)
    with pytest.raises(UnsupportedModel, match=f"the model's attention has {said}"):
        NativeLayers(loaded_model(), lab.llm.llm_engine.vllm_config, lab.scheduler.kv_cache_config, {})


@pytest.mark.long
def test_without_a_load_failure_policy_a_warning_says_what_to_add(models, caplog):
    with (
        caplog.at_level(logging.WARNING, "lmc"),
        engine(models("llama"), transfer={"kv_load_failure_policy": "fail"}) as lab,
    ):
        lab.ask(words(100, 1))
    assert "kv_load_failure_policy is 'fail', so a failed load will fail its request" in caplog.text
    assert """add "kv_load_failure_policy":"recompute" to --kv-transfer-config""" in caplog.text


@pytest.mark.long
@pytest.mark.parametrize("where", FAILS_AT_START)
def test_an_engine_in_which_lmc_fails_at_the_start_answers(models, monkeypatch, caplog, where):
    monkeypatch.setattr(f"lmc.connectors.vllm.{where}", raise_error)
    with engine(models("llama")) as lab:
        assert "lmc failed at its start and is disabled" in caplog.text
        assert len(answer(lab.ask(PROMPT.tokens, PROMPT.blend()))) == 8
        assert facts(lab.ask(PROMPT.tokens)) == {}
        assert lab.pool.get_num_free_blocks() == lab.free_at_start


@pytest.mark.long
def test_a_model_that_cannot_be_blended_is_offloaded_exactly(models, caplog):
    with caplog.at_level(logging.WARNING, "lmc"), engine(models("gpt2")) as lab:
        assert "blending is off: the model's layers get no positions, and lmc moves keys by RoPE only" in caplog.text
        assert "Exact prefixes are still stored and loaded." in caplog.text
        prompt = Prompt(DOCUMENTS)
        wanted = lab.vanilla(prompt.tokens)
        lab.ask(prompt.tokens)
        lab.forget_prefixes()
        again = lab.ask(prompt.tokens)
        assert facts(again)["exact_tokens"] >= 288
        assert answer(again) == answer(wanted)
        for wish in (prompt.blend(), {"learn": True}):
            lab.forget_prefixes()  # What the engine has cached needs no documents, and gets no note.
            assert "blending is off" in facts(lab.ask(prompt.tokens, wish))["note"]
        lab.check()


@pytest.mark.long
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"chunk_size": 100}, "set chunk_size (LMC_CHUNK_SIZE) to 96, or --block-size to a divisor of it"),
        ({"chunk_sice": 128}, "unknown setting chunk_sice (override chunk_sice): did you mean chunk_size?"),
        ({"blend_method": "fancy"}, "must be union, query, head or cacheblend"),
    ],
    ids=["block size", "misspelt", "method"],
)
def test_a_setting_that_cannot_work_ends_the_start(models, settings, said):
    assert said in refusal(models("llama"), settings)


@pytest.mark.long
def test_an_unknown_variable_ends_the_start(models, monkeypatch):
    monkeypatch.setenv("LMC_CHUNKSIZE", "128")
    said = refusal(models("llama"))
    assert said == "unknown setting LMC_CHUNKSIZE (environment LMC_CHUNKSIZE): did you mean LMC_CHUNK_SIZE?"


def test_a_special_string_that_encodes_to_nothing_ends_the_start():
    class Deaf:
        bos_token_id, all_special_ids = None, ()

        def encode(self, text: str) -> list[int]:
            return [ord(letter) for letter in text if letter != "#"]

        def decode(self, tokens: list[int]) -> str:
            return "".join(map(chr, tokens))

    with pytest.raises(ConfigError, match="the separator ' # # ' has no tokens of its own; set blend_special"):
        Bare(enable_blending=True).markers_of(Deaf())


def test_pipeline_parallel_is_not_blended():
    model = type("LlamaForCausalLM", (), {})()
    config = SimpleNamespace(parallel_config=SimpleNamespace(pipeline_parallel_size=2))
    with pytest.raises(UnsupportedModel, match="the model's layers are on several pipeline stages"):
        NativeLayers(model, config, None, {})


@pytest.mark.parametrize(
    ("experts", "said"),
    [
        (True, "the model's experts are shared with other data-parallel engines"),
        (False, "lmc does not find the decoder layers"),
    ],
)
def test_experts_that_data_parallel_engines_share_are_not_blended(experts, said):
    """Without experts only the next check refuses this model."""
    model = type("MixtralForCausalLM", (torch.nn.Module,), {})()
    parallel = SimpleNamespace(pipeline_parallel_size=1, data_parallel_size=2, is_moe_model=experts)
    with pytest.raises(UnsupportedModel, match=said):
        NativeLayers(model, SimpleNamespace(parallel_config=parallel), SimpleNamespace(kv_cache_groups=()), {})


def refusal(model, settings=None) -> str:
    """What an engine that does not start says."""
    try:
        with pytest.raises(ConfigError) as error, engine(model, settings):
            pass
    finally:
        cleanup_dist_env_and_memory()
    return str(error.value)


class Bare(LMCConnector):
    """A scheduler's side without an engine, whose worker says that the model cannot be blended."""

    def __init__(self, config=None, **settings) -> None:
        self.settings, self._config, self._scheduler = Settings(**settings), config or config_of(), None
        self._early_facts, self._early_requests, self._guard = {}, [], HookGuard()

    def markers_of(self, tokenizer):
        return self._markers(tokenizer)


def test_ranks_that_each_have_a_scheduler_of_their_own_are_refused():
    """As under torchrun (external_launcher): each would take the slots of a slab for one rank, and its worker for one
    of several.
    """
    connector = Bare(config_of(tensor_parallel_size=2))
    with pytest.raises(ConfigError, match=r"1 of 2 workers.*external_launcher"):
        connector.set_xfer_handshake_metadata_pp_aware({(0, 0): Handshake(None)})


def config_of(extra=(), *, caches_prefixes=True, **parallel) -> SimpleNamespace:
    """What a connector reads of vLLM's configuration."""
    return SimpleNamespace(
        model_config=SimpleNamespace(
            is_prefix_caching_supported=caches_prefixes, model="a model", served_model_name=None, tokenizer=None
        ),
        cache_config=SimpleNamespace(block_size=16, prefix_caching_hash_algo="sha256"),
        speculative_config=None,
        parallel_config=SimpleNamespace(
            **{"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "decode_context_parallel_size": 1,
               "prefill_context_parallel_size": 1, "data_parallel_size": 1, "data_parallel_index": 0, **parallel},
        ),
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config=dict(extra), kv_load_failure_policy="recompute"),
    )  # fmt: skip


@pytest.mark.parametrize(("engines", "own"), [(1, ""), (3, "dp2")])
def test_each_data_parallel_engine_has_a_directory_of_its_own(monkeypatch, tmp_path, engines, own):
    monkeypatch.setattr(KVConnectorBase_V1, "__init__", lambda *_, **__: None)
    parallel = {"data_parallel_size": engines, "data_parallel_index": 2}
    config = config_of({"local_disk": str(tmp_path)}, caches_prefixes=False, **parallel)
    connector = LMCConnector(config, KVConnectorRole.SCHEDULER, SimpleNamespace(kv_cache_groups=[SimpleNamespace()]))
    assert connector.settings.local_disk == tmp_path / own


def test_a_model_for_which_the_engine_caches_no_prefixes_is_left_alone(caplog, monkeypatch):
    monkeypatch.setattr(KVConnectorBase_V1, "__init__", lambda *_, **__: None)
    config = config_of(caches_prefixes=False)
    groups = SimpleNamespace(kv_cache_groups=[SimpleNamespace()])
    connector, worker = (LMCConnector(config, role, groups) for role in KVConnectorRole)
    assert caplog.text.count("lmc is disabled for this model: its pooling needs every prompt token") == 1
    worker.register_kv_caches({})
    assert worker.get_handshake_metadata() is None
    connector.set_xfer_handshake_metadata_pp_aware({})
    assert_scheduler_idle(connector)
    assert_worker_idle(worker)


def assert_worker_idle(worker):
    """The worker's side of a connector does nothing."""
    worker.start_load_kv(None)
    worker.wait_for_save()
    assert worker.get_finished({"a request"}) == (None, None)
    assert worker.get_block_ids_with_load_errors() == set()
    assert worker.build_connector_worker_meta() is None


def assert_scheduler_idle(connector):
    """The scheduler's side of a connector does nothing, and waits for nothing."""
    assert connector.get_num_new_matched_tokens(None, 0) == (0, False)
    assert connector.request_finished(None, []) == (False, None)
    assert not connector.build_connector_meta(None).plan.saves
    assert not connector.has_pending_push_work()


@pytest.mark.parametrize("where", FAILS_AT_START)
def test_after_an_error_at_its_start_lmc_is_idle(lab, monkeypatch, caplog, where):
    """An engine in which lmc fails before the first request serves without it."""
    monkeypatch.setattr(f"lmc.connectors.vllm.{where}", raise_error)
    group = lab.scheduler.kv_cache_config
    side = LMCConnector(lab.llm.llm_engine.vllm_config, KVConnectorRole.WORKER, group)
    side.register_kv_caches(caches_of(lab))
    monkeypatch.setattr("test_wrong_use.get_kv_transfer_group", lambda: side)
    with started(lab) as (connector, _):
        assert_scheduler_idle(connector)
    if where != "connector.open_engine":
        assert_worker_idle(side)
    assert "lmc failed at its start and is disabled; vLLM continues without it" in caplog.text
    assert "RuntimeError: planted" in caplog.text
    assert ("it failed at the start of a worker" in caplog.text) == (where == "worker.worker.Worker.register")


def test_an_error_at_the_start_of_one_of_several_ranks_ends_the_start(monkeypatch):
    """The other ranks may wait for this one in the middle of the self-test."""
    config = config_of(tensor_parallel_size=2)
    monkeypatch.setattr(KVConnectorBase_V1, "__init__", lambda *_, **__: None)
    monkeypatch.setattr("lmc.connectors.vllm.connector.objection", raise_error)
    with pytest.raises(RuntimeError, match="planted"):
        LMCConnector(config, KVConnectorRole.WORKER, SimpleNamespace(kv_cache_groups=[SimpleNamespace()]))


def test_facts_that_never_come_end_the_waiting_with_a_warning(caplog):
    """As beside other connectors whose metadata is not lmc's. An engine must not make empty steps for ever."""
    connector, steps = Bare(), 0
    connector.set_xfer_handshake_metadata_pp_aware({(0, 0): object()})
    while connector.has_pending_push_work():
        assert connector.build_connector_meta(None).plan == StepPlan()
        connector.update_connector_output(SimpleNamespace(kv_connector_worker_meta=None))
        steps += 1
    assert steps == MAX_WAIT_STEPS
    assert caplog.text.count("lmc was disabled, because only 0 of 1 workers sent their facts") == 1


def test_reports_of_ranks_are_joined_with_their_facts():
    first, second = (
        WorkerMetadata(StepReport(done={3: 1}), (WorkerFacts(rank=(0, i), page_bytes=(), layout=""),)) for i in (0, 1)
    )
    joined = first.aggregate(second)
    assert ([facts.rank for facts in joined.facts], joined.report.done) == ([(0, 0), (0, 1)], {3: 2})


@pytest.mark.parametrize("parallel", ["decode_context_parallel_size", "prefill_context_parallel_size"])
def test_context_parallelism_is_refused(monkeypatch, parallel):
    monkeypatch.setattr(KVConnectorBase_V1, "__init__", lambda *_, **__: None)
    with pytest.raises(ConfigError, match="lmc does not support context parallelism"):
        LMCConnector(config_of(**{parallel: 2}), KVConnectorRole.SCHEDULER, None)


def test_with_full_graphs_settings_are_checked_before_there_is_a_model(monkeypatch):
    monkeypatch.setattr(type(current_platform), "support_static_graph_mode", classmethod(lambda cls: True))

    def configured(graphs, **settings):
        transfer = KVTransferConfig(kv_connector="LMCConnector", kv_role="kv_both", kv_connector_extra_config=settings)
        VllmConfig(kv_transfer_config=transfer, compilation_config=CompilationConfig(cudagraph_mode=graphs))

    configured("FULL", chunk_size=128)
    configured("PIECEWISE", chunk_sice=128)  # checked when the connector is made
    for graphs in ("FULL", "FULL_AND_PIECEWISE"):
        with pytest.raises(ValueError, match=r"unknown setting chunk_sice .*did you mean chunk_size"):
            configured(graphs, chunk_sice=128)
    assert LMCConnector.requires_piecewise_for_cudagraph({}) is False
    for wrong in ({"lmc.admin": "0.0.0.0:9180"}, {"document_events": "somewhere"}):
        with pytest.raises(ConfigError, match=f"LMC_.*{next(iter(wrong.values()))}"):
            LMCConnector.requires_piecewise_for_cudagraph(wrong)
    monkeypatch.setattr("lmc.server.client.connection.SERVER_START_SECONDS", 0.0)
    with pytest.raises(TierUnusable, match="no cache server answers at /nowhere"):
        LMCConnector.requires_piecewise_for_cudagraph({"server": "/nowhere"})


def test_the_ranks_of_all_pipeline_stages_have_each_part_of_a_slot_once(monkeypatch):
    stages, ranks, found, arrived = (3, 2), 2, [], []
    everybody = [(stage, rank) for stage in range(2) for rank in range(ranks)]
    told = [SimpleNamespace(rank=rank, page_bytes=(64,) * stages[rank[0]]) for rank in everybody[::-1]]
    assert layers_of_stages(told) == stages
    slab = SimpleNamespace(part=lambda slot, part: part)
    monkeypatch.setattr("lmc.connectors.vllm.worker.rank_slab.Slab", SimpleNamespace(attach=lambda at, share: slab))
    for stage, rank in everybody:
        for kind, number in (("pp", stage), ("tp", rank)):
            group = SimpleNamespace(rank_in_group=number, world_size=ranks)
            monkeypatch.setattr(f"lmc.connectors.vllm.worker.rank_slab.get_{kind}_group", lambda group=group: group)
        side = RankSlab(SlabAddress(path="", slots=1, parallelism=Parallelism(stages, ranks), part_bytes=64))
        found += [side.part(0, layer) for layer in range(stages[stage])]
        arrived += [side.needed(layer) for layer in range(stages[stage])]
    assert sorted(found) == list(range(sum(stages) * ranks))
    assert found[:3] == [0, 2, 4], "the ranks of a layer are side by side"
    assert arrived == [2, 4, 6] * 2 + [8, 10] * 2, "a layer waits for the parts of all its ranks"
