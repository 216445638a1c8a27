"""The prompts of a calibration: passages of the user's documents, and questions about them.

Without given questions, questions are made from the documents, without a model. The prompt has the first half of a
sentence. The answer is the second half, which can be copied from one of the passages. So the answer depends on the
documents, whatever their topic is. Each such question needs only one passage. Only given questions can test whether
blends preserve information that is spread over several documents.
"""

import random
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lmc.demo.questions import TOP, Collection, Prompts, Question, passages, read_collection, read_texts, word_ends
from lmc.errors import InputError

PASSAGE_TOKENS = 200  # approximate number of tokens of a passage
OTHER_TOKENS = 300  # maximum tokens in addition to the passages: system text, question, chat template, answer
MIN_PASSAGE_TOKENS = 16  # minimum number of tokens of a passage
ANSWER_TOKENS = 16  # leading tokens of an answer that are compared
SENTENCE_WORDS = range(8, 41)  # number of words of a sentence that becomes a question
SYSTEM = "Answer from the documents."
ASK = "Complete this sentence from the documents, word for word: "
SEED = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationPrompt:
    """One prompt, as tokens."""

    tokens: list[int]
    bare: list[int]  # the same prompt without documents
    right: list[int]  # the first tokens of the right answer


def read_inputs(documents: Path, questions: Path | None) -> Collection:
    """Return the user's documents and questions. Raises `InputError` if they cannot be read."""
    if questions is not None:
        return read_collection(documents, questions)
    return Collection(system=SYSTEM, documents=read_texts(documents), questions=[])


def collect(inputs: Collection, tokenizer: Any, positions: int) -> Collection:
    """Return passages and questions, which are made if there are none. Raises `InputError` if that is impossible."""
    size = min(PASSAGE_TOKENS, (positions - OTHER_TOKENS) // TOP)
    if size < MIN_PASSAGE_TOKENS:
        raise InputError(f"the model has {positions} positions, too few for {TOP} documents and a question")
    if inputs.last_named:
        return inputs  # Its questions are about whole documents.
    documents: dict[str, str] = {}
    for name, text in inputs.documents.items():
        share = size / len(tokenizer.encode(text, add_special_tokens=False))
        cut = passages(text, max(1, round(share * len(word_ends(text)))))
        documents |= {f"{name} {number}": passage for number, passage in enumerate(cut, 1)}
    questions = inputs.questions or questions_about(documents)
    if not questions:
        words = f"{SENTENCE_WORDS[0]} to {SENTENCE_WORDS[-1]} words"
        raise InputError(f"the documents have no sentence of {words} to make questions of: use --questions")
    return replace(inputs, documents=documents, questions=questions)


def questions_about(documents: dict[str, str]) -> list[Question]:
    """Return a question for each sentence of a suitable length, in a random but reproducible order."""
    questions = []
    for name, text in documents.items():
        for sentence in re.split(r"(?<=[.!?])\s+|\n+", text):
            words = sentence.split()
            if len(words) in SENTENCE_WORDS and sum(word.isalpha() for word in words) > len(words) / 2:
                beginning, rest = " ".join(words[: len(words) // 2]), " ".join(words[len(words) // 2 :])
                questions.append(Question(question=ASK + beginning, answer=rest, lead=beginning, document=name))
    random.Random(SEED).shuffle(questions)
    return questions


class CalibrationPrompts:
    """Builds the prompts of a calibration in the same way as those of `lmc demo`."""

    def __init__(self, collection: Collection, tokenizer: Any, special: str) -> None:
        self._questions, self._tokenizer = collection.questions, tokenizer
        self._prompts = Prompts(collection, tokenizer, special)

    def prompt(self, number: int) -> CalibrationPrompt:
        """Return the prompt with this number. After the last question, they repeat with another order of documents."""
        question = self._questions[number % len(self._questions)]
        example = self._prompts.example(question, number)
        return CalibrationPrompt(
            tokens=example.prompt,
            bare=self._prompts.build(question, ()),
            right=self._tokenizer.encode(" " + example.answer, add_special_tokens=False)[:ANSWER_TOKENS],
        )
