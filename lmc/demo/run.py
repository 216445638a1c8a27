"""Runs questions over real documents in four modes side by side, and measures the cost and accuracy of each mode.

full    the model's own prefill          exact   prefix caching through the tiers
reuse   blind reuse of documents         blend   reuse with recomputed tokens, as in the settings
"""

import random
import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lmc.blend.segments import join, split
from lmc.config.settings import Settings
from lmc.connectors.transformers import CachedModel
from lmc.connectors.transformers.continuation import greedy_answer
from lmc.connectors.transformers.report import How, Prefilled
from lmc.demo.outcome import Answer, Asked, Outcome, Picture, Tally
from lmc.demo.pretrained import SMOLLM2
from lmc.demo.questions import Collection, Example, Prompts
from lmc.demo.random_model import SEPARATOR, machine, random_llama, random_tokens
from lmc.keys import common_prefix

MODES: tuple[How, ...] = ("full", "exact", "reuse", "blend")
LARGE_LAYERS, LARGE_HIDDEN, LARGE_TOKENS, LARGE_DOCUMENTS, LARGE_PROMPTS = 12, 768, 2048, 8, 3
# A second thread helps little at these sizes. On a busy machine, waiting for it takes much longer than its work.
TORCH_THREADS = 1
PREFIX_BLOCK = 16  # tokens
COMPARED_TOKENS = 16  # tokens of full prefill's answer that are compared with other modes
WARM_UP_TOKENS = 400  # more than one document
Progress = Callable[[str, int, int], None]  # name of the work, finished steps, all steps


def silent(_what: str, _done: int, _of: int) -> None:
    """Ignore progress."""


# -- running -----------------------------------------------------------------------------------------------------------


def answers(cached: CachedModel, prefilled: Prefilled, prompt: list[int], expected: str, tokenizer: Any) -> bool:
    """Return whether greedy decoding from a prefilled prompt begins with the right answer."""
    # One more token is decoded, because the answer may continue.
    limit = len(tokenizer.encode(" " + expected, add_special_tokens=False)) + 1
    return begins(tokenizer.decode(greedy_answer(cached, prompt, prefilled, limit), skip_special_tokens=True), expected)


def begins(answer: str, *accepted: str) -> bool:
    """Return whether an answer begins with the words of an accepted one, whatever their case and punctuation."""
    return any(f"{_words(answer)} ".startswith(f"{_words(text)} ") for text in accepted)


def _words(text: str) -> str:
    """Return the words of a text in lower case, without an article at the beginning."""
    words = re.findall(r"\w+", text.lower())
    return " ".join(words[1:] if len(words) > 1 and words[0] in ("a", "an", "the") else words)


def prefill_all(caches: dict[How, CachedModel], example: Example, first: int) -> dict[How, Prefilled]:
    """Prefill one prompt in all modes. `first` selects the mode that runs first, so that no mode is always first."""
    modes = [MODES[(first + offset) % len(MODES)] for offset in range(len(MODES))]
    prefilled = {mode: caches[mode].prefill(example.prompt, mode) for mode in modes}
    return {mode: prefilled[mode] for mode in MODES}


def ask(cached: CachedModel, example: Example, prefills: dict[How, Prefilled], tokenizer: Any, limit: int) -> Asked:
    """Return the answers of all modes from their prefilled prompts, compared with full prefill's."""
    tokens_of = {mode: greedy_answer(cached, example.prompt, prefilled, limit) for mode, prefilled in prefills.items()}
    full, answers = tokens_of["full"][:COMPARED_TOKENS], {}
    for mode, tokens in tokens_of.items():
        text, report = tokenizer.decode(tokens, skip_special_tokens=True), prefills[mode].report
        answers[mode] = Answer(
            text=text,
            right=begins(text, *example.accepted),
            agreement=common_prefix(tokens, full) / len(full),
            seconds=report.seconds,
            computed=statistics.mean(report.computed),
            reused=report.reused + report.exact,
        )
    return Asked(example=example, ways=answers)


def learn_all(
    cached: CachedModel, documents: Sequence[Sequence[int]], progress: Progress = silent
) -> tuple[int, float]:
    """Learn all documents. Returns the number of documents stored before, and the seconds for the others."""
    started = time.perf_counter()
    stored = sum(map(cached.knows, documents))
    for number, tokens in enumerate(documents):
        cached.learn(tokens)
        progress("documents learned", number + 1, len(documents))
    return stored, time.perf_counter() - started


def demo_settings(cache: Path) -> Settings:
    """Return the user's settings, with the demo's defaults: blending, a disk tier, little memory."""
    loaded = Settings.load()
    overrides: dict[str, object] = {"enable_blending": True}
    defaults = {
        "local_disk": str(cache),
        "max_local_cpu_size": 1.0,
        "max_local_disk_size": 2.0,
        "load_policy": "always",
    }
    overrides |= {name: value for name, value in defaults.items() if loaded.origin(name) == "default"}
    return Settings.load(overrides)


def memory_only(settings: Settings, **changes: object) -> Settings:
    """Return settings of a second cache in the same process, without tiers, because a directory has one owner."""
    values = {
        name: value
        for name, value in settings.model_dump().items()
        if name not in ("local_disk", "remote_url", "server")
    }
    return Settings(**{**values, "max_local_cpu_size": 1.5, **changes})


def prefix_cache(settings: Settings) -> Settings:
    """Return settings of the prefix-caching baseline, with chunks as small as vLLM's blocks."""
    return memory_only(settings, chunk_size=PREFIX_BLOCK)


def run_large(settings: Settings) -> tuple[str, dict[str, dict[str, Any]]]:
    """Run all modes on a larger model with random weights, where computing takes most of the time.

    Its answers have no meaning, so they are not compared.
    """
    model = random_llama(LARGE_LAYERS, LARGE_HIDDEN)
    documents = [random_tokens(LARGE_TOKENS // LARGE_DOCUMENTS - 4, i) for i in range(LARGE_DOCUMENTS)]
    system, shuffle = random_tokens(24, 1_000), random.Random(0)
    tallies: dict[str, Tally] = {mode: Tally() for mode in MODES}
    caches = (
        CachedModel(model, memory_only(settings), SEPARATOR),
        CachedModel(model, prefix_cache(settings), SEPARATOR),
    )
    with caches[0] as cached, caches[1] as prefixed:
        for document in documents:
            cached.learn(document)
        for number in range(LARGE_PROMPTS + 1):
            shuffle.shuffle(documents)
            prompt = join(system, documents, random_tokens(24, 2_000 + number), SEPARATOR)
            for mode in MODES:
                report = (prefixed if mode == "exact" else cached).prefill(prompt, mode).report
                if number:  # the first prompt warms up
                    tallies[mode].reports.append(report)
    parameters = sum(weight.numel() for weight in model.parameters())
    return f"random {parameters / 1e6:.0f}M", {mode: tally.row() for mode, tally in tallies.items()}


# -- the whole ---------------------------------------------------------------------------------------------------------


def run(
    model: Path, collection: Collection, settings: Settings, *, seed: int, large: bool, progress: Progress = silent
) -> Outcome:
    """Learn the retrieved documents, ask all questions in all modes, and draw one example of each class."""
    started = time.perf_counter()
    torch.set_num_threads(TORCH_THREADS)
    cached, tokenizer = CachedModel.load(model, settings)
    prompts = Prompts(collection, tokenizer, settings.blend_special_str)
    examples = [prompts.example(question, f"{seed} {question.question}") for question in collection.questions]
    retrieved = dict.fromkeys(name for example in examples for name in example.order)
    tallies: dict[str, Tally] = {mode: Tally() for mode in MODES}
    asked: list[Asked] = []
    gallery = Gallery()
    with cached, CachedModel(cached.model, prefix_cache(settings), cached.markers) as prefixed:
        caches: dict[How, CachedModel] = {mode: prefixed if mode == "exact" else cached for mode in MODES}
        stored, seconds = learn_all(cached, [prompts.tokens[name] for name in retrieved], progress)
        warm = prompts.example(examples[0].question, "warm")  # in an order whose prefix no question shares
        prefill_all(caches, replace(warm, prompt=warm.prompt[:WARM_UP_TOKENS]), 0)
        for number, example in enumerate(examples):
            prefills = prefill_all(caches, example, number)
            asked.append(ask(cached, example, prefills, tokenizer, collection.answer_tokens))
            for mode, answer in asked[-1].ways.items():
                tallies[mode].reports.append(prefills[mode].report)
                tallies[mode].right[example.question.kind].append(answer.right)
                tallies[mode].agreement.append(answer.agreement)
            gallery.look(cached, asked[-1], prefills, tokenizer)
            progress("questions in four modes", len(asked), len(examples))
        parameters = sum(weight.numel() for weight in cached.model.parameters())
    name = SMOLLM2.name if Path(model).name.startswith(SMOLLM2.name) else Path(model).name
    models = {f"{name} {parameters / 1e6:.1f}M": {mode: tally.row() for mode, tally in tallies.items()}}
    if large:
        progress("a larger model", 0, 1)
        name, rows = run_large(settings)
        models[name] = rows
        progress("a larger model", 1, 1)
    facts = {
        "documents": len(collection.documents),
        "documents_retrieved": len(retrieved),
        "documents_found": stored,
        "learn_seconds": seconds,
        "seconds": time.perf_counter() - started,
        "questions": len(examples),
        "strategy": settings.blend_method,
        "ratio": settings.blend_recompute_ratios,
        "disk": str(settings.local_disk),
        "threads": TORCH_THREADS,
        "machine": machine(),
        "seed": seed,
    }
    return Outcome(facts=facts, models=models, asked=asked, pictures=list(gallery.pictures.values()))


class Gallery:
    """A picture for each class of questions: of the first that only blind reuse answers wrong, or else the first."""

    def __init__(self) -> None:
        self.pictures: dict[str, Picture] = {}
        self._telling: set[str] = set()

    def look(self, cached: CachedModel, asked: Asked, prefills: dict[How, Prefilled], tokenizer: Any) -> None:
        """Draw this prompt, unless its class already has a picture that is as good."""
        kind = asked.example.question.kind
        is_telling = asked.ways["full"].right and asked.ways["blend"].right and not asked.ways["reuse"].right
        if prefills["blend"].report.reused and (
            kind not in self.pictures or (is_telling and kind not in self._telling)
        ):
            self.pictures[kind] = draw(cached, asked, prefills, tokenizer)
            if is_telling:
                self._telling.add(kind)


def draw(cached: CachedModel, asked: Asked, prefills: dict[How, Prefilled], tokenizer: Any) -> Picture:
    """Draw one example as layers × tokens.

    The picture shows the deviation of blindly reused keys from full prefill's, and the tokens that a blend recomputed.
    """
    example = asked.example
    length = len(example.prompt) - 1  # a cache ends before the last token
    segments = split(example.prompt, cached.markers)
    rows, marks = [], []
    for layer, recomputed in enumerate(prefills["blend"].report.recomputed):
        exact = prefills["full"].cache.layers[layer].keys[0, :, :length]
        blind = prefills["reuse"].cache.layers[layer].keys[0, :, :length]
        rows.append([*((blind - exact).float().norm(dim=(0, 2)) / exact.float().norm(dim=(0, 2))).tolist(), 0.0])
        marks.append(recomputed.tolist())
    return Picture(
        title=f"{example.question.kind}: {asked.title()}",
        answered=", ".join(f"{mode} {'right' if answer.right else 'wrong'}" for mode, answer in asked.ways.items()),
        tokens=[tokenizer.decode([token]) for token in example.prompt],
        documents=[(name, span.start, span.stop) for name, span in zip(example.order, segments.documents, strict=True)],
        deviation=rows,
        recomputed=marks,
    )
