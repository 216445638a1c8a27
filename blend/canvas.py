"""The canvas is the interface through which the blender uses an inference engine for one prompt.

A canvas holds the keys and values of one prompt, wherever the engine keeps them, and runs the model's own layers on
rows of it. There are two: `lmc.connectors.transformers.canvas` keeps dense tensors, and
`lmc.connectors.vllm.worker.canvas` writes into the engine's pages. To blend in another engine, one writes a third
canvas; the blender stays as it is.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeVar

import torch

from lmc.blend.kernels.operations import Kernels
from lmc.blend.rope import Turn
from lmc.blend.segments import Placement

KV = tuple[torch.Tensor, torch.Tensor]  # keys and values of one layer


class Paged(NamedTuple):
    """Keys and values of one layer in blocks of N tokens, `[B, H, N, D]` each, and the blocks `[b]` of one prompt.

    Without a table, the prompt is in one block. The slot of a token is its block × N + its place in the block.
    """

    keys: torch.Tensor
    values: torch.Tensor
    table: torch.Tensor | None = None

    @classmethod
    def of(cls, kv: "KV | Paged") -> "Paged":
        """Return keys and values `[H, N, D]` as one block."""
        return kv if isinstance(kv, Paged) else cls(kv[0][None], kv[1][None])


def dense(kv: KV | Paged) -> KV:
    """Return keys and values `[H, N, D]`, as copies if they are in several blocks."""
    if not isinstance(kv, Paged):
        return kv
    if kv.table is None:
        return kv.keys[0], kv.values[0]
    keys, values = (one[kv.table.long()].transpose(0, 1).flatten(1, 2) for one in kv[:2])
    return keys, values


# A function that attends for a batch of rows. It gets the queries [T, Q, D], and two functions without arguments: one
# writes the keys and values of these rows into the canvas, and one calls the engine's own attention, which may return
# None in the last layer. It returns the output of attention [T, Q, D], or None to end the layer there.
Own = Callable[[], torch.Tensor | None]
Attention = Callable[[torch.Tensor, Callable[[], None], Own], torch.Tensor | None]


def writes_and_attends(query: torch.Tensor, write: Callable[[], None], own: Own) -> torch.Tensor | None:
    """Do in a layer what the engine does."""
    write()
    return own()


def only_writes(query: torch.Tensor, write: Callable[[], None], own: Own) -> None:
    """End a layer when the keys and values of its rows are written."""
    write()


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
    kernels: Kernels  # which find keys and values by `slots` and `paged`, or by `read` and `write`
    scale: float  # of the attention's logits
    call_cost: int = 0  # rows that a layer computes in the time that the launches of one call of it take
    compiled: bool = False  # The engine has the model compiled as a whole, and `run_through` calls that.
    interleaved: bool = False  # RoPE rotates the dimensions (2i, 2i + 1) together, and not (i, i + R/2).

    def arrived(self, layer: int) -> bool:
        """Return whether the stored parts of a layer can be placed now; raise `ChunkLost` if they never will be."""
        return True

    def place(self, layer: int) -> int:
        """Put the stored parts of a layer where they are used, with keys rotated to their new positions.

        Returns the cost, as the number of rows that would take as long to compute.
        """

    def begin(self, positions: torch.Tensor, *, through: bool = False) -> R:
        """Return rows for the tokens at ascending `positions [T]`, before layer 0.

        If they go `through` the model as a whole, their batches are of a size for that.
        """

    def keep(self, rows: R, kept: torch.Tensor) -> R:
        """Return the rows with the ascending indices `kept`, with their hidden states."""

    def batches(self, rows: R) -> Sequence[slice]:
        """Return the slices of the rows that go through a layer in one call each."""

    def run(self, layer: int, rows: R, batch: slice, attention: Attention | None = None) -> None:
        """Run a batch of rows through a layer.

        Without `attention` their keys and values are written and the engine's own is used, with the exact causal mask
        over everything in the canvas. `attention` may change the keys and values of other rows before it attends.
        Outputs of the last layer that nobody reads may be left out.
        """

    def run_through(self, rows: R, batch: slice, attention_of: Callable[[int], Attention | None]) -> None:
        """Run a batch of rows through all layers in one call of the model that the engine has compiled.

        `attention_of` returns the attention of each layer, as in `run`.
        """
        for layer in range(self.depth):
            self.run(layer, rows, batch, attention_of(layer))

    def slots(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the numbers `[T]` of the places that the keys and values at `positions [T]` have in every layer."""
        return positions

    def read(self, layer: int, slots: torch.Tensor) -> KV:
        """Return copies of the keys and values `[T, H, D]` at `slots [T]`."""

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Set keys and values `[T, H, D]` at `slots [T]`, whether these rows are being computed or not."""

    def paged(self, layer: int) -> Paged:
        """Return the memory that `slots` number, for kernels that read and write it."""

    def turn(self, old: torch.Tensor, new: torch.Tensor) -> Turn:
        """Return the rotation that moves keys from the positions `old [T]` to the positions `new [T]`."""

    def context(self, layer: int, stop: int, absent: torch.Tensor) -> KV | Paged:
        """Return keys and values of the first positions, to be read, in a form that the canvas's kernels take.

        Kernels in torch get `[H, stop, D]`, with zeros at `absent [N]`.
        """

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
