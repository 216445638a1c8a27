"""The settings of a router, and the options that `--option name=value` takes."""

import hmac
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from lmc.http.server import bearer_token
from lmc.shapes import MIB

NAME_DIGITS = 12  # length of the name that hides an engine's address
Port = Annotated[int, Field(ge=0, le=65535)]


class RouterOptions(BaseModel):
    """The router's options that are given as `--option name=value`; docs/router.md describes them."""

    model_config = ConfigDict(extra="forbid", frozen=True, coerce_numbers_to_str=True)

    session_key: str = "x-session-id"
    special_string: str = " # # "
    exact_tokens: bool = False
    tokenizer_processes: int = Field(2, ge=1)
    static_kv_events: str = ""
    kv_events_port: Port = 0
    kv_replay_port: Port = 0
    allowed_paths: str = ""
    max_body_mib: int = Field(32, ge=1)
    max_held_mib: int = Field(1024, ge=1)
    health_seconds: float = Field(5.0, ge=0.1)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSettings:
    """The settings from the command line, the environment and a YAML file."""

    session_key: str = "x-session-id"
    special_string: str = " # # "
    api_key: str = field(default="", repr=False)  # sent to engines instead of the clients' keys
    # A client needs one of these tokens. Without any, every client is admitted.
    client_tokens: frozenset[str] = field(default=frozenset(), repr=False)
    allowed_paths: frozenset[str] = frozenset()  # forwarded in addition to those that compute something
    admin_token: str = field(default="", repr=False)
    open_admin: bool = True  # whether administration needs no token, because the router listens at this host only
    max_requests: int = 1000  # in flight; others are answered with 429
    max_body: int = 32 * MIB  # bytes
    max_held: int = 1024 * MIB  # bytes of all request bodies in flight
    exact_tokens: bool = False  # whether an engine tokenizes each prompt before the policy chooses
    tokenizers: Mapping[str, str] = field(default_factory=dict)  # directories or names on a hub, by model
    tokenizer_processes: int = 2
    attempts: int = 3  # engines that are tried in turn until an answer begins
    connect_seconds: float = 5.0
    answer_seconds: float = 600.0  # timeout for an engine that sends nothing
    health_seconds: float = 5.0  # between two health checks of an engine
    # Hides addresses without an administration token.
    name_key: bytes = field(default_factory=lambda: os.urandom(32), repr=False)

    def admits(self, authorization: str) -> bool:
        """Return whether a client with this `authorization` header may send requests."""
        token = bearer_token(authorization).encode()
        matches = [hmac.compare_digest(token, accepted.encode()) for accepted in self.client_tokens]
        return not matches or any(matches)

    def may_read_metrics(self, authorization: str) -> bool:
        """Return whether a caller with this `authorization` header may read the metrics.

        If clients have tokens, a caller needs one of them, or the administration token.
        """
        token = bearer_token(authorization).encode()
        return self.admits(authorization) or bool(
            self.admin_token and hmac.compare_digest(token, self.admin_token.encode())
        )

    @property
    def hides_engines(self) -> bool:
        """Whether clients and metrics get short names of engines instead of their addresses.

        This is so as soon as there is a token, because then not all callers are trusted.
        """
        return bool(self.client_tokens or self.admin_token)

    def name_of(self, url: str) -> str:
        """Return the name of an engine for clients and metrics: its address, or a short name that hides it.

        With an administration token, the short name is the same in all routers with this token, and after a restart.
        """
        if not self.hides_engines:
            return url
        key = self.admin_token.encode() or self.name_key
        return f"engine-{hmac.digest(key, url.encode(), 'sha256').hex()[:NAME_DIGITS]}"

    @property
    def login(self) -> dict[str, str]:
        """The authorization header for engines, if they have an API key."""
        return {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}
