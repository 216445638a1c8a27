"""Documents, questions, and prompts: BM25 finds the documents of a question, and each prompt has a new order of them.

Long documents are cut into passages of a fixed number of words, if the questions' file says how long. A model that has
a chat template is asked in it. Questions may refer back: an answer of null means "whoever the document before this one
named last", which changes with the order of the documents.
"""

import json
import random
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from lmc.blend.segments import join
from lmc.documents.sources import read_text
from lmc.errors import InputError

TOP = 6  # documents a question, as in CacheBlend's evaluation
DOCUMENTS = "\0"  # where the documents stand in a chat


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A question and its right answer."""

    question: str
    answer: str | None  # None: whoever the document before `document` named last
    accepted: tuple[str, ...] = ()  # other forms of the answer that are right too
    lead: str = ""  # how the answer begins, which is given to the model
    document: str | None = None
    kind: str = "self"
    shown: bool = False  # The demo asks these, if there are any, and else all.


@dataclass(frozen=True, slots=True, kw_only=True)
class Collection:
    """Documents and questions."""

    system: str
    documents: dict[str, str]  # by file name without ending, and the passage's number if documents are cut
    questions: list[Question]
    answer_tokens: int = 16  # how many tokens of an answer are generated
    last_named: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A question with its documents in an order, as tokens."""

    question: Question
    order: tuple[str, ...]
    answer: str
    prompt: list[int]

    @property
    def accepted(self) -> tuple[str, ...]:
        """Every right answer."""
        return self.answer, *self.question.accepted


def read_collection(documents: Path, questions: Path) -> Collection:
    """Text files of a directory and a JSON file of questions; raise `InputError` naming the file and what is wrong.

    The questions' file is a list of `{"question", "answer"}`, or a mapping with `questions`, and where they are wanted
    `system`, `passage_words`, `answer_tokens` and `last_named`.
    """
    texts = read_texts(documents)
    content = _json(questions)
    if isinstance(content, list):
        content = {"questions": content}
    if isinstance(content, dict) and (words := content.get("passage_words")):
        cuts = {name: enumerate(passages(" ".join(text.split()), words)) for name, text in texts.items()}
        texts = {f"{name}-{number:03d}": passage for name, cut in cuts.items() for number, passage in cut}
    try:
        asked = [Question(**{**entry, "accepted": tuple(entry.get("accepted", ()))}) for entry in content["questions"]]
    except (TypeError, KeyError, AttributeError) as error:
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
    return Collection(
        system=content.get("system", "Answer from the documents."),
        documents=texts,
        questions=asked,
        answer_tokens=content.get("answer_tokens", 16),
        last_named=last_named,
    )


def passages(text: str, words: int) -> Iterator[str]:
    """Cut a text into passages of `words` words without overlap; a rest of less than half joins the one before."""
    ends, start = word_ends(text), 0
    while start < len(ends):
        stop = start + words if len(ends) - start >= 1.5 * words else len(ends)
        yield text[ends[start - 1] if start else 0 : ends[stop - 1]].strip()
        start = stop


def word_ends(text: str) -> list[int]:
    """Return where each word of a text ends, with the blanks behind it. Text without blanks has words of 20 letters."""
    return [word.end() for word in re.finditer(r"\S{1,20}\s*", text)]


def read_texts(folder: Path) -> dict[str, str]:
    """Return the texts of a directory, `a.txt` as `a` and `a.md` as `a.md`; raise `InputError` if there are none."""
    texts = {}
    for path in sorted([*folder.glob("*.txt"), *folder.glob("*.md")]) if folder.is_dir() else []:
        if path.is_dir():
            continue
        name = path.stem if path.suffix == ".txt" else path.name
        texts[name] = read_text(path).strip()
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


class PromptBuilder:
    """Builds prompts from documents and a question: in the model's chat template, if it has one."""

    def __init__(self, tokenizer: Any, system: str, special: str) -> None:
        self._tokenizer, self._system = tokenizer, system
        self._separator = self.encode(special)

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, without those that the tokenizer adds to a prompt."""
        return self._tokenizer.encode(text, add_special_tokens=False)  # type: ignore[no-any-return]

    def prompt(self, documents: Sequence[Sequence[int]], question: str, lead: str) -> list[int]:
        """Return a prompt up to the answer, which begins with `lead`, with separators around the documents."""
        if not getattr(self._tokenizer, "chat_template", None):
            asked = self.encode(f"{question} {lead}".strip())
            return join(self._tokenizer.encode(self._system), documents, asked, self._separator)
        content = f"Here are the documents.{DOCUMENTS}Question: {question}"
        chat = [{"role": "system", "content": self._system}, {"role": "user", "content": content}]
        if "system" not in str(self._tokenizer.chat_template):
            chat = [{"role": "user", "content": f"{self._system} {content}"}]
        text = self._tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        before, behind = text.split(DOCUMENTS)
        return join(self.encode(before), documents, self.encode(behind + lead), self._separator)


class Prompts:
    """Builds examples: it retrieves documents, puts them in a new order, and encodes them."""

    def __init__(self, collection: Collection, tokenizer: Any, special: str) -> None:
        self._collection = collection
        self._retriever = Retriever(collection.documents)
        self._builder = PromptBuilder(tokenizer, collection.system, special)
        self.tokens = {name: self._builder.encode(text) for name, text in collection.documents.items()}

    def example(self, question: Question, order_seed: int | str) -> Example:
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
        return Example(question=question, order=tuple(names), answer=answer, prompt=self.build(question, names))

    def build(self, question: Question, order: Sequence[str]) -> list[int]:
        """Return the prompt of a question over these documents."""
        return self._builder.prompt([self.tokens[name] for name in order], question.question, question.lead)


def sample(collection: Collection, count: int | None) -> Collection:
    """Return a collection with `count` of the questions, taken from all kinds in turn; by default those to show."""
    kinds: dict[str, list[Question]] = defaultdict(list)
    for question in sorted(collection.questions, key=lambda question: not question.shown):
        kinds[question.kind].append(question)
    turns = [question for row in zip_longest(*kinds.values()) for question in row if question is not None]
    shown = [question for question in collection.questions if question.shown]
    return replace(collection, questions=shown or collection.questions if count is None else turns[:count])
