"""Finds a text among the tokens of a prompt, whatever surrounds it.

A tokenizer may join the first and the last characters of a text with the adjacent text. The words between them always
have the same tokens.
"""

import re
from array import array
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from lmc.blend.markers import tokens_inside
from lmc.blend.segments import Span
from lmc.blend.turn_headers import Tokens

MAX_WORD_TOKENS = 32  # maximum number of tokens of a text's first or last word
MAX_MATCHES = 100  # maximum number of matches that are checked, because the engine makes no step meanwhile


def find_text(
    prompt: "array[int]",
    text: str,
    encode: Callable[[str], Tokens],
    decode: Callable[[list[int]], str],
    start: int = 0,
) -> Span | None:
    """Return the first occurrence of a text in a prompt from `start` on. Returns None without one.

    A text of fewer than 3 words is never found. The prompt is an array of 4-byte unsigned integers (`"I"`).
    """
    parts = re.fullmatch(r"\s*(\S+)(\s.*\S)\s+(\S+)\s*", text, re.DOTALL)
    if parts is None:
        return None
    first, inner, last = parts.groups()
    core = tokens_inside(encode, ("a", "b"), inner, (" a", "\nb"))
    for at in islice(_places(prompt, core, start), MAX_MATCHES):
        begin = _extend_left(prompt, at, first, decode)
        end = None if begin is None or begin < start else _extend_right(prompt, at + len(core), last, decode)
        if begin is not None and end is not None:
            return Span(begin, end)
    return None


def _places(prompt: "array[int]", core: Tokens, start: int) -> Iterator[int]:
    """Yield the positions of the tokens `core` in a prompt. `bytes.find` takes time linear in the prompt's length."""
    text, pattern, size = prompt.tobytes(), array("I", core).tobytes(), prompt.itemsize
    at = text.find(pattern, size * start) if pattern else -1
    while at >= 0:
        if at % size == 0:
            yield at // size
        at = text.find(pattern, at + 1)


def _extend_left(prompt: Sequence[int], at: int, word: str, decode: Callable[[list[int]], str]) -> int | None:
    """Return the last position `begin` so that the text of the tokens `[begin, at)` contains a word."""
    if word not in decode(list(prompt[max(0, at - MAX_WORD_TOKENS) : at])):
        return None
    begins = range(at - 1, max(-1, at - MAX_WORD_TOKENS - 1), -1)
    return next((begin for begin in begins if word in decode(list(prompt[begin:at]))), None)


def _extend_right(prompt: Sequence[int], at: int, word: str, decode: Callable[[list[int]], str]) -> int | None:
    """Return the first position `end` so that the text of the tokens `[at, end)` contains a word."""
    if word not in decode(list(prompt[at : at + MAX_WORD_TOKENS])):
        return None
    ends = range(at + 1, min(len(prompt), at + MAX_WORD_TOKENS) + 1)
    return next((end for end in ends if word in decode(list(prompt[at:end]))), None)
