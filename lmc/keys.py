"""Chunk keys, which identify a chunk in every process and on every machine.

*Exact* keys chain from the start of a prompt. *Document* keys chain only inside a document, so a document is stored
once for all prompts that contain it. An exact key never equals a document key, so approximate KV is never served as
exact. Both chains start from a namespace, which contains everything that KV bytes depend on besides tokens.
"""

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from pathlib import Path
from typing import Any, NewType

from lmc.errors import InputError
from lmc.shapes import KVShape

ChunkKey = NewType("ChunkKey", bytes)  # 32 bytes, sha256
FORMAT = 1  # version of the format of chunks and records; chunks of another version are never found
TENANT_DIGITS = 16  # hexadecimal digits of a tenant's name
LONGEST_MODEL = 100  # characters of a model's name
LONGEST_NAME = 500  # characters of the name that a user gives a document
UNIT_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}  # seconds in the units of durations such as 7d
MAX_TTL_SECONDS = 100 * 365 * 86400  # time limits of documents are shorter


class RecordKind(Enum):
    """The kinds of KV in a chunk, and where each kind may be used."""

    PAGES = "pages"  # exact, in the layout of an engine's pages; used only after the same tokens
    PREFIX = "prefix"  # exact, as keys and values [T, H, D]; used only after the same tokens
    DOCUMENT = "document"  # computed alone, as keys and values [T, H, D]; used anywhere, approximately


def model_label(name: str) -> str:
    """Return a model's name as records and a cache server have it: a path without its directories, cut to length."""
    return (Path(name).name if name.startswith(("/", ".")) else name)[:LONGEST_MODEL]


@dataclass(frozen=True, slots=True, kw_only=True)
class Namespace:
    """Everything that KV bytes depend on besides tokens. A change in any field changes the keys."""

    model: str  # identifies config and weights; never a path
    dtype: str
    layers: int
    kv_heads: int  # KV heads of one rank
    head_dim: int | str  # of keys; text such as 64+512 if that of values differs
    rope: str
    chunk_size: int
    tensor_parallel: int = 1
    layout: str = ""  # layout of an engine's pages
    kind: str = ""  # kind of the records (`RecordKind`), and the prefix after which documents are learned
    cache_salt: str = ""  # tenants share chunks only if they have the same salt

    @classmethod
    def of(cls, shape: KVShape, **others: Any) -> "Namespace":
        """Return the namespace for KV of a shape, with the values of the other fields."""
        heads, dim = shape.kv_heads, "+".join(dict.fromkeys(map(str, shape.dims)))
        return cls(dtype=str(shape.dtype), layers=shape.layers, kv_heads=heads, head_dim=dim, **others)

    def digest(self) -> bytes:
        """Return the SHA-256 of all fields (32 bytes).

        Each field is hashed with its length, so different namespaces never hash the same bytes.
        """
        h = hashlib.sha256(b"lmc-%d" % FORMAT)
        for name in self.__slots__:
            value = str(getattr(self, name)).encode()
            h.update(b"%s=%d:%s;" % (name.encode(), len(value), value))
        return h.digest()


def tenant_of(cache_salt: str) -> str:
    """Return the name of a tenant, which does not reveal the salt; empty without a salt."""
    return hashlib.sha256(b"tenant" + cache_salt.encode()).hexdigest()[:TENANT_DIGITS] if cache_salt else ""


def tokens_digest(tokens: Sequence[int]) -> str:
    """Return the SHA-256 of token ids as uint32 little-endian, in hexadecimal digits.

    It identifies a document in every model and for every tenant. Raises `InputError` for a token that is not a uint32.
    """
    return hashlib.sha256(check_tokens(tokens).tobytes()).hexdigest()


def exact_keys(namespace: bytes, tokens: Sequence[int], chunk_size: int) -> list[ChunkKey]:
    """Return the keys of all full chunks of a prompt, and of a partly full chunk at its end.

    `key_i = sha256(key_{i-1} ‖ tokens as uint32 little-endian)`, `key_{-1} = sha256(namespace)`.
    Raises `InputError` for a token that is not a uint32.
    """
    return _chain(exact_root(namespace), tokens, chunk_size)


def exact_root(namespace: bytes) -> ChunkKey:
    """Return the start of a chain of exact keys, `key_{-1}`."""
    return ChunkKey(hashlib.sha256(namespace).digest())


def next_key(parent: ChunkKey, tokens: Sequence[int]) -> ChunkKey:
    """Return the key of the chunk with these tokens after the chunk `parent`."""
    return _chain(parent, tokens, len(tokens))[0]


def document_keys(namespace: bytes, tokens: Sequence[int], chunk_size: int) -> list[ChunkKey]:
    """Return the keys of a document's chunks.

    A key depends only on the namespace and on the document's tokens up to the chunk's end.
    """
    return _chain(hashlib.sha256(b"document" + namespace).digest(), tokens, chunk_size)


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the length of the common prefix of two token sequences."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def chunk_bounds(tokens: int, chunk_size: int) -> list[tuple[int, int]]:
    """Return the half-open token ranges of the chunks of `tokens` tokens; the last chunk may be partly full."""
    return list(pairwise([*range(0, tokens, chunk_size), tokens]))


def check_tokens(tokens: Sequence[int]) -> "array[int]":
    """Return token ids as uint32; raise `InputError` for a token that is not a uint32."""
    try:
        return array("I", tokens)
    except (OverflowError, TypeError) as error:
        raise InputError(f"token ids must be integers from 0 to 2**32 - 1: {error}") from error


def _chain(parent: bytes, tokens: Sequence[int], chunk_size: int) -> list[ChunkKey]:
    packed = memoryview(check_tokens(tokens)).cast("B")  # 4 bytes a token, little-endian on all supported machines
    keys, step, sha256 = [], 4 * chunk_size, hashlib.sha256
    for start in range(0, len(packed), step):
        parent = sha256(parent + packed[start : start + step]).digest()
        keys.append(ChunkKey(parent))
    return keys
