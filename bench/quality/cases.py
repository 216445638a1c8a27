"""The prompts that ways are compared on, as tokens: made ones, real questions, and those of the small shipped model."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from find import TEMPLATES

from lmc.config.settings import Settings
from lmc.connectors.transformers import CachedModel
from lmc.demo import REAL, SHIPPED
from lmc.demo.pretrained import checkpoint
from lmc.demo.questions import Collection, PromptBuilder, Prompts, read_collection
from quality.tasks import DEVELOPMENT, HELD_OUT, TASKS, Draw

# How the documents of a prompt are joined, if not by separators. With `parts`, the learned documents of a made prompt
# are longer.
JOINS: Mapping[str, Callable[[Sequence[str]], str]] = {
    name: TEMPLATES[template]
    for name, template in (("newlines", "stuff"), ("numbers", "numbered"), ("xml", "xml"), ("parts", "stuff"))
}
SEPARATED = "separators"
SYSTEM = "You answer questions from the documents that you are given."
REAL_TASK, PYTHON_TASK, SMALL_TASK = "real", "python", "small"
REAL_TASKS = REAL_TASK, PYTHON_TASK  # questions over real documents
DOCUMENTS = 6  # of a made prompt
# Sentences of each document that say nothing: documents of about 50, 110 and 290 tokens, prompts of 480, 840 and 1850.
FILLERS = {"short": 3, "medium": 10, "long": 26}
WORDS = {"development": DEVELOPMENT, "held-out": HELD_OUT}
SEED = 1  # of the order of real questions and of their documents


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One prompt."""

    task: str
    variant: str  # of the task: the size of documents, which words, and whether facts stand inside
    name: str  # one of its kind within the variant
    question: str
    prompt: list[int]
    accepted: tuple[str, ...]  # right answers
    learned: list[int]  # a prompt whose documents are learned; without separators in `prompt`, another one
    answer: list[int] | None  # the right answer as tokens, after which predictions are compared; None: full prefill's

    @property
    def key(self) -> str:
        """What no other prompt has."""
        return key_of(self.task, self.variant, self.name)


def key_of(task: str, variant: str, name: str) -> str:
    """Return the key of a prompt; `Case` describes its parts."""
    return f"{task} | {variant} | {name}"


def load(task: str, model: str, settings: Settings) -> tuple[CachedModel, Any]:
    """Return the model of a task, and its tokenizer: a pretrained `model`, or the small one that lmc ships."""
    return CachedModel.load(SHIPPED / "model" if task == SMALL_TASK else checkpoint(model), settings)


def cases(
    tasks: Sequence[str],
    tokenizer: Any,
    special: str,
    size: str,
    words: str,
    count: int,
    *,
    inside: bool = False,
    joined: str = SEPARATED,
) -> Iterator[Case]:
    """Yield `count` prompts of each task, or as many as it has; a prompt of each task in turn.

    With `inside`, what made documents have to say stands inside of them, and not at their beginnings. `joined` says
    how documents are joined: by separators, or by a name of `JOINS`.
    """
    builder = PromptBuilder(tokenizer, SYSTEM, special)
    sources = [
        _asked(task, tokenizer, special, joined) if task in ASKED else _made(builder, task, size, words, inside, joined)
        for task in tasks
    ]
    for _ in range(count):
        for source in sources:
            if case := next(source, None):
                yield case


def collection_of(task: str) -> Collection:
    """Return the documents and questions of a task that is not made."""
    folder = ASKED[task]
    return read_collection(folder / "documents", folder / "questions.json")


def shuffled(collection: Collection) -> list[Any]:
    """Return the questions in the order in which they are asked."""
    return random.Random(SEED).sample(collection.questions, len(collection.questions))


def _asked(task: str, tokenizer: Any, special: str, joined: str) -> Iterator[Case]:
    collection = collection_of(task)
    prompts, builder = Prompts(collection, tokenizer, special), PromptBuilder(tokenizer, collection.system, special)
    for question in shuffled(collection):
        example = prompts.example(question, f"{SEED} {question.question}")
        texts = [collection.documents[name] for name in example.order]
        yield Case(
            task=task,
            variant=_variant(question.kind, joined),
            name=question.question,
            question=f"{question.question} {question.lead}",
            prompt=_joined(builder, texts, joined, question.question, question.lead) or example.prompt,
            learned=example.prompt,
            accepted=example.accepted,
            answer=None,
        )


def _made(builder: PromptBuilder, task: str, size: str, words: str, inside: bool, joined: str) -> Iterator[Case]:
    number = 0
    variant = _variant(size, words, "inside" * inside, joined)
    while True:
        item = TASKS[task](Draw(WORDS[words], f"{task} {number}", DOCUMENTS, FILLERS[size], inside=inside))
        pages = item.documents
        if joined == "parts":  # Each document stands between two of another prompt.
            other = TASKS[task](Draw(WORDS[words], f"{task} {number} around", DOCUMENTS, FILLERS[size])).documents
            around = zip(other, item.documents, [*other[1:], other[0]], strict=True)
            pages = ["\n\n".join(page) for page in around]
        learned = builder.prompt([builder.encode(page) for page in pages], item.question, item.lead)
        yield Case(
            task=task,
            variant=variant,
            name=str(number),
            question=f"{item.question} {item.lead}",
            prompt=_joined(builder, item.documents, joined, item.question, item.lead) or learned,
            learned=learned,
            accepted=(item.answer,),
            answer=builder.encode(" " + item.answer),
        )
        number += 1


def _variant(*parts: str) -> str:
    return ", ".join(part for part in parts if part and part != SEPARATED)


def _joined(builder: PromptBuilder, documents: Sequence[str], joined: str, question: str, lead: str) -> list[int]:
    """Return the prompt of a question over documents without separators; empty if `joined` means separators."""
    if joined == SEPARATED:
        return []
    before, after = builder.around(question, lead)
    return builder.encode(f"{before}\n\n{JOINS[joined](documents)}\n\n{after}")


PYTHON = Path(__file__).parents[1] / "texts/python"  # holds documents/ and questions.json
ASKED = {REAL_TASK: REAL, PYTHON_TASK: PYTHON, SMALL_TASK: SHIPPED}
