"""The change log: the chunks that have appeared in a place or left it, in order.

KV events, metrics and routers read it, each at its own pace. Changes are numbered, and a reader requests those after
the last number that it has seen. If the log no longer has them, the reader starts again from the list of the chunks
that are present.
"""

import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple, Protocol, TypeAlias, runtime_checkable

from lmc.keys import ChunkKey, RecordKind
from lmc.storage.locks import Rank, new_lock
from lmc.storage.places import place_of
from lmc.storage.tiers.record import RecordMeta

KEPT = 1 << 16  # changes that the log keeps, about 10 MB
BATCH = 128  # changes that are processed at once; more would make a thread that stores chunks wait too long


class Chunk(NamedTuple):
    """A chunk's metadata, without its bytes."""

    key: ChunkKey
    kind: RecordKind
    tokens: int
    namespace: bytes  # digest
    model: str  # name
    tenant: str  # digest of the cache salt; empty without one
    bytes: int  # in memory

    @classmethod
    def of(cls, meta: RecordMeta) -> "Chunk":
        """Return the chunk of a record."""
        return cls(meta.key, meta.kind, meta.tokens, meta.namespace, meta.model, meta.tenant, meta.memory)


class Amount(NamedTuple):
    """The amount of stored KV: chunks, tokens and bytes."""

    chunks: int = 0
    tokens: int = 0
    bytes: int = 0

    def plus(self, other: "Amount") -> "Amount":
        """Return the sum."""
        return Amount(self.chunks + other.chunks, self.tokens + other.tokens, self.bytes + other.bytes)


class Change(NamedTuple):
    """The event that a chunk has appeared in a place or left it. A move is two changes."""

    number: int  # counts from 1, without gaps
    chunk: Chunk
    place: str
    appeared: bool


@runtime_checkable
class Changes(Protocol):
    """The interface for readers of a change log."""

    def since(self, number: int) -> tuple[list[Change], bool]:
        """Return the changes after `number`, and true. Returns an empty list and false if the log has lost them."""

    def present(self) -> tuple[int, dict[str, list[Chunk]]]:
        """Return the number of the last change, and the chunks in each place after it."""


Facts: TypeAlias = tuple[RecordKind, int, bytes, str, str, int]  # the fields of a `Chunk` after its key


@lru_cache(maxsize=4096)
def _one_object(facts: Facts) -> Facts:
    """Return the same object for equal facts: a disk has millions of chunks of few kinds."""
    return facts


class _Place:
    """The chunks in one place, and the amounts that models and tenants have of it."""

    __slots__ = ("amount", "bytes_of_models", "bytes_of_tenants", "chunks", "held")

    def __init__(self) -> None:
        self.chunks: dict[ChunkKey, Facts] = {}
        self.amount = Amount()  # of all models and tenants
        self.held: dict[str, dict[str, list[int]]] = {}  # chunks, tokens, bytes, by tenant and model
        self.bytes_of_models: dict[str, int] = {}
        self.bytes_of_tenants: dict[str, int] = {}

    def count(self, facts: Facts, sign: int) -> None:
        """Add a chunk that has appeared (`sign` 1) to the amounts, or subtract one that has left (-1)."""
        _, tokens, _, model, tenant, size = facts
        self.amount = self.amount.plus(Amount(sign, sign * tokens, sign * size))
        of_tenant = self.held.get(tenant)
        if of_tenant is None:
            of_tenant = self.held[tenant] = {}
        held = of_tenant.get(model)
        if held is None:
            held = of_tenant[model] = [0, 0, 0]
        held[0] += sign
        held[1] += sign * tokens
        held[2] += sign * size
        if not held[0]:
            del of_tenant[model]
            if not of_tenant:
                del self.held[tenant]
        for taken, whose in ((self.bytes_of_models, model), (self.bytes_of_tenants, tenant)):
            taken[whose] = taken.get(whose, 0) + sign * size
            if not taken[whose]:
                del taken[whose]


class ChangeLog(Changes):
    """The newest changes, and the chunks that are present in each place after them.

    Recording a change must be cheap, because chunks are stored and evicted all the time. Recorded changes are processed
    when a reader reads the log, or after `BATCH` changes.
    """

    def __init__(self, kept: int = KEPT) -> None:
        self._lock = new_lock(Rank.LEAF)
        self._noted: deque[tuple[str, ChunkKey, Chunk | None]] = deque()  # recorded, and not processed yet
        self._changes: deque[tuple[Chunk, str, bool]] = deque(maxlen=kept)  # the fields of `Change` after its number
        self._number = 0
        self._places: defaultdict[str, _Place] = defaultdict(_Place)

    def appeared(self, place: str, meta: RecordMeta) -> None:
        """Record that a chunk has appeared in a place."""
        self.note(place, meta.key, Chunk.of(meta))

    def left(self, place: str, key: ChunkKey) -> None:
        """Record that a chunk has left a place."""
        self.note(place, key, None)

    def note(self, place: str, key: ChunkKey, chunk: Chunk | None) -> None:
        """Record that a key's chunk has appeared in a place, or with None that it has left."""
        self._noted.append((place, key, chunk))
        if len(self._noted) >= BATCH:
            with self._lock:
                self._work_out()

    def since(self, number: int) -> tuple[list[Change], bool]:
        """Return the changes after `number`, and true. Returns an empty list and false if the log has lost them."""
        with self._lock:
            self._work_out()
            if number == self._number:  # the common case in a step of an engine
                return [], True
            seen = len(self._changes) - (self._number - number)  # kept changes that the reader has seen
            if not 0 <= seen <= len(self._changes):
                return [], False
            after = itertools.islice(self._changes, seen, None)
            return [Change(number + i, *change) for i, change in enumerate(after, 1)], True

    def present(self) -> tuple[int, dict[str, list[Chunk]]]:
        """Return the number of the last change, and the chunks in each place after it."""
        number, chunks = self.listing()
        return number, by_place(chunks)

    def listing(self) -> tuple[int, Iterator[tuple[str, Chunk]]]:
        """Return the number of the last change, and an iterator over the places and chunks after it.

        Other threads wait while the tables are copied, which takes 20 ms for a million chunks.
        """
        with self._lock:
            self._work_out()
            number, places = self._number, {name: dict(place.chunks) for name, place in self._places.items()}
        return number, ((name, Chunk(key, *facts)) for name in list(places) for key, facts in places.pop(name).items())

    def held(self, tenant: str | None = None) -> dict[tuple[str, str, str], Amount]:
        """Return the amount that each place has of each model and tenant, or of the models of one tenant.

        The time for one tenant does not depend on the number of other tenants.
        """
        with self._lock:
            self._work_out()
            return {
                (name, model, owner): Amount(*held)
                for name, place in self._places.items()
                for owner in (place.held if tenant is None else [tenant])
                for model, held in place.held.get(owner, {}).items()
            }

    def taken(self, place: str, model: str | None = None, tenant: str | None = None) -> int:
        """Return how many bytes a place has of a model, of a tenant, or of one tenant's chunks of one model."""
        with self._lock:
            self._work_out()
            there = self._places.get(place) or _Place()
            if model is not None and tenant is not None:
                return there.held.get(tenant, {}).get(model, (0, 0, 0))[2]
            if model is not None:
                return there.bytes_of_models.get(model, 0)
            return there.bytes_of_tenants.get(tenant, 0) if tenant is not None else 0

    def counts(self) -> dict[str, Amount]:
        """Return the amount that each place has. This takes the same time for any number of chunks and tenants."""
        with self._lock:
            self._work_out()
            return {name: place.amount for name, place in self._places.items()}

    def _work_out(self) -> None:
        """Process and number the recorded changes. A record that changes nothing gets no number."""
        noted, places, changes = self._noted, self._places, self._changes
        while noted:
            name, key, new = noted.popleft()
            place = places[name]
            if new is None:
                facts = place.chunks.pop(key, None)
                if facts is None:
                    continue
                place.count(facts, -1)
                chunk = Chunk(key, *facts)
            elif key in place.chunks:
                continue
            else:
                facts = place.chunks[key] = _one_object(new[1:])
                place.count(facts, 1)
                chunk = new
            self._number += 1
            changes.append((chunk, name, new is not None))


def by_place(chunks: Iterable[tuple[str, Chunk]]) -> dict[str, list[Chunk]]:
    """Return the chunks of a listing by their places."""
    found: dict[str, list[Chunk]] = {}
    for place, chunk in chunks:
        found.setdefault(place, []).append(chunk)
    return found


def media_steps(
    changes: Changes, read: int, seen: Callable[[], set[tuple[ChunkKey, str]]], kind: RecordKind | None = None
) -> tuple[int, list[tuple[ChunkKey, str, bool]]]:
    """Return the number of the last change, and the chunks that reached a medium (true) or left it since `read`.

    If the log has lost changes, the result is the difference between `seen` and the present chunks. `seen` returns the
    chunks and media that the reader knows. With a `kind`, only chunks of that kind count.
    """

    def medium(chunk: Chunk, place: str) -> str:
        return place_of(place).medium if kind in (None, chunk.kind) else ""

    after, complete = changes.since(read)
    if complete:
        found = [(change.chunk.key, medium(change.chunk, change.place), change.appeared) for change in after]
        return read + len(after), [step for step in found if step[1]]
    number, present = changes.present()
    now = {(chunk.key, at) for place, chunks in present.items() for chunk in chunks if (at := medium(chunk, place))}
    before = seen()
    return number, [(*one, False) for one in before - now] + [(*one, True) for one in now - before]
