"""Calls decoder layers one by one: those of vLLM's own models, and those of transformers inside of vLLM.

vLLM serves architectures that it does not implement with the layers of transformers, whose attention it replaces (its
transformers backend). Both kinds get what the model itself passes to them.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from itertools import chain
from typing import Any

import torch

from lmc.blend.canvas import EndOfLayer
from lmc.blend.measured_rope import PROBED, Angles, rotations_by_layer, rotations_of, way_between
from lmc.blend.rope import Rotation
from lmc.errors import UnsupportedModel

POSITIONS = {"positions", "position_ids"}  # how layers of vLLM name the positions of their rows
PASSED = POSITIONS | {"hidden_states", "residual"}  # what lmc passes to each of these layers
NUMBER = {"idx"}  # how layers of vLLM name their number in the model (Hunyuan V3)
OF_LAYER = {"per_layer_input"}  # what the model passes to a layer of its own, by row (Gemma 4)
EMBEDDED = 2  # dimensions of hidden states `[T, E]`
ANGLES = "position_embeddings"  # cos and sin of the rows, for a layer of transformers
PART = 4096  # positions whose angles are computed at once

Group = Sequence[Any]  # layers that are called one after another; exactly one has attention
Given = dict[str, Any]  # what a layer gets in addition to hidden states
RunModel = Callable[[torch.Tensor], None]  # runs the model on one token at `positions [T]`
After = tuple[torch.Tensor, torch.Tensor]  # rows `[T, E]` after a layer: the hidden states and the residual
KeysAt = Callable[[int, torch.Tensor], torch.Tensor]  # the keys [T, H, D] of that token in a layer, at `positions [T]`


class OwnLayers:
    """Layers of vLLM's own models, which are called with positions, hidden states and perhaps a residual.

    A token may have several hidden states (AltUp in Gemma 3n, arXiv 2301.13310). Layers get these as `[S, T, E]`.
    """

    def __init__(self, groups: Sequence[Group]) -> None:
        self._groups, self._layers = groups, list(chain(*groups))
        self._signature = inspect.signature(self._layers[0].forward)
        self.takes_residual = "residual" in self._signature.parameters
        (self._positions,) = POSITIONS & self._signature.parameters.keys()
        self._of_layer = OF_LAYER & self._signature.parameters.keys()
        numbers = {layer: {name: number} for number, layer in enumerate(self._layers) for name in NUMBER}
        self._number: dict[Any, Given] = numbers if NUMBER & self._signature.parameters.keys() else {}
        self._returned: list[type] = [tuple] * len(groups)  # by group

    def begin(self, run: Callable[[], None]) -> tuple[torch.Tensor, list[Given]]:
        """Return the hidden states `[T, E]` before layer 0, and what each group of layers gets in addition.

        `run` runs the model on the rows. Raises `UnsupportedModel` if the model passes something unknown to its layers.
        """
        caught: list[Given] = []
        wanted = len(self._layers) if self._of_layer else 1

        def catch(*arguments: Any, **named: Any) -> Any:
            given = self._signature.bind(*arguments, **named).arguments
            given = {name: value for name, value in given.items() if value is not None}
            if more := given.keys() - PASSED - NUMBER - self._of_layer:
                raise UnsupportedModel(f"the model's layers are called with {', '.join(sorted(more))}")
            caught.append(given)
            if len(caught) == wanted:
                raise EndOfLayer
            return (given["hidden_states"], None) if self.takes_residual else given["hidden_states"]

        with _replaced(self._layers, [catch] * len(self._layers)), suppress(EndOfLayer):
            run()
        of_layers = [{name: given[name][None] for name in self._of_layer & given.keys()} for given in caught]
        states: torch.Tensor = caught[0]["hidden_states"]
        return _by_row(states), of_layers if self._of_layer else [{}] * len(self._groups)

    def call(
        self, group: int, states: torch.Tensor, residual: torch.Tensor | None, positions: torch.Tensor, given: Given
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Call a group with rows `[T, E]`, and return the states and the residual that the next layer takes."""
        same = {self._positions: positions, **{name: rows[0] for name, rows in given.items()}}
        residual = residual if group else None
        for layer in self._groups[group]:
            more = {"residual": residual} if self.takes_residual else {}
            found = layer(hidden_states=_by_row(states), **same, **more, **self._number.get(layer, {}))
            self._returned[group] = type(found)
            states, residual = found if isinstance(found, tuple) else (_by_row(found), None)
        return states, residual if self.takes_residual else None  # StableLM returns one that no layer takes.

    def answered(self, after: Sequence[After]) -> AbstractContextManager[None]:
        """Return a context in which each layer returns what its group has returned, whatever it gets."""
        of_groups = zip(self._groups, self._returned, after, strict=True)
        answers = [[one if form is tuple else one[0]] * len(group) for group, form, one in of_groups]
        return _replaced(self._layers, list(map(_answering, chain(*answers))))


class TransformersLayers:
    """Layers of transformers, with rows `[1, T, E]`. What they get is caught when the model passes it to them."""

    takes_residual = False

    def __init__(self, groups: Sequence[Group]) -> None:
        """Raise `UnsupportedModel` if a layer has no attention."""
        self._layers, self._in_tuple = list(chain(*groups)), False
        if len(self._layers) > len(groups):
            raise UnsupportedModel("a layer has no attention")

    def begin(self, run: Callable[[], None]) -> tuple[torch.Tensor, list[Given]]:
        """See `OwnLayers.begin`. Raises `UnsupportedModel` if the model passes something unknown."""
        caught: list[tuple[torch.Tensor, Given]] = []

        def catch(hidden_states: torch.Tensor, *more: Any, **given: Any) -> torch.Tensor:
            if any(one is not None for one in more) or not isinstance(given.get(ANGLES), tuple | torch.Tensor):
                raise UnsupportedModel("lmc does not know what its layers are called with")
            caught.append((hidden_states, given | {"attention_mask": None}))
            if len(caught) == len(self._layers):
                raise EndOfLayer
            return hidden_states

        with _replaced(self._layers, [catch] * len(self._layers)), suppress(EndOfLayer):
            run()
        return caught[0][0][0], [given for _, given in caught]

    def call(
        self, layer: int, states: torch.Tensor, residual: torch.Tensor | None, positions: torch.Tensor, given: Given
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `OwnLayers.call`."""
        found = self._layers[layer](states[None], **given)
        self._in_tuple = isinstance(found, tuple)
        return (found[0] if self._in_tuple else found)[0], None

    def answered(self, after: Sequence[After]) -> AbstractContextManager[None]:
        """See `OwnLayers.answered`."""
        rows = [states[None] for states, _ in after]
        return _replaced(self._layers, [_answering((one,) if self._in_tuple else one) for one in rows])

    def rotations(
        self, run: RunModel, keys_at: KeysAt, longest: int, device: torch.device, part: int = PART
    ) -> list[Rotation]:
        """Return the rotation of each layer, for positions up to `longest`, computed for `part` of them at once."""
        found: list[list[Given]] = []
        for start in range(0, longest, part):
            positions = torch.arange(start, min(start + part, longest), device=device)
            found.append(self.begin(partial(run, positions))[1])
        first = [given[ANGLES] for given in found[0]]  # Layers with the same RoPE get the same tensors.
        kinds = [next(i for i, other in enumerate(first) if other is one) for one in first]
        angles = {kind: Angles.together([Angles.of(given[kind][ANGLES]) for given in found]) for kind in set(kinds)}
        ends = torch.tensor([0, PROBED], device=device)
        ways = []
        for layer, kind in enumerate(kinds):
            keys = keys_at(layer, ends)
            rotations = [rotation.between(ends[:1], ends[1:]) for rotation in rotations_of(angles[kind])]
            ways.append(way_between(keys[:1], keys[1:], rotations))
        return rotations_by_layer(kinds, ways, angles)


@contextmanager
def _replaced(layers: Sequence[Any], calls: Sequence[Callable[..., Any]]) -> Iterator[None]:
    """In this context, these functions are called instead of the layers."""
    for layer, call in zip(layers, calls, strict=True):
        layer.forward = call
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _answering(answer: Any) -> Callable[..., Any]:
    """Return a function that returns this answer, whatever it gets."""
    return lambda *_, **__: answer


def _by_row(states: torch.Tensor) -> torch.Tensor:
    """Return hidden states `[S, T, E]` as `[T, S, E]` or the other way around; `[T, E]` stay as they are."""
    return states.transpose(0, 1).contiguous() if states.dim() > EMBEDDED else states


def calls_of(groups: Sequence[Group]) -> OwnLayers | TransformersLayers:
    """Return how the layers of a model are called. Raises `UnsupportedModel` if lmc does not know."""
    for kind in {type(layer): layer for layer in chain(*groups)}.values():
        parameters = inspect.signature(kind.forward).parameters
        if ANGLES in parameters:
            return TransformersLayers(groups)
        named = [one for one in parameters.values() if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
        if not POSITIONS & parameters.keys():
            raise UnsupportedModel("the model's layers get no positions, and lmc moves keys by RoPE only")
        more = [one.name for one in named if one.default is one.empty and one.name not in PASSED | OF_LAYER]
        if more or "hidden_states" not in parameters or len(POSITIONS & parameters.keys()) != 1:
            raise UnsupportedModel(f"the model's layers are called with {', '.join(one.name for one in named)}")
    return OwnLayers(groups)


def rows_of(given: Given, rows: slice | torch.Tensor, count: int) -> Given:
    """Return what some of `count` rows get."""
    return {name: _rows_of(value, rows, count) for name, value in given.items()}


def _rows_of(value: Any, rows: slice | torch.Tensor, count: int) -> Any:
    if isinstance(value, tuple):
        return tuple(_rows_of(one, rows, count) for one in value)
    by_row = isinstance(value, torch.Tensor) and value.dim() > 1 and value.shape[1] == count
    return value[:, rows] if by_row else value


def joined(parts: Sequence[Given]) -> Given:
    """Return what the rows of several calls get, one after another."""
    return {name: _joined([part[name] for part in parts]) for name in parts[0]}


def _joined(values: Sequence[Any]) -> Any:
    if isinstance(values[0], tuple):
        return tuple(_joined(one) for one in zip(*values, strict=True))
    by_row = isinstance(values[0], torch.Tensor) and values[0].dim() > 1
    return torch.cat(list(values), dim=1) if by_row else values[0]
