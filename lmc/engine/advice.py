"""Advises what to change if a prompt has no known document, or has one in a form that is not found."""

import json
import shlex
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import nlargest

from lmc.blend.segments import Span
from lmc.documents.escaped import AS_JSON, unescaped
from lmc.documents.finder import BLOCK, STRIDE, DocumentFinder, FoundRun
from lmc.documents.known import KnownDocument
from lmc.engine.cache_engine import CacheEngine
from lmc.engine.explain import known_document, why_elsewhere
from lmc.engine.planner import DocumentMatch
from lmc.keys import RecordKind

MIN_RUN = BLOCK + STRIDE  # smallest value of blend_min_run
MAX_RANKED = 4096  # documents, the last used ones, that are ranked by the tokens that they share with a prompt
MAX_SPACELESS = 16  # documents that are compared without regard to white space
ID_DIGITS = 12  # digits of the id of a document without a name
MAX_ESCAPED = 2  # how often a text may be escaped: twice in JSON inside of a JSON string

Tokens = Sequence[int]


@dataclass(frozen=True, slots=True)
class Advice:
    """Why a document of a prompt is not found, and lines that say what to change. Empty if there is nothing to say."""

    why: str = ""
    lines: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Spaceless:
    """The tokens of a document's text without its white space."""

    tokens: "array[int]"
    known: KnownDocument


@dataclass(frozen=True, slots=True, kw_only=True)
class Adviser:
    """Compares prompts of a tenant with the documents that an engine knows."""

    engine: CacheEngine
    salt: str
    encode: Callable[[str], Tokens] | None  # None without a tokenizer
    decode: Callable[[list[int]], str]

    def on_escapes(self, prompt: Tokens, found: Iterable[DocumentMatch]) -> Advice:
        """Return advice if a prompt has documents as JSON strings. `found` are documents that are found in it."""
        if self.encode is None:
            return Advice()
        text, here = self.decode(list(prompt)), _tokens_of((known, len(span)) for span, known in self._known_in(found))
        for times in range(1, MAX_ESCAPED + 1):
            text, escaped = unescaped(text), text
            runs = self._runs(self.encode(text)) if text != escaped else []
            there = _tokens_of((run.document, run.tokens) for run in runs)
            more = [name for name in there if there[name] >= here[name] + self.engine.settings.blend_min_run]
            if more and there.total() >= here.total() + self.engine.settings.blend_min_run:
                lines = self._learn("--escaped", "learns documents as JSON strings, too")
                if "\\u" in escaped:
                    lines = "write JSON with ensure_ascii=False: \\u… is not learned, and takes many tokens", *lines
                if times > 1:
                    lines = "let tools return the text itself: it is now JSON inside of a JSON string", *lines
                why = f"the prompt has {_first_of(more)} as a JSON string{', twice' * (times - 1)}"
                return Advice(f"{why}: line breaks and quotes are escaped", lines)
        return Advice()

    def on_white_space(self, prompt: Tokens, found: Iterable[DocumentMatch]) -> Advice:
        """Return advice if a prompt has documents with other white space than they were learned with.

        `found` are documents that are found in it.
        """
        namespace = self.engine.namespace(RecordKind.DOCUMENT, self.salt)
        known = list(self._known_in(found))
        names = {_name(document) for _, document in known}
        inside = {position for span, _ in known for position in range(span.start, span.stop)}
        rest = [token for position, token in enumerate(prompt) if position not in inside]
        own = [one for one in self.engine.known.list() if not one.removed and one.namespace == namespace]
        similar = self._with_other_white_space(rest, [one for one in own if _name(one) not in names])
        return self._of_white_space(prompt, similar)

    def on_nothing(self, prompt: Tokens) -> Advice:
        """Return advice for a prompt in which no document is found."""
        settings = self.engine.settings
        if settings.blend_find == "separators":
            why = f"blend_find is {settings.blend_find}, and the prompt has no separator"
            find = "set blend_find: known (LMC_BLEND_FIND=known) to find known documents anywhere in prompts"
            return Advice(f"{why} {settings.blend_special_str!r}", (find, *self._marks()))
        if len(prompt) <= settings.blend_min_tokens:
            why = f"the prompt has {len(prompt)} tokens, and blend_min_tokens is {settings.blend_min_tokens}"
            return Advice(why, ("try a longer prompt, or lower blend_min_tokens (LMC_BLEND_MIN_TOKENS)",))
        known = [document for document in self.engine.known.list() if not document.removed]
        namespace = self.engine.namespace(RecordKind.DOCUMENT, self.salt)
        own = [document for document in known if document.namespace == namespace]
        others = dict.fromkeys(document.namespace for document in known if document.namespace != namespace)
        for other in self.engine.background.gently(others):
            if runs := self.engine.known.find(other, prompt, settings.blend_min_run):
                why = f"the prompt has {_first_of(_name(run.document) for run in runs)}: "
                why += why_elsewhere(self.engine, [run.document for run in runs])
                return Advice(why, self._learn("", "learns documents for this model and this cache_salt"))
        if short := self._runs(prompt, MIN_RUN):
            longest = max(short, key=lambda run: run.tokens)
            why = f"the prompt has {longest.tokens} tokens in a row of {_name(longest.document)}, and blend_min_run "
            return Advice(f"{why}is {settings.blend_min_run}", (f"lower blend_min_run, to {MIN_RUN} or more",))
        if (advice := self._of_white_space(prompt, self._with_other_white_space(prompt, own))).why:
            return advice
        why = f"none of {len(own)} known documents is in the prompt" if own else "this engine knows no documents"
        if known and not own:
            why += " of this model and this cache_salt"
        marks = self._marks() if settings.blend_learn else ()
        return Advice(why, (*self._learn("", "known documents are found in prompts as they are"), *marks))

    def _known_in(self, found: Iterable[DocumentMatch]) -> Iterator[tuple[Span, KnownDocument]]:
        """Yield the spans of a prompt that are known documents, or parts of them."""
        for match in found:
            if document := known_document(self.engine, match):
                yield match.span, document

    def _runs(self, prompt: Tokens, min_run: int = 0) -> Sequence[FoundRun[KnownDocument]]:
        namespace = self.engine.namespace(RecordKind.DOCUMENT, self.salt)
        return self.engine.known.find(namespace, prompt, min_run or self.engine.settings.blend_min_run)

    def _of_white_space(self, prompt: Tokens, similar: Sequence[KnownDocument]) -> Advice:
        if not similar:
            return Advice()
        why = f"the prompt has {_first_of(map(_name, similar))} with other white space"
        lines = self._learn("", "with the texts that the application sends")
        if "\r\n" in self.decode(list(prompt)):
            lines = *lines, *self._learn("--crlf", "keeps line ends of files that are \\r\\n, as in this prompt")
        return Advice(why, lines)

    def _with_other_white_space(self, prompt: Tokens, documents: Sequence[KnownDocument]) -> list[KnownDocument]:
        """Return the documents whose text, or a part of it, is in a prompt with other white space."""
        if self.encode is None:
            return []
        encode = self.encode

        def spaceless(tokens: Tokens) -> "array[int]":
            return array("I", encode("".join(self.decode(list(tokens)).split())))

        gently, distinct = self.engine.background.gently, set(prompt)
        latest = nlargest(MAX_RANKED, documents, key=lambda document: document.used)
        ranked = [
            (len(distinct.intersection(document.tokens)) / len(document.tokens) ** 0.5, number)
            for number, document in enumerate(gently(latest))
        ]
        likely = [latest[number] for _, number in nlargest(MAX_SPACELESS, ranked)]
        finder = DocumentFinder[Spaceless]()
        finder.insert([Spaceless(spaceless(document.tokens), document) for document in gently(likely)])
        return [run.document.known for run in finder.find(spaceless(prompt), self.engine.settings.blend_min_run)]

    def _learn(self, option: str, effect: str) -> tuple[str, ...]:
        salt = f"--salt {shlex.quote(self.salt)}" if self.salt else ""
        command = " ".join(filter(None, ("lmc learn FILES --url http://localhost:8000", option, salt)))
        return (f"{command}    ({effect})",)

    def _marks(self) -> tuple[str, ...]:
        """Return how an application marks documents in its prompts: by separators, or by a field of its request."""
        separator = self.engine.settings.blend_special_str
        quoted = json.dumps(separator)
        repeated = "or set blend_find: repeated (LMC_BLEND_FIND=repeated), and lmc learns what prompts repeat"
        return (
            *([repeated] if self.engine.settings.blend_find == "known" else []),
            "or let prompts say where documents are, and lmc learns them from prompts:",
            f"LangChain: create_stuff_documents_chain(…, document_separator={quoted}), and {quoted} before "
            "and after {context}",
            f"LlamaIndex: a node postprocessor that begins each node with {quoted}, and {quoted} after {{context_str}}",
            f"Haystack: {{% for d in documents %}}{separator}{{{{ d.content }}}}{{% endfor %}}{separator}",
            'OpenAI: extra_body={"kv_transfer_params": {"lmc": {"documents": ["TEXT", …]}}}, as they are in the prompt',
        )


def _tokens_of(documents: Iterable[tuple[KnownDocument, int]]) -> "Counter[str]":
    """Return the sums of tokens by document, given by its name or id. A text as a JSON string counts as the text."""
    tokens = Counter[str]()
    for document, count in documents:
        tokens[_name(document).removesuffix(AS_JSON)] += count
    return tokens


def _name(document: KnownDocument) -> str:
    return document.first_name or document.id[:ID_DIGITS]


def _first_of(names: Iterable[str]) -> str:
    """Return the first name, and the number of the others."""
    first, *others = dict.fromkeys(names)
    return f"{first} and {len(others)} more" if others else first
