"""Attention of scattered queries over pages, and what they pay to each key."""

from dataclasses import replace

import pytest
import torch
from amount import cases, mostly_long
from pages import LAYOUTS, TOLERANCE, as_dense, latent_pages, pages_of

from lmc.blend.canvas import Paged
from lmc.blend.kernels import attention, attention_triton
from lmc.blend.kernels.attention_triton import tile
from lmc.blend.kernels.tuning import HOPPER, tuning_for
from lmc.blend.layer_attention import LayerAttention

SHAPES = [  # KV heads, query heads of each, head dim, tokens of a block
    (2, 1, 64, 16),
    (1, 3, 80, 16),
    (2, 4, 128, 32),
    (1, 7, 96, 16),
    (1, 8, 64, 8),
]


def problem(shape: tuple[int, ...], dtype: torch.dtype, layout: str, count: int = 23, length: int = 150):
    """Queries at some positions, the first and the last among them, over pages."""
    heads, group, dim, size = shape
    torch.manual_seed(sum(shape))
    pages = pages_of(heads, dim, size, length, dtype, layout)
    positions = torch.randperm(length - 2)[: count - 2].sort().values + 1
    positions = torch.cat((torch.tensor([0]), positions, torch.tensor([length - 1])))
    return torch.randn(count, heads * group, dim).to(dtype), pages, positions, LayerAttention(scale=dim**-0.5)


def shared(monkeypatch, share: int = 16) -> None:
    """Let several programs share the keys also of contexts as short as those of the tests."""
    monkeypatch.setattr(attention_triton, "tuning_of", lambda device: HOPPER._replace(fewest_keys=share))


def agree(found: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> bool:
    return bool((found.float() - wanted.float()).abs().max() <= TOLERANCE[dtype])


# What differs between shapes does not know of layouts: for each commit, one shape has all of them, and another has one.
CASES = [(shape, *layout) for shape in SHAPES for layout in LAYOUTS]
KEPT = [case for case in CASES if case[0] == SHAPES[1] or (case[0] == SHAPES[2] and case[2] == "HND")]


@pytest.mark.parametrize(("shape", "dtype", "layout"), cases(CASES, *KEPT), ids=str)
def test_outputs_are_those_of_torch(shape, dtype, layout):
    query, pages, positions, layer = problem(shape, dtype, layout)
    wanted = attention.attend(query, pages, positions, layer)
    assert agree(attention_triton.attend(query, pages, positions, layer), wanted, dtype)
    assert agree(attention_triton.attend(query, as_dense(pages, 150), positions, layer), wanted, dtype)


@pytest.mark.parametrize("share", [64, 512])  # keys of a program
@pytest.mark.parametrize("heads", [3, 32])  # 32 are too many for one program
@pytest.mark.parametrize("latent", [True, False])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_values_may_have_another_dim_and_be_keys_too(monkeypatch, dtype, latent, heads, share):
    """Latent attention is that of keys with two parts, of which the second one is the value."""
    shared(monkeypatch, share)
    _, _, positions, layer = problem((1, heads, 64, 16), dtype, "NHD")
    pages, layer = latent_pages(32, 80, 16, 150, dtype), replace(layer, latent=latent)
    query = torch.randn(len(positions), heads, 32 + 80 * latent).to(dtype)
    present = torch.rand(150) < 0.7
    present[positions] = True
    wanted = attention.attend(query, pages, positions, layer)
    if latent:
        keys, values = as_dense(pages, 150)
        plain = Paged.of((torch.cat((keys, values), dim=-1), values))
        assert agree(attention.attend(query, plain, positions, replace(layer, latent=False)), wanted, dtype)
    assert agree(attention_triton.attend(query, pages, positions, layer), wanted, dtype)
    for over_heads in ("mean", "max"):
        found, wanted = (
            one.attend_and_score(query, pages, positions, layer, present, over_heads)
            for one in (attention_triton, attention)
        )
        assert all(agree(one, other, dtype) for one, other in zip(found, wanted, strict=True))


SIGHTS = [{"window": 1}, {"window": 40}, {"chunk": 37}, {"window": 200}, {}]


@pytest.mark.parametrize("share", [64, 512])  # keys of a program
@pytest.mark.parametrize(("sinks", "soft_cap"), [(False, 0.0), (True, 0.0), (False, 1.5)])
@pytest.mark.parametrize("sight", SIGHTS, ids=str)
def test_windows_chunks_sinks_and_soft_caps_are_those_of_torch(monkeypatch, sight, sinks, soft_cap, share):
    """Also if several programs share the keys, of which a window hides all from some."""
    shared(monkeypatch, share)
    query, pages, positions, layer = problem((2, 4, 64, 16), torch.float32, "HND")
    layer = replace(layer, sinks=torch.randn(8) if sinks else None, soft_cap=soft_cap, **sight)
    present = torch.rand(150) < 0.7
    present[positions] = True
    if soft_cap:
        plain = attention.attend(query, pages, positions, replace(layer, soft_cap=0.0))
        capped = attention.attend(query, pages, positions, layer)
        assert sight == {"window": 1} or not agree(plain, capped, torch.float32), "the control: the cap is low"
    assert agree(
        attention_triton.attend(query, pages, positions, layer),
        attention.attend(query, pages, positions, layer),
        torch.float32,
    )
    for over_heads in ("mean", "max"):
        wanted, found = (
            one.attend_and_score(query, pages, positions, layer, present, over_heads)
            for one in (attention, attention_triton)
        )
        assert all(agree(one, other, torch.float32) for one, other in zip(found, wanted, strict=True))


def over_heads_of(case):
    """What follows the products of queries and keys does not know how those were read."""
    return *case, "max" if case[1:] in LAYOUTS[1::2] else "mean"


@pytest.mark.parametrize(
    ("shape", "dtype", "layout", "over_heads"), cases(map(over_heads_of, CASES), *map(over_heads_of, KEPT)), ids=str
)
def test_scores_are_those_of_torch_and_absent_keys_get_none(shape, dtype, layout, over_heads):
    query, pages, positions, layer = problem(shape, dtype, layout)
    present = torch.rand(150) < 0.7
    present[positions] = True
    for one in pages[:2]:  # What was never computed may be anything.
        size = one.shape[2]
        absent = (~present).nonzero().flatten()[::2]
        one[pages.table[absent // size].long(), :, absent % size] = torch.nan
    keys, values = as_dense(pages, 150)
    wanted = attention.attend_and_score(
        query, (keys.nan_to_num(), values.nan_to_num()), positions, layer, present, over_heads
    )
    found = attention_triton.attend_and_score(query, pages, positions, layer, present, over_heads)
    for one, other in zip(found, wanted, strict=True):
        assert agree(one, other, dtype)
    assert not found[1][~present].any()


@pytest.mark.parametrize("count", mostly_long([1, 16, 70, 130], 1, 70))
def test_any_number_of_queries_is_answered_and_scores(count):
    """More rows than a program takes, and fewer."""
    query, pages, positions, layer = problem((1, 3, 64, 16), torch.float32, "HND", max(count, 2))
    query, positions = query[-count:], positions[-count:]
    present = torch.ones(150, dtype=torch.bool)
    wanted = attention.attend_and_score(query, pages, positions, layer, present, "mean")
    found = attention_triton.attend_and_score(query, pages, positions, layer, present, "mean")
    for one, other in zip(found, wanted, strict=True):
        assert agree(one, other, torch.float32)


@pytest.mark.parametrize(
    ("count", "dtype", "over_heads"),
    cases(
        [
            (2, torch.float32, "mean"),
            (5, torch.float16, "max"),
            (12, torch.float32, "max"),
            (40, torch.float16, "mean"),
        ],
        (2, torch.float32, "mean"),
        (12, torch.float32, "max"),
    ),
    ids=str,
)
def test_programs_that_share_keys_and_tokens_find_the_same(monkeypatch, count, dtype, over_heads):
    """Some rows see nothing of the last shares, and nobody sees anything of the one whose tokens are absent."""
    query, pages, positions, layer = problem((2, 3, 64, 16), dtype, "NHD", count)
    present = torch.ones(150, dtype=torch.bool)
    present[30:80] = False
    present[positions] = True
    wanted = attention.attend_and_score(query, pages, positions, layer, present, over_heads)
    alone = attention_triton.attend_and_score(query, pages, positions, layer, present, over_heads)
    shared(monkeypatch)
    assert HOPPER._replace(fewest_keys=16).shares(1, 150, 64) == 9
    together = attention_triton.attend_and_score(query, pages, positions, layer, present, over_heads)
    for found in (alone, together):
        for one, other in zip(found, wanted, strict=True):
            assert agree(one, other, dtype)
    wanted = attention.attend(query, pages, positions, layer)
    assert agree(attention_triton.attend(query, pages, positions, layer), wanted, dtype)


def test_keys_are_shared_where_rows_are_few_and_keys_many():
    assert HOPPER.shares(8, 16384, 64) == 32, "512 keys for each program at least"
    assert HOPPER.shares(32, 16384, 64) == 17, "528 programs"
    assert HOPPER.shares(152, 16384, 64) == 4, "64 steps of 64 keys at most"
    assert HOPPER.shares(400, 32768, 64) == 8
    assert HOPPER.shares(528, 32768, 64) == 1
    assert HOPPER.shares(8, 1000, 64) == 1


def test_queries_may_be_a_part_of_a_larger_tensor():
    query, pages, positions, layer = problem((2, 4, 64, 16), torch.float32, "NHD")
    wider = torch.randn(23, 24, 64)
    wider[:, 8:16] = query
    wanted = attention.attend(query, pages, positions, layer)
    assert agree(attention_triton.attend(wider[:, 8:16], pages, positions, layer), wanted, torch.float32)
    score = (pages, positions, layer, torch.ones(150, dtype=torch.bool), "mean")
    _, scores = attention_triton.attend_and_score(wider[:, 8:16], *score)
    assert agree(scores, attention.attend_and_score(query, *score)[1], torch.float32)


def test_a_later_key_changes_no_earlier_row():
    query, pages, positions, layer = problem((2, 4, 64, 16), torch.float32, "HND")
    for late in (positions[-1], positions[5] + 1, positions[0] + 1):
        before = attention_triton.attend(query, pages, positions, layer)
        size = pages.keys.shape[2]
        pages.keys[pages.table[late // size], :, late % size] = 1e4
        pages.values[pages.table[late // size], :, late % size] = 1e4
        after = attention_triton.attend(query, pages, positions, layer)
        earlier = positions < late
        assert torch.equal(after[earlier], before[earlier])
        assert not torch.equal(after[~earlier], before[~earlier])


def test_large_logits_in_half_precision_do_not_overflow():
    """Keys of Qwen2 are that large."""
    query, pages, positions, layer = problem((1, 4, 64, 16), torch.float16, "NHD")
    pages.keys[..., 0], query[..., 0] = 300, 300
    present = torch.ones(150, dtype=torch.bool)
    wanted = attention.attend_and_score(query, pages, positions, layer, present, "max")
    found = attention_triton.attend_and_score(query, pages, positions, layer, present, "max")
    for one, other in zip(found, wanted, strict=True):
        assert one.isfinite().all()
        assert (one.float() - other.float()).abs().max() <= 0.02  # Logits of 11,000 have an error of 0.004 in float32.


def test_a_program_is_smaller_where_there_are_few():
    assert tile(HOPPER, 300, 8, 4, 128, 2, hides=False) == (64, 64, 4, 3)
    assert tile(HOPPER, 300, 8, 4, 128, 2, hides=True) == (64, 32, 4, 3)
    assert tile(HOPPER, 6000, 8, 4, 128, 2, hides=True) == (128, 64, 8, 5)


def test_consumer_blackwell_has_more_warps_except_for_heads_of_64():
    tuning = tuning_for(120)
    for limited in (False, True):
        assert tile(tuning, 300, 8, 4, 128, 2, hides=False, limited=limited) == (64, 64, 8, 3)
        small = tile(tuning, 300, 8, 8, 64, 2, hides=False, limited=limited)
        assert small == tile(tuning_for(80), 300, 8, 8, 64, 2, hides=False, limited=limited)
        assert small.warps == 4


LARGE = [(group, dim, dtype) for group, dim in ((4, 256), (32, 128), (71, 64)) for dtype in TOLERANCE]


@pytest.mark.parametrize(("group", "dim", "dtype"), cases(LARGE, LARGE[0], LARGE[-1]), ids=str)
def test_large_heads_and_large_groups(group, dim, dtype):
    """A program has at least the queries of one token."""
    shape = (1, group, dim, 16)
    query, pages, positions, layer = problem(shape, dtype, "NHD")
    present = torch.ones(150, dtype=torch.bool)
    wanted = attention.attend_and_score(query, pages, positions, layer, present, "mean")
    for one, other in zip(
        attention_triton.attend_and_score(query, pages, positions, layer, present, "mean"), wanted, strict=True
    ):
        assert agree(one, other, dtype)
