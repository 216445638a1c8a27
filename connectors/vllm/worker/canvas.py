"""The paged canvas: a request's keys and values in the engine's pages, and the model's own layers over them.

This module also has two other operations on single tokens: prefill a document alone, and read its keys and values.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import torch

from lmc.blend.canvas import KV, Attention, Groups, Paged, positions_of
from lmc.blend.layer_attention import LayerAttention, key_rotations
from lmc.blend.rope import KeyRotation
from lmc.blend.staging import AHEAD, Staging
from lmc.connectors.vllm.messages import BlendJob
from lmc.connectors.vllm.worker.native import NativeLayers, PagedRows, RowBatch
from lmc.connectors.vllm.worker.paged import TokenAccess
from lmc.connectors.vllm.worker.stored_parts import PartMemory, StoredParts
from lmc.connectors.vllm.worker.streams import LayerLoads
from lmc.connectors.vllm.worker.tensor_parallel import agreed, largest, summed
from lmc.copies import Uploads

# On a GPU, the kernel launches of a layer that is not compiled take about as long as computing this many rows
# (`docs/gpu.md`).
CALL_COST = 512
# Bytes of the positions and slots that a pass of a blend uploads in one copy.
UPLOADED, UPLOADED_PER_TOKEN = 1 << 14, 40
COPY_COST = 32  # number of tokens copied in the time in which one token is computed: about 10 on GPUs, 100 on CPUs

Arrived = Callable[[int], bool]  # see `Canvas.arrived`; the same answer on every rank


class BatchRows(NamedTuple):
    """The maximal number of rows in one call."""

    layer: int  # rows in a call of one layer
    through: int = 0  # rows in a call of the compiled model; 0 if the compiled model is not called


class PagedCanvas:
    """The pages of one request."""

    def __init__(
        self,
        layers: NativeLayers,
        job: BlendJob,
        batch_rows: BatchRows,
        memory: PartMemory,
        arrived: Arrived,
        loads: LayerLoads | None = None,
        stream: "torch.cuda.Stream | None" = None,
    ) -> None:
        """Prepare the pages of a request for a blend.

        `memory` has the stored parts of the job when they have `arrived`; on a GPU, they are copied on `stream`.
        `loads` loads the job's exact pages.
        """
        self.depth, self.drafts, self.device, self.arrived = layers.depth, layers.drafts, layers.device, arrived
        self.dtype = min((shape.dtype for shape in layers.shapes), key=lambda dtype: dtype.itemsize)
        self.attentions: Sequence[LayerAttention] = layers.attentions
        self.kernels = layers.kernels
        self._layers, self._job, self._batch_rows = layers, job, batch_rows
        self._parts = StoredParts(memory, job.documents, layers.shapes, layers.kernels, layers.device)
        self.call_cost, self.compiled = call_cost(self.device), batch_rows.through > 0
        self._tokens, self._tables = torch.tensor(job.tokens), [torch.tensor(table) for table in job.tables]
        self.uploads = Uploads(self.device, UPLOADED + UPLOADED_PER_TOKEN * len(job.tokens))
        kernel_tables = [layers.kernel_blocks(table).to(torch.int32) for table in self._tables]
        self._kernel_tables = [self.uploads.add(table) for table in kernel_tables]
        old, new = positions_of(job.documents)
        self._stored, self._positions = self.slots(new), (self.uploads.add(old), self.uploads.add(new))
        self._loads, self._place_cost = loads, len(new) // COPY_COST + 1
        if loads is not None:
            self._place_cost += loads.cost
        self._staging: Staging | None = None
        if stream is not None and self.kernels.in_pages and job.documents:
            self._staging = Staging(self._parts.stage, layers.shapes, len(new), self.device, stream)

    @cached_property
    def _key_rotations(self) -> Sequence[KeyRotation]:
        """By layer, the rotations of stored keys to their positions."""
        return key_rotations(self.attentions, *self._positions)

    def place(self, layer: int) -> int:
        """Load the exact pages of a layer, and write its stored keys, rotated, and values into the other pages.

        The parts of the next layers that have arrived are copied to the GPU while the model works on this layer.
        """
        if self._loads is not None:
            self._loads.finish(layer)
        if self._job.documents:
            self._place_documents(layer)
        ahead = [copies for copies in (self._loads, self._staging) if copies is not None]
        for later in range(layer + 1, min(layer + 1 + AHEAD, self.depth + self.drafts)) if ahead else ():
            if not self.arrived(later):
                break
            for copies in ahead:
                copies.begin(later)
        return self._place_cost

    def _place_documents(self, layer: int) -> None:
        if self._staging is not None:
            with self._staging.parts(layer) as parts:
                self._place(layer, [parts], self._stored[layer], self.paged(layer))
        elif self.kernels.in_pages:
            self._place(layer, self._stored_in(layer), self._stored[layer], self.paged(layer))
        else:  # Only the backend's own writer knows the layout; it is called once.
            slots = self._stored[layer]
            keys, values = self._layers.access[layer].empty(len(slots))
            beside = torch.arange(len(slots), device=self.device)
            self._place(layer, self._stored_in(layer), beside, Paged.of((keys.transpose(0, 1), values.transpose(0, 1))))
            self.write(layer, slots, keys, values)

    def _place(self, layer: int, parts: Sequence[KV], slots: torch.Tensor, into: Paged) -> None:
        self.kernels.place(parts, self._key_rotations[layer], slots, into)

    def _stored_in(self, layer: int) -> list[KV]:
        """Return the stored keys and values `[T, H, D]` of a layer, for each document, as `place` takes them.

        Kernels that write pages directly take them as they are stored, which is as they are in the pages.
        """
        parts = self._parts.of(layer)
        return parts if self.kernels.in_pages else [self._layers.access[layer].dequantised(part) for part in parts]

    def begin(self, positions: torch.Tensor, *, through: bool = False, together: Groups = ()) -> PagedRows:
        """Return rows before layer 0, with the metadata that the attention backend needs."""
        size = self._batch_rows.through if through else self._batch_rows.layer
        return self._layers.begin(self._tokens, positions, self._tables, size, self.uploads, together)

    def keep(self, rows: PagedRows, kept: torch.Tensor) -> PagedRows:
        """Return the `kept` rows. Their projections are computed again when they run."""
        return self._layers.keep(rows, kept, self._tables, self._batch_rows.layer)

    def batches(self, rows: PagedRows) -> list[slice]:
        """Return the batches of rows; each batch goes in one call."""
        return [batch.rows for batch in rows.batches]

    def run(self, layer: int, rows: PagedRows, batch: slice, attention: Attention | None = None) -> None:
        """Run the engine's own layer, which writes the rows' keys and values into the pages."""
        self._layers.run(layer, rows, _batch(rows, batch), attention)

    def run_through(self, rows: PagedRows, batch: slice, attention_of: Callable[[int], Attention | None]) -> None:
        """Run the engine's compiled model."""
        self._layers.run_through(rows, _batch(rows, batch), attention_of)

    def draft(
        self, rows: PagedRows, batch: slice, attention_of: Callable[[int], Attention | None] | None = None
    ) -> None:
        """Run the engine's draft model, which writes its keys and values into the pages, too."""
        self._layers.draft(rows, _batch(rows, batch), attention_of)

    def slots(self, positions: torch.Tensor) -> list[torch.Tensor]:
        """Return slot numbers `[T]` by layer: block × block size + offset."""
        return self._layers.slots(self._tables, positions, self.uploads)

    def read(self, layer: int, slots: torch.Tensor) -> KV:
        """Return copies `[T, H, D]` from the pages."""
        return self._layers.access[layer].gather(slots)

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write keys and values `[T, H, D]` into the pages, with the backend's own writer."""
        self._layers.access[layer].scatter(slots, keys, values)

    def paged(self, layer: int) -> Paged:
        """Return the pages of a layer, with this prompt's blocks."""
        return self._layers.access[layer].pages._replace(table=self._kernel_tables[self._layers.group_of[layer]])

    def context(self, layer: int, stop: int, absent: torch.Tensor) -> KV | Paged:
        """Return the pages, or copies `[H, stop, D]` of whole pages in which the `absent` tokens are zero."""
        if self.kernels.in_pages:
            return self.paged(layer)
        access, table = self._layers.access[layer], self._kernel_tables[self._layers.group_of[layer]]
        keys, values = access.tokens_of(table[: -(-stop // access.pages.keys.shape[2])], stop)
        for half in (keys, values):
            half.index_fill_(1, absent, 0)  # Assigning a number by index would block the host on a GPU.
        return keys, values

    def context_cost(self, stop: int) -> int:
        """Return the cost of the copies that `context` makes, in rows."""
        return 0 if self.kernels.in_pages else stop // COPY_COST + 1

    def summed(self, evidence: torch.Tensor) -> torch.Tensor:
        """Return the sum of evidence over the tensor-parallel group."""
        return summed(evidence)

    def largest(self, evidence: torch.Tensor) -> torch.Tensor:
        """Return the largest evidence of the tensor-parallel group."""
        return largest(evidence)

    def agreed(self, chosen: torch.Tensor, of: int) -> torch.Tensor:
        """Return the indices that rank 0 has chosen among `of` candidates."""
        return agreed(chosen, of)


def _batch(rows: PagedRows, batch_slice: slice) -> RowBatch:
    return next(batch for batch in rows.batches if batch.rows == batch_slice)


def call_cost(device: torch.device) -> int:
    """Return how many rows a layer computes in the time of the kernel launches of one call."""
    return CALL_COST if device.type == "cuda" else 0


def prefill_alone(
    layers: NativeLayers, tokens: torch.Tensor, tables: Sequence[torch.Tensor], batch_rows: BatchRows, known: int = 0
) -> Iterator[int]:
    """Prefill a document after its first `known` tokens, whose keys and values are in its blocks; yield the costs.

    All tensors are on the host. `tables` has a block table for each KV cache group of the engine. The tokens go through
    all layers in batches, as in the engine's own chunked prefill. Each cost is in token-layers.
    """
    size = batch_rows.through or batch_rows.layer
    for start in range(known, len(tokens), size):
        positions = torch.arange(start, min(start + size, len(tokens)))
        rows = layers.begin(tokens, positions, tables, size)
        (batch,), cost = rows.batches, max(len(positions), call_cost(layers.device))  # Without gaps: one batch.
        if batch_rows.through:
            layers.run_through(rows, batch, lambda layer: None)
            yield layers.depth * cost
        else:
            for layer in range(layers.depth):
                layers.run(layer, rows, batch)
                yield cost
        if layers.drafts:
            layers.draft(rows, batch)
            yield layers.drafts * cost


def read_tokens(access: TokenAccess, slots: torch.Tensor, into: KV) -> None:
    """Copy a layer's keys and values of `slots [T]` to `into`, `[T, H, D]` each."""
    for there, half in zip(into, access.quantised(access.gather(slots)), strict=True):
        there.copy_(half, non_blocking=True)
