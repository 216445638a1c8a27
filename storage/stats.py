"""The counts of a store."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields, replace
from typing import Literal

Verb = Literal["read", "write", "lookup"]  # deletions count as writes, listings as lookups


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


NOTHING = StoreStats(hits={}, misses=0, bytes={}, writes={}, dropped_writes=0, no_room=0, evictions={}, queued=0)
GAUGES = ("queued", "usable", "present")


class RunningCounts:
    """Counts that only grow, although those of a server begin again when another one takes its place."""

    def __init__(self) -> None:
        self.total = self._last = NOTHING

    def begin(self, stats: StoreStats) -> None:
        """Take the counts of a server as those from which the next ones are counted."""
        self._last = stats

    def update(self, stats: StoreStats) -> None:
        """Add what has been counted since the last call."""
        new = _joined(stats, self._last, lambda now, before: now - before)
        self.total, self._last = _joined(new, self.total, lambda one, other: one + other), stats


def summed(found: Iterable[StoreStats]) -> StoreStats:
    """Return the counts of several stores together, which share their tiers. What is present is left out."""
    total = NOTHING
    for stats in found:
        joined = _joined(stats, total, lambda one, other: one + other)
        of_tiers = {  # All stores have the same count of these.
            name: getattr(joined, name) | {tier: getattr(stats, name).get(tier, 0) for tier in stats.usable}
            for name in ("evictions", "document_evictions")
        }
        usable = {tier: total.usable.get(tier, True) and works for tier, works in stats.usable.items()}
        total = replace(joined, **of_tiers, usable=usable, queued=stats.queued + total.queued, present={})
    return total


def _joined(one: StoreStats, other: StoreStats, join: Callable[[float, float], float]) -> StoreStats:
    """Join all counts of two, and take the gauges of the first one."""
    found: dict[str, object] = {}
    for name in (each.name for each in fields(StoreStats)):
        here, there = getattr(one, name), getattr(other, name)
        if name in GAUGES:
            found[name] = here
        elif isinstance(here, dict):
            found[name] = {key: join(here.get(key, 0), there.get(key, 0)) for key in {**there, **here}}
        else:
            found[name] = join(here, there)
    return StoreStats(**found)  # type: ignore[arg-type]
