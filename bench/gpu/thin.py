"""Makes a CUDA library smaller for one kind of GPU: code that it does not run becomes zeros, which compress to nothing.

The file keeps its length, and each fat binary (in the section `.nv_fatbin`) its place, so all addresses stay right. Of
a fat binary remains the machine code for the GPU. Without any, its newest PTX remains that the GPU can compile, and
without that, its smallest entry. Symbols that only debuggers read (`.symtab`, `.strtab`) go, too.

The layout of fat binaries is not documented. It was read from libraries that nvcc has made, and the machine code that
remains was compared with what cuobjdump finds in the whole library.
"""

import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

MAGIC, PTX, MACHINE_CODE = 0xBA55ED50, 1, 2
SECTIONS = ".nv_fatbin", "__nv_relfatbin"
NO_BITS = 8  # the type of a section that takes no room in the file


class Entry(NamedTuple):
    """The code for one architecture in a fat binary."""

    kind: int
    capability: int  # 90 for 9.0
    at: int  # position in the file, with its header
    size: int


class FatBinary(NamedTuple):
    """A list of entries in a section."""

    at: int
    first: int  # position of its first entry
    entries: tuple[Entry, ...]


def thinned(data: bytes, capability: int) -> bytes:
    """Return a library without what a GPU of this compute capability does not use.

    Raises:
        ValueError: `data` is not an ELF file of 64 bits.
    """
    out = bytearray(data)
    for binary in fat_binaries(data):
        kept = b"".join(data[one.at : one.at + one.size] for one in used(binary.entries, capability))
        whole = sum(one.size for one in binary.entries)
        out[binary.first : binary.first + whole] = kept + bytes(whole - len(kept))
        struct.pack_into("<Q", out, binary.at + 8, len(kept))
    for name, offset, size in sections(data):
        if name in (".symtab", ".strtab") or name.startswith(".debug"):
            out[offset : offset + size] = bytes(size)
    return bytes(out)


def used(entries: Sequence[Entry], capability: int) -> Sequence[Entry]:
    """Return the entries of a fat binary that a GPU may use."""
    if not entries:
        return ()
    codes = [one for one in entries if one.kind == MACHINE_CODE]
    own = [one for one in codes if one.capability == capability]
    major = [one for one in codes if one.capability // 10 == capability // 10 and one.capability <= capability]
    compiled = [one for one in entries if one.kind == PTX and one.capability <= capability]
    newest = max((one.capability for one in compiled), default=0)
    smallest = [min(entries, key=lambda one: one.size)]
    return own or major or [one for one in compiled if one.capability == newest] or smallest


def sections(data: bytes) -> Iterator[tuple[str, int, int]]:
    """Yield the name, the position and the size of each section of an ELF file of 64 bits."""
    if data[:6] != b"\x7fELF\x02\x01":
        raise ValueError("not an ELF file of 64 bits")
    (begin,) = struct.unpack_from("<Q", data, 0x28)
    size, count, names = struct.unpack_from("<HHH", data, 0x3A)
    rows = [struct.unpack_from("<IIQQQQIIQQ", data, begin + number * size) for number in range(count)]
    for name, kind, _, _, offset, length, *_ in rows:
        at = rows[names][4] + name
        if kind != NO_BITS:
            yield data[at : data.index(b"\0", at)].decode(), offset, length


def fat_binaries(data: bytes) -> Iterator[FatBinary]:
    """Yield the fat binaries of a library."""
    for name, offset, length in sections(data):
        at, end = offset, offset + length
        while name in SECTIONS and at + 16 <= end:
            magic, _, header, size = struct.unpack_from("<IHHQ", data, at)
            if magic != MAGIC:  # padding
                at += 8
                continue
            first = at + header
            yield FatBinary(at, first, tuple(_entries(data, first, first + size)))
            at = first + size


def _entries(data: bytes, at: int, stop: int) -> Iterator[Entry]:
    while at < stop:
        kind, _, header, payload = struct.unpack_from("<HHIQ", data, at)
        (capability,) = struct.unpack_from("<I", data, at + 28)
        yield Entry(kind, capability, at, header + payload)
        at += header + payload
