"""Hashes of the blocks of a prompt, each of which covers all blocks before it, and tables of them."""

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

import xxhash

CHARACTERS_PER_TOKEN = 4  # what the Gateway API Inference Extension assumes; only estimates for metrics depend on it


def encoded(text: str) -> bytes:
    """Return a text as UTF-8. JSON may contain halves of surrogate pairs, which must not end a request here."""
    return text.encode("utf-8", "surrogatepass")


def digest(text: str, seed: int = 0) -> int:
    """Return the 64-bit hash of a text, which is the same in every process."""
    return xxhash.xxh64_intdigest(encoded(text), seed)


def chained(blocks: Iterable[bytes], scope: str) -> list[int]:
    """Return the hash of each block together with all blocks before it, and with the scope."""
    before, hashes = digest(scope), list[int]()
    for block in blocks:
        before = xxhash.xxh64_intdigest(block, before)
        hashes.append(before)
    return hashes


def character_blocks(text: str, size: int) -> list[bytes]:
    """Cut a text after each `size` characters. The last block may be shorter."""
    return [encoded(text[start : start + size]) for start in range(0, len(text), size)]


def byte_blocks(data: bytes, size: int) -> list[bytes]:
    """Cut bytes into whole blocks; what is left at the end is in none."""
    return [data[start : start + size] for start in range(0, len(data) - size + 1, size)]


def leading(hashes: Sequence[int], holds: Callable[[int], bool]) -> int:
    """Return how many hashes at the beginning are held, by O(log n) questions.

    This needs that whoever holds a block holds all blocks before it.
    """
    return bisect_left(range(len(hashes)), True, key=lambda place: not holds(hashes[place]))


class PrefixTable:
    """Which engines have been sent which blocks. The block that was used least recently goes when there are too many.

    It is a trie of blocks, kept flat: a chained hash stands for a path from the root. Blocks are used from the last to
    the first one, so that the oldest block never has another one below it, and an engine that holds a block holds all
    blocks before it.
    """

    def __init__(self, capacity: int) -> None:
        """`capacity` is the number of blocks, of all scopes together."""
        self._capacity = capacity
        self._blocks: OrderedDict[int, tuple[float, dict[str, None]]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def add(self, hashes: Sequence[int], engine: str, now: float = 0.0) -> Callable[[], None]:
        """Note that an engine has the blocks of a prompt, and return what takes back those that it did not have."""
        new = hashes[self.leading(hashes, engine) :]
        for block in reversed(hashes):
            _, engines = self._blocks.pop(block, (now, {}))
            engines[engine] = None
            self._blocks[block] = (now, engines)
        while len(self._blocks) > self._capacity:
            self._blocks.popitem(last=False)
        return lambda: self._drop(new, engine)

    def leading(self, hashes: Sequence[int], engine: str) -> int:
        """Return how many blocks at the beginning of a prompt an engine has."""
        return leading(hashes, lambda block: block in self._blocks and engine in self._blocks[block][1])

    def drop_older(self, time: float) -> None:
        """Drop the blocks that have not been used since a time."""
        while self._blocks and next(iter(self._blocks.values()))[0] < time:
            self._blocks.popitem(last=False)

    def forget(self, engine: str) -> None:
        """Drop an engine, and the blocks that no other one has."""
        self._drop(list(self._blocks), engine)

    def _drop(self, blocks: Iterable[int], engine: str) -> None:
        for block in blocks:
            if block in self._blocks:
                engines = self._blocks[block][1]
                engines.pop(engine, None)
                if not engines:
                    del self._blocks[block]
