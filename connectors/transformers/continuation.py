"""Continues a prefilled prompt: the model's greedy answer, and its predictions for a given answer.

Each function restores the cache to its state after the prefill, so a prefilled prompt can be continued several times.
"""

from collections.abc import Sequence

import torch

from lmc.connectors.transformers.hf import forward
from lmc.connectors.transformers.model import CachedModel
from lmc.connectors.transformers.report import Prefilled


def greedy_answer(cached: CachedModel, prompt: Sequence[int], prefilled: Prefilled, limit: int) -> list[int]:
    """Return the most likely next tokens: at most `limit` tokens, up to and including the model's end token.

    The model's own defaults for generation, such as a repetition penalty, are not used.
    """
    ends = cached.model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    answer = [int(prefilled.logits.argmax())]
    new = [prompt[-1], answer[0]]  # The cache ends before the prompt's last token.
    while len(answer) < limit and answer[-1] not in ends:
        answer.append(int(forward(cached.model, new, prefilled.cache).logits[0, -1].argmax()))
        new = answer[-1:]
    _shorten(prefilled, len(prompt) - 1)
    return answer


def log_probabilities(
    cached: CachedModel, prompt: Sequence[int], prefilled: Prefilled, answer: Sequence[int]
) -> torch.Tensor:
    """Return log-probabilities `[A, V]` for the A tokens of an answer, each after the prompt and earlier tokens."""
    logits = forward(cached.model, [prompt[-1], *answer[:-1]], prefilled.cache, logits=0).logits[0]
    _shorten(prefilled, len(prompt) - 1)
    return torch.log_softmax(logits.float(), dim=-1)


def divergence(full: torch.Tensor, approximate: torch.Tensor) -> float:
    """Return KL(full ‖ other) of log-probabilities `[A, V]`, in nats: the mean over the A tokens."""
    return float((full.exp() * (full - approximate)).sum(-1).mean())


def _shorten(prefilled: Prefilled, length: int) -> None:
    """Remove all tokens after the first `length` tokens from the cache."""
    if extra := prefilled.cache.get_seq_length() - length:
        prefilled.cache.crop(-extra)
