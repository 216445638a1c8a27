"""Decides how a request is served: exactly, as a blend, or as a document to learn."""

import logging
import reprlib
from array import array
from collections import Counter
from collections.abc import Sequence
from typing import Any

from cachetools import LRUCache

from lmc.blend.locate import find_texts, inner_tokens, why_missing
from lmc.blend.markers import Markers
from lmc.blend.segments import Span, has_turns, split
from lmc.blend.strategies import BLIND_REUSE
from lmc.blend.turn_headers import occurrences
from lmc.connectors.vllm.scheduler.request_options import Options
from lmc.connectors.vllm.scheduler.request_state import RequestState, Role
from lmc.connectors.vllm.start import Setup
from lmc.engine import FoundBy
from lmc.errors import ConfigError, InputError
from lmc.keys import check_tokens
from lmc.terminal import all_of

log = logging.getLogger(__name__)

MOST_REMEMBERED = 1 << 19  # maximal number of tokens of texts that are kept
MOST_TEXTS = 1000  # maximal number of texts to search for in a prompt; the engine cannot make a step during the search
MAX_NAMED = 8  # missing texts that a note names, each with its reason
MOST_CHARACTERS = 64  # maximal number of characters of these texts for each token of the prompt; encoding takes time


class RequestClassifier:
    """Classifies requests. A refused request is served exactly and counted, and each reason is logged once."""

    def __init__(self, setup: Setup, counts: "Counter[str]", *, quiet: bool = False) -> None:
        self._setup, self._counts, self._quiet = setup, counts, quiet
        self.told: set[str] = set()
        # The inner tokens of texts that requests have named, by the text.
        self._texts: LRUCache[str, array[int]] = LRUCache(MOST_REMEMBERED, getsizeof=_size)

    def classify(self, request: Any) -> RequestState:
        """Return the state of a new request, with its role and its documents."""
        state = self.begin(request)
        self.find_role(state)
        return state

    def begin(self, request: Any) -> RequestState:
        """Return the state of a new request with its options; `find_role` adds the role and the documents."""
        given = request.kv_transfer_params
        try:
            options = Options.of(given if isinstance(given, dict) else {}, request.num_prompt_tokens)
            state = RequestState(request=request, role=Role.EXACT, policy=options.policy(self._setup.engine.settings))
        except (InputError, ConfigError) as error:
            return RequestState(request=request, role=Role.EXACT, note=self._refuse_options(error))
        state.options, state.blends = options, options.blend
        state.learning.allowed, state.learning.name = options.learn is not False, options.name
        return state

    def find_role(self, state: RequestState) -> None:
        """Find the documents of a request, and decide how it is served."""
        if state.options is None:
            return
        try:
            self._find_role(state, state.options)
        except (InputError, ConfigError) as error:
            state.role, state.policy, state.documents = Role.EXACT, None, ()
            state.note = self._refuse_options(error)

    def may_go_on(self, state: RequestState) -> bool:
        """Return whether a request may be blended, as far as its options and its kind say, and names no documents."""
        options, request = state.options, state.request
        if options is None or options.learn:
            return False
        if options.documents is not None or self._setup.markers is None or request.prompt_token_ids is None:
            return False
        return request.lora_request is None and not request.mm_features and request.prompt_embeds is None

    def separators_after(self, state: RequestState, start: int) -> int:
        """Return how many separators of a prompt end after the position `start`."""
        separators = self._setup.markers.separators if self._setup.markers else ()
        before = max(0, start + 1 - max(map(len, separators), default=1))
        places = occurrences(state.request.prompt_token_ids[before:], separators)
        return sum(before + at + len(separator) > start for at, separator in places)

    def _find_role(self, state: RequestState, options: Options) -> None:
        request = state.request
        asked = bool(options.learn) or (options.blend and options.documents is not None)
        searched = self._setup.markers is not None or self._setup.engine.settings.finds_known
        if not asked and not (self._setup.blends and options.blend and searched):
            return
        assert state.policy is not None
        if request.prompt_token_ids is not None:  # Without token ids, the request has only prompt embeddings.
            self._find_documents(state, options, check_tokens(request.prompt_token_ids))
        why = self._why_not(state, bool(options.learn))
        if not why and (asked or state.documents):
            state.role = Role.LEARN if options.learn else Role.BLEND
            state.policy = BLIND_REUSE if options.learn else state.policy
        elif why and (asked or any(one.learnable and one.known is None for one in state.documents)):
            state.note = why
            self._refuse(why, f"{why}; served exactly")

    def _find_documents(self, state: RequestState, options: Options, prompt: "array[int]") -> None:
        start: Span | None = None
        spans: tuple[Span, ...] | None = None
        found_by = FoundBy.SEPARATORS if options.documents is None else FoundBy.REQUEST
        if options.documents is not None:
            spans = self._spans_of(state, options.documents, prompt)
            state.question = spans[-1].stop if spans else 0
        else:
            segments = split(prompt, self._setup.markers or Markers(separators=()))
            spans, start, state.question = segments.documents, segments.opening, segments.question.start
            if options.learn and not state.question:  # Without separators, the prompt is one document.
                spans = (self._setup.engine.document_span(prompt),)
        engine, start = self._setup.engine, None if options.learn else start
        state.documents = engine.documents(prompt, spans, state.salt, start=start, found_by=found_by)
        by_text = any(isinstance(given, str) for given in options.documents or ())
        if self._setup.blends and options.blend and not options.learn and (options.documents is None or by_text):
            state.documents = engine.with_known(prompt, state.documents, state.salt)
            state.question = max([state.question, *(one.span.stop for one in state.documents if one.known)])
        state.question = min(state.question, len(prompt) - 1)  # Without a question, the last token is the question.

    def _spans_of(self, state: RequestState, documents: Sequence[Span | str], prompt: "array[int]") -> tuple[Span, ...]:
        """Return the spans of documents, given as spans or as texts. A text that is not in the prompt is noted."""
        texts = [given for given in documents if isinstance(given, str)]
        if not texts:
            return tuple(given for given in documents if isinstance(given, Span))
        tokenizer = self._setup.tokenizer
        if len(texts) > MOST_TEXTS:
            raise InputError(
                f"lmc.documents: a prompt may name {MOST_TEXTS} texts at most; give the others as positions"
            )
        if tokenizer is None:
            raise InputError("lmc.documents as texts need a tokenizer, which this engine does not have")
        characters = sum(map(len, texts))
        if characters > MOST_CHARACTERS * len(prompt):
            raise InputError(
                f"lmc.documents: the texts have {characters} characters, and the prompt {len(prompt)} tokens"
            )
        found = find_texts(prompt, [self._inner_tokens(text) for text in texts])
        missing = [text for text, spans in zip(texts, found, strict=True) if not spans]
        if missing:
            given = tokenizer.decode(state.request.prompt_token_ids)
            reasons = [f"{reprlib.repr(text)}: {why_missing(given, text)}" for text in missing[:MAX_NAMED]]
            if len(missing) > MAX_NAMED:
                reasons.append(f"and {len(missing) - MAX_NAMED} more")
            lacking = f"{len(missing)} of {all_of(len(texts), 'text')} not found"
            state.note = f"lmc.documents: {lacking}: {'; '.join(reasons)}"
        return tuple(sorted((span for spans in found for span in spans), key=lambda span: span.start))

    def _inner_tokens(self, text: str) -> "array[int]":
        tokens = self._texts.get(text)
        if tokens is None:
            tokens = inner_tokens(self._setup.tokenizer.encode, text)
            if _size(tokens) <= MOST_REMEMBERED:
                self._texts[text] = tokens
        return tokens

    def _why_not(self, state: RequestState, learn: bool) -> str:
        """Return why a request to blend or to learn has to be served exactly; an empty string if it does not."""
        request, markers = state.request, self._setup.markers
        spans = [document.span for document in state.documents] if learn else []
        documents = [request.prompt_token_ids[span.start : span.stop] for span in spans]
        turns = markers is not None and any(has_turns(document, markers) for document in documents)
        reasons = {
            "blending is off; the log of the engine's start says why": not self._setup.blends,
            "requests with LoRA are not blended": request.lora_request is not None,
            "requests with multimodal input are not blended": bool(request.mm_features),
            "requests with prompt embeddings are not blended": request.prompt_embeds is not None,
            "a document to learn must have no special tokens (add_special_tokens: false)": turns,
            "there is no document to learn: a document is text without special tokens": learn and not any(documents),
            "prompt_logprobs cannot be combined with lmc.learn": learn and request.skip_reading_prefix_cache,
        }
        return next((why for why, there in reasons.items() if there), "")

    def _refuse_options(self, error: InputError | ConfigError) -> str:
        """Count a request with invalid options, and return its note."""
        self._refuse("options", f"a request is served without blending: {error}")
        return str(error)

    def _refuse(self, about: str, text: str) -> None:
        self._counts["refused"] += 1
        if about not in self.told and not self._quiet:
            self.told.add(about)
            log.warning("%s (said once, counted as lmc:refused)", text)


def _size(tokens: "array[int]") -> int:
    """Return what a text takes, in tokens: also one whose tokens all depend on its surroundings."""
    return len(tokens) + 32
