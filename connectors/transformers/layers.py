"""Runs one decoder layer at a time, for the transformers families Llama, Mistral, Qwen2 and Qwen3.

The model's own modules (norms, projections, MLP) run on the caller's rows, and the caller computes the attention in
between. Modules are found by their names; no model code is imported.
"""

from typing import Any, NamedTuple

import torch

from lmc.blend.rope import check_rope
from lmc.errors import UnsupportedModel
from lmc.shapes import KVShape

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


class Projections(NamedTuple):
    """Query `[T, Q, D]`, key and value `[T, H, D]` of some rows in one layer."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


class DecoderLayers:
    """The layers of a causal language model."""

    def __init__(self, model: Any) -> None:
        """Examine a model. Raises `UnsupportedModel` for a family or a RoPE that lmc cannot run exactly."""
        config = model.config
        if config.model_type not in FAMILIES:
            families = ", ".join(FAMILIES)
            raise UnsupportedModel(
                f"models of type {config.model_type!r} cannot be blended yet (supported: {families})"
            )
        check_rope(config.rope_parameters)
        self._head, self._body, self._layers = model.lm_head, model.model, model.model.layers
        attention, weight, heads = self._layers[0].self_attn, self._body.embed_tokens.weight, config.num_key_value_heads
        self.scale: float = attention.scaling
        self.vocabulary: int = config.vocab_size
        self.shape = KVShape(layers=len(self._layers), kv_heads=heads, head_dim=attention.head_dim, dtype=weight.dtype)
        self.device: torch.device = weight.device
        # The blender's mask has no sliding window, so prompts longer than the window are refused.
        window = getattr(config, "sliding_window", None)
        self.positions: int = min(config.max_position_embeddings, window or config.max_position_embeddings)

    def rows(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin of the positions 0…T-1, `[T, R]` each, as the model itself computes them."""
        at = torch.arange(tokens, device=self.device)[None]
        probe = torch.empty(0, dtype=self.shape.dtype, device=self.device)
        cos, sin = self._body.rotary_emb(probe, position_ids=at)
        return cos[0], sin[0]

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the hidden states `[T, E]` before layer 0."""
        return self._body.embed_tokens(tokens)  # type: ignore[no-any-return]

    def project(self, layer: int, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Projections:
        """Return a layer's query, key and value from `hidden [T, E]`, rotated by `cos, sin [T, R]`."""
        block = self._layers[layer]
        attention, normed = block.self_attn, block.input_layernorm(hidden)
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        query, key, value = (project(normed).unflatten(-1, (-1, self.shape.head_dim)) for project in projections)
        if hasattr(attention, "q_norm"):
            query, key = attention.q_norm(query), attention.k_norm(key)
        cos, sin = cos[:, None], sin[:, None]
        return Projections(_rotated(query, cos, sin), _rotated(key, cos, sin), value)

    def finish(self, layer: int, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Return the hidden states after a layer, from `hidden [T, E]` before it and `attended [T, Q, D]`."""
        block = self._layers[layer]
        hidden = hidden + block.self_attn.o_proj(attended.flatten(1))
        return hidden + block.mlp(block.post_attention_layernorm(hidden))  # type: ignore[no-any-return]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits `[V]` of one row `[E]` after the last layer."""
        return self._head(self._body.norm(hidden))  # type: ignore[no-any-return]


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin
