"""A client of a cache server in a process of its own, which does what it is told through a pipe, a line each.

`pin KEY` and `begin KEY` do so and answer what came of it; `address` answers where the slab is.
"""

import time
from multiprocessing.connection import Connection
from pathlib import Path

from service_fakes import SIZES
from storage_fakes import key_of, meta_of

from lmc.server.client.remote_store import RemoteStore
from lmc.storage.memory.slab import Slab, SlabAddress


def worker(address: SlabAddress, slot: int, told: Connection) -> None:
    """Map the slab as a worker of the engine does, say so, and write into a slot for ever."""
    slab = Slab.attach(address)
    told.send("mapped")
    while True:
        slab.slot(slot).fill_(255)
        time.sleep(1e-3)


def main(path: Path, told: Connection) -> None:
    store = RemoteStore(path, SIZES, deadline=10.0)
    told.send("attached")
    while True:
        match told.recv().split():
            case ["pin", number]:
                (pin,) = store.pin([key_of(int(number))])
                told.send("pinned" if pin else "missing")
            case ["begin", number]:
                (reservation,) = store.begin([meta_of(key_of(int(number)))])
                told.send(reservation.slot if reservation else None)
            case ["address"]:
                told.send(store.slab.address)
