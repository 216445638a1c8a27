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
from torch.nn.functional import normalize

from lmc.blend.canvas import KV, Attention, Canvas
from lmc.blend.rope import Turn, rotate

# Two tokens are as alike as the cosine of their keys, less the document's mean key, plus this constant. Because of it,
# n / (n + 1 / SHARED) of the mean of n changes is predicted for all tokens.
SHARED = 0.3
VALUE_SHARE = 0.7  # of the prediction is added to values, because some of them change in ways that mislead.
SINKS = 2  # Tokens computed at the first positions are attention sinks, and change in ways of their own.
MOST_EXAMPLES = 64  # of a document; more of them do not predict better


class Shift:
    """The shift of documents that are repaired in the same batch of rows."""

    def __init__(self, canvas: Canvas[Any], document: torch.Tensor, repaired: torch.Tensor) -> None:
        """`document [N]` numbers the approximate tokens in ascending order, -1 for all others.

        `repaired [T]` are ascending positions.
        """
        self._canvas, repaired = canvas, repaired[document[repaired] >= 0]
        numbers, counts = torch.unique_consecutive(document[repaired], return_counts=True)
        examples = [one[:: -(-len(one) // MOST_EXAMPLES)] for one in repaired.split(counts.tolist())]
        is_other = torch.isin(document, numbers).index_fill_(0, repaired, False)
        self._others = is_other.nonzero().flatten()
        self._examples = torch.cat([repaired[:0], *examples])
        self._counts = [len(one) for one in examples]  # of each document
        self._other_counts = [int((document[self._others] == number).sum()) for number in numbers]
        self._weights: list[torch.Tensor] = []  # [N, E] of each document, computed in the first layer
        self._examples_back = canvas.turn(self._examples, torch.zeros_like(self._examples))
        self._others_forth = canvas.turn(torch.zeros_like(self._others), self._others)
        # The cost in one layer, as the number of rows that would take as long to compute.
        self.cost = canvas.context_cost(len(self._others))

    def attention(self, layer: int) -> Attention | None:
        """Return the engine's own attention over the shifted tokens, for a layer that is not repaired yet.

        Returns None for layer 0, in which keys and values depend on nothing but the token.
        """
        if layer == 0:
            return None
        stored = self._canvas.read(layer, self._examples)

        def attention(_: torch.Tensor, own: Callable[[], torch.Tensor | None]) -> torch.Tensor | None:
            self._apply(layer, stored)
            return own()

        return attention

    def _apply(self, layer: int, stored: KV) -> None:
        """Shift the other tokens, when the repaired ones have their new keys and values."""
        repaired = self._canvas.read(layer, self._examples)
        keys, values = self._canvas.read(layer, self._others)
        self._weights = self._weights or self._weigh(stored[0], keys)
        moved, changed = (new.float() - old for new, old in zip(repaired, stored, strict=True))  # [E, H, D]
        moved = self._rotated(moved, self._examples_back)
        changes = torch.stack((moved, VALUE_SHARE * changed), dim=1).flatten(1)  # [E, 2·H·D]
        predicted = changes.new_empty(len(self._others), changes.shape[1])
        documents = changes.split(self._counts), predicted.split(self._other_counts)
        for weights, change, out in zip(self._weights, *documents, strict=True):
            torch.mm(weights, change, out=out)
        moves, value_changes = predicted.unflatten(1, (2, *keys.shape[1:])).unbind(1)  # [T, H, D]
        keys += self._rotated(moves, self._others_forth)
        values += value_changes
        self._canvas.write(layer, self._others, keys, values)

    def _weigh(self, examples: torch.Tensor, others: torch.Tensor) -> list[torch.Tensor]:
        """Return what each example counts for each other token of its document, from stored keys `[T, H, D]`."""
        others_back = self._canvas.turn(self._others, torch.zeros_like(self._others))
        examples_at_zero = self._rotated(examples, self._examples_back).flatten(1).split(self._counts)
        others_at_zero, weights = self._rotated(others, others_back).flatten(1).split(self._other_counts), []
        for mine, theirs in zip(examples_at_zero, others_at_zero, strict=True):
            mean = theirs.mean(0)
            known, asked = (normalize(one - mean, dim=-1) for one in (mine, theirs))
            penalty = torch.eye(len(known), device=known.device)
            alike, own = asked @ known.T + SHARED, known @ known.T + SHARED
            weights.append(torch.linalg.solve_ex(own + penalty, alike, left=False)[0])
        return weights

    def _rotated(self, keys: torch.Tensor, turn: Turn) -> torch.Tensor:
        """Return keys `[T, H, D]` rotated, in float32."""
        turned = torch.empty_like(keys, dtype=torch.float32)
        rotate(keys.transpose(0, 1), turn, turned.transpose(0, 1), interleaved=self._canvas.interleaved)
        return turned


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
