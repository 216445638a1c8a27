"""The queue of documents to learn, first in, first out.

A document that came only once may never come again, and learning takes as long as prefill. So it waits until the engine
is idle. A `wanted` document is learned while requests run. A document is `wanted` if it came twice, is pinned, or a
request waits for it.

An engine that is never idle learns wanted documents only. New documents then replace the oldest ones that are not
wanted. The queue remembers that these have come, and they become wanted when they come again.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from lmc.documents.known import KnownDocument

MAX_QUEUED_DOCUMENTS = 256
MAX_SEEN_DOCUMENTS = 16_384  # number of documents that are remembered because they came once; about 2 MB


@dataclass(frozen=True, slots=True)
class Unlearned:
    """A document that is not stored, in the namespace of its tenant."""

    namespace: bytes
    tokens: tuple[int, ...]
    name: str = field(default="", compare=False)
    _hash: int = field(init=False, compare=False, repr=False)  # Requests that wait look for it in each step.

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((int.from_bytes(self.namespace[:8]), self.tokens)))

    def __hash__(self) -> int:
        return self._hash

    @classmethod
    def of(cls, document: KnownDocument) -> "Unlearned":
        """Return a known document as an entry of the queue, to be learned again."""
        return cls(document.namespace, tuple(document.tokens), document.name)


class LearnQueue:
    """A queue that has each document once. Any thread may call any method."""

    def __init__(self, room: int, chunk_size: int = 1) -> None:
        """Create an empty queue. `room` is the maximum number of tokens of all its documents: what memory holds.

        There, the last chunk of a document takes as much as a whole one of `chunk_size` tokens.
        """
        self._room, self._chunk_size, self._tokens = room, chunk_size, 0
        self._waiting: dict[Unlearned, bool] = {}  # document -> whether it is `wanted`
        self._seen = dict[int, None]()  # hashes of documents that came; a collision only makes a document wanted
        self.under_way: set[Unlearned] = set()  # documents that are being computed; set by the code that computes them
        self._mutex = threading.Lock()

    def add(self, document: Unlearned, *, wanted: bool = False, again: bool = False) -> bool:
        """Queue a document that a prompt has, if there is room. Returns whether it is queued.

        One that is learned `again`, because it has been evicted, does not become wanted by coming twice: if memory is
        too small for all documents, it would be evicted again.
        """
        with self._mutex:
            has_come = not again and self._has_come(document)
            return self._put(document, wanted=wanted or has_come)

    def put_back(self, document: Unlearned) -> bool:
        """Queue a document that was taken and not learned. Returns whether it is queued."""
        with self._mutex:
            return self._put(document, wanted=False)

    def _has_come(self, document: Unlearned) -> bool:
        """Return whether a document came before, and remember that it has come."""
        number = hash(document)
        if number in self._seen:
            return True
        if len(self._seen) == MAX_SEEN_DOCUMENTS:
            del self._seen[next(iter(self._seen))]
        self._seen[number] = None
        return False

    def _put(self, document: Unlearned, *, wanted: bool) -> bool:
        if document in self._waiting:
            self._waiting[document] |= wanted
            return True
        kept = [other for other, is_wanted in self._waiting.items() if is_wanted]
        if not self._has_room(document, len(kept), sum(map(self._taken, kept))):
            return False
        while not self._has_room(document, len(self._waiting), self._tokens):
            self._remove(next(other for other, is_wanted in self._waiting.items() if not is_wanted))
        self._waiting[document] = wanted
        self._tokens += self._taken(document)
        return True

    def _has_room(self, document: Unlearned, others: int, tokens: int) -> bool:
        return others < MAX_QUEUED_DOCUMENTS and tokens + self._taken(document) <= self._room

    def _taken(self, document: Unlearned) -> int:
        """Return the number of tokens for which a document takes memory."""
        return -(-len(document.tokens) // self._chunk_size) * self._chunk_size

    def _remove(self, document: Unlearned) -> None:
        del self._waiting[document]
        self._tokens -= self._taken(document)

    def discard(self, document: Unlearned) -> None:
        """Remove a document from the queue, if it is there."""
        with self._mutex, suppress(KeyError):
            self._remove(document)

    def take(
        self, fits: Callable[[Unlearned], bool] = lambda document: True, *, wanted: bool = False
    ) -> Unlearned | None:
        """Remove and return the first document, or the first wanted one, if it `fits`.

        Returns None if there is none, or if it does not fit. No other thread can remove the document while `fits` is
        called. `fits` must not use the queue.
        """
        with self._mutex:
            document = next((queued for queued, is_wanted in self._waiting.items() if is_wanted or not wanted), None)
            if document is None or not fits(document):
                return None
            self._remove(document)
            return document

    def clear(self) -> None:
        """Remove all documents, and forget which ones came."""
        with self._mutex:
            self._waiting.clear()
            self._seen.clear()
            self._tokens = 0

    @property
    def has_wanted(self) -> bool:
        """Whether any document is `wanted`."""
        with self._mutex:
            return any(self._waiting.values())

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, document: Unlearned) -> bool:
        with self._mutex:
            return document in self._waiting

    def __iter__(self) -> Iterator[Unlearned]:
        with self._mutex:
            return iter(list(self._waiting))
