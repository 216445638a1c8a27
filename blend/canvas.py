"""The canvas is the interface through which the blender uses an inference engine for one prompt.

A canvas holds the keys and values of one prompt, wherever the engine keeps them, and runs the model's own layers on
rows of it. There are two: `lmc.connectors.transformers.canvas` keeps dense tensors, `lmc.connectors.vllm.canvas` writes
into the engine's pages. To blend in another engine, one writes a third canvas; the blender stays as it is.
"""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch

from lmc.blend.rope import Turn
from lmc.blend.segments import Placement

KV = tuple[torch.Tensor, torch.Tensor]  # keys and values of one layer

# A function that attends for a batch whose keys and values are in the canvas. It gets the queries [T, Q, D], and a
# function without arguments that calls the engine's own attention. It returns the output of attention, or None to end
# the layer there.
Attention = Callable[[torch.Tensor, Callable[[], torch.Tensor | None]], torch.Tensor | None]


def positions_of(placements: Sequence[Placement], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the positions `[T]` of all tokens of placements, as they were computed and as they are used."""
    none = torch.empty(0, dtype=torch.long, device=device)
    old = [torch.arange(one.first, one.first + one.tokens, device=device) for one in placements]
    new = [positions + (one.at - one.first) for one, positions in zip(placements, old, strict=True)]
    return torch.cat([none, *old]), torch.cat([none, *new])


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
    interleaved: bool = False  # RoPE rotates the dimensions (2i, 2i + 1) together, and not (i, i + R/2).

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

    def run(self, layer: int, rows: R, batch: slice, attention: Attention | None = None) -> None:
        """Run a batch of rows through a layer. Their keys and values are in the canvas before attention reads it.

        Without `attention` the engine's own is used, with the exact causal mask over everything in the canvas.
        `attention` may change the keys and values of other rows before it attends. Outputs of the last layer that
        nobody reads may be left out.
        """

    def read(self, layer: int, positions: torch.Tensor) -> KV:
        """Return copies of the keys and values `[T, H, D]` at `positions [T]`."""

    def write(self, layer: int, positions: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Set keys and values `[T, H, D]` at `positions [T]`, whether these rows are being computed or not."""

    def turn(self, old: torch.Tensor, new: torch.Tensor) -> Turn:
        """Return the rotation that moves keys from the positions `old [T]` to the positions `new [T]`."""

    def context(self, layer: int, stop: int, absent: torch.Tensor) -> KV:
        """Return keys and values `[H, stop, D]` of the first positions, to be read; those at `absent [N]` are zeros."""

    def context_cost(self, stop: int) -> int:
        """Return the cost of `context`, as the number of rows that would take as long to compute."""
        return 0

    def summed(self, evidence: torch.Tensor) -> torch.Tensor:
        """Return evidence added up over the KV heads of all tensor-parallel ranks."""
        return evidence

    def largest(self, evidence: torch.Tensor) -> torch.Tensor:
        """Return the largest evidence over the KV heads of all tensor-parallel ranks."""
        return evidence

    def agreed(self, chosen: torch.Tensor, of: int) -> torch.Tensor:
        """Return the indices that rank 0 has `chosen` among `of` candidates, so that all ranks take the same steps."""
        return chosen
