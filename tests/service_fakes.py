"""Cache servers for tests, and stores that are attached to them."""

import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import storage_fakes
from storage_fakes import PART_BYTES, PARTS

from lmc.config.settings import Settings
from lmc.server.client.remote_store import RemoteStore
from lmc.server.server import CacheServer
from lmc.server.sizes import Sizes
from lmc.shapes import GIB, aligned
from lmc.storage.shares import Shares

SIZES = Sizes(Shares((PARTS,)), PART_BYTES, 1)


@contextmanager
def serving(folder, slots, tiers=(), memory=None, page_locked=False, **settings):
    """A server in a thread of this process, with memory for so many small chunks."""
    budget = slots * PARTS * aligned(PART_BYTES) / GIB
    settings = Settings(**{"max_local_cpu_size": budget, **settings})
    server = CacheServer(settings, folder / "lmc.sock", tiers=tiers, memory=memory, page_locked=page_locked)
    thread = threading.Thread(target=server.serve, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.close()
        thread.join(60)


def attached(server, sizes=SIZES, deadline=10.0):
    return RemoteStore(server.path, sizes, deadline=deadline)


def arena_of(server, sizes=SIZES):
    return server.arenas.open(sizes)


def put(store, key):
    """Store a chunk, and return when other clients can find it."""
    done = storage_fakes.put(store, key)
    store.held()  # The server answers after it has done what it was told before.
    return done


def filled(store, keys):
    return [key for key in keys if put(store, key)]


class Child:
    """A client in a process of its own."""

    def __init__(self, server):
        command = [sys.executable, str(Path(__file__).parent / "service_child.py"), str(server.path)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout.readline() == "attached\n"

    def ask(self, line):
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def kill(self):
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


def eventually(condition, seconds=60.0):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it does not come true"
        time.sleep(1e-3)
