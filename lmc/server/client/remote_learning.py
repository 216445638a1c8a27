"""What an engine tells a cache server of the documents that it has to learn, and which ones of others it gets to learn.

See `learning.py` for what the server does with them.
"""

from array import array
from collections.abc import Callable, Iterable

from lmc.documents.learn_queue import LearnQueue, Unlearned
from lmc.server import messages as m

OFFERED_BYTES = 1 << 20  # of tokens in one message
NAMESPACES = 1024  # in one message


class RemoteLearning:
    """The part of one engine. One thread uses it, once a second."""

    def __init__(
        self,
        queue: LearnQueue,
        namespaces: Callable[[], Iterable[bytes]],
        has_time: Callable[[], bool],
        learn: Callable[[Unlearned], object],
    ) -> None:
        """`queue` has the documents that the engine has to learn, and `namespaces` are those of tenants that it knows.

        While it `has_time`, it gets documents of other engines, which `learn` queues.
        """
        self._queue, self._namespaces, self._has_time, self._learn = queue, namespaces, has_time, learn
        self.begin()

    def begin(self) -> None:
        """Begin anew with a server that knows nothing of this engine."""
        self._seen: set[Unlearned] = set()  # in the queue a second ago
        self._told: set[Unlearned] = set()  # to the server, or by it
        self._known: set[bytes] = set()  # namespaces that the server has been told

    def news(self) -> m.Ping:
        """Return what the server has not been told yet.

        A document is offered when it has waited for a second: most are learned sooner than that.
        """
        waiting = set(self._queue)
        sizes, new = 0, list[m.Offered]()
        for document in (waiting & self._seen) - self._told:
            sizes += 4 * len(document.tokens)
            if new and (sizes > OFFERED_BYTES or len(new) == m.MOST_OFFERED):
                break
            self._told.add(document)
            tokens = array("I", document.tokens).tobytes()
            new.append(m.Offered(document.namespace, tokens, document.name))
        self._seen, self._told = waiting, self._told & waiting
        unknown = [one for one in self._namespaces() if one not in self._known][:NAMESPACES]
        self._known.update(unknown)
        return m.Ping(new, unknown, has_time=not waiting and self._has_time())

    def got(self, documents: Iterable[Unlearned]) -> None:
        """Queue documents that the server wants to be learned."""
        for document in documents:
            self._told.add(document)
            self._learn(document)
