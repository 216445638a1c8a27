"""Attention of scattered queries, and their attention to each key, in Triton; `attention.py` has the same in torch.

A program of `_attend` computes some tokens and all query heads of one KV head. It uses the running softmax of
FlashAttention (Dao et al. 2022, arXiv 2205.14135; Dao 2023, arXiv 2307.08691). It reads the keys up to the greatest
position of its tokens. It compares positions only for keys after the smallest position.

`_paid` computes the probabilities again from the log-sums that `_attend` stores, one block of keys per program, so the
probabilities are never in memory.

Few rows make few programs, which would leave most of a GPU idle over a long context. Then several programs share the
keys of the same rows, and `_join` combines their results.

With a window or a chunk (LIMIT), programs read no keys before the first one that any of their rows sees. A sink is a
logit with which a row's softmax begins. CAP is a soft cap of logits to base 2, or 0 for none.

Latent values (MLA) are read once for both products. All query heads have one KV head there, which is too much for one
program: the kernels get it as several KV heads at the same addresses.
"""

import torch
import triton
import triton.language as tl

from lmc.blend.canvas import KV, Paged
from lmc.blend.kernels.attention import OverHeads
from lmc.blend.kernels.place_triton import CHANGING, FUSED, padded, value_sizes
from lmc.blend.kernels.tuning import Kind, Tile, Tuning, tuning_of
from lmc.blend.layer_attention import LayerAttention

LOG2_E = tl.constexpr(1.4426950408889634)
FEWEST = 16  # minimum number of rows of a product on tensor cores
# Which keys before its own position a query sees. Kernels may only read constants of this type.
ALL, WINDOW, CHUNK = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def _pages(base, table, j, seen, h, stride_block, stride_head, stride_token, SIZE: tl.constexpr, PAGED: tl.constexpr):
    """Return the addresses of the rows of the positions `j`."""
    head = base + h.to(tl.int64) * stride_head
    if PAGED:
        block = tl.load(table + j // SIZE, mask=seen, other=0).to(tl.int64)
        return head + block * stride_block + (j % SIZE).to(tl.int64) * stride_token
    return head + j.to(tl.int64) * stride_token


@triton.jit
def _first_seen(at, limit, LIMIT: tl.constexpr):
    """Return the first positions that queries at `at` see, in a window or a chunk of `limit` positions."""
    if LIMIT == WINDOW:
        return at - limit + 1
    return at - at % limit


@triton.jit
def _of_model(numbers, kind: tl.constexpr):
    """Return numbers of pages, which may be quantised, in the `kind` of the model's numbers.

    Triton 3.6 converts 8 bits to bfloat16 directly with an instruction that GPUs of 8.9 do not have.
    """
    return numbers if numbers.dtype == kind else numbers.to(tl.float32).to(kind)


@triton.jit
def _scaled(logits, factor, CAP: tl.constexpr):
    """Return logits to base 2, below the soft cap if there is one: tanh(x) is 1 - 2 / (1 + exp(2 x))."""
    logits *= factor
    if CAP > 0:
        logits = CAP * (1.0 - 2.0 / (1.0 + tl.exp2(logits * (2.0 * LOG2_E / CAP))))
    return logits


@triton.jit
def _step(
    query, latent, keys, values, table, present, at, start, reach, h, most, total, sums, factor, limit,
    key_block, key_head, key_token, value_block, value_head, value_token,
    D: tl.constexpr, WIDE: tl.constexpr, V: tl.constexpr, WIDE_V: tl.constexpr, SIZE: tl.constexpr, BN: tl.constexpr,
    PAGED: tl.constexpr, PRESENT: tl.constexpr, LIMIT: tl.constexpr, CAP: tl.constexpr, ALL_SEEN: tl.constexpr,
):  # fmt: skip
    """Add the keys from position `start` on to the running softmax; `at` are the positions of the queries.

    `latent` is the second part of the queries, for values that are also keys; None if they are not.
    """
    d, v, j = tl.arange(0, WIDE), tl.arange(0, WIDE_V), start + tl.arange(0, BN)
    seen = j < reach
    if PRESENT:
        seen &= tl.load(present + j, mask=seen, other=0) != 0
    here = _pages(keys, table, j, j < reach, h, key_block, key_head, key_token, SIZE, PAGED)
    there = _pages(values, table, j, j < reach, h, value_block, value_head, value_token, SIZE, PAGED)
    if ALL_SEEN and not PRESENT and D == WIDE and V == WIDE_V:
        key = tl.load(here[None, :] + d[:, None])
        value = tl.load(there[:, None] + v[None, :])
    else:
        key = tl.load(here[None, :] + d[:, None], mask=seen[None, :] & (d < D)[:, None], other=0.0)
        value = tl.load(there[:, None] + v[None, :], mask=seen[:, None] & (v < V)[None, :], other=0.0)
    key, value = _of_model(key, query.dtype), _of_model(value, query.dtype)
    logits = tl.dot(query, key, input_precision="tf32x3")
    if latent is not None:
        logits = tl.dot(latent, tl.trans(value), logits, input_precision="tf32x3")
    logits = _scaled(logits, factor, CAP)
    if not ALL_SEEN:
        logits = tl.where(j[None, :] <= at[:, None], logits, float("-inf"))
    if LIMIT != ALL:
        logits = tl.where(j[None, :] >= _first_seen(at, limit, LIMIT)[:, None], logits, float("-inf"))
    if PRESENT or not ALL_SEEN:
        logits = tl.where(seen[None, :], logits, float("-inf"))
    greatest = tl.maximum(most, tl.max(logits, 1))
    anchor = tl.where(greatest == float("-inf"), 0.0, greatest)
    weights = tl.exp2(logits - anchor[:, None])
    shrunk = tl.exp2(most - anchor)
    sums = sums * shrunk[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="tf32x3")
    return greatest, total * shrunk + tl.sum(weights, 1), sums


@triton.jit
def _queries(row, tile, tokens, h, BM: tl.constexpr, GROUP: tl.constexpr):
    """Return the tokens and the query heads of a tile's rows, and which rows exist."""
    PER: tl.constexpr = BM // GROUP
    t = tile * PER + row // GROUP
    return t, h * GROUP + row % GROUP, (t < tokens) & (row < PER * GROUP)


@triton.jit(**CHANGING)
def _attend(
    query, keys, values, table, positions, present, sinks, out, log_sums, tokens, factor, value_scale, limit,
    query_token, query_head, key_block, key_head, key_token, value_block, value_head, value_token,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, V: tl.constexpr,
    WIDE_V: tl.constexpr, LATENT: tl.constexpr, SIZE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    PAGED: tl.constexpr, PRESENT: tl.constexpr, LIMIT: tl.constexpr, CAP: tl.constexpr, SINKS: tl.constexpr,
    LOG_SUMS: tl.constexpr,
):  # fmt: skip
    """Attend for BM // GROUP tokens and one KV head; `factor` is the scale of logits to base 2, with that of the keys.

    Programs start in the order of their ids. Programs of the last tokens read most and come first. The heads of the
    same tokens are adjacent. The third program id is the share of the keys, if several programs share them.
    """
    h, tile, share = tl.program_id(0), tl.num_programs(1) - 1 - tl.program_id(1), tl.program_id(2)
    row, d, v = tl.arange(0, BM), tl.arange(0, WIDE), tl.arange(0, WIDE_V)
    t, head, there = _queries(row, tile, tokens, h, BM, GROUP)
    at = tl.load(positions + t, mask=there, other=-1).to(tl.int32)
    first = tl.min(tl.where(there, at, 2147483647), 0)
    reach = tl.max(at, 0) + 1
    where = query + t.to(tl.int64)[:, None] * query_token + head[:, None] * query_head
    q = tl.load(where + d[None, :], mask=there[:, None] & (d < D)[None, :], other=0.0)
    latent = tl.load(where + D + v[None, :], mask=there[:, None] & (v < V)[None, :], other=0.0) if LATENT else None
    most = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    if SINKS:  # If several programs share the keys, the first one counts the sinks.
        sink = tl.load(sinks + head, mask=there, other=float("-inf")).to(tl.float32) * LOG2_E
        most = tl.where(share == 0, sink, most)
        total = tl.where(most == float("-inf"), 0.0, 1.0)
    sums = tl.zeros([BM, WIDE_V], tl.float32)
    low = tl.maximum(_first_seen(first, limit, LIMIT), 0) // BN * BN if LIMIT != ALL else 0
    per = tl.cdiv(tl.cdiv(reach - low, tl.num_programs(2)), BN) * BN
    begin = low + share * per
    reach = tl.minimum(reach, begin + per)
    # Every query sees all keys before `whole`, unless a window or a chunk hides some.
    whole = tl.minimum((first + 1) // BN * BN, reach) if LIMIT == ALL else begin
    if LIMIT == ALL:
        for start in range(begin, whole, BN):
            most, total, sums = _step(
                q, latent, keys, values, table, present, at, start, reach, h, most, total, sums, factor, limit,
                key_block, key_head, key_token, value_block, value_head, value_token,
                D, WIDE, V, WIDE_V, SIZE, BN, PAGED, PRESENT, LIMIT, CAP, True,
            )  # fmt: skip
    for start in range(tl.maximum(begin, whole), reach, BN):
        most, total, sums = _step(
            q, latent, keys, values, table, present, at, start, reach, h, most, total, sums, factor, limit,
            key_block, key_head, key_token, value_block, value_head, value_token,
            D, WIDE, V, WIDE_V, SIZE, BN, PAGED, PRESENT, LIMIT, CAP, False,
        )  # fmt: skip
    total = tl.where(total == 0.0, 1.0, total)  # 0: the row does not exist, or sees no key of this share.
    # The compiler would keep the rows' indices in registers during the loops, and some GPUs have too few registers
    # (`tests/test_kernels_compile.py`). So they are computed again, with a 0 that the compiler cannot fold.
    t, head, there = _queries(row + tl.minimum(tl.load(positions), 0), tile, tokens, h, BM, GROUP)
    wanted = there[:, None] & (v < V)[None, :]
    result = sums / total[:, None] * value_scale
    at_row = (share.to(tl.int64) * tokens + t)[:, None] * (HEADS * GROUP) + head[:, None]
    tl.store(out + at_row * V + v[None, :], result.to(out.dtype.element_ty), mask=wanted)
    if LOG_SUMS:
        tl.store(log_sums + (share * HEADS * GROUP + head) * tokens + t, most + tl.log2(total), mask=there)


@triton.jit(**CHANGING)
def _join(
    parts, part_sums, out, log_sums, tokens, shares,
    QUERIES: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, BT: tl.constexpr, LOG_SUMS: tl.constexpr,
):  # fmt: skip
    """Combine the `parts [S, T, Q, D]` of BT tokens and one query head, with the log-sums `part_sums [S, Q, T]`."""
    t, q, d = tl.program_id(0) * BT + tl.arange(0, BT), tl.program_id(1), tl.arange(0, WIDE)
    there = t < tokens
    most = tl.full([BT], float("-inf"), tl.float32)
    total = tl.zeros([BT], tl.float32)
    sums = tl.zeros([BT, WIDE], tl.float32)
    mask = there[:, None] & (d < D)[None, :]
    for share in range(shares):
        known = tl.load(part_sums + (share * QUERIES + q) * tokens + t, mask=there, other=float("-inf"))
        greatest = tl.maximum(most, known)
        anchor = tl.where(greatest == float("-inf"), 0.0, greatest)
        shrunk, weight = tl.exp2(most - anchor), tl.exp2(known - anchor)
        row = (tl.zeros([], tl.int64) + share) * tokens + t
        part = tl.load(parts + (row[:, None] * QUERIES + q) * D + d[None, :], mask=mask, other=0.0)
        sums = sums * shrunk[:, None] + part * weight[:, None]
        most, total = greatest, total * shrunk + weight
    total = tl.where(total == 0.0, 1.0, total)
    into = (t.to(tl.int64)[:, None] * QUERIES + q) * D + d[None, :]
    tl.store(out + into, (sums / total[:, None]).to(out.dtype.element_ty), mask=mask)
    if LOG_SUMS:
        tl.store(log_sums + q * tokens + t, most + tl.log2(total), mask=there)


@triton.jit(**CHANGING)
def _paid(
    query, keys, values, table, positions, present, log_sums, paid, tokens, count, factor, limit,
    query_token, query_head, key_block, key_head, key_token, value_block, value_head, value_token,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, V: tl.constexpr,
    WIDE_V: tl.constexpr, LATENT: tl.constexpr, SIZE: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr,
    PAGED: tl.constexpr, LIMIT: tl.constexpr, CAP: tl.constexpr, OVER_ALL: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """Store for BN keys the greatest attention of any token, as mean over heads or, if OVER_ALL, as maximum.

    If SHARED, several programs share the tokens, BT each, and `paid` must be zero before.
    """
    d, v, j = tl.arange(0, WIDE), tl.arange(0, WIDE_V), tl.program_id(0) * BN + tl.arange(0, BN)
    seen = j < count
    seen &= tl.load(present + j, mask=seen, other=0) != 0
    best = tl.zeros([BN], tl.float32)
    first = tl.program_id(1) * BT if SHARED else 0
    end = tl.minimum(first + BT, tokens) if SHARED else tokens
    if LIMIT != ALL:  # A window hides all of these keys from the first token, and so from all.
        hidden = (tl.program_id(0) + 1) * BN <= _first_seen(tl.load(positions).to(tl.int32), limit, LIMIT)
        end = tl.where(hidden, first, end)
    for begin in range(first, end, BT):
        t = begin + tl.arange(0, BT)
        there = t < tokens
        at = tl.load(positions + t, mask=there, other=-1).to(tl.int32)
        over_heads = tl.zeros([BT, BN], tl.float32)
        for h in range(HEADS):
            head = tl.zeros([], tl.int32) + h
            here = _pages(keys, table, j, seen, head, key_block, key_head, key_token, SIZE, PAGED)
            key = tl.load(here[None, :] + d[:, None], mask=seen[None, :] & (d < D)[:, None], other=0.0)
            if LATENT:
                here = _pages(values, table, j, seen, head, value_block, value_head, value_token, SIZE, PAGED)
                value = tl.load(here[None, :] + v[:, None], mask=seen[None, :] & (v < V)[:, None], other=0.0)
                value = _of_model(value, query.dtype.element_ty)
            key = _of_model(key, query.dtype.element_ty)
            for g in range(GROUP):
                where = query + t.to(tl.int64)[:, None] * query_token + (h * GROUP + g) * query_head
                q = tl.load(where + d[None, :], mask=there[:, None] & (d < D)[None, :], other=0.0)
                log_sum = tl.load(log_sums + (h * GROUP + g) * tokens + t, mask=there, other=float("inf"))
                logits = tl.dot(q, key, input_precision="tf32x3")
                if LATENT:
                    latent = tl.load(where + D + v[None, :], mask=there[:, None] & (v < V)[None, :], other=0.0)
                    logits = tl.dot(latent, value, logits, input_precision="tf32x3")
                weights = tl.exp2(_scaled(logits, factor, CAP) - log_sum[:, None])
                weights = tl.where((j[None, :] <= at[:, None]) & seen[None, :], weights, 0.0)
                if LIMIT != ALL:
                    weights = tl.where(j[None, :] >= _first_seen(at, limit, LIMIT)[:, None], weights, 0.0)
                over_heads = tl.maximum(over_heads, weights) if OVER_ALL else over_heads + weights
        best = tl.maximum(best, tl.max(over_heads, 0))
    if not OVER_ALL:
        best /= HEADS * GROUP
    if SHARED:
        tl.atomic_max(paid + j, best, mask=j < count)
    else:
        tl.store(paid + j, best, mask=j < count)


def attend(
    query: torch.Tensor,
    kv: KV | Paged,
    positions: torch.Tensor,
    layer: LayerAttention,
    present: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `lmc.blend.kernels.attention.attend`."""
    return _attended(_by_rows(query), kv, positions, layer, present, None)


def attend_and_score(
    query: torch.Tensor,
    kv: KV | Paged,
    positions: torch.Tensor,
    layer: LayerAttention,
    present: torch.Tensor,
    over_heads: OverHeads,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `lmc.blend.kernels.attention.attend_and_score`."""
    query = _by_rows(query)
    log_sums = torch.empty(query.shape[1::-1], dtype=torch.float32, device=query.device)  # [Q, T]
    out = _attended(query, kv, positions, layer, present, log_sums)
    pages, (tokens, queries, _) = _repeated(Paged.of(kv), query, layer), query.shape
    heads, count, tuning = pages.keys.shape[1], len(present), tuning_of(query.device)
    some, keys, warps, stages = scored(tuning, _widest(pages, layer), query.element_size(), quantised=pages.largest > 0)
    shared = triton.cdiv(count, keys) < tuning.many and tokens > FEWEST
    some = FEWEST if shared else some
    make = torch.zeros if shared else torch.empty
    paid = make(count, dtype=torch.float32, device=query.device)
    _paid[(triton.cdiv(count, keys), triton.cdiv(tokens, some) if shared else 1)](
        query, pages.keys, pages.values, pages.table, positions, present, log_sums, paid,
        tokens, count, _factor(pages, layer), layer.reach,
        *query.stride()[:2], *pages.keys.stride()[:3], *pages.values.stride()[:3],
        HEADS=heads, GROUP=queries // heads, BT=some, BN=keys, OVER_ALL=over_heads == "max", SHARED=shared,
        num_warps=warps, num_stages=stages, **_sizes(pages, layer), **FUSED,
    )  # fmt: skip
    return out, paid


def _attended(
    query: torch.Tensor,
    kv: KV | Paged,
    positions: torch.Tensor,
    layer: LayerAttention,
    present: torch.Tensor | None,
    log_sums: torch.Tensor | None,
) -> torch.Tensor:
    pages = _repeated(Paged.of(kv), query, layer)
    (tokens, queries, _), heads, dim = query.shape, pages.keys.shape[1], pages.values.shape[3]
    group, out = queries // heads, query.new_empty(tokens, queries, dim)
    if not tokens:
        return out
    hides = present is not None
    widest, limited, tuning = _widest(pages, layer), not layer.sees_all, tuning_of(query.device)
    rows, keys, warps, stages = tile(
        tuning, tokens, heads, group, widest, query.element_size(),
        hides=hides, limited=limited, quantised=pages.largest > 0,
    )  # fmt: skip
    tiles = triton.cdiv(tokens, rows // group)
    length = (
        len(present) if present is not None else pages.keys.shape[2] * (1 if pages.table is None else len(pages.table))
    )
    count = tuning.shares(tiles * heads, length, keys)
    parts, sums = out, log_sums
    if count > 1:
        parts, sums = (
            torch.empty(count, *shape, dtype=torch.float32, device=query.device)
            for shape in (out.shape, (queries, tokens))
        )
    _attend[(heads, tiles, count)](
        query, pages.keys, pages.values, pages.table, positions, present, layer.sinks, parts, sums,
        tokens, _factor(pages, layer), pages.scales[1], layer.reach,
        *query.stride()[:2], *pages.keys.stride()[:3], *pages.values.stride()[:3],
        HEADS=heads, GROUP=group, BM=rows, BN=keys, PRESENT=hides,
        SINKS=layer.sinks is not None, LOG_SUMS=sums is not None,
        num_warps=warps, num_stages=stages, **_sizes(pages, layer), **FUSED,
    )  # fmt: skip
    if count > 1:
        _join[(triton.cdiv(tokens, FEWEST), queries)](
            parts, sums, out, log_sums, tokens, count,
            QUERIES=queries, D=dim, WIDE=padded(dim), BT=FEWEST, LOG_SUMS=log_sums is not None, num_warps=4, **FUSED,
        )  # fmt: skip
    return out


def _repeated(pages: Paged, query: torch.Tensor, layer: LayerAttention) -> Paged:
    """Return pages with the KV head of latent values several times, so that a program has `FEWEST` query heads."""
    if not layer.latent:
        return pages
    heads = max(1, query.shape[1] // FEWEST)
    if query.shape[1] % heads:
        heads = 1
    keys, values = (half.expand(-1, heads, -1, -1) for half in pages[:2])
    return pages._replace(keys=keys, values=values)


def _factor(pages: Paged, layer: LayerAttention) -> float:
    """Return the scale of logits to base 2 for the keys in memory. Latent values have the scale of the keys."""
    return layer.scale * pages.scales[0] * float(LOG2_E.value)


def _widest(pages: Paged, layer: LayerAttention) -> int:
    """Return the head dim that limits the size of tiles."""
    dims = pages.keys.shape[3], pages.values.shape[3]
    return sum(dims) if layer.latent else max(dims)


def _sizes(pages: Paged, layer: LayerAttention) -> dict[str, int | bool]:
    """Return compile-time arguments that both kernels have."""
    dim, paged = pages.keys.shape[3], pages.table is not None
    return {
        "D": dim, "WIDE": padded(dim), **value_sizes(pages.values), "LATENT": layer.latent,
        "SIZE": _size(pages), "PAGED": paged, "LIMIT": _limit(layer), "CAP": layer.soft_cap * LOG2_E.value,
    }  # fmt: skip


def _limit(layer: LayerAttention) -> int:
    """Return which keys before its own position a query sees."""
    return int((WINDOW if layer.window else CHUNK if layer.chunk else ALL).value)


def _by_rows(query: torch.Tensor) -> torch.Tensor:
    """Return queries whose last dimension is contiguous, as the kernels require."""
    return query if query.stride(-1) == 1 else query.contiguous()


def tile(
    tuning: Tuning,
    tokens: int,
    heads: int,
    group: int,
    dim: int,
    itemsize: int,
    *,
    hides: bool,
    limited: bool = False,
    quantised: bool = False,
) -> Tile:
    """Return the size of a program of `_attend`, whose rows are queries of one KV head.

    Keys are hidden if the kernel `hides` absent ones, and `limited` by a window or a chunk. Those of a `quantised`
    cache are converted, which takes registers. None of these tiles needs more registers or shared memory than a GPU has
    (`tests/test_kernels_compile.py`). Elements of 4 bytes need three products on tensor cores, each with its own
    operands.
    """
    wide, many = padded(dim), tuning.tiles["many rows"].rows
    kind: Kind
    if wide > 512:  # In MLA (64 + 512), keys are shorter than values, and take fewer registers than in Gemma 4 (512).
        kind = "latent, hidden tokens" if hides else "latent, quantised" if quantised else "latent"
    elif wide > 256:
        kind = "heads of 512, window" if limited and not hides else "heads of 512"
    elif itemsize > 2:
        kind = "float32, heads of 64" if wide <= 64 else "float32"
    elif wide > 128:
        kind = "heads of 256"
    elif not limited and triton.cdiv(tokens * group, many) * heads >= tuning.many:
        kind = "many rows"
    elif hides:
        kind = "few rows, hidden tokens"
    elif wide > 64:
        kind = "few rows, window" if limited else "few rows"
    else:
        kind = "few rows, heads of 64, window" if limited else "few rows, heads of 64"
    found = tuning.tiles[kind]
    return found._replace(rows=max(found.rows, triton.next_power_of_2(group)))


def scored(tuning: Tuning, dim: int, itemsize: int, *, quantised: bool = False) -> Tile:
    """Return the size of a program of `_paid`, whose rows are tokens."""
    wide = padded(dim)
    if wide > 256:
        return tuning.tiles["scores, wider heads, quantised" if quantised else "scores, wider heads"]
    if itemsize > 2:
        return tuning.tiles["scores, float32" if wide <= 128 else "scores, float32, heads of 256"]
    if wide > 128:
        return tuning.tiles["scores, heads of 256"]
    return tuning.tiles["scores" if wide > 64 else "scores, heads of 64"]


def _size(pages: Paged) -> int:
    """Return the block size for which kernels are compiled. It is 1 for prompts in one block, whose lengths vary."""
    return 1 if pages.table is None else pages.keys.shape[2]
