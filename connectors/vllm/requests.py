"""What a request asks of lmc, in `kv_transfer_params: {"lmc": {…}}`; without it the settings decide."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from lmc.blend.segments import Span
from lmc.blend.select import Policy
from lmc.config import Settings
from lmc.errors import ConfigError, InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """One request's wishes."""

    blend: bool = True
    learn: bool = False  # the prompt is a document: keep its KV for use anywhere
    strategy: str | None = None
    ratio: float | None = None
    documents: tuple[Span, ...] | None = None  # instead of the special string

    @classmethod
    def read(cls, given: Any, prompt_tokens: int) -> "Options":
        """From the request's parameters; raise `InputError` for what cannot be meant."""
        if given is None:
            return cls()
        if not isinstance(given, Mapping):
            raise InputError(f"kv_transfer_params['lmc'] must be an object, not {given!r}")
        known = [field.name for field in fields(cls)]
        unknown = sorted(set(given) - set(known))
        if unknown:
            raise InputError(f"kv_transfer_params['lmc'] has no {', '.join(unknown)}; there are {', '.join(known)}")
        for name in ("blend", "learn"):
            if not isinstance(given.get(name, True), bool):
                raise InputError(f"lmc.{name} must be true or false, not {given[name]!r}")
        ratio = given.get("ratio")
        if ratio is not None and (isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 <= ratio <= 1):
            raise InputError(f"lmc.ratio must be between 0 and 1, not {ratio!r}")
        documents = given.get("documents")
        return cls(
            blend=given.get("blend", True),
            learn=given.get("learn", False),
            strategy=given.get("strategy"),
            ratio=ratio,
            documents=None if documents is None else _spans(documents, prompt_tokens),
        )

    def policy(self, settings: Settings) -> Policy:
        """How this request is repaired; raise `InputError` if that is no policy."""
        strategy = self.strategy or settings.blend_strategy
        deviation = strategy == "deviation"
        ratios = settings.blend_recompute_ratios if deviation else settings.blend_recompute_ratios[:1]
        if self.ratio is not None:
            ratios = (self.ratio,) * len(ratios)
        try:
            return Policy(
                strategy=strategy,
                ratios=ratios,
                check_layers=settings.blend_check_layers if deviation else (1,),
                thresholds=settings.blend_thresholds if deviation else None,
            )
        except ConfigError as error:
            raise InputError(str(error)) from error


def _spans(given: Any, prompt_tokens: int) -> tuple[Span, ...]:
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise InputError(f"lmc.documents must be a list of [start, stop], not {given!r}")
    spans: list[Span] = []
    for pair in given:
        good = isinstance(pair, Sequence) and not isinstance(pair, str) and len(pair) == 2
        if not good or not all(isinstance(edge, int) and not isinstance(edge, bool) for edge in pair):
            raise InputError(f"lmc.documents: {pair!r} is no [start, stop]")
        start, stop = pair
        if not 0 <= start < stop <= prompt_tokens:
            raise InputError(f"lmc.documents: [{start}, {stop}) is not inside the prompt of {prompt_tokens} tokens")
        if spans and start < spans[-1].stop:
            raise InputError(f"lmc.documents: [{start}, {stop}) overlaps what comes before it; give them in order")
        spans.append(Span(start, stop))
    return tuple(spans)
