"""The exchange of waiting documents between an engine and a cache server.

An engine offers the documents in its learn queue, and gets documents of other engines when it is idle. See
`learning.py` for the server's side.
"""

from array import array
from collections.abc import Iterable

from lmc.documents.learn_queue import Unlearned
from lmc.documents.server import LearningEngine
from lmc.server import messages as m

MAX_OFFERED_BYTES = 1 << 20  # tokens in one message
MAX_SENT_NAMESPACES = 1024  # namespaces in one message


class RemoteLearning:
    """One engine's side of the exchange. One thread uses it, once a second."""

    def __init__(self, engine: LearningEngine) -> None:
        """Begin the exchange; see `DocumentServer.share_learning`."""
        self._engine = engine
        self.begin()

    def begin(self) -> None:
        """Reset the state for a new server, which knows nothing about this engine."""
        self._queued_before: set[Unlearned] = set()  # documents in the queue a second ago
        self._exchanged: set[Unlearned] = set()  # documents that were offered to the server, or came from it
        self._sent_namespaces: set[bytes] = set()  # namespaces that were sent to the server

    def news(self) -> m.Ping:
        """Return a message with the documents and namespaces that were not sent to the server yet.

        A document is offered after it has waited for a second, because most are learned sooner.
        """
        waiting = set(self._engine.queue)
        sizes, new = 0, list[m.Offered]()
        for document in (waiting & self._queued_before) - self._exchanged:
            sizes += 4 * len(document.tokens)
            if new and (sizes > MAX_OFFERED_BYTES or len(new) == m.MAX_OFFERED_DOCUMENTS):
                break
            self._exchanged.add(document)
            tokens = array("I", document.tokens).tobytes()
            new.append(m.Offered(document.namespace, tokens, document.name))
        self._queued_before, self._exchanged = waiting, self._exchanged & waiting
        unknown = [namespace for namespace in self._engine.namespaces() if namespace not in self._sent_namespaces][
            :MAX_SENT_NAMESPACES
        ]
        self._sent_namespaces.update(unknown)
        return m.Ping(new, unknown, has_time=not waiting and self._engine.has_time())

    def got(self, wanted: Iterable[Unlearned]) -> None:
        """Queue the documents that the server wants to be learned."""
        for document in wanted:
            self._exchanged.add(document)
            self._engine.learn(document)
