"""The index of the disk tier: starts without reading records, killed processes, lost and damaged databases."""

import errno
import logging
import os
import random
import shutil
import sqlite3
import sys
import threading
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from storage_fakes import RECORD_BYTES, ended, eventually, key_of, meta_of, raw_record, stored, threads_named
from test_disk import path_of, raising
from tier_contract import read, write

from lmc.errors import TierUnusable
from lmc.keys import RecordKind
from lmc.storage.change_log import ChangeLog
from lmc.storage.tiers.disk import DiskTier, index
from lmc.storage.tiers.disk import tier as disk
from lmc.storage.tiers.record import RecordMeta
from lmc.storage.tiers.tier import Written

KEYS = [key_of(number) for number in range(12)]
ROOM, ROOMY = 100 * RECORD_BYTES, 2000 * RECORD_BYTES


def filled(root: Path, keys=KEYS) -> DiskTier:
    tier = DiskTier(root, ROOM)
    for number, key in enumerate(keys):
        kind = RecordKind.DOCUMENT if number % 2 else RecordKind.PAGES
        meta = replace(meta_of(key), kind=kind, label=f"label {number}", model="model", tenant=f"tenant {number}")
        tier.write(meta, [stored(meta)])
    return tier


def killed(tier: DiskTier, to: Path) -> Path:
    """The directory as a process that is killed now would leave it."""
    shutil.copytree(tier.root, to)
    return to


def indexed(meta: RecordMeta) -> RecordMeta:
    return replace(meta, sizes=(), checksums=())


def refuse(*_, **__):
    raise AssertionError("a record was read")


def order(tier: DiskTier) -> list:
    return [entry.key for entry in tier.entries()]


def rows_of(tier: DiskTier) -> index.DiskIndex:
    """The index of a tier."""
    return tier._rows


def commit(tier):
    """Commit the changes of a tier's index now; whether that succeeded."""
    return rows_of(tier).flush()


def settled(tier: DiskTier) -> DiskTier:
    """The tier when it has compared its index with its directory."""
    for comparing in threads_named("lmc-disk-compare"):
        ended(comparing)
    return tier


@pytest.fixture(autouse=True)
def no_rests(monkeypatch):
    monkeypatch.setattr(disk, "REST_SECONDS", 0.0)


# -- a start ---------------------------------------------------------------------------------------------------------


def test_a_start_reads_no_record(tmp_path, monkeypatch):
    with closing(filled(tmp_path)) as tier:
        expected = []
        for key in KEYS:
            with closing(tier.open(key)) as reader:
                expected.append(indexed(reader.meta))
    monkeypatch.setattr(disk, "DiskReader", refuse)
    with closing(DiskTier(tmp_path, ROOM)) as tier:
        newest_first = expected[::-1]
        documents_first = sorted(newest_first, key=lambda meta: meta.kind is not RecordKind.DOCUMENT)
        assert [meta for meta, _ in tier.headers()] == documents_first
        settled(tier)
        assert tier.contains(KEYS) == [True] * len(KEYS)
        assert tier.bytes == len(KEYS) * RECORD_BYTES
        assert tier.faults() == []


def test_the_order_of_use_and_the_kinds_survive(tmp_path):
    shuffled = random.Random(0).sample(KEYS, len(KEYS))
    with closing(filled(tmp_path)) as tier:
        for key in shuffled:
            read(tier, key)
    with closing(DiskTier(tmp_path, ROOM, document_share=0.5)) as tier:
        assert order(tier) == shuffled
        tier.capacity = 0
        tier.trim()
        assert tier.document_evictions == len(KEYS) // 2
    with closing(DiskTier(tmp_path, ROOM)) as tier:
        assert list(tier.headers()) == []


def test_a_record_that_was_removed_or_replaced_does_not_come_back(tmp_path):
    with closing(filled(tmp_path)) as tier:
        tier.delete(KEYS[0])
        tier.delete(KEYS[1])
        write(tier, KEYS[1])
    with closing(DiskTier(tmp_path, ROOM)) as tier:
        assert {meta.key: meta.label for meta, _ in tier.headers()}.keys() == {*KEYS[1:]}
        assert [meta.label for meta, _ in tier.headers() if meta.key == KEYS[1]] == [""]


# -- killed processes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("committed", [0, 5, 12])
def test_records_without_a_row_are_found_after_a_kill(tmp_path, committed, monkeypatch):
    monkeypatch.setattr(index, "COMMIT_SECONDS", 3600.0)
    tier = filled(tmp_path / "live", KEYS[:committed])
    assert commit(tier)
    for key in KEYS[committed:]:
        write(tier, key)
    left = killed(tier, tmp_path / "killed")
    tier.close()
    with closing(DiskTier(left, ROOM)) as again:
        changes = ChangeLog()
        again.report_to(changes)
        assert {meta.key for meta, _ in again.headers()} == {*KEYS}
        assert {chunk.key for chunk in changes.present()[1]["disk"]} == {*KEYS}
        assert again.bytes == len(KEYS) * RECORD_BYTES
        assert again.check() == []


def test_rows_without_a_record_are_forgotten_after_a_kill(tmp_path, monkeypatch):
    monkeypatch.setattr(index, "COMMIT_SECONDS", 3600.0)
    tier = filled(tmp_path / "live")
    assert commit(tier)
    for key in KEYS[:5]:
        tier.delete(key)
    left = killed(tier, tmp_path / "killed")
    tier.close()
    with closing(DiskTier(left, ROOM)) as again:
        assert again.contains(KEYS) == [False] * 5 + [True] * 7
        assert {meta.key for meta, _ in again.headers()} == {*KEYS[5:]}
        assert again.bytes == 7 * RECORD_BYTES
        assert again.faults() == []


def test_a_close_while_changes_are_being_committed_ends(tmp_path, monkeypatch):
    """The thread that commits cleared the event with which the close had just woken it, and waited for ever."""
    closing = threading.Thread(target=lambda: rows.close())  # noqa: PLW0108 - `rows` is made later.
    woken, cleared = threading.Event(), []

    class ClosedMeanwhile(threading.Event):
        def set(self):
            super().set()
            if self in cleared:
                woken.set()

        def clear(self):
            cleared.append(self)
            closing.start()
            assert woken.wait(60)
            super().clear()

    monkeypatch.setattr(index, "COMMIT_SECONDS", 0.0)
    with monkeypatch.context() as patch:
        patch.setattr(threading, "Event", ClosedMeanwhile)
        rows = index.DiskIndex(tmp_path)
    (thread,) = threads_named("lmc-disk-index")
    rows.use(KEYS[0], 1)
    ended(thread)
    ended(closing)


def test_changes_are_committed_without_a_request(tmp_path, monkeypatch):
    monkeypatch.setattr(index, "COMMIT_SECONDS", 0.01)
    with closing(filled(tmp_path)) as tier:
        eventually(lambda: len(index.read_uses(tmp_path)) == len(KEYS))
        read(tier, KEYS[0])
        eventually(lambda: max(uses := index.read_uses(tmp_path), key=uses.get) == KEYS[0])


def test_uses_in_memory_survive_a_killed_process(tmp_path, monkeypatch):
    """What memory serves for days would be evicted first after a kill."""
    monkeypatch.setattr(disk, "USES_SECONDS", 0.01)
    with closing(filled(tmp_path / "tier")) as tier:
        tier.note_use([KEYS[0]])
        eventually(lambda: order(tier)[-1] == KEYS[0])
        with closing(DiskTier(killed(tier, tmp_path / "killed"), ROOM)) as again:
            assert order(again)[-1] == KEYS[0]


def test_headers_have_the_key_objects_of_the_tier(tmp_path):
    """An engine keeps both, and a million keys take 80 MB."""
    filled(tmp_path).close()
    with closing(DiskTier(tmp_path, ROOM)) as tier:
        objects = {id(key) for key in tier.all_keys()}
        assert {id(meta.key) for meta, _ in tier.headers()} == objects


# -- directories that others have changed ----------------------------------------------------------------------------


def test_an_older_directory_is_taken_over_in_place(tmp_path):
    """A directory of an older version has no index: the order of use is that of the files' times."""
    shuffled = random.Random(1).sample(KEYS, len(KEYS))
    for number, key in enumerate(shuffled):
        path = path_of(tmp_path, key)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(raw_record(meta_of(key)))
        os.utime(path, (1000 + number, 1000 + number))
    with closing(DiskTier(tmp_path, ROOM)) as tier:
        assert [(meta.key, used) for meta, used in tier.headers()] == [
            (key, 1000 + number) for number, key in reversed([*enumerate(shuffled)])
        ]
        assert order(tier) == shuffled
        assert [entry.used for entry in tier.entries()] == [1000 + number for number in range(len(KEYS))]


def test_what_others_have_added_and_removed_is_noticed_in_the_background(tmp_path):
    filled(tmp_path, KEYS[:6]).close()
    path_of(tmp_path, KEYS[0]).unlink()
    path_of(tmp_path, KEYS[7]).parent.mkdir(exist_ok=True)
    path_of(tmp_path, KEYS[7]).write_bytes(raw_record(meta_of(KEYS[7])))
    path_of(tmp_path, KEYS[8]).parent.mkdir(exist_ok=True)
    path_of(tmp_path, KEYS[8]).write_bytes(b"garbage")
    with closing(DiskTier(tmp_path, ROOM)) as tier:
        settled(tier)
        assert tier.contains([KEYS[0], KEYS[1], KEYS[7], KEYS[8]]) == [False, True, True, True]
        assert tier.bytes == 6 * RECORD_BYTES + len(b"garbage")
        assert read(tier, KEYS[7]) == bytes(stored(meta_of(KEYS[7])))
        assert tier.faults() == []
    with closing(DiskTier(tmp_path, ROOM)) as tier:
        assert {meta.key for meta, _ in tier.headers()} == {*KEYS[1:6], KEYS[7]}


def test_nothing_is_forgotten_while_the_records_are_away(tmp_path, monkeypatch):
    """For example, because the filesystem is not mounted."""
    filled(tmp_path).close()
    listdir, gone, listed = os.listdir, threading.Event(), []

    def list_later(folder):
        if Path(folder).parent == tmp_path / "records":
            assert gone.wait(60)
            listed.append(folder)
        return listdir(folder)

    monkeypatch.setattr(disk.os, "listdir", list_later)
    with closing(DiskTier(tmp_path, ROOM)) as tier:
        (tmp_path / "records").rename(tmp_path / "away")
        gone.set()
        settled(tier)
        (tmp_path / "away").rename(tmp_path / "records")
        assert len(listed) == disk.SHARDS
        assert tier.contains(KEYS) == [True] * len(KEYS)
        assert len(list(tier.headers())) == len(KEYS)


def test_an_index_is_not_trusted_after_a_start_that_failed(tmp_path, monkeypatch):
    monkeypatch.setattr(index, "COMMIT_SECONDS", 3600.0)
    tier = filled(tmp_path / "live")
    left = killed(tier, tmp_path / "killed")
    tier.close()
    with monkeypatch.context() as patch:
        patch.setattr(disk.os, "listdir", raising(PermissionError(errno.EACCES, "Permission denied")))
        with pytest.raises(TierUnusable, match="Permission denied"):
            DiskTier(left, ROOM)
    with closing(DiskTier(left, ROOM)) as tier:
        assert {meta.key for meta, _ in tier.headers()} == {*KEYS}


def test_a_guest_knows_the_uses_of_the_owner(tmp_path, monkeypatch):
    monkeypatch.setattr(index, "COMMIT_SECONDS", 0.01)
    with closing(filled(tmp_path)) as owner, closing(DiskTier(tmp_path, ROOM, read_only=True)) as guest:
        read(owner, KEYS[3])
        eventually(lambda: order(guest)[-1] == KEYS[3])
        assert {*order(guest)} == {*KEYS}


# -- damaged and lost databases --------------------------------------------------------------------------------------


def damage(path: Path, dice: random.Random) -> None:
    blob = bytearray(path.read_bytes())
    match dice.randrange(4):
        case 0:
            blob = bytearray(dice.randbytes(len(blob)))
        case 1:
            del blob[dice.randrange(len(blob)) :]
        case 2:
            at = dice.randrange(0, len(blob), 512)
            blob[at : at + 512] = dice.randbytes(512)
        case _:
            blob[dice.randrange(len(blob))] ^= 1 << dice.randrange(8)
    path.write_bytes(blob)


@pytest.mark.parametrize("seed", range(40))
def test_a_damaged_database_loses_no_record(tmp_path, seed):
    filled(tmp_path).close()
    damage(tmp_path / index.FILE, random.Random(seed))
    with closing(DiskTier(tmp_path, ROOM)) as tier:
        list(tier.headers())
        settled(tier)
        assert tier.contains(KEYS) == [True] * len(KEYS)
        assert tier.faults() == []
        for key in KEYS:
            assert read(tier, key) is not None
    with closing(DiskTier(tmp_path, ROOM)) as tier:
        assert settled(tier).contains(KEYS) == [True] * len(KEYS)


def test_a_damaged_database_that_can_be_read_is_built_anew_at_the_next_start(tmp_path, monkeypatch):
    def malformed(*_):
        raise sqlite3.DatabaseError("database disk image is malformed")

    tier = filled(tmp_path)
    assert commit(tier)
    monkeypatch.setattr(index.DiskIndex, "_commit", malformed)
    tier.delete(KEYS[0])
    tier.close()
    assert not list(tmp_path.glob("index*"))
    monkeypatch.undo()
    with closing(DiskTier(tmp_path, ROOM)) as tier:
        assert {meta.key for meta, _ in tier.headers()} == {*KEYS[1:]}


def test_a_lost_database_is_built_anew_with_a_warning_only_if_it_was_damaged(tmp_path, caplog):
    filled(tmp_path).close()
    (tmp_path / index.FILE).unlink()
    with closing(DiskTier(tmp_path, ROOM)) as tier:
        assert {meta.key for meta, _ in tier.headers()} == {*KEYS}
    assert caplog.records == []
    (tmp_path / index.FILE).write_bytes(b"not a database" * 100)
    with closing(DiskTier(tmp_path, ROOM)) as tier:
        assert {meta.key for meta, _ in tier.headers()} == {*KEYS}
    assert "cannot be used (file is not a database) and is rebuilt" in caplog.text


def test_a_database_of_another_version_is_built_anew(tmp_path, caplog):
    filled(tmp_path).close()
    with closing(sqlite3.connect(tmp_path / index.FILE)) as database:
        database.execute("PRAGMA user_version = 99")
    with closing(DiskTier(tmp_path, ROOM)) as tier:
        assert {meta.key for meta, _ in tier.headers()} == {*KEYS}
    assert "it has version 99 instead of 1" in caplog.text


def full(*_):
    raise sqlite3.OperationalError("database or disk is full")


def test_a_database_that_cannot_be_written_costs_only_the_next_start_time(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(index, "COMMIT_SECONDS", 0.01)
    with closing(filled(tmp_path, KEYS[:6])) as tier, monkeypatch.context() as patch:
        assert commit(tier)
        patch.setattr(index.DiskIndex, "_commit", full)
        for key in KEYS[6:]:
            write(tier, key)
        eventually(lambda: "cannot be written (database or disk is full)" in caplog.text)
        assert read(tier, KEYS[9]) is not None
        tier.close()
    assert caplog.text.count("cannot be written") == 1
    with closing(DiskTier(tmp_path, ROOM)) as tier:
        assert {meta.key for meta, _ in tier.headers()} == {*KEYS}


def test_changes_that_could_not_be_committed_are_committed_later(tmp_path, monkeypatch):
    monkeypatch.setattr(index, "COMMIT_SECONDS", 3600.0)  # The thread commits nothing before the test does.
    with closing(filled(tmp_path, KEYS[:6])) as tier:
        with monkeypatch.context() as patch:
            patch.setattr(
                index.DiskIndex, "_commit", lambda *_: (_ for _ in ()).throw(sqlite3.OperationalError("busy"))
            )
            assert not commit(tier)
            tier.delete(KEYS[0])
        assert commit(tier)
        assert rows_of(tier).uses().keys() == {*KEYS[1:6]}


def test_changes_that_cannot_be_committed_for_long_take_no_more_memory(tmp_path, monkeypatch):
    """Earlier, such changes were kept as long as the process ran. Without them, the index is rebuilt."""
    monkeypatch.setattr(index, "COMMIT_SECONDS", 3600.0)
    monkeypatch.setattr(index, "MAX_WAITING", 8)
    monkeypatch.setattr(index, "PATIENCE_SECONDS", 0.01)
    metas = [replace(meta_of(key), label=f"label of {number}") for number, key in enumerate(KEYS)]
    references = list(map(sys.getrefcount, metas))
    with closing(DiskTier(tmp_path, ROOM)) as tier, closing(sqlite3.connect(tmp_path / index.FILE)) as other:
        other.execute("BEGIN IMMEDIATE")
        tier.write(metas[0], [stored(metas[0])])
        assert not commit(tier)  # The log has the error of this commit, and so all that it was to write.
        assert [tier.write(meta, [stored(meta)]) for meta in metas[1:]] == [Written.STORED] * 11
        assert list(map(sys.getrefcount, metas)) != references
        assert not commit(tier)
        assert list(map(sys.getrefcount, metas))[1:] == references[1:]
        other.rollback()
        assert {meta.key for meta, _ in tier.headers()} == {*KEYS}
    with closing(DiskTier(tmp_path, ROOM)) as tier:
        assert rows_of(tier).complete
        assert {meta.key for meta, _ in tier.headers()} == {*KEYS}


def test_a_listing_that_outlives_the_tier_leaves_the_index_of_the_next_one(tmp_path):
    """Earlier, the listing took the closed database for damaged, and removed the file that the next process used."""
    tier = DiskTier(tmp_path, ROOMY)
    for number in range(1200):
        write(tier, key_of(number))
    listing = tier.headers()
    next(listing)
    tier.close()
    with closing(DiskTier(tmp_path, ROOMY)) as following:
        assert len([*listing]) < 1200
    with closing(sqlite3.connect(tmp_path / index.FILE)) as database:
        assert database.execute("SELECT complete FROM state").fetchone() == (1,)
        assert database.execute("SELECT COUNT(*) FROM records").fetchone() == (1200,)
    assert following.faults() == []


def test_a_listing_that_is_half_read_does_not_let_the_database_grow(tmp_path, monkeypatch):
    """An open query kept SQLite from emptying its write-ahead log: 260 MB in 300 commits, now 8 MB."""
    monkeypatch.setattr(index, "PAGE_ROWS", 5)
    rows = index.DiskIndex(tmp_path)
    for number, key in enumerate(KEYS):
        rows.put(meta_of(key), 100, number - 2)  # A file may be older than 1970.
    listing = rows.records()
    first = [next(listing)[0] for _ in range(3)]
    for commits in range(3000):
        rows.put(replace(meta_of(key_of(100)), label="x" * 2000), 100, 1000 + commits)
        assert rows.flush()
    assert (tmp_path / f"{index.FILE}-wal").stat().st_size < 8 << 20
    assert first + [key for key, *_ in listing] == [*KEYS, key_of(100)]
    rows.close()


def test_a_record_that_is_used_during_a_listing_is_not_missed(tmp_path, monkeypatch):
    """A record that is used moves from where the listing has not been to where it has been."""
    monkeypatch.setattr(index, "PAGE_ROWS", 3)
    with closing(filled(tmp_path)) as tier:
        assert commit(tier)
        order = [meta.key for meta, _ in tier.headers()]
        assert {*order} == {*KEYS}
        listing = tier.headers()
        listed = [next(listing)[0].key for _ in range(8)]
        read(tier, order[-1])
        assert [*listed, *(meta.key for meta, _ in listing)] == order, "the last one was found where it is now"


def test_a_listing_of_a_database_that_was_built_anew_meanwhile_ends_with_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(index, "PAGE_ROWS", 5)
    rows = index.DiskIndex(tmp_path)
    for number, key in enumerate(KEYS):
        rows.put(meta_of(key), 100, number)
    listing = rows.records()
    next(listing)
    rows.clear()
    rows.put(meta_of(KEYS[-1]), 100, 100)
    with pytest.raises(index.IndexLost, match="rebuilt"):
        list(listing)
    rows.close()


def test_a_value_that_the_database_does_not_take_costs_its_row_only(tmp_path, caplog):
    """The thread that commits ended with the error, and no later row was committed."""
    with closing(filled(tmp_path, KEYS[:3])) as tier:
        rows_of(tier).put(meta_of(KEYS[5]), 1, 1 << 70)
        rows_of(tier).put(replace(meta_of(KEYS[6]), label="a name of bytes \udcff"), 1, 1)
        assert commit(tier)
        write(tier, KEYS[4])
        assert commit(tier)
        assert rows_of(tier).uses().keys() == {*KEYS[:3], KEYS[4], KEYS[6]}
    assert "cannot take the record" in caplog.text


def test_an_index_that_another_process_locks_stays_as_it_is(tmp_path, monkeypatch, caplog):
    filled(tmp_path).close()
    monkeypatch.setattr(index, "PATIENCE_SECONDS", 0.01)
    with closing(sqlite3.connect(tmp_path / index.FILE, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with closing(DiskTier(tmp_path, ROOM)) as tier:
            assert {meta.key for meta, _ in tier.headers()} == {*KEYS}
        other.execute("ROLLBACK")
    assert "cannot be used now (database is locked)" in caplog.text
    caplog.clear()
    with closing(DiskTier(tmp_path, ROOM)) as tier:
        assert {meta.key for meta, _ in tier.headers()} == {*KEYS}
    assert "rebuilt" not in caplog.text


def test_an_index_that_could_not_be_used_is_not_trusted_at_the_next_start(tmp_path, monkeypatch):
    """Earlier, such an index still claimed to be complete, and lacked what the process without it had written."""
    filled(tmp_path, KEYS[:6]).close()
    monkeypatch.setattr(index, "PATIENCE_SECONDS", 0.01)
    with closing(sqlite3.connect(tmp_path / index.FILE, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        tier = DiskTier(tmp_path, ROOM)
        other.execute("ROLLBACK")
    for key in KEYS[6:]:
        write(tier, key)
    tier.delete(KEYS[0])
    tier.close()
    with closing(DiskTier(tmp_path, ROOM)) as tier:
        assert {meta.key for meta, _ in tier.headers()} == {*KEYS[1:]}


def test_an_index_that_is_closed_while_it_is_built_anew_is_not_trusted(tmp_path, monkeypatch):
    with closing(filled(tmp_path)):
        pass
    tier = settled(DiskTier(tmp_path, ROOM))
    monkeypatch.setattr(DiskTier, "_compare", lambda *_, **__: None)  # as if the tier were closed meanwhile
    with monkeypatch.context() as patch:
        patch.setattr(index.DiskIndex, "_fetch", raising(index.IndexLost(OSError("damaged"), tmp_path, 0)))
        list(tier.headers())
    tier.close()
    monkeypatch.undo()
    with closing(DiskTier(tmp_path, ROOM)) as tier:
        assert {meta.key for meta, _ in tier.headers()} == {*KEYS}


def test_without_a_place_for_the_database_the_tier_works(tmp_path, monkeypatch, caplog):
    (tmp_path / index.FILE).mkdir(parents=True)
    with caplog.at_level(logging.WARNING), closing(filled(tmp_path)) as tier:
        assert {meta.key for meta, _ in tier.headers()} == {*KEYS}
        assert tier.check() == []
    assert "all records are read" in caplog.text
    with closing(DiskTier(tmp_path, ROOM)) as tier:
        assert {meta.key for meta, _ in tier.headers()} == {*KEYS}


def test_times_are_those_of_the_uses(tmp_path):
    before = time.time()
    with closing(filled(tmp_path)) as tier:
        tier.note_use([KEYS[0]])
    with closing(DiskTier(tmp_path, ROOM)) as tier:
        assert order(tier)[-1] == KEYS[0]
        assert all(before <= used <= time.time() for _, used in tier.headers())


@pytest.mark.parametrize("label", [0, 512, 1400, 6000])
def test_the_index_takes_about_as_much_as_lmc_size_says(tmp_path: Path, label: int) -> None:
    with closing(DiskTier(tmp_path, ROOMY)) as tier:
        for number in range(1000):
            meta = replace(
                meta_of(key_of(number), parts=1, part_bytes=64), label=f"{number:x<{label}}" if label else ""
            )
            tier.write(meta, [stored(meta)])
    assert (tmp_path / index.FILE).stat().st_size == pytest.approx(1000 * index.index_bytes(label), rel=0.3)
