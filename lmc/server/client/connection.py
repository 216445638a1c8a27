"""A client's connection to a cache server. The command line uses it, too, so it must not import torch."""

import logging
import os
import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from lmc import __version__
from lmc.errors import ConfigError, StorageError, TierUnusable
from lmc.server.channel import MAX_RESPONSE_BYTES, OK, BrokenProtocol, Channel, decoded
from lmc.server.handshake import PROTOCOL, CheckIntegrity, Hello, Opening, Retire, ServerStatus, Status

if TYPE_CHECKING:  # This module imports torch.
    from lmc.server.messages import Request

log = logging.getLogger(__name__)

SERVER_START_SECONDS = 60.0  # timeout of an engine that starts, for a server that starts at the same time
SERVER_POLL_SECONDS = 1.0
STATUS_SECONDS = 10.0  # timeout of the command line's requests
CHECK_SECONDS = 120.0  # timeout of the check of a server's bookkeeping
T = TypeVar("T")

_encode = msgspec.msgpack.Encoder().encode
_hello: msgspec.msgpack.Decoder[Hello] = msgspec.msgpack.Decoder(Hello)
_nothing: msgspec.msgpack.Decoder[None] = msgspec.msgpack.Decoder(None)
_faults: msgspec.msgpack.Decoder[list[str]] = msgspec.msgpack.Decoder(list[str])
_status: msgspec.msgpack.Decoder[ServerStatus] = msgspec.msgpack.Decoder(ServerStatus)


def lock_of(path: Path) -> Path:
    """Return the lock file of the server that listens at a path; the server holds the lock while it runs."""
    return path.with_name(f"{path.name}.lock")


class Gone(Exception):
    """The connection has ended, or the server has not responded in time."""


def status(path: Path) -> ServerStatus:
    """Return the status of the server at a path; raise the errors of `ServerConnection`."""
    with closing(ServerConnection(path, STATUS_SECONDS)) as connection:
        return connection.open(Status(), _status)


def wait_for_server(path: Path) -> None:
    """Wait until the server at a path responds. Raises the errors of `ServerConnection`."""
    until, waited = time.monotonic() + SERVER_START_SECONDS, False
    while True:
        try:
            status(path)
            return
        except TierUnusable:
            if time.monotonic() >= until:
                raise
        if not waited:
            log.warning("found no cache server at %s; waiting up to %g s for it", path, SERVER_START_SECONDS)
        waited = True
        time.sleep(SERVER_POLL_SECONDS)


def check_integrity(path: Path) -> list[str]:
    """Return the faults in the bookkeeping of the server at a path; raise the errors of `ServerConnection`."""
    with closing(ServerConnection(path, CHECK_SECONDS)) as connection:
        return connection.open(CheckIntegrity(), _faults)


def retire(path: Path, seconds: float) -> None:
    """Shut down the server at a path, of any version, for a takeover, and wait until its process has ended.

    Raises the errors of `ServerConnection`, or `TierUnusable` if the shutdown takes longer than `seconds`.
    """
    with closing(ServerConnection(path, STATUS_SECONDS, any_version=True)) as connection:
        if not connection.server:
            raise TierUnusable(f"the cache server at {path} runs in another container: end it there first")
        process = os.pidfd_open(connection.server)
        try:
            connection.open(Retire(), _nothing)
            if not select.select([process], [], [], seconds)[0]:
                raise TierUnusable(f"the cache server at {path} did not end within {seconds:g} s")
        finally:
            os.close(process)


class ServerConnection:
    """Sends requests one at a time. Any thread may send a request."""

    def __init__(self, path: Path, deadline: float, *, any_version: bool = False) -> None:
        """Connect to the server at a path, with a timeout of `deadline` seconds for each response.

        Raises `TierUnusable` if no server responds. Raises `ConfigError` if its protocol version differs, unless
        `any_version` is true.
        """
        self._lock, self._path = threading.Lock(), path
        self.files: list[int] = []  # descriptors: the slab, and the lifeline that this process has locked
        try:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError as error:  # too many open files
            raise TierUnusable(f"cannot connect to {path}: {error.strerror}") from error
        self._channel = Channel(connection, MAX_RESPONSE_BYTES)
        self._channel.set_timeout(deadline)
        with self._started():
            connection.connect(str(path))
            self._channel.send(_encode(Hello(PROTOCOL, __version__)))
            refused = decoded(_hello, self._received()).refused
            if refused and not any_version:
                raise ConfigError(refused)

    def open(self, opening: Opening, decoder: msgspec.msgpack.Decoder[T]) -> T:
        """Send the purpose of the connection, and return the response.

        Raises `TierUnusable`, or `StorageError` if the server refuses.
        """
        with self._started():
            self._channel.send(_encode(opening))
            return decoded(decoder, _payload(self._received(self.files)))

    @property
    def server(self) -> int:
        """The process id of the server; 0 if it runs in another container."""
        return self._channel.peer()[0]

    def ask(self, request: "Request") -> Any:
        """Return the response to a request; raise `Gone`, or `StorageError` if the server reports an error.

        `StorageError` is also raised if the request cannot be sent.
        """
        with self._lock:
            return self._ask(request)

    def send(self, request: "Request") -> None:
        """Send a request without a response; raise `Gone`, or `StorageError` if the request cannot be sent."""
        frame = _encoded(request)
        with self._lock, self._in_order():
            self._channel.send(frame)

    def set_timeout(self, seconds: float) -> None:
        """Set the timeout for responses from now on."""
        self._channel.set_timeout(seconds)

    def ask_if_idle(self, request: "Request") -> Any:
        """Return the response, or None if a request of another thread is in flight; raise the errors of `ask`."""
        if not self._lock.acquire(blocking=False):
            return None
        try:
            return self._ask(request)
        finally:
            self._lock.release()

    def close(self) -> None:
        """Close the connection; a thread that waits for a response gets an error."""
        self._channel.close()

    def _ask(self, request: "Request") -> Any:
        frame = _encoded(request)
        with self._in_order():
            self._channel.send(frame)
            frame = self._received()
            if frame[:1] == OK:
                return decoded(request.decoder, frame[1:])
        return _payload(frame)

    @contextmanager
    def _in_order(self) -> Iterator[None]:
        """Close the connection after an incomplete request or response, so no later request gets this response."""
        try:
            yield
        except (OSError, BrokenProtocol, Gone) as error:
            self.close()
            raise Gone(getattr(error, "strerror", None) or str(error)) from error
        except BaseException:  # such as Ctrl-C
            self.close()
            raise

    @contextmanager
    def _started(self) -> Iterator[None]:
        """Turn `Gone` into `TierUnusable` with a hint, for errors while the connection is opened."""
        try:
            with self._in_order():
                yield
        except Gone as error:
            hint = f"start it with `lmc serve --socket {self._path}`, as the same user or with --group"
            raise TierUnusable(f"no cache server answers at {self._path} ({error}): {hint}") from error

    def _received(self, files: list[int] | None = None) -> bytes:
        frame = self._channel.receive(files)
        if frame is None:
            raise Gone("the server closed the connection")
        return frame


def _encoded(request: "Request") -> bytes:
    """Return the frame of a request; raise `StorageError` if a text or a number in it cannot be sent."""
    try:
        return _encode(request)
    except (ValueError, OverflowError) as error:
        raise StorageError(f"a request cannot be encoded: {error}") from error


def _payload(frame: bytes) -> bytes:
    if frame[:1] != OK:
        raise StorageError(frame[1:].decode())
    return frame[1:]
