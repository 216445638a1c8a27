"""The paged canvas over pages as vLLM's GPU backends have them, with the kernels in Triton and with those in torch."""

import sys
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from pages import pages_of
from part_memory import PartMemory
from test_staging import Machine, Stream, Task
from watching import READS, MetaBlender, NoWaits, kernels_without_values, watch_kernels, watched

pytest.importorskip("vllm")

from lmc.blend.blender import Blender, BlendInput
from lmc.blend.kernels.choice import TORCH, kernels_of
from lmc.blend.layer_attention import LayerAttention
from lmc.blend.rope import Rotation
from lmc.blend.strategies import STRATEGIES, RecomputePolicy
from lmc.connectors.vllm import vllm_api
from lmc.connectors.vllm.messages import BlendJob
from lmc.connectors.vllm.worker import stored_parts
from lmc.connectors.vllm.worker.canvas import BatchRows, PagedCanvas
from lmc.connectors.vllm.worker.draft_model import NO_DRAFTS
from lmc.connectors.vllm.worker.layer_calls import OwnLayers
from lmc.connectors.vllm.worker.memory import memory_for
from lmc.connectors.vllm.worker.native import MOST_RUNS, NativeLayers
from lmc.connectors.vllm.worker.paged import TokenAccess
from lmc.engine import Piece
from lmc.errors import UnsupportedModel
from lmc.keys import ChunkKey, RecordKind
from lmc.shapes import KVShape

ROOT = Path(__file__).parents[2]
HEADS, GROUP, DIM, BLOCK, LENGTH = 2, 2, 32, 16, 90
TABLES = (3, 1, 4, 0, 2, 5), (2, 4, 0, 5, 3, 1)
SIZE = 12  # of a document
FUNCTIONS = 240  # that the host calls for a layer of a pass; twice as many for the first layer
LAUNCHES, WEIGHTS = 14, 20  # in a layer of a pass, and where the weights of a correction are computed
SOURCES = tuple(str(ROOT / folder) for folder in ("lmc", "blend", "connectors"))
QUERIES = HEADS * GROUP
HIDDEN = QUERIES * DIM


FP8, SCALES = torch.float8_e4m3fn, (0.05, 0.02)  # of keys and values in a quantised cache


def written(attention, keys, values, cache, slots):
    """As the backend's writer does it."""
    if cache.dtype is torch.uint8:
        largest, halves = torch.finfo(FP8).max, zip((keys, values), SCALES, strict=True)
        keys, values = ((half / scale).clamp(-largest, largest).to(FP8) for half, scale in halves)
        cache = cache.view(FP8)
    cache[slots // cache.shape[2], :, slots % cache.shape[2]] = torch.cat((keys, values), dim=-1)


class Attention:
    """The parts of vLLM's attention module that lmc uses. Its own kernel knows runs of consecutive rows only."""

    head_size, layer_name, kv_cache_dtype = DIM, "layer", "fp8_e4m3"
    _k_scale_float, _v_scale_float = SCALES
    _k_scale, _v_scale = map(torch.tensor, SCALES)
    attn_backend = SimpleNamespace(get_name=lambda: "FLASH_ATTN")

    def __init__(self, counting):
        self.impl, self._counting = Implementation(), counting

    def __call__(self, query, key, value):
        query, key, value = (
            one.reshape(-1, heads, DIM) for one, heads in ((query, QUERIES), (key, HEADS), (value, HEADS))
        )
        output = torch.empty_like(query)
        with self._counting(True):
            self.impl.forward(self, query, key, value, None, None, output)
        return output.flatten(1)


class Implementation:
    """What writes and reads the pages."""

    do_kv_cache_update = staticmethod(written)

    def forward(self, *given):
        raise AssertionError("the engine's own attention was called for scattered rows")


class Layer(torch.nn.Module):
    """A decoder layer without anything but projections and attention. What lmc does in its attention is counted."""

    def __init__(self, counting) -> None:
        super().__init__()
        self.attention, self._counting = Attention(counting), counting
        self.weights = torch.randn(HIDDEN, HIDDEN + 2 * HEADS * DIM) / HIDDEN**0.5

    def forward(self, positions, hidden_states, residual):
        states = hidden_states
        with self._counting(False):
            projected = (states @ self.weights).split([HIDDEN, HEADS * DIM, HEADS * DIM], dim=-1)
            return states + self.attention(*projected), states if residual is None else residual


@dataclass(frozen=True)
class Spec:
    """vLLM's description of the cache of a layer."""

    block_size: int


class FewLayers(NativeLayers):
    """Three layers over pages, in which the engine's blocks are `ratio` of the kernel's; all have one block table."""

    def __init__(self, kernels, ratio: int, length: int, counting, *, without_values: bool, quantised: bool) -> None:
        torch.manual_seed(0)
        caches = [pages_of(HEADS, DIM, BLOCK, length + 60, torch.float32) for _ in range(3)]
        caches = [torch.cat((one.keys, one.values), dim=-1) for one in caches]
        if quantised:
            caches = [cache.to(FP8).view(torch.uint8) for cache in caches]
        self._layers, embedding = [Layer(counting) for _ in caches], torch.randn(100, HIDDEN)
        if without_values:
            caches, embedding = [cache.to("meta") for cache in caches], embedding.to("meta")
            for layer in self._layers:
                layer.weights = layer.weights.to("meta")
        self.attention = [layer.attention for layer in self._layers]
        self.access = [
            TokenAccess(one, cache, kernels, torch.float32) for one, cache in zip(self.attention, caches, strict=True)
        ]
        self.kernels, self.device = self.access[0].kernels, caches[0].device
        self.block_size, self._ratio, self.most_runs = BLOCK * ratio, ratio, 1 << 30
        angles = (torch.arange(2 * length)[:, None] * 0.8 ** torch.arange(DIM // 2)).to(self.device)
        rotation = Rotation(angles.cos(), angles.sin())
        self.attentions = [LayerAttention(scale=DIM**-0.5, rotation=rotation)] * len(caches)
        self.shape = KVShape(layers=3, kv_heads=HEADS, head_dim=DIM, dtype=FP8 if quantised else torch.float32)
        self.shapes, self._kinds, self.computes = [self.shape] * 3, [None] * 3, torch.float32
        self.group_count, self.group_of = 1, [0] * 3
        self._calls, self._draft_model, self.drafts = OwnLayers([[one] for one in self._layers]), NO_DRAFTS, 0
        self._adapters, self._aux_layers = None, ()
        self._config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_batched_tokens=length))

        def model(tokens: torch.Tensor, positions: torch.Tensor, intermediate_tensors: None) -> None:
            """As the engine has compiled it: no layer is called by lmc."""
            with counting(False):
                states, residual = embedding[tokens.long()], None
                for layer in self._layers:
                    states, residual = layer(positions, states, residual)

        self._model, self._text = model, SimpleNamespace(hidden_size=HIDDEN)

    def _context(self, count, **options):
        return nullcontext()


def layers_over(
    kernels,
    ratio: int,
    length: int = LENGTH,
    counting=lambda on: nullcontext(),
    *,
    without_values=False,
    quantised=False,
) -> FewLayers:
    return FewLayers(kernels, ratio, length, counting, without_values=without_values, quantised=quantised)


def outcome(
    kernels, ratio: int, *, ahead: bool = True, tables: int = 1, quantised: bool = False, **canvas_has
) -> list[torch.Tensor]:
    """Place two documents, one of them without its first tokens, run scattered rows, and read everything.

    With `ahead`, the parts of the next layer have always arrived.
    """
    layers = layers_over(kernels, ratio, quantised=quantised)
    if tables == 2:  # The layer in the middle has a table of its own.
        layers.group_count, layers.group_of = 2, [0, 1, 0]
    parts = torch.randn(3, 2, 2, 30, HEADS, DIM)  # [L, document, K, T, H, D]
    parts = (parts / SCALES[0]).to(FP8) if quantised else parts
    pieces = [
        Piece(kind=RecordKind.DOCUMENT, key=ChunkKey(b""), tokens=tokens, at=at, first=first, skip=skip, stored=30,
              place=None, exact=False)
        for tokens, at, first, skip in ((30, 4, 0, 0), (22, 40, 8, 8))
    ]  # fmt: skip
    job = BlendJob(
        request="request", tokens=tuple(range(LENGTH)),
        tables=tuple(table[: -(-LENGTH // layers.block_size)] for table in TABLES[:tables]), stop=LENGTH,
        policy=RecomputePolicy(strategy="all"),
        documents=tuple(replace(piece, slot=i) for i, piece in enumerate(pieces)),
    )  # fmt: skip
    canvas = PagedCanvas(
        layers,
        job,
        BatchRows(LENGTH),
        PartMemory(lambda slot, layer: parts[layer, slot].flatten().view(torch.uint8)),
        lambda _: ahead,
        **canvas_has,
    )
    everything = canvas.slots(torch.arange(LENGTH))
    rows, found = canvas.begin(torch.tensor([0, 1, 6, 9, 10, 39, 44, 80, LENGTH - 1])), []
    canvas.uploads.send()
    for layer in range(3):
        canvas.write(layer, everything[layer], *torch.randn(2, LENGTH, HEADS, DIM))
    for layer in range(3):
        canvas.place(layer)
        found += [one.clone() for one in canvas.read(layer, everything[layer])]
        (batch,) = canvas.batches(rows)
        own = None if kernels.in_pages else attending(canvas, layer, rows.positions)
        canvas.run(layer, rows, batch, own if layer < 2 else None)
        found += [one.clone() for one in canvas.read(layer, everything[layer])]
    return [*found, rows.states]


def attending(canvas, layer, positions):
    """Attention by the kernels in torch, as the engine's own would be."""
    nothing = torch.empty(0, dtype=torch.long)

    def attention(query, write, own):
        write()
        return canvas.kernels.attend(query, canvas.context(layer, LENGTH, nothing), positions, canvas.attentions[layer])

    return attention


@pytest.mark.parametrize("ratio", [1, 2])
def test_both_kinds_of_kernels_leave_the_same(monkeypatch, ratio):
    monkeypatch.setenv("LMC_KERNELS", "triton")
    triton = kernels_of(torch.device("cpu"))
    assert triton.in_pages
    for one, other in zip(outcome(triton, ratio), outcome(TORCH, ratio), strict=True):
        assert torch.allclose(one, other, atol=1e-4)


@pytest.mark.parametrize("staged", [False, True])
def test_both_kinds_of_kernels_leave_the_same_in_a_quantised_cache(monkeypatch, staged):
    """A number may be rounded to its neighbour, because torch's kernels round a rotated key twice."""
    machine = Machine(0)
    machine.model = machine.current = AtOnce(machine)
    monkeypatch.setenv("LMC_KERNELS", "triton")
    triton = kernels_of(torch.device("cpu"), quantised=True)
    if staged:
        machine.installed(monkeypatch)
        triton = triton._replace(stage=TORCH.stage)
    found = outcome(triton, 1, quantised=True, **({"stream": machine.copies} if staged else {}))
    for one, other in zip(found, outcome(TORCH, 1, quantised=True), strict=True):
        assert (one - other).abs().max() <= other.abs().max() / 8
        assert (one - other).abs().mean() <= 1e-3 * other.abs().mean()


@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_layers_with_a_block_table_of_their_own_leave_the_same(monkeypatch, kernels):
    monkeypatch.setenv("LMC_KERNELS", kernels)
    found = outcome(kernels_of(torch.device("cpu")), 1, tables=2)
    for one, other in zip(found, outcome(TORCH, 1), strict=True):
        assert torch.allclose(one, other, atol=1e-4)


class AtOnce(Stream):
    """The model's stream, which does at once what it is given, as the kernels do here. It waits for late copies."""

    def record_event(self):
        return SimpleNamespace(over=True)

    def wait_event(self, event) -> None:
        for _ in range(100):
            if not event.over:
                self.machine.go_on(1)
        assert event.over, "nothing that was issued lets this event come"


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("late", [False, True])
def test_parts_that_are_copied_on_a_stream_of_their_own_are_placed_as_others_are(monkeypatch, late, ahead):
    """Copies are done as soon, or as late, as the waiting of streams allows."""
    machine, staged = Machine(0), []
    machine.installed(monkeypatch)
    machine.model = machine.current = AtOnce(machine)
    monkeypatch.setenv("LMC_KERNELS", "triton")

    def stage(parts, into) -> None:
        staged.append(machine.current)
        machine.issue(machine.current, Task(lambda: TORCH.stage(parts, into)))
        if not late:
            machine.finish()

    kernels = kernels_of(torch.device("cpu"))._replace(stage=stage)
    found = outcome(kernels, 1, stream=machine.copies, ahead=ahead)
    assert staged == [machine.copies] * 3
    for one, other in zip(found, outcome(TORCH, 1), strict=True):
        assert torch.allclose(one, other, atol=1e-4)


@pytest.mark.parametrize(("ahead", "wanted"), [(True, "f0 b1 b2 f1 b2 f2"), (False, "f0 f1 f2")])
def test_exact_pages_are_waited_for_layer_by_layer(monkeypatch, ahead, wanted):
    """Those of the next two layers are loaded when the ones of this layer are there, if they have arrived."""
    asked: list[str] = []
    loads = SimpleNamespace(
        cost=1, begin=lambda layer: asked.append(f"b{layer}"), finish=lambda layer: asked.append(f"f{layer}")
    )
    outcome(TORCH, 1, loads=loads, ahead=ahead)
    assert " ".join(asked) == wanted


def length_of(documents: int) -> int:
    """The tokens of a prompt with a beginning, so many documents and a question."""
    return 5 + documents * (SIZE + 2) + 6


def blend_of(
    kind: type[PagedCanvas],
    layers: NativeLayers,
    documents: int,
    policy: dict[str, object],
    *,
    through: bool,
    rows: int | None = None,
    memory: type[PartMemory] = PartMemory,
    **canvas_has,
) -> tuple[PagedCanvas, BlendInput, RecomputePolicy]:
    """A canvas for a prompt with documents, whose `rows` go in one call, and what a blender is to do with it."""
    length, parts = length_of(documents), torch.randn(3, documents, 2, SIZE, HEADS, DIM)  # [L, document, K, T, H, D]
    pieces = [
        Piece.whole(RecordKind.DOCUMENT, ChunkKey(b""), SIZE, 5 + i * (SIZE + 2), 0, None, exact=False)
        for i in range(documents)
    ]
    job = BlendJob(
        request="request", tokens=tuple(torch.arange(length).remainder(100).tolist()),
        tables=(tuple(range(-(-length // BLOCK)))[::-1],), stop=length, policy=RecomputePolicy(**policy),
        documents=tuple(replace(piece, slot=i) for i, piece in enumerate(pieces)),
    )  # fmt: skip
    canvas = kind(
        layers, job, BatchRows(rows or length, (rows or length) if through else 0),
        memory(lambda slot, layer: parts[layer, slot].flatten().view(torch.uint8)), lambda _: True, **canvas_has,
    )  # fmt: skip
    return canvas, BlendInput(length=length, stop=length, question=length - 6, placements=pieces), job.policy


class MetaCanvas(PagedCanvas):
    """A canvas on the meta device, in which something is planted after each layer."""

    planted = staticmethod(lambda keys: None)

    def run(self, layer, rows, batch, attention=None):
        super().run(layer, rows, batch, attention)
        self.planted(self.paged(layer).keys[0])

    def run_through(self, rows, batch, attention_of):
        super().run_through(rows, batch, attention_of)
        self.planted(self.paged(0).keys[0])


def blended_without_values(monkeypatch, policy, *, through: bool) -> tuple[set[int], int, int]:
    """Blend on the meta device, and return the layers that ran, and the numbers of waits and of uploads."""
    kernels_without_values(monkeypatch)
    monkeypatch.setattr(
        "lmc.connectors.vllm.worker.tensor_parallel.get_tp_group", lambda: SimpleNamespace(world_size=1)
    )
    layers = layers_over(kernels_of(torch.device("cpu")), 1, length_of(3), without_values=True)
    with torch.inference_mode(), NoWaits() as watch:
        canvas, given, policy = blend_of(MetaCanvas, layers, 3, policy, through=through)
        blender = MetaBlender(canvas, given, policy)
        return {done.layer for done in blender.slices()}, blender.waits, watch.uploads


CORRECTED = {"strategy": "union", "ratio": 0.3, "correction": "shift"}


@pytest.mark.parametrize(("strategy", "waits"), [("union", 1), ("query", 1), ("head", 0)])
@pytest.mark.parametrize("through", [False, True])
def test_a_blend_waits_for_scores_and_for_nothing_else(monkeypatch, strategy, waits, through):
    """On the meta device tensors have shapes but no values, so that reading one fails. A pass begins with an upload."""
    found = blended_without_values(monkeypatch, CORRECTED | {"strategy": strategy}, through=through)
    assert found == ({0, 1, 2}, waits, waits + 1)


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("through", [False, True])
def test_a_value_that_is_read_behind_a_layer_is_found(monkeypatch, read, through):
    monkeypatch.setattr(MetaCanvas, "planted", staticmethod(READS[read]))
    with pytest.raises((NotImplementedError, RuntimeError), match=r"[Mm]eta"):
        blended_without_values(monkeypatch, CORRECTED, through=through)


@pytest.mark.parametrize("documents", [1, 3, 9, 20])
@pytest.mark.parametrize(
    "policy",
    [{"strategy": "union", "ratio": 0.3, "correction": "shift"}, {"strategy": "query", "ratio": 0.3}],
    ids=lambda one: one["strategy"],
)
@pytest.mark.parametrize("through", [False, True])
def test_nothing_waits_and_launches_are_few(monkeypatch, policy, documents, through):
    """Layer by layer, and in a second pass through the compiled model, which is one slice."""
    watch = watch_kernels(monkeypatch)
    monkeypatch.setattr(
        "lmc.connectors.vllm.worker.tensor_parallel.get_tp_group", lambda: SimpleNamespace(world_size=1)
    )
    length = length_of(documents)
    layers = layers_over(kernels_of(torch.device("cpu")), 1, length, watch.set)
    canvas, given, policy = blend_of(PagedCanvas, layers, documents, policy, through=through)
    assert canvas.compiled == through
    run_through, compiled = PagedCanvas.run_through, []

    def noted(canvas, *given):
        watch.take()  # Its rows were described before.
        run_through(canvas, *given)
        compiled.append(watch.take())

    monkeypatch.setattr(PagedCanvas, "run_through", noted)
    for layer, launched, waited in watched(watch, Blender(canvas, given, policy).slices()):
        if layer:  # Rows are chosen and described before the first one.
            assert not waited, launched
            assert len(launched) <= (WEIGHTS if "_alike" in launched else LAUNCHES), launched
    assert len(compiled) == through
    for launched, waited in compiled:
        assert not waited, launched
        assert "_attend" in launched
        assert len(launched) <= 2 * LAUNCHES + WEIGHTS + 2, "all three layers, and the tokens and positions once"


class PageLocked(PartMemory):
    """A memory that a GPU accesses by itself."""

    def addresses(self, slots, layer):
        return np.array(slots, np.int64)


@pytest.mark.parametrize("documents", [1, 8, 40])
def test_the_host_calls_few_functions_for_each_layer(monkeypatch, documents):
    """A GPU waits while the host works: 8 documents of 1,024 tokens take the bus 0.7 ms a layer.

    Each call of lmc's functions, and of torch and numpy by these, takes about a microsecond or a few. Their number does
    not depend on the documents.
    """
    kernels_without_values(monkeypatch)
    machine = Machine(0)
    machine.installed(monkeypatch)
    monkeypatch.setattr(stored_parts, "submit_of", lambda _: lambda copies: None)
    monkeypatch.setattr(
        "lmc.connectors.vllm.worker.tensor_parallel.get_tp_group", lambda: SimpleNamespace(world_size=1)
    )
    layers = layers_over(kernels_of(torch.device("cpu")), 1, length_of(documents), without_values=True)
    has = {"through": False, "memory": PageLocked, "stream": machine.copies}
    canvas, given, policy = blend_of(MetaCanvas, layers, documents, CORRECTED, **has)
    calls = [0]  # of each slice, the last one under way

    def count(frame, event, _):
        calls[-1] += event in ("call", "c_call") and frame.f_code.co_filename.startswith(SOURCES)

    of_passes: list[list[int]] = []  # by layer
    with torch.inference_mode():
        slices = MetaBlender(canvas, given, policy).slices()
        while True:
            sys.setprofile(count)
            try:
                done = next(slices, None)
            finally:
                sys.setprofile(None)
            if done is None:
                break
            if done.layer == 0 and (not of_passes or len(of_passes[-1]) == 3):
                of_passes.append([])
            if done.layer == len(of_passes[-1]):
                of_passes[-1].append(0)
            of_passes[-1][-1] += calls[-1]
            calls.append(0)
    assert len(of_passes) == 2
    for layers_of_pass in of_passes:
        assert all(count <= FUNCTIONS for count in layers_of_pass[1:]), of_passes
        assert layers_of_pass[0] <= 2 * FUNCTIONS, of_passes


def test_the_estimate_of_memory_has_the_weights_of_every_document(monkeypatch):
    """Per document two matrices of 64 by 64 numbers, and a mean key: 40 documents of an 8B Llama take 1.4 MiB."""

    def estimated(documents: int, tokens: int) -> int:
        pieces = [
            Piece.whole(RecordKind.DOCUMENT, ChunkKey(b""), tokens, i * tokens, 0, None, exact=False)
            for i in range(documents)
        ]
        job = BlendJob(
            request="request", tokens=(0,) * LENGTH, tables=((0,),), stop=LENGTH,
            policy=RecomputePolicy(strategy="all"),
            documents=tuple(replace(piece, slot=i) for i, piece in enumerate(pieces)),
        )  # fmt: skip
        return memory_for(layers, job)

    layers = layers_over(TORCH, 1)
    assert estimated(8, 10) - estimated(1, 80) == 7 * (2 * 64**2 + HEADS * DIM) * 4


def test_rows_of_a_long_prompt_share_one_block_table(monkeypatch):
    """A table for each run of 8,192 rows in a prompt of 128k tokens would take 268 MB a batch, of several at once."""
    monkeypatch.setenv("LMC_KERNELS", "triton")
    layers, length = layers_over(kernels_of(torch.device("cpu")), 1), 40 * BLOCK
    positions, blocks = torch.arange(1, length, 2), torch.arange(40)
    rows = layers.begin(torch.arange(length), positions, [blocks], 100)
    tables = [batch.common[0].block_table_tensor for batch in rows.batches]
    assert [len(table) for table in tables] == [100, 100, 100, 20]
    assert all(torch.equal(row, blocks[: len(row)].int()) for table in tables for row in table)
    taken = sum((table[0] if table.stride(0) == 0 else table).nbytes for table in tables)
    assert taken <= len(tables) * len(blocks) * 4


@pytest.mark.parametrize(
    ("together", "ends"),
    [
        ([], [10, 20, 30]),
        ([(2, 8), (8, 13), (14, 22), (22, 28)], [8, 14, 22, 30]),  # a border in each of three groups
        ([(2, 10), (10, 20)], [10, 20, 30]),  # borders between groups
        ([(5, 12)], [5, 15, 25, 30]),  # half of the batch remains
        ([(4, 12), (18, 24)], [10, 18, 28, 30]),  # less than half would remain
        ([(0, 30)], [10, 20, 30]),  # a group that is longer than a batch
    ],
)
def test_a_batch_ends_before_a_group_that_its_end_would_split(together, ends):
    layers, positions = layers_over(TORCH, 1), torch.arange(0, 90, 3)
    rows = layers.begin(torch.arange(90), positions, [torch.arange(6)], 10, together=together)
    assert [batch.rows.stop for batch in rows.batches] == ends
    assert [batch.rows.start for batch in rows.batches] == [0, *ends[:-1]]


def test_a_batch_has_as_many_runs_as_the_backend_takes():
    layers = layers_over(TORCH, 1)
    layers.most_runs = 2
    positions = torch.tensor([0, 1, 4, 5, 6, 10, 12, 13, 14, 15, 16])
    rows = layers.begin(torch.arange(90), positions, [torch.arange(6)], 4)
    assert [batch.rows.stop for batch in rows.batches] == [4, 6, 10, 11]


@pytest.mark.parametrize("through", [False, True])
def test_a_border_of_batches_leaves_a_document_its_correction(monkeypatch, through):
    """A document is corrected by its rows in one batch. With a border inside it, its other rows were not used."""
    monkeypatch.setenv("LMC_KERNELS", "triton")
    monkeypatch.setattr(
        "lmc.connectors.vllm.worker.tensor_parallel.get_tp_group", lambda: SimpleNamespace(world_size=1)
    )
    # Three rows of each document are computed, and after them the two of a separator.
    chosen = torch.tensor([document * SIZE + token for document in range(4) for token in (3, 5, 7)])
    monkeypatch.setitem(STRATEGIES, "union", lambda evidence, count: chosen)
    found = []
    for size, wanted in ((100, [slice(0, 26)]), (16, [slice(0, 15), slice(15, 26)])):
        torch.manual_seed(0)
        layers = layers_over(kernels_of(torch.device("cpu")), 1, length_of(4))
        canvas, given, policy = blend_of(PagedCanvas, layers, 4, CORRECTED, through=through, rows=size)
        cut, cuts = canvas.batches, []
        monkeypatch.setattr(canvas, "batches", lambda rows, cut=cut, cuts=cuts: [cuts.append(cut(rows)), cut(rows)][1])
        Blender(canvas, given, policy).run()
        assert cuts[-1] == wanted
        everything = canvas.slots(torch.arange(given.length))
        canvas.uploads.send()
        found += [[half.clone() for layer in range(3) for half in canvas.read(layer, everything[layer])]]
    for whole, in_two in zip(*found, strict=True):
        torch.testing.assert_close(in_two, whole)


def test_keys_that_tell_the_rotation_are_not_rounded_by_the_cache():
    """Rounded to 8 bits, two keys differ by more than a wrong rotation may make of keys in 16 bits."""
    found, before = [], []
    for quantised in (False, True):
        layers = layers_over(TORCH, 1, quantised=quantised)
        before.append(layers.access[0].pages.keys.clone())
        found.append(layers._keys_at(0, torch.tensor([0, 7])))
        assert torch.equal(layers.access[0].pages.keys.float(), before[-1].float())
        assert "scatter" not in vars(layers.access[0])
    assert found[0].shape == (2, HEADS, DIM)
    assert torch.equal(*found)


def states_of(monkeypatch, kernels: str, **attention_has) -> torch.Tensor:
    """The states behind the first layer, of all rows of a prompt in one run."""
    for name, one in attention_has.items():
        monkeypatch.setattr(Attention, name, one, raising=False)
    monkeypatch.setenv("LMC_KERNELS", kernels)
    layers, positions = layers_over(kernels_of(torch.device("cpu")), 1), torch.arange(LENGTH)
    rows = layers.begin(positions, positions, [torch.tensor(TABLES[0])], LENGTH)
    (batch,) = rows.batches
    assert batch.common[0].num_reqs == 1
    layers.run(0, rows, batch)
    return rows.states


def test_the_engine_does_not_attend_if_it_divides_its_output(monkeypatch):
    """After CUDA graphs with a quantised output, FlashInfer divides by its scale in each call without being told to."""
    states = [states_of(monkeypatch, kernels, _o_scale_float=0.01) for kernels in ("triton", "torch")]
    assert torch.allclose(*states, atol=1e-4)


@pytest.mark.parametrize("option", ["output_scale", "output_block_scale"])
def test_a_quantised_output_is_refused(monkeypatch, option):
    """A compiled model may have it, and is then not called: lmc would have written numbers without their scale."""

    def call(attention, query, key, value):
        given = (one.reshape(len(query), -1, DIM) for one in (query, key, value))
        attention.impl.forward(attention, *given, None, None, torch.empty(0), **{option: torch.ones(1)})

    with pytest.raises(UnsupportedModel, match="the model's attention quantises its output"):
        states_of(monkeypatch, "triton", __call__=call)


@pytest.mark.parametrize(("kernels", "requests"), [("triton", 1), ("torch", MOST_RUNS)])
def test_the_backend_has_buffers_for_the_runs_that_go_to_it_and_no_more(monkeypatch, kernels, requests):
    """FlashInfer's builder takes 4 bytes for each request and page: 4096 of 128k tokens are 134 MB."""
    monkeypatch.setenv("LMC_KERNELS", kernels)
    made, scheduler = [], SimpleNamespace(max_num_seqs=256, max_num_batched_tokens=64)

    def builder(spec, names, own, device):
        made.append(own)

    backend = type("Backend", (), {"get_name": lambda: "FLASHINFER", "get_builder_cls": lambda: builder})
    for name, one in (
        ("Attention", Attention),
        ("FullAttentionSpec", Spec),
        ("set_current_vllm_config", nullcontext),
        ("set_forward_context", lambda **named: nullcontext()),
        ("CUDAGraphMode", SimpleNamespace(NONE="none")),
    ):
        monkeypatch.setitem(vars(vllm_api), name, one)
    for name, one in (("attn_backend", backend), ("sliding_window", None)):
        monkeypatch.setattr(Attention, name, one, raising=False)
    monkeypatch.setattr(Implementation, "scale", 1.0, raising=False)
    layer, embedding = Layer(lambda on: nullcontext()), torch.randn(100, HIDDEN)
    monkeypatch.setattr(Layer, "modules", lambda self: [self.attention])

    class Model(torch.nn.Module):
        """A model of one layer."""

        config = SimpleNamespace()

        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList([layer])

        def forward(self, tokens, positions, intermediate_tensors):
            return layer(positions, embedding[tokens], None)

    config = SimpleNamespace(
        parallel_config=SimpleNamespace(pipeline_parallel_size=1, data_parallel_size=1),
        model_config=SimpleNamespace(
            max_model_len=10, dtype=torch.float32, hf_config=SimpleNamespace(), hf_text_config=SimpleNamespace()
        ),
        scheduler_config=scheduler, compilation_config=SimpleNamespace(cudagraph_mode="full"),
    )  # fmt: skip
    group = SimpleNamespace(kv_cache_spec=Spec(BLOCK), layer_names=["layer"])
    caches = {"layer": torch.zeros(4, HEADS, BLOCK, 2 * DIM)}
    layers = NativeLayers(Model(), config, SimpleNamespace(kv_cache_groups=[group], num_blocks=4), caches)
    assert layers.kernels.in_pages == (kernels == "triton")
    assert [one.scheduler_config.max_num_seqs for one in made] == [requests]
    assert (scheduler.max_num_seqs, made[0].compilation_config.cudagraph_mode) == (256, "none")
