"""The cache server: it owns memory and tiers, and serves the engines of a host over a unix socket.

Each connection has its own thread, so a slow client delays no other client. A client loses its lease (`lease.py`) when
it ends, is silent for too long, or violates the protocol. This does not affect other clients.
"""

import logging
import os
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from lmc import __version__
from lmc.config.settings import Settings
from lmc.errors import LmcError
from lmc.server import messages as m
from lmc.server.arenas import Arenas
from lmc.server.channel import ERROR, OK, BrokenProtocol, Channel, decoded
from lmc.server.handshake import PROTOCOL, ArenaStatus, CheckIntegrity, Hello, Opening, Retire, ServerStatus, Status
from lmc.server.lease import Lease
from lmc.server.lifelines import Lifelines
from lmc.server.own_files import OwnFiles
from lmc.storage.chunk_layout import ChunkLayout
from lmc.storage.tiers.tier import Tier
from lmc.storage.tiers.tier_guard import TierGuard

log = logging.getLogger(__name__)

CLIENT_TIMEOUT_SECONDS = 10.0  # A client without a request for this time counts as hung; clients send one every second.
MAX_TOKENIZERS = 1000  # models whose tokenizer paths are remembered
MAX_SESSIONS = 1024  # connections, including those of ended clients with live processes
ACCEPT_PAUSE_SECONDS = 0.1  # after a connection that could not be accepted

_request: msgspec.msgpack.Decoder[m.Request] = msgspec.msgpack.Decoder(m.AnyRequest)
_hello: msgspec.msgpack.Decoder[Hello] = msgspec.msgpack.Decoder(Hello)
_opening: msgspec.msgpack.Decoder[Opening] = msgspec.msgpack.Decoder(Opening)
_encode = msgspec.msgpack.Encoder().encode

complain = TierGuard().complain  # logs each kind of problem at most once a minute


class Explainer(NamedTuple):
    """A client that explains prompts for its model."""

    model: str
    admin: str  # an address on this host
    token: str  # made by the client for this server


class CacheServer:
    """A chunk store for the engines of a host."""

    def __init__(
        self,
        settings: Settings,
        path: Path,
        *,
        group: int | None = None,
        memory: Path | None = None,
        page_locked: bool = False,
        tiers: Sequence[Tier] | None = None,
    ) -> None:
        """Listen at `path` for processes of this user, of root, and of a `group`.

        Chunks in `memory`, a directory on tmpfs, outlive the server. See `Arenas` for `page_locked`.
        Raises `TierUnusable` if another server listens at `path` or uses this memory, and the errors of `Arenas`.
        """
        self.path, self._group = path, group
        self._files = OwnFiles(path, group, memory)
        with ExitStack() as opened:
            opened.callback(self._files.close)
            self._listener = self._files.listener
            self.lifelines = Lifelines((memory or path.with_suffix(".d")) / "clients", group)
            self.arenas = Arenas(
                settings, self.lifelines, tiers=tiers, memory=memory, page_locked=page_locked, group=group
            )
            opened.pop_all()
        self._sessions: set[Session] = set()
        self._tokenizers: OrderedDict[str, str] = OrderedDict()  # by model, the most recently introduced one at the end
        self._lock = threading.Lock()
        self.ends = False  # whether the server is shutting down, and accepts no more clients

    def serve(self) -> None:
        """Accept and serve clients until `stop` or `close` is called."""
        self._files.used = True
        while True:
            try:
                connection, _ = self._listener.accept()
                self._admit(Channel(connection))
            except (OSError, RuntimeError) as error:  # too many open files or threads
                if self.ends:
                    return
                complain("connections", f"could not accept a client, will retry: {error}")
                time.sleep(ACCEPT_PAUSE_SECONDS)

    def _admit(self, channel: Channel) -> None:
        session = None
        try:
            session = Session(self, channel)
            if not self._may_attach(session):
                channel.close()
                return
            with self._lock:
                full = len(self._sessions) >= MAX_SESSIONS
                if not full:
                    self._sessions.add(session)
            if full:
                complain("full", f"refused a client: the limit of {MAX_SESSIONS} connections is reached")
                channel.close()
                return
            threading.Thread(target=session.run, name="lmc-client", daemon=True).start()
        except BaseException:
            if session is not None:
                self.ended(session)
            channel.close()
            raise

    def stop(self) -> None:
        """Make `serve` return, and accept no more connections."""
        self.ends = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close all connections, write chunks that are only in memory to the tiers, and close the tiers."""
        self.stop()
        with self._lock:
            sessions = list(self._sessions)
        for session in sessions:
            session.hang_up()
        self.arenas.close()
        self._files.close()

    @property
    def clients(self) -> int:
        """Number of connections with a lease, plus leases that wait until processes have ended."""
        with self._lock:
            return sum(session.attached for session in self._sessions)

    def attached(self) -> list[dict[str, Any]]:
        """Return the clients that have a lease, and what each holds."""
        with self._lock:
            sessions = list(self._sessions)
        return [client for session in sessions if (client := session.described())]

    def explainers(self) -> list[Explainer]:
        """Return the clients that explain prompts, in the order of their attachment."""
        with self._lock:
            sessions = sorted(self._sessions, key=lambda session: session.since)
        return [explainer for session in sessions if (explainer := session.explainer)]

    def tokenizers(self) -> dict[str, str]:
        """Return the tokenizer path of each model, as clients have introduced it."""
        with self._lock:
            return dict(self._tokenizers)

    def introduced(self, model: str, tokenizer: str) -> None:
        """Remember the tokenizer path of a model."""
        with self._lock:
            self._tokenizers[model] = tokenizer
            self._tokenizers.move_to_end(model)
            if len(self._tokenizers) > MAX_TOKENIZERS:
                self._tokenizers.popitem(last=False)

    def status(self) -> ServerStatus:
        """Return the status of the server."""
        budget = self.arenas.budget
        arenas = [
            ArenaStatus(
                arena.layout.parts,
                arena.layout.part_bytes,
                budget.taken[arena.layout],
                arena.store.held(),
                arena.store.stats(),
            )
            for arena in self.arenas.all()
        ]
        return ServerStatus(__version__, budget.size, self.clients, arenas)

    def check_integrity(self) -> list[str]:
        """Return a sentence for each inconsistency of the bookkeeping of all arenas."""
        return [
            f"chunks of {arena.layout.parts} x {arena.layout.part_bytes} bytes: {fault}"
            for arena in self.arenas.all()
            for fault in arena.store.check_integrity()
        ]

    def ended(self, session: "Session") -> None:
        """Forget the session of a client."""
        with self._lock:
            self._sessions.discard(session)

    def _may_attach(self, session: "Session") -> bool:
        """Return whether the client's process belongs to the server's user, to root, or to the group."""
        process, user, groups = session.peer
        allowed = user in (0, os.getuid()) or self._group in groups
        if not allowed:
            log.warning("refused process %d of user %d: start the server with --group to allow it", process, user)
        return allowed


class Session:
    """A client's connection, which runs in its own thread."""

    def __init__(self, server: CacheServer, channel: Channel) -> None:
        self._server, self._channel = server, channel
        self._lease: Lease | None = None
        self.peer, self.since = channel.peer(), time.time()

    def run(self) -> None:
        """Handle requests until the connection ends."""
        try:
            self._channel.set_timeout(CLIENT_TIMEOUT_SECONDS)
            refused = self._greet()
            opening = self._opening(refused)
            if isinstance(opening, Retire):
                if self.peer[1] not in (0, os.getuid()):
                    raise BrokenProtocol("only the server's user may end the server")
                log.info("another server took over")
                self._channel.send(OK + _encode(None))
                self._server.stop()
                return
            if isinstance(opening, Status):
                self._channel.send(OK + _encode(self._server.status()))
                return
            if isinstance(opening, CheckIntegrity):
                self._channel.send(OK + _encode(self._server.check_integrity()))
                return
            lease = self._attach(opening.layout)
            while (frame := self._channel.receive()) is not None:
                self._answer(decoded(_request, frame), lease)
        except TimeoutError:
            complain("silent", f"released everything of a client that was silent for {CLIENT_TIMEOUT_SECONDS:g} s")
        except (OSError, LmcError) as error:
            if not self._server.ends:  # A shutdown closes all connections.
                reason = getattr(error, "strerror", None) or error
                complain("closed", f"closed the connection to client process {self.peer[0]}: {reason}")
        except Exception:
            log.exception("closed the connection to a client after an unexpected error")
        finally:
            self._channel.close()
            try:
                self._end_lease()
            finally:
                self._server.ended(self)

    def _end_lease(self) -> None:
        if self._lease is not None:
            try:
                self._lease.end()
            finally:
                self._server.arenas.left(self._lease.arena)

    @property
    def attached(self) -> bool:
        """Whether the client has a lease."""
        return self._lease is not None

    def described(self) -> dict[str, Any]:
        """Return the client's identity and what it holds; empty before the client has introduced itself.

        A client's second connection, for slow requests, sends no introduction.
        """
        if self._lease is None or self._lease.model is None:
            return {}
        pinned, reserved = self._lease.held
        return {
            "process": self.peer[0],
            "user": self.peer[1],
            "model": self._lease.model,
            "admin": self._lease.admin,
            "attached": self.since,
            "pinned": pinned,
            "reserved": reserved,
            "hits": dict(self._lease.hits),
            "misses": self._lease.misses,
            "stored": self._lease.stored,
            "refused": self._lease.refused,
        }

    @property
    def explainer(self) -> Explainer | None:
        """The client's endpoint for explanations; None if it explains no prompts."""
        lease = self._lease
        if lease is None or lease.model is None or not lease.admin:
            return None
        return Explainer(lease.model, lease.admin, lease.explain_token)

    def hang_up(self) -> None:
        """Close the connection from another thread."""
        self._channel.close()

    def _greet(self) -> str:
        """Exchange versions with the client; return why it is refused, or "" if it is accepted."""
        theirs = decoded(_hello, self._received())
        refused = ""
        if theirs.protocol != PROTOCOL:
            versions = f"the cache server is lmc {__version__} (protocol {PROTOCOL}), the client {theirs.version}"
            refused = f"{versions} (protocol {theirs.protocol}): install the same version for both"
        self._channel.send(_encode(Hello(PROTOCOL, __version__, refused)))
        return refused

    def _opening(self, refused: str) -> Opening:
        """Return the purpose of the connection.

        With another version, a server may take over, but clients may not attach.
        """
        if not refused:
            return decoded(_opening, self._received())
        with suppress(OSError, BrokenProtocol):  # A refused client closes the connection.
            if isinstance(opening := decoded(_opening, self._received()), Retire):
                return opening
        raise BrokenProtocol(refused)

    def _attach(self, layout: ChunkLayout) -> Lease:
        """Open the arena for the client's chunks, and send the client the descriptor of the arena's memory."""
        if not layout.possible:
            raise BrokenProtocol("sent invalid chunk sizes")
        try:
            arena = self._server.arenas.open(layout)
            try:
                self._lease = Lease(arena, self._server.lifelines.new(), self._server.introduced)
            except BaseException:
                self._server.arenas.left(arena)
                raise
        except (LmcError, OSError) as error:
            self._channel.send(ERROR + str(error).encode())
            raise
        store = arena.store
        address = replace(store.slab.address, lifeline=str(self._lease.lifeline))
        response = m.Attached(address, store.shared_places, store.pins_yield, arena.changes.last)
        self._channel.send(OK + _encode(response), (store.slab.file,))
        return self._lease

    def _answer(self, request: m.Request, lease: Lease) -> None:
        try:
            response = OK + _encode(request.handle(lease))
        except BrokenProtocol:
            raise
        except LmcError as error:
            response = ERROR + str(error).encode()
            complain("refused", f"a client's request failed: {error}")
        if request.answered:
            self._channel.send(response)

    def _received(self) -> bytes:
        frame = self._channel.receive()
        if frame is None:
            raise BrokenProtocol("the connection ended before the client attached")
        return frame
