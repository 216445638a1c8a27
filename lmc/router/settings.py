"""The settings of a router: one frozen value."""

import hmac
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from lmc.http_server import bearer_token
from lmc.shapes import MIB

NAME_DIGITS = 12  # of the name of an engine whose address is hidden


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
    name_key: bytes = field(default_factory=lambda: os.urandom(32), repr=False)  # without a token of administration

    def admits(self, given: str) -> bool:
        """Return whether a client may ask, who gives this in the header `authorization`."""
        kind, _, token = given.partition(" ")
        found = [hmac.compare_digest(token.strip().encode(), one.encode()) for one in self.client_tokens]
        return not found or (kind.lower() == "bearer" and any(found))

    def may_read_metrics(self, given: str) -> bool:
        """Return whether a caller may read the metrics, who gives this in the header `authorization`.

        With tokens of clients, a caller needs one of them, or that of administration.
        """
        token = bearer_token(given).encode()
        return self.admits(given) or bool(self.admin_token and hmac.compare_digest(token, self.admin_token.encode()))

    @property
    def hides_engines(self) -> bool:
        """Whether clients and metrics get short names of engines instead of their addresses: as soon as there is a
        token, which says that not all callers are trusted.
        """
        return bool(self.client_tokens or self.admin_token)

    def name_of(self, url: str) -> str:
        """Return what clients and metrics call an engine: its address, or a short name from which nobody can tell it.

        With a token of administration, the name is the same in all routers that have it, and after a restart.
        """
        if not self.hides_engines:
            return url
        key = self.admin_token.encode() or self.name_key
        return f"engine-{hmac.digest(key, url.encode(), 'sha256').hex()[:NAME_DIGITS]}"

    @property
    def login(self) -> dict[str, str]:
        """The header that engines are asked with, if they have a key of their own."""
        return {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}
