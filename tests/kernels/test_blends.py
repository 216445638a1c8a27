"""Blends whose kernels are Triton's choose the same tokens as those in torch, and leave the same keys and values."""

from contextlib import nullcontext

import pytest
import torch
from models import SEPARATOR, random_model
from test_transformers import DOCUMENTS, prompt, settings

from lmc.blend.staging import Staging
from lmc.connectors.transformers import CachedModel
from lmc.connectors.transformers.canvas import DenseCanvas
from lmc.errors import ConfigError


def blended(monkeypatch, kernels: str, family: str, **more):
    """Logits and budget of a prompt's blend."""
    monkeypatch.setenv("LMC_KERNELS", kernels)
    with CachedModel(random_model(family, layers=3), settings(**more), SEPARATOR) as cached:
        assert cached.blends, "the self-test ran with these kernels"
        for document in DOCUMENTS[:4]:
            cached.learn(document)
        found = cached.prefill(prompt(2, 0, 5, 3))
        assert found.report.reused > 0
        return found.logits, found.report.charged_budget


@pytest.mark.parametrize(
    ("family", "more"),
    [
        pytest.param("qwen2", {}, marks=pytest.mark.long),
        pytest.param("qwen2", {"blend_method": "query"}, marks=pytest.mark.long),
        pytest.param("llama", {"blend_method": "cacheblend"}, marks=pytest.mark.long),
        ("qwen2", {"blend_method": "head", "blend_recompute_ratios": 0.4}),
    ],
    ids=str,
)
def test_a_blend_is_that_of_torch(monkeypatch, family, more):
    logits, budget = blended(monkeypatch, "triton", family, **more)
    wanted, wanted_budget = blended(monkeypatch, "torch", family, **more)
    assert budget == wanted_budget
    assert torch.allclose(logits, wanted, atol=1e-4)


class AtOnce:
    """A stream on which everything is over as soon as it is issued."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def record_event(self):
        return None

    def wait_event(self, event) -> None:
        pass

    wait_stream = wait_event


def test_the_parts_of_the_next_layer_are_staged_while_one_is_computed(monkeypatch):
    """As on a GPU, but for the order in which streams go on (`tests/test_staging.py`)."""
    wanted, budget = blended(monkeypatch, "torch", "llama")
    begun = []

    class Noted(Staging):
        def __init__(self, *given) -> None:
            super().__init__(*given)
            self.begun = set()

        def begin(self, layer: int) -> None:
            self.begun.add(layer)
            super().begin(layer)

    class Staged(DenseCanvas):
        def __init__(self, *given) -> None:
            super().__init__(*given)
            if len(self._stored):
                shapes, count = [self._layers.shape] * self.depth, len(self._stored)
                stream = AtOnce(self.device)
                self._staging = Noted(self._stage, shapes, count, self.device, stream)

        def place(self, layer: int) -> int:
            begun.append(self._staging is not None and layer in self._staging.begun)
            return super().place(layer)

    monkeypatch.setattr(torch.cuda, "current_stream", AtOnce)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
    monkeypatch.setattr("lmc.connectors.transformers.model.DenseCanvas", Staged)
    found, found_budget = blended(monkeypatch, "triton", "llama")
    assert begun[-3:] == [False, True, True], "all layers but the first"
    assert found_budget == budget
    assert torch.allclose(found, wanted, atol=1e-4)


def test_kernels_that_do_not_exist_are_refused(monkeypatch):
    with pytest.raises(ConfigError, match="LMC_KERNELS = cuda: use one of auto, triton, torch"):
        blended(monkeypatch, "cuda", "llama")
