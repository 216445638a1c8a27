"""The write policies of a store, and its counts."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

Verb = Literal["read", "write", "lookup"]  # deletions count as writes, listings as lookups


class WritePolicy(Enum):
    """When a chunk is written to the next place."""

    WRITE_THROUGH = "write_through"
    WRITE_BACK = "write_back"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStats:
    """Counts since the start, and gauges. A place is "device", "host" or a tier's name."""

    hits: dict[str, int]  # chunks pinned, by place
    misses: int
    bytes: dict[tuple[str, Verb], int]  # read from and written to tiers, counted as in memory, without a codec
    writes: dict[str, int]  # records stored, by tier
    dropped_writes: int  # because the queue was full, or a tier not usable
    no_room: int  # chunks for which every slot was held
    evictions: dict[str, int]  # by place; of tiers those that evict by themselves
    queued: int  # chunks that wait to be copied or written now
    document_evictions: dict[str, int] = field(default_factory=dict)  # evictions of chunks of documents, by place
    seconds: dict[tuple[str, Verb], float] = field(default_factory=dict)  # inside tiers, summed over threads
    failed: dict[str, int] = field(default_factory=dict)  # failed operations, each a miss or a lost write
    corrupt: dict[str, int] = field(default_factory=dict)  # of these, records that were not what had been written
    usable: dict[str, bool] = field(default_factory=dict)  # false for tiers that are skipped after failures
    present: dict[str, tuple[int, int]] = field(default_factory=dict)  # chunks and tokens that are in each place
