"""Tiers in front of another tier that delay it, let it fail, or count what passes: for tests."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from lmc.keys import ChunkKey
from lmc.storage.tiers.record import RecordMeta
from lmc.storage.tiers.tier import RecordReader, Tier, Wrapped, Written


class Delayed(Wrapped):
    """A tier that takes at least `per_part` seconds for every part read and `per_write` for every record written."""

    def __init__(self, inner: Tier, per_part: float = 0.0, per_write: float = 0.0) -> None:
        super().__init__(inner)
        self.per_part, self.per_write = per_part, per_write

    def open(self, key: ChunkKey) -> RecordReader | None:
        """A reader that sleeps for the rest of each part's time."""
        reader = self.inner.open(key)
        return reader and _WrappedReader(reader, self._read)

    def write(self, meta: RecordMeta, parts: Sequence[memoryview]) -> Written:
        """Write, slowly."""
        time.sleep(self.per_write)
        return self.inner.write(meta, parts)

    def _read(self, reader: RecordReader, first: int, count: int, into: Sequence[memoryview]) -> None:
        due = time.monotonic() + self.per_part * count
        reader.read(first, count, into)
        time.sleep(max(0.0, due - time.monotonic()))


class Faulty(Wrapped):
    """A tier that asks `fault(verb, key)` before `open`, `read` and `write`, and raises what it returns."""

    def __init__(self, inner: Tier, fault: Callable[[str, ChunkKey], Exception | None]) -> None:
        super().__init__(inner)
        self._fault = fault

    def announce(self, keys: Sequence[ChunkKey], into: Sequence[Sequence[memoryview]] = ()) -> None:
        """Announce, but let nothing be read before `read` has asked for a fault."""
        self.inner.announce(keys)

    def open(self, key: ChunkKey) -> RecordReader | None:
        """Open unless a fault is due."""
        self._meet("open", key)
        reader = self.inner.open(key)
        return reader and _WrappedReader(reader, self._read)

    def write(self, meta: RecordMeta, parts: Sequence[memoryview]) -> Written:
        """Write unless a fault is due."""
        self._meet("write", meta.key)
        return self.inner.write(meta, parts)

    def _read(self, reader: RecordReader, first: int, count: int, into: Sequence[memoryview]) -> None:
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

    def open(self, key: ChunkKey) -> RecordReader | None:
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

    def _read(self, reader: RecordReader, first: int, count: int, into: Sequence[memoryview]) -> None:
        reader.read(first, count, into)
        self.counts.bytes_read += sum(map(len, into))


class _WrappedReader:
    """A reader whose `read` goes through a function."""

    def __init__(
        self, inner: RecordReader, read: Callable[[RecordReader, int, int, Sequence[memoryview]], None]
    ) -> None:
        self.inner, self.meta, self._read = inner, inner.meta, read

    def request(self, first: int, count: int) -> None:
        self.inner.request(first, count)

    def read(self, first: int, count: int, into: Sequence[memoryview]) -> None:
        self._read(self.inner, first, count, into)

    def close(self) -> None:
        self.inner.close()
