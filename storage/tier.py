"""What a tier is: a place that keeps records under keys, slower and larger than memory.

A missing key is an answer, not an error; so is `FileNotFoundError`, for what has gone while it was read. A tier may raise `OSError`
or `CorruptRecord`; the store, and only the store, turns these into misses. `tests/tier_contract.py` is the contract: a tier without
that test class does not exist. The wrappers at the end add delay, faults and counts to any tier.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from lmc.keys import ChunkKey
from lmc.storage.record import RecordMeta


class Written(Enum):
    """What became of a record that was offered to a tier."""

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
    """Something wrong in a persistent tier, and whether it was mended."""

    where: str
    problem: str
    fixed: bool


class Reader(Protocol):
    """An open record. Parts are read in any order, verified one by one."""

    meta: RecordMeta

    def ask(self, first: int, count: int) -> None:
        """Say that these parts are read next by this thread, after whatever it has asked for before: a tier far away sends for them."""

    def read(self, first: int, count: int, into: Sequence[memoryview]) -> None:
        """Fill `into` (one view per part, or one over all) with stored parts; raise `CorruptRecord` or `OSError`."""

    def close(self) -> None:
        """Give back what the reader holds."""


class Tier(Protocol):
    """A place for records."""

    name: str
    shared: bool  # with other processes, which read and write there too

    @property
    def evictions(self) -> int:
        """Records that it has removed to stay within its bound."""

    @property
    def usable(self) -> bool:
        """False while the place is known not to answer: then everything is a miss, at once."""

    def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """Which of `keys` could be read now, as far as is known without reading them."""

    def expect(self, keys: Sequence[ChunkKey], into: Sequence[Sequence[memoryview]] = ()) -> None:
        """Say that these records are opened next by this thread: a tier far away sends for all of them at once.

        `into`: where the first parts of each will be read to, if they have the size that is expected. A tier may fill it as it opens
        the record, with whatever it finds; only `Reader.read` says whether that is right.
        """

    def open(self, key: ChunkKey) -> Reader | None:
        """A reader, or None if there is no such record. A record that is not what was written is deleted, and raises `CorruptRecord`."""

    def write(self, meta: RecordMeta, parts: Sequence[memoryview]) -> Written:
        """Keep a record; visible whole or not at all. Checksums are computed here."""

    def delete(self, key: ChunkKey) -> bool:
        """Forget a record; False if there was none."""

    def entries(self) -> Iterator[Entry]:
        """All records, least recently used first."""

    def check(self, fix: bool = False) -> list[Finding]:
        """Verify every byte; with `fix`, remove what is wrong. Nothing right is ever removed."""

    def close(self) -> None:
        """Stop using the place. No operation may follow."""


class Wrapped:
    """A tier in front of another; subclasses change what they are about."""

    def __init__(self, inner: Tier) -> None:
        self.inner = inner
        self.name, self.shared = inner.name, inner.shared

    @property
    def usable(self) -> bool:
        """As the inner tier."""
        return self.inner.usable

    @property
    def evictions(self) -> int:
        """As the inner tier."""
        return self.inner.evictions

    def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """As the inner tier."""
        return self.inner.contains(keys)

    def expect(self, keys: Sequence[ChunkKey], into: Sequence[Sequence[memoryview]] = ()) -> None:
        """As the inner tier."""
        self.inner.expect(keys, into)

    def open(self, key: ChunkKey) -> Reader | None:
        """As the inner tier."""
        return self.inner.open(key)

    def write(self, meta: RecordMeta, parts: Sequence[memoryview]) -> Written:
        """As the inner tier."""
        return self.inner.write(meta, parts)

    def delete(self, key: ChunkKey) -> bool:
        """As the inner tier."""
        return self.inner.delete(key)

    def entries(self) -> Iterator[Entry]:
        """As the inner tier."""
        return self.inner.entries()

    def check(self, fix: bool = False) -> list[Finding]:
        """As the inner tier."""
        return self.inner.check(fix)

    def close(self) -> None:
        """As the inner tier."""
        self.inner.close()


class Delayed(Wrapped):
    """A tier that takes at least `per_part` seconds for every part read and `per_write` for every record written."""

    def __init__(self, inner: Tier, per_part: float = 0.0, per_write: float = 0.0) -> None:
        super().__init__(inner)
        self.per_part, self.per_write = per_part, per_write

    def open(self, key: ChunkKey) -> Reader | None:
        """A reader that sleeps for the rest of each part's time."""
        reader = self.inner.open(key)
        return reader and _WrappedReader(reader, self._read)

    def write(self, meta: RecordMeta, parts: Sequence[memoryview]) -> Written:
        """Write, slowly."""
        time.sleep(self.per_write)
        return self.inner.write(meta, parts)

    def _read(self, reader: Reader, first: int, count: int, into: Sequence[memoryview]) -> None:
        due = time.monotonic() + self.per_part * count
        reader.read(first, count, into)
        time.sleep(max(0.0, due - time.monotonic()))


class Faulty(Wrapped):
    """A tier that asks `fault(verb, key)` before `open`, `read` and `write`, and raises what it returns."""

    def __init__(self, inner: Tier, fault: Callable[[str, ChunkKey], Exception | None]) -> None:
        super().__init__(inner)
        self._fault = fault

    def open(self, key: ChunkKey) -> Reader | None:
        """Open unless a fault is due."""
        self._meet("open", key)
        reader = self.inner.open(key)
        return reader and _WrappedReader(reader, self._read)

    def write(self, meta: RecordMeta, parts: Sequence[memoryview]) -> Written:
        """Write unless a fault is due."""
        self._meet("write", meta.key)
        return self.inner.write(meta, parts)

    def _read(self, reader: Reader, first: int, count: int, into: Sequence[memoryview]) -> None:
        self._meet("read", reader.meta.key)
        reader.read(first, count, into)

    def _meet(self, verb: str, key: ChunkKey) -> None:
        error = self._fault(verb, key)
        if error is not None:
            raise error


@dataclass(slots=True)
class Counts:
    """What passed through a `Counted` tier."""

    opened: int = 0
    written: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    keys_asked: list[ChunkKey] = field(default_factory=list)


class Counted(Wrapped):
    """A tier that counts, for tests and benchmarks."""

    def __init__(self, inner: Tier) -> None:
        super().__init__(inner)
        self.counts = Counts()

    def contains(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """Count what was asked for."""
        self.counts.keys_asked.extend(keys)
        return self.inner.contains(keys)

    def open(self, key: ChunkKey) -> Reader | None:
        """Count records opened and bytes read."""
        reader = self.inner.open(key)
        self.counts.opened += reader is not None
        return reader and _WrappedReader(reader, self._read)

    def write(self, meta: RecordMeta, parts: Sequence[memoryview]) -> Written:
        """Count records and bytes that were stored."""
        outcome = self.inner.write(meta, parts)
        if outcome is Written.STORED:
            self.counts.written += 1
            self.counts.bytes_written += meta.offset(meta.parts)
        return outcome

    def _read(self, reader: Reader, first: int, count: int, into: Sequence[memoryview]) -> None:
        reader.read(first, count, into)
        self.counts.bytes_read += sum(map(len, into))


class _WrappedReader:
    """A reader whose `read` goes through a function."""

    def __init__(self, inner: Reader, read: Callable[[Reader, int, int, Sequence[memoryview]], None]) -> None:
        self.inner, self.meta, self._read = inner, inner.meta, read

    def ask(self, first: int, count: int) -> None:
        self.inner.ask(first, count)

    def read(self, first: int, count: int, into: Sequence[memoryview]) -> None:
        self._read(self.inner, first, count, into)

    def close(self) -> None:
        self.inner.close()
