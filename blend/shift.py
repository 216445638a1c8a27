"""The mean shift corrects reused tokens that are not recomputed.

What the other documents of a prompt change in a document has a part that is common to its tokens. In each layer, the
mean of what the repaired tokens of a document have changed by is added to its other tokens: to their values, and to
their keys as they are before RoPE. The idea is AgentKVShift's (arXiv 2607.21604), which estimates the shift from probe
tokens in one layer; here the tokens that are repaired anyway estimate it in every layer.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from lmc.blend.canvas import KV, Attention, Canvas
from lmc.blend.rope import Turn, rotate

DAMPING = 8  # Few tokens estimate a shift badly: the mean over n tokens counts n / (n + DAMPING) of its value.
# The first tokens of a document are attention sinks. Their keys and values are unlike those of the others.
SINKS = 2


class MeanShift:
    """The shifts of documents that are repaired in the same batch of rows."""

    def __init__(self, canvas: Canvas[Any], document: torch.Tensor, repaired: torch.Tensor) -> None:
        """`document [N]` numbers the approximate tokens, -1 for the others; `repaired [T]` are positions."""
        self._canvas, self._repaired = canvas, repaired[document[repaired] >= 0]
        self._of_repaired = document[self._repaired]
        counts = torch.bincount(self._of_repaired, minlength=max(1, int(document.max()) + 1))
        self._weights = (1 / (counts + DAMPING))[:, None, None]
        is_other = (document >= 0) & (counts[document] > 0)
        is_other[self._repaired] = False
        self._others = is_other.nonzero().flatten()
        self._of_others = document[self._others]
        self._back = canvas.turn(self._repaired, torch.zeros_like(self._repaired))
        self._forth = canvas.turn(torch.zeros_like(self._others), self._others)
        # The cost in one layer, as the number of rows that would take as long to compute.
        self.cost = canvas.context_cost(len(self._others))

    def attention(self, layer: int) -> Attention | None:
        """Return the engine's own attention over the shifted tokens, for a layer that is not repaired yet.

        Returns None for layer 0, in which keys and values depend on nothing but the token.
        """
        if layer == 0:
            return None
        stored = self._canvas.read(layer, self._repaired)

        def attention(_: torch.Tensor, own: Callable[[], torch.Tensor | None]) -> torch.Tensor | None:
            self._apply(layer, stored)
            return own()

        return attention

    def _apply(self, layer: int, stored: KV) -> None:
        """Shift the other tokens, when the repaired ones have their new keys and values."""
        repaired = self._canvas.read(layer, self._repaired)
        key, value = (new.float() - old for new, old in zip(repaired, stored, strict=True))
        keys, values = self._canvas.read(layer, self._others)
        keys += self._rotated(self._mean(self._rotated(key, self._back)), self._forth)
        values += self._mean(value)
        self._canvas.write(layer, self._others, keys, values)

    def _mean(self, changes: torch.Tensor) -> torch.Tensor:
        """Return for each of the others the damped mean of its document."""
        totals = changes.new_zeros(len(self._weights), *changes.shape[1:]).index_add_(0, self._of_repaired, changes)
        return (totals * self._weights)[self._of_others]

    def _rotated(self, keys: torch.Tensor, turn: Turn) -> torch.Tensor:
        out = torch.empty_like(keys)
        rotate(keys.transpose(0, 1), turn, out.transpose(0, 1), interleaved=self._canvas.interleaved)
        return out


def shifts_of(
    canvas: Canvas[Any], offset: torch.Tensor, reused: torch.Tensor, batches: Sequence[torch.Tensor]
) -> Iterator[MeanShift]:
    """Yield the shifts to apply after each batch of repaired positions.

    `reused [N]` are the positions of approximate tokens, and `offset [N]` those in their own documents. A document is
    shifted with the first batch that has any of its tokens.
    """
    if not len(reused):
        return
    _, number = torch.unique(reused - offset, return_inverse=True)
    document = reused.new_full((int(reused[-1]) + 1,), -1)
    document[reused] = torch.where(offset >= SINKS, number, -1)
    for repaired in batches:
        yield MeanShift(canvas, document, repaired)
        document[torch.isin(document, document[repaired])] = -1
