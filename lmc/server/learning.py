"""Documents that wait to be learned by the first idle client of a cache server.

An engine offers the documents that it has seen and not learned yet, and keeps them in its own queue. An idle client
gets some of the waiting documents; for a while, other clients do not get the same ones. The first engine that computes
a document reserves its chunks, so two engines never compute the same document. A stored document leaves the queue.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from lmc.documents.learn_queue import Unlearned

# Beyond this number of documents, the oldest one is dropped here. It stays in the queue of the engine that offered it.
MAX_WAITING_DOCUMENTS = 1024
CLAIM_SECONDS = 60.0  # time in which a document that one client has claimed is not given to other clients
MAX_CLAIMS = 3  # A document is dropped after this many claims, because it may be too long for all engines.
MAX_CLAIMED_DOCUMENTS = 4  # documents that a client gets with one request


@dataclass(slots=True)
class _Waiting:
    document: Unlearned
    anybody: bool = False  # Busy clients get the document, too, because it is in no client's queue.
    offered: set[object] = field(default_factory=set)  # clients that have the document in their own queues
    claimed: float = float("-inf")  # time when a client last got the document
    claims: int = 0
    claimant: object | None = None


class WaitingDocuments:
    """The documents of one arena that wait to be learned. Any thread may call any method."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._mutex = clock, threading.Lock()
        self._waiting: OrderedDict[str, _Waiting] = OrderedDict()  # by id

    def __len__(self) -> int:
        return len(self._waiting)

    def offer(self, name: str, document: Unlearned, client: object) -> None:
        """Add a document that a client has in its own queue; `name` is the document's id."""
        with self._mutex:
            self._add(name, document).offered.add(client)

    def want(self, name: str, document: Unlearned) -> None:
        """Add a document that must be stored again and is in no client's queue; `name` is the document's id."""
        with self._mutex:
            self._add(name, document).anybody = True

    def discard(self, name: str) -> None:
        """Remove a document, if it is waiting."""
        if name in self._waiting:
            with self._mutex:
                self._waiting.pop(name, None)

    def take(self, client: object, namespaces: Collection[bytes], *, has_time: bool) -> list[Unlearned]:
        """Return documents of these namespaces for a client to learn. `has_time` says whether the client is idle.

        Other clients do not get these documents for `CLAIM_SECONDS`.
        """
        if not self._waiting or not namespaces:
            return []
        with self._mutex:
            now = self._clock()
            free = [
                (name, entry)
                for name, entry in self._waiting.items()
                if entry.document.namespace in namespaces
                and client not in entry.offered
                and (has_time or entry.anybody)
                and now - entry.claimed > CLAIM_SECONDS
            ][:MAX_CLAIMED_DOCUMENTS]
            for name, entry in free:
                entry.claimed, entry.claimant, entry.claims = now, client, entry.claims + 1
                if entry.claims >= MAX_CLAIMS:
                    del self._waiting[name]
            return [entry.document for _, entry in free]

    def left(self, client: object) -> None:
        """Make the documents that a disconnected client got or offered available to other clients."""
        with self._mutex:
            for entry in self._waiting.values():
                entry.offered.discard(client)
                if entry.claimant is client:
                    entry.claimed, entry.claimant = float("-inf"), None

    def _add(self, name: str, document: Unlearned) -> _Waiting:
        entry = self._waiting.setdefault(name, _Waiting(document))
        if len(self._waiting) > MAX_WAITING_DOCUMENTS:
            self._waiting.popitem(last=False)
        return entry
