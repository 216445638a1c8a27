"""What encryption at rest costs: a tier with a secret key against the same tier without one, side by side.

    python bench/encryption.py [--only disk|redis] [--keep]

The tiers are the disk, and a pool: a Redis on this machine, over TCP. A pool that is farther away is slower, and then
encryption costs less. Chunks of 1, 4 and 32 MiB are written and read as the store does it (`tiers.py`), by two threads
(one writes to a pool). Both ways take turns in every round. A ratio is that of bytes a second with a key over those
without one, the median of the rounds' ratios. `encrypt` is GB/s of one thread for records of 4 MiB that are in memory;
decrypting is the same computation.
"""

import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any

from common import closing_line, parser
from tiers import MOVED, READERS, ROUNDS, SHAPES, Arena, Disk, Redis, Turn, redis_servers, rounds

from lmc.demo.random_model import machine
from lmc.storage.secret_keys import SecretKey, SecretKeys
from lmc.storage.tiers.encryption import Encrypted, encrypt_record
from lmc.storage.writer import WRITERS

KEY = SecretKey(bytes(32))


def compare(arena: Disk | Redis, after: Callable[[Turn], Turn], ratios: dict[str, dict[str, float]]) -> None:
    """Measure a tier without a key (`raw`) and with one (`ours`); `after` is called after each turn."""
    tier, encrypted = arena.tier, Encrypted(arena.tier, SecretKeys({"": [KEY]}))
    arena.ways = {
        "raw": lambda turn: after(arena.through(tier, turn)),
        "ours": lambda turn: after(arena.through(encrypted, turn)),
    }
    with closing(tier):
        taken = rounds(arena)
    arena.ways.clear()  # Its functions would keep its memory allocated during the next size.
    for verb, which in (("write", "put"), ("read", "get")):
        plain, ours = ([getattr(turn, which) for turn in taken[name]] for name in ("raw", "ours"))
        ratio = median(one / other for one, other in zip(plain, ours, strict=True))
        ratios.setdefault(verb, {})[str(arena.mib)] = round(ratio, 3)
        gbs = MOVED[arena.place] / median(plain) / 1e9
        said = f"{gbs:.2f} GB/s without a key, {ratio:.3f} of it with one"
        print(f"{arena.mib:>3} MiB  {arena.place:<5}  {verb:<5}  {said}", flush=True)


def measured(place: str, folder: Path) -> dict[str, Any]:
    """Return the ratios of writing and of reading: their means, and those by the MiB of a chunk."""
    ratios: dict[str, dict[str, float]] = {}
    if place == "disk":
        for mib in SHAPES:
            disk = Disk(mib, Turn(WRITERS, READERS), folder / str(mib))
            compare(disk, disk.settled, ratios)
    else:
        with redis_servers()(folder / "redis") as server:
            for mib in SHAPES:
                redis = Redis(mib, Turn(1, READERS), server, "tcp")
                compare(redis, redis.emptied, ratios)
    means = {verb: round(sum(by_mib.values()) / len(by_mib), 3) for verb, by_mib in ratios.items()}
    return {**means, "by_mib": ratios}


def in_memory() -> float:
    """Return the GB/s of one thread that encrypts records."""
    arena = Arena("disk", 4, Turn(1, 1))
    seconds = []
    for number in range(1 + ROUNDS["disk"]):
        began = time.perf_counter()
        for chunk in range(arena.count):
            encrypt_record(arena.meta(number, chunk), [arena.whole(arena.source, chunk)], KEY)
        seconds.append(time.perf_counter() - began)
    return MOVED["disk"] / median(seconds[1:]) / 1e9


def main() -> None:
    arguments = parser(__doc__, "encryption")
    arguments.add_argument("--only", choices=["disk", "redis"])
    options = arguments.parse_args()
    print(f"{machine()}; {READERS} readers, {WRITERS} writers")
    encrypt = in_memory()
    print(f"  4 MiB  one thread encrypts {encrypt:.1f} GB/s in memory")
    folder = Path(tempfile.mkdtemp(dir=".", prefix=".bench-")).resolve()
    try:
        found = {place: measured(place, folder) for place in ("disk", "redis") if options.only in (None, place)}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    result = {"bench": "encryption", "encrypt_gbs": round(encrypt, 2), **found}
    closing_line(result, "encryption" if options.keep else None)


if __name__ == "__main__":
    main()
