"""The shift corrects reused tokens that are not recomputed.

The other documents of a prompt change much the same in tokens that are alike. In each layer, for each document and KV
head, ridge regression (Hoerl and Kennard 1970) finds how the changes of the repaired tokens depend on their stored
keys, and predicts the changes of the other tokens from theirs: of their values, and of their keys, both as they are
before RoPE. The fewer tokens are repaired, and the less alike they are, the smaller are the predictions.

What the question reads most is also changed most, and in ways of its own: a corrected sentence takes up the correction.
Spread over a document that would mislead, so the values of the half that the question reads most are no examples.

The idea of a correction from probe tokens is AgentKVShift's (arXiv 2607.21604), which adds their mean change. Here the
tokens that are repaired anyway are the probes, and their mean is what regression on a constant alone would predict.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch.nn.functional import normalize, pad

from lmc.blend.canvas import KV, Attention, Canvas
from lmc.blend.rope import Turn, rotate

# What is regressed on beside the key, whose length is 1. The penalty is 1 for all coefficients, so that of the mean of
# n changes n / (n + 1 / CONSTANT²) is predicted.
CONSTANT = 0.3**0.5
# The first tokens of a document are attention sinks. Their keys and values are unlike those of the others.
SINKS = 2


class _Document(NamedTuple):
    """One document in the order of the positions."""

    repaired: slice  # its tokens among those that are repaired
    others: slice  # and among those that are not
    examples: torch.Tensor  # [R, 1], 1 for each repaired token whose values are examples, and 0


class Shift:
    """The shift of documents that are repaired in the same batch of rows."""

    def __init__(
        self, canvas: Canvas[Any], document: torch.Tensor, repaired: torch.Tensor, attention: torch.Tensor
    ) -> None:
        """`document [N]` numbers the approximate tokens in ascending order, -1 for all others.

        `repaired [T]` are ascending positions. `attention [N]` is what the question pays to each token.
        """
        self._canvas, self._repaired = canvas, repaired[document[repaired] >= 0]
        numbers = max(0, int(document.max()) + 1)
        counts = torch.bincount(document[self._repaired], minlength=numbers)
        is_other = (document >= 0) & (counts[document] > 0) if numbers else document >= 0
        is_other[self._repaired] = False
        self._others = is_other.nonzero().flatten()
        others = torch.bincount(document[self._others], minlength=numbers)
        pairs = zip(_slices(counts.tolist()), _slices(others.tolist()), strict=True)
        read = attention[self._repaired]
        self._documents = [
            _Document(one, other, (read[one] <= read[one].median())[:, None].float())
            for one, other in pairs
            if one.stop > one.start
        ]
        self._repaired_back = canvas.turn(self._repaired, torch.zeros_like(self._repaired))
        self._others_back = canvas.turn(self._others, torch.zeros_like(self._others))
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
        keys, values = self._canvas.read(layer, self._others)
        was, now = (self._at_zero(one[0], self._repaired_back) for one in (stored, repaired))
        key_change, value_change = now - was, (repaired[1].float() - stored[1]).transpose(0, 1)  # [H, R, D]
        others = self._at_zero(keys, self._others_back)
        for document in self._documents:
            mine, theirs = document.repaired, document.others
            mean = others[:, theirs].mean(1, keepdim=True)
            known, asked = _regressors(was[:, mine] - mean), _regressors(others[:, theirs] - mean)
            values[theirs] += _ridge(known * document.examples, value_change[:, mine], asked).transpose(0, 1)
            turn = self._forth[0][theirs], self._forth[1][theirs]
            moved = _ridge(known, key_change[:, mine], asked)
            rotate(moved, turn, keys[theirs].transpose(0, 1), interleaved=self._canvas.interleaved, add=True)
        self._canvas.write(layer, self._others, keys, values)

    def _at_zero(self, keys: torch.Tensor, back: Turn) -> torch.Tensor:
        """Return keys `[T, H, D]` as they are before RoPE, as `[H, T, D]` float32."""
        turned = torch.empty_like(keys.transpose(0, 1), dtype=torch.float32)
        rotate(keys.transpose(0, 1), back, turned, interleaved=self._canvas.interleaved)
        return turned


def _regressors(keys: torch.Tensor) -> torch.Tensor:
    """Return keys `[H, T, D]` with length 1, and a constant behind them."""
    return pad(normalize(keys, dim=-1), (0, 1), value=CONSTANT)


def _ridge(known: torch.Tensor, change: torch.Tensor, asked: torch.Tensor) -> torch.Tensor:
    """Return the changes `[H, N, D]` predicted for `asked [H, N, R]` from those `[H, T, D]` of `known [H, T, R]`."""
    gram = known.mT @ known
    gram.diagonal(dim1=1, dim2=2).add_(1)  # the penalty
    factor, _ = torch.linalg.cholesky_ex(gram)
    return asked @ torch.cholesky_solve(known.mT @ change, factor)


def _slices(counts: Sequence[int]) -> list[slice]:
    """Return where each of several parts of a sequence lies, from their lengths."""
    return [slice(start, stop) for start, stop in pairwise(accumulate(counts, initial=0))]


def shifts_of(
    canvas: Canvas[Any],
    offset: torch.Tensor,
    reused: torch.Tensor,
    attention: torch.Tensor | None,
    batches: Sequence[torch.Tensor],
) -> Iterator[Shift]:
    """Yield the shifts to apply after each batch of repaired positions.

    `reused [N]` are the positions of approximate tokens, `offset [N]` those in their own documents, and
    `attention [N]`, if it is known, is what the question pays to each. A document is shifted with the first batch that
    has any of its tokens.
    """
    if not len(reused):
        return
    _, number = torch.unique(reused - offset, return_inverse=True)
    document = reused.new_full((int(reused[-1]) + 1,), -1)
    document[reused] = torch.where(offset >= SINKS, number, -1)
    read = torch.zeros(document.shape, device=reused.device)
    if attention is not None:
        read[reused] = attention
    for repaired in batches:
        yield Shift(canvas, document, repaired, read)
        document[torch.isin(document, document[repaired])] = -1
