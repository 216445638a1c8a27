"""Tier B of `accept.py`: lmc inside vLLM on this GPU, against the expected results: answers, aborts,
preemptions, times.

Needs vLLM 0.30 or later and lmc's own dependencies; see docs/gpu.md. Engines run one after another, each in its own
process.

Answers are compared by the logprobs of the likeliest tokens, up to the first token that differs. What is allowed
is `NOISE` times the difference between two prefills of vLLM alone, from the beginning and after its own prefix of half
or all of the prompt, and at least `FLOOR`. Blind reuse has to differ by several times as much, so that the comparison
can fail. A blend at ratio 1 computes every token again, and is right wherever stored documents were placed; so blends
that keep what was placed are compared with those of an engine whose kernels are in torch. The times are in
`vllm_times.py`.
"""

import math
import os
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import entry_points
from typing import Any
from unittest.mock import patch

import torch
from engine import SYSTEM, in_folder, make_head, make_model, prompt_of, words
from engine_probe import Probe, Request

from gpu.report import Report
from gpu.vllm_times import TINY, Times, graphs, measure_gaps, measure_times

NOISE = 4  # times that two prefills of vLLM alone differ are allowed
# A logit of bfloat16 between 2 and 4 has steps of 1.6e-2. Numbers of a cache in fp8 are 6 to 12 % apart.
FLOOR = {"bfloat16": 2e-2, "float32": 1e-4, "fp8": 0.05}
CONTROL = 3  # times what is allowed is how much blind reuse has to differ at least
LIKELIEST = 5  # tokens whose logprobs are compared
DRAFTED = 3  # tokens that an EAGLE head drafts in a step
BLIND = {"strategy": "none"}
EXACT = ({"strategy": "all", "ratio": 1.0}, {"strategy": "union", "ratio": 1.0})
# Blends that keep what was placed, and whose choice of tokens does not depend on rounding.
PLACED = {"blind reuse": BLIND, "a blend at 0.15 by chance": {"strategy": "random", "ratio": 0.15}}
Answer = dict[str, Any]


@dataclass
class Sizes:
    """What is asked. The defaults have the heads of an 8B Llama, in fewer and smaller layers."""

    backends: tuple[str, ...] = ("FLASH_ATTN", "TRITON_ATTN")
    layers: int = 8
    hidden: int = 2048
    head_dim: int = 128
    group: int = 4
    dtype: str = "bfloat16"
    cache: str = "auto"  # the type of the KV cache
    block: int = 16
    eager: bool = False
    documents: int = 8
    tokens: int = 500  # of a document
    prompts: int = 4
    step: int = 512  # tokens that the engine computes at a time; lmc then calls the model layer by layer
    large_step: int = 8192  # the same, with which lmc calls the compiled model
    aborts: int = 20
    largest_graph: int = 64  # tokens; 0 for what vLLM chooses


SMOKE = Sizes(
    backends=("CPU_ATTN",), layers=4, hidden=256, head_dim=32, dtype="float32", block=32, eager=True, documents=4,
    tokens=120, prompts=2, step=64, large_step=512,
)  # fmt: skip


@dataclass
class Case:
    """A prompt of documents."""

    tokens: list[int]
    spans: list[list[int]]  # where its documents are

    def blend(self, **wishes: Any) -> Request:
        """Return the prompt, with what it asks of lmc."""
        return self.tokens, {"documents": self.spans, **wishes}


class Cases:
    """The prompts: the same documents in several orders, and those whose beginning they share."""

    def __init__(self, sizes: Sizes) -> None:
        self.documents = [words(sizes.tokens, i) for i in range(sizes.documents)]
        # vLLM computes the last block of a prompt of whole blocks again, and lmc only the last token: no such prompts.
        question = 2 * sizes.block - (SYSTEM + sizes.documents * sizes.tokens) % sizes.block + sizes.block // 4
        order = random.Random(0)
        orders = [order.sample(self.documents, sizes.documents) for _ in range(sizes.prompts)]
        self.blended = [Case(*prompt_of(one, i, question)) for i, one in enumerate(orders)]
        others = [case.tokens[: -sizes.documents * sizes.tokens // 4] for case in self.blended]
        self.plain = [case.tokens for case in self.blended]
        self.plain += [beginning + words(30, 50 + i) for i, beginning in enumerate(others)]
        self.plain.append(words(len(self.plain[0]), 60))  # which has nothing of a blend
        self.count = sizes.block + 8  # tokens of each answer, so that each needs another block

    def options(self, sizes: Sizes, backend: str, step: int) -> dict[str, Any]:
        """Return options of an engine, whose blocks are enough for two prompts, and one too few for their answers."""
        longest = len(self.plain[0]) + self.count
        return {
            **graphs(0 if sizes.eager else sizes.largest_graph),
            "attention_backend": backend,
            "dtype": sizes.dtype,
            "kv_cache_dtype": sizes.cache,
            "block_size": sizes.block,
            "enforce_eager": sizes.eager,
            "max_num_batched_tokens": step,
            "max_num_seqs": 8,
            "max_model_len": longest + 1,
            "num_gpu_blocks_override": 2 * -(-longest // sizes.block) - SYSTEM // sizes.block,
        }


def parts_inside_vllm(report: Report, *, eager: bool = False) -> dict[str, Callable[[str], None]]:
    """Return the parts of tier B, each with what measures it in a folder for models.

    `eager` compiles no model and captures no CUDA graph.
    """
    sizes, timed = (SMOKE, TINY) if report.smoke else (Sizes(), Times())
    if eager:
        sizes, timed = replace(sizes, eager=True), replace(timed, compiled=False)

    def model_in(folder: str) -> str:
        return make_model(folder, sizes.layers, sizes.hidden, sizes.head_dim, sizes.group)

    first = sizes.backends[0]
    in_8_bits = replace(sizes, cache="fp8")
    parts: dict[str, Callable[[str], None]] = {
        "start": lambda folder: started(report, sizes, model_in(folder), first),
        **{
            backend: lambda folder, backend=backend: answers(report, sizes, model_in(folder), backend)
            for backend in sizes.backends
        },
        "compiled": lambda folder: answers_in_large_steps(report, sizes, model_in(folder), first),
        "fp8": lambda folder: answers_in_8_bits(report, in_8_bits, model_in(folder), sizes.backends[-1]),
        "drafts": lambda folder: answers_with_drafts(report, sizes, model_in(folder), first),
        "times": lambda folder: measure_times(report, timed, folder),
        "gaps": lambda folder: measure_gaps(report, timed, folder, timed.batch),
        "small_steps": lambda folder: measure_gaps(report, timed, folder, timed.small_batch),
    }
    if report.smoke and not torch.cpu._is_avx512_supported():  # vLLM's CPU build has fp8 only there.
        del parts["fp8"]
    return parts


def inside_vllm(report: Report, parts: Mapping[str, Callable[[str], None]]) -> None:
    """Print the lines of parts of tier B."""
    for name, measure in parts.items():
        with report.measuring(name), in_folder() as folder:
            if "lmc" not in entry_points(group="vllm.general_plugins").names:
                raise LookupError("lmc is not installed in this Python, so vLLM does not find it: pip install .")
            measure(folder)


def started(report: Report, sizes: Sizes, model: str, backend: str) -> None:
    """Whether an engine starts with lmc, and answers one prompt rightly: what to look at first on a new machine."""
    sizes = replace(sizes, prompts=1)
    cases = Cases(sizes)
    options = cases.options(sizes, backend, sizes.large_step)
    wanted, began = wanted_of(model, sizes, cases, "start", options), time.monotonic()
    with engine_with_lmc(model, sizes, options, "auto") as engine:
        report.line("start: seconds until an engine with lmc has started", time.monotonic() - began, "s")
        found = engine.setup()
        print(f"start: {found}", flush=True)
        report.line("start: the self-test passed", float(not found["refused"]), "", least=1)
        checks = Checks(report, "start", engine, cases, wanted, sizes.block)
        checks.exact_hits()
        checks.blends()


def answers(report: Report, sizes: Sizes, model: str, backend: str) -> None:
    """Whether answers are right with an attention backend, whatever happens meanwhile."""
    cases = Cases(sizes)
    options = cases.options(sizes, backend, sizes.step)
    wanted = wanted_of(model, sizes, cases, backend, options)
    with engine_with_lmc(model, sizes, options, "auto") as engine:
        found = engine.setup()
        print(found["refused"] or "lmc blends")
        blends = not found["refused"] and found["backends"] == [backend]
        report.line(f"{backend}: the self-test passed, and this is the backend", float(blends), "", least=1)
        least = None if report.smoke else 1  # A CPU has none of them.
        report.line(f"{backend}: the kernels are those in Triton", float(found["triton"]), "", least=least)
        checks = Checks(report, backend, engine, cases, wanted, sizes.block)
        checks.exact_hits()
        checks.blends()
        placed = checks.placed()
        checks.isolation()
        checks.aborts(sizes.aborts)
        checks.preemption()
    with engine_with_lmc(model, sizes, options, "torch") as engine:
        in_torch = not engine.setup()["triton"]
        report.line(f"{backend}: the kernels of another engine are those in torch", float(in_torch), "", least=1)
        Checks(report, backend, engine, cases, wanted, sizes.block).compare_placed(placed)


def answers_in_8_bits(report: Report, sizes: Sizes, model: str, backend: str) -> None:
    """Whether answers are right with a KV cache in fp8, whose kernels read and write other numbers than the model's."""
    answers_of_both_kernels(report, sizes, model, backend, "fp8", {})


def answers_with_drafts(report: Report, sizes: Sizes, model: str, backend: str) -> None:
    """Whether answers are right with an EAGLE head, which the self-test covers, too. Its drafts are hardly accepted."""
    head = {"method": "eagle", "model": make_head(model, f"{model}-head"), "num_speculative_tokens": DRAFTED}
    more = {"speculative_config": head, "num_gpu_blocks_override": None}  # An engine needs more blocks for drafts.
    answers_of_both_kernels(report, sizes, model, backend, "EAGLE", more)


def answers_of_both_kernels(
    report: Report, sizes: Sizes, model: str, backend: str, kind: str, more: dict[str, Any]
) -> None:
    """Check the answers of a kind of engine, with `more` options, and with kernels in Triton and in torch."""
    cases, name = Cases(sizes), f"{backend}, {kind}"
    options = {**cases.options(sizes, backend, sizes.step), **more}
    wanted = wanted_of(model, sizes, cases, name, options)
    with engine_with_lmc(model, sizes, options, "auto") as engine:
        found = engine.setup()
        print(found["refused"] or "lmc blends")
        report.line(f"{name}: the self-test passed", float(not found["refused"]), "", least=1)
        report.line(f"{name}: the kernels are those in Triton", float(found["triton"]), "")
        checks = Checks(report, name, engine, cases, wanted, sizes.block)
        checks.exact_hits()
        checks.blends()
        placed = checks.placed()
    with engine_with_lmc(model, sizes, options, "torch") as engine:
        Checks(report, name, engine, cases, wanted, sizes.block).compare_placed(placed)


def answers_in_large_steps(report: Report, sizes: Sizes, model: str, backend: str) -> None:
    """Whether answers are right where documents that are learned, and second passes, go through the compiled model."""
    cases, name = Cases(sizes), f"{backend}, steps of {sizes.large_step}"
    options = cases.options(sizes, backend, sizes.large_step)
    wanted = wanted_of(model, sizes, cases, name, options)
    with engine_with_lmc(model, sizes, options, "auto") as engine:
        Checks(report, name, engine, cases, wanted, sizes.block).blends()
        found, compiled = engine.setup(), not sizes.eager
        report.line(
            f"{name}: rows in a call of the compiled model", found["through"], "", least=1 if compiled else None
        )
        least = len(cases.blended) if compiled else None
        report.line(f"{name}: calls of the compiled model by blends", found["calls"], "", least=least)


def wanted_of(model: str, sizes: Sizes, cases: "Cases", name: str, options: dict[str, Any]) -> "Wanted":
    """Return what vLLM alone answers with these options, and how much answers may differ from that."""
    with Probe(model, lmc=None, **options) as engine:
        wanted = Wanted(engine, cases)
    wanted.allowed = max(NOISE * wanted.noise, FLOOR[sizes.dtype if sizes.cache == "auto" else sizes.cache])
    print(f"{name}: two prefills differ by {wanted.noise:.2g}, {wanted.allowed:.2g} is allowed\n", flush=True)
    return wanted


def engine_with_lmc(model: str, sizes: Sizes, options: dict[str, Any], kernels: str) -> Probe:
    """Start an engine with the kernels that `LMC_KERNELS` then chooses."""
    settings = {
        "blend_min_tokens": min(256, sizes.tokens),  # tokens that are worth a blend
        "blend_find": "separators",  # Plain requests have the same documents, and are not blended.
        "max_local_cpu_size": 1.0,
    }
    with patch.dict(os.environ, LMC_KERNELS=kernels):  # The child inherits it.
        return Probe(model, lmc=settings, **options)


# -- what vLLM answers alone -------------------------------------------------------------------------------------------


class Wanted:
    """The answers of an engine without lmc."""

    allowed = 0.0  # difference between answers

    def __init__(self, engine: Probe, cases: Cases) -> None:
        self.noise = 0.0  # between two ways to compute the same prompt
        self.full: list[Answer] = []
        self.hits: list[Answer] = []  # after the engine's own prefix of the whole prompt
        self.unsteady = 0  # tokens that differ when the same hit is answered again
        for tokens in cases.plain:
            engine.forget_prefixes()
            self.full.append(engine.answer(tokens, None, cases.count))
            self.hits.append(engine.answer(tokens, None, cases.count))
            self.unsteady += others(engine.answer(tokens, None, cases.count), self.hits[-1])
            engine.forget_prefixes()
            engine.answer(tokens[: len(tokens) // 2])
            in_two = engine.answer(tokens, None, cases.count)
            self.noise = max(self.noise, *(distance(one, self.full[-1]) for one in (in_two, self.hits[-1])))


def distance(found: Answer, wanted: Answer) -> float:
    """Return the largest difference of the likeliest tokens' logprobs, up to the first token that differs.

    That token is included: a difference that changes the order of two logprobs is at least as large as their distance.
    """
    worst = 0.0
    for number, (ours, theirs) in enumerate(zip(found["logprobs"], wanted["logprobs"], strict=True)):
        lowest = min(ours.values())
        for token, logprob in sorted(theirs.items(), key=lambda item: -item[1])[:LIKELIEST]:
            apart = abs(ours.get(token, lowest) - logprob)
            worst = math.inf if math.isnan(apart) else max(worst, apart)
        if found["tokens"][number] != wanted["tokens"][number]:
            break
    return worst


def others(found: Answer, wanted: Answer) -> int:
    """Return how many tokens of an answer differ."""
    return sum(one != other for one, other in zip(found["tokens"], wanted["tokens"], strict=True))


def farthest(found: Iterable[Answer], wanted: Iterable[Answer]) -> float:
    """Return the largest difference of several answers."""
    return max(distance(one, other) for one, other in zip(found, wanted, strict=True))


# -- what it answers with lmc ------------------------------------------------------------------------------------------


class Checks:
    """The lines of one attention backend."""

    def __init__(self, report: Report, backend: str, engine: Probe, cases: Cases, wanted: Wanted, block: int) -> None:
        self._report, self._backend, self._engine, self._cases, self._wanted = report, backend, engine, cases, wanted
        self._block = block
        self._blended = wanted.full[: len(cases.blended)]

    def exact_hits(self) -> None:
        """Prefixes out of lmc's store, against the engine's own."""
        cases, found = self._cases, []
        for tokens in cases.plain:
            self._engine.forget_everything()
            self._engine.answer(tokens)
            self._engine.poison()
            found.append(self._engine.answer(tokens, None, cases.count))
        self._differ("exact hits", found, self._wanted.hits)
        changed = sum(map(others, found, self._wanted.hits))
        self._line("tokens of exact hits that differ", changed, "", most=self._wanted.unsteady)
        loaded = sum(answer["facts"].get("exact_tokens", 0) for answer in found)
        whole = sum(len(tokens) // self._block * self._block for tokens in cases.plain)
        self._line("tokens loaded for exact hits", loaded / whole, "of all", least=1)

    def blends(self) -> None:
        """Blends in which every token is recomputed, against full prefill; blind reuse as the control."""
        self._learn()
        for wish in EXACT:
            found = self._ask(case.blend(**wish) for case in self._cases.blended)
            self._differ(f"blends at ratio 1 by {wish['strategy']}", found, self._blended)
            self._reused(f"blends at ratio 1 by {wish['strategy']}", found)
        found = self._ask(case.blend(**BLIND) for case in self._cases.blended)
        least = min(map(distance, found, self._blended)) / self._wanted.allowed
        self._line("the control, blind reuse, differs", least, "of allowed", least=CONTROL)

    def placed(self) -> dict[str, list[Answer]]:
        """Return answers that depend on where the documents were placed."""
        self._learn()
        return {name: self._ask(case.blend(**wish) for case in self._cases.blended) for name, wish in PLACED.items()}

    def compare_placed(self, others: dict[str, list[Answer]]) -> None:
        """Compare these answers with those of an engine with other kernels."""
        for name, found in self.placed().items():
            self._reused(f"{name}, in both engines", [*found, *others[name]])
            self._differ(f"answers of both engines by {name}", others[name], found)

    def isolation(self) -> None:
        """Check plain requests after inaccurate blends: they find the blends' pages neither in vLLM nor in lmc."""
        self._learn()
        self._ask(case.blend(**BLIND) for case in self._cases.blended)
        for case in self._cases.blended:
            self._engine.answer(*case.blend(**BLIND), self._cases.count)
        found = [self._engine.answer(tokens, None, self._cases.count) for tokens in self._cases.plain]
        self._differ("plain requests behind blends", found, self._wanted.full)
        found = self._ask((tokens, None) for tokens in self._cases.plain)
        self._differ("plain requests behind blends, from lmc's chunks", found, self._wanted.full)

    def aborts(self, count: int) -> None:
        """Blends and exact loads that are aborted on the way; the same request follows each at once."""
        self._learn()
        plain = self._cases.plain[-1]
        self._engine.answer(plain)
        requests: list[Request] = []
        wanted: list[Answer] = []
        for case, full in zip(self._cases.blended, self._blended, strict=True):
            requests += [*(case.blend(**wish) for wish in EXACT), (plain, None)]
            wanted += [*(full for _ in EXACT), self._wanted.full[-1]]
        found = self._engine.aborts(requests, count, self._cases.count)
        self._line("requests aborted in the middle of a load or blend", found["caught"], "", least=count / 2)
        self._differ("requests behind an abort", found["answers"], [wanted[i % len(wanted)] for i in range(count)])
        self._nothing_is_left("the aborts")

    def preemption(self) -> None:
        """More requests than there are blocks for, and one that is preempted while another is loaded."""
        self._learn()
        blended, plain, wanted = self._cases.blended, self._cases.plain, self._wanted.full
        mixed = [(case.blend(**EXACT[0]), (case.tokens, None)) for case in blended]
        found = self._engine.press([one for pair in mixed for one in pair], self._cases.count)
        self._line("requests preempted, as blocks are few", found["preempted"], "", least=1)
        self._differ("requests among them", found["answers"], [one for one in self._blended for _ in range(2)])
        self._learn()
        found = self._engine.preempt((plain[-1], None), blended[0].blend(**EXACT[0]), self._cases.count)
        self._line("requests preempted while another one is blended", float(found["preempted"]), "", least=1)
        self._differ("these two", found["answers"], [wanted[-1], wanted[0]])
        self._nothing_is_left("the preemptions")

    # -- inside ------------------------------------------------------------------------------------------------------

    def _line(self, what: str, found: float, unit: str, **wanted: float) -> None:
        self._report.line(f"{self._backend}: {what}", found, unit, **wanted)

    def _differ(self, what: str, found: Sequence[Answer], wanted: Sequence[Answer]) -> None:
        self._line(f"{what} differ by", farthest(found, wanted), "", most=round(self._wanted.allowed, 5))

    def _reused(self, what: str, found: Sequence[Answer]) -> None:
        reused = sum(answer["facts"].get("reused_tokens", 0) for answer in found)
        documents = len(found) * sum(map(len, self._cases.documents))
        self._line(f"document tokens reused by {what}", reused / documents, "of all", least=1)

    def _ask(self, requests: Iterable[Request]) -> list[Answer]:
        """Ask one after another, with nothing in the engine's own cache."""
        found = []
        for request in requests:
            self._engine.poison()
            found.append(self._engine.answer(*request, self._cases.count))
        return found

    def _learn(self) -> None:
        """Keep the documents and nothing else."""
        self._engine.forget_everything()
        for document in self._cases.documents:
            self._engine.answer(document, {"learn": True})
        self._engine.poison()

    def _nothing_is_left(self, behind: str) -> None:
        left = sum(self._engine.left().values())
        self._line(f"requests, blocks and chunks that are held behind {behind}", left, "", most=0)
