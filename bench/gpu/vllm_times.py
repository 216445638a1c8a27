"""The times in tier B of `accept.py`, with the shape of an 8B Llama: throughput without hits, TTFT, loads, and gaps
between the tokens of a running request.
"""

import random
import statistics
from dataclasses import dataclass, field
from typing import Any

from engine import prompt_of, words
from engine_probe import Probe

from gpu.report import Report


@dataclass
class Times:
    """What is measured. The defaults are an 8B Llama, with documents of a thousand tokens."""

    shape: dict[str, int] = field(
        default_factory=lambda: {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
        }
    )
    shape_dtype: str = "bfloat16"
    page: int = 16
    compiled: bool = True
    counts: tuple[int, ...] = (8, 16)  # documents in a prompt
    document: int = 1024  # tokens
    ratio: float = 0.15
    requests: int = 64  # at once, for the throughput
    request: int = 1024  # tokens
    said: int = 64  # tokens of each answer
    batch: int = 8192  # tokens that the engine computes at a time, as `vllm serve` does
    small_batch: int = 2048  # the same, where gaps are measured once more
    memory: float = 16.0  # GB of host memory for lmc
    repeats: int = 5
    largest_graph: int = 64  # tokens; 0 for what vLLM chooses


TINY = Times(
    shape={
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 1024,
    },
    shape_dtype="float32", page=32, compiled=False, counts=(2, 3), document=96, requests=3, request=96, said=4,
    batch=512, small_batch=64, memory=0.1, repeats=1,
)  # fmt: skip


def measure_times(report: Report, sizes: Times, folder: str) -> None:
    """Measure whole requests: lmc first, then vLLM without it twice, as one engine may be a little faster than another.

    The lines are known after two engines; the third one corrects them.
    """
    model = shaped(folder, sizes)
    with Probe(model, lmc=settings(sizes), **options(sizes, sizes.batch)) as engine:
        ours, theirs = Measured(engine, sizes, ours=True), list[Measured]()
    for _ in range(2):
        with Probe(model, lmc=None, **options(sizes, sizes.batch)) as engine:
            theirs.append(Measured(engine, sizes, ours=False))
        report.drop_part()
        compare(report, sizes, ours, theirs)
        report.save()


def measure_gaps(report: Report, sizes: Times, folder: str, batch: int) -> None:
    """Measure gaps between tokens in steps of `batch` tokens, with one engine of each kind."""
    model = shaped(folder, sizes)
    with Probe(model, lmc=None, **options(sizes, batch)) as engine:
        alone = Gaps(engine, sizes).alone()
    with Probe(model, lmc=settings(sizes), **options(sizes, batch)) as engine:
        compare_gaps(report, sizes, batch, Gaps(engine, sizes).with_lmc(), alone)


def shaped(folder: str, sizes: Times) -> str:
    """Write the configuration of a model, whose weights vLLM makes up."""
    from transformers import LlamaConfig

    path, shape = f"{folder}/shaped", sizes.shape
    config = LlamaConfig(
        **shape,
        head_dim=shape["hidden_size"] // shape["num_attention_heads"],
        max_position_embeddings=32768,
        tie_word_embeddings=False,
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(path)
    return path


def options(sizes: Times, batch: int) -> dict[str, Any]:
    """Return the options of an engine that computes `batch` tokens at a time."""
    return {
        **graphs(sizes.largest_graph if sizes.compiled else 0),
        "load_format": "dummy",
        "dtype": sizes.shape_dtype,
        "block_size": sizes.page,
        "enforce_eager": not sizes.compiled,
        "max_num_batched_tokens": batch,
        "max_num_seqs": min(256, batch),
        "max_model_len": max(sizes.counts) * sizes.document + 1024,
    }


def graphs(largest: int) -> dict[str, Any]:
    """Return the option to capture no CUDA graphs of more than `largest` tokens, so that an engine starts sooner."""
    if not largest:
        return {}
    sizes = [size for size in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512) if size <= largest]
    return {"compilation_config": {"cudagraph_capture_sizes": sizes}}


def settings(sizes: Times) -> dict[str, Any]:
    """Return lmc's settings."""
    return {"max_local_cpu_size": sizes.memory, "blend_min_tokens": min(256, sizes.document)}


# -- in one engine -----------------------------------------------------------------------------------------------------


class Measured:
    """What was measured with one engine."""

    def __init__(self, engine: Probe, sizes: Times, *, ours: bool) -> None:
        self._engine, self._sizes = engine, sizes
        self.documents = [words(sizes.document, i) for i in range(max(sizes.counts))]
        self.tokens_per_second = self._throughput()
        if ours:
            self.stored = engine.numbers()["stored_tokens"]
            self.blends = {count: self._blend(count) for count in sizes.counts}
            self.loads = self._loads()
            self.refused = engine.setup()["refused"]
            self.copy = engine.copy_speed(self.loads[0]["bytes"])
        else:
            self.full = {count: self._full(count) for count in sizes.counts}

    def _throughput(self) -> float:
        """Return tokens, of prompts and answers, per second; every prompt is new, and the first round warms up."""
        sizes, found = self._sizes, []
        for round_ in range(sizes.repeats + 1):
            prompts = [words(sizes.request, 10**6 + round_ * sizes.requests + i) for i in range(sizes.requests)]
            found.append(self._engine.many(prompts, sizes.said)["seconds"])
        self._engine.forget_prefixes()  # and save what is not saved yet
        return sizes.requests * (sizes.request + sizes.said) / statistics.median(found[1:])

    def _prompt(self, count: int, seed: int) -> tuple[list[int], list[list[int]]]:
        order = random.Random(seed)
        return prompt_of(order.sample(self.documents[:count], count), seed)

    def _full(self, count: int) -> float:
        """Return the median seconds until the first token by full prefill; the first one warms up."""
        found = []
        for seed in range(self._sizes.repeats + 1):
            self._engine.forget_prefixes()
            found.append(self._engine.ask(self._prompt(count, seed)[0])["seconds"])
        return statistics.median(found[1:])

    def _blend(self, count: int) -> dict[str, float]:
        """Return median seconds of blends, and which share of the documents' tokens they reused."""
        learn(self._engine, self.documents[:count])
        found = []
        for seed in range(self._sizes.repeats + 1):
            self._engine.poison()
            tokens, spans = self._prompt(count, seed)
            found.append(self._engine.ask(tokens, {"documents": spans, "ratio": self._sizes.ratio}))
        reused = [one["facts"].get("reused_tokens", 0) / (count * self._sizes.document) for one in found]
        return {"seconds": statistics.median(one["seconds"] for one in found[1:]), "reused": min(reused)}

    def _loads(self) -> list[dict[str, Any]]:
        """Load a prompt of as many tokens as the largest again and again; the first one warms up."""
        self._engine.forget_everything()
        tokens = words(max(self._sizes.counts) * self._sizes.document, 77)
        self._engine.ask(tokens, {"blend": False})
        found = []
        for _ in range(self._sizes.repeats + 1):
            self._engine.poison()
            found.append(self._engine.load(tokens) | {"prompt": len(tokens)})
        return found[1:]


def learn(engine: Probe, documents: list[list[int]]) -> None:
    """Keep documents, and nothing else."""
    engine.forget_everything()
    for document in documents:
        engine.ask(document, {"learn": True})


# -- lines -------------------------------------------------------------------------------------------------------------


def compare(report: Report, sizes: Times, ours: Measured, theirs: list[Measured]) -> None:
    """Compare an engine with lmc and engines without it."""
    report.line("the self-test of the large shape passed", float(not ours.refused), "", least=1)
    plain = statistics.mean(one.tokens_per_second for one in theirs)
    if len(theirs) > 1:
        starts = theirs[0].tokens_per_second / theirs[1].tokens_per_second
        report.line("tokens per second of vLLM, of its second start", starts, "of vLLM")
    report.line("tokens per second without hits", ours.tokens_per_second / plain, "of vLLM", least=0.97)
    computed = (sizes.repeats + 1) * sizes.requests * (sizes.request + sizes.said)  # Answers are stored as well.
    report.line("tokens that were stored meanwhile", ours.stored / computed, "of all", least=0.95)
    for count, blend in ours.blends.items():
        length, full = count * sizes.document, statistics.mean(one.full[count] for one in theirs)
        report.line(f"document tokens reused in a prompt of {length}", blend["reused"], "of all", least=1)
        report.line(f"TTFT of {length} tokens: full prefill", 1000 * full, "ms")
        report.line(f"TTFT of {length} tokens: blend at {sizes.ratio}", 1000 * blend["seconds"], "ms")
        report.line(f"a blend of {length} tokens is faster", full / blend["seconds"], "times", least=3.0)
    load, length = ours.loads[0], max(sizes.counts) * sizes.document
    report.line(f"tokens loaded by an exact hit of {length}", load["tokens"] / load["prompt"], "of all", least=0.9)
    ttft = statistics.median(one["ttft"] for one in ours.loads)
    speed = statistics.median(one["bytes"] / one["seconds"] for one in ours.loads)
    report.line(f"TTFT of {length} tokens: exact hit", 1000 * ttft, "ms")
    report.line(f"KV loaded by an exact hit of {length} tokens", speed / 1e9, "GB/s")
    report.line("that, of one large page-locked copy", speed / ours.copy, "of copies", least=0.8)


class Gaps:
    """Return the worst gap between two tokens of a running request while another request is computed."""

    def __init__(self, engine: Probe, sizes: Times) -> None:
        self._engine, self._sizes, count = engine, sizes, sizes.counts[0]
        self._documents, self._running = [words(sizes.document, i) for i in range(count)], words(40, 99)
        order = random.Random(0)
        rounds = range(sizes.repeats + 1)  # the first one warms up
        self._prompts = [prompt_of(order.sample(self._documents, count), seed) for seed in rounds]

    def alone(self) -> dict[str, float]:
        """Return the gap during a chunked prefill of an engine without lmc."""
        found = []
        for tokens, _ in self._prompts:
            self._engine.forget_prefixes()
            found.append(self._engine.beside(self._running, tokens, None))
        return {"prefill": _worst(found)}

    def with_lmc(self) -> dict[str, float]:
        """Return the gaps during a chunked prefill and during a blend, alternately."""
        found: dict[str, list[dict[str, Any]]] = {"prefill": [], "blend": []}
        for tokens, spans in self._prompts:
            self._engine.forget_everything()
            found["prefill"].append(self._engine.beside(self._running, tokens, {"blend": False}))
            learn(self._engine, self._documents)
            self._engine.forget_prefixes()
            wish = {"documents": spans, "ratio": self._sizes.ratio}
            found["blend"].append(self._engine.beside(self._running, tokens, wish))
        return {name: _worst(some) for name, some in found.items()}


def _worst(found: list[dict[str, Any]]) -> float:
    return statistics.median(one["gap"] for one in found[1:])


def compare_gaps(report: Report, sizes: Times, step: int, ours: dict[str, float], theirs: dict[str, float]) -> None:
    """Record the gaps with steps of this size, and how much longer they are with lmc than with vLLM's chunked prefill.

    `theirs` are those of an engine without lmc.
    """
    alone, tokens = theirs["prefill"], sizes.counts[0] * sizes.document
    for name, seconds in {"prefill of vLLM alone": alone, **ours}.items():
        what = f"steps of {step}: worst gap between tokens beside a {name}, {tokens} tokens"
        report.line(what, 1000 * seconds, "ms")
    for what, share in (
        ("the gap beside a blend", ours["blend"] / ours["prefill"]),
        ("the gap beside a blend, of vLLM without lmc", ours["blend"] / alone),
        ("the gap beside a prefill, of vLLM without lmc", ours["prefill"] / alone),
    ):
        report.line(f"steps of {step}: {what}", share, "of prefill", most=1.1)
