"""Tensor parallelism: all ranks must take the same steps, because they meet in collective operations."""

from datetime import timedelta

import torch

from lmc.connectors.vllm.vllm_api import get_tp_group

# At start, a rank waits no longer than this for the others: compilation takes minutes, and longer on some ranks.
MEET_SECONDS = 300.0


def several_ranks() -> bool:
    """Return whether the tensor-parallel group has more than one rank."""
    return bool(get_tp_group().world_size > 1)


def summed(evidence: torch.Tensor) -> torch.Tensor:
    """Return the sum of evidence over the heads of all ranks."""
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
    """Return the indices that rank 0 has chosen among `of` candidates. All are on the host.

    Sums may differ between ranks in the last bit, and a threshold would then select different tokens.
    """
    group = get_tp_group()
    if group.world_size == 1:
        return chosen
    mask = torch.zeros(of, dtype=torch.uint8)
    mask[chosen] = 1
    torch.distributed.broadcast(mask, group=group.cpu_group, group_src=0)
    return mask.nonzero().flatten()


def on_all_ranks(*, good: bool) -> bool:
    """Return whether `good` is true on every rank.

    The ranks communicate on the host, so that this does not wait for a GPU.
    """
    if not several_ranks():
        return good
    votes = torch.tensor([int(good)])
    torch.distributed.all_reduce(votes, torch.distributed.ReduceOp.MIN, get_tp_group().cpu_group)
    return bool(votes.item())


def meet_all_ranks(*, good: bool) -> bool:
    """Wait for every rank, and return whether `good` is true on every rank.

    Raises `RuntimeError` if a rank has not arrived after `MEET_SECONDS` seconds, because it waits for another rank
    elsewhere. Otherwise the start would hang.
    """
    if several_ranks():
        try:
            torch.distributed.monitored_barrier(get_tp_group().cpu_group, timedelta(seconds=MEET_SECONDS))
        except RuntimeError as error:
            hint = "see the errors above, and start vLLM without blending (enable_blending: false)"
            raise RuntimeError(f"the self-test of lmc has ended on some ranks only: {hint}") from error
    return on_all_ranks(good=good)
