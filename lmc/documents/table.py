"""Known documents in a table, from which lists select also when there are a million of them.

What lists select and sort by stands in columns, one array each. numpy reads a column of a million documents in a few
milliseconds, while other threads run. Lists that are always in order would cost each use of a document more, and take
more memory.
"""

import time
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from lmc.documents.names import names_in
from lmc.errors import InputError

PLACE_DIGITS = 12  # digits of an id in the text of a `Use`; they decide only between uses at the same time
REMOVED, FREE = -np.inf, np.inf  # in place of the time: of a removed document, and of a row without a document
ID_DIGITS = 16  # first digits of an id in its column

Rows = npt.NDArray[np.int64]
Ids = npt.NDArray[np.uint64]


class Listable(Protocol):
    """What the table needs to know about a document."""

    row: int  # set by the table
    name: str  # its names, one on each line
    model: str
    tenant: str
    used: float  # seconds since 1970
    removed: str  # why it was removed; empty if it was not

    @property
    def id(self) -> str:
        """Its id, in hexadecimal digits."""


class Use(NamedTuple):
    """When a document was last used, and its id. A page of a list continues after the last entry of the page before."""

    time: float
    id: str

    @classmethod
    def of(cls, document: Listable) -> "Use":
        """Return a document's last use."""
        return cls(document.used, document.id)

    @classmethod
    def parse(cls, text: str) -> "Use":
        """Return the last use that `str` has written. Raises `InputError` for any other text."""
        seconds, _, name = text.partition(":")
        try:
            return cls(float(seconds), name)
        except ValueError as error:
            raise InputError(f"invalid position {text!r} in a list: use `next` of the previous page") from error

    def __str__(self) -> str:
        return f"{self.time!r}:{self.id[:PLACE_DIGITS]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """Which documents a list has."""

    name: str = ""  # part of the name
    model: str = ""  # part of the model's name
    tenant: str = ""  # first digits of the tenant
    unused_for: float = 0.0  # seconds since its last use, at least

    def passes(self, document: Listable) -> bool:
        """Return whether a list has this document."""
        return (
            not document.removed
            and self.name in document.name
            and self.of_owner(document.model, document.tenant)
            and not (self.unused_for and time.time() - document.used < self.unused_for)
        )

    def of_owner(self, model: str, tenant: str) -> bool:
        """Return whether a list has documents of this model and tenant."""
        return self.model in model and tenant.startswith(self.tenant)


ALL = Filter()
D = TypeVar("D", bound=Listable)


class DocumentTable(Generic[D]):
    """Documents by row. Not safe for several threads at once."""

    def __init__(self) -> None:
        self._documents: list[D | None] = []
        self._free: list[int] = []  # rows
        self._times = np.full(64, FREE)  # of the last use
        self._ids = np.zeros(64, np.uint64)  # the first digits
        self._names = np.zeros(64, np.int64)  # hashes of the first name
        # Few documents have other names.
        self._others: dict[int, list[str]] = {}  # by row
        self._rows_by_other: dict[str, set[int]] = {}
        self._owners = np.zeros(64, np.int64)  # hashes of model and tenant

    def add(self, document: D) -> None:
        """Add a document, and set its `row`."""
        if self._free:
            document.row = self._free.pop()
            self._documents[document.row] = document
        else:
            document.row = len(self._documents)
            self._documents.append(document)
            if document.row == len(self._times):
                self._times = np.concatenate([self._times, np.full_like(self._times, FREE)])
                self._ids, self._names, self._owners = (
                    np.concatenate([column, np.zeros_like(column)]) for column in (self._ids, self._names, self._owners)
                )
        self._ids[document.row] = id_number(document.id)
        self.update(document)

    def update(self, document: D) -> None:
        """Record that a document was used or removed, or that it has another name or owner."""
        row = document.row
        self._times[row] = REMOVED if document.removed else document.used
        first, *others = names_in(document.name) or [""]
        self._names[row], self._owners[row] = hash(first), hash((document.model, document.tenant))
        if others or row in self._others:
            self._rename(row, others)

    def _rename(self, row: int, others: list[str]) -> None:
        """Record the names of a row's document after its first one."""
        for name in self._others.pop(row, ()):
            self._rows_by_other[name].discard(row)
            if not self._rows_by_other[name]:
                del self._rows_by_other[name]
        if others:
            self._others[row] = others
        for name in others:
            self._rows_by_other.setdefault(name, set()).add(row)

    def discard(self, document: D) -> None:
        """Remove a document."""
        self._documents[document.row], self._times[document.row] = None, FREE
        self._rename(document.row, [])
        self._free.append(document.row)

    def count(self) -> int:
        """Return the number of documents that are not removed."""
        return len(self._passing(ALL))

    def ids(self, only: Filter = ALL) -> Ids:
        """Return the first digits of the ids of the documents that pass a filter, as numbers, in no order.

        The `name` of the filter is ignored.
        """
        return self._ids[self._passing(only)]

    def latest(self, limit: int, after: Use | None = None, only: Filter = ALL) -> tuple[int, list[D]]:
        """Return how many documents pass a filter, and up to `limit` of them from `after` on.

        The most recently used come first. The `name` of the filter is ignored.
        """
        rows, same = self._passing(only), 0
        count = len(rows)
        if after is not None:
            rows = rows[self._times[rows] <= after.time]
            same = int(np.count_nonzero(self._times[rows] == after.time))
        times = self._times[rows]
        if limit + same < len(rows):  # Those with the same time as the last one are kept.
            most = len(rows) - limit - same
            rows = rows[times >= np.partition(times, most)[most]]
        rows = rows[np.argsort(self._times[rows], kind="stable")[::-1]]
        documents = self._at(rows)
        for start, stop in _equal_stretches(self._times[rows]):
            documents[start:stop] = sorted(documents[start:stop], key=Use.of, reverse=True)
        first = sum(after is not None and Use.of(document) >= after for document in documents[:same])
        return count, documents[first : first + limit]

    def oldest(self, limit: int) -> list[D]:
        """Return up to `limit` documents, removed ones first, and then the least recently used first."""
        count = min(limit, len(self._documents) - len(self._free))
        rows = np.argpartition(self._times, count - 1)[:count] if count else np.empty(0, np.int64)
        return self._at(rows[np.argsort(self._times[rows], kind="stable")])

    def named(self, name: str) -> list[D]:
        """Return the documents with this name."""
        rows = np.flatnonzero((self._names == hash(name)) & np.isfinite(self._times))
        others = [row for row in self._rows_by_other.get(name, ()) if np.isfinite(self._times[row])]
        documents = self._at(np.append(rows, np.array(others, np.int64)))
        return [document for document in documents if name in names_in(document.name)]

    def with_digits(self, digits: str) -> list[D]:
        """Return the documents whose id begins with these hexadecimal digits."""
        first = int(digits[:ID_DIGITS].ljust(ID_DIGITS, "0"), 16)
        last = int(digits[:ID_DIGITS].ljust(ID_DIGITS, "f"), 16)
        rows = np.flatnonzero((self._ids >= first) & (self._ids <= last) & np.isfinite(self._times))
        return [document for document in self._at(rows) if document.id.startswith(digits)]

    def _passing(self, only: Filter) -> Rows:
        """Return the rows of the documents that pass a filter, apart from its `name`."""
        passing = np.isfinite(self._times)
        if only.unused_for:
            passing &= self._times <= time.time() - only.unused_for
        if only.model or only.tenant:
            rows = np.flatnonzero(passing)
            owners, firsts = np.unique(self._owners[rows], return_index=True)
            wanted = [only.of_owner(document.model, document.tenant) for document in self._at(rows[firsts])]
            passing &= np.isin(self._owners, owners[wanted])
        return np.flatnonzero(passing)

    def _at(self, rows: Rows) -> list[D]:
        documents = (self._documents[row] for row in rows.tolist())
        return [document for document in documents if document is not None]


def id_number(name: str) -> int:
    """Return the first digits of an id as a number."""
    return int(name[:ID_DIGITS], 16)


def _equal_stretches(times: npt.NDArray[np.float64]) -> list[tuple[int, int]]:
    """Return where each stretch of at least two equal times begins and ends."""
    ends = np.flatnonzero(np.diff(times)) + 1
    bounds = np.concatenate([[0], ends, [len(times)]])
    long = np.flatnonzero(np.diff(bounds) > 1)
    return list(zip(bounds[long].tolist(), bounds[long + 1].tolist(), strict=True))
