"""Compares lmc on this GPU with the expected results, in two tiers of several parts.

A    without vLLM: copies, kernels, scattered, models (the transformers connector), answers
B    inside vLLM, if that is installed (`vllm_answers.py`): start, FLASH_ATTN and TRITON_ATTN (answers, aborts and
     preemptions with one of vLLM's attention backends), compiled, fp8 (a quantised KV cache), drafts (an EAGLE head),
     times, gaps, small_steps

    make gpu [TIER=A|B] [PART="copies kernels"]            # exit status 1 if a line falls short
    cd bench && python -m gpu.accept [--tier A|B] [--part PART …] [--keep] [--eager]
    cd bench && TRITON_INTERPRET=1 python -m gpu.accept --smoke     # tiny sizes on a CPU: do the checks run?

Each part takes five minutes at most. `--keep` writes the lines after each part, and keeps those of other parts that
were measured on such a GPU before, so that the parts can run one by one.

Tier A needs torch, triton, transformers 5, and lmc's own dependencies; see docs/gpu.md. Bandwidths are against a copy
of large tensors on the same device, in the same run. Errors are against lmc's kernels in torch, in float32 on the same
device.
"""

import gc
import os
import random
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from common import parser, prompt_of
from transformers import AutoModelForCausalLM, AutoTokenizer

from gpu.interpreter import mend_interpreter
from gpu.kernels import SMOKE, Sizes, kernels, scattered
from gpu.report import Report
from gpu.vllm_answers import inside_vllm, parts_inside_vllm
from lmc.blend.blender import Blender
from lmc.blend.markers import Markers
from lmc.blend.strategies import RecomputePolicy
from lmc.blend.tolerances import difference
from lmc.config.settings import Settings
from lmc.connectors.transformers import CachedModel, Prefilled
from lmc.connectors.transformers.report import How
from lmc.connectors.vllm.worker.paged import Move, Pages
from lmc.connectors.vllm.worker.streams import Streams
from lmc.connectors.vllm.worker.streams import seconds_of as seconds_of_copies
from lmc.copies import can_submit, merged
from lmc.demo import REAL, SHIPPED
from lmc.demo.pretrained import smollm2
from lmc.demo.questions import Prompts, read_collection, sample
from lmc.demo.random_model import SEPARATOR, random_llama, random_tokens
from lmc.demo.run import ask, learn_all
from lmc.errors import InputError
from lmc.rag import SEPARATOR as SEPARATOR_TEXT
from lmc.shapes import GIB
from lmc.storage.memory.slab import Slab

SLOTS = 8  # of the slab
DELAY = 20_000_000  # cycles that a stream sleeps, about 10 ms
OURS = {
    "_place",
    "_gather",
    "_deviation",
    "_attend",
    "_join",
    "_paid",
    "_rotated",
    "_mean",
    "_alike",
    "_invert",
    "_changes",
    "_correct",
}
WAYS = {False: "one by one", True: "by way of memory on the GPU"}  # by `Pages._stages`
NOISE = {torch.bfloat16: 6e-2, torch.float16: 1e-2, torch.float32: 1e-3}  # the same, of logits after all layers
LAUNCHES = 25  # of lmc's kernels in a layer of a blend, at most
NEEDED = 'pip install ".[vllm,transformers]" (vLLM 0.30 or later, and lmc, whose plugin vLLM has to find)'


def main() -> None:
    """Measure, print a line for each number, and end with status 1 if one falls short."""
    mend_interpreter()
    arguments = parser(__doc__, "gpu_accept")
    arguments.add_argument("--smoke", action="store_true")
    arguments.add_argument("--tier", choices=("A", "B"), help="only this one; by default both, if vLLM is installed")
    arguments.add_argument("--part", action="append", default=[], help="only this one; may be given several times")
    arguments.add_argument("--eager", action="store_true", help="vLLM compiles nothing, if compiling fails there")
    arguments.add_argument("--layers", type=int, default=Sizes().layers, help="of tier A's model with the shape of 8B")
    options = arguments.parse_args()
    if not (options.smoke or torch.cuda.is_available()):
        sys.exit("there is no GPU here; --smoke tries the checks themselves, on a CPU")
    vllm = find_spec("vllm") is not None
    name = "CPU" if options.smoke else torch.cuda.get_device_name()
    device = torch.device("cpu" if options.smoke else "cuda")
    report = Report(device, options.smoke, name, "gpu_accept" if options.keep else "")
    tiers = {"A": WITHOUT_VLLM, "B": parts_inside_vllm(report, eager=options.eager)}
    known = [name for parts in tiers.values() for name in parts]
    if unknown := sorted({*options.part} - {*known}):
        arguments.error(f"no part {', '.join(unknown)}: use {', '.join(known)}")
    outside, inside = (
        {name: measure for name, measure in parts.items() if name in (options.part or known)}
        if options.tier in (None, tier)
        else {}
        for tier, parts in tiers.items()
    )
    if inside and not (outside or vllm):
        sys.exit(f"tier B needs vLLM, which is not installed in this Python: {NEEDED}")
    print(f"{name}; torch {torch.__version__}\n")
    if options.keep:
        report.continued()
    without_vllm(report, SMOKE if options.smoke else Sizes(layers=options.layers), outside)
    if inside and vllm:
        if outside:
            free_memory(report)
        inside_vllm(report, inside)
    elif inside:
        print(f"\nTier B was left out, because vLLM is not installed in this Python: {NEEDED}.\n")
    report.end()


def without_vllm(report: Report, sizes: Sizes, parts: Mapping[str, Callable[[Report, Sizes], None]]) -> None:
    """Print the lines of parts of tier A."""
    # The interpreter would take minutes for the answers.
    tried, fast = ({"LMC_KERNELS": "triton"}, {"LMC_KERNELS": "torch"}) if report.smoke else ({}, {})
    torch.manual_seed(0)
    for name, measure in parts.items():
        with report.measuring(name), patch.dict(os.environ, fast if measure is answered else tried):
            measure(report, sizes)


def all_kernels(report: Report, sizes: Sizes) -> None:
    """Check the kernels in each dtype."""
    for dtype in sizes.dtypes:
        with report.part(f"kernels in {dtype}"):
            kernels(report, sizes, dtype)


def free_memory(report: Report) -> None:
    """Leave the GPU to the engines of tier B, which are processes of their own."""
    gc.collect()
    if report.device.type == "cuda":
        torch.cuda.empty_cache()
        report.line("memory of the GPU that tier A still holds", torch.cuda.memory_reserved() / GIB, "GiB", most=1.0)


# -- copies ------------------------------------------------------------------------------------------------------------


def copies(report: Report, sizes: Sizes) -> None:
    """Check copies of pages between a slab and the GPU, and their order after long work."""
    page_bytes = sizes.page * sizes.heads * 2 * sizes.dim * 2
    parts = sizes.slab_bytes // (64 * page_bytes) // SLOTS
    started = time.perf_counter()
    slab = Slab(SLOTS, parts, 64 * page_bytes)  # It is page-locked by several threads, in stretches of whole slots.
    seconds = time.perf_counter() - started
    report.line("make and page-lock a slab, for each GiB", 1000 * seconds * GIB / slab.bytes, "ms")
    whole, there = slab.slot(0), torch.zeros(parts, 64 * page_bytes, dtype=torch.uint8, device=report.device)
    bandwidth = {}
    for name, target, source in (("in", there, whole), ("out", whole, there)):
        took = report.milliseconds(lambda target=target, source=source: target.copy_(source, non_blocking=True))
        bandwidth[name] = whole.numel() / took / 1e6
        report.line(f"one large copy {name}", bandwidth[name], "GB/s")
    blocks = parts * 64
    cache = torch.zeros(blocks, sizes.heads, sizes.page, 2 * sizes.dim, dtype=torch.bfloat16, device=report.device)
    pages, ids = Pages({"layer": cache}, blocks), list(range(blocks))[::-1]
    moves = [Move(ids[64 * i : 64 * i + 64], slab.part(0, i)) for i in range(parts)]
    for name, work in (("in", pages.load_all), ("out", pages.save_all)):
        of_large = {}
        for stages, way in WAYS.items():
            pages._stages = stages
            took = report.milliseconds(lambda work=work: work(0, moves))
            of_large[stages] = whole.numel() / took / 1e6 / bandwidth[name]
            what = f"pages of {page_bytes >> 10} KiB, descending, {name}, {way}"
            report.line(what, of_large[stages], "of copies")
            # More than the copies take is not hidden by the work that keeps the GPU busy.
            report.line(f"{what}: issued by the host", report.host_milliseconds(lambda work=work: work(0, moves)), "ms")
        report.line("pages, the faster way", max(of_large.values()), "of copies", least=0.9)
    pages.choose_copy_mode(seconds_of_copies if report.device.type == "cuda" else lambda work: 0.0)
    report.line(f"pages are copied {WAYS[pages._stages]}", float(pages._stages), "")
    some = moves[: max(1024 // 64, 1)]
    started = time.perf_counter()
    for _ in range(100):
        merged(pages.copies(0, some))
    report.line("list of copies for 1,024 pages", 10 * (time.perf_counter() - started), "ms", most=1.0)
    for stages, way in WAYS.items():
        pages._stages = stages
        _ordered(report, pages, cache, moves, way)
    _served(report, there, bandwidth["in"])


def _served(report: Report, there: torch.Tensor, bandwidth: float) -> None:
    """The memory of `lmc serve --page-locked`, as a worker maps it: it is locked in a thread, while it is used."""
    parts, part_bytes = there.shape
    owner = Slab(SLOTS, parts, part_bytes, shared=True, sparse=True, page_locked=True)
    worker = Slab.attach(owner.address, owner.address.parallelism.worker(0, 0))
    for thread in threading.enumerate():
        if thread.name == "lmc-lock":
            thread.join()
    locked = sum(can_submit(worker.part(slot, part)) for slot in range(SLOTS) for part in range(parts))
    if report.device.type == "cuda":
        report.line("a cache server's memory: parts that are page-locked", locked / (SLOTS * parts), "", least=1.0)
    owner.slot(SLOTS - 1).fill_(7)
    there.zero_()
    took = report.milliseconds(lambda: there.copy_(worker.slot(SLOTS - 1), non_blocking=True))
    report.wait()
    report.line("a chunk from there, wrong bytes", float((there != 7).sum()), "", most=0)
    report.line("a chunk from there", there.numel() / took / 1e6 / bandwidth, "of copies", least=0.8)


def _ordered(report: Report, pages: Pages, cache: torch.Tensor, moves: list[Move], way: str) -> None:
    """Save what a slow kernel writes, let it be overwritten, load it back, and use its slots again, as a worker does.

    The control omits to wait, which has to be noticed, if there is a GPU.
    """
    what = f"pages wrong behind slow saves and loads, and slots used again, {way}"
    report.line(what, _wrong_pages(report, pages, cache, moves, waits=True), "", most=0)
    if report.device.type == "cuda":
        report.line(f"{what}, if nothing waits", _wrong_pages(report, pages, cache, moves, waits=False), "", least=1)


def _wrong_pages(report: Report, pages: Pages, cache: torch.Tensor, moves: list[Move], *, waits: bool) -> float:
    streams, cuda = Streams(report.device), report.device.type == "cuda"

    def delayed() -> None:
        if cuda:
            torch.cuda._sleep(DELAY)

    def behind(stream: Any) -> Any:
        return streams.behind(stream) if waits or stream is None else torch.cuda.stream(stream)

    cache.fill_(1)
    report.wait()
    delayed()
    cache.fill_(3)
    with behind(streams.save):
        delayed()
        pages.save_all(0, moves)
        event = streams.event()
    if event is not None and waits:
        event.synchronize()  # Before that the scheduler gives no block to others.
    cache.fill_(5)
    with behind(streams.load):
        delayed()
        pages.load_all(0, moves)
        event = streams.event()
    if waits:
        streams.wait_for(event)
    if event is not None and waits:
        event.synchronize()  # Before that the slots are given to no other chunk.
    for move in moves:
        move.part.fill_(7)
    found = cache.clone()
    report.wait()
    return float((found != 3).sum())


# -- models ------------------------------------------------------------------------------------------------------------


def models(report: Report, sizes: Sizes) -> None:
    """The transformers connector: a large shape for the times, and the shipped model for the answers."""
    dtype, least = sizes.dtypes[0], min(256, sizes.tokens)  # tokens that are worth a blend
    settings = Settings(enable_blending=True, max_local_cpu_size=sizes.slab_bytes / GIB, blend_min_tokens=least)
    with torch.device(report.device):
        model = random_llama(sizes.layers, sizes.hidden, sizes.heads * sizes.group, sizes.heads).to(dtype)
    with CachedModel(model, settings, SEPARATOR) as cached:
        report.line("the self-test of the large shape passed", float(cached.blends), "", least=1)
        documents = [random_tokens(sizes.tokens - 16, i) for i in range(sizes.documents)]
        for document in documents:
            cached.learn(document)
        order, count = random.Random(0), 3 if report.smoke else 8
        orders = [order.sample(range(len(documents)), len(documents)) for _ in range(count)]
        prompts = [prompt_of(documents, one, seed=i) for i, one in enumerate(orders)]
        full = cached.prefill(prompts[0], "full").logits
        whole = cached.prefill(prompts[0], policy=RecomputePolicy(strategy="all", ratio=1.0))
        report.line("error of logits at ratio 1", difference(whole.logits, full), "", most=NOISE[dtype])
        report.line("tokens reused there", whole.report.reused / len(prompts[0]), "of all", least=0.4)
        took = {
            "full": [seconds_of(cached, prompt, "full") for prompt in prompts],
            "blend": [seconds_of(cached, prompt, "blend") for prompt in prompts],
            "exact": [seconds_of(cached, prompts[0], "exact") for _ in range(count)],
        }
        seconds = {how: statistics.median(some[2:]) for how, some in took.items()}
        for how, second in seconds.items():
            report.line(f"TTFT of {len(prompts[0])} tokens, {sizes.layers} layers: {how}", 1000 * second, "ms")
        report.line("a blend is faster than full prefill", seconds["full"] / seconds["blend"], "times", least=3.0)
        report.line("exact hits are faster than full prefill", seconds["full"] / seconds["exact"], "times")
        with report.part("waiting"), never_waiting(report.device):  # This raises where something waits.
            cached.prefill(prompts[1], "blend")
            report.line("times that a blend waits for the GPU, beside that for its scores", 0, "", most=0)
        if report.device.type == "cuda":
            launched = launches(lambda: cached.prefill(prompts[2], "blend"))
            ours = sum(count for name, count in launched.items() if name in OURS)
            report.line("GPU operations of a blend, for each layer", sum(launched.values()) / sizes.layers, "")
            what = "launches of lmc's kernels of a blend, for each layer"
            report.line(what, ours / sizes.layers, "", least=1, most=LAUNCHES)  # at least `place`


def launches(work: Callable[[], Any]) -> Counter[str]:
    """Return how often each kernel and copy of some work ran on the GPU."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        work()
        torch.cuda.synchronize()
    return Counter(event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA)


def seconds_of(cached: CachedModel, prompt: list[int], how: How) -> float:
    """Return the time until the logits of the first token are there."""
    started = time.perf_counter()
    cached.prefill(prompt, how).logits.cpu()
    return time.perf_counter() - started


def answered(report: Report, _: Sizes) -> None:
    """Questions over documents, asked of the shipped model and of SmolLM2 if that is installed."""
    _answers(report, "the shipped model", SHIPPED / "model", SHIPPED, 4 if report.smoke else 40, least=0.95)
    if report.smoke:  # The same once more, in a larger model.
        return
    try:
        checkpoint = smollm2()
    except InputError as error:
        print(f"SmolLM2 is left out: {error}")
        return
    _answers(report, "SmolLM2", checkpoint, REAL, 40, least=0.9)


def _answers(report: Report, model: str, checkpoint: Path, texts: Path, count: int, least: float) -> None:
    """How many questions a model answers rightly by a blend, of how many it answers so by full prefill."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    loaded = AutoModelForCausalLM.from_pretrained(checkpoint).to(report.device)
    collection = sample(read_collection(texts / "documents", texts / "questions.json"), count)
    prompts = Prompts(collection, tokenizer, SEPARATOR_TEXT)
    examples = [prompts.example(question, number) for number, question in enumerate(collection.questions)]
    documents = dict.fromkeys(name for example in examples for name in example.order)
    settings = Settings(enable_blending=True, max_local_cpu_size=2.0)
    with CachedModel(loaded, settings, Markers.of(tokenizer, SEPARATOR_TEXT)) as cached:
        learn_all(cached, [prompts.tokens[name] for name in documents])
        right: Counter[str] = Counter()
        full = cached.prefill(examples[0].prompt, "full").logits
        whole = cached.prefill(examples[0].prompt, policy=RecomputePolicy(strategy="all", ratio=1.0))
        report.line(
            f"error of logits of {model} at ratio 1", difference(whole.logits, full), "", most=NOISE[full.dtype]
        )
        for example in examples:
            done: dict[How, Prefilled] = {how: cached.prefill(example.prompt, how) for how in ("full", "blend")}
            found = ask(cached, example, done, tokenizer, collection.answer_tokens).ways
            right.update(how for how in done if found[how].right)
    share = right["blend"] / right["full"] if right["full"] else 0.0
    report.line(f"questions that {model} answers rightly by a blend, of full", share, "", least=least)


@contextmanager
def never_waiting(device: torch.device) -> Iterator[None]:
    """Make it an error to wait for the GPU in a blend, except for its scores."""
    if device.type != "cuda":
        yield
        return

    def in_mode(mode: str, after: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any) -> Any:
            torch.cuda.set_sync_debug_mode(mode)
            try:
                return original(*given)
            finally:
                torch.cuda.set_sync_debug_mode(after)

        return run

    with (
        patch.object(Blender, "run", in_mode("error", "default", Blender.run)),
        patch.object(Blender, "_on_host", in_mode("default", "error", Blender._on_host)),
    ):
        yield


WITHOUT_VLLM = {  # the parts of tier A
    "copies": torch.inference_mode()(copies),
    "kernels": torch.inference_mode()(all_kernels),
    "scattered": torch.inference_mode()(scattered),
    "models": models,
    "answers": answered,
}

if __name__ == "__main__":
    main()
