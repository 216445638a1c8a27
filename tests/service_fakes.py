"""Cache servers for tests, and stores that are attached to them."""

import threading
import time
from contextlib import contextmanager

import storage_fakes
from storage_fakes import PART_BYTES, PARTS

from lmc.config import Settings
from lmc.service.messages import Attach
from lmc.service.remote_store import RemoteStore
from lmc.service.server import CacheServer
from lmc.shapes import GIB, aligned
from lmc.storage.shares import Shares

SIZES = Attach(Shares((PARTS,)), PART_BYTES, 1)


@contextmanager
def serving(folder, slots, tiers=(), **settings):
    """A server in a thread of this process, with memory for so many small chunks."""
    budget = slots * PARTS * aligned(PART_BYTES) / GIB
    server = CacheServer(Settings(**{"max_local_cpu_size": budget, **settings}), folder / "lmc.sock", tiers=tiers)
    thread = threading.Thread(target=server.serve, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.close()
        thread.join(60)


def attached(server, sizes=SIZES, deadline=10.0):
    return RemoteStore(server.path, sizes, deadline=deadline)


def put(store, key):
    """Store a chunk, and return when other clients can find it."""
    done = storage_fakes.put(store, key)
    store.held()  # The server answers after it has done what it was told before.
    return done


def eventually(condition, seconds=60.0):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it does not come true"
        time.sleep(1e-3)
