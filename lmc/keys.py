"""Chunk keys: what names a chunk, in every process and on every machine.

Two domains that never meet, so that approximate KV can never be served as exact:
*exact* keys chain from the start of a prompt; *document* keys chain only inside a document, so that a document is stored
once whatever stands around it. Both chains start from a namespace, which names everything that must agree.
"""

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NewType

from lmc.errors import InputError

ChunkKey = NewType("ChunkKey", bytes)  # 32 bytes, sha256
FORMAT = 1  # of chunks and records; another number never matches


@dataclass(frozen=True, slots=True, kw_only=True)
class Namespace:
    """Everything that must agree for KV bytes to mean the same: a change in any field makes other keys."""

    kind: str  # "tokens" [K, T, H, D], or "pages" as the engine lays them out
    model: str  # fingerprint of config and weights, never a path
    dtype: str
    layers: int
    kv_heads: int
    head_dim: int
    rope: str
    chunk_size: int
    tensor_parallel: int = 1
    lora: str = ""
    cache_salt: str = ""  # tenants share bytes only if they share this

    def digest(self) -> bytes:
        """32 bytes; fields are length-prefixed, so that no two namespaces run into each other."""
        h = hashlib.sha256(b"lmc-%d" % FORMAT)
        for name in self.__slots__:
            value = str(getattr(self, name)).encode()
            h.update(b"%s=%d:%s;" % (name.encode(), len(value), value))
        return h.digest()


def exact_keys(namespace: bytes, tokens: Sequence[int], chunk_size: int) -> list[ChunkKey]:
    """Keys of all full chunks of a prompt, and of a partly full one at its end.

    `key_i = sha256(key_{i-1} ‖ tokens as uint32 little-endian)`, `key_{-1} = sha256(namespace)`.
    Raises `InputError` for a token that is no uint32.
    """
    return _chain(exact_root(namespace), tokens, chunk_size)


def exact_root(namespace: bytes) -> ChunkKey:
    """What the first exact key chains to: `key_{-1}`."""
    return ChunkKey(hashlib.sha256(namespace).digest())


def next_key(parent: ChunkKey, tokens: Sequence[int]) -> ChunkKey:
    """The key of the chunk `tokens` behind the chunk `parent`."""
    return _chain(parent, tokens, len(tokens))[0]


def document_keys(namespace: bytes, tokens: Sequence[int], chunk_size: int) -> list[ChunkKey]:
    """Keys of a document's chunks: they depend on the document from its start to the chunk's end, and on nothing else."""
    return _chain(hashlib.sha256(b"document" + namespace).digest(), tokens, chunk_size)


def chunk_bounds(tokens: int, chunk_size: int) -> list[tuple[int, int]]:
    """Half-open token ranges of the chunks of `tokens` tokens; the last may be partly full."""
    edges = [*range(0, tokens, chunk_size), tokens]
    return list(pairwise(edges))


def check_tokens(tokens: Sequence[int]) -> "array[int]":
    """Token ids as uint32; raise `InputError` for what is none."""
    try:
        return array("I", tokens)
    except (OverflowError, TypeError) as error:
        raise InputError(f"token ids must be integers from 0 to 2**32 - 1: {error}") from error


def _chain(parent: bytes, tokens: Sequence[int], chunk_size: int) -> list[ChunkKey]:
    packed = memoryview(check_tokens(tokens)).cast("B")  # 4 bytes a token, little-endian on every machine we run on
    keys, step, sha256 = [], 4 * chunk_size, hashlib.sha256
    for start in range(0, len(packed), step):
        h = sha256(parent)
        h.update(packed[start : start + step])
        parent = h.digest()
        keys.append(ChunkKey(parent))
    return keys
