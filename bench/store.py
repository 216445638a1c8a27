"""Threads that look up, store and retrieve at once, through memory, disk and (if there is a server) Redis, all of them
evicting.

    python bench/store.py [--seconds 60] [--keep]

One thread asks, a thousand times a second, where the 200 chunks of a prompt are that lies in memory. The others do a
mix: lookups of prompts of 200 chunks from everywhere, stores, and retrievals of 4 chunks that are read to the end. The
bytes of a chunk follow from its key, and are checked on a sample. `lookup` is the time of the call; `waking` is counted
from when the thread meant to ask, and so has what the system and the interpreter took to let it run.
"""

import hashlib
import random
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch
from common import closing_line, parser

from lmc.config.redis_url import parse_redis_url
from lmc.demo.random_model import machine
from lmc.errors import ChunkLost
from lmc.keys import ChunkKey, RecordKind
from lmc.shapes import MIB
from lmc.storage.memory.slab import Slab
from lmc.storage.store import Store
from lmc.storage.tiers.disk import DiskTier
from lmc.storage.tiers.record import RecordMeta
from lmc.storage.tiers.tier import Tier

sys.path.append(str(Path(__file__).parent.parent / "tests"))

PARTS, PART_BYTES = 16, 1 << 14
CHUNK_BYTES = PARTS * PART_BYTES
PROMPT, CHUNKS = 200, 4000  # chunks of a prompt, and all there are
SLOTS = PROMPT + 400
ON_DISK, IN_REDIS = 1000, 600  # chunks, about
RETRIEVED, CHECKED = 4, 1 / 8
MIX = {"lookup": 4, "store": 3, "retrieve": 3}
BUSY = (0, 1, 3, 7)  # threads of the mix; the last for all of the time
SHORT = 3.0  # seconds for the others
PAUSE = 0.001
COUNT = torch.arange(CHUNK_BYTES // 8).view(PARTS, -1)


@dataclass(slots=True)
class Tally:
    """What one thread did."""

    done: Counter[str] = field(default_factory=Counter)
    wrong: int = 0
    calls: list[float] = field(default_factory=list)  # seconds
    wakings: list[float] = field(default_factory=list)


def meta_of(number: int) -> RecordMeta:
    key = ChunkKey(hashlib.sha256(b"%d" % number).digest())
    kind, namespace = RecordKind.PAGES, bytes(32)
    return RecordMeta(key=key, kind=kind, namespace=namespace, tokens=256, first=0, parts=PARTS, part_bytes=PART_BYTES)


def content(key: ChunkKey) -> torch.Tensor:
    """int64 [L, part / 8]"""
    return COUNT + int.from_bytes(key[:7], "little")


def put(store: Store, meta: RecordMeta) -> None:
    (slot,) = store.begin([meta])
    if slot is not None:
        store.view(slot).view(torch.int64).copy_(content(meta.key))
        store.commit([slot])


def retrieve(store: Store, keys: Sequence[ChunkKey], into: torch.Tensor, check: bool) -> Iterator[tuple[str, bool]]:
    """Where each chunk came from, and whether it was what it must be."""
    with store.pinned(keys) as pins:
        for key, pin in zip(keys, pins, strict=True):
            if pin is None:
                yield "miss", True
                continue
            try:
                for part in range(PARTS):
                    into[part].copy_(store.part(pin, part))
            except ChunkLost:
                yield "lost", True
                continue
            yield f"from {pin.place}", not check or torch.equal(into.view(torch.int64), content(key))


def mix(store: Store, metas: Sequence[RecordMeta], seed: int, ends: float, tally: Tally) -> None:
    draw, into = random.Random(seed), torch.empty(PARTS, PART_BYTES, dtype=torch.uint8)
    verbs, weights = list(MIX), list(MIX.values())
    while time.perf_counter() < ends:
        (verb,), first = draw.choices(verbs, weights), draw.randrange(PROMPT, CHUNKS - PROMPT)
        if verb == "lookup":
            store.lookup([meta.key for meta in metas[first : first + PROMPT]])
        elif verb == "store":
            put(store, metas[first])
        else:
            keys = [meta.key for meta in metas[first : first + RETRIEVED]]
            for source, right in retrieve(store, keys, into, draw.random() < CHECKED):
                tally.done[source] += 1
                tally.wrong += not right
        tally.done[verb] += 1


def ask(store: Store, keys: Sequence[ChunkKey], ends: float, tally: Tally) -> None:
    due = time.perf_counter()
    while due < ends:
        due = max(due + PAUSE, time.perf_counter() - PAUSE)
        time.sleep(max(0.0, due - time.perf_counter()))
        started = time.perf_counter()
        places = store.lookup(keys)
        done = time.perf_counter()
        tally.calls.append(done - started)
        tally.wakings.append(done - due)
        tally.done["lookup"] += 1
        tally.wrong += places != ["host"] * PROMPT


def run(store: Store, metas: Sequence[RecordMeta], busy: int, seconds: float) -> tuple[Tally, Counter[str]]:
    """What the asking thread saw, and what all did."""
    ends = time.perf_counter() + seconds
    tallies = [Tally() for _ in range(busy + 1)]
    prompt = [meta.key for meta in metas[:PROMPT]]
    with ThreadPoolExecutor(busy + 1) as threads:
        running = [threads.submit(ask, store, prompt, ends, tallies[0])]
        running += [threads.submit(mix, store, metas, seed, ends, tallies[seed]) for seed in range(1, busy + 1)]
    for one in running:
        one.result()  # An error in a thread is one of the benchmark.
    tallies[0].wrong = sum(tally.wrong for tally in tallies)
    return tallies[0], sum((tally.done for tally in tallies), Counter())


def percentile(values: Sequence[float], part: float) -> float:
    """In milliseconds."""
    return sorted(values)[int(part * (len(values) - 1))] * 1e3


def rss() -> float:
    """In MiB, now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / MIB


def open_tiers(folder: Path, stack: ExitStack) -> list[Tier]:
    """A small disk tier, and a small Redis if its client and a server are there."""
    tiers: list[Tier] = [DiskTier(folder / "disk", ON_DISK * (CHUNK_BYTES + 4096))]
    try:
        from redis_servers import RedisServer

        from lmc.storage.tiers.redis import RedisTier
    except ImportError as error:
        print(f"without Redis: {error}")
        return tiers
    if shutil.which("redis-server") is None:
        print("without Redis: no redis-server")
        return tiers
    server = stack.enter_context(RedisServer(folder / "redis", maxmemory=IN_REDIS * CHUNK_BYTES, policy="allkeys-lru"))
    return [*tiers, RedisTier(parse_redis_url(server.tcp_url()), deadline=0.5, ttl=0, prefix="lmc")]


def measure(store: Store, metas: Sequence[RecordMeta], busy: int, seconds: float) -> tuple[dict[str, float], int]:
    """Return the measurements with this number of busy threads, and the number of wrong answers."""
    early: list[float] = []
    timer = threading.Timer(min(10.0, seconds / 2), lambda: early.append(rss()))
    timer.start()
    tally, done = run(store, metas, busy, seconds)
    timer.join()
    column = {
        "ops_per_s": round(sum(done[verb] for verb in MIX) / seconds),
        "lookup_p50_ms": round(percentile(tally.calls, 0.5), 4),
        "lookup_p99_ms": round(percentile(tally.calls, 0.99), 4),
        "waking_p99_ms": round(percentile(tally.wakings, 0.99), 2),
        "rss_early_mib": round(early[0]),
        "rss_end_mib": round(rss()),
    }
    print(f"{busy} busy threads beside the asking one, {seconds:g} s: {column}\n  {dict(sorted(done.items()))}")
    return column, tally.wrong


def main() -> None:
    arguments = parser(__doc__, "store")
    arguments.add_argument("--seconds", type=float, default=60.0)
    options = arguments.parse_args()
    metas = [meta_of(number) for number in range(CHUNKS)]
    columns, wrong = {}, 0
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="."))).resolve()
        tiers = open_tiers(folder, stack)
        store = Store(Slab(SLOTS, PARTS, PART_BYTES), tiers)
        print(
            f"{machine()}\ntiers: {', '.join(tier.name for tier in tiers)}; "
            f"{CHUNK_BYTES / MIB:g} MiB a chunk, {SLOTS} slots"
        )
        for meta in metas[:PROMPT]:
            put(store, meta)
        pins = store.pin([meta.key for meta in metas[:PROMPT]])
        for busy in BUSY:
            seconds = options.seconds if busy == BUSY[-1] else min(SHORT, options.seconds)
            columns[str(busy)], mistakes = measure(store, metas, busy, seconds)
            wrong += mistakes
        store.release([pin for pin in pins if pin is not None])
        store.flush()
        leaked, stats = store.held(), store.stats()
        assert store.check_integrity() == []
        store.close()
    counts = {
        "evictions": stats.evictions,
        "writes": stats.writes,
        "dropped_writes": stats.dropped_writes,
        "failed": stats.failed,
        "no_room": stats.no_room,
    }
    print(f"{counts}, wrong answers {wrong}, pins left {leaked}, bookkeeping right")
    assert not wrong
    assert not leaked
    line = {
        "bench": "store",
        "ops_per_s": columns[str(BUSY[-1])]["ops_per_s"],
        "lookup_p99_ms": columns[str(BUSY[-1])]["lookup_p99_ms"],
        "leaked_pins": leaked,
    }
    closing_line(line, "store" if options.keep else None, {"by_busy_threads": columns, **counts})


if __name__ == "__main__":
    main()
