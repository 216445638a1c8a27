"""Tensor parallelism: all ranks must take the same steps, because they meet in collective operations."""

from collections.abc import Sequence

import torch

from lmc.connectors.vllm.vllm_api import get_tp_group


def summed(evidence: torch.Tensor) -> torch.Tensor:
    """Return evidence added up over the heads of all ranks."""
    group = get_tp_group()
    return group.all_reduce(evidence) if group.world_size > 1 else evidence


def largest(evidence: torch.Tensor) -> torch.Tensor:
    """Return the largest evidence over the heads of all ranks."""
    group = get_tp_group()
    if group.world_size == 1:
        return evidence
    evidence = evidence.contiguous()
    torch.distributed.all_reduce(evidence, torch.distributed.ReduceOp.MAX, group.device_group)
    return evidence


def agreed(chosen: torch.Tensor, of: int) -> torch.Tensor:
    """Return the choice of rank 0 among `of` candidates.

    Sums may differ between ranks in the last bit, and a threshold then selects other tokens.
    """
    group = get_tp_group()
    if group.world_size == 1:
        return chosen
    mask = torch.zeros(of, dtype=torch.int32, device=chosen.device)
    mask[chosen] = 1
    agreed_on: torch.Tensor = group.broadcast(mask, src=0)
    return agreed_on.nonzero().flatten()


def all_of(good: Sequence[bool], device: torch.device) -> list[bool]:
    """Return which of these are true on every rank."""
    group = get_tp_group()
    if group.world_size == 1:
        return list(good)
    votes = torch.tensor(good, dtype=torch.float32, device=device)
    return (group.all_reduce(votes) > group.world_size - 0.5).tolist()  # type: ignore[no-any-return]
