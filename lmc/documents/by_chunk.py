"""Documents by a chunk that they have."""

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from lmc.keys import ChunkKey


class Chunked(Protocol):
    """A document, as far as its chunks are concerned. The key of its last chunk identifies it."""

    @property
    def keys(self) -> Sequence[ChunkKey]:
        """The keys of its chunks."""


D = TypeVar("D", bound=Chunked)


class DocumentsByChunk(Generic[D]):
    """Documents by a chunk that they have. Not safe for several threads at once.

    Most chunks belong to one document. Only for the others there is a dictionary, so that an entry takes 40 to 80 bytes
    and not 300.
    """

    def __init__(self) -> None:
        self._first: dict[ChunkKey, D] = {}
        self._others: dict[ChunkKey, dict[ChunkKey, D]] = {}  # by the chunk, and by the document's last chunk

    def add(self, key: ChunkKey, document: D) -> None:
        """Add a document that has a chunk. It may be there already."""
        first = self._first.setdefault(key, document)
        if first.keys[-1] != document.keys[-1]:
            self._others.setdefault(key, {})[document.keys[-1]] = document

    def discard(self, key: ChunkKey, document: D) -> None:
        """Remove a document from those that have a chunk, if it is among them."""
        others = self._others.get(key, {})
        others.pop(document.keys[-1], None)
        first = self._first.get(key)
        if first is not None and first.keys[-1] == document.keys[-1]:
            del self._first[key]
            if others:
                self._first[key] = others.pop(next(iter(others)))
        if not others:
            self._others.pop(key, None)

    def of(self, key: ChunkKey) -> list[D]:
        """Return the documents that have a chunk."""
        first = self._first.get(key)
        return [] if first is None else [first, *self._others.get(key, {}).values()]
