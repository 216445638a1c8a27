"""Speculative decoding: drafted tokens that are rejected leave nothing in the store, and blends are as without drafts.

vLLM starts no second engine in a process in which numba, with which drafts are found in prompts, has been loaded.
"""

import pytest
from apart import PYTEST, run_apart


@pytest.mark.parametrize("model", [pytest.param("llama", marks=pytest.mark.long), "gemma3mixed"])
def test_with_tokens_that_the_prompt_predicts(model):
    run_apart(*PYTEST, "engine/drafting.py", "-k", model, interpret=False)
