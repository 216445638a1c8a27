"""The GPU memory for lmc's computations: how much is needed, and whether every rank has it."""

import math

import torch

from lmc.blend.kernels.shift import MOST_EXAMPLES
from lmc.blend.staging import SIDES
from lmc.connectors.vllm.messages import BlendJob
from lmc.connectors.vllm.worker.native import NativeLayers
from lmc.connectors.vllm.worker.tensor_parallel import on_all_ranks, several_ranks
from lmc.errors import NoMemory
from lmc.shapes import KV, MIB

# Allowance for unused memory: a GPU allocator may leave up to 1 MiB unused after each large tensor.
UNUSED_BYTES = 32 * MIB


def allocated(device: torch.device) -> int:
    """Return the bytes that tensors take on a GPU; 0 on other devices."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def make_room(size: int, device: torch.device, work: str, kept: int = 0) -> None:
    """Reserve `size` bytes of a GPU for `work`, which is computed next. `kept` more bytes stay free for the engine.

    With several ranks, each of them reserves the memory in its allocator, and all agree. An error on one rank in the
    middle of a layer would leave the other ranks waiting. Raises `NoMemory` on every rank if one rank lacks the memory.
    """
    available = _free(device) >= size + kept
    if available and several_ranks():
        try:
            torch.empty(size, dtype=torch.uint8, device=device)
        except RuntimeError:
            available = False
    if not on_all_ranks(good=available):
        lacks = f"{kept / MIB:.0f} MiB must stay free for the engine, and not every rank has as much free memory"
        raise NoMemory(f"{work} needs {size / MIB:.0f} MiB, {lacks}")


def _free(device: torch.device) -> float:
    """Return the bytes of a GPU that torch can still allocate; infinity on other devices, which have no such limit."""
    if device.type != "cuda":
        return math.inf
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def memory_for(layers: NativeLayers, job: BlendJob) -> int:
    """Return about how many bytes a blend needs, in addition to the memory of a layer for a batch of rows."""
    shape, tokens = layers.shape, len(job.tokens)
    placed = (*job.documents, *job.own)
    stored = sum(piece.tokens for piece in placed)
    row_bytes = shape.token_bytes // shape.dtype.itemsize * layers.computes.itemsize
    staged = (SIDES + 1) * stored * row_bytes  # the parts of two layers, and the corrected part of one layer
    # For each document: the similarities of its examples, the inverse of this matrix, and the mean key.
    of_document = 2 * MOST_EXAMPLES**2 + shape.kv_heads * shape.head_dim
    weights = (stored * MOST_EXAMPLES + len(placed) * of_document) * torch.float32.itemsize
    scores = layers.depth * tokens * torch.float32.itemsize
    # For each RoPE: cos and sin of the rotations that place documents, and that move keys to position 0 and back.
    rotations = {attention.rotation for attention in layers.attentions}
    angles = 3 * len(rotations) * stored * shape.head_dim * torch.float32.itemsize
    return UNUSED_BYTES + staged + weights + scores + angles + KV * tokens * layers.width * layers.computes.itemsize
