"""Codecs: a tier that wraps another tier and compresses its records without loss.

The exponents of the numbers in a KV cache repeat; their mantissas do not. So items of k bytes are split into k planes
(byte j of every item, the lowest byte first) before LZ4 compresses them. Records name this codec `planes<k>+lz4`. A
part of `stored_part` bytes is encoded as

    u32 × k   the length of each plane's block; a block as long as its plane is the plane itself
    blocks    LZ4 blocks or planes, without gaps
    zeros     up to whole blocks of 4096 bytes

The inner tier computes its checksums over the encoded bytes. No encoded part can make lmc allocate more memory than the
size of a part.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from lmc.errors import ConfigError, CorruptRecord
from lmc.keys import ChunkKey
from lmc.shapes import ALIGN, GIB, aligned
from lmc.storage.tiers.record import (
    NO_CODEC,
    RecordMeta,
    encode_header,
    pages,
    removed_if_corrupt,
    scratch,
    split_parts,
)
from lmc.storage.tiers.tier import RecordReader, Tier, Wrapped, Written

PART_LIMIT = GIB  # bytes of a part in memory; LZ4 blocks and 32-bit lengths allow little more
ITEMS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # bytes of an item -> a dtype of that size
NAMES = {planes: f"planes{planes}+lz4" for planes in ITEMS}
PLANES = {name: planes for planes, name in NAMES.items()}
LENGTH = 4  # bytes of the length of a block


class Coded(Wrapped):
    """Encodes written records with one codec, and decodes read records with the codec that each record names."""

    def __init__(self, inner: Tier, codec: str, item_bytes: int) -> None:
        """Wrap `inner` with the codec "none" or "planes" (of items of `item_bytes` bytes).

        Raises `ConfigError` if the codec is unknown or its package is missing.
        """
        super().__init__(inner)
        planes = {NO_CODEC: 0, "planes": item_bytes}
        if codec not in planes:
            raise ConfigError(f"codec {codec!r}: use one of {', '.join(planes)}")
        assert item_bytes in ITEMS
        self.planes = planes[codec]
        if self.planes:
            lz4_block()

    def open(self, key: ChunkKey) -> RecordReader | None:
        """Open a record. One with a codec or sizes that lmc never writes is deleted, and raises `CorruptRecord`."""
        reader = self.inner.open(key)
        if reader is None or (reader.meta.codec == NO_CODEC and not reader.meta.sizes):
            return reader
        try:
            with removed_if_corrupt(self.inner.delete, key):
                if reader.meta.codec not in PLANES:
                    raise CorruptRecord(f"parts in the unknown codec {reader.meta.codec[:40]!r}")
                # An encoded part is larger than a raw part by at most the lengths of its blocks.
                if reader.meta.stored_part > PART_LIMIT or max(reader.meta.stored) > reader.meta.stored_part + ALIGN:
                    raise CorruptRecord("impossible sizes of encoded parts")
            lz4_block()
        except ConfigError as error:  # The record is valid, but this process cannot decode it.
            reader.close()
            raise OSError(str(error)) from error
        except CorruptRecord:
            reader.close()
            raise
        return CodedReader(reader, self.inner)

    def write(self, meta: RecordMeta, parts: Sequence[memoryview]) -> Written:
        """Write the encoded record, or the raw one if encoding does not make it smaller."""
        assert (meta.codec, meta.sizes) == (NO_CODEC, ())
        if not self.planes or meta.stored_part > PART_LIMIT:
            return self.inner.write(meta, parts)
        if self.inner.contains([meta.key])[0]:
            return Written.PRESENT
        return self.inner.write(*encode_record(meta, parts, self.planes))


class CodedReader:
    """An open record that is decoded while it is read. Its metadata is that of a raw record."""

    def __init__(self, inner: RecordReader, tier: Tier) -> None:
        self.meta = replace(inner.meta, codec=NO_CODEC, sizes=())
        self._tier, self._inner = tier, inner
        self.request, self.close = inner.request, inner.close

    def read(self, first: int, count: int, into: Sequence[memoryview]) -> None:
        """Read parts and decode them into `into`. A part that cannot be decoded deletes the record."""
        sizes = self._inner.meta.stored[first : first + count]
        encoded = scratch(sum(sizes))
        self._inner.read(first, count, [encoded])
        views = split_parts(into, (self.meta.stored_part,) * count)
        with removed_if_corrupt(self._tier.delete, self.meta.key):
            for part, view in zip(split_parts([encoded], sizes), views, strict=True):
                decode_part(part, view, PLANES[self._inner.meta.codec])


def encode_record(
    meta: RecordMeta, parts: Sequence[memoryview], planes: int
) -> tuple[RecordMeta, Sequence[memoryview]]:
    """Return the encoded record, in memory that direct I/O accepts, or the raw record if encoding saves nothing."""
    raw = meta.offset(meta.parts)
    out = pages(raw)
    sizes: list[int] = []
    for view in split_parts(parts, meta.stored):
        part = encode_part(view, planes)
        start, size = sum(sizes), aligned(sum(map(len, part)))
        if start + size > raw:
            return meta, parts
        for piece in part:
            out[start : start + len(piece)] = piece
            start += len(piece)
        sizes.append(size)
    coded = replace(meta, codec=NAMES[planes], sizes=tuple(sizes))
    return (coded, [out[: sum(sizes)]]) if _record_bytes(coded) < _record_bytes(meta) else (meta, parts)


def encode_part(view: memoryview, planes: int) -> list[memoryview | bytes]:
    """Return the pieces of an encoded part: the lengths, then the blocks.

    The blocks may be views of `view` and of this thread's `scratch`. They are valid until `scratch` is used again.
    """
    compress, length = lz4_block().compress, len(view) // planes
    split = view if planes == 1 else _split(view, planes)
    blocks: list[memoryview | bytes] = []
    for start in range(0, len(view), length):
        plane = split[start : start + length]
        block = compress(plane, mode="fast", store_size=False)
        blocks.append(block if len(block) < length else plane)
    return [b"".join(len(block).to_bytes(LENGTH, "little") for block in blocks), *blocks]


def decode_part(encoded: memoryview, into: memoryview, planes: int) -> None:
    """Decode a part into `into`. Raises `CorruptRecord` if the part does not fit exactly."""
    length, end = len(into) // planes, LENGTH * planes
    blocks = []
    for at in range(0, end, LENGTH):
        size = int.from_bytes(encoded[at : at + LENGTH], "little")
        if not 0 < size <= length:
            raise CorruptRecord(f"a block of {size} bytes for a plane of {length}")
        blocks.append(slice(end, end + size))
        end += size
    if aligned(end) != len(encoded):
        raise CorruptRecord(f"blocks of {end} bytes in a part of {len(encoded)}")
    _join([_plane(encoded[block], length) for block in blocks], into)


def _plane(block: memoryview, length: int) -> torch.Tensor:
    """Return the plane that a block encodes: uint8 `[length]`."""
    if len(block) == length:
        return torch.frombuffer(block, dtype=torch.uint8)
    lz4 = lz4_block()
    try:
        plane = lz4.decompress(block, uncompressed_size=length, return_bytearray=True)
    except lz4.LZ4BlockError as error:
        raise CorruptRecord(f"not an LZ4 block: {error}") from error
    if len(plane) != length:
        raise CorruptRecord(f"a plane of {len(plane)} bytes, not {length}")
    return torch.frombuffer(plane, dtype=torch.uint8)


# Planes are split and joined by shifting and adding whole items, at 7 to 20 GB/s (1 MiB in cache, one core of an AMD
# EPYC; bfloat16 is faster than float32). Copying every k-th byte reaches only 0.6 to 0.9 GB/s for splitting and 3.7
# GB/s for joining.
def _split(view: memoryview, planes: int) -> memoryview:
    """Split `[n × k]` bytes into `[k, n]`, in this thread's `scratch`."""
    raw = torch.frombuffer(view, dtype=torch.uint8)
    items = (raw if raw.data_ptr() % planes == 0 else raw.clone()).view(ITEMS[planes])
    split = scratch(len(view))
    rows = torch.frombuffer(split, dtype=torch.uint8).view(planes, -1)
    for j in range(planes):
        rows[j].copy_(items >> (8 * j))
    return split


def _join(planes: Sequence[torch.Tensor], into: memoryview) -> None:
    """Join k planes `[n]` to `[n × k]` bytes."""
    raw = torch.frombuffer(into, dtype=torch.uint8)
    out = raw if raw.data_ptr() % len(planes) == 0 else torch.empty_like(raw)
    items = out.view(ITEMS[len(planes)])
    items.copy_(planes[0])
    for j, plane in enumerate(planes[1:], 1):
        items.add_(plane, alpha=1 << (8 * j))
    if out is not raw:
        raw.copy_(out)


def _record_bytes(meta: RecordMeta) -> int:
    """Return the size of a record in bytes, including its header."""
    return len(encode_header(replace(meta, checksums=(0,) * meta.parts))) + meta.offset(meta.parts)


def lz4_block() -> Any:
    """Return the module `lz4.block`, whose functions release the GIL."""
    try:
        import lz4.block
    except ImportError as error:
        raise ConfigError("codecs need the package lz4: pip install lz4") from error
    return lz4.block
