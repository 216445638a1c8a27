"""A million known documents: memory, and how long lists, searches and changes take.

    python bench/known.py [--documents 1000000] [--tokens 400] [--keep]

Documents of random tokens become known to a cache engine. Their KV is not stored. Then, as `lmc documents` and
`lmc explain` do through the administration:

    bytes_a_document  memory of the process for a document; `counted` is what `max_document_index_size` counts for it
    page_ms           the first page of the list, of 100 documents, and one in the middle of the list
    name_ms           a page of the documents whose name has a part: on an idle engine, and on one that computes, where
                      the search rests between steps
    show_ms           a document by its id, and by its name
    pin_ms            a pin of a document, by its id
    nearest_ms        the search for the most similar document to one that is not known, which is `similar` or `new`
    note_ms           one more document, as it is learned: the mean, and the longest of 1,000
    forget_ms         the same beyond `max_document_index_size`, where each makes another one be forgotten

Times are the longest of five, if nothing else is said.
"""

import gc
import tempfile
import threading
import time
from array import array
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from common import closing_line, parser
from scale import LAYOUT, NAMESPACE, SHAPE, resident
from scale import TOKENS as CHUNK

from lmc.config.settings import Settings
from lmc.demo.random_model import machine
from lmc.documents.admin import DocumentAdmin
from lmc.documents.known import known_bytes
from lmc.documents.table import Filter
from lmc.engine import CacheEngine
from lmc.keys import RecordKind, chunk_bounds
from lmc.open_store import open_store
from lmc.shapes import GIB

VOCABULARY, BATCH = 150_000, 1000
TIMES, NOTED = 5, 1000
STEP_SECONDS = 0.02  # of the engine that is busy


def milliseconds(work: Callable[[], object]) -> float:
    """Run some work, and return its milliseconds."""
    began = time.perf_counter()
    work()
    return 1e3 * (time.perf_counter() - began)


def longest(work: Callable[[], object]) -> float:
    """Run some work several times, and return the milliseconds of the longest run."""
    return round(max(milliseconds(work) for _ in range(TIMES)), 2)


class Documents:
    """Random documents, which become known to an engine."""

    def __init__(self, engine: CacheEngine, tokens: int) -> None:
        self._engine, self._tokens, self._dice, self.count = engine, tokens, np.random.default_rng(0), 0
        self._namespace = engine.namespace(RecordKind.DOCUMENT)

    def one(self) -> "array[int]":
        """Return the tokens of a new document."""
        return array("I", self._dice.integers(0, VOCABULARY, self._tokens, dtype=np.uint32).tobytes())

    def note(self, tokens: "array[int]") -> None:
        """Record a document as learned, with a name, and insert it where prompts are searched."""
        engine = self._engine
        keys = engine.document_keys(tokens, self._namespace)
        engine.known.note(self._namespace, tokens, keys, name=f"file-{self.count}.md", model="bench")
        self.count += 1

    def note_many(self, count: int) -> None:
        """Record `count` new documents."""
        for start in range(0, count, BATCH):
            for _ in range(min(BATCH, count - start)):
                self.note(self.one())
            self._engine.known.prepare()

    def times(self) -> dict[str, float]:
        """Return the mean and the longest milliseconds of further documents, each found in prompts at once."""
        new = [self.one() for _ in range(NOTED)]
        times = [
            milliseconds(lambda tokens=tokens: (self.note(tokens), self._engine.known.prepare())) for tokens in new
        ]
        return {"mean": round(sum(times) / NOTED, 3), "longest": round(max(times), 2)}


def measure(folder: Path, documents: int, tokens: int) -> dict[str, Any]:
    """Return all numbers."""
    room = (documents + NOTED) * known_bytes(tokens, len(chunk_bounds(tokens, CHUNK))) / GIB
    settings = Settings(
        chunk_size=CHUNK, max_local_cpu_size=0.001, local_disk=folder, max_local_disk_size=20.0,
        enable_blending=True, max_document_index_size=room,
    )  # fmt: skip
    with closing(
        CacheEngine(settings, open_store(settings, LAYOUT), LAYOUT, SHAPE, NAMESPACE, model="bench")
    ) as engine:
        known, made, before = engine.known, Documents(engine, tokens), resident()
        began = time.perf_counter()
        made.note_many(documents)
        found: dict[str, Any] = {"noted_a_second": round(documents / (time.perf_counter() - began))}
        gc.collect()
        counted = known.list()[0].memory
        found["bytes_a_document"] = {"measured": round((resident() - before) / documents), "counted": counted}
        admin = DocumentAdmin(lambda: [engine], lambda *_: None, engine.background)
        middle, number = admin.listed(documents // 2)["next"], documents // 3
        name, one = f"file-{number}.md", known.latest(documents - number)[1][-1]
        assert one.name == name
        found["page_ms"] = {
            "first": longest(admin.listed), "middle": longest(lambda: admin.listed(after=middle))
        }  # fmt: skip
        only = Filter(name=f"{number}.")
        found["name_ms"] = {"idle": longest(lambda: admin.listed(only=only)), "busy": busy(engine, admin, only)}
        found["show_ms"] = {"id": longest(lambda: admin.show(one.id)), "name": longest(lambda: admin.show(name))}
        found["pin_ms"] = longest(lambda: admin.change(one.id, {"pinned": True}))
        similar, new = [*one.tokens[: 3 * tokens // 4], *made.one()[: tokens // 4]], made.one().tolist()
        assert known.nearest(similar, one.namespace) is one
        found["nearest_ms"] = {
            "similar": longest(lambda: known.nearest(similar, one.namespace)),
            "new": longest(lambda: known.nearest(new, one.namespace)),
        }  # fmt: skip
        found["note_ms"] = made.times()
        found["forget_ms"] = made.times()
        assert known.count() == documents + NOTED
    return found


def busy(engine: CacheEngine, admin: DocumentAdmin, only: Filter) -> float:
    """Return the milliseconds of a page while the engine makes steps."""
    ended = threading.Event()

    def steps() -> None:
        while not ended.wait(STEP_SECONDS):
            engine.background.stepped()

    thread = threading.Thread(target=steps)
    thread.start()
    try:
        return round(milliseconds(lambda: admin.listed(only=only)), 2)
    finally:
        ended.set()
        thread.join()


def main() -> None:
    arguments = parser(__doc__, "known")
    arguments.add_argument("--documents", type=int, default=1_000_000)
    arguments.add_argument("--tokens", type=int, default=400, help="tokens of a document")
    options = arguments.parse_args()
    print(machine())
    with tempfile.TemporaryDirectory(prefix="lmc-known-") as folder:
        found = measure(Path(folder), options.documents, options.tokens)
    for name, numbers in found.items():
        print(f"{name:18} {numbers}")
    summary = {"bench": "known", "documents": options.documents, **found}
    closing_line(summary, "known" if options.keep else None)


if __name__ == "__main__":
    main()
