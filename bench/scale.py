"""A disk tier with a million records: starts, operations beside those of a small tier, and killed writers.

    python bench/scale.py [--records 1000000] [--small 10000] [--kills 20] [--rebuild] [--folder FOLDER] [--keep]

Records have one part of 4 KiB and a label like that of a chunk of vLLM's pages. Each start is a process of its own,
with a whole cache engine over memory and disk:

    ready_s         until the engine answers
    found           chunks whose records it had read by then; all others are found by their keys
    recalled_s      until all records were read
    bytes_a_record  memory of the process for a record after that; a million blocks of prompts are part of it

The kinds of starts are: after the engine was closed, after it was killed, and with `--rebuild` without an index. Files
and index are in the page cache, as after a restart of the process.

Operations are measured in turns over both tiers; `times` is the 99th percentile of the large one over that of the small
one:

    prompt    an engine finds the 200 chunks of a prompt of 51,200 tokens, as for each request
    lookup    the tier's own part of that
    write     a write
    evict     a write to a full disk, which evicts a record

Kills: a process writes records to a full disk, is killed after a random time, and the next one looks at what is there.
Every second writer finds an incomplete index, and compares it with the directory while it writes (`reconciling`). The
writer tells of each record that is stored. `lost` are records that were stored, and were missing although older
ones were there. `phantoms` are records that were found and could not be read.
"""

import hashlib
import json
import multiprocessing
import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from common import closing_line, parser

from lmc.config.settings import Settings
from lmc.demo.random_model import machine
from lmc.engine import CacheEngine
from lmc.engine.index import SHORT, BlockChain, CacheIndex
from lmc.engine.names import Names
from lmc.engine.planner import Match
from lmc.keys import Namespace, RecordKind
from lmc.open_store import open_store
from lmc.shapes import GIB, KVShape
from lmc.storage.chunk_layout import ChunkLayout
from lmc.storage.tiers.disk import UNBOUNDED, DiskTier
from lmc.storage.tiers.disk.index import FILE
from lmc.storage.tiers.disk.reader import DiskReader
from lmc.storage.tiers.record import RecordMeta, file_of, verify_parts
from lmc.storage.tiers.tier import Written

TOKENS = 256  # of a chunk
SHAPE = KVShape(layers=1, kv_heads=1, head_dim=4, dtype=torch.float16)
NAMESPACE = Namespace(
    model="bench", dtype="float16", layers=1, kv_heads=1, head_dim=4, rope="", chunk_size=TOKENS, tensor_parallel=1
)
PAGES = Names(NAMESPACE, (), "model").of(RecordKind.PAGES, "")  # the namespace of the engine's pages
LAYOUT = ChunkLayout.of(SHAPE, TOKENS)
RECORD_BYTES = 8192  # header and part of a record on the disk
BLOCKS, BLOCK_TOKENS = 16, 16  # of a chunk, and tokens of each
PROMPT = 200  # chunks of a lookup
OPERATIONS = ("prompt", "lookup", "write", "evict")
ROUNDS, IN_A_ROUND = 10, 200  # of each operation, and how many of them
SAMPLE = 300  # records that are read after a kill
LONGEST_LIFE = 12.0  # seconds after which a writer is killed at the latest
CHAIN = BlockChain(CacheIndex(), PAGES, (), TOKENS, BLOCK_TOKENS)
HASH = 32  # bytes of a block's hash
PART = memoryview(bytearray(LAYOUT.part_bytes))


def blocks_of(number: int) -> list[bytes]:
    """Return the hashes of a chunk's blocks, as of vLLM's."""
    digest = hashlib.shake_128(b"%d" % number).digest(BLOCKS * HASH)
    return [digest[at : at + HASH] for at in range(0, len(digest), HASH)]


def meta_of(number: int) -> RecordMeta:
    """Return the metadata of a record, which follow from its number."""
    blocks = blocks_of(number)
    key, label = CHAIN.key(blocks[-1]), "".join(block[:SHORT].hex() for block in blocks)
    return RecordMeta(
        key=key, kind=RecordKind.PAGES, namespace=PAGES, tokens=TOKENS, first=0, parts=1,
        part_bytes=LAYOUT.part_bytes, label=label, model="model",
    )  # fmt: skip


def write(tier: DiskTier, number: int) -> None:
    """Write a record. A disk may refuse it for a moment."""
    assert tier.write(meta_of(number), [PART]) is Written.STORED


def fill(root: Path, records: int) -> float:
    """Write records; return the records written in a second."""
    began = time.perf_counter()
    with closing(DiskTier(root, UNBOUNDED)) as tier:
        for number in range(records):
            write(tier, number)
    return records / (time.perf_counter() - began)


def resident() -> int:
    """Return the bytes of memory that this process has."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGESIZE")


def opened(root: Path, records: int) -> CacheEngine:
    """Open an engine over a directory with room for twice the records."""
    settings = Settings(
        chunk_size=TOKENS,
        max_local_cpu_size=1e-4,
        local_disk=root,
        max_local_disk_size=2 * records * RECORD_BYTES / GIB,
    )
    return CacheEngine(settings, open_store(settings, LAYOUT), LAYOUT, SHAPE, NAMESPACE, model="model")


def start(root: Path, records: int) -> dict[str, Any]:
    """Start an engine over a directory, and wait until it has read all records."""
    before, began = resident(), time.perf_counter()
    engine = opened(root, records)
    ready, found = time.perf_counter() - began, engine.recall.count
    while not engine.recall.ended:
        time.sleep(0.01)
    recalled = time.perf_counter() - began
    memory = (resident() - before) / records
    with closing(engine):
        assert engine.store.changes.counts()["disk"].chunks == records, "not all records were found"
    return {
        "ready_s": round(ready, 2), "found": found, "recalled_s": round(recalled, 2), "bytes_a_record": round(memory)
    }  # fmt: skip


def in_a_process(task: Callable[..., Any], *arguments: Any) -> Any:
    """Run a task in a new process, so that it begins with its own memory."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(task, arguments)


def operations(small: Path, large: Path, counts: tuple[int, int]) -> dict[str, Any]:
    """Return the percentiles of the milliseconds of each operation, of both tiers in turns."""
    seconds: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in OPERATIONS}
    with closing(opened(small, counts[0])) as first, closing(opened(large, counts[1])) as second:
        engines, dice = (first, second), random.Random(0)
        for engine in engines:
            while not engine.recall.ended:  # It takes the processor for a moment, and so does the comparison.
                time.sleep(0.1)
            disk_of(engine)._comparing.join()  # type: ignore[union-attr]
        after = list(counts)  # number of the next record
        for step in range(len(OPERATIONS) * ROUNDS):
            name = OPERATIONS[step % len(OPERATIONS)]
            for which, engine in enumerate(engines):
                tier = disk_of(engine)
                tier.capacity = tier.bytes if name == "evict" else UNBOUNDED
                for _ in range(IN_A_ROUND):
                    numbers = [dice.randrange(counts[which] // 2, counts[which]) for _ in range(PROMPT)]
                    work = prepared(name, engine, numbers, after[which])
                    after[which] += name in ("write", "evict")
                    began = time.perf_counter()
                    found = work()
                    seconds[name][which].append(time.perf_counter() - began)
                    assert found
    results: dict[str, Any] = {}
    for name, both in seconds.items():
        ordered = [sorted(one) for one in both]
        (small_p50, small_p99), (p50, p99) = [(one[len(one) // 2], one[len(one) * 99 // 100]) for one in ordered]
        results[name] = {
            "small_p50_ms": round(1e3 * small_p50, 3), "small_p99_ms": round(1e3 * small_p99, 3),
            "p50_ms": round(1e3 * p50, 3), "p99_ms": round(1e3 * p99, 3), "times": round(p99 / small_p99, 2),
        }  # fmt: skip
    return results


def disk_of(engine: CacheEngine) -> DiskTier:
    """Return the tier of an engine, without what wraps it."""
    tier: Any = engine.store._tiers[0]
    while not isinstance(tier, DiskTier):
        tier = tier.inner
    return tier


def prepared(name: str, engine: CacheEngine, numbers: list[int], new: int) -> Callable[[], bool]:
    """Return an operation with these records, which returns whether it found or stored what it should."""
    tier = disk_of(engine)
    if name == "prompt":
        hashes = [block for number in numbers for block in blocks_of(number)]
        match = Match(prompt=PROMPT * TOKENS + 1, exact_stop=PROMPT * TOKENS)
        return lambda: len(engine.look(match, engine.block_chain(hashes, BLOCK_TOKENS)).exact) == PROMPT
    if name == "lookup":
        keys = [CHAIN.key(blocks_of(number)[-1]) for number in numbers]
        return lambda: all(tier.contains(keys))
    meta = meta_of(new)
    return lambda: tier.write(meta, [PART]) is Written.STORED


def mark_incomplete(root: Path) -> None:
    """Mark the index of a directory as a killed process leaves it."""
    with closing(sqlite3.connect(root / FILE)) as database, database:
        database.execute("UPDATE state SET complete = 0")


def write_until_killed(root: Path, records: int, first: int) -> None:
    """Write records from number `first` on to a disk with room for `records`, and print the number of each."""
    print("began", flush=True)
    tier = DiskTier(root, records * RECORD_BYTES)
    number = first
    while True:
        write(tier, number)
        print(number, flush=True)
        number += 1


def look(root: Path, records: int, first: int, stored: int) -> dict[str, int]:
    """Look at what a killed writer has left. It had stored the records before number `stored`, and may have evicted."""
    with closing(DiskTier(root, records * RECORD_BYTES)) as tier:
        assert tier._comparing is not None
        tier._comparing.join()
        there, known = {meta_of(number).key: number for number in range(first, stored + 2)}, set(tier.all_keys())
        numbers = sorted(there[key] for key in known)
        lost = set(range(numbers[0], stored)) - set(numbers)
        phantoms = known ^ {entry.key for entry in tier.entries()}
        for number in {*random.Random(stored).sample(numbers, SAMPLE), *numbers[-SAMPLE:]}:
            path = root / "records" / file_of(meta_of(number).key)  # A use of the tier would change what is evicted.
            with closing(DiskReader(path, meta_of(number).key, tier.discard)) as reader:
                verify_parts(reader.meta, reader.verified)
        assert tier.faults() == []
    return {"lost": len(lost), "phantoms": len(phantoms), "first": numbers[0], "after": numbers[-1] + 1}


def kills(root: Path, records: int, first: int, after: int, count: int) -> dict[str, Any]:
    """Kill writers, and add up what was wrong afterwards. The directory has the records from `first` to `after`."""
    dice = random.Random(0)
    found = {"kills": count, "reconciling": 0, "written": 0, "while_starting": 0, "lost": 0, "phantoms": 0}
    for number in range(count):
        if number % 2:
            mark_incomplete(root)
            found["reconciling"] += 1
        command = [sys.executable, __file__, "--writer", json.dumps([str(root), records, after])]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "began\n"
            time.sleep(dice.uniform(0, LONGEST_LIFE))
            writer.send_signal(signal.SIGKILL)
            lines = [line for line in writer.stdout if line.endswith("\n")]
        stored = int(lines[-1]) + 1 if lines else after
        found["written"] += stored - after
        found["while_starting"] += not lines
        seen = in_a_process(look, root, records, first, stored)
        found["lost"], found["phantoms"] = found["lost"] + seen["lost"], found["phantoms"] + seen["phantoms"]
        first, after = seen["first"], seen["after"]
    return found


def measure(folder: Path, options: Any) -> dict[str, Any]:
    """Return all numbers."""
    large, small, records = folder / "large", folder / "small", options.records
    found: dict[str, Any] = {"written_a_second": round(in_a_process(fill, large, records))}
    in_a_process(fill, small, options.small)
    found["start"] = in_a_process(start, large, records)
    print("start", found["start"], flush=True)
    mark_incomplete(large)
    found["start_after_a_kill"] = in_a_process(start, large, records)
    print("start_after_a_kill", found["start_after_a_kill"], flush=True)
    found["index_bytes_a_record"] = round((large / FILE).stat().st_size / records)
    if options.rebuild:
        (large / FILE).unlink()
        found["start_without_an_index"] = in_a_process(start, large, records)
        print("start_without_an_index", found["start_without_an_index"], flush=True)
    found["operations"] = in_a_process(operations, small, large, (options.small, records))
    written = 2 * ROUNDS * IN_A_ROUND
    if options.kills:
        evicted = ROUNDS * IN_A_ROUND
        found["killed"] = kills(large, records, evicted, records + written, options.kills)
    return found


def main() -> None:
    arguments = parser(__doc__, "scale")
    arguments.add_argument("--records", type=int, default=1_000_000)
    arguments.add_argument("--small", type=int, default=10_000, help="records of the tier to compare with")
    arguments.add_argument("--kills", type=int, default=20)
    arguments.add_argument("--rebuild", action="store_true", help="also start without an index (takes minutes)")
    arguments.add_argument("--folder", help="a folder on the disk to measure")
    arguments.add_argument("--writer", type=json.loads, help="what a writer that will be killed does")
    options = arguments.parse_args()
    if options.writer:
        root, records, first = options.writer
        write_until_killed(Path(root), records, first)
    print(machine())
    with tempfile.TemporaryDirectory(prefix="lmc-scale-", dir=options.folder) as folder:
        found = measure(Path(folder), options)
    for name, numbers in found.items():
        print(f"{name:22} {numbers}")
    closing_line({"bench": "scale", "records": options.records, **found}, "scale" if options.keep else None)


if __name__ == "__main__":
    main()
