"""Pins and time limits of documents that an engine requests from a cache server. The server stores them."""

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

from lmc.documents.keeper import DocumentKeeper
from lmc.documents.known import REMOVED_BY_USER, KnownDocument, KnownDocuments
from lmc.errors import InputError
from lmc.server import messages as m
from lmc.shapes import MIB

MAX_REQUEST_BYTES = 2 * MIB  # of tokens


class RemoteKeeper(DocumentKeeper):
    """A `DocumentKeeper` that sends its operations to the server."""

    def __init__(
        self,
        ask: Callable[[m.Request, Any], Any],
        pinned_chunks: Callable[[], int],
        known: KnownDocuments,
        unqueue: Callable[[KnownDocument], object],
    ) -> None:
        """`ask` returns the server's response to a request, or its second argument while the server is away.

        `pinned_chunks` returns the server's number of pinned chunks. The documents are among `known`. `unqueue` removes
        one from the learn queue.
        """
        self._ask, self._pinned_chunks, self._known, self._unqueue = ask, pinned_chunks, known, unqueue
        self.moving = threading.RLock()

    @property
    def pinned_chunks(self) -> int:
        """Number of chunks of pinned documents in the server, for all clients."""
        return self._pinned_chunks()

    def pin(self, documents: Sequence[KnownDocument]) -> None:
        """Protect documents from eviction; raise `InputError` if the pin quota is exceeded or the server is away."""
        self._keep(documents, "pin")
        for document in documents:
            document.pinned = True

    def unpin(self, documents: Sequence[KnownDocument]) -> None:
        """Remove the pins of documents, so they can be evicted; raise `InputError` if the server is away."""
        self._keep(documents, "unpin")
        for document in documents:
            document.pinned = False

    def expire(self, documents: Sequence[KnownDocument], seconds: float | None) -> None:
        """Expire documents `seconds` from now, or never if this is None; raise `InputError` if the server is away."""
        self._keep(documents, "expire", seconds)
        self.refresh(documents)

    def remove(self, documents: Sequence[KnownDocument]) -> None:
        """Remove documents from all tiers and the learn queue; raise `InputError` if the server is away."""
        for document in documents:
            self._unqueue(document)
        self._keep(documents, "remove")
        self._known.remove(documents, REMOVED_BY_USER)
        for document in documents:
            document.pinned, document.expires = False, 0.0

    def renamed(self, documents: Sequence[KnownDocument]) -> None:
        """Do nothing: the server has its own names, which its administration changes."""

    def refresh(self, documents: Sequence[KnownDocument]) -> None:
        """Update the pins and time limits of documents from the server."""
        for batch in m.batches(documents):
            states = self._ask(m.Kept([document.id for document in batch]), [])
            for document, (pinned, expires) in zip(batch, states, strict=False):
                document.pinned, document.expires = pinned, expires

    def begin_anew(self) -> None:
        """Do nothing: other engines may use this engine's documents, and administrators can remove them."""

    def close(self) -> None:
        """Do nothing: the server continues to run."""

    def _keep(
        self,
        documents: Sequence[KnownDocument],
        operation: Literal["pin", "unpin", "expire", "remove"],
        seconds: float | None = None,
    ) -> None:
        for batch in _requests([m.Described.of(document) for document in documents]):
            unavailable = "the cache server is unreachable: try again when it has restarted"
            if refused := self._ask(m.Keep(batch, operation, seconds), unavailable):
                raise InputError(refused)


def _requests(documents: Sequence[m.Described]) -> Iterator[list[m.Described]]:
    """Yield the documents in lists that fit into messages, by their number and the bytes of their tokens."""
    batch, size = list[m.Described](), 0
    for document in documents:
        if batch and (len(batch) == m.MAX_KEPT_DOCUMENTS or size + len(document.tokens) > MAX_REQUEST_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(document)
        size += len(document.tokens)
    if batch:
        yield batch
