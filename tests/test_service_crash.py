"""Clients of a cache server, and the server, are killed at random moments. No wrong byte is read, and nothing leaks.

SERVICE_KILLS says how many clients are killed, and a tenth as many servers; few here, so that the tests stay short.
"""

import multiprocessing
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import service_storm_child
from forked import Forked
from service_fakes import Child, arena_of, attached, eventually, filled, put, serving
from service_process import ServerProcess
from storage_fakes import PART_BYTES, PARTS, expected, get, key_of, meta_of

from lmc.config.settings import Settings
from lmc.errors import TierUnusable
from lmc.server.client.connection import status
from lmc.server.server import CacheServer
from lmc.shapes import GIB

KILLS, CLIENTS, SLOTS = int(os.environ.get("SERVICE_KILLS", "12")), 4, 12
FITTING = SLOTS - 1  # While the server allocates memory for a slot ahead, one chunk more would evict another.
SERVER_KILLS = max(3, KILLS // 10)
MEMORY = SLOTS * PARTS * PART_BYTES / GIB


class Storm:
    """Clients that are killed and started again, and what they have said."""

    def __init__(self, path: Path) -> None:
        self._path, self._numbers, self.said = path, iter(range(1, 1 << 30)), Counter[str]()
        self._clients: list[Forked] = []
        self._readers: list[threading.Thread] = []
        for _ in range(CLIENTS):
            self._clients.append(self._start())

    def _start(self) -> Forked:
        told, tells = multiprocessing.Pipe(duplex=False)
        client = Forked(service_storm_child.main, self._path, next(self._numbers), tells)
        tells.close()
        self._readers.append(threading.Thread(target=self._listen, args=(told,), daemon=True))
        self._readers[-1].start()
        return client

    def _listen(self, told: Connection) -> None:
        with told, suppress(EOFError):
            while True:
                self.said[told.recv()] += 1

    def kill(self, number: int, *, again: bool = True) -> None:
        """Kill a client, and start another one."""
        self._clients[number].kill()
        self._clients[number].wait()
        if again:
            self._clients[number] = self._start()

    def end(self) -> Counter[str]:
        """Kill all of them, and return what was said."""
        for number in range(CLIENTS):
            self.kill(number, again=False)
        for reader in self._readers:
            reader.join(60)
        return self.said


@pytest.fixture
def storm():
    storms = []

    def storm(path):
        storms.append(Storm(path))
        return storms[-1]

    yield storm
    for one in storms:
        one.end()


def test_clients_that_are_killed_leave_nothing_held_and_no_wrong_byte(tmp_path, storm):
    dice = random.Random(7)
    with serving(tmp_path, SLOTS) as server:
        storm = storm(server.path)
        eventually(lambda: storm.said["read"] > 50)
        for _ in range(KILLS):
            time.sleep(dice.random() * 0.1)
            storm.kill(dice.randrange(CLIENTS))
        before = storm.said["read"]
        eventually(lambda: storm.said["read"] > before + 50)  # Those that live go on.
        eventually(lambda: storm.said["stored"] > 20)
        said = storm.end()
        eventually(lambda: server.clients == 0)
        store = arena_of(server).store
        assert store.held() == 0
        assert store.check_integrity() == []
    assert said["wrong"] == 0, said
    assert said["read"] > 100
    assert said["stored"] > 20


def test_a_server_that_is_killed_serves_again_and_no_client_reads_a_wrong_byte(tmp_path, storm):
    dice, server = random.Random(8), ServerProcess(tmp_path, forked=True, max_local_cpu_size=MEMORY)
    try:
        storm = storm(server.path)
        eventually(lambda: status(server.path).clients == 2 * CLIENTS)
        for _ in range(SERVER_KILLS):
            before = storm.said["read"]
            eventually(lambda before=before: storm.said["read"] > before + 20)
            time.sleep(dice.random() * 0.2)
            server.kill()
            server.start()
            eventually(lambda: status(server.path).clients == 2 * CLIENTS)  # They attach again by themselves.
        said = storm.end()
        store = attached(server)
        eventually(lambda: store.held() == 0)
        store.close()
    finally:
        server.kill()
    assert said["wrong"] == 0, said
    assert said["away"] > 0


# -- memory that outlives the server ---------------------------------------------------------------------------------


@pytest.fixture
def memory(tmp_path):
    """A directory on tmpfs."""
    folder = Path("/dev/shm") / f"lmc-test-{os.getpid()}-{tmp_path.name[-20:]}"
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def serve(tmp_path):
    """Starts servers, and kills them at the end."""
    servers = []

    def serve(*options):
        servers.append(ServerProcess(tmp_path, *options, forked=True, max_local_cpu_size=MEMORY))
        return servers[-1]

    yield serve
    for server in servers:
        server.kill()


def noted(memory):
    """How many chunks the journal has."""
    (journal,) = memory.glob("*.chunks")
    content, count = journal.read_bytes(), 0
    while content:
        content, count = content[4 + int.from_bytes(content[:4], "little") :], count + 1
    return count


@pytest.mark.parametrize("how", ["killed", "ended"])
def test_memory_outlives_a_server(serve, memory, how):
    keys = [key_of(i) for i in range(FITTING)]
    server = serve("--memory", str(memory))
    store = attached(server)
    assert filled(store, keys) == keys
    eventually(lambda: noted(memory) == FITTING)  # Checksums are computed beside the work.
    if how == "killed":
        server.kill()
    else:
        assert server.stop() == 0
    server.start()
    eventually(lambda: store.attachment is not None and store.lookup(keys) == ["host"] * FITTING)
    assert [get(store, key) for key in keys] == [expected(key) for key in keys]
    assert put(store, key_of(99)), "it is used like any other memory"
    eventually(lambda: status(server.path).arenas[0].memory == SLOTS * PARTS * PART_BYTES)
    store.close()


def test_a_chunk_that_was_changed_or_is_not_whole_is_not_kept(serve, memory):
    """A killed server leaves a slot that a client is filling, and somebody has changed a byte of another one."""
    server = serve("--memory", str(memory))
    store = attached(server)
    assert filled(store, map(key_of, range(3)))
    (begun,) = store.begin([meta_of(key_of(3))])
    (pin,) = store.pin([key_of(1)])
    eventually(lambda: noted(memory) == 3)
    store.part(pin, PARTS - 1)[5] ^= 1
    server.kill()
    eventually(lambda: store.attachment is None)
    server.start()
    store.commit([begun])
    store.release([pin])
    eventually(lambda: store.attachment is not None)
    assert store.lookup(list(map(key_of, range(4)))) == ["host", None, "host", None]
    store.close()


def test_a_late_write_of_a_client_of_the_killed_server_harms_nobody(serve, memory):
    """The client's worker still writes into a reserved slot, which the next server does not use meanwhile."""
    server = serve("--memory", str(memory))
    child = Child(server)
    worker = child.spawn(child.ask("begin 0"))
    try:
        server.kill()
        child.kill()
        server.start()
        store = attached(server)
        assert not put(store, key_of(1)), "all slots are quarantined"
    finally:
        worker.kill()
    keys = [key_of(i) for i in range(FITTING)]
    for key in keys:
        eventually(lambda key=key: put(store, key))
    assert [get(store, key) for key in keys] == [expected(key) for key in keys]
    store.close()


def test_another_server_takes_over_while_clients_work(serve, memory, storm):
    options = "--memory", str(memory)
    server = serve(*options)
    storm = storm(server.path)
    eventually(lambda: status(server.path).clients == 2 * CLIENTS)
    eventually(lambda: storm.said["read"] > 50)
    first = server.process
    server.options = *options, "--takeover"
    server.start()
    assert first.wait(60) == 0
    assert "chunks of an earlier server in memory" in server.log
    eventually(lambda: status(server.path).clients == 2 * CLIENTS)
    before = storm.said["read"]
    eventually(lambda: storm.said["read"] > before + 50)
    assert storm.end()["wrong"] == 0


def test_memory_on_a_disk_is_warned_of(memory, tmp_path, monkeypatch, caplog):
    def start(name):
        CacheServer(Settings(max_local_cpu_size=MEMORY), tmp_path / name, memory=memory, tiers=[]).close()
        return f"{memory} is on a disk" in caplog.text

    assert not start("one.sock")
    monkeypatch.setattr("lmc.storage.memory.memory_files.IN_MEMORY", ())  # as if it were none of these kinds
    assert start("other.sock")


def test_a_server_that_is_told_to_end_while_it_starts_ends(tmp_path):
    """In a container it would get no other signal than the one that kills it, minutes later."""
    code = """
import os, signal, sys
from lmc.commands.cli import main
from lmc.server import server

def starting(*_, **__):
    os.kill(os.getpid(), signal.SIGTERM)
    raise AssertionError("it goes on")

server.CacheServer = starting
sys.argv[1:] = ["serve", "--socket", sys.argv[1]]
main()
"""
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "lmc.sock"], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_directory_of_another_user_is_not_taken_for_memory(memory, tmp_path, monkeypatch):
    memory.mkdir(exist_ok=True)
    if os.getuid() == 0:
        os.chown(memory, 65534, -1)
    else:  # as if we were somebody else
        owner = os.getuid()
        monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    with pytest.raises(TierUnusable, match="belongs to user"):
        CacheServer(Settings(max_local_cpu_size=MEMORY), tmp_path / "lmc.sock", memory=memory, tiers=[])


def test_a_second_server_is_refused_and_memory_of_another_size_is_removed(tmp_path, serve, memory):
    server = serve("--memory", str(memory))
    store = attached(server)
    put(store, key_of(0))
    with pytest.raises(TierUnusable, match="another cache server uses the memory"):
        CacheServer(Settings(max_local_cpu_size=MEMORY), tmp_path / "other.sock", memory=memory)
    assert server.stop() == 0
    store.close()
    with_more = CacheServer(Settings(max_local_cpu_size=2 * MEMORY), tmp_path / "lmc.sock", memory=memory, tiers=[])
    assert (with_more.arenas.all(), list(memory.glob("*.slab"))) == ([], [])
    with_more.close()
