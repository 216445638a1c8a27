"""The results of a demo: answers side by side, costs by mode, and pictures, as plain data and as texts."""

import base64
import json
import re
import statistics
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass, field
from typing import Any

from lmc.connectors.transformers.report import How, Report
from lmc.demo.questions import Example
from lmc.terminal import counted

FULL_SCALE = 1.0  # relative deviation ‖Δk‖/‖k‖ at which the colour is darkest
# A dot ends a sentence after a word or a number, or at the end of the text, but not after an initial or a title.
SENTENCE = re.compile(r"(?:(?!Mrs)\w{3}|\d|[)\"'])\s?[.!?](?=\s|$)|\n|[.!?]$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer of one mode to one question, and its cost."""

    text: str
    right: bool
    agreement: float  # share of full prefill's tokens before the first that differs
    seconds: float  # TTFT
    computed: float  # tokens, as a mean over the layers
    reused: int

    def sentence(self) -> str:
        """Return the answer's first sentence; an ellipsis marks an unfinished one."""
        text = self.text.strip()
        end = SENTENCE.search(text)
        return text[: end.end()].strip() if end else f"{text} …"


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A question and its answers, by mode."""

    example: Example
    ways: dict[How, Answer]

    def title(self) -> str:
        """Return the question, and the right answer."""
        return f"{self.example.question.question} → {self.example.answer}"

    def lines(self) -> list[str]:
        """Return the given beginning of the answers, and a line for each mode; a wrong answer is marked."""
        lead = self.example.question.lead
        answers = [
            f"{'' if answer.right else '✗':>3} {mode:6} {answer.sentence()}" for mode, answer in self.ways.items()
        ]
        return [*([f"    {lead} …"] if lead else []), *answers]


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """One prompt as a picture of layers × tokens."""

    title: str
    answered: str
    tokens: list[str]
    documents: list[tuple[str, int, int]]  # name and half-open token range
    deviation: list[list[float]]  # per layer, per token: ‖Δk‖/‖k‖ of blindly reused keys against full prefill's
    recomputed: list[list[int]]  # per layer, positions of recomputed tokens

    def data(self) -> dict[str, Any]:
        """Return the data for the page's script, with one byte for each cell."""
        cells = bytes(min(255, round(255 * value / FULL_SCALE)) for row in self.deviation for value in row)
        return {
            "title": self.title,
            "answered": self.answered,
            "tokens": self.tokens,
            "documents": self.documents,
            "layers": len(self.deviation),
            "cells": base64.b64encode(cells).decode(),
            "recomputed": self.recomputed,
        }


@dataclass(slots=True)
class Tally:
    """The results of one mode over all examples."""

    reports: list[Report] = field(default_factory=list)
    right: dict[str, list[bool]] = field(default_factory=lambda: defaultdict(list))
    agreement: list[float] = field(default_factory=list)

    def row(self) -> dict[str, Any]:
        """Return the numbers of the table: medians over prompts, means of counts, accuracies by class of question."""
        seconds = sorted(report.seconds for report in self.reports)
        loaded: Counter[str] = Counter()
        for report in self.reports:
            loaded.update(report.loaded)
        return {
            "prompts": len(self.reports),
            "ttft_median_s": statistics.median(seconds),
            "ttft_p95_s": seconds[min(len(seconds) - 1, int(len(seconds) * 0.95))],
            "prompt_tokens": statistics.mean(report.tokens for report in self.reports),
            "computed_tokens": statistics.mean(sum(report.computed) / len(report.computed) for report in self.reports),
            "reused_tokens": statistics.mean(report.reused + report.exact for report in self.reports),
            "charged_budget": statistics.mean(report.charged_budget for report in self.reports),
            "bytes": dict(loaded),
            "agreement": statistics.mean(self.agreement) if self.agreement else None,
            "right": sum(sum(hits) for hits in self.right.values()),
            "accuracy": {kind: statistics.mean(hits) for kind, hits in sorted(self.right.items())},
            "questions": {kind: len(hits) for kind, hits in sorted(self.right.items())},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """All results of a demo."""

    facts: dict[str, Any]
    models: dict[str, dict[str, dict[str, Any]]]  # name of a model -> mode -> row of the table
    asked: list[Asked]
    pictures: list[Picture]

    def json(self) -> str:
        """Return the numbers of the table, and the questions with their documents in order, as JSON."""
        examples = [
            {
                **asdict(result.example.question),
                "order": result.example.order,
                "expected": result.example.answer,
                "ways": {mode: asdict(answer) for mode, answer in result.ways.items()},
            }
            for result in self.asked
        ]
        return json.dumps({**self.facts, "models": self.models, "examples": examples}, indent=1)

    def heading(self) -> str:
        """Return one or more sentences about the run."""
        facts = self.facts
        stored, retrieved = facts["documents_found"], facts["documents_retrieved"]
        computed = retrieved - stored
        parts = [
            f"{counted(facts['questions'], 'question')} over {counted(facts['documents'], 'document')}, "
            f"{retrieved} of them retrieved, each time in a new order."
        ]
        if stored:
            parts.append(f"{stored} documents were already on disk ({facts['disk']}).")
        if computed:
            parts.append(f"{computed} documents were prefilled alone and stored in {facts['learn_seconds']:.1f} s.")
        threads = f"{facts['threads']} thread{'s' if facts['threads'] > 1 else ''}"
        parts.append(f"blend: {facts['strategy']} at {facts['ratio']:g}. {threads}, {facts['seconds']:.0f} s in all.")
        return " ".join(parts)

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Return columns, and a row for each model and mode; numbers are per prompt.

        `as full` is the share of full prefill's answer before the first different token.
        """
        kinds = sorted(
            {kind for by_mode in self.models.values() for row in by_mode.values() for kind in row["accuracy"]},
            reverse=True,
        )
        columns = ["model", "mode", "TTFT ms", "p95", "speed-up", "computed", "reused", "MB GPU/CPU/disk", "charged"]
        columns += ["as full", *(f"right: {kind}" for kind in kinds)]
        rows = []
        for model, by_mode in self.models.items():
            for mode, row in by_mode.items():
                moved = (row["bytes"].get(place, 0) / row["prompts"] / 1e6 for place in ("device", "host", "disk"))
                numbers = [
                    f"{row['ttft_median_s'] * 1e3:.1f}",
                    f"{row['ttft_p95_s'] * 1e3:.1f}",
                    f"{by_mode['full']['ttft_median_s'] / row['ttft_median_s']:.2f}",
                    f"{row['computed_tokens']:.0f}/{row['prompt_tokens']:.0f}",
                    f"{row['reused_tokens']:.0f}",
                    " / ".join(f"{megabytes:.1f}" for megabytes in moved),
                    f"{row['charged_budget']:.2f}",
                    "" if row["agreement"] is None else f"{row['agreement']:.0%}",
                ]
                right = [f"{row['accuracy'][kind]:.1%}" if kind in row["accuracy"] else "" for kind in kinds]
                rows.append([model, mode, *numbers, *right])
        return columns, rows
