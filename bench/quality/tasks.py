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
    animals: tuple[str, ...]
    colors: tuple[str, ...]
    goods: tuple[str, ...]
    fillers: tuple[str, ...]


DEVELOPMENT = Words(
    firms=("Falcon", "River", "Tiger", "Eagle", "Star", "Ocean", "Moon", "Forest"),
    people=(
        ("Anna", "She"), ("Tom", "He"), ("Lucy", "She"), ("Peter", "He"),
        ("Maria", "She"), ("Jack", "He"), ("Emma", "She"), ("Paul", "He"),
    ),
    cities=("London", "Paris", "Rome", "Berlin", "Madrid", "Vienna", "Tokyo", "Dublin"),
    jobs=("teacher", "doctor", "baker", "farmer", "pilot", "nurse", "lawyer", "painter"),
    animals=("dog", "cat", "horse", "goat", "cow", "pig", "duck", "sheep"),
    colors=("red", "green", "blue", "yellow"),
    goods=("bicycles", "pianos", "clocks", "shoes"),
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
        "Behind the fence there are a few old apple trees.",
        "The telephone is answered from nine to five.",
        "A storm broke two of the lamps at the entrance.",
        "The floor is made of stone and is cold in winter.",
        "Some of the chairs were given by friends.",
        "Bread is brought every morning by a boy with a cart.",
        "The walls carry photographs of a summer long ago.",
        "Water has to be carried up from the well.",
        "It is never quite silent in the long corridor.",
        "Keys are kept in a box behind the second door.",
        "A path of gravel goes once around everything.",
        "On some days one smells the sea from there.",
        "The clock over the door has been wrong for weeks.",
        "Letters are put on a table beside the stairs.",
        "Nobody complains about the food any more.",
        "The heating was paid for by a small loan.",
        "A list of all rules hangs next to the window.",
        "Children like to play on the steps after school.",
        "The lift is repaired again and again.",
        "In spring the river comes very close.",
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
    animals=("wolf", "fox", "bear", "lion", "mouse", "bird", "snake", "rabbit"),
    colors=("white", "black", "brown", "pink"),
    goods=("candles", "carpets", "bottles", "knives"),
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
        "A wooden bench stands in the sun all afternoon.",
        "The shelves are dusted once a week.",
        "Parcels are left with the neighbours if nobody is in.",
        "An old map of the coast hangs above the desk.",
        "The lights go out by themselves at eleven.",
        "Snow is cleared away before the first visitors come.",
        "Somebody has planted roses along the wall.",
        "The coffee is better than it used to be.",
        "Bicycles may be left in the yard without a lock.",
        "The well was closed when the pipes were laid.",
        "A new carpet covers the worst of the boards.",
        "Music can be heard through the open doors.",
        "The bell rings twice when the ferry arrives.",
        "Tables are carried outside as soon as it is warm.",
        "The cellar is dry and is used to keep potatoes.",
        "Every guest gets a small key and a lamp.",
        "The roof has been home to swallows for years.",
        "Two of the rooms have no windows at all.",
        "Newspapers of the last week lie on the counter.",
        "The gate squeaks, and everybody knows that sound.",
    ),
)  # fmt: skip


class Draw:
    """One prompt's draws."""

    def __init__(self, words: Words, seed: str, documents: int, fillers: int, *, inside: bool = False) -> None:
        """What a document has to say stands at its beginning, or `inside` of its `fillers` sentences."""
        self.words, self.documents, self._fillers, self._inside = words, documents, fillers, inside
        self.random, self._place = random.Random(seed), random.Random(f"{seed} inside")

    def filler(self) -> str:
        """Return sentences that say nothing of the question."""
        return " ".join(self._sentences())

    def among(self, text: str, apart: str = " ") -> str:
        """Return a text before sentences that say nothing, or among them."""
        sentences = self._sentences()
        before = self._place.randint(1, self._fillers - 1) if self._inside else 0
        parts = " ".join(sentences[:before]), text, " ".join(sentences[before:])
        return apart.join(part for part in parts if part)

    def _sentences(self) -> list[str]:
        return self.random.sample(self.words.fillers, self._fillers)

    def pairs(self, one: tuple[str, ...], other: tuple[str, ...], count: int) -> list[tuple[str, str]]:
        """Return different items of one kind with different items of another."""
        return list(zip(self.random.sample(one, count), self.random.sample(other, count), strict=True))


def subject(draw: Draw) -> Item:
    """Chunks of a fixed size: the second chunk says "the company", "it" or "she", and the first one says who it is."""
    words, choose = draw.words, draw.random.choice
    firm, (name, he_or_she) = choose(words.firms), choose(words.people)
    subjects = [
        (
            f"This text is about the company {firm}.",
            "The company has its headquarters in {}.",
            f"In which city does the company {firm} have its headquarters?",
            f"The company {firm} has its headquarters in",
            choose(words.cities),
        ),
        (
            f"This text is about a person called {name}.",
            f"{he_or_she} works as a {{}} all week.",
            f"What does {name} work as?",
            f"{name} works as a",
            choose(words.jobs),
        ),
        (
            "This text is about a farm outside of the town.",
            "The animal that is kept there is a {}.",
            "Which animal is kept on the farm?",
            "The animal that is kept there is a",
            choose(words.animals),
        ),
        (
            "This text is about the old bridge of the town.",
            "It was painted {} after the war.",
            "In which color was the old bridge painted?",
            "The old bridge was painted",
            choose(words.colors),
        ),
        (
            "This text is about a shop in Market Street.",
            "The shop sells {} and nothing else.",
            "What does the shop in Market Street sell?",
            "The shop in Market Street sells",
            choose(words.goods),
        ),
    ]
    picked = draw.random.sample(subjects, min(len(subjects), draw.documents // 2))
    documents = []
    for first, second, _, _, answer in picked:
        documents += [draw.among(first), draw.among(second.format(answer))]
    while len(documents) < draw.documents:
        documents.append(draw.filler())
    _, _, question, lead, answer = choose(picked)
    return Item(documents, question, lead, answer)


def pronoun(draw: Draw) -> Item:
    """The second chunk says "she" or "he", and the first one says who. Two people did different things."""
    (name, he_or_she), (other, of_other) = draw.random.sample(draw.words.people, 2)
    job, city, animal = (draw.random.choice(kind) for kind in (draw.words.jobs, draw.words.cities, draw.words.animals))
    documents = [
        draw.among(f"{name} worked as a {job} for many years."),
        draw.among(f"{he_or_she} moved to {city} later."),
        draw.among(f"{other} lived alone for many years."),
        draw.among(f"{of_other} bought a {animal} later."),
    ]
    while len(documents) < draw.documents:
        documents.append(draw.filler())
    return draw.random.choice(
        [
            Item(documents, f"To which city did {name} move later?", f"{name} moved to", city),
            Item(documents, f"Which animal did {other} buy later?", f"{other} bought a", animal),
        ]
    )


def correction(draw: Draw) -> Item:
    """The last document corrects one of the others."""
    *pairs, (_, new) = draw.pairs(draw.words.firms, draw.words.cities, draw.documents)
    documents = [draw.among(f"The office of {firm} is in {city}.") for firm, city in pairs]
    firm, _ = draw.random.choice(pairs)
    documents.append(draw.among(f"News: {firm} has moved. Its office is now in {new}."))
    return Item(documents, f"Where is the office of {firm} now?", f"The office of {firm} is now in", new)


def update(draw: Draw) -> Item:
    """The last document says what has changed since one of the others was written."""
    names = draw.random.sample([name for name, _ in draw.words.people], draw.documents - 1)
    *jobs, new = draw.random.sample(draw.words.jobs, draw.documents)
    documents = [draw.among(f"{name} works as a {job}.") for name, job in zip(names, jobs, strict=True)]
    name = draw.random.choice(names)
    documents.append(draw.among(f"Correction: {name} now works as a {new}."))
    return Item(documents, f"What does {name} work as now?", f"{name} now works as a", new)


def scope(draw: Draw) -> Item:
    """Keys of several sections, whose names stand in the chunks before."""
    server, city, color, name = (
        draw.random.choice(kind)
        for kind in (draw.words.firms, draw.words.cities, draw.words.colors, [name for name, _ in draw.words.people])
    )
    documents = []
    for section, key, value in (
        (f"server {server}", "location", city),
        ("window", "color", color),
        ("user", "name", name),
    ):
        about = f"[{section}]\nThis section is about the {section.split()[0]}."
        documents += [draw.among(about), draw.among(f"{key} = {value}", "\n")]
    while len(documents) < draw.documents:
        documents.append(draw.filler())
    return draw.random.choice(
        [
            Item(
                documents,
                f"What is the location of the server {server}?",
                f"The location of the server {server} is",
                city,
            ),
            Item(documents, "What is the color of the window?", "The color of the window is", color),
            Item(documents, "What is the name of the user?", "The name of the user is", name),
        ]
    )


def rivals(draw: Draw) -> Item:
    """As `subject`, with several companies. The model itself often takes one for the other."""
    pairs = draw.pairs(draw.words.firms, draw.words.cities, draw.documents // 2)
    documents = []
    for firm, city in pairs:
        documents.append(draw.among(f"This text is about the company {firm}."))
        documents.append(draw.among(f"The company has its headquarters in {city}."))
    firm, city = draw.random.choice(pairs)
    question = f"In which city does the company {firm} have its headquarters?"
    return Item(documents, question, f"The company {firm} has its headquarters in", city)


def price(draw: Draw) -> Item:
    """A control: prices, and a correction of one price in the last document."""
    goods = draw.random.sample([*draw.words.goods, *draw.words.animals], draw.documents - 1)
    *prices, new = draw.random.sample(range(11, 99), draw.documents)
    documents = [draw.among(f"The price of {one} is {cost} dollars.") for one, cost in zip(goods, prices, strict=True)]
    again = draw.random.choice(goods)
    documents.append(draw.among(f"Correction: the new price of {again} is {new} dollars."))
    return Item(documents, f"What is the new price of {again}?", f"The new price of {again} is", str(new))


def fact(draw: Draw) -> Item:
    """A control: one document answers, and the others do not matter."""
    names = tuple(name for name, _ in draw.words.people)
    pairs = draw.pairs(names, draw.words.jobs, draw.documents)
    documents = [draw.among(f"{name} is a {job}.") for name, job in pairs]
    name, job = draw.random.choice(pairs)
    return Item(documents, f"What is the job of {name}?", f"{name} is a", job)


Task = Callable[[Draw], Item]
# Full prefill is right in at least 85 % of these on SmolLM2-135M, and blind reuse differs from it.
MAIN: dict[str, Task] = {
    "subject": subject,
    "pronoun": pronoun,
    "scope": scope,
    "correction": correction,
    "update": update,
}
CONTROLS: dict[str, Task] = {"fact": fact, "price": price}
HARD: dict[str, Task] = {"rivals": rivals}
TASKS = MAIN | CONTROLS | HARD
