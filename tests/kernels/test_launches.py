"""Between two layers of a blend nothing waits for the GPU, and launches are few, however many documents there are.

The model's own layers do not count. On a CPU nothing has to wait, so this watches the calls that would on a GPU.
"""

import pytest
import torch
from amount import mostly_long
from models import random_model, random_tokens
from watching import Watch, watch_kernels, watched

from lmc.blend.blender import Blender, BlendInput
from lmc.blend.segments import Placement
from lmc.blend.strategies import RecomputePolicy
from lmc.connectors.transformers.canvas import DenseCanvas
from lmc.connectors.transformers.layers import DecoderLayers

LAUNCHES = 9  # in a layer of a pass
WEIGHTS = 14  # where the weights of a correction are computed, which is in one layer of a blend
LAYERS = 4


class WatchedCanvas(DenseCanvas):
    """The model's own layers do not count, and what a blend does within their attention does."""

    watch: Watch

    def run(self, layer, rows, batch, attention=None):
        def unwatched(part):
            def run():
                with self.watch.set(False):
                    return part()

            return run

        def attending(query, write, own):
            with self.watch.set(True):
                return attention(query, unwatched(write), unwatched(own))

        with self.watch.set(False):
            super().run(layer, rows, batch, attention and attending)


def blended(monkeypatch, documents: int, **policy):
    """Blend documents, and return what each slice launched."""
    watch = watch_kernels(monkeypatch)
    monkeypatch.setattr(WatchedCanvas, "watch", watch, raising=False)
    layers = DecoderLayers(random_model(layers=LAYERS))
    heads, dim, size = layers.shape.kv_heads, layers.shape.head_dim, 12
    placements = [Placement(at=5 + i * (size + 2), tokens=size, first=0) for i in range(documents)]
    tokens = random_tokens(5 + documents * (size + 2) + 6, 0)
    reader = iter([(layer, [*torch.randn(documents, 2, size, heads, dim)]) for layer in range(LAYERS)])
    canvas = WatchedCanvas(layers, tokens, placements, reader)
    given = BlendInput(length=len(tokens), stop=len(tokens), question=len(tokens) - 6, placements=placements)
    return watched(watch, Blender(canvas, given, RecomputePolicy(**policy)).slices())


@pytest.mark.parametrize("documents", mostly_long([1, 10], 10))
@pytest.mark.parametrize(
    "policy",
    [{"strategy": "union", "ratio": 0.3, "correction": "shift"}, {"strategy": "query", "ratio": 0.3},
     {"strategy": "head", "ratio": 0.3, "correction": "shift"}],
    ids=lambda one: one["strategy"],
)  # fmt: skip
def test_nothing_waits_and_launches_are_few(monkeypatch, policy, documents):
    found = blended(monkeypatch, documents, **policy)
    assert {layer for layer, *_ in found} == set(range(LAYERS))
    for layer, launched, waited in found:
        if layer == 0:
            continue  # Rows are chosen and described before it.
        assert not waited, launched
        assert len(launched) <= (WEIGHTS if "_alike" in launched else LAUNCHES), launched


def test_what_waits_is_seen():
    watch, values = Watch(), torch.arange(3)
    with watch.modes[0], watch.modes[1], watch.set(True):
        for wait in (
            values.cpu, values.tolist, values.nonzero, values[0].item, values[0].__int__, values[0].__bool__,
            lambda: values[values > 1], lambda: torch.tensor([1]), lambda: values.to(values.device),
            lambda: values.__setitem__(torch.clone(values), 1),
        ):  # fmt: skip
            wait()
            assert watch.take()[1]
        values + 1
        assert watch.take() == (["aten.add.Tensor"], [])
