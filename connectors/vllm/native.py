"""The model's own decoder layers and attention kernels, run on rows of a request that lmc chooses.

A run of consecutive rows goes to the attention backend as a request of its own: as many queries as the run has rows, a context up to
the run's last row, the same block table. So the mask is exact, and any backend, window or scale is the engine's. The layer itself
writes the rows' keys and values into the pages. Verified with vLLM 0.32 for the architectures in `PROVEN`; a self-test at start
(`selftest.py`) asks the loaded model.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import CommonAttentionMetadata

from lmc.blend.rope import check_rope
from lmc.connectors.vllm.paged import TokenAccess
from lmc.errors import UnsupportedModel

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


class _Enough(Exception):
    """Ends a layer behind its projections: the rest of it is not needed."""


@dataclass(slots=True, eq=False)
class Batch:
    """Consecutive rows that go through a layer together."""

    rows: slice
    common: CommonAttentionMetadata
    slots: dict[str, torch.Tensor]
    metadata: dict[str, Any] = field(default_factory=dict)  # what the backend's builder has made of `common`


@dataclass(slots=True)
class Hidden:
    """Rows between two layers."""

    positions: torch.Tensor  # [T]
    states: torch.Tensor  # [T, E]
    residual: torch.Tensor  # [T, E]

    def keep(self, rows: torch.Tensor) -> "Hidden":
        """Only these rows, copied."""
        return Hidden(self.positions[rows], self.states[rows], self.residual[rows])


class NativeLayers:
    """A loaded model's decoder, layer by layer."""

    def __init__(self, model: Any, config: Any, kv_cache_config: Any, caches: Mapping[str, torch.Tensor]) -> None:
        """Raise `UnsupportedModel` and say why for what cannot be blended exactly."""
        architecture = type(model).__name__
        if architecture not in PROVEN:
            raise UnsupportedModel(f"{architecture} has not been proven (proven: {', '.join(PROVEN)})")
        parallel = config.parallel_config
        if parallel.pipeline_parallel_size > 1:
            raise UnsupportedModel("its layers are on several pipeline stages")
        if parallel.data_parallel_size > 1 and parallel.is_moe_model is not False:
            raise UnsupportedModel(
                "its experts are shared with other data-parallel engines, which do not step with a blend"
            )
        if len(kv_cache_config.kv_cache_groups) != 1:
            raise UnsupportedModel("its layers use several kinds of KV cache")
        parameters = getattr(model.config, "rope_parameters", None) or {"rope_type": "default"}
        check_rope(parameters)
        self.rope = repr(sorted(parameters.items(), key=str))
        self._config = config
        self.decoder = model.model
        self._layers = list(self.decoder.layers)
        attentions = [[m for m in layer.modules() if isinstance(m, Attention)] for layer in self._layers]
        if any(len(found) != 1 for found in attentions):
            raise UnsupportedModel("a layer of it has no attention of its own, or more than one")
        self.attention = [found[0] for found in attentions]
        # The mask would be right, but the engine takes away the blocks behind a window while we fill them.
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
        # An own builder: the runner's keep plans and graph buffers of the step that is under way.
        with set_current_vllm_config(config):
            builder = self.attention[0].attn_backend.get_builder_cls()
            self._builder = builder(spec, group.layer_names, config, self.device)
        self._built: Batch | None = None
        # Builders of GPU backends have buffers for so many requests; on the CPU nothing is sized by it.
        self._runs = config.scheduler_config.max_num_seqs if self.device.type != "cpu" else 1 << 30
        self._names: list[str] = group.layer_names
        self.access = [TokenAccess(a, caches[a.layer_name]) for a in self.attention]

    @property
    def depth(self) -> int:
        """How many layers there are."""
        return len(self._layers)

    def rows_of(self, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin `[T, R/2]` of positions from `first` on, as the model has them."""
        table = self._rope.cos_sin_cache[first : first + count]
        if len(table) < count:
            raise UnsupportedModel(f"its RoPE table ends at position {first + len(table)}")
        cos, sin = table.float().chunk(2, dim=-1)
        return cos, sin

    @property
    def interleaved(self) -> bool:
        """How the RoPE pairs dimensions."""
        return not self._rope.is_neox_style

    def slots(self, blocks: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Slot numbers of `positions [T]` under the block table `blocks [B]`."""
        slots: torch.Tensor = blocks[positions // self.block_size] * self.block_size + positions % self.block_size
        return slots

    def kernel_blocks(self, blocks: torch.Tensor) -> torch.Tensor:
        """The kernel's block numbers for the scheduler's."""
        if self._ratio == 1:
            return blocks
        inside = torch.arange(self._ratio, device=blocks.device)
        return torch.flatten(blocks[:, None] * self._ratio + inside)

    def embed(self, tokens: torch.Tensor, positions: torch.Tensor) -> Hidden:
        """Rows before layer 0, of `tokens` (of the whole prompt) at `positions`."""
        states: torch.Tensor = self.decoder.embed_input_ids(tokens[positions])
        return Hidden(positions, states, torch.zeros_like(states))

    def batches(self, positions: torch.Tensor, blocks: torch.Tensor, size: int) -> list[Batch]:
        """Rows at ascending `positions [T]`, at most `size` at a time, with what the attention backend wants to know of them."""
        found = []
        for rows in _cut(positions.cpu(), size, self._runs):
            common = self._common(positions[rows], blocks)
            found.append(Batch(rows, common, dict.fromkeys(self._names, common.slot_mapping)))
        return found

    def run(self, layer: int, hidden: Hidden, batch: Batch) -> None:
        """One layer for the rows of a batch, in place; their keys and values are in the pages afterwards."""
        with self.forward_context(batch):
            states, residual = self._call(layer, hidden, batch.rows)
        # In this order: a kernel that works in place may return the very rows it was given, as the residual of layer 0.
        hidden.residual[batch.rows] = residual
        hidden.states[batch.rows] = states

    def project(self, layer: int, hidden: Hidden, batch: Batch) -> torch.Tensor:
        """Only up to the projections: keys and values go into the pages; returns the queries `[T, Q, D]`. `hidden` stays as it is."""
        attention, query = self.attention[layer], torch.empty(0)

        def end(module: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
            nonlocal query
            given = {**dict(zip(("query", "key", "value"), arguments, strict=False)), **named}
            query = given["query"].reshape(-1, attention.num_heads, attention.head_size)
            heads = (-1, attention.num_kv_heads, attention.head_size)
            slots = batch.slots[attention.layer_name]
            self.access[layer].scatter(slots, given["key"].reshape(heads), given["value"].reshape(heads))
            raise _Enough

        rows = batch.rows
        copied = Hidden(hidden.positions[rows], hidden.states[rows].clone(), hidden.residual[rows].clone())
        with self._hooked(layer, end), self.forward_context(batch):
            try:
                self._call(layer, copied, slice(None))
            except _Enough:
                return query
        raise AssertionError("the attention was not reached")

    def advance(self, layer: int, hidden: Hidden, batch: Batch) -> None:
        """`run`; of the last layer only `project`, as nobody reads what comes out of it."""
        if layer < self.depth - 1:
            self.run(layer, hidden, batch)
        else:
            self.project(layer, hidden, batch)

    @contextmanager
    def watching(self, layer: int, see: Callable[[torch.Tensor], None]) -> Iterator[None]:
        """Inside, `see` is given the queries `[T, Q, D]` of every call of a layer's attention."""
        attention = self.attention[layer]

        def look(module: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
            query = arguments[0] if arguments else named["query"]
            see(query.reshape(-1, attention.num_heads, attention.head_size).clone())

        with self._hooked(layer, look):
            yield

    # -- inside ------------------------------------------------------------------------------------------------------

    def _call(self, layer: int, hidden: Hidden, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        residual = None if layer == 0 else hidden.residual[rows]
        return self._layers[layer](hidden.positions[rows], hidden.states[rows], residual)  # type: ignore[no-any-return]

    def forward_context(self, batch: Batch) -> Any:
        """What the engine has to know around a call of the model or a layer for `batch`."""
        if self._built is not batch:
            # A builder may lend out its buffers: what it made for another batch meanwhile has changed ours.
            made = self._builder.build(0, batch.common)
            batch.metadata, self._built = dict.fromkeys(self._names, made), batch
        count = batch.rows.stop - batch.rows.start
        return set_forward_context(
            batch.metadata, self._config, num_tokens=count, slot_mapping=batch.slots, skip_compiled=True
        )

    @contextmanager
    def _hooked(self, layer: int, hook: Callable[..., None]) -> Iterator[None]:
        # Only around our own call: between two slices the engine's forward uses the same module.
        handle = self.attention[layer].register_forward_pre_hook(hook, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()

    def _common(self, positions: torch.Tensor, blocks: torch.Tensor) -> CommonAttentionMetadata:
        at = positions.cpu()
        edges = torch.cat((torch.tensor([0]), _breaks(at), torch.tensor([len(at)])))
        starts = edges.to(torch.int32)
        lengths = (at[edges[1:] - 1] + 1).to(torch.int32)
        runs = len(lengths)
        table = blocks[: -(-int(lengths.max()) // self.block_size)].to(torch.int32)
        table = self.kernel_blocks(table)
        return CommonAttentionMetadata(
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
    """Where a new run of consecutive positions begins."""
    return (positions[1:] != positions[:-1] + 1).nonzero().flatten() + 1


def _cut(positions: torch.Tensor, size: int, runs: int) -> list[slice]:
    """Rows in pieces of at most `size` rows and `runs` runs."""
    cuts = _breaks(positions)[runs - 1 :: runs].tolist()  # behind every so many runs
    pieces = []
    for start, stop in pairwise([0, *cuts, len(positions)]):
        pieces += [slice(at, min(at + size, stop)) for at in range(start, stop, size)]
    return pieces


def _rope_of(layer: Any) -> Any:
    found = [m for m in layer.modules() if hasattr(m, "cos_sin_cache") and hasattr(m, "is_neox_style")]
    if len(found) != 1 or found[0].cos_sin_cache.dim() != 2:
        raise UnsupportedModel("a layer of it has no RoPE with one table of cos and sin")
    return found[0]
