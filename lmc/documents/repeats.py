"""Finds text that the prompts of a tenant repeat after different prefixes, so that it is worth learning.

An engine's own prefix cache already has text that repeats after the same prefix. The tool results and files of an
agent, and the retrieved documents of a RAG application, come again after another prefix.

Of each prompt, the fingerprints of a few windows of `WINDOW` tokens are kept, those that winnowing chooses (Schleimer,
Wilkerson, Aiken 2003): the same windows wherever the text is, at least one in `EVERY` consecutive windows. A hash of
the text before it is stored with each fingerprint. A prompt with the same fingerprint after another text repeats it.

Fingerprints are in a table of fixed size, in which new ones overwrite old ones, so memory and time do not depend on the
number of prompts: the table takes 6 MiB and has the last two million tokens or so. The fingerprints of a tenant are
found only by this tenant. A prompt of 2,000 tokens takes 0.1 ms.
"""

import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from lmc.blend.markers import Markers
from lmc.blend.segments import Span, ends_with_result, texts
from lmc.documents.finder import BLOCK, as_array, is_periodic, polynomials

NAME = "(repeated)"  # name of documents that are learned because prompts repeat them
WINDOW = BLOCK  # tokens of a window
EVERY = 8  # At least one window in this number of consecutive windows has a fingerprint.
NEAR = 2 * EVERY  # tokens by which a repeated text may be longer than it was found
MIN_LEARNED, MAX_LEARNED = 64, 1024  # tokens of a text that is learned
BITS = 19  # The table has 2**BITS fingerprints.
OF_ANSWER = 0xFFFFFFFF  # stands for the hash of the text before a window that is in an answer of the model
MAX_ENDS = 1 << 18  # number of tokens in the memory of `LineEnds`

Hashes = npt.NDArray[np.uint64]
Positions = npt.NDArray[np.int64]


class Repeats:
    """The fingerprints of recent prompts of all tenants. Not safe for several threads at once."""

    def __init__(self, base: int | None = None) -> None:
        """Create an empty table. `base` is the base of all hashes, secret by default."""
        self._base = (secrets.randbits(64) if base is None else base) | 1
        self._prints = np.zeros(1 << BITS, np.uint64)
        self._before = np.zeros(1 << BITS, np.uint32)

    @property
    def size(self) -> int:
        """Number of bytes of the table."""
        return self._prints.nbytes + self._before.nbytes

    def find(
        self, tenant: bytes, prompt: Sequence[int], blocks: Sequence[bytes], block_size: int, start: int = 0
    ) -> list[Span]:
        """Return what a prompt repeats from position `start` on, up to `NEAR` tokens at its ends. Remember the prompt.

        `blocks` are the hashes of the prompt's full blocks of `block_size` tokens. Each hash covers all tokens up to
        the end of its block. Text before `start` is not repeated: the engine has it after the same prefix.
        """
        first = max(0, start - WINDOW - EVERY)
        at, prints = self._fingerprints(tenant, prompt[first:])
        if not len(at):
            return []
        at += first
        block = first // block_size
        hashes = (hashed[:4] for hashed in blocks[max(0, block - 1) :])
        known = np.frombuffer(b"\0" * 4 * (not block) + b"".join(hashes), np.uint32) >> 1  # less than OF_ANSWER
        before = known[np.minimum(at // block_size - block, len(known) - 1)]
        places = self._places(prints)
        same = self._prints[places] == prints
        repeated = same & (self._before[places] != before) & (self._before[places] != OF_ANSWER)
        new = places[~same]
        self._prints[new], self._before[new] = prints[~same], before[~same]
        return [span for span in _runs_of(at, repeated) if span.stop > start]

    def note_answer(self, tenant: bytes, tokens: Sequence[int]) -> None:
        """Remember an answer of the model, so that it is not found. What it quotes of prompts is still found."""
        _, prints = self._fingerprints(tenant, tokens)
        places = self._places(prints)
        new = self._prints[places] != prints
        self._prints[places[new]], self._before[places[new]] = prints[new], OF_ANSWER

    def _places(self, prints: Hashes) -> Positions:
        return (prints >> np.uint64(64 - BITS)).astype(np.int64)

    def _fingerprints(self, tenant: bytes, tokens: Sequence[int]) -> tuple[Positions, Hashes]:
        """Return the positions and the fingerprints of the windows that winnowing chooses."""
        if len(tokens) < WINDOW:
            return np.zeros(0, np.int64), np.zeros(0, np.uint64)
        words = as_array(tokens)
        hashes = polynomials(words, self._base)
        hashes ^= hashes >> np.uint64(32)  # The lower bits of such a hash depend on few bits of the tokens.
        hashes *= np.uint64(self._base)
        # A window is chosen if it is the least one among EVERY consecutive windows.
        least = _sliding(np.minimum, np.pad(hashes, EVERY - 1, constant_values=~np.uint64(0)))
        at = np.flatnonzero(hashes == _sliding(np.maximum, least))
        at = at[~is_periodic(words[at[:, None] + np.arange(WINDOW)])]  # Such a window is in one text many times.
        return at, hashes[at] ^ np.uint64(int.from_bytes(tenant[:8], "little"))


def _sliding(reduce: np.ufunc, values: Hashes) -> Hashes:
    """Return the least or the greatest of each `EVERY` consecutive values."""
    size = 1
    while size < EVERY:
        values, size = reduce(values[:-size], values[size:]), 2 * size
    return values


def _runs_of(at: Positions, repeated: npt.NDArray[np.bool_]) -> list[Span]:
    """Return the texts of consecutive repeated windows; `at` are the positions of all chosen windows."""
    found = list[Span]()
    for first, last in np.flatnonzero(np.diff(np.r_[False, repeated, False])).reshape(-1, 2).tolist():
        start, stop = int(at[first]), int(at[last - 1]) + WINDOW
        # Near the end of a text, which windows are chosen depends on the text around it.
        if found and start <= found[-1].stop:
            start = found.pop().start
        found.append(Span(start, stop))
    return found


class LineEnds:
    """Which tokens end a line of text, as a tokenizer's `decode` shows when they are met."""

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._known: dict[int, tuple[int, bool]] = {}

    def rank(self, tokens: Sequence[int], at: int) -> int:
        """Return 2 if a blank line ends before position `at`, 1 if another line does, otherwise 0."""
        newlines, is_blank = self._of(tokens[at - 1]) if at else (0, False)
        if newlines == 1 and is_blank and at > 1:
            newlines += self._of(tokens[at - 2])[0]
        return min(newlines, 2)

    def is_blank(self, tokens: Sequence[int]) -> bool:
        """Return whether tokens are only white space."""
        return all(self._of(token)[1] for token in tokens)

    def _of(self, token: int) -> tuple[int, bool]:
        """Return the number of newlines at the end of a token, and whether it is only white space."""
        if token not in self._known:
            text = self._decode([token])
            bare = text.rstrip()
            if len(self._known) >= MAX_ENDS:
                self._known.clear()
            self._known[token] = text.count("\n", len(bare)), not bare
        return self._known[token]


def to_learn(
    tokens: Sequence[int], repeats: Iterable[Span], taken: Iterable[Span], markers: Markers, ends: LineEnds
) -> list[Span]:
    """Return what to learn of the texts that a prompt `repeats`: `MIN_LEARNED` to `MAX_LEARNED` tokens each.

    Neither `taken` parts of the prompt nor the model's answers are learned. A document begins and ends with a line if
    a line begins or ends nearby, so that the same text is learned from every prompt. The last lines of the last text
    are the question, and are not learned, unless this text is the result of a tool.
    """
    free = bytearray(b"\1" * len(tokens) + b"\0")
    for span in taken:
        free[span.start : span.stop] = bytes(len(span))
    repeats = [span for span in repeats if any(len(run) >= MIN_LEARNED - 2 * NEAR for run in _runs(free, span))]
    if not repeats:
        return []
    theirs = [text for text in texts(tokens, markers) if not ends.is_blank(tokens[text.start : text.stop])]
    if not theirs:
        return []
    for before, after in pairwise([Span(0, 0), *theirs, Span(len(tokens), len(tokens))]):
        free[before.stop : after.start] = bytes(after.start - before.stop)
    latest = theirs[-1]
    is_result = ends_with_result(tokens, markers, ends.is_blank)
    asks = latest.stop if is_result else max(latest.start, latest.stop - WINDOW)
    learned: list[Span] = []
    for repeat in repeats:
        for run in _runs(free, Span(max(0, repeat.start - NEAR), min(len(tokens), repeat.stop + NEAR))):
            first, last = max(run.start, repeat.start), min(run.stop, repeat.stop)
            if first >= last:
                continue
            starts, stops = range(run.start, first + 1), range(min(run.stop, asks), last - 1, -1)
            start = next((at for at in starts if not (at and free[at - 1]) or ends.rank(tokens, at)), first)
            if last <= asks:
                stop = next((at for at in stops if not free[at] or ends.rank(tokens, at)), last)
            else:  # the last blank line, or else the last line, before the question
                stop = max(range(asks, start, -1), key=lambda at: ends.rank(tokens, at), default=start)
                stop = stop if ends.rank(tokens, stop) else start
            learned += _parts(tokens, Span(start, stop), ends)
            free[start:stop] = bytes(stop - start)
    return learned


def _runs(free: bytearray, within: Span) -> Iterator[Span]:
    """Yield the runs of free tokens."""
    start = within.start
    while (start := free.find(1, start, within.stop)) >= 0:
        end = free.find(0, start, within.stop)
        end = within.stop if end < 0 else end
        yield Span(start, end)
        start = end


def _parts(tokens: Sequence[int], text: Span, ends: LineEnds) -> Iterator[Span]:
    """Cut a text after blank lines, or else after other lines, so that no part is too long or too short."""
    start = text.start
    while text.stop - start > MAX_LEARNED:
        cuts = range(min(start + MAX_LEARNED, text.stop - MIN_LEARNED), start + MAX_LEARNED // 2, -1)
        cut = max(cuts, key=lambda at: ends.rank(tokens, at))  # the last one of equal ones
        yield Span(start, cut)
        start = cut
    if text.stop - start >= MIN_LEARNED:
        yield Span(start, text.stop)
