"""Finds given texts among the tokens of a prompt, whatever surrounds them.

A tokenizer may join the first and the last characters of a text with the adjacent text. The tokens between them are the
same in all surroundings.
"""

import json
from array import array
from collections.abc import Callable, Iterable, Iterator
from itertools import islice

from lmc.blend.segments import Span
from lmc.blend.turn_headers import Tokens
from lmc.keys import common_prefix

BEFORE, AFTER = ("a ", "a\n", 'a"'), (" b", "\nb", '"b')  # surroundings that pretokenizers treat differently
MIN_TOKENS = 4  # minimum number of tokens that a text has in all surroundings
MAX_PLACES = 100  # maximum number of places of one text, because the engine makes no step meanwhile


def inner_tokens(encode: Callable[[str], Tokens], text: str) -> "array[int]":
    """Return the tokens of a text that do not depend on the text around it. White space around the text is ignored."""
    text = text.strip()
    tokens = encode(BEFORE[0] + text + AFTER[0])
    others_before = (encode(before + text + AFTER[0]) for before in BEFORE[1:])
    others_after = (encode(BEFORE[0] + text + after) for after in AFTER[1:])
    start = max(len(tokens) - common_prefix(tokens[::-1], other[::-1]) for other in others_before)
    stop = min(common_prefix(tokens, other) for other in others_after)
    return array("I", tokens[start:stop])


def find_texts(prompt: "array[int]", texts: "Iterable[array[int]]") -> list[list[Span]]:
    """Return where each text is in a prompt, given by its `inner_tokens`. Earlier texts win; spans do not overlap.

    A text of fewer than `MIN_TOKENS` tokens is not found. All arrays have 4-byte unsigned integers (`"I"`).
    """
    taken, found = bytearray(len(prompt)), []
    for tokens in texts:
        free = []
        for at in islice(_places(prompt, tokens), MAX_PLACES) if len(tokens) >= MIN_TOKENS else ():
            stop = at + len(tokens)
            if taken.find(1, at, stop) < 0:
                taken[at:stop] = b"\1" * len(tokens)
                free.append(Span(at, stop))
        found.append(free)
    return found


def why_missing(prompt: str, text: str) -> str:
    """Return why a text is not among a prompt's tokens, from the prompt's own text."""
    text = text.strip()
    if text in prompt:
        return "it is too short, or its tokens are different in the prompt"
    if " ".join(text.split()) in " ".join(prompt.split()):
        return "it has other white space in the prompt"
    if any(json.dumps(text, ensure_ascii=ascii)[1:-1] in prompt for ascii in (True, False)):
        return "it is escaped as JSON in the prompt"
    return "it is not in the prompt"


def _places(prompt: "array[int]", tokens: "array[int]") -> Iterator[int]:
    """Yield the positions of `tokens` in a prompt. `bytes.find` takes time linear in the prompt's length."""
    text, pattern, size = prompt.tobytes(), tokens.tobytes(), prompt.itemsize
    at = text.find(pattern)
    while at >= 0:
        if at % size == 0:
            yield at // size
        at = text.find(pattern, at + 1)
