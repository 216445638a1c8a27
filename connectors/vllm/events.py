"""KV events of our tiers: which of the engine's blocks are in memory or on disk, for routers that send prompts where their KV is.

Kept only if somebody listens. Not a journal but a comparison: when the store has changed, every chunk is looked up, and what is
elsewhere than before is told. A block may be in several chunks; it is told once.
"""

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lmc.connectors.vllm.library import Library
from lmc.keys import ChunkKey

MEDIUM = {"host": "CPU", "disk": "STORAGE"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """The blocks of a chunk, as the engine's events name them."""

    hashes: tuple[bytes, ...]
    parent: bytes | None
    tokens: tuple[int, ...]
    lora_id: int | None = None
    lora_name: str | None = None


@dataclass(frozen=True, slots=True)
class Change:
    """Blocks that have come to a medium, or gone from it."""

    told: Told
    blocks: tuple[int, ...]  # places in `told.hashes`
    medium: str
    stored: bool


def told_of(request: Any, first: int, count: int, block_size: int) -> Told:
    """Of the blocks `[first, first + count)` of a request."""
    lora = request.lora_request
    return Told(
        hashes=tuple(request.block_hashes[first : first + count]),
        parent=request.block_hashes[first - 1] if first else None,
        tokens=tuple(request.all_token_ids[first * block_size : (first + count) * block_size]),
        lora_id=lora.adapter_id if lora else None,
        lora_name=lora.name if lora else None,
    )


class Events:
    """What has changed since the last time."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._chunks: OrderedDict[ChunkKey, Told] = OrderedDict()
        self._medium: dict[ChunkKey, str] = {}
        self._copies: Counter[tuple[str, bytes]] = Counter()  # chunks that hold a block, by medium
        self._mark: object = None

    def expect(self, key: ChunkKey, told: Told) -> None:
        """A chunk with these blocks is being stored."""
        self._chunks[key] = told
        self._chunks.move_to_end(key)
        while len(self._chunks) - len(self._medium) > self._library.slots:  # those that never came
            stale = next(key for key in self._chunks if key not in self._medium)
            del self._chunks[stale]

    def take(self) -> list[Change]:
        """Changes, oldest chunk first."""
        stats = self._library.store.stats()
        mark = (self._library.jobs.stored["chunks"], stats.evictions, stats.bytes_loaded, stats.writes)
        if mark == self._mark:
            return []
        self._mark = mark
        changes: list[Change] = []
        keys = list(self._chunks)
        for key, place in zip(keys, self._library.store.lookup(keys, shared=False), strict=True):
            before, now = self._medium.get(key), MEDIUM.get(place or "")
            if before == now:
                continue
            told = self._chunks[key]
            if now is not None:
                self._medium[key] = now
                changes += self._moved(told, now, stored=True)
            if before is not None:
                changes += self._moved(told, before, stored=False)
            if now is None:
                del self._medium[key], self._chunks[key]
        return changes

    def _moved(self, told: Told, medium: str, *, stored: bool) -> Sequence[Change]:
        """The blocks for which this is the first copy on a medium, or was the last one."""
        places = []
        for place, found in enumerate(told.hashes):
            self._copies[medium, found] += 1 if stored else -1
            if self._copies[medium, found] == int(stored):
                places.append(place)
            if not self._copies[medium, found]:
                del self._copies[medium, found]
        return [Change(told, tuple(places), medium, stored)] if places else []
