"""Measures ways on a prompt, against full prefill of the same prompt."""

import copy
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from lmc.blend.blender import Blender
from lmc.blend.kernels import choice
from lmc.blend.kernels.operations import Kernels
from lmc.blend.learn_prefix import learn_prefix
from lmc.blend.segments import split
from lmc.blend.shift import Shift
from lmc.blend.strategies import STRATEGIES, Evidence, highest
from lmc.config.settings import Settings
from lmc.connectors.transformers import CachedModel
from lmc.connectors.transformers.continuation import divergence, greedy_answer, log_probabilities
from lmc.connectors.transformers.hf import forward, rows_of
from lmc.connectors.transformers.report import Prefilled
from lmc.demo.run import begins
from lmc.keys import common_prefix
from quality.cases import Case
from quality.ways import FULL, ORACLE, ROUNDED, Way

TOKENS = 16  # of full prefill's answer with which others are compared
ASKING = 64  # last tokens of the prompt whose attention the oracle knows


class Seconds:
    """Where the time of a blend goes: to the question's pass, and within it to scores, to the choice, to the shift."""

    def __init__(self) -> None:
        self.by_part: dict[str, float] = defaultdict(float)

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Add clocks around the parts, which have no public names."""
        parts = [
            (Blender, "_ask", "question"), (choice, "TORCH", "scores"),
            (Blender, "_choose", "choice"), (Shift, "_apply", "shift"), (Shift, "__init__", "shift"),
        ]  # fmt: skip
        originals = [(owner, name, getattr(owner, name)) for owner, name, _ in parts]
        for owner, name, part in parts:
            clocked = self._clocked_steps if name == "_ask" else self._clocked
            if owner is choice:
                clocked = self._clocked_scores
            setattr(owner, name, clocked(getattr(owner, name), part))
        try:
            yield
        finally:
            for owner, name, original in originals:
                setattr(owner, name, original)

    def _clocked_scores(self, kernels: Kernels, part: str) -> Kernels:
        return kernels._replace(attend_and_score=self._clocked(kernels.attend_and_score, part))

    def _clocked(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        def clocked(*given: Any, **named: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*given, **named)
            finally:
                self.by_part[part] += time.perf_counter() - started

        return clocked

    def _clocked_steps(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        def clocked(*given: Any) -> Iterator[Any]:
            started = time.perf_counter()
            yield from function(*given)
            self.by_part[part] += time.perf_counter() - started

        return clocked


@dataclass(frozen=True, slots=True)
class Reference:
    """What full prefill says to a prompt, with which ways are compared."""

    case: Case
    said: list[int]  # its greedy answer
    answer: list[int]  # the tokens after which predictions are compared
    predictions: torch.Tensor  # [A, V] for them


class Lab:
    """One pretrained model, wrapped once for each prefix after which documents are learned."""

    def __init__(self, cached: CachedModel, tokenizer: Any, settings: Settings) -> None:
        self.tokenizer = tokenizer
        self._stack = ExitStack()
        self._models = {"primer": self._stack.enter_context(cached)}
        for behind in ("none", "sink"):
            prefix = learn_prefix(tokenizer, settings, cached.markers, behind)
            model = CachedModel(cached.model, settings, cached.markers, learn_prefix=prefix)
            self._models[behind] = self._stack.enter_context(model)
        self._settings, self._rounded = settings, None

    def close(self) -> None:
        """Close all caches."""
        self._stack.close()

    def measure(self, case: Case, ways: Sequence[Way], rounded: bool, pictured: bool) -> dict[str, Any]:
        """Return what was measured of each way, and of full prefill; `rounded` adds full prefill in bfloat16.

        `pictured` adds the prompt's text and the tokens that each way has chosen.
        """
        plain, prompt = self._models["none"], case.prompt
        for behind in {way.behind for way in ways}:
            self._models[behind].learn_documents(case.learned)
        done = plain.prefill(prompt, "full")
        said = greedy_answer(plain, prompt, done, TOKENS)
        answer = case.answer or said
        full = Reference(case, said, answer, log_probabilities(plain, prompt, done, answer))
        found = {FULL: {**self._judged(said, case), "seconds": {"ttft": done.report.seconds}}}
        if rounded:
            found[ROUNDED] = self._in_bfloat16(full)
        chosen = {}
        for way in ways:
            cached, seconds = self._models[way.behind], Seconds()
            if way.policy.strategy == ORACLE:
                STRATEGIES[ORACLE] = self._oracle(cached, prompt, done)
            with seconds.measured():
                blend = cached.prefill(prompt, "blend", policy=way.policy)
            report = blend.report
            found[way.name] = self._compared(cached, blend, full) | {
                "charged": report.charged_budget,
                "seconds": {"ttft": report.seconds, **seconds.by_part},
            }
            chosen[way.name] = [positions.tolist() for positions in report.recomputed]
        for cached in self._models.values():
            cached.engine.forget_all()
        row = {"key": case.key, "task": case.task, "variant": case.variant, "question": case.question}
        row |= {"tokens": len(prompt), "ways": found}
        return row | self._picture(case, chosen) if pictured else row

    def _judged(self, said: list[int], case: Case) -> dict[str, Any]:
        text = self.tokenizer.decode(said, skip_special_tokens=True)
        return {"said": said, "text": text, "right": begins(text, *case.accepted)}

    def _compared(self, cached: CachedModel, done: Prefilled, full: Reference) -> dict[str, Any]:
        """Compare a way's predictions with those of full prefill, and its greedy answer with full prefill's."""
        prompt, said = full.case.prompt, full.said
        predictions = log_probabilities(cached, prompt, done, said)
        same = common_prefix(predictions.argmax(-1).tolist(), said)
        if full.answer != said:
            predictions = log_probabilities(cached, prompt, done, full.answer)
        judged = self._judged(said if same == len(said) else greedy_answer(cached, prompt, done, TOKENS), full.case)
        kl = divergence(full.predictions, predictions)
        return judged | {"first": same > 0, "agreement": same / len(said), "kl": kl}

    def _in_bfloat16(self, full: Reference) -> dict[str, Any]:
        """Return how far full prefill is from itself if the model computes in bfloat16, as servers do."""
        if self._rounded is None:
            plain = self._models["none"]
            settings = self._settings.model_copy(update={"enable_blending": False})
            model = copy.deepcopy(plain.model).to(torch.bfloat16)
            self._rounded = self._stack.enter_context(CachedModel(model, settings, plain.markers))
        done = self._rounded.prefill(full.case.prompt, "full")
        return self._compared(self._rounded, done, full) | {"charged": 1.0}

    def _oracle(
        self, cached: CachedModel, prompt: list[int], full: Prefilled
    ) -> Callable[[Evidence, int], torch.Tensor]:
        """Return a choice by what full prefill knows: attention of the prompt's last tokens times change of the KV."""
        blind = cached.prefill(prompt, "reuse")
        start = len(prompt) - ASKING
        before = copy.deepcopy(full.cache)
        before.crop(start - before.get_seq_length())
        cached.model.set_attn_implementation("eager")
        attentions = forward(cached.model, prompt[start:], before, output_attentions=True).attentions
        cached.model.set_attn_implementation("sdpa")
        scores = torch.zeros(len(prompt) - 1)
        for attention, right, reused in zip(attentions, rows_of(full.cache), rows_of(blind.cache), strict=True):
            read = attention[0].amax((0, 1))[: len(scores)]
            for exact, stored in zip(right, reused, strict=True):  # keys, and values
                scores += read * (exact - stored).norm(dim=(1, 2)) / exact.norm(dim=(1, 2)).mean()
        inside = torch.cat([torch.arange(one.start, one.stop) for one in split(prompt, cached.markers).documents])
        return lambda evidence, count: highest(scores[inside], count)

    def _picture(self, case: Case, chosen: dict[str, list[list[int]]]) -> dict[str, Any]:
        """Return the prompt's tokens as text, its documents, and the chosen positions from each layer on."""
        changes = {}
        for way, layers in chosen.items():
            changes[way] = [[i, one] for i, one in enumerate(layers) if i == 0 or one != layers[i - 1]]
        markers = self._models["none"].markers
        documents = [[one.start, one.stop] for one in split(case.prompt, markers).documents]
        pieces = [self.tokenizer.decode([token]) for token in case.prompt]
        return {"pieces": pieces, "documents": documents, "chosen": changes}
