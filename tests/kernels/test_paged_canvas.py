"""The paged canvas over pages as vLLM's GPU backends have them, with the kernels in Triton and with those in torch."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from pages import pages_of

pytest.importorskip("vllm")

from lmc.blend.kernels.choice import TORCH, kernels_of
from lmc.blend.strategies import RecomputePolicy
from lmc.connectors.vllm.canvas import PagedCanvas
from lmc.connectors.vllm.messages import BlendJob, DocumentPart
from lmc.connectors.vllm.native import NativeLayers
from lmc.connectors.vllm.paged import TokenAccess
from lmc.engine import Piece
from lmc.keys import ChunkKey, RecordKind
from lmc.shapes import KVShape

HEADS, GROUP, DIM, BLOCK, LENGTH = 2, 2, 32, 16, 90
HIDDEN = HEADS * GROUP * DIM


def written(attention, keys, values, cache, slots):
    """As the backend's writer does it."""
    cache[slots // cache.shape[2], :, slots % cache.shape[2]] = torch.cat((keys, values), dim=-1)


class Attention:
    """The parts of vLLM's attention module that lmc uses. Its own kernel knows runs of consecutive rows only."""

    num_heads, num_kv_heads, head_size, layer_name = HEADS * GROUP, HEADS, DIM, "layer"
    attn_backend = SimpleNamespace(get_name=lambda: "FLASH_ATTN")
    impl = SimpleNamespace(do_kv_cache_update=written, scale=DIM**-0.5)

    def __call__(self, *given):
        return self.forward(*given)

    def forward(self, query, key, value):
        raise AssertionError("the engine's own attention was called for scattered rows")


class Layer:
    """A decoder layer without anything but projections and attention."""

    def __init__(self) -> None:
        self.attention = Attention()
        self.weights = torch.randn(HIDDEN, HIDDEN + 2 * HEADS * DIM) / HIDDEN**0.5

    def __call__(self, positions, states, residual):
        projected = (states @ self.weights).split([HIDDEN, HEADS * DIM, HEADS * DIM], dim=-1)
        return states + self.attention(*projected), states if residual is None else residual


def layers_over(kernels, ratio: int, monkeypatch) -> NativeLayers:
    """Three layers over pages, in which the engine's blocks are `ratio` of the kernel's."""
    torch.manual_seed(0)
    found = object.__new__(NativeLayers)
    monkeypatch.setattr(NativeLayers, "forward_context", lambda self, batch, attends=True: nullcontext())
    caches = [pages_of(HEADS, DIM, BLOCK, LENGTH + 60, torch.float32) for _ in range(3)]
    caches = [torch.cat((one.keys, one.values), dim=-1) for one in caches]
    found._layers = [Layer() for _ in caches]
    found.attention = [layer.attention for layer in found._layers]
    found.access = [
        TokenAccess(layer.attention, cache, kernels) for layer, cache in zip(found._layers, caches, strict=True)
    ]
    found.kernels, found.device, found.scale = found.access[0].kernels, torch.device("cpu"), DIM**-0.5
    found.block_size, found._ratio, found._names, found.most_runs = BLOCK * ratio, ratio, ["layer"], 1 << 30
    angles = torch.arange(2 * LENGTH)[:, None] * 0.8 ** torch.arange(DIM // 2)
    found._rope = SimpleNamespace(cos_sin_cache=torch.cat((angles.cos(), angles.sin()), dim=-1), is_neox_style=True)
    found.shape = KVShape(layers=3, kv_heads=HEADS, head_dim=DIM, dtype=torch.float32)
    embedding = torch.randn(100, HIDDEN)
    found.decoder = SimpleNamespace(embed_input_ids=lambda tokens: embedding[tokens])
    return found


def outcome(kernels, ratio: int, monkeypatch) -> list[torch.Tensor]:
    """Place two documents, one of them without its first tokens, run scattered rows, and read everything."""
    layers = layers_over(kernels, ratio, monkeypatch)
    parts = torch.randn(3, 2, 2, 30, HEADS, DIM)  # [L, document, K, T, H, D]
    pieces = [
        Piece(kind=RecordKind.DOCUMENT, key=ChunkKey(b""), tokens=tokens, at=at, first=first, skip=skip, stored=30,
              place=None, exact=False)
        for tokens, at, first, skip in ((30, 4, 0, 0), (22, 40, 8, 8))
    ]  # fmt: skip
    job = BlendJob(
        request="request", tokens=tuple(range(LENGTH)), blocks=(3, 1, 4, 0, 2, 5)[: -(-LENGTH // layers.block_size)],
        stop=LENGTH, policy=RecomputePolicy(strategy="all"),
        documents=tuple(DocumentPart(slot=i, tag=0, piece=piece) for i, piece in enumerate(pieces)),
    )  # fmt: skip
    canvas = PagedCanvas(
        layers, job, LENGTH, lambda slot, layer: parts[layer, slot].flatten().view(torch.uint8), lambda _: True
    )
    everything = canvas.slots(torch.arange(LENGTH))
    rows, found = canvas.begin(torch.tensor([0, 1, 6, 9, 10, 39, 44, 80, LENGTH - 1])), []
    for layer in range(3):
        canvas.place(layer)
        found += [one.clone() for one in canvas.read(layer, everything)]
        (batch,) = canvas.batches(rows)
        own = None if kernels.in_pages else attending(canvas, layer, rows.positions)
        canvas.run(layer, rows, batch, own if layer < 2 else None)
        found += [one.clone() for one in canvas.read(layer, everything)]
    return [*found, rows.states]


def attending(canvas, layer, positions):
    """Attention by the kernels in torch, as the engine's own would be."""
    nothing = torch.empty(0, dtype=torch.long)
    return lambda query, own: canvas.kernels.attend(
        query, canvas.context(layer, LENGTH, nothing), positions, canvas.scale
    )


@pytest.mark.parametrize("ratio", [1, 2])
def test_both_kinds_of_kernels_leave_the_same(monkeypatch, ratio):
    monkeypatch.setenv("LMC_KERNELS", "triton")
    triton = kernels_of(torch.device("cpu"))
    assert triton.in_pages
    for one, other in zip(outcome(triton, ratio, monkeypatch), outcome(TORCH, ratio, monkeypatch), strict=True):
        assert torch.allclose(one, other, atol=1e-4)
