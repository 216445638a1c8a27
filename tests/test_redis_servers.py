"""The servers of `redis_servers.py` are real: what they promise to the tests of the Redis tier.

Clusters, sentinels, TLS and rights are shown by those tests.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import redis as redis_py
from redis.exceptions import ConnectionError, TimeoutError
from redis_servers import RedisServer, process_state, wait_until

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
