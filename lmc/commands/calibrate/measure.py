"""Measures blends against full prefill: the same prompts in all modes, after all documents were learned."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from math import sqrt
from statistics import fmean, median

import torch

from lmc.blend.strategies import BLIND_REUSE, RecomputePolicy
from lmc.commands.calibrate.prompts import ANSWER_TOKENS, CalibrationPrompt, CalibrationPrompts
from lmc.connectors.transformers import CachedModel
from lmc.connectors.transformers.continuation import divergence, greedy_answer, log_probabilities
from lmc.errors import InputError

BLIND, RATIOS = 0.0, (0.05, 0.1, 0.15, 0.3, 0.5)  # ratio 0 is blind reuse, as a reference
MIN_PROMPTS, MAX_PROMPTS = 8, 64
MEASUREMENT_SECONDS = 210.0  # target time of the measurement; `MIN_PROMPTS` may take longer
TIMED_PROMPTS = 2  # number of prompts whose time determines how many prompts are measured


@dataclass(slots=True)
class Numbers:
    """The numbers of one ratio. Each list has one entry per prompt."""

    same: list[float] = field(default_factory=list)  # share of the tokens of full prefill's answer that are predicted
    first: list[bool] = field(default_factory=list)  # whether the answer's first token is predicted
    kl: list[float] = field(default_factory=list)  # KL(full ‖ blend), mean over the answer
    seconds: list[float] = field(default_factory=list)  # TTFT

    @property
    def tokens_same(self) -> float:
        """The mean share of the answers' tokens that are the same as full prefill's."""
        return fmean(self.same)

    @property
    def first_same(self) -> float:
        """The share of prompts whose answer begins with the same token as full prefill's."""
        return fmean(self.first)

    @property
    def agreement(self) -> float:
        """The minimum of the shares of all tokens and of first tokens.

        A token after given tokens of the answer is often easy to predict, but the first token never is. There are only
        as many first tokens as prompts, so one standard error is added to their share.
        """
        first = self.first_same
        return min(self.tokens_same, first + sqrt(first * (1 - first) / len(self.first)))

    @property
    def ttft(self) -> float:
        """The median TTFT."""
        return median(self.seconds)


@dataclass(slots=True)
class Measured:
    """All numbers of a calibration."""

    full: list[float] = field(default_factory=list)  # TTFT of each prompt
    ways: dict[float, Numbers] = field(default_factory=lambda: {ratio: Numbers() for ratio in (BLIND, *RATIOS)})
    gains: list[float] = field(default_factory=list)  # increase of log p(right answer) by documents, per token
    tokens: list[int] = field(default_factory=list)  # number of tokens of each prompt

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
        self._policies[BLIND] = BLIND_REUSE

    def run(self, count: int | None, progress: Callable[[int, int], None]) -> Measured:
        """Measure `count` prompts, or as many as there is time for. Calls `progress(done, of)` after each prompt."""
        measured, total = Measured(), count or MAX_PROMPTS
        self._warm_up(self._prompts.prompt(MAX_PROMPTS))
        started = time.perf_counter()
        while len(measured.full) < total:
            self._measure(self._prompts.prompt(len(measured.full)), len(measured.full), measured)
            if count is None and len(measured.full) == TIMED_PROMPTS:
                seconds_per_prompt = (time.perf_counter() - started) / TIMED_PROMPTS
                total = min(max(int(MEASUREMENT_SECONDS / seconds_per_prompt), MIN_PROMPTS), MAX_PROMPTS)
            progress(len(measured.full), total)
        return measured

    def _warm_up(self, prompt: CalibrationPrompt) -> None:
        self._cached.learn_documents(prompt.tokens)
        self._cached.prefill(prompt.tokens, "full")
        prefilled = self._cached.prefill(prompt.tokens, "blend", policy=self._policies[RATIOS[0]])
        if not prefilled.report.reused:
            reason = prefilled.report.note or "they have fewer tokens than blend_min_tokens"
            raise InputError(f"prompts over these documents are not blended: {reason}")

    def _measure(self, prompt: CalibrationPrompt, number: int, measured: Measured) -> None:
        cached, tokens = self._cached, prompt.tokens
        cached.learn_documents(tokens)
        prefilled = cached.prefill(tokens, "full")
        measured.full.append(prefilled.report.seconds)
        measured.tokens.append(len(tokens))
        answer = greedy_answer(cached, tokens, prefilled, ANSWER_TOKENS)
        full = log_probabilities(cached, tokens, prefilled, answer)
        with_documents = log_probabilities(cached, tokens, prefilled, prompt.right)
        without = log_probabilities(cached, prompt.bare, cached.prefill(prompt.bare, "full"), prompt.right)
        measured.gains.append(float((picked(with_documents, prompt.right) - picked(without, prompt.right)).mean()))
        ratios = [*self._policies]
        for turn in range(len(ratios)):  # Each prompt begins with another ratio.
            ratio = ratios[(number + turn) % len(ratios)]
            prefilled = cached.prefill(tokens, "blend", policy=self._policies[ratio])
            blended, numbers = log_probabilities(cached, tokens, prefilled, answer), measured.ways[ratio]
            agrees = blended.argmax(-1) == full.argmax(-1)
            numbers.same.append(float(agrees.float().mean()))
            numbers.first.append(bool(agrees[0]))
            numbers.kl.append(divergence(full, blended))
            numbers.seconds.append(prefilled.report.seconds)


def picked(scores: torch.Tensor, answer: list[int]) -> torch.Tensor:
    """Return the log-probabilities `[A]` of an answer."""
    return scores[torch.arange(len(answer)), answer]
