"""A client of the router: what it has sent, whether it is still there, and what it is answered. ASGI is spoken here."""

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from lmc.http_server import Receive, Send
from lmc.router.headers import read_headers

LATER = (429, 503)  # answers that ask a client to come back
RETRY_AFTER = b"1"  # seconds
UPLOAD_SECONDS, UPLOAD_RATE = 30.0, 64 << 10  # for a body, and the bytes of each second more that it may take
STALLED_SECONDS = 60.0  # for which a client may read nothing of an answer
KINDS = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "NotFoundError",
    408: "timeout_error", 413: "invalid_request_error", 429: "rate_limit_error",
}  # fmt: skip


class Refusal(Exception):
    """What a client is told instead of an engine's answer."""

    def __init__(self, status: int, why: str, parameter: str | None = None) -> None:
        """`parameter` is the field of the request that is wrong."""
        super().__init__(why)
        self.status, self.why, self.parameter = status, why, parameter


class Stalled(Exception):
    """A client does not read its answer."""


class Room:
    """The memory for the bodies of all requests together."""

    def __init__(self, most: int) -> None:
        self.most, self.taken = most, 0

    def take(self, size: int) -> None:
        """Take so many bytes; raise `Refusal` if there are not so many."""
        if self.taken + size > self.most:
            raise Refusal(503, f"the router holds {self.most} bytes of requests at most: try again later")
        self.taken += size


class Client:
    """One client, and its one request."""

    def __init__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        self._receive, self._send, self._begun = receive, send, False
        self.header_list = read_headers(scope["headers"])
        self.headers = dict(self.header_list)
        query, self.method, self.path = scope["query_string"], str(scope["method"]), str(scope["path"])
        self.target = (scope["raw_path"] + (b"?" + query if query else b"")).decode("latin-1")
        self.held = 0  # bytes of the body, which it has in the room
        self.request_id = ""
        self.status = 499  # of the answer; this one if the client has left before there was one

    async def body(self, most: int, room: "Room") -> bytes:
        """Return the body; raise `Refusal` if it is larger than `most` bytes, comes too slowly, or has no room now."""
        length = self.headers.get("content-length", "")
        if length.isdecimal() and int(length) > most:
            raise Refusal(413, f"a body may have {most} bytes at most")
        parts, more, began = [], True, asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(UPLOAD_SECONDS) as limit:
                while more:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        raise Refusal(499, "the client has left")
                    parts.append(message.get("body", b""))
                    more = message.get("more_body", False)
                    room.take(len(parts[-1]))
                    self.held += len(parts[-1])
                    if self.held > most:
                        raise Refusal(413, f"a body may have {most} bytes at most")
                    limit.reschedule(began + UPLOAD_SECONDS + self.held / UPLOAD_RATE)
        except TimeoutError:
            raise Refusal(408, f"the body has come too slowly: {self.held} bytes of it") from None
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
        """Send a part of the answer; wait while the client does not read, and raise `Stalled` if it does not for long.

        Its request has a place among those that are answered at once, and its engine computes for it.
        """
        try:
            async with asyncio.timeout(STALLED_SECONDS):
                await self._send({"type": "http.response.body", "body": part, "more_body": True})
        except TimeoutError:
            raise Stalled(f"the client has read nothing for {STALLED_SECONDS:g} s") from None

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
