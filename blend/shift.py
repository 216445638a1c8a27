"""The shift corrects reused tokens that are not recomputed.

The earlier documents of a prompt change the keys and values of a later document, and similar tokens change similarly.
Ridge regression (Hoerl and Kennard 1970) predicts the changes of a document's other tokens from those of its recomputed
tokens. It predicts values, and keys before RoPE. Tokens are similar if their stored keys are similar in the first
corrected layer. Similarity changes little with depth, so the weights of the prediction are computed once for all layers
and heads. Fewer or less similar recomputed tokens give smaller predictions.

The idea of a correction from probe tokens is AgentKVShift's (arXiv 2607.21604), which adds their mean change. Here the
probes are the tokens that are recomputed anyway. Regression on a constant alone would predict their mean change.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from lmc.blend.canvas import KV, Attention, Canvas, Groups, Own
from lmc.blend.kernels.shift import MOST_EXAMPLES, Spans
from lmc.blend.layer_attention import key_rotations

SINKS = 2  # Tokens computed at this many first positions are attention sinks, which change differently.


class Shift:
    """The shift of the documents with recomputed tokens in the same batch of rows."""

    def __init__(self, canvas: Canvas[Any], document: torch.Tensor, recomputed: torch.Tensor) -> None:
        """Prepare the shift of the documents with tokens among `recomputed`. Call `begin` when the numbers are sent.

        `document [N]` has the document number of each approximate token, in ascending order, and -1 for other tokens.
        `recomputed [T]` are the ascending positions of recomputed tokens. Both are on the host.
        """
        self._canvas, recomputed = canvas, recomputed[document[recomputed] >= 0]
        numbers, counts = torch.unique_consecutive(document[recomputed], return_counts=True)
        chosen = [group[:: -(-len(group) // MOST_EXAMPLES)] for group in recomputed.split(counts.tolist())]
        is_other = _are_among(document, numbers).index_fill_(0, recomputed, False)
        others, examples = is_other.nonzero().flatten(), torch.cat([recomputed[:0], *chosen])
        tokens = torch.bincount(document[others], minlength=int(document.max()) + 1)[numbers].tolist()
        self._spans = Spans.of(tokens, [len(group) for group in chosen], canvas.uploads)
        self._examples, self._others = canvas.slots(examples), canvas.slots(others)
        self._weights: torch.Tensor | None = None  # [T, MOST_EXAMPLES], computed in the first layer
        self._positions = canvas.uploads.add(examples), canvas.uploads.add(others)
        # The cost in one layer, as the number of rows that take as long to compute.
        self.cost = canvas.context_cost(len(others))

    def begin(self) -> None:
        """Compute, by layer, the rotations of keys to position 0, and from there to their positions."""
        attentions, (examples, others) = self._canvas.attentions, self._positions
        self._examples_back = key_rotations(attentions, examples, torch.zeros_like(examples))
        self._others_back = key_rotations(attentions, others, torch.zeros_like(others))
        self._others_forth = key_rotations(attentions, torch.zeros_like(others), others)

    def attention(self, layer: int) -> Attention | None:
        """Return the engine's own attention over the shifted tokens, for a layer that is not recomputed yet.

        Returns None for layer 0, whose keys and values depend only on the token, and if no tokens are shifted.
        """
        if layer == 0 or not len(self._others[layer]):
            return None

        def attention(_: torch.Tensor, write: Callable[[], None], own: Own) -> torch.Tensor | None:
            stored = self._canvas.read(layer, self._examples[layer])
            write()
            self._apply(layer, stored)
            return own()

        return attention

    def _apply(self, layer: int, stored: KV) -> None:
        """Shift the other tokens. The recomputed tokens must have their new keys and values."""
        canvas, others, kernels = self._canvas, self._others[layer], self._canvas.kernels
        if self._weights is None:
            back = self._examples_back[layer], self._others_back[layer]
            self._weights = kernels.weights_of(canvas, layer, stored[0], others, back, self._spans)
        changes = kernels.changes_of(canvas, layer, self._examples[layer], stored, self._examples_back[layer])
        kernels.correct(canvas, layer, others, self._weights, changes, self._spans, self._others_forth[layer])


def shifts_of(canvas: Canvas[Any], document: torch.Tensor, batches: Sequence[torch.Tensor]) -> list[Shift]:
    """Return the shift to apply after each batch of recomputed positions.

    `document [N]` is that of `numbered`. A document is shifted with the first batch that has any of its tokens.
    """
    unshifted, shifts = document.clone(), []
    for recomputed in batches:
        shifts.append(Shift(canvas, unshifted, recomputed))
        unshifted[_are_among(unshifted, unshifted[recomputed])] = -1
    return shifts


def numbered(computed_at: torch.Tensor, reused: torch.Tensor) -> torch.Tensor:
    """Return the document number of each token of a prompt up to the last approximate one, and -1 for other tokens.

    `reused [N]` are the positions of the approximate tokens, at least one. `computed_at [N]` are the positions at which
    they were computed. Attention sinks, which change differently, have -1, too.
    """
    # Another document may be between two parts of one document.
    _, number = torch.unique_consecutive(reused - computed_at, return_inverse=True)
    document = reused.new_full((int(reused[-1]) + 1,), -1)
    document[reused] = torch.where(computed_at >= SINKS, number, -1)
    return document


def rows_by_document(document: torch.Tensor, positions: torch.Tensor) -> Groups:
    """Return the first row and the end of the recomputed rows of each document.

    `document [N]` is that of `numbered`, or empty. The rows are those of ascending `positions [T]`.
    """
    numbers = document[positions[positions < len(document)]]
    rows = (numbers >= 0).nonzero().flatten()
    counts = torch.unique_consecutive(numbers[rows], return_counts=True)[1]
    stops = counts.cumsum(0)
    return list(zip(rows[stops - counts].tolist(), (rows[stops - 1] + 1).tolist(), strict=True))


def _are_among(document: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Return whether each of the document numbers `[N]`, which may be -1, is among `numbers [M]` and is not -1."""
    among = torch.zeros(int(document.max()) + 2, dtype=torch.bool)
    among[numbers] = True
    among[-1] = False
    return among[document]
