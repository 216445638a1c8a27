"""Which parts of a chunk belong to each worker of an engine.

A chunk has one part for each layer and tensor-parallel rank. In a record, the parts of a layer are adjacent, in the
order of the ranks. So a layer can be loaded as a whole. In memory, the parts of one worker are contiguous, slot after
slot, so that each worker page-locks only its own parts.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WorkerParts:
    """The parts of one worker: every `step`-th part, starting with part `first`."""

    first: int
    step: int
    count: int  # the worker's layers

    @property
    def numbers(self) -> slice:
        """The numbers of the worker's parts."""
        return slice(self.first, self.first + self.count * self.step, self.step)

    def needed(self, layer: int) -> int:
        """Return how many parts of a chunk must have arrived to complete this worker's `layer` on all ranks."""
        return (self.first // self.step + layer + 1) * self.step


@dataclass(frozen=True, slots=True)
class Parallelism:
    """The pipeline stages and tensor-parallel ranks of an engine."""

    stages: tuple[int, ...]  # the number of layers of each pipeline stage
    ranks: int = 1  # tensor-parallel ranks

    @property
    def parts(self) -> int:
        """The number of parts of a chunk."""
        return sum(self.stages) * self.ranks

    def worker(self, stage: int, rank: int) -> WorkerParts:
        """Return the parts of one worker."""
        return WorkerParts(sum(self.stages[:stage]) * self.ranks + rank, self.ranks, self.stages[stage])

    @property
    def workers(self) -> list[WorkerParts]:
        """The parts of each worker, in their order in memory."""
        return [self.worker(stage, rank) for stage in range(len(self.stages)) for rank in range(self.ranks)]
