"""The disk tier: the contract, and what a directory adds to it (restarts, other files, full disks, other processes)."""

import errno
import json
import logging
import math
import mmap
import os
import random
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from amount import some
from storage_fakes import (
    PART_BYTES,
    PARTS,
    RECORD_BYTES,
    SMALL_FILESYSTEM,
    content,
    eventually,
    key_of,
    memory,
    meta_of,
    mounted,
    raw_record,
    stored,
    unmounted,
)
from tier_contract import LocalContract, read, write

from lmc.errors import CorruptRecord, TierUnusable
from lmc.keys import ChunkKey
from lmc.storage.tiers import breaker
from lmc.storage.tiers.disk import DiskTier, files, index
from lmc.storage.tiers.disk import reader as disk_reader
from lmc.storage.tiers.disk import tier as disk
from lmc.storage.tiers.record import RecordMeta, checksum, encode_header, split_parts
from lmc.storage.tiers.tier import Written

K0, K1, K2, K3 = map(key_of, range(4))
ROOM = 100 * RECORD_BYTES


def path_of(root: Path, key: ChunkKey) -> Path:
    return root / "records" / key.hex()[:2] / f"{key.hex()}.safetensors"


def used(root: Path) -> int:
    """Bytes of all files under `root` besides the index, counted around the tier."""
    total = 0
    for folder, _, names in os.walk(root):
        for name in names:
            if name.startswith(index.FILE):
                continue
            try:
                total += os.lstat(os.path.join(folder, name)).st_size
            except FileNotFoundError:
                continue  # renamed or evicted meanwhile
    return total


@pytest.fixture
def tier(tmp_path):
    tier = DiskTier(tmp_path / "tier", ROOM)
    yield tier
    tier.close()


class TestDiskTier(LocalContract):
    @pytest.fixture
    def tier(self, tmp_path):
        tier = DiskTier(tmp_path / "tier", ROOM)
        yield tier
        assert tier.bytes == used(tier.root), "what the tier counts is what is there"
        tier.close()

    def raw_read(self, tier, key):
        path = path_of(tier.root, key)
        return path.read_bytes() if path.exists() else None

    def raw_write(self, tier, key, blob):
        path_of(tier.root, key).write_bytes(blob)


class TestDiskTierThatWritesWhileItSums(TestDiskTier):
    """Records that are large enough for it: the header is written last."""

    @pytest.fixture(autouse=True)
    def always(self, monkeypatch):
        monkeypatch.setattr(disk, "BESIDE_BYTES", 0)


def test_records_stay_known_while_their_file_system_is_not_mounted(tmp_path, monkeypatch):
    """The directory of the mount is there, and empty. Records were then forgotten, and not counted afterwards."""
    monkeypatch.setattr(breaker, "FIRST_PAUSE", 0.01)
    root, away = tmp_path / "tier", tmp_path / "away"
    with closing(DiskTier(root, 2 * RECORD_BYTES)) as tier:
        for key in (K0, K1):
            write(tier, key)
        root.rename(away)
        root.mkdir()
        with pytest.raises(OSError, match="records"):
            tier.delete(K1)
        with pytest.raises(OSError, match="records"):
            write(tier, K2)  # It would evict the oldest record.
        assert tier.open(K0) is None
        assert tier.contains([K0, K1]) == [False, False]
        root.rmdir()
        away.rename(root)
        eventually(lambda: tier.usable)
        assert tier.contains([K0, K1]) == [True, True]
        write(tier, K2)
        assert tier.contains([K0, K1, K2]) == [False, True, True]
        assert tier.bytes == used(root)


def test_another_directory_in_the_place_of_the_locked_one_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setattr(breaker, "FIRST_PAUSE", 60.0)
    root = tmp_path / "tier"
    with closing(DiskTier(root, ROOM)) as tier:
        write(tier, K0)
        root.rename(tmp_path / "away")
        with closing(DiskTier(root, ROOM)):
            assert tier.open(K0) is None
            assert not tier.usable


class TestDiskTierWithoutDirectIO(TestDiskTier):
    """A filesystem that refuses O_DIRECT, as tmpfs did before Linux 6.6."""

    @pytest.fixture
    def tier(self, tmp_path, monkeypatch):
        plain = os.open

        def no_direct(path, flags, *rest, **named):
            if flags & os.O_DIRECT:
                raise OSError(errno.EINVAL, "no direct I/O here")
            return plain(path, flags, *rest, **named)

        monkeypatch.setattr(os, "open", no_direct)
        tier = DiskTier(tmp_path / "tier", ROOM)
        yield tier
        tier.close()


# -- restarts --------------------------------------------------------------------------------------------------------


def test_a_restart_keeps_the_records_and_the_order_of_their_use(tmp_path):
    """Files had times of some milliseconds' grain, so that a quick sequence of uses came back in any order."""
    tier = DiskTier(tmp_path, ROOM)
    keys = [key_of(i) for i in range(30)]
    for key in keys:
        write(tier, key)
    random.Random(3).shuffle(keys)
    for key in keys:
        assert read(tier, key) is not None
    tier.close()
    tier = DiskTier(tmp_path, ROOM)
    assert [entry.key for entry in tier.entries()] == keys
    assert tier.contains([*keys, key_of("no")]) == [True] * 30 + [False]
    assert tier.bytes == 30 * RECORD_BYTES
    tier.close()
    tier = DiskTier(tmp_path, 3 * RECORD_BYTES)
    assert [entry.key for entry in tier.entries()] == keys[-3:], "a smaller bound is applied at start"
    tier.close()


def test_files_of_killed_writers_are_swept_at_start_and_others_left(tmp_path):
    """A folder in tmp/ that was named like a record kept the tier from opening."""
    DiskTier(tmp_path, ROOM).close()
    tmp = tmp_path / "tmp"
    (tmp / "17.safetensors").write_bytes(b"torn")
    (tmp / "model.safetensors").write_bytes(b"not ours")
    (tmp / "18.safetensors").mkdir()
    tier = DiskTier(tmp_path, ROOM)
    assert sorted(path.name for path in tmp.iterdir()) == ["18.safetensors", "model.safetensors"]
    assert list(tier.entries()) == []
    tier.close()


def test_a_file_that_vanished_behind_our_back_is_a_miss_and_is_no_longer_counted(tier):
    write(tier, K0)
    path_of(tier.root, K0).unlink()
    assert tier.open(K0) is None
    assert tier.contains([K0]) == [False]
    assert tier.bytes == 0
    write(tier, K0)


# -- the bound -------------------------------------------------------------------------------------------------------


def test_the_least_recently_used_record_goes_first(tmp_path):
    tier = DiskTier(tmp_path, 3 * RECORD_BYTES)
    for key in (K0, K1, K2):
        write(tier, key)
    read(tier, K0)
    write(tier, K3)
    assert tier.contains([K0, K1, K2, K3]) == [True, False, True, True]
    assert (tier.evictions, tier.bytes, used(tmp_path)) == (1, 3 * RECORD_BYTES, 3 * RECORD_BYTES)
    tier.close()


def test_uses_in_memory_count_and_hold_after_a_restart(tmp_path):
    tier = DiskTier(tmp_path, 3 * RECORD_BYTES)
    for key in (K0, K1, K2):
        write(tier, key)
    tier.note_use([K1, K0, b"x" * 32])
    write(tier, K3)
    assert tier.contains([K0, K1, K2, K3]) == [True, True, False, True]
    tier.note_use([K1])
    tier.close()
    assert [entry.key for entry in DiskTier(tmp_path, 3 * RECORD_BYTES, read_only=True).entries()] == [K0, K3, K1]
    tier = DiskTier(tmp_path, 3 * RECORD_BYTES)
    write(tier, K2)
    assert tier.contains([K0, K1, K2, K3]) == [False, True, True, True]
    tier.close()


def test_a_use_is_noted_while_files_are_removed(tmp_path, monkeypatch):
    """The scheduler notes it, and must not wait for the disk."""
    tier = DiskTier(tmp_path, 3 * RECORD_BYTES)
    write(tier, K0)
    unlink, removes, goes_on = Path.unlink, threading.Event(), threading.Event()

    def unlink_slowly(path, **named):
        removes.set()
        assert goes_on.wait(60)
        unlink(path, **named)

    monkeypatch.setattr(Path, "unlink", unlink_slowly)
    removing = threading.Thread(target=tier.delete, args=(K0,))
    noting = threading.Thread(target=tier.note_use, args=([K0],))
    removing.start()
    assert removes.wait(60)
    noting.start()
    noting.join(30)
    assert not noting.is_alive()
    goes_on.set()
    removing.join(60)
    tier.close()


def test_a_record_larger_than_the_tier_is_refused_and_evicts_nothing(tmp_path):
    tier = DiskTier(tmp_path, 2 * RECORD_BYTES)
    write(tier, K0)
    large = meta_of(K1, 3 * PARTS)
    assert tier.write(large, [stored(large)]) is Written.REFUSED
    assert tier.contains([K0, K1]) == [True, False]
    tier.close()


def test_several_writers_together_stay_within_the_bound(tmp_path, monkeypatch):
    """Room for two; four writers at once: those for whom nothing can be evicted are refused. They went beyond the
    bound.
    """
    tier = DiskTier(tmp_path, 2 * RECORD_BYTES)
    plain, everybody = files.write_new, threading.Barrier(3)

    def in_company(*arguments):
        plain(*arguments)
        everybody.wait(60)  # the two that write, and the test

    monkeypatch.setattr(files, "write_new", in_company)
    outcomes = []
    writers = [
        threading.Thread(target=lambda key=key: outcomes.append(tier.write(meta_of(key), [stored(meta_of(key))])))
        for key in (K0, K1)
    ]
    for writer in writers:
        writer.start()
    while tier.bytes < 2 * RECORD_BYTES:
        pass
    assert tier.write(meta_of(K2), [stored(meta_of(K2))]) is Written.REFUSED
    assert used(tmp_path) <= tier.bytes == 2 * RECORD_BYTES
    everybody.wait(60)
    for writer in writers:
        writer.join()
    assert outcomes == [Written.STORED] * 2
    tier.close()


def test_the_bound_holds_at_every_moment_under_concurrent_writers_and_readers(tmp_path):
    tier = DiskTier(tmp_path, 5 * RECORD_BYTES)
    keys, wrong, over, stop = [key_of(i) for i in range(20)], [], [], threading.Event()

    def work(seed: int) -> None:
        dice = random.Random(seed)
        for _ in range(60):
            key = dice.choice(keys)
            match dice.randrange(5):
                case 0:
                    tier.delete(key)
                case 1 | 2:
                    found = read(tier, key)
                    if found is not None and found != bytes(stored(meta_of(key))):
                        wrong.append(key)
                case _:
                    tier.write(meta_of(key), [stored(meta_of(key))])

    def watch() -> None:
        while not stop.is_set():
            if tier.bytes > tier.capacity:
                over.append(tier.bytes)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    watcher = threading.Thread(target=watch)
    watcher.start()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stop.set()
    watcher.join()
    assert (wrong, over) == ([], [])
    assert tier.bytes == used(tmp_path) <= tier.capacity
    assert tier.check() == []
    assert {entry.key for entry in tier.entries()} == {key for key in keys if tier.contains([key]) == [True]}
    tier.close()


def test_a_reader_that_came_too_early_does_not_make_the_tier_forget_a_newer_record(tier, monkeypatch):
    """Open finds no file; then a writer brings it; then open takes the key out of the index: the file was never counted
    again.
    """
    plain = disk_reader.open_to_read

    def overtaken(path):
        try:
            return plain(path)
        except FileNotFoundError:
            write(tier, K0)
            raise

    monkeypatch.setattr(disk_reader, "open_to_read", overtaken)
    assert tier.open(K0) is None
    monkeypatch.undo()
    assert tier.contains([K0]) == [True]
    assert tier.bytes == RECORD_BYTES


def test_two_writers_of_one_key_leave_one_record(tier, monkeypatch):
    plain = files.write_new

    def overtaken(*arguments):
        monkeypatch.undo()
        write(tier, K0)
        plain(*arguments)

    monkeypatch.setattr(files, "write_new", overtaken)
    write(tier, K0)
    assert tier.bytes == used(tier.root) == RECORD_BYTES
    assert read(tier, K0) == bytes(stored(meta_of(K0)))


def test_an_eviction_that_fails_leaves_the_record_readable(tmp_path, monkeypatch):
    """On a disk that turned read-only every write took one more record out of the index, though none could be
    removed.
    """
    tier = DiskTier(tmp_path, RECORD_BYTES)
    write(tier, K0)

    def refuse(self, missing_ok=False):
        raise OSError(errno.EROFS, "read-only file system")

    monkeypatch.setattr(Path, "unlink", refuse)
    for _ in range(3):
        with pytest.raises(OSError, match="read-only"):
            tier.write(meta_of(K1), [stored(meta_of(K1))])
    monkeypatch.undo()
    assert tier.contains([K0]) == [True]
    assert read(tier, K0) == bytes(stored(meta_of(K0)))
    assert tier.bytes == RECORD_BYTES
    tier.close()


# -- other files -----------------------------------------------------------------------------------------------------


def test_foreign_files_are_never_served_and_never_removed(tmp_path):
    tier = DiskTier(tmp_path, 3 * RECORD_BYTES)
    write(tier, K0)
    tier.close()
    shard = path_of(tmp_path, K0).parent
    foreign = [
        tmp_path / "notes.txt",
        tmp_path / "records" / "model.safetensors",
        tmp_path / "records" / "zz" / f"{K1.hex()}.safetensors",  # in the wrong folder
        shard / "model.safetensors",
        shard / f"{K0.hex()}.safetensors.bak",
        shard / f"{K0.hex().upper()}.safetensors",
        shard / ("0" * 63 + ".safetensors"),
    ]
    for path in foreign:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(raw_record(meta_of(K1)))
    tier = DiskTier(tmp_path, 3 * RECORD_BYTES)
    assert [entry.key for entry in tier.entries()] == [K0]
    assert tier.check(fix=True) == []
    assert tier.contains([K1]) == [False]
    for key in map(key_of, range(10, 16)):
        write(tier, key)
    tier.close()
    assert [path.read_bytes() == raw_record(meta_of(K1)) for path in foreign] == [True] * len(foreign)


def test_what_is_named_like_a_record_but_is_no_file_is_never_served(tmp_path, caplog):
    """A pipe under a record's name made its reader wait for ever; a link could show any file outside."""
    DiskTier(tmp_path, ROOM).close()
    outside = tmp_path / "outside"
    outside.write_bytes(raw_record(meta_of(K2)))
    for key in (K0, K1, K2):
        path_of(tmp_path, key).parent.mkdir(exist_ok=True)
    path_of(tmp_path, K0).mkdir()
    os.mkfifo(path_of(tmp_path, K1))
    path_of(tmp_path, K2).symlink_to(outside)
    tier = DiskTier(tmp_path, ROOM)
    assert list(tier.entries()) == []
    assert tier.contains([K0, K1, K2]) == [False] * 3
    for key in (K0, K1, K2):
        with pytest.raises(OSError, match=r"(directory|not a file|symbolic)"):
            tier.open(key)
    assert tier.check(fix=True) == []
    assert outside.exists()
    assert os.path.lexists(path_of(tmp_path, K1))
    tier.close()


def test_garbage_under_a_record_s_name_is_found_wrong_once_and_is_gone(tmp_path):
    DiskTier(tmp_path, ROOM).close()
    dice = random.Random(4)
    keys = [key_of(i) for i in range(40)]
    for key in keys:
        path_of(tmp_path, key).parent.mkdir(exist_ok=True)
        path_of(tmp_path, key).write_bytes(dice.randbytes(dice.choice([0, 3, 4096, 5000, 12288])))
    tier = DiskTier(tmp_path, ROOM)
    for key in keys:
        with pytest.raises(CorruptRecord):
            tier.open(key)
    assert (tier.corrupt, tier.bytes, used(tmp_path)) == (40, 0, 0)
    tier.close()


def test_flipped_bits_and_not_one_wrong_byte(tmp_path):
    tier = DiskTier(tmp_path, ROOM)
    dice, served, flips = random.Random(5), 0, some(1000)
    original = raw_record(meta_of(K0))
    right = bytes(stored(meta_of(K0)))
    for _ in range(flips):
        write(tier, K0)
        blob = bytearray(original)
        bit = dice.randrange(len(blob) * 8)
        blob[bit // 8] ^= 1 << bit % 8
        path_of(tmp_path, K0).write_bytes(blob)
        try:
            found = read(tier, K0)
        except CorruptRecord:
            continue
        served += 1
        assert found == right
    assert served == 0
    assert tier.corrupt == flips
    tier.close()


PLAIN = meta_of(K0)
CODED = replace(
    PLAIN, codec="planes2+lz4", sizes=(4096, 8192, 4096)
)  # as a codec leaves it: every part of its own size


def raw(meta: RecordMeta, body: bytes) -> bytes:
    """A record's file: the checksums are right, whatever else `meta` says."""
    views = split_parts([memoryview(body)], CODED.stored if meta.sizes else PLAIN.stored)
    sums = meta.checksums or tuple(map(checksum, views))
    return encode_header(replace(meta, checksums=sums)) + body


def sealed(header: bytes, changes: dict[str, str]) -> bytes:
    """The header with other metadata, and the digest that belongs to it."""
    text = json.loads(header[8:])
    said = {**text["__metadata__"], **changes}
    said.pop("digest")
    said["digest"] = f"{checksum(json.dumps(said).encode()):016x}"
    text["__metadata__"] = said
    blob = json.dumps(text, separators=(",", ":")).encode()
    size = -(-(8 + len(blob)) // 4096) * 4096
    return (size - 8).to_bytes(8, "little") + blob.ljust(size - 8)


def mutated(dice: random.Random, meta: RecordMeta, body: bytes) -> bytes:
    """A record's file that has met with something, or was made by somebody who knows the format."""
    blob = bytearray(raw(meta, body))
    numbers = [
        "0",
        "-1",
        "1",
        "2",
        "4",
        "4096",
        "8192",
        "12288",
        "16384",
        str(1 << 40),
        str(1 << 62),
        "9" * 30,
        "x",
        "",
    ]
    match dice.randrange(7):
        case 0:  # bits
            for _ in range(dice.choice([1, 1, 3, 50])):
                blob[dice.randrange(len(blob))] ^= 1 << dice.randrange(8)
        case 1:  # an end too early, on a block or not
            del blob[dice.choice([dice.randrange(len(blob)), dice.randrange(0, len(blob), 4096)]) :]
        case 2:  # more behind the end
            blob += dice.randbytes(dice.choice([1, 100, 4096, 8192, 40960]))
        case 3:  # another length of the header
            blob[:8] = dice.choice(
                [dice.randbytes(8), (dice.randrange(-8, 1 << 17) * 4096 - 8).to_bytes(8, "little", signed=True)]
            )
        case 4:  # blocks exchanged
            one, other = (4096 * dice.randrange(len(blob) // 4096) for _ in range(2))
            blob[one : one + 4096], blob[other : other + 4096] = blob[other : other + 4096], blob[one : one + 4096]
        case 5:  # metadata with a digest that is right
            names = [
                "parts",
                "part_bytes",
                "tokens",
                "first",
                "codec",
                "key",
                "namespace",
                "checksums",
                "sizes",
                "label",
            ]
            value = dice.choice([*numbers, ",".join(dice.choice(numbers) for _ in range(dice.choice([2, 3, 3, 4])))])
            blob[:4096] = sealed(bytes(blob[:4096]), {dice.choice(names): value})
        case _:  # a header that is right in itself, and another file
            other = replace(
                meta,
                parts=(parts := dice.choice([1, 2, 3, 3, 4, 400])),
                part_bytes=dice.choice([1, 4095, 4096, 4097, 8192, 1 << 40]),
                sizes=dice.choice(
                    [(), meta.sizes, tuple(4096 * dice.choice([1, 1, 2, 3, 1 << 28]) for _ in range(parts))]
                ),
                checksums=tuple(map(checksum, split_parts([memoryview(body)], meta.stored))) + (0,) * 397,
            )
            other = replace(other, checksums=other.checksums[:parts])
            blob[:4096] = encode_header(other)
            if dice.random() < 0.5 and other.offset(parts) < 1 << 16:
                blob = blob[: -len(body)] + body.ljust(other.offset(parts), b"\0")[: other.offset(parts)]
    return bytes(blob)


def test_mutated_files_are_misses_and_never_wrong_bytes(tmp_path, monkeypatch):
    """Nor does any of them make us allocate more than there is in the file (a length of 1 MiB before 16 KiB of file
    did).
    """
    tier, dice, taken = DiskTier(tmp_path, ROOM), random.Random(7), []
    path = path_of(tmp_path, K0)
    path.parent.mkdir()
    bodies = [
        (meta, b"".join(content(K0, part, size) for part, size in enumerate(meta.stored))) for meta in (PLAIN, CODED)
    ]
    plain = mmap.mmap
    monkeypatch.setattr(
        mmap, "mmap", lambda fd, size, *rest, **named: taken.append(size) or plain(fd, size, *rest, **named)
    )
    right, wrong, files = 0, 0, some(5000)
    for number in range(files):
        meta, body = bodies[number % 2]
        blob = mutated(dice, meta, body)
        path.write_bytes(blob)
        taken.clear()
        try:
            reader = tier.open(K0)
            try:
                for part, size in enumerate(reader.meta.stored):
                    assert size <= len(blob)
                    reader.read(part, 1, [into := memory(size)])
                    assert checksum(into) == reader.meta.checksums[part]
                    assert bytes(into) in bytes(body)
                    right += 1
            finally:
                reader.close()
        except CorruptRecord:
            wrong += 1
            assert not path.exists()
        assert sum(taken) <= 2 * len(blob) + 4096  # header and parts, and the first block once a thread
    assert wrong > 0.8 * files
    assert right > 0.1 * files, "records with another label, say: their bytes are right"
    tier.close()


def test_a_check_does_not_remove_what_it_cannot_read_for_the_moment(tier, monkeypatch):
    """With too many open files every record seemed wrong, and a check with fix removed them all."""
    write(tier, K0)

    def refuse(path):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(disk_reader, "open_to_read", refuse)
    assert [(f.problem, f.fixed) for f in tier.check(fix=True)] == [("[Errno 24] Too many open files", False)]
    monkeypatch.undo()
    assert read(tier, K0) == bytes(stored(meta_of(K0)))


def test_the_folder_of_unfinished_records_is_made_again(tier):
    """After a program for old files had removed it, nothing was written until the next start."""
    (tier.root / "tmp").rmdir()
    write(tier, K0)
    assert read(tier, K0) == bytes(stored(meta_of(K0)))
    shutil.rmtree(tier.root)
    with pytest.raises(FileNotFoundError):
        write(tier, K1)
    assert not tier.root.exists()


def test_corrupt_records_on_a_read_only_disk_cost_only_themselves(tier, monkeypatch):
    """Three of them made every record a miss, were not counted as corrupt, and a check ended with an error."""
    for key in (K0, K1, K2, K3):
        write(tier, key)
    for key in (K0, K1, K2):
        path_of(tier.root, key).write_bytes(b"\0" * RECORD_BYTES)

    def refuse(path, **_):
        raise OSError(errno.EROFS, "Read-only file system", path)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refuse)
        for key in (K0, K1, K2):
            with pytest.raises(CorruptRecord):
                tier.open(key)
        assert tier.usable
        assert read(tier, K3) == bytes(stored(meta_of(K3)))
        assert [finding.fixed for finding in tier.check(fix=True)] == [False] * 3
    assert [finding.fixed for finding in tier.check(fix=True)] == [True] * 3


# -- other processes, other rights -----------------------------------------------------------------------------------


def test_a_directory_in_use_is_refused_in_this_process_and_in_another(tmp_path):
    tier = DiskTier(tmp_path, ROOM)
    with pytest.raises(TierUnusable, match="in use by another process"):
        DiskTier(tmp_path, ROOM)
    script = (
        "import sys\nfrom lmc.errors import TierUnusable\nfrom lmc.storage.tiers.disk import DiskTier\n"
        "try: DiskTier(sys.argv[1], 10**6)\nexcept TierUnusable as error: print(error)\n"
    )
    run = subprocess.run([sys.executable, "-c", script, tmp_path], capture_output=True, text=True, check=True)
    assert "in use by another process" in run.stdout
    tier.close()
    DiskTier(tmp_path, ROOM).close()


@pytest.mark.parametrize("where", ["file", "file/below"])
def test_a_place_that_cannot_be_written_is_refused_with_its_name(tmp_path, where):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(TierUnusable, match=rf"cannot write to disk tier .*{where}"):
        DiskTier(tmp_path / where, ROOM)


@pytest.mark.parametrize("shut", ["records", "tmp"])
def test_a_directory_without_the_right_to_write_is_refused_at_start(shut):
    """With `records` or `tmp` of another user it opened, and every write failed."""
    place = Path(tempfile.mkdtemp())  # not tmp_path, which only its owner can enter
    root = place / "tier"
    user = os.geteuid()
    try:
        DiskTier(root, ROOM).close()
        place.chmod(0o755)
        for folder in (root, root / "records", root / "tmp"):
            folder.chmod(0o777)
        (root / "lock").chmod(0o666)
        (root / shut).chmod(0o555)
        if user == 0:
            os.seteuid(65534)
        with pytest.raises(TierUnusable, match=r"cannot write to disk tier .*Permission denied"):
            DiskTier(root, ROOM)
    finally:
        os.seteuid(user)
        shutil.rmtree(place)


def test_more_than_the_filesystem_has_is_refused_at_start_with_both_numbers(tmp_path):
    there = os.statvfs(tmp_path)
    whole = there.f_blocks * there.f_frsize
    with pytest.raises(
        TierUnusable, match=r"may take [\d.]+ GiB \(max_local_disk_size\), but its filesystem has [\d.]+ GiB"
    ):
        DiskTier(tmp_path, 2 * whole)
    DiskTier(tmp_path, whole).close()  # the refused one has let go; and whether so much is free now is not asked
    DiskTier(tmp_path, files.UNBOUNDED).close()
    DiskTier(tmp_path, 2 * whole, read_only=True).close()


def test_a_forked_child_does_not_keep_the_directory(tmp_path):
    """A child has the same lock, which lasted as long as the last child, even after the parent had ended."""
    tier = DiskTier(tmp_path, ROOM)
    (wait, go), (hear, say) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.write(say, b".")
        os.read(wait, 1)
        os._exit(0)
    try:
        os.read(hear, 1)
        tier.close()
        DiskTier(tmp_path, ROOM).close()
    finally:
        os.write(go, b".")
        os.waitpid(child, 0)
        for end in (wait, go, hear, say):
            os.close(end)


def test_a_directory_that_cannot_be_listed_is_refused_and_is_not_left_locked(tmp_path, monkeypatch):
    """The constructor raised a bare error and kept the lock."""

    def refuse(path):
        raise PermissionError(errno.EACCES, "Permission denied", path)

    monkeypatch.setattr(disk.os, "scandir", refuse)
    with pytest.raises(TierUnusable, match=r"cannot read disk tier .*Permission denied"):
        DiskTier(tmp_path, ROOM)
    monkeypatch.undo()
    DiskTier(tmp_path, ROOM).close()


def test_a_read_only_tier_reads_while_the_owner_writes(tmp_path):
    with pytest.raises(TierUnusable, match="no disk tier"):
        DiskTier(tmp_path, ROOM, read_only=True)
    owner = DiskTier(tmp_path, ROOM)
    write(owner, K0)
    guest = DiskTier(tmp_path, ROOM, read_only=True)
    assert read(guest, K0) == bytes(stored(meta_of(K0)))
    write(owner, K1)
    assert guest.contains([K0, K1, K2]) == [True, True, False]
    assert read(guest, K1) == bytes(stored(meta_of(K1)))
    assert guest.write(meta_of(K2), [stored(meta_of(K2))]) is Written.REFUSED
    owner.delete(K0)
    assert guest.open(K0) is None
    assert guest.check() == []
    guest.close()
    owner.close()


def test_a_read_only_tier_removes_nothing(tmp_path):
    """Earlier, `delete` of a read-only tier removed the owner's record."""
    owner = DiskTier(tmp_path, ROOM)
    write(owner, K0)
    write(owner, K1)
    path_of(tmp_path, K1).write_bytes(b"garbage")
    (tmp_path / "tmp" / "9.safetensors").write_bytes(b"torn")
    guest = DiskTier(tmp_path, 1, read_only=True)
    assert guest.delete(K0) is False
    with pytest.raises(CorruptRecord):
        guest.open(K1)
    assert [finding.fixed for finding in guest.check(fix=True)] == [False, False]
    guest.close()
    assert path_of(tmp_path, K0).exists()
    assert path_of(tmp_path, K1).exists()
    owner.close()


@pytest.mark.parametrize("umask", [0, 0o022, 0o077])
def test_nobody_else_may_read_what_is_stored(tmp_path, umask):
    """Whatever the process allows by default; missing folders above the tier were open to all."""
    before = os.umask(umask)
    try:
        tier = DiskTier(tmp_path / "new" / "tier", ROOM)
        write(tier, K0)
        tier.close()
    finally:
        os.umask(before)
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "new").rglob("*") if path.is_file()}
    folders = [tmp_path / "new", *(path for path in (tmp_path / "new").rglob("*") if path.is_dir())]
    assert modes == {0o600}
    assert {stat.S_IMODE(path.stat().st_mode) for path in folders} == {0o700}


# -- full disks and other filesystems --------------------------------------------------------------------------------


class SmallDisk:
    """Answers `pwritev` as a disk with `room` bytes would; a removed file makes room again."""

    def __init__(self, root: Path, room: int) -> None:
        self.root, self.room, self.plain = root, room, os.pwritev

    def __call__(self, fd, views, offset):
        size = sum(map(len, views))
        if used(self.root) - os.fstat(fd).st_size + offset + size > self.room:
            half = views[0][: len(views[0]) // 2 // 4096 * 4096]
            if len(half) and offset == 0:
                self.plain(fd, [half], offset)  # as much as still fits, then no more
            raise OSError(errno.ENOSPC, "No space left on device")
        return self.plain(fd, views, offset)


def test_a_full_disk_costs_older_records_then_the_new_one_and_reading_goes_on(tmp_path, monkeypatch, caplog):
    tier, kept, new = DiskTier(tmp_path, ROOM), disk.TRIES, key_of(100)
    full = SmallDisk(tmp_path, kept * RECORD_BYTES)
    monkeypatch.setattr(os, "pwritev", full)
    keys = [key_of(number) for number in range(kept + 1)]
    for key in keys:
        write(tier, key)
    assert tier.contains(keys) == [False, *[True] * kept], "an older record made room"
    assert caplog.records == []
    full.room = 0  # somebody else took it all
    with caplog.at_level(logging.WARNING):
        assert tier.write(meta_of(new), [stored(meta_of(new))]) is Written.REFUSED
        assert tier.write(meta_of(K0), [stored(meta_of(K0))]) is Written.REFUSED
    assert len(caplog.records) == 1
    assert "no space left" in caplog.text
    assert read(tier, keys[-1]) == bytes(stored(meta_of(keys[-1])))
    assert list((tmp_path / "tmp").iterdir()) == []
    assert tier.bytes == used(tmp_path) == RECORD_BYTES, "an eviction before each retry"
    full.room = ROOM
    monkeypatch.setattr(time, "monotonic", lambda: math.inf)  # The pause is over.
    write(tier, new)
    tier.close()


def test_a_directory_that_cannot_be_read_is_left_alone_until_it_can(tmp_path, caplog):
    root = tmp_path / "disk"
    tier = DiskTier(root, ROOM)
    write(tier, K0)
    records, aside = root / "records", tmp_path / "aside"
    records.rename(aside)
    records.write_text("no directory")
    for _ in range(3):
        assert tier.usable
        assert tier.contains([K0]) == [True]
        with pytest.raises(NotADirectoryError):
            tier.open(K0)
    assert (tier.usable, tier.contains([K0]), tier.open(K0)) == (False, [False], None)
    assert tier.write(meta_of(K1), [stored(meta_of(K1))]) is Written.REFUSED
    assert caplog.text.count("its chunks are misses until it answers") == 1
    records.unlink()
    aside.rename(records)
    eventually(lambda: tier.usable)
    assert tier.contains([K0]) == [True]
    assert read(tier, K0) == bytes(stored(meta_of(K0)))
    tier.close()


def test_a_directory_that_cannot_be_written_is_still_read(tmp_path, monkeypatch, caplog):
    tier = DiskTier(tmp_path, ROOM)
    write(tier, K0)
    with monkeypatch.context() as patch:
        patch.setattr(files, "write_new", raising(OSError(errno.EROFS, "Read-only file system")))
        for _ in range(3):
            with pytest.raises(OSError, match="Read-only"):
                tier.write(meta_of(K1), [stored(meta_of(K1))])
        assert tier.write(meta_of(K1), [stored(meta_of(K1))]) is Written.REFUSED
    assert "cannot be written (Read-only file system); storing pauses for 30 s, reading goes on" in caplog.text
    assert tier.usable
    assert read(tier, K0) == bytes(stored(meta_of(K0)))
    monkeypatch.setattr(time, "monotonic", lambda: math.inf)  # The pause is over.
    write(tier, K1)
    tier.close()


def raising(error):
    def fail(*_, **__):
        raise error

    return fail


def test_two_writers_on_a_full_disk_complain_once(tmp_path, monkeypatch, caplog):
    tier = DiskTier(tmp_path, ROOM)
    together = threading.Barrier(2)

    def full(fd, views, offset):
        together.wait(60)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwritev", full)
    writers = [threading.Thread(target=tier.write, args=(meta_of(key), [stored(meta_of(key))])) for key in (K0, K1)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert len(caplog.records) == 1
    assert tier.bytes == 0
    tier.close()


@pytest.fixture
def small_mount(tmp_path):
    """A real filesystem of 1 MiB, where this process may mount one."""
    place = tmp_path / "small"
    place.mkdir()
    if not mounted(place, *SMALL_FILESYSTEM):
        yield None
        return
    yield place
    unmounted(place)


def test_a_really_full_filesystem_evicts_and_goes_on(small_mount, tmp_path, monkeypatch):
    if small_mount is None:
        small_mount = tmp_path
        monkeypatch.setattr(os, "pwritev", SmallDisk(tmp_path, 1 << 20))
    tier = DiskTier(small_mount, files.UNBOUNDED)
    keys = [key_of(i) for i in range(100)]
    outcomes = [tier.write(meta_of(key), [stored(meta_of(key))]) for key in keys]
    assert outcomes == [Written.STORED] * 100
    assert tier.contains(keys[-10:]) == [True] * 10
    assert 30 <= tier.evictions < 90
    assert tier.check() == []
    tier.close()


def test_memory_filesystems_work(tmp_path):
    shm = Path("/dev/shm")
    place = (shm if shm.is_dir() and os.access(shm, os.W_OK) else tmp_path) / f"lmc-test-{os.getpid()}"
    try:
        tier = DiskTier(place, ROOM)
        for key in (K0, K1):
            write(tier, key)
            assert read(tier, key) == bytes(stored(meta_of(key)))
        reader = tier.open(K0)
        into = memory(PART_BYTES, offset=5)
        reader.read(2, 1, [into])
        reader.close()
        assert bytes(into) == content(K0, 2)
        assert tier.check() == []
        tier.close()
    finally:
        shutil.rmtree(place, ignore_errors=True)


def test_a_record_of_thousands_of_parts_is_written_and_read(tmp_path):
    """More views than one call of the kernel takes, and a header of several blocks."""
    tier = DiskTier(tmp_path, 1 << 26)
    meta = meta_of(K0, parts=2500, part_bytes=8)
    whole = stored(meta)
    views = [whole[at : at + 4096] for at in range(0, len(whole), 4096)]
    assert tier.write(meta, views) is Written.STORED
    into = [memory(4096) for _ in range(2500)]
    reader = tier.open(K0)
    reader.read(0, 2500, into)
    reader.close()
    assert b"".join(into) == bytes(whole)
    tier.close()


def test_a_short_write_is_continued(tier, monkeypatch):
    plain = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda fd, views, offset: plain(fd, [views[0][:4096]], offset))
    write(tier, K0)
    monkeypatch.undo()
    assert read(tier, K0) == bytes(stored(meta_of(K0)))


def test_a_short_read_is_continued(tier, monkeypatch):
    write(tier, K0)
    plain = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, views, offset: plain(fd, [views[0][:4096]], offset))
    assert read(tier, K0) == bytes(stored(meta_of(K0)))


def test_a_failed_write_leaves_nothing_behind(tier, monkeypatch):
    def fail(fd, views, offset):
        raise OSError(errno.EIO, "I/O error")

    monkeypatch.setattr(os, "pwritev", fail)
    with pytest.raises(OSError, match="I/O error"):
        tier.write(meta_of(K0), [stored(meta_of(K0))])
    assert (tier.bytes, used(tier.root), tier.contains([K0])) == (0, 0, [False])


@pytest.mark.parametrize("outcome", ["refused", "fails"])
def test_a_write_that_ends_early_does_not_read_the_slot_any_more(tmp_path, monkeypatch, outcome):
    """A thread still computed checksums of a slot when the write had been refused, and the slot was given to others."""
    tier = DiskTier(tmp_path, ROOM if outcome == "fails" else RECORD_BYTES - 1)
    begun, gate, events = threading.Event(), threading.Event(), []

    def slow_checksum(view):
        begun.set()
        gate.wait(60)
        events.append("read")
        return checksum(view)

    def fail(fd, views, offset):
        raise OSError(errno.EIO, "I/O error")

    def write_one():
        try:
            events.append(tier.write(meta_of(K0), [stored(meta_of(K0))]))
        except OSError as error:
            events.append(error.errno)

    monkeypatch.setattr(disk, "BESIDE_BYTES", 0)
    monkeypatch.setattr(
        disk, "checksums", lambda meta, parts: tuple(map(slow_checksum, split_parts(parts, meta.stored)))
    )
    # The header is made when the thread reads already.
    monkeypatch.setattr(disk, "encode_header", lambda meta: begun.wait(60) and encode_header(meta))
    monkeypatch.setattr(os, "pwritev", fail)
    writer = threading.Thread(target=write_one)
    writer.start()
    begun.wait(60)
    writer.join(0.2)  # It would end now if it did not wait.
    gate.set()
    writer.join(60)
    tier.close()
    assert events == ["read"] * PARTS + [errno.EIO if outcome == "fails" else Written.REFUSED]


def test_readers_give_back_their_files(tier):
    """Also when the record is wrong, or the time of its use cannot be written."""
    write(tier, K0)
    before = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
    for _ in range(20):
        read(tier, K0)
    path_of(tier.root, K0).write_bytes(b"garbage")
    with pytest.raises(CorruptRecord):
        tier.open(K0)
    assert (len(os.listdir("/proc/self/fd")) if before else 0) == before


# -- first parts beside the header -----------------------------------------------------------------------------------


def test_first_parts_are_read_together_with_the_header(tmp_path):
    with closing(DiskTier(tmp_path, 1 << 20)) as tier:
        write(tier, K0)
        into = memory(2 * PART_BYTES)
        tier.announce([K0], [[into]])
        with closing(tier.open(K0)) as reader:
            assert bytes(into) == content(K0, 0) + content(K0, 1)
            reader.read(0, 2, [into])
            reader.read(2, 1, [into[:PART_BYTES]])
        assert bytes(into[:PART_BYTES]) == content(K0, 2)


@pytest.mark.parametrize("expected", [PART_BYTES, 2 * PART_BYTES, 5 * PART_BYTES])
@pytest.mark.parametrize("offset", [0, 7])
def test_what_was_expected_otherwise_is_read_again(tmp_path, expected, offset):
    """A record of smaller parts, memory that direct I/O does not take, another place than was said: only reading
    decides.
    """
    with closing(DiskTier(tmp_path, 1 << 20)) as tier:
        small = meta_of(K1, PARTS, 100)
        write(tier, K0)
        tier.write(small, [stored(small)])
        for meta in (meta_of(K0), small):
            early, into = memory(expected, offset), memory(PARTS * meta.stored_part)
            tier.announce([meta.key], [[early]])
            with closing(tier.open(meta.key)) as reader:
                reader.read(0, PARTS, [into])
                assert bytes(into) == bytes(stored(meta))
                reader.read(0, 1, [early[: meta.stored_part]])
                assert bytes(early[: meta.stored_part]) == bytes(stored(meta)[: meta.stored_part])


def test_a_damaged_first_part_is_found_although_it_came_early(tmp_path):
    with closing(DiskTier(tmp_path, 1 << 20)) as tier:
        write(tier, K0)
        path = path_of(tmp_path, K0)
        blob = bytearray(path.read_bytes())
        blob[4096 + 5] ^= 1
        path.write_bytes(blob)
        into = memory(PART_BYTES)
        tier.announce([K0], [[into]])
        with closing(tier.open(K0)) as reader, pytest.raises(CorruptRecord):
            reader.read(0, 1, [into])
        assert tier.contains([K0]) == [False]
