"""The documents that wait to be learned, the one that has waited longest first.

A document that came only once may never come again, and to learn it takes as long as to prefill it. So it waits until
the engine is idle. A document that is *wanted*, because it came twice, is pinned, or a request waits for it, is learned
while requests run.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from lmc.documents.known import KnownDocument

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
        self._room, self._tokens = room, 0
        self._waiting: dict[Unlearned, bool] = {}  # whether each document is wanted
        self.under_way: set[Unlearned] = set()  # that are being computed; whoever does it notes them here
        self._mutex = threading.Lock()

    def add(self, document: Unlearned, *, wanted: bool = False) -> bool:
        """Queue a document if there is room; return whether it is in the queue now. The second time, it is wanted."""
        with self._mutex:
            if document in self._waiting:
                self._waiting[document] = True
                return True
            fits = len(self._waiting) < WAITING and self._tokens + len(document.tokens) <= self._room
            if fits:
                self._waiting[document] = wanted
                self._tokens += len(document.tokens)
            return fits

    def discard(self, document: Unlearned) -> None:
        """Take a document out of the queue, if it is there."""
        with self._mutex, suppress(KeyError):
            self._waiting.pop(document)
            self._tokens -= len(document.tokens)

    def take(
        self, fits: Callable[[Unlearned], bool] = lambda document: True, *, wanted: bool = False
    ) -> Unlearned | None:
        """Take the first document, or the first wanted one, if it `fits`; None if it does not, or if there is none.

        Another thread cannot remove the document between the question and the answer. `fits` must not use the queue.
        """
        with self._mutex:
            document = next((one for one, is_wanted in self._waiting.items() if is_wanted or not wanted), None)
            if document is None or not fits(document):
                return None
            del self._waiting[document]
            self._tokens -= len(document.tokens)
            return document

    def clear(self) -> None:
        """Remove all documents."""
        with self._mutex:
            self._waiting.clear()
            self._tokens = 0

    @property
    def has_wanted(self) -> bool:
        """Whether a document is wanted."""
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
