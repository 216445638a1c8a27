"""Documents that wait to be learned, by whichever client of a cache server has time first.

An engine offers the documents that it has met and not learned yet, and keeps them in a queue of its own. A client that
has time gets some of them, each of which nobody else gets for a while. Whoever computes a document first reserves its
chunks, so that no two engines compute the same, and a document that is stored waits no longer.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from lmc.documents.learn_queue import Unlearned

MOST_WAITING = 1024  # documents; the oldest one is dropped, and is still in the queue of the engine that met it
CLAIM_SECONDS = 60.0  # for which a document is given to nobody else
MOST_CLAIMS = 3  # after which a document is dropped: it may be too long for all engines
AT_ONCE = 4  # documents that a client gets


@dataclass(slots=True)
class _Waiting:
    document: Unlearned
    anybody: bool = False  # It is given to clients that have no time, too, because nobody has it in a queue.
    offered: set[object] = field(default_factory=set)  # by these clients, which have it in their own queues
    claimed: float = float("-inf")  # when it was given to a client for the last time
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
        """Let a document wait that a client has in its own queue; `name` is its id."""
        with self._mutex:
            self._add(name, document).offered.add(client)

    def want(self, name: str, document: Unlearned) -> None:
        """Let a document wait that has to be stored again, and is in no client's queue."""
        with self._mutex:
            self._add(name, document).anybody = True

    def discard(self, name: str) -> None:
        """Let a document wait no longer, if it does."""
        if name in self._waiting:
            with self._mutex:
                self._waiting.pop(name, None)

    def take(self, client: object, namespaces: Collection[bytes], *, has_time: bool) -> list[Unlearned]:
        """Return documents for a client that knows these namespaces, which nobody else gets for a while."""
        if not self._waiting or not namespaces:
            return []
        with self._mutex:
            now = self._clock()
            free = [
                (name, one)
                for name, one in self._waiting.items()
                if one.document.namespace in namespaces
                and client not in one.offered
                and (has_time or one.anybody)
                and now - one.claimed > CLAIM_SECONDS
            ][:AT_ONCE]
            for name, one in free:
                one.claimed, one.claimant, one.claims = now, client, one.claims + 1
                if one.claims >= MOST_CLAIMS:
                    del self._waiting[name]
            return [one.document for _, one in free]

    def left(self, client: object) -> None:
        """Let others have what a client that has gone was given, or has offered."""
        with self._mutex:
            for one in self._waiting.values():
                one.offered.discard(client)
                if one.claimant is client:
                    one.claimed, one.claimant = float("-inf"), None

    def _add(self, name: str, document: Unlearned) -> _Waiting:
        found = self._waiting.setdefault(name, _Waiting(document))
        if len(self._waiting) > MOST_WAITING:
            self._waiting.popitem(last=False)
        return found
