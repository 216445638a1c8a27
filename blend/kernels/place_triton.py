"""Writes stored keys and values to slots, and reads them back, in Triton; `place.py` has the same in torch.

Each kernel is launched once for all documents of a layer. A program moves some tokens of one KV head.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from lmc.blend.canvas import Canvas, Paged, R
from lmc.blend.kernels import place as torch_place
from lmc.blend.rope import Turn
from lmc.copies import Addresses, Copies, can_submit, submit_of
from lmc.shapes import KV

TOKENS = 16  # tokens that a program moves
# Arguments that vary from prompt to prompt. Without this, Triton would recompile a kernel for lengths that are 1 or
# divisible by 16, and for tensors that are not aligned to 16 bytes.
CHANGING = {
    "do_not_specialize": ["tokens", "count", "shares", "size", "limit"],
    "do_not_specialize_on_alignment": ["positions", "slots", "present", "sinks", "paid", "log_sums"],
}
FUSED = {"enable_fp_fusion": True}  # fused multiply-add with one rounding; Triton 3.9 warns if it is not set


@triton.jit
def _rows(base, slots, t, there, h, size, stride_block, stride_head, stride_token):
    """Return the addresses of the rows of the tokens `t` in pages."""
    slot = tl.load(slots + t, mask=there, other=0).to(tl.int64)
    head = (tl.zeros([], tl.int64) + h) * stride_head  # int64: all blocks of a head may precede the next head.
    return base + slot // size * stride_block + head + slot % size * stride_token


@triton.jit
def _pairs(i, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Return the two dimensions of the pairs `i`, which RoPE rotates together."""
    if INTERLEAVED:
        return 2 * i, 2 * i + 1
    return i, i + HALF


@triton.jit
def _difference(new, old, d, mask):
    """Return the dimensions `d` of rows in float32, minus those of the old rows if `old` is given."""
    found = tl.load(new[:, None] + d[None, :], mask=mask, other=0.0).to(tl.float32)
    if old is not None:
        found -= tl.load(old[:, None] + d[None, :], mask=mask, other=0.0).to(tl.float32)
    return found


@triton.jit
def _rotate(
    new, old, into, cos, sin, t, there,
    D: tl.constexpr, WIDE: tl.constexpr, HALF: tl.constexpr, PADDED: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Store BT rows of keys, minus the old rows if `old` is given. Rotates 2 · HALF dimensions, in float32."""
    d, i = tl.arange(0, WIDE), tl.arange(0, PADDED)
    first, second = _pairs(i, HALF, INTERLEAVED)
    mask = there[:, None] & (i < HALF)[None, :]
    a, b = _difference(new, old, first, mask), _difference(new, old, second, mask)
    c = tl.load(cos + t[:, None] * HALF + i[None, :], mask=mask, other=0.0)
    s = tl.load(sin + t[:, None] * HALF + i[None, :], mask=mask, other=0.0)
    kind = into.dtype.element_ty
    tl.store(into[:, None] + first[None, :], (a * c - b * s).to(kind), mask=mask)
    tl.store(into[:, None] + second[None, :], (b * c + a * s).to(kind), mask=mask)
    if 2 * HALF < D:
        rest = there[:, None] & ((d >= 2 * HALF) & (d < D))[None, :]
        tl.store(into[:, None] + d[None, :], _difference(new, old, d, rest).to(kind), mask=rest)


@triton.jit(**CHANGING)
def _place(
    stored, cos, sin, slots, keys, values, tokens, stored_kind, size,
    key_block, key_head, key_token, value_block, value_head, value_token,
    HEADS: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, HALF: tl.constexpr, PADDED: tl.constexpr,
    BT: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Write rows of `stored [K, T, H, D]` to their slots."""
    t, h, d = tl.program_id(0) * BT + tl.arange(0, BT), tl.program_id(1), tl.arange(0, WIDE)
    there, wide = t < tokens, t.to(tl.int64)
    source = stored + (wide * HEADS + h) * D
    into = _rows(keys, slots, t, there, h, size, key_block, key_head, key_token)
    _rotate(source, None, into, cos, sin, wide, there, D, WIDE, HALF, PADDED, INTERLEAVED)
    whole = there[:, None] & (d < D)[None, :]
    value = tl.load(source[:, None] + stored_kind + d[None, :], mask=whole)
    into = _rows(values, slots, t, there, h, size, value_block, value_head, value_token)
    tl.store(into[:, None] + d[None, :], value, mask=whole)


@triton.jit(**CHANGING)
def _gather(
    out, slots, keys, values, tokens, out_kind, size,
    key_block, key_head, key_token, value_block, value_head, value_token,
    HEADS: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Copy the rows at `slots` to `out [K, T, H, D]`."""
    t, h, d = tl.program_id(0) * BT + tl.arange(0, BT), tl.program_id(1), tl.arange(0, WIDE)
    there = t < tokens
    into = out + (t.to(tl.int64) * HEADS + h) * D
    mask = there[:, None] & (d < D)[None, :]
    source = _rows(keys, slots, t, there, h, size, key_block, key_head, key_token)
    tl.store(into[:, None] + d[None, :], tl.load(source[:, None] + d[None, :], mask=mask), mask=mask)
    source = _rows(values, slots, t, there, h, size, value_block, value_head, value_token)
    into += out_kind
    tl.store(into[:, None] + d[None, :], tl.load(source[:, None] + d[None, :], mask=mask), mask=mask)


@triton.jit(**CHANGING)
def _deviation(
    stored, slots, keys, changed, tokens, size, stored_token, stored_head, key_block, key_head, key_token,
    HEADS: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Sum the squares of changes over the heads and dimensions, for BT tokens."""
    t, d = tl.program_id(0) * BT + tl.arange(0, BT), tl.arange(0, WIDE)
    there = t < tokens
    mask = there[:, None] & (d < D)[None, :]
    far = tl.zeros([BT], tl.float32)
    for h in range(HEADS):
        before = tl.load(
            stored + t.to(tl.int64)[:, None] * stored_token + h * stored_head + d[None, :], mask=mask, other=0.0
        )
        row = _rows(keys, slots, t, there, h, size, key_block, key_head, key_token)
        now = tl.load(row[:, None] + d[None, :], mask=mask, other=0.0)
        change = now.to(tl.float32) - before.to(tl.float32)
        far += tl.sum(change * change, 1)
    tl.store(changed + t, far, mask=there)


def place(parts: Sequence[torch.Tensor], turn: Turn, slots: torch.Tensor, into: Paged) -> None:
    """See `lmc.blend.kernels.place.place`. Several parts are first staged, then placed in one launch."""
    keys, values, _ = into
    heads, size, dim = keys.shape[1:]
    if not len(slots):
        return
    if len(parts) == 1 and parts[0].device == keys.device and parts[0].is_contiguous():
        stored = parts[0]
    else:
        stored = torch.empty(KV, len(slots), heads, dim, dtype=keys.dtype, device=keys.device)
        stage(parts, stored)
    _place[(triton.cdiv(len(slots), TOKENS), heads)](
        stored, *rows_of(turn), slots, keys, values, len(slots), stored.stride(0), size,
        *keys.stride()[:3], *values.stride()[:3],
        BT=TOKENS, num_warps=4, **rotating(keys, turn),
    )  # fmt: skip


def rows_of(turn: Turn) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin without gaps between rows, as the kernels require."""
    return turn.cos.contiguous(), turn.sin.contiguous()


def rotating(keys: torch.Tensor, turn: Turn) -> dict[str, Any]:
    """Return the compile-time arguments of a kernel that rotates keys `[B, H, N, D]`."""
    (_, heads, _, dim), half = keys.shape, turn.cos.shape[1]
    wide = {"D": dim, "WIDE": padded(dim), "HALF": half, "PADDED": padded(half)}
    return {"HEADS": heads, **wide, "INTERLEAVED": turn.interleaved, **FUSED}


def padded(dim: int) -> int:
    """Return the power of 2 to which a program pads a dimension. Products need at least 16."""
    return int(max(16, triton.next_power_of_2(dim)))


def stage(parts: Sequence[torch.Tensor], into: torch.Tensor) -> None:
    """See `lmc.blend.kernels.place.stage`. All parts are copied in one call if the device supports it."""
    submit = submit_of(into.device)
    if submit is None or not _can_copy(*parts, into):
        torch_place.stage(parts, into)
        return
    counts = np.array([part.shape[1] for part in parts], np.int64)
    submit(_copies(parts, into, np.cumsum(counts) - counts))


def spread(keys: torch.Tensor, values: torch.Tensor, parts: Sequence[torch.Tensor], firsts: Sequence[int]) -> None:
    """See `lmc.blend.kernels.place.spread`. All parts are copied in one call if the device supports it."""
    submit = submit_of(keys.device)
    if submit is None or not _can_copy(*parts):
        torch_place.spread(keys, values, parts, firsts)
        return
    whole = torch.stack((keys, values)).contiguous()
    submit(_copies(parts, whole, np.array(firsts, np.int64)).reversed())


def _can_copy(*parts: torch.Tensor) -> bool:
    """Return whether a GPU can copy the parts `[K, T, H, D]` by itself, because their rows have no gaps."""
    return all(can_submit(part) and part[0].is_contiguous() for part in parts)


def _copies(parts: Sequence[torch.Tensor], whole: torch.Tensor, firsts: Addresses) -> Copies:
    """Return the copies of parts `[K, T, H, D]` to the rows of `whole` from `firsts` on."""
    row = whole.stride(1) * whole.element_size()
    sizes = np.array([part.shape[1] for part in parts] * KV, np.int64) * row
    of_parts = [part[kind].data_ptr() for kind in range(KV) for part in parts]
    of_whole = [whole[kind].data_ptr() + firsts * row for kind in range(KV)]
    return Copies(np.array(of_parts, np.int64), np.concatenate(of_whole), sizes)


def gather(source: Paged, slots: torch.Tensor) -> torch.Tensor:
    """See `lmc.blend.kernels.place.gather`."""
    keys, values, _ = source
    heads, size, dim = keys.shape[1:]
    out = torch.empty(KV, len(slots), heads, dim, dtype=keys.dtype, device=keys.device)
    if len(slots):
        _gather[(triton.cdiv(len(slots), TOKENS), heads)](
            out, slots, keys, values, len(slots), out.stride(0), size, *keys.stride()[:3], *values.stride()[:3],
            HEADS=heads, D=dim, WIDE=padded(dim), BT=TOKENS, num_warps=4, **FUSED,
        )  # fmt: skip
    return out


def deviation(canvas: Canvas[R], layer: int, slots: torch.Tensor, stored: torch.Tensor) -> torch.Tensor:
    """See `lmc.blend.kernels.place.deviation`."""
    keys, count = canvas.paged(layer).keys, len(slots)
    heads, size, dim = keys.shape[1:]
    changed = torch.empty(count, dtype=torch.float32, device=keys.device)
    if count:
        _deviation[(triton.cdiv(count, TOKENS),)](
            stored, slots, keys, changed, count, size, *stored.stride()[:2], *keys.stride()[:3],
            HEADS=heads, D=dim, WIDE=padded(dim), BT=TOKENS, num_warps=4, **FUSED,
        )  # fmt: skip
    return changed
