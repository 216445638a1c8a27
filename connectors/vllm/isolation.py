"""Approximate KV must never be found by a request that did not ask for the same approximation.

vLLM enters a request's blocks in its prefix cache under the request's block hashes. From the first approximate block on these are
replaced by ones that chain from a salt of everything the blend depends on: plain prompts cannot meet them, and the same blend finds its
own blocks again. Only public list operations of the request are used.
"""

import hashlib
from array import array
from typing import Any

from lmc.blend.segments import Span
from lmc.blend.select import NEEDS_QUESTION, Policy


def salt_of(prompt: list[int], reused: list[Span], policy: Policy) -> bytes:
    """Of a blend: its policy, the documents it reuses, and every token it could have looked at."""
    tokens = prompt if policy.strategy in NEEDS_QUESTION else prompt[: reused[-1].stop]
    said = repr((policy, [(span.start, span.stop) for span in reused])).encode()
    return hashlib.sha256(b"lmc-blend-1 %d " % len(said) + said + array("I", tokens).tobytes()).digest()


def salt(request: Any, block: int, secret: bytes) -> None:
    """Chain the request's hashes from `block` on from another parent."""
    original = request.block_hashes[block]
    del request.block_hashes[block:]
    request.block_hashes.append(hashlib.sha256(secret + original).digest())
    request.update_block_hashes()


def cached_blocks(pool: Any, hashes: list[bytes]) -> int:
    """How many leading blocks the engine's own cache has."""
    for count, found in enumerate(hashes):
        if not pool.get_cached_block(found, [0]):
            return count
    return len(hashes)
