"""Runs one decoder layer at a time, for causal language models of transformers.

The model's own layers run on the caller's rows. transformers lets a model call a registered attention function; lmc's
function passes queries, keys and values to the caller. What a layer passes to it in addition, such as its window and
its sinks, is the description of its attention. No model code is imported.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from transformers import AttentionInterface
from transformers.modeling_outputs import MoeModelOutputWithPast

from lmc.blend.canvas import KV, EndOfLayer
from lmc.blend.layer_attention import LayerAttention, absorbed
from lmc.blend.measured_rope import PROBED, Angles, rotations_by_layer, rotations_of, way_between
from lmc.blend.rope import check_rope
from lmc.connectors.transformers.hf import cache_argument, is_latent, max_positions, shape_of
from lmc.engine.identity import rope_name
from lmc.errors import UnsupportedModel

NAME = "lmc"  # name of lmc's attention function in transformers
BODY = "embed_tokens", "layers", "norm", "rotary_emb"  # modules of a model that lmc calls
KINDS = {"full_attention", "sliding_attention"}  # layers whose keys are hidden by nothing but a window

# A function that gets query [T, Q, D], key and value [T, H, D], and the other arguments of the attention function. It
# returns the attention's output [T, Q, D], or None to end the layer.
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, dict[str, Any]], torch.Tensor | None]
_ATTEND: ContextVar[Attend] = ContextVar("attend")


def _attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **named: Any
) -> tuple[torch.Tensor, None]:
    """Call the function in `_ATTEND` instead of an attention kernel.

    Raises `UnsupportedModel` if the layer has made a mask, because lmc calls layers without one.
    """
    if attention_mask is not None:
        raise UnsupportedModel("the model's layers make masks of their own, which lmc's attention does not know")
    rows = [one[0].transpose(0, 1) for one in (query, key, value)]
    attended = _ATTEND.get()(rows[0], rows[1], rows[2], named)
    if attended is None:
        raise EndOfLayer
    return attended[None], None


AttentionInterface.register(NAME, _attention)


class LatentRows:
    """Stands for the cache of a layer with MLA, and catches what the layer would keep of its rows."""

    rotated: torch.Tensor  # [T, 1, D]
    latent: torch.Tensor  # [T, 1, D]

    def update(self, latent: torch.Tensor, rotated: torch.Tensor, *_: Any, **__: Any) -> KV:
        """Catch the rows `[1, 1, T, D]`, and return them."""
        if latent.shape[1] > 1:
            raise UnsupportedModel("this version of transformers keeps keys and values of MLA by heads")
        self.latent, self.rotated = (one[0].transpose(0, 1) for one in (latent, rotated))
        return latent, rotated


class Projections(NamedTuple):
    """The projections of latent vectors to keys and values of each head."""

    keys: torch.Tensor  # [Q, D, L]
    values: torch.Tensor  # [Q, D, L]

    @classmethod
    def of(cls, attention: Any) -> "Projections":
        """Return the projections of an attention with MLA."""
        dims = attention.qk_nope_head_dim, attention.v_head_dim
        by_head = attention.kv_b_proj.weight.view(attention.num_heads, sum(dims), -1)
        return cls(*by_head.split(dims, dim=1))


class DecoderLayers:
    """The layers of a causal language model."""

    def __init__(self, model: Any) -> None:
        """Examine a model. Raises `UnsupportedModel` if lmc cannot run its layers exactly."""
        config = model.config.get_text_config(decoder=True)
        if not hasattr(config, "num_hidden_layers") or not all(
            hasattr(getattr(model, "model", None), name) for name in BODY
        ):
            raise UnsupportedModel(f"models of type {model.config.model_type!r} cannot be blended with transformers")
        kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
        if others := sorted(set(kinds) - KINDS):
            raise UnsupportedModel(f"models with layers of the kind {others[0]} cannot be blended with transformers")
        check_rope(getattr(config, "rope_parameters", None) or {})
        self._config, self._model, self._body, self._layers = config, model, model.model, model.model.layers
        weight, self._cache = self._body.embed_tokens.weight, cache_argument(model)
        self.latent = is_latent(config)
        self.kinds: list[str] = list(kinds)  # by layer
        self.vocabulary: int = config.vocab_size
        self.positions = max_positions(config)
        self.shape = shape_of(config, weight.dtype)
        self.device: torch.device = weight.device
        try:
            with torch.inference_mode():
                self._projections = [Projections.of(layer.self_attn) for layer in self._layers] if self.latent else []
                self._seen = self._examined()
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise UnsupportedModel(
                f"layers of models of type {config.model_type!r} cannot be called one by one: {error!r}"
            ) from error

    @property
    def depth(self) -> int:
        """The number of layers."""
        return len(self._layers)

    @property
    def longest_window(self) -> int:
        """The largest number in the configuration that may be a window, and is less than the longest prompt."""
        numbers = (value for name, value in vars(self._config).items() if "window" in name and isinstance(value, int))
        return max((number for number in numbers if number < self.positions), default=0)

    def angles(self, tokens: int) -> dict[str, Angles]:
        """Return the model's cos and sin of the positions 0…T-1, by kind of layer."""
        at = torch.arange(tokens, device=self.device)[None]
        probe, rope = torch.empty(0, dtype=self.shape.dtype, device=self.device), self._body.rotary_emb
        by_kind = "layer_type" in inspect.signature(rope.forward).parameters
        found = {
            kind: rope(probe, position_ids=at, **({"layer_type": kind} if by_kind else {})) for kind in set(self.kinds)
        }
        return {kind: Angles.of(one) for kind, one in found.items()}

    def attentions(self, angles: dict[str, Angles]) -> list[LayerAttention]:
        """Return the description of each layer's attention; keys can be moved between the positions of `angles`."""
        rotations = rotations_by_layer(self.kinds, [way for _, way in self._seen], angles)
        return [
            LayerAttention(**seen, rotation=rotation) for (seen, _), rotation in zip(self._seen, rotations, strict=True)
        ]

    @property
    def rope(self) -> str:
        """A name for the model's RoPE, as in `rope_name`."""
        rotations = [attention.rotation for attention in self.attentions(self.angles(1))]
        return rope_name(self._config.rope_parameters, interleaved=any(one.interleaved for one in rotations))

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the hidden states `[T, E]` before layer 0."""
        embedded: torch.Tensor = self._body.embed_tokens(tokens)
        return embedded * getattr(self._config, "embedding_multiplier", 1.0)

    def run(
        self, layer: int, hidden: torch.Tensor, positions: torch.Tensor, angles: Angles, attend: Attend
    ) -> torch.Tensor | None:
        """Run a layer on rows `hidden [T, E]` at `positions [T]`, and return the rows after it.

        The attention is computed by `attend`; if that ends the layer, the result is None.
        """
        more: dict[str, Any] = {}
        if self.latent:
            more[self._cache] = rows = LatentRows()
            attend = self._by_heads(self._projections[layer], rows, attend)
        usual, token = self._config._attn_implementation, _ATTEND.set(attend)
        self._config._attn_implementation = NAME
        try:
            out = self._layers[layer](
                hidden[None], attention_mask=None, position_ids=positions[None],
                position_embeddings=angles.embeddings(), **more,
            )  # fmt: skip
        except EndOfLayer:
            return None
        finally:
            self._config._attn_implementation = usual
            _ATTEND.reset(token)
        found: torch.Tensor = (out[0] if isinstance(out, tuple) else out)[0]
        return found

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits `[V]` of one row `[E]` after the last layer."""
        normed, model = self._body.norm(hidden)[None, None], self._model
        token = torch.zeros(1, 1, dtype=torch.long, device=hidden.device)
        # The model itself computes its head, which may scale logits. Its body returns the given row instead.
        with _replaced(self._body, "forward", lambda *_, **__: MoeModelOutputWithPast(last_hidden_state=normed)):
            return model(input_ids=token, use_cache=False).logits[0, -1]  # type: ignore[no-any-return]

    # -- inside ------------------------------------------------------------------------------------------------------

    @staticmethod
    def _by_heads(projections: Projections, rows: LatentRows, attend: Attend) -> Attend:
        """Return an attention function for a layer with MLA, which calls `attend` with latent rows."""

        def attend_by_heads(query: torch.Tensor, *others: Any) -> torch.Tensor | None:
            attended = attend(absorbed(query, projections.keys), rows.rotated, rows.latent, others[-1])
            return None if attended is None else torch.einsum("tql,qdl->tqd", attended, projections.values)

        return attend_by_heads

    def _examined(self) -> list[tuple[dict[str, Any], int | None]]:
        """Return what a query of each layer sees, and the index of its rotation; None if its keys do not rotate.

        The layers project the same hidden state at two positions.
        """
        angles, hidden = self.angles(PROBED + 1), self.embed(torch.ones(1, dtype=torch.long, device=self.device))
        ends = [torch.tensor([position], device=self.device) for position in (0, PROBED)]
        found = []
        for layer, kind in enumerate(self.kinds):
            (first, named), (moved, _) = (self._projected(layer, hidden, at, angles[kind].at(at)) for at in ends)
            if first.shape[1:] != (self.shape.kv_heads, self.shape.head_dim):
                raise UnsupportedModel("the model's layers have KV heads of different numbers or sizes")
            window = int(named.get("sliding_window") or 0)
            if not window and self._has_window(kind):
                raise UnsupportedModel("the model's windows are in its masks alone, which lmc does not read")
            seen = {
                "scale": float(named["scaling"]),
                "window": window,
                "sinks": named.get("s_aux"),
                "soft_cap": float(named.get("softcap") or 0.0),
                "latent": self.latent,
            }
            rotations = [rotation.between(*ends) for rotation in rotations_of(angles[kind])]
            found.append((seen, way_between(first, moved, rotations)))
        return found

    def _has_window(self, kind: str) -> bool:
        """Return whether the configuration gives layers of this kind a window that is shorter than a prompt may be."""
        window = getattr(self._config, "sliding_window", None)
        windowed = kind == "sliding_attention" or not getattr(self._config, "layer_types", None)
        return windowed and window is not None and window < self.positions

    def _projected(
        self, layer: int, hidden: torch.Tensor, at: torch.Tensor, angles: Angles
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Return the keys `[T, H, D]` of some rows, and what the layer passes to its attention function in addition."""
        found: list[tuple[torch.Tensor, dict[str, Any]]] = []
        self.run(layer, hidden, at, angles, lambda _, key, __, named: found.append((key, named)))
        return found[0]


@contextmanager
def _replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute of a module in this context. The module may have its own, as modules of accelerate do."""
    own = vars(module).get(name)
    setattr(module, name, value)
    try:
        yield
    finally:
        delattr(module, name) if own is None else setattr(module, name, own)
