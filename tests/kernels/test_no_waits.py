"""The layer loop of a blend reads no value from a tensor, for which it would wait on a GPU.

Rows are chosen with values. Then the layers run on torch's meta device, where tensors have shapes but no values, so
that reading one fails. Kernels in Triton do nothing; their outputs are allocated before they are launched.
"""

from collections import defaultdict

import pytest
import torch
from models import random_model, random_tokens
from watching import KERNELS

from lmc.blend.blender import Blender, BlendInput
from lmc.blend.kernels import place_triton
from lmc.blend.segments import Placement
from lmc.blend.strategies import RecomputePolicy
from lmc.connectors.transformers.canvas import DenseCanvas
from lmc.connectors.transformers.layers import DecoderLayers

LAYERS, SIZE, AT = 3, 12, (5, 19, 33)  # the tokens of a document, and where documents begin
LENGTH = AT[-1] + SIZE + 8
WAITS = {
    "cpu": lambda keys: keys.cpu(),
    "to": lambda keys: keys.to("cpu"),
    "item": lambda keys: keys[0, 0, 0].item(),
    "tolist": lambda keys: keys.tolist(),
    "int": lambda keys: int(keys[0, 0, 0]),
    "if": lambda keys: bool(keys[0, 0, 0] > 0),
    "nonzero": lambda keys: keys.nonzero(),
    "unique": lambda keys: keys.unique(),
    "mask": lambda keys: keys[keys > 0],
    "masked_select": lambda keys: keys.masked_select(keys > 0),
}


def without_values(one):
    """Return the same with all tensors on the meta device."""
    if isinstance(one, torch.Tensor):
        return one.to("meta")
    if isinstance(one, list | tuple):
        parts = [without_values(part) for part in one]
        return type(one)(*parts) if hasattr(one, "_fields") else type(one)(parts)
    return one


def forget(thing) -> None:
    """Take the values from all tensors of an object."""
    for name in getattr(thing, "__slots__", None) or vars(thing):
        setattr(thing, name, without_values(getattr(thing, name)))


class MetaCanvas(DenseCanvas):
    """A canvas on the meta device. Its rows are described with values, and lose them when they run."""

    def __init__(self, placements, planted) -> None:
        model, (heads, dim) = random_model(layers=LAYERS), (2, 16)
        reader = iter([(layer, [*torch.randn(len(AT), 2, SIZE, heads, dim)]) for layer in range(LAYERS)])
        super().__init__(DecoderLayers(model), random_tokens(LENGTH, 0), placements, reader)
        self._planted = planted
        model.to("meta")
        forget(self)

    def run(self, layer, rows, batch, attention=None):
        forget(rows)
        super().run(layer, rows, batch, attention)
        self._planted(self.kv[layer][0])


class MetaBlender(Blender):
    """What is described before the layers loses its values then."""

    def _shifts(self, rows):
        shifts = super()._shifts(rows)
        for shift in shifts:
            forget(shift)
        return shifts

    def _probes(self, *described):
        return without_values(super()._probes(*described))

    def _scoring(self, layer, probe, paid):
        return super()._scoring(layer, probe, without_values(paid))


def blended(monkeypatch, strategy: str, planted=lambda keys: None) -> tuple[set[int], torch.Tensor]:
    """Blend on the meta device with something planted behind each layer; return the layers that ran, and logits."""
    monkeypatch.setenv("LMC_KERNELS", "triton")
    for module, name in KERNELS:
        monkeypatch.setattr(module, name, defaultdict(lambda: lambda *given, **named: None))
    monkeypatch.setattr(place_triton, "submit_of", lambda device: lambda copies: None)
    monkeypatch.setattr(place_triton, "can_submit", lambda memory: True)
    placements = [Placement(at=at, tokens=SIZE, first=0) for at in AT]
    canvas = MetaCanvas(placements, planted)
    given = BlendInput(length=LENGTH, stop=LENGTH, question=LENGTH - 6, placements=placements)
    policy = RecomputePolicy(strategy=strategy, ratios=(0.3,), correction="shift")
    with torch.inference_mode():
        return {done.layer for done in MetaBlender(canvas, given, policy).slices()}, canvas.logits


@pytest.mark.parametrize("strategy", ["union", "query", "head"])
def test_no_value_is_read_in_the_layers(monkeypatch, strategy):
    layers, logits = blended(monkeypatch, strategy)
    assert layers == set(range(LAYERS))
    assert logits.is_meta


@pytest.mark.parametrize("wait", WAITS)
def test_a_value_that_is_read_behind_a_layer_is_found(monkeypatch, wait):
    with pytest.raises((NotImplementedError, RuntimeError), match=r"[Mm]eta"):
        blended(monkeypatch, "union", WAITS[wait])
