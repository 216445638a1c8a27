"""A client's connections to a cache server, and the slab that it has mapped."""

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from lmc import __version__
from lmc.errors import ConfigError, StorageError, TierUnusable
from lmc.service.channel import ANSWER, BrokenProtocol, Channel, decoded
from lmc.service.messages import PROTOCOL, Attach, Attached, Hello, Request, ServerStatus, Status
from lmc.storage.slab import Slab, SlabAddress

STATUS_SECONDS = 10.0
T = TypeVar("T")

_encode = msgspec.msgpack.Encoder().encode
_hello: msgspec.msgpack.Decoder[Hello] = msgspec.msgpack.Decoder(Hello)
_attached: msgspec.msgpack.Decoder[Attached] = msgspec.msgpack.Decoder(Attached)
_status: msgspec.msgpack.Decoder[ServerStatus] = msgspec.msgpack.Decoder(ServerStatus)


class Gone(Exception):
    """The connection has ended, or the server has not answered in time."""


def status(path: Path) -> ServerStatus:
    """Return how the server at a path is; raise as `ServerConnection`."""
    with closing(ServerConnection(path, STATUS_SECONDS)) as connection:
        return connection.open(Status(), _status)


class ServerConnection:
    """Asks one question after the other. Any thread may ask."""

    def __init__(self, path: Path, deadline: float) -> None:
        """Raise `TierUnusable` if there is no server, or `ConfigError` if it is of another version."""
        self._lock, self._path = threading.Lock(), path
        self.files: list[int] = []  # the slab and the lifeline
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._channel = Channel(connection)
        self._channel.set_timeout(deadline)
        with self._closed_by_errors():
            connection.connect(str(path))
            self._channel.send(_encode(Hello(PROTOCOL, __version__)))
            refused = decoded(_hello, self._received()).refused
            if refused:
                raise ConfigError(refused)

    def open(self, opening: Attach | Status, decoder: msgspec.msgpack.Decoder[T]) -> T:
        """Say what the connection is for, and return the answer; raise `TierUnusable`, or `StorageError` if refused."""
        with self._closed_by_errors():
            self._channel.send(_encode(opening))
            return decoded(decoder, _answer(self._received(self.files)))

    @contextmanager
    def _closed_by_errors(self) -> Iterator[None]:
        try:
            yield
        except (OSError, BrokenProtocol, Gone) as error:
            self.close()
            why = getattr(error, "strerror", None) or error
            hint = f"start it with `lmc serve --socket {self._path}`, as the same user or with --group"
            raise TierUnusable(f"no cache server answers at {self._path} ({why}): {hint}") from error
        except BaseException:
            self.close()
            raise

    def ask(self, question: Request) -> Any:
        """Return the answer; raise `Gone`, or `StorageError` for what the server cannot do."""
        with self._lock:
            return self._ask(question)

    def tell(self, question: Request) -> None:
        """Ask for something that has no answer; raise `Gone`."""
        with self._lock:
            self._send(question)

    def ask_if_idle(self, question: Request) -> Any:
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

    def _ask(self, question: Request) -> Any:
        self._send(question)
        try:
            return decoded(question.decoder, _answer(self._received()))
        except (OSError, BrokenProtocol) as error:
            raise Gone(str(error)) from error

    def _send(self, question: Request) -> None:
        try:
            self._channel.send(_encode(question))
        except (OSError, BrokenProtocol) as error:
            raise Gone(str(error)) from error

    def _received(self, files: list[int] | None = None) -> bytes:
        frame = self._channel.receive(files)
        if frame is None:
            raise Gone("the server has closed the connection")
        return frame


def _answer(frame: bytes) -> bytes:
    if frame[:1] != ANSWER:
        raise StorageError(frame[1:].decode())
    return frame[1:]


@dataclass(frozen=True, slots=True)
class Attachment:
    """What a client has of one server, until one of the two ends."""

    quick: ServerConnection  # for questions that are answered at once; everything that is held belongs to it
    slow: ServerConnection
    slab: Slab
    slots: int
    shared_places: frozenset[str]

    @classmethod
    def open(cls, path: Path, sizes: Attach, *, deadline: float, patience: float) -> "Attachment":
        """Attach to the server at a path; raise as `ServerConnection`, or `StorageError` if it refuses the sizes.

        Answers are awaited for `deadline` seconds, and those to slow questions for `patience`.
        """
        with ExitStack() as opened:
            quick = opened.enter_context(closing(ServerConnection(path, deadline)))
            attached = quick.open(sizes, _attached)
            opened.callback(_close, quick.files)
            slow = opened.enter_context(closing(ServerConnection(path, patience)))
            slow.open(sizes, _attached)
            opened.pop_all()
        _close(slow.files)  # It holds nothing.
        slab, lifeline = (f"/proc/{os.getpid()}/fd/{file}" for file in quick.files)
        at = SlabAddress(
            path=slab,
            slots=attached.slots,
            shares=sizes.shares,
            part_bytes=sizes.part_bytes,
            sparse=True,
            lifeline=lifeline,
        )
        return cls(quick, slow, Slab.attach(at), attached.slots, attached.shared_places)

    def hang_up(self) -> None:
        """End the connections. What is mapped stays so, because it may still be read or written."""
        self.quick.close()
        self.slow.close()

    def let_go(self) -> None:
        """Tell the server that nothing is written any more, as soon as no worker has the slab mapped either."""
        _close(self.quick.files)


def _close(files: list[int]) -> None:
    while files:
        os.close(files.pop())
