"""Measures blends against full prefill: the same prompts in all ways, with all documents learned before."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

import torch

from lmc.blend.segments import split
from lmc.blend.strategies import RecomputePolicy
from lmc.calibrate.prompts import ANSWER, CalibrationPrompt, CalibrationPrompts
from lmc.connectors.transformers import CachedModel, Prefilled
from lmc.connectors.transformers.hf import forward
from lmc.errors import InputError

BLIND, RATIOS = 0.0, (0.05, 0.1, 0.15, 0.3, 0.5)  # ratio 0 is blind reuse, for scale
LEAST_PROMPTS, MOST_PROMPTS = 8, 64
SECONDS = 210.0  # of measuring, if that is possible with the least number of prompts
TIMED_PROMPTS = 2  # from which the number of prompts is estimated


@dataclass(slots=True)
class Numbers:
    """The numbers of one way, one of each for each prompt."""

    same: list[float] = field(default_factory=list)  # share of full prefill's answer that this way predicts as well
    first: list[bool] = field(default_factory=list)  # whether that has the first token of the answer
    kl: list[float] = field(default_factory=list)  # KL(full ‖ way), mean over the answer
    seconds: list[float] = field(default_factory=list)  # TTFT

    @property
    def tokens_same(self) -> float:
        """The share of the answers' tokens that is the same."""
        return fmean(self.same)

    @property
    def first_same(self) -> float:
        """The share of prompts whose answer begins with the same token."""
        return fmean(self.first)

    @property
    def agreement(self) -> float:
        """The smaller one of the two. Behind given tokens the next one is often easy, and the first one never is."""
        return min(self.tokens_same, self.first_same)

    @property
    def ttft(self) -> float:
        """The median TTFT."""
        return median(self.seconds)


@dataclass(slots=True)
class Measured:
    """All numbers of a calibration."""

    full: list[float] = field(default_factory=list)  # TTFT of each prompt
    ways: dict[float, Numbers] = field(default_factory=lambda: {ratio: Numbers() for ratio in (BLIND, *RATIOS)})
    gains: list[float] = field(default_factory=list)  # how much documents raise log p(right answer), per token
    tokens: list[int] = field(default_factory=list)  # of each prompt

    @property
    def full_ttft(self) -> float:
        """The median TTFT of full prefill."""
        return median(self.full)


class Measurement:
    """Measures one model."""

    def __init__(self, cached: CachedModel, prompts: CalibrationPrompts) -> None:
        self._cached, self._prompts = cached, prompts
        settings = cached.settings
        self._policies = {ratio: RecomputePolicy.of(settings, ratio=ratio) for ratio in RATIOS}
        self._policies[BLIND] = RecomputePolicy(strategy="none", ratios=(0.0,))
        ends = cached.model.generation_config.eos_token_id
        self._ends = set(ends if isinstance(ends, list) else [ends])

    def run(self, count: int | None, progress: Callable[[int, int], None]) -> Measured:
        """Measure `count` prompts, or as many as there is time for. `progress(done, of)` is called as it goes."""
        found, total = Measured(), count or MOST_PROMPTS
        self._warm_up(self._prompts.prompt(MOST_PROMPTS))
        started = time.perf_counter()
        while len(found.full) < total:
            self._measure(self._prompts.prompt(len(found.full)), len(found.full), found)
            if count is None and len(found.full) == TIMED_PROMPTS:
                each = (time.perf_counter() - started) / TIMED_PROMPTS
                total = min(max(int(SECONDS / each), LEAST_PROMPTS), MOST_PROMPTS)
            progress(len(found.full), total)
        return found

    def _warm_up(self, prompt: CalibrationPrompt) -> None:
        self._learn(prompt.tokens)
        self._cached.prefill(prompt.tokens, "full")
        done = self._cached.prefill(prompt.tokens, "blend", policy=self._policies[RATIOS[0]])
        if not done.report.reused:
            why = done.report.note or "blend_min_tokens is more than they have"
            raise InputError(f"no prompt over these documents is blended: {why}")

    def _learn(self, tokens: list[int]) -> None:
        for span in split(tokens, self._cached.separators).documents:
            self._cached.learn(tokens[span.start : span.stop])

    def _measure(self, prompt: CalibrationPrompt, number: int, found: Measured) -> None:
        tokens = prompt.tokens
        self._learn(tokens)
        done = self._cached.prefill(tokens, "full")
        found.full.append(done.report.seconds)
        found.tokens.append(len(tokens))
        answer = self._greedy(tokens, done)
        full = self._scores(tokens, answer, done)
        with_documents = self._scores(tokens, prompt.right, done)
        without = self._scores(prompt.bare, prompt.right, self._cached.prefill(prompt.bare, "full"))
        found.gains.append(float((picked(with_documents, prompt.right) - picked(without, prompt.right)).mean()))
        ratios = [*self._policies]
        for turn in range(len(ratios)):  # Another one is first each time.
            ratio = ratios[(number + turn) % len(ratios)]
            done = self._cached.prefill(tokens, "blend", policy=self._policies[ratio])
            scores, numbers = self._scores(tokens, answer, done), found.ways[ratio]
            same = scores.argmax(-1) == full.argmax(-1)
            numbers.same.append(float(same.float().mean()))
            numbers.first.append(bool(same[0]))
            numbers.kl.append(float((full.exp() * (full - scores)).sum(-1).mean()))
            numbers.seconds.append(done.report.seconds)

    def _greedy(self, tokens: list[int], done: Prefilled) -> list[int]:
        """Return the model's own answer, whose end may be its last token."""
        answer = [int(done.logits.argmax())]
        given = [tokens[-1], answer[0]]  # The cache ends before the prompt's last token.
        while len(answer) < ANSWER and answer[-1] not in self._ends:
            answer.append(int(forward(self._cached.model, given, done.cache).logits[0, -1].argmax()))
            given = answer[-1:]
        shorten(done.cache, len(tokens) - 1)
        return answer

    def _scores(self, tokens: list[int], answer: list[int], done: Prefilled) -> torch.Tensor:
        """Return log-probabilities `[A, V]` at the tokens of an answer that is given. The cache stays as it was."""
        ids = torch.tensor([[tokens[-1], *answer[:-1]]], device=self._cached.layers.device)
        with torch.inference_mode():
            logits = self._cached.model(ids, past_key_values=done.cache).logits[0]
        shorten(done.cache, len(tokens) - 1)
        return torch.log_softmax(logits.float(), dim=-1)


def picked(scores: torch.Tensor, answer: list[int]) -> torch.Tensor:
    """Return the log-probabilities `[A]` of an answer."""
    return scores[torch.arange(len(answer)), answer]


def shorten(cache: Any, length: int) -> None:
    """Remove what stands behind the first `length` tokens of a transformers cache."""
    if extra := cache.get_seq_length() - length:
        cache.crop(-extra)
