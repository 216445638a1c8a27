"""Markers: the tokens that tell the parts of a prompt apart, as a tokenizer and its chat template write them.

A tokenizer encodes the special string in one way at the start of a text, in another way inside of one, and in a third
way before a word that takes the last blank with it; each of these ways is a variant.
"""

import itertools
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
    common_prefix,
    longest_first,
)
from lmc.errors import InputError

# Pairs of texts around a special string: a tokenizer treats both alike, and they have no token in common beside it.
BEFORE = ("a", "b"), ("a.", "a,"), ("a\n", "a\t")
BEHIND = ("a", "b"), ("A", "B"), (" a", " b"), ("\n", "\t")
# Names that only chat templates write, such as <|user|> and <tool_call|>, also without the special flag
MARKER_NAME = re.compile(r"<[|\uff5c].*>|<.*[|\uff5c]>", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Markers:
    """What a prompt is cut at, and what shows that a text is a conversation and no document."""

    separators: Variants  # all token sequences of the special string, longest first
    special: frozenset[int] = frozenset()  # tokens that no document has: role markers, BOS, EOS
    answers: Variants = ()  # what a chat template writes before answers of the model, longest first
    messages: Variants = ()  # what it writes before other contents, longest first; an answer ends there

    @classmethod
    def of(cls, tokenizer: Any, special_string: str) -> "Markers":
        """Return the markers of a tokenizer of transformers or vLLM; raise `InputError` as `separator_variants`."""
        separators = separator_variants(tokenizer.encode, tokenizer.decode, special_string)
        special = special_tokens(tokenizer)
        turns = TurnHeaders.of(tokenizer, special)
        return cls(
            separators=separators,
            special=special | turns.special,
            answers=turns.answers,
            messages=turns.messages,
        )


def separator_variants(
    encode: Callable[[str], Tokens], decode: Callable[[list[int]], str], special_string: str
) -> Variants:
    """Return every token sequence as which the special string can be encoded, longest first.

    `encode` may or may not add special tokens. Raises `InputError` if the special string cannot be found among other
    tokens.
    """
    bare = special_string.strip()
    start = common_prefix(encode("a"), encode("b"))  # special tokens that come before every text, such as BOS
    texts = special_string, bare, " " + bare, bare + " "
    found = {tuple(encode(text)[start:]) for text in texts}
    found |= {tokens_inside(encode, *parts) for parts in itertools.product(BEFORE, texts, BEHIND)}
    # Where a letter joins the special string in one token, a part of it is missing.
    whole = [
        one for one in found if bare and decode(list(one)).replace(SENTENCE_PIECE_BLANK, " ").split() == bare.split()
    ]
    if not whole:
        wrong = f"the special string {special_string!r} encodes to no token of its own"
        raise InputError(f"{wrong}; set blend_special_str to another one")
    return longest_first(whole)


def special_tokens(tokenizer: Any) -> frozenset[int]:
    """Return the tokens that are no text. The one for unknown words is not among them, because it stands for text."""
    found = set(tokenizer.all_special_ids)
    # Role markers may be special without being one of the tokenizer's named special tokens.
    found |= {token for token, added in getattr(tokenizer, "added_tokens_decoder", {}).items() if added.special}
    found |= {token for token, name in added_tokens(tokenizer).items() if MARKER_NAME.fullmatch(name)}
    return frozenset(found - {getattr(tokenizer, "unk_token_id", None)})


def tokens_inside(
    encode: Callable[[str], Tokens], before: tuple[str, str], text: str, behind: tuple[str, str]
) -> tuple[int, ...]:
    """Return how `text` is encoded between two others: the tokens that are the same whichever texts these are."""
    whole, other_before, other_behind = (
        encode(left + text + right)
        for left, right in ((before[0], behind[0]), (before[1], behind[0]), (before[0], behind[1]))
    )
    start = len(whole) - common_prefix(whole[::-1], other_before[::-1])
    return tuple(whole[start : common_prefix(whole, other_behind)])
