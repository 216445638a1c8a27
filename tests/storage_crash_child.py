"""Forks writers that are there to be killed: imports once, then one child for each line "directory capacity seed" on
standard input. A child whose seed is a multiple of `KILLS_ITSELF` kills itself while it writes.
"""

import os
import random
import signal
import sys
from pathlib import Path

from storage_fakes import PART_BYTES, PARTS, get, key_of, put

from lmc.errors import ChunkLost
from lmc.storage.memory.slab import Slab
from lmc.storage.store import Store
from lmc.storage.tiers.disk import DiskTier, files, index

KILLS_ITSELF = 5
index.COMMIT_SECONDS = 0.005  # Writers are killed after some milliseconds, and often during a commit.


def write_until_killed(directory: str, capacity: int, seed: int) -> None:
    dice = random.Random(seed)
    tier = DiskTier(directory, capacity)
    store = Store(Slab(8, PARTS, PART_BYTES), [tier])
    if seed % KILLS_ITSELF == 0:
        kill_before_rename(dice.randrange(1, 20))
    parent = os.getppid()
    while os.getppid() == parent:
        key = key_of(dice.randrange(200))
        try:
            if get(store, key) is None:
                put(store, key)
        except ChunkLost:
            continue


def kill_before_rename(count: int) -> None:
    """Kill this process when it has written so many records, and renamed all but the last one."""
    moved, real = 0, files.move

    def move(path: Path, to: Path) -> None:
        nonlocal moved
        moved += 1
        if moved == count:
            os.kill(os.getpid(), signal.SIGKILL)
        real(path, to)

    files.move = move


def main() -> None:
    for line in sys.stdin:
        directory, capacity, seed = line.rstrip("\n").rsplit(" ", 2)
        child = os.fork()
        if child == 0:
            write_until_killed(directory, int(capacity), int(seed))
        say(child)
        _, status = os.waitpid(child, 0)
        say(os.WTERMSIG(status) if os.WIFSIGNALED(status) else f"ended: {status}")


def say(what: object) -> None:
    sys.stdout.write(f"{what}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
