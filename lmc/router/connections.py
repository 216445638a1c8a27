"""Limits of client connections: the size of a request's head, the time it may take, and the number of open files.

uvicorn's protocol closes a connection that is idle after an answer, but has no timeout for the head of a request.
"""

import asyncio
import json
import resource
from http import HTTPStatus
from typing import Any

from lmc.errors import ConfigError
from lmc.router.client import error_object

HEAD_BYTES = 64 << 10
HEAD_SECONDS = 10.0
SPARE_FILES = 256  # for health checks, events and idle clients; each request needs two more


def bounded_protocol() -> Any:
    """Return uvicorn's protocol over httptools, with limits for request heads."""
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

    class BoundedHeads(HttpToolsProtocol):  # type: ignore[misc]
        """A connection that is closed if the head of a request is too large or too slow."""

        head_bytes = 0  # received of the current head
        waiting: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            """Start the timeout for the first head."""
            super().connection_made(transport)
            self._wait()

        def connection_lost(self, exc: Exception | None) -> None:
            """Stop the timeout."""
            self._wait(ends=True)
            super().connection_lost(exc)

        def on_message_begin(self) -> None:
            """Start the timeout for the rest of a head."""
            super().on_message_begin()
            self._wait()

        def on_headers_complete(self) -> None:
            """Stop the timeout."""
            self._wait(ends=True)
            super().on_headers_complete()

        def data_received(self, data: bytes) -> None:
            """Handle received bytes, and close the connection if a head is too large."""
            before = self.waiting
            super().data_received(data)
            self.head_bytes += len(data) if self.waiting is before else 0  # without the end of an earlier request
            if self.waiting is not None and self.head_bytes > HEAD_BYTES:
                self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"request head exceeds {HEAD_BYTES} bytes")

        def send_400_response(self, msg: str) -> None:
            """Answer a request that is not valid HTTP."""
            self._refuse(HTTPStatus.BAD_REQUEST, msg)

        def _refuse(self, status: HTTPStatus, reason: str) -> None:
            body = json.dumps({"error": error_object(status, reason)}).encode()
            head = f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\nconnection: close\r\n"
            self.transport.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            self.transport.close()

        def _wait(self, *, ends: bool = False) -> None:
            if self.waiting is not None:
                self.waiting.cancel()
            self.waiting, self.head_bytes = None if ends else self.loop.call_later(HEAD_SECONDS, self._give_up), 0

        def _give_up(self) -> None:
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
