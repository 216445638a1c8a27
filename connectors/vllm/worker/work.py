"""A worker's jobs: they are done slice by slice, and say what slices cost."""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lmc.connectors.vllm.messages import DocumentPart, PageCopy


class Cost(NamedTuple):
    """What a slice of a job has cost, in token-layers; nothing if it waits for bytes."""

    done: int
    coming: int | None = None  # what the next one costs, where that is known; 0 behind the last one


@dataclass(slots=True)
class Work:
    """A job that is under way."""

    steps: Generator[Cost, None, None]
    request: str = ""  # the request that waits for it
    blocks: tuple[int, ...] = ()  # whose contents are wrong if it fails
    wanted: Sequence[PageCopy | DocumentPart] = ()  # the slots that it reads
    job: int = -1  # the number of a job that learns
    idle: bool = False  # It is done only in steps in which nothing else is computed.
    computes: str = ""  # what it computes; "" if it only copies
    memory: int = 0  # bytes that it may still take beside those for a batch of rows
    coming: int = 0  # what its next slice is expected to cost
    largest: int = 0  # the largest cost of its slices until now, which is expected where nothing else is known

    def next_slice(self) -> int:
        """Do a slice, and return what it has cost; raise `StopIteration` behind the last one."""
        done, coming = next(self.steps)
        self.largest = max(self.largest, done)
        self.coming = self.largest if coming is None else coming
        return done
