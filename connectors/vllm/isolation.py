"""Isolation: approximate KV is never found by a request that did not ask for the same approximation.

vLLM keeps a request's blocks in its prefix cache under the request's block hashes. From the first approximate block on,
these are replaced by hashes that chain from a salt of everything that the blend depends on. So plain prompts do not
find these blocks, and the same blend finds them again. Only public list operations of the request are used.
"""

import hashlib
from array import array
from collections.abc import Sequence
from typing import Any

from lmc.blend.strategies import NEEDS_QUESTION, RecomputePolicy
from lmc.engine import Piece


def salt_of(prompt: Sequence[int], reused: Sequence[Piece], policy: RecomputePolicy) -> bytes:
    """Return the salt of a blend, from its policy, the pieces that it reuses, and every token that it can depend on."""
    tokens = prompt if policy.strategy in NEEDS_QUESTION else prompt[: reused[-1].stop]
    given = repr((policy, [(piece.at, piece.stop) for piece in reused])).encode()
    return hashlib.sha256(b"lmc-blend-2 %d " % len(given) + given + array("I", tokens).tobytes()).digest()


def salt(request: Any, block: int, secret: bytes) -> None:
    """Replace the request's hashes from `block` on by hashes that depend on `secret`."""
    original = request.block_hashes[block]
    del request.block_hashes[block:]
    request.block_hashes.append(hashlib.sha256(secret + original).digest())
    request.update_block_hashes()


def cached_blocks(pool: Any, hashes: list[bytes]) -> int:
    """Return how many leading blocks are in the engine's own cache."""
    for count, found in enumerate(hashes):
        if not pool.get_cached_block(found, [0]):
            return count
    return len(hashes)
