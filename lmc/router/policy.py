"""What a routing policy is asked, and what it answers. The policies themselves are in `lmc.router.policies`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRequest:
    """A request as policies see it.

    `text` is the text of the prompt in its order, with the roles of a conversation, as far as anybody looks at it (the
    first four million letters). What stands in it is compared between requests of the same `model` and `salt` only, so
    that no tenant's history steers the requests of another.
    """

    text: str
    model: str = ""
    salt: str = ""  # vLLM's `cache_salt`: the tenant
    session: str = ""  # the value of the session header, or the `user` of the request
    tokens: Sequence[int] | None = None  # of the prompt, if they are known
    media: bool = False  # whether images or sounds are in it, which have tokens and no letters
    documents: Sequence[str] = ()  # texts that the request itself names as its documents

    @property
    def scope(self) -> str:
        """Within what prompts are compared: the model and the tenant."""
        return f"{self.model}\0{self.salt}"


@dataclass(slots=True)
class Candidate:
    """An engine that may get a request: healthy, of the right model, and not being drained."""

    name: str  # its URL
    load: int = 0  # requests that it has been sent and has not finished
    cache: str = ""  # the cache that it uses; engines of one cache server have one
    backlog: float = 0.0  # tokens that it has been sent to compute, of requests that it has not begun to answer
    rate: float = 1.0  # tokens that it computes in a second, in any unit that is the same for all candidates
    ratio: float = 0.15  # of a reused document, the share that it computes again; lmc's default until it says another
    blend_min_tokens: int = 0  # of documents that it has, below which it reuses none of them

    def __post_init__(self) -> None:
        self.cache = self.cache or self.name


class RoutingChoice(NamedTuple):
    """The engine that a policy chose, and why, in words for a log and a metric."""

    engine: str
    why: str  # a few fixed words of each policy, because they label a metric: "longest prefix", "least loaded"
    expected_tokens: float = 0.0  # of the prompt that the engine is expected to reuse, as far as the policy knows
    cost: float = 0.0  # tokens that it is expected to compute; 0 if the policy does not know
    beginning_tokens: float = 0.0  # at the start of the prompt, which it was sent before or has said that it has
    assumed_tokens: float = 0.0  # of documents that it was sent before, and of which it has not said that it has them
    assumed_beginning: float = 0.0  # the same of the tokens at the start of the prompt


class Usage(NamedTuple):
    """What an engine has said of a prompt that it has answered. None stands for what it does not say."""

    prompt_tokens: int | None = None
    cached_tokens: int | None = None  # of the prompt, which were not computed; needs --enable-prompt-tokens-details
    document_tokens: int | None = None  # of those, the ones of documents; in answers that are not streamed
    places: Mapping[str, int] = {}  # tokens by the place that they came from; in answers that are not streamed


TakeBack = Callable[[], None]


class Policy(Protocol):
    """Chooses engines. One thread calls the methods, one at a time.

    `choose` changes nothing that depends on the prompt: what an engine will have is noted by `sent`, which is called
    with the engine that the request really went to, once for each request.
    """

    def choose(self, request: PromptRequest, candidates: Sequence[Candidate]) -> RoutingChoice:
        """Return the engine for a request; `candidates` is never empty, and its order means nothing."""

    def sent(self, request: PromptRequest, engine: str) -> TakeBack | None:
        """Note that a request is sent to an engine, and return what takes back what an engine will have by that.

        It is called if the engine has failed before it answered.
        """

    def forget(self, engine: str) -> None:
        """Drop what is known of an engine that has gone, or that has lost its cache."""


@runtime_checkable
class Scoring(Protocol):
    """A policy that can say what it makes of each engine. In what unit, its class says."""

    def scores(self, request: PromptRequest, candidates: Sequence[Candidate]) -> dict[str, float]:
        """Return what speaks for each engine, beside its load; nothing is noted."""
