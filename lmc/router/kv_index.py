"""Which blocks of tokens the engines have, as their KV events say. It decodes nothing and opens no connection.

Engines name blocks by hashes of their own. The index hashes the tokens of events again, in the same way as those of a
prompt, so that it depends neither on an engine's kind of hashes nor on their seed.
"""

from array import array
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple

import xxhash

from lmc.router.prefix_hashes import digest, encoded

# llm-d's weights of GPU and CPU memory, and Dynamo's credit for disks, of which llm-d says nothing.
TIER_WEIGHTS: Mapping[str, float] = MappingProxyType({"gpu": 1.0, "cpu": 0.8, "storage": 0.25})

BlockName = int | bytes  # an engine's hash of a block
Medium = tuple[str, int | None]  # where a copy of a block is, and to which group of layers it belongs


class CacheSource(NamedTuple):
    """One cache: that of an engine, or of one of its data-parallel ranks."""

    engine: str
    rank: int = 0


class Run(NamedTuple):
    """What an engine has of a prompt's beginning."""

    score: float = 0.0  # tokens, each by the weight of its tier
    tokens: int = 0


def _block_hash(before: int, tokens: Sequence[int], extra: Sequence[Any]) -> int:
    data = array("q", tokens).tobytes()
    return xxhash.xxh64_intdigest(data + encoded(repr(list(extra))) if extra else data, before)


def _root(block_size: int, adapter: str) -> int:
    return digest(f"{block_size}\0{adapter}")


def token_chain(tokens: Sequence[int], block_size: int, salt: str = "", adapter: str = "") -> list[int]:
    """Return the hashes of a prompt's whole blocks, under which the index has the blocks of events.

    `salt` is the request's cache salt, and `adapter` the name of its LoRA adapter.
    """
    before, hashes = _root(block_size, adapter), list[int]()
    for start in range(0, len(tokens) - block_size + 1, block_size):
        extra = [salt] if salt and not start else []
        before = _block_hash(before, tokens[start : start + block_size], extra)
        hashes.append(before)
    return hashes


def chains(tokens: Sequence[int], salt: str, adapter: str) -> Callable[[int], list[int]]:
    """Return what returns a prompt's `token_chain` for a size of blocks, which is made once for each."""
    return cache(lambda size: token_chain(tokens, size, salt, adapter))


class _Held:
    """A block of one source."""

    __slots__ = ("chained", "media")

    def __init__(self, chained: int) -> None:
        self.chained = chained
        self.media: dict[Medium, int] = {}  # how many copies are on each


class _SourceBlocks:
    """All blocks of one source."""

    __slots__ = ("adapters", "at", "blocks", "sizes", "weights")

    def __init__(self) -> None:
        self.blocks: OrderedDict[BlockName, _Held] = OrderedDict()
        self.at: dict[int, set[BlockName]] = {}  # the same tokens may be in several blocks: exact and blended ones
        self.weights: dict[int, float] = {}  # of the best copy
        self.sizes: set[int] = set()
        self.adapters: set[str] = set()


class BlockIndex:
    """The blocks of all sources. One thread calls the methods, one at a time."""

    def __init__(self, weights: Mapping[str, float] = TIER_WEIGHTS, max_blocks: int = 1 << 20) -> None:
        """`weights` has what a token is worth on each medium, in small letters; others are worth nothing.

        `max_blocks` is how many blocks of a source are kept. More are announced only by an engine that says nothing of
        blocks which it has dropped; then the ones that it stored first are dropped here.
        """
        self._weights, self._max_blocks = dict(weights), max_blocks
        self._engines: dict[str, dict[int, _SourceBlocks]] = {}  # by engine and rank
        self.unreadable = 0  # batches of events
        self.unplaced = 0  # blocks that were announced behind one which the index does not know, and are not in it

    def drop(self, source: CacheSource) -> None:
        """Drop all that is known of a source."""
        ranks = self._engines.get(source.engine, {})
        ranks.pop(source.rank, None)
        if not ranks:
            self._engines.pop(source.engine, None)

    def forget(self, engine: str) -> None:
        """Drop all sources of an engine."""
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
        """Note that blocks which follow each other are on a medium, each in one more copy than before.

        vLLM may compute a block that it has once more, and keep both: it says of each copy that it was stored, and of
        each that it was removed.

        `extra_keys` is what the hash of each block covers beside tokens: the adapter's name, and in the first block of
        a prompt its cache salt. Blocks with anything else match no text.
        """
        of = self._of(source)
        if parent is not None and parent not in of.blocks:
            self.unplaced += len(names)
            return
        before = _root(block_size, adapter) if parent is None else of.blocks[parent].chained
        of.sizes.add(block_size)
        if adapter:
            of.adapters.add(adapter)
        for place, name in enumerate(names):
            extra = list((extra_keys[place] if extra_keys else None) or ())
            if adapter and extra[:1] == [adapter]:
                del extra[0]
            before = _block_hash(before, tokens[place * block_size : (place + 1) * block_size], extra)
            held = of.blocks.setdefault(name, _Held(before))
            held.media[medium] = held.media.get(medium, 0) + 1
            of.at.setdefault(held.chained, set()).add(name)
            self._weigh(of, held.chained)
        while len(of.blocks) > self._max_blocks:
            self._take_out(of, next(iter(of.blocks)))

    def removed(self, source: CacheSource, names: Sequence[BlockName], medium: Medium = ("gpu", None)) -> None:
        """Note that a copy of each of these blocks has left a medium."""
        of = self._of(source)
        for name in names:
            if (held := of.blocks.get(name)) is not None:
                copies = held.media.pop(medium, 0)
                if copies > 1:
                    held.media[medium] = copies - 1
                elif held.media:
                    self._weigh(of, held.chained)
                else:
                    self._take_out(of, name)

    def cleared(self, source: CacheSource) -> None:
        """Note that a source has dropped all blocks: on all media, because the event names none."""
        self.drop(source)

    def blocks(self, source: CacheSource) -> dict[BlockName, set[Medium]]:
        """Return all blocks of a source, and where they are."""
        of = self._ranks(source.engine).get(source.rank)
        return {name: set(held.media) for name, held in of.blocks.items()} if of else {}

    def __len__(self) -> int:
        return sum(map(self.count, self._engines))

    def count(self, engine: str) -> int:
        """Return how many blocks are known of an engine."""
        return sum(len(of.blocks) for of in self._ranks(engine).values())

    def block_sizes(self, engine: str) -> set[int]:
        """Return the sizes of an engine's blocks, as far as events have said them."""
        return set().union(*(of.sizes for of in self._ranks(engine).values()))

    def is_adapter(self, model: str) -> bool:
        """Return whether events have named a LoRA adapter so."""
        return any(model in of.adapters for ranks in self._engines.values() for of in ranks.values())

    def longest(self, engine: str, chain: Callable[[int], Sequence[int]]) -> Run:
        """Return what an engine has of a prompt; `chain` returns the prompt's `token_chain` for a size of blocks.

        Of several data-parallel ranks, the one that has most counts.
        """
        runs = [self._run(of, size, chain(size)) for of in self._ranks(engine).values() for size in of.sizes]
        return max(runs, default=Run())

    def _run(self, of: _SourceBlocks, size: int, hashes: Sequence[int]) -> Run:
        score, blocks = 0.0, 0
        for chained in hashes:
            weight = of.weights.get(chained)
            if weight is None:
                break
            score, blocks = score + weight * size, blocks + 1
        return Run(score, blocks * size)

    def _of(self, source: CacheSource) -> _SourceBlocks:
        ranks = self._engines.setdefault(source.engine, {})
        return ranks.get(source.rank) or ranks.setdefault(source.rank, _SourceBlocks())

    def _ranks(self, engine: str) -> Mapping[int, _SourceBlocks]:
        return self._engines.get(engine, {})

    def _weigh(self, of: _SourceBlocks, chained: int) -> None:
        """Note the weight of the best copy of some tokens."""
        of.weights[chained] = max(
            self._weights.get(medium, 0.0) for name in of.at[chained] for medium, _ in of.blocks[name].media
        )

    def _take_out(self, of: _SourceBlocks, name: BlockName) -> None:
        """Drop a block with all its copies."""
        chained = of.blocks.pop(name).chained
        of.at[chained].remove(name)
        if of.at[chained]:
            self._weigh(of, chained)
        else:
            del of.at[chained], of.weights[chained]
