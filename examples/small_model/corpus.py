"""The grammar of a small village register: documents that refer back to the document before them.

A document opens with `owner of goat them .`, where `them` is the last name in the document *before* it in the prompt,
so the right answer changes with the order of the documents. `former` is a second reference that hangs on the first: the
person this document's `them` stands for. Explicit names may stand between the two, so `former` cannot be resolved by
looking for the latest name; it needs the resolved `them`.

`python corpus.py` (re)writes `documents/*.txt` and `questions.json`. Pure Python; training draws its text from here
too.
"""

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lmc.demo import SHIPPED

SYSTEM = "this is the old register for the village and the land about it . each entry was kept by hand . name one owner and no more ."
SEPARATOR = " # # "
THEM, FORMER = "them", "former"
SELF, REFERRING, CHAINED = "self", "referring", "chained"


def words(text: str) -> list[str]:
    """Word lists stay readable as running text."""
    return text.split()


NAMES = words(
    "Ada Alma Ana Anton Bea Ben Cora Dana Dora Elin Ella Elsa Emil Enid Eva Fay Gwen Hana Ida Ines Ira Ivan Jan June Kai Lena "
    "Lina Lisa Mara Mina Mona Nell Nora Olga Omar Owen Rosa Sven Tara Vera"
)

SUBJECTS = words(
    "ant ape bat bear bee boar buck bull calf cat cod cow crab crow cub deer doe dog dove duck eel elk ewe fawn fox frog goat "
    "goose gull hare hawk hen heron horse hound kid kite lamb lark lion lynx mare mink mole moose moth mouse mule newt otter owl "
    "ox pig pony pup ram rat raven robin rook seal sheep slug snail snake sow stag stork swan toad trout vole wasp whale wolf "
    "worm wren colt axe bag ball band barn basin bed bell belt bench bin boat bolt bone book boot bow bowl box brick broom brush "
    "cabin cage cake can cane cap cape card cart cask chain chair chest clock cloak cloth coat coin comb cord cot crate crown cup "
    "desk dish door dress drill drum fan file flag flask flute fork frame gate glass globe glove gown harp hat hinge hook hoop "
    "horn hut jar jug key kiln knife lamp lid lock loom lute map mask mat mug nail net oar oven pail pan pen pick pin pipe plate "
    "pot pump purse quilt rake razor reed ring robe rod rope rug sack sail saw scarf scale shawl shed shelf shirt shoe sled spade "
    "spoon spear stool stove sword table tent tile torch towel tray trunk tub urn vase veil vest vine whip yoke bead lens sash "
    "stamp bath bank dart dial hood hose lace latch lever plum rail ramp rein seat shell skate"
)

THEMES: dict[str, tuple[str, ...]] = {
    "mill": ("wheel", "flour", "grain", "dam"),
    "harbour": ("tide", "quay", "mast", "pier"),
    "market": ("stall", "price", "square", "fair"),
    "forest": ("oak", "path", "moss", "glade"),
    "farm": ("field", "wheat", "fence", "hay"),
    "forge": ("iron", "coal", "spark", "smoke"),
    "inn": ("soup", "bread", "ale", "hearth"),
    "abbey": ("choir", "tower", "garden", "hymn"),
}
ADJECTIVES = words("dry wet cold warm grey quiet busy old new long small dark low thin clean")
WEATHER = words("rain wind fog frost sun snow hail mist")
TIMES = words("dawn noon dusk night")
SEASONS = words("spring summer autumn winter")
SIDES = words("north south east west hill river")
DEEDS = words("mended painted swept counted moved shut")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """`value` is what the text says after `subject`: a name, `them` or `former`."""

    subject: str
    value: str
    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One entry of the register; the first line is its title."""

    name: str
    theme: str
    lines: tuple[str, ...]
    facts: tuple[Fact, ...]

    @property
    def text(self) -> str:
        """One sentence a line."""
        return "\n".join(self.lines)

    @property
    def last_named(self) -> str:
        """Whom `them` in the next document stands for."""
        return next(fact.value for fact in reversed(self.facts) if fact.kind == SELF)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How much of everything a document has: counts of facts by kind and of filler sentences."""

    referring: bool
    chained: int
    named: int
    filler: int


def filler_line(rng: random.Random, theme: str) -> str:
    """Return a sentence without names, so that only facts decide an answer."""
    one, two = rng.sample(THEMES[theme], 2)
    pick = rng.choice
    templates = (
        f"the {pick(WEATHER)} over the {theme} was {pick(ADJECTIVES)} at {pick(TIMES)} .",
        f"in the {pick(SEASONS)} the {one} was {pick(DEEDS)} and {pick(DEEDS)} again .",
        f"{pick(ADJECTIVES)} {pick(WEATHER)} came from the {pick(SIDES)} side before {pick(TIMES)} .",
        f"the {one} by the {two} was {pick(ADJECTIVES)} all {pick(SEASONS)} .",
        f"no one {pick(DEEDS)} the {one} until the {pick(WEATHER)} had gone .",
        f"near the {theme} the {one} and the {two} stood {pick(ADJECTIVES)} and {pick(ADJECTIVES)} .",
    )
    return pick(templates)


def fact_line(fact: Fact) -> str:
    return f"owner of {fact.subject} {fact.value} ."


def document_facts(rng: random.Random, subjects: Iterator[str], shape: Shape) -> list[Fact]:
    """The facts in order: `them` opens, an explicit name closes, the others stand in any order between."""
    assert shape.named >= 1, "a document without an explicit name leaves the next one without an antecedent"
    assert shape.referring or not shape.chained, "`former` needs a `them` to hang on"
    names = rng.sample(NAMES, shape.named)
    named = [Fact(subject=next(subjects), value=name, kind=SELF) for name in names]
    between = named[1:] + [Fact(subject=next(subjects), value=FORMER, kind=CHAINED) for _ in range(shape.chained)]
    rng.shuffle(between)
    opening = [Fact(subject=next(subjects), value=THEM, kind=REFERRING)] if shape.referring else []
    return opening + between + named[:1]


def write_document(rng: random.Random, name: str, theme: str, subjects: Iterator[str], shape: Shape) -> Document:
    """At most one filler sentence stands before the first fact and after the last; the rest goes anywhere between."""
    facts = document_facts(rng, subjects, shape)
    gaps = [0] * (len(facts) + 1)
    if shape.filler > 1:
        gaps[0], gaps[-1] = rng.randint(0, 1), rng.randint(0, 1)
    inner = range(1, len(facts)) if len(facts) > 1 else range(1)
    for _ in range(shape.filler - gaps[0] - gaps[-1]):
        gaps[rng.choice(inner)] += 1
    lines = [f"notes from the {theme} in {rng.choice(SEASONS)} :"]
    for fact, gap in zip(facts, gaps[:-1], strict=True):
        lines += [filler_line(rng, theme) for _ in range(gap)]
        lines.append(fact_line(fact))
    lines += [filler_line(rng, theme) for _ in range(gaps[-1])]
    return Document(name=name, theme=theme, lines=tuple(lines), facts=tuple(facts))


def question(theme: str, subject: str) -> str:
    return f"at the {theme} , owner of {subject}"


def answers(documents: Sequence[Document]) -> list[tuple[str, str, str]]:
    """(question, kind, answer) for every fact that has an answer when the documents stand in this order."""
    asked: list[tuple[str, str, str]] = []
    before: str | None = None
    for document in documents:
        for fact in document.facts:
            answer = fact.value if fact.kind == SELF else before
            if answer is not None:
                asked.append((question(document.theme, fact.subject), fact.kind, answer))
        before = document.last_named
    return asked


def every_word() -> list[str]:
    """All words the grammar can write: each must be one token."""
    rng = random.Random(0)
    words = set(SYSTEM.split()) | set(SEPARATOR.split()) | set(NAMES) | set(SUBJECTS) | {THEM, FORMER}
    words |= set(question("mill", "cat").split())
    for theme in THEMES:
        shape = Shape(referring=True, chained=1, named=1, filler=400)
        words |= set(write_document(rng, "", theme, iter(SUBJECTS), shape).text.split())
    return sorted(words)


def shipped_documents(seed: int = 7) -> list[Document]:
    """Three documents a theme; every subject stands in one document only, so a question has one answer."""
    rng = random.Random(seed)
    subjects = iter(rng.sample(SUBJECTS, len(SUBJECTS)))
    documents = []
    for theme in THEMES:
        for number in range(1, 4):
            shape = Shape(
                referring=True, chained=rng.choice((1, 1, 2)), named=3 + (number == 2), filler=rng.randint(12, 13)
            )
            documents.append(write_document(rng, f"{theme}-{number:02d}", theme, subjects, shape))
    return documents


def question_sheet(documents: Sequence[Document]) -> dict[str, object]:
    """Return the contents of `questions.json`. A null answer stands for the last name in the document before."""
    rows = [
        {
            "question": question(document.theme, fact.subject),
            "kind": fact.kind,
            "document": document.name,
            "answer": fact.value if fact.kind == SELF else None,
        }
        for document in documents
        for fact in document.facts
    ]
    return {
        "system": SYSTEM,
        "answer_tokens": 2,  # an answer is one word, which is one token; the next one shows that it ends there
        "last_named": {document.name: document.last_named for document in documents},
        "questions": rows,
    }


def write_collection(folder: Path) -> None:
    documents = shipped_documents()
    target = folder / "documents"
    target.mkdir(parents=True, exist_ok=True)
    for old in target.glob("*.txt"):
        old.unlink()
    for document in documents:
        (target / f"{document.name}.txt").write_text(document.text + "\n", encoding="utf-8")
    sheet = json.dumps(question_sheet(documents), indent=1)
    (folder / "questions.json").write_text(sheet + "\n", encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="write documents/ and questions.json")
    parser.add_argument("--out", type=Path, default=SHIPPED)
    write_collection(parser.parse_args().out)
