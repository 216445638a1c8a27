"""Hashes of a prompt's blocks. Each hash covers all blocks before it as well."""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence

import xxhash

CHARACTERS_PER_TOKEN = 4  # as the Gateway API Inference Extension assumes; an estimate where tokens are unknown


def encoded(text: str) -> bytes:
    """Return a text as UTF-8. Halves of surrogate pairs are encoded too: JSON may contain them."""
    return text.encode("utf-8", "surrogatepass")


def digest(text: str, seed: int = 0) -> int:
    """Return the 64-bit hash of a text. It is the same in every process."""
    return xxhash.xxh64_intdigest(encoded(text), seed)


def chained(blocks: Iterable[bytes], scope: str) -> list[int]:
    """Return a hash for each block that covers the scope, all blocks before it, and the block."""
    before, hashes = digest(scope), list[int]()
    for block in blocks:
        before = xxhash.xxh64_intdigest(block, before)
        hashes.append(before)
    return hashes


def character_blocks(text: str, size: int) -> list[bytes]:
    """Split a text into blocks of `size` characters. The last block may be shorter."""
    return [encoded(text[start : start + size]) for start in range(0, len(text), size)]


def byte_blocks(data: bytes, size: int) -> list[bytes]:
    """Split bytes into whole blocks of `size` bytes, and drop the rest."""
    return [data[start : start + size] for start in range(0, len(data) - size + 1, size)]


def leading(hashes: Sequence[int], holds: Callable[[int], bool]) -> int:
    """Return how many leading hashes are held, with O(log n) calls of `holds`.

    A holder of a block must hold all blocks before it.
    """
    return bisect_left(range(len(hashes)), True, key=lambda place: not holds(hashes[place]))
