"""Cuts a prompt at the special string: `system # # doc # # doc # # … # # question`, by token ids.

A tokenizer encodes the special string in one way at the start of a text, in another way inside of one, and in a third
way before a word that takes the last blank with it; each of these ways is a variant. The model reads the separators as
a part of the prompt. They belong to no document.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from lmc.errors import InputError


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

    `tokens` tokens that were computed at the positions from `first` on are used at the positions from `at` on.
    """

    at: int
    tokens: int
    first: int
    exact: bool = False  # Full prefill would give the same keys and values, so they are never recomputed.


Variants = tuple[tuple[int, ...], ...]


def separator_variants(encode: Callable[[str], Sequence[int]], special: str) -> Variants:
    """Return every token sequence as which `special` can be encoded, longest first.

    `encode` may or may not add special tokens. Raises `InputError` if `special` cannot be found among other tokens.
    """
    found = set()
    start = _common_prefix(encode("a"), encode("b"))  # special tokens that come before every text, such as BOS
    for text in (special, special.strip(), " " + special.strip(), special.strip() + " "):
        found.add(tuple(encode(text)[start:]))
        for before in ("a", "a.", "a\n"):
            for after in ("a", " a", "A", "\n"):
                found.add(_inside(encode, before, text, after))
    blank = set(encode(" ")[start:]) | set(encode("\n")[start:])
    variants = tuple(sorted((v for v in found if set(v) - blank), key=lambda v: (-len(v), v)))
    if not special.strip() or not variants:
        raise InputError(
            f"the special string {special!r} encodes to no token of its own; set blend_special_str to another one"
        )
    return variants


def split(tokens: Sequence[int], variants: Variants) -> Segments:
    """Cut a prompt at every separator. Without separators, all of it is the question."""
    cuts = _find(tokens, variants)
    if not cuts:
        return Segments(system=Span(0, 0), documents=(), question=Span(0, len(tokens)))
    edges = [Span(a.stop, b.start) for a, b in pairwise(cuts)]
    return Segments(
        system=Span(0, cuts[0].start),
        documents=tuple(span for span in edges if len(span)),
        question=Span(cuts[-1].stop, len(tokens)),
    )


def join(
    system: Sequence[int], documents: Sequence[Sequence[int]], question: Sequence[int], separator: Sequence[int]
) -> list[int]:
    """Return the prompt that `split` cuts into these parts; with an empty `system` it starts with a separator."""
    prompt = list(system)
    for part in (*documents, question):
        prompt += [*separator, *part]
    return prompt


def _find(tokens: Sequence[int], variants: Variants) -> list[Span]:
    by_first: dict[int, list[tuple[int, ...]]] = {}
    for variant in variants:
        by_first.setdefault(variant[0], []).append(variant)
    cuts: list[Span] = []
    for at, token in enumerate(tokens):
        if token not in by_first or (cuts and at < cuts[-1].stop):
            continue
        for variant in by_first[token]:
            if tuple(tokens[at : at + len(variant)]) == variant:
                cuts.append(Span(at, at + len(variant)))
                break
    return cuts


def _inside(encode: Callable[[str], Sequence[int]], before: str, text: str, after: str) -> tuple[int, ...]:
    """Return how `text` is encoded between two others: the tokens that their own encodings do not explain."""
    whole, left, right = encode(before + text + after), encode(before), encode(after)
    start = _common_prefix(whole, left)
    stop = len(whole) - _common_prefix(whole[::-1], right[::-1])
    return tuple(whole[start:stop])


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
