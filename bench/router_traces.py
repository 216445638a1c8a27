"""Requests for simulated engines: questions over documents, conversations, and when they come."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

from lmc.router.policy_types import PromptRequest

SPECIAL = " # # "
LETTERS = 4  # of a token


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request, when it comes."""

    at: float
    request: PromptRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """When requests come: at random, and `burst` times as many of them for some seconds of each minute."""

    per_second: float  # outside of bursts
    burst: float = 1.0
    burst_seconds: float = 5.0

    def times(self, count: int, generator: random.Random) -> Iterator[float]:
        """Return the arrival times of the requests."""
        now = 0.0
        for _ in range(count):
            in_burst = now % 60 < self.burst_seconds
            now += generator.expovariate(self.per_second * (self.burst if in_burst else 1))
            yield now


def zipf(count: int, exponent: float) -> list[float]:
    """Return cumulated weights of `count` things."""
    return list(accumulate((rank + 1) ** -exponent for rank in range(count)))


def letters(generator: random.Random, tokens: int) -> str:
    """Return a text of about the given number of tokens."""
    return "".join(generator.choices("abcdefghijklmnopqrstuvwxyz    ", k=tokens * LETTERS)).strip()


def rag(
    requests: int,
    traffic: Traffic,
    *,
    documents: int = 5000,
    exponent: float = 0.6,
    in_prompt: int = 6,
    tokens: int = 300,
    topics: int = 0,
    seed: int = 0,
) -> Iterator[Arrival]:
    """Questions over documents. With `topics`, all documents of a prompt are of one topic.

    Texts are made when they are first asked for, because most of a million documents never are.
    """
    generator = random.Random(seed)

    @cache
    def text(document: int) -> str:
        return letters(random.Random(f"{seed} document {document}"), tokens)

    system = "Answer from the documents."
    every = zipf(documents if not topics else documents // topics, exponent)
    topical = zipf(topics, exponent) if topics else []
    for number, at in enumerate(traffic.times(requests, random.Random(f"{seed} times"))):
        chosen: list[int] = []
        topic = generator.choices(range(topics), cum_weights=topical)[0] if topics else 0
        while len(chosen) < in_prompt:
            one = generator.choices(range(len(every)), cum_weights=every)[0]
            one = one * topics + topic if topics else one
            if one not in chosen:
                chosen.append(one)
        question = f"question {number} {letters(generator, 30)}"
        yield Arrival(at, PromptRequest(text=SPECIAL.join([system, *map(text, chosen), question])))


def chat(
    requests: int, traffic: Traffic, *, sessions: int = 400, tokens: int = 150, seed: int = 0
) -> Iterator[Arrival]:
    """Conversations of several turns. Each turn repeats all earlier turns."""
    generator = random.Random(seed)
    talks: list[str] = []
    for at in traffic.times(requests, random.Random(f"{seed} times")):
        if (len(talks) < sessions and generator.random() < 0.3) or not talks:
            talks.append("\0system\0You help.\0")
        one = generator.randrange(len(talks))
        talks[one] += f"user\0{letters(generator, tokens)}\0"
        yield Arrival(at, PromptRequest(text=talks[one] + "assistant\0"))
        talks[one] += f"assistant\0{letters(generator, tokens)}\0"
        if len(talks[one]) > 12_000:
            talks.pop(one)
