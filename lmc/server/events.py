"""The change log of a cache server as events, for subscribers that may miss some, and can tell when they have."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

from lmc.storage.change_log import Change, ChangeLog, Chunk

AT_ONCE = 500  # changes in an event
T = TypeVar("T")


class Event(NamedTuple):
    """Something that happened, or all that is there if a subscriber has missed what happened."""

    id: str  # A subscriber names the last one that it has seen.
    kind: str  # "changes"; or "listing", with which what was known before is to be forgotten, and "listing_goes_on"
    data: Mapping[str, Any]


class Events:
    """Turns the change log into events."""

    def __init__(self, changes: ChangeLog, server: str) -> None:
        """`server` tells this server from those before it, whose numbers mean nothing here."""
        self._changes, self._server = changes, server

    def after(self, last: str) -> Iterator[Event]:
        """Yield the events after the one with the id `last`; everything that is there if it is unknown or too old."""
        server, _, number = last.rpartition("-")
        if server == self._server and number.isdecimal():
            changes, complete = self._changes.since(int(number))
            if complete:
                for part in _parts(changes):
                    yield Event(self._id(part[-1].number), "changes", {"changes": [_described(one) for one in part]})
                return
        newest, present = self._changes.present()
        listing = _parts([(place, chunk) for place, chunks in present.items() for chunk in chunks]) or [[]]
        for i, some in enumerate(listing):
            kind = "listing_goes_on" if i else "listing"
            whole = i == len(listing) - 1  # Whoever has a part of it only begins again.
            chunks = [{"place": place, **_chunk(chunk)} for place, chunk in some]
            yield Event(self._id(newest) if whole else "", kind, {"chunks": chunks})

    def _id(self, number: int) -> str:
        return f"{self._server}-{number}"


def _parts(items: list[T]) -> list[list[T]]:
    return [items[at : at + AT_ONCE] for at in range(0, len(items), AT_ONCE)]


def _described(change: Change) -> dict[str, Any]:
    return {"number": change.number, "place": change.place, "appeared": change.appeared, **_chunk(change.chunk)}


def _chunk(chunk: Chunk) -> dict[str, Any]:
    return {
        "key": chunk.key.hex(),
        "kind": chunk.kind.value,
        "tokens": chunk.tokens,
        "bytes": chunk.bytes,
        "model": chunk.model,
        "tenant": chunk.tenant,
    }
