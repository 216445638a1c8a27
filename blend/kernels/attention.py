"""Attention of scattered queries in torch: a query at position p sees exactly the keys at positions ≤ p.

A causal flag does not do this. It aligns the last query with the last key, so other scattered queries would see keys
after their positions. A layer's window or chunk also hides keys long before p.
"""

from typing import Literal

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from lmc.blend.canvas import KV, Paged, dense
from lmc.blend.layer_attention import LayerAttention

OverHeads = Literal["mean", "max"]
# Queries per call. A call does not read keys after its last query, so small calls save half of the work.
BLOCK = 64


def attend(
    query: torch.Tensor,
    kv: KV | Paged,
    positions: torch.Tensor,
    layer: LayerAttention,
    present: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the outputs `[T, Q, D]`, with the D of values, of queries `[T, Q, D]` at ascending `positions [T]`.

    The keys and values `kv`, `[H, N, D]` each or in pages, are at the positions 0…N-1. Keys at which `present [N]` is
    false are hidden. Query head i reads KV head i // (Q / H).
    """
    keys, values = _operands(dense(kv), layer)
    heads, group = keys.shape[0], query.shape[1] // keys.shape[0]
    out, first_seen = query.new_empty(*query.shape[:2], values.shape[-1]), layer.first_seen(positions)
    starts = range(0, len(positions), BLOCK)
    ends = [min(start + BLOCK, len(positions)) - 1 for start in starts]
    # A GPU is waited for once, and not for every block.
    bounds = torch.stack((first_seen[::BLOCK], positions[ends])).tolist()
    for start, first, last in zip(starts, *bounds, strict=True):
        block, seen = slice(start, start + BLOCK), slice(first, last + 1)
        mask = _visible(positions[block], first_seen[block], seen)
        if present is not None:
            mask &= present[seen]
        rows = mask.shape[0]
        q = query[block].unflatten(1, (heads, group)).permute(1, 2, 0, 3)  # [T, Q, D] -> [H, G, T, D]
        operands = keys[:, seen], values[:, seen], mask.repeat(group, 1)
        if layer.sinks is not None:
            operands = _with_sinks(*operands, layer.sinks.view(heads, group))
        k, v, allowed = operands
        q = q.reshape(heads, group * rows, -1)  # The queries of a group read the same keys.
        if layer.soft_cap:
            attended = _capped(q, k, v, allowed, layer)
        else:
            attended = scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=allowed, scale=layer.scale)
        out[block] = attended.view(heads, group, rows, -1).permute(2, 0, 1, 3).flatten(1, 2)
    return out


def attend_and_score(
    query: torch.Tensor,
    kv: KV | Paged,
    positions: torch.Tensor,
    layer: LayerAttention,
    present: torch.Tensor,
    over_heads: OverHeads,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs as `attend` does, and the attention `[N]` float32 of these queries to each key.

    The attention to a key is first reduced over heads, to its mean or maximum, and then to its maximum over queries.
    """
    first_seen = layer.first_seen(positions)
    seen = slice(0 if layer.sees_all else int(first_seen[0]), len(present))
    keys, values = (one[:, seen] for one in _operands(dense(kv), layer))
    heads, group = keys.shape[0], query.shape[1] // keys.shape[0]
    hidden = ~(_visible(positions, first_seen, seen) & present[seen])  # [T, N]
    sinks = None if layer.sinks is None else layer.sinks.view(heads, group, 1, 1).float()
    out, paid = query.new_empty(*query.shape[:2], values.shape[-1]), []
    for head in range(heads):  # One head at a time: [G·T, N] fits into the CPU cache, and [Q, T, N] does not.
        head_queries = slice(head * group, (head + 1) * group)
        q = query[:, head_queries].transpose(0, 1).float()  # [G, T, D]
        # Scaled before the product, in float32: large keys (Qwen2's biases) overflow half precision.
        logits = layer.capped((q * layer.scale) @ keys[head].float().T).masked_fill_(hidden, float("-inf"))
        if sinks is None:
            weights = logits.softmax(-1)
        else:
            sink = sinks[head].expand(-1, len(positions), 1)
            weights = torch.cat((sink, logits), dim=-1).softmax(-1)[..., 1:]
        out[:, head_queries] = (weights @ values[head].float()).transpose(0, 1).to(out.dtype)
        paid.append(weights.amax((0, 1)) if over_heads == "max" else weights.sum(0))  # [N] or [T, N]
    joined = torch.stack(paid)
    scores = joined.amax(0) if over_heads == "max" else joined.sum(0).amax(0) / (heads * group)
    return out, pad(scores, (seen.start, 0))


def _operands(kv: KV, layer: LayerAttention) -> KV:
    """Return the keys and values of the products; latent values are part of the keys."""
    keys, values = kv
    return (torch.cat((keys, values), dim=-1), values) if layer.latent else kv


def _visible(positions: torch.Tensor, first_seen: torch.Tensor, keys: slice) -> torch.Tensor:
    """Return which `keys`, a slice of positions, queries at `positions [T]` see: bool `[T, N]`."""
    at = torch.arange(keys.start, keys.stop, device=positions.device)
    return (positions[:, None] >= at) & (first_seen[:, None] <= at)


def _capped(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, layer: LayerAttention
) -> torch.Tensor:
    """Return the outputs `[H, T, D]` of queries `[H, T, D]` with a soft cap, which torch's own attention lacks.

    `mask` is bool `[T, N]`, or additive `[H, T, N]`.
    """
    logits = layer.capped((query.float() * layer.scale) @ keys.float().mT)
    logits = logits.masked_fill_(~mask, float("-inf")) if mask.dtype is torch.bool else logits + mask
    return (logits.softmax(-1) @ values.float()).to(values.dtype)


def _with_sinks(
    keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, sinks: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return keys, values and an additive mask `[H, G·T, 1 + N]` with a first key whose logits are the `sinks [H, G]`.

    That key and its value are zeros.
    """
    heads, group = sinks.shape
    bias = torch.zeros(mask.shape, dtype=keys.dtype, device=keys.device).masked_fill_(~mask, float("-inf"))
    first = sinks.to(keys.dtype).repeat_interleave(len(mask) // group, dim=1)  # [H, G·T]
    allowed = torch.cat((first[..., None], bias.expand(heads, -1, -1)), dim=2)
    keys, values = (torch.cat((one.new_zeros(heads, 1, one.shape[2]), one), dim=1) for one in (keys, values))
    return keys, values, allowed
