"""The options of a request, in `kv_transfer_params: {"lmc": {…}}`. By default the settings apply."""

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from lmc.blend.segments import Span
from lmc.blend.strategies import STRATEGIES, RecomputePolicy
from lmc.config import Settings
from lmc.errors import ConfigError, InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of one request."""

    blend: bool = True
    learn: bool = False  # The prompt is a document, whose KV is stored for use anywhere.
    strategy: str | None = None
    ratio: float | None = None
    documents: tuple[Span, ...] | None = None  # instead of the special string

    @classmethod
    def read(cls, given: Any, prompt_tokens: int) -> "Options":
        """Read the request's parameters; raise `InputError` if they are wrong."""
        if given is None:
            return cls()
        if not isinstance(given, Mapping):
            raise InputError(f"kv_transfer_params['lmc'] must be an object, not {_shown(given)}")
        known = [field.name for field in fields(cls)]
        unknown = sorted(_shown(name) for name in given if name not in known)
        if unknown:
            raise InputError(f"kv_transfer_params['lmc'] has no {', '.join(unknown)}; there are {', '.join(known)}")
        for name in ("blend", "learn"):
            if not isinstance(given.get(name, True), bool):
                raise InputError(f"lmc.{name} must be true or false, not {_shown(given[name])}")
        strategy = given.get("strategy")
        if strategy is not None and strategy not in tuple(STRATEGIES):
            raise InputError(f"lmc.strategy must be one of {', '.join(STRATEGIES)}, not {_shown(strategy)}")
        ratio = given.get("ratio")
        if ratio is not None and (isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 <= ratio <= 1):
            raise InputError(f"lmc.ratio must be between 0 and 1, not {_shown(ratio)}")
        documents = given.get("documents")
        if documents is not None and given.get("learn"):
            raise InputError("lmc.learn and lmc.documents exclude each other, because the whole prompt is learned")
        return cls(
            blend=given.get("blend", True),
            learn=given.get("learn", False),
            strategy=strategy,
            ratio=ratio,
            documents=None if documents is None else _spans(documents, prompt_tokens),
        )

    def policy(self, settings: Settings) -> RecomputePolicy:
        """Return the policy for this request; raise `InputError` if there is no such policy."""
        try:
            return RecomputePolicy.of(settings, self.strategy, self.ratio)
        except ConfigError as error:
            raise InputError(str(error)) from error


def _spans(given: Any, prompt_tokens: int) -> tuple[Span, ...]:
    if not isinstance(given, list | tuple):
        raise InputError(f"lmc.documents must be a list of [start, stop], not {_shown(given)}")
    spans: list[Span] = []
    for pair in given:
        good = isinstance(pair, list | tuple) and len(pair) == 2
        if not good or not all(isinstance(edge, int) and not isinstance(edge, bool) for edge in pair):
            raise InputError(f"lmc.documents: {_shown(pair)} is no [start, stop]")
        start, stop = pair
        if not 0 <= start < stop <= prompt_tokens:
            raise InputError(f"lmc.documents: {_shown(pair)} is not inside the prompt of {prompt_tokens} tokens")
        if spans and start < spans[-1].stop:
            raise InputError(f"lmc.documents: [{start}, {stop}) overlaps what comes before it; give them in order")
        spans.append(Span(start, stop))
    return tuple(spans)


def _shown(given: Any) -> str:
    """Return what a client sent, cut to a size that fits into an error."""
    try:
        return reprlib.repr(given)
    except ValueError:  # an integer of more digits than Python writes
        return "a number of too many digits"
