"""Training rows: ids, where answers are supervised, and where the probe may look. No model here.

Early stages are short (two documents), the last ones are longer than the shipped prompts. Rows with one document that
stands alone, without system text, are part of every stage: a document computed alone must be familiar, so that blind
reuse fails for want of context and not because alone is strange.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import corpus
import torch
from corpus import CHAINED, FORMER, NAMES, REFERRING, SELF, THEM, Document, Shape
from torch import Tensor

IGNORED = -100
KINDS = (SELF, REFERRING, CHAINED)
SUBJECT = "subject"
PROBED = {SUBJECT: corpus.SUBJECTS, THEM: NAMES, FORMER: NAMES}  # what a probe reads, and the classes it may answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """`steps` batches of about `tokens` tokens; `documents` and `filler` are inclusive ranges.

    `bare` asks by the subject alone and has a batch of pairs in every third place: many answers for few tokens.
    """

    label: str
    steps: int
    tokens: int
    documents: tuple[int, int]
    filler: tuple[int, int]
    questions: int
    bare: bool = False


@dataclass(slots=True)
class Row:
    """`answers` are (position that predicts, expected id), `kinds` their kinds; `probes` are (position, class)."""

    ids: list[int] = field(default_factory=list)
    answers: list[tuple[int, int]] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)
    probes: dict[str, list[tuple[int, int]]] = field(default_factory=lambda: {word: [] for word in PROBED})


@dataclass(slots=True)
class Batch:
    """B rows of T tokens, padded on the right; causal attention never looks there."""

    ids: Tensor  # [B, T]
    answers: Tensor  # [B, T], the expected next id or IGNORED
    kinds: Tensor  # [B, T], the number of the question's kind in KINDS where it has one
    probes: dict[str, Tensor]  # each [B, T], the class to name or IGNORED
    text: Tensor  # [B, T], the next id for the light language-model loss or IGNORED


class Writer:
    """Turns documents into rows by looking words up; `table` has one id a word."""

    def __init__(self, table: dict[str, int], separator: Sequence[int], end: int, pad: int) -> None:
        self.table, self.separator, self.end, self.pad = table, list(separator), end, pad
        self.system = [table[word] for word in corpus.SYSTEM.split()]
        self.themes = list(corpus.THEMES)
        self.subjects = frozenset(corpus.SUBJECTS)

    def documents(self, rng: random.Random, count: int, filler: tuple[int, int]) -> list[Document]:
        """Documents for one prompt, of about one length; three in four open with a reference."""
        subjects = iter(rng.sample(corpus.SUBJECTS, len(corpus.SUBJECTS)))
        level = rng.randint(*filler)
        documents = []
        for _ in range(count):
            referring = rng.random() < 0.75
            chained = rng.randint(0, 2) if referring else 0
            named = rng.randint(1, 4)
            sentences = level and max(2, level + rng.randint(-1, 1))
            shape = Shape(referring=referring, chained=chained, named=named, filler=sentences)
            documents.append(corpus.write_document(rng, "", rng.choice(self.themes), subjects, shape))
        return documents

    def _append_document(self, row: Row, document: Document, before: str | None) -> None:
        """Adds the text and what the probes should find: at a value its subject, at a reference its antecedent."""
        subject = ""
        for word in document.text.split():
            if subject:
                row.probes[SUBJECT].append((len(row.ids), corpus.SUBJECTS.index(subject)))
            subject = word if word in self.subjects else ""
            if word in (THEM, FORMER) and before is not None:
                row.probes[word].append((len(row.ids), NAMES.index(before)))
            row.ids.append(self.table[word])

    def row(self, rng: random.Random, documents: Sequence[Document], questions: int, system: bool, bare: bool) -> Row:
        """All documents, then questions with their answers in any order."""
        row = Row(ids=list(self.system) if system else [])
        before: str | None = None
        for number, document in enumerate(documents):
            row.ids += self.separator if system or number else []
            self._append_document(row, document, before)
            before = document.last_named
        asked = corpus.answers(documents)
        rng.shuffle(asked)
        row.ids += self.separator if bare else []
        for text, kind, answer in asked[:questions]:
            words = text.split()
            row.ids += [self.table[words[-1]]] if bare else self.separator + [self.table[word] for word in words]
            row.answers.append((len(row.ids) - 1, self.table[answer]))
            row.kinds.append(KINDS.index(kind))
            row.ids += [self.table[answer]] if bare else [self.table[answer], self.end]
        return row

    def pairs(self, rng: random.Random, count: int) -> Row:
        """`subject name` pairs, then the same pairs shuffled: nothing but the look-up, and every second token is an
        answer.
        """
        listed = list(zip(rng.sample(corpus.SUBJECTS, count), rng.choices(NAMES, k=count), strict=True))
        row = Row()
        for subject, name in listed:
            row.probes[SUBJECT].append((len(row.ids) + 1, corpus.SUBJECTS.index(subject)))
            row.ids += [self.table[subject], self.table[name]]
        row.ids += self.separator
        for subject, name in rng.sample(listed, count):
            row.answers.append((len(row.ids), self.table[name]))
            row.kinds.append(KINDS.index(SELF))
            row.ids += [self.table[subject], self.table[name]]
        return row

    def rows(self, rng: random.Random, stage: Stage) -> list[Row]:
        """One kind of row a batch, so that lengths agree and little is padded."""
        if stage.bare and rng.random() < 1 / 3:
            count = rng.randint(2, 16)
            return [self.pairs(rng, count) for _ in range(stage.tokens // (4 * count + 3))]
        alone = rng.random() < 0.12
        count = 1 if alone else rng.randint(*stage.documents)
        filler = rng.randint(*stage.filler)
        system = not alone and not stage.bare and rng.random() < 0.8
        rows, total = [], 0
        while total < stage.tokens:
            row = self.row(rng, self.documents(rng, count, (filler, filler)), stage.questions, system, stage.bare)
            rows.append(row)
            total += len(row.ids)
        return rows

    def batch(self, rng: random.Random, stage: Stage) -> Batch:
        """One batch of a stage; the rows come padded to the longest."""
        rows = self.rows(rng, stage)
        width = max(len(row.ids) for row in rows)
        shape = (len(rows), width)
        ids = torch.full(shape, self.pad)
        answers, kinds, text = (torch.full(shape, IGNORED) for _ in range(3))
        probes = {word: torch.full(shape, IGNORED) for word in PROBED}
        for number, row in enumerate(rows):
            own = torch.tensor(row.ids)
            ids[number, : len(own)] = own
            text[number, : len(own) - 1] = own[1:]
            for (at, expected), kind in zip(row.answers, row.kinds, strict=True):
                answers[number, at], kinds[number, at] = expected, kind
            for word, found in row.probes.items():
                for at, wanted in found:
                    probes[word][number, at] = wanted
        return Batch(ids=ids, answers=answers, kinds=kinds, probes=probes, text=text)
