"""Runs one decoder layer at a time, for causal language models of transformers.

The model's own layers run on the caller's rows. transformers lets a model call a registered attention function; lmc's
function passes queries, keys and values to the caller. What a layer passes to it in addition, such as its window and
its sinks, is the description of its attention. No model code is imported.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from transformers import AttentionInterface
from transformers.modeling_outputs import MoeModelOutputWithPast

from lmc.blend.canvas import EndOfLayer
from lmc.blend.kernels.shift import rotated
from lmc.blend.layer_attention import LayerAttention
from lmc.blend.rope import UNROTATED, Rotation, Turn, check_rope
from lmc.blend.selftest import FLOOR, difference
from lmc.errors import UnsupportedModel
from lmc.shapes import KVShape

NAME = "lmc"  # of lmc's attention function in transformers
KINDS = {"full_attention", "sliding_attention"}  # layers whose keys are hidden by nothing but a window
PROBED = 7  # position at which the keys of a layer are compared with those at position 0

# A function that gets query [T, Q, D], key and value [T, H, D], and the other arguments of the attention function. It
# returns the attention's output [T, Q, D], or None to end the layer.
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, dict[str, Any]], torch.Tensor | None]
_ATTEND: ContextVar[Attend] = ContextVar("attend")


def _attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **named: Any
) -> tuple[torch.Tensor, None]:
    """Call the function in `_ATTEND` instead of an attention kernel."""
    rows = [one[0].transpose(0, 1) for one in (query, key, value)]
    attended = _ATTEND.get()(rows[0], rows[1], rows[2], named)
    if attended is None:
        raise EndOfLayer
    return attended[None], None


AttentionInterface.register(NAME, _attention)


class Angles(NamedTuple):
    """The model's own cos and sin of some positions, `[T, R]` each, for one kind of layer."""

    cos: torch.Tensor
    sin: torch.Tensor

    def at(self, positions: torch.Tensor) -> "Angles":
        """Return the rows at `positions [T]`."""
        return Angles(self.cos[positions], self.sin[positions])


class DecoderLayers:
    """The layers of a causal language model."""

    def __init__(self, model: Any) -> None:
        """Examine a model. Raises `UnsupportedModel` if lmc cannot run its layers exactly."""
        config = model.config
        kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
        if others := sorted(set(kinds) - KINDS):
            raise UnsupportedModel(f"models with layers of the kind {others[0]} cannot be blended with transformers")
        if not all(hasattr(getattr(model, "model", None), name) for name in ("embed_tokens", "layers", "rotary_emb")):
            raise UnsupportedModel(f"models of type {config.model_type!r} cannot be blended with transformers")
        check_rope(getattr(config, "rope_parameters", None) or {})
        self._config, self._model, self._body, self._layers = config, model, model.model, model.model.layers
        weight, heads = self._body.embed_tokens.weight, config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        self.kinds: list[str] = list(kinds)  # by layer
        self.vocabulary: int = config.vocab_size
        self.positions: int = config.max_position_embeddings
        self.shape = KVShape(layers=self.depth, kv_heads=kv_heads, head_dim=head_dim, dtype=weight.dtype)
        self.device: torch.device = weight.device
        try:
            with torch.inference_mode():
                self._seen = self._examined()
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise UnsupportedModel(
                f"layers of models of type {config.model_type!r} cannot be called one by one: {error!r}"
            ) from error

    @property
    def depth(self) -> int:
        """The number of layers."""
        return len(self._layers)

    def angles(self, tokens: int) -> dict[str, Angles]:
        """Return the model's cos and sin of the positions 0…T-1, by kind of layer."""
        at = torch.arange(tokens, device=self.device)[None]
        probe, rope = torch.empty(0, dtype=self.shape.dtype, device=self.device), self._body.rotary_emb
        by_kind = "layer_type" in inspect.signature(rope.forward).parameters
        found = {
            kind: rope(probe, position_ids=at, **({"layer_type": kind} if by_kind else {})) for kind in set(self.kinds)
        }
        return {kind: Angles(cos[0], sin[0]) for kind, (cos, sin) in found.items()}

    def attentions(self, angles: dict[str, Angles]) -> list[LayerAttention]:
        """Return the description of each layer's attention; keys can be moved between the positions of `angles`."""
        made: dict[tuple[str, int], Rotation] = {}
        for kind, (_, way) in zip(self.kinds, self._seen, strict=True):
            if way is not None and (kind, way) not in made:
                made[kind, way] = list(_rotations(angles[kind]))[way]
        return [
            LayerAttention(**seen, rotation=UNROTATED if way is None else made[kind, way])
            for kind, (seen, way) in zip(self.kinds, self._seen, strict=True)
        ]

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
        usual, token = self._config._attn_implementation, _ATTEND.set(attend)
        self._config._attn_implementation = NAME
        try:
            rotation = angles.cos[None], angles.sin[None]
            out = self._layers[layer](
                hidden[None], attention_mask=None, position_ids=positions[None], position_embeddings=rotation
            )
        except EndOfLayer:
            return None
        finally:
            self._config._attn_implementation = usual
            _ATTEND.reset(token)
        rows: torch.Tensor = (out[0] if isinstance(out, tuple) else out)[0]
        return rows

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits `[V]` of one row `[E]` after the last layer."""
        normed, model = self._body.norm(hidden)[None, None], self._model
        token = torch.zeros(1, 1, dtype=torch.long, device=hidden.device)
        # The model itself computes its head, which may scale logits. Its body returns the given row instead.
        with _replaced(self._body, "forward", lambda *_, **__: MoeModelOutputWithPast(last_hidden_state=normed)):
            return model(input_ids=token, use_cache=False).logits[0, -1]  # type: ignore[no-any-return]

    # -- inside ------------------------------------------------------------------------------------------------------

    def _examined(self) -> list[tuple[dict[str, Any], int | None]]:
        """Return scale, window and sinks of each layer, and the index of its rotation; None if its keys do not rotate.

        The layers project the same hidden state at two positions.
        """
        angles, hidden = self.angles(PROBED + 1), self.embed(torch.ones(1, dtype=torch.long, device=self.device))
        ends = [torch.tensor([position], device=self.device) for position in (0, PROBED)]
        found = []
        for layer, kind in enumerate(self.kinds):
            (first, named), (moved, _) = (self._projected(layer, hidden, at, angles[kind].at(at)) for at in ends)
            if first.shape[1:] != (self.shape.kv_heads, self.shape.head_dim):
                raise UnsupportedModel("its layers have KV heads of different numbers or sizes")
            if named.get("softcap"):
                what = "a soft cap of its logits, which lmc's attention does not support"
                raise UnsupportedModel(f"its attention has {what}")
            seen = {
                "scale": float(named["scaling"]),
                "window": int(named.get("sliding_window") or 0),
                "sinks": named.get("s_aux"),
            }
            turns = [rotation.turn(*ends) for rotation in _rotations(angles[kind])]
            found.append((seen, _way(first, moved, turns)))
        return found

    def _projected(
        self, layer: int, hidden: torch.Tensor, at: torch.Tensor, angles: Angles
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Return the keys `[T, H, D]` of some rows, and what the layer passes to its attention function in addition."""
        found: list[tuple[torch.Tensor, dict[str, Any]]] = []
        self.run(layer, hidden, at, angles, lambda _, key, __, named: found.append((key, named)))
        return found[0]


def _way(first: torch.Tensor, moved: torch.Tensor, turns: Sequence[Turn]) -> int | None:
    """Return the index of the rotation that makes `moved` of the keys `first`; None if they are equal.

    Raises `UnsupportedModel` if there is none.
    """
    allowed = FLOOR[first.dtype]
    if difference(first, moved) <= allowed:
        return None
    for way, turn in enumerate(turns):
        fits = 2 * turn.cos.shape[-1] <= first.shape[-1]
        if fits and difference(rotated(first, turn), moved) <= allowed:
            return way
    raise UnsupportedModel("its keys at two positions are not rotations of each other")


@contextmanager
def _replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute of a module in this context. The module may have its own, as modules of accelerate do."""
    own = vars(module).get(name)
    setattr(module, name, value)
    try:
        yield
    finally:
        delattr(module, name) if own is None else setattr(module, name, own)


def _rotations(angles: Angles) -> Iterator[Rotation]:
    """Yield the rotations that a model may make of its cos and sin: they have each angle twice, in two orders, or once.

    Either of the two ways to pair dimensions goes with each.
    """
    half = angles.cos.shape[-1] // 2
    for columns in (slice(0, half), slice(0, None, 2), slice(None)):
        for interleaved in (False, True):
            yield Rotation(angles.cos[:, columns], angles.sin[:, columns], interleaved)
