"""Answers web pages of other origins as the engines do (CORS).

Preflights go to an engine. The router's own answers, such as errors, get the headers that an engine gives the origin.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from cachetools import TTLCache

from lmc.http.server import Message, Send
from lmc.router.client import ENGINE_HEADER, Refusal, read_headers

MAX_ORIGINS, ORIGIN_SECONDS = 1000, 60.0  # whose headers are remembered, and for how long

RawHeaders = Sequence[tuple[bytes, bytes]]
# From an origin to the headers of an engine's answer to it. Raises `Refusal` if no engine answers.
AskHeaders = Callable[[str], Awaitable[RawHeaders]]


def is_preflight(method: str, headers: Mapping[str, str]) -> bool:
    """Return whether a browser asks if a page of another origin may send a request."""
    return method == "OPTIONS" and "origin" in headers and "access-control-request-method" in headers


class OriginHeaders:
    """The headers that engines give to web pages, by origin."""

    def __init__(self, ask: AskHeaders) -> None:
        self._ask = ask
        self._headers: TTLCache[str, RawHeaders] = TTLCache(MAX_ORIGINS, ORIGIN_SECONDS)

    def added(self, scope: Mapping[str, Any], send: Send) -> Send:
        """Return a function that sends an answer. An answer of the router itself gets the headers of an engine."""
        origin = dict(read_headers(scope["headers"])).get("origin")
        if origin is None:
            return send

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start" and ENGINE_HEADER.encode() not in dict(message["headers"]):
                message = {**message, "headers": [*message["headers"], *await self._of(origin)]}
            await send(message)

        return send_with_headers

    async def _of(self, origin: str) -> RawHeaders:
        headers: RawHeaders | None = self._headers.get(origin)
        if headers is None:
            try:
                headers = [(name.lower(), value) for name, value in await self._ask(origin)]
            except Refusal:
                return ()
            headers = [one for one in headers if one[0] == b"vary" or one[0].startswith(b"access-control-")]
            self._headers[origin] = headers
        return headers
