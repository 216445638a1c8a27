"""Limits of client connections: the size of a request's head, and the number of open files."""

import json
import resource
from http import HTTPStatus
from typing import Any

from lmc.errors import ConfigError
from lmc.http.timeouts import TimedConnection
from lmc.router.client import error_object

HEAD_BYTES = 64 << 10
SPARE_FILES = 256  # for health checks, events and idle clients; each request needs two more


def bounded_protocol() -> Any:
    """Return uvicorn's protocol over httptools, with timeouts and a size limit for request heads."""
    from httptools import HttpParserError
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

    class BoundedHeads(TimedConnection, HttpToolsProtocol):  # type: ignore[misc]
        """A connection that is closed if the head of a request is too large, or if the client is too slow."""

        in_head, head_bytes = False, 0  # received of the current head, without the bytes in which it began
        too_large = False  # whether the last complete head was too large

        def on_message_begin(self) -> None:
            """Start counting the bytes of a head."""
            super().on_message_begin()
            self.in_head, self.head_bytes = True, 0

        def on_headers_complete(self) -> None:
            """Stop counting. Raises `HttpParserError`, which ends the parsing, if the complete head is too large.

            Only the bytes of its headers are counted, because the body may have arrived with them.
            """
            self.in_head = False
            self.too_large = sum(len(name) + len(value) + len(b":\r\n") for name, value in self.headers) > HEAD_BYTES
            if self.too_large:
                raise HttpParserError
            super().on_headers_complete()

        def data_received(self, data: bytes) -> None:
            """Handle received bytes, and close the connection if a head is too large."""
            self.head_bytes += len(data)
            super().data_received(data)
            if self.in_head and self.head_bytes > HEAD_BYTES:
                self._refuse_head()

        def send_400_response(self, msg: str) -> None:
            """Answer a request that is not valid HTTP, or whose head is too large."""
            if self.too_large:
                self._refuse_head()
            else:
                self._refuse(HTTPStatus.BAD_REQUEST, msg)

        def _refuse_head(self) -> None:
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"request head exceeds {HEAD_BYTES} bytes")

        def _refuse(self, status: HTTPStatus, reason: str) -> None:
            body = json.dumps({"error": error_object(status, reason)}).encode()
            head = f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\nconnection: close\r\n"
            self.transport.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            self.transport.close()

    return BoundedHeads


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
