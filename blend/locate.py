"""Finds given texts among the tokens of a prompt, whatever surrounds them.

A tokenizer may join the first and the last characters of a text with the adjacent text. The tokens between them are the
same in all surroundings.
"""

import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence

from lmc.blend.segments import Span
from lmc.blend.turn_headers import Tokens, common_prefix

BEFORE, AFTER = ("a ", "a\n", 'a"'), (" b", "\nb", '"b')  # surroundings that pretokenizers treat differently
MIN_TOKENS = 4  # minimum number of tokens that a text has in all surroundings


def inner_tokens(encode: Callable[[str], Tokens], text: str) -> tuple[int, ...]:
    """Return the tokens of a text that do not depend on the text around it. White space around the text is ignored."""
    text = text.strip()
    tokens = encode(BEFORE[0] + text + AFTER[0])
    others_before = (encode(before + text + AFTER[0]) for before in BEFORE[1:])
    others_after = (encode(BEFORE[0] + text + after) for after in AFTER[1:])
    start = max(len(tokens) - common_prefix(tokens[::-1], other[::-1]) for other in others_before)
    stop = min(common_prefix(tokens, other) for other in others_after)
    return tuple(tokens[start:stop])


def find_texts(prompt: "array[int]", texts: Iterable[Tokens]) -> list[list[Span]]:
    """Return where each text is in a prompt, given by its `inner_tokens`. Earlier texts win; spans do not overlap.

    A text of fewer than `MIN_TOKENS` tokens is not found. The prompt is an array of 4-byte unsigned integers (`"I"`).
    """
    taken, found = bytearray(len(prompt)), []
    for tokens in texts:
        free = []
        for at in _places(prompt, tokens) if len(tokens) >= MIN_TOKENS else ():
            stop = at + len(tokens)
            if taken.find(1, at, stop) < 0:
                taken[at:stop] = b"\1" * len(tokens)
                free.append(Span(at, stop))
        found.append(free)
    return found


def why_missing(prompt: str, text: str) -> str:
    """Return why a text is not among a prompt's tokens, from the prompt's own text."""
    if len(text.split()) > 1 and " ".join(text.split()) in " ".join(prompt.split()) and text.strip() not in prompt:
        return "it has other white space in the prompt"
    if json.dumps(text.strip())[1:-1] in prompt or json.dumps(text.strip(), ensure_ascii=False)[1:-1] in prompt:
        return "it is too short to be found" if text.strip() in prompt else "it is escaped as JSON in the prompt"
    return "it is not in the prompt"


def _places(prompt: "array[int]", tokens: Sequence[int]) -> Iterator[int]:
    """Yield the positions of `tokens` in a prompt. `bytes.find` takes time linear in the prompt's length."""
    text, pattern, size = prompt.tobytes(), array("I", tokens).tobytes(), prompt.itemsize
    at = text.find(pattern)
    while at >= 0:
        if at % size == 0:
            yield at // size
        at = text.find(pattern, at + 1)
