"""What repaired tokens have changed by, and what the others get of it, in Triton; `shift.py` has the same in torch."""

import torch
import triton
import triton.language as tl
from torch.nn.functional import normalize

from lmc.blend.canvas import KV, Canvas, R
from lmc.blend.kernels.place_triton import FUSED, _pairs, _rows, padded
from lmc.blend.kernels.shift import MOST_EXAMPLES, SHARED, TILE, VALUE_SHARE, Spans
from lmc.blend.rope import Turn
from lmc.shapes import KV as KINDS

TOKENS = 16  # that a program of `_changes` takes
AT_ONCE = 16  # documents whose examples are multiplied with all of their tokens


@triton.jit
def _changes(
    out, old_keys, old_values, cos, sin, slots, keys, values, tokens, share, size,
    old_key_token, old_key_head, old_value_token, old_value_head,
    key_block, key_head, key_token, value_block, value_head, value_token,
    HEADS: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, HALF: tl.constexpr, PADDED: tl.constexpr,
    BT: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Store new less old keys, rotated, and values, of BT tokens and one head in `out [T, K, H, D]`."""
    t, h, d, i = tl.program_id(0) * BT + tl.arange(0, BT), tl.program_id(1), tl.arange(0, WIDE), tl.arange(0, PADDED)
    there, wide = t < tokens, t.to(tl.int64)
    first, second = _pairs(i, HALF, INTERLEAVED)
    half, whole = there[:, None] & (i < HALF)[None, :], there[:, None] & (d < D)[None, :]
    now = _rows(keys, slots, t, there, h, size, key_block, key_head, key_token)
    old = old_keys + wide * old_key_token + h * old_key_head
    into = out + (wide * 2 * HEADS + h) * D
    a = _difference(now, old, first, half)
    b = _difference(now, old, second, half)
    c = tl.load(cos + wide[:, None] * HALF + i[None, :], mask=half, other=0.0)
    s = tl.load(sin + wide[:, None] * HALF + i[None, :], mask=half, other=0.0)
    tl.store(into[:, None] + first[None, :], a * c - b * s, mask=half)
    tl.store(into[:, None] + second[None, :], b * c + a * s, mask=half)
    if 2 * HALF < D:
        rest = whole & (d >= 2 * HALF)[None, :]
        tl.store(into[:, None] + d[None, :], _difference(now, old, d, rest), mask=rest)
    now = _rows(values, slots, t, there, h, size, value_block, value_head, value_token)
    old = old_values + wide * old_value_token + h * old_value_head
    tl.store(into[:, None] + HEADS * D + d[None, :], _difference(now, old, d, whole) * share, mask=whole)


@triton.jit
def _difference(now, old, d, mask):
    new = tl.load(now[:, None] + d[None, :], mask=mask, other=0.0).to(tl.float32)
    return new - tl.load(old[:, None] + d[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _summed(weights, changes, e, known, d, wanted):
    """Return `weights [T, M]` times the dimensions `d` of `changes`, rows that are `[K, H, D]` apart."""
    mask = known[:, None] & wanted[None, :]
    return tl.dot(weights, tl.load(changes + e[:, None] + d[None, :], mask=mask, other=0.0), input_precision="tf32x3")


@triton.jit
def _add(into, d, more, mask):
    where = into[:, None] + d[None, :]
    before = tl.load(where, mask=mask, other=0.0)
    tl.store(where, (before.to(tl.float32) + more).to(before.dtype), mask=mask)


@triton.jit
def _correct(
    weights, changes, tiles, cos, sin, slots, keys, values, size,
    key_block, key_head, key_token, value_block, value_head, value_token,
    HEADS: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, HALF: tl.constexpr, PADDED: tl.constexpr,
    MOST: tl.constexpr, BT: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Correct the tokens of one tile in one head."""
    h, d, i, m = tl.program_id(1), tl.arange(0, WIDE), tl.arange(0, PADDED), tl.arange(0, MOST)
    tile = tiles + 4 * tl.program_id(0)
    t = tl.load(tile) + tl.arange(0, BT)
    there = tl.arange(0, BT) < tl.load(tile + 1)
    known, wide = m < tl.load(tile + 3), t.to(tl.int64)
    own = tl.load(weights + wide[:, None] * MOST + m[None, :], mask=there[:, None] & known[None, :], other=0.0)
    e = ((tl.load(tile + 2) + m).to(tl.int64) * 2 * HEADS + h) * D
    first, second = _pairs(i, HALF, INTERLEAVED)
    half, whole = there[:, None] & (i < HALF)[None, :], there[:, None] & (d < D)[None, :]
    a = _summed(own, changes, e, known, first, i < HALF)
    b = _summed(own, changes, e, known, second, i < HALF)
    c = tl.load(cos + wide[:, None] * HALF + i[None, :], mask=half, other=0.0)
    s = tl.load(sin + wide[:, None] * HALF + i[None, :], mask=half, other=0.0)
    into = _rows(keys, slots, t, there, h, size, key_block, key_head, key_token)
    _add(into, first, a * c - b * s, half)
    _add(into, second, b * c + a * s, half)
    if 2 * HALF < D:
        rest = (d >= 2 * HALF) & (d < D)
        _add(into, d, _summed(own, changes, e, known, d, rest), there[:, None] & rest[None, :])
    into = _rows(values, slots, t, there, h, size, value_block, value_head, value_token)
    _add(into, d, _summed(own, changes, e + HEADS * D, known, d, d < D), whole)


def weights_of(examples: torch.Tensor, tokens: torch.Tensor, spans: Spans) -> torch.Tensor:
    """See `lmc.blend.kernels.shift.weights_of`. This is for all documents at once, with few and large operations.

    The regression's matrix is applied to the examples, not to the tokens, so that documents may have any lengths.
    """
    known, asked, documents = examples.flatten(1), tokens.flatten(1), len(spans.tokens)
    number, its = spans.example_document, spans.token_document
    sums = known.new_zeros(documents, known.shape[1] + 1)
    sums[:, :-1].index_add_(0, its, asked)
    mean = sums[:, :-1] / sums[:, -1:].index_add_(0, its, known.new_ones(1, 1).expand(len(asked), 1))
    known, asked = normalize(known - mean[number], dim=-1), normalize(asked - mean[its], dim=-1)
    padded = known.new_zeros(documents, MOST_EXAMPLES, known.shape[1] + 1)
    padded[number, spans.example_place, :-1] = known
    padded[number, spans.example_place, -1] = SHARED**0.5  # so that the product of two rows has the constant
    one = torch.eye(MOST_EXAMPLES, device=known.device).expand(documents, -1, -1)
    solved, weights, at = torch.linalg.solve_ex(torch.baddbmm(one, padded, padded.mT), padded)[0], [], 0
    for first in range(0, documents, AT_ONCE):
        some, count = solved[first : first + AT_ONCE], sum(spans.tokens[first : first + AT_ONCE])
        own = its[at : at + count] - first
        products = asked[at : at + count] @ some[..., :-1].flatten(0, 1).T  # with the examples of several documents
        products = products.unflatten(1, (len(some), MOST_EXAMPLES)) + SHARED**0.5 * some[..., -1]
        weights.append(products.take_along_dim(own[:, None, None], dim=1)[:, 0])
        at += count
    return torch.cat(weights) if weights else known.new_zeros(0, MOST_EXAMPLES)


def changes_of(canvas: Canvas[R], layer: int, slots: torch.Tensor, stored: KV, turn: Turn) -> torch.Tensor:
    """See `lmc.blend.kernels.shift.changes_of`."""
    keys, values, _ = canvas.paged(layer)
    (_, heads, size, dim), (cos, sin) = keys.shape, (one.contiguous() for one in turn)
    out = torch.empty(len(slots), KINDS, heads, dim, dtype=torch.float32, device=keys.device)
    if len(slots):
        _changes[(triton.cdiv(len(slots), TOKENS), heads)](
            out, *stored, cos, sin, slots, keys, values, len(slots), VALUE_SHARE, size,
            *stored[0].stride()[:2], *stored[1].stride()[:2], *keys.stride()[:3], *values.stride()[:3],
            HEADS=heads, D=dim, WIDE=padded(dim), HALF=cos.shape[1],
            PADDED=padded(cos.shape[1]), BT=TOKENS, INTERLEAVED=canvas.interleaved,
            num_warps=4, **FUSED,
        )  # fmt: skip
    return out


def correct(
    canvas: Canvas[R],
    layer: int,
    slots: torch.Tensor,
    weights: torch.Tensor,
    changes: torch.Tensor,
    spans: Spans,
    turn: Turn,
) -> None:
    """See `lmc.blend.kernels.shift.correct`."""
    keys, values, _ = canvas.paged(layer)
    (_, heads, size, dim), (cos, sin) = keys.shape, (one.contiguous() for one in turn)
    if not len(spans.tiles):
        return
    _correct[(len(spans.tiles), heads)](
        weights, changes, spans.tiles, cos, sin, slots, keys, values, size, *keys.stride()[:3], *values.stride()[:3],
        HEADS=heads, D=dim, WIDE=padded(dim), HALF=cos.shape[1],
        PADDED=padded(cos.shape[1]), MOST=MOST_EXAMPLES, BT=TILE,
        INTERLEAVED=canvas.interleaved, num_warps=8, **FUSED,
    )  # fmt: skip
