"""Prompts in plain text whose answer needs more than one document, or a document that is read in the light of another.

Each task draws its words with a seed. Development and held-out prompts have different names, places and filler
sentences, so that a choice made on the first cannot have learned the second by heart.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Item:
    """One prompt: documents, a question, how the answer begins, and the words that answer it."""

    documents: list[str]
    question: str
    lead: str
    answer: str


@dataclass(frozen=True, slots=True)
class Words:
    """What a generator may draw from."""

    firms: tuple[str, ...]
    people: tuple[tuple[str, str], ...]  # a first name, and its pronoun
    cities: tuple[str, ...]
    jobs: tuple[str, ...]
    fillers: tuple[str, ...]


DEVELOPMENT = Words(
    firms=("Falcon", "River", "Tiger", "Eagle", "Star", "Ocean", "Moon", "Forest"),
    people=(
        ("Anna", "She"), ("Tom", "He"), ("Lucy", "She"), ("Peter", "He"),
        ("Maria", "She"), ("Jack", "He"), ("Emma", "She"), ("Paul", "He"),
    ),
    cities=("London", "Paris", "Rome", "Berlin", "Madrid", "Vienna", "Tokyo", "Dublin"),
    jobs=("teacher", "doctor", "baker", "farmer", "pilot", "nurse", "lawyer", "painter"),
    fillers=(
        "A new roof was put on the main building a few years ago.",
        "Visitors are welcome on weekdays and may look around.",
        "A small canteen serves soup and bread at noon.",
        "Deliveries arrive at the back gate before eight o'clock.",
        "The garden behind the house is open to everybody.",
        "The windows were painted again last year.",
        "A bus stops in front of the gate every half hour.",
        "In most years the busiest months are May and October.",
        "The local newspaper has written about it more than once.",
        "Two long meetings are held there every month.",
    ),
)  # fmt: skip
HELD_OUT = Words(
    firms=("Lion", "Sun", "Bear", "Mountain", "Diamond", "Silver", "Rose", "Crown"),
    people=(
        ("Julia", "She"), ("Mark", "He"), ("Sarah", "She"), ("David", "He"),
        ("Laura", "She"), ("Simon", "He"), ("Helen", "She"), ("Frank", "He"),
    ),
    cities=("Athens", "Moscow", "Chicago", "Boston", "Toronto", "Sydney", "Lisbon", "Oslo"),
    jobs=("singer", "writer", "cook", "driver", "actor", "judge", "miner", "tailor"),
    fillers=(
        "The old stairs creak when somebody walks on them.",
        "Most of the people who come there know each other well.",
        "The archive keeps letters and drawings from the early days.",
        "Electricity comes from panels on the southern wall.",
        "There is a plan to build a second hall next to the first one.",
        "Every Monday morning the whole week is talked through.",
        "The kitchen was rebuilt after a fire in the winter.",
        "A narrow path leads from there down to the lake.",
        "Nobody remembers who planted the two tall trees.",
        "On clear days one can see the hills from the upper floor.",
    ),
)  # fmt: skip


class Draw:
    """One prompt's draws."""

    def __init__(self, words: Words, seed: str, documents: int, fillers: int) -> None:
        self.words, self.documents, self._fillers = words, documents, fillers
        self.random = random.Random(seed)

    def filler(self) -> str:
        """Return sentences that say nothing of the question."""
        return " ".join(self.random.sample(self.words.fillers, self._fillers))

    def pairs(self, one: tuple[str, ...], other: tuple[str, ...], count: int) -> list[tuple[str, str]]:
        """Return different items of one kind with different items of another."""
        return list(zip(self.random.sample(one, count), self.random.sample(other, count), strict=True))


def subject(draw: Draw) -> Item:
    """Chunks of a fixed size: the second chunk says "the company", and the first one says which."""
    pairs = draw.pairs(draw.words.firms, draw.words.cities, draw.documents // 2)
    documents = []
    for firm, city in pairs:
        documents.append(f"This text is about the company {firm}. {draw.filler()}")
        documents.append(f"The company has its headquarters in {city}. {draw.filler()}")
    firm, city = draw.random.choice(pairs)
    question = f"In which city does the company {firm} have its headquarters?"
    return Item(documents, question, f"The company {firm} has its headquarters in", city)


def pronoun(draw: Draw) -> Item:
    """The second chunk says "she" or "he", and the first one says who."""
    people = draw.random.sample(draw.words.people, draw.documents // 2)
    cities = draw.random.sample(draw.words.cities, len(people))
    documents = []
    for (name, pronoun), city in zip(people, cities, strict=True):
        documents.append(f"{name} worked as a {draw.random.choice(draw.words.jobs)} for many years. {draw.filler()}")
        documents.append(f"{pronoun} moved to {city} later. {draw.filler()}")
    number = draw.random.randrange(len(people))
    name = people[number][0]
    return Item(documents, f"To which city did {name} move?", f"{name} moved to", cities[number])


def correction(draw: Draw) -> Item:
    """The last document corrects one of the others."""
    *pairs, (_, new) = draw.pairs(draw.words.firms, draw.words.cities, draw.documents)
    documents = [f"The office of {firm} is in {city}. {draw.filler()}" for firm, city in pairs]
    firm, _ = draw.random.choice(pairs)
    documents.append(f"News: {firm} has moved. Its office is now in {new}. {draw.filler()}")
    return Item(documents, f"Where is the office of {firm} now?", f"The office of {firm} is now in", new)


def scope(draw: Draw) -> Item:
    """The same key in several sections, whose names stand in the chunks before."""
    pairs = draw.pairs(draw.words.firms, draw.words.cities, draw.documents // 2)
    documents = []
    for server, city in pairs:
        documents.append(f"[{server}]\nThis section is about the server {server}. {draw.filler()}")
        documents.append(f"location = {city}\n{draw.filler()}")
    server, city = draw.random.choice(pairs)
    return Item(
        documents, f"What is the location of the server {server}?", f"The location of the server {server} is", city
    )


def fact(draw: Draw) -> Item:
    """One document answers, and the others do not matter: a control."""
    names = tuple(name for name, _ in draw.words.people)
    pairs = draw.pairs(names, draw.words.jobs, draw.documents)
    documents = [f"{name} is a {job}. {draw.filler()}" for name, job in pairs]
    name, job = draw.random.choice(pairs)
    return Item(documents, f"What is the job of {name}?", f"{name} is a", job)


TASKS: dict[str, Callable[[Draw], Item]] = {
    "subject": subject,
    "pronoun": pronoun,
    "correction": correction,
    "scope": scope,
    "fact": fact,
}
