"""What tiers promise: a class for each protocol in `lmc.storage.tiers.tier`.

A tier's tests subclass one of them, and read and write a record's bytes around the tier.
"""

import pytest
from storage_fakes import PART_BYTES, PARTS, content, key_of, memory, meta_of, raw_record, stored

from lmc.errors import CorruptRecord
from lmc.keys import ChunkKey, RecordKind
from lmc.storage.change_log import ChangeLog
from lmc.storage.tiers.tier import Tier, Written

K0, K1, K2, K3 = map(key_of, range(4))


class TierContract:
    """Subclasses make the tier, and read and write a record's raw bytes without it."""

    @pytest.fixture
    def tier(self, tmp_path):
        raise NotImplementedError

    def raw_read(self, tier: Tier, key: ChunkKey) -> bytes | None:
        """A record's bytes as they are kept, or None."""
        raise NotImplementedError

    def raw_write(self, tier: Tier, key: ChunkKey, blob: bytes) -> None:
        """Overwrite (or add) a record's bytes behind the tier's back."""
        raise NotImplementedError

    def meet(self, tier: Tier, key: ChunkKey) -> None:
        """Do what has to find out that a record's bytes are missing or too many: open it, where that costs nothing."""
        tier.open(key)

    # -- finding and reading -----------------------------------------------------------------------------------------

    def test_missing_is_an_answer(self, tier):
        assert tier.contains([K0, K1]) == [False, False]
        assert tier.contains([]) == []
        assert tier.open(K0) is None
        assert tier.delete(K0) is False

    def test_what_was_written_is_found_and_equal(self, tier):
        write(tier, K0)
        assert tier.contains([K1, K0]) == [False, True]
        assert read(tier, K0) == bytes(stored(meta_of(K0)))

    def test_the_reader_says_what_was_written_with_the_record(self, tier):
        write(tier, K0)
        reader = tier.open(K0)
        meta = reader.meta
        reader.close()
        assert (meta.key, meta.tokens, meta.first, meta.parts, meta.part_bytes) == (K0, 16, 32, PARTS, PART_BYTES)
        assert len(meta.checksums) == PARTS

    def test_the_kept_bytes_are_a_record_as_the_format_says(self, tier):
        write(tier, K0)
        assert self.raw_read(tier, K0) == raw_record(meta_of(K0))

    def test_a_record_that_was_put_there_around_the_tier_reads_equal(self, tier):
        write(tier, K0)
        self.raw_write(tier, K0, raw_record(meta_of(K0)))
        assert read(tier, K0) == bytes(stored(meta_of(K0)))

    @pytest.mark.parametrize("part_bytes", [1, 100, 4096, 4097, 3 * 4096])
    def test_parts_of_any_size_come_back_padded_with_zeros(self, tier, part_bytes):
        meta = meta_of(K0, PARTS, part_bytes)
        assert tier.write(meta, [stored(meta)]) is Written.STORED
        assert read(tier, K0) == bytes(stored(meta))

    def test_parts_are_read_in_any_order_and_in_ranges(self, tier):
        write(tier, K0)
        reader = tier.open(K0)
        for first, count in [(2, 1), (0, 2), (1, 2), (0, 1), (1, 1), (0, 3)]:
            into = memory(count * PART_BYTES)
            reader.read(first, count, [into])
            assert bytes(into) == b"".join(content(K0, part) for part in range(first, first + count))
        reader.close()

    def test_a_range_can_be_scattered_over_views(self, tier):
        write(tier, K0)
        into = [memory(PART_BYTES) for _ in range(PARTS)]
        reader = tier.open(K0)
        reader.read(0, PARTS, into)
        reader.close()
        assert [bytes(view) for view in into] == [content(K0, part) for part in range(PARTS)]

    def test_a_record_can_be_gathered_from_views(self, tier):
        whole = stored(meta_of(K0))
        views = [whole[part * PART_BYTES : (part + 1) * PART_BYTES] for part in range(PARTS)]
        assert tier.write(meta_of(K0), views) is Written.STORED
        assert read(tier, K0) == bytes(whole)

    def test_memory_that_is_not_aligned_works(self, tier):
        assert tier.write(meta_of(K0), [stored(meta_of(K0), offset=13)]) is Written.STORED
        reader = tier.open(K0)
        into = memory(PARTS * PART_BYTES, offset=7)
        reader.read(0, PARTS, [into])
        reader.close()
        assert bytes(into) == bytes(stored(meta_of(K0)))

    # -- changing ----------------------------------------------------------------------------------------------------

    def test_a_second_write_finds_it_present_and_changes_nothing(self, tier):
        write(tier, K0)
        assert tier.write(meta_of(K0), [stored(meta_of(K0), version=1)]) is Written.PRESENT
        assert read(tier, K0) == bytes(stored(meta_of(K0)))

    def test_a_deleted_record_is_missing_and_can_be_written_again(self, tier):
        write(tier, K0)
        write(tier, K1)
        assert tier.delete(K0) is True
        assert tier.contains([K0, K1]) == [False, True]
        assert tier.open(K0) is None
        assert self.raw_read(tier, K0) is None
        write(tier, K0)
        assert read(tier, K0) == bytes(stored(meta_of(K0)))

    def test_a_record_that_is_deleted_while_it_is_read_is_right_or_an_error(self, tier):
        write(tier, K0)
        reader = tier.open(K0)
        tier.delete(K0)
        into = memory(PART_BYTES)
        try:
            reader.read(0, 1, [into])
        except OSError:
            return
        finally:
            reader.close()
        assert bytes(into) == content(K0, 0)

    # -- records that are not what was written -----------------------------------------------------------------------

    @pytest.mark.parametrize("at", [0, 9, 600, 4095], ids=["length", "json", "metadata", "padding"])
    def test_a_damaged_header_deletes_the_record(self, tier, at):
        write(tier, K0)
        self.damage(tier, K0, at)
        with pytest.raises(CorruptRecord):
            tier.open(K0)
        self.assert_gone(tier, K0)

    def test_a_record_of_another_format_version_is_deleted(self, tier, monkeypatch):
        write(tier, K0)
        with monkeypatch.context() as patch:
            patch.setattr("lmc.storage.tiers.record.FORMAT", 2)
            other = raw_record(meta_of(K0))
        assert b"lmc-2" in other
        self.raw_write(tier, K0, other)
        with pytest.raises(CorruptRecord):
            tier.open(K0)
        self.assert_gone(tier, K0)

    def test_a_damaged_part_is_never_delivered_and_deletes_the_record(self, tier):
        write(tier, K0)
        self.damage(tier, K0, 4096 + PART_BYTES + 77)
        reader = tier.open(K0)
        into = memory(PART_BYTES)
        reader.read(0, 1, [into])
        assert bytes(into) == content(K0, 0), "the parts before it are right"
        with pytest.raises(CorruptRecord):
            reader.read(1, 1, [into])
        reader.close()
        self.assert_gone(tier, K0)

    @pytest.mark.parametrize("size", [0, 1, 7, 8, 100, 4095, 4096, 4097, 8192, 4096 + PARTS * PART_BYTES - 1])
    def test_a_truncated_record_is_deleted(self, tier, size):
        write(tier, K0)
        self.raw_write(tier, K0, raw_record(meta_of(K0))[:size])
        with pytest.raises(CorruptRecord):
            self.meet(tier, K0)
        self.assert_gone(tier, K0)

    def test_a_record_with_bytes_behind_its_end_is_deleted(self, tier):
        write(tier, K0)
        self.raw_write(tier, K0, raw_record(meta_of(K0)) + bytes(4096))
        with pytest.raises(CorruptRecord):
            self.meet(tier, K0)
        self.assert_gone(tier, K0)

    def test_the_record_of_another_key_is_deleted(self, tier):
        write(tier, K0)
        write(tier, K1)
        self.raw_write(tier, K0, raw_record(meta_of(K1)))
        with pytest.raises(CorruptRecord):
            tier.open(K0)
        self.assert_gone(tier, K0)
        assert read(tier, K1) == bytes(stored(meta_of(K1))), "the other key's own record stays"

    # -- what the tests above are made of ----------------------------------------------------------------------------

    def damage(self, tier: Tier, key: ChunkKey, at: int) -> None:
        blob = bytearray(self.raw_read(tier, key))
        blob[at] ^= 1
        self.raw_write(tier, key, bytes(blob))

    def assert_gone(self, tier: Tier, key: ChunkKey) -> None:
        assert tier.contains([key]) == [False]
        assert tier.open(key) is None
        assert self.raw_read(tier, key) is None


class ListedContract(TierContract):
    """What a `ListedTier` promises as well."""

    def tick(self, tier) -> None:
        """Wait until the tier's clock, by which it orders uses, has moved."""

    def test_a_tier_without_records_lists_none_and_is_right(self, tier):
        assert list(tier.entries()) == []
        assert tier.check() == []

    def test_entries_list_sizes_with_the_least_recently_used_first(self, tier):
        for key in (K0, K1, K2):
            write(tier, key)
            self.tick(tier)
        read(tier, K0)
        entries = list(tier.entries())
        assert [entry.key for entry in entries] == [K1, K2, K0]
        assert {entry.bytes for entry in entries} == {4096 + PARTS * PART_BYTES}
        assert [entry.used for entry in entries] == sorted(entry.used for entry in entries)

    def test_check_reports_exactly_the_wrong_ones_and_changes_nothing(self, tier):
        """A damaged part was deleted by a check that had not been asked to fix anything."""
        self.spoil_two_of_four(tier)
        before = [self.raw_read(tier, key) for key in (K0, K1, K2, K3)]
        findings = tier.check()
        assert len(findings) == 2
        assert not any(finding.fixed for finding in findings)
        assert [self.raw_read(tier, key) for key in (K0, K1, K2, K3)] == before

    def test_check_with_fix_removes_exactly_the_wrong_ones(self, tier):
        self.spoil_two_of_four(tier)
        findings = tier.check(fix=True)
        assert [finding.fixed for finding in findings] == [True, True]
        assert tier.contains([K0, K1, K2, K3]) == [True, False, True, False]
        assert tier.check() == []
        assert read(tier, K0) == bytes(stored(meta_of(K0)))
        assert read(tier, K2) == bytes(stored(meta_of(K2)))

    def spoil_two_of_four(self, tier: Tier) -> None:
        for key in (K0, K1, K2, K3):
            write(tier, key)
        self.damage(tier, K1, 4096 + PARTS * PART_BYTES - 1)
        self.damage(tier, K3, 100)


class LocalContract(ListedContract):
    """What a `LocalTier` promises as well."""

    def test_records_that_appear_and_leave_are_reported(self, tier):
        changes = ChangeLog()
        tier.report_to(changes)
        write(tier, K0)
        write(tier, K1)
        tier.delete(K0)
        reported = [(change.chunk.key, change.place, change.appeared) for change in changes.since(0)[0]]
        assert reported == [(K0, tier.name, True), (K1, tier.name, True), (K0, tier.name, False)]

    def test_headers_are_listed_with_the_most_recently_used_first_and_reported(self, tier):
        for key in (K0, K1):
            write(tier, key)
            self.tick(tier)
        changes = ChangeLog()
        tier.report_to(changes)
        assert [meta.key for meta, _ in tier.headers()] == [K1, K0]
        assert [chunk.key for chunk in changes.present()[1][tier.name]] == [K1, K0]

    def test_reading_headers_is_no_use(self, tier):
        for key in (K0, K1):
            write(tier, key)
            self.tick(tier)
        for meta, _ in tier.headers():
            assert meta.kind is RecordKind.PAGES
        assert [entry.key for entry in tier.entries()] == [K0, K1]

    def test_a_tier_within_its_bound_keeps_everything(self, tier):
        write(tier, K0)
        tier.protect([K0, K1], pinned=True)
        tier.note_use([K0, K1])
        tier.trim()
        tier.protect([K0, K1], pinned=False)
        assert tier.contains([K0, K1]) == [True, False]
        assert (tier.evictions, tier.document_evictions) == (0, 0)

    def test_the_bookkeeping_agrees_after_every_operation(self, tier):
        for operation in (
            lambda: write(tier, K0),
            lambda: write(tier, K1),
            lambda: tier.protect([K1, K2], pinned=True),
            lambda: tier.delete(K0),
            lambda: write(tier, K2),
            lambda: tier.protect([K1], pinned=False),
            lambda: read(tier, K1),
            lambda: tier.delete(K1),
        ):
            operation()
            assert tier.faults() == []


class OverDict(LocalContract):
    """What a tier promises that wraps a `DictTier`."""

    def raw_read(self, tier, key):
        record = tier.inner.records.get(key)
        return None if record is None else bytes(record)

    def raw_write(self, tier, key, blob):
        tier.inner.records[key] = bytearray(blob)


def write(tier: Tier, key: ChunkKey) -> None:
    assert tier.write(meta_of(key), [stored(meta_of(key))]) is Written.STORED


def read(tier: Tier, key: ChunkKey) -> bytes | None:
    """All stored parts of a record, or None if it is missing."""
    reader = tier.open(key)
    if reader is None:
        return None
    try:
        into = memory(reader.meta.parts * reader.meta.stored_part)
        reader.read(0, reader.meta.parts, [into])
        return bytes(into)
    finally:
        reader.close()
