"""Questions over real documents, asked in four ways side by side, with what each way costs and gets right.

full    the model's own prefill          exact   prefix caching through the tiers
reuse   blind reuse of documents         blend   reuse, repaired as the settings say
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
from lmc.demo.pretrained import NAME as PRETRAINED
from lmc.demo.questions import Collection, Example, Prompts
from lmc.demo.random_model import SEPARATOR, machine, random_llama, random_tokens

WAYS: tuple[How, ...] = ("full", "exact", "reuse", "blend")
LARGE_LAYERS, LARGE_HIDDEN, LARGE_TOKENS, LARGE_DOCUMENTS, LARGE_PROMPTS = 12, 768, 2048, 8, 3
# A second thread helps little at these sizes; on a busy machine its barriers cost tens of times what it computes.
THREADS = 1
PREFIX_BLOCK = 16  # tokens
AGREEMENT = 16  # tokens of full prefill's answer with which the others are compared
WARM_UP = 400  # tokens, which are a document and a bit
Progress = Callable[[str, int, int], None]  # what, how many are done, of how many


def silent(_what: str, _done: int, _of: int) -> None:
    """Show no progress."""


# -- running -----------------------------------------------------------------------------------------------------------


def answers(cached: CachedModel, done: Prefilled, prompt: list[int], wanted: str, tokenizer: Any) -> bool:
    """Return whether greedy decoding from a prefilled prompt begins with the right answer."""
    limit = len(tokenizer.encode(" " + wanted, add_special_tokens=False)) + 1  # one more: the answer may go on
    return begins(tokenizer.decode(greedy_answer(cached, prompt, done, limit), skip_special_tokens=True), wanted)


def begins(said: str, *accepted: str) -> bool:
    """Return whether an answer begins with the words of an accepted one, whatever their case and punctuation."""
    return any(f"{_words(said)} ".startswith(f"{_words(one)} ") for one in accepted)


def _words(text: str) -> str:
    """Return the words of a text in lower case, without an article at the beginning."""
    words = re.findall(r"\w+", text.lower())
    return " ".join(words[1:] if len(words) > 1 and words[0] in ("a", "an", "the") else words)


def common(said: Sequence[int], wanted: Sequence[int]) -> int:
    """Return how many tokens two answers have in common before the first difference."""
    return next((i for i, (a, b) in enumerate(zip(said, wanted, strict=False)) if a != b), min(len(said), len(wanted)))


def prefill_all(caches: dict[How, CachedModel], example: Example, first: int) -> dict[How, Prefilled]:
    """Prefill one prompt in all ways. The first one differs from question to question, so that none is always first."""
    turns = [WAYS[(first + turn) % len(WAYS)] for turn in range(len(WAYS))]
    done = {how: caches[how].prefill(example.prompt, how) for how in turns}
    return {how: done[how] for how in WAYS}


def ask(cached: CachedModel, example: Example, done: dict[How, Prefilled], tokenizer: Any, limit: int) -> Asked:
    """Let every way answer from its prefilled prompt, and compare the answers."""
    said = {how: greedy_answer(cached, example.prompt, prefilled, limit) for how, prefilled in done.items()}
    full, ways = said["full"][:AGREEMENT], {}
    for how, tokens in said.items():
        text, report = tokenizer.decode(tokens, skip_special_tokens=True), done[how].report
        ways[how] = Answer(
            text=text,
            right=begins(text, *example.accepted),
            agreement=common(tokens, full) / len(full),
            seconds=report.seconds,
            computed=statistics.mean(report.computed),
            reused=report.reused + report.exact,
        )
    return Asked(example=example, ways=ways)


def learn_all(
    cached: CachedModel, documents: Sequence[Sequence[int]], progress: Progress = silent
) -> tuple[int, float]:
    """Learn every document; return how many were stored already, and the seconds for the rest."""
    started = time.perf_counter()
    known = sum(map(cached.knows, documents))
    for number, tokens in enumerate(documents):
        cached.learn(tokens)
        progress("documents learned", number + 1, len(documents))
    return known, time.perf_counter() - started


def demo_settings(cache: Path) -> Settings:
    """Return the user's settings, with the demo's own defaults: blending, a directory to keep, little memory."""
    given = Settings.load()
    wanted: dict[str, object] = {"enable_blending": True}
    defaults = {
        "local_disk": str(cache),
        "max_local_cpu_size": 1.0,
        "max_local_disk_size": 2.0,
        "load_policy": "always",
    }
    wanted |= {name: value for name, value in defaults.items() if given.origin(name) == "default"}
    return Settings.load(wanted)


def beside(settings: Settings, **changes: object) -> Settings:
    """Return settings of a second cache in the same process, in memory only, because a directory has one owner."""
    values = {
        name: value
        for name, value in settings.model_dump().items()
        if name not in ("local_disk", "remote_url", "server")
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


def run(
    model: Path, collection: Collection, settings: Settings, *, seed: int, large: bool, progress: Progress = silent
) -> Outcome:
    """Learn what is retrieved, ask everything in every way, draw one example of each class."""
    started = time.perf_counter()
    torch.set_num_threads(THREADS)
    cached, tokenizer = CachedModel.load(model, settings)
    prompts = Prompts(collection, tokenizer, settings.blend_special_str)
    examples = [prompts.example(question, f"{seed} {question.question}") for question in collection.questions]
    retrieved = dict.fromkeys(name for example in examples for name in example.order)
    tallies: dict[str, Tally] = {how: Tally() for how in WAYS}
    asked: list[Asked] = []
    gallery = Gallery()
    with cached, CachedModel(cached.model, prefix_cache(settings), cached.markers) as prefixed:
        caches: dict[How, CachedModel] = {how: prefixed if how == "exact" else cached for how in WAYS}
        known, seconds = learn_all(cached, [prompts.tokens[name] for name in retrieved], progress)
        warm = prompts.example(examples[0].question, "warm")  # in an order in which no question finds its beginning
        prefill_all(caches, replace(warm, prompt=warm.prompt[:WARM_UP]), 0)
        for number, example in enumerate(examples):
            done = prefill_all(caches, example, number)
            asked.append(ask(cached, example, done, tokenizer, collection.answer_tokens))
            for how, found in asked[-1].ways.items():
                tallies[how].reports.append(done[how].report)
                tallies[how].right[example.question.kind].append(found.right)
                tallies[how].agreement.append(found.agreement)
            gallery.look(cached, asked[-1], done, tokenizer)
            progress("questions in four ways", len(asked), len(examples))
        parameters = sum(weight.numel() for weight in cached.model.parameters())
    name = PRETRAINED if Path(model).name.startswith(PRETRAINED) else Path(model).name
    models = {f"{name} {parameters / 1e6:.1f}M": {how: tally.row() for how, tally in tallies.items()}}
    if large:
        progress("a larger model", 0, 1)
        name, rows = run_large(settings)
        models[name] = rows
        progress("a larger model", 1, 1)
    facts = {
        "documents": len(collection.documents),
        "documents_retrieved": len(retrieved),
        "documents_found": known,
        "learn_seconds": seconds,
        "seconds": time.perf_counter() - started,
        "questions": len(examples),
        "strategy": settings.blend_method,
        "ratio": settings.blend_recompute_ratios,
        "disk": str(settings.local_disk),
        "threads": THREADS,
        "machine": machine(),
        "seed": seed,
    }
    return Outcome(facts=facts, models=models, asked=asked, pictures=list(gallery.pictures.values()))


class Gallery:
    """A picture for each class of questions: the first one that blind reuse gets wrong, or else the first."""

    def __init__(self) -> None:
        self.pictures: dict[str, Picture] = {}
        self._telling: set[str] = set()

    def look(self, cached: CachedModel, asked: Asked, done: dict[How, Prefilled], tokenizer: Any) -> None:
        """Draw this prompt if its class has no better picture."""
        kind = asked.example.question.kind
        telling = asked.ways["full"].right and asked.ways["blend"].right and not asked.ways["reuse"].right
        if done["blend"].report.reused and (kind not in self.pictures or (telling and kind not in self._telling)):
            self.pictures[kind] = draw(cached, asked, done, tokenizer)
            if telling:
                self._telling.add(kind)


def draw(cached: CachedModel, asked: Asked, done: dict[How, Prefilled], tokenizer: Any) -> Picture:
    """Draw one example as layers × tokens.

    The picture shows how far blindly reused keys are from those of full prefill, and which tokens the blend computed.
    """
    example = asked.example
    length = len(example.prompt) - 1  # a cache ends before the last token
    segments = split(example.prompt, cached.markers)
    rows, marks = [], []
    for layer, repaired in enumerate(done["blend"].report.repaired):
        wanted = done["full"].cache.layers[layer].keys[0, :, :length]
        blind = done["reuse"].cache.layers[layer].keys[0, :, :length]
        rows.append([*((blind - wanted).float().norm(dim=(0, 2)) / wanted.float().norm(dim=(0, 2))).tolist(), 0.0])
        marks.append(repaired.tolist())
    return Picture(
        title=f"{example.question.kind}: {asked.title()}",
        answered=", ".join(f"{how} {'right' if way.right else 'wrong'}" for how, way in asked.ways.items()),
        tokens=[tokenizer.decode([token]) for token in example.prompt],
        documents=[(name, span.start, span.stop) for name, span in zip(example.order, segments.documents, strict=True)],
        deviation=rows,
        recomputed=marks,
    )
