"""How far computed numbers are from those that are wanted: what the self-tests of all connectors ask."""

import torch


def far(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest difference, relative to the largest value; NaN counts as far."""
    largest = (found.float() - wanted.float()).abs().max() / wanted.float().abs().max().clamp_min(1e-6)
    return float(largest.nan_to_num(nan=float("inf")))
