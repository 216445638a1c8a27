"""Which documents of an arena were learned or removed, for clients that find them in prompts."""

import threading
import time
from collections import deque
from typing import NamedTuple

from lmc.documents.known import KnownDocument, KnownDocuments
from lmc.keys import ChunkKey

MAX_DOCUMENT_CHANGES = 1 << 17  # changes that are kept for clients; they take up to 10 MB
MAX_SENT_DOCUMENTS = 64  # documents that a client gets with one request


class NextChanges(NamedTuple):
    """What `DocumentChanges.since` returns."""

    documents: list[KnownDocument]  # that were learned or removed, as they are now
    number: int  # of the last change of these
    more: bool  # whether there are later changes
    complete: bool  # False if earlier changes are lost, so that the client must list all documents again


class DocumentChanges:
    """The last changes of an arena's documents. Any thread may call any method.

    A change says only which document was learned or removed, because a client needs no earlier state of it. Changes are
    numbered from the time of the start in nanoseconds, so that the numbers of an earlier server are lower.
    """

    def __init__(self, known: KnownDocuments) -> None:
        self._known, self._mutex = known, threading.Lock()
        self._keys: deque[ChunkKey] = deque(maxlen=MAX_DOCUMENT_CHANGES)  # last keys of the documents
        self.last = time.time_ns()  # number of the last change

    def add(self, document: KnownDocument) -> None:
        """Add a document that was learned or removed just before."""
        with self._mutex:
            self._keys.append(document.keys[-1])
            self.last += 1

    def since(self, number: int) -> NextChanges:
        """Return the next documents that changed after the change `number`."""
        with self._mutex:
            first = self.last - len(self._keys)
            complete = first <= number <= self.last
            start = number if complete else first
            end = min(start + MAX_SENT_DOCUMENTS, self.last)
            keys = [self._keys[i - first] for i in range(start, end)]  # `islice` would pass all entries before them.
            more = end < self.last
        documents = [self._known.get(key.hex()) for key in dict.fromkeys(keys)]
        return NextChanges([document for document in documents if document is not None], end, more, complete)
