"""The servers of `redis_servers.py` are real: what they promise to the tests of the Redis tier."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import redis as redis_py
from redis.exceptions import AuthenticationError, ConnectionError, NoPermissionError, ResponseError, TimeoutError
from redis.sentinel import Sentinel
from redis_servers import RedisCluster, RedisServer, Sentinels, process_state, wait_until

pytest_plugins = ["redis_servers"]


def test_a_server_is_reached_by_tcp_and_by_its_socket(redis: RedisServer, redis_url: str) -> None:
    with redis_py.from_url(redis_url) as tcp, redis_py.from_url(redis.unix_url()) as unix:
        tcp.set("a", b"\x00\xff")
        assert unix.get("a") == b"\x00\xff"
        assert redis.client().keys() == [b"a"]


def test_each_test_finds_the_shared_server_running_and_empty(redis: RedisServer) -> None:
    redis.client().set("a", 1)
    redis.pause()
    redis.fresh()
    assert redis.client().dbsize() == 0
    redis.kill()
    redis.fresh()
    assert redis.client().dbsize() == 0


def test_a_paused_server_keeps_its_connections_and_goes_on(redis: RedisServer) -> None:
    with redis_py.Redis(port=redis.port, socket_timeout=0.1, retry=None) as client:
        client.set("a", 1)
        redis.pause()
        with pytest.raises(TimeoutError):
            client.get("a")
        redis.resume()
        assert client.get("a") == b"1"


def test_a_killed_server_refuses_and_is_empty_when_restarted(redis: RedisServer) -> None:
    client = redis.client()
    client.set("a", 1)
    port, first = redis.port, redis.process
    redis.kill()
    with pytest.raises(ConnectionError):
        client.get("a")
    redis.restart()
    assert (redis.port, client.dbsize()) == (port, 0)
    assert redis.process is not first


def test_tls_is_verified_against_the_ca(tmp_path: Path) -> None:
    with RedisServer(tmp_path, tls=True) as server:
        with redis_py.from_url(server.tls_url(), ssl_ca_certs=str(server.ca), ssl_check_hostname=True) as trusting:
            assert trusting.ping()
        with (
            redis_py.from_url(server.tls_url(), retry=None) as strange,
            pytest.raises(ConnectionError, match="CERTIFICATE"),
        ):
            strange.ping()


def test_a_password_and_the_rights_of_users_are_kept(tmp_path: Path) -> None:
    with RedisServer(tmp_path, password="s3cret", users=["reader on >other ~* +@read"]) as server:
        assert server.client().set("a", 1)
        for url in (server.tcp_url(), server.unix_url()):
            with redis_py.from_url(url) as client:
                assert client.get("a") == b"1"
        with redis_py.from_url(server.tcp_url(password="wrong")) as client, pytest.raises(AuthenticationError):
            client.ping()
        with redis_py.from_url(server.tcp_url(user="reader", password="other")) as client:
            assert client.get("a") == b"1"
            with pytest.raises(NoPermissionError):
                client.set("a", 2)


def test_memory_databases_and_further_directives_are_set(tmp_path: Path) -> None:
    extra = ["maxclients 77"]
    with RedisServer(tmp_path, maxmemory="10mb", policy="allkeys-lru", databases=2, extra=extra) as server:
        seen = [server.ask("CONFIG", "GET", name)[1] for name in ("maxmemory", "maxmemory-policy", "maxclients")]
        assert seen == [b"10485760", b"allkeys-lru", b"77"]
        with redis_py.from_url(server.tcp_url(db=2)) as client, pytest.raises(ResponseError, match="out of range"):
            client.ping()


def test_a_server_that_cannot_start_shows_its_log(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="no-such-directive"):
        RedisServer(tmp_path, extra=["no-such-directive 1"])


def test_a_server_dies_with_its_tests_even_when_they_are_killed_and_it_is_paused(tmp_path: Path) -> None:
    program = (
        "import os, pathlib, signal, redis_servers\n"
        f"server = redis_servers.RedisServer(pathlib.Path({str(tmp_path)!r}))\n"
        "server.pause()\n"
        "print(server.process.pid, server.socket, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    child = subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).parent, capture_output=True, check=False)
    assert child.returncode == -9, child.stderr.decode()
    pid, path = child.stdout.decode().split()
    wait_until(lambda: process_state(int(pid)) in ("", "Z"), "the server's end", 5)
    shutil.rmtree(Path(path).parent)


def test_a_cluster_spreads_keys_and_survives_the_loss_of_a_node(tmp_path: Path) -> None:
    with RedisCluster(tmp_path) as cluster:
        client = cluster.client()
        for number in range(30):
            client.set(f"key{number}", number)
        assert [client.get(f"key{number}") for number in range(30)] == [b"%d" % number for number in range(30)]
        assert all(node.client().dbsize() for node in cluster.nodes)
        assert sum(node.client().dbsize() for node in cluster.nodes) == 30
        assert cluster.url() == "redis-cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in cluster.nodes)
        lost = next(n for n in range(30) if cluster.node_of(f"key{n}") is cluster.nodes[2])
        kept = next(n for n in range(30) if cluster.node_of(f"key{n}") is cluster.nodes[0])
        cluster.kill(2)
        cluster.wait_ok()
        assert client.get(f"key{kept}") == b"%d" % kept
        cluster.nodes[2].restart()
        wait_until(lambda: cluster.client().get(f"key{lost}") is None, "an empty node that is back")


def test_a_cluster_with_replicas_gives_a_dead_masters_slots_to_its_replica(tmp_path: Path) -> None:
    with RedisCluster(tmp_path, replicas=1, password="s3cret") as cluster:
        client = cluster.client()
        client.set("a", 1)
        client.wait(1, 1000, target_nodes=client.get_node_from_key("a"))
        owner = cluster.nodes.index(cluster.node_of("a"))
        assert owner < 3
        heir = cluster.failover(owner)
        assert heir is cluster.nodes[owner + 3]
        assert cluster.node_of("a") is heir
        assert cluster.client().get("a") == b"1"


@pytest.mark.parametrize("password", [None, "s3cret"])
def test_sentinels_announce_the_replica_when_the_master_dies(tmp_path: Path, password: str | None) -> None:
    with Sentinels(tmp_path, password=password) as group:
        assert group.url().endswith(f"127.0.0.1:{group.sentinels[2][1]}/mymaster/0")
        watch = Sentinel(group.sentinels)
        with watch.master_for(group.service, password=password) as client:
            client.set("a", 1)
            assert client.wait(1, 1000) == 1
            old = group.master
            new = group.failover()
            assert new is not old
            assert client.get("a") == b"1"
            assert client.set("a", 2)
        for sentinel in watch.sentinels:
            sentinel.close()
