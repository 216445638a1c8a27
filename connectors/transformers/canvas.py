"""The dense canvas: a prompt's keys and values as one tensor per layer, and a transformers model's layers over them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

import torch

from lmc.blend.canvas import KV, Attention, Canvas, Groups, Paged, positions_of, writes_and_attends
from lmc.blend.kernels.choice import kernels_of
from lmc.blend.layer_attention import LayerAttention, key_rotations
from lmc.blend.measured_rope import Angles
from lmc.blend.rope import KeyRotation
from lmc.blend.segments import Placement
from lmc.blend.staging import Staging
from lmc.connectors.transformers.layers import DecoderLayers
from lmc.copies import Uploads

# For each layer in order: its number, and stored keys and values [T, H, D] for each placement.
Reader = Iterator[tuple[int, Sequence[KV]]]


@dataclass(slots=True)
class DenseRows:
    """Tokens between two layers of the model."""

    positions: torch.Tensor  # [T], on the host
    at: torch.Tensor  # [T], the same on the device
    tokens: torch.Tensor  # [T], on the device
    hidden: torch.Tensor  # [T, E], empty before layer 0
    angles: dict[str, Angles] = field(default_factory=dict)  # cos and sin of the positions, by kind of layer


class DenseCanvas(Canvas[DenseRows]):
    """The KV of one prompt. After a blend, `kv` has all of it, and `logits` has the logits of the last token."""

    def __init__(
        self, layers: DecoderLayers, tokens: Sequence[int], placements: Sequence[Placement], reader: Reader
    ) -> None:
        """Allocate the KV of a prompt; `reader` yields the stored parts of `placements`, layer by layer."""
        self.depth, self.device = layers.shape.layers, layers.device
        self.kernels, self.dtype = kernels_of(self.device), layers.shape.dtype
        self._layers, self._reader = layers, reader
        self._tokens = torch.tensor(tokens)
        # In its stored form, a document may end at a later position than the prompt.
        ends = [placement.first + placement.tokens for placement in placements]
        self._angles = layers.angles(max([len(tokens), *ends]))
        self.uploads = Uploads(self.device)
        self._computed_at, self._stored = map(self.uploads.add, positions_of(placements))
        self.attentions: Sequence[LayerAttention] = layers.attentions(self._angles)
        shape, empty = layers.shape, partial(torch.empty, dtype=layers.shape.dtype, device=self.device)
        sizes = [(shape.kv_heads, len(tokens), dim) for dim in shape.dims]
        self.kv: list[KV] = [(empty(sizes[0]), empty(sizes[1])) for _ in range(self.depth)]  # [H, N, D] each
        self.logits: torch.Tensor  # [V], after the last layer
        self._placed = 0  # number of layers whose stored parts are in place
        self._staging: Staging | None = None
        if self.device.type == "cuda" and self.kernels.in_pages and placements:
            shapes, stream = [shape] * self.depth, torch.cuda.Stream(self.device)
            self._staging = Staging(self._stage, shapes, len(self._stored), self.device, stream)

    @cached_property
    def _key_rotations(self) -> Sequence[KeyRotation]:
        """By layer, the rotations of stored keys to their positions."""
        return key_rotations(self.attentions, self._computed_at, self._stored)

    def place(self, layer: int) -> int:
        """Write a layer's stored keys, rotated, and values to their positions."""
        self._placed = layer + 1
        if self._staging is None:
            self.kernels.place(self._parts(layer), self._key_rotations[layer], self._stored, self.paged(layer))
            return 0
        with self._staging.parts(layer) as staged:
            self.kernels.place([staged], self._key_rotations[layer], self._stored, self.paged(layer))
        return 0

    def _stage(self, layer: int, into: KV) -> None:
        self.kernels.stage(self._parts(layer), into)

    def _parts(self, layer: int) -> Sequence[KV]:
        """Wait for the stored parts of a layer, and return them."""
        arrived, parts = next(self._reader)
        assert arrived == layer, "the reader is out of step"
        return parts

    def begin(self, positions: torch.Tensor, *, through: bool = False, together: Groups = ()) -> DenseRows:
        """Return the tokens at `positions`. They are embedded when they run."""
        at, tokens = map(self.uploads.add, (positions, self._tokens[positions]))
        return DenseRows(positions, at, tokens, torch.empty(0, device=self.device))

    def keep(self, rows: DenseRows, kept: torch.Tensor) -> DenseRows:
        """Return the `kept` rows. Their projections are computed again when they run."""
        positions, kept = rows.positions[kept], self.uploads.add(kept)
        self.uploads.send()
        at = rows.at[kept]
        return DenseRows(positions, at, rows.tokens[kept], rows.hidden[kept], self._angles_at(at))

    def _angles_at(self, positions: torch.Tensor) -> dict[str, Angles]:
        return {kind: angles.at(positions) for kind, angles in self._angles.items()}

    def batches(self, rows: DenseRows) -> list[slice]:
        """Return one batch of all rows."""
        return [slice(0, len(rows.positions))]

    def run(self, layer: int, rows: DenseRows, batch: slice, attention: Attention | None = None) -> None:
        """Run the model's own layer on the rows, with the given attention or lmc's.

        The last layer is finished only for the last token, whose logits are computed.
        """
        kernels, own_attention, last = self.kernels, self.attentions[layer], layer == self.depth - 1
        finishes = False  # whether the last layer is to be finished

        def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _: object) -> torch.Tensor | None:
            def write() -> None:
                self.write(layer, rows.at, key, value)

            def own() -> torch.Tensor | None:
                nonlocal finishes
                finishes = last
                return None if last else kernels.attend(query, self.kv[layer], rows.at, own_attention)

            return (attention or writes_and_attends)(query, write, own)

        def attend_last(query: torch.Tensor, *_: object) -> torch.Tensor:
            return kernels.attend(query, self.kv[layer], rows.at[-1:], own_attention)

        if not len(rows.hidden):
            rows.hidden, rows.angles = self._layers.embed(rows.tokens), self._angles_at(rows.at)
        angles = rows.angles[self._layers.kinds[layer]]
        hidden = self._layers.run(layer, rows.hidden, rows.at, angles, attend)
        if hidden is not None:
            rows.hidden = hidden
        elif finishes:  # All keys and values are in place, so that the last row alone can be finished.
            end = slice(-1, None)
            hidden = self._layers.run(layer, rows.hidden[end], rows.at[end], angles.at(end), attend_last)
            assert hidden is not None
            self.logits = self._layers.logits(hidden[-1])
        if self._staging is not None and layer + 1 == self._placed < self.depth:
            self._staging.begin(layer + 1)  # The host waits for the next layer while the GPU computes this layer.

    def paged(self, layer: int) -> Paged:
        """Return the KV of a layer as one block, in which slots are positions."""
        return Paged.of(self.kv[layer])

    def read(self, layer: int, slots: torch.Tensor) -> KV:
        """Return copies of keys and values `[T, H, D]`."""
        keys, values = (cached.index_select(1, slots) for cached in self.kv[layer])
        return keys.transpose(0, 1), values.transpose(0, 1)

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write keys and values `[T, H, D]` to `slots`."""
        for whole, some in zip(self.kv[layer], (keys, values), strict=True):
            whole.index_copy_(1, slots, some.transpose(0, 1))

    def context(self, layer: int, stop: int, absent: torch.Tensor) -> KV:
        """Return views `[H, stop, D]` of a layer's keys and values.

        Absent rows, which are computed later, are zeroed in place. Their weight in attention is zero, but 0 × NaN would
        be NaN.
        """
        keys, values = self.kv[layer]
        for cached in (keys, values):
            cached.index_fill_(1, absent, 0)  # Assigning a number by index would block the host on a GPU.
        return keys[:, :stop], values[:, :stop]
