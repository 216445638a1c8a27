"""The record: a chunk as one safetensors file, which any safetensors tool can open.

    0     u64 length | JSON header, padded with spaces to whole blocks of 4096 bytes
    4096  part 0 | part 1 | …      one U8 tensor `layer.i` per part, each padded with zeros to whole blocks

Parts are of one size, unless a codec made them smaller: then the header has the size of each.

`__metadata__` holds what the store needs and a checksum (xxh3-64) per part and of itself. A header is accepted only if
encoding what it says gives the same bytes again, so a flipped bit anywhere in a record is an error or is found by a checksum.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from itertools import accumulate, pairwise

import xxhash

from lmc.errors import CorruptRecord
from lmc.keys import FORMAT, ChunkKey
from lmc.shapes import ALIGN, aligned

HEADER_LIMIT = 1 << 20  # bytes; a hostile length must not make us allocate
PARTS_LIMIT = 4096
PART_LIMIT = 1 << 40  # bytes
NO_CODEC = "none"
BEGINNING = b'{"__metadata__":'


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordMeta:
    """What is known of a record beside its parts."""

    key: ChunkKey
    namespace: bytes  # digest
    tokens: int
    first: int  # position of the first token where it was computed; keys in the parts are rotated to it
    parts: int
    part_bytes: int  # that mean something; a part is stored in `aligned(part_bytes)`
    codec: str = NO_CODEC
    label: str = ""  # whatever its writer wants to find again with the record
    sizes: tuple[int, ...] = ()  # stored bytes of each part, if they differ
    checksums: tuple[int, ...] = ()  # xxh3-64 of each stored part

    @property
    def stored_part(self) -> int:
        """Bytes of a part as it lies in memory, and in the record if no codec is at work."""
        return aligned(self.part_bytes)

    @property
    def stored(self) -> tuple[int, ...]:
        """Bytes of each part in the record."""
        return self.sizes or (self.stored_part,) * self.parts

    def offset(self, part: int) -> int:
        """Where part `part` begins, counted from the first; `offset(parts)` is the size of all."""
        return sum(self.sizes[:part]) if self.sizes else part * self.stored_part


def checksum(part: memoryview | bytes) -> int:
    """xxh3-64: at memory speed, and without the GIL."""
    return int(xxhash.xxh3_64_intdigest(part))


def compare(found: Iterable[int], wanted: Sequence[int], first: int) -> None:
    """Raise `CorruptRecord` if the checksums of parts, from part `first` on, are not those that were written."""
    for part, (one, right) in enumerate(zip(found, wanted, strict=True), first):
        if one != right:
            raise CorruptRecord(f"part {part} is not what was written")


def split_parts(memory: Sequence[memoryview], sizes: Sequence[int]) -> list[memoryview]:
    """Views of single parts of these sizes, whether or not the memory holds several side by side."""
    parts, views = [], iter(memory)
    left = memoryview(b"")
    for size in sizes:
        if not left:
            left = next(views)
        assert len(left) >= size, "a part lies in two views"
        parts.append(left[:size])
        left = left[size:]
    return parts


def encode_header(meta: RecordMeta) -> bytes:
    """The header's bytes, a multiple of 4096."""
    said = json.dumps(_metadata(meta), separators=(",", ":")).encode()
    text = BEGINNING + said + _tensors(meta.stored)
    size = aligned(8 + len(text)) - 8
    return size.to_bytes(8, "little") + text.ljust(size)


def header_size(prefix: bytes) -> int:
    """How many bytes the header takes, from its first 8; raise `CorruptRecord` if that cannot be."""
    size = 8 + int.from_bytes(prefix[:8], "little")
    if len(prefix) < 8 or size % ALIGN or not ALIGN <= size <= HEADER_LIMIT:
        raise CorruptRecord(f"header length {size}")
    return size


def decode_header(blob: bytes) -> RecordMeta:
    """What a header says; raise `CorruptRecord` if it is not exactly what `encode_header` would write."""
    try:
        # What follows the metadata need not be parsed: it has to be what is encoded again below.
        text, _ = json.JSONDecoder().raw_decode(blob[8:].decode(), len(BEGINNING))
        meta = RecordMeta(
            key=ChunkKey(bytes.fromhex(text["key"])),
            namespace=bytes.fromhex(text["namespace"]),
            tokens=int(text["tokens"]),
            first=int(text["first"]),
            parts=int(text["parts"]),
            part_bytes=int(text["part_bytes"]),
            codec=str(text["codec"]),
            label=str(text.get("label", "")),
            sizes=tuple(int(size) for size in text["sizes"].split(",")) if "sizes" in text else (),
            checksums=tuple(int(c, 16) for c in text["checksums"].split(",")),
        )
    except (ValueError, OverflowError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptRecord(f"unreadable header: {error}") from error
    if not 0 < meta.parts <= PARTS_LIMIT or not 0 < meta.part_bytes <= PART_LIMIT or len(meta.checksums) != meta.parts:
        raise CorruptRecord("impossible sizes in header")
    if meta.sizes and (len(meta.sizes) != meta.parts or any(not _fits(size) for size in meta.sizes)):
        raise CorruptRecord("impossible sizes of parts in header")
    if encode_header(meta) != blob:
        raise CorruptRecord("header is not what was written")
    return meta


@lru_cache(maxsize=256)
def _tensors(sizes: tuple[int, ...]) -> bytes:
    """The JSON behind the metadata; the same for all whole chunks of a model."""
    entries = [
        f',"layer.{part}":{{"dtype":"U8","shape":[{stop - start}],"data_offsets":[{start},{stop}]}}'
        for part, (start, stop) in enumerate(pairwise(accumulate(sizes, initial=0)))
    ]
    return "".join([*entries, "}"]).encode()


def _fits(size: int) -> bool:
    return 0 < size <= PART_LIMIT and size % ALIGN == 0


def _metadata(meta: RecordMeta) -> dict[str, str]:
    said = {
        "format": f"lmc-{FORMAT}",
        "key": meta.key.hex(),
        "namespace": meta.namespace.hex(),
        "checksums": ",".join(f"{c:016x}" for c in meta.checksums),
    }
    if meta.sizes:
        said["sizes"] = ",".join(map(str, meta.sizes))
    for field in fields(meta):
        if field.name not in ("label", "sizes") or getattr(meta, field.name):
            said.setdefault(field.name, str(getattr(meta, field.name)))
    # decode_header re-encodes what it read and compares: a flip inside any value above makes another digest than the stored one.
    said["digest"] = f"{checksum(json.dumps(said).encode()):016x}"
    return said
