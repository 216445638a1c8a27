"""Questions over real documents, asked in four ways side by side, with what each way costs and gets right.

full    the model's own prefill          exact   prefix caching through the tiers
reuse   blind reuse of documents         blend   reuse, repaired as the settings say
"""

import json
import random
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from lmc.blend.segments import join, split
from lmc.config import Settings
from lmc.connectors.transformers import CachedModel
from lmc.connectors.transformers.report import How, Prefilled, Report
from lmc.demo.page import Picture
from lmc.demo.questions import Collection, Example, Prompts
from lmc.demo.random_model import SEPARATOR, machine, random_llama, random_tokens

WAYS: tuple[How, ...] = ("full", "exact", "reuse", "blend")
LARGE_LAYERS, LARGE_HIDDEN, LARGE_TOKENS, LARGE_DOCUMENTS, LARGE_PROMPTS = 12, 768, 2048, 8, 3
# A second thread helps little at these sizes; on a busy machine its barriers cost tens of times what it computes.
THREADS = 1
PREFIX_BLOCK = 16  # tokens


@dataclass(slots=True)
class Tally:
    """The results of one way over all examples."""

    reports: list[Report] = field(default_factory=list)
    right: dict[str, list[bool]] = field(default_factory=lambda: defaultdict(list))

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
            "accuracy": {kind: statistics.mean(hits) for kind, hits in sorted(self.right.items())},
            "questions": {kind: len(hits) for kind, hits in sorted(self.right.items())},
        }


# -- running -----------------------------------------------------------------------------------------------------------


def answers(cached: CachedModel, done: Prefilled, prompt: list[int], wanted: str, tokenizer: Any) -> bool:
    """Return whether greedy decoding from a prefilled prompt begins with the right answer."""
    limit = len(tokenizer.encode(" " + wanted, add_special_tokens=False)) + 1  # one more: the answer may go on
    ids = torch.tensor([prompt], device=cached.layers.device)
    options = {"max_new_tokens": limit, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    said = cached.model.generate(input_ids=ids, past_key_values=done.cache, **options)[0, len(prompt) :].tolist()
    return begins(tokenizer.decode(said, skip_special_tokens=True), wanted)


def begins(said: str, wanted: str) -> bool:
    """Return whether an answer begins with the right words, and not with a longer word."""
    said, wanted = said.strip().lower(), wanted.lower()
    return said.startswith(wanted) and not said[len(wanted) : len(wanted) + 1].isalnum()


def run_questions(
    cached: CachedModel, prefixed: CachedModel, prompts: Prompts, collection: Collection, tokenizer: Any, seed: int
) -> Iterator[tuple[Example, dict[How, Prefilled], dict[How, bool]]]:
    """Ask all questions, each in all ways on the same prompt. The order of the ways rotates, so that none is first."""
    for number, question in enumerate(collection.questions):
        example = prompts.example(question, seed * 1_000_003 + number)
        done, right = {}, {}
        for turn in range(len(WAYS)):
            how = WAYS[(number + turn) % len(WAYS)]
            model = prefixed if how == "exact" else cached
            done[how] = model.prefill(example.prompt, how)
        for how, prefilled in done.items():
            right[how] = answers(cached, prefilled, example.prompt, example.answer, tokenizer)
        yield example, done, right


def learn_all(cached: CachedModel, prompts: Prompts) -> tuple[int, float]:
    """Learn every document; return how many were stored already, and the seconds for the rest."""
    started = time.perf_counter()
    known = sum(cached.knows(tokens) for tokens in prompts.tokens.values())
    for tokens in prompts.tokens.values():
        cached.learn(tokens)
    return known, time.perf_counter() - started


def demo_settings(cache: Path) -> Settings:
    """Return the user's settings, with the demo's own defaults: blending, a directory to keep, little memory."""
    given = Settings.load()
    wanted: dict[str, object] = {"enable_blending": True}
    defaults = {
        "local_disk": str(cache),
        "max_local_cpu_size": 0.5,
        "max_local_disk_size": 2.0,
        "load_policy": "always",
        "blend_calibration": "ignore",  # The demo shows what blends are, good or bad.
    }
    wanted |= {name: value for name, value in defaults.items() if given.origin(name) == "default"}
    return Settings.load(wanted)


def beside(settings: Settings, **changes: object) -> Settings:
    """Return settings of a second cache in the same process, in memory only, because a directory has one owner."""
    values = {
        name: value
        for name, value in settings.model_dump().items()
        if name not in ("local_disk", "remote_url", "blend_preset")
    }
    return Settings(**{**values, "max_local_cpu_size": 1.5, **changes})


def prefix_cache(settings: Settings) -> Settings:
    """Return settings of the prefix-caching baseline, with chunks as small as vLLM's blocks."""
    return beside(settings, chunk_size=PREFIX_BLOCK)


def run_large(settings: Settings) -> tuple[str, dict[str, dict[str, Any]]]:
    """Run the same ways on a larger model with random weights, where computing takes most of the time.

    Nothing is right or wrong there.
    """
    model = random_llama(LARGE_LAYERS, LARGE_HIDDEN)
    documents = [random_tokens(LARGE_TOKENS // LARGE_DOCUMENTS - 4, i) for i in range(LARGE_DOCUMENTS)]
    system, shuffle = random_tokens(24, 1_000), random.Random(0)
    tallies: dict[str, Tally] = {how: Tally() for how in WAYS}
    caches = CachedModel(model, beside(settings), SEPARATOR), CachedModel(model, prefix_cache(settings), SEPARATOR)
    with caches[0] as cached, caches[1] as prefixed:
        for document in documents:
            cached.learn(document)
        for number in range(LARGE_PROMPTS + 1):
            shuffle.shuffle(documents)
            prompt = join(system, documents, random_tokens(24, 2_000 + number), SEPARATOR)
            for how in WAYS:
                report = (prefixed if how == "exact" else cached).prefill(prompt, how).report
                if number:  # the first prompt warms up
                    tallies[how].reports.append(report)
    parameters = sum(weight.numel() for weight in model.parameters())
    return f"random {parameters / 1e6:.0f}M", {how: tally.row() for how, tally in tallies.items()}


# -- the whole ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """All results of a demo."""

    facts: dict[str, Any]
    models: dict[str, dict[str, dict[str, Any]]]  # name of a model -> way -> row of the table
    examples: list[Example]
    pictures: list[Picture]

    def json(self) -> str:
        """Return everything that the table shows, and what was asked in which order."""
        asked = [
            {**asdict(example.question), "order": example.order, "expected": example.answer}
            for example in self.examples
        ]
        return json.dumps({**self.facts, "models": self.models, "examples": asked}, indent=1)

    def heading(self) -> str:
        """Return in a sentence or two what was done."""
        facts = self.facts
        found, documents = facts["documents_found"], facts["documents"]
        learned = documents - found
        parts = [f"{facts['questions']} questions over {documents} documents, each in a new order."]
        if found:
            parts.append(f"{found} documents were found on disk ({facts['disk']}).")
        if learned:
            parts.append(f"{learned} documents were prefilled alone and stored in {facts['learn_seconds']:.1f} s.")
        parts.append(f"blend: {facts['strategy']} at {facts['ratio']:g}. {facts['threads']} thread.")
        return " ".join(parts)

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Return columns, and a row for each model and way; numbers are per prompt."""
        kinds = sorted(
            {kind for ways in self.models.values() for row in ways.values() for kind in row["accuracy"]}, reverse=True
        )
        columns = ["model", "way", "TTFT ms", "p95", "speed-up", "computed", "reused", "MB GPU/CPU/disk", "charged"]
        rows = []
        for model, ways in self.models.items():
            for how, row in ways.items():
                moved = (row["bytes"].get(place, 0) / row["prompts"] / 1e6 for place in ("device", "host", "disk"))
                numbers = [
                    f"{row['ttft_median_s'] * 1e3:.1f}",
                    f"{row['ttft_p95_s'] * 1e3:.1f}",
                    f"{ways['full']['ttft_median_s'] / row['ttft_median_s']:.2f}",
                    f"{row['computed_tokens']:.0f}/{row['prompt_tokens']:.0f}",
                    f"{row['reused_tokens']:.0f}",
                    " / ".join(f"{megabytes:.1f}" for megabytes in moved),
                    f"{row['charged_budget']:.2f}",
                ]
                right = [f"{row['accuracy'][kind]:.1%}" if kind in row["accuracy"] else "" for kind in kinds]
                rows.append([model, how, *numbers, *right])
        return [*columns, *kinds], rows


def run(
    model: Path,
    collection: Collection,
    settings: Settings,
    *,
    seed: int,
    large: bool,
    progress: Callable[[str, int, int], None],
) -> Outcome:
    """Learn, ask everything in every way, draw one example of each class.

    `progress(what, done, of)` is called as it goes.
    """
    torch.set_num_threads(THREADS)
    cached, tokenizer = CachedModel.load(model, settings)
    prompts = Prompts(collection, tokenizer, settings.blend_special_str)
    tallies: dict[str, Tally] = {how: Tally() for how in WAYS}
    examples, pictures, drawn = [], [], set()
    total = len(collection.questions)
    with cached, CachedModel(cached.model, prefix_cache(settings), cached.separators) as prefixed:
        known, seconds = learn_all(cached, prompts)
        warm = prompts.example(collection.questions[0], seed)
        for how in WAYS:
            (prefixed if how == "exact" else cached).prefill(warm.prompt[: len(warm.prompt) // 2], how)
        for example, done, right in run_questions(cached, prefixed, prompts, collection, tokenizer, seed):
            kind = example.question.kind
            for how in WAYS:
                tallies[how].reports.append(done[how].report)
                tallies[how].right[kind].append(right[how])
            if (
                kind not in drawn
                and done["blend"].report.reused
                and right["full"]
                and (kind == "self" or not right["reuse"])
            ):
                drawn.add(kind)
                pictures.append(draw(cached, example, done, right, tokenizer))
            examples.append(example)
            progress("questions in four ways", len(examples), total)
        parameters = sum(weight.numel() for weight in cached.model.parameters())
    models = {f"{Path(model).name} {parameters / 1e6:.1f}M": {how: tally.row() for how, tally in tallies.items()}}
    if large:
        progress("a larger model", 0, 1)
        name, rows = run_large(settings)
        models[name] = rows
        progress("a larger model", 1, 1)
    facts = {
        "documents": len(collection.documents),
        "documents_found": known,
        "learn_seconds": seconds,
        "questions": total,
        "strategy": settings.blend_strategy,
        "ratio": settings.blend_recompute_ratios[0],
        "disk": str(settings.local_disk),
        "threads": THREADS,
        "machine": machine(),
        "seed": seed,
    }
    return Outcome(facts=facts, models=models, examples=examples, pictures=pictures)


def draw(
    cached: CachedModel, example: Example, done: dict[How, Prefilled], right: dict[How, bool], tokenizer: Any
) -> Picture:
    """Draw one example as layers × tokens.

    The picture shows how far blindly reused keys are from those of full prefill, and which tokens the blend computed.
    """
    length = len(example.prompt) - 1  # a cache ends before the last token
    segments = split(example.prompt, cached.separators)
    rows, marks = [], []
    for layer, repaired in enumerate(done["blend"].report.repaired):
        wanted = done["full"].cache.layers[layer].keys[0, :, :length]
        blind = done["reuse"].cache.layers[layer].keys[0, :, :length]
        rows.append([*((blind - wanted).float().norm(dim=(0, 2)) / wanted.float().norm(dim=(0, 2))).tolist(), 0.0])
        marks.append(repaired.tolist())
    return Picture(
        title=f"{example.question.kind}: “{example.question.question}” → {example.answer}",
        answered=", ".join(f"{how} {'right' if ok else 'wrong'}" for how, ok in sorted(right.items())),
        tokens=[tokenizer.decode([token]) for token in example.prompt],
        documents=[(name, span.start, span.stop) for name, span in zip(example.order, segments.documents, strict=True)],
        deviation=rows,
        recomputed=marks,
    )
