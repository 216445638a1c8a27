"""Kills clients of a cache server, and the server, at random moments while clients store and read.

    python bench/serve_kills.py [--clients 8] [--client-kills 500] [--server-kills 50] [--keep]

The server keeps its memory in /dev/shm. Each client stores chunks whose bytes tell their keys, and looks at every byte
that it reads. When a server was killed, the next one is started, and it is measured how long it takes from when that
one listens until all clients are attached, and how many of the chunks in memory are found again.
"""

import hashlib
import logging
import multiprocessing
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from common import closing_line, parser

from lmc.errors import ChunkLost, TierUnusable
from lmc.keys import ChunkKey, RecordKind
from lmc.server.client.connection import status
from lmc.server.client.remote_store import RemoteStore
from lmc.shapes import GIB
from lmc.storage.chunk_layout import ChunkLayout
from lmc.storage.contract import PinState
from lmc.storage.tiers.record import RecordMeta
from lmc.storage.worker_parts import Parallelism

sys.path.append(str(Path(__file__).parent.parent / "tests"))
from service_process import ServerProcess

SIZES = ChunkLayout(Parallelism((2,)), 1 << 14, 2)
SLOTS, KEYS = 2048, 2400
SAID = ("read", "wrong", "lost", "stored", "refused", "away")
SECONDS = 60.0  # that anything may take


def meta_of(number: int) -> RecordMeta:
    key = ChunkKey(hashlib.sha256(b"%d" % number).digest())
    kind, namespace = RecordKind.PAGES, bytes(32)
    return RecordMeta(key=key, kind=kind, namespace=namespace, tokens=16, first=0, parts=2, part_bytes=SIZES.part_bytes)


def byte_of(number: int, part: int) -> int:
    return (number * 31 + part * 7) % 251


def turn(store: RemoteStore, number: int) -> str:
    """Read a chunk if it is there, and store it otherwise; return what came of it."""
    meta = meta_of(number)
    (pin,) = store.pin([meta.key])
    if pin is not None:
        right = False
        with suppress(ChunkLost):
            right = all(bool((store.part(pin, part) == byte_of(number, part)).all()) for part in range(2))
        lost = store.state(pin) is not PinState.READY
        store.release([pin])
        return "lost" if lost else ("read" if right else "wrong")
    (slot,) = store.begin([meta])
    if slot is None:
        return "away" if store.attachment is None else "refused"
    for part in range(2):
        store.view(slot)[part] = byte_of(number, part)
    store.commit([slot])
    return "stored"


def client(path: Path, seed: int, counts: Any) -> None:
    logging.disable(logging.WARNING)  # It says whenever the server is away.
    dice = random.Random(seed)
    store = None
    while store is None:
        with suppress(TierUnusable):  # The server has just been killed.
            store = RemoteStore(path, SIZES, deadline=10.0)
    while True:
        done = turn(store, dice.randrange(KEYS))
        with counts.get_lock():
            counts[SAID.index(done)] += 1
        time.sleep(0.02 if done == "away" else 1e-3)


class Clients:
    """Client processes that are killed and started again."""

    def __init__(self, path: Path, number: int) -> None:
        self._path, self._seed, self.counts = path, 0, [multiprocessing.Array("q", len(SAID)) for _ in range(number)]
        self._processes = [self._start(one) for one in range(number)]

    def _start(self, number: int) -> multiprocessing.Process:
        self._seed += 1
        # A lock that a killed client had is never free again.
        old, self.counts[number] = list(self.counts[number].get_obj()), multiprocessing.Array("q", len(SAID))
        self.counts[number].get_obj()[:] = old
        process = multiprocessing.Process(
            target=client, args=(self._path, self._seed, self.counts[number]), daemon=True
        )
        process.start()
        return process

    def kill(self, number: int, *, again: bool = True) -> None:
        process = self._processes[number]
        if process.exitcode not in (None, -signal.SIGKILL):
            raise SystemExit(f"a client has ended by itself, with status {process.exitcode}")
        process.kill()
        process.join()
        if again:
            self._processes[number] = self._start(number)

    def end(self) -> None:
        for number in range(len(self._processes)):
            self.kill(number, again=False)

    def done(self, number: int) -> int:
        return sum(self.counts[number].get_obj())

    def said(self, what: str) -> int:
        return sum(one.get_obj()[SAID.index(what)] for one in self.counts)


@contextmanager
def served(number: int, *options: str) -> Iterator[tuple[ServerProcess, Clients]]:
    """Run a server with options and clients. Its memory has fewer slots than the clients have keys."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as ending:
        server = ServerProcess(Path(folder), *options, max_local_cpu_size=SLOTS * SIZES.slot_bytes / GIB)
        ending.callback(server.kill)
        clients = Clients(server.path, number)  # before this process has threads
        ending.callback(clients.end)
        yield server, clients


def wait_for(condition: Callable[[], bool], what: str) -> float:
    """Return how long it took until something is so."""
    started = time.monotonic()
    while True:
        with suppress(TierUnusable):
            if condition():
                return time.monotonic() - started
        if time.monotonic() - started > SECONDS:
            raise SystemExit(f"after {SECONDS:g} s still not so: {what}")
        time.sleep(0.005)


def kill_servers(
    server: ServerProcess, store: RemoteStore, clients: Clients, kills: int, attached: int
) -> dict[str, float]:
    dice, seconds, kept, started = random.Random(1), [], [], []
    for _ in range(kills):
        before = clients.said("read")
        wait_for(lambda before=before: clients.said("read") > before + 200, "clients read")  # type: ignore[misc]
        time.sleep(1.0 + dice.random())
        there = len(store.known_keys())
        server.kill()
        at = time.monotonic()
        server.start()
        started.append(time.monotonic() - at)
        seconds.append(wait_for(lambda: status(server.path).clients == attached, "all clients are attached again"))
        found = int(re.findall(r"(\d+) chunks are in memory from before", server.log)[-1])
        kept.append(found / there)
    return {
        "attached_s": round(max(seconds), 2),
        "started_s": round(max(started), 2),
        "kept_least": round(min(kept), 4),
        "kept": round(sum(kept) / len(kept), 4),
    }


def main() -> None:
    options = parser(__doc__, "serve_kills")
    options.add_argument("--clients", type=int, default=8)
    options.add_argument("--client-kills", type=int, default=500)
    options.add_argument("--server-kills", type=int, default=50)
    given = options.parse_args()
    memory = Path("/dev/shm") / f"lmc-kills-{os.getpid()}"
    try:
        with served(given.clients, "--memory", str(memory)) as (server, clients):
            store = RemoteStore(server.path, SIZES, deadline=10.0)
            attached = 2 * (given.clients + 1)
            wait_for(lambda: status(server.path).clients == attached, "all clients are attached")
            wait_for(lambda: len(store.known_keys()) > 0.9 * SLOTS, "memory is full")
            result = kill_servers(server, store, clients, given.server_kills, attached)
            dice = random.Random(2)
            for _ in range(given.client_kills):
                time.sleep(dice.random() * 0.1)
                clients.kill(dice.randrange(given.clients))
            clients.end()
            wait_for(lambda: status(server.path).clients == 2, "no lease of a killed client is left")
            held = store.held()
            store.close()
    finally:
        shutil.rmtree(memory, ignore_errors=True)
    said = {what: clients.said(what) for what in SAID}
    assert not said["wrong"]
    assert not held
    kills = {"client_kills": given.client_kills, "server_kills": given.server_kills, "held": held}
    closing_line({"bench": "serve_kills", **kills, **result, **said}, "serve_kills" if given.keep else None)


if __name__ == "__main__":
    main()
