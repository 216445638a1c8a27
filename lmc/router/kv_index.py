"""The index of the blocks that engines have, filled from their KV events by `lmc.router.follow`.

Engines name blocks by hashes of their own. The index hashes the tokens of events again, in the same way as those of a
prompt, so it depends neither on an engine's hash function nor on its seed.
"""

from array import array
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple

import xxhash

from lmc.router.prefix_hashes import digest, encoded

# llm-d's weights of GPU and CPU memory, and Dynamo's credit for disks, for which llm-d has no weight.
TIER_WEIGHTS: Mapping[str, float] = MappingProxyType({"gpu": 1.0, "cpu": 0.8, "storage": 0.25})

BlockName = int | bytes  # an engine's hash of a block
Medium = tuple[str, int | None]  # the medium of a copy of a block, and its group of layers


class CacheSource(NamedTuple):
    """The cache of an engine, or of one of its data-parallel ranks."""

    engine: str
    rank: int = 0


class Run(NamedTuple):
    """The prefix of a prompt that an engine has."""

    score: float = 0.0  # tokens, weighted by tier
    tokens: int = 0


def _block_hash(before: int, tokens: Sequence[int], extra: Sequence[Any]) -> int:
    data = array("q", tokens).tobytes()
    return xxhash.xxh64_intdigest(data + encoded(repr(list(extra))) if extra else data, before)


def _root(block_size: int, adapter: str) -> int:
    return digest(f"{block_size}\0{adapter}")


def token_chain(tokens: Sequence[int], block_size: int, salt: str = "", adapter: str = "") -> list[int]:
    """Return the hashes of a prompt's whole blocks. The index stores the blocks of events under the same hashes.

    `salt` is the request's cache salt, and `adapter` the name of its LoRA adapter.
    """
    before, hashes = _root(block_size, adapter), list[int]()
    for start in range(0, len(tokens) - block_size + 1, block_size):
        extra = [salt] if salt and not start else []
        before = _block_hash(before, tokens[start : start + block_size], extra)
        hashes.append(before)
    return hashes


def chains(tokens: Sequence[int], salt: str, adapter: str) -> Callable[[int], list[int]]:
    """Return a function from a block size to a prompt's `token_chain`, which is computed once per size."""
    return cache(lambda size: token_chain(tokens, size, salt, adapter))


class _Held:
    """A block of one source."""

    __slots__ = ("chained", "media")

    def __init__(self, chained: int) -> None:
        self.chained = chained
        self.media: dict[Medium, int] = {}  # number of copies by medium


class _SourceBlocks:
    """All blocks of one source."""

    __slots__ = ("adapters", "at", "blocks", "sizes", "weights")

    def __init__(self) -> None:
        self.blocks: OrderedDict[BlockName, _Held] = OrderedDict()
        self.at: dict[int, set[BlockName]] = {}  # names by hash: exact and blended blocks may have the same tokens
        self.weights: dict[int, float] = {}  # of the best copy, by hash
        self.sizes: set[int] = set()
        self.adapters: set[str] = set()


class BlockIndex:
    """The blocks of all sources. All methods are called by one thread."""

    def __init__(self, weights: Mapping[str, float] = TIER_WEIGHTS, max_blocks: int = 1 << 20) -> None:
        """`weights` has the weight of a token on each medium, in lower case; 0 for others.

        `max_blocks` limits the blocks of a source. Only an engine that does not report evicted blocks exceeds it; then
        the blocks that it stored first are dropped here.
        """
        self._weights, self._max_blocks = dict(weights), max_blocks
        self._engines: dict[str, dict[int, _SourceBlocks]] = {}  # by engine and rank
        self.unreadable = 0  # batches of events, so far
        self.unplaced = 0  # blocks with an unknown parent, which are not in the index

    def drop(self, source: CacheSource) -> None:
        """Drop all blocks of a source."""
        ranks = self._engines.get(source.engine, {})
        ranks.pop(source.rank, None)
        if not ranks:
            self._engines.pop(source.engine, None)

    def forget(self, engine: str) -> None:
        """Drop all blocks of an engine."""
        self._engines.pop(engine, None)

    def stored(
        self,
        source: CacheSource,
        names: Sequence[BlockName],
        parent: BlockName | None,
        tokens: Sequence[int],
        block_size: int,
        medium: Medium = ("gpu", None),
        adapter: str = "",
        extra_keys: Sequence[Sequence[Any] | None] | None = None,
    ) -> None:
        """Add one copy of each of some consecutive blocks on a medium.

        vLLM may compute a block again and keep both copies. It reports each copy as stored, and as removed.

        `extra_keys` has what the hash of each block covers in addition to tokens: the adapter's name, and in the first
        block of a prompt its cache salt. Blocks with other keys match no text.
        """
        blocks_of = self._of(source)
        if parent is not None and parent not in blocks_of.blocks:
            self.unplaced += len(names)
            return
        before = _root(block_size, adapter) if parent is None else blocks_of.blocks[parent].chained
        blocks_of.sizes.add(block_size)
        if adapter:
            blocks_of.adapters.add(adapter)
        for position, name in enumerate(names):
            extra = list((extra_keys[position] if extra_keys else None) or ())
            if adapter and extra[:1] == [adapter]:
                del extra[0]
            before = _block_hash(before, tokens[position * block_size : (position + 1) * block_size], extra)
            block = blocks_of.blocks.setdefault(name, _Held(before))
            block.media[medium] = block.media.get(medium, 0) + 1
            blocks_of.at.setdefault(block.chained, set()).add(name)
            self._weigh(blocks_of, block.chained)
        while len(blocks_of.blocks) > self._max_blocks:
            self._take_out(blocks_of, next(iter(blocks_of.blocks)))

    def removed(self, source: CacheSource, names: Sequence[BlockName], medium: Medium = ("gpu", None)) -> None:
        """Remove one copy of each of these blocks from a medium."""
        blocks_of = self._of(source)
        for name in names:
            if (block := blocks_of.blocks.get(name)) is not None:
                copies = block.media.pop(medium, 0)
                if copies > 1:
                    block.media[medium] = copies - 1
                elif block.media:
                    self._weigh(blocks_of, block.chained)
                else:
                    self._take_out(blocks_of, name)

    def blocks(self, source: CacheSource) -> dict[BlockName, set[Medium]]:
        """Return all blocks of a source with their media."""
        blocks_of = self._ranks(source.engine).get(source.rank)
        return {name: set(block.media) for name, block in blocks_of.blocks.items()} if blocks_of else {}

    def __len__(self) -> int:
        return sum(map(self.count, self._engines))

    def count(self, engine: str) -> int:
        """Return the number of blocks of an engine."""
        return sum(len(blocks_of.blocks) for blocks_of in self._ranks(engine).values())

    def block_sizes(self, engine: str) -> set[int]:
        """Return the block sizes of an engine that events have reported."""
        return set().union(*(blocks_of.sizes for blocks_of in self._ranks(engine).values()))

    def is_adapter(self, model: str) -> bool:
        """Return whether events have reported a LoRA adapter of this name."""
        return any(model in blocks_of.adapters for ranks in self._engines.values() for blocks_of in ranks.values())

    def longest(self, engine: str, chain: Callable[[int], Sequence[int]]) -> Run:
        """Return the longest run of a prompt's blocks at an engine.

        `chain` returns the prompt's `token_chain` for a block size. Of several ranks, the best one counts.
        """
        runs = [
            self._run(blocks_of, size, chain(size))
            for blocks_of in self._ranks(engine).values()
            for size in blocks_of.sizes
        ]
        return max(runs, default=Run())

    def _run(self, blocks_of: _SourceBlocks, size: int, hashes: Sequence[int]) -> Run:
        score, blocks = 0.0, 0
        for chained in hashes:
            weight = blocks_of.weights.get(chained)
            if weight is None:
                break
            score, blocks = score + weight * size, blocks + 1
        return Run(score, blocks * size)

    def _of(self, source: CacheSource) -> _SourceBlocks:
        ranks = self._engines.setdefault(source.engine, {})
        return ranks.get(source.rank) or ranks.setdefault(source.rank, _SourceBlocks())

    def _ranks(self, engine: str) -> Mapping[int, _SourceBlocks]:
        return self._engines.get(engine, {})

    def _weigh(self, blocks_of: _SourceBlocks, chained: int) -> None:
        """Update the weight of the best copy of a block's tokens."""
        blocks_of.weights[chained] = max(
            self._weights.get(medium, 0.0)
            for name in blocks_of.at[chained]
            for medium, _ in blocks_of.blocks[name].media
        )

    def _take_out(self, blocks_of: _SourceBlocks, name: BlockName) -> None:
        """Drop a block with all its copies."""
        chained = blocks_of.blocks.pop(name).chained
        blocks_of.at[chained].remove(name)
        if blocks_of.at[chained]:
            self._weigh(blocks_of, chained)
        else:
            del blocks_of.at[chained], blocks_of.weights[chained]
