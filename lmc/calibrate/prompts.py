"""The prompts of a calibration: passages of the user's documents, and questions over them.

Where nobody gives questions, they are made from the documents, without a model: the first half of a sentence stands in
the prompt, and the answer is its other half, which can be copied from one of the passages. The answer therefore depends
on the documents, whatever they are about. Such questions need one passage each. Whether blends keep what several
documents say together is seen only with questions that ask for it.
"""

import random
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lmc.blend.segments import join
from lmc.demo.questions import TOP, Collection, Prompts, Question, read_collection, read_texts
from lmc.errors import InputError

PASSAGE = 200  # tokens, about
BESIDE = 300  # tokens that a prompt may have beside its passages: system text, question, chat template, answer
LEAST_PASSAGE = 16  # tokens
ANSWER = 16  # tokens of an answer that are looked at
WORDS = range(8, 41)  # of a sentence that is asked about
SYSTEM = "Answer from the documents."
ASK = "Complete this sentence from the documents, word for word: "
SEED = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationPrompt:
    """One prompt, as tokens."""

    tokens: list[int]
    bare: list[int]  # the same without documents
    right: list[int]  # the beginning of the right answer


def check_inputs(documents: Path, questions: Path | None) -> None:
    """Raise `InputError` if the files of the user cannot be read."""
    if questions is None:
        read_texts(documents)
    else:
        read_collection(documents, questions)


def collect(documents: Path, questions: Path | None, tokenizer: Any, positions: int) -> Collection:
    """Return passages and questions; raise `InputError` if there are none, naming the file and what is wrong."""
    size = min(PASSAGE, (positions - BESIDE) // TOP)
    if size < LEAST_PASSAGE:
        raise InputError(f"the model has {positions} positions, which are too few for {TOP} documents and a question")
    given = read_collection(documents, questions) if questions is not None else None
    if given is not None and given.last_named:
        return given  # Its questions ask about whole documents.
    passages: dict[str, str] = {}
    for name, text in (given.documents if given is not None else read_texts(documents)).items():
        cut = passages_of(text, len(tokenizer.encode(text, add_special_tokens=False)), size)
        passages |= {f"{name} {number}": passage for number, passage in enumerate(cut, 1)}
    if given is not None:
        return replace(given, documents=passages)
    asked = questions_about(passages)
    if not asked:
        raise InputError(
            f"{documents} has no sentence of {WORDS[0]} to {WORDS[-1]} words to ask about: use --questions"
        )
    return Collection(system=SYSTEM, documents=passages, questions=asked)


def passages_of(text: str, tokens: int, size: int) -> list[str]:
    """Cut a text of so many tokens into passages of about `size` tokens, where possible between words."""
    length = max(len(text) * size // max(tokens, 1), 1)
    found = re.findall(rf"(?s).{{1,{length}}}(?:\s+|$)|.{{1,{length}}}", text)
    return [passage.strip() for passage in found if passage.strip()]


def questions_about(passages: dict[str, str]) -> list[Question]:
    """Return a question for each sentence of a suitable length, in an order that is the same every time."""
    asked = []
    for name, text in passages.items():
        for sentence in re.split(r"(?<=[.!?])\s+|\n+", text):
            words = sentence.split()
            if len(words) in WORDS and sum(word.isalpha() for word in words) > len(words) / 2:
                half = len(words) // 2
                asked.append(Question(question=" ".join(words[:half]), answer=" ".join(words[half:]), document=name))
    random.Random(SEED).shuffle(asked)
    return asked


class CalibrationPrompts:
    """Builds prompts in the model's chat template, or as plain text if its tokenizer has none.

    Prompts without a template are those of `lmc demo`.
    """

    def __init__(self, collection: Collection, tokenizer: Any, special: str, *, made: bool) -> None:
        """`made` says that the questions are those of `questions_about`."""
        self._collection, self._tokenizer, self._made = collection, tokenizer, made
        self._prompts = Prompts(collection, tokenizer, special)
        self._separator = self._encode(special)

    def prompt(self, number: int) -> CalibrationPrompt:
        """Return the prompt with this number. Questions come again, with another order of documents, if they end."""
        questions = self._collection.questions
        example = self._prompts.example(questions[number % len(questions)], number)
        head, tail = self._frame(example.question.question)
        documents = [self._prompts.tokens[name] for name in example.order]
        return CalibrationPrompt(
            tokens=join(head, documents, tail, self._separator),
            bare=join(head, (), tail, self._separator),
            right=self._encode(" " + example.answer)[:ANSWER],
        )

    def _frame(self, question: str) -> tuple[list[int], list[int]]:
        """Return the tokens before and behind the documents.

        The answer to a question that was made begins with the half of the sentence that is known.
        """
        system, known = self._collection.system, question if self._made else ""
        asked = ASK + question if self._made else question
        if not getattr(self._tokenizer, "chat_template", None):
            return self._tokenizer.encode(system), self._encode(f"{asked}\n{known}" if known else asked)
        between = "\0"  # No template changes it, and no text has it.
        chat = [{"role": "user", "content": system + between + asked}]
        text = self._tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        before, _, behind = text.partition(between)
        return self._encode(before), self._encode(behind + known)

    def _encode(self, text: str) -> list[int]:
        tokens: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return tokens
