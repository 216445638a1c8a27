"""Layers from a disk tier that takes as long per layer as the compute does: how much of the smaller one is hidden.

    python bench/overlap.py

A prompt of 8 documents whose chunks lie on disk only. Every part takes at least a set time to read (the tier's own
reads included); the consumer computes as long per layer (busy, in torch, on one thread). Without overlap the total
would be 2.0.
"""

import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

import torch
from common import closing_line, parser

from lmc.blend.segments import Span
from lmc.config.settings import Settings
from lmc.demo.random_model import machine, random_tokens
from lmc.engine import CacheEngine, Match, Piece
from lmc.keys import Namespace, RecordKind
from lmc.open_store import open_store
from lmc.shapes import KVShape
from lmc.storage.chunk_layout import ChunkLayout
from lmc.storage.tiers.disk import DiskTier
from lmc.storage.tiers.tier import Tier

sys.path.append(str(Path(__file__).parent.parent / "tests"))
from tier_wrappers import Delayed

LAYERS, DOCUMENTS, TOKENS, LAYER_SECONDS = 24, 8, 256, 0.040
SHAPE = KVShape(layers=LAYERS, kv_heads=8, head_dim=64, dtype=torch.float32)


def engine_over(tier: Tier) -> CacheEngine:
    """An engine whose memory holds nothing yet."""
    namespace = Namespace(
        model="bench", dtype="float32", layers=LAYERS, kv_heads=8, head_dim=64, rope="", chunk_size=TOKENS
    )
    settings = Settings(max_local_cpu_size=0.5, chunk_size=TOKENS)
    layout = ChunkLayout.of(SHAPE, TOKENS)
    return CacheEngine(settings, open_store(settings, layout, tiers=[tier]), layout, SHAPE, namespace)


def store(engine: CacheEngine, document: list[int]) -> None:
    """Store random KV as that of a document."""
    for slot in engine.begin_document(engine.namespace(RecordKind.DOCUMENT), document) or []:
        assert slot is not None
        for raw in engine.store.view(slot):
            for half in SHAPE.part(raw, slot.meta.tokens):
                half.normal_()
        engine.store.commit([slot])


def pieces_of(engine: CacheEngine, documents: list[list[int]]) -> list[Piece]:
    """Return the positions of the chunks of a prompt of these documents, which are all stored."""
    prompt = [token for document in documents for token in document]
    spans = [Span(start, start + TOKENS) for start in range(0, len(prompt), TOKENS)]
    match = Match(prompt=len(prompt), exact_stop=len(prompt), documents=engine.documents(prompt, spans))
    pieces = engine.look(match, engine.token_chain(prompt)).pieces
    assert len(pieces) == len(documents)
    return pieces


def busy(seconds: float, matrix: torch.Tensor) -> float:
    """Compute for `seconds`; return how long it really was."""
    started = time.perf_counter()
    while time.perf_counter() - started < seconds:
        matrix @ matrix
    return time.perf_counter() - started


def main() -> None:
    arguments = parser(__doc__, "overlap")
    options = arguments.parse_args()
    documents = [random_tokens(TOKENS, i) for i in range(DOCUMENTS)]
    with tempfile.TemporaryDirectory(dir=".") as directory:
        engine = engine_over(DiskTier(directory, 1 << 33))
        for document in documents:
            store(engine, document)
        engine.close()
        # Two loader threads share the chunks of a layer: a layer takes as long as half of the parts, one after another.
        tier = Delayed(DiskTier(Path(directory), 1 << 33), per_part=LAYER_SECONDS / (DOCUMENTS / 2))
        engine = engine_over(tier)
        pieces = pieces_of(engine, documents)
        matrix = torch.randn(128, 128)
        started, compute = time.perf_counter(), 0.0
        with closing(engine.layers(pieces)) as reader:
            for _ in reader:
                compute += busy(LAYER_SECONDS, matrix)
        total = time.perf_counter() - started
        engine.close()
        alone = engine_over(Delayed(DiskTier(directory, 1 << 33), tier.per_part))
        started = time.perf_counter()
        with closing(alone.layers(pieces)) as reader:
            for _ in reader:
                pass
        io = time.perf_counter() - started
        alone.close()
    print(
        f"{machine()}\n{len(pieces)} chunks, {LAYERS} layers: "
        f"I/O alone {io:.3f} s, compute {compute:.3f} s, together {total:.3f} s"
    )
    line = {"bench": "overlap", "total_over_max": round(total / max(io, compute), 3)}
    closing_line(line, "overlap" if options.keep else None)


if __name__ == "__main__":
    main()
