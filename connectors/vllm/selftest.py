"""The self-test for vLLM, which runs once at start in blocks that are not in use yet."""

from typing import Any

import torch

from lmc.blend.canvas import KV
from lmc.blend.selftest import MOVED, TOKENS, prove, random_prompt
from lmc.blend.strategies import RecomputePolicy
from lmc.connectors.vllm.canvas import PagedCanvas, prefill_alone
from lmc.connectors.vllm.messages import BlendJob, DocumentPart
from lmc.connectors.vllm.native import NativeLayers
from lmc.engine import Piece
from lmc.errors import UnsupportedModel
from lmc.keys import ChunkKey, RecordKind


def prove_model(model: Any, layers: NativeLayers, vocabulary: int, blocks: int) -> None:
    """Raise `UnsupportedModel` if lmc leaves other keys and values in the pages than the model's own forward pass."""
    need = -(-TOKENS // layers.block_size)
    if blocks <= need:
        raise UnsupportedModel(f"the KV cache has only {blocks} blocks, too few for the self-test")
    table, tokens = tuple(range(1, need + 1)), random_prompt(vocabulary)  # Block 0 is the null block.
    piece = Piece.whole(RecordKind.DOCUMENT, ChunkKey(b""), TOKENS - MOVED, MOVED, 0, None, exact=False)
    document = DocumentPart(slot=0, tag=0, piece=piece)
    with torch.inference_mode():
        try:
            whole, in_two = (_prefill(model, layers, tokens, table, chunks) for chunks in ([TOKENS], [MOVED, TOKENS]))
            alone = _prefill_alone(layers, tokens[MOVED:], table)
            part = torch.stack(alone[0]).flatten().view(torch.uint8)
            canvas = _canvas(layers, tokens, table, (), torch.empty(0))
            prove(canvas, _canvas(layers, tokens, table, (document,), part), whole, in_two)
        finally:
            _clear(layers, table)


def run_full_batch(layers: NativeLayers, rows: int) -> None:
    """Run as many rows through a layer as a blend ever does, so that memory that is missing is missed at the start.

    All of them lie in block 1, which holds nothing yet. Raises `UnsupportedModel` if the memory is not there.
    """
    positions = torch.arange(rows + 1, device=layers.device)
    blocks, scattered = torch.ones_like(positions[:: layers.block_size]), positions[positions != 1]
    try:
        with torch.inference_mode():
            batches = layers.begin(torch.zeros_like(positions), scattered, blocks, rows)
            for batch in batches.batches:
                layers.run(0, batches, batch)
    except torch.OutOfMemoryError as error:
        cure = "lower --max-num-batched-tokens or --gpu-memory-utilization"
        raise UnsupportedModel(f"a batch of {rows} tokens does not fit into what memory is left: {cure}") from error
    finally:
        _clear(layers, (1,))


def _canvas(
    layers: NativeLayers, tokens: list[int], table: tuple[int, ...], documents: Any, part: torch.Tensor
) -> PagedCanvas:
    job = BlendJob(
        request="self-test",
        tokens=tuple(tokens),
        blocks=table,
        stop=len(tokens),
        documents=documents,
        policy=RecomputePolicy(strategy="all"),
    )
    return PagedCanvas(layers, job, TOKENS, lambda *_: part, lambda _: True)


def _prefill(model: Any, layers: NativeLayers, tokens: list[int], table: tuple[int, ...], stops: list[int]) -> list[KV]:
    """Return the KV that the model's forward passes leave in the pages, with chunks that end at `stops`."""
    blocks, ids = torch.tensor(table, device=layers.device), torch.tensor(tokens, device=layers.device)
    for start, stop in zip([0, *stops], stops, strict=False):
        positions = torch.arange(start, stop, device=layers.device)
        (batch,) = layers.begin(ids, positions, blocks, TOKENS).batches
        with layers.forward_context(batch):
            model(ids[start:stop], positions)
    return _read(layers, blocks, stops[-1])


def _prefill_alone(layers: NativeLayers, tokens: list[int], table: tuple[int, ...]) -> list[KV]:
    blocks, ids = torch.tensor(table, device=layers.device), torch.tensor(tokens, device=layers.device)
    for _ in prefill_alone(layers, ids, blocks, TOKENS):
        pass
    return _read(layers, blocks, len(tokens))


def _read(layers: NativeLayers, blocks: torch.Tensor, count: int) -> list[KV]:
    slots = layers.slots(blocks, torch.arange(count, device=layers.device))
    return [tuple(one.clone() for one in access.gather(slots)) for access in layers.access]  # type: ignore[misc]


def _clear(layers: NativeLayers, table: tuple[int, ...]) -> None:
    """Write zeros to the blocks that were used, as they had before."""
    blocks = torch.tensor(table, device=layers.device)
    slots = layers.slots(blocks, torch.arange(len(table) * layers.block_size, device=layers.device))
    for access in layers.access:
        keys, values = access.gather(slots)
        access.scatter(slots, torch.zeros_like(keys), torch.zeros_like(values))
