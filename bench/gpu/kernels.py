"""The checks of `accept.py` on single kernels: errors against torch in float32, and bandwidths."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from gpu.report import Report
from lmc.blend.canvas import Canvas, Paged, dense
from lmc.blend.kernels import attention, place, shift
from lmc.blend.kernels.choice import kernels_of
from lmc.blend.kernels.shift import MOST_EXAMPLES, Spans
from lmc.blend.layer_attention import LayerAttention
from lmc.blend.rope import KeyRotation
from lmc.blend.tolerances import difference
from lmc.copies import Uploads
from lmc.shapes import GIB, MIB

BLEND_LAYERS = 32
DENSE = {"cuda": SDPBackend.FLASH_ATTENTION, "cpu": SDPBackend.MATH}  # cuDNN's would be faster, and another one
ALLOWED = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 1e-4}  # errors, relative to the largest value


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
    latent: tuple[int, int, int] = (16, 64, 512)  # query heads, rotated numbers and others of MLA
    hidden: int = 4096
    layers: int = BLEND_LAYERS
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16)


SMOKE = Sizes(
    heads=2, group=2, dim=64, documents=2, tokens=40, context=96, rows=(5,), latent=(3, 16, 48), slab_bytes=16 * MIB,
    hidden=256, layers=2, dtypes=(torch.float32,),
)  # fmt: skip


class OneLayer(Canvas[Any]):
    """Pages of one layer, for kernels that want a canvas."""

    def __init__(self, pages: Paged) -> None:
        self._pages = pages

    def paged(self, layer: int) -> Paged:
        return self._pages

    def read(self, layer: int, slots: torch.Tensor) -> Any:
        return place.gather(self._pages, slots)

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        size = self._pages.keys.shape[2]
        for whole, some in zip(self._pages[:2], (keys, values), strict=True):
            whole[slots // size, :, slots % size] = some.to(whole.dtype)


def spans_of(sizes: Sizes, examples: int, device: torch.device) -> Spans:
    """Return the spans of documents, each with this many examples."""
    uploads, documents = Uploads(device), sizes.documents
    spans = Spans.of([sizes.tokens - examples] * documents, [examples] * documents, uploads)
    uploads.send()
    return spans


def pages_of(report: Report, sizes: Sizes, tokens: int, dtype: torch.dtype, *, heads_first: bool = False) -> Paged:
    """Return random pages with shuffled blocks, with tokens before or after heads."""
    blocks = -(-tokens // sizes.page)
    order = (sizes.heads, sizes.page) if heads_first else (sizes.page, sizes.heads)
    cache = torch.randn(blocks, *order, 2 * sizes.dim, device=report.device).to(dtype)
    keys, values = (cache if heads_first else cache.transpose(1, 2)).split(sizes.dim, dim=-1)
    return Paged(keys, values, torch.randperm(blocks, device=report.device).to(torch.int32))


def exact(pages: Paged) -> Paged:
    """Return the model's numbers in float32."""
    keys, values = (one.float() * scale for one, scale in zip(pages[:2], pages.scales, strict=True))
    return Paged(keys, values, pages.table)


class Speed:
    """Notes how fast some work is, of what the device allows."""

    def __init__(self, report: Report, dtype: torch.dtype) -> None:
        self._report, self._name = report, str(dtype).removeprefix("torch.")
        large = torch.empty(256 * MIB if not report.smoke else MIB, dtype=torch.uint8, device=report.device)
        self.memory = 2 * large.numel() / report.milliseconds(large.clone) / 1e6
        report.line("memory, by a large copy", self.memory, "GB/s")
        side = 4096 if not report.smoke else 64
        one, other = torch.randn(2, side, side, device=report.device).to(dtype)
        self.products = 2 * side**3 / report.milliseconds(lambda: one @ other) / 1e9
        report.line(f"products of a large matrix, {self._name}", self.products, "TFLOP/s")

    def __call__(self, what: str, moved: int, work: Callable[[], Any], least: float | None = None) -> None:
        """Record the share of the memory bandwidth for `moved` bytes, and whether it is at least `least`."""
        took = self._report.milliseconds(work)
        self._report.line(f"{what}, {self._name}", moved / took / 1e6 / self.memory, "of memory", least=least)


def kernels(report: Report, sizes: Sizes, dtype: torch.dtype) -> None:
    """Errors and bandwidths of the kernels that move keys and values, and of the scores, each in a part of its own."""
    speed, name = Speed(report, dtype), str(dtype).removeprefix("torch.")
    for what, measure in MEASURED.items():
        with report.part(f"{what} in {name}"):
            measure(report, sizes, dtype, speed)


def errors(
    report: Report, what: str, found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor], most: float
) -> None:
    """Record the largest and the mean error, both relative to the largest value."""
    worst = max(map(difference, found, wanted))
    mean = statistics.fmean(
        float((one.double() - other.double()).abs().mean() / other.double().abs().max())
        for one, other in zip(found, wanted, strict=True)
    )
    report.line(f"error of {what}", worst, "", most=most)
    report.line(f"mean error of {what}", mean, "", most=most / 8)


def stored(report: Report, sizes: Sizes, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return the parts of all documents."""
    shape = (sizes.documents, 2, sizes.tokens, sizes.heads, sizes.dim)
    return list(torch.randn(shape, device=report.device).to(dtype))


def moved(report: Report, sizes: Sizes, dtype: torch.dtype, speed: Speed) -> None:
    """Place stored parts, read them back, and compare keys with stored ones."""
    ours, name, count = kernels_of(report.device), str(dtype).removeprefix("torch."), sizes.documents * sizes.tokens
    pages, row = pages_of(report, sizes, count, dtype), sizes.heads * sizes.dim * dtype.itemsize
    before, parts = exact(pages), stored(report, sizes, dtype)
    slots = torch.randperm(count, device=report.device)
    angles = torch.rand(count, sizes.dim // 2, device=report.device)
    rotation = KeyRotation(angles.cos(), angles.sin())
    place.place([part.float() for part in parts], rotation, slots, before)
    ours.place(parts, rotation, slots, pages)
    errors(report, f"place, {name}", pages[:2], before[:2], ALLOWED[dtype])
    staged = torch.cat(parts, dim=1)
    speed("place", 4 * count * row, lambda: ours.place([staged], rotation, slots, pages), 0.7)
    speed("place, with copies to one piece", 8 * count * row, lambda: ours.place(parts, rotation, slots, pages))
    pairs = zip(ours.gather(pages, slots), place.gather(pages, slots), strict=True)
    wrong = sum(float((one != other).sum()) for one, other in pairs)
    report.line(f"numbers that gather has wrong, {name}", wrong, "", most=0)
    speed("gather", 4 * count * row, lambda: ours.gather(pages, slots))
    canvas, keys = OneLayer(pages), torch.cat(parts, dim=1)[0]
    found, wanted = ([one.deviation(canvas, 0, slots, keys)] for one in (ours, place))
    errors(report, f"deviation, {name}", found, wanted, ALLOWED[torch.float32])
    speed("deviation", 2 * count * row, lambda: ours.deviation(canvas, 0, slots, keys))


def placed(report: Report, sizes: Sizes, dtype: torch.dtype, speed: Speed) -> None:
    """Place in pages with heads before tokens, pairs of RoPE side by side, or a part of each head rotated."""
    ours, name, count = kernels_of(report.device), str(dtype).removeprefix("torch."), sizes.documents * sizes.tokens
    parts, slots = stored(report, sizes, dtype), torch.randperm(count, device=report.device)
    for what, heads_first, interleaved, half in (
        ("HND", True, False, sizes.dim // 2),
        ("interleaved RoPE", False, True, sizes.dim // 2),
        ("partial rotation", False, False, sizes.dim // 8),
    ):
        pages = pages_of(report, sizes, count, dtype, heads_first=heads_first)
        before, angles = exact(pages), torch.rand(count, half, device=report.device)
        rotation = KeyRotation(angles.cos(), angles.sin(), interleaved)
        place.place([part.float() for part in parts], rotation, slots, before)
        ours.place(parts, rotation, slots, pages)
        errors(report, f"place with {what}, {name}", pages[:2], before[:2], ALLOWED[dtype])


def corrected(report: Report, sizes: Sizes, dtype: torch.dtype, speed: Speed) -> None:
    """What the tokens that are not recomputed get of the changes of the others."""
    ours, name, count = kernels_of(report.device), str(dtype).removeprefix("torch."), sizes.documents * sizes.tokens
    pages, row = pages_of(report, sizes, count, dtype), sizes.heads * sizes.dim * dtype.itemsize
    slots = torch.randperm(count, device=report.device)
    angles = torch.rand(count, sizes.dim // 2, device=report.device)
    rotation = KeyRotation(angles.cos(), angles.sin())
    per = min(MOST_EXAMPLES, sizes.tokens // 4)
    spans = spans_of(sizes, per, report.device)
    examples, others = slots[: per * sizes.documents], slots[per * sizes.documents :]
    weights = torch.rand(len(others), MOST_EXAMPLES, device=report.device) / per
    canvas, wanted = OneLayer(pages), OneLayer(exact(pages))
    old = canvas.read(0, examples.flip(0))
    back, forth = (KeyRotation(rotation.cos[: len(some)], rotation.sin[: len(some)]) for some in (examples, others))
    changes = ours.changes_of(canvas, 0, examples, old, back)
    true = shift.changes_of(wanted, 0, examples, tuple(one.float() for one in old), back)
    errors(report, f"changes, {name}", [changes], [true], ALLOWED[torch.float32])
    found = ours.weights_of(canvas, 0, old[0], others, (back, forth), spans)
    regression = shift.weights_of(wanted, 0, old[0].float(), others, (back, forth), spans)
    errors(report, f"weights, {name}", [found], [regression], ALLOWED[torch.float32])
    shift.correct(wanted, 0, others, weights, true, spans, forth)
    ours.correct(canvas, 0, others, weights, changes, spans, forth)
    errors(report, f"correct, {name}", pages[:2], wanted.paged(0)[:2], ALLOWED[dtype])
    speed("correct", 4 * len(others) * row, lambda: ours.correct(canvas, 0, others, weights, changes, spans, forth))


def scores(report: Report, sizes: Sizes, dtype: torch.dtype, speed: Speed) -> None:
    """The attention of a question, and what it pays to each token, by mean and by maximum over heads."""
    ours, name = kernels_of(report.device), str(dtype).removeprefix("torch.")
    context = pages_of(report, sizes, sizes.context, dtype)
    asking = min(64, sizes.context // 2)
    query = torch.randn(asking, sizes.heads * sizes.group, sizes.dim, device=report.device).to(dtype)
    at = torch.arange(sizes.context - asking, sizes.context, device=report.device)
    there = torch.rand(sizes.context, device=report.device) < 0.9
    there[at] = True
    for over_heads in ("mean", "max"):
        score = (at, LayerAttention(scale=sizes.dim**-0.5), there, over_heads)
        found = ours.attend_and_score(query, context, *score)
        wanted = attention.attend_and_score(query.float(), exact(context), *score)
        for what, one, other in zip(
            (f"attention with scores by {over_heads}", f"scores by {over_heads}"), found, wanted, strict=True
        ):
            errors(report, f"{what}, {name}", [one], [other], ALLOWED[dtype])
        both, alone = (
            report.milliseconds(work)
            for work in (
                partial(ours.attend_and_score, query, context, *score),
                partial(ours.attend, query, context, *score[:3]),
            )
        )
        what, took = f"scores by {over_heads} of {asking} rows, beside attention, {name}", max(both - alone, 1e-6)
        report.line(what, took, "ms")
        # They are a small part of a blend, and their kernel is far from what memory and products allow.
        report.line(f"{what}: in all of {BLEND_LAYERS} layers", BLEND_LAYERS * took, "ms", most=2.0)


def scattered_in(report: Report, context: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the positions of scattered rows, and which tokens of the context are there: most, and these rows."""
    at = torch.randperm(context, device=report.device)[:count].sort().values
    there = torch.rand(context, device=report.device) < 0.9
    there[at] = True
    return at, there


def limited(report: Report, sizes: Sizes, dtype: torch.dtype, speed: Speed) -> None:
    """Attention and scores of scattered rows in layers with a window, a chunk, sinks or a soft cap."""
    ours, name = kernels_of(report.device), str(dtype).removeprefix("torch.")
    context, queries = pages_of(report, sizes, sizes.context, dtype), sizes.heads * sizes.group
    count, reach = min(sizes.rows[0], sizes.context // 2), sizes.context // 5
    at, there = scattered_in(report, sizes.context, count)
    query = torch.randn(count, queries, sizes.dim, device=report.device).to(dtype)
    plain = LayerAttention(scale=sizes.dim**-0.5)
    kinds = {
        "a window": replace(plain, window=reach),
        "a chunk": replace(plain, chunk=reach),
        "a window and sinks": replace(plain, window=reach, sinks=torch.randn(queries, device=report.device).to(dtype)),
        "a soft cap": replace(plain, soft_cap=1.5),
        "a window and a soft cap": replace(plain, window=reach, soft_cap=1.5),
    }
    for kind, layer in kinds.items():
        found = ours.attend_and_score(query, context, at, layer, there, "max")
        wanted = attention.attend_and_score(query.float(), exact(context), at, layer, there, "max")
        for what, one, other in zip(("attention", "scores"), found, wanted, strict=True):
            errors(report, f"{what} with {kind}, {name}", [one], [other], ALLOWED[dtype])


def latent(report: Report, sizes: Sizes, dtype: torch.dtype, speed: Speed) -> None:
    """Place and attend to pages of MLA, in which values are keys, too."""
    ours, name = kernels_of(report.device), str(dtype).removeprefix("torch.")
    queries, dim, others = sizes.latent
    blocks, count = -(-sizes.context // sizes.page), min(sizes.rows[0], sizes.context // 2)
    cache = torch.randn(blocks, 1, sizes.page, others + dim, device=report.device).to(dtype)
    values, keys = cache.split((others, dim), dim=-1)
    pages = Paged(keys, values, torch.randperm(blocks, device=report.device).to(torch.int32))
    before, slots = exact(pages), torch.randperm(sizes.context, device=report.device)[:count]
    parts = [tuple(torch.randn(count, 1, size, device=report.device).to(dtype) for size in (dim, others))]
    angles = torch.rand(count, dim // 2, device=report.device)
    rotation = KeyRotation(angles.cos(), angles.sin(), interleaved=True)
    place.place([tuple(half.float() for half in part) for part in parts], rotation, slots, before)
    ours.place(parts, rotation, slots, pages)
    errors(report, f"place of MLA, {name}", pages[:2], before[:2], ALLOWED[dtype])
    query = torch.randn(count, queries, dim + others, device=report.device).to(dtype)
    at, there = scattered_in(report, sizes.context, count)
    layer = LayerAttention(scale=(dim + others) ** -0.5, latent=True)
    for what, found, wanted in zip(
        ("attention of MLA", "scores of MLA"),
        ours.attend_and_score(query, pages, at, layer, there, "max"),
        attention.attend_and_score(query.float(), before, at, layer, there, "max"),
        strict=True,
    ):
        errors(report, f"{what}, {name}", [found], [wanted], ALLOWED[dtype])
    took = report.milliseconds(lambda: ours.attend(query, pages, at, layer))
    products = 2 * int((at + 1).sum()) * queries * (dim + 2 * others)
    report.line(f"{count} scattered rows of {sizes.context}, MLA, {name}", took, "ms")
    report.line(f"{count} scattered rows, MLA, {name}", products / took / 1e9 / speed.products, "of products")


def quantised(report: Report, sizes: Sizes, dtype: torch.dtype, speed: Speed) -> None:
    """Everything over pages in fp8_e4m3, against the model's numbers. What is written may be one number off."""
    ours, name, count = kernels_of(report.device, quantised=True), str(dtype).removeprefix("torch."), sizes.context
    report.line("the GPU converts fp8_e4m3; otherwise lmc uses torch", float(ours.in_pages), "")
    if not ours.in_pages:
        return
    scales, most = (0.03, 0.02), 0.13
    pages = pages_of(report, sizes, count, torch.float32)
    keys, values = ((half / scale).to(torch.float8_e4m3fn) for half, scale in zip(pages[:2], scales, strict=True))
    pages = Paged(keys, values, pages.table, scales)
    before = exact(pages)
    slots = torch.randperm(count, device=report.device)
    angles = torch.rand(count, sizes.dim // 2, device=report.device)
    rotation, half = KeyRotation(angles.cos(), angles.sin()), count // 2
    query = torch.randn(half, sizes.heads * sizes.group, sizes.dim, device=report.device).to(dtype)
    at, there = scattered_in(report, count, half)
    score = (at, LayerAttention(scale=sizes.dim**-0.5), there, "max")
    for what, one, other in zip(
        ("attention", "scores"),
        ours.attend_and_score(query, pages, *score),
        attention.attend_and_score(query.float(), before, *score),
        strict=True,
    ):
        errors(report, f"{what} in 8 bits, {name}", [one], [other], ALLOWED[dtype])
    examples, others = slots[: MOST_EXAMPLES // 2], slots[MOST_EXAMPLES // 2 :]
    uploads = Uploads(report.device)
    spans = Spans.of([len(others)], [len(examples)], uploads)
    uploads.send()
    canvas, wanted = OneLayer(pages), OneLayer(before)
    old = tuple(one.to(dtype) for one in wanted.read(0, examples.flip(0)))
    back, forth = (KeyRotation(rotation.cos[: len(some)], rotation.sin[: len(some)]) for some in (examples, others))
    changes = ours.changes_of(canvas, 0, examples, old, back)
    true = shift.changes_of(wanted, 0, examples, tuple(one.float() for one in old), back)
    errors(report, f"changes in 8 bits, {name}", [changes], [true], ALLOWED[torch.float32])
    found, far = ([one.deviation(of, 0, examples, old[0])] for one, of in ((ours, canvas), (place, wanted)))
    errors(report, f"deviation in 8 bits, {name}", found, far, ALLOWED[torch.float32])
    weights = torch.rand(len(others), MOST_EXAMPLES, device=report.device) / MOST_EXAMPLES
    shift.correct(wanted, 0, others, weights, true, spans, forth)
    ours.correct(canvas, 0, others, weights, changes, spans, forth)
    errors(report, f"correct in 8 bits, {name}", exact(pages)[:2], before[:2], most)
    parts = [tuple(one[:half] for one in place.gather(pages, slots))]
    place.place([tuple(one.float() * scale for one, scale in zip(parts[0], scales, strict=True))],
                rotation.part(slice(0, half)), slots[half : 2 * half], before)  # fmt: skip
    ours.place(parts, rotation.part(slice(0, half)), slots[half : 2 * half], pages)
    errors(report, f"place in 8 bits, {name}", exact(pages)[:2], before[:2], most)


MEASURED = {
    "moving": moved,
    "layouts": placed,
    "corrections": corrected,
    "scores": scores,
    "limits": limited,
    "MLA": latent,
    "8 bits": quantised,
}


def scattered(report: Report, sizes: Sizes) -> None:
    """Attention of scattered rows, against a dense causal kernel with as many products."""
    dtype, ours = sizes.dtypes[0], kernels_of(report.device)
    context, heads = pages_of(report, sizes, sizes.context, dtype), sizes.heads * sizes.group
    layer = LayerAttention(scale=sizes.dim**-0.5)
    for rows in sizes.rows:
        at = torch.randperm(sizes.context, device=report.device)[:rows].sort().values
        query = torch.randn(rows, heads, sizes.dim, device=report.device).to(dtype)
        wanted = attention.attend(query.float(), tuple(one.float() for one in dense(context)), at, layer)
        found = ours.attend(query, context, at, layer)
        errors(report, f"{rows} scattered rows", [found], [wanted], ALLOWED[dtype])
        took = report.milliseconds(lambda query=query, at=at: ours.attend(query, context, at, layer))
        side = int((2 * int((at + 1).sum())) ** 0.5)
        q, k, v = torch.randn(3, 1, heads, side, sizes.dim, device=report.device).to(dtype)
        with sdpa_kernel(DENSE[report.device.type]):
            alike = report.milliseconds(lambda q=q, k=k, v=v: scaled_dot_product_attention(q, k, v, is_causal=True))
        report.line(f"{rows} scattered rows of {sizes.context}, alone", took, "ms")
        what = f"{rows} scattered rows, of {DENSE[report.device.type].name} with the same products"
        report.line(what, took / alike, "times", most=1.5)
