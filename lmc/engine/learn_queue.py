"""The documents that wait to be learned, the one that has waited longest first."""

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from lmc.engine.known_documents import KnownDocument

WAITING = 256  # documents, at most; one that is dropped comes again with the next prompt that has it


@dataclass(frozen=True, slots=True)
class Unlearned:
    """A document that is not stored, and the namespace of the tenant who brought it."""

    namespace: bytes
    tokens: tuple[int, ...]
    name: str = field(default="", compare=False)

    @classmethod
    def of(cls, document: KnownDocument) -> "Unlearned":
        """Return a known document as it waits to be learned again."""
        return cls(document.namespace, tuple(document.tokens), document.name)


class LearnQueue:
    """Each document is in it once. Any thread may call any method."""

    def __init__(self, room: int) -> None:
        """`room` is how many tokens all documents may have together: no more than memory holds."""
        self._room, self._waiting = room, deque[Unlearned]()
        self.under_way: set[Unlearned] = set()  # that are being computed; whoever does it notes them here
        self._mutex = threading.Lock()

    def add(self, document: Unlearned) -> bool:
        """Queue a document if there is room; return whether it is in the queue now."""
        with self._mutex:
            if document in self._waiting:
                return True
            tokens = len(document.tokens) + sum(len(waiting.tokens) for waiting in self._waiting)
            fits = len(self._waiting) < WAITING and tokens <= self._room
            if fits:
                self._waiting.append(document)
            return fits

    def discard(self, document: Unlearned) -> None:
        """Take a document out of the queue, if it is there."""
        with self._mutex, suppress(ValueError):
            self._waiting.remove(document)

    def popleft(self) -> Unlearned:
        """Take the first document; raise `IndexError` if there is none."""
        with self._mutex:
            return self._waiting.popleft()

    def clear(self) -> None:
        """Remove all documents."""
        with self._mutex:
            self._waiting.clear()

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, document: Unlearned) -> bool:
        with self._mutex:
            return document in self._waiting

    def __iter__(self) -> Iterator[Unlearned]:
        with self._mutex:
            return iter(list(self._waiting))
