"""The canvas is the interface through which the blender uses an inference engine for one prompt.

A canvas holds the keys and values of one prompt, wherever the engine keeps them, and runs the model's own layers on
rows of it. There are two: `lmc.connectors.transformers.canvas` keeps dense tensors, `lmc.connectors.vllm.canvas` writes
into the engine's pages. To blend in another engine, one writes a third canvas; the blender stays as it is.
"""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch

KV = tuple[torch.Tensor, torch.Tensor]  # keys and values of one layer

# Gets the queries [T, Q, D] of a batch whose keys and values are in the canvas, and returns the output of attention
# [T, Q, D], or None to end the layer there.
AttentionFunction = Callable[[torch.Tensor], torch.Tensor | None]


class Rows(Protocol):
    """Tokens on their way through the layers: their positions, and their hidden states in the canvas's own form."""

    positions: torch.Tensor  # [T], ascending


R = TypeVar("R", bound=Rows)


class Canvas(Protocol[R]):
    """The keys and values of one prompt in every layer, and the model's layers to compute more of them.

    A canvas inherits the answers of an engine with one rank, whose parts arrive when they are placed.
    """

    depth: int  # layers
    device: torch.device
    scale: float  # of the attention's logits

    def arrived(self, layer: int) -> bool:
        """Return whether the stored parts of a layer can be placed now; raise `ChunkLost` if they never will be."""
        return True

    def place(self, layer: int) -> int:
        """Put the stored parts of a layer where they are used, with keys rotated to their new positions.

        Returns the cost, as the number of rows that would take as long to compute.
        """

    def begin(self, positions: torch.Tensor) -> R:
        """Return rows for the tokens at ascending `positions [T]`, before layer 0."""

    def keep(self, rows: R, kept: torch.Tensor) -> R:
        """Return the rows with the ascending indices `kept`, with their hidden states."""

    def batches(self, rows: R) -> Sequence[slice]:
        """Return the slices of the rows that go through a layer in one call each."""

    def run(self, layer: int, rows: R, batch: slice, attention: AttentionFunction | None = None) -> None:
        """Run a batch of rows through a layer. Their keys and values are in the canvas before attention reads it.

        Without `attention` the engine's own is used, with the exact causal mask over everything in the canvas. Outputs
        of the last layer that nobody reads may be left out.
        """

    def read(self, layer: int, positions: torch.Tensor) -> KV:
        """Return keys and values `[T, H, D]` at `positions [T]`."""

    def write(self, layer: int, positions: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Set keys and values `[T, H, D]` at `positions [T]`, whether these rows are being computed or not."""

    def context(self, layer: int, stop: int, absent: torch.Tensor) -> KV:
        """Return keys and values `[H, stop, D]` of the first positions, to be read; those at `absent [N]` are zeros."""

    def context_cost(self, stop: int) -> int:
        """Return the cost of `context`, as the number of rows that would take as long to compute."""
        return 0

    def summed(self, evidence: torch.Tensor) -> torch.Tensor:
        """Return evidence added up over the KV heads of all tensor-parallel ranks."""
        return evidence

    def agreed(self, chosen: torch.Tensor, of: int) -> torch.Tensor:
        """Return the indices that rank 0 has `chosen` among `of` candidates, so that all ranks take the same steps."""
        return chosen
