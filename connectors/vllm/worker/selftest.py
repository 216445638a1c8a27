"""The self-test for vLLM, which runs once at start in unused blocks."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch.nn.functional import pad

from lmc.blend.canvas import KV
from lmc.blend.selftest import (
    DOCUMENT_TOKENS,
    QUESTION_SIZE,
    prove,
    prove_compiled,
    random_prompt,
    rehearse,
)
from lmc.blend.strategies import RecomputePolicy
from lmc.connectors.vllm.messages import BlendJob, Table
from lmc.connectors.vllm.worker.canvas import BatchRows, PagedCanvas, prefill_alone
from lmc.connectors.vllm.worker.memory import allocated, make_room
from lmc.connectors.vllm.worker.native import NativeLayers
from lmc.connectors.vllm.worker.tensor_parallel import on_all_ranks, several_ranks
from lmc.copies import Addresses
from lmc.engine import Piece
from lmc.errors import NoMemory, UnsupportedModel
from lmc.keys import ChunkKey, RecordKind

log = logging.getLogger(__name__)

FIRST_SHARE = 8  # An eighth of a full batch is run before the full batch.


def prove_model(
    layers: NativeLayers, vocabulary: int, blocks: int, rows: int, stream: "torch.cuda.Stream | None" = None
) -> bool:
    """Raise `UnsupportedModel` if lmc writes different keys and values to the pages than the model's own forward pass.

    Each call of a layer or of the model has at most `rows` rows. On a GPU, a stored document is copied on `stream` from
    page-locked memory, as in a blend. Returns whether the model can also be called in its compiled form.
    """
    reach = max(attention.reach for attention in layers.attentions)
    exam = Exam(layers, random_prompt(vocabulary, reach, layers.longest, layers.device), rows, stream)
    length = len(exam.tokens)
    if blocks <= max(map(max, exam.tables)):
        raise UnsupportedModel(f"the KV cache has only {blocks} blocks, and the self-test needs more")
    start = length - DOCUMENT_TOKENS
    piece = Piece.whole(RecordKind.DOCUMENT, ChunkKey(b""), DOCUMENT_TOKENS, start, 0, None, exact=False)
    with torch.inference_mode():
        try:
            whole, in_two = (exam.prefill(exam.tokens, stops) for stops in ([length], [start, length]))
            repeated = exam.prefill(exam.tokens[:1] * length, [length])
            alone = exam.prefill_alone(exam.tokens[start:])[0]
            stored = layers.access[0].quantised(alone)
            part = torch.cat([half.flatten() for half in stored]).view(torch.uint8)
            # Kernels are compiled with this part also for layers whose parts are longer.
            part = pad(part, (0, layers.shape.part_bytes(DOCUMENT_TOKENS) - len(part)))
            if stream is not None:
                part = part.cpu().pin_memory()
            canvas = exam.canvas()
            _agree(lambda: prove(canvas, exam.canvas(piece, part), whole, in_two, repeated))
            if layers.device.type == "cuda":  # Nothing is compiled for a CPU.
                moved = replace(piece, tokens=piece.tokens - QUESTION_SIZE)
                rehearse(lambda: exam.canvas(moved, part), moved, length)
            return layers.compiled and on_all_ranks(good=_as_compiled(canvas, whole, in_two))
        finally:
            _clear(layers, exam.tables)


def _agree(test: Callable[[], None]) -> None:
    """Raise `UnsupportedModel` on every rank if a test fails on one rank, so that no rank waits for the failed rank."""
    failed = UnsupportedModel("the self-test failed on another rank")
    try:
        test()
        passed = True
    except UnsupportedModel as error:
        passed, failed = False, error
    if not on_all_ranks(good=passed):
        raise failed


def _as_compiled(canvas: PagedCanvas, whole: list[KV], in_two: list[KV]) -> bool:
    try:
        prove_compiled(canvas, whole, in_two)
        return True
    except UnsupportedModel as error:
        log.warning("lmc will call the model layer by layer, which is slower than its compiled form: %s", error)
    except Exception:
        log.exception("lmc will call the model layer by layer, because a call of its compiled form failed")
    return False


def run_full_batch(layers: NativeLayers, rows: int) -> int:
    """Run layers with the largest batch that a blend uses, so that a lack of memory shows at the start.

    With several ranks, a smaller batch is run first. From its memory the ranks estimate the memory of the full batch,
    and agree whether it fits. Otherwise an error on one rank in the middle of a layer would leave the other ranks
    waiting. Returns the bytes that the full batch took on a GPU. Raises `UnsupportedModel` if a rank lacks the memory;
    with several ranks, it is raised on every rank.
    """
    try:
        if several_ranks():
            make_room(FIRST_SHARE * _bytes_of(layers, rows // FIRST_SHARE), layers.device, f"a batch of {rows} tokens")
        return _bytes_of(layers, rows)
    except (torch.OutOfMemoryError, NoMemory) as error:
        hint = "lower --max-num-batched-tokens or --gpu-memory-utilization"
        raise UnsupportedModel(f"a batch of {rows} tokens does not fit into the free memory: {hint}") from error


def _bytes_of(layers: NativeLayers, rows: int) -> int:
    """Run rows through one layer of each kind, and return the bytes that this took on a GPU.

    All rows use block 1, which is unused.
    """
    positions = torch.arange(rows + 1)
    table, scattered = torch.ones_like(positions[:: layers.block_size]), positions[positions != 1]
    cuda, before = layers.device.type == "cuda", allocated(layers.device)
    try:
        if cuda:
            torch.cuda.reset_peak_memory_stats(layers.device)
        with torch.inference_mode():
            batches = layers.begin(torch.zeros_like(positions), scattered, [table] * layers.group_count, rows)
            for layer in layers.samples:
                for batch in batches.batches:
                    layers.run(layer, batches, batch)
            for batch in batches.batches:
                layers.draft(batches, batch)
    finally:
        _clear(layers, [(1,)] * layers.group_count)
    return torch.cuda.max_memory_allocated(layers.device) - before if cuda else 0


class _OnePart:
    """A memory whose part is the same in all slots and layers."""

    def __init__(self, part: torch.Tensor) -> None:
        self._part = part

    def part(self, slot: int, layer: int) -> torch.Tensor:
        return self._part

    def addresses(self, slots: Sequence[int], layer: int) -> Addresses | None:
        return np.full(len(slots), self._part.data_ptr(), np.int64) if self._part.is_pinned() else None


class Exam:
    """The self-test's prompt in unused blocks."""

    def __init__(
        self, layers: NativeLayers, tokens: list[int], rows: int, stream: "torch.cuda.Stream | None" = None
    ) -> None:
        self._layers, self.tokens, self._stream = layers, tokens, stream
        count = -(-len(tokens) // layers.block_size)
        firsts = range(1, 1 + layers.group_count * count, count)  # Block 0 is the null block.
        self.tables = tuple(tuple(range(first, first + count)) for first in firsts)
        self._blocks = [torch.tensor(table) for table in self.tables]
        self._rows = min(len(tokens), rows)

    def canvas(self, document: Piece | None = None, part: torch.Tensor | None = None) -> PagedCanvas:
        """Return a canvas of the prompt, with a document whose stored `part` is the same in all layers."""
        job = BlendJob(
            request="self-test",
            tokens=tuple(self.tokens),
            tables=self.tables,
            stop=len(self.tokens),
            documents=(document,) if document else (),
            policy=RecomputePolicy(strategy="all"),
        )
        stored = _OnePart(torch.empty(0) if part is None else part)
        rows, stream = BatchRows(self._rows, self._rows), self._stream if document else None
        return PagedCanvas(self._layers, job, rows, stored, lambda _: True, stream=stream)

    def prefill(self, tokens: list[int], stops: list[int]) -> list[KV]:
        """Return the KV that the model's forward passes write to the pages, with chunks that end at `stops`."""
        layers, ids = self._layers, torch.tensor(tokens)
        for start, stop in zip([0, *stops], stops, strict=False):
            rows = layers.begin(ids, torch.arange(start, stop), self._blocks, self._rows)
            for batch in rows.batches:
                layers.run_model(rows, batch)
        return self._read(stops[-1])

    def prefill_alone(self, tokens: list[int]) -> list[KV]:
        """Return the KV of tokens that are computed as a document."""
        for _ in prefill_alone(self._layers, torch.tensor(tokens), self._blocks, BatchRows(self._rows)):
            pass
        return self._read(len(tokens))

    def _read(self, count: int) -> list[KV]:
        slots = self._layers.slots(self._blocks, torch.arange(count))
        of_layers = zip(self._layers.access, slots, strict=True)
        return [tuple(half.clone() for half in access.gather(here)) for access, here in of_layers]  # type: ignore[misc]


def _clear(layers: NativeLayers, tables: Sequence[Table]) -> None:
    """Reset the used blocks to zeros, their contents before the self-test."""
    blocks = [torch.tensor(table) for table in tables]
    positions = torch.arange(len(tables[0]) * layers.block_size)
    for access, slots in zip(layers.access, layers.slots(blocks, positions), strict=True):
        keys, values = access.gather(slots)
        access.scatter(slots, torch.zeros_like(keys), torch.zeros_like(values))
