"""Cuts a prompt at the special string: `system # # doc # # doc # # … # # question`, by token ids.

A tokenizer encodes the special string in one way at the start of a text, in another way inside of one, and in a third
way before a word that takes the last blank with it; each of these ways is a variant. The model reads the separators as
a part of the prompt. They belong to no document.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lmc.errors import InputError

Tokens = Sequence[int]


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens `[start, stop)` of a prompt."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class Segments:
    """The parts of a prompt. Tokens that are in no span are separators."""

    system: Span  # before the first separator; may be empty
    documents: tuple[Span, ...]
    question: Span  # behind the last separator; may be empty


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Stored tokens and the positions where they are used.

    `tokens` tokens that were computed at the positions from `first` on are used at the positions from `at` on. What
    they were computed behind, such as an attention sink, is at the positions before.
    """

    at: int
    tokens: int
    first: int
    exact: bool = False  # Full prefill would give the same keys and values, so they are never recomputed.


Variants = tuple[tuple[int, ...], ...]


def separator_variants(encode: Callable[[str], Tokens], special: str) -> Variants:
    """Return every token sequence as which `special` can be encoded, longest first.

    `encode` may or may not add special tokens. Raises `InputError` if `special` cannot be found among other tokens.
    """
    found = set()
    start = _common_prefix(encode("a"), encode("b"))  # special tokens that come before every text, such as BOS
    for text in (special, special.strip(), " " + special.strip(), special.strip() + " "):
        found.add(tuple(encode(text)[start:]))
        for before, after in itertools.product(("a", "a.", "a\n"), ("a", " a", "A", "\n")):
            found.add(_inside(encode, before, text, after))
    blank = set(encode(" ")[start:]) | set(encode("\n")[start:])
    variants = tuple(sorted((v for v in found if set(v) - blank), key=lambda v: (-len(v), v)))
    if not special.strip() or not variants:
        wrong = f"the special string {special!r} encodes to no token of its own"
        raise InputError(f"{wrong}; set blend_special_str to another one")
    return variants


def split(tokens: Tokens, variants: Variants) -> Segments:
    """Cut a prompt at every separator. Without separators, all of it is the question."""
    cuts = _find(tokens, variants)
    if not cuts:
        return Segments(system=Span(0, 0), documents=(), question=Span(0, len(tokens)))
    documents = tuple(Span(a.stop, b.start) for a, b in itertools.pairwise(cuts) if a.stop < b.start)
    return Segments(system=Span(0, cuts[0].start), documents=documents, question=Span(cuts[-1].stop, len(tokens)))


def join(system: Tokens, documents: Sequence[Tokens], question: Tokens, separator: Tokens) -> list[int]:
    """Return the prompt that `split` cuts into these parts; with an empty `system` it starts with a separator."""
    prompt = list(system)
    for part in (*documents, question):
        prompt += [*separator, *part]
    return prompt


def _find(tokens: Tokens, variants: Variants) -> list[Span]:
    cuts: list[Span] = []
    firsts = {variant[0] for variant in variants}
    for at, token in enumerate(tokens):
        if token in firsts and (not cuts or at >= cuts[-1].stop):
            found = next((one for one in variants if tuple(tokens[at : at + len(one)]) == one), None)
            if found is not None:
                cuts.append(Span(at, at + len(found)))
    return cuts


def _inside(encode: Callable[[str], Tokens], before: str, text: str, after: str) -> tuple[int, ...]:
    """Return how `text` is encoded between two others: the tokens that their own encodings do not explain."""
    whole, left, right = encode(before + text + after), encode(before), encode(after)
    start = _common_prefix(whole, left)
    stop = len(whole) - _common_prefix(whole[::-1], right[::-1])
    return tuple(whole[start:stop])


def _common_prefix(a: Tokens, b: Tokens) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
