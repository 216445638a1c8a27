"""Speculative decoding in a real engine, whose drafts are found in the prompt. `test_drafts.py` runs this."""

import pytest
from lab import Prompt, agree, answer, facts, words
from test_exact_and_blend import (
    DOCUMENTS,
    test_a_blend_behind_a_prefix_that_the_engine_has,
    test_an_approximate_blend_is_not_full_prefill,
    test_at_ratio_1_the_blend_is_full_prefill,
    test_pages_that_are_loaded_again_are_what_was_computed,
    test_six_requests_at_once,
)

__all__ = [
    "test_a_blend_behind_a_prefix_that_the_engine_has",
    "test_an_approximate_blend_is_not_full_prefill",
    "test_at_ratio_1_the_blend_is_full_prefill",
    "test_pages_that_are_loaded_again_are_what_was_computed",
    "test_six_requests_at_once",
]
# numba warns of what vLLM passes to it.
pytestmark = pytest.mark.filterwarnings("ignore:(?s).*Encountered the use of a type that is scheduled for deprecation")
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
TABLES = {"llama": 1, "gemma3mixed": 2}


@pytest.fixture(scope="module", params=TABLES)
def lab(request, models, shared_engine):
    found = shared_engine(models(request.param), speculative_config=dict(NGRAM))
    found.name = request.param
    return found


def test_layers_with_a_window_keep_their_own_block_table(lab):
    assert len(lab.scheduler.kv_cache_config.kv_cache_groups) == TABLES[lab.name]


def test_drafts_are_accepted_after_a_blend_and_the_answer_is_stored_exactly(lab, monkeypatch):
    """A random model repeats itself, so that drafts from its own answer are accepted."""
    prompt, steps, schedule = Prompt(DOCUMENTS), [], lab.scheduler.schedule
    monkeypatch.setattr(lab.scheduler, "schedule", lambda *given: [steps.append(1), schedule(*given)][1])
    wanted = lab.vanilla(prompt.tokens, 200)
    assert len(steps) < 150, "the control: drafts are accepted"
    longer = [*prompt.tokens, *answer(wanted), *words(20, 50)]
    wanted_later = lab.vanilla(longer)
    lab.learn(DOCUMENTS)
    lab.forget_pages()
    found = lab.ask(prompt.tokens, prompt.blend(ratio=1.0), 200)
    assert facts(found)["reused_tokens"] == sum(map(len, DOCUMENTS))
    assert agree(found, wanted)
    lab.forget_prefixes()
    exact = lab.ask(prompt.tokens, {"blend": False}, 200)
    assert agree(exact, wanted)
    lab.forget_prefixes()
    again = lab.ask(longer, {"blend": False})
    assert facts(again)["exact_tokens"] > len(prompt.tokens), "the answer's tokens were stored, too"
    assert agree(again, wanted_later)
    lab.check()
