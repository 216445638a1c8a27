"""Shares: which parts of a slot belong to which worker of an engine, and where they lie in the slab.

A chunk has a part for each layer and each tensor-parallel rank. The parts of a layer are side by side in a record, in
the order of the ranks, so that a layer can be loaded as a whole. In memory, the parts of one worker are one stretch,
slot after slot, so that each worker page-locks no more than its own share.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Share:
    """The parts of one worker: every `step`-th part from the part `first` on."""

    first: int
    step: int
    count: int  # its layers

    @property
    def parts(self) -> slice:
        """Their numbers."""
        return slice(self.first, self.first + self.count * self.step, self.step)

    def needed(self, layer: int) -> int:
        """Return how many parts of a chunk have arrived when those of all ranks for this worker's layer have."""
        return (self.first // self.step + layer + 1) * self.step


@dataclass(frozen=True, slots=True)
class Shares:
    """The workers of an engine."""

    stages: tuple[int, ...]  # layers of each pipeline stage
    ranks: int = 1  # of tensor parallelism

    @property
    def parts(self) -> int:
        """How many parts a chunk has."""
        return sum(self.stages) * self.ranks

    def of(self, stage: int, rank: int) -> Share:
        """Return the share of one worker."""
        return Share(sum(self.stages[:stage]) * self.ranks + rank, self.ranks, self.stages[stage])

    @property
    def all(self) -> list[Share]:
        """The shares in the order in which they lie in memory."""
        return [self.of(stage, rank) for stage in range(len(self.stages)) for rank in range(self.ranks)]
