"""The record: a chunk as one safetensors file, which any safetensors tool can open.

    0     u64 length | JSON header, padded with spaces to whole blocks of 4096 bytes
    4096  part 0 | part 1 | …      one U8 tensor `layer.i` per part, each padded with zeros to whole blocks

All parts have the same size, unless a codec has compressed them; then the header has the size of each part.

`__metadata__` holds the fields of `RecordMeta`, and checksums (xxh3-64) of each part and of itself. A header is
accepted only if decoding and encoding it gives the same bytes. So a flipped bit anywhere in a record is detected: as an
error in the header, or by the checksum of a part.
"""

import json
import mmap
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise

import xxhash

from lmc.errors import CorruptRecord
from lmc.keys import FORMAT, ChunkKey, RecordKind
from lmc.shapes import ALIGN, aligned

HEADER_LIMIT = 1 << 20  # bytes; a manipulated length cannot make lmc allocate more memory
SHORT_LABEL = HEADER_LIMIT // 16  # characters; with a label of at most this length, every header is within the limit
PARTS_LIMIT = 4096
PART_LIMIT = 1 << 40  # bytes
NO_CODEC = "none"
SUFFIX = ".safetensors"
BEGINNING = b'{"__metadata__":'
OPTIONAL = ("sizes", "label", "model", "tenant")  # metadata that is omitted if it is empty
PLAIN = ("tokens", "first", "parts", "part_bytes", "codec", "label", "model", "tenant")  # metadata written with `str`
_thread = threading.local()


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordMeta:
    """A record's metadata: everything except its parts."""

    key: ChunkKey
    kind: RecordKind
    namespace: bytes  # digest
    tokens: int
    first: int  # position at which the first token was computed; the keys in the parts are rotated for it
    parts: int
    part_bytes: int  # bytes of data in a part; a part is stored in `aligned(part_bytes)` bytes
    codec: str = NO_CODEC
    label: str = ""  # free text of the writer, returned with the record
    model: str = ""  # name, for people
    tenant: str = ""  # digest of the cache salt; empty without one
    sizes: tuple[int, ...] = ()  # stored bytes of each part, if they differ
    checksums: tuple[int, ...] = ()  # xxh3-64 of each stored part

    @property
    def stored_part(self) -> int:
        """Bytes of a part in memory, and in a record without a codec."""
        return aligned(self.part_bytes)

    @property
    def stored(self) -> tuple[int, ...]:
        """Bytes of each part in the record."""
        return self.sizes or (self.stored_part,) * self.parts

    @property
    def owner(self) -> tuple[str, str]:
        """The owner: the name of the model, and the digest of the tenant's cache salt."""
        return self.model, self.tenant

    @property
    def memory(self) -> int:
        """Bytes of all parts in memory."""
        return self.parts * self.stored_part

    def offset(self, part: int) -> int:
        """Return the offset of part `part` from the first part, in bytes. `offset(parts)` is the size of all parts."""
        return sum(self.sizes[:part]) if self.sizes else part * self.stored_part


def checksum(part: memoryview | bytes) -> int:
    """Return the xxh3-64 of a part, computed at memory speed and without the GIL."""
    return int(xxhash.xxh3_64_intdigest(part))


def checksums(meta: RecordMeta, parts: Sequence[memoryview]) -> tuple[int, ...]:
    """Return the checksum of each stored part of a record."""
    return tuple(checksum(part) for part in split_parts(parts, meta.stored))


def file_of(key: ChunkKey) -> str:
    """Return the path of a record's file in a folder: `ab/abcd….safetensors`."""
    name = key.hex()
    return f"{name[:2]}/{name}{SUFFIX}"


def compare(found: Iterable[int], wanted: Sequence[int], first: int) -> None:
    """Compare computed checksums with the written ones, of the parts from `first` on. Raises `CorruptRecord`."""
    for part, (one, right) in enumerate(zip(found, wanted, strict=True), first):
        if one != right:
            raise CorruptRecord(f"part {part} is not what was written")


@contextmanager
def removed_if_corrupt(remove: Callable[[ChunkKey], object], key: ChunkKey) -> Iterator[None]:
    """Remove a record if the block raises `CorruptRecord`, and raise the error again.

    A record that cannot be removed is found corrupt again.
    """
    try:
        yield
    except CorruptRecord:
        is_removed(remove, key)
        raise


def is_removed(remove: Callable[..., object], *arguments: object) -> bool:
    """Call `remove`, and return whether it succeeds. It fails, for example, on a disk that is read-only."""
    try:
        remove(*arguments)
    except OSError:
        return False
    return True


def verify_parts(meta: RecordMeta, read: Callable[[int, int, Sequence[memoryview]], None]) -> None:
    """Read each part of a record once into scratch memory. `read` raises an error for a corrupt part."""
    for part, size in enumerate(meta.stored):
        read(part, 1, [scratch(size)])


def split_parts(memory: Sequence[memoryview], sizes: Sequence[int]) -> list[memoryview]:
    """Return a view of each part. One view of `memory` may hold several adjacent parts."""
    parts, views = [], iter(memory)
    left = memoryview(b"")
    for size in sizes:
        if not left:
            left = next(views)
        assert len(left) >= size, "a part lies in two views"
        parts.append(left[:size])
        left = left[size:]
    return parts


def pages(size: int) -> memoryview:
    """Return zeroed memory of `size` bytes that direct I/O accepts."""
    return memoryview(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def scratch(size: int) -> memoryview:
    """Return scratch memory of this thread, valid until its next call: a thread reads one record at a time."""
    held: memoryview = getattr(_thread, "scratch", memoryview(b""))
    if len(held) < size:
        held = _thread.scratch = pages(size)
    return held[:size]


def encode_header(meta: RecordMeta) -> bytes:
    """Return the header's bytes, a multiple of 4096."""
    text = BEGINNING + json.dumps(_metadata(meta), separators=(",", ":")).encode() + _tensors(meta.stored)
    size = aligned(8 + len(text)) - 8
    return size.to_bytes(8, "little") + text.ljust(size)


def header_fits(meta: RecordMeta) -> bool:
    """Return whether a header is within `HEADER_LIMIT`, also if a codec adds the size of each part.

    It is not if the label has the tokens of a document of hundreds of thousands of tokens.
    """
    if len(meta.label) <= SHORT_LABEL:
        return True
    return len(encode_header(replace(meta, sizes=meta.stored, checksums=(0,) * meta.parts))) <= HEADER_LIMIT


def header_size(prefix: bytes, record: int = HEADER_LIMIT) -> int:
    """Return the size of a header in bytes, from its first 8 bytes, in a record of `record` bytes.

    Raises `CorruptRecord` for an impossible size.
    """
    size = 8 + int.from_bytes(prefix[:8], "little")
    if len(prefix) < 8 or size % ALIGN or not ALIGN <= size <= HEADER_LIMIT:
        raise CorruptRecord(f"header length {size}")
    if size > record:
        raise CorruptRecord(f"a header of {size} bytes in a record of {record}")
    return size


def header_of(blob: bytes, key: ChunkKey, record: int) -> RecordMeta:
    """Decode the header of a record of `record` bytes under a key. Raises `CorruptRecord` for any other record."""
    meta = decode_header(blob)
    if meta.key != key:
        raise CorruptRecord("the header has another key")
    if record != len(blob) + meta.offset(meta.parts):
        raise CorruptRecord("record size is not what the header says")
    return meta


def decode_header(blob: bytes) -> RecordMeta:
    """Decode a header. Raises `CorruptRecord` if it differs from what `encode_header` would write."""
    try:
        # The JSON after the metadata is not parsed, because the header is encoded again and compared below.
        text, _ = json.JSONDecoder().raw_decode(blob[8:].decode(), len(BEGINNING))
        meta = RecordMeta(
            key=ChunkKey(bytes.fromhex(text["key"])),
            namespace=bytes.fromhex(text["namespace"]),
            tokens=int(text["tokens"]),
            first=int(text["first"]),
            parts=int(text["parts"]),
            part_bytes=int(text["part_bytes"]),
            codec=str(text["codec"]),
            kind=RecordKind(text["kind"]),
            label=str(text.get("label", "")),
            model=str(text.get("model", "")),
            tenant=str(text.get("tenant", "")),
            sizes=tuple(int(size) for size in text["sizes"].split(",")) if "sizes" in text else (),
            checksums=tuple(int(c, 16) for c in text["checksums"].split(",")),
        )
    except (ValueError, OverflowError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptRecord(f"unreadable header: {error}") from error
    possible = 0 < meta.parts <= PARTS_LIMIT and 0 < meta.part_bytes <= PART_LIMIT and len(meta.checksums) == meta.parts
    fitting = all(0 < size <= PART_LIMIT and size % ALIGN == 0 for size in meta.sizes)
    if not (possible and fitting and len(meta.sizes) in (0, meta.parts)):
        raise CorruptRecord("impossible sizes in header")
    if encode_header(meta) != blob:
        raise CorruptRecord("header is not what was written")
    return meta


@lru_cache(maxsize=256)
def _tensors(sizes: tuple[int, ...]) -> bytes:
    """Return the JSON after the metadata. It is the same for all whole chunks of a model."""
    entries = [
        f',"layer.{part}":{{"dtype":"U8","shape":[{stop - start}],"data_offsets":[{start},{stop}]}}'
        for part, (start, stop) in enumerate(pairwise(accumulate(sizes, initial=0)))
    ]
    return "".join([*entries, "}"]).encode()


def _metadata(meta: RecordMeta) -> dict[str, str]:
    said = {"format": f"lmc-{FORMAT}", "key": meta.key.hex(), "namespace": meta.namespace.hex()}
    said["checksums"] = ",".join(f"{c:016x}" for c in meta.checksums)
    said |= {"sizes": ",".join(map(str, meta.sizes)), "kind": meta.kind.value}
    said |= {name: str(getattr(meta, name)) for name in PLAIN}
    said = {name: value for name, value in said.items() if value or name not in OPTIONAL}
    # A flipped bit in any of these values changes the digest when the header is encoded again.
    said["digest"] = f"{checksum(json.dumps(said).encode()):016x}"
    return said
