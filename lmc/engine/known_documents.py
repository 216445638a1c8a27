"""The documents that an engine knows: those it has learned, met in prompts, or found on its disk at the start.

This is what `lmc documents` lists and what `lmc explain` compares with. It decides nothing: whether a document can be
reused is asked of the store, chunk by chunk.
"""

import base64
import threading
import time
import zlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from lmc.background import gently
from lmc.keys import ChunkKey

# Tokens of all documents: 64 MiB. Beyond that, those are forgotten that were used longest ago, but not those that are
# pinned or have a time limit.
REMEMBERED = 1 << 24


@dataclass(slots=True)
class KnownDocument:
    """A document, under the namespace of its model and tenant."""

    namespace: bytes
    tokens: "array[int]" = field(repr=False)
    keys: tuple[ChunkKey, ...]
    uses: int = 0
    removed: bool = False  # by a person; it may be learned again
    used: float = field(default_factory=time.time)  # when it was learned or used last, in seconds since 1970
    name: str = ""  # for people; several documents may have the same
    pinned: bool = False  # Only the keeper sets `pinned` and `expires`.
    expires: float = 0.0  # when it is removed, in seconds since 1970; 0 for never

    @property
    def id(self) -> str:
        """The key of its last chunk, which covers all of its tokens and its namespace."""
        return self.keys[-1].hex()

    @property
    def kept(self) -> bool:
        """Whether it is pinned or has a time limit, so that it must not be forgotten."""
        return bool(self.pinned or self.expires)


class KnownDocuments:
    """All known documents. May be used by several threads."""

    def __init__(self) -> None:
        self._documents: OrderedDict[str, KnownDocument] = OrderedDict()  # used longest ago first
        self._forgettable: OrderedDict[str, None] = OrderedDict()  # ids in the same order, without those that are kept
        self._tokens = 0
        self._mutex = threading.Lock()

    def note(
        self, namespace: bytes, tokens: Sequence[int], keys: Sequence[ChunkKey], *, used: bool = False
    ) -> KnownDocument:
        """Note that a document was learned, or that a prompt has `used` it, and return it."""
        with self._mutex:
            name = keys[-1].hex()
            document = self._documents.get(name)
            if document is None:
                document = self._documents[name] = KnownDocument(namespace, array("I", tokens), tuple(keys))
                self._tokens += len(tokens)
            document.uses, document.used, document.removed = document.uses + used, time.time(), False
            self._documents.move_to_end(name)
            self._forgettable[name] = None
            self._forgettable.move_to_end(name)
            while self._tokens > REMEMBERED and len(self._forgettable) > 1:
                oldest, _ = self._forgettable.popitem(last=False)
                if not self._documents[oldest].kept:
                    self._tokens -= len(self._documents.pop(oldest).tokens)
            return document

    def clear(self) -> None:
        """Forget all documents."""
        with self._mutex:
            self._documents.clear()
            self._forgettable.clear()
            self._tokens = 0

    def get(self, name: str) -> KnownDocument | None:
        """Return the document with this id."""
        with self._mutex:
            return self._documents.get(name)

    def list(self) -> "list[KnownDocument]":
        """Return all documents; the one that was used last comes first."""
        with self._mutex:
            return list(reversed(self._documents.values()))

    def nearest(self, tokens: Sequence[int], namespace: bytes) -> KnownDocument | None:
        """Return the document of a namespace that has at least half of its distinct tokens in common with `tokens`."""
        wanted, best, most = set(tokens), None, 0.5
        for document in gently(self.list()):
            if document.namespace == namespace and not document.removed:
                common = len(wanted.intersection(document.tokens))
                if common <= most * len(wanted):  # The share is at most this, however few tokens the document has.
                    continue
                share = common / len(wanted.union(document.tokens))
                if share > most:
                    best, most = document, share
        return best


def pack_tokens(tokens: Sequence[int]) -> str:
    """Return tokens as a text for the label of a record."""
    return base64.b64encode(zlib.compress(array("I", tokens).tobytes(), 1)).decode()  # b85 is a hundred times slower


def unpack_tokens(text: str) -> "array[int]":
    """Return the tokens that `pack_tokens` has written; raise `ValueError` for any other text."""
    try:
        return array("I", zlib.decompress(base64.b64decode(text, validate=True)))
    except zlib.error as error:
        raise ValueError("no packed tokens") from error
