"""Pins and time limits of documents, as an engine asks a cache server for them. The server keeps them."""

import threading
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Literal

from lmc.documents.keeper import DocumentKeeper
from lmc.documents.known import BY_A_PERSON, KnownDocument
from lmc.errors import InputError
from lmc.server import messages as m
from lmc.server.client.remote_store import RemoteStore
from lmc.shapes import MIB

AT_ONCE = 2 * MIB  # of tokens in one question


class RemoteKeeper(DocumentKeeper):
    """Asks the server for what a `DocumentKeeper` does."""

    def __init__(self, store: RemoteStore, *, unqueue: Callable[[KnownDocument], object]) -> None:
        """`unqueue` takes a document out of the queue of those that are to be learned."""
        self._store, self._unqueue = store, unqueue
        self.moving = threading.RLock()

    @property
    def pinned_chunks(self) -> int:
        """How many chunks are pinned, by anybody."""
        return self._store.pinned_chunks

    def pin(self, documents: Sequence[KnownDocument]) -> None:
        """Let documents not be evicted; raise `InputError` if there is no room for that, or no server."""
        self._keep(documents, "pin")
        for document in documents:
            document.pinned = True

    def unpin(self, documents: Sequence[KnownDocument]) -> None:
        """Let documents be evicted again; raise `InputError` if there is no server."""
        self._keep(documents, "unpin")
        for document in documents:
            document.pinned = False

    def expire(self, documents: Sequence[KnownDocument], seconds: float | None) -> None:
        """Remove documents `seconds` from now; raise `InputError` if there is no server."""
        self._keep(documents, "expire", seconds)
        self.refresh(documents)

    def remove(self, documents: Sequence[KnownDocument]) -> None:
        """Remove documents everywhere; raise `InputError` if there is no server."""
        for document in documents:
            self._unqueue(document)
        self._keep(documents, "remove")
        for document in documents:
            document.removed, document.pinned, document.expires = BY_A_PERSON, False, 0.0

    def renamed(self, documents: Sequence[KnownDocument]) -> None:
        """Do nothing: the server has names of its own, which its administration changes."""

    def refresh(self, documents: Sequence[KnownDocument]) -> None:
        """Let documents say what the server keeps of them now."""
        found = self._store.ask_slowly(m.Kept([document.id for document in documents]), [])
        for document, (pinned, expires) in zip(documents, found, strict=False):
            document.pinned, document.expires = pinned, expires

    def begin_anew(self) -> None:
        """Do nothing: other engines may use the documents that this one had, and people can remove them."""

    def close(self) -> None:
        """Do nothing: the server goes on."""

    def _keep(
        self,
        documents: Sequence[KnownDocument],
        how: Literal["pin", "unpin", "expire", "remove"],
        seconds: float | None = None,
    ) -> None:
        described = [
            m.Described(one.namespace, one.tokens.tobytes(), list(one.keys), one.name, one.model, one.tenant)
            for one in documents
        ]
        while described:
            sizes = accumulate(len(one.tokens) for one in described)
            count = max(1, sum(size <= AT_ONCE for size in sizes))
            some, described = described[:count], described[count:]
            away = "the cache server is away: try again when it is back"
            if refused := self._store.ask_slowly(m.Keep(some, how, seconds), away):
                raise InputError(refused)
