"""Layers from a disk tier that takes as long per layer as the compute does: how much of the smaller one is hidden.

    python bench/overlap.py

A prompt of 8 documents whose chunks lie on disk only. Every part takes at least a set time to read (the tier's own reads
included); the consumer computes as long per layer (busy, in torch, on one thread). Without overlap the total would be 2.0.
"""

import tempfile
import time
from contextlib import closing
from pathlib import Path

import torch
from common import closing_line, parser

from lmc.config import Settings
from lmc.demo import machine, random_tokens
from lmc.engine import CacheEngine, Kind
from lmc.keys import Namespace
from lmc.shapes import KVShape
from lmc.storage.disk import DiskTier
from lmc.storage.tier import Delayed

LAYERS, DOCUMENTS, LAYER_SECONDS = 24, 8, 0.040
SHAPE = KVShape(layers=LAYERS, kv_heads=8, head_dim=64, dtype=torch.float32)


def busy(seconds: float, matrix: torch.Tensor) -> float:
    """Compute for `seconds`; return how long it really was."""
    started = time.perf_counter()
    while time.perf_counter() - started < seconds:
        matrix @ matrix
    return time.perf_counter() - started


def main() -> None:
    arguments = parser(__doc__, "overlap")
    options = arguments.parse_args()
    documents = [random_tokens(256, i) for i in range(DOCUMENTS)]
    namespace = Namespace(
        kind="tokens", model="bench", dtype="float32", layers=LAYERS, kv_heads=8, head_dim=64, rope="", chunk_size=256
    )
    settings = Settings(max_local_cpu_size=0.5)
    with tempfile.TemporaryDirectory(dir=".") as directory:
        engine = CacheEngine(settings, SHAPE, namespace, tiers=[DiskTier(directory, 1 << 33)])
        for document in documents:
            kv = [(torch.randn(256, 8, 64), torch.randn(256, 8, 64)) for _ in range(LAYERS)]
            engine.store(Kind.DOCUMENT, document, kv)
        engine.close()
        # Two loader threads share the chunks of a layer: a layer takes as long as half of the parts, one after another.
        tier = Delayed(DiskTier(Path(directory), 1 << 33), per_part=LAYER_SECONDS / (DOCUMENTS / 2))
        engine = CacheEngine(settings, SHAPE, namespace, tiers=[tier])
        plan = [piece for document in documents for piece in engine.find_document(document, 0) or []]
        matrix = torch.randn(128, 128)
        started, compute = time.perf_counter(), 0.0
        with closing(engine.layers(plan)) as reader:
            for _ in reader:
                compute += busy(LAYER_SECONDS, matrix)
        total = time.perf_counter() - started
        engine.close()
        alone = CacheEngine(settings, SHAPE, namespace, tiers=[Delayed(DiskTier(directory, 1 << 33), tier.per_part)])
        started = time.perf_counter()
        with closing(alone.layers(plan)) as reader:
            for _ in reader:
                pass
        io = time.perf_counter() - started
        alone.close()
    print(
        f"{machine()}\n{len(plan)} chunks, {LAYERS} layers: I/O alone {io:.3f} s, compute {compute:.3f} s, together {total:.3f} s"
    )
    line = {"bench": "overlap", "total_over_max": round(total / max(io, compute), 3)}
    closing_line(line, "overlap" if options.keep else None)


if __name__ == "__main__":
    main()
