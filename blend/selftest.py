"""The self-test compares the keys and values that a canvas computes with those that the model itself computes.

Connectors run it once at start, on random tokens. It detects a wrong mask (a scattered row sees a later row, or does
not see an earlier row), a wrong slot (a row is written to one slot and read from another), and a wrong rotation.
Blending stays off for a model that fails.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import product

import torch

from lmc.blend.blender import Blender, BlendInput
from lmc.blend.canvas import KV, Canvas, Paged, R
from lmc.blend.segments import Placement
from lmc.blend.strategies import NEEDS_QUESTION, RecomputePolicy
from lmc.errors import UnsupportedModel

PROMPT_TOKENS = 64  # tokens of the prompt
DOCUMENT_POSITION = 37  # new position of a document that was computed alone
QUESTION_SIZE = 8  # tokens of the question in a rehearsal
LONG = 2048  # tokens of a context whose keys several programs of a kernel share
LONGEST = 16384  # tokens of a context with enough keys for all programs, so that they do not share a question's rows
QUESTION_SIZES = (QUESTION_SIZE, 24, 64)  # tokens of questions that need differently compiled kernels on a GPU
# Differences, relative to the largest value, that are always allowed.
FLOOR = {torch.float64: 1e-5, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
# Allowed difference, as a multiple of the model's noise: the difference between a prefill in one chunk and in two.
NOISE = 8
# Largest allowed difference, however noisy the model is. Through 30 layers in bfloat16, two prefills differ by 0.06. An
# error in a mask, a slot or a rotation makes a difference of about 1.
CEILING = 0.1


def random_prompt(vocabulary: int) -> list[int]:
    """Return the random tokens of the self-test's prompt."""
    return torch.randint(vocabulary, (PROMPT_TOKENS,), generator=torch.Generator().manual_seed(0)).tolist()


def prove(canvas: Canvas[R], moved: Canvas[R], exact: Sequence[KV], in_two: Sequence[KV]) -> None:
    """Raise `UnsupportedModel` if lmc's results differ from the model's by more than the model's own noise allows.

    `canvas` holds the random prompt and nothing stored. `moved` places a document at `DOCUMENT_POSITION`: the prompt's
    last tokens, computed alone. `exact` and `in_two` are the KV `[T, H, D]` of the prompt by layer, from the model's
    own prefill in one chunk and in two.
    """
    noise = _largest(in_two, exact)
    check("layers", max(_recomputed(canvas, exact), _rotated(moved, exact)), noise, exact[0][0].dtype)


def prove_compiled(canvas: Canvas[R], exact: Sequence[KV], in_two: Sequence[KV]) -> None:
    """Do the same as `prove` for rows that go through all layers of the compiled model in one call."""
    check("compiled layers", _recomputed(canvas, exact, through=True), _largest(in_two, exact), exact[0][0].dtype)


def check(result_name: str, difference_found: float, noise: float, dtype: torch.dtype) -> None:
    """Raise `UnsupportedModel` if a difference is larger than the model's own noise allows."""
    allowed = min(max(NOISE * noise, FLOOR[dtype]), CEILING)
    if not difference_found <= allowed:
        differ = f"lmc's {result_name} differ from the model's by {difference_found:.2g} (relative)"
        message = f"on {PROMPT_TOKENS} random tokens {differ}"
        own_noise = f"two prefills of the model itself differ by {noise:.2g}"
        raise UnsupportedModel(f"the self-test failed: {message}; the limit is {allowed:.2g}, and {own_noise}")


def difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference, relative to the largest value of `expected`; infinite if a value is NaN."""
    largest = (actual.double() - expected.double()).abs().max() / expected.double().abs().max().clamp_min(1e-6)
    return float(largest.nan_to_num(nan=float("inf")))


def rehearse(canvas_of: Callable[[], Canvas[R]], document: Placement) -> None:
    """Run small blends, so that kernels are compiled at the start and not while a request waits.

    `canvas_of` returns a new canvas of the random prompt with a document. The question has the last `QUESTION_SIZE`
    tokens.
    """
    blend_input = BlendInput(
        length=PROMPT_TOKENS, stop=PROMPT_TOKENS, question=PROMPT_TOKENS - QUESTION_SIZE, placements=[document]
    )
    canvas = canvas_of()
    for strategy in (*NEEDS_QUESTION, "deviation"):
        policy = RecomputePolicy(strategy=strategy, ratio=0.3, correction="shift")
        Blender(canvas_of(), blend_input, policy).run()
    _attend_long(canvas)


def _attend_long(canvas: Canvas[R]) -> None:
    """Attend over long contexts of repeated keys, and score with questions of all sizes in `QUESTION_SIZES`."""
    kernels, scale, device = canvas.kernels, canvas.scale, canvas.device

    def attention(query: torch.Tensor, write: Callable[[], None], own: object) -> None:
        def inputs(count: int, length: int) -> tuple[torch.Tensor, Paged, torch.Tensor, float]:
            queries = query[:1].expand(count, -1, -1).contiguous()
            return (
                queries,
                _repeated(canvas.paged(0), length),
                torch.arange(length - count, length, device=device),
                scale,
            )

        for length in (LONG, LONGEST):
            present = torch.ones(length, dtype=torch.bool, device=device)
            for count, over_heads in product(QUESTION_SIZES, set(NEEDS_QUESTION.values())):
                kernels.attend_and_score(*inputs(count, length), present, over_heads)
        for count in (QUESTION_SIZE, LONG):
            kernels.attend(*inputs(count, LONG))
            kernels.attend(*inputs(count, LONG), torch.ones(LONG, dtype=torch.bool, device=device))

    rows = canvas.begin(torch.arange(1, device=canvas.device))
    canvas.run(0, rows, canvas.batches(rows)[0], attention)


def _repeated(pages: Paged, length: int) -> Paged:
    """Return pages for a context of `length` tokens. The context repeats one block, or has zeros without a table."""
    (_, heads, size, dim), table = pages.keys.shape, pages.table
    if table is not None:
        return pages._replace(table=table[:1].repeat(-(-length // size)))
    zeros = pages.keys.new_zeros(heads, length, dim)
    return Paged.of((zeros, zeros))


def _largest(actual: Iterable[KV], expected: Iterable[KV]) -> float:
    pairs = zip(actual, expected, strict=True)
    return max(difference(a, b) for ours, theirs in pairs for a, b in zip(ours, theirs, strict=True))


def _recomputed(canvas: Canvas[R], exact: Sequence[KV], *, through: bool = False) -> float:
    """Fill the canvas with the model's KV, overwrite scattered rows, recompute only these, and compare all rows."""
    everything = canvas.slots(torch.arange(PROMPT_TOKENS, device=canvas.device))
    # Runs of one, two and three positions with gaps between them, and the last position.
    positions = [at for at in range(PROMPT_TOKENS) if at % 11 in (1, 4, 5, 7, 8, 9) or at == PROMPT_TOKENS - 1]
    scattered = torch.tensor(positions, device=canvas.device)
    for layer, (keys, values) in enumerate(exact):
        canvas.write(layer, everything, keys, values)
        canvas.write(layer, canvas.slots(scattered), -2 * keys.flip(0)[scattered], -2 * values.flip(0)[scattered])
    rows = canvas.begin(scattered, through=through)
    for batch in canvas.batches(rows) if through else ():
        canvas.run_through(rows, batch, lambda layer: None)
    for layer in range(0 if through else canvas.depth):
        for batch in canvas.batches(rows):
            canvas.run(layer, rows, batch)
    return _largest((canvas.read(layer, everything) for layer in range(canvas.depth)), exact)


def _rotated(moved: Canvas[R], exact: Sequence[KV]) -> float:
    """Compare the keys of a moved document in layer 0, where they depend only on token and position."""
    moved.place(0)
    keys, _ = moved.read(0, moved.slots(torch.arange(DOCUMENT_POSITION, PROMPT_TOKENS, device=moved.device)))
    return difference(keys, exact[0][0][DOCUMENT_POSITION:])
