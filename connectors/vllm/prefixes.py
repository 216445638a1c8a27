"""Exact chunks under vLLM's block hashes: which stored chunk serves which leading blocks of a prompt.

The engine's hash of a block names the whole prompt up to its end, with salt, LoRA and images; so the hash of a chunk's last block
names the chunk. A chunk serves any number of its leading blocks: an index from block hash to chunk finds it for prompts that go
another way in its middle. The index is rebuilt from the records' labels when a disk is opened.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lmc.keys import ChunkKey

SHORT = 16  # bytes of a hash that the index and labels keep: nobody finds two prompts that share them
REMEMBERED = 1 << 20  # blocks: about 150 MB of index, 16 million tokens at 16 a block

Lookup = Callable[[Sequence[ChunkKey]], Sequence[str | None]]


@dataclass(frozen=True, slots=True)
class Hit:
    """Leading blocks of a stored chunk that a prompt begins with, or goes on with."""

    key: ChunkKey
    chunk: int  # of the prompt
    blocks: int


class Prefixes:
    """Finds exact chunks by block hashes."""

    def __init__(self, namespace: bytes, blocks: int) -> None:
        self.blocks = blocks  # of a full chunk
        self._namespace = namespace
        self._index: OrderedDict[bytes, tuple[ChunkKey, int]] = OrderedDict()  # short hash -> chunk, place in it

    def key(self, last: bytes) -> ChunkKey:
        """Of the chunk whose last block has this hash."""
        return ChunkKey(hashlib.sha256(b"pages" + self._namespace + last).digest())

    def label(self, hashes: Sequence[bytes]) -> str:
        """What brings a chunk's blocks back into the index after a restart."""
        return "".join(found[:SHORT].hex() for found in hashes)

    def remember(self, key: ChunkKey, hashes: Sequence[bytes]) -> None:
        """A chunk with these blocks is stored."""
        for place, found in enumerate(hashes):
            self._index[found[:SHORT]] = (key, place)
            self._index.move_to_end(found[:SHORT])
        while len(self._index) > REMEMBERED:
            self._index.popitem(last=False)

    def holders(self, hashes: Sequence[bytes]) -> list[ChunkKey]:
        """The longer chunk, if one is known, that begins with these blocks."""
        key, place = self._index.get(hashes[-1][:SHORT], (None, -1))
        return [key] if key is not None and place == len(hashes) - 1 else []

    def recall(self, key: ChunkKey, label: str) -> None:
        """As `remember`, from a label."""
        raw = bytes.fromhex(label)
        self.remember(key, [raw[i : i + SHORT] for i in range(0, len(raw), SHORT)])

    def find(self, hashes: Sequence[bytes], lookup: Lookup) -> list[Hit]:
        """The longest run of stored blocks from the start; whole chunks, and leading blocks of one more."""
        n = self.blocks
        keys = [self.key(hashes[last]) for last in range(n - 1, len(hashes), n)]
        places = lookup(keys)
        full = next((i for i, place in enumerate(places) if place is None), len(keys))
        hits = [Hit(keys[i], i, n) for i in range(full)]
        part = self._part(hashes[full * n : (full + 1) * n], full, lookup)
        return [*hits, part] if part else hits

    def _part(self, hashes: Sequence[bytes], chunk: int, lookup: Lookup) -> Hit | None:
        candidates = []
        for place in reversed(range(len(hashes))):
            key, found = self._index.get(hashes[place][:SHORT], (None, -1))
            if key is not None and found == place:
                candidates.append(Hit(key, chunk, place + 1))
            if place + 1 < self.blocks:  # a chunk that ends here, stored by another process
                candidates.append(Hit(self.key(hashes[place]), chunk, place + 1))
        places = lookup([hit.key for hit in candidates]) if candidates else []
        return next((hit for hit, there in zip(candidates, places, strict=True) if there), None)
