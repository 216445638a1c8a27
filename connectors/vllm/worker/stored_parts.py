"""The stored parts of a blend's documents, in slots of the slab.

A blend copies one part of each document in every layer: thousands of parts. Slots and layers are at equal distances in
the slab, so the addresses of all parts of a layer are computed at once. To make a tensor of each part and to ask CUDA
whether it is page-locked took 8 to 10 ms of a blend of 32 parts in 32 layers.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from lmc.blend.canvas import KV
from lmc.blend.kernels.operations import Kernels
from lmc.copies import Addresses, Copies, submit_of
from lmc.engine import Piece
from lmc.shapes import KVShape


class PartMemory(Protocol):
    """Slots with parts for the layers of this rank."""

    def part(self, slot: int, layer: int) -> torch.Tensor:
        """Return the part of a slot for a layer: uint8 `[n]`."""

    def addresses(self, slots: Sequence[int], layer: int) -> Addresses | None:
        """Return the addresses of the parts of slots for a layer; None if a GPU cannot access them by itself."""


class StoredParts:
    """The stored keys and values of some pieces, in the order of the pieces."""

    def __init__(
        self,
        memory: PartMemory,
        pieces: Sequence[Piece],
        shapes: Sequence[KVShape],
        kernels: Kernels,
        device: torch.device,
    ) -> None:
        """Prepare the copies of the parts to a GPU. `shapes` are those of the layers."""
        self._memory, self._pieces, self._shapes, self._kernels = memory, pieces, shapes, kernels
        self._submit, self._slots = submit_of(device), [piece.slot for piece in pieces]
        columns = [(piece.stored, piece.skip, piece.tokens) for piece in pieces]
        self._stored, self._skipped, self._counts = np.array(columns, np.int64).reshape(-1, 3).T
        self._firsts = np.cumsum(self._counts) - self._counts

    def of(self, layer: int) -> list[KV]:
        """Return the stored keys and values `[T, H, D]` of a layer, for each piece."""
        shape = self._shapes[layer]
        return [shape.part(self._memory.part(one.slot, layer), one.stored, one.rows) for one in self._pieces]

    def stage(self, layer: int, into: KV) -> None:
        """Copy the parts of a layer, one after another, to keys and values `[T, H, D]` on the GPU."""
        if self._submit is not None and (addresses := self._memory.addresses(self._slots, layer)) is not None:
            self._submit(self._copies(self._shapes[layer], addresses, into))
        else:
            self._kernels.stage(self.of(layer), into)

    def _copies(self, shape: KVShape, addresses: Addresses, into: KV) -> Copies:
        """Return the copies of parts at `addresses`. A part has the keys of its tokens, and then their values."""
        key_row, value_row = shape.row_bytes
        keys, values = (half.data_ptr() for half in into)
        sources = addresses + self._skipped * key_row, addresses + self._stored * key_row + self._skipped * value_row
        targets = keys + self._firsts * key_row, values + self._firsts * value_row
        sizes = self._counts * key_row, self._counts * value_row
        return Copies(*(np.concatenate(both) for both in (sources, targets, sizes)))
