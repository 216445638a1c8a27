"""The self-test compares the keys and values that a canvas computes with those that the model itself computes.

Connectors run it once at start, on random tokens. It detects a wrong mask (a scattered row sees a row that it must not
see, or does not see an earlier row), a wrong slot (a row is written to one slot and read from another), and a wrong
rotation. The prompt is longer than the windows of the model's layers. Blending stays off for a model that fails.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import product

import torch

from lmc.blend.blender import Blender, BlendInput
from lmc.blend.canvas import KV, Canvas, Paged, R, writes_and_attends
from lmc.blend.kernels.shift import rotated
from lmc.blend.layer_attention import LayerAttention
from lmc.blend.segments import Placement
from lmc.blend.strategies import NEEDS_QUESTION, RecomputePolicy
from lmc.blend.tolerances import FLOOR, THROUGH_LAYERS, check, difference
from lmc.errors import UnsupportedModel

PROMPT_TOKENS = 64  # tokens of the prompt after what the layers' windows hide from its last token
LONGEST_ON_CPU = 1100  # tokens of the prompt; larger windows are then not tested
DOCUMENT_TOKENS = 27  # last tokens of the prompt, which are also computed alone, as a document that is moved
QUESTION_SIZE = 8  # tokens of the question in a rehearsal
LONG = 2048  # tokens of a context whose keys several programs of a kernel share
LONGEST = 16384  # tokens of a context with enough keys for all programs, so that they do not share a question's rows
QUESTION_SIZES = (QUESTION_SIZE, 24, 64)  # tokens of questions that need differently compiled kernels on a GPU


def random_prompt(vocabulary: int, reach: int, longest: int, device: torch.device) -> list[int]:
    """Return the random tokens of the self-test's prompt, which is longer than the `reach` of every window.

    Its length is limited by that of the model's longest prompt, in which a larger window hides nothing, and on a CPU by
    `LONGEST_ON_CPU`, because a large model needs minutes for more. Raises `UnsupportedModel` if the model's longest
    prompt is too short for the test.
    """
    if longest < PROMPT_TOKENS:
        raise UnsupportedModel(f"the model accepts {longest} tokens, but the self-test needs {PROMPT_TOKENS}")
    most = longest if device.type == "cuda" else min(longest, LONGEST_ON_CPU)
    length = min(PROMPT_TOKENS + reach, most)
    return torch.randint(vocabulary, (length,), generator=torch.Generator().manual_seed(0)).tolist()


def prove(
    canvas: Canvas[R], moved: Canvas[R], exact: Sequence[KV], in_two: Sequence[KV], repeated: Sequence[KV]
) -> None:
    """Raise `UnsupportedModel` if lmc's results differ from the model's by more than the model's own noise allows.

    `canvas` holds the random prompt and nothing stored. `moved` places a document: the prompt's last tokens, computed
    alone. `exact` and `in_two` are the KV `[T, H, D]` of the prompt by layer, from the model's own prefill in one chunk
    and in two. `repeated` is the KV of a prompt that repeats one token. A draft model's KV is among them.
    """
    noise = _largest(in_two, exact)
    # Everything is computed before anything is checked, because the ranks compute together.
    recomputed = _recomputed(canvas, exact)
    moved_keys = max(_rotated(moved, exact), _turned(canvas.attentions, repeated))
    check("layers", recomputed, noise, THROUGH_LAYERS[canvas.dtype])
    check("moved keys", moved_keys, noise, FLOOR[canvas.dtype])


def prove_compiled(canvas: Canvas[R], exact: Sequence[KV], in_two: Sequence[KV]) -> None:
    """Do the same as `prove` for rows that go through all layers of the compiled model in one call."""
    recomputed, noise = _recomputed(canvas, exact, through=True), _largest(in_two, exact)
    check("compiled layers", recomputed, noise, THROUGH_LAYERS[canvas.dtype])


def rehearse(canvas_of: Callable[[], Canvas[R]], document: Placement, length: int) -> None:
    """Run small blends, so that kernels are compiled at the start and not while a request waits.

    `canvas_of` returns a new canvas of the random prompt of `length` tokens with a document. The question has the last
    `QUESTION_SIZE` tokens.
    """
    blend_input = BlendInput(length=length, stop=length, question=length - QUESTION_SIZE, placements=[document])
    canvas = canvas_of()
    for strategy in (*NEEDS_QUESTION, "deviation"):
        policy = RecomputePolicy(strategy=strategy, ratio=0.3, correction="shift")
        Blender(canvas_of(), blend_input, policy).run()
    keys = [canvas.paged(layer).keys for layer in range(len(canvas.attentions))]
    kinds = {
        (attention.sees_all, attention.sinks is None, keys[layer].shape, keys[layer].dtype): layer
        for layer, attention in reversed(list(enumerate(canvas.attentions)))
    }
    for layer in kinds.values():
        attend_long(canvas, layer)


def attend_long(canvas: Canvas[R], layer: int) -> None:
    """Attend over long contexts of repeated keys, and score with questions of all sizes in `QUESTION_SIZES`.

    A layer of the model gets the hidden states before layer 0.
    """
    kernels, device = canvas.kernels, canvas.device

    def attention(query: torch.Tensor, write: Callable[[], None], own: object) -> None:
        def inputs(count: int, length: int) -> tuple[torch.Tensor, Paged, torch.Tensor, LayerAttention]:
            queries = query[:1].expand(count, -1, -1).contiguous()
            positions = torch.arange(length - count, length, device=device)
            return queries, _repeated(canvas.paged(layer), length), positions, canvas.attentions[layer]

        for length in (LONG, LONGEST):
            present = torch.ones(length, dtype=torch.bool, device=device)
            for count, over_heads in product(QUESTION_SIZES, set(NEEDS_QUESTION.values())):
                kernels.attend_and_score(*inputs(count, length), present, over_heads)
        for count in (QUESTION_SIZE, LONG):
            kernels.attend(*inputs(count, LONG))
            kernels.attend(*inputs(count, LONG), torch.ones(LONG, dtype=torch.bool, device=device))

    rows = canvas.begin(torch.arange(1))
    canvas.uploads.send()
    (batch,) = canvas.batches(rows)
    if layer < canvas.depth:
        canvas.run(layer, rows, batch, attention)
        return
    for before in range(canvas.depth):
        canvas.run(before, rows, batch)
    canvas.draft(rows, batch, lambda one: attention if one == layer else writes_and_attends)


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
    length = len(exact[0][0])
    everything = canvas.slots(torch.arange(length))
    # Runs of one, two and three positions with gaps between them, and the last position. In a long prompt, they are
    # near its beginning and its end, so that windows hide the first ones from the last ones.
    ends = [at for at in range(length) if at < PROMPT_TOKENS // 2 or at >= length - PROMPT_TOKENS]
    positions = [at for at in ends if at % 11 in (1, 4, 5, 7, 8, 9) or at == length - 1]
    scattered = torch.tensor(positions)
    overwritten, rows = canvas.slots(scattered), canvas.begin(scattered, through=through)
    canvas.uploads.send()
    for layer, (keys, values) in enumerate(exact):
        canvas.write(layer, everything[layer], keys, values)
        canvas.write(layer, overwritten[layer], -2 * keys.flip(0)[scattered], -2 * values.flip(0)[scattered])
    for batch in canvas.batches(rows) if through else ():
        canvas.run_through(rows, batch, lambda layer: None)
    for layer in range(0 if through else canvas.depth):
        for batch in canvas.batches(rows):
            canvas.run(layer, rows, batch)
    for batch in canvas.batches(rows):
        canvas.draft(rows, batch)
    return _largest((canvas.read(layer, everything[layer]) for layer in range(len(exact))), exact)


def _rotated(moved: Canvas[R], exact: Sequence[KV]) -> float:
    """Compare the keys of a moved document in layer 0, where they depend only on token and position."""
    length = len(exact[0][0])
    document = torch.arange(length - DOCUMENT_TOKENS, length)
    slots = moved.slots(document)[0]
    moved.uploads.send()
    moved.place(0)
    return difference(moved.read(0, slots)[0], exact[0][0][document])


def _turned(attentions: Sequence[LayerAttention], repeated: Sequence[KV]) -> float:
    """Compare the keys of equal tokens, moved to the positions of others, in the first layer of each rotation.

    If all tokens of a prompt are equal, attention is a mean of equal values. So in every layer, the keys of two tokens
    differ only by their rotation. Sinks would give different weights to the values, so they allow this only in layer 0.
    A draft model may compute the first position differently.
    """
    first = {attention.rotation: layer for layer, attention in reversed(list(enumerate(attentions)))}
    layers = [layer for layer in first.values() if layer == 0 or all(one.sinks is None for one in attentions[:layer])]
    found = []
    for layer in layers:
        keys = repeated[layer][0]
        old = torch.arange(1, len(keys) // 2, device=keys.device)
        new = old + len(keys) // 2
        moved = rotated(keys[old], attentions[layer].rotation.between(old, new))
        found.append(difference(moved, keys[new]))
    return max(found)
