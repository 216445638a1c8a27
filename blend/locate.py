"""Finds given texts among the tokens of a prompt, whatever surrounds them.

A tokenizer may join the first and the last characters of a text with the adjacent text. The tokens between them are the
same in all surroundings.
"""

import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

from lmc.blend.segments import Span
from lmc.blend.turn_headers import Tokens
from lmc.keys import common_prefix

BEFORE, AFTER = ("a ", "a\n", 'a"'), (" b", "\nb", '"b')  # surroundings that pretokenizers treat differently
END_CHARACTERS = 400  # Surroundings change the tokens of a text only in this many characters at its ends.
MIN_TOKENS = 4  # minimum number of tokens that a text has in all surroundings
MAX_PLACES = 100  # maximum number of places of one text, because the engine makes no step meanwhile


def inner_tokens(encode: Callable[[str], Tokens], text: str) -> "array[int]":
    """Return the tokens of a text that do not depend on the text around it. White space around the text is ignored.

    A long text is encoded as a whole only once, because the engine makes no step meanwhile.
    """
    text = text.strip()
    tokens = encode(BEFORE[0] + text + AFTER[0])
    head, tail = text[:END_CHARACTERS], text[-END_CHARACTERS:]
    start, stop = _changed(encode, BEFORE, head, ("",)), _changed(encode, ("",), tail, AFTER)
    if len(text) <= 2 * END_CHARACTERS or start is None or stop is None:
        start, stop = _changed(encode, BEFORE, text, AFTER[:1]), _changed(encode, BEFORE[:1], text, AFTER)
        if start is None or stop is None:
            return array("I")
    return array("I", tokens[start : max(0, len(tokens) - stop)])


def _changed(encode: Callable[[str], Tokens], before: Sequence[str], text: str, after: Sequence[str]) -> int | None:
    """Return how many tokens at one end differ between surroundings, of which one side has several; None if all do."""
    found = [encode(one + text + other) for one in before for other in after]
    if len(before) > 1:
        found = [tokens[::-1] for tokens in found]
    same = min(common_prefix(found[0], other) for other in found[1:])
    return len(found[0]) - same if same else None


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
