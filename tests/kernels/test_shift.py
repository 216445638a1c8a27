"""What recomputed tokens have changed by, and what the others of their documents get of it."""

import pytest
import torch
from amount import cases
from pages import LAYOUTS, TOLERANCE, OneLayer, copied, latent_pages, pages_of

from lmc.blend.kernels import shift, shift_triton
from lmc.blend.kernels.shift import MOST_EXAMPLES, Spans
from lmc.copies import Uploads

SHAPES = [(2, 64, 16, 64), (1, 80, 16, 80), (3, 96, 32, 48), (2, 128, 16, 128)]  # H, D, N, R
LONG = (1, 256, 16, 128)  # which a program corrects fewer tokens of
TOKENS, EXAMPLES = [40, 3, 0, 70], [9, 1, 4, MOST_EXAMPLES]


def spans_of(tokens: list[int], examples: list[int]) -> Spans:
    uploads = Uploads(torch.device("cpu"))
    spans = Spans.of(tokens, examples, uploads)
    uploads.send()
    return spans


def problem(shape, dtype, tokens=TOKENS, examples=EXAMPLES, *, interleaved=False, layout="NHD"):
    """A canvas over pages, positions of examples and of others, and what the examples were before.

    That is a view of `[H, E, D]`, as the dense canvas reads it.
    """
    heads, dim, size, rotated = shape
    torch.manual_seed(sum(shape))
    count = sum(tokens) + sum(examples)
    canvas = OneLayer(pages_of(heads, dim, size, count, dtype, layout), rotated=rotated, interleaved=interleaved)
    positions = torch.randperm(count)
    known, others = positions[: sum(examples)], positions[sum(examples) :]
    stored = tuple(torch.randn(2, heads, len(known), dim).to(dtype).transpose(1, 2))
    return canvas, known, others, stored


# Each layout and each way to rotate for each commit, and all pairs of them with --long.
CASES = [
    (shape, interleaved, *layout) for shape in (*SHAPES, LONG) for interleaved in (False, True) for layout in LAYOUTS
]
KEPT = [case for case in CASES if case[0] in SHAPES[1:3] and case[1] == (case[2:] in LAYOUTS[1::2])]


@pytest.mark.parametrize(("shape", "interleaved", "dtype", "layout"), cases(CASES, *KEPT), ids=str)
def test_changes_and_corrections_are_those_of_torch(shape, dtype, interleaved, layout):
    canvas, examples, others, stored = problem(shape, dtype, interleaved=interleaved, layout=layout)
    back = canvas.between(examples, torch.zeros_like(examples))
    found, wanted = (
        one.changes_of(canvas, 0, canvas.slots(examples)[0], stored, back) for one in (shift_triton, shift)
    )
    assert (found - wanted).abs().max() <= 1e-5

    counts = torch.randn(len(others), MOST_EXAMPLES) / MOST_EXAMPLES
    spans = spans_of(TOKENS, EXAMPLES)
    forth, other = canvas.between(torch.zeros_like(others), others), OneLayer(
        copied(canvas.paged(0)), rotated=shape[3], interleaved=interleaved
    )  # fmt: skip
    before = copied(canvas.paged(0))
    for over, one in ((canvas, shift_triton), (other, shift)):
        one.correct(over, 0, over.slots(others)[0], counts, wanted, spans, forth)
    for a, b in zip(canvas.paged(0)[:2], other.paged(0)[:2], strict=True):
        assert (a.float() - b.float()).abs().max() <= TOLERANCE[dtype] * 4  # Values are up to 4.
    unchanged = OneLayer(before, rotated=shape[3], interleaved=interleaved)
    for a, b in zip(*(one.read(0, canvas.slots(examples)[0]) for one in (canvas, unchanged)), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(("rotated", "heads"), [(32, 1), (16, 1), (32, 2)])
def test_values_of_another_dim_are_corrected(rotated, heads):
    torch.manual_seed(rotated)
    count = sum(TOKENS) + sum(EXAMPLES)
    pages = latent_pages(32, 80, 16, count, torch.float32, heads)
    canvas, other = (OneLayer(one, rotated=rotated, interleaved=True) for one in (pages, copied(pages)))
    positions = torch.randperm(count)
    examples, others = positions[: sum(EXAMPLES)], positions[sum(EXAMPLES) :]
    stored = torch.randn(len(examples), heads, 32), torch.randn(len(examples), heads, 80)
    back, forth = canvas.between(examples, 0 * examples), canvas.between(0 * others, others)
    found, wanted = (
        one.changes_of(canvas, 0, canvas.slots(examples)[0], stored, back) for one in (shift_triton, shift)
    )
    assert found.shape == (len(examples), heads * (32 + 80))
    assert (found - wanted).abs().max() <= 1e-5
    shares, spans = torch.randn(len(others), MOST_EXAMPLES) / MOST_EXAMPLES, spans_of(TOKENS, EXAMPLES)
    for over, one in ((canvas, shift_triton), (other, shift)):
        one.correct(over, 0, over.slots(others)[0], shares, wanted, spans, forth)
    for a, b in zip(canvas.paged(0)[:2], other.paged(0)[:2], strict=True):
        assert (a - b).abs().max() <= 1e-4


def weights(kernels, tokens, examples, shape, dtype, *, interleaved, layout="NHD"):
    """The weights of examples for tokens that stand anywhere."""
    canvas, known, others, (stored, _) = problem(shape, dtype, tokens, examples, interleaved=interleaved, layout=layout)
    rotations = tuple(canvas.between(one, torch.zeros_like(one)) for one in (known, others))
    spans = spans_of(tokens, examples)
    return kernels.weights_of(canvas, 0, stored, canvas.slots(others)[0], rotations, spans)


@pytest.mark.parametrize(
    ("shape", "interleaved", "dtype", "layout"), cases([one for one in CASES if one[0] != LONG], *KEPT), ids=str
)
def test_weights_are_those_of_torch(shape, dtype, interleaved, layout):
    """Also with a document of which no token is shifted, and one with a single example."""
    wanted, found = (
        weights(one, TOKENS, EXAMPLES, shape, dtype, interleaved=interleaved, layout=layout)
        for one in (shift, shift_triton)
    )
    assert (found - wanted).abs().max() <= 1e-5
    assert wanted.abs().sum() > 0


@pytest.mark.parametrize("documents", [1, 20])
def test_weights_of_many_documents_are_those_of_torch(documents):
    torch.manual_seed(documents)
    tokens = torch.randint(1, 30, (documents,)).tolist()
    examples = torch.randint(1, MOST_EXAMPLES + 1, (documents,)).tolist()
    wanted, found = (
        weights(one, tokens, examples, SHAPES[0], torch.float32, interleaved=False) for one in (shift, shift_triton)
    )
    assert (found - wanted).abs().max() <= 1e-5


def test_a_matrix_is_inverted_as_exactly_as_by_torch():
    """Also one whose examples are all alike, whose largest eigenvalue is 85 times the smallest one."""
    torch.manual_seed(0)
    rows = torch.nn.functional.normalize(torch.randn(2, MOST_EXAMPLES, 20), dim=-1)
    alike = torch.cat((rows @ rows.mT, torch.ones(1, MOST_EXAMPLES, MOST_EXAMPLES))) + shift.SHARED
    alike[1, 9:], alike[1, :, 9:] = 0, 0  # A document with few examples has rows of the identity.
    matrices = alike + torch.eye(MOST_EXAMPLES)
    found = matrices.clone()
    shift_triton.invert(found)
    exact = torch.linalg.inv(matrices.double())
    assert (found - exact).abs().max() <= 2 * (torch.linalg.inv(matrices) - exact).abs().max() + 1e-7
