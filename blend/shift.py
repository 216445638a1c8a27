"""The shift corrects reused tokens that are not recomputed.

The earlier documents of a prompt change the keys and values of a later one, and tokens that are alike change alike. So
ridge regression (Hoerl and Kennard 1970) predicts how the other tokens of a document change from how its repaired ones
have changed: their values, and their keys before RoPE. Tokens are alike if their stored keys are alike in the first
layer that is corrected. This changes little with depth, so the weights of the prediction are computed once for all
layers and heads. The fewer tokens are repaired, and the less alike they are, the smaller are the predictions.

The idea of a correction from probe tokens is AgentKVShift's (arXiv 2607.21604), which adds their mean change. Here the
tokens that are repaired anyway are the probes, and their mean is what regression on a constant alone would predict.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from lmc.blend.canvas import KV, Attention, Canvas, Own
from lmc.blend.kernels.shift import MOST_EXAMPLES, Spans

SINKS = 2  # Tokens computed at the first positions are attention sinks, and change in ways of their own.


class Shift:
    """The shift of documents that are repaired in the same batch of rows."""

    def __init__(self, canvas: Canvas[Any], document: torch.Tensor, repaired: torch.Tensor) -> None:
        """`document [N]` numbers the approximate tokens in ascending order, -1 for all others.

        `repaired [T]` are ascending positions.
        """
        self._canvas, repaired = canvas, repaired[document[repaired] >= 0]
        numbers, counts = torch.unique_consecutive(document[repaired], return_counts=True)
        chosen = [one[:: -(-len(one) // MOST_EXAMPLES)] for one in repaired.split(counts.tolist())]
        is_other = torch.isin(document, numbers).index_fill_(0, repaired, False)
        others, examples = is_other.nonzero().flatten(), torch.cat([repaired[:0], *chosen])
        tokens = [int((document[others] == number).sum()) for number in numbers]
        self._spans = Spans.of(tokens, [len(one) for one in chosen], canvas.device)
        self._examples, self._others = canvas.slots(examples), canvas.slots(others)
        self._weights: torch.Tensor | None = None  # [T, MOST_EXAMPLES], computed in the first layer
        self._back = canvas.turn(examples, torch.zeros_like(examples)), canvas.turn(others, torch.zeros_like(others))
        self._others_forth = canvas.turn(torch.zeros_like(others), others)
        # The cost in one layer, as the number of rows that would take as long to compute.
        self.cost = canvas.context_cost(len(others))

    def attention(self, layer: int) -> Attention | None:
        """Return the engine's own attention over the shifted tokens, for a layer that is not repaired yet.

        Returns None for layer 0, in which keys and values depend on nothing but the token, and if none are shifted.
        """
        if layer == 0 or not len(self._others):
            return None

        def attention(_: torch.Tensor, write: Callable[[], None], own: Own) -> torch.Tensor | None:
            stored = self._canvas.read(layer, self._examples)
            write()
            self._apply(layer, stored)
            return own()

        return attention

    def _apply(self, layer: int, stored: KV) -> None:
        """Shift the other tokens, when the repaired ones have their new keys and values."""
        canvas, others, kernels = self._canvas, self._others, self._canvas.kernels
        if self._weights is None:
            self._weights = kernels.weights_of(canvas, layer, stored[0], others, self._back, self._spans)
        changes = kernels.changes_of(canvas, layer, self._examples, stored, self._back[0])
        kernels.correct(canvas, layer, others, self._weights, changes, self._spans, self._others_forth)


def shifts_of(
    canvas: Canvas[Any], offset: torch.Tensor, reused: torch.Tensor, batches: Sequence[torch.Tensor]
) -> Iterator[Shift]:
    """Yield the shifts to apply after each batch of repaired positions.

    `reused [N]` are the positions of approximate tokens, of which there is at least one, and `offset [N]` those in
    their own documents. A document is shifted with the first batch that has any of its tokens.
    """
    _, number = torch.unique(reused - offset, return_inverse=True)
    document = reused.new_full((int(reused[-1]) + 1,), -1)
    document[reused] = torch.where(offset >= SINKS, number, -1)
    for repaired in batches:
        yield Shift(canvas, document, repaired)
        document[torch.isin(document, document[repaired])] = -1
