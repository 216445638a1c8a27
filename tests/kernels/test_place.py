"""Placing stored keys and values, reading them back, and how far fresh keys are from them."""

import pytest
import torch
from amount import mostly_long
from pages import TOLERANCE, OneLayer, as_dense, copied, latent_pages, pages_of, slots_of
from test_copies import execute

from lmc.blend.canvas import Paged
from lmc.blend.kernels import place, place_triton
from lmc.blend.rope import UNROTATED, KeyRotation

SHAPES = [(2, 64, 16, 64), (1, 80, 16, 80), (3, 96, 32, 48), (2, 128, 16, 128), (1, 128, 8, 32)]  # H, D, N, R
STARTS = (3, 40, 41, 90)  # of documents, the third of which is empty
COUNTS = (30, 1, 0, 45)


def problem(shape, dtype, layout="NHD", *, interleaved=False):
    """Pages, stored parts of documents, and where they go."""
    heads, dim, size, rotated = shape
    torch.manual_seed(sum(shape))
    pages = pages_of(heads, dim, size, 140, dtype, layout)
    parts = [torch.randn(2, count + 3, heads, dim).to(dtype)[:, 2 : 2 + count] for count in COUNTS]
    new = torch.cat([torch.arange(start, start + count) for start, count in zip(STARTS, COUNTS, strict=True)])
    old = torch.cat([torch.arange(count) for count in COUNTS])
    canvas = OneLayer(pages, rotated=rotated, interleaved=interleaved)
    return pages, parts, canvas.between(old, new), new


def agree(found: Paged, wanted: Paged, dtype: torch.dtype) -> bool:
    pairs = zip(found[:2], wanted[:2], strict=True)
    return all(bool((one.float() - other.float()).abs().max() <= TOLERANCE[dtype]) for one, other in pairs)


@pytest.mark.parametrize("layout", ["NHD", "HND", "apart"])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", mostly_long(SHAPES, *SHAPES[2:]), ids=str)
def test_what_is_placed_is_what_torch_places(shape, dtype, interleaved, layout):
    pages, parts, rotation, new = problem(shape, dtype, layout, interleaved=interleaved)
    slots, wanted = slots_of(pages, new), copied(pages)
    place.place(parts, rotation, slots, wanted)
    place_triton.place(parts, rotation, slots, pages)
    assert agree(pages, wanted, dtype)


@pytest.mark.parametrize(("rotated", "heads"), [(32, 1), (16, 1), (32, 2)])
def test_values_may_have_another_dim(rotated, heads):
    _, _, rotation, new = problem(SHAPES[0], torch.float32)
    pages = latent_pages(32, 80, 16, 140, torch.float32, heads)
    canvas = OneLayer(pages, rotated=rotated, interleaved=True)
    rotation = canvas.between(new, new + 3)
    parts = [(torch.randn(count, heads, 32), torch.randn(count, heads, 80)) for count in COUNTS]
    slots, wanted = slots_of(pages, new), copied(pages)
    place.place(parts, rotation, slots, wanted)
    place_triton.place(parts, rotation, slots, pages)
    assert agree(pages, wanted, torch.float32)
    found, stored = place.gather(pages, slots), [torch.cat(half) for half in zip(*parts, strict=True)]
    assert torch.equal(found[1], stored[1])
    assert torch.equal(found[0][..., rotated:], stored[0][..., rotated:])
    for one, other in zip(place_triton.gather(pages, slots), found, strict=True):
        assert torch.equal(one, other)


def test_keys_of_a_layer_without_positions_are_placed_as_they_are():
    pages, parts, _, new = problem(SHAPES[1], torch.float32)
    slots, wanted, unrotated = slots_of(pages, new), copied(pages), UNROTATED.between(new, new)
    place.place(parts, unrotated, slots, wanted)
    place_triton.place(parts, unrotated, slots, pages)
    assert torch.equal(pages.keys, wanted.keys)
    assert torch.equal(place.gather(pages, slots)[0], torch.cat([part[0] for part in parts]))


def test_bfloat16_is_placed():
    pages, parts, rotation, new = problem(SHAPES[0], torch.bfloat16)
    wanted = copied(pages)
    place.place(parts, rotation, slots_of(pages, new), wanted)
    place_triton.place(parts, rotation, slots_of(pages, new), pages)
    difference = pages.keys.float() - wanted.keys.float()
    assert (difference.abs() <= 2**-7 * wanted.keys.float().abs()).all()  # The interpreter rounds towards zero.
    assert torch.equal(pages.values, wanted.values)


def test_what_does_not_move_keeps_its_bits_and_the_rest_keeps_its_own():
    pages, parts, _, new = problem(SHAPES[1], torch.float32)
    before, slots = copied(pages), slots_of(pages, new)
    still = KeyRotation(torch.ones(len(new), 40), torch.zeros(len(new), 40))
    place_triton.place(parts, still, slots, pages)
    assert torch.equal(torch.stack(place.gather(pages, slots)), torch.cat(parts, dim=1))
    others = torch.ones(pages.keys.shape[0] * 16, dtype=torch.bool)
    others[slots] = False
    others = others.nonzero().flatten()
    assert torch.equal(*(torch.stack(place.gather(one, others)) for one in (pages, before)))


@pytest.mark.parametrize("in_one_call", [False, True])
def test_rows_are_spread_over_parts_and_parts_staged_side_by_side(monkeypatch, in_one_call):
    """Chunks of a prompt into their slots, and back. Not all of the rows are wanted, and a part may be empty."""
    calls = []
    if in_one_call:
        monkeypatch.setattr(place_triton, "submit_of", lambda device: lambda copies: calls.append(execute(copies)))
        monkeypatch.setattr(place_triton, "can_submit", lambda memory: True)
    keys, values = torch.randn(2, 3, 40, 16).transpose(1, 2)  # [T, H, D] as caches of transformers have them
    firsts, sizes = [4, 20, 20, 36], [16, 0, 9, 4]
    found, wanted = ([torch.zeros(2, size, 3, 16) for size in sizes] for _ in range(2))
    place_triton.spread(keys, values, found, firsts)
    place.spread(keys, values, wanted, firsts)
    for part, other, first, size in zip(found, wanted, firsts, sizes, strict=True):
        rows = torch.stack((keys, values))[:, first : first + size]
        assert torch.equal(part, rows)
        assert torch.equal(other, rows)
    together, one_by_one = torch.zeros(2, 2, sum(sizes), 3, 16)
    place_triton.stage(found, together)
    place.stage(found, one_by_one)
    assert torch.equal(together, torch.cat(found, dim=1))
    assert torch.equal(one_by_one, together)
    assert len(calls) == 2 * in_one_call


def test_a_prompt_in_one_block():
    pages, parts, rotation, new = problem(SHAPES[0], torch.float32)
    whole = Paged.of(as_dense(pages, 140))
    wanted = copied(whole)
    place.place(parts, rotation, new, wanted)
    place_triton.place(parts, rotation, new, whole)
    assert agree(whole, wanted, torch.float32)


def test_a_head_may_lie_behind_two_thousand_million_numbers(tmp_path):
    """Where all blocks of a head stand before the next head's, as some caches of vLLM have them."""
    apart, heads, size, dim = 2**30, 3, 16, 16
    raw = torch.from_file(str(tmp_path / "cache"), shared=True, size=apart * heads, dtype=torch.float16)
    keys, values = (raw[at:].as_strided((4, heads, size, dim), (2 * size * dim, apart, 2 * dim, 1)) for at in (0, dim))
    pages, slots = Paged(keys, values, torch.arange(4, dtype=torch.int32)), torch.tensor([5, 40, 63])
    part = torch.randn(2, 3, heads, dim).half()
    still = KeyRotation(torch.ones(3, dim // 2), torch.zeros(3, dim // 2))
    place_triton.place([part], still, slots, pages)
    assert torch.equal(torch.stack(place.gather(pages, slots)), part)
    assert torch.equal(torch.stack(place_triton.gather(pages, slots)), part)


def test_nothing_is_placed():
    pages, _, rotation, new = problem(SHAPES[0], torch.float32)
    before = copied(pages)
    place_triton.place([], KeyRotation(rotation.cos[:0], rotation.sin[:0]), new[:0], pages)
    assert agree(pages, before, torch.float32)


@pytest.mark.parametrize("layout", ["NHD", "HND", "apart"])
@pytest.mark.parametrize("count", [0, 1, 16, 76])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_is_read_is_what_torch_reads(shape, count, layout):
    pages, _, _, new = problem(shape, torch.float16, layout)
    slots = slots_of(pages, new)[:count]
    assert torch.equal(*(torch.stack(one.gather(pages, slots)) for one in (place_triton, place)))


@pytest.mark.parametrize("layout", ["NHD", "HND", "apart"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_deviations_are_those_of_torch(shape, dtype, layout):
    pages, parts, _, new = problem(shape, dtype, layout)
    canvas = OneLayer(pages, rotated=shape[3], interleaved=False)
    slots, stored = slots_of(pages, new), torch.cat(parts, dim=1)[0]
    found = place_triton.deviation(canvas, 0, slots, stored)
    assert torch.allclose(found, place.deviation(canvas, 0, slots, stored), rtol=1e-5)
    assert not len(place_triton.deviation(canvas, 0, slots[:0], stored[:0]))
