"""What a model says behind a prefilled prompt."""

import pytest
import torch
from models import random_model, random_tokens

from lmc.config.settings import Settings
from lmc.connectors.transformers import CachedModel, Prefilled
from lmc.connectors.transformers.continuation import divergence, greedy_answer, log_probabilities

PROMPT = random_tokens(40, 1)


@pytest.fixture(scope="module")
def cached() -> CachedModel:
    return CachedModel(random_model(), Settings(max_local_cpu_size=0.01), [5, 6])


@pytest.fixture
def done(cached: CachedModel) -> Prefilled:
    return cached.prefill(PROMPT, "full")


def test_the_answer_is_that_of_generate(cached: CachedModel, done: Prefilled) -> None:
    answer = greedy_answer(cached, PROMPT, done, 8)
    assert len(answer) == 8
    assert answer == cached.generate(PROMPT, "full", max_new_tokens=8, do_sample=False)[0]
    assert done.cache.get_seq_length() == len(PROMPT) - 1
    assert greedy_answer(cached, PROMPT, done, 8) == answer, "the cache is as it was"


def test_the_answer_ends_with_the_end_token(
    cached: CachedModel, done: Prefilled, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = greedy_answer(cached, PROMPT, done, 8)
    stop = next(i for i in range(1, 8) if answer[i] not in answer[:i])
    for ends in (answer[stop], [answer[stop], 0]):
        monkeypatch.setattr(cached.model.generation_config, "eos_token_id", ends)
        assert greedy_answer(cached, PROMPT, done, 8) == answer[: stop + 1]


@pytest.mark.parametrize("length", [1, 5])
def test_the_predictions_are_those_of_one_forward_call(cached: CachedModel, done: Prefilled, length: int) -> None:
    answer = random_tokens(length, 2)
    found = log_probabilities(cached, PROMPT, done, answer)
    with torch.inference_mode():
        logits = cached.model(torch.tensor([[*PROMPT, *answer[:-1]]])).logits[0, -length:]
    torch.testing.assert_close(found, logits.log_softmax(-1), atol=1e-4, rtol=0)
    assert done.cache.get_seq_length() == len(PROMPT) - 1


def test_the_divergence_is_a_mean_over_tokens() -> None:
    full, other = torch.tensor([[0.5, 0.5], [0.25, 0.75]]).log(), torch.tensor([[0.5, 0.5], [0.5, 0.5]]).log()
    wanted = (0.25 * torch.tensor(0.5).log() + 0.75 * torch.tensor(1.5).log()) / 2
    assert divergence(full, full) == 0
    assert divergence(full, other) == pytest.approx(float(wanted))
