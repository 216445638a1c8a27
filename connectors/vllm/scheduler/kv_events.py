"""KV events for routers: which of the engine's blocks are in lmc's memory or on its disk.

The store's change log lists the chunks that appeared and left. This module converts chunks to blocks. A block may be in
several chunks. It is announced when its first chunk appears on a medium, and withdrawn when its last chunk leaves it.
"""

import base64
import json
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from lmc.keys import ChunkKey
from lmc.storage.change_log import Changes, media_steps

ABSENT = 1024  # maximal number of chunks whose details are kept while no medium has them; about 10 KB each


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockDetails:
    """The blocks of a chunk, as the engine's events name them."""

    hashes: tuple[bytes, ...]
    parent: bytes | None
    tokens: "array[int]"
    lora_id: int | None = None
    lora_name: str | None = None
    extra_keys: tuple[tuple[Any, ...] | None, ...] = ()  # for each block, what its hash covers in addition to tokens

    def label(self) -> str:
        """Return a label for the chunk's record, from which the next process can announce the chunk.

        The label is empty with LoRA, because the engine's LoRA ids differ between processes. It is also empty with
        other extra keys, because a tenant's cache salt must not be written to disk.
        """
        if self.lora_id is not None or any(self.extra_keys):
            return ""
        parent = self.parent.hex() if self.parent else ""
        tokens = base64.b85encode(self.tokens.tobytes()).decode()
        return json.dumps([[block.hex() for block in self.hashes], parent, tokens])

    @classmethod
    def from_label(cls, label: str) -> "BlockDetails":
        """Return the details from a label that `label` wrote. Raises `ValueError` for an invalid label."""
        hashes, parent, tokens = json.loads(label)
        return cls(
            hashes=tuple(bytes.fromhex(block) for block in hashes),
            parent=bytes.fromhex(parent) or None,
            tokens=array("I", base64.b85decode(tokens)),
        )


@dataclass(frozen=True, slots=True)
class BlocksMoved:
    """Blocks that appeared on a medium, or left it."""

    details: BlockDetails
    blocks: tuple[int, ...]  # indices of `details.hashes`
    medium: str
    stored: bool


class KVEvents:
    """The blocks that have appeared and left since the last call of `take`."""

    def __init__(
        self,
        changes: Changes,
        block_size: int,
        extra_keys: Callable[[Any, int, int], tuple[Any, ...] | None] | None = None,
    ) -> None:
        """Follow the change log `changes`.

        `extra_keys` returns what the hash of a request's block `[start, stop)` covers in addition to tokens.
        """
        self._changes, self._block_size, self._extra_keys = changes, block_size, extra_keys
        self._read = 0  # number of the last change that was read
        self._details: dict[ChunkKey, BlockDetails] = {}
        self._absent: dict[ChunkKey, None] = {}  # chunks that have not appeared yet, or have left; oldest first
        self._media: dict[ChunkKey, set[str]] = {}  # media of the announced chunks
        self._copies: Counter[tuple[str, bytes]] = Counter()  # number of chunks that hold a block, by medium

    def details(self, request: Any, first: int, count: int) -> BlockDetails:
        """Return the details of the blocks `[first, first + count)` of a request."""
        lora, size = request.lora_request, self._block_size
        return BlockDetails(
            hashes=tuple(request.block_hashes[first : first + count]),
            parent=request.block_hashes[first - 1] if first else None,
            tokens=array("I", request.all_token_ids[first * size : (first + count) * size]),
            lora_id=lora.adapter_id if lora else None,
            lora_name=lora.name if lora else None,
            extra_keys=tuple(
                self._extra_keys(request, block * size, (block + 1) * size) if self._extra_keys else None
                for block in range(first, first + count)
            ),
        )

    def expect(self, key: ChunkKey, details: BlockDetails) -> None:
        """Record the blocks of a chunk that is being saved."""
        self._details[key] = details
        self._keep_while_absent(key)

    def recall(self, recalled: dict[ChunkKey, str]) -> None:
        """Read the labels of disk records that earlier processes wrote, and empty the mapping."""
        while recalled:
            key, label = recalled.popitem()
            with suppress(ValueError, TypeError):  # lmc did not write this label.
                self._details[key] = BlockDetails.from_label(label)

    def take(self) -> list[BlocksMoved]:
        """Return the changes since the last call, in order."""
        self._read, steps = media_steps(self._changes, self._read, self._announced)
        return [moved for step in steps for moved in self._moved(*step)]

    def _keep_while_absent(self, key: ChunkKey) -> None:
        self._absent[key] = None
        if len(self._absent) > ABSENT:
            oldest = next(iter(self._absent))
            del self._absent[oldest], self._details[oldest]

    def _announced(self) -> set[tuple[ChunkKey, str]]:
        return {(key, medium) for key, media in self._media.items() for medium in media}

    def _moved(self, key: ChunkKey, medium: str, stored: bool) -> Iterator[BlocksMoved]:
        """Yield the blocks whose first copy appeared on a medium, or whose last copy left it."""
        details, media = self._details.get(key), self._media.get(key, set())
        if details is None or stored == (medium in media):
            return
        if stored:
            self._media.setdefault(key, set()).add(medium)
            self._absent.pop(key, None)
        else:
            media.remove(medium)
            if not media:  # The chunk may appear later: a late disk write can end after the chunk has left memory.
                del self._media[key]
                self._keep_while_absent(key)
        places = []
        for place, block in enumerate(details.hashes):
            self._copies[medium, block] += 1 if stored else -1
            if self._copies[medium, block] == int(stored):
                places.append(place)
            if not self._copies[medium, block]:
                del self._copies[medium, block]
        if places:
            yield BlocksMoved(details, tuple(places), medium, stored)
