"""Documents, questions, and prompts: BM25 finds the documents of a question, and each prompt has a new order of them.

Questions may refer back: an answer of null means "whoever the document before this one named last", which changes with
the order of the documents.
"""

import json
import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from lmc.blend.segments import join
from lmc.errors import InputError

TOP = 6  # documents a question, as in CacheBlend's evaluation


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A question and its right answer."""

    question: str
    answer: str | None  # None: whoever the document before `document` named last
    document: str | None = None
    kind: str = "self"


@dataclass(frozen=True, slots=True, kw_only=True)
class Collection:
    """Documents and questions."""

    system: str
    documents: dict[str, str]  # by file name without ending
    questions: list[Question]
    last_named: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A question with its documents in an order, as tokens."""

    question: Question
    order: tuple[str, ...]
    answer: str
    prompt: list[int]


def read_collection(documents: Path, questions: Path) -> Collection:
    """Text files of a directory and a JSON file of questions; raise `InputError` naming the file and what is wrong.

    The questions' file is a list of `{"question", "answer"}`, or a mapping with `questions`, `system` and `last_named`.
    """
    texts = read_texts(documents)
    content = _json(questions)
    if isinstance(content, list):
        content = {"questions": content}
    try:
        asked = [Question(**entry) for entry in content["questions"]]
    except (TypeError, KeyError) as error:
        raise InputError(f'{questions}: each question is {{"question": …, "answer": …}}; {error}') from error
    last_named = content.get("last_named", {})
    for question in asked:
        refers = (
            question.answer is None
            and question.document in texts
            and len(texts) > 1
            and texts.keys() == last_named.keys()
        )
        if not (
            isinstance(question.question, str)
            and ((isinstance(question.answer, str) and question.answer.strip()) or refers)
        ):
            needs = "an answer in text, or null with its `document` and `last_named` of all documents"
            raise InputError(f"{questions}: {question.question!r} needs {needs}")
    if not asked:
        raise InputError(f"{questions} has no questions")
    system = content.get("system", "Answer from the documents.")
    return Collection(system=system, documents=texts, questions=asked, last_named=last_named)


def read_texts(folder: Path) -> dict[str, str]:
    """Return the texts of a directory, `a.txt` as `a` and `a.md` as `a.md`; raise `InputError` if there are none."""
    texts = {}
    for path in sorted([*folder.glob("*.txt"), *folder.glob("*.md")]) if folder.is_dir() else []:
        name = path.stem if path.suffix == ".txt" else path.name
        try:
            texts[name] = path.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"cannot read {path} as UTF-8 text: {error}") from error
    texts = {name: text for name, text in texts.items() if text}
    if not texts:
        raise InputError(f"no .txt or .md files with text in {folder}: give a directory of text documents")
    return texts


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise InputError(f"{path} is no JSON: {error}") from error


class Retriever:
    """Retrieves documents by BM25."""

    def __init__(self, documents: dict[str, str]) -> None:
        import bm25s

        self._names = list(documents)
        self._bm25s = bm25s
        self._index = bm25s.BM25()
        self._index.index(
            bm25s.tokenize(list(documents.values()), stopwords=None, show_progress=False), show_progress=False
        )

    def top(self, question: str, count: int) -> list[str]:
        """Return the names of the `count` documents that fit best."""
        query = self._bm25s.tokenize(question, stopwords=None, show_progress=False)
        found, _ = self._index.retrieve(query, k=min(count, len(self._names)), show_progress=False)
        return [self._names[i] for i in found[0]]


class Prompts:
    """Builds examples: it retrieves documents, puts them in a new order, and encodes them."""

    def __init__(self, collection: Collection, tokenizer: Any, special: str) -> None:
        self._collection = collection
        self._retriever = Retriever(collection.documents)
        self.tokens = {
            name: tokenizer.encode(text, add_special_tokens=False) for name, text in collection.documents.items()
        }
        self._system = tokenizer.encode(collection.system)
        self._separator = tokenizer.encode(special, add_special_tokens=False)
        self._encode: Callable[[str], list[int]] = lambda text: tokenizer.encode(text, add_special_tokens=False)

    def example(self, question: Question, order_seed: int) -> Example:
        """Return the question over its best documents, in an order that `order_seed` decides.

        A document whose answer depends on the one before it never stands first.
        """
        names = self._retriever.top(question.question, TOP)
        shuffle = random.Random(order_seed)
        shuffle.shuffle(names)
        answer = question.answer
        if answer is None:
            if question.document not in names:
                names[-1] = str(question.document)
            if names[0] == question.document:
                other = shuffle.randrange(1, len(names))
                names[0], names[other] = names[other], names[0]
            answer = self._collection.last_named[names[names.index(str(question.document)) - 1]]
        prompt = join(
            self._system, [self.tokens[name] for name in names], self._encode(question.question), self._separator
        )
        return Example(question=question, order=tuple(names), answer=answer, prompt=prompt)


def sample(collection: Collection, count: int) -> Collection:
    """Return a collection with `count` of the questions, taken from all kinds in turn."""
    kinds: dict[str, list[Question]] = defaultdict(list)
    for question in collection.questions:
        kinds[question.kind].append(question)
    turns = [question for row in zip_longest(*kinds.values()) for question in row if question is not None]
    return replace(collection, questions=turns[:count])
