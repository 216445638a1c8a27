"""The memory of a GPU for what lmc computes: how much that is, and whether all ranks have it."""

import torch

from lmc.blend.kernels.shift import MOST_EXAMPLES
from lmc.blend.staging import SIDES
from lmc.connectors.vllm.messages import BlendJob
from lmc.connectors.vllm.worker.native import NativeLayers
from lmc.connectors.vllm.worker.tensor_parallel import on_all_ranks
from lmc.errors import NoMemory
from lmc.shapes import KV, MIB

UNUSED = 32 * MIB  # The allocator of a GPU may leave up to 1 MiB behind each large tensor.


def allocated(device: torch.device) -> int:
    """Return the bytes that tensors take on a GPU."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def make_room(size: int, device: torch.device, what: str) -> None:
    """Let the allocator of every rank have `size` bytes, for `what` is computed next.

    Raises `NoMemory` on every rank if one of them does not get it: an error in the middle of a layer would leave the
    others waiting for this one.
    """
    try:
        torch.empty(size, dtype=torch.uint8, device=device)
        there = True
    except RuntimeError:
        there = False
    if not on_all_ranks(good=there):
        raise NoMemory(f"{what} needs {size / MIB:.0f} MiB, which not every rank has")


def memory_for(layers: NativeLayers, job: BlendJob) -> int:
    """Return about how many bytes a blend has beside what a layer takes for a batch of rows."""
    shape, tokens = layers.shape, len(job.tokens)
    stored = sum(part.piece.tokens for part in job.documents)
    staged = (SIDES + 1) * stored * shape.token_bytes  # the parts of two layers, and what is corrected in one
    # For each document how much its examples are alike, the inverse of that, and its mean key.
    of_document = 2 * MOST_EXAMPLES**2 + shape.kv_heads * shape.head_dim
    weights = (stored * MOST_EXAMPLES + len(job.documents) * of_document) * torch.float32.itemsize
    scores = layers.depth * tokens * torch.float32.itemsize
    return UNUSED + staged + weights + scores + KV * tokens * layers.width * shape.dtype.itemsize
