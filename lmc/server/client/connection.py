"""A client's connection to a cache server. The command line has one as well, and should not wait for torch."""

import os
import select
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from lmc import __version__
from lmc.errors import ConfigError, StorageError, TierUnusable
from lmc.server.channel import ANSWER, LARGEST_ANSWER, BrokenProtocol, Channel, decoded
from lmc.server.greeting import PROTOCOL, Hello, Retire, ServerStatus, Status
from lmc.server.sizes import Sizes

if TYPE_CHECKING:  # It needs torch.
    from lmc.server.messages import Request

STATUS_SECONDS = 10.0
T = TypeVar("T")

_encode = msgspec.msgpack.Encoder().encode
_hello: msgspec.msgpack.Decoder[Hello] = msgspec.msgpack.Decoder(Hello)
_nothing: msgspec.msgpack.Decoder[None] = msgspec.msgpack.Decoder(None)
_status: msgspec.msgpack.Decoder[ServerStatus] = msgspec.msgpack.Decoder(ServerStatus)


def lock_of(path: Path) -> Path:
    """Return the file that the server which listens at a path has locked for as long as it lives."""
    return path.with_name(f"{path.name}.lock")


class Gone(Exception):
    """The connection has ended, or the server has not answered in time."""


def status(path: Path) -> ServerStatus:
    """Return how the server at a path is; raise as `ServerConnection`."""
    with closing(ServerConnection(path, STATUS_SECONDS)) as connection:
        return connection.open(Status(), _status)


def retire(path: Path, seconds: float) -> None:
    """Let the server at a path end, of whatever version, for another one to take over, and wait until it has.

    Raises as `ServerConnection`, or `TierUnusable` if it takes longer than this.
    """
    with closing(ServerConnection(path, STATUS_SECONDS, any_version=True)) as connection:
        if not connection.server:
            raise TierUnusable("it runs in another container, where its process cannot be waited for")
        process = os.pidfd_open(connection.server)
        try:
            connection.open(Retire(), _nothing)
            if not select.select([process], [], [], seconds)[0]:
                raise TierUnusable(f"the cache server at {path} has not ended within {seconds:g} s")
        finally:
            os.close(process)


class ServerConnection:
    """Asks one question after the other. Any thread may ask."""

    def __init__(self, path: Path, deadline: float, *, any_version: bool = False) -> None:
        """Raise `TierUnusable` if there is no server, or `ConfigError` if it is not of `any_version` and of another."""
        self._lock, self._path = threading.Lock(), path
        self.files: list[int] = []  # the slab, and the lifeline that we have locked
        try:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError as error:  # There are too many open files.
            raise TierUnusable(f"no connection to {path} can be made: {error.strerror}") from error
        self._channel = Channel(connection, LARGEST_ANSWER)
        self._channel.set_timeout(deadline)
        with self._started():
            connection.connect(str(path))
            self._channel.send(_encode(Hello(PROTOCOL, __version__)))
            refused = decoded(_hello, self._received()).refused
            if refused and not any_version:
                raise ConfigError(refused)

    def open(self, opening: Sizes | Status | Retire, decoder: msgspec.msgpack.Decoder[T]) -> T:
        """Say what the connection is for, and return the answer; raise `TierUnusable`, or `StorageError` if refused."""
        with self._started():
            self._channel.send(_encode(opening))
            return decoded(decoder, _answer(self._received(self.files)))

    @property
    def server(self) -> int:
        """The number of the server's process."""
        return self._channel.peer()[0]

    def ask(self, question: "Request") -> Any:
        """Return the answer; raise `Gone`, or `StorageError` for what the server cannot do."""
        with self._lock:
            return self._ask(question)

    def tell(self, question: "Request") -> None:
        """Ask for something that has no answer; raise `Gone`."""
        with self._lock, self._in_order():
            self._channel.send(_encode(question))

    def set_timeout(self, seconds: float) -> None:
        """Wait so long for an answer from now on."""
        self._channel.set_timeout(seconds)

    def ask_if_idle(self, question: "Request") -> Any:
        """Return the answer, or None if another thread is asking something; raise as `ask`."""
        if not self._lock.acquire(blocking=False):
            return None
        try:
            return self._ask(question)
        finally:
            self._lock.release()

    def close(self) -> None:
        """End the connection, and what a thread waits for."""
        self._channel.close()

    def _ask(self, question: "Request") -> Any:
        with self._in_order():
            self._channel.send(_encode(question))
            frame = self._received()
            if frame[:1] == ANSWER:
                return decoded(question.decoder, frame[1:])
        return _answer(frame)

    @contextmanager
    def _in_order(self) -> Iterator[None]:
        """End the connection if a question or its answer is not complete: the next one must not get this answer."""
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
        """Say what to do if a connection cannot be made."""
        try:
            with self._in_order():
                yield
        except Gone as error:
            hint = f"start it with `lmc serve --socket {self._path}`, as the same user or with --group"
            raise TierUnusable(f"no cache server answers at {self._path} ({error}): {hint}") from error

    def _received(self, files: list[int] | None = None) -> bytes:
        frame = self._channel.receive(files)
        if frame is None:
            raise Gone("the server has closed the connection")
        return frame


def _answer(frame: bytes) -> bytes:
    if frame[:1] != ANSWER:
        raise StorageError(frame[1:].decode())
    return frame[1:]
