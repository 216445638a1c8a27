"""A cache server against a store in this process: the times of requests, and the speed of storing and reading chunks.

    python bench/serve.py [--seconds 20] [--clients 4] [--keep]

Several processes are attached to one server. Each looks 200 chunks up a hundred times a second, and pins and releases
40 chunks in between; all times are put together. Then one process stores and retrieves chunks of 8 MiB through the
server, through a store of its own, and by memcpy, in turns.
"""

import hashlib
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median, quantiles

import torch
from common import closing_line, parser

from lmc.keys import ChunkKey, RecordKind
from lmc.server.client.remote_store import RemoteStore
from lmc.shapes import GIB
from lmc.storage.chunk_layout import ChunkLayout
from lmc.storage.contract import ChunkStore, Reservation
from lmc.storage.memory.slab import Slab
from lmc.storage.store import Store
from lmc.storage.tiers.record import RecordMeta
from lmc.storage.worker_parts import Parallelism

sys.path.append(str(Path(__file__).parent.parent / "tests"))
from service_process import ServerProcess

SMALL = ChunkLayout(Parallelism((16,)), 1 << 14, 2)  # of the prompt that is looked up
LARGE = ChunkLayout(Parallelism((32,)), 1 << 18, 2)  # 8 MiB
PROMPT, PINNED, PER_SECOND = 200, 40, 100
CHUNKS, TURNS = 48, 7  # of 8 MiB each, stored and retrieved in a turn
STEP = 32  # chunks of 256 tokens, of a step of 8,192: vLLM's default on large GPUs


def meta_of(number: int, sizes: ChunkLayout) -> RecordMeta:
    key = ChunkKey(hashlib.sha256(b"%d %d" % (sizes.part_bytes, number)).digest())
    parts, part_bytes, kind = sizes.parts, sizes.part_bytes, RecordKind.PAGES
    return RecordMeta(key=key, kind=kind, namespace=bytes(32), tokens=256, first=0, parts=parts, part_bytes=part_bytes)


def put(store: ChunkStore, metas: Sequence[RecordMeta], content: torch.Tensor) -> None:
    """Store `content`, one after the other, as an engine does: the chunks of a step are reserved together, and those of
    the step before are found from then on.
    """
    filled: list[Reservation] = []
    for first in range(0, len(metas), STEP):
        slots = [slot for slot in store.begin(metas[first : first + STEP]) if slot is not None]
        assert len(slots) == len(metas[first : first + STEP])
        store.commit(filled)
        for slot, one in zip(slots, content[first:], strict=False):
            store.view(slot).copy_(one)
        filled = slots
    store.commit(filled)


def client(path: str | None, seconds: float, results: "multiprocessing.Queue[tuple[list[float], list[float]]]") -> None:
    """Ask at a fixed pace, and return how long each lookup and each pair of pin and release took."""
    sizes, store = SMALL, None
    if path is None:
        slab = Slab(2 * PROMPT, sizes.parallelism, sizes.part_bytes)
        store = Store(slab)
        fill(store)
    store = store or RemoteStore(Path(path or ""), sizes, deadline=10.0)
    keys, lookups, pins = [meta_of(i, sizes).key for i in range(PROMPT)], list[float](), list[float]()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        started = time.perf_counter()
        found = store.lookup(keys)
        lookups.append(time.perf_counter() - started)
        assert None not in found
        started = time.perf_counter()
        held = store.pin(keys[:PINNED], found[:PINNED])
        store.release([pin for pin in held if pin is not None], wait=False)
        pins.append(time.perf_counter() - started)
        time.sleep(1 / PER_SECOND)
    store.close()
    results.put((lookups, pins))


def fill(store: ChunkStore) -> None:
    content = torch.zeros(PROMPT, SMALL.parts, SMALL.part_bytes, dtype=torch.uint8)
    put(store, [meta_of(i, SMALL) for i in range(PROMPT)], content)


def asked(path: str | None, clients: int, seconds: float) -> dict[str, float]:
    """Return the 99th percentiles in milliseconds, over all clients."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [context.Process(target=client, args=(path, seconds, results)) for _ in range(clients)]
    for process in processes:
        process.start()
    answers = [results.get(timeout=seconds + 120) for _ in processes]
    for process in processes:
        process.join()
    found = {}
    for name, times in zip(("lookup", "pin"), zip(*answers, strict=True), strict=True):
        every = sorted(time for one in times for time in one)
        found[f"{name}_p50_ms"], found[f"{name}_p99_ms"] = 1e3 * median(every), 1e3 * quantiles(every, n=100)[98]
    return found


def moved(store: ChunkStore, metas: Sequence[RecordMeta], content: torch.Tensor) -> tuple[float, float]:
    """Store chunks and read them; return the seconds of each."""
    into = torch.empty_like(content[0])
    started = time.perf_counter()
    put(store, metas, content)
    middle = time.perf_counter()
    keys = [meta.key for meta in metas]
    with store.pinned(keys) as pins:
        for pin in pins:
            assert pin is not None
            for part in range(len(into)):
                into[part].copy_(store.part(pin, part))
    return middle - started, time.perf_counter() - middle


def copied(slab: torch.Tensor, content: torch.Tensor) -> tuple[float, float]:
    into = torch.empty_like(content[0])
    started = time.perf_counter()
    for chunk, one in zip(slab, content, strict=True):
        chunk.copy_(one)
    middle = time.perf_counter()
    for chunk in slab:
        for part in range(len(into)):
            into[part].copy_(chunk[part])
    return middle - started, time.perf_counter() - middle


def bandwidths(path: Path) -> dict[str, float]:
    """Return how fast chunks are stored and retrieved, as shares of memcpy, by the server and by a store here."""
    parts, size = LARGE.parts, LARGE.part_bytes
    content = torch.randint(0, 255, (CHUNKS, parts, size), dtype=torch.uint8)  # more than caches of the CPU hold
    slab = torch.zeros(CHUNKS, parts, size, dtype=torch.uint8)
    stores: dict[str, ChunkStore] = {
        "served": RemoteStore(path, LARGE, deadline=30.0),
        "own": Store(Slab(CHUNKS, LARGE.parallelism, size)),
    }
    ways: dict[str, Callable[[int], tuple[float, float]]] = {
        "memcpy": lambda turn: copied(slab, content),
        **{
            name: lambda turn, store=store: moved(  # type: ignore[misc]
                store, [meta_of(1000 * turn + i, LARGE) for i in range(CHUNKS)], content
            )
            for name, store in stores.items()
        },
    }
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for turn in range(TURNS + 1):
        for name, way in ways.items():
            times = way(turn)
            if turn:  # The first turn takes the pages.
                taken[name].append(times)
    for store in stores.values():
        store.close()
    found = {}
    for name in stores:
        for which, what in enumerate(("store", "retrieve")):
            shares = [plain[which] / ours[which] for plain, ours in zip(taken["memcpy"], taken[name], strict=True)]
            found[what if name == "served" else f"{what}_own"] = median(shares)
    return found


def main() -> None:
    options = parser(__doc__, "serve")
    options.add_argument("--seconds", type=float, default=20.0)
    options.add_argument("--clients", type=int, default=4)
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        memory = CHUNKS * LARGE.parts * LARGE.part_bytes / GIB
        server = ServerProcess(Path(folder), max_local_cpu_size=2 * memory)
        try:
            filler = RemoteStore(server.path, SMALL, deadline=10.0)
            fill(filler)
            own = asked(None, given.clients, given.seconds)
            found = asked(str(server.path), given.clients, given.seconds)
            filler.close()
            shares = bandwidths(server.path)
        finally:
            server.stop()
    for name, value in found.items():
        print(f"{name}: {value:.3f} with the server, {own[name]:.3f} in each process")
    for name in ("store", "retrieve"):
        print(f"{name}: {shares[name]:.2f} of memcpy with the server, {shares[f'{name}_own']:.2f} in this process")
    result = {"bench": "serve", **{name: round(value, 3) for name, value in {**found, **shares}.items()}}
    own_times = {f"own_{name}": round(value, 3) for name, value in own.items()}
    closing_line(result, "serve" if given.keep else None, own_times)


if __name__ == "__main__":
    main()
