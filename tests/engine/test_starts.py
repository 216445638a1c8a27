"""Engines start with any kind of layers and beside any connector, and answer as without lmc."""

import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from host_offload import OFFLOADING, SIMPLE, copy_at_once
from lab import SAME, SETTINGS, Lab, Prompt, agree, answer, distance, engine, facts, launch, words
from stepping import poison
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from lmc.connectors.vllm import connector
from lmc.connectors.vllm.connector import LMCConnector
from lmc.connectors.vllm.model_kinds import TESTED, objection, price_of_one_table
from lmc.engine import CacheEngine

DOCUMENTS = [words(150, 1), words(300, 2)]
PROMPT = Prompt(DOCUMENTS)
PLAIN = words(700, 9)
NOTHING = "lmc is disabled for this model: "


@contextmanager
def started(make: Any) -> Iterator[LLM]:
    """An engine of any configuration, in this process."""
    llm = None
    try:
        llm = make()
        yield llm
    finally:
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        ensure_kv_transfer_shutdown()
        cleanup_dist_env_and_memory()


def without_lmc(model: Any, **options: Any) -> LLM:
    """The same engine as `lab.launch` makes, without a connector."""
    same = {"skip_tokenizer_init": True, "enforce_eager": True, "max_model_len": 2048, "dtype": "float32"}
    return LLM(str(model), **{**same, "disable_log_stats": True, "max_num_batched_tokens": 256, **options})


def said(caplog: Any) -> list[str]:
    """What lmc has logged."""
    return [record.getMessage() for record in caplog.records if record.name.startswith("lmc")]


# -- models -----------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_model_with_states_starts_and_answers_as_without_lmc(models, caplog):
    """Two block tables, of which one has states at block borders (align mode). Without `SupportsHMA`, vLLM raised
    'Failed to promote local KV cache specs to one unified type'.
    """

    def asked(llm: LLM) -> list[Any]:
        core = llm.llm_engine.engine_core.engine_core
        assert len(core.scheduler.kv_cache_config.kv_cache_groups) == 2
        wanted = SamplingParams(max_tokens=8, temperature=0, detokenize=False, ignore_eos=True, logprobs=1)
        prompts = [{"prompt_token_ids": PLAIN}, {"prompt_token_ids": PROMPT.tokens}]
        first, again = (llm.generate(prompts, wanted, use_tqdm=False) for _ in range(2))
        assert llm.reset_prefix_cache()
        return [*first, *again, *llm.generate(prompts, wanted, use_tqdm=False)]

    with started(lambda: without_lmc(models("lfm2"), block_size=32)) as llm:
        wanted = asked(llm)
    with caplog.at_level(logging.INFO, "lmc"), started(lambda: launch(models("lfm2"))) as llm:
        found = asked(llm)
    assert all(map(agree, found[:4], wanted[:4]))
    assert [out.num_cached_tokens for out in found[:4]] == [out.num_cached_tokens for out in wanted[:4]]
    assert found[2].num_cached_tokens == 672, "the engine's own cache resumes from its states"
    # What lmc loads is tested with Qwen3-Next (test_states.py): vLLM's CPU build computes this model differently if
    # steps end elsewhere, without lmc too.
    assert [out.num_cached_tokens for out in (found[4], wanted[4])] == [672, 0]
    assert "blending is off: the model has layers with a state (linear attention, Mamba)" in caplog.text


@pytest.mark.long
@pytest.mark.parametrize(("family", "kinds"), [("granite4", "SA"), ("nemotronh", "SSA")])
def test_models_with_mamba_2_start_and_lmc_knows_which_tables_have_states(models, family, kinds):
    """vLLM's CPU build raises an `IndexError` in the first step of these models, without lmc, too."""
    with started(lambda: launch(models(family), dtype="bfloat16", mamba_ssm_cache_dtype="float32")) as llm:
        lab = Lab(llm)
        specs = [group.kv_cache_spec for group in lab.scheduler.kv_cache_config.kv_cache_groups]
        assert "".join("S" if isinstance(spec, MambaSpec) else "A" for spec in specs) == kinds
        assert lab.setup.groups.states == {number for number, kind in enumerate(kinds) if kind == "S"}
        assert lab.lmc.engine.chunk_size % specs[0].block_size == 0


@pytest.mark.long
def test_hashes_of_parts_of_blocks_are_said_to_be_unsupported(models, caplog):
    """lmc names chunks by hashes of whole blocks."""
    with caplog.at_level(logging.WARNING, "lmc"), started(lambda: launch(models("gemma3mixed"), prefix_match_unit=16)):
        pass
    assert "lmc is disabled, because --prefix-match-unit is not the block size of 32" in caplog.text


@pytest.mark.long
def test_without_prefix_caching_nothing_is_done_for_a_model_with_states(models, caplog):
    with caplog.at_level(logging.INFO, "lmc"), started(lambda: launch(models("lfm2"), enable_prefix_caching=False)):
        pass
    reason = "it has layers with a state (linear attention, Mamba), which lmc stores only with prefix caching"
    assert said(caplog) == [NOTHING + reason]


def attention(kind: type = FullAttentionSpec, **more: Any) -> Any:
    return kind(block_size=32, num_kv_heads=1, head_size=32, dtype=torch.float32, **more)


class OtherRules(FullAttentionSpec):
    """A kind of cache that a later vLLM may derive, as it has derived `RSWASpec`."""


WINDOW = attention(SlidingWindowSpec, sliding_window=128)
LARGE = replace(WINDOW, block_size=64)
CHUNKS = attention(ChunkedLocalAttentionSpec, attention_chunk_size=128)
STATE = MambaSpec(block_size=32, shapes=((1,),), dtypes=(torch.float32,))
KEPT = replace(STATE, mamba_cache_mode="align")
MODEL = SimpleNamespace(is_prefix_caching_supported=True)
KINDS = {
    "full attention": ([attention()], ""),
    "windows": ([WINDOW], ""),
    "layers of several shapes": ([UniformTypeKVCacheSpecs(block_size=32, kv_cache_specs={"a": attention()})], ""),
    "states that are not kept": ([STATE], "stores only with prefix caching"),
    "states and attention, not kept": ([attention(), STATE], "stores only with prefix caching"),
    "states and attention": ([attention(), KEPT], ""),
    "states and drafts": ([attention(), replace(KEPT, num_speculative_blocks=2)], "store with speculative decoding"),
    "two tables": ([attention(), WINDOW], ""),
    "blocks of two sizes": ([attention(), LARGE], "2 block tables whose blocks differ; start vLLM with --disable-hyb"),
    "chunks": ([attention(), CHUNKS], "2 block tables whose blocks differ; start vLLM with --disable-hybrid"),
    "no cache": ([], "no KV cache"),
    "a derived kind": ([attention(), attention(OtherRules)], "layers of an unknown kind (OtherRules)"),
    "prompts that see all of themselves": ([attention(), attention(non_causal=True)], "attend to later ones"),
}


@pytest.mark.parametrize("name", KINDS)
def test_a_model_s_caches_decide_whether_it_is_offloaded(name):
    specs, said = KINDS[name]
    groups = [SimpleNamespace(kv_cache_spec=spec, layer_names=["a"]) for spec in specs]
    caches = SimpleNamespace(kv_cache_groups=groups)
    found = objection(MODEL, caches)
    assert said in found if said else found == ""


@pytest.mark.parametrize(
    ("text", "times"),
    [
        ({"layer_types": [*["sliding_attention"] * 52, *["full_attention"] * 10], "sliding_window": 1024}, "4.7"),
        ({"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 128}, "2.0"),
        ({"layer_types": ["chunked_attention", "full_attention"], "attention_chunk_size": 8192}, "1.3"),
        ({"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16384}, ""),
        ({"layer_types": ["full_attention"] * 2}, ""),
        ({"layer_types": ["sliding_attention"] * 2, "sliding_window": 128}, ""),
        ({}, ""),
    ],
)
def test_what_one_table_costs_is_said(text, times):
    said = price_of_one_table(SimpleNamespace(hf_text_config=SimpleNamespace(**text), max_model_len=16384))
    assert f" {times} times the KV cache" in said if times else said == ""


MIXED = ["sliding_attention", "full_attention"]


@pytest.mark.parametrize(
    ("several", "model", "text", "options"),
    [
        (True, {"is_hybrid": True}, {}, {}),
        (True, {"is_attention_free": True}, {}, {}),
        (True, {"is_encoder_decoder": True}, {}, {}),
        (True, {}, {"layer_types": ["compressed_sparse_attention"], "sliding_window": 128}, {}),
        (True, {}, {"compress_ratios": [0, 4, 128], "sliding_window": 128}, {}),
        (False, {}, {}, {}),
        (True, {}, {"layer_types": MIXED}, {}),
        (False, {}, {"layer_types": ["sliding_attention"] * 2}, {}),
        (False, {}, {"layer_types": ["chunked_attention", "full_attention"]}, {}),
        (False, {}, {"layer_types": MIXED, "global_head_dim": 512}, {}),
        (False, {}, {"layer_types": MIXED, "is_heterogeneous": True}, {}),
        (False, {}, {"layer_types": MIXED, "num_key_value_heads": 4, "swa_num_key_value_heads": 8}, {}),
        (True, {}, {"layer_types": MIXED, "num_key_value_heads": 8, "swa_num_key_value_heads": 8}, {}),
        (False, {}, {"layer_types": MIXED}, {"speculative_config": SimpleNamespace(method="eagle3")}),
        (True, {}, {"layer_types": MIXED}, {"speculative_config": SimpleNamespace(method="ngram")}),
        (False, {}, {"layer_types": MIXED}, {"parallel_config": SimpleNamespace(pipeline_parallel_size=2)}),
    ],
)
def test_the_hybrid_manager_stays_on_for_models_with_states_and_with_windows(several, model, text, options):
    kinds = dict.fromkeys(("is_hybrid", "is_attention_free", "is_encoder_decoder"), False)
    given = {**kinds, "hf_text_config": SimpleNamespace(**text), **model}
    config = SimpleNamespace(
        model_config=SimpleNamespace(**given),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        **{"speculative_config": None, "parallel_config": SimpleNamespace(pipeline_parallel_size=1), **options},
    )
    assert LMCConnector.get_required_kvcache_layout(config) is None
    assert config.scheduler_config.disable_hybrid_kv_cache_manager is not several


@pytest.mark.long
@pytest.mark.parametrize("tables", [1, 2])
def test_sliding_windows_are_offloaded_with_one_block_table_and_with_two(models, tables, monkeypatch, caplog):
    """With the hybrid manager, windows have a block table of their own, and vLLM frees the blocks that they pass.

    The log at start says whether an architecture was tested. One that was not is blended, too.
    """
    options = {"disable_hybrid_kv_cache_manager": True} if tables == 1 else {}
    tested = f"Gemma3ForCausalLM was tested with lmc: {TESTED['Gemma3ForCausalLM']}"
    if tables == 1:
        monkeypatch.delitem(TESTED, "Gemma3ForCausalLM")
    with caplog.at_level(logging.INFO, "lmc"), engine(models("gemma3mixed"), **options) as lab:
        assert lab.setup.blends
        assert said(caplog).count(tested) == tables - 1
        assert sum("Gemma3ForCausalLM has not been tested with lmc" in line for line in said(caplog)) == 2 - tables
        assert len(lab.scheduler.kv_cache_config.kv_cache_groups) == tables
        assert ("1.9 times the KV cache" in caplog.text) == (tables == 1)
        wanted = lab.vanilla(PLAIN)
        lab.ask(PLAIN)
        lab.forget_prefixes()
        poison()
        found = lab.ask(PLAIN)
        assert (found.num_cached_tokens, facts(found)["exact_tokens"]) == (672, 672)
        assert agree(found, wanted)
        lab.check()


@pytest.mark.long
def test_an_encoder_without_kv_cache_starts_and_embeds_as_without_lmc(tmp_path, caplog):
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256}
    transformers.BertModel(transformers.BertConfig(vocab_size=1024, **sizes)).save_pretrained(tmp_path)
    vocabulary = Tokenizer(WordLevel({"[UNK]": 0}, unk_token="[UNK]"))  # which vLLM wants for pooling
    transformers.PreTrainedTokenizerFast(tokenizer_object=vocabulary, pad_token="[UNK]").save_pretrained(tmp_path)
    prompts = [{"prompt_token_ids": words(count, count)} for count in (40, 200)]
    options = {"runner": "pooling", "max_model_len": 512, "max_num_batched_tokens": 512, "skip_tokenizer_init": False}

    def embedded(llm: LLM) -> list[Any]:
        return [out.outputs.data for out in llm.encode(prompts, pooling_task="embed", use_tqdm=False)]

    with started(lambda: without_lmc(tmp_path, **options)) as llm:
        wanted = embedded(llm)
    with caplog.at_level(logging.INFO, "lmc"), started(lambda: launch(tmp_path, **options)) as llm:
        found = embedded(llm)
    assert all(map(torch.equal, found, wanted))
    assert said(caplog) == [NOTHING + "it has no KV cache"]


# -- other connectors -------------------------------------------------------------------------------------------------

LMC = {
    "kv_connector": "LMCConnector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": SETTINGS,
}
STAND_IN = {"kv_connector": "StandIn", "kv_connector_module_path": "stand_in", "kv_role": "kv_both"}


@contextmanager
def beside(model: Any, *children: dict[str, Any], idle: bool = True) -> Iterator[Lab]:
    """An engine with several connectors; an `idle` one has no request at first, and gets the workers' facts before."""
    transfer = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": list(children)}}
    with started(lambda: launch(model, transfer=transfer)) as llm:
        lab = Lab(llm)
        (lab.connector,) = [one for one in lab.connector.sub_connectors if isinstance(one, LMCConnector)]
        if idle:  # A server makes steps by itself as long as a connector has work.
            lab.settle()
            assert lab.lmc is not None
        yield lab


@pytest.mark.long
@pytest.mark.parametrize("order", [(LMC, STAND_IN), (STAND_IN, LMC)], ids=["first", "last"])
def test_lmc_stands_beside_a_connector_with_handshake_metadata_of_its_own(models, caplog, order):
    """`MultiConnector` hands the first child's metadata to all children, and NIXL's scheduler raises unless it is its
    own.
    """
    with caplog.at_level(logging.WARNING, "lmc"), beside(models("llama"), *order) as lab:
        (other,) = [one for one in lab.scheduler.connector.sub_connectors if one is not lab.connector]
        assert other.introduced == [(0, 0)]
        assert not lab.connector.has_pending_push_work(), "facts have come, and nothing is left to do"
        (warning,) = [line for line in said(caplog) if line.startswith("blending is off: ")]
        assert "StandIn next to lmc may serve approximate KV to exact requests" in warning
        lab.ask(PLAIN)
        lab.settle()
        assert lab.llm.reset_prefix_cache()
        poison()
        found = lab.ask(PLAIN)
        assert (found.num_cached_tokens, facts(found)["exact_tokens"]) == (672, 672)
        assert (lab.numbers["loads"], lab.numbers["tokens_from_host"]) == (1, 672)
        assert "blending is off" in facts(lab.ask(PROMPT.tokens, PROMPT.blend()))["note"]
        assert agree(found, lab.vanilla(PLAIN))
        lab.check()


@pytest.mark.long
def test_no_blend_reaches_a_connector_that_hashes_tokens(models, caplog, tmp_path):
    """A request with `blend: false` got the approximate KV that a blend had left in the other connector."""
    example = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
    }
    other = Prompt(DOCUMENTS[::-1])
    with caplog.at_level(logging.WARNING, "lmc"), beside(models("llama"), LMC, example) as lab:
        assert "blending is off: ExampleConnector next to lmc" in caplog.text
        lab.ask(PROMPT.tokens, PROMPT.blend())
        asked = lab.ask(other.tokens, other.blend())
        lab.settle()
        assert lab.llm.reset_prefix_cache()
        poison()
        found = lab.ask(other.tokens, {"blend": False})
        assert found.num_cached_tokens >= 448
        lab.settle()
        assert answer(found) == answer(asked)
        assert distance(found, asked) <= SAME
        lab.check_idle()


@pytest.mark.long
@pytest.mark.parametrize("order", [(LMC, OFFLOADING), (OFFLOADING, LMC)], ids=["first", "last"])
def test_exact_prefixes_are_loaded_once_beside_a_connector_that_offloads_them_too(models, caplog, order):
    """The first connector of the list that has tokens loads them. Blending is off, because this connector reads the
    hashes of a prompt before lmc replaces them.
    """
    with caplog.at_level(logging.WARNING, "lmc"), beside(models("llama"), *order) as lab:
        assert "blending is off: OffloadingConnector next to lmc" in caplog.text
        wanted = [lab.ask(tokens) for tokens in (PLAIN, PROMPT.tokens)]
        lab.settle()
        assert lab.llm.reset_prefix_cache()
        poison()
        found = [lab.ask(PLAIN), lab.ask(PROMPT.tokens, PROMPT.blend())]
        assert [out.num_cached_tokens for out in found] == [672, 480]
        assert [facts(out).get("exact_tokens", 0) for out in found] == ([672, 480] if order[0] is LMC else [0, 0])
        assert lab.numbers.get("loads", 0) == (2 if order[0] is LMC else 0)
        assert all(map(agree, found, wanted))
        lab.check_idle()


@pytest.mark.long
@pytest.mark.parametrize("order", [(LMC, SIMPLE), (SIMPLE, LMC)], ids=["first", "last"])
def test_blends_stay_apart_in_a_connector_that_goes_by_block_hashes(models, monkeypatch, caplog, order):
    """The other connector keeps the blocks of a blend under their salted hashes, which exact requests do not have."""
    copy_at_once(monkeypatch)
    with caplog.at_level(logging.WARNING, "lmc"), beside(models("llama"), *order) as lab:
        assert "blending is off" not in caplog.text
        wanted = lab.ask(PROMPT.tokens, {"blend": False}, salt="another tenant")
        lab.learn(DOCUMENTS)
        blend = lab.ask(PROMPT.tokens, PROMPT.blend(strategy="none"))
        assert facts(blend)["reused_tokens"] == sum(map(len, DOCUMENTS))
        assert distance(blend, wanted) > 100 * SAME, "the control: stored KV is used"
        lab.drop_backfills()
        for cached in (32, 480):  # a block of the text before the documents, and then what the plain request has left
            lab.settle()
            assert lab.llm.reset_prefix_cache()
            poison()
            found = lab.ask(PROMPT.tokens, {"blend": False})
            assert found.num_cached_tokens == cached
            assert agree(found, wanted)
        lab.check_idle()


@pytest.mark.long
@pytest.mark.parametrize("failing", ["open_engine", "serve_if_wanted"])
def test_an_error_at_the_late_start_in_a_multi_connector_leaves_an_engine_without_lmc(
    models, monkeypatch, caplog, failing
):
    """Workers' facts come with the first step, when the engine serves requests already."""

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("planted")

    closed, close = [], CacheEngine.close
    monkeypatch.setattr(CacheEngine, "close", lambda engine: [closed.append(engine), close(engine)])
    monkeypatch.setattr(connector, failing, fail)
    with caplog.at_level(logging.WARNING, "lmc"), beside(models("llama"), LMC, idle=False) as lab:
        first = lab.ask(PLAIN)
        assert lab.llm.reset_prefix_cache()
        assert agree(lab.ask(PLAIN), first)
        assert lab.lmc is None
        assert not lab.connector.has_pending_push_work()
        assert len(closed) == (failing == "serve_if_wanted"), "nothing stays open"
        assert said(caplog).count("lmc was disabled, because its store could not be opened") == 1


@pytest.mark.long
def test_alone_in_a_multi_connector_prompts_are_blended_and_requests_before_the_facts_are_served(models):
    """Facts of workers come with the first step, in which requests may be waiting already. One that has begun is left
    alone.
    """
    with beside(models("llama"), LMC, idle=False) as lab:
        assert lab.lmc is None
        waiting = words(300, 12)
        lab.ask_all([(PLAIN, None), (waiting, None)])
        assert lab.setup.blends
        lab.settle()
        assert lab.llm.reset_prefix_cache()
        assert [lab.ask(tokens, count=1).num_cached_tokens for tokens in (waiting, PLAIN)] == [288, 0]
        lab.learn(DOCUMENTS)
        found = lab.ask(PROMPT.tokens, PROMPT.blend())
        assert facts(found)["reused_tokens"] > 0
        lab.check()
