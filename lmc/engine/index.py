"""The index of exact chunks: which stored chunks serve a prefix of a prompt.

There are two kinds of exact records.

*Token chunks* (transformers) are named by a chain of hashes over the tokens, one hash per chunk. The last chunk of a
stored prompt may be partly full. It is called an end, and is found by the chunk before it and by its length.

*Pages* (vLLM) are named by the engine's hash of their last block. This hash covers the whole prompt up to that block,
including cache salt, LoRA and images. A chunk of pages serves any number of its leading blocks, unless it lacks the
pages that only tokens inside the chunk see (layers with a window): then it serves all of them, or none.

Layers with a state (linear attention, Mamba) add one page to a chunk: the state after its last token. An engine has the
states of some positions only. The other chunks are stored as *inner* chunks: a prompt cannot continue after them, but
after a later chunk.

The index remembers ends and blocks. The labels of records hold them for the next process.
"""

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import takewhile
from typing import NamedTuple

from lmc.engine.pieces import Piece, up_to_end
from lmc.keys import ChunkKey, RecordKind, exact_keys, exact_root, next_key
from lmc.queue_dict import QueueDict

SHORT = 16  # bytes of a block hash in a label; enough to make collisions infeasible
NAMED = 13  # bytes of a block hash in the index, also enough. With its number, a name takes 48 bytes of memory, not 64.
REMEMBERED = 1 << 20  # blocks: an index of about 120 MB, for 16 million tokens at 16 tokens per block
ENDS = 4096  # maximum number of chunks whose following ends are remembered

Places = Mapping[ChunkKey, str | None]
Lookup = Callable[[Sequence[ChunkKey]], Sequence[str | None]]


class CacheIndex:
    """The blocks of stored chunks of pages, and the lengths of stored ends."""

    def __init__(self) -> None:
        # Blocks by the short hash and the number in the chunk: those of this process, and those of earlier ones.
        self._blocks: QueueDict[bytes, ChunkKey] = QueueDict()
        self._recalled: dict[bytes, ChunkKey] = {}  # the least recently used one is the last one
        self._ends: OrderedDict[ChunkKey, set[int]] = OrderedDict()  # chunk -> lengths of the ends after it
        self._mutex = threading.Lock()  # held while chunks are remembered; lookups need no lock

    def remember_blocks(self, key: ChunkKey, hashes: Sequence[bytes]) -> None:
        """Remember the blocks of a chunk of pages."""
        with self._mutex:
            for place, block in enumerate(hashes):
                name = _named(block, place)
                self._blocks.pop(name, None)
                self._blocks[name] = key  # at the end
                self._recalled.pop(name, None)
            while len(self._blocks) + len(self._recalled) > REMEMBERED:
                if self._recalled:
                    self._recalled.popitem()
                elif (first := self._blocks.first()) is not None:
                    del self._blocks[first]

    def remember_end(self, parent: ChunkKey, length: int) -> None:
        """Remember that a partly full chunk of `length` tokens is stored after the chunk `parent`."""
        with self._mutex:
            self._ends.setdefault(parent, set()).add(length)
            self._ends.move_to_end(parent)
            while len(self._ends) > ENDS:
                self._ends.popitem(last=False)

    def recall(self, kind: RecordKind, key: ChunkKey, tokens: int, label: str) -> None:
        """Remember a chunk from the label of its record, as used before all remembered ones, if there is room for it.

        Raises `ValueError` for a label that lmc did not write.
        """
        if kind is RecordKind.PAGES and len(self._blocks) + len(self._recalled) < REMEMBERED:
            raw = bytes.fromhex(label)
            with self._mutex:
                for place, at in enumerate(range(0, len(raw), SHORT)):
                    name = _named(raw[at : at + SHORT], place)
                    if name not in self._blocks:
                        self._recalled.setdefault(name, key)
        elif kind is RecordKind.PREFIX and label and len(self._ends) < ENDS:
            parent = ChunkKey(bytes.fromhex(label))
            with self._mutex:
                if parent not in self._ends:
                    self._ends[parent] = set()
                    self._ends.move_to_end(parent, last=False)
                self._ends[parent].add(tokens)

    def holder(self, block: bytes, place: int) -> ChunkKey | None:
        """Return the chunk whose block number `place` is this block; None if no chunk has it there."""
        name = _named(block, place)
        return self._blocks.get(name) or self._recalled.get(name)

    def ends(self, parent: ChunkKey) -> set[int]:
        """Return the lengths of the ends that are stored after a chunk."""
        return self._ends.get(parent, set())


def _named(block: bytes, place: int) -> bytes:
    """Return the name of a block that has number `place` in its chunk."""
    return block[:NAMED] + place.to_bytes(2)


class NewChunk(NamedTuple):
    """An exact chunk of a prompt that may be stored: `tokens` tokens after `chunk` full chunks."""

    chunk: int
    tokens: int
    inner: bool = False  # No prompt can continue after it; see `BlockChain`.
    details: str = ""  # text of the connector; after a restart it is in `CacheEngine.recalled`


@dataclass(frozen=True, slots=True)
class Naming:
    """The key under which an exact chunk is stored."""

    key: ChunkKey
    label: str = ""
    longer: ChunkKey | None = None  # key of a longer chunk that serves the same tokens while it is stored


class TokenChain:
    """A prompt as token chunks. Ends are looked up at the prompt lengths `ends` and at those in the index."""

    kind = RecordKind.PREFIX
    inner: Sequence[ChunkKey] = ()  # See `BlockChain.inner`.

    def __init__(
        self, index: CacheIndex, namespace: bytes, tokens: Sequence[int], chunk_size: int, ends: Iterable[int] = ()
    ) -> None:
        self._index, self.namespace, self._tokens, self._size = index, namespace, tokens, chunk_size
        self._ends = {*ends, len(tokens)}

    @cached_property
    def whole(self) -> Sequence[ChunkKey]:
        """The keys of the full chunks: a sha256 chain over the tokens."""
        full = len(self._tokens) // self._size * self._size
        return exact_keys(self.namespace, self._tokens[:full], self._size)

    def partial(self, chunk: int) -> list[tuple[ChunkKey, int]]:
        """Return the ends that may serve the tokens after `chunk` full chunks, with their lengths, longest first."""
        at, parent = chunk * self._size, self._parent(chunk)
        lengths = self._index.ends(parent) | {end - at for end in self._ends if at < end < at + self._size}
        fitting = sorted((length for length in lengths if length <= len(self._tokens) - at), reverse=True)
        return [(next_key(parent, self._tokens[at : at + length]), length) for length in fitting]

    def naming(self, chunk: int, tokens: int, *, inner: bool = False) -> Naming:
        """Return the key for `tokens` tokens after `chunk` full chunks. An end's label is the key before it."""
        at, parent = chunk * self._size, self._parent(chunk)
        if tokens == self._size:
            return Naming(self.whole[chunk])
        return Naming(next_key(parent, self._tokens[at : at + tokens]), parent.hex())

    def remember(self, chunk: int, tokens: int) -> None:
        """Remember that `tokens` tokens after `chunk` full chunks are stored. Full chunks are found by their keys."""
        if tokens < self._size:
            self._index.remember_end(self._parent(chunk), tokens)

    def _parent(self, chunk: int) -> ChunkKey:
        return self.whole[chunk - 1] if chunk else exact_root(self.namespace)


class BlockChain:
    """A prompt as chunks of pages, by the engine's block hashes."""

    kind = RecordKind.PAGES

    def __init__(
        self,
        index: CacheIndex,
        namespace: bytes,
        hashes: Sequence[bytes],
        chunk_size: int,
        block_size: int,
        *,
        divisible: bool = True,
        states: bool = False,
    ) -> None:
        """Store what names the chunks.

        `divisible` chunks serve any number of their leading blocks. With `states`, there may be inner chunks.
        """
        self._index, self.namespace, self._hashes = index, namespace, hashes
        self._size, self._blocks, self._divisible = block_size, chunk_size // block_size, divisible
        self._states = states

    @cached_property
    def whole(self) -> Sequence[ChunkKey]:
        """The keys of the full chunks, each from the hash of its last block."""
        return [self.key(self._hashes[last]) for last in range(self._blocks - 1, len(self._hashes), self._blocks)]

    @cached_property
    def inner(self) -> Sequence[ChunkKey]:
        """The keys of the full chunks as inner chunks; none if the engine has no layers with a state."""
        lasts = range(self._blocks - 1, len(self._hashes), self._blocks) if self._states else ()
        return [self._inner_key(self._hashes[last]) for last in lasts]

    def partial(self, chunk: int) -> list[tuple[ChunkKey, int]]:
        """Return the chunks that may serve the blocks after `chunk` full chunks, and how many of their tokens do.

        Chunks that serve the most tokens come first. After these tokens, a chunk ends or has other blocks.
        """
        hashes, found = self._hashes[chunk * self._blocks : (chunk + 1) * self._blocks], []
        for place in reversed(range(len(hashes))):
            holder = self._index.holder(hashes[place], place)
            if holder is not None and self._divisible:
                found.append((holder, (place + 1) * self._size))
            if place + 1 < self._blocks:  # Another process may have stored a chunk that ends with this block.
                found.append((self.key(hashes[place]), (place + 1) * self._size))
        return found

    def naming(self, chunk: int, tokens: int, *, inner: bool = False) -> Naming:
        """Return the key for `tokens` tokens after `chunk` full chunks. Its label has the shortened block hashes."""
        hashes = self._of(chunk, tokens)
        if inner:
            return Naming(self._inner_key(hashes[-1]), longer=self.key(hashes[-1]))
        longer = self._index.holder(hashes[-1], len(hashes) - 1) if self._divisible else None
        return Naming(self.key(hashes[-1]), "".join(block[:SHORT].hex() for block in hashes), longer)

    def remember(self, chunk: int, tokens: int) -> None:
        """Remember the blocks of the `tokens` tokens after `chunk` full chunks as stored."""
        hashes = self._of(chunk, tokens)
        self._index.remember_blocks(self.key(hashes[-1]), hashes)

    def key(self, last: bytes) -> ChunkKey:
        """Return the key of the chunk whose last block has this hash."""
        return ChunkKey(hashlib.sha256(b"pages" + self.namespace + last).digest())

    def _inner_key(self, last: bytes) -> ChunkKey:
        return ChunkKey(hashlib.sha256(b"inner pages" + self.namespace + last).digest())

    def _of(self, chunk: int, tokens: int) -> Sequence[bytes]:
        first = chunk * self._blocks
        return self._hashes[first : first + tokens // self._size]


ExactChain = TokenChain | BlockChain


def find_run(chain: ExactChain, chunk_size: int, places: Places, lookup: Lookup) -> list[Piece]:
    """Return the longest run of exact chunks from the start of a prompt.

    The run has full chunks, whose tiers are in `places`, and possibly a part of one more chunk, found by `lookup`. A
    prompt can continue after it.
    """
    inner = dict(zip(chain.whole, chain.inner, strict=False))
    keys = [key if places[key] else inner.get(key, key) for key in chain.whole]
    found = [(key, chunk_size, places[key]) for key in takewhile(places.get, keys)]
    ends = chain.partial(len(found))
    there = lookup([key for key, _ in ends]) if ends else []
    found += [(key, tokens, place) for (key, tokens), place in zip(ends, there, strict=True) if place][:1]
    starts, insides = range(0, len(found) * chunk_size, chunk_size), set(chain.inner)
    return up_to_end(
        [
            replace(Piece.whole(chain.kind, key, n, at, at, place), ends=key not in insides)
            for at, (key, n, place) in zip(starts, found, strict=True)
        ]
    )
