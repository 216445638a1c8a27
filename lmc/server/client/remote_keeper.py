"""Documents of an engine that uses a cache server, which has the pins and time limits of all engines.

The engine's known documents follow those of the server: what other engines learn and what is removed there.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

from lmc.documents.keeper import DocumentKeeper
from lmc.documents.known import REMOVED_BY_USER, KnownDocument
from lmc.documents.server import FollowingEngine
from lmc.errors import InputError
from lmc.server import messages as m
from lmc.shapes import MIB

MAX_REQUEST_BYTES = 2 * MIB  # limit for the tokens of a request
MAX_UNSENT_NAMES = 1 << 16  # names that wait for a server that is away; the oldest are forgotten


class RemoteKeeper(DocumentKeeper):
    """A `DocumentKeeper` that sends its operations to the server, and follows the changes there."""

    def __init__(
        self,
        ask: Callable[[m.Request, Any], Any],
        pinned_chunks: Callable[[], int],
        engine: FollowingEngine,
        changes: int,
    ) -> None:
        """`ask` returns the server's response to a request, or its second argument while the server is away.

        `pinned_chunks` returns the server's number of pinned chunks. `changes` is the number of a change of documents
        before which the engine has not begun to read which documents the server has.
        """
        self._ask, self._pinned_chunks, self._engine, self._known = ask, pinned_chunks, engine, engine.known
        self._changes = changes  # number of the last change that the engine knows
        self._read_since: int | None = changes  # the last change before the reading that goes on
        self._named: deque[m.Named] = deque(maxlen=MAX_UNSENT_NAMES)
        self._must_read = False  # whether the server may have documents that the engine does not know
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
        self._keep(documents, "remove")
        self._remove(documents, REMOVED_BY_USER)

    def renamed(self, documents: Sequence[KnownDocument], learned_as: str = "") -> None:
        """Send the name that documents were learned as to the server, within a second.

        It is added to the server's names of these documents, which its administration may replace.
        """
        self._named.extend(m.Named(document.keys[-1], learned_as) for document in documents if learned_as)

    def take_named(self) -> list[m.Named]:
        """Return the next names for the server, at most `MAX_NAMED_DOCUMENTS`, and forget them."""
        return [self._named.popleft() for _ in range(min(len(self._named), m.MAX_NAMED_DOCUMENTS))]

    def not_sent(self, named: Sequence[m.Named]) -> None:
        """Send these names later."""
        self._named.extendleft(reversed(named))

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

    def attached_again(self) -> None:
        """Read again which documents the server has: it may be another one, and the last reading may be incomplete."""
        self._must_read = True

    def follow(self, ask: Callable[[m.DocumentsSince], m.ChangedDocuments], last: int) -> bool:
        """Register the next documents that were learned or removed, up to the server's `last` change.

        Returns whether there are more.
        """
        if self._read_since is not None and not self._engine.reads():
            # Documents that were removed during the reading may have become known afterwards.
            self._changes, self._read_since = self._read_since, None
        more = False
        if self._changes != last:
            changed = ask(m.DocumentsSince(self._changes))
            for described in changed.learned:
                described.noted(self._known)
            for name, reason in changed.removed.items():
                if (document := self._known.get(name)) is not None:
                    self._remove([document], reason)
            self._known.prepare()
            self._changes, more = changed.number, changed.more
            self._must_read |= not changed.complete
        if self._must_read and self._read_since is None and not more:
            self._must_read, self._read_since = False, self._changes
            self._engine.read_again()
        return more

    def _remove(self, documents: Sequence[KnownDocument], reason: str) -> None:
        """Mark documents as removed that the server has removed."""
        self._known.remove(documents, reason)
        for document in documents:
            self._engine.removed(document)
            document.pinned, document.expires = False, 0.0

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
