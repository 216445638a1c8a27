"""The cache server: it owns memory and tiers, and answers the engines of a host over a unix socket.

Each client has a connection and a thread, so that a slow one holds up nobody else. A client that ends, is silent for
too long, or sends what it must not send loses its lease (`lease.py`), and nobody else notices.
"""

import logging
import os
import socket
import stat
import struct
import threading
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import msgspec

from lmc import __version__
from lmc.config import Settings
from lmc.errors import LmcError, TierUnusable
from lmc.service import messages as m
from lmc.service.arenas import Arenas, Sizes
from lmc.service.channel import ANSWER, ERROR, BrokenProtocol, Channel, decoded
from lmc.service.lease import Lease
from lmc.storage.record import PARTS_LIMIT
from lmc.storage.tier import Tier
from lmc.storage.tier_guard import TierGuard

log = logging.getLogger(__name__)

SILENT_SECONDS = 10.0  # after which a client counts as hung; it asks for something every second
ITEMS = (1, 2, 4)  # bytes of one number of the KV

_question: msgspec.msgpack.Decoder[m.Request] = msgspec.msgpack.Decoder(m.Question)
_hello: msgspec.msgpack.Decoder[m.Hello] = msgspec.msgpack.Decoder(m.Hello)
_opening: msgspec.msgpack.Decoder[m.Attach | m.Status] = msgspec.msgpack.Decoder(m.Opening)
_encode = msgspec.msgpack.Encoder().encode

complain = TierGuard().complain  # at most once a minute about the same


class CacheServer:
    """A store for the engines of a host."""

    def __init__(
        self, settings: Settings, path: Path, *, group: int | None = None, tiers: Sequence[Tier] | None = None
    ) -> None:
        """Listen at `path`, for processes of this user, of root, and of a `group`.

        Raises `TierUnusable` if another server listens there, and as `Arenas`.
        """
        self.path, self._group = path, group
        self._listener = _listener(path, group)
        try:
            self.arenas = Arenas(settings, tiers)
        except BaseException:
            self._listener.close()
            raise
        self._sessions: dict[Session, threading.Thread] = {}
        self._lock, self._closed = threading.Lock(), False

    def serve(self) -> None:
        """Answer clients until `close` is called."""
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if self._closed:
                    return
                raise
            if not self._may_attach(connection):
                connection.close()
                continue
            session = Session(self, Channel(connection))
            with self._lock:
                thread = threading.Thread(target=session.run, name="lmc-client", daemon=True)
                self._sessions[session] = thread
            thread.start()

    def stop(self) -> None:
        """Let `serve` return."""
        self._closed = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End all connections, write down what is in memory only, and close the tiers."""
        self.stop()
        self._listener.close()
        with self._lock:
            sessions = list(self._sessions)
        for session in sessions:
            session.hang_up()
        self.arenas.close()
        self.path.unlink(missing_ok=True)

    @property
    def clients(self) -> int:
        """How many connections have a lease, of those also that wait for processes to end."""
        with self._lock:
            return sum(session.attached for session in self._sessions)

    def status(self) -> m.ServerStatus:
        """Return how the server is."""
        budget = self.arenas.budget
        arenas = [
            m.ArenaStatus(sizes.shares.parts, sizes.part_bytes, budget.taken[sizes], store.held(), store.stats())
            for sizes, store in self.arenas.all()
        ]
        return m.ServerStatus(__version__, budget.size, self.clients, arenas)

    def ended(self, session: "Session") -> None:
        """Forget a client."""
        with self._lock:
            del self._sessions[session]

    def _may_attach(self, connection: socket.socket) -> bool:
        """Return whether the process at the other end is of our user, of root, or of the group."""
        size = struct.calcsize("3i")
        process, user, group = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
        allowed = user in (0, os.getuid()) or group == self._group
        if not allowed:
            log.warning("process %d of user %d may not attach (start the server with --group for it)", process, user)
        return allowed


class Session:
    """One client, in a thread of its own."""

    def __init__(self, server: CacheServer, channel: Channel) -> None:
        self._server, self._channel = server, channel
        self._lease: Lease | None = None

    def run(self) -> None:
        """Answer until the connection ends."""
        try:
            self._channel.set_timeout(SILENT_SECONDS)
            self._greet()
            opening = decoded(_opening, self._received())
            if isinstance(opening, m.Status):
                self._channel.send(ANSWER + _encode(self._server.status()))
                return
            lease = self._attach(opening)
            while (frame := self._channel.receive()) is not None:
                self._answer(decoded(_question, frame), lease)
        except TimeoutError:
            complain("silent", f"a client was silent for {SILENT_SECONDS:g} s, and has lost what it held")
        except (OSError, LmcError) as error:
            complain("closed", f"the connection to a client is closed: {error}")
        except Exception:
            log.exception("the connection to a client is closed, because of an error of the server")
        finally:
            self._channel.close()
            if self._lease is not None:
                self._lease.end()
            self._server.ended(self)

    @property
    def attached(self) -> bool:
        """Whether the client has a lease."""
        return self._lease is not None

    def hang_up(self) -> None:
        """End the connection from another thread."""
        self._channel.close()

    def _greet(self) -> None:
        theirs = decoded(_hello, self._received())
        refused = ""
        if theirs.protocol != m.PROTOCOL:
            both = f"the cache server is lmc {__version__} (protocol {m.PROTOCOL}), the client {theirs.version}"
            refused = f"{both} (protocol {theirs.protocol}): install the same version for both"
        self._channel.send(_encode(m.Hello(m.PROTOCOL, __version__, refused)))
        if refused:
            raise BrokenProtocol(refused)

    def _attach(self, asked: m.Attach) -> Lease:
        """Open the arena that the client wants, and send it the descriptors."""
        sizes = Sizes(asked.shares, asked.part_bytes, asked.item_bytes)
        if not (0 < sizes.shares.parts <= PARTS_LIMIT and sizes.part_bytes > 0 and sizes.item_bytes in ITEMS):
            raise BrokenProtocol(f"impossible sizes: {sizes}")
        try:
            arena = self._server.arenas.open(sizes)
        except LmcError as error:
            self._channel.send(ERROR + str(error).encode())
            raise
        self._lease = Lease(arena.store, arena.protected)
        answer = m.Attached(arena.store.slots, arena.store.shared_places)
        self._channel.send(ANSWER + _encode(answer), (arena.store.slab.file, self._lease.lifeline))
        self._lease.sent_lifeline()
        return self._lease

    def _answer(self, question: m.Request, lease: Lease) -> None:
        try:
            answer = ANSWER + _encode(question.asked(lease))
        except BrokenProtocol:
            raise
        except LmcError as error:
            answer = ERROR + str(error).encode()
            complain("refused", f"a client could not be served: {error}")
        if question.answered:
            self._channel.send(answer)

    def _received(self) -> bytes:
        frame = self._channel.receive()
        if frame is None:
            raise BrokenProtocol("it ended before it had attached")
        return frame


def _listener(path: Path, group: int | None) -> socket.socket:
    """Listen at a path; take the place of a server that has died, and raise `TierUnusable` if one lives."""
    try:
        if path.exists() and stat.S_ISSOCK(path.stat().st_mode):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe, suppress(ConnectionRefusedError):
                probe.connect(str(path))
                raise TierUnusable(f"a cache server listens at {path} already")
            path.unlink()
        with ExitStack() as opened:
            listener = opened.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            before = os.umask(0o177 if group is None else 0o117)
            try:
                listener.bind(str(path))
            finally:
                os.umask(before)
            if group is not None:
                os.chown(path, -1, group)
            listener.listen()
            opened.pop_all()
    except OSError as error:
        raise TierUnusable(f"cannot listen at {path}: {error.strerror or error}") from error
    return listener
