"""The base of all routing policies, what a policy can ask the router to supply, and checks of its options."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from lmc.errors import ConfigError
from lmc.router.cut import Cutter
from lmc.router.document_index import DocumentIndex
from lmc.router.kv_index import BlockIndex
from lmc.router.policy_types import Candidate, PromptRequest, RoutingChoice, TakeBack, Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What a policy needs in addition to requests and loads. The router fills the indexes that are given."""

    tokens: bool = False  # the token ids of each prompt, before `choose` is called
    kv_events: bool = False  # KV events of every engine; without them, the router does not start
    blocks: BlockIndex | None = None  # filled from the KV events of engines that publish them
    ranks: int = 1  # publishers of KV events per engine
    documents: DocumentIndex | None = None  # filled from the engines' document listings and document events
    cutter: Cutter | None = None  # given the engines' markers and separators, and the tokens of documents


class Policy(ABC):
    """Chooses engines. All methods are called by one thread.

    `choose` changes nothing that depends on the prompt. `sent` notes what an engine will have; it is called once per
    request, with the engine that really got it.
    """

    needs: Needs = Needs()
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}  # named sets of options

    @abstractmethod
    def choose(self, request: PromptRequest, candidates: Sequence[Candidate]) -> RoutingChoice:
        """Return the engine for a request. `candidates` is never empty, and its order has no meaning."""

    def sent(self, request: PromptRequest, engine: str) -> TakeBack | None:  # noqa: B027 - some policies keep no notes
        """Record that a request was sent to an engine.

        Returns a function that undoes this. It is called if the engine fails before it answers.
        """

    def forget(self, engine: str) -> None:  # noqa: B027 - some policies keep no notes
        """Drop what is known about an engine that was removed or has lost its cache."""

    def answered(self, request: PromptRequest, choice: RoutingChoice, usage: Usage) -> None:  # noqa: B027 - optional
        """Learn from what an engine reports at the end of its answer."""

    def scores(self, request: PromptRequest, candidates: Sequence[Candidate]) -> Mapping[str, float]:
        """Return the score of each engine, load aside, in a unit that the policy's class names. Changes nothing."""
        return {}

    def explain(self, request: PromptRequest, candidates: Sequence[Candidate]) -> Mapping[str, Mapping[str, Any]]:
        """Return more facts about each engine for `/lmc/explain`. Changes nothing."""
        return {}


def check(valid: bool, name: str, value: object, expected: str) -> None:
    """Raise `ConfigError` unless the option `name` is valid; `expected` describes its valid values."""
    if not valid:
        raise ConfigError(f"{name} = {value!r} is invalid: use {expected}")


def check_count(name: str, value: int) -> None:
    """Raise `ConfigError` unless an option is a whole number above 0."""
    check(isinstance(value, int) and value > 0, name, value, "a whole number above 0")
