"""Documents, questions, and prompts: BM25 finds the documents of a question, and each prompt has a new order of them.

Long documents are cut into passages if the questions' file has `passage_words`. For a model with a chat template, the
prompt uses the template. Questions may refer back: an answer of null stands for the name that the preceding document
mentions last, which changes with the order of the documents.
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

from rich.text import Text

from lmc.blend.segments import join, without_separators
from lmc.documents.sources import read_documents
from lmc.errors import InputError
from lmc.terminal import console

TOP = 6  # as in CacheBlend's evaluation
DOCUMENTS_MARK = "\0"  # stands for the documents in the text of a chat


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A question and its right answer."""

    question: str
    answer: str | None  # None: the name that the document before `document` mentions last
    accepted: tuple[str, ...] = ()  # other right forms of the answer
    lead: str = ""  # beginning of the answer, which the prompt contains
    document: str | None = None
    kind: str = "self"
    shown: bool = False  # The demo asks only shown questions, or all if none is shown.


@dataclass(frozen=True, slots=True, kw_only=True)
class Collection:
    """Documents and questions."""

    system: str
    documents: dict[str, str]  # by file name without ending, and the passage's number if documents are cut
    questions: list[Question]
    answer_tokens: int = 16  # number of generated tokens of an answer
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
        """All right answers."""
        return self.answer, *self.question.accepted


def read_collection(documents: Path, questions: Path) -> Collection:
    """Return the text files of a directory, and the questions of a JSON file.

    The questions' file is a list of `{"question", "answer"}`, or a mapping with `questions`, and optionally `system`,
    `passage_words`, `answer_tokens` and `last_named`. Raises `InputError`, which names the file and its fault.
    """
    texts = read_texts(documents)
    content = _json(questions)
    if isinstance(content, list):
        content = {"questions": content}
    if isinstance(content, dict) and (words := content.get("passage_words")):
        cuts = {name: enumerate(passages(" ".join(text.split()), words)) for name, text in texts.items()}
        texts = {f"{name}-{number:03d}": passage for name, cut in cuts.items() for number, passage in cut}
    try:
        question_list = [
            Question(**{**entry, "accepted": tuple(entry.get("accepted", ()))}) for entry in content["questions"]
        ]
    except (TypeError, KeyError, AttributeError) as error:
        raise InputError(
            f'{questions} has an invalid question ({error}): use {{"question": …, "answer": …}}'
        ) from error
    last_named = content.get("last_named", {})
    for question in question_list:
        refers_back = (
            question.answer is None
            and question.document in texts
            and len(texts) > 1
            and texts.keys() == last_named.keys()
        )
        if not (
            isinstance(question.question, str)
            and ((isinstance(question.answer, str) and question.answer.strip()) or refers_back)
        ):
            hint = "an answer in text, or null with its `document` and `last_named` of all documents"
            raise InputError(f"{questions}: {question.question!r} needs {hint}")
    if not question_list:
        raise InputError(f"{questions} has no questions")
    return Collection(
        system=content.get("system", "Answer from the documents."),
        documents=texts,
        questions=question_list,
        answer_tokens=content.get("answer_tokens", 16),
        last_named=last_named,
    )


def passages(text: str, words: int) -> Iterator[str]:
    """Cut a text into passages of `words` words without overlap. A rest below half a passage joins the last passage."""
    ends, start = word_ends(text), 0
    while start < len(ends):
        stop = start + words if len(ends) - start >= 1.5 * words else len(ends)
        yield text[ends[start - 1] if start else 0 : ends[stop - 1]].strip()
        start = stop


def word_ends(text: str) -> list[int]:
    """Return the end of each word of a text, including the blanks after it. Words have at most 20 characters."""
    return [word.end() for word in re.finditer(r"\S{1,20}\s*", text)]


def read_texts(source: Path) -> dict[str, str]:
    """Return the texts of a source as in `read_documents`, `a.txt` as `a`; name those that cannot be read."""
    corpus = read_documents(str(source))
    for line in corpus.warnings:
        console(error=True).print(Text(line))
    return {document.id.removesuffix(".txt"): document.text for document in corpus.documents}


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not valid JSON: {error}") from error


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
        """Return the names of the `count` documents that match best."""
        query = self._bm25s.tokenize(question, stopwords=None, show_progress=False)
        ranked, _ = self._index.retrieve(query, k=min(count, len(self._names)), show_progress=False)
        return [self._names[i] for i in ranked[0]]


class PromptBuilder:
    """Builds prompts from documents and a question, in the model's chat template if it has one."""

    def __init__(self, tokenizer: Any, system: str, special: str) -> None:
        self._tokenizer, self._system = tokenizer, system
        self._separator = self.encode(special)

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, without the tokens that the tokenizer adds to a prompt."""
        return self._tokenizer.encode(text, add_special_tokens=False)  # type: ignore[no-any-return]

    def prompt(self, documents: Sequence[Sequence[int]], question: str, lead: str) -> list[int]:
        """Return a prompt with separators around its documents. It ends with `lead`, with which the answer begins."""
        if not getattr(self._tokenizer, "chat_template", None):
            question_tokens = self.encode(f"{question} {lead}".strip())
            return join(self._tokenizer.encode(self._system), documents, question_tokens, self._separator)
        before, after = self.around(question, lead)
        return join(self.encode(before), documents, self.encode(after), self._separator)

    def around(self, question: str, lead: str) -> tuple[str, str]:
        """Return the text before and after the documents, in the model's chat template."""
        content = f"Here are the documents.{DOCUMENTS_MARK}Question: {question}"
        chat = [{"role": "system", "content": self._system}, {"role": "user", "content": content}]
        if "system" not in str(self._tokenizer.chat_template):
            chat = [{"role": "user", "content": f"{self._system} {content}"}]
        text = self._tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        before, after = text.split(DOCUMENTS_MARK)
        return before, after + lead


class Prompts:
    """Builds examples: it retrieves documents, puts them in a new order, and encodes them."""

    def __init__(self, collection: Collection, tokenizer: Any, special: str) -> None:
        self._collection = collection
        self._retriever = Retriever(collection.documents)
        self._builder = PromptBuilder(tokenizer, collection.system, special)
        texts = {name: without_separators(text, special) for name, text in collection.documents.items()}
        self.tokens = {name: self._builder.encode(text) for name, text in texts.items()}

    def example(self, question: Question, order_seed: int | str) -> Example:
        """Return the question with its best documents, in an order that depends on `order_seed`.

        If the answer depends on the document before the question's document, the latter is never first.
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
