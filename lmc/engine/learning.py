"""The learning queue: documents that stood in prompts and are not stored.

They wait here until the engine is idle and prefills them alone.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

WAITING = 256  # documents at most; one that is dropped comes again with the next prompt that has it


@dataclass(frozen=True, slots=True)
class Unlearned:
    """A document, and the namespace of the tenant who brought it."""

    namespace: bytes
    tokens: tuple[int, ...]


class LearningQueue:
    """Documents in the order in which they came, each once, and no more of their tokens than memory holds."""

    def __init__(self, most_tokens: int) -> None:
        self._most_tokens = most_tokens
        self._waiting: deque[Unlearned] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, namespace: bytes, tokens: Sequence[int]) -> None:
        """Add a document, unless it waits already or there is no room."""
        document = Unlearned(namespace, tuple(tokens))
        waiting = sum(len(other.tokens) for other in self._waiting)
        room = len(self._waiting) < WAITING and waiting + len(tokens) <= self._most_tokens
        if room and document not in self._waiting:
            self._waiting.append(document)

    def first(self) -> Unlearned | None:
        """Return the document that has waited longest, which stays in the queue."""
        return self._waiting[0] if self._waiting else None

    def pop(self) -> Unlearned:
        """Remove and return that document."""
        return self._waiting.popleft()

    def clear(self) -> None:
        """Remove all documents."""
        self._waiting.clear()
