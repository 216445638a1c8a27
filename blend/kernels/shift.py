"""The changes of recomputed tokens, and the correction of their documents' other tokens, in torch.

Examples are recomputed tokens. Tokens and examples are ordered by document; see `lmc.blend.shift`.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch.nn.functional import normalize

from lmc.blend.canvas import KV, Canvas, R
from lmc.blend.rope import KeyRotation, rotate
from lmc.copies import Uploads

MOST_EXAMPLES = 64  # maximum number of examples of a document; more do not predict better
# The similarity of two tokens is the cosine of their keys, less the document's mean key, plus this constant. With the
# constant, n / (n + 1 / SHARED) of the mean of n changes is predicted for all tokens.
SHARED = 0.3
TILE = 32  # tokens that a program of a kernel corrects
VALUE_SHARE = 0.7  # share of the prediction that is added to values, because the changes of some values mislead


class Spans(NamedTuple):
    """The T tokens and E examples of some documents. The tensors are for kernels, which must not wait for the host.

    A row of the tensors has the first token, the number of tokens, the first example, the number of examples, and the
    document's number.
    """

    tokens: list[int]  # number of tokens of each document
    examples: list[int]  # number of examples of each document, at most `MOST_EXAMPLES`
    documents: torch.Tensor  # int32 [documents, 5]
    tiles: torch.Tensor  # int32 [P, 5]; each row has at most `TILE` tokens of a document, and all of its examples

    @classmethod
    def of(cls, tokens: list[int], examples: list[int], uploads: Uploads) -> "Spans":
        """Cut the tokens of each document into tiles. The tensors have values after `uploads.send()`."""
        counts, known = np.array(tokens, np.int32), np.array(examples, np.int32)
        firsts = np.cumsum(counts) - counts, np.cumsum(known) - known
        documents = np.stack((firsts[0], counts, firsts[1], known, np.arange(len(counts))), axis=1, dtype=np.int32)
        tiles_of = -(-counts // TILE)
        tiles = np.repeat(documents, tiles_of, axis=0)
        begins = TILE * (np.arange(len(tiles)) - np.repeat(np.cumsum(tiles_of) - tiles_of, tiles_of))
        tiles[:, 0] += begins
        tiles[:, 1] = np.minimum(tiles[:, 1] - begins, TILE)
        return cls(tokens, examples, *(uploads.add(torch.from_numpy(rows)) for rows in (documents, tiles)))


def rotated(keys: torch.Tensor, rotation: KeyRotation) -> torch.Tensor:
    """Return keys `[T, H, D]` rotated, in float32."""
    out = torch.empty_like(keys, dtype=torch.float32)
    rotate(keys.transpose(0, 1), rotation, out.transpose(0, 1))
    return out


def weights_of(
    canvas: Canvas[R],
    layer: int,
    stored: torch.Tensor,
    slots: torch.Tensor,
    rotations: tuple[KeyRotation, KeyRotation],
    spans: Spans,
) -> torch.Tensor:
    """Return the weight of each example of its document for each token, float32 `[T, MOST_EXAMPLES]`.

    `stored [E, H, D]` are the keys of examples; the keys of tokens are at `slots [T]`. The two `rotations` move both to
    the same position. The weights solve a kernel ridge regression with a penalty of 1. Its kernel is the similarity of
    two tokens.
    """
    keys = stored, canvas.read(layer, slots)[0]
    at_zero = [rotated(*one).flatten(1) for one in zip(keys, rotations, strict=True)]
    weights = at_zero[0].new_zeros(len(slots), MOST_EXAMPLES)
    by_document = at_zero[0].split(spans.examples), at_zero[1].split(spans.tokens)
    for mine, theirs, out in zip(*by_document, weights.split(spans.tokens), strict=True):
        mean = theirs.mean(0)
        known, asked = (normalize(one - mean, dim=-1) for one in (mine, theirs))
        penalty = torch.eye(len(known), device=known.device)
        alike, own = asked @ known.T + SHARED, known @ known.T + SHARED
        out[:, : len(known)] = torch.linalg.solve_ex(own + penalty, alike, left=False)[0]
    return weights


def changes_of(canvas: Canvas[R], layer: int, slots: torch.Tensor, stored: KV, rotation: KeyRotation) -> torch.Tensor:
    """Return the changes of the keys and values at `slots [E]` since they were `stored`, float32 `[E, 2·H·D]`.

    `rotation` rotates the changes of keys, and those of values are multiplied by `VALUE_SHARE`.
    """
    now = canvas.read(layer, slots)
    keys, values = (new.float() - old for new, old in zip(now, stored, strict=True))
    return torch.cat((rotated(keys, rotation).flatten(1), VALUE_SHARE * values.flatten(1)), dim=1)


def correct(
    canvas: Canvas[R],
    layer: int,
    slots: torch.Tensor,
    weights: torch.Tensor,
    changes: torch.Tensor,
    spans: Spans,
    rotation: KeyRotation,
) -> None:
    """Add to the keys and values at `slots [T]` the weighted sum of their document's `changes [E, 2·H·D]`.

    `weights [T, M]` has the weight of each example of the token's own document. `rotation` rotates the sum for keys.
    """
    keys, values = canvas.read(layer, slots)
    predicted = changes.new_empty(len(slots), changes.shape[1])
    by_document = (one.split(count) for one, count in zip(
        (weights, changes, predicted), (spans.tokens, spans.examples, spans.tokens), strict=True
    ))  # fmt: skip
    for own, change, out in zip(*by_document, strict=True):
        torch.mm(own[:, : len(change)], change, out=out)
    moves, value_changes = predicted.split([keys[0].numel(), values[0].numel()], dim=1)
    keys += rotated(moves.view_as(keys), rotation)
    values += value_changes.view_as(values)
    canvas.write(layer, slots, keys, values)
