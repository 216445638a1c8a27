"""Starts of the disk tier with many records: with its index, after a kill, and without an index.

    python bench/scale.py [--records 100000] [--folder FOLDER] [--keep]

Records have one part of 4 KiB and a label like that of a chunk of vLLM's pages. For each kind of start:

    ready_s     until the tier answers lookups
    headers_s   after that, until all headers were reported, which an engine needs to find documents and parts of chunks

`bytes_a_record` is what the process takes for a record after that, without the change log.
`index_bytes_a_record` is the size of the index on the disk. Files and index are in the page cache, as after a restart
of the process; after a restart of the machine, reading every record takes a request to the disk each.
"""

import gc
import hashlib
import sqlite3
import tempfile
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import closing_line, parser

from lmc.demo.random_model import machine
from lmc.keys import ChunkKey, RecordKind
from lmc.shapes import ALIGN
from lmc.storage.tiers.disk import UNBOUNDED, DiskTier
from lmc.storage.tiers.disk.index import FILE
from lmc.storage.tiers.record import RecordMeta, checksum, encode_header

BLOCKS, SHORT = 16, 16  # block hashes in a label, and bytes of each
PROMPT = 200  # chunks of a lookup
LOOKUPS = 500


def meta_of(number: int) -> RecordMeta:
    """Return the metadata of a record, which follow from its number."""
    key = ChunkKey(hashlib.sha256(b"%d" % number).digest())
    label = hashlib.shake_128(key).digest(BLOCKS * SHORT).hex()
    return RecordMeta(
        key=key, kind=RecordKind.PAGES, namespace=bytes(32), tokens=256, first=0, parts=1, part_bytes=ALIGN,
        label=label, model="model",
    )  # fmt: skip


def fill(root: Path, records: int) -> None:
    """Write records as an older version of lmc has left them, without an index."""
    part = bytes(ALIGN)
    sums = (checksum(part),)
    for number in range(records):
        meta = replace(meta_of(number), checksums=sums)
        path = root / "records" / meta.key.hex()[:2] / f"{meta.key.hex()}.safetensors"
        if number < 10_000:
            path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encode_header(meta) + part)


def resident() -> int:
    """Return the bytes of memory that this process has."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * 4096


def start(root: Path, records: int) -> tuple[dict[str, float], DiskTier]:
    """Start a tier, and read all headers."""
    gc.collect()
    before, began = resident(), time.perf_counter()
    tier = DiskTier(root, UNBOUNDED)
    ready = time.perf_counter()
    count = sum(1 for _ in tier.headers())
    ended = time.perf_counter()
    assert count == records, f"{count} of {records} records were found"
    times = {"ready_s": round(ready - began, 2), "headers_s": round(ended - ready, 2)}
    return {**times, "bytes_a_record": round((resident() - before) / records)}, tier


def lookups(tier: DiskTier, records: int) -> float:
    """Return the 99th percentile of the seconds of a lookup of the chunks of a prompt."""
    seconds = []
    for number in range(LOOKUPS):
        keys = [meta_of((number * 7919 + at) % records).key for at in range(PROMPT)]
        began = time.perf_counter()
        assert all(tier.contains(keys))
        seconds.append(time.perf_counter() - began)
    return sorted(seconds)[LOOKUPS * 99 // 100]


def measure(root: Path, records: int) -> dict[str, Any]:
    """Return the numbers of all kinds of starts, and those of lookups."""
    fill(root, records)
    found: dict[str, Any] = {}
    found["without_index"], tier = start(root, records)
    tier.close()
    found["with_index"], tier = start(root, records)
    with closing(tier):
        found["lookup_p99_ms"] = round(1000 * lookups(tier, records), 3)
    found["index_bytes_a_record"] = round((root / FILE).stat().st_size / records)
    with closing(sqlite3.connect(root / FILE)) as database, database:
        database.execute("UPDATE state SET complete = 0")
    found["after_a_kill"], tier = start(root, records)
    tier.close()
    return found


def main() -> None:
    arguments = parser(__doc__, "scale")
    arguments.add_argument("--records", type=int, default=100_000)
    arguments.add_argument("--folder", help="a folder on the disk to measure; it is emptied")
    options = arguments.parse_args()
    print(machine())
    with tempfile.TemporaryDirectory(prefix="lmc-scale-", dir=options.folder) as folder:
        found = measure(Path(folder), options.records)
    for name, numbers in found.items():
        print(f"{name:22} {numbers}")
    line = {"bench": "scale", "records": options.records, **found}
    closing_line(line, "scale" if options.keep else None)


if __name__ == "__main__":
    main()
