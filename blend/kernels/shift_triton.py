"""The changes of recomputed tokens, and the correction of others, in Triton; `shift.py` has the same in torch."""

import torch
import triton
import triton.language as tl

from lmc.blend.canvas import KV, Canvas, Paged, R
from lmc.blend.kernels.place_triton import (
    CHANGING,
    FUSED,
    _difference,
    _pairs,
    _rotate,
    _rounded,
    _rows,
    padded,
    rotating,
    rows_of,
    value_sizes,
)
from lmc.blend.kernels.shift import MOST_EXAMPLES, SHARED, TILE, VALUE_SHARE, Spans
from lmc.blend.rope import KeyRotation

TOKENS = 16  # tokens per program of `_rotated` or `_changes`
WIDEST = 128  # maximal number of dimensions of a value that `_correct` corrects in one step
BLOCK = 32  # dimensions per program of `_mean`, and per step of `_alike`


@triton.jit(**CHANGING)
def _rotated(
    out, cos, sin, slots, keys, tokens, scale, size, key_block, key_head, key_token,
    HEADS: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, HALF: tl.constexpr,
    PADDED: tl.constexpr, BT: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Store the rotated keys of BT tokens and one head, times `scale`, in `out [T, H, D]`."""
    t, h = tl.program_id(0) * BT + tl.arange(0, BT), tl.program_id(1)
    there, wide = t < tokens, t.to(tl.int64)
    source = _rows(keys, slots, t, there, h, size, key_block, key_head, key_token)
    into = out + (wide * HEADS + h) * D
    _rotate(source, None, into, cos, sin, wide, there, scale, D, WIDE, HALF, PADDED, INTERLEAVED, 0)


@triton.jit(**CHANGING)
def _mean(out, rows, documents, DIMS: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr):
    """Store the mean of a document's `rows [T, DIMS]` in BD dimensions of `out [documents, DIMS]`."""
    number, d = tl.program_id(0).to(tl.int64), tl.program_id(1) * BD + tl.arange(0, BD)
    first, tokens = tl.load(documents + 5 * number).to(tl.int64), tl.load(documents + 5 * number + 1)
    total = tl.zeros([BD], tl.float32)
    for begin in range(0, tokens, BT):
        t = begin + tl.arange(0, BT)
        mask = (t < tokens)[:, None] & (d < DIMS)[None, :]
        total += tl.sum(tl.load(rows + (first + t)[:, None] * DIMS + d[None, :], mask=mask, other=0.0), 0)
    tl.store(out + number * DIMS + d, total / tl.maximum(tokens, 1), mask=d < DIMS)


@triton.jit
def _centred(rows, t, there, d, mean, DIMS: tl.constexpr):
    """Return the dimensions `d` of `rows [T, DIMS]`, minus the mean."""
    mask = there[:, None] & (d < DIMS)[None, :]
    return tl.load(rows + t.to(tl.int64)[:, None] * DIMS + d[None, :], mask=mask, other=0.0) - mean[None, :]


@triton.jit(**CHANGING)
def _alike(
    out, rows, examples, means, inverses, spans,
    DIMS: tl.constexpr, MOST: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, SHARED: tl.constexpr, OWN: tl.constexpr,
):  # fmt: skip
    """Compute the similarity of some rows and the examples of their document.

    If OWN, the rows are all examples of a document. The result plus the penalty goes to `out [documents, MOST, MOST]`;
    absent examples have rows of the identity. Otherwise the rows are a tile of tokens. The result times the inverse of
    their document's matrix goes to `out [T, MOST]`.
    """
    span, r, m = spans + 5 * tl.program_id(0), tl.arange(0, BT), tl.arange(0, MOST)
    example, known, number = tl.load(span + 2), tl.load(span + 3), tl.load(span + 4).to(tl.int64)
    t, there = (example + r, r < known) if OWN else (tl.load(span) + r, r < tl.load(span + 1))
    products = tl.zeros([BT, MOST], tl.float32)
    length, known_length = tl.zeros([BT], tl.float32), tl.zeros([MOST], tl.float32)
    for begin in range(0, DIMS, BD):
        d = begin + tl.arange(0, BD)
        mean = tl.load(means + number * DIMS + d, mask=d < DIMS, other=0.0)
        row, other = _centred(rows, t, there, d, mean, DIMS), _centred(examples, example + m, m < known, d, mean, DIMS)
        products = tl.dot(row, tl.trans(other), products, input_precision="tf32x3")
        length += tl.sum(row * row, 1)
        known_length += tl.sum(other * other, 1)
    products /= tl.maximum(tl.sqrt(length), 1e-12)[:, None] * tl.maximum(tl.sqrt(known_length), 1e-12)[None, :]
    products = tl.where(there[:, None] & (m < known)[None, :], products + SHARED, 0.0)
    its = (number * MOST + m[:, None]) * MOST + m[None, :]
    if OWN:
        tl.store(out + its, products + tl.where(r[:, None] == m[None, :], 1.0, 0.0))
    else:  # Inverses are symmetric, so their memory order does not matter.
        weights = tl.dot(products, tl.load(inverses + its), input_precision="tf32x3")
        tl.store(out + t.to(tl.int64)[:, None] * MOST + m[None, :], weights, mask=there[:, None])


@triton.jit(**CHANGING)
def _invert(inverses, MOST: tl.constexpr):
    """Replace a matrix of `[documents, MOST, MOST]` by its inverse.

    The matrices are symmetric, and the penalty makes all of their eigenvalues at least 1. So Gauss-Jordan elimination
    needs no other pivots than the diagonal.
    """
    m = tl.arange(0, MOST)
    r, c = m[:, None], m[None, :]
    where = inverses + (tl.program_id(0).to(tl.int64) * MOST + r) * MOST + c
    matrix = tl.load(where)
    for k in range(MOST):
        row = tl.sum(tl.where(r == k, matrix, 0.0), 0)
        column = tl.sum(tl.where(c == k, matrix, 0.0), 1)
        row = tl.where(m == k, 1.0, row) / tl.sum(tl.where(m == k, row, 0.0), 0)
        others = tl.where(c == k, 0.0, matrix) - column[:, None] * row[None, :]
        matrix = tl.where(r == k, row[None, :], others)
    tl.store(where, matrix)


@triton.jit(**CHANGING)
def _changes(
    out, old_keys, old_values, cos, sin, slots, keys, values, tokens, share, key_scale, value_scale, size,
    old_key_token, old_key_head, old_value_token, old_value_head,
    key_block, key_head, key_token, value_block, value_head, value_token,
    HEADS: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, V: tl.constexpr, WIDE_V: tl.constexpr,
    HALF: tl.constexpr, PADDED: tl.constexpr, BT: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Store new minus old keys, rotated, and new minus old values times `share`, in `out [T, H·D + H·V]`.

    A program does this for BT tokens and one head.
    """
    t, h, v = tl.program_id(0) * BT + tl.arange(0, BT), tl.program_id(1), tl.arange(0, WIDE_V)
    there, wide = t < tokens, t.to(tl.int64)
    now = _rows(keys, slots, t, there, h, size, key_block, key_head, key_token)
    old = old_keys + wide * old_key_token + h * old_key_head
    row = out + wide * (HEADS * (D + V))
    _rotate(now, old, row + h * D, cos, sin, wide, there, key_scale, D, WIDE, HALF, PADDED, INTERLEAVED, 0)
    now = _rows(values, slots, t, there, h, size, value_block, value_head, value_token)
    old = old_values + wide * old_value_token + h * old_value_head
    whole, into = there[:, None] & (v < V)[None, :], row + HEADS * D + h * V
    tl.store(into[:, None] + v[None, :], _difference(now, old, v, whole, value_scale) * share, mask=whole)


@triton.jit
def _summed(weights, changes, e, known, d, wanted):
    """Return `weights [T, M]` times the dimensions `d` of the rows of `changes` at the offsets `e`."""
    mask = known[:, None] & wanted[None, :]
    return tl.dot(weights, tl.load(changes + e[:, None] + d[None, :], mask=mask, other=0.0), input_precision="tf32x3")


@triton.jit
def _add(into, d, more, mask, scale, LARGEST: tl.constexpr):
    """Add `more` to the dimensions `d` of rows; `scale` is that of the rows."""
    where = into[:, None] + d[None, :]
    before = tl.load(where, mask=mask, other=0.0)
    tl.store(where, _rounded(before.to(tl.float32) + more / scale, before.dtype, LARGEST), mask=mask)


@triton.jit(**CHANGING)
def _correct(
    weights, changes, tiles, cos, sin, slots, keys, values, key_scale, value_scale, size,
    key_block, key_head, key_token, value_block, value_head, value_token,
    HEADS: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, V: tl.constexpr, WIDE_V: tl.constexpr,
    HALF: tl.constexpr, PADDED: tl.constexpr, MOST: tl.constexpr, BT: tl.constexpr,
    INTERLEAVED: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """Correct BT tokens of one tile in one head. The third program id selects the BT tokens in the tile."""
    h, d, i, m = tl.program_id(1), tl.arange(0, WIDE), tl.arange(0, PADDED), tl.arange(0, MOST)
    tile, n = tiles + 5 * tl.program_id(0), tl.program_id(2) * BT + tl.arange(0, BT)
    t, there = tl.load(tile) + n, n < tl.load(tile + 1)
    known, wide = m < tl.load(tile + 3), t.to(tl.int64)
    own = tl.load(weights + wide[:, None] * MOST + m[None, :], mask=there[:, None] & known[None, :], other=0.0)
    e = (tl.load(tile + 2) + m).to(tl.int64) * (HEADS * (D + V)) + h * D
    first, second = _pairs(i, HALF, INTERLEAVED)
    half = there[:, None] & (i < HALF)[None, :]
    a = _summed(own, changes, e, known, first, i < HALF)
    b = _summed(own, changes, e, known, second, i < HALF)
    c = tl.load(cos + wide[:, None] * HALF + i[None, :], mask=half, other=0.0)
    s = tl.load(sin + wide[:, None] * HALF + i[None, :], mask=half, other=0.0)
    into = _rows(keys, slots, t, there, h, size, key_block, key_head, key_token)
    _add(into, first, a * c - b * s, half, key_scale, LARGEST)
    _add(into, second, b * c + a * s, half, key_scale, LARGEST)
    if 2 * HALF < D:
        rest = (d >= 2 * HALF) & (d < D)
        _add(into, d, _summed(own, changes, e, known, d, rest), there[:, None] & rest[None, :], key_scale, LARGEST)
    into = _rows(values, slots, t, there, h, size, value_block, value_head, value_token)
    e += HEADS * D + h * (V - D)
    for begin in range(0, V, WIDE_V):
        v = begin + tl.arange(0, WIDE_V)
        more, mask = _summed(own, changes, e, known, v, v < V), there[:, None] & (v < V)[None, :]
        _add(into, v, more, mask, value_scale, LARGEST)


def weights_of(
    canvas: Canvas[R],
    layer: int,
    stored: torch.Tensor,
    slots: torch.Tensor,
    rotations: tuple[KeyRotation, KeyRotation],
    spans: Spans,
) -> torch.Tensor:
    """See `lmc.blend.kernels.shift.weights_of`. Stored keys are treated as pages of one token each."""
    apart, pages = stored[:, :, None], canvas.paged(layer)
    known = _rotated_keys(Paged(apart, apart), torch.arange(len(stored), device=stored.device), rotations[0])
    asked = _rotated_keys(pages, slots, rotations[1])
    documents, dims = len(spans.documents), known.shape[1]
    means, weights = known.new_empty(documents, dims), known.new_empty(len(slots), MOST_EXAMPLES)
    own = known.new_empty(documents, MOST_EXAMPLES, MOST_EXAMPLES)
    _mean[(documents, triton.cdiv(dims, BLOCK))](means, asked, spans.documents, DIMS=dims, BT=TILE, BD=BLOCK, **FUSED)
    sizes = {"DIMS": dims, "MOST": MOST_EXAMPLES, "BD": BLOCK, "SHARED": SHARED, **FUSED}
    _alike[(documents,)](  # With 4 warps, it spills registers on sm_120 in Triton 3.6.
        own, known, known, means, own, spans.documents, BT=MOST_EXAMPLES, OWN=True, num_warps=8, **sizes
    )
    invert(own)
    _alike[(len(spans.tiles),)](
        weights, asked, known, means, own, spans.tiles, BT=TILE, OWN=False, num_warps=4, **sizes
    )
    return weights


def invert(matrices: torch.Tensor) -> None:
    """Invert symmetric matrices `[n, MOST_EXAMPLES, MOST_EXAMPLES]` in place."""
    _invert[(len(matrices),)](matrices, MOST=MOST_EXAMPLES, num_warps=4, **FUSED)


def _rotated_keys(pages: Paged, slots: torch.Tensor, rotation: KeyRotation) -> torch.Tensor:
    """Return the rotated keys at `slots [T]`, in float32 `[T, H · D]`."""
    keys, (heads, size, dim) = pages.keys, pages.keys.shape[1:]
    out = torch.empty(len(slots), heads * dim, dtype=torch.float32, device=keys.device)
    _rotated[(triton.cdiv(len(slots), TOKENS), heads)](
        out, *rows_of(rotation), slots, keys, len(slots), pages.scales[0], size, *keys.stride()[:3],
        BT=TOKENS, num_warps=4, **rotating(keys, rotation),
    )  # fmt: skip
    return out


def changes_of(canvas: Canvas[R], layer: int, slots: torch.Tensor, stored: KV, rotation: KeyRotation) -> torch.Tensor:
    """See `lmc.blend.kernels.shift.changes_of`."""
    pages = canvas.paged(layer)
    keys, values, (heads, size, dim) = pages.keys, pages.values, pages.keys.shape[1:]
    numbers = heads * (dim + values.shape[3])
    out = torch.empty(len(slots), numbers, dtype=torch.float32, device=keys.device)
    _changes[(triton.cdiv(len(slots), TOKENS), heads)](
        out, *stored, *rows_of(rotation), slots, keys, values, len(slots), VALUE_SHARE, *pages.scales, size,
        *stored[0].stride()[:2], *stored[1].stride()[:2], *keys.stride()[:3], *values.stride()[:3],
        BT=TOKENS, num_warps=4, **value_sizes(values), **rotating(keys, rotation),
    )  # fmt: skip
    return out


def correct(
    canvas: Canvas[R],
    layer: int,
    slots: torch.Tensor,
    weights: torch.Tensor,
    changes: torch.Tensor,
    spans: Spans,
    rotation: KeyRotation,
) -> None:
    """See `lmc.blend.kernels.shift.correct`."""
    pages = canvas.paged(layer)
    keys, values, (heads, size, dim) = pages.keys, pages.values, pages.keys.shape[1:]
    wide = corrected_values(values.shape[3])
    together = corrected(
        dim, values.shape[3], rotation.cos.shape[1], scattered=rotation.interleaved and pages.largest > 0
    )
    _correct[(len(spans.tiles), heads, TILE // together)](
        weights, changes, spans.tiles, *rows_of(rotation), slots, keys, values, *pages.scales, size,
        *keys.stride()[:3], *values.stride()[:3],
        MOST=MOST_EXAMPLES, BT=together, LARGEST=pages.largest, num_warps=8, **wide, **rotating(keys, rotation),
    )  # fmt: skip


def corrected_values(dim: int) -> dict[str, int]:
    """Return the sizes of values in `_correct`, which corrects long values in several steps."""
    return {"V": dim, "WIDE_V": padded(dim) if dim <= WIDEST else WIDEST // 2}


def corrected(dim: int, value_dim: int, half: int, *, scattered: bool = False) -> int:
    """Return the tokens per program of `_correct`, as many as fit into its registers.

    They are fewer for long heads, latent values, keys of which only the first `2 * half` numbers are rotated, and
    `scattered` numbers: those of a quantised cache whose pairs lie side by side.
    """
    return TILE if dim <= 128 and value_dim <= 128 and 2 * half == dim and not scattered else TILE // 2
