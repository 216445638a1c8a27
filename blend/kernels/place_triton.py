"""Writes stored keys and values to slots, and reads them back, in Triton; `place.py` has the same in torch.

Each kernel is launched once for all documents of a layer. A program moves some tokens of one KV head.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from lmc.blend.canvas import KV, Canvas, Paged, R
from lmc.blend.kernels import place as torch_place
from lmc.blend.rope import KeyRotation
from lmc.copies import Addresses, Copies, can_submit, submit_of

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
def _difference(new, old, d, mask, scale):
    """Return the dimensions `d` of rows times `scale` in float32, minus those of the old rows if `old` is given."""
    found = tl.load(new[:, None] + d[None, :], mask=mask, other=0.0).to(tl.float32) * scale
    if old is not None:
        found -= tl.load(old[:, None] + d[None, :], mask=mask, other=0.0).to(tl.float32)
    return found


@triton.jit
def _rounded(numbers, kind: tl.constexpr, LARGEST: tl.constexpr):
    """Return float32 numbers as the `kind` of a cache, whose LARGEST number the others become if it is quantised."""
    if LARGEST > 0:
        numbers = tl.minimum(tl.maximum(numbers, -LARGEST), LARGEST)
    return numbers.to(kind)


@triton.jit
def _rotate(
    new, old, into, cos, sin, t, there, scale,
    D: tl.constexpr, WIDE: tl.constexpr, HALF: tl.constexpr, PADDED: tl.constexpr, INTERLEAVED: tl.constexpr,
    LARGEST: tl.constexpr,
):  # fmt: skip
    """Store BT rows of keys times `scale`, minus the old rows if `old` is given.

    Rotates 2 · HALF dimensions, in float32.
    """
    d, i = tl.arange(0, WIDE), tl.arange(0, PADDED)
    first, second = _pairs(i, HALF, INTERLEAVED)
    mask = there[:, None] & (i < HALF)[None, :]
    a, b = _difference(new, old, first, mask, scale), _difference(new, old, second, mask, scale)
    c = tl.load(cos + t[:, None] * HALF + i[None, :], mask=mask, other=0.0)
    s = tl.load(sin + t[:, None] * HALF + i[None, :], mask=mask, other=0.0)
    kind = into.dtype.element_ty
    tl.store(into[:, None] + first[None, :], _rounded(a * c - b * s, kind, LARGEST), mask=mask)
    tl.store(into[:, None] + second[None, :], _rounded(b * c + a * s, kind, LARGEST), mask=mask)
    if 2 * HALF < D:
        rest = there[:, None] & ((d >= 2 * HALF) & (d < D))[None, :]
        tl.store(into[:, None] + d[None, :], _rounded(_difference(new, old, d, rest, scale), kind, LARGEST), mask=rest)


@triton.jit(**CHANGING)
def _place(
    stored_keys, stored_values, cos, sin, slots, keys, values, tokens, size,
    key_block, key_head, key_token, value_block, value_head, value_token,
    HEADS: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, V: tl.constexpr, WIDE_V: tl.constexpr,
    HALF: tl.constexpr, PADDED: tl.constexpr, BT: tl.constexpr, INTERLEAVED: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """Write rows of stored keys `[T, H, D]` and values `[T, H, V]` to their slots; both have the same scales."""
    t, h, v = tl.program_id(0) * BT + tl.arange(0, BT), tl.program_id(1), tl.arange(0, WIDE_V)
    there, wide = t < tokens, t.to(tl.int64)
    row = wide * HEADS + h
    into = _rows(keys, slots, t, there, h, size, key_block, key_head, key_token)
    _rotate(stored_keys + row * D, None, into, cos, sin, wide, there, 1.0, D, WIDE, HALF, PADDED, INTERLEAVED, LARGEST)
    whole = there[:, None] & (v < V)[None, :]
    value = tl.load(stored_values + (row * V)[:, None] + v[None, :], mask=whole)
    into = _rows(values, slots, t, there, h, size, value_block, value_head, value_token)
    tl.store(into[:, None] + v[None, :], value, mask=whole)


@triton.jit(**CHANGING)
def _gather(
    out_keys, out_values, slots, keys, values, tokens, size,
    key_block, key_head, key_token, value_block, value_head, value_token,
    HEADS: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, V: tl.constexpr, WIDE_V: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Copy the rows at `slots` to keys `[T, H, D]` and values `[T, H, V]`."""
    t, h = tl.program_id(0) * BT + tl.arange(0, BT), tl.program_id(1)
    d, v = tl.arange(0, WIDE), tl.arange(0, WIDE_V)
    there, row = t < tokens, t.to(tl.int64) * HEADS + h
    source = _rows(keys, slots, t, there, h, size, key_block, key_head, key_token)
    mask = there[:, None] & (d < D)[None, :]
    key = tl.load(source[:, None] + d[None, :], mask=mask)
    tl.store(out_keys + (row * D)[:, None] + d[None, :], key, mask=mask)
    source = _rows(values, slots, t, there, h, size, value_block, value_head, value_token)
    mask = there[:, None] & (v < V)[None, :]
    value = tl.load(source[:, None] + v[None, :], mask=mask)
    tl.store(out_values + (row * V)[:, None] + v[None, :], value, mask=mask)


@triton.jit(**CHANGING)
def _deviation(
    stored, slots, keys, changed, tokens, scale, size, stored_token, stored_head, key_block, key_head, key_token,
    HEADS: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Sum the squares of changes over the heads and dimensions, for BT tokens; `scale` is that of the `keys`."""
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
        change = now.to(tl.float32) * scale - before.to(tl.float32)
        far += tl.sum(change * change, 1)
    tl.store(changed + t, far, mask=there)


def place(parts: Sequence[KV], rotation: KeyRotation, slots: torch.Tensor, into: Paged) -> None:
    """See `lmc.blend.kernels.place.place`. Several parts are first staged, then placed in one launch."""
    keys, values = into.keys, into.values
    heads, size = keys.shape[1:3]
    if not len(slots):
        return
    if len(parts) == 1 and all(half.device == keys.device and half.is_contiguous() for half in parts[0]):
        stored = parts[0]
    else:
        stored = _rows_for(into, len(slots))
        stage(parts, stored)
    _place[(triton.cdiv(len(slots), TOKENS), heads)](
        *stored, *rows_of(rotation), slots, keys, values, len(slots), size, *keys.stride()[:3], *values.stride()[:3],
        BT=TOKENS, LARGEST=into.largest, num_warps=4, **value_sizes(values), **rotating(keys, rotation),
    )  # fmt: skip


def _rows_for(pages: Paged, tokens: int) -> KV:
    """Return uninitialized memory for keys and values `[T, H, D]`."""
    keys, values = (half.new_empty(tokens, half.shape[1], half.shape[3]) for half in pages[:2])
    return keys, values


def rows_of(rotation: KeyRotation) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin without gaps between rows, as the kernels require."""
    return rotation.cos.contiguous(), rotation.sin.contiguous()


def rotating(keys: torch.Tensor, rotation: KeyRotation) -> dict[str, Any]:
    """Return the compile-time arguments of a kernel that rotates keys `[B, H, N, D]`."""
    (_, heads, _, dim), half = keys.shape, rotation.cos.shape[1]
    wide = {"D": dim, "WIDE": padded(dim), "HALF": half, "PADDED": padded(half)}
    return {"HEADS": heads, **wide, "INTERLEAVED": rotation.interleaved, **FUSED}


def value_sizes(values: torch.Tensor) -> dict[str, int]:
    """Return the compile-time arguments of a kernel for values `[B, H, N, V]`."""
    dim = values.shape[3]
    return {"V": dim, "WIDE_V": padded(dim)}


def padded(dim: int) -> int:
    """Return the power of 2 to which a program pads a dimension. Products need at least 16."""
    return int(max(16, triton.next_power_of_2(dim)))


def stage(parts: Sequence[KV], into: KV) -> None:
    """See `lmc.blend.kernels.place.stage`. All parts are copied in one call if the device supports it."""
    submit = submit_of(into[0].device)
    if submit is None or not _can_copy(*parts, into):
        torch_place.stage(parts, into)
        return
    counts = np.array([len(keys) for keys, _ in parts], np.int64)
    submit(_copies(parts, into, np.cumsum(counts) - counts))


def spread(keys: torch.Tensor, values: torch.Tensor, parts: Sequence[KV], firsts: Sequence[int]) -> None:
    """See `lmc.blend.kernels.place.spread`. All parts are copied in one call if the device supports it."""
    submit = submit_of(keys.device)
    if submit is None or not _can_copy(*parts):
        torch_place.spread(keys, values, parts, firsts)
        return
    submit(_copies(parts, (keys.contiguous(), values.contiguous()), np.array(firsts, np.int64)).reversed())


def _can_copy(*parts: KV) -> bool:
    """Return whether a GPU can copy the parts by itself, because their rows have no gaps."""
    return all(can_submit(half) and half.is_contiguous() for part in parts for half in part)


def _copies(parts: Sequence[KV], whole: KV, firsts: Addresses) -> Copies:
    """Return the copies of parts to the rows of `whole` from `firsts` on."""
    places, rows, sizes = [], [], []
    for half, there in zip(zip(*parts, strict=True), whole, strict=False):
        row = there.stride(0) * there.element_size()
        places += [part.data_ptr() for part in half]
        rows.append(there.data_ptr() + firsts * row)
        sizes.append(np.array([len(part) for part in half], np.int64) * row)
    return Copies(np.array(places, np.int64), np.concatenate(rows), np.concatenate(sizes))


def gather(source: Paged, slots: torch.Tensor) -> KV:
    """See `lmc.blend.kernels.place.gather`."""
    keys, values = source.keys, source.values
    heads, size, dim = keys.shape[1:]
    out = _rows_for(source, len(slots))
    if len(slots):
        _gather[(triton.cdiv(len(slots), TOKENS), heads)](
            *out, slots, keys, values, len(slots), size, *keys.stride()[:3], *values.stride()[:3],
            HEADS=heads, D=dim, WIDE=padded(dim), **value_sizes(values), BT=TOKENS, num_warps=4, **FUSED,
        )  # fmt: skip
    return out


def deviation(canvas: Canvas[R], layer: int, slots: torch.Tensor, stored: torch.Tensor) -> torch.Tensor:
    """See `lmc.blend.kernels.place.deviation`."""
    pages, count = canvas.paged(layer), len(slots)
    keys, (heads, size, dim) = pages.keys, pages.keys.shape[1:]
    changed = torch.empty(count, dtype=torch.float32, device=keys.device)
    if count:
        _deviation[(triton.cdiv(count, TOKENS),)](
            stored, slots, keys, changed, count, pages.scales[0], size, *stored.stride()[:2], *keys.stride()[:3],
            HEADS=heads, D=dim, WIDE=padded(dim), BT=TOKENS, num_warps=4, **FUSED,
        )  # fmt: skip
    return changed
