"""Runs the model's own decoder layers and attention kernels on rows of a request that lmc chooses.

Each run of consecutive rows goes to the attention backend as a separate request. It has the same block table, one query
per row, and a context up to the run's last row. So the mask is exact, and backend, window and scale are the engine's.
The layer itself writes the rows' keys and values into the pages. This was verified for the architectures in `PROVEN`,
and a self-test at start (`selftest.py`) verifies the loaded model.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from lmc.blend.canvas import Attention, writes_and_attends
from lmc.blend.kernels.choice import kernels_of
from lmc.blend.rope import Turn, check_rope
from lmc.connectors.vllm import vllm_api
from lmc.connectors.vllm.model_kinds import PROVEN
from lmc.connectors.vllm.worker.paged import TokenAccess
from lmc.connectors.vllm.worker.streams import sent
from lmc.engine.identity import rope_name
from lmc.errors import UnsupportedModel
from lmc.shapes import KVShape

MOST_RUNS = 4096  # maximal number of runs in a batch for a GPU backend, which allocates buffers for them


class _EndOfLayer(Exception):
    """Raised to end a layer after its projections, when the rest of the layer is not needed."""


@dataclass(slots=True, eq=False)
class RowBatch:
    """Consecutive rows that go through a layer together."""

    rows: slice
    common: vllm_api.CommonAttentionMetadata
    metadata: Any = None  # metadata of the attention backend, built from `common`


@dataclass(slots=True)
class PagedRows:
    """Tokens of one request between two layers."""

    positions: torch.Tensor  # [T]
    tokens: torch.Tensor  # [T]
    batches: list[RowBatch]
    states: torch.Tensor  # [T, E], empty before layer 0
    residual: torch.Tensor  # [T, E]


class NativeLayers:
    """The decoder layers of a loaded model."""

    def __init__(self, model: Any, config: Any, kv_cache_config: Any, caches: Mapping[str, torch.Tensor]) -> None:
        """Examine the model. Raises `UnsupportedModel` with the reason if it cannot be blended exactly."""
        architecture = type(model).__name__
        if architecture not in PROVEN:
            raise UnsupportedModel(f"{architecture} has not been tested (tested: {', '.join(PROVEN)})")
        parallel = config.parallel_config
        if parallel.pipeline_parallel_size > 1:
            raise UnsupportedModel("its layers are on several pipeline stages")
        if parallel.data_parallel_size > 1 and parallel.is_moe_model is not False:
            raise UnsupportedModel(
                "its experts are shared with other data-parallel engines, which run steps independently"
            )
        if len(kv_cache_config.kv_cache_groups) != 1:
            raise UnsupportedModel("its layers use several kinds of KV cache")
        parameters = getattr(model.config, "rope_parameters", None) or {"rope_type": "default"}
        check_rope(parameters)
        self.rope = rope_name(parameters)
        self._config, self._model, self._decoder = config, model, model.model
        self._layers = list(self._decoder.layers)
        # Whether the engine has compiled the model as a whole. Compilation has then ended before this point.
        self.compiled = not getattr(self._decoder, "do_not_compile", True)
        attentions = [[m for m in layer.modules() if isinstance(m, vllm_api.Attention)] for layer in self._layers]
        if any(len(modules) != 1 for modules in attentions):
            raise UnsupportedModel("a layer does not have exactly one attention")
        self.attention = [modules[0] for modules in attentions]
        # The mask would be correct, but the engine frees blocks that a window has passed while lmc fills them.
        if any(a.sliding_window is not None for a in self.attention):
            raise UnsupportedModel("its attention has a sliding window")
        if extras := list(filter(None, map(_more_than_products, self.attention))):
            raise UnsupportedModel(f"its attention has {extras[0]}, which lmc's attention does not support")
        ropes = [_rope_of(layer) for layer in self._layers]
        self._rope = ropes[0]
        if any(r is not self._rope and not torch.equal(r.cos_sin_cache, self._rope.cos_sin_cache) for r in ropes):
            raise UnsupportedModel("its layers have different RoPE tables")
        group = kv_cache_config.kv_cache_groups[0]
        self.block_size: int = group.kv_cache_spec.block_size
        self.device = next(iter(caches.values())).device
        self._ratio = caches[self.attention[0].layer_name].shape[0] // kv_cache_config.num_blocks
        spec = group.kv_cache_spec
        if self._ratio > 1:
            spec = spec.copy_with_new_block_size(self.block_size // self._ratio)
        kernels = kernels_of(self.device)
        self.access = [TokenAccess(a, caches[a.layer_name], kernels) for a in self.attention]
        self.kernels = self.access[0].kernels
        # lmc needs its own builder, because the runner's builders hold plans and buffers of the step that is under way.
        # If lmc's own attention handles batches of several runs, buffers for one run are enough. Otherwise there are
        # buffers for the maximal number of runs.
        own = _own_config(config, 1 if self.kernels.in_pages else max(MOST_RUNS, config.scheduler_config.max_num_seqs))
        with vllm_api.set_current_vllm_config(own):
            builder = self.attention[0].attn_backend.get_builder_cls()
            self._builder = builder(spec, group.layer_names, own, self.device)
        self._built: RowBatch | None = None
        # On a GPU, the builder's buffers limit the number of runs, which it sees as requests.
        few = self.device.type != "cpu" and not self.kernels.in_pages
        self.most_runs = own.scheduler_config.max_num_seqs if few else 1 << 30
        heads, size, dtype = self.access[0].kv_heads, self.access[0].head_dim, self.access[0].dtype
        self.shape = KVShape(layers=self.depth, kv_heads=heads, head_dim=size, dtype=dtype)
        self.scale: float = self.attention[0].impl.scale

    @property
    def width(self) -> int:
        """The size of a hidden state."""
        return int(self._model.config.hidden_size)

    @property
    def depth(self) -> int:
        """The number of layers."""
        return len(self._layers)

    def angles(self, positions: torch.Tensor) -> Turn:
        """Return the model's cos and sin `[T, R/2]` of `positions [T]`."""
        table = self._rope.cos_sin_cache
        if len(positions) and int(positions.max()) >= len(table):
            raise UnsupportedModel(f"its RoPE table ends at position {len(table)}")
        return tuple(table[positions].float().chunk(2, dim=-1))

    @property
    def interleaved(self) -> bool:
        """Whether RoPE rotates the dimensions (2i, 2i + 1) together, instead of (i, i + R/2)."""
        return not self._rope.is_neox_style

    def slots(self, blocks: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the slot numbers of `positions [T]` in a request with the block table `blocks [B]`."""
        slots: torch.Tensor = blocks[positions // self.block_size] * self.block_size + positions % self.block_size
        return slots

    def kernel_blocks(self, blocks: torch.Tensor) -> torch.Tensor:
        """Return the kernel's block numbers for the scheduler's block numbers."""
        if self._ratio == 1:
            return blocks
        inside = torch.arange(self._ratio, device=blocks.device)
        return torch.flatten(blocks[:, None] * self._ratio + inside)

    def begin(self, tokens: torch.Tensor, positions: torch.Tensor, blocks: torch.Tensor, size: int) -> PagedRows:
        """Return rows before layer 0, at ascending `positions [T]` of the prompt `tokens`, in batches of `size`."""
        none = torch.empty(0, device=self.device)
        return PagedRows(positions, tokens[positions], self._batches(positions, blocks, size), none, none)

    def keep(self, rows: PagedRows, kept: torch.Tensor, blocks: torch.Tensor, size: int) -> PagedRows:
        """Return copies of the rows at the ascending indices `kept`, after at least one layer has run."""
        positions = rows.positions[kept]
        batches = self._batches(positions, blocks, size)
        return PagedRows(positions, rows.tokens[kept], batches, rows.states[kept], rows.residual[kept])

    def run(self, layer: int, rows: PagedRows, batch: RowBatch, attention: Attention | None = None) -> None:
        """Run a layer for the rows of a batch, in place, and write their keys and values into the pages.

        In the last layer, only the projections are computed, because its output is not read. The exception is an
        `attention` that returns a result without calling the engine's attention.
        """
        if not len(rows.states):
            rows.states = self._decoder.embed_input_ids(rows.tokens)
            rows.residual = torch.zeros_like(rows.states)
        # The rows are cloned, because the layer may end early and kernels may work in place.
        states, residual = rows.states[batch.rows].clone(), rows.residual[batch.rows].clone()
        try:
            with self._replaced(layer, batch, attention or writes_and_attends), self._context(batch):
                call = self._layers[layer]
                states, residual = call(rows.positions[batch.rows], states, None if layer == 0 else residual)
        except _EndOfLayer:
            return
        # The residual is written first, because a kernel that works in place may return layer 0's input as residual.
        rows.residual[batch.rows] = residual
        rows.states[batch.rows] = states

    def run_through(self, rows: PagedRows, batch: RowBatch, attention_of: Callable[[int], Attention | None]) -> None:
        """Run all layers for the rows of a batch, in the model as the engine has compiled it."""
        with suppress(_EndOfLayer), ExitStack() as stack:
            for layer in range(self.depth):
                stack.enter_context(self._replaced(layer, batch, attention_of(layer) or writes_and_attends))
            stack.enter_context(self._context(batch, skip_compiled=False))
            # The compiled model expects the runner's dtypes, and memory that begins at a multiple of 16 bytes.
            tokens, positions = rows.tokens[batch.rows].to(torch.int32), rows.positions[batch.rows].clone()
            self._model(tokens, positions)

    def run_model(self, rows: PagedRows, batch: RowBatch) -> None:
        """Run the rows of a batch through the model as the engine does."""
        slots = {attention.layer_name: batch.common.slot_mapping for attention in self.attention}
        metadata = dict.fromkeys(slots, self._metadata(batch))
        with self._context(batch, attn_metadata=metadata, slot_mapping=slots):
            self._model(rows.tokens[batch.rows], rows.positions[batch.rows])

    # -- inside ------------------------------------------------------------------------------------------------------

    def _context(self, batch: RowBatch, **options: Any) -> Any:
        """Return the engine's context for a call of the model or of a layer.

        By default, the context has no slots, so that the engine itself writes no keys and values.
        """
        count = batch.rows.stop - batch.rows.start
        return vllm_api.set_forward_context(
            **{"attn_metadata": None, "slot_mapping": {}, "skip_compiled": True, **options},
            vllm_config=self._config, num_tokens=count,
        )  # fmt: skip

    def _metadata(self, batch: RowBatch) -> Any:
        if self._built is not batch:
            # The metadata is built again, because another batch may have overwritten the builder's buffers.
            batch.metadata, self._built = self._builder.build(0, batch.common), batch
        return batch.metadata

    def _attends(self, batch: RowBatch) -> bool:
        """Return whether lmc's own attention is faster: the engine's attention reads the context again for each run."""
        return self.kernels.in_pages and batch.common.num_reqs > 1

    @contextmanager
    def _replaced(self, layer: int, batch: RowBatch, attention: Attention) -> Iterator[None]:
        """Replace a layer's attention by `attention` in this context; it works for compiled and other layers."""
        module = self.attention[layer]
        impl, common, access = module.impl, batch.common, self.access[layer]
        original = impl.forward

        def forward(
            module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor,
            metadata: None, output: torch.Tensor, **more: Any,
        ) -> torch.Tensor:  # fmt: skip
            def write() -> None:
                access.scatter(common.slot_mapping, key, value)

            def own() -> torch.Tensor | None:
                if layer == self.depth - 1:
                    return None
                if self._attends(batch):
                    pages = access.pages._replace(table=common.block_table_tensor[0])
                    return self.kernels.attend(query, pages, common.positions, self.scale)
                original(module, query, key, value, cache, self._metadata(batch), output, **more)
                return output

            attended = attention(query, write, own)
            if attended is None:
                raise _EndOfLayer
            if attended is not output:
                output.copy_(attended)
            return output

        # `forward` is replaced only during lmc's own call, because the engine's forward pass uses the same module.
        impl.forward = forward
        try:
            yield
        finally:
            del impl.forward

    def _batches(self, positions: torch.Tensor, blocks: torch.Tensor, size: int) -> list[RowBatch]:
        """Split rows into batches, with the metadata that the attention backend needs.

        The host waits for the positions of all rows once, instead of once per batch.
        """
        at = positions.cpu()
        cut = _cut(at, size, self.most_runs)
        return [RowBatch(rows, self._common(positions[rows], at[rows], blocks)) for rows in cut]

    def _common(
        self, positions: torch.Tensor, at: torch.Tensor, blocks: torch.Tensor
    ) -> vllm_api.CommonAttentionMetadata:
        """Return the attention metadata of rows at `positions [T]`; `at` is a copy of the positions on the host."""
        edges = torch.cat((torch.tensor([0]), _breaks(at), torch.tensor([len(at)])))
        starts = edges.to(torch.int32)
        lengths = (at[edges[1:] - 1] + 1).to(torch.int32)
        runs = len(lengths)
        table = blocks[: -(-int(lengths.max()) // self.block_size)].to(torch.int32)
        table = self.kernel_blocks(table)[None].expand(runs, -1)
        return vllm_api.CommonAttentionMetadata(
            query_start_loc=sent(starts, self.device),
            query_start_loc_cpu=starts,
            seq_lens=sent(lengths, self.device),
            seq_lens_cpu_upper_bound=lengths,
            num_reqs=runs,
            num_actual_tokens=len(at),
            max_query_len=int((edges[1:] - edges[:-1]).max()),
            max_seq_len=int(lengths.max()),
            # lmc's own attention reads one row of the table. Thousands of copies of a long table would take hundreds of
            # megabytes.
            block_table_tensor=table if self.kernels.in_pages else table.contiguous(),
            slot_mapping=self.slots(blocks, positions),
            positions=positions,
            causal=True,
        )


def _own_config(config: Any, runs: int) -> Any:
    """Return the engine's configuration for lmc's own metadata builder: at most `runs` requests, no CUDA graphs."""
    lmc_config = copy.copy(config)
    lmc_config.scheduler_config = copy.copy(config.scheduler_config)
    lmc_config.compilation_config = copy.copy(config.compilation_config)
    lmc_config.scheduler_config.max_num_seqs = runs
    lmc_config.compilation_config.cudagraph_mode = vllm_api.CUDAGraphMode.NONE
    return lmc_config


def _breaks(positions: torch.Tensor) -> torch.Tensor:
    """Return the indices at which a new run of consecutive positions begins."""
    return (positions[1:] != positions[:-1] + 1).nonzero().flatten() + 1


def _cut(positions: torch.Tensor, size: int, runs: int) -> list[slice]:
    """Split rows into pieces of at most `size` rows and `runs` runs."""
    cuts = _breaks(positions)[runs - 1 :: runs].tolist()  # the ends of every `runs` runs
    pieces = []
    for start, stop in pairwise([0, *cuts, len(positions)]):
        pieces += [slice(at, min(at + size, stop)) for at in range(start, stop, size)]
    return pieces


def _more_than_products(attention: Any) -> str:
    """Return what the attention uses in addition to products of queries and keys; an empty string if nothing.

    lmc's own attention supports none of it. Backends store it under these names, as 0 or None if a model does not use
    it.
    """
    impl = attention.impl
    if getattr(impl, "logits_soft_cap", None):
        return "a soft cap of its logits"
    if getattr(impl, "alibi_slopes", None) is not None or getattr(attention, "use_alibi_sqrt", False):
        return "ALiBi"
    sinks = (getattr(impl, name, None) for name in ("sinks", "_sinks_source"))
    return "attention sinks" if getattr(attention, "has_sink", False) or any(s is not None for s in sinks) else ""


def _rope_of(layer: Any) -> Any:
    ropes = [m for m in layer.modules() if hasattr(m, "cos_sin_cache") and hasattr(m, "is_neox_style")]
    if len(ropes) != 1 or ropes[0].cos_sin_cache.dim() != 2:
        raise UnsupportedModel("a layer does not have exactly one RoPE with one table of cos and sin")
    return ropes[0]
