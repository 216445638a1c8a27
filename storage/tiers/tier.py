"""What a tier is: a place that keeps records under keys, slower and larger than memory.

A missing key is an answer, not an error; so is `FileNotFoundError`, for a record that goes while it is read. A tier may
raise `OSError` or `CorruptRecord`; the store, and only the store, turns these into misses (`tier_guard.py`).
`tests/tier_contract.py` is the contract as tests: every tier runs them.
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
    """What became of a record that was to be written."""

    STORED = "stored"
    PRESENT = "present"  # it was there already
    REFUSED = "refused"  # larger than the tier, or the tier is full or read-only for now


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One record as a listing shows it."""

    key: ChunkKey
    bytes: int
    used: float  # seconds since the epoch of its last use


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something wrong in a persistent tier, and whether it was repaired."""

    where: str
    problem: str
    fixed: bool


class RecordReader(Protocol):
    """An open record. Parts are read in any order, verified one by one."""

    meta: RecordMeta

    def request(self, first: int, count: int) -> None:
        """Announce that this thread reads these parts next, after earlier requests; a remote tier has them sent."""

    def read(self, first: int, count: int, into: Sequence[memoryview]) -> None:
        """Fill `into` (one view per part, or one over all) with stored parts; raise `CorruptRecord` or `OSError`."""

    def close(self) -> None:
        """Give back what the reader holds."""


class Tier(Protocol):
    """A place for records."""

    name: str
    shared: bool  # with other processes, which read and write there too
    evictions: int  # records that it has removed to stay within its bound
    document_evictions: int  # of these, records of documents

    @property
    def usable(self) -> bool:
        """False while the place is known not to answer: then everything is a miss, at once."""

    def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """Which of `keys` could be read now, as far as is known without reading them."""

    def announce(self, keys: Sequence[ChunkKey], into: Sequence[Sequence[memoryview]] = ()) -> None:
        """Announce that this thread opens these records next: a remote tier gets all their headers at once.

        `into` is where the first parts of each record will be read to, if they have the usual size. A tier may fill it
        while it opens the record; only `RecordReader.read` says whether the bytes are right.
        """

    def open(self, key: ChunkKey) -> RecordReader | None:
        """A reader, or None if there is no such record.

        A record that is not what was written is deleted, and raises `CorruptRecord`.
        """

    def note_use(self, keys: Sequence[ChunkKey]) -> None:
        """Note that chunks were used in memory, so that their records here are not evicted as unused.

        It returns at once, and whether these records are there does not matter. A shared tier ignores it.
        """

    def write(self, meta: RecordMeta, parts: Sequence[memoryview]) -> Written:
        """Keep a record; visible whole or not at all. Checksums are computed here."""

    def delete(self, key: ChunkKey) -> bool:
        """Forget a record; False if there was none."""

    def entries(self) -> Iterator[Entry]:
        """All records, least recently used first."""

    def headers(self) -> Iterator[RecordMeta]:
        """The headers of all readable records in the same order, without counting as a use.

        A shared tier has too many, and yields none.
        """

    def if_present(self, key: ChunkKey, then: Callable[[], object]) -> bool:
        """Call `then` while a record is sure to stay, if it is there; return whether it is. A shared tier says no."""

    def protect(self, keys: Collection[ChunkKey], standing: Standing) -> None:
        """Let records be evicted as entries of this standing, also those that are written later.

        A tier that evicts by itself cannot do so.
        """

    def trim(self) -> None:
        """Evict what is there beyond the tier's bound, after `protect` has said what has to stay."""

    def report_to(self, changes: ChangeLog) -> None:
        """Report records that appear and leave from now on, under the tier's name.

        A shared tier reports only what this process does.
        """

    def check(self, fix: bool = False) -> list[Finding]:
        """Verify every byte; with `fix`, remove what is wrong. Nothing right is ever removed."""

    def close(self) -> None:
        """Stop using the place. No operation may follow."""


class Wrapped:
    """A tier in front of another one. Whatever a subclass does not define is answered by the inner tier."""

    def __init__(self, inner: Tier) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)
