"""Clients of a cache server, and the server, are killed at random moments. No wrong byte is read, and nothing leaks.

SERVICE_KILLS says how many clients are killed, and a tenth as many servers; few here, so that the tests stay short.
"""

import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
from ledger_check import check_store
from service_fakes import attached, eventually, serving
from service_process import ServerProcess
from storage_fakes import PART_BYTES, PARTS
from test_service import arena_of

from lmc.service.attachment import status
from lmc.shapes import GIB

KILLS, CLIENTS, SLOTS = int(os.environ.get("SERVICE_KILLS", "40")), 6, 12
SERVER_KILLS = max(5, KILLS // 10)
MEMORY = SLOTS * PARTS * PART_BYTES / GIB


class Storm:
    """Clients that are killed and started again, and what they have said."""

    def __init__(self, path: Path) -> None:
        self._path, self._numbers, self.said = path, iter(range(1, 1 << 30)), Counter[str]()
        self._clients: list[subprocess.Popen[str]] = []
        self._readers: list[threading.Thread] = []
        for _ in range(CLIENTS):
            self._clients.append(self._start())

    def _start(self) -> subprocess.Popen[str]:
        child = Path(__file__).parent / "service_storm_child.py"
        command = [sys.executable, str(child), str(self._path), str(next(self._numbers))]
        client = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        self._readers.append(threading.Thread(target=self._listen, args=(client,), daemon=True))
        self._readers[-1].start()
        return client

    def _listen(self, client: subprocess.Popen[str]) -> None:
        assert client.stdout is not None
        with client.stdout:
            for line in client.stdout:
                self.said[line.strip()] += 1

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
        said = storm.end()
        eventually(lambda: server.clients == 0)
        store = arena_of(server).store
        assert store.held() == 0
        check_store(store)
    assert said["wrong"] == 0, said
    assert said["read"] > 100
    assert said["stored"] > 20


def test_a_server_that_is_killed_serves_again_and_no_client_reads_a_wrong_byte(tmp_path, storm):
    dice, server = random.Random(8), ServerProcess(tmp_path, max_local_cpu_size=MEMORY)
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
