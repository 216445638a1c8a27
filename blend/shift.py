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
from torch.nn.functional import normalize

from lmc.blend.canvas import KV, Attention, Canvas
from lmc.blend.rope import Turn, rotate

# Two tokens are as alike as the cosine of their keys, less the document's mean key, plus this constant. Because of it,
# n / (n + 1 / CONSTANT) of the mean of n changes is predicted for all.
CONSTANT = 0.3
VALUE_SHARE = 0.7  # of the predictions; some values change in ways that mislead even so
# The first tokens of a document are attention sinks. Their keys and values are unlike those of the others.
SINKS = 2
EXAMPLES = 128  # of a document, at most; a key has about as many dimensions
LAYERS = 3  # Which tokens are alike changes slowly with depth: it is looked up once in so many layers.


class _Document(NamedTuple):
    """One document in the order of the positions."""

    examples: slice  # its tokens among the examples
    others: slice  # and among those that are not repaired
    unread: torch.Tensor  # [E, 1] float32, 1 for the examples that the question reads least, and 0


class _Regression(NamedTuple):
    """What does not depend on the changes."""

    alike: torch.Tensor  # [H, N, E], the others and the examples
    inverse: torch.Tensor  # [2, H, E, E], of the examples' own likeness plus the penalty: all, and the unread ones


class Shift:
    """The shift of documents that are repaired in the same batch of rows."""

    def __init__(
        self, canvas: Canvas[Any], document: torch.Tensor, repaired: torch.Tensor, attention: torch.Tensor
    ) -> None:
        """`document [N]` numbers the approximate tokens in ascending order, -1 for all others.

        `repaired [T]` are ascending positions. `attention [N]` is what the question pays to each token.
        """
        self._canvas, repaired = canvas, repaired[document[repaired] >= 0]
        numbers = max(0, int(document.max()) + 1)
        counts = torch.bincount(document[repaired], minlength=numbers)
        is_other = (document >= 0) & (counts[document] > 0) if numbers else document >= 0
        is_other[repaired] = False
        self._others = is_other.nonzero().flatten()
        others = torch.bincount(document[self._others], minlength=numbers).tolist()
        examples = [one[:: -(-len(one) // EXAMPLES) or 1] for one in repaired.split(counts.tolist())]
        self._examples = torch.cat([repaired[:0], *examples])
        self._documents = [
            _Document(mine, theirs, (attention[one] <= attention[one].median())[:, None].float())
            for one, mine, theirs in zip(examples, _slices(list(map(len, examples))), _slices(others), strict=True)
            if len(one)
        ]
        self._regressions: list[_Regression] = []
        self._examples_back = canvas.turn(self._examples, torch.zeros_like(self._examples))
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
        stored = self._canvas.read(layer, self._examples)

        def attention(_: torch.Tensor, own: Callable[[], torch.Tensor | None]) -> torch.Tensor | None:
            self._apply(layer, stored)
            return own()

        return attention

    def _apply(self, layer: int, stored: KV) -> None:
        """Shift the other tokens, when the repaired ones have their new keys and values."""
        repaired = self._canvas.read(layer, self._examples)
        keys, values = self._canvas.read(layer, self._others)
        if (layer - 1) % LAYERS == 0:
            self._regressions = self._regress(stored[0], keys)
        moved, changed = (new.float() - old for new, old in zip(repaired, stored, strict=True))
        change = torch.stack((self._at_zero(moved, self._examples_back), changed.transpose(0, 1)))  # [2, H, E, D]
        for (mine, theirs, unread), (alike, inverse) in zip(self._documents, self._regressions, strict=True):
            change[1, :, mine] *= unread
            slopes = torch.cat((inverse @ change[:, :, mine]).unbind(), dim=-1)  # [H, E, 2D]
            key, value = (alike @ slopes).chunk(2, dim=-1)  # [H, N, D] each
            values[theirs].add_(value.transpose(0, 1), alpha=VALUE_SHARE)
            turn, out = (self._forth[0][theirs], self._forth[1][theirs]), keys[theirs].transpose(0, 1)
            rotate(key, turn, out, interleaved=self._canvas.interleaved, add=True)
        self._canvas.write(layer, self._others, keys, values)

    def _regress(self, examples: torch.Tensor, others: torch.Tensor) -> list[_Regression]:
        """Prepare the regression of each document on the stored keys `[T, H, D]` of examples and others."""
        examples = self._at_zero(examples, self._examples_back)
        others, found = self._at_zero(others, self._others_back), []
        for mine, theirs, unread in self._documents:
            mean = others[:, theirs].mean(1, keepdim=True)
            asked, known = others[:, theirs] - mean, normalize(examples[:, mine] - mean, dim=-1)
            length = asked.norm(dim=-1, keepdim=True).clamp_min_(torch.finfo(torch.float32).tiny)
            alike = (asked @ known.mT).div_(length).add_(CONSTANT)
            own = (known @ known.mT).add_(CONSTANT)
            own = torch.stack((own, own * unread * unread.mT)) + torch.eye(len(unread), device=own.device)
            found.append(_Regression(alike, torch.cholesky_inverse(torch.linalg.cholesky_ex(own)[0])))
        return found

    def _at_zero(self, keys: torch.Tensor, back: Turn) -> torch.Tensor:
        """Return keys `[T, H, D]` as they are before RoPE, as `[H, T, D]` float32."""
        turned = torch.empty_like(keys.transpose(0, 1), dtype=torch.float32)
        rotate(keys.transpose(0, 1), back, turned, interleaved=self._canvas.interleaved)
        return turned


def _slices(counts: Sequence[int]) -> list[slice]:
    """Return where each of several parts of a sequence lies, from their lengths."""
    return [slice(start, stop) for start, stop in pairwise(accumulate(counts, initial=0))]


def shifts_of(
    canvas: Canvas[Any], offset: torch.Tensor, reused: torch.Tensor, paid: torch.Tensor, batches: Sequence[torch.Tensor]
) -> Iterator[Shift]:
    """Yield the shifts to apply after each batch of repaired positions.

    `reused [N]` are the positions of approximate tokens, of which there is at least one, `offset [N]` those in their
    own documents, and `paid [N]` is the attention that the question pays to each. A document is shifted with the first
    batch that has any of its tokens.
    """
    _, number = torch.unique(reused - offset, return_inverse=True)
    document = reused.new_full((int(reused[-1]) + 1,), -1)
    document[reused] = torch.where(offset >= SINKS, number, -1)
    attention = paid.new_zeros(document.shape)
    attention[reused] = paid
    for repaired in batches:
        yield Shift(canvas, document, repaired, attention)
        document[torch.isin(document, document[repaired])] = -1
