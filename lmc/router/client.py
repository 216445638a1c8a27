"""A client of the router: what it has sent, whether it is still there, and what it is answered. ASGI is spoken here."""

import json
from collections.abc import Mapping
from typing import Any

from lmc.http_server import Receive, Send
from lmc.router.headers import read_headers

LATER = (429, 503)  # answers that ask a client to come back
RETRY_AFTER = b"1"  # seconds
KINDS = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "NotFoundError",
         413: "invalid_request_error", 429: "rate_limit_error"}  # fmt: skip


class Refusal(Exception):
    """What a client is told instead of an engine's answer."""

    def __init__(self, status: int, why: str, parameter: str | None = None) -> None:
        """`parameter` is the field of the request that is wrong."""
        super().__init__(why)
        self.status, self.why, self.parameter = status, why, parameter


class Client:
    """One client, and its one request."""

    def __init__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        self._receive, self._send, self._begun = receive, send, False
        self.header_list = read_headers(scope["headers"])
        self.headers = dict(self.header_list)
        query, self.method, self.path = scope["query_string"], str(scope["method"]), str(scope["path"])
        self.target = (scope["raw_path"] + (b"?" + query if query else b"")).decode("latin-1")
        self.request_id = ""
        self.status = 499  # of the answer; this one if the client has left before there was one

    async def body(self, most: int) -> bytes:
        """Return the body; raise `Refusal` if it is larger than `most` bytes."""
        length = self.headers.get("content-length", "")
        if length.isdecimal() and int(length) > most:
            raise Refusal(413, f"a body may have {most} bytes at most")
        parts, size, more = [], 0, True
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise Refusal(499, "the client has left")
            parts.append(message.get("body", b""))
            size, more = size + len(parts[-1]), message.get("more_body", False)
            if size > most:
                raise Refusal(413, f"a body may have {most} bytes at most")
        return b"".join(parts)

    async def leaves(self) -> None:
        """Wait until the client goes away."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def begin(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Begin the answer."""
        self._begun, self.status = True, status
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, part: bytes) -> None:
        """Send a part of the answer; waits while the client does not read."""
        await self._send({"type": "http.response.body", "body": part, "more_body": True})

    async def end(self) -> None:
        """End the answer."""
        await self._send({"type": "http.response.body", "body": b""})

    async def refuse(self, refusal: Refusal) -> None:
        """Answer with an error in the form of OpenAI's API, if no answer has begun."""
        if self._begun:
            return
        error = {
            "message": refusal.why, "type": KINDS.get(refusal.status, "server_error"), "param": refusal.parameter,
            "code": refusal.status,
        }  # fmt: skip
        body = json.dumps({"error": error}).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        if refusal.status in LATER:
            headers.append((b"retry-after", RETRY_AFTER))
        await self.begin(refusal.status, headers)
        await self._send({"type": "http.response.body", "body": body})
