"""The contract of a tier below memory: it stores records by key, and is slower and larger than memory.

A missing key is an ordinary result, not an error. The same holds for `FileNotFoundError`, if a record disappears while
it is read. A tier may raise `OSError` or `CorruptRecord`; only the store turns these into misses (`tier_guard.py`).
`tests/tier_contract.py` tests the contract for every tier.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol, TypeGuard

from lmc.keys import ChunkKey
from lmc.storage.change_log import ChangeLog
from lmc.storage.tiers.record import RecordMeta


class Written(Enum):
    """The outcome of writing a record."""

    STORED = "stored"
    PRESENT = "present"  # The tier had the record already.
    REFUSED = "refused"  # The record is larger than the tier, or the tier is full, read-only or paused.


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One record in a listing of a tier."""

    key: ChunkKey
    bytes: int
    used: float  # time of the last use, in seconds since the epoch; 0 if the tier does not know it


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A problem in a persistent tier, and whether it was repaired."""

    where: str
    problem: str
    fixed: bool


class RecordReader(Protocol):
    """An open record. Its parts can be read in any order, and each part is verified."""

    meta: RecordMeta

    def request(self, first: int, count: int) -> None:
        """Announce the parts that this thread reads after those of earlier requests. A remote tier has them sent."""

    def read(self, first: int, count: int, into: Sequence[memoryview]) -> None:
        """Fill `into` (one view per part, or one for all) with stored parts. Raises `CorruptRecord` or `OSError`."""

    def close(self) -> None:
        """Release the reader's resources."""


class Tier(Protocol):
    """A level of storage below memory. It stores records by key."""

    name: str
    shared: bool  # whether other processes also read and write there; a tier that is not shared is a `LocalTier`

    @property
    def usable(self) -> bool:
        """Whether the tier responds. While it does not, every lookup is a miss without waiting."""

    def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """Return for each of `keys` whether it can be read now, as far as the tier knows without reading it."""

    def unanswered(self, keys: Sequence[ChunkKey]) -> bool:
        """Return whether lookups of some of these keys are under way, whose answers `contains` did not wait for."""

    def announce(self, keys: Sequence[ChunkKey], into: Sequence[Sequence[memoryview]] = ()) -> None:
        """Announce the records that this thread opens next. A remote tier fetches all their headers at once.

        `into` is the memory for the first parts of each record, if they have the usual size. A tier may fill it while
        it opens the record. Only `RecordReader.read` verifies these bytes.
        """

    def open(self, key: ChunkKey) -> RecordReader | None:
        """Open a record and return its reader, or None if the record is missing.

        A corrupt record is deleted, and raises `CorruptRecord`.
        """

    def write(self, meta: RecordMeta, parts: Sequence[memoryview]) -> Written:
        """Store a record, and compute its checksums. The record becomes visible as a whole or not at all."""

    def delete(self, key: ChunkKey) -> bool:
        """Delete a record. Returns false if it was missing. Raises `OSError` if the tier does not respond."""

    def close(self) -> None:
        """Close the tier. No operation may follow."""


class ListedTier(Tier, Protocol):
    """A tier whose records can be listed and verified. The command line uses it."""

    def entries(self) -> Iterator[Entry]:
        """Return all records, least recently used first."""

    def check(self, fix: bool = False) -> list[Finding]:
        """Verify every byte. With `fix`, remove corrupt records. Valid records are never removed."""


class LocalTier(ListedTier, Protocol):
    """A tier that only this process uses. The store decides what it keeps, and logs its changes."""

    evictions: int  # records that the tier has removed to stay within its bound
    document_evictions: int  # evictions of records of documents

    def note_use(self, keys: Sequence[ChunkKey]) -> None:
        """Record that chunks were used in memory, so that their records here are not evicted as unused.

        This does not block, and ignores records that the tier does not have.
        """

    def protect(self, keys: Collection[ChunkKey], *, pinned: bool) -> None:
        """Pin records of documents, or end that, including records that are written later."""

    def trim(self) -> None:
        """Evict records until the tier is within its bound. Call `protect` before, for the records that must stay."""

    def report_to(self, changes: ChangeLog) -> None:
        """Report to `changes` the records that appear and leave from now on, under the tier's name."""

    def all_keys(self) -> Collection[ChunkKey]:
        """Return the keys of all records."""

    def headers(self) -> Iterator[tuple[RecordMeta, float]]:
        """Yield each readable record's header, without sizes and checksums of parts, and report the record afterwards.

        With it comes the time of the last use, in seconds since 1970. Documents come first, and of each kind the most
        recently used record. One that is used meanwhile may be yielded again. This does not count as a use.
        """

    def faults(self) -> list[str]:
        """Return a sentence for each inconsistency of the tier's bookkeeping. No record is read."""


def is_local(tier: Tier) -> TypeGuard[LocalTier]:
    """Return whether only this process uses a tier."""
    return not tier.shared


class Wrapped:
    """A tier that wraps another tier. Methods that a subclass does not define are those of the inner tier."""

    def __init__(self, inner: Tier) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)
