"""The dense canvas: a prompt's keys and values as one tensor per layer, and a transformers model's layers over them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from lmc.blend.attention import attend
from lmc.blend.canvas import AttentionFunction
from lmc.blend.rope import rotate, turn_between
from lmc.blend.segments import Placement
from lmc.connectors.transformers.layers import DecoderLayers, Projections

# For each layer in order: its number, and one part [K, T, H, D] for each placement.
Reader = Iterator[tuple[int, Sequence[torch.Tensor]]]


@dataclass(slots=True)
class DenseRows:
    """Tokens between two layers of the model."""

    positions: torch.Tensor  # [T]
    hidden: torch.Tensor  # [T, E]
    turns: tuple[torch.Tensor, torch.Tensor]  # cos and sin [T, R] of the positions
    projected: Projections | None = None  # in the next layer, if they are computed already


class DenseCanvas:
    """The KV of one prompt. After a blend all of it is in `keys` and `values`, and the last token's in `logits`."""

    def __init__(
        self, layers: DecoderLayers, tokens: Sequence[int], placements: Sequence[Placement], reader: Reader
    ) -> None:
        """`reader` yields the stored parts of `placements`, layer by layer."""
        self.depth, self.device, self.scale = layers.shape.layers, layers.device, layers.scale
        self._layers, self._placements, self._reader = layers, placements, reader
        self._tokens = torch.tensor(tokens, device=self.device)
        self._cos, self._sin = layers.rows(len(tokens))
        self._turns = [self._turn_of(placement) for placement in placements]
        size = (layers.shape.kv_heads, len(tokens), layers.shape.head_dim)
        self.keys, self.values = (
            [torch.empty(size, dtype=layers.shape.dtype, device=self.device) for _ in range(self.depth)]
            for _ in ("keys", "values")
        )  # per layer [H, N, D]
        self.logits: torch.Tensor | None = None  # [V]

    def arrived(self, layer: int) -> bool:
        """Return true, because `place` waits for the reader."""
        return True

    def place(self, layer: int) -> int:
        """Write stored keys, rotated, and values to their places."""
        arrived, parts = next(self._reader)
        assert arrived == layer, "the reader is out of step"
        keys, values = self.keys[layer], self.values[layer]
        for placement, (cos, sin), part in zip(self._placements, self._turns, parts, strict=True):
            here = slice(placement.at, placement.at + placement.tokens)
            stored = part.to(self.device).transpose(1, 2)  # [K, T, H, D] -> [K, H, T, D]
            rotate(stored[0], cos, sin, out=keys[:, here])
            values[:, here] = stored[1]
        return 0

    def begin(self, positions: torch.Tensor) -> DenseRows:
        """Embed the tokens."""
        hidden = self._layers.embed(self._tokens[positions])
        return DenseRows(positions, hidden, (self._cos[positions], self._sin[positions]))

    def keep(self, rows: DenseRows, kept: torch.Tensor) -> DenseRows:
        """Return some of the rows, with their projections if these are computed already."""
        cos, sin = rows.turns
        projected = rows.projected and Projections(*(one[kept] for one in rows.projected))
        return DenseRows(rows.positions[kept], rows.hidden[kept], (cos[kept], sin[kept]), projected)

    def batches(self, rows: DenseRows) -> list[slice]:
        """Return one batch of all rows."""
        return [slice(0, len(rows.positions))]

    def run(self, layer: int, rows: DenseRows, batch: slice, attention: AttentionFunction | None = None) -> None:
        """Project the rows, write keys and values, attend, and finish the layer.

        After the last layer only the logits of the last token are computed.
        """
        projected = rows.projected or self._layers.project(layer, rows.hidden, *rows.turns)
        self.write(layer, rows.positions, projected.key, projected.value)
        wanted = slice(-1, None) if attention is None and layer == self.depth - 1 else slice(None)
        if attention is not None:
            attended = attention(projected.query)
        else:
            kv = self.keys[layer], self.values[layer]
            attended = attend(projected.query[wanted], *kv, rows.positions[wanted], self.scale)
        rows.projected = projected if attended is None else None
        if attended is not None:
            rows.hidden = self._layers.finish(layer, rows.hidden[wanted], attended)
            if layer == self.depth - 1:
                self.logits = self._layers.logits(rows.hidden[-1])

    def read(self, layer: int, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies `[T, H, D]`."""
        return self.keys[layer][:, positions].transpose(0, 1), self.values[layer][:, positions].transpose(0, 1)

    def write(self, layer: int, positions: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write keys and values `[T, H, D]` to their places."""
        self.keys[layer].index_copy_(1, positions, keys.transpose(0, 1))
        self.values[layer].index_copy_(1, positions, values.transpose(0, 1))

    def context(self, layer: int, stop: int, absent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views.

        Absent rows, which are computed later, are zeroed in place. Their weight in attention is zero, but 0 × NaN would
        be NaN.
        """
        keys, values = self.keys[layer], self.values[layer]
        keys[:, absent] = values[:, absent] = 0
        return keys[:, :stop], values[:, :stop]

    def context_cost(self, stop: int) -> int:
        """Return 0, because views cost nothing."""
        return 0

    def summed(self, evidence: torch.Tensor) -> torch.Tensor:
        """Return the evidence: there is one rank."""
        return evidence

    def agreed(self, chosen: torch.Tensor, of: int) -> torch.Tensor:
        """Return the choice: there is one rank."""
        return chosen

    def _turn_of(self, placement: Placement) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin `[T, R/2]` that rotate a placement's keys to their new positions, in every layer."""
        assert placement.first <= placement.at, "a document never moves towards the start"
        half, cos, sin = self._cos.shape[-1] // 2, self._cos, self._sin
        old, new = (slice(at, at + placement.tokens) for at in (placement.first, placement.at))
        return turn_between(cos[old, :half], sin[old, :half], cos[new, :half], sin[new, :half])
