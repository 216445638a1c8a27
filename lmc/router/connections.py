"""The connections of clients: how long the head of a request may be, and how long it may take.

uvicorn's protocol closes a connection that is idle behind an answer. It waits for ever for a head that does not end.
"""

import asyncio
import resource
from typing import Any

from lmc.errors import ConfigError

HEAD_BYTES = 64 << 10
HEAD_SECONDS = 10.0
SPARE_FILES = 256  # beside the two connections of each request: health checks, events, clients that are idle


def bounded_protocol() -> Any:
    """Return uvicorn's protocol over httptools, with bounds for heads."""
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

    class BoundedHeads(HttpToolsProtocol):  # type: ignore[misc]
        """A connection that is closed if the head of a request is too large, or does not come in time."""

        head_bytes = 0  # that have come of a head
        waiting: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            """Begin to wait for the first request."""
            super().connection_made(transport)
            self._wait()

        def connection_lost(self, exc: Exception | None) -> None:
            """Wait no more."""
            self._wait(ends=True)
            super().connection_lost(exc)

        def on_message_begin(self) -> None:
            """Begin to wait for the rest of a head."""
            super().on_message_begin()
            self._wait()

        def on_headers_complete(self) -> None:
            """Wait no more."""
            self._wait(ends=True)
            super().on_headers_complete()

        def data_received(self, data: bytes) -> None:
            """Take what has come."""
            before = self.waiting
            super().data_received(data)
            self.head_bytes += len(data) if self.waiting is before else 0  # not what another request may end in
            if self.waiting is not None and self.head_bytes > HEAD_BYTES:
                self.transport.write(b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\n\r\n")
                self.transport.close()

        def _wait(self, *, ends: bool = False) -> None:
            if self.waiting is not None:
                self.waiting.cancel()
            self.waiting, self.head_bytes = None if ends else self.loop.call_later(HEAD_SECONDS, self._give_up), 0

        def _give_up(self) -> None:
            self.transport.close()

    return BoundedHeads


def allow_files(requests: int) -> None:
    """Let the process open as many files as so many requests at once need; raise `ConfigError` if it may not."""
    needed = 2 * requests + SPARE_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = hard == resource.RLIM_INFINITY
    if hard < needed and not unlimited:
        raise ConfigError(
            f"--max-requests {requests} needs {needed} open files, and this process may have {hard}: "
            f"raise its limit (ulimit -Hn), or take --max-requests {max(1, (hard - SPARE_FILES) // 2)}"
        )
    if soft < needed and soft != resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed if unlimited else hard, hard))
