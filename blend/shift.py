"""The mean shift corrects reused tokens that are not recomputed.

What the other documents of a prompt change in a document has a part that is common to its tokens. In each layer, the
mean of what the repaired tokens of a document have changed by is added to its other tokens: to their values, and half
of it to their keys as they are before RoPE. The idea is AgentKVShift's (arXiv 2607.21604), which estimates the shift
from probe tokens in one layer; here the tokens that are repaired anyway estimate it in every layer.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch

from lmc.blend.canvas import KV, Attention, Canvas
from lmc.blend.rope import rotate

DAMPING = 8  # Few tokens estimate a shift badly: the mean over n tokens counts n / (n + DAMPING) of its value.
KEY_SHARE = 0.5  # of the mean of keys. All of it makes a model worse at copying what the question does not attend to.
# The first tokens of a document are attention sinks. Their keys and values are unlike those of the others.
SINKS = 2
EARLY = 1 / 6  # of the layers, the first ones, change little and are left as they are.


class _Document(NamedTuple):
    """One document in the order of the positions."""

    repaired: slice  # its tokens among those that are repaired
    others: slice  # and among those that are not
    weight: float  # of the sum of its changes


class MeanShift:
    """The shifts of documents that are repaired in the same batch of rows."""

    def __init__(self, canvas: Canvas[Any], document: torch.Tensor, repaired: torch.Tensor) -> None:
        """`document [N]` numbers the approximate tokens in ascending order, -1 for all others.

        `repaired [T]` are ascending positions.
        """
        self._canvas, self._repaired = canvas, repaired[document[repaired] >= 0]
        numbers = max(0, int(document.max()) + 1)
        counts = torch.bincount(document[self._repaired], minlength=numbers)
        is_other = (document >= 0) & (counts[document] > 0) if numbers else document >= 0
        is_other[self._repaired] = False
        self._others = is_other.nonzero().flatten()
        others = torch.bincount(document[self._others], minlength=numbers)
        pairs = zip(_slices(counts.tolist()), _slices(others.tolist()), counts.tolist(), strict=True)
        self._documents = [_Document(one, other, 1 / (count + DAMPING)) for one, other, count in pairs if count]
        self._back = canvas.turn(self._repaired, torch.zeros_like(self._repaired))
        self._forth = canvas.turn(torch.zeros_like(self._others), self._others)
        # The cost in one layer, as the number of rows that would take as long to compute.
        self.cost = canvas.context_cost(len(self._others))

    def attention(self, layer: int) -> Attention | None:
        """Return the engine's own attention over the shifted tokens, for a layer that is not repaired yet.

        Returns None for an early layer. In layer 0, keys and values depend on nothing but the token.
        """
        if layer < EARLY * self._canvas.depth:
            return None
        stored = self._canvas.read(layer, self._repaired)

        def attention(_: torch.Tensor, own: Callable[[], torch.Tensor | None]) -> torch.Tensor | None:
            self._apply(layer, stored)
            return own()

        return attention

    def _apply(self, layer: int, stored: KV) -> None:
        """Shift the other tokens, when the repaired ones have their new keys and values."""
        repaired = self._canvas.read(layer, self._repaired)
        moved, change = (new.float() - old for new, old in zip(repaired, stored, strict=True))
        key = torch.empty_like(moved)
        interleaved = self._canvas.interleaved
        rotate(moved.transpose(0, 1), self._back, key.transpose(0, 1), interleaved=interleaved)
        keys, values = self._canvas.read(layer, self._others)
        for document in self._documents:
            rows, others = document.repaired, document.others
            mean = key[rows].sum(0)[:, None] * (KEY_SHARE * document.weight)  # [H, 1, D]
            turn = self._forth[0][others], self._forth[1][others]
            rotate(mean, turn, keys[others].transpose(0, 1), interleaved=interleaved, add=True)
            values[others] += change[rows].sum(0) * document.weight
        self._canvas.write(layer, self._others, keys, values)


def _slices(counts: Sequence[int]) -> list[slice]:
    """Return where each of several parts of a sequence lies, from their lengths."""
    return [slice(start, stop) for start, stop in pairwise(accumulate(counts, initial=0))]


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
