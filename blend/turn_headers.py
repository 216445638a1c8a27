"""Turn headers: the tokens that a chat template writes before the contents of a conversation.

They are inferred from conversations that the template renders, because a template is a program and does not describe
its output. `Markers.of` calls `TurnHeaders.of` once, at the start.
"""

import itertools
import re
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from lmc.keys import common_prefix

LONG = 512  # minimum number of tokens at which numpy is faster than a loop
Tokens = Sequence[int]
Variants = tuple[tuple[int, ...], ...]

SENTENCE_PIECE_BLANK = "\u2581"  # Some tokenizers leave it in the text of a few tokens.
BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
# Two contents without a common token. The second shows which tokens of a header join with a newline or a full stop.
CONTENT, OTHER_CONTENT = "a", "\nB."


class Speaker(Enum):
    """The author of a content. `MODEL`: an answer, its thinking and its tool calls. `OTHERS`: what the model reads."""

    MODEL = "model"
    OTHERS = "others"


@dataclass(frozen=True, slots=True, eq=False)
class Content:
    """A placeholder for a text in a conversation."""

    speaker: Speaker
    is_result: bool = False  # the result of a tool


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """The tokens of a rendered conversation between two contents, before the first, or after the last."""

    before: Speaker | None  # None at the start of the conversation
    after: Speaker
    tokens: tuple[int, ...]
    before_result: bool = False  # The content after it is the result of a tool.
    tokens_since_model: tuple[int, ...] = ()  # of the boundaries between the model's last content and this boundary

    @property
    def apart(self) -> bool:
        """Whether it is between two contents."""
        return self.before is not None

    @property
    def within_answer(self) -> bool:
        """Whether the model is the author of both contents."""
        return self.before is Speaker.MODEL and self.after is Speaker.MODEL


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnHeaders:
    """The headers of the turns of a conversation. All fields are empty without a chat template that can be rendered."""

    special: frozenset[int] = frozenset()  # tokens without the special flag that never occur in a document
    answers: Variants = ()  # headers of the model's answers, longest first
    messages: Variants = ()  # headers of other contents, longest first
    results: Variants = ()  # headers of results of tools, longest first

    @classmethod
    def of(cls, tokenizer: Any, special: frozenset[int]) -> "TurnHeaders":
        """Return the turn headers of a tokenizer. The tokens `special` never occur in a document."""
        boundaries = [*dict.fromkeys(_boundaries(tokenizer, {}))] or [*dict.fromkeys(_boundaries(tokenizer, VARIABLES))]
        names = added_tokens(tokenizer)
        # Templates also write added tokens inside answers, such as <think>. A text with such a token may still be a
        # document, because answers are found by their headers.
        needed: set[int] = set()
        for boundary in boundaries:
            if boundary.apart and not boundary.within_answer and (special | needed).isdisjoint(boundary.tokens):
                needed |= names.keys() & set(boundary.tokens)
        search = _Search(tokenizer, special | names.keys(), boundaries)
        answers = search.answers()
        messages = search.messages(answers)
        messages += search.texts([*answers, *messages], special | needed)
        return cls(
            special=frozenset(needed),
            answers=longest_first(answers),
            messages=longest_first(messages),
            results=longest_first(search.results()),
        )


def added_tokens(tokenizer: Any) -> dict[int, str]:
    """Return the names of a tokenizer's added tokens, special or not, except white space and the unknown token."""
    decoder = getattr(tokenizer, "added_tokens_decoder", {})
    names = {token: str(getattr(added, "content", added)) for token, added in decoder.items()}
    unknown = getattr(tokenizer, "unk_token_id", None)  # It stands for text.
    return {token: name for token, name in names.items() if not _is_blank(name) and token != unknown}


def occurrences(tokens: Tokens, variants: Variants) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield the occurrences of `variants` in `tokens`, each with its position, from left to right without overlaps.

    If several begin at the same position, the first of `variants` counts.
    """
    end = 0
    for at in positions_of(tokens, {variant[0] for variant in variants}):
        if at >= end:
            match = next((one for one in variants if tuple(tokens[at : at + len(one)]) == one), None)
            if match is not None:
                end = at + len(match)
                yield at, match


def positions_of(tokens: Tokens, wanted: Collection[int]) -> list[int]:
    """Return the positions of the `wanted` tokens. In a long array, a search takes a tenth of the time."""
    if isinstance(tokens, array) and len(tokens) >= LONG:
        import numpy as np  # The router's policies need nothing heavy.

        found: list[int] = np.flatnonzero(np.isin(np.frombuffer(tokens, np.uint32), list(wanted))).tolist()
        return found
    return [at for at, token in enumerate(tokens) if token in wanted]


def longest_first(variants: Iterable[Sequence[int]]) -> Variants:
    """Return token sequences in the order of the search: longest first, without duplicates."""
    return tuple(sorted(set(map(tuple, variants)), key=lambda one: (-len(one), one)))


def _is_blank(text: str) -> bool:
    return not text.replace(SENTENCE_PIECE_BLANK, " ").strip()


# -- conversations ---------------------------------------------------------------------------------------------------

Message = dict[str, Any]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Search.",
            "parameters": {
                "type": "object",
                "properties": {name: {"type": "string", "description": "Text."} for name in ("x", "y")},
                "required": ["x"],
            },
        },
    }
]
# What a few templates need in addition, tried only with templates that reject every conversation without it.
VARIABLES: Message = {"functions": "[]", "datetime": "2024-01-01"}
THINKING: tuple[Message, ...] = (
    {},
    {"enable_thinking": True, "thinking": True},
    {"enable_thinking": False, "thinking": False},
)


def _boundaries(tokenizer: Any, options: Message) -> Iterator[Boundary]:
    """Yield the boundaries that a chat template writes, in all conversations that it accepts with these `options`."""
    for forms in _conversations():
        for messages, of_form in forms:
            variants = messages, _in_parts(messages)
            tried = (_boundaries_of(tokenizer, variant, {**of_form, **options}) for variant in variants)
            if boundaries := next(filter(None, tried), None):
                yield from boundaries
                break


def _conversations() -> Iterator[Iterable[tuple[list[Message], Message]]]:
    """Yield conversations with options of the template. Each has several forms, for templates that reject some.

    There are few conversations, because the start of an engine waits for them.
    """
    chat = [*map(_message, ["system", "user", "assistant", "user", "assistant"])]
    # vLLM's Mistral tokenizers reject a conversation that ends with an answer.
    yield [(chat, {}), (chat[1:], {}), (chat[:-1], {}), (chat[1:-1], {})]
    yield [([*map(_message, ["user", "thinking", "user", "thinking"])], {})]
    yield itertools.chain(
        *(_with_tools("assistant", after, {}) for after in (["assistant", "user", "assistant"], ["assistant", "user"]))
    )
    for calling in ("silent", "thinking", "thinking, silent"):
        yield _with_tools(calling, ["thinking"], {})
    for thinking in THINKING:
        yield [([_message("user")], {"add_generation_prompt": True, **thinking})]
        yield _with_tools("assistant", [], {"add_generation_prompt": True, **thinking})


def _message(kind: str) -> Message:
    """Return a message of a role. Answers may have thinking, and may be silent, which means without content."""
    if kind in ("system", "user", "tool"):
        return {"role": kind, "content": Content(Speaker.OTHERS, is_result=kind == "tool")}
    answer: Message = {"role": "assistant", "content": "" if "silent" in kind else Content(Speaker.MODEL)}
    if "thinking" in kind:  # Templates read it under different names.
        thinking = Content(Speaker.MODEL)
        answer |= {"reasoning_content": thinking, "reasoning": thinking, "thinking": thinking}
    return answer


def _with_tools(calling: str, following: list[str], options: Message) -> Iterator[tuple[list[Message], Message]]:
    """Yield the forms of a conversation in which the model calls tools. `following` are the messages after the results.

    Templates accept arguments as an object or as text, and may reject two calls in a message.
    """
    for as_text, names in itertools.product((False, True), ("x ; x", "x y")):
        requested, results = [], []
        for i, call in enumerate(names.split(";")):
            arguments = {name: Content(Speaker.MODEL) for name in call.split()}
            function = {"name": "search", "arguments": arguments["x"] if as_text else arguments}
            requested.append({"id": f"call0000{i}", "type": "function", "function": function})
            results.append({**_message("tool"), "tool_call_id": f"call0000{i}", "name": "search"})
        chat = [_message("user"), {**_message(calling), "tool_calls": requested}, *results, *map(_message, following)]
        yield chat, {"tools": TOOLS, **options}


def _in_parts(messages: list[Message]) -> list[Message]:
    """Return messages whose contents are lists of parts, as some templates of multimodal models require."""
    texts = ([{"type": "text", "text": message["content"]}] if message["content"] else "" for message in messages)
    return [{**message, "content": text} for message, text in zip(messages, texts, strict=True)]


def _boundaries_of(tokenizer: Any, messages: list[Message], options: Message) -> list[Boundary]:
    """Return the boundaries of a conversation, in order; empty if the template rejects the conversation.

    If the conversation ends with a generation prompt, only the boundary after its last content is returned.
    """
    contents = list(dict.fromkeys(_contents(messages)))
    generates = "add_generation_prompt" in options

    def render(other: Content | None = None) -> list[int]:
        texts = {content: OTHER_CONTENT if content is other else CONTENT for content in contents}
        filled = _filled(messages, texts)
        return list(tokenizer.apply_chat_template(filled, tokenize=True, return_dict=False, **options))

    try:
        chat = render()
        looked_for = contents[-1:] if generates else contents
        places = {content: _difference(chat, render(content)) for content in looked_for}
    except Exception:  # noqa: BLE001 - templates may raise any error for conversations that they reject
        return []
    written = {content: place for content, place in places.items() if place[0] < place[1]}
    if generates:
        ends = [stop for _, stop in written.values()]
        return [Boundary(before=Speaker.OTHERS, after=Speaker.MODEL, tokens=tuple(chat[end:])) for end in ends]
    # If the template omits an answer, the next header directly follows the header of the answer.
    if any(written.keys().isdisjoint(_contents(message)) for message in messages):
        return []
    boundaries: list[Boundary] = []
    end, before = 0, None
    tokens_since_model: Header = ()
    for content, (start, stop) in sorted(written.items(), key=lambda item: item[1]):
        if start < end:  # The template writes a content several times.
            return []
        boundary = Boundary(
            before=before,
            after=content.speaker,
            tokens=tuple(chat[end:start]),
            before_result=content.is_result,
            tokens_since_model=tokens_since_model,
        )
        boundaries.append(boundary)
        tokens_since_model = () if content.speaker is Speaker.MODEL else tokens_since_model + boundary.tokens
        end, before = stop, content.speaker
    return boundaries


def _contents(part: Any) -> Iterator[Content]:
    if isinstance(part, Content):
        yield part
    elif isinstance(part, dict | list):
        for inner in part.values() if isinstance(part, dict) else part:
            yield from _contents(inner)


def _filled(part: Any, texts: dict[Content, str]) -> Any:
    if isinstance(part, dict):
        return {name: _filled(inner, texts) for name, inner in part.items()}
    if isinstance(part, list):
        return [_filled(inner, texts) for inner in part]
    return texts[part] if isinstance(part, Content) else part


def _difference(chat: list[int], other: list[int]) -> tuple[int, int]:
    """Return the range of a chat's tokens that differs from another chat."""
    start = common_prefix(chat, other)
    return start, len(chat) - common_prefix(chat[start:][::-1], other[start:][::-1])


# -- search ----------------------------------------------------------------------------------------------------------

Header = tuple[int, ...]
Tells = Callable[[Header], bool]


class _Search:
    """Chooses few and short headers that distinguish answers from other contents."""

    def __init__(self, tokenizer: Any, markers: frozenset[int], boundaries: list[Boundary]) -> None:
        self._tokenizer, self._markers, self._boundaries = tokenizer, markers, boundaries
        self._to_answers = [
            boundary.tokens for boundary in boundaries if boundary.after is Speaker.MODEL and not boundary.within_answer
        ]
        self._to_others = [boundary.tokens for boundary in boundaries if boundary.after is Speaker.OTHERS]
        # Tokens before contents of the model, also inside answers.
        self._to_model = [boundary.tokens for boundary in boundaries if boundary.after is Speaker.MODEL]

    def answers(self) -> list[Header]:
        """Return the headers of answers.

        Such a header may also precede other contents if a header of only other contents follows it there.
        """
        units = {unit for tokens in self._to_others for unit in self._units(tokens)}
        only_others = {unit for unit in units if not any(_has(tokens, unit) for tokens in self._to_model)}

        def tells_always(header: Header) -> bool:
            return not any(_has(tokens, header) for tokens in self._to_others)

        def tells_in_the_end(header: Header) -> bool:
            ends = (_rest(tokens, (header,)) for tokens in self._to_others if _has(tokens, header))
            return all(any(_has(end, unit) for unit in only_others) for end in ends)

        return self._chosen(self._to_answers, tells_always, tells_in_the_end)

    def messages(self, answers: list[Header]) -> list[Header]:
        """Return the headers of contents that are not answers. Each ends the answer before it."""
        answer_headers = longest_first(answers)
        after_answers = (boundary for boundary in self._boundaries if boundary.after is Speaker.OTHERS)
        targets = [
            _rest(boundary.tokens, answer_headers)
            for boundary in after_answers
            if boundary.before is Speaker.MODEL or any(occurrences(boundary.tokens, answer_headers))
        ]

        def matches(tokens: Tokens, header: Header) -> list[bool]:
            """Return for each header in `tokens`, in order, whether it is `header` and not the header of an answer."""
            return [match == header for _, match in occurrences(tokens, longest_first([*answers, header]))]

        def tells_always(header: Header) -> bool:
            return header not in answers and not any(any(matches(tokens, header)) for tokens in self._to_model)

        def tells_in_the_end(header: Header) -> bool:
            return header not in answers and not any(any(matches(tokens, header)[-1:]) for tokens in self._to_model)

        # Where nothing tells an answer from the content before it, that content counts as a part of an answer, too.
        before_unmarked_answers = [
            boundary.tokens_since_model
            for boundary in self._boundaries
            if boundary.before is Speaker.OTHERS and boundary.after is Speaker.MODEL
            if not any(occurrences(boundary.tokens, answer_headers))
        ]
        chosen = self._chosen(targets, tells_always, tells_in_the_end)
        return [header for header in chosen if not any(_has(before, header) for before in before_unmarked_answers)]

    def texts(self, headers: list[Header], special: frozenset[int]) -> list[Header]:
        """Return the texts of boundaries that have neither a header nor a special token."""
        known_headers = longest_first(headers)
        bare = [
            boundary.tokens
            for boundary in self._boundaries
            if boundary.before and not boundary.within_answer and special.isdisjoint(boundary.tokens)
        ]
        texts = self._texts([tokens for tokens in bare if not any(occurrences(tokens, known_headers))])
        return [text for text in texts if not any(_has(tokens, text) for tokens in self._to_model)]

    def results(self) -> set[Header]:
        """Return the headers of results of tools.

        The header of a result is the shortest end of the boundary before it that has a marker, and that no other
        boundary has. No other boundary ends with a beginning of the header, either: the content after it could continue
        it. The header has text after its last marker only if the markers do not suffice, because the name of the tool
        or the number of the call may differ from result to result.
        """
        whole = {boundary: self._without_blanks(boundary.tokens) for boundary in self._boundaries}
        cut = {boundary: self._up_to_marker(tokens) for boundary, tokens in whole.items()}
        others = [boundary for boundary in whole if not boundary.before_result]

        def telling(tokens: Header, others: Sequence[Header]) -> Iterator[Header]:
            """Yield the ends of a boundary's tokens that `others` do not have, the shortest first."""
            for size in range(1, len(tokens) + 1):
                end = tokens[-size:]
                beginnings = [end[:part] for part in range(1, size + 1)]
                shared = any(other[-len(beginning) :] == beginning for other in others for beginning in beginnings)
                if not shared and not self._markers.isdisjoint(end):
                    yield end

        found = set[Header]()
        for boundary in whole.keys() - others:
            of_cut = telling(cut[boundary], [ends[other] for ends in (cut, whole) for other in others])
            of_whole = telling(whole[boundary], [whole[other] for other in others])
            found |= set(itertools.islice(itertools.chain(of_cut, of_whole), 1))
        return found

    def _chosen(self, targets: list[Header], tells_always: Tells, tells_in_the_end: Tells) -> list[Header]:
        """Return headers so that each target has one, if possible. Uses texts only for targets without a marker."""
        headers, texts = self._headers(targets), self._texts(targets)
        always, texts = [*filter(tells_always, headers)], [*filter(tells_always, texts)]
        uncovered = list(targets)
        chosen: list[Header] = []
        for usable in ([*always, *filter(tells_in_the_end, headers)], texts):
            while any(_has(tokens, header) for tokens in uncovered for header in usable):
                best = min(usable, key=lambda header: _cost(header, uncovered, header not in always))
                chosen.append(best)
                uncovered = [tokens for tokens in uncovered if not _has(tokens, best)]
        return chosen

    def _headers(self, targets: list[Header]) -> list[Header]:
        """Return header candidates: each marker alone, with the common text after it, and with each whole text."""
        by_marker: dict[int, list[Header]] = {}
        for tokens in targets:
            for unit in self._units(tokens):
                by_marker.setdefault(unit[0], []).append(unit)
        shared = [units[0][: min(common_prefix(units[0], unit) for unit in units)] for units in by_marker.values()]
        return [*((marker,) for marker in by_marker), *shared, *itertools.chain(*by_marker.values())]

    def _units(self, tokens: Tokens) -> Iterator[Header]:
        """Yield each marker with the text after it."""
        starts = [at for at, token in enumerate(tokens) if token in self._markers]
        for start, stop in itertools.pairwise([*starts, len(tokens)]):
            yield self._stripped(tokens[start:stop])

    def _texts(self, targets: list[Header]) -> list[Header]:
        """Return the texts at the starts of `targets` that have a letter or a digit."""
        starts = (itertools.takewhile(lambda token: token not in self._markers, tokens) for tokens in targets)
        texts = [self._stripped(tuple(start)) for start in starts]
        return [text for text in texts if any(map(str.isalnum, self._decoded(text)))]

    def _decoded(self, tokens: Tokens) -> str:
        """Return the text of tokens. Some tokenizers write a byte, such as a line break, as `<0x0A>`."""
        text = self._tokenizer.decode(list(tokens))
        return BYTE_TOKEN.sub(lambda match: chr(int(match[1], 16)), text)

    def _without_blanks(self, tokens: Header) -> Header:
        """Return tokens without white space at their end, which some tokenizers join with the content after it."""
        size = next((size for size in range(len(tokens), 0, -1) if not _is_blank(self._decoded([tokens[size - 1]]))), 0)
        return tokens[:size]

    def _up_to_marker(self, tokens: Header) -> Header:
        """Return tokens up to their last marker; no tokens without one."""
        return tokens[: max((at + 1 for at, token in enumerate(tokens) if token in self._markers), default=0)]

    def _stripped(self, tokens: Tokens) -> Header:
        """Return tokens without leading and trailing white space."""
        texts = [not _is_blank(self._decoded([token])) for token in tokens]
        return tuple(tokens[texts.index(True) : len(texts) - texts[::-1].index(True)]) if any(texts) else ()


def _cost(header: Header, targets: list[Header], uncertain: bool) -> tuple[int, bool, int, int]:
    """Return the sort key of a header: headers of many targets, certain, early and short headers come first."""
    places = [next(occurrences(tokens, (header,)))[0] for tokens in targets if _has(tokens, header)]
    return -len(places), uncertain, sum(places), len(header)


def _has(tokens: Tokens, header: Header) -> bool:
    return any(occurrences(tokens, (header,)))


def _rest(tokens: Header, headers: Variants) -> Header:
    """Return the tokens after the last header; all tokens if they have no header."""
    ends = [at + len(match) for at, match in occurrences(tokens, headers)]
    return tokens[ends[-1] if ends else 0 :]
