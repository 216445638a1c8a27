"""The layer loop of a blend reads no value from a tensor, for which it would wait on a GPU.

Rows are chosen with values. Then the layers run on torch's meta device, where tensors have shapes but no values, so
that reading one fails. Kernels in Triton do nothing; their outputs are allocated before they are launched.
"""

import pytest
import torch
from models import random_model, random_tokens
from watching import READS, MetaBlender, forget, kernels_without_values

from lmc.blend.blender import BlendInput
from lmc.blend.segments import Placement
from lmc.blend.strategies import RecomputePolicy
from lmc.connectors.transformers.canvas import DenseCanvas
from lmc.connectors.transformers.layers import DecoderLayers

LAYERS, SIZE, AT = 3, 12, (5, 19, 33)  # the tokens of a document, and where documents begin
LENGTH = AT[-1] + SIZE + 8


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


def blended(monkeypatch, strategy: str, planted=lambda keys: None) -> tuple[set[int], torch.Tensor]:
    """Blend on the meta device with something planted behind each layer; return the layers that ran, and logits."""
    kernels_without_values(monkeypatch)
    placements = [Placement(at=at, tokens=SIZE, first=0) for at in AT]
    canvas = MetaCanvas(placements, planted)
    given = BlendInput(length=LENGTH, stop=LENGTH, question=LENGTH - 6, placements=placements)
    policy = RecomputePolicy(strategy=strategy, ratio=0.3, correction="shift")
    with torch.inference_mode():
        return {done.layer for done in MetaBlender(canvas, given, policy).slices()}, canvas.logits


@pytest.mark.parametrize("strategy", ["union", "query", "head"])
def test_no_value_is_read_in_the_layers(monkeypatch, strategy):
    layers, logits = blended(monkeypatch, strategy)
    assert layers == set(range(LAYERS))
    assert logits.is_meta


@pytest.mark.parametrize("wait", READS)
def test_a_value_that_is_read_behind_a_layer_is_found(monkeypatch, wait):
    with pytest.raises((NotImplementedError, RuntimeError), match=r"[Mm]eta"):
        blended(monkeypatch, "union", READS[wait])
