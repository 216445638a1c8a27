"""The record format: any safetensors tool reads it, and nothing else passes for one."""

import json
import random
import tracemalloc
from dataclasses import replace

import pytest
import safetensors
import safetensors.torch
from storage_fakes import NAMESPACE, content, key_of, meta_of, raw_record, stored

from lmc.errors import CorruptRecord
from lmc.storage.tiers.record import (
    HEADER_LIMIT,
    RecordMeta,
    checksum,
    decode_header,
    encode_header,
    header_size,
    split_parts,
)

K0 = key_of(0)
META = replace(meta_of(K0), checksums=(1, 2**64 - 1, 0))


def decode(blob: bytes) -> RecordMeta:
    """As a tier does it: the length first, then that much."""
    return decode_header(blob[: header_size(blob[:8])])


@pytest.mark.parametrize(
    "meta",
    [
        META,
        replace(META, tokens=0, first=10**6, codec="planes2+lz4", part_bytes=1),
        replace(META, parts=80, checksums=tuple(range(80))),
        replace(META, parts=1, checksums=(7,), part_bytes=1 << 40),
    ],
)
def test_a_header_says_what_was_put_into_it(meta):
    blob = encode_header(meta)
    assert decode(blob) == meta
    assert len(blob) % 4096 == 0


@pytest.mark.parametrize(("parts", "start"), [(1, 4096), (32, 4096), (80, 8192), (200, 20480)])
def test_data_starts_at_a_whole_block(parts, start):
    meta = replace(META, parts=parts, checksums=(2**64 - 1,) * parts)
    assert len(encode_header(meta)) == start


@pytest.mark.parametrize(("parts", "part_bytes"), [(3, 4096), (2, 5000), (80, 16)])
def test_safetensors_reads_the_same_bytes(tmp_path, parts, part_bytes):
    meta = meta_of(K0, parts, part_bytes)
    path = tmp_path / "a.safetensors"
    path.write_bytes(raw_record(meta))
    whole = bytes(stored(meta))
    size = meta.stored_part
    tensors = safetensors.torch.load_file(path)
    assert sorted(tensors) == sorted(f"layer.{part}" for part in range(parts))
    for part in range(parts):
        assert tensors[f"layer.{part}"].numpy().tobytes() == whole[part * size : (part + 1) * size]
    with safetensors.safe_open(path, framework="pt") as file:
        said = file.metadata()
        assert (said["key"], said["namespace"], said["tokens"], said["first"]) == (
            K0.hex(),
            NAMESPACE.hex(),
            "16",
            "32",
        )
        assert (said["parts"], said["part_bytes"], said["codec"]) == (str(parts), str(part_bytes), "none")
        assert file.get_tensor("layer.1").numpy().tobytes()[:part_bytes] == content(K0, 1, part_bytes)


def test_parts_are_split_the_same_from_one_view_or_from_several():
    blob = bytes(range(12))
    for views in ([blob], [blob[:4], blob[4:]], [blob[:8], blob[8:]]):
        assert split_parts(list(map(memoryview, views)), (4, 4, 4)) == [blob[:4], blob[4:8], blob[8:]]


def test_every_flipped_bit_in_a_header_is_refused():
    blob = encode_header(META)
    text_end = len(blob.rstrip())
    dice = random.Random(1)
    bits = [
        *range(64),
        *dice.sample(range(64, text_end * 8), 2500),
        *dice.sample(range(text_end * 8, len(blob) * 8), 500),
    ]
    for bit in bits:
        flipped = bytearray(blob)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptRecord):
            decode(bytes(flipped))


def sized(text: bytes) -> bytes:
    """`text` with a right length in front and padding behind."""
    size = -(-(8 + len(text)) // 4096) * 4096 - 8
    return size.to_bytes(8, "little") + text.ljust(size)


BODY = json.loads(encode_header(META)[8:])
HOSTILE = {
    "nothing": b"",
    "seven bytes": b"1234567",
    "length 0": bytes(4096),
    "huge length": b"\xff" * 4096,
    "length beyond the limit": (HEADER_LIMIT + 4096 - 8).to_bytes(8, "little") + bytes(4088),
    "length that is no block": (4096).to_bytes(8, "little") + bytes(4088),
    "not json": sized(b"hello"),
    "not text": sized(b"\xff\xfe\xfd" * 99),
    "zeros": sized(bytes(100)),
    "empty object": sized(b"{}"),
    "a list": sized(b"[1, 2]"),
    "a string": sized(b'"__metadata__"'),
    "null": sized(b"null"),
    "nan": sized(b"NaN"),
    "deep lists": sized(b"[" * 500_000),
    "deep objects": sized(b'{"a":' * 150_000),
    "a number of many digits": sized(b"9" * 100_000),
    "metadata is a list": sized(b'{"__metadata__": []}'),
    "metadata is a number": sized(b'{"__metadata__": 5}'),
    "metadata is text": sized(b'{"__metadata__": "key"}'),
}


@pytest.mark.parametrize("blob", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_header_is_a_corrupt_record(blob):
    with pytest.raises(CorruptRecord):
        decode(blob)


ATOMS = ["", "-1", "0", "1e999", "9" * 4300, "9" * 5000, "\uff19", " 5", "0x10", "\ud800", "none", "zz",
         "00" * 40, "-1,-2,-3", ",,", None, True, -1, 0, 1.5, float("inf"), float("-inf"), float("nan"), 10**30,
         10**4000, [], {}, [[1]], {"a": 1}]  # fmt: skip


@pytest.mark.parametrize("name", BODY["__metadata__"])
@pytest.mark.parametrize("value", ATOMS, ids=lambda value: repr(value)[:12])
def test_a_hostile_value_in_the_metadata_is_a_corrupt_record(name, value):
    """`Infinity` was an OverflowError, and a size of 4300 digits a ValueError out of the header that is made to
    compare.
    """
    body = {**BODY, "__metadata__": {**BODY["__metadata__"], name: value}}
    if value != BODY["__metadata__"][name]:
        with pytest.raises(CorruptRecord):
            decode(sized(json.dumps(body, separators=(",", ":")).encode()))


@pytest.mark.parametrize(
    "changes",
    [
        {"parts": 0, "checksums": ()},
        {"parts": -1},
        {"parts": 4097, "checksums": (0,) * 4097},
        {"parts": 10**9},
        {"part_bytes": 0},
        {"part_bytes": -4096},
        {"part_bytes": (1 << 40) + 1},
        {"part_bytes": 10**4000},
        {"checksums": (1, 2)},
        {"checksums": (1, 2, 3, 4)},
    ],
    ids=lambda changes: str(changes)[:40],
)
def test_a_well_made_header_of_impossible_sizes_is_a_corrupt_record(changes):
    """The checksum of the header is right, because its writer knows the format."""
    written = replace(META, parts=1, checksums=(0,))
    text = encode_header(written)
    said = json.loads(text[8:])
    for name, value in changes.items():
        said["__metadata__"][name] = ",".join(f"{c:016x}" for c in value) if name == "checksums" else str(value)
    said["__metadata__"].pop("digest")
    said["__metadata__"]["digest"] = f"{checksum(json.dumps(said['__metadata__']).encode()):016x}"
    with pytest.raises(CorruptRecord):
        decode(sized(json.dumps(said, separators=(",", ":")).encode()))


def test_huge_numbers_in_a_header_allocate_nothing():
    bodies = [
        sized(json.dumps({"__metadata__": {**BODY["__metadata__"], name: "9" * 4300}}).encode())
        for name in ("parts", "part_bytes")
    ]
    tracemalloc.start()
    for blob in [*bodies, HOSTILE["huge length"], HOSTILE["length beyond the limit"]]:
        with pytest.raises(CorruptRecord):
            decode(blob)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 << 20


def test_ten_thousand_mutations_are_corrupt_records_or_the_record():
    original = encode_header(META)
    text_end = len(original.rstrip())
    dice = random.Random(2)
    for _ in range(10_000):
        blob = bytearray(original)
        for _ in range(dice.choice([1, 1, 2, 5])):
            at = dice.randrange(text_end)
            match dice.randrange(4):
                case 0:
                    blob[at] = dice.randrange(256)
                case 1:
                    blob[at : at + dice.randrange(20)] = b""
                case 2:
                    blob[at:at] = dice.choice(
                        [b"9" * 50, b"[", b"}", b'"', b"-", b"\\u0000", b"1e999", b"Infinity", b"\xff"]
                    )
                case 3:
                    start = dice.randrange(text_end)
                    blob[at:at] = original[start : start + 30]
        blob = blob[: len(original)].ljust(len(original))
        if dice.random() < 0.9:
            blob[:8] = original[:8]
        try:
            assert decode(bytes(blob)) == META
        except CorruptRecord:
            continue
        assert blob == original
