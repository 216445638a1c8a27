"""The types that routing policies read and return: requests, engines, choices and token counts.

The policies are in `lmc.router.policies`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import xxhash

from lmc.router.prefix_hashes import encoded

MAX_KEY_CHARACTERS = 128  # A longer name of a tenant or a session is stored as its hash.


class FoundDocument(NamedTuple):
    """A known document, or a part of it, in a prompt."""

    start: int  # its place in the prompt's tokens or, if the prompt is cut by text, in its characters
    stop: int
    content: bytes  # identifies the document's tokens or text
    digest: str = ""  # digest of its tokens, as in engines' events; empty while unknown
    size: float = 0.0  # number of its tokens, if the whole document was found and this is known
    whole: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRequest:
    """A request as policies see it.

    `text` is the prompt's text in order, with the roles of a conversation, up to the first four million characters. It
    is compared only between requests of the same `model` and `salt`, so a tenant's history never steers the requests of
    another tenant.
    """

    text: str
    model: str = ""
    salt: str = ""  # vLLM's `cache_salt`, which identifies the tenant
    session: str = ""  # the value of the session header, or the `user` field of the request
    tokens: Sequence[int] | None = None  # token ids of the prompt; None if unknown
    unread_tokens: float = 0.0  # estimated tokens of a prompt that could not be read; its text is empty then
    media: bool = False  # whether the prompt has images or audio, which have tokens but no characters
    documents: Sequence[str] = ()  # texts that the request itself names as its documents
    found: Sequence[FoundDocument] = ()  # known documents in the prompt, in its order

    @property
    def scope(self) -> str:
        """The model and the tenant, as a key that may be stored; prompts are compared only within one scope."""
        return _short(f"{self.model}\0{self.salt}")

    @property
    def session_key(self) -> str:
        """The session, as a key that may be stored; empty without a session."""
        return _short(self.session)


def _short(text: str) -> str:
    """Return a text that a client chose, or its hash if it is long."""
    return text if len(text) <= MAX_KEY_CHARACTERS else xxhash.xxh3_128_hexdigest(encoded(text))


@dataclass(slots=True)
class Candidate:
    """An engine that may get a request: it is healthy, serves the model and is not draining."""

    name: str  # its URL
    load: int = 0  # requests in flight at this engine
    cache: str = ""  # the name of its cache; engines of one cache server share one name
    backlog: float = 0.0  # tokens to compute for requests whose answer has not begun
    rate: float = 1.0  # tokens computed per second; only the ratio between candidates matters
    ratio: float = 0.15  # the share of a reused document that is recomputed; lmc's default until the engine reports it
    blend_min_tokens: int = 0  # fewer document tokens than this are not reused at all
    finds: bool = True  # whether it finds known documents without separators

    def __post_init__(self) -> None:
        self.cache = self.cache or self.name


class RoutingChoice(NamedTuple):
    """The engine that a policy chose, with the reason for a log and a metric."""

    engine: str
    why: str  # a fixed phrase, because it labels a metric: "longest prefix", "least loaded"
    expected_tokens: float = 0.0  # prompt tokens that the engine is expected to reuse, as far as the policy can tell
    cost: float = 0.0  # tokens that the engine is expected to compute; 0 if the policy does not estimate it
    prefix_tokens: float = 0.0  # tokens at the start of the prompt, routed there before or confirmed by events
    assumed_tokens: float = 0.0  # document tokens routed there but not confirmed by events
    assumed_prefix: float = 0.0  # tokens at the start of the prompt, routed there but not confirmed by events


class Usage(NamedTuple):
    """What an engine reports about a prompt at the end of its answer. None stands for a missing number."""

    prompt_tokens: int | None = None
    cached_tokens: int | None = None  # prompt tokens that were not computed; needs --enable-prompt-tokens-details
    document_tokens: int | None = None  # cached tokens of documents; only in answers that are not streamed
    places: Mapping[str, int] = {}  # tokens by the tier they were loaded from; only in answers that are not streamed
    generated_tokens: int | None = None  # tokens of the answer


TakeBack = Callable[[], None]  # reverts what a policy noted about one request
