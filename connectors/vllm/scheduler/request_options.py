"""The options of a request, in `kv_transfer_params: {"lmc": {…}}`. The settings are the defaults."""

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lmc.blend.segments import Span
from lmc.blend.strategies import RecomputePolicy, Strategy
from lmc.config.settings import Settings
from lmc.errors import InputError
from lmc.keys import LONGEST_NAME
from lmc.terminal import some_of

ONLY_OURS = {"blend", "learn", "strategy", "ratio"}  # options whose names no other connector uses
# Facts of a response. A proxy between prefill and decode engines may send them on as the options of the second request.
FACTS = {
    "learned", "computed_documents", "exact_tokens", "tokens_from", "skipped_tokens", "continued_tokens",
    "found_documents", "unknown_documents", "reused_tokens", "fresh_tokens", "token_layers", "charged_budget", "note",
}  # fmt: skip


class Options(BaseModel):
    """The options of one request. The description of a field completes the error message "… must be"."""

    model_config = ConfigDict(frozen=True, strict=True)

    blend: bool = Field(default=True, description="true or false")
    # True: the documents of the prompt are learned before it is answered; a prompt without separators is one document.
    # False: the documents of the prompt are not learned after the request either.
    learn: bool | None = Field(default=None, description="true or false")
    name: str = Field(
        default="",
        max_length=LONGEST_NAME,
        description=f"a text of at most {LONGEST_NAME} letters, for lmc documents",
    )
    strategy: Strategy | None = Field(default=None, description=f"one of {', '.join(get_args(Strategy))}")
    ratio: float | None = Field(default=None, ge=0, le=1, description="between 0 and 1")
    documents: tuple[Span, ...] | tuple[str, ...] | None = None  # replaces separators; the prompt is searched for texts

    @classmethod
    def of(cls, parameters: Mapping[str, Any], prompt_tokens: int) -> "Options":
        """Return the options in a request's `kv_transfer_params`. Raises `InputError` if they are invalid."""
        if misplaced := [name for name in parameters if name in ONLY_OURS]:
            name = misplaced[0]
            wanted = f'{{"lmc": {{"{name}": …}}}}'
            raise InputError(f"kv_transfer_params has {name!r} outside of 'lmc': write {wanted}")
        return cls.read(parameters.get("lmc"), prompt_tokens)

    @classmethod
    def read(cls, given: Any, prompt_tokens: int) -> "Options":
        """Return the options of a request from the value of `lmc`. Raises `InputError` if they are invalid.

        Facts of an earlier response are ignored.
        """
        if given is None:
            return cls()
        if not isinstance(given, Mapping):
            raise InputError(f"kv_transfer_params['lmc'] must be an object, not {_shown(given)}")
        if FACTS & given.keys():  # Names that are options as well were those of the response, too.
            given = {name: value for name, value in given.items() if name not in {*FACTS, "strategy", "documents"}}
        unknown = sorted(_shown(name) for name in given if name not in cls.model_fields)
        if unknown:
            known = ", ".join(cls.model_fields)
            raise InputError(f"kv_transfer_params['lmc'] has no {some_of(unknown)}; there are {known}")
        documents = given.get("documents")
        if documents is not None and given.get("learn"):
            raise InputError("lmc.learn and lmc.documents exclude each other, because the whole prompt is learned")
        if given.get("name") and not given.get("learn"):
            raise InputError("lmc.name names documents that are learned: it needs lmc.learn")
        if documents is not None:
            documents = _texts(documents) if _all_texts(documents) else _spans(documents, prompt_tokens)
        try:
            return cls.model_validate({**given, "documents": documents})
        except ValidationError as error:
            name = str(error.errors(include_input=False)[0]["loc"][0])
            wanted = cls.model_fields[name].description
            raise InputError(f"lmc.{name} must be {wanted}, not {_shown(given[name])}") from None

    def policy(self, settings: Settings) -> RecomputePolicy:
        """Return the policy for this request. Raises `ConfigError` if the options and settings make no valid policy."""
        return RecomputePolicy.of(settings, self.strategy, self.ratio)


def _all_texts(documents: Any) -> bool:
    return isinstance(documents, list | tuple) and bool(documents) and all(isinstance(one, str) for one in documents)


def _texts(given: Sequence[str]) -> tuple[str, ...]:
    for text in given:
        try:
            text.encode()
        except UnicodeEncodeError:  # JSON can escape half of a character, which no tokenizer accepts.
            raise InputError(f"lmc.documents: {_shown(text)} is not valid Unicode text") from None
    return tuple(given)


def _spans(given: Any, prompt_tokens: int) -> tuple[Span, ...]:
    if not isinstance(given, list | tuple):
        raise InputError(f"lmc.documents must be a list of [start, stop], or of texts, not {_shown(given)}")
    spans: list[Span] = []
    for pair in given:
        good = isinstance(pair, list | tuple) and len(pair) == 2
        if not good or not all(isinstance(edge, int) and not isinstance(edge, bool) for edge in pair):
            raise InputError(f"lmc.documents: {_shown(pair)} is invalid: use [start, stop]")
        start, stop = pair
        if not 0 <= start < stop <= prompt_tokens:
            raise InputError(f"lmc.documents: {_shown(pair)} is not inside the prompt of {prompt_tokens} tokens")
        if spans and start < spans[-1].stop:
            raise InputError(f"lmc.documents: [{start}, {stop}) overlaps what comes before it; give them in order")
        spans.append(Span(start, stop))
    return tuple(spans)


def _shown(given: Any) -> str:
    """Return a client's value as text, truncated for an error message."""
    try:
        return reprlib.repr(given)
    except ValueError:  # an integer with more digits than Python converts to text
        return "a number of too many digits"
