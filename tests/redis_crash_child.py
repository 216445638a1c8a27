"""Forks writers that are there to be killed, as `storage_crash_child`: each stores, reads and forgets chunks of a disk
and a Redis.

One child for each line "capacity seed url directory" on standard input.
"""

import contextlib
import os
import random
import sys

from storage_crash_child import say
from storage_fakes import get, key_of, put

from lmc.config.redis_url import parse_redis_url
from lmc.errors import ChunkLost
from lmc.storage.memory.slab import Slab
from lmc.storage.store import Store
from lmc.storage.tiers.disk import DiskTier
from lmc.storage.tiers.redis import RedisTier, layout
from lmc.storage.tiers.redis import tier as redis

PARTS, PART_BYTES = 3, 128 << 10
RECORD_BYTES = 4096 + PARTS * PART_BYTES
KEYS = [key_of(i) for i in range(16)]


def cut_small() -> None:
    """Several values a record, though records are small; as both sides of the test must have it."""
    layout.CLASSES = tuple(size >> 8 for size in layout.CLASSES)
    layout.LARGEST = redis.LARGEST = layout.CLASSES[-1] - layout.OVERHEAD


def write_until_killed(directory: str, capacity: int, url: str, seed: int) -> None:
    say(os.getpid())  # not by who forks: the first line has to come before the second
    dice = random.Random(seed)
    tiers = [DiskTier(directory, capacity), RedisTier(parse_redis_url(url), deadline=10)]
    store = Store(Slab(8, PARTS, PART_BYTES), tiers)
    say("begun")
    parent = os.getppid()
    while os.getppid() == parent:
        key = dice.choice(KEYS)
        if dice.random() < 0.3:
            with contextlib.suppress(ChunkLost):
                get(store, key)
        else:  # so that there is always something to be written
            store.forget(key)
            put(store, key)


def main() -> None:
    cut_small()
    for line in sys.stdin:
        capacity, seed, url, directory = line.rstrip("\n").split(" ", 3)
        child = os.fork()
        if child == 0:
            write_until_killed(directory, int(capacity), url, int(seed))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        say(os.WTERMSIG(status) if os.WIFSIGNALED(status) else f"ended: {status}")


if __name__ == "__main__":
    main()
