"""Timeouts of a client's connection: for the head of a request, for what follows a response, and for reading.

uvicorn closes a connection that is idle after a response. It has no timeout for the head of a request, for the rest of
a body that was refused, or for a client that reads nothing.
"""

import asyncio
import logging
from typing import Any

from lmc.shapes import KIB

log = logging.getLogger(__name__)

HEAD_SECONDS = 10.0  # timeout for the head of a request, and for the rest of a body after the response
UNREAD_SECONDS = 60.0  # a client that reads less than UNREAD_BYTES of its response in this time is disconnected
UNREAD_BYTES = 64 * KIB


class TimedConnection(asyncio.Protocol):
    """A connection that is closed unless a request arrives in time, and aborted unless the client reads.

    A protocol of uvicorn is the next base class.
    """

    loop: asyncio.AbstractEventLoop
    transport: asyncio.Transport
    cycle: Any  # the last request and its response
    timeout_keep_alive_task: asyncio.TimerHandle | None
    head_timer: asyncio.TimerHandle | None = None  # runs while no request is being answered
    read_timer: asyncio.TimerHandle | None = None  # runs while the client has to read

    def connection_made(self, transport: Any) -> None:
        """Start the timeout for the first head."""
        super().connection_made(transport)
        self._time_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop both timeouts."""
        self._stop_timing_head()
        self._stop_timing_reads()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Handle received bytes. Only a complete head stops its timeout."""
        if self.timeout_keep_alive_task is not None:  # The connection was idle: a head may begin now.
            self._stop_timing_head()
        super().data_received(data)
        self._time_head()

    def on_response_complete(self) -> None:
        """Start the timeout for the next head, which is also that for the rest of a refused body."""
        super().on_response_complete()  # type: ignore[misc]
        self._time_head()

    def pause_writing(self) -> None:
        """Start the timeout for reading, because the client has not read a part of its response."""
        super().pause_writing()
        self._time_reads()

    def resume_writing(self) -> None:
        """Stop the timeout for reading, unless the connection ends once the client has read everything."""
        super().resume_writing()
        if not self.transport.is_closing():
            self._stop_timing_reads()

    def _time_head(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:  # A request is being answered.
            self._stop_timing_head()
        elif self.head_timer is None:
            self.head_timer = self.loop.call_later(HEAD_SECONDS, self._close)

    def _stop_timing_head(self) -> None:
        if self.head_timer is not None:
            self.head_timer.cancel()
            self.head_timer = None

    def _close(self) -> None:
        self.transport.close()
        self._time_reads()

    def _time_reads(self) -> None:
        if self.read_timer is None:
            unread = self.transport.get_write_buffer_size()
            self.read_timer = self.loop.call_later(UNREAD_SECONDS, self._check_reads, unread)

    def _stop_timing_reads(self) -> None:
        if self.read_timer is not None:
            self.read_timer.cancel()
            self.read_timer = None

    def _check_reads(self, unread: int) -> None:
        self.read_timer = None
        if self.transport.get_write_buffer_size() > unread - UNREAD_BYTES:
            log.info("lmc: disconnected a client that read nothing for %g s", UNREAD_SECONDS)
            self.transport.abort()
        else:
            self._time_reads()
