"""The change log of a cache server as events, for subscribers that may miss events and can detect this."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from lmc.server.messages import batches
from lmc.storage.change_log import Change, ChangeLog, Chunk

MAX_EVENT_CHANGES = 500  # changes in an event


class Event(NamedTuple):
    """Changes of a store, or a listing of its chunks for a subscriber that has missed changes."""

    id: str  # A subscriber sends the id of the last event that it has received.
    kind: str  # "changes", "listing" (the subscriber must forget all it knew), or "listing_goes_on"
    data: Mapping[str, Any]


class Events:
    """Turns the change log into events."""

    def __init__(self, changes: ChangeLog, server: str) -> None:
        """`server` distinguishes this server from earlier ones, whose event numbers are invalid here."""
        self._changes, self._server = changes, server

    def after(self, last: str) -> Iterator[Event]:
        """Yield the events after the event with the id `last`.

        If this id is unknown or too old, yield a listing of all chunks instead.
        """
        server, _, number = last.rpartition("-")
        if server == self._server and number.isdecimal():
            changes, complete = self._changes.since(int(number))
            if complete:
                for part in batches(changes, MAX_EVENT_CHANGES):
                    yield Event(
                        self._id(part[-1].number), "changes", {"changes": [_described(change) for change in part]}
                    )
                return
        newest, chunks = self._changes.listing()
        listing = list(batches(list(chunks), MAX_EVENT_CHANGES)) or [[]]
        for i, batch in enumerate(listing):
            kind = "listing_goes_on" if i else "listing"
            complete_listing = i == len(listing) - 1  # A subscriber with a partial listing starts again.
            described = [{"place": place, **_chunk(chunk)} for place, chunk in batch]
            yield Event(self._id(newest) if complete_listing else "", kind, {"chunks": described})

    def _id(self, number: int) -> str:
        return f"{self._server}-{number}"


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
