"""A client of a cache server that stores and reads chunks until it is killed, and checks every byte that it reads.

It tells through a pipe what it has done, and `wrong` for bytes that are not those of their key.
"""

import random
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

from service_fakes import SIZES
from storage_fakes import PARTS, as_tensor, content, key_of, meta_of, pin_bytes

from lmc.errors import ChunkLost
from lmc.keys import ChunkKey
from lmc.server.client.remote_store import RemoteStore
from lmc.storage.contract import Pin, PinState

KEYS = 30


def read(store: RemoteStore, key: ChunkKey, pin: Pin, dice: random.Random) -> str:
    """Read a chunk slowly; return whether it was right."""
    found = []
    with suppress(ChunkLost):
        for part in range(PARTS):
            found.append(pin_bytes(store, pin, part) == content(key, part))
            time.sleep(dice.random() * 1e-3)
    if store.state(pin) is not PinState.READY:
        return "lost"
    return "read" if len(found) == PARTS and all(found) else "wrong"


def write(store: RemoteStore, key: ChunkKey, dice: random.Random) -> str:
    """Store a chunk slowly, or give up in the middle."""
    (reservation,) = store.begin([meta_of(key)])
    if reservation is None:
        return "refused"
    for part in range(PARTS):
        store.view(reservation)[part] = as_tensor(content(key, part))
        time.sleep(dice.random() * 1e-3)
    if dice.random() < 0.1:
        store.abort(reservation)
        return "aborted"
    store.commit([reservation])
    return "stored"


def main(path: Path, seed: int, told: Connection) -> None:
    dice = random.Random(seed)
    store = RemoteStore(path, SIZES, deadline=10.0)
    while True:
        key = key_of(dice.randrange(KEYS))
        (pin,) = store.pin([key])
        if pin is not None:
            done = read(store, key, pin, dice)
            store.release([pin])
        elif store.attachment is None:
            done = "away"
            time.sleep(0.01)
        else:
            done = write(store, key, dice)
        told.send(done)
