"""Attention of scattered queries in torch: a query at position p sees exactly the keys at positions ≤ p.

A causal flag does not do this. It aligns the last query with the last key, so other scattered queries would see keys
after their positions.
"""

from typing import Literal

import torch
from torch.nn.functional import scaled_dot_product_attention

from lmc.blend.canvas import KV, Paged, dense

OverHeads = Literal["mean", "max"]
# Queries per call. A call does not read keys after its last query, so small calls save half of the work.
BLOCK = 64


def attend(
    query: torch.Tensor, kv: KV | Paged, positions: torch.Tensor, scale: float, present: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the outputs `[T, Q, D]` of queries `[T, Q, D]` at ascending `positions [T]`.

    The keys and values `kv`, `[H, N, D]` each or in pages, are at the positions 0…N-1. Keys at which `present [N]` is
    false are hidden. Query head i reads KV head i // (Q / H).
    """
    keys, values = dense(kv)
    heads, group = keys.shape[0], query.shape[1] // keys.shape[0]
    out = torch.empty_like(query)
    for start in range(0, len(positions), BLOCK):
        block = slice(start, start + BLOCK)
        reach = int(positions[block][-1]) + 1
        mask = positions[block, None] >= torch.arange(reach, device=keys.device)  # [T, N]
        if present is not None:
            mask &= present[:reach]
        rows = mask.shape[0]
        q = query[block].unflatten(1, (heads, group)).permute(1, 2, 0, 3)  # [T, Q, D] -> [H, G, T, D]
        attended = scaled_dot_product_attention(
            q.reshape(1, heads, group * rows, -1),  # The queries of a group read the same keys.
            keys[None, :, :reach],
            values[None, :, :reach],
            attn_mask=mask.repeat(group, 1),
            scale=scale,
        )
        out[block] = attended.view(heads, group, rows, -1).permute(2, 0, 1, 3).flatten(1, 2)
    return out


def attend_and_score(
    query: torch.Tensor,
    kv: KV | Paged,
    positions: torch.Tensor,
    scale: float,
    present: torch.Tensor,
    over_heads: OverHeads,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs as `attend` does, and the attention `[N]` float32 of these queries to each key.

    The attention to a key is first reduced over heads, to its mean or maximum, and then to its maximum over queries.
    """
    keys, values = (one[:, : len(present)] for one in dense(kv))
    heads, group = keys.shape[0], query.shape[1] // keys.shape[0]
    later = positions[:, None] < torch.arange(keys.shape[1], device=keys.device)
    hidden = later.logical_or_(~present)  # [T, N]
    out, paid = torch.empty_like(query), []
    for head in range(heads):  # One head at a time: [G·T, N] fits into the CPU cache, and [Q, T, N] does not.
        head_queries = slice(head * group, (head + 1) * group)
        q = query[:, head_queries].transpose(0, 1).float()  # [G, T, D]
        # Scaled before the product, in float32: large keys (Qwen2's biases) overflow half precision.
        logits = ((q * scale) @ keys[head].float().T).masked_fill_(hidden, float("-inf"))
        weights = logits.softmax(-1)
        out[:, head_queries] = (weights @ values[head].float()).transpose(0, 1).to(out.dtype)
        paid.append(weights.amax((0, 1)) if over_heads == "max" else weights.sum(0))  # [N] or [T, N]
    joined = torch.stack(paid)
    return out, joined.amax(0) if over_heads == "max" else joined.sum(0).amax(0) / (heads * group)
