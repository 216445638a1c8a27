"""Finds a text among the tokens of a prompt, whatever stands around it there.

A tokenizer may join the first and the last letters of a text with what stands beside them. The words between them
always have the same tokens.
"""

import re
from collections.abc import Callable, Sequence

from lmc.blend.markers import Tokens, tokens_inside
from lmc.blend.segments import Span

FEW = 32  # tokens that the first or the last word of a text may have


def find_text(
    prompt: Sequence[int],
    text: str,
    encode: Callable[[str], Tokens],
    decode: Callable[[list[int]], str],
    start: int = 0,
) -> Span | None:
    """Return where a text first stands in a prompt from `start` on; None if it does not, or has fewer than 3 words."""
    parts = re.fullmatch(r"\s*(\S+)(\s.*\S)\s+(\S+)\s*", text, re.DOTALL)
    if parts is None:
        return None
    first, inner, last = parts.groups()
    core = tokens_inside(encode, ("a", "b"), inner, (" a", "\nb"))
    at = _find(prompt, core, start)
    while at is not None:
        begin, end = _extend_left(prompt, at, first, decode), _extend_right(prompt, at + len(core), last, decode)
        if begin is not None and end is not None and begin >= start:
            return Span(begin, end)
        at = _find(prompt, core, at + 1)
    return None


def _find(prompt: Sequence[int], core: Tokens, start: int) -> int | None:
    wanted = list(core)
    for at in range(start, len(prompt) - len(wanted) + 1 if wanted else 0):
        if prompt[at] == wanted[0] and list(prompt[at : at + len(wanted)]) == wanted:
            return at
    return None


def _extend_left(prompt: Sequence[int], at: int, word: str, decode: Callable[[list[int]], str]) -> int | None:
    """Return the last position from which on the text before `at` has a word in it."""
    begins = range(at - 1, max(-1, at - FEW - 1), -1)
    return next((begin for begin in begins if word in decode(list(prompt[begin:at]))), None)


def _extend_right(prompt: Sequence[int], at: int, word: str, decode: Callable[[list[int]], str]) -> int | None:
    """Return the first position up to which the text from `at` on has a word in it."""
    ends = range(at + 1, min(len(prompt), at + FEW) + 1)
    return next((end for end in ends if word in decode(list(prompt[at:end]))), None)
