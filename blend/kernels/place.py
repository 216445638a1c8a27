"""Writes stored keys and values to the slots of a prompt, and reads them back, in torch."""

from collections.abc import Sequence

import torch

from lmc.blend.canvas import KV, Canvas, Paged, R
from lmc.blend.rope import KeyRotation, rotate


def stage(parts: Sequence[KV], into: KV) -> None:
    """Copy parts, keys and values `[T, H, D]` which may be in host memory, one after another into larger tensors."""
    counts = [len(keys) for keys, _ in parts]
    for half, whole in zip(zip(*parts, strict=True), into, strict=False):
        for part, there in zip(half, whole.split(counts), strict=True):
            there.copy_(part, non_blocking=True)


def spread(keys: torch.Tensor, values: torch.Tensor, parts: Sequence[KV], firsts: Sequence[int]) -> None:
    """Copy rows of keys and values `[T, H, D]` to parts.

    `firsts` has the first row for each part. The parts may be in host memory; the caller must wait for the GPU before
    reading them.
    """
    for part, first in zip(parts, firsts, strict=True):
        for there, whole in zip(part, (keys, values), strict=True):
            there.copy_(whole[first : first + len(there)], non_blocking=True)


def place(parts: Sequence[KV], rotation: KeyRotation, slots: torch.Tensor, into: Paged) -> None:
    """Write the tokens of all stored `parts`, keys and values `[T, H, D]`, to `slots [T]`, with keys rotated.

    `rotation` rotates the keys of all tokens. The parts may be in host memory. If the prompt is in one block, the
    slots of a part must be contiguous.
    """
    size, at = into.keys.shape[2], 0
    for part in parts:
        rows = slice(at, at + len(part[0]))
        keys, values = (half.to(into.keys.device, non_blocking=True).transpose(0, 1) for half in part)  # [H, T, D]
        here, mine = slots[rows], rotation.part(rows)
        if into.table is None and len(here) and not here.is_cuda:  # The host would wait for a GPU to tell the slots.
            there = slice(int(here[0]), int(here[0]) + len(here))
            rotate(keys, mine, into.keys[0, :, there])
            into.values[0, :, there] = values
        else:
            rotated = torch.empty_like(keys)
            rotate(keys, mine, rotated)
            into.keys[here // size, :, here % size] = rotated.transpose(0, 1)
            into.values[here // size, :, here % size] = values.transpose(0, 1)
        at = rows.stop


def gather(source: Paged, slots: torch.Tensor) -> KV:
    """Return copies of the keys and values `[T, H, D]` at `slots [T]`."""
    size = source.keys.shape[2]
    block, offset = slots // size, slots % size
    return source.keys[block, :, offset], source.values[block, :, offset]


def deviation(canvas: Canvas[R], layer: int, slots: torch.Tensor, stored: torch.Tensor) -> torch.Tensor:
    """Return the squared L2 distances `[T]` of the keys at `slots [T]` from the keys `stored [T, H, D]`.

    They are summed over all KV heads in float32.
    """
    change = canvas.read(layer, slots)[0].float() - stored.float()
    return (change * change).sum((1, 2))
