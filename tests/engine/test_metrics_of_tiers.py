"""The numbers of tiers in an engine's `/metrics`: vLLM's classes, our labels."""

import json

import msgspec
import pytest
import torch
from lab import SIZES, Prompt, distance, engine, facts, words
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import REGISTRY, Counter, Gauge, Histogram

from lmc.connectors.vllm.stats import LmcPromMetrics, LmcStats
from lmc.metrics import NAMES, flat, parted
from lmc.storage.stats import StoreStats

TYPES = {kind: kind for kind in (Counter, Gauge, Histogram)}
DOCUMENTS = [words(150, 1), words(300, 2)]


class Config:
    """All of vLLM's configuration that its base class looks at."""

    kv_transfer_config = None


def metrics_of(*engines: int) -> LmcPromMetrics:
    return LmcPromMetrics(Config(), TYPES, ["model_name", "engine"], {n: ["m", str(n)] for n in engines})


def value(name: str, engine: int = 0, model: str = "m", **labels: str) -> float | None:
    return REGISTRY.get_sample_value(f"lmc:{name}", {"model_name": model, "engine": str(engine), **labels})


def stats(usable: bool) -> StoreStats:
    return StoreStats(
        hits={"host": 3},
        misses=1,
        bytes={("disk", "read"): 4096},
        seconds={("disk", "read"): 0.5},
        writes={},
        dropped_writes=0,
        failed={},
        corrupt={},
        no_room=0,
        evictions={"host": 2},
        queued=5,
        usable={"disk": usable},
    )


@pytest.mark.long
def test_a_blend_is_a_span_in_the_trace_of_its_request(models):
    spans = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    trace.set_tracer_provider(provider)  # vLLM's own, which would send to the endpoint, comes too late.
    options = {"otlp_traces_endpoint": "grpc://127.0.0.1:9", "disable_log_stats": False, "dtype": "float16"}
    with engine(models("llama"), **options) as lab:
        lab.learn(DOCUMENTS[:1])
        prompt = Prompt(DOCUMENTS[:1])
        lab.ask(prompt.tokens, prompt.blend(), 1)
    (found,) = [span for span in spans.get_finished_spans() if span.name == "lmc.blend"]
    assert found.attributes["lmc.tokens_from.host"] == len(DOCUMENTS[0])
    assert found.attributes["lmc.charged_budget"] > 0
    assert found.start_time < found.end_time


def test_what_was_observed_becomes_histograms():
    metrics = metrics_of(0)
    assert value("budget_count") == 0
    joined = LmcStats(data={"ttft_seconds|blend": [0.2], "requests": 1}).aggregate(
        LmcStats(data={"ttft_seconds|blend": [0.6], "ttft_seconds|full": [3.0], "requests": 2})
    )
    assert joined.reduce() == {
        "lmc mean ttft seconds blend": 0.4,
        "lmc mean ttft seconds full": 3.0,
        "lmc requests": 3,
    }
    metrics.observe(joined.data)
    assert value("ttft_seconds_count", mode="blend") == 2
    assert value("ttft_seconds_sum", mode="blend") == pytest.approx(0.8)
    assert value("ttft_seconds_bucket", mode="blend", le="0.25") == 1
    assert value("ttft_seconds_bucket", mode="full", le="5.0") == 1
    metrics_of(0)
    assert value("ttft_seconds_count", mode="blend") is None


def test_numbers_get_vllm_s_labels_and_ours():
    metrics = metrics_of(0, 1)
    metrics.observe(flat(stats(True)), 1)
    assert value("bytes_total", 1, tier="disk", direction="read") == 4096
    assert value("seconds_total", 1, tier="disk", direction="read") == 0.5
    assert value("hits_total", 1, place="host") == 3
    assert value("evictions_total", 1, place="host") == 2
    assert value("write_queue_depth", 1) == 5
    assert value("tier_usable", 1, tier="disk") == 1
    assert value("corrupt_records_total", 1, tier="disk") == 0
    assert value("misses_total", 0) == 0  # there from the start, as all without labels of ours
    assert value("bytes_total", 0, tier="disk", direction="read") is None


def test_gauges_are_the_sum_of_their_changes():
    metrics = metrics_of(0)
    before, after = flat(stats(True)), flat(stats(False))
    metrics.observe(before)
    metrics.observe({"write_queue_depth": -4, "tier_usable|disk": after["tier_usable|disk"] - 1})
    assert value("write_queue_depth") == 1
    assert value("tier_usable", tier="disk") == 0


def test_changes_of_steps_add_up_and_travel():
    one, other = LmcStats(data={"bytes|disk|read": 10, "write_queue_depth": 3}), LmcStats(data={"bytes|disk|read": 5})
    other.data["write_queue_depth"] = -3
    both = one.aggregate(other)
    assert both.data == {"bytes|disk|read": 15, "write_queue_depth": 0}
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(both.to_dict())) == both.data
    assert json.loads(json.dumps(both.data)) == both.data
    assert both.reduce() == {"lmc bytes disk read": 15}
    assert LmcStats(data={"misses": 0}).is_empty()
    assert LmcStats(data={"seconds|disk|lookup": 0.00012345}).reduce() == {"lmc seconds disk lookup": 0.000123}
    assert LmcStats(data={"tier_usable|disk": -1}).reduce() == {"lmc change of tier usable disk": -1}


def test_a_number_that_nobody_knows_is_left_out():
    metrics_of(0).observe({"no such number": 3, "misses": 1})
    assert value("misses_total") == 1


def test_a_number_that_cannot_be_counted_leaves_the_others(caplog):
    """vLLM's API server returns no response after an error in its metrics."""
    metrics_of(0).observe({"misses": -1, "no_room": 2})
    assert (value("misses_total"), value("no_room_total")) == (0, 2)
    assert "lmc failed in observe" in caplog.text


def test_the_next_engine_in_a_process_takes_the_place_of_the_last():
    metrics_of(0).observe({"misses": 3})
    metrics_of(0).observe({"misses": 1})
    assert value("misses_total") == 1


@pytest.fixture(scope="module")
def lab(models, tmp_path_factory):
    disk = tmp_path_factory.mktemp("disk")
    # With AMX, vLLM's CPU build has pages for bfloat16 from which lmc reads no keys.
    half = "float16" if torch.cpu._is_amx_tile_supported() else "bfloat16"
    with engine(models("llama"), {"local_disk": str(disk)}, dtype=half, disable_log_stats=False) as lab:
        lab.learn(DOCUMENTS)
        prompt = Prompt(DOCUMENTS[::-1])
        lab.ask(prompt.tokens, prompt.blend())
        lab.settle()
        lab.store.flush()
        lab.ask(words(200, 5), count=2)  # a step that tells of it
        lab.model = lab.llm.llm_engine.vllm_config.model_config.served_model_name
        yield lab


@pytest.mark.long
def test_an_engine_s_metrics_are_its_store_s(lab):
    lag = {
        "stored_chunks",
        "stored_tokens",
        "seconds",
        "bytes",
        "written_chunks",
        "write_queue_depth",
        "chunks",
        "chunk_tokens",
        "backfills",
    }  # by a step
    for key, count in lab.numbers.items():
        name, labels = parted(key)
        own = dict(zip(NAMES[name].labels, labels, strict=True))
        shown = value(name if NAMES[name].gauge else f"{name}_total", model=lab.model, **own)
        assert shown == count or (name in lag and shown is not None), key
    assert value("bytes_total", model=lab.model, tier="disk", direction="write") > 0
    assert value("written_chunks_total", model=lab.model, tier="disk") > 0
    assert value("tier_usable", model=lab.model, tier="disk") == 1
    assert value("blends_total", model=lab.model) == 1
    assert value("layers", model=lab.model) == SIZES["num_hidden_layers"]


@pytest.mark.long
def test_requests_are_observed_by_mode_and_blends_with_their_budget(lab):
    modes = {mode: value("ttft_seconds_count", model=lab.model, mode=mode) for mode in ("full", "learn", "blend")}
    assert modes == {"full": 1, "learn": len(DOCUMENTS), "blend": 1}
    assert value("load_seconds_count", model=lab.model, mode="blend") == 1
    assert value("reused_tokens_sum", model=lab.model, mode="blend") == sum(map(len, DOCUMENTS))
    assert value("budget_sum", model=lab.model) == pytest.approx(0.15, abs=0.02)
    assert value("budget_count", model=lab.model) == 1


@pytest.mark.long
def test_a_blend_in_half_precision_is_far_nearer_to_full_prefill_than_blind_reuse(lab):
    prompt, found = Prompt(DOCUMENTS[::-1], seed=3000), {}
    wanted = lab.vanilla(prompt.tokens)
    lab.learn(DOCUMENTS)
    for ratio in (0.0, 1.0):
        lab.forget_prefixes()
        out = lab.ask(prompt.tokens, prompt.blend(strategy="query", ratio=ratio))
        assert facts(out)["reused_tokens"] == sum(map(len, DOCUMENTS))
        found[ratio] = distance(out, wanted)
    assert found[1.0] < 0.2 * found[0.0]
