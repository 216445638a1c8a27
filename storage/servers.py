"""The servers of a Redis, of whatever kind: connections, discovery, TLS and logins by redis-py, and a circuit breaker for each."""

import contextlib
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode, RedisCluster
from redis.crc import key_slot
from redis.exceptions import RedisClusterException
from redis.retry import Retry
from redis.sentinel import Sentinel

from lmc.errors import TierUnusable
from lmc.remote import Remote
from lmc.storage.breaker import Breaker
from lmc.storage.wire import ProtocolError, ReplyError, Wire, WrongValue, command

# Refusals that say something of the server rather than of the command.
MOVED = ("MOVED", "ASK")
FOR_NOW = (*MOVED, "READONLY", "CLUSTERDOWN", "TRYAGAIN", "MASTERDOWN", "LOADING", "BUSY")
AWAY = (*FOR_NOW, "NOAUTH", "NOPERM")
TROUBLES = (OSError, redis.RedisError, RedisClusterException, ReplyError)
# What redis-py raises when something that is no Redis answers its greeting.
GARBAGE = (ValueError, TypeError, LookupError, AttributeError, AssertionError, RecursionError)


class _Held:
    """A thread's connection, which ends with the thread."""

    def __init__(self, wire: Wire, let_go: Callable[[Wire], None]) -> None:
        self.wire, self._let_go = wire, let_go

    def __del__(self) -> None:
        self._let_go(self.wire)


class Server:
    """One server: a connection for each thread that asks it."""

    def __init__(
        self,
        name: str,
        pool: redis.ConnectionPool,
        deadline: float,
        greet: Callable[[Wire], None],
        lost: Callable[[], None] = lambda: None,
    ) -> None:
        """`greet` is what a new acquaintance begins with; `lost` is called each time that it cannot be made."""
        self.name = name
        self.breaker = Breaker(name, self._meet)
        self._secret = pool.connection_kwargs.get("password")
        self._pool, self._deadline, self._greet, self._lost = pool, deadline, greet, lost
        self._local = threading.local()
        # It may be taken anew by the thread that has it: the collector ends connections, whatever that thread is at.
        self._mutex = threading.RLock()
        self._looking = threading.Lock()
        self._wires: dict[Wire, redis.Connection] = {}

    @property
    def usable(self) -> bool:
        """Whether it is worth asking."""
        return self.breaker.usable

    @contextlib.contextmanager
    def wire(self, *, within: float = float("inf")) -> Iterator[Wire]:
        """This thread's connection. An error inside closes it, counts against the server, and leaves as `OSError`.

        So does an answer that takes longer than `within` seconds, but that it is an answer. A refused command leaves as `ReplyError`,
        unless the refusal says that the server as a whole is of no use now.
        """
        if not self.usable:
            self._drop_wire()  # answers may be on their way
            raise OSError(f"{self.name} is away")
        started = time.monotonic()
        try:
            wire = self._wire()
            wire.heard = False
            yield wire
        except TROUBLES as error:
            self._drop_wire()
            if isinstance(error, ReplyError) and error.code not in AWAY:
                raise
            trouble = _as_os_error(self.name, error, self._secret)
            if isinstance(error, ReplyError) and error.code in MOVED:
                self._look_again()  # it is not to blame
            else:
                self.breaker.failed(trouble)
            raise trouble from None
        except WrongValue:
            self.breaker.worked()
            raise
        except BaseException:
            self._drop_wire()  # who knows what is on its way
            raise
        else:
            if time.monotonic() - started > within:
                self.breaker.failed(OSError(f"{self.name} answers slowly"))
            elif wire.heard:  # not if something was only sent
                self.breaker.worked()

    def _look_again(self) -> None:
        """Ask for a cluster's new map beside all else, once at a time."""
        if self._looking.acquire(blocking=False):

            def look() -> None:
                try:
                    self._lost()
                finally:
                    self._looking.release()

            try:
                threading.Thread(target=look, name="lmc-redis-map", daemon=True).start()
            except RuntimeError:  # no thread is to be had now
                self._looking.release()

    def retire(self) -> None:
        """It has left the cluster: nobody asks it any more, and nobody tries. Whoever waits on a connection fails at once."""
        self.breaker.stop()
        with self._mutex:
            wires = list(self._wires)
        for wire in wires:
            wire.close()
            # Threads would keep theirs, and the pool, which a successor under this name gets, has only so many.
            self._let_go(wire)

    def close(self) -> None:
        """Close all connections."""
        self.retire()
        self.breaker.close(2 * self._deadline)
        self.retire()  # what the breaker's thread has made meanwhile

    def _wire(self) -> Wire:
        held: _Held | None = getattr(self._local, "held", None)
        if held is not None and held.wire in self._wires and held.wire.alive():
            return held.wire
        held = None
        self._drop_wire()  # closed by the server while nobody used it
        wire = self._connect()
        self._local.held = _Held(wire, self._let_go)
        return wire

    def _connect(self) -> Wire:
        try:
            connection = self._pool.get_connection()
        except GARBAGE as error:
            raise ProtocolError(f"no Redis: {type(error).__name__}") from None
        try:
            assert connection._sock is not None  # redis-py has no public name for it; tests would notice a change
            wire = Wire(connection._sock, self._deadline)
        except BaseException:
            connection.disconnect()
            raise
        with self._mutex:
            self._wires[wire] = connection
        return wire

    def _drop_wire(self) -> None:
        self._local.held = None  # and with it the connection

    def _let_go(self, wire: Wire) -> None:
        with self._mutex:
            connection = self._wires.pop(wire, None)
        if connection is not None:
            connection.disconnect()
            self._pool.release(connection)

    def _meet(self) -> None:
        wire = None
        try:
            wire = self._connect()
            self._greet(wire)
        except TROUBLES as error:
            self._lost()
            raise _said(self.name, error, self._secret) from None
        finally:
            if wire is not None:
                self._let_go(wire)


class Servers:
    """All servers of a Redis: one, or a cluster's primaries."""

    def __init__(self, remote: Remote, deadline: float, greet: Callable[[Wire], None], about: bytes) -> None:
        """Meet them; raise `TierUnusable` for a login, a database or a certificate that is refused. One that is away comes later.

        `greet` is called with a connection to a server that is new, or was away; it asks for the key `about`.
        """
        self._remote, self._deadline, self._greet, self._about = remote, deadline, greet, about
        self._nodes: dict[str, Server] = {}
        self._cluster: RedisCluster | None = None
        self._map: dict[int, str] = {}  # of a cluster: slot -> node
        self._names: list[str] = [""] if remote.kind != "cluster" else []
        self._mutex = threading.Lock()
        self._closed = False
        if remote.kind == "cluster":
            self._breaker = Breaker(str(remote), self._find_cluster)
        else:
            server = self._nodes[""] = Server(str(remote), self._pool(), deadline, greet)
            self._breaker = server.breaker
        try:
            self._breaker.start()
        except BaseException:
            self.close()
            raise

    def of(self, key: bytes) -> Server | None:
        """The server that has `key`; None if nobody knows now."""
        if self._remote.kind != "cluster":
            return self._nodes[""]
        return self._nodes.get(self._map.get(key_slot(key), ""))

    def all(self) -> list[Server]:
        """Every server that chunks may be on."""
        return [self._nodes[name] for name in self._names if name in self._nodes]

    @property
    def usable(self) -> bool:
        """Whether any is worth asking."""
        return any(server.usable for server in self.all())

    def look_again(self) -> None:
        """Get a cluster's map anew, if anybody there can tell it."""
        with self._mutex, contextlib.suppress(*TROUBLES, *GARBAGE):
            if self._cluster is not None and not self._closed:
                self._cluster.nodes_manager.initialize()
                self._take_map(self._cluster)

    def close(self) -> None:
        """Close all connections."""
        self._closed = True
        for server in list(self._nodes.values()):
            server.breaker.stop()  # all of them, before any is waited for
        for server in list(self._nodes.values()):
            server.close()
        self._breaker.close(2 * self._deadline)
        if self._cluster is not None:
            self._cluster.close()

    # -- clusters ----------------------------------------------------------------------------------------------------

    def _find_cluster(self) -> None:
        nodes = [ClusterNode(address.host, address.port) for address in self._remote.hosts]
        try:
            # The hosts of the URL stay the ones to start from: a cluster may come back under new addresses.
            cluster = RedisCluster(
                startup_nodes=nodes, require_full_coverage=False, dynamic_startup_nodes=False, **self._options()
            )
        except TROUBLES as error:
            raise _said(str(self._remote), error, self._remote.password) from None
        except GARBAGE as error:  # nodes that have no slots yet
            raise OSError(f"{self._remote}: no cluster yet ({type(error).__name__})") from None
        with self._mutex:
            self._take_map(cluster)
        owner = self.of(self._about)
        try:
            if owner is not None:
                with owner.wire() as wire:
                    self._greet(wire)
        except (*TROUBLES, TierUnusable) as error:
            with self._mutex:  # nothing is asked of it before it was met
                for node in self._nodes.values():
                    node.retire()
                self._nodes, self._map, self._names = {}, {}, []
            cluster.close()
            if isinstance(error, TierUnusable):
                raise
            raise _said(str(self._remote), error, self._remote.password) from None
        self._cluster = cluster

    def _take_map(self, cluster: RedisCluster) -> None:
        for node in cluster.get_primaries():
            if node.name not in self._nodes:
                pool = cluster.get_redis_connection(node).connection_pool
                name = f"Redis at {node.name}"
                self._nodes[node.name] = Server(name, pool, self._deadline, self._greet_node, self.look_again)
        # A map of our own: theirs is locked while it is made anew.
        self._map = {slot: nodes[0].name for slot, nodes in cluster.nodes_manager.slots_cache.items() if nodes}
        self._names = sorted(set(self._map.values()))
        for name in self._nodes.keys() - set(self._names):
            self._nodes.pop(name).retire()

    def _greet_node(self, wire: Wire) -> None:
        # A node of a cluster that is down would answer a PING; that a key is another's is an answer.
        (answer,) = wire.call_all([command("EXISTS", self._about)])
        if isinstance(answer, ReplyError) and answer.code not in MOVED:
            raise answer
        self.look_again()  # what has changed meanwhile?

    # -- connections -------------------------------------------------------------------------------------------------

    def _pool(self) -> redis.ConnectionPool:
        remote, options = self._remote, self._options()
        if remote.kind == "unix":
            return redis.ConnectionPool(redis.UnixDomainSocketConnection, path=remote.path, db=remote.db, **options)
        if remote.kind == "sentinel":
            # Sentinels are asked one after the other when a connection is made: one deadline for all of them together.
            patience = self._deadline / len(remote.hosts)
            own = {**self._options(login=False), "socket_timeout": patience, "socket_connect_timeout": patience}
            sentinel = Sentinel([tuple(host) for host in remote.hosts], sentinel_kwargs=own)
            pool: redis.ConnectionPool = sentinel.master_for(remote.service, db=remote.db, **options).connection_pool
            return pool
        host, port = remote.hosts[0]
        kind = redis.SSLConnection if options.pop("ssl", False) else redis.Connection
        return redis.ConnectionPool(kind, host=host, port=port, db=remote.db, **options)

    def _options(self, *, login: bool = True) -> dict[str, Any]:
        options: dict[str, Any] = {
            "socket_timeout": self._deadline,
            "socket_connect_timeout": self._deadline,
            "retry": Retry(NoBackoff(), 0),
            "protocol": 2,
            "client_name": "lmc",
        }
        if login:
            options |= {"username": self._remote.username, "password": self._remote.password}
        if self._remote.tls:
            options |= {"ssl": True, **dict(self._remote.options)}
        return options


def _text(name: str, error: Exception, secret: str | None) -> str:
    # A server that does not know a command says what it was given with it; of AUTH that is the password.
    said = str(error).partition(", with args beginning with")[0]
    return f"{name}: {said.replace(secret, '***') if secret else said}"


def _as_os_error(name: str, error: Exception, secret: str | None) -> OSError:
    kind = TimeoutError if isinstance(error, TimeoutError | redis.TimeoutError) else OSError
    return kind(_text(name, error, secret))


def _said(name: str, error: Exception, secret: str | None) -> OSError | TierUnusable:
    """Of a first meeting: `TierUnusable` for what waiting does not mend (a login, a permission, a database, a certificate)."""
    if isinstance(error, ReplyError) and error.code not in FOR_NOW:
        return TierUnusable(_text(name, error, secret))
    seen: BaseException | None = error
    while seen is not None:
        refused = isinstance(seen, redis.AuthenticationError | redis.ResponseError)
        refused = refused and str(seen).partition(" ")[0] not in FOR_NOW
        if (refused and not isinstance(seen, redis.exceptions.ClusterError)) or isinstance(
            seen, ssl.SSLCertVerificationError
        ):
            return TierUnusable(_text(name, error, secret))
        seen = seen.__cause__ or seen.__context__
    return _as_os_error(name, error, secret)
