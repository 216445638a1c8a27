"""The counts of a store."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields, replace
from typing import Literal

Verb = Literal["read", "write", "lookup"]  # Deletions count as writes, listings as lookups.


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStats:
    """Counts since the start, and gauges. A place is "device", "host" or a tier's name."""

    hits: dict[str, int]  # chunks pinned, by place
    misses: int
    bytes: dict[tuple[str, Verb], int]  # read from and written to tiers; size in memory, before any codec
    writes: dict[str, int]  # records stored, by tier
    dropped_writes: int  # writes that were skipped because a queue was full or a tier was not usable or refused them
    no_room: int  # chunks that got no slot, because every slot was held
    evictions: dict[str, int]  # by place; for a tier, only the evictions that lmc itself does
    queued: int  # chunks that currently wait to be copied or written
    document_evictions: dict[str, int] = field(default_factory=dict)  # evictions of chunks of documents, by place
    seconds: dict[tuple[str, Verb], float] = field(default_factory=dict)  # inside tiers, summed over threads
    failed: dict[str, int] = field(default_factory=dict)  # failed operations, each a miss or a lost write
    corrupt: dict[str, int] = field(default_factory=dict)  # failed operations whose record was corrupt
    usable: dict[str, bool] = field(default_factory=dict)  # false for tiers that are skipped after failures
    present: dict[str, tuple[int, int]] = field(default_factory=dict)  # chunks and tokens in each place


NOTHING = StoreStats(hits={}, misses=0, bytes={}, writes={}, dropped_writes=0, no_room=0, evictions={}, queued=0)
GAUGES = ("queued", "usable", "present")


class RunningCounts:
    """Counts that only grow, although a server's counts start again at 0 when a new server replaces it."""

    def __init__(self) -> None:
        self.total = self._last = NOTHING

    def begin(self, stats: StoreStats) -> None:
        """Set a server's counts as the baseline for the next update, and its gauges as the current ones."""
        self._last = stats
        self.update(stats)

    def lose(self) -> None:
        """Set the gauges of a server that was lost: nothing is there, and no tier can be used."""
        absent, unusable = dict.fromkeys(self.total.present, (0, 0)), dict.fromkeys(self.total.usable, False)
        self.total = replace(self.total, present=absent, usable=unusable, queued=0)

    def update(self, stats: StoreStats) -> None:
        """Add the difference between these counts and the last ones to the total."""
        new = _joined(stats, self._last, lambda now, before: now - before)
        self.total, self._last = _joined(new, self.total, lambda one, other: one + other), stats


def summed(found: Iterable[StoreStats]) -> StoreStats:
    """Return the summed counts of several stores that share their tiers. `present` is left empty."""
    total = NOTHING
    for stats in found:
        joined = _joined(stats, total, lambda one, other: one + other)
        of_tiers = {  # All stores report the same counts for the tiers, so these are not added.
            name: getattr(joined, name) | {tier: getattr(stats, name).get(tier, 0) for tier in stats.usable}
            for name in ("evictions", "document_evictions")
        }
        usable = {tier: total.usable.get(tier, True) and works for tier, works in stats.usable.items()}
        total = replace(joined, **of_tiers, usable=usable, queued=stats.queued + total.queued, present={})
    return total


def _joined(one: StoreStats, other: StoreStats, join: Callable[[float, float], float]) -> StoreStats:
    """Combine the counts of two stats with `join`, and take the gauges from the first."""
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
