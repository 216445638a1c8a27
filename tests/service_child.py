"""A client of a cache server in a process of its own, which does what it is told through a pipe, a line each.

`pin KEY` and `begin KEY` do so and answer what came of it; `address` answers where the slab is.
"""

import os
import time
from multiprocessing.connection import Connection
from pathlib import Path

from service_fakes import SIZES, put
from storage_fakes import expected, get, key_of, meta_of

from lmc.server.client.remote_store import RemoteStore
from lmc.storage.memory.slab import Slab, SlabAddress


def attach_as_a_member(path: Path, group: int) -> None:
    """Store and read a chunk as another user, who is in a group and has no other rights."""
    os.setgroups([group])
    os.setgid(65534)
    os.setuid(65534)
    store = RemoteStore(path, SIZES, deadline=10.0)
    assert put(store, key_of(0))
    assert get(store, key_of(0)) == expected(key_of(0))
    Slab.attach(store.slab.address)  # as a worker does


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
