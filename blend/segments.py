"""Cuts a prompt at its separators, by token ids: `system # # doc # # doc # # … # # question`.

Separators are a part of the prompt that the model reads, but not of a document. In a conversation, a text between
separators may extend from one message into the next. It then contains a role marker or another special token, and is
not a document. Answers of the model are not documents either.
"""

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from lmc.blend.markers import Markers
from lmc.blend.turn_headers import Tokens, Variants, longest_first, occurrences, positions_of

PASSES = 4  # Replacing a separator may leave another one, as in "# # #".


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
    question: Span  # after the last separator; may be empty
    opening: Span | None = None  # the system text, if it may be a document without a separator before it


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Stored tokens, and the positions at which they are used.

    `tokens` tokens were computed at the positions from `first` on, and are used at the positions from `at` on. The
    positions before `first` had the learn prefix, such as an attention sink.
    """

    at: int
    tokens: int
    first: int
    exact: bool = False  # The KV is never recomputed, for example because it equals that of full prefill.


def split(tokens: Tokens, markers: Markers) -> Segments:
    """Cut a prompt at every separator. Without separators, the whole prompt is the question."""
    headers = _headers(tokens, markers)
    answers = _answers(len(tokens), headers, markers.answers)
    starts = [answer.start for answer in answers]  # ascending, because answers do not overlap

    def answered(at: int) -> bool:
        before = bisect_right(starts, at)
        return before > 0 and at in answers[before - 1]

    cuts = [cut for cut in _find(tokens, markers.separators) if not answered(cut.start)]
    if not cuts:
        return Segments(system=Span(0, 0), documents=(), question=Span(0, len(tokens)))
    turns = sorted({at for at, _ in headers}.union(positions_of(tokens, markers.special)))
    between = (Span(a.stop, b.start) for a, b in itertools.pairwise(cuts))
    system = Span(0, cuts[0].start)
    return Segments(
        system=system,
        documents=tuple(span for span in between if len(span) and not _any_inside(turns, span)),
        question=Span(cuts[-1].stop, len(tokens)),
        opening=None if _any_inside(turns, Span(1, system.stop)) else system,  # Any prompt may begin with BOS.
    )


def texts(tokens: Tokens, markers: Markers) -> list[Span]:
    """Return the parts of a prompt that are text of somebody else than the model.

    They are outside of special tokens, headers of turns, separators, and the model's answers.
    """
    headers = _headers(tokens, markers)
    others = [Span(at, at + 1) for at in positions_of(tokens, markers.special)]
    others += (Span(at, at + len(header)) for at, header in headers)
    others += (Span(answer.start, answer.stop) for answer in _answers(len(tokens), headers, markers.answers))
    others += _find(tokens, markers.separators)
    found, end = list[Span](), 0
    for other in [*sorted(others, key=lambda span: span.start), Span(len(tokens), len(tokens))]:
        if other.start > end:
            found.append(Span(end, other.start))
        end = max(end, other.stop)
    return found


def _is_result(tokens: Tokens, text: Span, markers: Markers) -> bool:
    """Return whether a text of `texts` is the result of a tool, by the header that the chat template writes before it.

    The header may end within the text: with ChatML, the name of the role counts as text.
    """
    return any(
        tuple(tokens[start : start + len(header)]) == header
        for header in markers.results
        for start in range(max(0, text.start - len(header)), text.start)
    )


def ends_with_result(tokens: Tokens, markers: Markers, is_blank: Callable[[Tokens], bool]) -> bool:
    """Return whether the last text of a prompt is the result of a tool, which asks nothing.

    Texts of white space do not count, because a template may write a line break after a message. `is_blank` tells them.
    The text may have separators, between the passages that a tool has found, for example.
    """
    if not markers.results:
        return False
    whole = texts(tokens, replace(markers, separators=()))
    said = (text for text in reversed(whole) if not is_blank(tokens[text.start : text.stop]))
    return any(_is_result(tokens, text, markers) for text in itertools.islice(said, 1))


def last_question(tokens: Tokens, markers: Markers) -> int:
    """Return where the text after the last complete answer of the model begins; 0 without one."""
    answers = _answers(len(tokens), _headers(tokens, markers), markers.answers)
    return max((answer.stop for answer in answers if answer.stop < len(tokens)), default=0)


def has_turns(tokens: Tokens, markers: Markers) -> bool:
    """Return whether tokens contain a special token or the header of a turn, and so are not a document."""
    return not markers.special.isdisjoint(tokens) or any(_headers(tokens, markers))


def join(system: Tokens, documents: Sequence[Tokens], question: Tokens, separator: Tokens) -> list[int]:
    """Return the prompt that `split` cuts into these parts. With an empty `system`, it begins with a separator."""
    prompt = list(system)
    for part in (*documents, question):
        prompt += [*separator, *part]
    return prompt


def document_tokens(encode: Callable[[str], Tokens], markers: Markers, special_string: str, text: str) -> list[Tokens]:
    """Return the tokens of a text between two separators of a prompt, without white space around the text.

    Separators inside the text are replaced as by `without_separators`. The list is empty if the text has a special
    token of the model, and so is not a document.
    """
    tokens = encode(special_string.join(("", without_separators(text, special_string).strip(), "")))
    return [tokens[span.start : span.stop] for span in split(tokens, markers).documents]


def without_separators(text: str, separator: str) -> str:
    """Replace the separators in a document, so that they do not cut it: `##` instead of `# #`."""
    bare, apart = bare_and_apart(separator)
    for _ in range(PASSES):
        text = text.replace(bare, apart)
    return text


def bare_and_apart(separator: str) -> tuple[str, str]:
    """Return a separator without white space around it, and its replacement inside documents.

    The replacement is the separator without its inner white space. If it has none, a blank is inserted after its first
    character.
    """
    bare = separator.strip()
    joined = "".join(bare.split())
    return bare, joined if joined != bare else f"{bare[0]} {bare[1:]}" if bare[1:] else ""


def _find(tokens: Tokens, variants: Variants) -> list[Span]:
    return [Span(at, at + len(match)) for at, match in occurrences(tokens, variants)]


def _headers(tokens: Tokens, markers: Markers) -> list[tuple[int, tuple[int, ...]]]:
    """Return the positions and the tokens of the headers of turns."""
    return list(occurrences(tokens, longest_first([*markers.answers, *markers.messages])))


def _answers(size: int, headers: Iterable[tuple[int, Tokens]], of_answers: Variants) -> list[range]:
    """Return the ranges of the model's answers, each from the end of its header to the header of the next message."""
    answers: list[range] = []
    start: int | None = None
    for at, header in headers:
        if header in of_answers:
            start = at + len(header) if start is None else start  # An answer may consist of several parts.
        elif start is not None:
            answers.append(range(start, at))
            start = None
    return answers if start is None else [*answers, range(start, size)]


def _any_inside(positions: Sequence[int], span: Span) -> bool:
    """Return whether one of the ascending `positions` is inside a span."""
    return bisect_left(positions, span.start) < bisect_left(positions, span.stop)
