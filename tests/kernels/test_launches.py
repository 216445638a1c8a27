"""Between two layers of a blend nothing waits for the GPU, and launches are few, however many documents there are.

The model's own layers do not count. On a CPU nothing has to wait, so this watches the calls that would on a GPU.
"""

from contextlib import contextmanager

import pytest
import torch
from models import random_model, random_tokens
from test_copies import execute
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lmc.blend.blender import Blender, BlendInput
from lmc.blend.kernels import attention_triton, place_triton, shift_triton
from lmc.blend.segments import Placement
from lmc.blend.strategies import RecomputePolicy
from lmc.connectors.transformers.canvas import DenseCanvas
from lmc.connectors.transformers.layers import DecoderLayers

LAUNCHES = 12  # in a layer of a pass
WEIGHTS = 45  # where the weights of a correction are computed, which is in one layer of a blend
LAYERS = 4
WAITS = {"cpu", "item", "tolist", "__int__", "__bool__", "__float__", "__index__", "nonzero", "unique",
         "unique_consecutive", "isin", "masked_select", "argwhere", "numpy", "bincount"}  # fmt: skip
KERNELS = [
    (attention_triton, "_attend"), (attention_triton, "_paid"), (place_triton, "_place"), (place_triton, "_gather"),
    (place_triton, "_deviation"), (shift_triton, "_changes"), (shift_triton, "_correct"),
]  # fmt: skip


class Watch:
    """What has been launched since the last look, and what would have waited."""

    def __init__(self) -> None:
        self.launched, self.waited, self._on = [], [], False
        watch = self

        class Waits(TorchFunctionMode):
            def __torch_function__(self, function, types, args=(), kwargs=None):
                if watch._on:
                    watch.called(function.__name__, args, kwargs or {})
                return function(*args, **(kwargs or {}))

        class Launches(TorchDispatchMode):
            def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
                made = operation(*args, **(kwargs or {}))
                if watch._on and not operation.is_view and "empty" not in str(operation):
                    watch.launched.append(str(operation))
                return made

        self.modes = Waits(), Launches()

    def called(self, name: str, args, kwargs) -> None:
        masked = name in ("__getitem__", "__setitem__") and _has_mask(args[1])
        from_host = name == "tensor" or (name in ("as_tensor", "to") and "device" in kwargs)
        if name in WAITS or masked or from_host:
            self.waited.append(name)

    @contextmanager
    def set(self, on: bool):
        before, self._on = self._on, on
        try:
            yield
        finally:
            self._on = before

    def take(self) -> tuple[list[str], list[str]]:
        found, self.launched, self.waited = (self.launched, self.waited), [], []
        return found


def _has_mask(index) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, torch.Tensor) and part.dtype is torch.bool for part in parts)


class Counted:
    """A kernel, each call of which is one launch."""

    def __init__(self, kernel, watch: Watch) -> None:
        self._kernel, self._watch = kernel, watch

    def __getitem__(self, grid):
        def run(*args, **named):
            self._watch.launched.append(self._kernel.__name__)
            with self._watch.set(False):
                self._kernel[grid](*args, **named)

        return run


class WatchedCanvas(DenseCanvas):
    """The model's own layers do not count, and what a blend does within their attention does."""

    watch: Watch

    def run(self, layer, rows, batch, attention=None):
        def watched(query, own):
            def unwatched():
                with self.watch.set(False):
                    return own()

            with self.watch.set(True):
                return attention(query, unwatched)

        with self.watch.set(False):
            super().run(layer, rows, batch, attention and watched)


def blended(monkeypatch, documents: int, **policy):
    """Return for each layer and pass what was launched and what waited, from the second layer on."""
    monkeypatch.setenv("LMC_KERNELS", "triton")
    watch = Watch()
    for module, name in KERNELS:
        monkeypatch.setattr(module, name, Counted(getattr(module, name), watch))
    monkeypatch.setattr(WatchedCanvas, "watch", watch, raising=False)

    def submitted(copies) -> None:
        watch.launched.append("copies")
        execute(copies)

    monkeypatch.setattr(place_triton, "submit_of", lambda device: submitted)
    monkeypatch.setattr(place_triton, "can_submit", lambda memory: True)
    layers = DecoderLayers(random_model(layers=LAYERS))
    heads, dim, size = layers.shape.kv_heads, layers.shape.head_dim, 12
    placements = [Placement(at=5 + i * (size + 2), tokens=size, first=0) for i in range(documents)]
    tokens = random_tokens(5 + documents * (size + 2) + 6, 0)
    reader = iter([(layer, [*torch.randn(documents, 2, size, heads, dim)]) for layer in range(LAYERS)])
    canvas = WatchedCanvas(layers, tokens, placements, reader)
    given = BlendInput(length=len(tokens), stop=len(tokens), question=len(tokens) - 6, placements=placements)
    found, steps = [], Blender(canvas, given, RecomputePolicy(**policy)).slices()
    with torch.inference_mode(), watch.modes[0], watch.modes[1], watch.set(True):
        for done in steps:
            launched, waited = watch.take()
            if done.layer:
                found.append((done.layer, launched, waited))
    return found


@pytest.mark.parametrize("documents", [1, 3, 9])
@pytest.mark.parametrize(
    "policy",
    [{"strategy": "union", "ratios": (0.3,), "correction": "shift"}, {"strategy": "query", "ratios": (0.3,)},
     {"strategy": "head", "ratios": (0.3,), "correction": "shift"}],
    ids=lambda one: one["strategy"],
)  # fmt: skip
def test_nothing_waits_and_launches_are_few(monkeypatch, policy, documents):
    found = blended(monkeypatch, documents, **policy)
    assert {layer for layer, *_ in found} == set(range(1, LAYERS))
    for _, launched, waited in found:
        assert not waited, launched
        assert len(launched) <= (WEIGHTS if "aten.linalg_solve_ex.default" in launched else LAUNCHES), launched


def test_what_waits_is_seen():
    watch, values = Watch(), torch.arange(3)
    with watch.modes[0], watch.modes[1], watch.set(True):
        for wait in (
            values.cpu, values.tolist, values.nonzero, values[0].item, values[0].__int__, values[0].__bool__,
            lambda: values[values > 1], lambda: torch.tensor([1]),
        ):  # fmt: skip
            wait()
            assert watch.take()[1]
        values + 1
        assert watch.take() == (["aten.add.Tensor"], [])
