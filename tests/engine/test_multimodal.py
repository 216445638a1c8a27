"""Multimodal models: the layers of their language models, and several positions for each token (M-RoPE)."""

import sys
from pathlib import Path

import pytest
from apart import PYTEST, run_apart

VISION = Path(sys.prefix) / "vision"  # see `vision.py`


@pytest.mark.skipif(not VISION.is_dir(), reason="this environment has no torchvision")
@pytest.mark.parametrize(
    "model", ["qwen3vl", *(pytest.param(name, marks=pytest.mark.long) for name in ("qwen25vl", "gemma3"))]
)
def test_text_is_blended_and_images_are_served_exactly(model):
    run_apart(*PYTEST, "-p", "engine.vision", "engine/multimodal.py", "-k", model, interpret=False)
