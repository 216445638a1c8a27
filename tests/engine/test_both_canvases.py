"""The dense canvas and the paged canvas blend alike: the same weights, prompts, policies and stored parts lead to the
same choice of tokens, and to the same keys, values and logits.
"""

from dataclasses import dataclass, replace

import pytest
import torch
from amount import mostly_long
from lab import words
from part_memory import PartMemory
from stepping import layers_of_lmc
from transformers import AutoModelForCausalLM

from lmc.blend.blender import Blender, BlendInput
from lmc.blend.segments import Placement
from lmc.blend.shift import SINKS
from lmc.blend.strategies import NEEDS_QUESTION, STRATEGIES, RecomputePolicy
from lmc.connectors.transformers.canvas import DenseCanvas
from lmc.connectors.transformers.hf import prefilled, rows_of
from lmc.connectors.transformers.layers import DecoderLayers
from lmc.connectors.vllm.messages import BlendJob
from lmc.connectors.vllm.worker.canvas import BatchRows, PagedCanvas
from lmc.engine import Piece
from lmc.keys import ChunkKey, RecordKind

DOCUMENT, NOBODY = RecordKind.DOCUMENT, ChunkKey(b"")
SAME = 1e-4  # float32; the two attention kernels add up in different orders
ROWS = 96  # of the paged canvas in one batch, fewer than the prompts have
RATIOS = (0.05, 0.15, 0.5)
ONE, TWO, THREE = words(150, 1), words(210, 2), words(90, 3)
SYSTEM, QUESTION, UNKNOWN = words(37, 1000), words(23, 1001), words(31, 1002)


@dataclass(frozen=True)
class Stored:
    """A placement, and the tokens behind which and of which its KV was computed."""

    placement: Placement
    computed: tuple[int, ...]  # the tokens from position 0 to the end of the part


@dataclass(frozen=True)
class Case:
    """A prompt with stored parts."""

    tokens: list[int]
    stored: list[Stored]
    question: int
    start: int = 0  # an exact prefix, which an engine has in its own cache


def part(document: list[int], at: int, first: int = 0, stop: int | None = None) -> Stored:
    """The tokens `[first, stop)` of a document, which was computed alone, from position `at` of a prompt on."""
    stop = len(document) if stop is None else stop
    return Stored(Placement(at=at, tokens=stop - first, first=first), tuple(document[:stop]))


def case(system: list[int], *documents: list[int], start: int = 0) -> Case:
    """A prompt whose documents are all stored."""
    tokens, stored = list(system), []
    for document in documents:
        stored.append(part(document, len(tokens)))
        tokens += document
    return Case([*tokens, *QUESTION], stored, len(tokens), start)


def case_with_gaps() -> Case:
    """An unknown document between two others, and a document of which the middle chunk is missing."""
    tokens = [*SYSTEM, *ONE, *UNKNOWN, *TWO, *QUESTION]
    at = len(SYSTEM + ONE + UNKNOWN)
    stored = [part(ONE, len(SYSTEM)), part(TWO, at, 0, 64), part(TWO, at + 128, 128)]
    return Case(tokens, stored, len(tokens) - len(QUESTION))


def case_with_exact_document() -> Case:
    """The first document stands where it was learned, behind no tokens, so that it is exact."""
    plain = case([], ONE, TWO)
    first = plain.stored[0]
    return replace(plain, stored=[Stored(replace(first.placement, exact=True), first.computed), *plain.stored[1:]])


CASES = {
    "documents": case(SYSTEM, THREE, ONE, TWO),
    "gaps": case_with_gaps(),
    "exact prefix": case(SYSTEM, ONE, TWO, start=len(SYSTEM) + 20),
    "exact document": case_with_exact_document(),
}
POLICIES = {
    **{f"{name} {ratio}": RecomputePolicy(strategy=name, ratio=ratio) for name in STRATEGIES for ratio in RATIOS},
    **{
        f"{name} {ratio}, shift": RecomputePolicy(strategy=name, ratio=ratio, correction="shift")
        for name in ("union", "head")
        for ratio in RATIOS
    },
}

KEPT = [policy for name, policy in POLICIES.items() if "0.15" in name or name.startswith("deviation,")]


@pytest.fixture(scope="module")
def model(models):
    return AutoModelForCausalLM.from_pretrained(models("llama"), dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def lab(models, shared_engine):
    return shared_engine(models("llama"))


def computed(model, tokens) -> list[torch.Tensor]:
    """The model's own KV of some tokens, `[K, T, H, D]` for each layer."""
    return [torch.stack(kv) for kv in rows_of(prefilled(model, tokens))]


def stored_parts(model, given: Case) -> list[list[torch.Tensor]]:
    """For each placement its stored part in each layer."""
    return [[kv[:, one.placement.first :].contiguous() for kv in computed(model, one.computed)] for one in given.stored]


def dense(model, given: Case, policy: RecomputePolicy):
    """The result of a blend over the dense canvas, its KV `[K, T, H, D]` by layer, and its logits."""
    parts, placements = stored_parts(model, given), [one.placement for one in given.stored]
    if given.start:  # transformers has no cache of its own: an exact prefix is an exact placement there
        parts.insert(0, computed(model, given.tokens[: given.start]))
        placements, parts = trimmed(placements, parts, given.start)
    layers = DecoderLayers(model)
    reader = ((layer, [one[layer] for one in parts]) for layer in range(layers.shape.layers))
    canvas = DenseCanvas(layers, given.tokens, placements, reader)
    length = len(given.tokens)
    what = BlendInput(length=length, stop=length, question=given.question, placements=placements)
    result = Blender(canvas, what, policy).run()
    kv = [torch.stack([keys.transpose(0, 1), values.transpose(0, 1)]) for keys, values in canvas.kv]
    return result, kv, canvas.logits


def trimmed(placements, parts, start):
    """The placements behind an exact prefix of `start` tokens, and that prefix."""
    kept, left = [Placement(at=0, tokens=start, first=0, exact=True)], [parts[0]]
    for placement, layers in zip(placements, parts[1:], strict=True):
        skip = max(0, start - placement.at)
        if skip < placement.tokens:
            moved = {"at": placement.at + skip, "first": placement.first + skip, "tokens": placement.tokens - skip}
            kept.append(replace(placement, **moved))
            left.append([one[:, skip:] for one in layers])
    return kept, left


def paged(lab, model, given: Case, policy: RecomputePolicy, rows: BatchRows):
    """The same over the paged canvas, in blocks that the engine does not use now."""
    layers, length = layers_of_lmc(), len(given.tokens)
    placements, parts = [one.placement for one in given.stored], stored_parts(model, given)
    prefix = computed(model, given.tokens[: given.start]) if given.start else []
    if given.start:
        placements, parts = trimmed(placements, [prefix, *parts], given.start)
        placements, parts = placements[1:], parts[1:]
    pieces = tuple(
        replace(Piece.whole(DOCUMENT, NOBODY, p.tokens, p.at, p.first, None, exact=p.exact), slot=i)
        for i, p in enumerate(placements)
    )
    blocks = tuple(range(1, 1 - (-length // layers.block_size)))
    job = BlendJob(
        request="test", tokens=tuple(given.tokens), tables=(blocks,), start=given.start, exact=given.start, stop=length,
        question=given.question, copies=(), documents=pieces, ready=True, policy=policy,
    )  # fmt: skip

    def stored(slot, layer):
        return parts[slot][layer].contiguous().flatten().view(torch.uint8)

    canvas = PagedCanvas(layers, job, rows, PartMemory(stored), lambda _: True)
    everything = canvas.slots(torch.arange(length))
    canvas.uploads.send()
    with torch.inference_mode():
        for layer in range(canvas.depth):  # nothing of the test before may be of use
            empty = torch.full((length, layers.shape.kv_heads, layers.shape.head_dim), 1e3)
            canvas.write(layer, everything[layer], empty, empty)
            if prefix:
                canvas.write(layer, everything[layer][: given.start], *prefix[layer])
        what = BlendInput(length=length, stop=length, question=given.question, placements=placements, start=given.start)
        result = Blender(canvas, what, policy).run()
        kv = [torch.stack([*canvas.read(layer, slots)]) for layer, slots in enumerate(everything)]
        return result, kv, last_logits(lab, canvas, length)


def model_of(lab):
    """The model that the engine has loaded."""
    return lab.core.model_executor.driver_worker.worker.get_model()


def last_logits(lab, canvas, length: int) -> torch.Tensor:
    """The logits of the last token, by the engine's own layers over what the blend has left."""
    last, nothing = torch.tensor([length - 1]), torch.empty(0, dtype=torch.long)
    rows = canvas.begin(last)
    canvas.uploads.send()
    for layer in range(canvas.depth):

        def attention(query, write, own, layer=layer):
            write()
            return canvas.kernels.attend(query, canvas.context(layer, length, nothing), last, canvas.attentions[layer])

        (batch,) = canvas.batches(rows)
        canvas.run(layer, rows, batch, attention)
    engine_model = model_of(lab)
    hidden, _ = engine_model.model.norm(rows.states, rows.residual)
    return engine_model.compute_logits(hidden)[0]


@pytest.mark.parametrize("policy", mostly_long(POLICIES.values(), *KEPT), ids=POLICIES)
@pytest.mark.parametrize("given", CASES.values(), ids=CASES)
def test_the_same_tokens_and_the_same_kv(lab, model, given, policy):
    one, kv, logits = dense(model, given, policy)
    # The shift of a document uses its rows in one batch, and the dense canvas has one batch for all.
    rows = ROWS if policy.correction == "none" else len(given.tokens)
    other, paged_kv, paged_logits = paged(lab, model, given, policy, BatchRows(rows))
    assert (one.reused, one.fresh, one.charged) == (other.reused, other.fresh, other.charged)
    assert one.computed == other.computed
    assert [a.tolist() for a in one.recomputed] == [b.tolist() for b in other.recomputed]
    difference = max(float((a - b).abs().max()) for a, b in zip(kv, paged_kv, strict=True))
    assert difference <= SAME
    assert float((logits - paged_logits[: len(logits)]).abs().max()) <= SAME


@pytest.mark.parametrize("policy", mostly_long(POLICIES.values(), *KEPT), ids=POLICIES)
@pytest.mark.parametrize("given", CASES.values(), ids=CASES)
def test_rows_that_go_through_all_layers_at_once_leave_the_same(lab, model, given, policy, monkeypatch):
    calls, run_through = [], PagedCanvas.run_through
    monkeypatch.setattr(PagedCanvas, "run_through", lambda self, *what: [calls.append(what), run_through(self, *what)])
    one, kv, logits = paged(lab, model, given, policy, BatchRows(ROWS))
    assert not calls
    other, through_kv, through_logits = paged(lab, model, given, policy, BatchRows(ROWS, ROWS))
    assert bool(calls) == (policy.strategy in NEEDS_QUESTION), "only where all documents were placed by a first pass"
    assert (one.computed, one.charged) == (other.computed, other.charged)
    assert [a.tolist() for a in one.recomputed] == [b.tolist() for b in other.recomputed]
    assert max(float((a - b).abs().max()) for a, b in zip(kv, through_kv, strict=True)) <= SAME
    assert float((logits - through_logits).abs().max()) <= SAME


@pytest.mark.parametrize("through", [False, True])
def test_a_border_of_batches_inside_a_document_changes_nothing(lab, model, monkeypatch, through):
    """The dense canvas has one batch for all rows, and the documents of the paged canvas are corrected as there."""
    policy, given = RecomputePolicy(strategy="union", correction="shift"), CASES["documents"]
    result, kv, logits = dense(model, given, policy)
    border = int((result.recomputed[-1] < given.stored[-1].placement.at + SINKS).sum())
    size = (border + len(result.recomputed[-1])) // 2  # A batch of so many rows would end inside the last document.
    cuts, batches = [], PagedCanvas.batches
    monkeypatch.setattr(
        PagedCanvas, "batches", lambda self, rows: [cuts.append(batches(self, rows)), batches(self, rows)][1]
    )
    _, paged_kv, paged_logits = paged(lab, model, given, policy, BatchRows(size, size if through else 0))
    assert slice(0, border) in [cut for cut in cuts if len(cut) > 1][-1]
    assert max(float((a - b).abs().max()) for a, b in zip(kv, paged_kv, strict=True)) <= SAME
    assert float((logits - paged_logits[: len(logits)]).abs().max()) <= SAME


@pytest.mark.parametrize("through", [0, ROWS])
@pytest.mark.parametrize("correction", ["none", "shift"])
def test_of_the_last_layer_a_blend_computes_keys_and_values_only(lab, model, monkeypatch, correction, through):
    policy, finished = RecomputePolicy(strategy="union", correction=correction), set()
    layers = model_of(lab).model.layers
    hooks = [layer.mlp.register_forward_hook(lambda *_, i=i: finished.add(i)) for i, layer in enumerate(layers)]
    monkeypatch.setitem(globals(), "last_logits", lambda *_: None)
    paged(lab, model, CASES["documents"], policy, BatchRows(ROWS, through))
    for hook in hooks:
        hook.remove()
    assert finished == set(range(len(layers) - 1))


def test_the_cases_differ_from_full_prefill_and_from_each_other(model):
    """Without this, two canvases that both computed everything would agree as well."""
    for given in CASES.values():
        wanted = computed(model, given.tokens)
        found = {name: dense(model, given, policy)[1] for name, policy in POLICIES.items() if "0.15" in name}
        far = {
            name: max(float((a - b).abs().max()) for a, b in zip(kv, wanted, strict=True)) for name, kv in found.items()
        }
        assert far.pop("all 0.15") <= SAME
        assert min(far.values()) > 10 * SAME
