"""A blend waits once for a GPU: for the scores of its first pass.

The canvas is on torch's meta device, where tensors have shapes but no values, so that reading one fails. Kernels in
Triton do nothing; their outputs are allocated before they are launched.
"""

import pytest
import torch
from models import random_model, random_tokens
from watching import READS, SENDS, MetaBlender, NoWaits, Waited, kernels_without_values

from lmc.blend.blender import BlendInput
from lmc.blend.segments import Placement
from lmc.blend.strategies import RecomputePolicy
from lmc.connectors.transformers.canvas import DenseCanvas
from lmc.connectors.transformers.layers import DecoderLayers

LAYERS, SIZE, AT = 3, 12, (5, 19, 33)  # the tokens of a document, and where documents begin
LENGTH = AT[-1] + SIZE + 8


class MetaCanvas(DenseCanvas):
    """A canvas on the meta device."""

    def __init__(self, placements, planted) -> None:
        model, (heads, dim) = random_model(layers=LAYERS), (2, 16)
        layers = DecoderLayers(model)
        layers.device = model.to("meta").device
        reader = iter([(layer, [*torch.randn(len(AT), 2, SIZE, heads, dim)]) for layer in range(LAYERS)])
        super().__init__(layers, random_tokens(LENGTH, 0), placements, reader)
        self._planted = planted

    def run(self, layer, rows, batch, attention=None):
        super().run(layer, rows, batch, attention)
        self._planted(self.kv[layer][0])


def blended(monkeypatch, strategy: str, planted=lambda keys: None) -> tuple[set[int], int, int, torch.Tensor]:
    """Blend with something planted after each layer.

    Returns the layers that ran, the numbers of waits and of uploads, and logits.
    """
    kernels_without_values(monkeypatch)
    placements = [Placement(at=at, tokens=SIZE, first=0) for at in AT]
    given = BlendInput(length=LENGTH, stop=LENGTH, question=LENGTH - 6, placements=placements)
    policy = RecomputePolicy(strategy=strategy, ratio=0.3, correction="shift")
    canvas = MetaCanvas(placements, planted)
    with torch.inference_mode(), NoWaits() as watch:
        blender = MetaBlender(canvas, given, policy)
        return {done.layer for done in blender.slices()}, blender.waits, watch.uploads, canvas.logits


@pytest.mark.parametrize(
    ("strategy", "waits", "uploads"), [("union", 1, 2), ("query", 1, 2), ("deviation", 1, 3), ("head", 0, 1)]
)
def test_a_blend_waits_for_scores_and_for_nothing_else(monkeypatch, strategy, waits, uploads):
    """Each pass begins with one upload. `deviation` has one more to read the stored keys, and one for its choice."""
    layers, waited, uploaded, logits = blended(monkeypatch, strategy)
    assert layers == set(range(LAYERS))
    assert (waited, uploaded) == (waits, uploads)
    assert logits.is_meta


@pytest.mark.parametrize("wait", READS)
def test_a_value_that_is_read_behind_a_layer_is_found(monkeypatch, wait):
    with pytest.raises((NotImplementedError, RuntimeError), match=r"[Mm]eta"):
        blended(monkeypatch, "union", READS[wait])


@pytest.mark.parametrize("send", SENDS)
def test_numbers_that_are_sent_and_waited_for_are_found(monkeypatch, send):
    with pytest.raises(Waited):
        blended(monkeypatch, "union", SENDS[send])
