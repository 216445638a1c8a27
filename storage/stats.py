"""How a store writes down, and what it has counted."""

from dataclasses import dataclass
from enum import Enum


class Policy(Enum):
    """When a chunk goes down to the next place."""

    WRITE_THROUGH = "write_through"
    WRITE_BACK = "write_back"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStats:
    """Counts since start."""

    hits: dict[str, int]  # chunks pinned, by place
    misses: int
    bytes_loaded: dict[str, int]  # from tiers, by name
    writes: dict[str, int]  # records stored, by tier
    dropped_writes: int  # the queue was full
    failed: dict[str, int]  # operations a tier failed at: each was a miss or a write that did not happen
    no_room: int  # chunks that found every slot held
    evictions: dict[str, int]
