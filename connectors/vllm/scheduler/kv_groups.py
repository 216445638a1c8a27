"""The engine's KV cache groups: layers that share a block table.

vLLM puts layers with a sliding window and layers that see the whole prompt into different groups. A request has a block
table in each group. With a window, only the blocks that the next token sees are kept; in the place of the others, the
table has the null block. All groups take their blocks from one pool, and here have blocks of the same size.

lmc needs more blocks than the engine keeps: a blend computes tokens all over the prompt, and each sees its own window.
lmc borrows these blocks until the blend ends.

Layers with a state (linear attention, Mamba) have groups, too. The page of a block is the state after its last token,
and the engine has it only where one of its steps has ended. The next token sees that state alone. So it is like a
window of two tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lmc.connectors.vllm.messages import NULL, Tables, passed_blocks


@dataclass(frozen=True, slots=True)
class Borrowed:
    """Blocks that are borrowed for a request, and the block tables that they complete."""

    tables: Tables
    blocks: Sequence[Any]


@dataclass(frozen=True, slots=True)
class KVGroups:
    """The groups of one engine, and its block pool."""

    pool: Any
    block_size: int  # number of tokens in a block
    windows: tuple[int, ...] = (0,)  # by group, how many tokens a token sees, including itself; 0 for all
    states: frozenset[int] = frozenset()  # groups whose pages are states after the last token of a block

    @property
    def count(self) -> int:
        """The number of groups."""
        return len(self.windows)

    @property
    def all(self) -> list[int]:
        """The numbers of all groups."""
        return list(range(self.count))

    @property
    def without_window(self) -> list[int]:
        """The numbers of the groups in which a token sees all tokens before it."""
        return [group for group, window in enumerate(self.windows) if not window]

    @property
    def windowed(self) -> bool:
        """Whether the engine keeps only some of a request's blocks in at least one group."""
        return any(self.windows)

    def blocks(self, tokens: int) -> int:
        """Return how many blocks `tokens` tokens take in one group without a window."""
        return -(-tokens // self.block_size)

    def kept(self, tokens: int) -> int:
        """Return how many blocks the engine keeps, in all groups, for a prompt of `tokens` tokens."""
        whole = self.blocks(tokens)
        return sum(min(whole, self.blocks(window) + 1) if window else whole for window in self.windows)

    def first_seen(self, group: int, position: int) -> int:
        """Return the index of the first block of a group that the token at `position` sees."""
        window = self.windows[group]
        return max(0, position - window + 1) // self.block_size if window else 0

    def loadable(self, tokens: int) -> int:
        """Return how many of the `tokens` tokens of a request may be loaded, which is at most one less.

        The engine keeps the blocks that the token after the loaded ones sees. If all tokens are loaded, it computes the
        last one again, which may see a block more.
        """
        last = max(0, tokens - 1)
        drops = any(self.first_seen(group, tokens) > self.first_seen(group, last) for group in self.all)
        return last if drops else tokens

    def cached(self, hashes: Sequence[bytes]) -> int:
        """Return after how many of these blocks the engine can continue from its own prefix cache."""
        found = self.cached_in(self.without_window, hashes)
        windowed = [group for group, window in enumerate(self.windows) if window]
        while windowed:
            shorter = min(self._cached_in_window(group, hashes[:found]) for group in windowed)
            if shorter == found:
                break
            found = shorter
        return found

    def cached_tokens(self, hashes: Sequence[bytes]) -> int:
        """Return after how many tokens of these blocks the engine can continue from its own prefix cache."""
        return self.cached(hashes) * self.block_size

    def cached_in(self, groups: Sequence[int], hashes: Sequence[bytes]) -> int:
        """Return how many of these blocks, from the first on, are in the engine's prefix cache in all of `groups`."""
        absent = (n for n, one in enumerate(hashes) if groups and not self.pool.get_cached_block(one, groups))
        return next(absent, len(hashes))

    def cached_block(self, group: int, block_hash: bytes) -> int:
        """Return the number of the block of a group that the engine has cached under a hash; the null block if none."""
        found = self.pool.get_cached_block(block_hash, [group])
        return int(found[0].block_id) if found else NULL

    def _cached_in_window(self, group: int, hashes: Sequence[bytes]) -> int:
        """Return how many blocks end with a cached window, which may be the prompt's beginning."""
        need, run = self.blocks(self.windows[group] - 1), 0
        for at in range(len(hashes) - 1, -1, -1):
            run = run + 1 if self.pool.get_cached_block(hashes[at], [group]) else 0
            if run >= need:
                return at + run
        return run

    def take(self, tokens: int) -> list[list[Any]]:
        """Return free blocks for `tokens` tokens, by group."""
        count = self.blocks(tokens)
        blocks = self.pool.get_new_blocks(self.count * count)
        return [blocks[group * count : (group + 1) * count] for group in range(self.count)]

    def lacking(self, exact: int, stop: int) -> int:
        """Return about how many blocks a blend of the positions `[exact, stop)` borrows."""
        return sum(max(0, self.first_seen(group, stop) - self.first_seen(group, exact)) for group in range(self.count))

    def completed(
        self, tables: Sequence[Sequence[int]], hashes: Sequence[bytes], local: int, exact: int, stop: int
    ) -> Borrowed | None:
        """Return the tables of a request with every block that the tokens of the positions `[exact, stop)` see.

        `tables` are those of the engine, which has the first `local` tokens in its prefix cache under `hashes`. Returns
        None if such a block has been evicted, or if too few blocks are free.
        """
        borrowed, first_new, end = list[Any](), local // self.block_size, self.blocks(stop)
        # The engine has allocated no block for a last token that is not loaded; see `loadable`.
        whole = [[*table, *[NULL] * (end - len(table))] for table in tables]
        lacking = [
            (group, at)
            for group, table in enumerate(tables)
            for at in (*range(self.first_seen(group, exact), passed_blocks(table)), *range(len(table), end))
        ]
        # New blocks may take the place of cached ones, so the cached blocks of all groups are held first.
        for group, at in (place for place in lacking if place[1] < first_new):
            cached = self.pool.get_cached_block(hashes[at], [group])
            if not cached:
                self.release(borrowed)
                return None
            self.pool.touch(cached)
            borrowed += cached
            whole[group][at] = cached[0].block_id
        fresh = [place for place in lacking if place[1] >= first_new]
        if len(fresh) > self.pool.get_num_free_blocks():
            self.release(borrowed)
            return None
        new = self.pool.get_new_blocks(len(fresh)) if fresh else []
        for (group, at), block in zip(fresh, new, strict=True):
            whole[group][at] = block.block_id
        return Borrowed(tuple(map(tuple, whole)), [*borrowed, *new])

    def cached_blocks(self, hashes: Sequence[bytes]) -> list[Any]:
        """Return the blocks that the only group has cached under these hashes; none if one has been evicted."""
        found = [self.pool.get_cached_block(one, self.all) for one in hashes]
        return [block for (block,) in found] if all(found) else []

    def give_back(self, borrowed: Borrowed, request: Any, stop: int) -> None:
        """Return the blocks that were borrowed for a request.

        Those before position `stop` are added to the engine's prefix cache, as if the engine had computed them.
        """
        try:
            given = {block.block_id for block in borrowed.blocks if block.block_hash is None}
            for group, table in enumerate(borrowed.tables):
                new = [at for at, number in enumerate(table[: stop // self.block_size]) if number in given]
                if new:
                    blocks = [self.pool.blocks[number] for number in table]
                    self.pool.cache_full_blocks(request, blocks, new[0], new[-1] + 1, self.block_size, group)
        finally:
            self.release(borrowed.blocks)

    def release(self, blocks: Sequence[Any]) -> None:
        """Release blocks, the last ones first, so that the engine evicts these first."""
        self.pool.free_blocks(reversed(blocks))


def numbers_of(blocks: Sequence[Sequence[Any]]) -> Tables:
    """Return the block tables of blocks by group."""
    return tuple(tuple(block.block_id for block in of_group) for of_group in blocks)
