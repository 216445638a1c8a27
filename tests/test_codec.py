"""Codecs: the contract, that nothing changes on the way, and that nothing a record says can do harm."""

import random
import sys
from contextlib import closing
from dataclasses import replace

import pytest
import torch
from storage_fakes import (
    PART_BYTES,
    PARTS,
    DictTier,
    as_tensor,
    content,
    expected,
    get,
    key_of,
    memory,
    meta_of,
    put,
    raw_record,
    stored,
    writing,
)
from tier_contract import OverDict, read, write
from tier_wrappers import Counted

from lmc.errors import ChunkLost, ConfigError, CorruptRecord
from lmc.shapes import ALIGN, aligned
from lmc.storage.memory.slab import Slab
from lmc.storage.store import Store
from lmc.storage.tiers import codec as codecs
from lmc.storage.tiers.codec import Coded, decode_part
from lmc.storage.tiers.disk import DiskTier
from lmc.storage.tiers.record import checksum, decode_header, header_size, split_parts
from lmc.storage.tiers.tier import Wrapped, Written

K0, K1, K2 = map(key_of, range(3))
lz4 = pytest.importorskip("lz4.block")
DTYPES = {torch.bfloat16: 2, torch.float16: 2, torch.float32: 4, torch.uint8: 1}
REPEATS = 4


class TestCoded(OverDict):
    """What the contract writes is random, so every record stays raw."""

    @pytest.fixture(params=["none", "planes"])
    def tier(self, request):
        return Coded(DictTier(), request.param, 2)


class Repeated(Wrapped):
    """Keeps every part four times in a row, so that what the contract writes gets smaller: 8192 bytes for 16384."""

    def write(self, meta, parts):
        views = [memoryview(bytearray(bytes(view) * REPEATS)) for view in split_parts(parts, meta.stored)]
        return self.inner.write(replace(meta, part_bytes=REPEATS * meta.stored_part, label=str(meta.part_bytes)), views)

    def open(self, key):
        reader = self.inner.open(key)
        return RepeatedReader(reader) if reader and reader.meta.label else reader


class RepeatedReader:
    def __init__(self, inner):
        self.inner, self.close, self.request = inner, inner.close, inner.request
        self.meta = replace(inner.meta, part_bytes=int(inner.meta.label), label="")

    def read(self, first, count, into):
        wide = memory(count * self.inner.meta.stored_part)
        self.inner.read(first, count, [wide])
        sizes = [self.meta.stored_part] * count
        for part, view in zip(
            split_parts([wide], [size * REPEATS for size in sizes]), split_parts(into, sizes), strict=True
        ):
            assert bytes(part) == bytes(part[: len(view)]) * REPEATS
            view[:] = part[: len(view)]


class TestCodedRecordsThatGetSmaller(OverDict):
    @pytest.fixture(params=[1, 4])
    def tier(self, request):
        self.codec = f"planes{request.param}+lz4"
        return Repeated(Coded(DictTier(), "planes", request.param))

    def raw_read(self, tier, key):
        return super().raw_read(tier.inner, key)

    def raw_write(self, tier, key, blob):
        super().raw_write(tier.inner, key, blob)

    def damage(self, tier, key, at):
        part, rest = divmod(at - ALIGN, PART_BYTES)
        super().damage(tier, key, at if at < ALIGN else ALIGN + part * 2 * ALIGN + rest)

    def test_the_kept_bytes_are_a_record_as_the_format_says(self, tier):
        write(tier, K0)
        blob = self.raw_read(tier, K0)
        meta = decode_header(blob[: header_size(blob)])
        parts = split_parts([memoryview(blob)[header_size(blob) :]], meta.stored)
        assert (meta.codec, meta.sizes) == (self.codec, (2 * ALIGN,) * PARTS)
        assert meta.checksums == tuple(map(checksum, parts))
        assert len(blob) == header_size(blob) + sum(meta.sizes)

    def test_entries_list_sizes_with_the_least_recently_used_first(self, tier):
        for key in (K0, K1, K2):
            write(tier, key)
        read(tier, K0)
        assert [entry.key for entry in tier.entries()] == [K1, K2, K0]
        assert {entry.bytes for entry in tier.entries()} == {ALIGN + PARTS * 2 * ALIGN}


# -- nothing changes on the way ---------------------------------------------------------------------------------------


def bits(tensor: torch.Tensor) -> memoryview:
    """A tensor's bytes, padded to whole blocks, as one part lies in memory."""
    raw = tensor.contiguous().view(torch.uint8).flatten()
    view = memory(aligned(len(raw)))
    torch.frombuffer(view, dtype=torch.uint8)[: len(raw)] = raw
    return view


def side_by_side(parts: list[memoryview]) -> memoryview:
    whole = memory(sum(map(len, parts)))
    whole[:] = b"".join(parts)
    return whole


def record(parts: list[memoryview], key=K0):
    return meta_of(key, len(parts), len(parts[0])), [side_by_side(parts)]


def tensors(dtype: torch.dtype):
    torch.manual_seed(0)
    count = 5 * ALIGN // dtype.itemsize
    yield (torch.randn(count) * 3).to(dtype)
    yield torch.zeros(count, dtype=dtype)
    yield torch.full((count,), 7, dtype=dtype)
    if dtype.is_floating_point:
        yield torch.full((count,), float("nan"), dtype=dtype)
        yield torch.tensor([float("inf"), -0.0, 1e-30, float("-inf")] * (count // 4)).to(dtype)
    same = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[dtype.itemsize]
    every = (
        torch.arange(count) * 0x9E3779B1 & (1 << 8 * dtype.itemsize) - 1
    )  # every bit pattern, signalling NaNs as well
    yield every.to(same).view(dtype)


@pytest.mark.parametrize("codec", ["none", "planes"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_bit_comes_back(dtype, codec):
    parts = [bits(tensor) for tensor in tensors(dtype)]
    tier = Coded(DictTier(), codec, DTYPES[dtype])
    assert tier.write(*record(parts)) is Written.STORED
    assert read(tier, K0) == b"".join(parts)
    assert read(Coded(tier.inner, "none", 1), K0) == b"".join(parts), "whatever the reader is set to"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_planes_make_random_normals_smaller_where_lz4_alone_does_not(dtype):
    torch.manual_seed(0)
    parts = [bits(torch.randn(1 << 16).to(dtype)) for _ in range(2)]
    kept = {}
    for planes in (1, dtype.itemsize):
        tier = Coded(DictTier(), "planes", planes)
        tier.write(*record(parts))
        kept[planes] = len(tier.inner.records[K0])
        assert read(tier, K0) == b"".join(parts)
    assert kept[1] == ALIGN + 2 * len(parts[0])
    assert kept[dtype.itemsize] < (0.86 if dtype is torch.bfloat16 else 0.94) * kept[1]


@pytest.mark.parametrize("part_bytes", [1, 100, 4096, 4097, 3 * 4096, 65537])
@pytest.mark.parametrize("item", [1, 2, 4, 8])
def test_parts_of_any_size_come_back_padded_with_zeros(part_bytes, item):
    meta = meta_of(K0, 2, part_bytes)
    whole = memory(2 * meta.stored_part)
    for part in range(2):
        whole[part * meta.stored_part :][:part_bytes] = (b"abcdefg" * part_bytes)[:part_bytes]
    tier = Coded(DictTier(), "planes", item)
    assert tier.write(meta, [whole]) is Written.STORED
    assert read(tier, K0) == bytes(whole)
    assert len(tier.inner.records[K0]) == ALIGN + 2 * ALIGN  # one block is the least


@pytest.mark.parametrize("offset", [0, 7])
def test_ranges_and_scattered_views(offset):
    """Also in memory that is not aligned, for writing and for reading."""
    parts = [bits(tensor) for tensor in tensors(torch.float32)]
    size, tier = len(parts[0]), Coded(DictTier(), "planes", 4)
    whole = memory(len(parts) * size, offset)
    whole[:] = b"".join(parts)
    assert tier.write(meta_of(K0, len(parts), size), [whole[: 2 * size], whole[2 * size :]]) is Written.STORED
    assert codec_of(tier) == "planes4+lz4"
    with closing(tier.open(K0)) as reader:
        reader.request(0, 2)
        for first, count in [(2, 1), (0, 2), (1, 4), (5, 1), (0, len(parts))]:
            into = memory(count * size, offset)
            reader.read(first, count, [into])
            assert bytes(into) == b"".join(parts[first : first + count])
            scattered = [memory(size, offset) for _ in range(count)]
            reader.read(first, count, scattered)
            assert scattered == parts[first : first + count]


def codec_of(tier) -> str:
    with closing(tier.inner.open(K0)) as reader:
        return reader.meta.codec


def test_what_does_not_get_smaller_is_raw_and_costs_nothing_to_read():
    tier = Coded(DictTier(), "planes", 2)
    write(tier, K0)
    assert bytes(tier.inner.records[K0]) == raw_record(meta_of(K0))
    assert type(tier.open(K0)) is type(tier.inner.open(K0))


def test_a_part_that_does_not_get_smaller_in_a_record_that_does():
    noise, zeros = memoryview(bytearray(content(K0, 0, 5 * ALIGN))), memory(5 * ALIGN)
    tier = Coded(DictTier(), "planes", 2)
    tier.write(*record([zeros, noise, zeros]))
    assert tier.inner.open(K0).meta.sizes == (ALIGN, 6 * ALIGN, ALIGN)
    assert read(tier, K0) == b"".join([zeros, noise, zeros])


def test_a_record_in_reading_looks_as_it_was_written():
    tier = Coded(DictTier(), "planes", 2)
    meta, parts = record([memory(5 * ALIGN)] * 3)
    tier.write(meta, parts)
    with closing(tier.open(K0)) as reader:
        assert replace(reader.meta, checksums=()) == meta


class Asked(Wrapped):
    def open(self, key):
        self.reader = RequestedReader(self.inner.open(key))
        return self.reader


class RequestedReader:
    def __init__(self, inner):
        self.inner, self.meta, self.read, self.asked, self.closed = inner, inner.meta, inner.read, [], False

    def request(self, first, count):
        self.asked.append((first, count))

    def close(self):
        self.closed = True


def test_what_is_asked_for_early_is_passed_on_and_the_inner_reader_closed():
    tier = Coded(Asked(DictTier()), "planes", 2)
    tier.write(*record([memory(5 * ALIGN)] * 3))
    reader = tier.open(K0)
    reader.request(1, 2)
    reader.close()
    assert tier.inner.reader.asked == [(1, 2)]
    assert tier.inner.reader.closed


def test_a_record_that_is_there_is_not_encoded_again(monkeypatch):
    tier = Coded(DictTier(), "planes", 2)
    tier.write(*record([memory(5 * ALIGN)] * 3))
    monkeypatch.setattr(codecs, "encode_record", lambda *_: pytest.fail("encoded"))
    assert tier.write(*record([memory(5 * ALIGN)] * 3)) is Written.PRESENT


# -- over a directory, and under a store ------------------------------------------------------------------------------


class Aligned(Wrapped):
    """Says of every buffer whether direct I/O takes it."""

    def __init__(self, inner):
        super().__init__(inner)
        self.taken = []

    def write(self, meta, parts):
        self.taken += [torch.frombuffer(view, dtype=torch.uint8).data_ptr() % ALIGN == 0 for view in parts]
        return self.inner.write(meta, parts)

    def open(self, key):
        reader = self.inner.open(key)
        plain = reader.read

        def looked(first, count, into):
            self.taken += [torch.frombuffer(view, dtype=torch.uint8).data_ptr() % ALIGN == 0 for view in into]
            plain(first, count, into)

        reader.read = looked
        return reader


def test_a_directory_keeps_less_and_gives_the_same_after_a_restart(tmp_path):
    torch.manual_seed(0)
    parts = [bits(torch.randn(1 << 15).bfloat16()) for _ in range(8)]
    with closing(Coded(Aligned(DiskTier(tmp_path, 1 << 30)), "planes", 2)) as tier:
        tier.write(*record(parts))
        assert read(tier, K0) == b"".join(parts)
        assert tier.inner.taken == [True, True]
        assert tier.check() == []
        (entry,) = tier.entries()
        assert entry.bytes < 0.9 * 8 * len(parts[0])
    with closing(Coded(DiskTier(tmp_path, 1 << 30), "none", 1)) as tier:
        assert read(tier, K0) == b"".join(parts)


def test_check_finds_a_flipped_bit_of_what_is_stored(tmp_path):
    with closing(Coded(DiskTier(tmp_path, 1 << 30), "planes", 2)) as tier:
        tier.write(*record([memory(5 * ALIGN)] * 3))
        (path,) = tmp_path.rglob("*.safetensors")
        blob = bytearray(path.read_bytes())
        blob[2 * ALIGN + 100] ^= 1
        path.write_bytes(blob)
        assert [finding.fixed for finding in tier.check(fix=True)] == [True]
        assert tier.contains([K0]) == [False]


def test_a_record_of_a_directory_that_cannot_be_decoded_is_deleted(tmp_path):
    with closing(Coded(DiskTier(tmp_path, 1 << 30), "planes", 2)) as tier:
        meta = meta_of(K0, 1, 5 * ALIGN)
        tier.inner.write(replace(meta, codec="planes2+lz4", sizes=(ALIGN,)), [memory(ALIGN)])
        with closing(tier.open(K0)) as reader, pytest.raises(CorruptRecord):
            reader.read(0, 1, [memory(5 * ALIGN)])
        assert not list(tmp_path.rglob("*.safetensors"))


@pytest.mark.parametrize("part_bytes", [PART_BYTES, 5 * ALIGN - 9])
def test_a_store_gets_back_what_it_wrote_down(tmp_path, part_bytes):
    """What shrinks and what does not, through slots that are narrower than whole blocks."""
    again = (b"again " * part_bytes)[:part_bytes]
    with closing(Store(Slab(4, PARTS, part_bytes), [Coded(DiskTier(tmp_path, 1 << 30), "planes", 1)])) as store:
        assert put(store, K0)
        with writing(store, meta_of(K1, PARTS, part_bytes)) as slot:
            slot[:, :part_bytes] = as_tensor(again)
    counted = Counted(DiskTier(tmp_path, 1 << 30))
    with closing(Store(Slab(2, PARTS, part_bytes), [Coded(counted, "none", 1)])) as store:
        assert get(store, K0) == expected(K0, PARTS, part_bytes)
        assert get(store, K1) == [again] * PARTS
        assert store.stats().failed == {}
    assert counted.counts.bytes_read == PARTS * (aligned(part_bytes) + ALIGN)


def test_a_store_misses_what_cannot_be_decoded():
    inner = DictTier()
    part_bytes = 5 * ALIGN
    with closing(Store(Slab(2, PARTS, part_bytes), [Coded(inner, "none", 1)])) as store:
        meta = replace(meta_of(K0, PARTS, part_bytes), codec="planes1+lz4", sizes=(ALIGN,) * PARTS)
        inner.write(meta, [memoryview(bytes(PARTS * ALIGN))])
        with pytest.raises(ChunkLost):
            get(store, K0)
        assert get(store, K0) is None
        assert inner.records == {}


# -- what a record may say --------------------------------------------------------------------------------------------


def hostile(codec: str, encoded: bytes, part_bytes: int = 2 * ALIGN, planes: int = 2) -> Coded:
    """A tier with a record of one part that is whatever it is, with its right checksum."""
    tier = Coded(DictTier(), "planes", planes)
    blob = encoded.ljust(aligned(len(encoded)), b"\0")
    meta = replace(meta_of(K0, 1, part_bytes), codec=codec, sizes=(len(blob),))
    assert tier.inner.write(meta, [memoryview(blob)]) is Written.STORED
    return tier


def block(data: bytes) -> bytes:
    return lz4.compress(data, store_size=False)


def lengths(*sizes: int) -> bytes:
    return b"".join(size.to_bytes(4, "little") for size in sizes)


ZEROS, TOO_FEW, TOO_MANY = block(bytes(ALIGN)), block(bytes(ALIGN - 1)), block(bytes(ALIGN + 1))
LIES = {
    "nothing": lengths(0, 0),
    "no block": lengths(0, len(ZEROS)) + ZEROS,
    "longer than its plane": lengths(ALIGN + 1, len(ZEROS)) + bytes(ALIGN + 1) + ZEROS,
    "4 GiB": lengths(0xFFFFFFFF, len(ZEROS)) + ZEROS,
    "behind the end": lengths(len(ZEROS), ALIGN) + ZEROS,
    "blocks that nobody needs": lengths(len(ZEROS), len(ZEROS)) + ZEROS + ZEROS + bytes(ALIGN),
    "fewer bytes than wanted": lengths(len(ZEROS), len(TOO_FEW)) + ZEROS + TOO_FEW,
    "more bytes than wanted": lengths(len(TOO_MANY), len(ZEROS)) + TOO_MANY + ZEROS,
    "not LZ4": lengths(8, len(ZEROS)) + b"\xff" * 8 + ZEROS,
}


def test_the_same_without_a_lie_is_read():
    tier = hostile("planes2+lz4", lengths(len(ZEROS), len(ZEROS)) + ZEROS + ZEROS)
    assert read(tier, K0) == bytes(2 * ALIGN)


@pytest.mark.parametrize("encoded", LIES.values(), ids=LIES)
def test_a_part_that_lies_is_never_delivered_and_deletes_the_record(encoded):
    tier = hostile("planes2+lz4", encoded)
    with closing(tier.open(K0)) as reader, pytest.raises(CorruptRecord):
        reader.read(0, 1, [memory(2 * ALIGN)])
    assert tier.open(K0) is None


@pytest.mark.parametrize(
    "codec",
    ["zstd", "lz4", "planes3+lz4", "planes02+lz4", "planes16+lz4", "planes2", "LZ4", "", "none", "x" * 999],
)
def test_a_record_in_an_unknown_codec_is_deleted(codec):
    """`none` with sizes of its own is one of them: its parts are not as long as the reader's."""
    tier = hostile(codec, bytes(ALIGN))
    with pytest.raises(CorruptRecord):
        tier.open(K0)
    assert tier.inner.records == {}


@pytest.mark.parametrize(
    ("stored_bytes", "part_bytes"), [(4 * ALIGN, 2 * ALIGN), (ALIGN, (1 << 30) + 1), (ALIGN, 1 << 40)]
)
def test_sizes_that_cannot_be_delete_the_record_before_anything_is_allocated(stored_bytes, part_bytes):
    tier = hostile("planes1+lz4", bytes(stored_bytes), part_bytes)
    with pytest.raises(CorruptRecord):
        tier.open(K0)
    assert tier.inner.records == {}


@pytest.mark.parametrize("planes", [1, 2, 4])
def test_any_flipped_bit_with_a_right_checksum_gives_an_error_or_as_many_bytes(planes):
    tier = Coded(DictTier(), "planes", planes)
    data = side_by_side([bits(torch.arange(40) * 1234567), memory(ALIGN)])
    tier.write(meta_of(K0, 1, len(data)), [data])
    with closing(tier.inner.open(K0)) as reader:
        meta, good = reader.meta, bytes(reader.verified(0))
    used = len(good.rstrip(b"\0"))
    assert used < 700
    outcomes = {CorruptRecord: 0, bytes: 0}
    for bit in [*range(8 * used), 8 * ALIGN - 1]:
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        tier.inner.records.clear()
        tier.inner.write(meta, [memoryview(bad)])
        try:
            outcomes[bytes] += len(read(tier, K0)) == len(data)
        except CorruptRecord:
            outcomes[CorruptRecord] += 1
            assert tier.inner.records == {}
    assert sum(outcomes.values()) == 8 * used + 1
    assert min(outcomes.values()) > 100


def test_random_bytes_as_a_part_do_no_harm():
    dice = random.Random(0)
    for _ in range(2000):
        size = dice.randrange(1, ALIGN - 8)
        encoded = (lengths(size, dice.randrange(1, ALIGN)) + dice.randbytes(size)).ljust(ALIGN, b"\0")
        try:
            decode_part(memoryview(bytearray(encoded)), memory(2 * ALIGN), 2)
        except CorruptRecord:
            continue


# -- settings ---------------------------------------------------------------------------------------------------------


def test_an_unknown_codec_is_an_error_at_start():
    with pytest.raises(ConfigError, match="codec 'zstd': use one of none, planes"):
        Coded(DictTier(), "zstd", 2)


def test_without_the_package_a_codec_is_an_error_at_start_and_no_record_is_lost(monkeypatch):
    """Records of another time are kept: they can be read again as soon as the package is there."""
    inner = DictTier()
    Coded(inner, "planes", 2).write(*record([memory(5 * ALIGN)] * 3))
    monkeypatch.setitem(sys.modules, "lz4", None)
    monkeypatch.setitem(sys.modules, "lz4.block", None)
    with pytest.raises(ConfigError, match="pip install lz4"):
        Coded(inner, "planes", 2)
    with pytest.raises(OSError, match="pip install lz4"):
        Coded(inner, "none", 2).open(K0)
    assert inner.contains([K0]) == [True]
    write(Coded(inner, "none", 2), K1)
    assert read(Coded(inner, "none", 2), K1) == bytes(stored(meta_of(K1)))
