"""How a store writes down, and what it has counted."""

from dataclasses import dataclass
from enum import Enum
from typing import Literal

Verb = Literal["read", "write", "lookup"]  # deletions count as writes, listings as lookups


class Policy(Enum):
    """When a chunk goes down to the next place."""

    WRITE_THROUGH = "write_through"
    WRITE_BACK = "write_back"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStats:
    """Counts since start, and how things stand. A place is "device", "host" or a tier's name."""

    hits: dict[str, int]  # chunks pinned, by place
    misses: int
    bytes: dict[tuple[str, Verb], int]  # that came from and went to tiers, as they lie in memory: before a codec
    seconds: dict[tuple[str, Verb], float]  # inside tiers; threads that are there at once count each
    writes: dict[str, int]  # records stored, by tier
    dropped_writes: int  # the queue was full, or a tier not usable
    failed: dict[str, int]  # operations a tier failed at: each was a miss or a write that did not happen
    corrupt: dict[str, int]  # of these, records that were not what had been written
    no_room: int  # chunks that found every slot held
    evictions: dict[str, int]  # by place; of tiers those that evict by themselves
    queued: int  # chunks on their way down or up now
    usable: dict[str, bool]  # tiers that are not being skipped after failures

    @property
    def bytes_loaded(self) -> dict[str, int]:
        """From tiers, by name."""
        return {tier: count for (tier, verb), count in self.bytes.items() if verb == "read"}
