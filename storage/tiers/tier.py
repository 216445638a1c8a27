"""The contract of a tier: a place that keeps records by key, slower and larger than memory.

A missing key is an ordinary result, not an error. The same holds for `FileNotFoundError`, if a record disappears while
it is read. A tier may raise `OSError` or `CorruptRecord`; only the store turns these into misses (`tier_guard.py`).
`tests/tier_contract.py` tests the contract for every tier.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from lmc.keys import ChunkKey
from lmc.storage.change_log import ChangeLog
from lmc.storage.eviction import Standing
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
    used: float  # time of the last use, in seconds since the epoch


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
    """A place that keeps records."""

    name: str
    shared: bool  # whether other processes also read and write there
    evictions: int  # records that the tier has removed to stay within its bound
    document_evictions: int  # evictions of records of documents

    @property
    def usable(self) -> bool:
        """Whether the tier responds. While it does not, every lookup is a miss without waiting."""

    def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """Return for each of `keys` whether it can be read now, as far as the tier knows without reading it."""

    def announce(self, keys: Sequence[ChunkKey], into: Sequence[Sequence[memoryview]] = ()) -> None:
        """Announce the records that this thread opens next. A remote tier fetches all their headers at once.

        `into` is the memory for the first parts of each record, if they have the usual size. A tier may fill it while
        it opens the record. Only `RecordReader.read` verifies these bytes.
        """

    def open(self, key: ChunkKey) -> RecordReader | None:
        """Open a record and return its reader, or None if the record is missing.

        A corrupt record is deleted, and raises `CorruptRecord`.
        """

    def note_use(self, keys: Sequence[ChunkKey]) -> None:
        """Record that chunks were used in memory, so that their records here are not evicted as unused.

        This does not block, and ignores records that the tier does not have. A shared tier does nothing.
        """

    def write(self, meta: RecordMeta, parts: Sequence[memoryview]) -> Written:
        """Store a record, and compute its checksums. The record becomes visible as a whole or not at all."""

    def delete(self, key: ChunkKey) -> bool:
        """Delete a record. Returns false if it was missing."""

    def entries(self) -> Iterator[Entry]:
        """Return all records, least recently used first."""

    def headers(self) -> Iterator[RecordMeta]:
        """Yield the headers of all readable records, least recently used first. This does not count as a use.

        A shared tier has too many records, and yields none.
        """

    def if_present(self, key: ChunkKey, then: Callable[[], object]) -> bool:
        """Call `then` if a record is present, and keep the record during the call. Returns whether it is present.

        A shared tier returns false.
        """

    def protect(self, keys: Collection[ChunkKey], standing: Standing) -> None:
        """Set the standing of records, including records that are written later.

        A tier that evicts by itself does nothing.
        """

    def trim(self) -> None:
        """Evict records until the tier is within its bound. Call `protect` before, for the records that must stay."""

    def report_to(self, changes: ChangeLog) -> None:
        """Report to `changes` the records that appear and leave from now on, under the tier's name.

        A shared tier need not report, because other processes change it as well.
        """

    def check(self, fix: bool = False) -> list[Finding]:
        """Verify every byte. With `fix`, remove corrupt records. Valid records are never removed."""

    def close(self) -> None:
        """Close the tier. No operation may follow."""


class Wrapped:
    """A tier that wraps another tier. Methods that a subclass does not define are those of the inner tier."""

    def __init__(self, inner: Tier) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)
