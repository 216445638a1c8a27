"""Cache servers for tests, and stores that are attached to them."""

import multiprocessing
import threading
import time
from contextlib import contextmanager

import storage_fakes
from forked import Forked
from storage_fakes import PART_BYTES, PARTS

from lmc.config.settings import Settings
from lmc.server.client import remote_store
from lmc.server.client.remote_store import RemoteStore
from lmc.server.server import CacheServer
from lmc.shapes import GIB, aligned
from lmc.storage.chunk_layout import ChunkLayout
from lmc.storage.worker_parts import Parallelism

remote_store.BEAT_SECONDS = 0.1  # so that no test waits long for a client that attaches again
SIZES = ChunkLayout(Parallelism((PARTS,)), PART_BYTES, 1)


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


def arena_for(server, store):
    """The server's memory of the size that a client has asked for."""
    sizes = store.slab.parts, store.slab.part_bytes
    (arena,) = (one for one in server.arenas.all() if (one.store.slab.parts, one.store.slab.part_bytes) == sizes)
    return arena


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
        import service_child  # which has the sizes of this module

        self.process, self._pipe = self._start(service_child.main, server.path)
        assert self._pipe.recv() == "attached"
        self._worker = service_child.worker

    def _start(self, function, *given):
        ours, theirs = multiprocessing.Pipe()
        process = Forked(function, *given, theirs)
        theirs.close()
        return process, ours

    def ask(self, line):
        self._pipe.send(line)
        return self._pipe.recv()

    def spawn(self, slot):
        """Start a worker that writes into a slot until it is killed, also after this client."""
        worker, told = self._start(self._worker, self.ask("address"), slot)
        with told:
            assert told.recv() == "mapped"
        return worker

    def kill(self):
        self.process.kill()
        self.process.wait()
        self._pipe.close()


def beat(store):
    """Send the heartbeat of a client now. Tests that need this have none meanwhile: `BEAT_SECONDS` is long."""
    store._beat(store.attachment)


def eventually(condition, seconds=60.0):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it does not come true"
        time.sleep(1e-3)
