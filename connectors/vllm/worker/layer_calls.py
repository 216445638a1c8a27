"""Calls decoder layers one by one: those of vLLM's own models, and those of transformers inside of vLLM.

vLLM serves architectures that it does not implement with the layers of transformers, whose attention it replaces (its
transformers backend). Both kinds get what the model itself passes to them.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch

from lmc.blend.canvas import EndOfLayer
from lmc.blend.measured_rope import PROBED, Angles, rotations_by_layer, rotations_of, way_between
from lmc.blend.rope import Rotation
from lmc.errors import UnsupportedModel

PASSED = {"positions", "hidden_states", "residual"}  # what lmc can pass to a layer of vLLM
ANGLES = "position_embeddings"  # cos and sin of the rows, for a layer of transformers
PART = 4096  # positions whose angles are computed at once

Given = dict[str, Any]  # what a layer gets in addition to hidden states
RunModel = Callable[[torch.Tensor], None]  # runs the model on one token at `positions [T]`
KeysAt = Callable[[int, torch.Tensor], torch.Tensor]  # the keys [T, H, D] of that token in a layer, at `positions [T]`


class OwnLayers:
    """Layers of vLLM's own models, which are called with positions, hidden states and perhaps a residual."""

    def __init__(self, layers: Sequence[Any]) -> None:
        self._layers, self._signature = layers, inspect.signature(layers[0].forward)
        self.takes_residual = "residual" in self._signature.parameters

    def begin(self, run: Callable[[], None]) -> tuple[torch.Tensor, list[Given]]:
        """Return the hidden states `[T, E]` before layer 0, and what each layer gets in addition; here nothing.

        `run` runs the model on the rows. Raises `UnsupportedModel` if the model passes more to its layers.
        """
        caught: list[torch.Tensor] = []

        def catch(_: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
            given = self._signature.bind(*arguments, **named).arguments
            if more := [name for name, value in given.items() if value is not None and name not in PASSED]:
                raise UnsupportedModel(f"its layers are called with {', '.join(more)}")
            caught.append(given["hidden_states"])
            raise EndOfLayer

        handle = self._layers[0].register_forward_pre_hook(catch, with_kwargs=True)
        try:
            with suppress(EndOfLayer):
                run()
        finally:
            handle.remove()
        return caught[0], [{}] * len(self._layers)

    def call(
        self, layer: int, states: torch.Tensor, residual: torch.Tensor | None, positions: torch.Tensor, given: Given
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Call a layer with rows `[T, E]`, and return the states and the residual after it."""
        more = {"residual": residual if layer else None} if self.takes_residual else {}
        found = self._layers[layer](positions=positions, hidden_states=states, **more)
        return found if isinstance(found, tuple) else (found, None)


class TransformersLayers:
    """Layers of transformers, with rows `[1, T, E]`. What they get is caught when the model passes it to them."""

    takes_residual = False

    def __init__(self, layers: Sequence[Any]) -> None:
        self._layers = layers

    def begin(self, run: Callable[[], None]) -> tuple[torch.Tensor, list[Given]]:
        """See `OwnLayers.begin`. Raises `UnsupportedModel` if the model passes something unknown."""
        caught: list[tuple[torch.Tensor, Given]] = []
        with self._caught(caught), suppress(EndOfLayer):
            run()
        return caught[0][0][0], [given for _, given in caught]

    @contextmanager
    def _caught(self, caught: list[tuple[torch.Tensor, Given]]) -> Iterator[None]:
        """In this context, layers catch what they get, and return the hidden states as they are."""

        def forward(hidden_states: torch.Tensor, *more: Any, **given: Any) -> torch.Tensor:
            if any(one is not None for one in more) or not isinstance(given.get(ANGLES), tuple | torch.Tensor):
                raise UnsupportedModel("lmc does not know what its layers are called with")
            caught.append((hidden_states, given | {"attention_mask": None}))
            if len(caught) == len(self._layers):
                raise EndOfLayer
            return hidden_states

        for layer in self._layers:
            layer.forward = forward
        try:
            yield
        finally:
            for layer in self._layers:
                del layer.forward

    def call(
        self, layer: int, states: torch.Tensor, residual: torch.Tensor | None, positions: torch.Tensor, given: Given
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `OwnLayers.call`."""
        found = self._layers[layer](states[None], **given)
        return (found[0] if isinstance(found, tuple) else found)[0], None

    def rotations(self, run: RunModel, keys_at: KeysAt, longest: int, device: torch.device) -> list[Rotation]:
        """Return the rotation of each layer, for positions up to `longest`."""
        found: list[list[Given]] = []
        for start in range(0, longest, PART):
            positions = torch.arange(start, min(start + PART, longest), device=device)
            found.append(self.begin(partial(run, positions))[1])
        first = [given[ANGLES] for given in found[0]]  # Layers with the same RoPE get the same tensors.
        kinds = [next(i for i, other in enumerate(first) if other is one) for one in first]
        angles = {kind: Angles.together([Angles.of(part[kind][ANGLES]) for part in found]) for kind in set(kinds)}
        ends = torch.tensor([0, PROBED], device=device)
        ways = []
        for layer, kind in enumerate(kinds):
            keys = keys_at(layer, ends)
            turns = [rotation.turn(ends[:1], ends[1:]) for rotation in rotations_of(angles[kind])]
            ways.append(way_between(keys[:1], keys[1:], turns))
        return rotations_by_layer(kinds, ways, angles)


def calls_of(layers: Sequence[Any]) -> OwnLayers | TransformersLayers:
    """Return how the layers of a model are called. Raises `UnsupportedModel` if lmc does not know."""
    for kind in {type(layer): layer for layer in layers}.values():
        parameters = inspect.signature(kind.forward).parameters
        if ANGLES in parameters:
            return TransformersLayers(layers)
        named = [one for one in parameters.values() if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
        more = [one.name for one in named if one.default is one.empty and one.name not in PASSED]
        if more or not {"positions", "hidden_states"} <= parameters.keys():
            raise UnsupportedModel(f"its layers are called with {', '.join(one.name for one in named)}")
    return OwnLayers(layers)


def rows_of(given: Given, rows: slice | torch.Tensor, count: int) -> Given:
    """Return what some of `count` rows get."""
    return {name: _rows_of(value, rows, count) for name, value in given.items()}


def _rows_of(value: Any, rows: slice | torch.Tensor, count: int) -> Any:
    if isinstance(value, tuple):
        return tuple(_rows_of(one, rows, count) for one in value)
    by_row = isinstance(value, torch.Tensor) and value.dim() > 1 and value.shape[1] == count
    return value[:, rows] if by_row else value
