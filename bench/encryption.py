"""What encryption at rest costs: the disk tier with a secret key against the disk tier without one, side by side.

    python bench/encryption.py

Chunks of 1, 4 and 32 MiB are written and read as the store does it (`tiers.py`), by two threads. Both ways take turns
in every round. A ratio is that of bytes a second with a key over those without one, the median of the rounds' ratios.
`encrypt` is GB/s of one thread for records of 4 MiB that are in memory; decrypting is the same computation.
"""

import shutil
import tempfile
import time
from contextlib import closing
from pathlib import Path
from statistics import median

from common import closing_line, parser
from tiers import MOVED, READERS, ROUNDS, SHAPES, Arena, Disk, Turn, rounds

from lmc.demo.random_model import machine
from lmc.storage.secret_keys import SecretKey, SecretKeys
from lmc.storage.tiers.encryption import Encrypted, encrypt_record
from lmc.storage.writer import WRITERS

KEY = SecretKey(bytes(32))


class Both(Disk):
    """The same directory without a key (`raw`) and with one (`ours`)."""

    def __init__(self, mib: int, folder: Path) -> None:
        super().__init__(mib, Turn(WRITERS, READERS), folder)
        self.encrypted = Encrypted(self.tier, SecretKeys({"": [KEY]}))
        self.ways = {
            "raw": lambda turn: self.settled(self.through(self.tier, turn)),
            "ours": lambda turn: self.settled(self.through(self.encrypted, turn)),
        }


def on_disk(folder: Path) -> dict[str, dict[str, float]]:
    """Return the ratios of writing and of reading, by the MiB of a chunk."""
    ratios: dict[str, dict[str, float]] = {"write": {}, "read": {}}
    for mib in SHAPES:
        both = Both(mib, folder / str(mib))
        with closing(both.tier):
            taken = rounds(both)
        for verb, which in (("write", "put"), ("read", "get")):
            plain, encrypted = ([getattr(turn, which) for turn in taken[name]] for name in ("raw", "ours"))
            ratio = median(one / other for one, other in zip(plain, encrypted, strict=True))
            ratios[verb][str(mib)] = round(ratio, 3)
            gbs = MOVED["disk"] / median(plain) / 1e9
            print(f"{mib:>3} MiB  {verb:<5}  {gbs:.2f} GB/s without a key, {ratio:.3f} of it with one", flush=True)
    return ratios


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
    keep = parser(__doc__, "encryption").parse_args().keep
    print(f"{machine()}; {READERS} readers, {WRITERS} writers")
    encrypt = in_memory()
    print(f"  4 MiB  one thread encrypts {encrypt:.1f} GB/s in memory")
    folder = Path(tempfile.mkdtemp(dir=".", prefix=".bench-")).resolve()
    try:
        by_mib = on_disk(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    means = {verb: round(sum(ratios.values()) / len(ratios), 3) for verb, ratios in by_mib.items()}
    result = {"bench": "encryption", **means, "encrypt_gbs": round(encrypt, 2), "by_mib": by_mib}
    closing_line(result, "encryption" if keep else None)


if __name__ == "__main__":
    main()
