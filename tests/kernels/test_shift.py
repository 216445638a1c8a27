"""What repaired tokens have changed by, and what the others of their documents get of it."""

import pytest
import torch
from pages import TOLERANCE, OneLayer, copied, pages_of

from lmc.blend.kernels import shift, shift_triton
from lmc.blend.kernels.shift import MOST_EXAMPLES, Spans

SHAPES = [(2, 64, 16, 64), (1, 80, 16, 80), (3, 96, 32, 48), (2, 128, 16, 128)]  # H, D, N, R
TOKENS, EXAMPLES = [40, 3, 0, 70], [9, 1, 4, MOST_EXAMPLES]


def problem(shape, dtype, *, interleaved=False):
    """A canvas over pages, positions of examples and of others, and what the examples were before."""
    heads, dim, size, rotated = shape
    torch.manual_seed(sum(shape))
    count = sum(TOKENS) + sum(EXAMPLES)
    canvas = OneLayer(pages_of(heads, dim, size, count, dtype), rotated=rotated, interleaved=interleaved)
    positions = torch.randperm(count)
    examples, others = positions[: sum(EXAMPLES)], positions[sum(EXAMPLES) :]
    stored = tuple(torch.randn(2, len(examples), heads, dim).to(dtype))
    return canvas, examples, others, stored


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_changes_and_corrections_are_those_of_torch(shape, dtype, interleaved):
    canvas, examples, others, stored = problem(shape, dtype, interleaved=interleaved)
    back = canvas.turn(examples, torch.zeros_like(examples))
    found, wanted = (one.changes_of(canvas, 0, canvas.slots(examples), stored, back) for one in (shift_triton, shift))
    assert (found - wanted).abs().max() <= 1e-5

    weights = torch.randn(len(others), MOST_EXAMPLES) / MOST_EXAMPLES
    spans = Spans.of(TOKENS, EXAMPLES, canvas.device)
    forth, other = canvas.turn(torch.zeros_like(others), others), OneLayer(
        copied(canvas.paged(0)), rotated=shape[3], interleaved=interleaved
    )  # fmt: skip
    before = copied(canvas.paged(0))
    for over, one in ((canvas, shift_triton), (other, shift)):
        one.correct(over, 0, over.slots(others), weights, wanted, spans, forth)
    for a, b in zip(canvas.paged(0)[:2], other.paged(0)[:2], strict=True):
        assert (a.float() - b.float()).abs().max() <= TOLERANCE[dtype] * 4  # Values are up to 4.
    unchanged = OneLayer(before, rotated=shape[3], interleaved=interleaved)
    for a, b in zip(*(one.read(0, canvas.slots(examples)) for one in (canvas, unchanged)), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("documents", [1, 4, 40])
def test_weights_are_those_of_torch(documents):
    """Also of more documents than are multiplied at once."""
    torch.manual_seed(documents)
    tokens = torch.randint(2, 30, (documents,)).tolist()
    examples = torch.randint(1, MOST_EXAMPLES + 1, (documents,)).tolist()
    spans = Spans.of(tokens, examples, torch.device("cpu"))
    known, asked = torch.randn(sum(examples), 2, 64), torch.randn(sum(tokens), 2, 64)
    wanted, found = (one.weights_of(known, asked, spans) for one in (shift, shift_triton))
    assert (found - wanted).abs().max() <= 1e-5
    assert wanted.abs().sum() > 0
