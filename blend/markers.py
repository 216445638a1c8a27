"""Markers: the tokens that separate the parts of a prompt, as a tokenizer and its chat template write them.

A tokenizer may encode the separator differently at the start of a text, inside a text, and before a word whose token
includes the last blank. Each of these token sequences is a variant.
"""

import itertools
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lmc.blend.turn_headers import (
    SENTENCE_PIECE_BLANK,
    Tokens,
    TurnHeaders,
    Variants,
    added_tokens,
    longest_first,
    occurrences,
)
from lmc.errors import InputError
from lmc.keys import common_prefix

log = logging.getLogger(__name__)

# Pairs of texts around a separator. A tokenizer treats both alike, and they share no token next to the separator.
ALIKE_BEFORE = ("a", "b"), ("a.", "a,"), ("a\n", "a\t")
ALIKE_AFTER = ("a", "b"), ("A", "B"), (" a", " b"), ("\n", "\t")
# What may stand before and after a separator. Pretokenizers join it with punctuation and line breaks.
SPACES = "", " ", "\n", "\n\n", "\r\n"
BEFORE = (
    "a", "a.", "a,", "a:", "a;", "a!", "a?", 'a"', "a'", "a)", "a]", "a}", "a>", "a*", "a`", "a|", "a-", "a。", "12",
)  # fmt: skip
AFTER = "a", "A", '"', "(", "[", "{", "<", "-", "*", "`", "|", "1"
# First words of texts that some tokenizers join with the separator before them. No sequence can be found for these.
FIRST_WORDS = "The", "This", "In", "if", "import", "include", "define", "from", "def", "class", "user"
# Names of tokens that only chat templates write, such as <|user|> and <tool_call|>, with or without the special flag.
MARKER_NAME = re.compile(r"<[|\uff5c].*>|<.*[|\uff5c]>", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Markers:
    """The tokens at which a prompt is cut, and those that show that a text is a conversation, not a document."""

    separators: Variants  # all token sequences of the separator, longest first
    special: frozenset[int] = frozenset()  # tokens that never occur in a document: role markers, BOS, EOS
    answers: Variants = ()  # headers that a chat template writes before answers of the model, longest first
    messages: Variants = ()  # headers before other contents, which end an answer, longest first
    results: Variants = ()  # headers that a chat template writes only before results of tools, longest first

    @classmethod
    def of(cls, tokenizer: Any, special_string: str) -> "Markers":
        """Return the markers of a transformers or vLLM tokenizer. Raises `InputError` as `separator_variants` does."""
        separators = separator_variants(tokenizer.encode, tokenizer.decode, special_string)
        if lost := _lost_between(tokenizer.encode, separators, special_string):
            log.warning(
                "blend_special_str %r is not found in %r with this tokenizer: use %r, also in prompts",
                special_string,
                lost,
                f" {special_string.strip()} ",
            )
        special = special_tokens(tokenizer)
        turns = TurnHeaders.of(tokenizer, special)
        return cls(
            separators=separators,
            special=special | turns.special,
            answers=turns.answers,
            messages=turns.messages,
            results=turns.results,
        )


def separator_variants(
    encode: Callable[[str], Tokens], decode: Callable[[list[int]], str], special_string: str
) -> Variants:
    """Return every token sequence to which the separator can be encoded, longest first.

    A sequence may contain white space and a punctuation mark of the text around it. `encode` may or may not add special
    tokens. Raises `InputError` if the separator has no tokens of its own.
    """
    bare = special_string.strip()
    start = common_prefix(encode("a"), encode("b"))  # special tokens before every text, such as BOS
    texts = special_string, bare, " " + bare, bare + " "
    inside = {tuple(encode(text)[start:]) for text in texts}
    inside |= {tokens_inside(encode, *parts) for parts in itertools.product(ALIKE_BEFORE, texts, ALIKE_AFTER)}
    # Drop sequences that lack a part of the separator because a token joins it with an adjacent character.
    variants = {one for one in inside if decode([*one]).replace(SENTENCE_PIECE_BLANK, " ").split() == bare.split()}
    spaced = list(dict.fromkeys(before + bare + after for before in SPACES for after in SPACES))
    around = [*itertools.product(BEFORE, spaced, ("a",)), *itertools.product(("a",), spaced, AFTER)]
    around += itertools.product(BEFORE, (bare,), AFTER)
    variants |= {_joined(encode("".join(parts)), decode, bare) for parts in around} - {()}
    if not bare or not variants:
        wrong = f"the separator {special_string!r} has no tokens of its own"
        raise InputError(f"{wrong}; set blend_special_str to another string")
    return longest_first(variants)


def _lost_between(encode: Callable[[str], Tokens], variants: Variants, special_string: str) -> str:
    """Return an example of a text in which the separator is not found; an empty text without one."""
    around = itertools.product(BEFORE, (special_string,), (*AFTER, *FIRST_WORDS))
    return next((text for text in map("".join, around) if not any(occurrences(encode(text), variants))), "")


def _joined(tokens: Tokens, decode: Callable[[list[int]], str], bare: str) -> tuple[int, ...]:
    """Return the fewest tokens that contain the separator `bare`, and white space or a mark of the text around it.

    Returns no tokens if these have other characters of that text as well.
    """

    def text(start: int, stop: int) -> str:
        return decode(list(tokens[start:stop])).replace(SENTENCE_PIECE_BLANK, " ")

    if not bare or bare not in text(0, len(tokens)):
        return ()
    stop = next(stop for stop in range(1, len(tokens) + 1) if bare in text(0, stop))
    start = next(start for start in reversed(range(stop)) if bare in text(start, stop))
    before, _, after = text(start, stop).partition(bare)
    marks = before.strip(), after.strip()
    return () if any(len(mark) > 1 or mark.isalnum() for mark in marks) else tuple(tokens[start:stop])


def special_tokens(tokenizer: Any) -> frozenset[int]:
    """Return the tokens that are not text. The token for unknown words is left out, because it stands for text."""
    specials = set(tokenizer.all_special_ids)
    # Role markers may have the special flag without being among the tokenizer's named special tokens.
    specials |= {token for token, added in getattr(tokenizer, "added_tokens_decoder", {}).items() if added.special}
    specials |= {token for token, name in added_tokens(tokenizer).items() if MARKER_NAME.fullmatch(name)}
    return frozenset(specials - {getattr(tokenizer, "unk_token_id", None)})


def tokens_inside(
    encode: Callable[[str], Tokens], before: tuple[str, str], text: str, after: tuple[str, str]
) -> tuple[int, ...]:
    """Return the tokens of `text` between two other texts: those that do not depend on the other texts."""
    joined, other_before, other_after = (
        encode(left + text + right)
        for left, right in ((before[0], after[0]), (before[1], after[0]), (before[0], after[1]))
    )
    start = len(joined) - common_prefix(joined[::-1], other_before[::-1])
    return tuple(joined[start : common_prefix(joined, other_after)])
