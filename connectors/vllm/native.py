"""Runs the model's own decoder layers and attention kernels on rows of a request that lmc chooses.

A run of consecutive rows goes to the attention backend as a request of its own, with the same block table, as many
queries as the run has rows, and a context up to the run's last row. So the mask is exact, and backend, window and scale
are the engine's. The layer itself writes the rows' keys and values into the pages. This was verified for the
architectures in `PROVEN`, and a self-test at start (`selftest.py`) verifies the loaded model.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from lmc.blend.canvas import Attention
from lmc.blend.kernels.choice import kernels_of
from lmc.blend.rope import Turn, check_rope
from lmc.connectors.vllm import vllm_api
from lmc.connectors.vllm.paged import TokenAccess
from lmc.engine.identity import rope_name
from lmc.errors import UnsupportedModel
from lmc.shapes import KVShape

# Architectures whose blend at ratio 1 was found equal to the engine's own prefill, and with which RoPE
# (tests/engine/test_exact_and_blend.py: float32, CPU, logprobs within 1e-5). Gemma 2 and 3 were tried, and differ.
PROVEN = {
    "LlamaForCausalLM": "plain, llama3 and YaRN RoPE",
    "MistralForCausalLM": "without a sliding window",
    "MixtralForCausalLM": "plain RoPE",
    "Phi3ForCausalLM": "plain RoPE",
    "Qwen2ForCausalLM": "plain RoPE",
    "Qwen3ForCausalLM": "plain RoPE",
    "Qwen3MoeForCausalLM": "plain RoPE",
}


class _EndOfLayer(Exception):
    """Ends a layer after its projections, when the rest is not needed."""


@dataclass(slots=True, eq=False)
class RowBatch:
    """Consecutive rows that go through a layer together."""

    rows: slice
    common: vllm_api.CommonAttentionMetadata
    slots: dict[str, torch.Tensor]
    metadata: dict[str, Any] = field(default_factory=dict)  # by layer, built from `common`


@dataclass(slots=True)
class PagedRows:
    """Tokens of one request between two layers."""

    positions: torch.Tensor  # [T]
    states: torch.Tensor  # [T, E]
    residual: torch.Tensor  # [T, E]
    batches: list[RowBatch]


class NativeLayers:
    """The decoder layers of a loaded model."""

    def __init__(self, model: Any, config: Any, kv_cache_config: Any, caches: Mapping[str, torch.Tensor]) -> None:
        """Raise `UnsupportedModel` with the reason if the model cannot be blended exactly."""
        architecture = type(model).__name__
        if architecture not in PROVEN:
            raise UnsupportedModel(f"{architecture} has not been proven (proven: {', '.join(PROVEN)})")
        parallel = config.parallel_config
        if parallel.pipeline_parallel_size > 1:
            raise UnsupportedModel("its layers are on several pipeline stages")
        if parallel.data_parallel_size > 1 and parallel.is_moe_model is not False:
            raise UnsupportedModel("its experts are shared with other data-parallel engines, which make steps alone")
        if len(kv_cache_config.kv_cache_groups) != 1:
            raise UnsupportedModel("its layers use several kinds of KV cache")
        parameters = getattr(model.config, "rope_parameters", None) or {"rope_type": "default"}
        check_rope(parameters)
        self.rope = rope_name(parameters)
        self._config = config
        self.decoder = model.model
        self._layers = list(self.decoder.layers)
        attentions = [[m for m in layer.modules() if isinstance(m, vllm_api.Attention)] for layer in self._layers]
        if any(len(found) != 1 for found in attentions):
            raise UnsupportedModel("a layer of it has no attention of its own, or more than one")
        self.attention = [found[0] for found in attentions]
        # The mask would be right, but the engine frees the blocks behind a window while lmc fills them.
        if any(a.sliding_window is not None for a in self.attention):
            raise UnsupportedModel("its attention has a sliding window")
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
        # The runner's own builders hold plans and buffers of the step that is under way.
        with vllm_api.set_current_vllm_config(config):
            builder = self.attention[0].attn_backend.get_builder_cls()
            self._builder = builder(spec, group.layer_names, config, self.device)
        self._built: RowBatch | None = None
        self._names: list[str] = group.layer_names
        kernels = kernels_of(self.device)
        self.access = [TokenAccess(a, caches[a.layer_name], kernels) for a in self.attention]
        self.kernels = self.access[0].kernels
        # On a GPU, builders have buffers for so many requests.
        few = self.device.type != "cpu" and not self.kernels.in_pages
        self.most_runs = config.scheduler_config.max_num_seqs if few else 1 << 30
        heads, size, dtype = self.access[0].kv_heads, self.access[0].head_dim, self.access[0].dtype
        self.shape = KVShape(layers=self.depth, kv_heads=heads, head_dim=size, dtype=dtype)
        self.scale: float = self.attention[0].impl.scale

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
        """Whether RoPE rotates the dimensions (2i, 2i + 1) together, and not (i, i + R/2)."""
        return not self._rope.is_neox_style

    def slots(self, blocks: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the slot numbers of `positions [T]` in a request with the block table `blocks [B]`."""
        slots: torch.Tensor = blocks[positions // self.block_size] * self.block_size + positions % self.block_size
        return slots

    def kernel_blocks(self, blocks: torch.Tensor) -> torch.Tensor:
        """Return the kernel's block numbers for the scheduler's."""
        if self._ratio == 1:
            return blocks
        inside = torch.arange(self._ratio, device=blocks.device)
        return torch.flatten(blocks[:, None] * self._ratio + inside)

    def begin(self, tokens: torch.Tensor, positions: torch.Tensor, blocks: torch.Tensor, size: int) -> PagedRows:
        """Return rows before layer 0, at ascending `positions [T]` of the prompt `tokens`, in batches of `size`."""
        states: torch.Tensor = self.decoder.embed_input_ids(tokens[positions])
        return PagedRows(positions, states, torch.zeros_like(states), self._batches(positions, blocks, size))

    def keep(self, rows: PagedRows, kept: torch.Tensor, blocks: torch.Tensor, size: int) -> PagedRows:
        """Return copies of the rows with the ascending indices `kept`."""
        positions = rows.positions[kept]
        batches = self._batches(positions, blocks, size)
        return PagedRows(positions, rows.states[kept], rows.residual[kept], batches)

    def run(self, layer: int, rows: PagedRows, batch: RowBatch, attention: Attention | None = None) -> None:
        """Run a layer for the rows of a batch, in place, and write their keys and values into the pages.

        `attention` is called when they are written. Of the last layer only the projections are computed, because its
        output is not read.
        """
        if attention is None and layer == self.depth - 1:
            attention = lambda query, own: None  # noqa: E731 - only keys and values are wanted
        elif attention is None and self._attends(batch):
            attention = lambda query, own: own()  # noqa: E731
        states, residual = rows.states[batch.rows], rows.residual[batch.rows]
        if attention is not None:  # The layer may end early, and kernels may work in place.
            states, residual = states.clone(), residual.clone()
        try:
            with self._attention_replaced(layer, batch, attention), self.forward_context(batch, attention is None):
                call = self._layers[layer]
                states, residual = call(rows.positions[batch.rows], states, None if layer == 0 else residual)
        except _EndOfLayer:
            return
        # The residual comes first, because a kernel that works in place may return layer 0's input as its residual.
        rows.residual[batch.rows] = residual
        rows.states[batch.rows] = states

    # -- inside ------------------------------------------------------------------------------------------------------

    def forward_context(self, batch: RowBatch, attends: bool = True) -> Any:
        """Return the engine's context for a call of the model or a layer, with attention metadata if it `attends`."""
        if attends and self._built is not batch:
            # Building for another batch may have overwritten the builder's buffers.
            made = self._builder.build(0, batch.common)
            batch.metadata, self._built = dict.fromkeys(self._names, made), batch
        count = batch.rows.stop - batch.rows.start
        metadata = batch.metadata if attends else None
        return vllm_api.set_forward_context(
            metadata, self._config, num_tokens=count, slot_mapping=batch.slots, skip_compiled=True
        )

    def _attends(self, batch: RowBatch) -> bool:
        """Whether lmc's own attention is faster: the engine's reads the context anew for each run of rows."""
        return self.kernels.in_pages and batch.common.num_reqs > 1

    @contextmanager
    def _attention_replaced(self, layer: int, batch: RowBatch, attention: Attention | None) -> Iterator[None]:
        """Let the layer's attention module write keys and values into the pages and then call `attention`."""
        if attention is None:
            yield
            return
        module = self.attention[layer]
        original = module.forward

        def forward(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *more: Any, **named: Any) -> Any:
            heads = (-1, module.num_kv_heads, module.head_size)
            self.access[layer].scatter(batch.slots[module.layer_name], key.reshape(heads), value.reshape(heads))
            rows = query.reshape(-1, module.num_heads, module.head_size)

            def own() -> torch.Tensor | None:
                if layer == self.depth - 1:
                    return None
                if self._attends(batch):
                    common = batch.common
                    pages = self.access[layer].pages._replace(table=common.block_table_tensor[0])
                    return self.kernels.attend(rows, pages, common.positions, self.scale)
                with self.forward_context(batch):  # It writes the same keys and values again.
                    return original(query, key, value, *more, **named)  # type: ignore[no-any-return]

            attended = attention(rows, own)
            if attended is None:
                raise _EndOfLayer
            return attended.flatten(1)

        # This holds for lmc's own call only; the engine's forward pass uses the same module.
        module.forward = forward
        try:
            yield
        finally:
            del module.forward

    def _batches(self, positions: torch.Tensor, blocks: torch.Tensor, size: int) -> list[RowBatch]:
        """Cut rows into batches, with what the attention backend needs to know of them."""
        found = []
        for rows in _cut(positions.cpu(), size, self.most_runs):
            common = self._common(positions[rows], blocks)
            found.append(RowBatch(rows, common, dict.fromkeys(self._names, common.slot_mapping)))
        return found

    def _common(self, positions: torch.Tensor, blocks: torch.Tensor) -> vllm_api.CommonAttentionMetadata:
        at = positions.cpu()
        edges = torch.cat((torch.tensor([0]), _breaks(at), torch.tensor([len(at)])))
        starts = edges.to(torch.int32)
        lengths = (at[edges[1:] - 1] + 1).to(torch.int32)
        runs = len(lengths)
        table = blocks[: -(-int(lengths.max()) // self.block_size)].to(torch.int32)
        table = self.kernel_blocks(table)
        return vllm_api.CommonAttentionMetadata(
            query_start_loc=starts.to(self.device),
            query_start_loc_cpu=starts,
            seq_lens=lengths.to(self.device),
            seq_lens_cpu_upper_bound=lengths,
            num_reqs=runs,
            num_actual_tokens=len(at),
            max_query_len=int((edges[1:] - edges[:-1]).max()),
            max_seq_len=int(lengths.max()),
            block_table_tensor=table[None].expand(runs, -1).contiguous(),
            slot_mapping=self.slots(blocks, positions),
            positions=positions,
            causal=True,
        )


def _breaks(positions: torch.Tensor) -> torch.Tensor:
    """Return the indices at which a new run of consecutive positions begins."""
    return (positions[1:] != positions[:-1] + 1).nonzero().flatten() + 1


def _cut(positions: torch.Tensor, size: int, runs: int) -> list[slice]:
    """Cut rows into pieces of at most `size` rows and `runs` runs."""
    cuts = _breaks(positions)[runs - 1 :: runs].tolist()  # the ends of every `runs` runs
    pieces = []
    for start, stop in pairwise([0, *cuts, len(positions)]):
        pieces += [slice(at, min(at + size, stop)) for at in range(start, stop, size)]
    return pieces


def _rope_of(layer: Any) -> Any:
    found = [m for m in layer.modules() if hasattr(m, "cos_sin_cache") and hasattr(m, "is_neox_style")]
    if len(found) != 1 or found[0].cos_sin_cache.dim() != 2:
        raise UnsupportedModel("a layer of it has no RoPE with one table of cos and sin")
    return found[0]
