"""The shift gives to the tokens of a document that are not recomputed what the recomputed ones like them changed by."""

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from models import SEPARATOR, random_model, random_tokens
from torch.nn.functional import normalize
from transformers import DynamicCache

from lmc.blend.blender import Blender, BlendInput
from lmc.blend.canvas import Canvas, positions_of, writes_and_attends
from lmc.blend.kernels import shift
from lmc.blend.kernels.choice import TORCH
from lmc.blend.layer_attention import LayerAttention
from lmc.blend.markers import Markers
from lmc.blend.rope import Rotation, rotate
from lmc.blend.segments import Placement, join, split
from lmc.blend.shift import Shift, numbered, shifts_of
from lmc.blend.strategies import RecomputePolicy
from lmc.config.settings import Settings
from lmc.connectors.transformers.canvas import DenseCanvas
from lmc.connectors.transformers.hf import forward, prefilled, rows_of
from lmc.connectors.transformers.layers import DecoderLayers
from lmc.copies import Uploads

HEADS, DIM, LENGTH = 2, 8, 60
DOCUMENTS = [random_tokens(20 + 3 * i, i) for i in range(3)]
ANGLES = torch.arange(LENGTH)[:, None] * 0.5 ** torch.arange(DIM // 2)
ROTATION = Rotation(ANGLES.cos(), ANGLES.sin())


class Tensors(Canvas):
    """Keys and values that all layers share, and nothing that computes."""

    depth = 3
    device = torch.device("cpu")
    kernels = TORCH
    attentions = (LayerAttention(scale=1.0, rotation=ROTATION),) * 3

    def __init__(self) -> None:
        make = torch.Generator().manual_seed(7)
        self.k, self.v = torch.randn(2, LENGTH, HEADS, DIM, generator=make)
        self.uploads = Uploads(self.device)

    def read(self, layer, positions):
        return self.k[positions], self.v[positions]

    def write(self, layer, positions, keys, values):
        self.k[positions], self.v[positions] = keys, values


def at_zero(canvas: Canvas, keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Keys `[T, H, D]` as they would be at position 0."""
    out = torch.empty_like(keys)
    rotate(keys.transpose(0, 1), ROTATION.between(positions, torch.zeros_like(positions)), out.transpose(0, 1))
    return out


def repair(canvas: Tensors, positions: list[int], seed: int) -> None:
    """Give rows new keys and values, as computing them would."""
    make = torch.Generator().manual_seed(seed)
    canvas.k[positions] += torch.randn(len(positions), HEADS, DIM, generator=make)
    canvas.v[positions] += torch.randn(len(positions), HEADS, DIM, generator=make)


def found_shifts(canvas: Tensors, pieces: list[Placement], batches: list[list[int]]) -> Iterator[Shift]:
    old, new = positions_of(pieces)
    for found in shifts_of(canvas, numbered(old, new), [torch.tensor(rows, dtype=torch.long) for rows in batches]):
        canvas.uploads.send()
        found.begin()
        yield found


def ridge(keys: torch.Tensor, others: torch.Tensor, change: torch.Tensor) -> torch.Tensor:
    """Predictions `[N, H, D]` for others from what `keys [T, R]` have changed by, by penalised least squares."""
    size = keys.shape[1] + 1
    rows, asked = (torch.cat((x, torch.full((len(x), 1), shift.SHARED**0.5)), dim=1) for x in (keys, others))
    given = torch.cat((change.flatten(1), torch.zeros(size, HEADS * DIM)))
    solution = torch.linalg.lstsq(torch.cat((rows, torch.eye(size))), given).solution
    return (asked @ solution).unflatten(1, (HEADS, DIM))


@pytest.mark.parametrize(
    ("stops", "estimating"), [([60], [9, 12, 15, 20]), ([25, 60], [9, 12, 15, 20]), ([7, 13, 22, 60], [9, 12])]
)
def test_the_others_get_what_regression_predicts_from_their_own_document(stops, estimating):
    """The first document has two pieces; tokens 0 and 1 of each document take no part.

    In the last case its rows are in several batches, and the first of them that has any decides.
    """
    canvas = Tensors()
    pieces = [
        Placement(at=5, tokens=8, first=0),
        Placement(at=13, tokens=8, first=8),
        Placement(at=30, tokens=20, first=0),
    ]
    recomputed = [6, 9, 12, 15, 20, 41, 44]
    keys, values = canvas.k.clone(), canvas.v.clone()
    batches = [
        [position for position in recomputed if start <= position < stop] for start, stop in pairwise([0, *stops])
    ]
    shifts = list(found_shifts(canvas, pieces, batches))
    for rows, found in zip(batches, shifts, strict=True):

        def write(rows: list[int] = rows) -> None:
            repair(canvas, rows, seed=sum(rows))

        attention = found.attention(1) or writes_and_attends  # Two batches of the last case shift nothing.
        assert attention(None, write, lambda: "attended") == "attended"

    # Position 6 is the second token of its document.
    documents = [(range(7, 21), estimating), (range(32, 50), [41, 44])]
    for tokens, rows in documents:
        others = torch.tensor([one for one in tokens if one not in recomputed])
        shifted = torch.tensor([one for one in tokens if one not in rows])  # some are recomputed in a later batch
        center = at_zero(canvas, keys[shifted], shifted).mean(0).flatten()

        def regressors(chosen: torch.Tensor, center: torch.Tensor = center) -> torch.Tensor:
            return normalize(at_zero(canvas, keys[chosen], chosen).flatten(1) - center, dim=-1)

        at = torch.tensor(rows)
        change = at_zero(canvas, canvas.k[at], at) - at_zero(canvas, keys[at], at)
        moved = at_zero(canvas, canvas.k[others], others) - at_zero(canvas, keys[others], others)
        assert torch.allclose(moved, ridge(regressors(at), regressors(others), change), atol=1e-5)
        wanted = ridge(regressors(at), regressors(others), canvas.v[at] - values[at])
        assert torch.allclose(canvas.v[others] - values[others], shift.VALUE_SHARE * wanted, atol=1e-5)
    untouched = torch.tensor([*range(7), *range(21, 32), *range(50, 60)])
    untouched = untouched[untouched != 6]
    assert torch.equal(canvas.k[untouched], keys[untouched])
    assert torch.equal(canvas.v[untouched], values[untouched])


def test_tokens_change_as_those_that_are_like_them():
    """A document has two kinds of tokens. Of each kind half is recomputed, and the kinds change in opposite ways."""
    canvas = Tensors()
    kind = torch.arange(LENGTH) % 2 * 2.0 - 1
    direction = torch.randn(HEADS, DIM, generator=torch.Generator().manual_seed(1))
    turned = torch.empty_like(canvas.k)
    positions = torch.arange(LENGTH)
    rotate(
        (kind[:, None, None] * direction).transpose(0, 1),
        ROTATION.between(torch.zeros_like(positions), positions),
        turned.transpose(0, 1),
    )
    canvas.k = turned
    values = canvas.v.clone()
    recomputed = [one for one in range(4, LENGTH) if one % 4 < 2]
    (found,) = found_shifts(canvas, [Placement(at=0, tokens=LENGTH, first=0)], [recomputed])

    def write() -> None:
        canvas.v[recomputed] += kind[recomputed, None, None]

    found.attention(1)(None, write, lambda: None)
    others = [one for one in range(4, LENGTH) if one % 4 >= 2]
    change = canvas.v[others] - values[others]
    assert torch.allclose(change, shift.VALUE_SHARE * kind[others, None, None].expand_as(change), atol=0.1)


def test_the_tokens_that_are_alike_are_those_of_the_first_layer():
    """In the next layer other keys are stored, and the same share of each example's change is predicted."""
    canvas = Tensors()
    recomputed, others = [8, 9, 11, 12], [10, 13, 14]
    (found,) = found_shifts(canvas, [Placement(at=5, tokens=10, first=0)], [recomputed])
    predictions = []
    for layer in (1, 2):
        values = canvas.v.clone()

        def write() -> None:
            canvas.v[recomputed] += torch.arange(1.0, 5)[:, None, None]

        found.attention(layer)(None, write, lambda: None)
        predictions.append(canvas.v[others] - values[others])
        canvas.k = torch.randn(LENGTH, HEADS, DIM, generator=torch.Generator().manual_seed(layer))
    assert predictions[0].abs().min() > 1e-3
    assert torch.allclose(*predictions, atol=1e-5)


def test_the_numbers_of_documents_serve_for_another_pass():
    canvas = Tensors()
    old, new = positions_of([Placement(at=5, tokens=10, first=0), Placement(at=30, tokens=20, first=0)])
    document, batches = numbered(old, new), [torch.tensor([8, 9]), torch.tensor([12, 40])]
    shifted = [[shift.attention(1) is not None for shift in shifts_of(canvas, document, batches)] for _ in range(2)]
    assert shifted == [[True, True]] * 2
    assert torch.equal(document, numbered(old, new))


def test_a_document_without_a_repaired_token_stays_as_it_is():
    canvas = Tensors()
    keys = canvas.k.clone()
    pieces = [Placement(at=5, tokens=10, first=0), Placement(at=30, tokens=20, first=0)]
    (found,) = found_shifts(canvas, pieces, [[8, 9, 11, 12]])
    found.attention(1)(None, lambda: repair(canvas, [8, 9, 11, 12], seed=1), lambda: None)
    assert torch.equal(canvas.k[30:50], keys[30:50])
    assert not torch.equal(canvas.k[10:15], keys[10:15])


@pytest.mark.parametrize("rope", ["plain", "llama3", "yarn"])
def test_a_change_that_all_tokens_have_in_common_is_found_whole(monkeypatch, rope):
    """The stored KV is full prefill's, less a constant in each layer but the first. Almost nothing of it is left."""
    monkeypatch.setattr(shift, "SHARED", 900)
    monkeypatch.setattr(shift, "VALUE_SHARE", 1)
    model = random_model("llama", rope)
    layers, prompt = DecoderLayers(model), join(random_tokens(9, 50), DOCUMENTS, random_tokens(11, 51), SEPARATOR)
    segments = split(prompt, Markers(separators=(SEPARATOR,)))
    cache = DynamicCache()
    done = forward(model, prompt, cache)
    wanted = rows_of(cache)
    pieces = [Placement(at=span.start, tokens=len(span), first=0) for span in segments.documents]
    rotation = DenseCanvas(layers, prompt, (), iter(())).attentions[0].rotation
    make = torch.Generator().manual_seed(3)

    def reader():
        for layer, (keys, values) in enumerate(wanted):
            yield layer, [less_a_constant(piece, keys, values, 0 if layer == 0 else 1) for piece in pieces]

    def less_a_constant(piece, keys, values, times):
        here = torch.arange(piece.at, piece.at + piece.tokens)
        alone = here - piece.at
        constant = torch.randn(2, *keys.shape[1:], generator=make).expand(piece.tokens, -1, -1, -1).clone()
        constant[:2] = 0
        constant *= times
        moved, turned = torch.empty_like(keys[here]), torch.empty_like(keys[here])
        rotate(keys[here].transpose(0, 1), rotation.between(here, alone), moved.transpose(0, 1))
        rotate(
            constant[:, 0].transpose(0, 1),
            rotation.between(torch.zeros_like(alone), alone),
            turned.transpose(0, 1),
        )
        return torch.stack((moved - turned, values[here] - constant[:, 1]))

    canvas = DenseCanvas(layers, prompt, pieces, reader())
    given = BlendInput(length=len(prompt), stop=len(prompt), question=segments.question.start, placements=pieces)
    policy = RecomputePolicy(strategy="head", ratio=0.3, correction="shift")
    result = Blender(canvas, given, policy).run()

    assert 0 < result.charged_budget <= 0.3
    assert torch.allclose(canvas.logits, done.logits[0, -1], atol=5e-3)
    for (keys, values), (right_keys, right_values) in zip(canvas.kv, wanted, strict=True):
        assert torch.allclose(keys.transpose(0, 1), right_keys, atol=5e-3)
        assert torch.allclose(values.transpose(0, 1), right_values, atol=5e-3)


def test_the_method_says_whether_there_is_a_shift():
    assert RecomputePolicy.of(Settings()).correction == "shift"
    assert RecomputePolicy.of(Settings(blend_method="cacheblend")).correction == "none"


@pytest.mark.parametrize("strategy", ["union", "deviation", "all", "none"])
def test_with_every_token_repaired_or_none_there_is_nothing_to_shift(strategy):
    """And `deviation` is as published."""
    model = random_model("llama", "plain")
    prompt = join(random_tokens(9, 50), DOCUMENTS, random_tokens(11, 51), SEPARATOR)
    segments = split(prompt, Markers(separators=(SEPARATOR,)))
    pieces = [Placement(at=span.start, tokens=len(span), first=0) for span in segments.documents]
    stored = [rows_of(prefilled(model, prompt[p.at : p.at + p.tokens])) for p in pieces]
    found = []
    for correction in ("none", "shift"):
        reader = ((layer, [torch.stack(kv[layer]) for kv in stored]) for layer in range(model.config.num_hidden_layers))
        canvas = DenseCanvas(DecoderLayers(model), prompt, pieces, reader)
        given = BlendInput(length=len(prompt), stop=len(prompt), question=segments.question.start, placements=pieces)
        ratio = {"deviation": 0.2}.get(strategy, 1.0)
        policy = RecomputePolicy(strategy=strategy, ratio=ratio, correction=correction)
        Blender(canvas, given, policy).run()
        found.append(canvas)
    for plain, shifted in zip(found[0].kv, found[1].kv, strict=True):
        for one, other in zip(plain, shifted, strict=True):
            assert torch.equal(one, other)
    assert torch.equal(found[0].logits, found[1].logits)


def test_two_parts_of_a_document_with_another_one_between_them_are_shifted_apart():
    """Both parts have moved as far as each other. Each is shifted as if it were alone."""
    pieces, together = (
        [Placement(at=at, tokens=10, first=first) for at, first in ((5, 3), (15, 3), (25, 23))],
        Tensors(),
    )

    def shifted(canvas: Tensors, pieces: list[Placement]) -> None:
        def compute() -> None:
            for piece in pieces:
                repair(canvas, [piece.at + 2, piece.at + 3], seed=piece.at)

        (found,) = found_shifts(canvas, pieces, [[piece.at + skip for piece in pieces for skip in (2, 3)]])
        found.attention(1)(None, compute, lambda: None)

    shifted(together, pieces)
    for piece in pieces:
        alone, rows = Tensors(), slice(piece.at, piece.at + piece.tokens)
        before = alone.k[rows].clone()
        shifted(alone, [piece])
        torch.testing.assert_close(together.k[rows], alone.k[rows])
        torch.testing.assert_close(together.v[rows], alone.v[rows])
        assert not torch.isclose(before[4:], alone.k[rows][4:]).all(dim=(1, 2)).any()
