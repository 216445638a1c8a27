"""A client of the router over ASGI: its request, its connection, its answer, and the headers that pass through."""

import asyncio
import json
import re
import uuid
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

from multidict import CIMultiDict

from lmc.http.server import Receive, Send

RETRIABLE = (429, 503)  # statuses that are sent with Retry-After
RETRY_AFTER = b"1"  # seconds
UPLOAD_SECONDS, UPLOAD_RATE = 30.0, 64 << 10  # a body may take 30 s, and 1 s more for each 64 KiB
ERROR_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "NotFoundError",
    405: "invalid_request_error", 408: "timeout_error", 413: "invalid_request_error", 429: "rate_limit_error",
    431: "invalid_request_error",
}  # fmt: skip
# Headers of one connection, and headers that are written anew for each.
NOT_SENT_ON = frozenset({
    "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer",
    "transfer-encoding", "upgrade", "host", "content-length", "expect",
})  # fmt: skip
NOT_SENT_BACK = NOT_SENT_ON - {"content-length"}
REQUEST_ID_PATTERN = re.compile(r"[\w.:-]{1,128}", re.ASCII)
ENGINE_HEADER, EXPECTED_HEADER, REQUEST_ID_HEADER = "x-lmc-engine", "x-lmc-expected-tokens", "x-request-id"


class Refusal(Exception):
    """An error for a client, instead of an engine's answer."""

    def __init__(self, status: int, reason: str, parameter: str | None = None, allow: str = "") -> None:
        """`parameter` is the invalid field of the request, and `allow` the methods that the path allows."""
        super().__init__(reason)
        self.status, self.why, self.parameter, self.allow = status, reason, parameter, allow


class Room:
    """The memory limit for the bodies of all requests together."""

    def __init__(self, limit: int) -> None:
        self.most, self.taken = limit, 0

    def take(self, size: int) -> None:
        """Reserve `size` bytes. Raises `Refusal` if the limit would be exceeded."""
        if self.taken + size > self.most:
            raise Refusal(503, f"request bodies in flight exceed {self.most} bytes: try again later")
        self.taken += size


class Client:
    """One client, with one request."""

    def __init__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        self._receive, self._send, self._begun = receive, send, False
        self.header_list = read_headers(scope["headers"])
        self.headers = dict(self.header_list)
        query, self.method, self.path = scope["query_string"], str(scope["method"]), str(scope["path"])
        self.target = (scope["raw_path"] + (b"?" + query if query else b"")).decode("latin-1")
        self.held = 0  # bytes of the body, reserved in the room
        self.request_id = ""
        self.status = 499  # of the answer; 499 if the client disconnected before it began

    async def body(self, max_bytes: int, room: "Room") -> bytes:
        """Return the body. Raises `Refusal` if it exceeds `max_bytes`, arrives too slowly, or exceeds the room."""
        length = self.headers.get("content-length", "")
        if length.isdecimal() and int(length) > max_bytes:
            raise Refusal(413, f"request body exceeds {max_bytes} bytes")
        parts, unfinished, began = [], True, asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(UPLOAD_SECONDS) as limit:
                while unfinished:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        raise Refusal(499, "the client disconnected")
                    parts.append(message.get("body", b""))
                    unfinished = message.get("more_body", False)
                    room.take(len(parts[-1]))
                    self.held += len(parts[-1])
                    if self.held > max_bytes:
                        raise Refusal(413, f"request body exceeds {max_bytes} bytes")
                    limit.reschedule(began + UPLOAD_SECONDS + self.held / UPLOAD_RATE)
        except TimeoutError:
            raise Refusal(408, f"request body timed out after {self.held} bytes") from None
        return b"".join(parts)

    async def leaves(self) -> None:
        """Wait until the client disconnects."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def begin(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Begin the answer."""
        self._begun, self.status = True, status
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, part: bytes) -> None:
        """Send a part of the answer, and wait until the client reads, or is disconnected because it does not."""
        await self._send({"type": "http.response.body", "body": part, "more_body": True})

    async def end(self) -> None:
        """End the answer."""
        await self._send({"type": "http.response.body", "body": b""})

    async def refuse(self, refusal: Refusal) -> None:
        """Send an error in the format of OpenAI's API, unless an answer has begun."""
        if self._begun:
            return
        body = json.dumps({"error": error_object(refusal.status, refusal.why, refusal.parameter)}).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        if refusal.status in RETRIABLE:
            headers.append((b"retry-after", RETRY_AFTER))
        if refusal.allow:
            headers.append((b"allow", refusal.allow.encode()))
        await self.begin(refusal.status, headers)
        await self._send({"type": "http.response.body", "body": body})


def error_object(status: int, reason: str, parameter: str | None = None) -> dict[str, Any]:
    """Return the error of OpenAI's API for a status and a reason."""
    kind = ERROR_TYPES.get(status, "server_error")
    return {"message": reason, "type": kind, "param": parameter, "code": status}


def read_headers(raw: Iterable[tuple[bytes, bytes]]) -> list[tuple[str, str]]:
    """Return headers as strings with lower-case names. Invalid UTF-8 in values is decoded as Latin-1."""
    return [(name.decode("latin-1").lower(), _decoded(value)) for name, value in raw]


def sent_on(
    headers: Sequence[tuple[str, str]], login: Mapping[str, str], without: Set[str] = frozenset()
) -> CIMultiDict[str]:
    """Return the headers for an engine, without those of the client's connection and those in `without`.

    They include `login`, and one request id, which is generated if the client's is missing or invalid.
    """
    dropped = NOT_SENT_ON | _of_connection(headers) | without
    sent = CIMultiDict((name, value) for name, value in headers if name not in dropped)
    sent.update(login)
    client_id = sent.get(REQUEST_ID_HEADER, "")
    sent[REQUEST_ID_HEADER] = client_id if REQUEST_ID_PATTERN.fullmatch(client_id) else uuid.uuid4().hex
    return sent


def sent_back(
    raw: Sequence[tuple[bytes, bytes]], request_id: str, engine: str, expected_tokens: float
) -> list[tuple[bytes, bytes]]:
    """Return an engine's headers for the client, with the request id, the engine and the expected tokens."""
    router_headers = {
        REQUEST_ID_HEADER: request_id,
        ENGINE_HEADER: engine,
        EXPECTED_HEADER: str(round(expected_tokens)),
    }
    dropped = NOT_SENT_BACK | _of_connection(read_headers(raw)) | router_headers.keys()
    engine_headers = [(name.lower(), value) for name, value in raw if name.decode("latin-1").lower() not in dropped]
    return [*engine_headers, *((name.encode(), value.encode()) for name, value in router_headers.items())]


def _of_connection(headers: Iterable[tuple[str, str]]) -> set[str]:
    """Return the header names that `Connection` lists, which belong to one connection."""
    return {item.strip().lower() for name, value in headers if name == "connection" for item in value.split(",")}


def _decoded(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")
