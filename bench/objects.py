"""The object tier against obstore alone: seconds to write and to read the same bytes.

    python bench/objects.py [--records 64] [--mib 4] [--url s3://bucket/prefix?endpoint=http://host:9000] [--keep]

Without `--url`, a directory and an S3 server of `moto` on this machine are measured. That server is written in Python,
and slower than any network: its numbers say what the tier adds to a slow store. The tier verifies checksums and reads
into the slab by the store's threads; obstore alone gets the same objects with as many threads. Ratios are obstore's
seconds over the tier's: 1 is equally fast. They are medians of `--rounds` rounds, in each of which both take turns.
"""

import random
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
from common import closing_line, parser

from lmc.config.remote_url import ObjectURL, parse_remote_url
from lmc.demo.random_model import machine
from lmc.keys import ChunkKey, RecordKind
from lmc.shapes import MIB
from lmc.storage.memory.slab import Slab
from lmc.storage.store import Store
from lmc.storage.tiers.objects import ObjectTier
from lmc.storage.tiers.opening import object_store
from lmc.storage.tiers.record import RecordMeta
from lmc.storage.tiers.tier import Wrapped

sys.path.append(str(Path(__file__).parent.parent / "tests"))

PARTS = 16
THREADS = 2  # as an engine has
DEADLINE = 30.0


class Pair:
    """The tier under a store with memory for all records, and the client of the same object store."""

    def __init__(self, url: ObjectURL, records: int, size: int) -> None:
        """Make records of random bytes."""
        self.client = object_store(url, DEADLINE)
        self.records, self.part, draw = records, size // PARTS, random.Random(0)
        self.bytes = torch.randint(256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
        self.keys = [ChunkKey(draw.randbytes(32)) for _ in range(records)]
        self.slab = Slab(records, PARTS, self.part)  # An engine allocates its slab at the start.
        self.tier = ObjectTier(self.client, str(url), deadline=DEADLINE)

    def meta(self, key: ChunkKey) -> RecordMeta:
        return RecordMeta(
            key=key, kind=RecordKind.PAGES, namespace=bytes(32), tokens=256, first=0, parts=PARTS, part_bytes=self.part
        )

    def tier_writes(self) -> None:
        view = memoryview(self.bytes.numpy())
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(lambda key: self.tier.write(self.meta(key), [view]), self.keys))

    def client_writes(self) -> None:
        blob = bytes(self.bytes.numpy())
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(lambda key: self.client.put(f"alone/{key.hex()}", blob), self.keys))

    def tier_reads(self) -> None:
        store = Store(self.slab, [_Borrowed(self.tier)], load_threads=THREADS)
        with closing(store), store.pinned(self.keys) as pins:
            for pin in pins:
                assert pin is not None
                for part in range(PARTS):
                    store.part(pin, part)

    def client_reads(self) -> None:
        with ThreadPoolExecutor(THREADS) as pool:
            sizes = list(pool.map(lambda key: len(self.client.get(f"alone/{key.hex()}").bytes()), self.keys))
        assert sum(sizes) == self.records * len(self.bytes)

    def clear(self) -> None:
        for entry in self.tier.entries():
            self.tier.delete(entry.key)


class _Borrowed(Wrapped):
    """The tier, which a store does not close."""

    def close(self) -> None:
        pass


def seconds(work: Any) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def measure(url: ObjectURL, records: int, size: int, rounds: int) -> dict[str, float]:
    pair, found = Pair(url, records, size), []
    with closing(pair.tier):
        for _ in range(rounds + 1):
            pair.clear()
            found.append(
                [seconds(work) for work in (pair.client_writes, pair.tier_writes, pair.client_reads, pair.tier_reads)]
            )
    of_rounds = found[1:]  # The first round warms up.
    rate = records * size / MIB
    return {
        "write": round(median(one[0] / one[1] for one in of_rounds), 3),
        "read": round(median(one[2] / one[3] for one in of_rounds), 3),
        "write_mib_s": round(rate / median(one[1] for one in of_rounds)),
        "read_mib_s": round(rate / median(one[3] for one in of_rounds)),
    }


@contextmanager
def urls(given: str | None) -> Iterator[dict[str, ObjectURL]]:
    """The stores to measure, by name."""
    with ExitStack() as stack:
        if given:
            found = {"url": given}
        else:
            from s3_servers import BUCKET, s3_server

            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="lmc-objects-"))
            port = stack.enter_context(s3_server())
            found = {
                "directory": f"file://{folder}/shared",
                "moto": f"s3://test:test@{BUCKET}/bench?endpoint=http://127.0.0.1:{port}",
            }
        parsed = {name: parse_remote_url(url) for name, url in found.items()}
        yield {name: url for name, url in parsed.items() if isinstance(url, ObjectURL)}


def main() -> None:
    arguments = parser(__doc__, "objects")
    arguments.add_argument("--records", type=int, default=64)
    arguments.add_argument("--mib", type=int, default=4, help="size of a record")
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--url", help="an object store; its prefix is emptied")
    options = arguments.parse_args()
    print(machine())
    with urls(options.url) as stores:
        found = {name: measure(url, options.records, options.mib * MIB, options.rounds) for name, url in stores.items()}
    for name, numbers in found.items():
        print(f"{name:10} {numbers}")
    line = {"bench": "objects", "records": options.records, "mib": options.mib, **found}
    closing_line(line, "objects" if options.keep else None)


if __name__ == "__main__":
    main()
