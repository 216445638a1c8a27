"""The kernels over pages of 8 bits: what they read and write are the model's numbers, divided by the layer's scales."""

import pytest
import torch
from amount import mostly_long
from pages import OneLayer, copied, latent_pages, pages_of, slots_of

from lmc.blend.canvas import Paged
from lmc.blend.kernels import attention, attention_triton, place, place_triton, shift, shift_triton
from lmc.blend.kernels.shift import MOST_EXAMPLES, Spans
from lmc.blend.layer_attention import LayerAttention
from lmc.copies import Uploads

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BITS = {E4M3: 3, E5M2: 2}  # of a number after its first one
SCALES = 0.25, 0.5  # of keys and values; powers of 2, so that nothing is rounded but what is written
LENGTH, HEADS, GROUP, DIM, SIZE = 150, 2, 3, 64, 16


def quantised(pages: Paged, dtype: torch.dtype, scales: tuple[float, float] = SCALES) -> Paged:
    """The same pages in 8 bits."""
    keys, values = (
        torch.empty_like(half, dtype=dtype).copy_(rounded(half / scale, dtype))
        for half, scale in zip(pages[:2], scales, strict=True)
    )
    return Paged(keys, values, pages.table, scales)


def model_of(pages: Paged) -> Paged:
    """The model's numbers of quantised pages."""
    keys, values = (half.float() * scale for half, scale in zip(pages[:2], pages.scales, strict=True))
    return Paged(keys, values, pages.table)


def rounded(numbers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Numbers as the engine writes them: the largest one stands for those that are larger."""
    largest = torch.finfo(dtype).max
    return numbers.float().clamp(-largest, largest).to(dtype)


def agree(found: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether numbers differ by at most one that lies between others, which a sum in another order may round so."""
    found, wanted = found.float(), wanted.float()
    return bool(((found - wanted).abs() <= wanted.abs() / 2 ** BITS[dtype] + torch.finfo(dtype).tiny).all())


def some_pages(dtype: torch.dtype, layout: str = "NHD") -> Paged:
    torch.manual_seed(3)
    return quantised(pages_of(HEADS, DIM, SIZE, LENGTH, torch.float32, layout), dtype)


def layer_of(pages: Paged, rotated: int = DIM, *, interleaved: bool = False) -> OneLayer:
    return OneLayer(pages, rotated=rotated, interleaved=interleaved)


@pytest.mark.parametrize("layout", mostly_long(["NHD", "HND", "apart"], "HND"))
@pytest.mark.parametrize("dtype", BITS, ids=str)
@pytest.mark.parametrize("computes", [torch.float32, torch.float16], ids=str)
def test_attention_and_scores_are_those_of_the_models_numbers(dtype, computes, layout):
    pages = some_pages(dtype, layout)
    positions = torch.tensor([0, 3, 40, 41, 99, LENGTH - 1])
    query, present = torch.randn(len(positions), HEADS * GROUP, DIM).to(computes), torch.rand(LENGTH) < 0.7
    present[positions] = True
    layer, bound = LayerAttention(scale=DIM**-0.5), 1e-5 if computes is torch.float32 else 2e-3
    wanted = attention.attend(query.float(), model_of(pages), positions, layer)
    assert (attention_triton.attend(query, pages, positions, layer).float() - wanted).abs().max() <= bound
    for over in ("mean", "max"):
        given = positions, layer, present, over
        wanted = attention.attend_and_score(query.float(), model_of(pages), *given)
        for one, other in zip(attention_triton.attend_and_score(query, pages, *given), wanted, strict=True):
            assert (one.float() - other).abs().max() <= bound


@pytest.mark.parametrize("dtype", mostly_long(BITS, E4M3), ids=str)
def test_latent_values_have_the_scale_of_the_keys(dtype):
    torch.manual_seed(4)
    pages = quantised(latent_pages(32, 80, SIZE, LENGTH, torch.float32), dtype, (0.25, 0.25))
    positions = torch.tensor([0, 40, LENGTH - 1])
    query, layer = torch.randn(len(positions), 4, 32 + 80), LayerAttention(scale=0.1, latent=True)
    present = torch.ones(LENGTH, dtype=torch.bool)
    wanted = attention.attend_and_score(query, model_of(pages), positions, layer, present, "mean")
    found = attention_triton.attend_and_score(query, pages, positions, layer, present, "mean")
    for one, other in zip(found, wanted, strict=True):
        assert (one - other).abs().max() <= 1e-5


@pytest.mark.parametrize("rotated", [DIM, DIM // 2])
@pytest.mark.parametrize("dtype", BITS, ids=str)
def test_what_is_placed_is_rotated_and_rounded_once(dtype, rotated):
    pages = some_pages(dtype)
    new = torch.arange(40, 70)
    rotation = layer_of(pages, rotated).between(new - 40, new)
    keys, values = (rounded(4 * torch.randn(len(new), HEADS, DIM), dtype) for _ in range(2))
    keys[3] = torch.finfo(dtype).max  # Rotated, some of these are larger than the type's largest number.
    keys[4, 0, :2] = -torch.finfo(dtype).max
    slots, wanted = slots_of(pages, new), model_of(pages)
    place.place([(keys.float(), values.float())], rotation, slots, wanted)
    place_triton.place([(keys, values)], rotation, slots, pages)
    found, wanted = place_triton.gather(pages, slots), place.gather(wanted, slots)
    assert torch.equal(found[1].float(), values.float())
    assert agree(found[0], rounded(wanted[0], dtype), dtype)
    assert (found[0].float().abs() == torch.finfo(dtype).max).any()


@pytest.mark.parametrize("dtype", BITS, ids=str)
def test_deviations_and_changes_are_those_of_the_models_numbers(dtype):
    pages = some_pages(dtype)
    found, wanted = layer_of(pages), layer_of(model_of(pages))
    at = torch.randperm(LENGTH)[:30]
    (slots,), stored = found.slots(at), tuple(torch.randn(2, HEADS, len(at), DIM).transpose(1, 2))
    far = place.deviation(wanted, 0, slots, stored[0])
    assert (place_triton.deviation(found, 0, slots, stored[0]) / far - 1).abs().max() <= 1e-5
    back = found.between(at, torch.zeros_like(at))
    changes = [one.changes_of(of, 0, slots, stored, back) for one, of in ((shift_triton, found), (shift, wanted))]
    assert (changes[0] - changes[1]).abs().max() <= 1e-5


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", BITS, ids=str)
def test_corrections_are_those_of_the_models_numbers(dtype, interleaved):
    pages = some_pages(dtype)
    before = copied(pages)._replace(scales=SCALES)
    found, wanted = (layer_of(one, interleaved=interleaved) for one in (pages, model_of(pages)))
    at, uploads = torch.randperm(LENGTH), Uploads(torch.device("cpu"))
    examples, others = at[:13], at[13:]
    spans = Spans.of([len(others)], [len(examples)], uploads)
    uploads.send()
    rotations = [found.between(one, torch.zeros_like(one)) for one in (examples, others)]
    stored, (slots,) = torch.randn(len(examples), HEADS, DIM), found.slots(others)
    weights = [
        one.weights_of(of, 0, stored, slots, rotations, spans) for one, of in ((shift_triton, found), (shift, wanted))
    ]
    assert (weights[0] - weights[1]).abs().max() <= 1e-4
    weights = torch.randn(len(others), MOST_EXAMPLES) / MOST_EXAMPLES
    changes = torch.randn(len(examples), 2 * HEADS * DIM)
    changes[0, 5] = 1e6  # Corrected numbers may be larger than the type's largest one.
    forth = found.between(torch.zeros_like(others), others)
    for one, of in ((shift_triton, found), (shift, wanted)):
        one.correct(of, 0, slots, weights, changes, spans, forth)
    for half, other, scale in zip(pages[:2], wanted.paged(0)[:2], SCALES, strict=True):
        assert agree(half, rounded(other / scale, dtype), dtype)
    (kept,) = found.slots(examples)
    for half, other in zip(place.gather(pages, kept), place.gather(before, kept), strict=True):
        assert torch.equal(half.float(), other.float())


def test_pages_that_are_not_quantised_have_scales_of_one():
    pages = pages_of(HEADS, DIM, SIZE, LENGTH, torch.float16)
    assert (pages.scales, pages.largest) == ((1.0, 1.0), 0.0)
    assert [some_pages(dtype).largest for dtype in BITS] == [448.0, 57344.0]
