"""What tiers of pools have in common: stores of whole records whose requests may be slow, refused or unanswered."""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence

from lmc.errors import CorruptRecord, TierUnusable
from lmc.keys import ChunkKey
from lmc.storage.tiers.breaker import Breaker
from lmc.storage.tiers.record import (
    RecordMeta,
    checksum,
    compare,
    is_removed,
    removed_if_corrupt,
    split_parts,
    verify_parts,
)
from lmc.storage.tiers.tier import Entry, Finding

PROMPTLY = 0.4  # share of the deadline for a lookup
SLOWEST_RATE = 4 << 20  # bytes a second; a write may take the deadline and the time at this rate
CLOSING_SECONDS = 1.0  # `close` waits at most this long for a probe in flight


class PoolReader(ABC):
    """An open record of a pool."""

    meta: RecordMeta

    def __init__(
        self, discard: Callable[[ChunkKey], object], reported: Callable[[], contextlib.AbstractContextManager[None]]
    ) -> None:
        """Create a reader. `discard` removes a record if a later read finds a corrupt part.

        `reported` is a context in which answers are awaited, so that the circuit breaker hears of missing ones.
        """
        self._discard, self._reported = discard, reported

    def read(self, first: int, count: int, into: Sequence[memoryview]) -> None:
        """Fill `into` with `count` parts, and verify each part. A corrupt part deletes the record."""
        with removed_if_corrupt(self._discard, self.meta.key):
            self.verified(first, count, into)

    def verified(self, first: int, count: int, into: Sequence[memoryview]) -> None:
        """Fill `into` with `count` parts. Raises `CorruptRecord` for a corrupt part, without deleting the record."""
        parts = split_parts(into, self.meta.stored[first : first + count])
        self._receive(first, count, parts)
        compare(map(checksum, parts), self.meta.checksums[first : first + count], first)

    @abstractmethod
    def request(self, first: int, count: int) -> None:
        """Request these parts, to be read later."""

    @abstractmethod
    def close(self) -> None:
        """End all requests."""

    @abstractmethod
    def _receive(self, first: int, count: int, parts: Sequence[memoryview]) -> None:
        """Fill `parts` with the stored bytes of `count` parts. Raises `CorruptRecord` if there are too few."""


class PoolTier(ABC):
    """Records in a pool that many hosts use. It has no bound, and evicts nothing itself."""

    shared = True

    def __init__(self, name: str, title: str) -> None:
        """Create a tier whose breaker is closed. `title` is the pool's name in messages, `name` that of the tier."""
        self.name, self.corrupt = name, 0
        self._title = title
        self._breaker = Breaker(title, self._greet)

    @property
    def usable(self) -> bool:
        """Whether the pool responds. While it does not, every lookup is a miss without waiting."""
        return self._breaker.usable

    def unanswered(self, keys: Sequence[ChunkKey]) -> bool:
        """Return whether lookups of some of these keys are under way."""
        return False

    def discard(self, key: ChunkKey) -> None:
        """Remove a corrupt record, and count it."""
        self.corrupt += 1
        self.delete(key)

    def check(self, fix: bool = False) -> list[Finding]:
        """Read and verify every record. With `fix`, remove corrupt records."""
        findings = []
        for entry in self.entries():
            problem = self._problem(entry.key)
            if problem:
                fixed = fix and is_removed(self.discard, entry.key)
                findings.append(Finding(where=self._path(entry.key), problem=problem, fixed=fixed))
        return findings

    @abstractmethod
    def entries(self) -> Iterator[Entry]:
        """Return all records."""

    @abstractmethod
    def delete(self, key: ChunkKey) -> bool:
        """Delete a record. Returns false if it was missing."""

    # -- inside ------------------------------------------------------------------------------------------------------

    @abstractmethod
    def _greet(self) -> None:
        """Make the first contact. Raises `OSError` without a response, `TierUnusable` for a permanent refusal."""

    @abstractmethod
    def _path(self, key: ChunkKey) -> str:
        """Return the name of a record's object."""

    @abstractmethod
    def _reader(self, key: ChunkKey, discard: Callable[[ChunkKey], object]) -> PoolReader:
        """Open a record. Raises `FileNotFoundError` for a missing one. `discard` removes one with a corrupt part."""

    @contextlib.contextmanager
    def _reported(self) -> Iterator[None]:
        """Report to the breaker whether the pool works.

        Raises `OSError` if the pool no longer grants access, or at once if it does not respond.
        """
        if not self.usable:
            raise OSError(f"{self._title} does not respond")
        try:
            yield
        except FileNotFoundError:
            self._breaker.worked()
            raise
        except TierUnusable as error:  # It may concern one record only, such as one that was moved to an archive.
            self._breaker.failed(refusal := PermissionError(str(error)))
            raise refusal from None
        except OSError as error:
            self._breaker.failed(error)
            raise
        self._breaker.worked()

    def _problem(self, key: ChunkKey) -> str:
        """Return the problem of a record, or an empty string. This removes nothing."""
        try:
            with contextlib.closing(self._reader(key, lambda _: None)) as reader:
                verify_parts(reader.meta, reader.verified)
        except FileNotFoundError:
            return ""  # It was removed after it was listed.
        except CorruptRecord as error:
            return str(error)
        return ""
