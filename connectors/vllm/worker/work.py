"""The jobs of a worker: a job runs slice by slice, and reports the cost of its slices."""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lmc.connectors.vllm.messages import PageCopy
from lmc.engine import Piece


class Cost(NamedTuple):
    """The cost of a slice of a job, in token-layers; 0 if the slice waits for bytes."""

    done: int
    coming: int | None = None  # cost of the next slice, if known; 0 after the last slice


@dataclass(slots=True)
class Work:
    """A job that is under way."""

    steps: Generator[Cost, None, None]
    request: str = ""  # the request that waits for the job
    blocks: tuple[int, ...] = ()  # blocks whose contents are invalid if the job fails
    wanted: Sequence[PageCopy | Piece] = ()  # the slots that the job reads
    job: int = -1  # the number of a learning or backfill job
    idle: bool = False  # The job runs only in steps in which nothing else is computed.
    computes: str = ""  # what the job computes; "" if it only copies
    memory: int = 0  # number of bytes that the job may still allocate, in addition to those for a batch of rows
    coming: int = 0  # expected cost of the next slice
    rows: float = 0  # tokens that a blend computes
    largest: int = 0  # largest cost of a slice until now; it is the expectation if the cost of the next is unknown

    def next_slice(self) -> int:
        """Run a slice, and return its cost. Raises `StopIteration` after the last slice."""
        cost, coming = next(self.steps)
        self.largest = max(self.largest, cost)
        self.coming = self.largest if coming is None else coming
        return cost
