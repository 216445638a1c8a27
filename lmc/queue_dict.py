"""A dict that is a queue as well: entries are added at its end, and removed at its beginning or anywhere."""

from itertools import islice
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")

FIRST = 256  # entries at the beginning that are read at once


class QueueDict(dict[K, V]):
    """A dict whose first entry, in the order in which entries were added, is found in O(1) on average.

    An `OrderedDict` finds it as well, and takes 64 bytes more for each entry. In a plain dict, the search for the first
    entry passes all places of entries that were removed before it. So the first `FIRST` entries are read together.

    An entry whose value is replaced must be removed before, and is then at the end.
    """

    __slots__ = ("_first",)

    def __init__(self) -> None:
        """Create an empty queue."""
        super().__init__()
        self._first: list[tuple[K, V]] = []  # entries at the beginning, in reverse order; some may have been removed

    def first(self) -> K | None:
        """Return the first key, or None if the queue is empty.

        An entry that was removed and then added with the same value object may be returned before its turn.
        """
        while self:
            while self._first:
                key, value = self._first[-1]
                if key in self and self[key] is value:
                    return key
                self._first.pop()
            self._first = list(islice(self.items(), FIRST))[::-1]
        return None
