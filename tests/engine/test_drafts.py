"""Drafts that are found in the prompt: rejected ones leave nothing in the store, and blends are as without drafts.

vLLM starts no second engine in a process in which numba, with which drafts are found in prompts, has been loaded.
"""

import pytest
from apart import PYTEST, run_apart

from lmc.connectors.vllm.vllm_api import installed_version


@pytest.mark.skipif(installed_version().startswith("0.30."), reason="vLLM 0.30 for CPUs does not decode with drafts")
@pytest.mark.parametrize(
    "drafts",
    [pytest.param("llama", marks=pytest.mark.long), "gemma3mixed"],
)
def test_drafts_of(drafts):
    """Of n-grams in the prompt, with two models."""
    run_apart(*PYTEST, "engine/drafting.py", "-k", drafts, interpret=False)
