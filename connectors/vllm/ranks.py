"""Tensor parallelism: every rank must take the same steps, or the next collective meets another one. One rank needs none of this."""

from collections.abc import Sequence

import torch
from vllm.distributed import get_tp_group


def summed(evidence: torch.Tensor) -> torch.Tensor:
    """Evidence added up over the heads of all ranks."""
    group = get_tp_group()
    return group.all_reduce(evidence) if group.world_size > 1 else evidence


def agreed(chosen: torch.Tensor, of: int) -> torch.Tensor:
    """The choice of rank 0 among `of` candidates: sums may differ in their last bit, and a threshold then chooses another number."""
    group = get_tp_group()
    if group.world_size == 1:
        return chosen
    mask = torch.zeros(of, dtype=torch.int32, device=chosen.device)
    mask[chosen] = 1
    agreed_on: torch.Tensor = group.broadcast(mask, src=0)
    return agreed_on.nonzero().flatten()


def all_of(good: Sequence[bool], device: torch.device) -> list[bool]:
    """Which of these are true on every rank."""
    group = get_tp_group()
    if group.world_size == 1:
        return list(good)
    votes = torch.tensor(good, dtype=torch.float32, device=device)
    return (group.all_reduce(votes) > group.world_size - 0.5).tolist()  # type: ignore[no-any-return]
