"""The canvas is the interface through which the blender uses an inference engine for one prompt.

A canvas gives access to the keys and values of one prompt in the engine's memory, and runs the model's own layers on
rows of the prompt. There are two: `lmc.connectors.transformers.canvas` has dense tensors, and
`lmc.connectors.vllm.worker.canvas` writes into the engine's pages. Another engine needs only another canvas; the
blender stays the same.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeVar

import torch

from lmc.blend.kernels.operations import Kernels
from lmc.blend.layer_attention import LayerAttention
from lmc.blend.segments import Placement
from lmc.copies import Uploads

KV = tuple[torch.Tensor, torch.Tensor]  # keys and values of one layer
Groups = Sequence[tuple[int, int]]  # starts and ends of groups of rows, ascending and without overlap


class Paged(NamedTuple):
    """Keys and values of one layer in blocks of N tokens, `[B, H, N, D]` each, and the blocks `[b]` of one prompt.

    Without a table, the prompt is in one block. A token's slot is its block × N + its index in the block. In a
    quantised cache, the model's keys and values are those in memory times the two `scales`.
    """

    keys: torch.Tensor
    values: torch.Tensor
    table: torch.Tensor | None = None
    scales: tuple[float, float] = (1.0, 1.0)

    @property
    def largest(self) -> float:
        """The largest number that the type of a quantised cache has; 0 if the cache is not quantised."""
        return torch.finfo(self.keys.dtype).max if self.keys.element_size() == 1 else 0.0

    @classmethod
    def of(cls, kv: "KV | Paged") -> "Paged":
        """Return keys and values `[H, N, D]` as one block."""
        return kv if isinstance(kv, Paged) else cls(kv[0][None], kv[1][None])


def dense(kv: KV | Paged) -> KV:
    """Return keys and values `[H, N, D]`, as copies if they are in several blocks. They must not be quantised."""
    if not isinstance(kv, Paged):
        return kv
    if kv.table is None:
        return kv.keys[0], kv.values[0]
    keys, values = (half[kv.table.long()].transpose(0, 1).flatten(1, 2) for half in kv[:2])
    return keys, values


# A function that computes attention for a batch of rows. Its arguments are the queries [T, Q, D] and two functions. The
# first writes the keys and values of these rows into the canvas. The second calls the engine's own attention, which may
# return None in the last layer. The result is the attention's output [T, Q, D], or None to end the layer there.
Own = Callable[[], torch.Tensor | None]
Attention = Callable[[torch.Tensor, Callable[[], None], Own], torch.Tensor | None]


class EndOfLayer(Exception):
    """Raised to end a layer after its projections, when the rest of the layer is not needed."""


def writes_and_attends(query: torch.Tensor, write: Callable[[], None], own: Own) -> torch.Tensor | None:
    """Write the keys and values of the rows, and compute the engine's own attention."""
    write()
    return own()


def only_writes(query: torch.Tensor, write: Callable[[], None], own: Own) -> None:
    """Write the keys and values of the rows, and end the layer."""
    write()


def positions_of(placements: Sequence[Placement]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the positions `[T]` at which the tokens of placements were computed, and those at which they are used."""
    none = torch.empty(0, dtype=torch.long)
    old = [torch.arange(placement.first, placement.first + placement.tokens) for placement in placements]
    new = [positions + (placement.at - placement.first) for placement, positions in zip(placements, old, strict=True)]
    return torch.cat([none, *old]), torch.cat([none, *new])


class Rows(Protocol):
    """Tokens that go through the layers: their positions, and their hidden states in the canvas's own form."""

    positions: torch.Tensor  # [T], ascending, on the host


R = TypeVar("R", bound=Rows)


class Canvas(Protocol[R]):
    """The keys and values of one prompt in every layer, and the model's layers to compute more of them.

    Positions and indices of rows are on the host, so that a blend can plan its work without waiting for a GPU. All that
    the layers read is on the device: slots, rotations, keys and values.

    The inherited defaults are for an engine with one rank that loads parts when they are placed.
    """

    depth: int  # number of layers
    # Number of layers of a draft model. They have keys and values, too, and come after the model's own layers in
    # everything that is by layer. Only `draft` runs them.
    drafts: int = 0
    device: torch.device
    kernels: Kernels  # they access keys and values by `slots` and `paged`, or by `read` and `write`
    attentions: Sequence[LayerAttention]  # by layer
    dtype: torch.dtype  # of stored keys and values, which an engine may have quantised
    call_cost: int = 0  # launch time of one call of a layer, as the number of rows that take as long to compute
    compiled: bool = False  # whether `run_through` calls a model that the engine has compiled as a whole
    uploads: Uploads  # of positions and slots to the device; rows and slots can be used after `uploads.send()`

    def arrived(self, layer: int) -> bool:
        """Return whether the stored parts of a layer can be placed now. Raises `ChunkLost` if they never can."""
        return True

    def place(self, layer: int) -> int:
        """Write the stored parts of a layer to their slots, with keys rotated to their new positions.

        Returns the cost, as the number of rows that take as long to compute.
        """

    def begin(self, positions: torch.Tensor, *, through: bool = False, together: Groups = ()) -> R:
        """Return rows for the tokens at ascending `positions [T]`, before layer 0.

        With `through`, the size of their batches suits `run_through`. A batch ends before a group of `together` that
        its end would split, if at least half of the batch remains.
        """

    def keep(self, rows: R, kept: torch.Tensor) -> R:
        """Return the rows at the ascending indices `kept`, with their hidden states."""

    def batches(self, rows: R) -> Sequence[slice]:
        """Return slices of the rows. Each goes through a layer in one call."""

    def run(self, layer: int, rows: R, batch: slice, attention: Attention | None = None) -> None:
        """Run a batch of rows through a layer.

        Without `attention`, the rows' keys and values are written and the engine's own attention is used. Its causal
        mask is exact over everything in the canvas. `attention` may change the keys and values of other rows before it
        attends. Unused outputs of the last layer may be left out.
        """

    def run_through(self, rows: R, batch: slice, attention_of: Callable[[int], Attention | None]) -> None:
        """Run a batch of rows through all layers, in one call of the compiled model if there is one.

        `attention_of` returns the attention of each layer, as in `run`.
        """
        for layer in range(self.depth):
            self.run(layer, rows, batch, attention_of(layer))

    def draft(self, rows: R, batch: slice, attention_of: Callable[[int], Attention | None] | None = None) -> None:
        """Run a batch of rows through the draft model, if there is one, after they have gone through all layers.

        Without `attention_of`, which is as in `run_through`, keys and values are written as by `run`.
        """
        return

    def slots(self, positions: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return the slots `[T]` of the keys and values at `positions [T]`, by layer, on the device."""
        return [self.uploads.add(positions)] * self.depth

    def read(self, layer: int, slots: torch.Tensor) -> KV:
        """Return copies of the keys and values `[T, H, D]` at `slots [T]`."""

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write keys and values `[T, H, D]` to `slots [T]`, whether these rows are being computed or not."""

    def paged(self, layer: int) -> Paged:
        """Return the memory that `slots` index, for kernels that read and write it."""

    def context(self, layer: int, stop: int, absent: torch.Tensor) -> KV | Paged:
        """Return the keys and values of the positions before `stop`, read-only, in the form of the canvas's kernels.

        Torch kernels get `[H, stop, D]`, with zeros at the positions `absent [N]`.
        """

    def context_cost(self, stop: int) -> int:
        """Return the cost of `context`, as the number of rows that take as long to compute."""
        return 0

    def summed(self, evidence: torch.Tensor) -> torch.Tensor:
        """Return the sum of evidence over the KV heads of all tensor-parallel ranks."""
        return evidence

    def largest(self, evidence: torch.Tensor) -> torch.Tensor:
        """Return the maximum of evidence over the KV heads of all tensor-parallel ranks."""
        return evidence

    def agreed(self, chosen: torch.Tensor, of: int) -> torch.Tensor:
        """Return the indices that rank 0 has `chosen` among `of` candidates, so that all ranks do the same."""
        return chosen
