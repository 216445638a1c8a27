"""Blends whose kernels are Triton's choose the same tokens as those in torch, and leave the same keys and values."""

import pytest
import torch
from models import SEPARATOR, random_model
from test_transformers import DOCUMENTS, prompt, settings

from lmc.connectors.transformers import CachedModel
from lmc.errors import ConfigError


def blended(monkeypatch, kernels: str, family: str, **more):
    monkeypatch.setenv("LMC_KERNELS", kernels)
    with CachedModel(random_model(family, layers=3), settings(**more), SEPARATOR) as cached:
        assert cached.blends, "the self-test ran with these kernels"
        for document in DOCUMENTS[:4]:
            cached.learn(document)
        found = cached.prefill(prompt(2, 0, 5, 3))
        assert found.report.reused > 0
        return found.logits, found.report.charged_budget


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"blend_strategy": "query"},
        {"blend_strategy": "deviation", "blend_check_layers": [1]},
        {"blend_recompute_ratios": [0.4], "blend_learn_prefix": "sink"},
    ],
    ids=str,
)
def test_a_blend_is_that_of_torch(monkeypatch, family, more):
    logits, budget = blended(monkeypatch, "triton", family, **more)
    wanted, wanted_budget = blended(monkeypatch, "torch", family, **more)
    assert budget == wanted_budget
    assert torch.allclose(logits, wanted, atol=1e-4)


def test_kernels_that_do_not_exist_are_refused(monkeypatch):
    with pytest.raises(ConfigError, match="LMC_KERNELS = cuda: use one of auto, triton, torch"):
        blended(monkeypatch, "cuda", "llama")
