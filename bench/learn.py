"""Ten thousand documents learned into a disk by `lmc learn`, with the shipped model: how long, and what they cost.

    python bench/learn.py [--documents 10000]

Documents of 200 to 500 tokens, as lines of JSON. Half way the process is killed (SIGKILL), and the same command
goes on. What is measured:

    a second        documents learned, without the start of the process
    learned twice   records that were on the disk after the kill and were written again, which should be none
    lost            documents of the manifest that are not on the disk, which should be none
    restart         seconds by which the start is longer with all of them on the disk, and the bytes of memory that
                    all that is remembered of a document takes
    list            seconds of a list of all documents and the places where they are
    stat            seconds of `lmc stat`, which reads all headers
    pin             seconds of the same command with `--pin`, when all is learned, less those of the command without it
"""

import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
import tracemalloc
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from common import closing_line, parser
from transformers import AutoTokenizer

from lmc.blend.markers import Markers
from lmc.blend.segments import document_tokens
from lmc.config.settings import Settings
from lmc.connectors.transformers import CachedModel
from lmc.demo import SHIPPED
from lmc.documents.sources import read_documents
from lmc.keys import ChunkKey, RecordKind
from lmc.rag import SEPARATOR
from lmc.storage.tiers.disk import UNBOUNDED, DiskTier

MODEL, SIZES = SHIPPED / "model", (200, 500)


def write_documents(path: Path, count: int, tokenizer: Any) -> None:
    """Write documents of the words that the shipped model knows."""
    words = sorted({word for one in (SHIPPED / "documents").glob("*.txt") for word in one.read_text().split()})
    per_word = len(tokenizer.encode(" ".join(words))) / len(words)
    draw = random.Random(0)
    with path.open("w") as file:
        for number in range(count):
            length = int(draw.randint(*SIZES) / per_word)
            text = " ".join([str(number), *draw.choices(words, k=length)])
            file.write(json.dumps({"id": f"document {number}", "text": text}) + "\n")


def learn(folder: Path, *more: str, kill_at: int = 0) -> dict[str, Any]:
    """Run `lmc learn`, and kill it when the manifest has the given number of documents."""
    manifest = folder / "manifest.sqlite"
    words = ["learn", str(folder / "documents.jsonl"), "--model", str(MODEL), "--local-disk", str(folder / "disk")]
    words += ["--manifest", str(manifest), "--json", *more]
    room = os.environ | {"LMC_MAX_LOCAL_DISK_SIZE": "200"}
    process = subprocess.Popen([sys.executable, "-m", "lmc", *words], stdout=subprocess.PIPE, text=True, env=room)
    if not kill_at:
        found: dict[str, Any] = json.loads(process.communicate()[0])
        return found
    while process.poll() is None and len(learned_in(manifest)) < kill_at:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL, "it has ended before"
    return {"learned": len(learned_in(manifest))}


def learned_in(manifest: Path) -> list[str]:
    """Return the names of the documents of a manifest; none while it is being created."""
    address = f"file:{manifest}?mode=ro"
    with suppress(sqlite3.Error), closing(sqlite3.connect(address, uri=True)) as database:
        return [name for (name,) in database.execute("SELECT id FROM learned")]
    return []


def records(disk: Path) -> set[ChunkKey]:
    """Return the keys of all records on a disk."""
    tier = DiskTier(disk, UNBOUNDED, read_only=True)
    try:
        return {entry.key for entry in tier.entries()}
    finally:
        tier.close()


def written(disk: Path) -> dict[str, int]:
    """Return when each record was written."""
    return {path.name: path.stat().st_mtime_ns for path in disk.rglob("*.safetensors")}


def lost(folder: Path, tokenizer: Any) -> int:
    """Return how many documents of the manifest are not on the disk as a whole."""
    disk = {"local_disk": folder / "disk", "max_local_disk_size": 200}
    settings = Settings.load({"enable_blending": True, "max_local_cpu_size": 0.05, **disk})
    cached, _ = CachedModel.load(MODEL, settings)
    with cached:
        engine, markers = cached.engine, Markers.of(tokenizer, SEPARATOR)
        namespace, there = engine.namespace(RecordKind.DOCUMENT), records(folder / "disk")
        named = set(learned_in(folder / "manifest.sqlite"))
        missing = 0
        for document in read_documents(str(folder / "documents.jsonl")).documents:
            (tokens,) = document_tokens(tokenizer.encode, markers, SEPARATOR, document.text)
            missing += document.id in named and not there.issuperset(engine.document_keys(tokens, namespace))
    return missing


def opened(disk: Path, *, traced: bool = False) -> tuple[float, float]:
    """Open the model with a disk. Return the seconds that a list of all documents takes, and those of the start.

    If `traced`, the first number is the bytes of memory that Python's objects take instead.
    """
    settings = Settings.load(
        {"enable_blending": True, "max_local_cpu_size": 0.05, "local_disk": disk, "max_local_disk_size": 200}
    )
    if traced:
        tracemalloc.start()
    started = time.perf_counter()
    cached, _ = CachedModel.load(MODEL, settings)
    start = time.perf_counter() - started
    with cached:
        if traced:
            held, _ = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            return held, start
        started = time.perf_counter()
        documents = [(known.id, cached.engine.lookup(known.keys, {})) for known in cached.engine.known.list()]
        print(f"{len(documents)} documents are known after a restart", flush=True)
        return time.perf_counter() - started, start


def measure(count: int) -> dict[str, Any]:
    """Return what is measured; see above."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_documents(folder / "documents.jsonl", count, tokenizer)
        killed = learn(folder, kill_at=count // 2)
        print(f"killed after {killed['learned']} documents", flush=True)
        lost_by_kill, before = lost(folder, tokenizer), written(folder / "disk")
        done = learn(folder)
        assert not done["failed"], done["failed"]
        after = written(folder / "disk")
        print(done, flush=True)
        seconds, pinned = [], {}
        for more in ((), ("--pin",)):
            started = time.perf_counter()
            pinned = learn(folder, *more)
            seconds.append(time.perf_counter() - started)
        print(pinned, seconds, flush=True)
        (_, plain), (memory, _) = opened(folder / "none"), opened(folder / "none", traced=True)
        (listed, restart), (held, _) = opened(folder / "disk"), opened(folder / "disk", traced=True)
        chunks = records(folder / "disk")
        size = sum(path.stat().st_size for path in (folder / "disk").rglob("*.safetensors"))
        started = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "lmc", "stat", str(folder / "disk")], check=True, stdout=subprocess.DEVNULL
        )
        stat = time.perf_counter() - started
        return {
            "documents": count,
            "chunks": len(chunks),
            "GB": round(size / 2**30, 2),
            "a second": round(done["learned"] / done["seconds"], 1),
            "learned twice": sum(after.get(name) != at for name, at in before.items()),
            "lost": lost_by_kill + lost(folder, tokenizer),
            "restart seconds": round(restart - plain, 2),
            "bytes a document": round((held - memory) / count),
            "list seconds": round(listed, 3),
            "stat seconds": round(stat, 2),
            "pinned": pinned["before"],
            "pin seconds": round(seconds[1] - seconds[0], 2),
        }


def main() -> None:
    arguments = parser(__doc__, "learn")
    arguments.add_argument("--documents", type=int, default=10_000)
    options = arguments.parse_args()
    closing_line({"bench": "learn", **measure(options.documents)}, "learn" if options.keep else None)


if __name__ == "__main__":
    main()
