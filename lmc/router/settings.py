"""The settings of a router: one frozen value."""

import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field

from lmc.shapes import MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSettings:
    """What the command line, the environment and a YAML file have said."""

    session_key: str = "x-session-id"
    special_string: str = " # # "
    api_key: str = field(default="", repr=False)  # for the engines, instead of the clients' own
    client_tokens: frozenset[str] = field(default=frozenset(), repr=False)  # of those who may ask; empty: everybody
    allowed_paths: frozenset[str] = frozenset()  # that are sent on beside those that compute something
    admin_token: str = field(default="", repr=False)
    open_admin: bool = True  # whether administration needs no token: only hosts that are this one can ask
    max_requests: int = 1000  # that are being answered; others are told to come back later
    max_body: int = 32 * MIB  # bytes
    max_held: int = 1024 * MIB  # bytes of all requests together that are being answered
    exact_tokens: bool = False  # whether an engine is asked for the tokens of each prompt before another is chosen
    tokenizers: Mapping[str, str] = field(default_factory=dict)  # directories or names of a hub, by model
    tokenizer_processes: int = 2
    attempts: int = 3  # engines that a request is sent to, one after the other, before the first byte of an answer
    connect_seconds: float = 5.0
    answer_seconds: float = 600.0  # without a byte from an engine
    health_seconds: float = 5.0  # between two looks at an engine

    def admits(self, given: str) -> bool:
        """Return whether a client may ask, who gives this in the header `authorization`."""
        kind, _, token = given.partition(" ")
        found = [hmac.compare_digest(token.strip().encode(), one.encode()) for one in self.client_tokens]
        return not found or (kind.lower() == "bearer" and any(found))

    @property
    def login(self) -> dict[str, str]:
        """The header that engines are asked with, if they have a key of their own."""
        return {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}
