"""Connections to the servers of any kind of Redis, with a circuit breaker for each server.

redis-py makes the connections: it handles addresses, sentinels, the map of a cluster, TLS and logins. `resp.py` handles
the data on a connection.
"""

import contextlib
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import redis
from redis import ConnectionPool
from redis._parsers import _RESP2Parser
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode, RedisCluster
from redis.crc import key_slot
from redis.exceptions import ClusterError, RedisClusterException
from redis.retry import Retry
from redis.sentinel import Sentinel

from lmc.config.redis_url import RedisURL
from lmc.errors import TierUnusable
from lmc.storage.tiers.breaker import Breaker
from lmc.storage.tiers.redis.resp import Connection, ProtocolError, ReplyError, TooLong, WrongValue, command

# Codes of refusals that concern the server, and not the command.
MOVED = ("MOVED", "ASK")
FOR_NOW = (*MOVED, "READONLY", "CLUSTERDOWN", "TRYAGAIN", "MASTERDOWN", "LOADING", "BUSY")
AWAY = (*FOR_NOW, "NOAUTH", "NOPERM")
TROUBLES = (OSError, redis.RedisError, RedisClusterException)
REFUSALS = (ReplyError, redis.AuthenticationError, redis.ResponseError)
# redis-py raises these errors if a program other than Redis replies to its greeting.
GARBAGE = (ValueError, TypeError, LookupError, AttributeError, AssertionError, RecursionError, OverflowError)


Greet: TypeAlias = Callable[[Connection], None]


class _OfThread:
    """A thread's connection, which is given back when the thread ends."""

    def __init__(self, connection: Connection, give_back: Callable[[Connection], None]) -> None:
        self.connection, self._give_back = connection, give_back

    def __del__(self) -> None:
        self._give_back(self.connection)


class Server:
    """One server, with a connection for each thread that uses it."""

    def __init__(
        self, name: str, pool: ConnectionPool, deadline: float, greet: Greet, lost: Callable[[], None] = lambda: None
    ) -> None:
        """Create a server without a connection.

        `greet` is called with a new connection after the server did not respond. `lost` is called whenever a new
        contact fails.
        """
        self.name = name
        # hiredis would allocate memory for all items that a reply announces, before the first item arrives.
        pool.connection_kwargs["parser_class"] = _RESP2Parser
        self.breaker = Breaker(name, self._greet_again)
        self._secret = pool.connection_kwargs.get("password")
        self._pool, self._deadline, self._greet, self._lost = pool, deadline, greet, lost
        self._local = threading.local()
        self._connections: dict[Connection, redis.Connection] = {}

    @property
    def usable(self) -> bool:
        """Whether the server may be used."""
        return self.breaker.usable

    @contextlib.contextmanager
    def connection(self, *, within: float = float("inf")) -> Iterator[Connection]:
        """Use this thread's connection.

        An error in the block closes it, counts as a failure of the server, and is raised as an `OSError`. A block that
        takes longer than `within` seconds also counts as a failure. A refused command raises `ReplyError`. It counts
        only if the refusal concerns the server as a whole.
        """
        if not self.usable:
            self._drop()  # Replies may still be in flight.
            raise OSError(f"{self.name} is away")
        started = time.monotonic()
        try:
            connection = self._of_this_thread()
            connection.heard = False
            yield connection
        except (WrongValue, TooLong):  # The server responds; only the stored data is wrong.
            self.breaker.worked()
            raise
        except TROUBLES as error:
            self._drop()
            if isinstance(error, ReplyError) and error.code not in AWAY:
                raise ReplyError(str(error), self.name) from None
            trouble = _as_os_error(self.name, error, self._secret)
            if isinstance(error, ReplyError) and error.code in MOVED:
                self._refresh_map()  # The server responds; only the map is stale.
            else:
                self.breaker.failed(trouble)
            raise trouble from None
        except BaseException:
            self._drop()  # Replies may still be in flight.
            raise
        else:
            if time.monotonic() - started > within:
                self.breaker.failed(OSError(f"{self.name} answers slowly"))
            elif connection.heard:  # A block that only sends says nothing about the server.
                self.breaker.worked()

    def retire(self) -> None:
        """Stop using the server, because it has left the cluster. Calls that wait on a connection fail at once."""
        self.breaker.close()
        # Otherwise threads would keep connections of the pool, which has a limited number. A later server of this name
        # uses the same pool.
        for connection in list(self._connections):
            self._give_back(connection)

    def close(self) -> None:
        """Close all connections."""
        self.retire()
        self.breaker.close(2 * self._deadline)
        self.retire()  # again, because the breaker's thread may have opened another connection

    def _of_this_thread(self) -> Connection:
        held: _OfThread | None = getattr(self._local, "held", None)
        # The server may have closed the connection while it was idle.
        if held is None or not held.connection.alive():
            held = self._local.held = _OfThread(self._connect(), self._give_back)
        return held.connection

    def _connect(self) -> Connection:
        try:
            made = self._pool.get_connection()
        except GARBAGE as error:
            raise ProtocolError(f"no Redis: {type(error).__name__}") from None
        try:
            assert made._sock is not None  # redis-py has no public name for the socket. Tests would notice a change.
            connection = Connection(made._sock, self._deadline)
        except BaseException:
            made.disconnect()
            raise
        self._connections[connection] = made
        return connection

    def _drop(self) -> None:
        self._local.held = None  # Its finaliser gives the connection back.

    def _give_back(self, connection: Connection) -> None:
        made = self._connections.pop(connection, None)
        if made is not None:
            made.disconnect()
            self._pool.release(made)

    def _greet_again(self) -> None:
        try:
            connection = self._connect()
            try:
                self._greet(connection)
            finally:
                self._give_back(connection)
        except TROUBLES as error:
            self._lost()
            raise _first_trouble(self.name, error, self._secret) from None

    def _refresh_map(self) -> None:
        """Refresh the cluster's map in a new thread."""
        with contextlib.suppress(RuntimeError):  # No thread can be started now.
            threading.Thread(target=self._lost, name="lmc-redis-map", daemon=True).start()


class Servers:
    """All servers of a Redis: one, or the primaries of a cluster."""

    def __init__(self, remote: RedisURL, deadline: float, greet: Greet, about: bytes) -> None:
        """Make the first contact.

        A server that does not respond is used as soon as it responds. `greet` is called with a connection to a server
        that is new or did not respond before, and reads the key `about`. Raises `TierUnusable` if a login, a database
        or a certificate is refused.
        """
        self._remote, self._deadline, self._greet, self._about = remote, deadline, greet, about
        self._nodes: dict[str, Server] = {}  # by name: the nodes of a cluster, or one server with an empty name
        self._cluster: RedisCluster | None = None
        self._map: dict[int, str] = {}  # for a cluster: hash slot -> name of its node
        self._refreshing = threading.Lock()
        if remote.kind == "cluster":
            self._breaker = Breaker(str(remote), self._find_cluster)
        else:
            server = self._nodes[""] = Server(str(remote), self._client().connection_pool, deadline, greet)
            self._breaker = server.breaker
        try:
            self._breaker.start()
        except BaseException:
            self.close()
            raise

    def of(self, key: bytes) -> Server | None:
        """Return the server for `key`, or None if it is unknown or not usable now."""
        server = self._nodes.get(self._map.get(key_slot(key), "") if self._map else "")
        return server if server is not None and server.usable else None

    def all(self) -> list[Server]:
        """Return every server that may have chunks."""
        return list(self._nodes.values())

    @property
    def usable(self) -> bool:
        """Whether any server may be used."""
        return any(server.usable for server in self.all())

    def refresh_map(self) -> None:
        """Fetch a cluster's map again, if any of its nodes responds and no other thread is fetching it."""
        cluster = self._cluster if self._breaker.usable else None
        if cluster is not None and self._refreshing.acquire(blocking=False):
            try:
                with contextlib.suppress(*TROUBLES, *GARBAGE):
                    cluster.nodes_manager.initialize()
                    self._take_map(cluster)
            finally:
                self._refreshing.release()

    def close(self) -> None:
        """Close all connections."""
        self._breaker.close()
        for server in self.all():
            server.breaker.close()  # close all breakers before waiting for any of them
        for server in self.all():
            server.close()
        self._breaker.close(2 * self._deadline)
        if self._cluster is not None:
            self._cluster.close()

    # -- clusters ----------------------------------------------------------------------------------------------------

    def _find_cluster(self) -> None:
        nodes = [ClusterNode(address.host, address.port) for address in self._remote.hosts]
        cluster = None
        try:
            # A search always starts from the hosts of the URL, because a cluster may come back under new addresses.
            cluster = RedisCluster(
                startup_nodes=nodes, require_full_coverage=False, dynamic_startup_nodes=False, **self._options()
            )
            self._take_map(cluster)
            owner = self.of(self._about)
            if owner is not None:
                with owner.connection() as connection:
                    self._greet(connection)
        except (*TROUBLES, *GARBAGE, TierUnusable) as error:
            for node in self.all():  # No node is used before the greeting has succeeded.
                node.retire()
            self._nodes, self._map = {}, {}
            if cluster is not None:
                cluster.close()
            raise _first_trouble(str(self._remote), error, self._remote.password) from None
        self._cluster = cluster

    def _take_map(self, cluster: RedisCluster) -> None:
        for node in cluster.get_primaries():
            if node.name not in self._nodes:
                pool = cluster.get_redis_connection(node).connection_pool
                name = f"Redis at {node.name}"
                self._nodes[node.name] = Server(name, pool, self._deadline, self._greet_node, self.refresh_map)
        # lmc keeps a copy of the map, because redis-py's map is locked while it is refreshed.
        self._map = {slot: nodes[0].name for slot, nodes in cluster.nodes_manager.slots_cache.items() if nodes}
        for name in self._nodes.keys() - set(self._map.values()):
            self._nodes.pop(name).retire()

    def _greet_node(self, connection: Connection) -> None:
        # PING would succeed on a node of a cluster that is down, so EXISTS is used. A reply that another node has the
        # key counts as a response.
        (answer,) = connection.call_all([command("EXISTS", self._about)])
        if isinstance(answer, ReplyError) and answer.code not in MOVED:
            raise answer
        self.refresh_map()  # The map may have changed meanwhile.

    # -- connections -------------------------------------------------------------------------------------------------

    def _client(self) -> redis.Redis:
        remote, options = self._remote, self._options()
        if remote.kind == "sentinel":
            # Sentinels are contacted one after the other, within one deadline for all of them together.
            patience = self._deadline / len(remote.hosts)
            own = {**options, "socket_timeout": patience, "socket_connect_timeout": patience}
            sentinel = Sentinel(remote.hosts, sentinel_kwargs={**own, "username": None, "password": None})
            client: redis.Redis = sentinel.master_for(remote.service, db=remote.db, **options)
            return client
        where = {"unix_socket_path": remote.path} if remote.kind == "unix" else remote.hosts[0]._asdict()
        return redis.Redis(**where, db=remote.db, **options)

    def _options(self) -> dict[str, Any]:
        remote = self._remote
        options = {"socket_timeout": self._deadline, "socket_connect_timeout": self._deadline, "client_name": "lmc"}
        options |= {"retry": Retry(NoBackoff(), 0), "protocol": 2}
        options |= {"username": remote.username, "password": remote.password}
        return options | {"ssl": True, **dict(remote.options)} if remote.tls else options


def _as_os_error(name: str, error: BaseException, secret: str | None) -> OSError:
    """Translate an error of a connection into an `OSError` or `TimeoutError`, without the password."""
    below = error.__cause__ or error.__context__  # The library's text would repeat the address, which is in `name`.
    said = below.strerror if isinstance(error, redis.ConnectionError) and isinstance(below, OSError) else None
    # A server that does not know a command repeats its arguments. For AUTH, these include the password.
    said = said or str(error).partition(", with args beginning with")[0]
    kind = TimeoutError if isinstance(error, TimeoutError | redis.TimeoutError) else OSError
    return kind(f"{name}: {said.replace(secret, '***') if secret else said}")


def _first_trouble(name: str, error: BaseException, secret: str | None) -> OSError | TierUnusable:
    """Translate an error of a first contact.

    Permanent refusals (of a login, a permission, a database or a certificate) become `TierUnusable`.
    """
    if isinstance(error, TierUnusable):
        return error
    if not isinstance(error, TROUBLES):  # The nodes have no slots yet.
        return OSError(f"{name}: no cluster yet ({type(error).__name__})")
    trouble = _as_os_error(name, error, secret)
    seen: BaseException | None = error
    while seen is not None:
        refused = isinstance(seen, REFUSALS) and not isinstance(seen, ClusterError)
        refused = refused and str(seen).partition(" ")[0] not in FOR_NOW
        if refused or isinstance(seen, ssl.SSLCertVerificationError):
            return TierUnusable(str(trouble))
        seen = seen.__cause__ or seen.__context__
    return trouble
