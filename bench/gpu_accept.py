"""What lmc does on this GPU without vLLM, against what is wanted: copies, kernels, the transformers connector.

    python bench/gpu_accept.py [--keep] [--layers 8]              # `make gpu`; exit status 1 if a line falls short
    TRITON_INTERPRET=1 python bench/gpu_accept.py --smoke         # tiny sizes on a CPU: do the checks themselves run?

Needs torch, triton, transformers 5, and lmc's own dependencies; see docs/gpu.md. Bandwidths are against a copy of large
tensors on the same device, in the same run. Errors are against lmc's kernels in torch, in float32 on the same device.
"""

import os
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from common import parser, prompt_of
from report import Report
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoModelForCausalLM, AutoTokenizer

from lmc.blend.blender import Blender
from lmc.blend.canvas import Canvas, Paged, dense
from lmc.blend.kernels import attention, place, shift
from lmc.blend.kernels.choice import kernels_of
from lmc.blend.kernels.shift import MOST_EXAMPLES, Spans
from lmc.blend.markers import Markers
from lmc.blend.selftest import difference
from lmc.blend.strategies import RecomputePolicy
from lmc.config import Settings
from lmc.connectors.transformers import CachedModel, Prefilled
from lmc.connectors.transformers.report import How
from lmc.connectors.vllm.paged import Move, Pages
from lmc.copies import merged
from lmc.demo import REAL, SHIPPED
from lmc.demo.pretrained import smollm2
from lmc.demo.questions import Prompts, read_collection, sample
from lmc.demo.random_model import SEPARATOR, random_llama, random_tokens
from lmc.demo.run import ask, learn_all
from lmc.errors import InputError
from lmc.rag import SEPARATOR as SEPARATOR_TEXT
from lmc.shapes import GIB, MIB
from lmc.storage.slab import Slab

DELAY = 20_000_000  # cycles that a stream sleeps, some 10 ms
ALLOWED = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 1e-4}  # errors, relative to the largest value
NOISE = {torch.bfloat16: 6e-2, torch.float16: 1e-2, torch.float32: 1e-3}  # the same, of logits behind all layers


@dataclass
class Sizes:
    """What is measured. The defaults are an 8B Llama with 8 documents of a thousand tokens."""

    heads: int = 8
    group: int = 4
    dim: int = 128
    page: int = 16
    documents: int = 8
    tokens: int = 1024  # of a document
    context: int = 16384
    rows: tuple[int, ...] = (300, 1000, 3000)
    slab_bytes: int = 4 * GIB
    hidden: int = 4096
    layers: int = 8
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16)


SMOKE = Sizes(
    heads=2, group=2, dim=64, documents=2, tokens=40, context=96, rows=(5,), slab_bytes=16 * MIB, hidden=256, layers=2,
    dtypes=(torch.float32,),
)  # fmt: skip


def main() -> None:
    """Measure, print a line for each number, and end with status 1 if one falls short."""
    arguments = parser(__doc__, "gpu_accept")
    arguments.add_argument("--smoke", action="store_true")
    arguments.add_argument("--layers", type=int, default=Sizes().layers, help="of the model with the shape of 8B")
    options = arguments.parse_args()
    if not (options.smoke or torch.cuda.is_available()):
        sys.exit("there is no GPU here; --smoke tries the checks themselves, on a CPU")
    device = torch.device("cpu" if options.smoke else "cuda")
    if options.smoke:
        os.environ["LMC_KERNELS"] = "triton"
    sizes = SMOKE if options.smoke else Sizes(layers=options.layers)
    report, name = Report(device, options.smoke), "CPU" if options.smoke else torch.cuda.get_device_name()
    print(f"{name}; torch {torch.__version__}\n")
    torch.manual_seed(0)
    with torch.inference_mode():
        with report.part("copies"):
            copies(report, sizes)
        for dtype in sizes.dtypes:
            with report.part(f"kernels in {dtype}"):
                kernels(report, sizes, dtype)
        with report.part("scattered attention"):
            scattered(report, sizes)
    with report.part("the large shape"):
        models(report, sizes)
    if options.smoke:  # The interpreter would take minutes.
        os.environ["LMC_KERNELS"] = "torch"
    with report.part("answers"):
        answered(report)
    report.end("gpu_accept", name, asdict(sizes), keep=options.keep)


# -- copies ------------------------------------------------------------------------------------------------------------


def copies(report: Report, sizes: Sizes) -> None:
    """Pages between a slab and the GPU, and their order behind work that takes long."""
    page_bytes = sizes.page * sizes.heads * 2 * sizes.dim * 2
    parts = sizes.slab_bytes // (64 * page_bytes)
    started = time.perf_counter()
    slab = Slab(1, parts, 64 * page_bytes)
    seconds = time.perf_counter() - started
    report.line("make and page-lock a slab", 1000 * seconds * GIB / slab.bytes, "ms")
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
        for stages, way in ((False, "one by one"), (True, "by way of memory on the GPU")):
            pages._stages = stages
            took = report.milliseconds(lambda work=work: work(0, moves))
            of_large[stages] = whole.numel() / took / 1e6 / bandwidth[name]
            report.line(f"pages of {page_bytes >> 10} KiB, descending, {name}, {way}", of_large[stages], "of copies")
        report.line("pages, the faster way", max(of_large.values()), "of copies", least=0.9)
    some = moves[: max(1024 // 64, 1)]
    started = time.perf_counter()
    for _ in range(100):
        merged(pages.copies(0, some))
    report.line("list of copies for 1,024 pages", 10 * (time.perf_counter() - started), "ms", most=1.0)
    _ordered(report, pages, cache, moves)


def _ordered(report: Report, pages: Pages, cache: torch.Tensor, moves: list[Move]) -> None:
    """Save what a slow kernel writes, let it be overwritten, and load it back; all of it is only issued."""
    cuda = report.device.type == "cuda"
    saving, loading = (torch.cuda.Stream() if cuda else None for _ in range(2))

    @contextmanager
    def behind(stream: Any) -> Iterator[None]:
        if stream is None:
            yield
            return
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(DELAY)
            yield

    if cuda:
        torch.cuda._sleep(DELAY)
    cache.fill_(3)
    with behind(saving):
        pages.save_all(0, moves)
    if cuda:
        torch.cuda.current_stream().wait_stream(saving)
    cache.fill_(5)
    with behind(loading):
        pages.load_all(0, moves)
    if cuda:
        torch.cuda.current_stream().wait_stream(loading)
    report.line("pages wrong after a slow save, other contents, and a slow load", float((cache != 3).sum()), "", most=0)


# -- kernels -----------------------------------------------------------------------------------------------------------


class OneLayer(Canvas[Any]):
    """Pages of one layer, for kernels that want a canvas."""

    def __init__(self, pages: Paged) -> None:
        self._pages = pages

    def paged(self, layer: int) -> Paged:
        return self._pages

    def read(self, layer: int, slots: torch.Tensor) -> Any:
        return tuple(place.gather(self._pages, slots))

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        size = self._pages.keys.shape[2]
        for whole, some in zip(self._pages[:2], (keys, values), strict=True):
            whole[slots // size, :, slots % size] = some.to(whole.dtype)


def pages_of(report: Report, sizes: Sizes, tokens: int, dtype: torch.dtype) -> Paged:
    """Random pages, whose blocks are in no order."""
    blocks = -(-tokens // sizes.page)
    cache = torch.randn(blocks, sizes.page, sizes.heads, 2 * sizes.dim, device=report.device).to(dtype).transpose(1, 2)
    keys, values = cache.split(sizes.dim, dim=-1)
    return Paged(keys, values, torch.randperm(blocks, device=report.device).to(torch.int32))


def exact(pages: Paged) -> Paged:
    """Return copies in float32."""
    keys, values = (one.to(torch.float32, copy=True) for one in pages[:2])
    return Paged(keys, values, pages.table)


def kernels(report: Report, sizes: Sizes, dtype: torch.dtype) -> None:
    """Errors and bandwidths of the kernels that move keys and values, and of the scores."""
    ours, name, count = kernels_of(report.device), str(dtype).removeprefix("torch."), sizes.documents * sizes.tokens
    large = torch.empty(256 * MIB if not report.smoke else MIB, dtype=torch.uint8, device=report.device)
    memory = 2 * large.numel() / report.milliseconds(large.clone) / 1e6
    report.line("memory, by a large copy", memory, "GB/s")

    def speed(what: str, moved: int, work: Callable[[], Any], least: float | None = None) -> None:
        took = report.milliseconds(work)
        report.line(f"{what}, {name}", moved / took / 1e6 / memory, "of memory", least=least)

    pages, row = pages_of(report, sizes, count, dtype), sizes.heads * sizes.dim * dtype.itemsize
    before = exact(pages)
    slots = torch.randperm(count, device=report.device)
    parts = list(torch.randn(sizes.documents, 2, sizes.tokens, sizes.heads, sizes.dim, device=report.device).to(dtype))
    angles = torch.rand(count, sizes.dim // 2, device=report.device)
    turn = angles.cos(), angles.sin()
    place.place([part.float() for part in parts], turn, slots, before)
    ours.place(parts, turn, slots, pages)
    report.line(f"error of place, {name}", max(map(difference, pages[:2], before[:2])), "", most=ALLOWED[dtype])
    speed(
        "place, with the copy to its staging area", 8 * count * row, lambda: ours.place(parts, turn, slots, pages), 0.7
    )
    wrong = (ours.gather(pages, slots) != place.gather(pages, slots)).sum()
    report.line(f"numbers that gather has wrong, {name}", float(wrong), "", most=0)
    speed("gather", 4 * count * row, lambda: ours.gather(pages, slots))

    per = min(MOST_EXAMPLES, sizes.tokens // 4)
    spans = Spans.of([sizes.tokens - per] * sizes.documents, [per] * sizes.documents, report.device)
    examples, others = slots[: per * sizes.documents], slots[per * sizes.documents :]
    weights = torch.rand(len(others), MOST_EXAMPLES, device=report.device) / per
    canvas, wanted = OneLayer(pages), OneLayer(exact(pages))
    stored = canvas.read(0, examples.flip(0))
    back, forth = (tuple(one[: len(some)] for one in turn) for some in (examples, others))
    changes = ours.changes_of(canvas, 0, examples, stored, back)
    true = shift.changes_of(wanted, 0, examples, tuple(one.float() for one in stored), back)
    report.line(f"error of changes, {name}", difference(changes, true), "", most=ALLOWED[torch.float32])
    found = ours.weights_of(canvas, 0, stored[0], others, (back, forth), spans)
    regression = shift.weights_of(wanted, 0, stored[0].float(), others, (back, forth), spans)
    report.line(f"error of weights, {name}", difference(found, regression), "", most=ALLOWED[torch.float32])
    shift.correct(wanted, 0, others, weights, true, spans, forth)
    ours.correct(canvas, 0, others, weights, changes, spans, forth)
    report.line(f"error of correct, {name}", difference(pages.keys, wanted.paged(0).keys), "", most=ALLOWED[dtype])
    speed("correct", 4 * len(others) * row, lambda: ours.correct(canvas, 0, others, weights, changes, spans, forth))

    context = pages_of(report, sizes, sizes.context, dtype)
    asking = min(64, sizes.context // 2)
    query = torch.randn(asking, sizes.heads * sizes.group, sizes.dim, device=report.device).to(dtype)
    at = torch.arange(sizes.context - asking, sizes.context, device=report.device)
    there = torch.rand(sizes.context, device=report.device) < 0.9
    there[at] = True
    score = (at, sizes.dim**-0.5, there, "mean")
    found, paid = ours.attend_and_score(query, context, *score)
    out, wanted_paid = attention.attend_and_score(query.float(), exact(context), *score)
    report.line(f"error of attention with scores, {name}", difference(found, out), "", most=ALLOWED[dtype])
    report.line(f"error of scores, {name}", difference(paid, wanted_paid), "", most=ALLOWED[dtype])
    speed(
        "attention and scores of 64 rows, three readings of the keys", 3 * sizes.context * row,
        lambda: ours.attend_and_score(query, context, *score), 0.5,
    )  # fmt: skip


def scattered(report: Report, sizes: Sizes) -> None:
    """Attention of scattered rows, against a dense causal kernel with as many products."""
    dtype, ours = sizes.dtypes[0], kernels_of(report.device)
    context, heads = pages_of(report, sizes, sizes.context, dtype), sizes.heads * sizes.group
    scale = sizes.dim**-0.5
    for rows in sizes.rows:
        at = torch.randperm(sizes.context, device=report.device)[:rows].sort().values
        query = torch.randn(rows, heads, sizes.dim, device=report.device).to(dtype)
        wanted = attention.attend(query.float(), tuple(one.float() for one in dense(context)), at, scale)
        found = ours.attend(query, context, at, scale)
        report.line(f"error of {rows} scattered rows", difference(found, wanted), "", most=ALLOWED[dtype])
        took = report.milliseconds(lambda query=query, at=at: ours.attend(query, context, at, scale))
        side = int((2 * int((at + 1).sum())) ** 0.5)
        q, k, v = torch.randn(3, 1, heads, side, sizes.dim, device=report.device).to(dtype)
        alike = report.milliseconds(lambda q=q, k=k, v=v: scaled_dot_product_attention(q, k, v, is_causal=True))
        report.line(f"{rows} scattered rows of {sizes.context}, alone", took, "ms")
        report.line(f"{rows} scattered rows, of a dense kernel with the same products", took / alike, "times", most=1.5)


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
        order = random.Random(0)
        prompts = [prompt_of(documents, order.sample(range(len(documents)), len(documents)), seed=i) for i in range(8)]
        full = cached.prefill(prompts[0], "full").logits
        whole = cached.prefill(prompts[0], policy=RecomputePolicy(strategy="all", ratios=(1.0,)))
        report.line("error of logits at ratio 1", difference(whole.logits, full), "", most=NOISE[dtype])
        report.line("tokens reused there", whole.report.reused / len(prompts[0]), "of all", least=0.4)
        took = {
            "full": [seconds_of(cached, prompt, "full") for prompt in prompts],
            "blend": [seconds_of(cached, prompt, "blend") for prompt in prompts],
            "exact": [seconds_of(cached, prompts[0], "exact") for _ in range(6)],
        }
        seconds = {how: statistics.median(some[2:]) for how, some in took.items()}
        for how, second in seconds.items():
            report.line(f"TTFT of {len(prompts[0])} tokens, {sizes.layers} layers: {how}", 1000 * second, "ms")
        report.line("a blend is faster than full prefill", seconds["full"] / seconds["blend"], "times", least=3.0)
        with never_waiting(report.device):  # This raises where something waits.
            cached.prefill(prompts[1], "blend")


def seconds_of(cached: CachedModel, prompt: list[int], how: How) -> float:
    """Return the time until the logits of the first token are there."""
    started = time.perf_counter()
    cached.prefill(prompt, how).logits.cpu()
    return time.perf_counter() - started


def answered(report: Report) -> None:
    """Questions over documents, asked of the shipped model and of SmolLM2 if that is installed."""
    _answers(report, "the shipped model", SHIPPED / "model", SHIPPED, 4 if report.smoke else 40, least=0.95)
    try:
        checkpoint = smollm2()
    except InputError as error:
        print(f"SmolLM2 is left out: {error}")
        return
    _answers(report, "SmolLM2", checkpoint, REAL, 1 if report.smoke else 40, least=0.9)


def _answers(report: Report, model: str, checkpoint: Path, texts: Path, count: int, least: float) -> None:
    """How many questions a model answers rightly by a blend, of those that it answers by full prefill."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    loaded = AutoModelForCausalLM.from_pretrained(checkpoint).to(report.device)
    collection = sample(read_collection(texts / "documents", texts / "questions.json"), count)
    prompts = Prompts(collection, tokenizer, SEPARATOR_TEXT)
    examples = [prompts.example(question, number) for number, question in enumerate(collection.questions)]
    documents = dict.fromkeys(name for example in examples for name in example.order)
    settings = Settings(enable_blending=True, max_local_cpu_size=2.0, blend_calibration="ignore")
    with CachedModel(loaded, settings, Markers.of(tokenizer, SEPARATOR_TEXT)) as cached:
        learn_all(cached, [prompts.tokens[name] for name in documents])
        right: Counter[str] = Counter()
        for example in examples:
            done: dict[How, Prefilled] = {how: cached.prefill(example.prompt, how) for how in ("full", "blend")}
            found = ask(cached, example, done, tokenizer, collection.answer_tokens).ways
            right.update(how for how in done if found[how].right)
    share = right["blend"] / right["full"] if right["full"] else 0.0
    report.line(f"questions that {model} answers rightly by a blend, of full", share, "", least=least)


@contextmanager
def never_waiting(device: torch.device) -> Iterator[None]:
    """Make it an error to wait for the GPU between two layers of a pass."""
    original = Blender.slices

    def slices(blender: Any) -> Iterator[Any]:
        for done in original(blender):
            yield done
            torch.cuda.set_sync_debug_mode("error" if done.layer < len(blender.result.computed) - 1 else "default")

    if device.type != "cuda":
        yield
        return
    Blender.slices = slices  # type: ignore[method-assign]
    try:
        yield
    finally:
        Blender.slices = original  # type: ignore[method-assign]
        torch.cuda.set_sync_debug_mode("default")


if __name__ == "__main__":
    main()
