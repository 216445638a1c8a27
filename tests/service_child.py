"""A client of a cache server in a process of its own, which does what its standard input says, a line each.

`pin KEY` and `begin KEY` do so and print what came of it; `spawn SLOT` starts another process that maps the slab, like
a worker of the engine, and goes on to write into a slot when this one is killed.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

from service_fakes import SIZES
from storage_fakes import key_of, meta_of

from lmc.server.client.remote_store import RemoteStore
from lmc.storage.memory.slab import Slab, SlabAddress

WORKER = "worker"


def say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def work(path: str, lifeline: str, slots: str, slot: str) -> None:
    """Map the slab, say so, and write into a slot for ever."""
    at = SlabAddress(
        path=path, slots=int(slots), shares=SIZES.shares, part_bytes=SIZES.part_bytes, sparse=True, lifeline=lifeline
    )
    slab = Slab.attach(at)
    say("mapped", os.getpid())
    while True:
        slab.slot(int(slot)).fill_(255)  # type: ignore[arg-type]
        time.sleep(1e-3)


def main() -> None:
    store = RemoteStore(Path(sys.argv[1]), SIZES, deadline=10.0)
    say("attached")
    for line in sys.stdin:
        match line.split():
            case ["pin", number]:
                (pin,) = store.pin([key_of(int(number))])
                say("pinned" if pin else "missing")
            case ["begin", number]:
                (reservation,) = store.begin([meta_of(key_of(int(number)))])
                say(reservation.slot if reservation else "refused")
            case ["spawn", slot]:
                at = store.slab.address
                command = [sys.executable, __file__, WORKER, at.path, at.lifeline, str(at.slots), slot]
                worker = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
                assert worker.stdout is not None
                say(worker.stdout.readline().strip())
    store.close()


if __name__ == "__main__":
    work(*sys.argv[2:]) if sys.argv[1] == WORKER else main()
