"""Connections to the servers of a Redis, of whatever kind, and a circuit breaker for each server.

redis-py makes the connections: addresses, sentinels, the map of a cluster, TLS and logins are its business. What goes
through a connection is `resp.py`'s.
"""

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
from redis.exceptions import ClusterError, RedisClusterException
from redis.retry import Retry
from redis.sentinel import Sentinel

from lmc.errors import TierUnusable
from lmc.redis_url import RedisURL
from lmc.storage.redis.breaker import Breaker
from lmc.storage.redis.resp import Connection, ProtocolError, ReplyError, WrongValue, command

# Refusals that say something about the server, and not about the command.
MOVED = ("MOVED", "ASK")
FOR_NOW = (*MOVED, "READONLY", "CLUSTERDOWN", "TRYAGAIN", "MASTERDOWN", "LOADING", "BUSY")
AWAY = (*FOR_NOW, "NOAUTH", "NOPERM")
TROUBLES = (OSError, redis.RedisError, RedisClusterException, ReplyError)
# redis-py raises these when something that is no Redis answers its greeting.
GARBAGE = (ValueError, TypeError, LookupError, AttributeError, AssertionError, RecursionError)


class _OfThread:
    """A thread's connection, which is given back when the thread ends."""

    def __init__(self, connection: Connection, give_back: Callable[[Connection], None]) -> None:
        self.connection, self._give_back = connection, give_back

    def __del__(self) -> None:
        self._give_back(self.connection)


class Server:
    """One server, with a connection for each thread that asks it."""

    def __init__(
        self,
        name: str,
        pool: redis.ConnectionPool,
        deadline: float,
        greet: Callable[[Connection], None],
        lost: Callable[[], None] = lambda: None,
    ) -> None:
        """`greet` is called with a new connection after the server was away; `lost` whenever it cannot be reached."""
        self.name = name
        self.breaker = Breaker(name, self._greet_again)
        self._secret = pool.connection_kwargs.get("password")
        self._pool, self._deadline, self._greet, self._lost = pool, deadline, greet, lost
        self._local = threading.local()
        # The lock is re-entrant because the garbage collector may end a connection while the same thread holds it.
        self._mutex = threading.RLock()
        self._refreshing = threading.Lock()
        self._connections: dict[Connection, redis.Connection] = {}

    @property
    def usable(self) -> bool:
        """Whether the server is asked at all."""
        return self.breaker.usable

    @contextlib.contextmanager
    def connection(self, *, within: float = float("inf")) -> Iterator[Connection]:
        """Use this thread's connection.

        An error in the block closes it, counts against the server, and is raised as an `OSError`. An answer that takes
        longer than `within` seconds counts against the server as well. A refused command is a `ReplyError`, unless the
        refusal says that the server as a whole cannot be used now.
        """
        if not self.usable:
            self._drop()  # Answers may still be on their way.
            raise OSError(f"{self.name} is away")
        started = time.monotonic()
        try:
            connection = self._of_this_thread()
            connection.heard = False
            yield connection
        except TROUBLES as error:
            self._drop()
            if isinstance(error, ReplyError) and error.code not in AWAY:
                raise
            trouble = _as_os_error(self.name, error, self._secret)
            if isinstance(error, ReplyError) and error.code in MOVED:
                self._refresh_map()  # The server is not to blame.
            else:
                self.breaker.failed(trouble)
            raise trouble from None
        except WrongValue:
            self.breaker.worked()
            raise
        except BaseException:
            self._drop()  # Answers may still be on their way.
            raise
        else:
            if time.monotonic() - started > within:
                self.breaker.failed(OSError(f"{self.name} answers slowly"))
            elif connection.heard:  # Something may only have been sent.
                self.breaker.worked()

    def retire(self) -> None:
        """Use the server no more, as it has left the cluster. Whoever waits on a connection fails at once."""
        self.breaker.stop()
        with self._mutex:
            connections = list(self._connections)
        for connection in connections:
            connection.close()
            # Threads would keep theirs, and the pool, which the next server of this name gets, has a limited number.
            self._give_back(connection)

    def close(self) -> None:
        """Close all connections."""
        self.retire()
        self.breaker.close(2 * self._deadline)
        self.retire()  # The breaker's thread may have made another one.

    def _of_this_thread(self) -> Connection:
        held: _OfThread | None = getattr(self._local, "held", None)
        if held is not None and held.connection in self._connections and held.connection.alive():
            return held.connection
        held = None
        self._drop()  # The server may have closed it while nobody used it.
        connection = self._connect()
        self._local.held = _OfThread(connection, self._give_back)
        return connection

    def _connect(self) -> Connection:
        try:
            made = self._pool.get_connection()
        except GARBAGE as error:
            raise ProtocolError(f"no Redis: {type(error).__name__}") from None
        try:
            assert made._sock is not None  # redis-py has no public name for it. The tests would notice a change.
            connection = Connection(made._sock, self._deadline)
        except BaseException:
            made.disconnect()
            raise
        with self._mutex:
            self._connections[connection] = made
        return connection

    def _drop(self) -> None:
        self._local.held = None  # Its finaliser gives the connection back.

    def _give_back(self, connection: Connection) -> None:
        with self._mutex:
            made = self._connections.pop(connection, None)
        if made is not None:
            made.disconnect()
            self._pool.release(made)

    def _greet_again(self) -> None:
        connection = None
        try:
            connection = self._connect()
            self._greet(connection)
        except TROUBLES as error:
            self._lost()
            raise _first_trouble(self.name, error, self._secret) from None
        finally:
            if connection is not None:
                self._give_back(connection)

    def _refresh_map(self) -> None:
        """Get a cluster's new map in a thread of its own, one at a time."""
        if not self._refreshing.acquire(blocking=False):
            return

        def refresh() -> None:
            try:
                self._lost()
            finally:
                self._refreshing.release()

        try:
            threading.Thread(target=refresh, name="lmc-redis-map", daemon=True).start()
        except RuntimeError:  # No thread can be started now.
            self._refreshing.release()


class Servers:
    """All servers of a Redis: one, or the primaries of a cluster."""

    def __init__(self, remote: RedisURL, deadline: float, greet: Callable[[Connection], None], about: bytes) -> None:
        """Make a first contact.

        A server that is away is used as soon as it comes. `greet` is called with a connection to a server that is new
        or was away, and asks for the key `about`. Raises `TierUnusable` if a login, a database or a certificate is
        refused.
        """
        self._remote, self._deadline, self._greet, self._about = remote, deadline, greet, about
        self._nodes: dict[str, Server] = {}
        self._cluster: RedisCluster | None = None
        self._map: dict[int, str] = {}  # of a cluster: hash slot -> node
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
        """Return the server that has `key`, or None if that is not known now."""
        if self._remote.kind != "cluster":
            return self._nodes[""]
        return self._nodes.get(self._map.get(key_slot(key), ""))

    def all(self) -> list[Server]:
        """Return every server that chunks may be on."""
        return [self._nodes[name] for name in self._names if name in self._nodes]

    @property
    def usable(self) -> bool:
        """Whether any server is worth asking."""
        return any(server.usable for server in self.all())

    def refresh_map(self) -> None:
        """Get a cluster's map anew, if any of its nodes answers."""
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
            # A search always starts from the hosts of the URL, because a cluster may come back under new addresses.
            cluster = RedisCluster(
                startup_nodes=nodes, require_full_coverage=False, dynamic_startup_nodes=False, **self._options()
            )
        except TROUBLES as error:
            raise _first_trouble(str(self._remote), error, self._remote.password) from None
        except GARBAGE as error:  # The nodes have no slots yet.
            raise OSError(f"{self._remote}: no cluster yet ({type(error).__name__})") from None
        with self._mutex:
            self._take_map(cluster)
        owner = self.of(self._about)
        try:
            if owner is not None:
                with owner.connection() as connection:
                    self._greet(connection)
        except (*TROUBLES, TierUnusable) as error:
            with self._mutex:  # No node is asked for anything before the greeting.
                for node in self._nodes.values():
                    node.retire()
                self._nodes, self._map, self._names = {}, {}, []
            cluster.close()
            if isinstance(error, TierUnusable):
                raise
            raise _first_trouble(str(self._remote), error, self._remote.password) from None
        self._cluster = cluster

    def _take_map(self, cluster: RedisCluster) -> None:
        for node in cluster.get_primaries():
            if node.name not in self._nodes:
                pool = cluster.get_redis_connection(node).connection_pool
                name = f"Redis at {node.name}"
                self._nodes[node.name] = Server(name, pool, self._deadline, self._greet_node, self.refresh_map)
        # redis-py's map is locked while it is made anew, so lmc has a copy.
        self._map = {slot: nodes[0].name for slot, nodes in cluster.nodes_manager.slots_cache.items() if nodes}
        self._names = sorted(set(self._map.values()))
        for name in self._nodes.keys() - set(self._names):
            self._nodes.pop(name).retire()

    def _greet_node(self, connection: Connection) -> None:
        # A node of a cluster that is down would answer a PING. That another node has the key is an answer as well.
        (answer,) = connection.call_all([command("EXISTS", self._about)])
        if isinstance(answer, ReplyError) and answer.code not in MOVED:
            raise answer
        self.refresh_map()  # The map may have changed meanwhile.

    # -- connections -------------------------------------------------------------------------------------------------

    def _pool(self) -> redis.ConnectionPool:
        remote, options = self._remote, self._options()
        if remote.kind == "unix":
            return redis.ConnectionPool(redis.UnixDomainSocketConnection, path=remote.path, db=remote.db, **options)
        if remote.kind == "sentinel":
            # Sentinels are asked one after the other, within one deadline for all of them together.
            patience = self._deadline / len(remote.hosts)
            own = {**self._options(login=False), "socket_timeout": patience, "socket_connect_timeout": patience}
            sentinel = Sentinel([tuple(host) for host in remote.hosts], sentinel_kwargs=own)
            pool: redis.ConnectionPool = sentinel.master_for(remote.service, db=remote.db, **options).connection_pool
            return pool
        host, port = remote.hosts[0]
        kind = redis.SSLConnection if options.pop("ssl", False) else redis.Connection
        return redis.ConnectionPool(kind, host=host, port=port, db=remote.db, **options)

    def _options(self, *, login: bool = True) -> dict[str, Any]:
        options: dict[str, Any] = {"socket_timeout": self._deadline, "socket_connect_timeout": self._deadline}
        options |= {"retry": Retry(NoBackoff(), 0), "protocol": 2, "client_name": "lmc"}
        if login:
            options |= {"username": self._remote.username, "password": self._remote.password}
        if self._remote.tls:
            options |= {"ssl": True, **dict(self._remote.options)}
        return options


def _as_os_error(name: str, error: Exception, secret: str | None) -> OSError:
    """Translate an error of a connection, without the password."""
    # A server that does not know a command repeats its arguments, which for AUTH include the password.
    said = str(error).partition(", with args beginning with")[0]
    kind = TimeoutError if isinstance(error, TimeoutError | redis.TimeoutError) else OSError
    return kind(f"{name}: {said.replace(secret, '***') if secret else said}")


def _first_trouble(name: str, error: Exception, secret: str | None) -> OSError | TierUnusable:
    """Translate an error of a first contact.

    Refusals that will not change by themselves (a login, a permission, a database, a certificate) are `TierUnusable`.
    """
    trouble = _as_os_error(name, error, secret)
    if isinstance(error, ReplyError) and error.code not in FOR_NOW:
        return TierUnusable(str(trouble))
    seen: BaseException | None = error
    while seen is not None:
        refused = isinstance(seen, redis.AuthenticationError | redis.ResponseError)
        refused = refused and str(seen).partition(" ")[0] not in FOR_NOW and not isinstance(seen, ClusterError)
        if refused or isinstance(seen, ssl.SSLCertVerificationError):
            return TierUnusable(str(trouble))
        seen = seen.__cause__ or seen.__context__
    return trouble
