"""Cuts a prompt at the special string: `system # # doc # # doc # # … # # question`, by token ids.

The model reads the separators as a part of the prompt. They belong to no document. In a conversation, a text between
separators may reach from one message into the next. It then has a role marker or another special token in it, and is no
document. What the model has answered is no document either.
"""

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from lmc.blend.markers import Markers
from lmc.blend.turn_headers import Tokens, Variants, longest_first, occurrences

PASSES = 4  # Taking a special string out of a text may leave another one, as in "# # #".


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens `[start, stop)` of a prompt."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class Segments:
    """The parts of a prompt. Other tokens are separators, or text of a conversation between documents."""

    system: Span  # before the first separator; may be empty
    documents: tuple[Span, ...]
    question: Span  # behind the last separator; may be empty
    opening: Span | None = None  # the system text if it may be a document that has no separator before it


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Stored tokens and the positions where they are used.

    `tokens` tokens that were computed at the positions from `first` on are used at the positions from `at` on. What
    they were computed behind, such as an attention sink, is at the positions before.
    """

    at: int
    tokens: int
    first: int
    exact: bool = False  # Full prefill would give the same keys and values, so they are never recomputed.


def split(tokens: Tokens, markers: Markers) -> Segments:
    """Cut a prompt at every separator. Without separators, all of it is the question."""
    headers = _headers(tokens, markers)
    answers = _answers(len(tokens), headers, markers.answers)
    starts = [answer.start for answer in answers]  # ascending; none begins before the one before it has ended

    def answered(at: int) -> bool:
        before = bisect_right(starts, at)
        return before > 0 and at in answers[before - 1]

    cuts = [cut for cut in _find(tokens, markers.separators) if not answered(cut.start)]
    if not cuts:
        return Segments(system=Span(0, 0), documents=(), question=Span(0, len(tokens)))
    turns = sorted({at for at, _ in headers} | {at for at, token in enumerate(tokens) if token in markers.special})
    between = (Span(a.stop, b.start) for a, b in itertools.pairwise(cuts))
    system = Span(0, cuts[0].start)
    return Segments(
        system=system,
        documents=tuple(span for span in between if len(span) and not _any_inside(turns, span)),
        question=Span(cuts[-1].stop, len(tokens)),
        opening=None if _any_inside(turns, Span(1, system.stop)) else system,  # Any prompt may begin with BOS.
    )


def has_turns(tokens: Tokens, markers: Markers) -> bool:
    """Return whether tokens are no document, because they have a special token, or the header of a turn."""
    return not markers.special.isdisjoint(tokens) or any(_headers(tokens, markers))


def join(system: Tokens, documents: Sequence[Tokens], question: Tokens, separator: Tokens) -> list[int]:
    """Return the prompt that `split` cuts into these parts; with an empty `system` it starts with a separator."""
    prompt = list(system)
    for part in (*documents, question):
        prompt += [*separator, *part]
    return prompt


def document_tokens(encode: Callable[[str], Tokens], markers: Markers, special_string: str, text: str) -> list[Tokens]:
    """Return the tokens that a text has in a prompt, between two separators, without white space around it.

    Separators inside of it are written as by `without_separators`. There are no tokens if the text has a special token
    of the model, and so is no document.
    """
    tokens = encode(special_string.join(("", without_separators(text, special_string).strip(), "")))
    return [tokens[span.start : span.stop] for span in split(tokens, markers).documents]


def without_separators(text: str, separator: str) -> str:
    """Return a document in which separators are written so that they do not cut it: `##` instead of `# #`."""
    bare, apart = bare_and_apart(separator)
    for _ in range(PASSES):
        text = text.replace(bare, apart)
    return text


def bare_and_apart(separator: str) -> tuple[str, str]:
    """Return a separator without the white space around it, and what is written instead of it inside of documents.

    That is the same without the white space in it, or, if it has none, with a blank behind its first letter.
    """
    bare = separator.strip()
    joined = "".join(bare.split())
    return bare, joined if joined != bare else f"{bare[0]} {bare[1:]}" if bare[1:] else ""


def _find(tokens: Tokens, variants: Variants) -> list[Span]:
    return [Span(at, at + len(match)) for at, match in occurrences(tokens, variants)]


def _headers(tokens: Tokens, markers: Markers) -> list[tuple[int, tuple[int, ...]]]:
    """Return where the headers of turns begin, and which they are."""
    return list(occurrences(tokens, longest_first([*markers.answers, *markers.messages])))


def _answers(size: int, headers: Iterable[tuple[int, Tokens]], of_answers: Variants) -> list[range]:
    """Return where the model's answers are in a conversation: from their headers to those of the next messages."""
    found: list[range] = []
    start: int | None = None
    for at, header in headers:
        if header in of_answers:
            start = at + len(header) if start is None else start  # An answer may consist of several parts.
        elif start is not None:
            found.append(range(start, at))
            start = None
    return found if start is None else [*found, range(start, size)]


def _any_inside(positions: Sequence[int], span: Span) -> bool:
    """Return whether one of the ascending `positions` is inside of a span."""
    return bisect_left(positions, span.start) < bisect_left(positions, span.stop)
