"""Markers: the tokens that tell the parts of a prompt apart, as a tokenizer and its chat template write them.

A tokenizer encodes the special string in one way at the start of a text, in another way inside of one, and in a third
way before a word that takes the last blank with it; each of these ways is a variant.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lmc.errors import InputError

Tokens = Sequence[int]
Variants = tuple[tuple[int, ...], ...]

# Pairs of texts around a special string: a tokenizer treats both alike, and they have no token in common beside it.
BEFORE = ("a", "b"), ("a.", "a,"), ("a\n", "a\t")
SENTENCE_PIECE_BLANK = "\u2581"  # Some tokenizers leave it in a text of few tokens.
BEHIND = ("a", "b"), ("A", "B"), (" a", " b"), ("\n", "\t")


@dataclass(frozen=True, slots=True, kw_only=True)
class Markers:
    """What a prompt is cut at, and what shows that a text is a conversation and no document."""

    separators: Variants  # all token sequences of the special string, longest first
    special: frozenset[int] = frozenset()  # tokens that no text has: role markers, BOS, EOS
    answer: tuple[int, ...] = ()  # what a chat template writes before each answer of the model, if that is known

    @classmethod
    def of(cls, tokenizer: Any, special_string: str) -> "Markers":
        """Return the markers of a tokenizer of transformers or vLLM; raise `InputError` as `separator_variants`."""
        separators = separator_variants(tokenizer.encode, tokenizer.decode, special_string)
        return cls(separators=separators, special=special_tokens(tokenizer), answer=_answer_header(tokenizer))


def separator_variants(
    encode: Callable[[str], Tokens], decode: Callable[[list[int]], str], special_string: str
) -> Variants:
    """Return every token sequence as which the special string can be encoded, longest first.

    `encode` may or may not add special tokens. Raises `InputError` if the special string cannot be found among other
    tokens.
    """
    bare = special_string.strip()
    start = _common_prefix(encode("a"), encode("b"))  # special tokens that come before every text, such as BOS
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
    return tuple(sorted(whole, key=lambda one: (-len(one), one)))


def special_tokens(tokenizer: Any) -> frozenset[int]:
    """Return the tokens that are no text. The one for unknown words is not among them, because it stands for text."""
    found = set(tokenizer.all_special_ids)
    # Role markers may be special without being one of the tokenizer's named special tokens.
    found |= {token for token, added in getattr(tokenizer, "added_tokens_decoder", {}).items() if added.special}
    return frozenset(found - {getattr(tokenizer, "unk_token_id", None)})


def _answer_header(tokenizer: Any) -> tuple[int, ...]:
    """Return what a chat has between a user's text and an answer, without white space at its end.

    Returns nothing if there is no chat template, if none of this is a special token, or if a chat has the same before a
    user's text.
    """
    texts = ("a", "b", "e"), ("d", "b", "e"), ("a", "c", "e"), ("a", "b", "f")
    try:
        chat, other_question, other_answer, other_end = (_chat(tokenizer, *three) for three in texts)
    except Exception:  # noqa: BLE001 - templates raise whatever they like about conversations that they do not expect
        return ()
    before_answer = _between(tokenizer, chat, other_question, other_answer)
    before_user = _between(tokenizer, chat, other_answer, other_end)
    tells = special_tokens(tokenizer) & set(before_answer) and before_answer != before_user
    return before_answer if tells else ()


def _between(tokenizer: Any, chat: list[int], other_text: list[int], other_next: list[int]) -> tuple[int, ...]:
    """Return what a chat has between two texts, of which another chat each has others, up to white space at its end."""
    found = chat[len(chat) - _common_prefix(chat[::-1], other_text[::-1]) : _common_prefix(chat, other_next)]
    while found and not tokenizer.decode(found[-1:]).strip():
        found.pop()
    return tuple(found)


def _chat(tokenizer: Any, question: str, answer: str, end: str) -> list[int]:
    roles = (("user", question), ("assistant", answer), ("user", end))
    messages = [{"role": role, "content": content} for role, content in roles]
    return list(tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False))


def tokens_inside(
    encode: Callable[[str], Tokens], before: tuple[str, str], text: str, behind: tuple[str, str]
) -> tuple[int, ...]:
    """Return how `text` is encoded between two others: the tokens that are the same whichever texts these are."""
    whole, other_before, other_behind = (
        encode(left + text + right)
        for left, right in ((before[0], behind[0]), (before[1], behind[0]), (before[0], behind[1]))
    )
    start = len(whole) - _common_prefix(whole[::-1], other_before[::-1])
    return tuple(whole[start : _common_prefix(whole, other_behind)])


def _common_prefix(a: Tokens, b: Tokens) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
