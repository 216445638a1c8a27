"""Copies of stored parts by their addresses are those that one copy for each part makes."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_copies import execute

from lmc.blend.kernels.choice import TORCH
from lmc.connectors.vllm.worker import stored_parts
from lmc.connectors.vllm.worker.stored_parts import StoredParts
from lmc.engine import Piece
from lmc.keys import ChunkKey, RecordKind
from lmc.shapes import KVShape
from lmc.storage.memory.slab import Slab, Slot
from lmc.storage.worker_parts import Parallelism

LAYERS, SLOTS, STORED = 3, 5, 30
CPU = torch.device("cpu")
PIECES = [  # slot, tokens in the chunk, skipped, used
    (4, STORED, 0, STORED),
    (0, STORED, 8, 22),
    (2, 7, 3, 2),
    (4, STORED, 29, 1),
]


def pieces() -> list[Piece]:
    given = {"kind": RecordKind.DOCUMENT, "key": ChunkKey(b""), "at": 0, "first": 0}
    return [Piece(stored=stored, skip=skip, tokens=tokens, slot=slot, **given) for slot, stored, skip, tokens in PIECES]


@pytest.fixture(params=[(2, 8, 8, torch.float32), (1, 4, 16, torch.bfloat16)], ids=["heads", "latent"])
def shape(request) -> KVShape:
    heads, dim, value_dim, dtype = request.param
    return KVShape(layers=LAYERS, kv_heads=heads, head_dim=dim, value_dim=value_dim, dtype=dtype)


def slab_for(shape: KVShape) -> Slab:
    slab = Slab(SLOTS, Parallelism((LAYERS,)), shape.part_bytes(STORED))
    for slot in range(SLOTS):
        for layer in range(LAYERS):
            part = slab.part(Slot(slot), layer)
            part.copy_(torch.randint(256, part.shape, dtype=torch.uint8))
    return slab


@pytest.mark.parametrize("submits", [True, False])
def test_a_layer_of_parts_is_copied_in_one_call(monkeypatch, shape, submits):
    slab, calls = slab_for(shape), []

    def submit(copies) -> None:
        calls.append(copies)
        execute(copies)

    monkeypatch.setattr(stored_parts, "submit_of", lambda device: submit)
    memory = SimpleNamespace(
        part=lambda slot, layer: slab.part(Slot(slot), layer),
        addresses=lambda slots, layer: slab.addresses(slots, layer) if submits else None,
    )
    parts = StoredParts(memory, pieces(), [shape] * LAYERS, TORCH, CPU)
    tokens = sum(tokens for *_, tokens in PIECES)
    for layer in range(LAYERS):
        found, wanted = shape.empty(tokens, CPU), shape.empty(tokens, CPU)
        TORCH.stage(parts.of(layer), wanted)
        parts.stage(layer, found)
        for one, other in zip(found, wanted, strict=True):
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    assert len(calls) == LAYERS * submits
    assert all(len(copies.sizes) == 2 * len(PIECES) for copies in calls)


def test_addresses_are_those_of_the_parts():
    slab = Slab(SLOTS, Parallelism((2, 1), 2), 100)
    for part in range(slab.parts):
        wanted = [slab.part(Slot(slot), part).data_ptr() for slot in (3, 0, 4)]
        assert np.array_equal(slab.addresses([3, 0, 4], part), wanted)
