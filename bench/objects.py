"""The tiers of pools against their clients alone (obstore, Mooncake): seconds to write and to read the same bytes.

    python bench/objects.py [--records 64] [--mib 4] [--url s3://bucket/prefix?endpoint=http://host:9000] [--keep]

Without `--url`, a directory, S3 servers of `moto` and of `rclone` (if it is installed), and a Mooncake Store (over TCP)
on this machine are measured. moto is written in Python, and slower than any network: its numbers say what the tier adds
to a slow store. rclone reads faster: its numbers say what the tier costs. A tier verifies checksums and reads into the
slab by the store's threads; the client alone gets the same objects with as many threads, Mooncake's into registered
memory. Ratios are the client's seconds over the tier's: 1 is equally fast. They are medians of `--rounds` rounds, in
each of which both take turns.
"""

import random
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from queue import SimpleQueue
from statistics import median
from typing import Any

import numpy as np
import torch
from common import closing_line, parser

from lmc.config.mooncake_url import MooncakeURL
from lmc.config.redis_url import RedisURL
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


class Obstore:
    """The client of an object store, alone."""

    def __init__(self, url: ObjectURL) -> None:
        self.store = object_store(url, DEADLINE)

    def put(self, name: str, blob: bytes) -> None:
        self.store.put(name, blob)

    def get(self, name: str, size: int) -> int:
        return len(self.store.get(name).bytes())

    def close(self) -> None: ...


class Mooncake:
    """Mooncake's client, alone, with registered memory, as its documentation advises."""

    def __init__(self, url: MooncakeURL, size: int) -> None:
        from mooncake.store import MooncakeDistributedStore

        self.store = MooncakeDistributedStore()
        code = self.store.setup(
            url.local_hostname, url.metadata_server, 0, url.local_buffer_size, "tcp", "", url.master_address
        )
        assert code == 0
        self._memory: SimpleQueue[Any] = SimpleQueue()
        for _ in range(THREADS):
            memory = np.zeros(size, np.uint8)
            assert self.store.register_buffer(memory.ctypes.data, size) == 0
            self._memory.put(memory)

    def put(self, name: str, blob: bytes) -> None:
        memory = self._memory.get()
        memory[:] = np.frombuffer(blob, np.uint8)
        assert self.store.put_from(name, memory.ctypes.data, len(blob)) == 0
        self._memory.put(memory)

    def get(self, name: str, size: int) -> int:
        memory = self._memory.get()
        found = int(self.store.get_into(name, memory.ctypes.data, size))
        self._memory.put(memory)
        return found

    def clear(self) -> None:
        self.store.remove_all(True)

    def close(self) -> None:
        self.store.close()


class Pair:
    """The tier under a store with memory for all records, and the client of the same pool."""

    def __init__(self, url: ObjectURL | MooncakeURL, records: int, size: int) -> None:
        """Make records of random bytes."""
        self.records, self.part, draw = records, size // PARTS, random.Random(0)
        self.bytes = torch.randint(256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
        self.keys = [ChunkKey(draw.randbytes(32)) for _ in range(records)]
        self.slab = Slab(records, PARTS, self.part)  # An engine allocates its slab at the start.
        self.client: Obstore | Mooncake
        self.tier: Any
        if isinstance(url, MooncakeURL):
            from lmc.storage.tiers.mooncake import MooncakeTier

            self.client, self.tier = Mooncake(url, size), MooncakeTier(url, deadline=DEADLINE)
        else:
            self.client = Obstore(url)
            self.tier = ObjectTier(self.client.store, str(url), deadline=DEADLINE)

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
            sizes = list(pool.map(lambda key: self.client.get(f"alone/{key.hex()}", len(self.bytes)), self.keys))
        assert sum(sizes) == self.records * len(self.bytes)

    def clear(self) -> None:
        if isinstance(self.client, Mooncake):
            self.client.clear()  # An object that exists is not written again.
        for entry in self.tier.entries():
            self.tier.delete(entry.key)

    def close(self) -> None:
        self.tier.close()
        self.client.close()


class _Borrowed(Wrapped):
    """The tier, which a store does not close."""

    def close(self) -> None:
        pass


def seconds(work: Any) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def measure(url: ObjectURL | MooncakeURL, records: int, size: int, rounds: int) -> dict[str, float]:
    pair, found = Pair(url, records, size), []
    with closing(pair):
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
def urls(given: str | None, size: int) -> Iterator[dict[str, ObjectURL | MooncakeURL]]:
    """The stores to measure, by name."""
    with ExitStack() as stack:
        if given:
            found = {"url": given}
        else:
            from mooncake_servers import mooncake_store
            from s3_servers import BUCKET, find_rclone, rclone_server, s3_server

            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="lmc-objects-"))
            servers = {"moto": s3_server, **({"rclone": rclone_server} if find_rclone() else {})}
            ports = {name: stack.enter_context(server()) for name, server in servers.items()}
            mooncake = stack.enter_context(mooncake_store(4 * size))
            found = {
                "directory": f"file://{folder}/shared",
                **{name: f"s3://test:test@{BUCKET}/bench?endpoint=http://127.0.0.1:{at}" for name, at in ports.items()},
                "mooncake": mooncake.url(),
            }
        parsed = {name: parse_remote_url(url) for name, url in found.items()}
        yield {name: url for name, url in parsed.items() if not isinstance(url, RedisURL)}


def main() -> None:
    arguments = parser(__doc__, "objects")
    arguments.add_argument("--records", type=int, default=64)
    arguments.add_argument("--mib", type=int, default=4, help="size of a record")
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--url", help="an object store or a Mooncake Store; its prefix is emptied")
    options = arguments.parse_args()
    print(machine())
    with urls(options.url, options.records * options.mib * MIB) as stores:
        found = {name: measure(url, options.records, options.mib * MIB, options.rounds) for name, url in stores.items()}
    for name, numbers in found.items():
        print(f"{name:10} {numbers}")
    line = {"bench": "objects", "records": options.records, "mib": options.mib, **found}
    closing_line(line, "objects" if options.keep else None)


if __name__ == "__main__":
    main()
