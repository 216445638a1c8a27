"""Runs the model's own decoder layers and attention kernels on rows of a request that lmc chooses.

Each run of consecutive rows goes to the attention backend as a separate request. It has the same block table, one query
per row, and a context up to the run's last row. So the mask is exact, and backend, window and scale are the engine's.
The layer itself writes the rows' keys and values into the pages. A self-test at start (`selftest.py`) verifies this
for the loaded model.

The engine may have several groups of layers with a block table each. Lists of tables `[B]` have one for each group.
Positions, tokens and block tables that are arguments here are on the host.
"""

import copy
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch

from lmc.blend.canvas import KV, Attention, EndOfLayer, Groups, Paged, only_writes, writes_and_attends
from lmc.blend.kernels.choice import kernels_of
from lmc.blend.layer_attention import LayerAttention, absorbed
from lmc.blend.rope import UNROTATED, Rotation, check_rope
from lmc.connectors.vllm import vllm_api
from lmc.connectors.vllm.model_kinds import architectures_of, attentions_in, groups_of, kv_source_of, specs_of
from lmc.connectors.vllm.worker.draft_model import NO_DRAFTS, DraftModel, Output
from lmc.connectors.vllm.worker.layer_calls import PART, Given, Group, TransformersLayers, calls_of, joined, rows_of
from lmc.connectors.vllm.worker.lora import WithoutAdapters
from lmc.connectors.vllm.worker.paged import token_access
from lmc.copies import Uploads
from lmc.engine.identity import rope_name
from lmc.errors import UnsupportedModel

MOST_RUNS = 4096  # maximal number of runs in a batch for a GPU backend, which allocates buffers for them


@dataclass(slots=True, eq=False)
class RowBatch:
    """Consecutive rows that go through a layer together."""

    rows: slice
    common: list[vllm_api.CommonAttentionMetadata]  # by KV cache group
    # Metadata by kind of layer, built from `common`.
    metadata: dict[Any, Any] = field(default_factory=dict)
    output: Output | None = None  # what the model has returned, if it was called as a whole and has a draft model


@dataclass(slots=True)
class PagedRows:
    """Tokens of one request between two layers."""

    positions: torch.Tensor  # [T], on the host
    at: torch.Tensor  # [T], the same on the device
    tokens: torch.Tensor  # [T], on the device
    drafted: torch.Tensor  # [T], the tokens that a draft model gets
    batches: list[RowBatch]
    states: torch.Tensor  # [T, E], empty before layer 0
    residual: torch.Tensor  # [T, E]
    given: list[Given] = field(default_factory=list)  # by layer, what it gets in addition; empty before layer 0
    # After some layers, the states and the residual that a draft model reads.
    between: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)


class NativeLayers:
    """The decoder layers of a loaded model, and after them those of its draft model, which run together."""

    def __init__(
        self,
        model: Any,
        config: Any,
        kv_cache_config: Any,
        caches: Mapping[str, torch.Tensor],
        draft_model: DraftModel = NO_DRAFTS,
        adapters: WithoutAdapters | None = None,
    ) -> None:
        """Examine the model. Raises `UnsupportedModel` with the reason if it cannot be blended exactly.

        `adapters` are those of an engine with LoRA.
        """
        _check_parallel(config.parallel_config)
        groups = kv_cache_config.kv_cache_groups
        specs = {name: spec for group in groups for name, spec in specs_of(group).items()}
        if any(isinstance(spec, vllm_api.MambaSpec) for spec in specs.values()):
            raise UnsupportedModel("the model has layers with a state (linear attention, Mamba)")
        # In a multimodal model, the layers are those of its language model.
        language = model.get_language_model() if hasattr(model, "get_language_model") else model
        self._config, self._model = config, language
        self._layers, attention, self._sharing = _own_layers(language)
        body = max(language.children(), key=lambda part: len(attentions_in(part)))
        self.architectures = architectures_of(config.model_config, language)
        self.longest = int(config.model_config.max_model_len)
        # The configuration of the language model. Step 3.5 does not keep it.
        self._text = getattr(language, "config", config.model_config.hf_text_config)
        # Whether the engine has compiled the model as a whole. Compilation has then ended before this point. The
        # language model of a multimodal model is compiled for embeddings instead of tokens.
        self.compiled = language is model and not getattr(body, "do_not_compile", True)
        self._calls = calls_of(self._layers)
        if draft_model.reads_on:
            _check_drafted(self._layers, self._sharing)
        self._draft_model, self.drafts, self._adapters = draft_model, len(draft_model.attention), adapters
        self.attention = attention + draft_model.attention
        # EAGLE-3 reads the states after these numbers of layers. The engine has told the model.
        self._aux_layers: tuple[int, ...] = tuple(getattr(body, "aux_hidden_state_layers", ()))
        if extras := list(filter(None, map(_unsupported, self.attention))):
            raise UnsupportedModel(f"the model's attention has {extras[0]}, which lmc's attention does not support")
        self.block_size: int = groups[0].kv_cache_spec.block_size
        numbers = groups_of(kv_cache_config)
        self.group_count, self.group_of = len(groups), [numbers[one.layer_name] for one in self.attention]
        self.device = next(iter(caches.values())).device
        ratios = {caches[one.layer_name].shape[0] // kv_cache_config.num_blocks for one in self.attention}
        if len(ratios) > 1:
            raise UnsupportedModel("the model's layers have kernels with blocks of different sizes")
        (self._ratio,) = ratios
        quantised = any(caches[one.layer_name].dtype.itemsize == 1 for one in self.attention)
        kernels = kernels_of(self.device, quantised=quantised)
        self.computes: torch.dtype = config.model_config.dtype
        self.access = [token_access(one, caches[one.layer_name], kernels, self.computes) for one in self.attention]
        self.kernels = self.access[0].kernels
        # lmc needs its own builder, because the runner's builders hold plans and buffers of the step that is under way.
        # If lmc's own attention handles batches of several runs, buffers for one run are enough. Otherwise there are
        # buffers for the maximal number of runs.
        own = _own_config(config, 1 if self.kernels.in_pages else max(MOST_RUNS, config.scheduler_config.max_num_seqs))
        # Layers have the same metadata if they have the same backend and block table, and KV of the same shape.
        self._kinds = [
            (one.attn_backend, specs[one.layer_name], group)
            for one, group in zip(self.attention, self.group_of, strict=True)
        ]
        with vllm_api.set_current_vllm_config(own):
            self._builders = {kind: self._builder(kind, own) for kind in set(self._kinds)}
        # By kind, the batch whose metadata is in its builder's buffers, and when a GPU has read those on the host.
        self._built: dict[Any, tuple[RowBatch, torch.cuda.Event | None]] = {}
        # On a GPU, the builder's buffers limit the number of runs, which it sees as requests.
        few = self.device.type != "cpu" and not self.kernels.in_pages
        self.most_runs = own.scheduler_config.max_num_seqs if few else 1 << 30
        self.shapes = [replace(one.shape, layers=len(self.access)) for one in self.access]
        self.shape = max(self.shapes, key=lambda shape: shape.token_bytes)  # the largest, which records have
        rotations = self._rotations()
        interleaved = any(rotation.interleaved for rotation in rotations)
        if self.drafts:
            rotations += self._draft_rotations(rotations)
        self.rope = rope_name(getattr(self._text, "rope_parameters", None), interleaved=interleaved)
        self.attentions = [
            LayerAttention(scale=float(one.impl.scale), rotation=rotation, **_sight_of(one))
            for one, rotation in zip(self.attention, rotations, strict=True)
        ]

    @property
    def width(self) -> int:
        """The size of a hidden state."""
        return int(self._text.hidden_size)

    @property
    def depth(self) -> int:
        """The number of layers with attention."""
        return len(self._layers)

    @property
    def samples(self) -> list[int]:
        """One layer of each kind; the first layers of a model with experts often have none, for example."""
        first: dict[Any, int] = {}
        for layer, (group, kind) in enumerate(zip(self._layers, self._kinds, strict=False)):
            first.setdefault((kind, *(weight.shape for module in group for weight in module.parameters())), layer)
        return list(first.values())

    def slots(
        self, tables: Sequence[torch.Tensor], positions: torch.Tensor, uploads: Uploads | None = None
    ) -> list[torch.Tensor]:
        """Return the slot numbers of `positions [T]` in a request with these block tables, by layer, on the device.

        With `uploads`, they are there when these are sent.
        """
        with self._uploading(uploads) as own:
            by_group = [own.add(self._slots_in(table, positions)) for table in tables]
        return [by_group[group] for group in self.group_of]

    def _slots_in(self, table: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        slots: torch.Tensor = table[positions // self.block_size] * self.block_size + positions % self.block_size
        return slots

    def kernel_blocks(self, blocks: torch.Tensor) -> torch.Tensor:
        """Return the kernel's block numbers for the scheduler's block numbers."""
        if self._ratio == 1:
            return blocks
        inside = torch.arange(self._ratio, device=blocks.device)
        return torch.flatten(blocks[:, None] * self._ratio + inside)

    def begin(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        tables: Sequence[torch.Tensor],
        size: int,
        uploads: Uploads | None = None,
        together: Groups = (),
    ) -> PagedRows:
        """Return rows before layer 0, at ascending `positions [T]` of the prompt `tokens`, in batches of up to `size`.

        With `uploads`, they can be used when these are sent. `together` is as in `Canvas.begin`.
        """
        with self._uploading(uploads) as own:
            none, at = torch.empty(0, device=self.device), own.add(positions)
            batches = self._batches(positions, at, tables, size, own, together)
            given = drafted = own.add(tokens[positions])
            if self._draft_model.reads_on:
                drafted = own.add(tokens[(positions + 1).clamp_max_(len(tokens) - 1)])
            return PagedRows(positions, at, given, drafted, batches, none, none)

    def keep(self, rows: PagedRows, kept: torch.Tensor, tables: Sequence[torch.Tensor], size: int) -> PagedRows:
        """Return copies of the rows at the ascending indices `kept`, after at least one layer has run."""
        with self._uploading() as uploads:
            positions = rows.positions[kept]
            at, kept = uploads.add(positions), uploads.add(kept)
            batches = self._batches(positions, at, tables, size, uploads)
        return PagedRows(
            positions,
            at,
            rows.tokens[kept],
            rows.drafted[kept],
            batches,
            rows.states[kept],
            rows.residual[kept if self._calls.takes_residual else slice(0)],
            [rows_of(given, kept, len(rows.positions)) for given in rows.given],
            {layer: (states[kept], residual[kept]) for layer, (states, residual) in rows.between.items()},
        )

    def run(self, layer: int, rows: PagedRows, batch: RowBatch, attention: Attention | None = None) -> None:
        """Run a layer for the rows of a batch, in place, and write their keys and values into the pages.

        In the last layer, only the projections are computed, unless a draft model reads the output. The exception is an
        `attention` that returns a result without calling the engine's attention.
        """
        if not len(rows.states):
            rows.states, rows.given = self._before(rows.tokens, rows.at)
            rows.residual = torch.zeros_like(rows.states)
        positions, count = rows.at[batch.rows], len(rows.at)
        # The rows are cloned, because the layer may end early and kernels may work in place.
        given = rows.states[batch.rows].clone(), rows.residual[batch.rows].clone()
        more = rows_of(rows.given[layer], batch.rows, count)
        try:
            with self._replaced(layer, batch, attention or writes_and_attends), self._context(len(positions)):
                states, residual = self._calls.call(layer, *given, positions, more)
        except EndOfLayer:
            return
        # The residual is written first, because a kernel that works in place may return layer 0's input as residual.
        if residual is not None:  # Layers of Gemma 4 take a residual, and neither use nor return one.
            rows.residual[batch.rows] = residual
        rows.states[batch.rows] = states
        if layer + 1 in self._aux_layers:
            halves = rows.between.setdefault(layer, (torch.empty_like(rows.states), torch.empty_like(rows.residual)))
            for half, now in zip(halves, (rows.states, rows.residual), strict=True):
                half[batch.rows] = now[batch.rows]

    def run_through(self, rows: PagedRows, batch: RowBatch, attention_of: Callable[[int], Attention | None]) -> None:
        """Run all layers for the rows of a batch, in the model as the engine has compiled it."""
        with suppress(EndOfLayer), ExitStack() as stack:
            for layer in range(self.depth):
                stack.enter_context(self._replaced(layer, batch, attention_of(layer) or writes_and_attends))
            stack.enter_context(self._context(batch.rows.stop - batch.rows.start, skip_compiled=False))
            # The compiled model expects the runner's dtypes, and memory that begins at a multiple of 16 bytes.
            tokens, positions = rows.tokens[batch.rows].to(torch.int32), rows.at[batch.rows].clone()
            batch.output = self._forward(tokens, positions)

    def draft(
        self, rows: PagedRows, batch: RowBatch, attention_of: Callable[[int], Attention | None] | None = None
    ) -> None:
        """Run the draft model, if there is one, for the rows of a batch, which have gone through all layers.

        Its keys and values are written into the pages. Without `attention_of`, the last layer ends then, because no
        draft is read.
        """
        if not self.drafts:
            return
        output, batch.output = batch.output, None
        if output is None and self._draft_model.reads_on:
            output = self._output(rows, batch)
        last = self.depth + self.drafts - 1
        usual = attention_of or (lambda layer: only_writes if layer == last else writes_and_attends)
        self._draft(rows, batch, output, usual)

    def _draft(
        self, rows: PagedRows, batch: RowBatch, output: Output | None, attention_of: Callable[[int], Attention | None]
    ) -> None:
        with suppress(EndOfLayer), ExitStack() as stack:
            for layer in range(self.depth, self.depth + self.drafts):
                stack.enter_context(self._replaced(layer, batch, attention_of(layer) or writes_and_attends))
            stack.enter_context(self._context(batch.rows.stop - batch.rows.start))
            self._draft_model.run(rows.drafted[batch.rows].to(torch.int32), rows.at[batch.rows], output)

    def _output(self, rows: PagedRows, batch: RowBatch) -> Output:
        """Return what the model returns for the rows of a batch, which have gone through all layers one by one."""
        tokens, positions, residual = rows.tokens[batch.rows], rows.at[batch.rows], rows.residual[batch.rows]
        last = rows.states[batch.rows], residual
        between = {layer: (one[0][batch.rows], one[1][batch.rows]) for layer, one in rows.between.items()}
        after = [between.get(layer, last) for layer in range(self.depth)]
        with self._calls.answered(after), self._context(len(tokens)):
            return self._forward(tokens, positions)

    def run_model(self, rows: PagedRows, batch: RowBatch) -> None:
        """Run the rows of a batch through the model, and then through its draft model, as the engine does."""
        groups = zip(self.attention, self.group_of, strict=True)
        slots = {one.layer_name: batch.common[group].slot_mapping for one, group in groups}
        built = {kind: self._metadata(batch, kind) for kind in self._builders}
        metadata = {one.layer_name: built[kind] for one, kind in zip(self.attention, self._kinds, strict=True)}
        for of_layers in (slots, metadata):
            of_layers |= {name: of_layers[target] for name, target in self._sharing.items()}
        positions = rows.at[batch.rows]
        if self._config.model_config.uses_mrope:  # A token has three positions, which are equal in text.
            positions = positions.expand(3, -1)
        with self._context(batch.rows.stop - batch.rows.start, attn_metadata=metadata, slot_mapping=slots):
            output = self._forward(rows.tokens[batch.rows], positions)
            if self.drafts:
                self._draft_model.run(rows.drafted[batch.rows].to(torch.int32), rows.at[batch.rows], output)

    # -- inside ------------------------------------------------------------------------------------------------------

    @contextmanager
    def _uploading(self, uploads: Uploads | None = None) -> Iterator[Uploads]:
        """Yield these uploads, which the caller sends, or new ones, which are sent after this block."""
        own = uploads or Uploads(self.device)
        yield own
        if uploads is None:
            own.send()

    def _forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> Output:
        """Call the model as the engine does: InternLM2 has no default for the tensors of an earlier pipeline stage."""
        output: Output = self._model(tokens, positions, intermediate_tensors=None)
        return output

    def _before(self, tokens: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, list[Given]]:
        """Return the hidden states `[T, E]` before layer 0 (some models scale embeddings), and what each layer gets."""
        size = self._most_rows
        parts = [self._before_some(*part) for part in zip(tokens.split(size), positions.split(size), strict=True)]
        if len(parts) == 1:
            return parts[0]
        states, given = zip(*parts, strict=True)
        return torch.cat(states), list(map(joined, zip(*given, strict=True)))

    @property
    def _most_rows(self) -> int:
        """The maximal number of rows in a call of the model: as many as the engine computes in a step.

        Buffers have this size for adapters, and in Gemma 3n and 4 with --kv-sharing-fast-prefill.
        """
        return int(self._config.scheduler_config.max_num_batched_tokens)

    def _before_some(self, tokens: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, list[Given]]:
        def run() -> None:
            with self._context(len(tokens)):
                self._forward(tokens, positions)

        return self._calls.begin(run)

    def _rotations(self) -> list[Rotation]:
        """Return the rotation of each layer: that of the RoPE it calls, which it may have and not call."""
        if isinstance(self._calls, TransformersLayers):
            check_rope(getattr(self._text, "rope_parameters", None) or {})
            with torch.inference_mode():
                run = self._run_at, self._keys_at
                return self._calls.rotations(*run, self.longest, self.device, min(PART, self._most_rows))
        made: dict[Any, Rotation] = {}
        for layer in chain(*self._layers):
            for rope in (module for module in layer.modules() if _is_rope(module)):
                if rope not in made:
                    rotation = _rotation_of(rope, self.longest)
                    made[rope] = next((other for other in made.values() if other.same_as(rotation)), rotation)
        token, called = torch.zeros(1, dtype=torch.long), list[Any]()
        rows = self.begin(token, token, [token + 1] * self.group_count, 1)  # one token in block 1, which is unused
        handles = [rope.register_forward_pre_hook(lambda rope, _: called.append(rope)) for rope in made]
        try:
            with torch.inference_mode():
                ropes = [self._rope_called(layer, rows, called) for layer in range(self.depth)]
            return [made[rope] if rope is not None else UNROTATED for rope in ropes]
        finally:
            for handle in handles:
                handle.remove()

    def _draft_rotations(self, known: Sequence[Rotation]) -> list[Rotation]:
        """Return the rotation of each layer of the draft model: that of the RoPE called before its attention.

        Rotations that are equal to one of those `known` are the same object. Nothing is written. Raises
        `UnsupportedModel` if a step of the draft model does not call each of its layers once.
        """
        ropes = {rope: _rotation_of(rope, self.longest) for rope in self._draft_model.modules() if _is_rope(rope)}
        called, rotations = list[Any](), list[tuple[int, Rotation]]()

        def attention_of(layer: int) -> Attention:
            def attention(query: torch.Tensor, _: object, __: object) -> torch.Tensor:
                rotation = ropes[called[-1]] if called else UNROTATED
                rotations.append((layer, next((one for one in known if one.same_as(rotation)), rotation)))
                called.clear()
                return query.new_zeros(*query.shape[:2], self.access[layer].value_dim)

            return attention

        token = torch.zeros(1, dtype=torch.long)
        rows = self.begin(token, token, [token + 1] * self.group_count, 1)
        states = torch.zeros(1, self.width, dtype=self.computes, device=self.device)
        aux = [states] * len(self._aux_layers)
        handles = [rope.register_forward_pre_hook(lambda rope, _: called.append(rope)) for rope in ropes]
        try:
            with torch.inference_mode():
                self._draft(rows, rows.batches[0], (states, aux) if aux else states, attention_of)
        finally:
            for handle in handles:
                handle.remove()
        if [layer for layer, _ in rotations] != list(range(self.depth, self.depth + self.drafts)):
            raise UnsupportedModel("a step of its draft model does not call each of its layers once")
        return [rotation for _, rotation in rotations]

    def _run_at(self, positions: torch.Tensor) -> None:
        """Run the model on token 1 at these positions. Nothing is written."""
        with self._context(len(positions)):
            self._forward(torch.ones_like(positions), positions)

    def _keys_at(self, layer: int, positions: torch.Tensor) -> torch.Tensor:
        """Return the keys `[T, H, D]` that a layer computes for token 1 at positions of block 1. Nothing is written.

        Token 0 may be padding, whose hidden state may be zero. A quantised cache would round the keys.
        """
        tables, access, keys = [torch.ones_like(positions)] * self.group_count, self.access[layer], list[torch.Tensor]()
        rows = self.begin(torch.ones(self.block_size, dtype=torch.long), positions, tables, 8)
        access.scatter = lambda _, computed, values: keys.append(computed.clone())  # type: ignore[method-assign, assignment]
        try:
            for batch in rows.batches:
                self.run(layer, rows, batch, only_writes)
        finally:
            del access.scatter
        return torch.cat(keys)

    def _rope_called(self, layer: int, rows: PagedRows, called: list[Any]) -> Any | None:
        """Return the RoPE that a layer calls; RoPEs add themselves to `called`. No keys are written."""
        called.clear()
        self.run(layer, rows, rows.batches[0], lambda *_: None)
        if len(called) > 1:
            raise UnsupportedModel("a layer calls its RoPE more than once")
        return called[0] if called else None

    def _context(self, count: int, **options: Any) -> Any:
        """Return the engine's context for a call of the model or of a layer with `count` rows.

        By default, the context has no slots, so that the engine itself writes no keys and values.
        """
        if self._adapters is not None:
            self._adapters.set(count)
        return vllm_api.set_forward_context(
            **{"attn_metadata": None, "slot_mapping": {}, "skip_compiled": True, **options},
            vllm_config=self._config, num_tokens=count,
        )  # fmt: skip

    def _builder(self, kind: tuple[Any, Any, int], config: Any) -> Any:
        """Return a builder of metadata for the layers of a kind."""
        backend, spec, _ = kind
        names = [one.layer_name for one, other in zip(self.attention, self._kinds, strict=True) if other == kind]
        if self._ratio > 1:
            spec = spec.copy_with_new_block_size(self.block_size // self._ratio)
        return backend.get_builder_cls()(spec, names, config, self.device)

    def _metadata(self, batch: RowBatch, kind: tuple[Any, Any, int]) -> Any:
        built, read = self._built.get(kind, (None, None))
        if built is not batch:
            # The metadata is built again, because another batch may have overwritten the builder's buffers.
            if read is not None:
                read.synchronize()
            common = batch.common[kind[2]]
            # The engine's attention reads a row of the table for each run, and lmc's own only the first one.
            # Thousands of copies of a long table would take hundreds of megabytes.
            common.block_table_tensor = common.block_table_tensor.contiguous()
            batch.metadata[kind] = self._builders[kind].build(0, common)
            cuda = self.device.type == "cuda"
            self._built[kind] = batch, torch.cuda.current_stream(self.device).record_event() if cuda else None
        return batch.metadata[kind]

    @contextmanager
    def _replaced(self, layer: int, batch: RowBatch, attention: Attention) -> Iterator[None]:
        """Replace a layer's attention by `attention` in this context; it works for compiled and other layers."""
        module = self.attention[layer]
        latent = isinstance(module, vllm_api.MLAAttention)
        owner, name = (module, "forward_impl") if latent else (module.impl, "forward")
        original = getattr(owner, name)

        def forward(
            module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor,
            metadata: None, output: torch.Tensor, **more: Any,
        ) -> torch.Tensor:  # fmt: skip
            def engine(built: Any) -> None:
                original(module, query, key, value, cache, built, output, **more)

            _check_output(more)
            rows = self._unquantised(module, query), key, value
            attended = self._attended(layer, batch, attention, rows, engine, output)
            if attended is not output:
                output.copy_(attended)
            return output

        def forward_latent(
            query: torch.Tensor, latent: torch.Tensor, rotated: torch.Tensor, cache: torch.Tensor,
            metadata: None, output: torch.Tensor, **more: Any,
        ) -> torch.Tensor:  # fmt: skip
            def engine(built: Any) -> None:
                original(query, latent, rotated, cache, built, output=output, **more)

            _check_output(more)
            rows = absorbed(query, module.W_UK_T), rotated, latent[:, None]
            attended = self._attended(layer, batch, attention, rows, engine, output)
            if attended is not output:
                module._v_up_proj(attended, out=output)
            return output

        # It is replaced only during lmc's own call, because the engine's forward pass uses the same module.
        setattr(owner, name, forward_latent if latent else forward)
        try:
            yield
        finally:
            delattr(owner, name)

    def _unquantised(self, module: Any, query: torch.Tensor) -> torch.Tensor:
        """Return queries in the model's type; some backends get them quantised as the keys are."""
        return query if query.dtype.itemsize > 1 else query.to(self.computes) * module._q_scale_float

    def _attended(
        self, layer: int, batch: RowBatch, attention: Attention, rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        engine: Callable[[Any], None], output: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """Return what `attention` returns for the queries, keys and values of a batch, `[T, Q, D]` and `[T, H, D]`.

        `engine` computes the engine's own attention into `output`, with metadata of the batch. Raises `EndOfLayer` if
        the attention ends the layer.
        """
        common, (query, keys, values) = batch.common[self.group_of[layer]], rows

        def write() -> None:
            self.access[layer].scatter(common.slot_mapping, keys, values)

        def own() -> torch.Tensor | None:
            if layer == self.depth - 1 and not self._draft_model.reads_on:
                return None
            # The engine's attention would read the context again for each run. That of MLA needs the shortest runs
            # first.
            several = common.num_reqs > 1 and (self.kernels.in_pages or self.attentions[layer].latent)
            if several or _divides_output(self.attention[layer]):
                return self.kernels.attend(
                    query, self._context_of(layer, common), common.positions, self.attentions[layer]
                )
            engine(self._metadata(batch, self._kinds[layer]))
            return output

        attended = attention(query, write, own)
        if attended is None:
            raise EndOfLayer
        return attended

    def _context_of(self, layer: int, common: vllm_api.CommonAttentionMetadata) -> KV | Paged:
        """Return the keys and values that the rows of a batch see."""
        access, table = self.access[layer], common.block_table_tensor[0]
        return (
            access.pages._replace(table=table) if self.kernels.in_pages else access.tokens_of(table, common.max_seq_len)
        )

    def _batches(
        self, positions: torch.Tensor, at: torch.Tensor, tables: Sequence[torch.Tensor], size: int, uploads: Uploads,
        together: Groups = (),
    ) -> list[RowBatch]:  # fmt: skip
        """Split rows into batches, with the metadata that the attention backend needs.

        `at` are the positions on the device. The metadata can be used when the `uploads` are sent.
        """
        cut = _cut(positions, size, self.most_runs, together)
        return [RowBatch(rows, self._common(positions[rows], at[rows], tables, uploads)) for rows in cut]

    def _common(
        self, positions: torch.Tensor, at: torch.Tensor, tables: Sequence[torch.Tensor], uploads: Uploads
    ) -> list[vllm_api.CommonAttentionMetadata]:
        """Return the attention metadata of rows at `positions [T]`, by KV cache group.

        `at` are the positions on the device.
        """
        edges = torch.cat((torch.tensor([0]), _breaks(positions), torch.tensor([len(positions)])))
        starts = edges.to(torch.int32)
        lengths = (positions[edges[1:] - 1] + 1).to(torch.int32)
        runs, longest = len(lengths), int(lengths.max())
        starts_there, lengths_there = uploads.add(starts), uploads.add(lengths)

        def of_group(blocks: torch.Tensor) -> vllm_api.CommonAttentionMetadata:
            table = self.kernel_blocks(blocks[: -(-longest // self.block_size)].to(torch.int32))
            table = uploads.add(table[None]).expand(runs, -1)
            return vllm_api.CommonAttentionMetadata(
                query_start_loc=starts_there,
                query_start_loc_cpu=starts,
                seq_lens=lengths_there,
                seq_lens_cpu_upper_bound=lengths,
                num_reqs=runs,
                num_actual_tokens=len(positions),
                max_query_len=int((edges[1:] - edges[:-1]).max()),
                max_seq_len=longest,
                block_table_tensor=table,
                slot_mapping=uploads.add(self._slots_in(blocks, positions)),
                positions=at,
                causal=True,
            )

        return [of_group(blocks) for blocks in tables]


def _check_parallel(parallel: Any) -> None:
    """Raise `UnsupportedModel` if lmc cannot run layers with this parallelism."""
    if parallel.pipeline_parallel_size > 1:
        raise UnsupportedModel("the model's layers are on several pipeline stages")
    if parallel.data_parallel_size > 1 and parallel.is_moe_model is not False:
        raise UnsupportedModel(
            "the model's experts are shared with other data-parallel engines, which run steps independently"
        )


def _check_drafted(groups: Sequence[Group], sharing: Mapping[str, str]) -> None:
    """Raise `UnsupportedModel` if a draft model cannot get what these layers compute. `sharing` is as of `_own_layers`.

    The states after each layer have to be known by the layer's number.
    """
    if sharing:
        raise UnsupportedModel("the model's draft model reads what its last layers compute, and these share KV")
    if any(len(group) > 1 for group in groups):
        raise UnsupportedModel(
            "the model's draft model reads what its layers compute, and some of these have no attention"
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


def _cut(positions: torch.Tensor, size: int, runs: int, together: Groups) -> list[slice]:
    """Split rows into pieces of at most `size` rows and `runs` runs; `together` is as in `Canvas.begin`."""
    breaks, starts = _breaks(positions).tolist(), [start for start, _ in together]
    pieces, at = list[slice](), 0
    while at < len(positions):
        last = bisect_right(breaks, at) + runs - 1  # the index of the break after the last of `runs` runs
        stop = min(at + size, len(positions), *breaks[last : last + 1])
        group = bisect_left(starts, stop) - 1  # the last group that begins before `stop`
        if group >= 0 and together[group][1] > stop and 2 * (starts[group] - at) >= stop - at:
            stop = starts[group]
        pieces.append(slice(at, stop))
        at = stop
    return pieces


def _layers_of(language: Any) -> list[Any]:
    """Return the decoder layers of a language model: the list of modules that has most attentions.

    Raises `UnsupportedModel` if there is none.
    """
    lists = [module for module in language.modules() if isinstance(module, torch.nn.ModuleList)]
    layers = list(max(lists, key=lambda one: len(attentions_in(one)), default=()))
    if not any(map(attentions_in, layers)):
        raise UnsupportedModel(f"lmc does not find the decoder layers of {type(language).__name__}")
    return layers


def _own_layers(language: Any) -> tuple[list[Group], list[Any], dict[str, str]]:
    """Return the decoder layers with keys and values of their own, their attention, and the names of the others.

    Layers without attention (Nemotron-Super) are in a group with the layer before them. The last layers may read the
    keys and values of earlier ones (Gemma 4 E2B). A prompt's KV does not depend on what they compute, so lmc does not
    run them. For each name, there is the name of the layer that is read.
    Raises `UnsupportedModel` if a layer has several attentions.
    """
    groups, attention, before = list[list[Any]](), list[Any](), list[Any]()
    for layer in _layers_of(language):
        found = attentions_in(layer)
        if len(found) > 1:
            raise UnsupportedModel("a layer has several attentions")
        if found:
            groups.append([*before, layer])
            attention += found
            before = []
        else:  # Layers before the first attention are in a group with the layer after them.
            (groups[-1] if groups else before).append(layer)
    sharing = {one.layer_name: name for one in attention if (name := kv_source_of(one))}
    own = len(groups) - len(sharing)
    return list[Group](groups[:own]), attention[:own], sharing


def _unsupported(attention: Any) -> str:
    """Return what the attention computes that lmc's own attention does not; an empty string if nothing.

    Backends store it under these names, as 0 or None if a model does not use it.
    """
    impl = attention.impl
    if getattr(attention, "indexer", None) is not None:
        return "an index of the keys that it reads"
    if isinstance(attention, vllm_api.MLAAttention) and not hasattr(attention, "W_UK_T"):
        return "weights in a form of its backend"
    if getattr(impl, "alibi_slopes", None) is not None or getattr(attention, "use_alibi_sqrt", False):
        return "ALiBi"
    if kv_source_of(attention):
        return "the keys and values of another layer, and later layers do not"
    return (
        "attention sinks in an unknown form"
        if getattr(attention, "has_sink", False) and _sinks_of(impl) is None
        else ""
    )


def _check_output(options: Mapping[str, Any]) -> None:
    """Raise `UnsupportedModel` if these options of an attention call tell it to quantise its output."""
    if any(options.get(name) is not None for name in ("output_scale", "output_block_scale")):
        raise UnsupportedModel(
            "the model's attention quantises its output (fuse_attn_quant), and lmc's attention does not"
        )


def _divides_output(attention: Any) -> bool:
    """Return whether the engine's attention divides its output by a scale, also if it is not told to.

    FlashInfer does so after its first call that quantised the output (`fuse_attn_quant`).
    """
    return getattr(attention, "_o_scale_float", None) is not None


def _sinks_of(impl: Any) -> torch.Tensor | None:
    return next((s for s in (getattr(impl, name, None) for name in ("sinks", "_sinks_source")) if s is not None), None)


def _sight_of(attention: Any) -> dict[str, Any]:
    """Return the window, the chunk, the sinks and the soft cap of an attention, as in `LayerAttention`."""
    return {
        "window": int(getattr(attention, "sliding_window", None) or 0),
        "chunk": int(getattr(attention, "attention_chunk_size", 0) or 0),
        "sinks": _sinks_of(attention.impl),
        "soft_cap": float(getattr(attention.impl, "logits_soft_cap", None) or 0.0),
        "latent": isinstance(attention, vllm_api.MLAAttention),
    }


def _is_rope(module: Any) -> bool:
    return any(hasattr(module, name) for name in ("cos_sin_cache", "long_short_cos_sin_cache"))


def _rotation_of(rope: Any, longest: int) -> Rotation:
    """Return the rotation of a RoPE, whose table covers `longest` positions."""
    if hasattr(rope, "long_short_cos_sin_cache"):  # vLLM chooses one of the two tables at start.
        short = rope.original_max_position_embeddings
        table = rope.long_short_cos_sin_cache[short:] if rope.use_long_rope else rope.long_short_cos_sin_cache[:short]
        return _checked(table, longest, interleaved=False)
    if not hasattr(rope, "is_neox_style"):
        raise UnsupportedModel(f"lmc does not know the RoPE {type(rope).__name__}")
    return _checked(rope.cos_sin_cache, longest, interleaved=not rope.is_neox_style)


def _checked(table: torch.Tensor, longest: int, *, interleaved: bool) -> Rotation:
    """Return the rotation by a table of cos and sin `[N, R]`.

    Raises `UnsupportedModel` if the table is too short, or if its rows are not rotations of one another.
    """
    if table.dim() != 2:
        raise UnsupportedModel("the model's RoPE has several tables of cos and sin")
    if len(table) < longest:
        raise UnsupportedModel(
            f"the model's RoPE table has {len(table)} positions, and --max-model-len is {longest}: lower it to blend"
        )
    cos, sin = table.chunk(2, dim=-1)
    magnitude = cos.float().square() + sin.float().square()
    if not torch.allclose(magnitude, magnitude[:1].expand_as(magnitude), rtol=0.05):
        raise UnsupportedModel("the rows of the model's RoPE table are not rotations of one another")
    return Rotation(cos, sin, interleaved)
