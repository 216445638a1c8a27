"""Limits of client connections: the size of a request's head, and the number of open files."""

import json
import resource
from http import HTTPStatus
from typing import Any

from lmc.errors import ConfigError
from lmc.http.timeouts import TimedConnection
from lmc.router.client import error_object

HEAD_BYTES = 64 << 10
BODY_HEADERS = (b"content-length", b"transfer-encoding")
UPGRADE_REFUSED = (
    "connections are not upgraded, and the body of such a request cannot be read: send it without the header Upgrade; "
    "in Java, with HttpClient.Version.HTTP_1_1"
)
SPARE_FILES = 256  # for health checks, events and idle clients; each request needs two more


class BoundedHeads(TimedConnection):
    """A connection that is closed if the head of a request is too large, or if the client is too slow.

    uvicorn's protocol over httptools is the next base class.
    """

    headers: list[tuple[bytes, bytes]]
    parser: Any
    in_message, in_head = False, False  # whether a request, or its head, has begun and is incomplete
    # Received since the current head or its trailers began, without the bytes in which they began.
    head_bytes = 0
    too_large = False  # whether the last complete head was too large
    body_lost = False  # whether the last head has requested an upgrade, which ends the parsing before the body

    def on_message_begin(self) -> None:
        """Start counting the bytes of a head."""
        super().on_message_begin()  # type: ignore[misc]
        self.in_message, self.in_head, self.head_bytes = True, True, 0

    def on_header(self, name: bytes, value: bytes) -> None:
        """Add a header, but no trailer: trailers after a chunked body are not headers."""
        if self.in_head:
            super().on_header(name, value)  # type: ignore[misc]

    def on_headers_complete(self) -> None:
        """Check a head. Raises `HttpParserError`, which ends the parsing, if it is too large.

        Only the bytes of its headers are counted, because the body may have arrived with them. A request for an upgrade
        that has a body is an error, too: httptools would take the body for the next request.
        """
        from httptools import HttpParserError

        self.in_head, self.head_bytes = False, 0
        self.too_large = sum(len(name) + len(value) + len(b":\r\n") for name, value in self.headers) > HEAD_BYTES
        self.body_lost = self.parser.should_upgrade() and any(
            name in BODY_HEADERS and value != b"0" for name, value in self.headers
        )
        if self.too_large or self.body_lost:
            raise HttpParserError
        super().on_headers_complete()  # type: ignore[misc]

    def on_body(self, body: bytes) -> None:
        """Add a part of a body, after which trailers may begin."""
        self.head_bytes = 0
        super().on_body(body)  # type: ignore[misc]

    def on_message_complete(self) -> None:
        """End a request."""
        self.in_message = False
        super().on_message_complete()  # type: ignore[misc]

    def data_received(self, data: bytes) -> None:
        """Handle received bytes, and close the connection if a head or its trailers are too large."""
        if self.body_lost:  # The connection is closed later, because closing it now would discard the response.
            return
        self.head_bytes += len(data)
        super().data_received(data)
        if self.in_message and self.head_bytes > HEAD_BYTES:
            self._refuse_head()

    def _should_upgrade(self) -> bool:
        """Return False: uvicorn would answer 500, because the router has no WebSockets, as those of /v1/realtime."""
        return False

    def send_400_response(self, msg: str) -> None:
        """Answer a request that is not valid HTTP, whose head is too large, or whose body cannot be read."""
        if self.too_large:
            self._refuse_head()
        elif self.body_lost:
            self._answer(HTTPStatus.BAD_REQUEST, UPGRADE_REFUSED)
        else:
            self._refuse(HTTPStatus.BAD_REQUEST, msg)

    def _refuse_head(self) -> None:
        self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"headers exceed {HEAD_BYTES} bytes")

    def _refuse(self, status: HTTPStatus, reason: str) -> None:
        self._answer(status, reason)
        self.transport.close()

    def _answer(self, status: HTTPStatus, reason: str) -> None:
        body = json.dumps({"error": error_object(status, reason)}).encode()
        head = f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\nconnection: close\r\n"
        self.transport.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)


def bounded_protocol() -> Any:
    """Return uvicorn's protocol over httptools, with timeouts and a size limit for request heads."""
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

    return type("BoundedProtocol", (BoundedHeads, HttpToolsProtocol), {})


def allow_files(requests: int) -> None:
    """Raise the limit of open files to what `requests` in flight need. Raises `ConfigError` if this is not allowed."""
    needed = 2 * requests + SPARE_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = hard == resource.RLIM_INFINITY
    if hard < needed and not unlimited:
        raise ConfigError(
            f"--max-requests {requests} needs {needed} open files, and the limit of this process is {hard}: "
            f"raise the limit (ulimit -Hn), or use --max-requests {max(1, (hard - SPARE_FILES) // 2)}"
        )
    if soft < needed and soft != resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed if unlimited else hard, hard))
