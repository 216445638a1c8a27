"""The change log says which chunks have appeared in a place, and which have left it.

KV events, metrics and routers read it, each at its own pace. Changes are numbered, and a reader asks for those after
the last number that it has seen. If the log does not reach back so far, the reader is told so, and starts again from
the list of the chunks that are present.
"""

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass

from lmc.keys import ChunkKey, RecordKind
from lmc.storage.locks import Rank, RankedLock
from lmc.storage.record import RecordMeta

KEPT = 1 << 16  # changes, about 10 MB


@dataclass(frozen=True, slots=True)
class Chunk:
    """What is known of a chunk apart from its bytes."""

    key: ChunkKey
    kind: RecordKind | None  # None for records of lmc 0.1.0, which did not say
    tokens: int
    namespace: bytes  # digest

    @classmethod
    def of(cls, meta: RecordMeta) -> "Chunk":
        """Return the chunk of a record."""
        return cls(meta.key, meta.kind, meta.tokens, meta.namespace)


@dataclass(frozen=True, slots=True)
class Change:
    """A chunk has appeared in a place, or left it. A chunk that moved has done both."""

    number: int  # from 1 on, without gaps
    chunk: Chunk
    place: str
    appeared: bool


class ChangeLog:
    """The newest changes, and what is present in each place after them."""

    def __init__(self, kept: int = KEPT) -> None:
        self._lock = RankedLock(Rank.LEAF)
        self._changes: deque[Change] = deque(maxlen=kept)
        self._number = 0
        self._present: dict[str, dict[ChunkKey, Chunk]] = {}  # by place
        self._tokens: Counter[str] = Counter()  # by place

    def appeared(self, place: str, meta: RecordMeta) -> None:
        """Note that a chunk can be found in a place from now on."""
        with self._lock:
            there = self._present.setdefault(place, {})
            if meta.key not in there:
                chunk = there[meta.key] = Chunk.of(meta)
                self._tokens[place] += chunk.tokens
                self._add(chunk, place, appeared=True)

    def left(self, place: str, key: ChunkKey) -> None:
        """Note that a chunk cannot be found in a place any more."""
        with self._lock:
            chunk = self._present.get(place, {}).pop(key, None)
            if chunk is not None:
                self._tokens[place] -= chunk.tokens
                self._add(chunk, place, appeared=False)

    def since(self, number: int) -> tuple[list[Change], bool]:
        """Return the changes after `number`, and true; or none and false if the log does not reach back so far."""
        with self._lock:
            seen = len(self._changes) - (self._number - number)  # how many of the kept changes are older
            return (list(self._changes)[seen:], True) if seen >= 0 else ([], False)

    def present(self) -> tuple[int, dict[str, list[Chunk]]]:
        """Return the number of the last change, and the chunks that are in each place after it."""
        with self._lock:
            return self._number, {place: list(chunks.values()) for place, chunks in self._present.items()}

    def counts(self) -> Iterator[tuple[str, int, int]]:
        """Return for each place how many chunks and how many tokens are there."""
        with self._lock:
            return iter([(place, len(chunks), self._tokens[place]) for place, chunks in self._present.items()])

    def _add(self, chunk: Chunk, place: str, *, appeared: bool) -> None:
        self._number += 1
        self._changes.append(Change(self._number, chunk, place, appeared))
