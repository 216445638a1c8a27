"""The store: where chunks are, who waits for whom, and that failures of tiers are misses."""

import logging
import os
import resource
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace

import pytest
from storage_fakes import (
    PART_BYTES,
    PARTS,
    Broken,
    DictTier,
    Gated,
    Shared,
    as_tensor,
    content,
    eventually,
    expected,
    get,
    key_of,
    meta_of,
    open_gates,
    pin_bytes,
    put,
    raw_record,
    state_of,
    stored,
    writing,
)
from tier_contract import LocalContract, read
from tier_wrappers import Counted, Delayed, Faulty

from lmc.errors import ChunkLost, CorruptRecord, StorageError
from lmc.keys import RecordKind
from lmc.storage import loader, writer
from lmc.storage.contract import PinState
from lmc.storage.memory.slab import LOST, Slab, tag_of
from lmc.storage.store import Store
from lmc.storage.tiers.disk import DiskTier
from lmc.storage.tiers.record import HEADER_LIMIT, decode_header
from lmc.storage.tiers.tier import Wrapped
from lmc.storage.writer import WRITERS, Writer

K0, K1, K2, K3, K4, K5 = map(key_of, range(6))


class TestDictTier(LocalContract):
    @pytest.fixture
    def tier(self):
        return DictTier()

    def raw_read(self, tier, key):
        record = tier.records.get(key)
        return None if record is None else bytes(record)

    def raw_write(self, tier, key, blob):
        tier.records[key] = bytearray(blob)


class WrapperContract(TestDictTier):
    def raw_read(self, tier, key):
        return super().raw_read(tier.inner, key)

    def raw_write(self, tier, key, blob):
        super().raw_write(tier.inner, key, blob)


class TestFaulty(WrapperContract):
    @pytest.fixture
    def tier(self):
        return Faulty(DictTier(), lambda verb, key: None)


# -- a store for each test, proved clean at its end ------------------------------------------------------------------


@pytest.fixture(autouse=True)
def part_by_part(monkeypatch):
    """Parts are small here; they are read one by one all the same, as large ones are."""
    monkeypatch.setattr(loader, "READ_AHEAD_BYTES", 1)


@pytest.fixture
def make():
    """Makes stores; at the end of the test nothing may be held, and the bookkeeping must be right."""
    made = []

    def make_store(*tiers, slots=4, device=0, shared=False, **options):
        slab = Slab(device, PARTS, PART_BYTES) if device else None
        store = Store(Slab(slots, PARTS, PART_BYTES, shared=shared), tiers, device=slab, **options)
        made.append((store, tiers))
        return store

    yield make_store
    for store, tiers in made:
        open_gates(tiers)
        store.close()
        assert store.held() == 0
        assert store.check_integrity() == []


@pytest.fixture
def tier():
    return DictTier()


def fill(tier, *keys):
    for key in keys:
        tier.records[key] = bytearray(raw_record(meta_of(key)))
    return tier


class Elsewhere(threading.Thread):
    """Runs a function in another thread; `result` waits for it, and raises what it raised."""

    def __init__(self, function, *arguments):
        super().__init__(daemon=True)
        self._call, self._error, self._result = (function, arguments), None, None
        self.start()

    def run(self):
        function, arguments = self._call
        try:
            self._result = function(*arguments)
        except BaseException as error:  # noqa: BLE001 - handed to the test
            self._error = error

    @property
    def result(self):
        self.join(60)
        assert not self.is_alive(), "hangs"
        if self._error:
            raise self._error
        return self._result


def named(name):
    tier = DictTier()
    tier.name, tier.shared = name, True
    return tier


class Away(Wrapped):
    """A tier that the test makes unusable, as a circuit breaker does."""

    usable = True


def loaded(stats):
    """Bytes that came from tiers, by name."""
    return {tier: count for (tier, verb), count in stats.bytes.items() if verb == "read"}


# -- memory ----------------------------------------------------------------------------------------------------------


def test_what_was_written_is_pinned_bit_equal_and_the_rest_is_a_miss(make):
    store = make()
    assert put(store, K0)
    assert get(store, K0) == expected(K0)
    assert get(store, K1) is None
    assert store.lookup([K1, K0]) == [None, "host"]
    stats = store.stats()
    assert (stats.hits, stats.misses) == ({"host": 1}, 1)


def test_a_lookup_of_what_is_in_memory_waits_for_nobody(make):
    store = make(device=2)
    put(store, K0)
    found = []

    def chunks():
        """The store's lock is held while it takes chunks from here."""
        found.append(Elsewhere(store.lookup, [K0, K1, K0]).result)
        yield from ()

    store.adopt(chunks())
    assert found == [["device", None, "device"]]


def test_a_pinned_chunk_is_never_evicted(make):
    store = make(slots=2)
    put(store, K0)
    with store.pinned([K0]) as (pin,):
        for key in (K1, K2, K3):
            assert put(store, key)
        assert pin_bytes(store, pin, 1) == content(K0, 1)
    assert store.lookup([K0, K1, K2, K3]) == ["host", None, None, "host"]


def test_with_every_slot_held_nothing_is_written_or_loaded_and_that_is_counted(make, tier):
    store = make(fill(tier, K2), slots=2)
    put(store, K0)
    put(store, K1)
    store.flush()
    with store.pinned([K0, K1]) as pins:
        assert None not in pins
        assert not put(store, K3)
        assert get(store, K2) is None
        assert store.stats().no_room == 2
    assert get(store, K2) == expected(K2)


def test_a_second_write_of_a_key_has_nothing_to_do(make):
    store = make()
    put(store, K0)
    assert not put(store, K0, version=1)
    assert get(store, K0) == expected(K0)
    with writing(store, meta_of(K1)) as slot:
        assert slot is not None
        assert Elsewhere(put, store, K1).result is False, "another thread is at it"
        for part in range(PARTS):
            slot[part] = as_tensor(content(K1, part))
    assert get(store, K1) == expected(K1)


def test_an_exception_while_writing_gives_the_slot_back(make):
    store = make(slots=1)
    with pytest.raises(KeyError), writing(store, meta_of(K0)):
        raise KeyError
    assert store.held() == 0
    assert store.lookup([K0]) == [None]
    assert put(store, K0)


def test_a_short_chunk_carries_nothing_of_the_one_before_it_into_its_record(make, tier):
    store = Store(Slab(1, PARTS, 2 * PART_BYTES), [tier])
    with writing(store, meta_of(K0, part_bytes=2 * PART_BYTES)) as slot:
        slot.fill_(255)
    store.flush()
    with writing(store, meta_of(K1, part_bytes=100)) as slot:
        slot[:, :100] = 1
    store.close()
    assert tier.records[K1][4096:] == (bytes([1]) * 100 + bytes(3996)) * PARTS


# -- down ------------------------------------------------------------------------------------------------------------


def test_write_through_reaches_the_disk_and_survives_a_restart(make, tmp_path):
    store = make(DiskTier(tmp_path, 1 << 24))
    put(store, K0)
    store.flush()
    assert store.stats().writes == {"disk": 1}
    store.close()
    store = make(DiskTier(tmp_path, 1 << 24))
    assert store.lookup([K0, K1]) == ["disk", None]
    assert get(store, K0) == expected(K0)
    assert get(store, K0) == expected(K0)
    stats = store.stats()
    assert stats.hits == {"disk": 1, "host": 1}
    assert loaded(stats) == {"disk": PARTS * PART_BYTES}
    assert store.known_keys() == {K0}


def test_the_end_is_orderly_if_there_is_no_memory_for_a_copy(make, tier, monkeypatch):
    """The error left threads and tiers open."""
    store = make(tier, device=1)
    for copying in ("copy_from", "snapshot"):
        monkeypatch.setattr(Slab, copying, lambda *_: (_ for _ in ()).throw(OSError("no memory")))
    put(store, K0)
    store.close()
    assert tier.records == {}
    assert store.stats().dropped_writes == 1


def test_loads_that_cannot_be_begun_hold_nothing_and_keep_nobody_waiting(make, tier, monkeypatch):
    """A load that no thread was given was joined, and waited for, by all who asked for its chunk later."""
    other = make(tier)
    for key in (K0, K1):
        put(other, key)
    other.close()
    store = make(tier)
    with monkeypatch.context() as patch:
        patch.setattr(loader.Loader, "run", lambda *_: (_ for _ in ()).throw(RuntimeError("can't start new thread")))
        with pytest.raises(RuntimeError):
            store.pin([K0, K1, K0])
    assert store.held() == 0
    assert get(store, K0) == expected(K0)


def test_a_batch_that_is_larger_than_what_may_be_open_is_loaded_all_the_same(tmp_path):
    """Every record of it was opened before the first was read; the rest failed, and with them whatever else needed a
    file.
    """
    keys = [key_of(i) for i in range(400)]
    tier = DiskTier(tmp_path, 1 << 30)
    for key in keys:
        meta = meta_of(key)
        tier.write(meta, [stored(meta)])
    store = Store(Slab(len(keys), PARTS, PART_BYTES), [tier])
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Two threads open a fourth of what may be open each, beside what other tests have left open.
    most = 2 * max(map(int, os.listdir("/proc/self/fd"))) + 100
    assert most // 4 < len(keys)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, limits[1]))
    try:
        with store.pinned(keys) as pins:
            assert all(pin_bytes(store, pin, PARTS - 1) for pin in pins)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert store.stats().failed == {}
    store.close()


def test_a_full_queue_drops_the_write_and_counts_it_and_close_writes_it(make, tier):
    gated = Gated(tier)
    gated.write_gate.clear()
    store = make(gated, slots=4)  # two may be queued
    for key in (K0, K1, K2, K3):
        assert put(store, key)
    assert store.stats().dropped_writes == 2
    gated.open_all()
    store.flush()
    assert set(tier.records) == {K0, K1}
    store.close()
    assert set(tier.records) == {K0, K1, K2, K3}


def test_flush_waits_for_what_the_queued_work_queues(make, tier):
    """With a device, a write went device -> host and then, queued anew, host -> tier: flush came back between the
    two.
    """
    gated = Gated(tier)
    gated.write_gate.clear()
    store = make(gated, device=2)
    put(store, K0)
    assert gated.writing.wait(60)
    flush = Elsewhere(store.flush)
    gated.open_all()
    assert flush.result is None
    assert list(tier.records) == [K0]


def test_every_tier_gets_the_record_and_one_that_fails_costs_only_itself(make, tier):
    store = make(Broken(lambda: OSError("no")), tier)
    put(store, K0)
    store.flush()
    assert list(tier.records) == [K0]
    assert store.stats().failed["broken"] >= 1


def test_a_tier_that_hangs_does_not_hold_up_the_other_and_each_has_its_share_of_the_queue(make, tier):
    hanging = Gated(named("remote"))
    hanging.write_gate.clear()
    store = make(hanging, tier, slots=8)  # four may be queued, two for each tier
    for number, key in enumerate((K0, K1, K2, K3, K4), 1):
        put(store, key)
        eventually(lambda wanted=number: store.stats().writes == {"dict": wanted})
    stats = store.stats()
    assert (stats.queued, stats.dropped_writes) == (2, 3)
    assert store.held() == 2, "a slot is held until every tier has its chunk"
    hanging.open_all()
    store.flush()
    assert set(hanging.inner.records) == {K0, K1}
    assert store.stats().queued == store.held() == 0
    store.close()
    assert set(hanging.inner.records) == {K0, K1, K2, K3, K4}


class Hanging(Wrapped):
    """A tier whose `open` does not return until the test lets it, as a disk that hangs."""

    def __init__(self, inner):
        super().__init__(inner)
        self.opens, self.opening = threading.Event(), threading.Event()

    def open(self, key):
        self.opening.set()
        assert self.opens.wait(60)
        return self.inner.open(key)


def test_a_tier_that_hangs_in_a_read_delays_no_other_and_its_chunks_become_misses(make, tier, monkeypatch):
    """Two requests took both threads. No later load of any tier began, and the tier counted as usable."""
    hanging = Hanging(named("remote"))
    for inner, keys in ((hanging.inner, (K0, K1, K2)), (tier, (K3, K4))):
        for key in keys:
            inner.write(meta_of(key), [stored(meta_of(key))])
    store = make(hanging, tier, slots=8)
    pins = store.pin([K0, K1, K2])
    assert hanging.opening.wait(60)
    assert get(store, K3) == expected(K3)
    assert store.lookup([K0, K4]) == ["remote", "dict"]
    monkeypatch.setattr(loader, "STALLED_SECONDS", -1.0)
    assert store.lookup([K0, K4]) == [None, "dict"]
    assert store.stats().usable == {"remote": False, "dict": True}
    monkeypatch.undo()
    hanging.opens.set()
    store.release(pins)
    assert get(store, K1) == expected(K1)


def forget_while_away(store, away):
    """Store a chunk, and forget it while the tier that has it is not usable."""
    put(store, K0)
    store.flush()
    away.usable = False
    store.forget(K0)


def test_a_record_is_deleted_when_its_tier_is_usable_again(make, monkeypatch):
    """Earlier, the record stayed without a word in the log, and its document was found again after the outage."""
    monkeypatch.setattr(writer, "RETRY_SECONDS", 0.01)
    away = Away(named("remote"))
    store = make(away)
    forget_while_away(store, away)
    assert K0 in away.inner.records
    assert store.lookup([K0]) == [None]
    away.usable = True
    eventually(lambda: K0 not in away.inner.records)
    put(store, K0)
    store.flush()
    assert K0 in away.inner.records


def test_a_chunk_that_is_stored_again_is_not_deleted_later(make, monkeypatch):
    monkeypatch.setattr(writer, "RETRY_SECONDS", 3600.0)
    away = Away(named("remote"))
    store = make(away, slots=1)
    forget_while_away(store, away)
    away.usable = True
    put(store, K0)
    store.close()
    assert K0 in away.inner.records


def test_a_thread_for_deletions_that_cannot_be_started_is_started_later(make, monkeypatch):
    """Nothing was deleted any more, and the store could not be closed."""
    monkeypatch.setattr(writer, "RETRY_SECONDS", 0.01)
    start = threading.Thread.start

    def refuse(thread):
        if thread.name == "lmc-delete":
            raise RuntimeError("can't start new thread")
        start(thread)

    away = Away(named("remote"))
    store = make(away)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        forget_while_away(store, away)
    put(store, K1)
    store.forget(K1)
    away.usable = True
    eventually(lambda: not away.inner.records)


class AwayForRetries(Wrapped):
    """The same, and the thread that deletes records again finds it unusable for longer."""

    usable_again, usable_for_retries = True, False

    @property
    def usable(self):
        is_retry = threading.current_thread().name == "lmc-delete"
        return self.usable_for_retries if is_retry else self.usable_again

    @usable.setter
    def usable(self, usable):
        self.usable_again = usable


def test_a_chunk_whose_write_waits_is_not_deleted_after_it(make, monkeypatch):
    """The deletion, which an outage had delayed, was queued after the write, and removed the new record."""
    submitted = list[tuple[object, ...]]()

    class Pool(ThreadPoolExecutor):
        def submit(self, job, *arguments):
            submitted.append(arguments)
            return super().submit(job, *arguments)

    monkeypatch.setattr(writer, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(writer, "ThreadPoolExecutor", Pool)
    gate = Gated(named("remote"))
    away = AwayForRetries(gate)
    store = make(away)
    forget_while_away(store, away)
    away.usable = True
    gate.write_gate.clear()
    put(store, K1)
    put(store, K0)
    away.usable_for_retries = True
    eventually(lambda: sum(K0 in arguments for arguments in submitted) == 2)  # It was submitted again.
    gate.write_gate.set()
    store.close()
    assert K0 in gate.inner.records


def test_records_that_could_not_be_deleted_are_counted_when_the_store_is_closed(make, caplog):
    away = Away(named("remote"))
    store = make(away)
    forget_while_away(store, away)
    store.close()
    assert "1 records could not be deleted from tier remote" in caplog.text


class Slow(Wrapped):
    """A tier that has answered about its keys only when it is asked for the third time."""

    def __init__(self, inner):
        super().__init__(inner)
        self.asked = 0

    def contains(self, keys):
        self.asked += 1
        return self.inner.contains(keys) if self.asked > 2 else [False] * len(keys)

    def unanswered(self, keys):
        return self.asked <= 2


def test_spread_waits_for_the_answers_of_a_slow_tier(make, tier):
    """No answer yet counted as absent: pinned documents were loaded and learned again."""
    slow = Slow(named("remote"))
    slow.inner.write(meta_of(K0), [stored(meta_of(K0))])
    store = make(slow)
    assert store.spread([K0]) == []
    assert store.stats().bytes == {}


def test_a_tier_that_is_not_usable_gets_nothing_until_it_is_again(make, tier):
    away = Away(named("remote"))
    store = make(away, tier, slots=1)
    away.usable = False
    for key in (K0, K1):
        put(store, key)
        store.flush()
    stats = store.stats()
    assert stats.usable == {"remote": False, "dict": True}
    assert (stats.dropped_writes, stats.failed) == (2, {})
    away.usable = True
    put(store, K2)
    store.close()
    assert set(tier.records) == {K0, K1, K2}
    assert set(away.inner.records) == {K2}


def test_what_waits_for_a_tier_that_goes_away_is_dropped_and_does_not_wait_for_ever(make):
    first, *behind = K0, K1, K2, K3
    gated = Gated(named("remote"))  # which has one writer
    gated.write_gate.clear()
    away = Away(gated)
    store = make(away, slots=20)
    put(store, first)
    assert gated.writing.wait(60)
    for key in behind:
        put(store, key)
    away.usable = False
    gated.open_all()
    store.flush()
    assert list(gated.inner.records) == [first]
    assert store.stats().dropped_writes == 3


def test_a_disk_has_two_writers(make, tmp_path):
    """Twice the records a second where they are small: one is checked while the other is written."""
    one, other = (
        next(key for key in map(key_of, range(40)) if key[-1] % WRITERS == writer) for writer in range(WRITERS)
    )
    both = threading.Barrier(2)

    class Meeting(Wrapped):
        def write(self, meta, parts):
            both.wait(60)
            return self.inner.write(meta, parts)

    store = make(Meeting(DiskTier(tmp_path, 1 << 24)))
    put(store, one)
    put(store, other)
    store.flush()
    assert store.stats().writes == {"disk": 2}


def test_a_label_that_no_reader_accepts_is_not_written(make, tier, caplog):
    """That of a document of hundreds of thousands of tokens: its record counted as stored, and was found corrupt."""
    store = make(tier)
    sizes = (HEADER_LIMIT - 4096, HEADER_LIMIT)
    for key, size in zip((K0, K1), sizes, strict=True):
        with writing(store, replace(meta_of(key), kind=RecordKind.DOCUMENT, label="x" * size)) as slot:
            slot.zero_()
    store.flush()
    assert list(tier.records) == [K0]
    assert decode_header(bytes(tier.records[K0][:HEADER_LIMIT])).key == K0
    assert store.stats().dropped_writes == 1
    assert "a document of 48 tokens is not written to tiers" in caplog.text


def test_work_on_one_key_keeps_its_order(make, tier):
    """A tier has several writers: a deletion must not overtake a write, nor a write a deletion."""
    store = make(Delayed(tier, per_write=1e-4), slots=200)
    for version in range(30):
        for key in (K0, K1, K2):
            assert put(store, key, version)
            store.forget(key, wait=False)
    for key in (K0, K1):
        assert put(store, key, 99)
    store.forget(K2)
    store.flush()
    assert store.stats().dropped_writes == 0
    assert set(tier.records) == {K0, K1}
    assert all(bytes(tier.records[key][4096:]) == bytes(stored(meta_of(key), 99)) for key in (K0, K1))


def test_closing_twice_is_closing_once_and_a_closed_store_takes_nothing(make, tier):
    store = make(fill(tier, K1))
    put(store, K0)
    store.close()
    store.close()
    assert not put(store, K2)
    assert get(store, K0) == expected(K0)
    assert get(store, K1) is None
    assert store.held() == 0


def test_a_closed_store_removes_nothing_and_says_so(make, tier):
    """A cache server that ends may still be removing documents. It logged an unexpected error."""
    store = make(fill(tier, K1))
    store.close()
    with pytest.raises(StorageError, match="the store is closed"):
        store.forget(K1)
    assert set(tier.records) == {K1}


# -- up --------------------------------------------------------------------------------------------------------------


def test_two_threads_that_ask_for_one_key_open_its_record_once(make, tier):
    gated = Gated(fill(tier, K0))
    counted = Counted(gated)
    store = make(counted)
    first = Elsewhere(get, store, K0)
    assert gated.reading.wait(60)
    with store.pinned([K0]) as (pin,):
        assert pin.place == "dict"
        gated.open_all()
        assert pin_bytes(store, pin, 2) == content(K0, 2)
        assert first.result == expected(K0)
    assert counted.counts.opened == 1
    assert loaded(store.stats()) == {"dict": PARTS * PART_BYTES}


def test_a_key_that_is_asked_for_twice_at_once_is_loaded_once(make, tier):
    counted = Counted(fill(tier, K0))
    store = make(counted)
    with store.pinned([K0, K0]) as pins:
        assert [pin_bytes(store, pin, 0) for pin in pins] == [content(K0, 0)] * 2
    assert counted.counts.opened == 1


def test_a_part_can_be_read_while_the_next_ones_are_still_on_their_way(make, tier):
    gated = Gated(fill(tier, K0))
    store = make(gated)
    with store.pinned([K0]) as (pin,):
        for part in range(PARTS):
            gated.read_gates[part].set()
            assert pin_bytes(store, pin, part) == content(K0, part)
            assert store.arrived(pin) == part + 1


def test_layer_0_of_all_chunks_comes_before_layer_1_of_any(make, tier):
    order = []

    def watch(verb, key):
        if verb == "read":
            order.append(key)

    store = make(Faulty(fill(tier, K0, K1, K2), watch), load_threads=1)
    with store.pinned([K0, K1, K2]) as pins:
        assert [pin_bytes(store, pin, 2) for pin in pins] == [content(key, 2) for key in (K0, K1, K2)]
    assert order == [K0, K1, K2] * PARTS


def test_small_parts_are_read_several_at_a_time(make, tier, monkeypatch):
    monkeypatch.setattr(loader, "READ_AHEAD_BYTES", 2 * PART_BYTES)
    reads = []
    store = make(Faulty(fill(tier, K0), lambda verb, key: reads.append(verb)))
    assert get(store, K0) == expected(K0)
    assert reads == ["open", "read", "read"]


def test_loading_one_chunk_does_not_evict_another_that_the_same_call_asks_for(make, tier):
    """Of [on disk, in memory] the first was loaded into the slot of the second, which then was a miss."""
    store = make(fill(tier, K0), slots=2)
    put(store, K1)
    put(store, K2)
    store.flush()
    tier.records.pop(K1, None)
    with store.pinned([K0, K1]) as pins:
        assert [pin and pin.place for pin in pins] == ["dict", "host"]
        assert [pin_bytes(store, pin, 1) for pin in pins] == [content(K0, 1), content(K1, 1)]


def test_leaving_early_cancels_the_load_and_holds_nothing(make, tier):
    gated = Gated(fill(tier, K0))
    store = make(gated)
    gated.read_gates[0].set()

    def leave_after_the_first_part():
        with store.pinned([K0]) as (pin,):
            return pin_bytes(store, pin, 0)

    reader = Elsewhere(leave_after_the_first_part)
    gated.read_gates[1].set()
    gated.read_gates[2].set()
    assert reader.result == content(K0, 0)
    assert store.held() == 0
    assert get(store, K0) == expected(K0), "the next one finds it whole, by whatever way"


def test_a_cancelled_load_reads_no_further_part(make, tier):
    gated = Gated(fill(tier, K0))
    counted = Counted(gated)
    store = make(counted)
    pins = store.pin([K0])
    assert gated.reading.wait(60)
    store.release(pins, wait=False)
    gated.open_all()
    eventually(lambda: store.held() == 0)
    assert counted.counts.bytes_read == PART_BYTES
    assert store.lookup([K0]) == ["dict"]


def test_a_load_that_no_thread_has_begun_is_cancelled_without_waiting_for_others(make, tier):
    """Earlier, cancelling waited for whatever the loading threads did, perhaps for another request's slow disk."""
    gated = Gated(fill(tier, K0, K1))
    store = make(gated, load_threads=1)
    slow = Elsewhere(get, store, K0)
    assert gated.reading.wait(60)
    with store.pinned([K1]) as (pin,):
        assert pin is not None
    assert store.held() == 1, "only the slow one's"
    gated.open_all()
    assert slow.result == expected(K0)


def test_who_joins_a_load_that_the_first_reader_leaves_gets_all_of_it(make, tier):
    gated = Gated(fill(tier, K0))
    counted = Counted(gated)
    store = make(counted)
    first = store.pin([K0])
    assert gated.reading.wait(60)
    with store.pinned([K0]) as (second,):
        store.release(first, wait=False)
        gated.open_all()
        assert [pin_bytes(store, second, part) for part in range(PARTS)] == expected(K0)
    assert counted.counts.opened == 1


def test_a_load_that_fails_midway_is_lost_to_its_readers_and_a_miss_afterwards(make, tier):
    fill(tier, K0)
    tier.records[K0][4096 + PART_BYTES + 5] ^= 1
    store = make(tier)
    with store.pinned([K0]) as (pin,):
        assert pin_bytes(store, pin, 0) == content(K0, 0)
        with pytest.raises(ChunkLost) as lost:
            store.part(pin, 1)
        assert lost.value.keys == [K0]
    assert store.lookup([K0]) == [None]
    assert get(store, K0) is None
    assert store.stats().failed == {"dict": 1}


def test_parts_that_had_arrived_stay_right_after_the_load_has_failed(make, tier):
    """The failed load's slot went back at once, and the next chunk was written over a part that was still being
    read.
    """
    fill(tier, K0)
    tier.records[K0][4096 + PART_BYTES + 5] ^= 1
    store = make(tier, slots=2)
    with store.pinned([K0]) as (pin,):
        early = store.part(pin, 0)
        with pytest.raises(ChunkLost):
            store.part(pin, 2)
        for key in (K1, K2, K3):
            put(store, key)
        assert bytes(early.tolist()) == content(K0, 0)
        assert pin_bytes(store, pin, 0) == content(K0, 0)
        assert store.held() >= 1
    store.flush()
    assert store.held() == 0


def test_a_failed_load_is_lost_to_everyone_who_waits_for_it_and_to_nobody_else(make, tier):
    faults = []
    gated = Gated(fill(tier, K0, K1))
    store = make(Faulty(gated, lambda verb, key: faults.pop() if verb == "read" and key == K0 and faults else None))
    gated.open_all()
    faults.append(OSError("a broken wire"))
    with store.pinned([K0, K1]) as (broken, fine):
        with pytest.raises(ChunkLost):
            store.part(broken, 0)
        assert pin_bytes(store, fine, 2) == content(K1, 2)
    assert get(store, K0) == expected(K0), "the record is still there, and reads the second time"


def test_a_record_of_another_shape_is_a_miss_and_is_removed(make, tier):
    """Earlier, the wrong record stayed: the tier still reported its key, and could never be given the right record."""
    tier.records[K0] = bytearray(raw_record(meta_of(K0, parts=PARTS + 1)))
    tier.records[K1] = bytearray(raw_record(meta_of(K1, part_bytes=2 * PART_BYTES)))
    store = make(tier)
    for key in (K0, K1):
        with store.pinned([key]) as (pin,), pytest.raises(ChunkLost):
            store.part(pin, 0)
        assert store.lookup([key]) == [None]
    assert put(store, K0)
    store.flush()
    assert read(tier, K0) == bytes(stored(meta_of(K0)))


# -- tiers that fail -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [OSError("a broken wire"), CorruptRecord("nonsense")], ids=["os", "corrupt"])
def test_a_tier_that_fails_at_everything_is_a_miss_and_is_complained_of_once(make, caplog, error):
    store = make(Broken(lambda: error))
    with caplog.at_level(logging.WARNING):
        assert store.lookup([K0]) == [None]
        assert get(store, K0) is None
        assert put(store, K0)
        store.flush()
        store.forget(K0)
        assert store.known_keys() == set()
        assert put(store, K1)
        store.close()
    complaint, closing = (record.getMessage() for record in caplog.records)
    assert complaint.startswith("tier broken: ")
    assert closing == "1 records could not be deleted from tier broken: remove them again later"
    assert store.stats().failed["broken"] >= 6


@pytest.mark.parametrize("verb", ["open", "read"])
def test_a_failure_at_one_verb_is_a_miss_and_the_next_time_a_hit(make, tier, verb):
    faults = [OSError("now and then")]
    store = make(Faulty(fill(tier, K0), lambda met, key: faults.pop() if met == verb and faults else None))
    with store.pinned([K0]) as (pin,), pytest.raises(ChunkLost):
        store.part(pin, 0)
    assert get(store, K0) == expected(K0)


def test_an_error_that_is_no_tier_s_failure_still_ends_the_load(make, tier, caplog):
    """A programming error in a tier must not leave a reader waiting for ever."""
    store = make(Faulty(fill(tier, K0), lambda verb, key: ZeroDivisionError() if verb == "read" else None))
    with store.pinned([K0]) as (pin,), pytest.raises(ChunkLost):
        store.part(pin, 0)
    assert store.held() == 0
    assert "ZeroDivisionError" in caplog.text


def test_an_error_that_is_no_tier_s_failure_gives_the_written_slot_back(make, tier, caplog):
    store = make(Faulty(tier, lambda verb, key: ZeroDivisionError() if key == K0 else None))
    put(store, K0)
    store.flush()
    assert store.held() == 0
    assert get(store, K0) == expected(K0)
    assert "ZeroDivisionError" in caplog.text
    store.forget(K0)


def test_an_unexpected_error_of_one_write_at_the_end_leaves_the_others_written_and_the_tiers_closed(make, caplog):
    """A record that did not fit into memory kept other records from being written, and the disk's index incomplete."""
    closed = list[bool]()

    class Closed(DictTier):
        def close(self):
            closed.append(True)

    errors = {K0: OSError("away"), K1: OSError("away")}
    tier = Closed()
    store = make(Faulty(tier, lambda verb, key: errors.get(key)))
    put(store, K0)
    put(store, K1)
    store.flush()
    errors |= {K0: MemoryError(), K1: None}
    store.close()
    assert list(tier.records) == [K1]
    assert closed
    assert "MemoryError" in caplog.text


def test_two_stores_of_one_tier_write_one_key_both(make, tier):
    one, other = make(tier), make(tier)
    assert put(one, K0)
    assert put(other, K0)
    one.flush()
    other.flush()
    assert one.stats().writes.get("dict", 0) + other.stats().writes.get("dict", 0) >= 1
    assert get(one, K0) == get(other, K0) == expected(K0)
    assert tier.check() == []


# -- device ----------------------------------------------------------------------------------------------------------


def test_write_through_from_the_device_reaches_host_and_tier(make, tier):
    store = make(tier, device=2)
    put(store, K0)
    assert store.lookup([K0]) == ["device"]
    store.flush()
    assert bytes(tier.records[K0]) == raw_record(meta_of(K0))
    put(store, K1)
    put(store, K2)
    store.flush()
    assert store.lookup([K0, K1, K2]) == ["host", "device", "device"]
    assert get(store, K0) == expected(K0)


def test_what_was_read_from_the_host_goes_up_to_the_device(make):
    store = make(device=1)
    put(store, K0)
    store.flush()
    put(store, K1)
    store.flush()
    assert store.lookup([K0]) == ["host"]
    assert get(store, K0) == expected(K0)
    store.flush()
    assert store.lookup([K0]) == ["device"]
    assert get(store, K0) == expected(K0)


def test_what_was_loaded_from_a_tier_goes_up_to_the_device_too(make, tier):
    store = make(fill(tier, K0), device=1)
    assert get(store, K0) == expected(K0)
    with store.pinned([K0]):
        store.flush()
    get(store, K0)
    store.flush()
    assert store.lookup([K0]) == ["device"]
    assert get(store, K0) == expected(K0)


def test_a_chunk_passes_through_all_levels_and_none_is_lost(make, tier):
    keys = [key_of(i) for i in range(9)]
    store = make(tier, slots=4, device=2)
    for key in keys:
        put(store, key)
        store.flush()
    assert store.lookup(keys) == ["dict"] * 5 + ["host"] * 2 + ["device"] * 2
    for key in keys:
        assert get(store, key) == expected(key)
        store.flush()
    assert store.stats().dropped_writes == 0


def test_close_writes_what_is_on_the_device_even_if_the_host_is_smaller(make, tier):
    """Earlier, these chunks went through memory, whose slots were taken from under chunks not yet written."""
    gated = Gated(tier)
    gated.write_gate.clear()
    store = make(gated, slots=2, device=6)
    for key in (K0, K1, K2, K3, K4, K5):
        put(store, key)
    gated.open_all()
    store.close()
    assert {key: bytes(record) for key, record in tier.records.items()} == {
        key: raw_record(meta_of(key)) for key in (K0, K1, K2, K3, K4, K5)
    }


# -- forget ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", [0, 2])
def test_forget_removes_a_chunk_everywhere(make, tier, device):
    store = make(tier, device=device)
    put(store, K0)
    put(store, K1)
    store.flush()
    store.forget(K0)
    assert store.lookup([K0, K1]) == [None, "device" if device else "host"]
    assert K0 not in tier.records
    assert store.known_keys() == {K1}
    assert put(store, K0, version=1)
    assert get(store, K0) == expected(K0, version=1)


@pytest.mark.parametrize("device", [0, 2])
def test_a_forgotten_chunk_is_not_written_by_what_was_queued_before(make, tier, device):
    """The write that was under way brought the record back after the tier had deleted it."""
    gated = Gated(tier)
    gated.write_gate.clear()
    store = make(gated, device=device, slots=6)
    put(store, K0)
    assert gated.writing.wait(60)
    put(store, K1)  # waits in the queue
    forget = [Elsewhere(store.forget, key) for key in (K0, K1)]
    eventually(lambda: store.lookup([K0, K1]) == [None, None])
    gated.open_all()
    assert [thread.result for thread in forget] == [None, None]
    store.flush()
    assert store.lookup([K0, K1]) == [None, None]
    assert dict(tier.records) == {}


@pytest.mark.parametrize("end", ["abort", "commit"])
def test_a_forgotten_chunk_that_is_reserved_again_comes_from_the_second_reservation(make, end):
    """The end of the first one made the second one's chunk invisible, and a commit showed what was forgotten."""
    store = make()
    first = begin(store, K0)
    store.forget(K0)
    second = begin(store, K0)
    if end == "abort":
        store.abort(first)
    else:
        assert not store.commit_one(first)
    assert store.begin([meta_of(K0)]) == [None]
    assert store.commit_one(second)
    assert get(store, K0) == expected(K0)


def test_a_forgotten_chunk_is_not_kept_by_a_load_under_way(make, tier):
    gated = Gated(fill(tier, K0))
    store = make(gated)
    with store.pinned([K0]) as (pin,):
        assert gated.reading.wait(60)
        store.forget(K0)
        gated.open_all()
        with suppress(ChunkLost):
            assert pin_bytes(store, pin, 2) == content(K0, 2)
    assert store.lookup([K0]) == [None]


def test_a_forgotten_chunk_is_not_kept_by_a_load_that_overtakes_its_deletion(make, tier):
    deleting, go_on = threading.Event(), threading.Event()

    class SlowToDelete(Wrapped):
        def delete(self, key):
            deleting.set()
            assert go_on.wait(60)
            return self.inner.delete(key)

    store = make(SlowToDelete(fill(tier, K0)))
    forget = Elsewhere(store.forget, K0)
    assert deleting.wait(60)
    assert get(store, K0) == expected(K0)
    go_on.set()
    assert forget.result is None
    assert store.lookup([K0]) == [None]


def test_forgetting_a_pinned_chunk_leaves_it_to_its_reader(make, tier):
    """With a device, giving such a pin back failed in the promotion of what was no longer there, and leaked the
    slot.
    """
    store = make(fill(tier, K0), slots=2, device=2)
    with store.pinned([K0]) as (pin,):
        assert pin_bytes(store, pin, 2) == content(K0, 2)
        store.forget(K0)
        for key in (K1, K2, K3):
            put(store, key)
            store.flush()
        assert pin_bytes(store, pin, 0) == content(K0, 0)
    store.flush()
    assert store.lookup([K0]) == [None]


def test_forget_removes_both_copies_of_a_chunk_that_was_written_and_loaded_at_once(make, tier):
    """A key can be in two slots of a level; forget dropped the first and left the second to be found."""
    store = make(fill(tier, K0))
    with writing(store, meta_of(K0)) as slot:
        for part in range(PARTS):
            slot[part] = as_tensor(content(K0, part))
        assert get(store, K0) == expected(K0), "from the tier meanwhile"
    store.forget(K0)
    assert store.lookup([K0]) == [None]


# -- counts ----------------------------------------------------------------------------------------------------------


def test_what_moves_and_how_long_it_takes_is_counted_by_tier_and_verb(make, tier, tmp_path):
    record = 4096 + PARTS * PART_BYTES
    store = make(DiskTier(tmp_path, 2 * record), Delayed(tier, per_part=0.01, per_write=0.02), slots=1)
    for key in (K0, K1, K2):
        put(store, key)
        store.flush()
    assert get(store, K0) == expected(K0)
    stats, size = store.stats(), PARTS * PART_BYTES
    assert stats.bytes == {("disk", "write"): 3 * size, ("dict", "write"): 3 * size, ("dict", "read"): size}
    assert loaded(stats) == {"dict": size}
    assert stats.writes == {"disk": 3, "dict": 3}
    assert stats.evictions == {"host": 3, "disk": 1, "dict": 0}
    assert set(stats.seconds) >= {("disk", "write"), ("disk", "lookup"), ("dict", "write"), ("dict", "read")}
    assert stats.seconds["dict", "read"] >= PARTS * 0.01
    assert stats.seconds["dict", "write"] >= 3 * 0.02
    assert (stats.queued, stats.usable) == (0, {"disk": True, "dict": True})


def test_corrupt_records_are_counted_apart(make, tier):
    fill(tier, K0, K1)
    tier.records[K0][4096] ^= 1
    store = make(Faulty(tier, lambda verb, key: OSError("gone") if key == K1 else None))
    for key in (K0, K1):
        with store.pinned([key]) as (pin,), pytest.raises(ChunkLost):
            store.part(pin, 0)
    assert (store.stats().failed, store.stats().corrupt) == ({"dict": 2}, {"dict": 1})


def test_what_is_counted_is_a_copy(make, tier):
    store = make(tier)
    before = store.stats()
    put(store, K0)
    get(store, K0)
    store.flush()
    assert (before.hits, before.writes, before.bytes) == ({}, {}, {})


# -- everybody at once -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", [0, 2])
def test_many_threads_never_see_a_wrong_byte_and_leave_nothing_held(make, device):
    keys = [key_of(i) for i in range(10)]

    class Sometimes(Wrapped):
        """Loses every seventh record that it is asked for."""

        asked = 0

        def open(self, key):
            self.asked += 1
            if self.asked % 7 == 0:
                self.inner.delete(key)
            return super().open(key)

    store = make(Sometimes(DictTier()), slots=4, device=device)

    def work(seed):
        for turn in range(150):
            mine = [keys[(seed * 5 + turn * step) % 10] for step in (1, 3, 7)]
            put(store, mine[0])
            with store.pinned(mine) as pins:
                for key, pin in zip(mine, pins, strict=True):
                    try:
                        for part in range(PARTS if pin and (turn + seed) % 3 else 0):
                            assert pin_bytes(store, pin, part) == content(key, part)
                    except ChunkLost:
                        continue
            if turn % 11 == 0:
                store.forget(mine[2])

    threads = [Elsewhere(work, seed) for seed in range(4)]
    assert [thread.result for thread in threads] == [None] * 4
    store.flush()
    assert store.held() == 0
    assert store.check_integrity() == []


def test_closing_while_others_read_and_write_ends(make, tier):
    """A pin that was taken just then waited for a thread that no longer came."""
    store = make(fill(tier, *map(key_of, range(20))), slots=6)
    begun = threading.Barrier(4)

    def work(seed):
        begun.wait(60)
        for turn in range(100):
            key = key_of((turn * 7 + seed) % 25)
            put(store, key)
            try:
                found = get(store, key)
            except ChunkLost:
                continue
            assert found in (None, expected(key))

    threads = [Elsewhere(work, seed) for seed in range(3)]
    begun.wait(60)
    store.close()
    assert [thread.result for thread in threads] == [None] * 3


# -- slots that others fill and read -----------------------------------------------------------------------------------


def begin(store, key):
    """A writing whose slot is filled, as another process would."""
    (writing,) = store.begin([meta_of(key)])
    if writing is not None:
        for part in range(PARTS):
            store.view(writing)[part, :PART_BYTES] = as_tensor(content(key, part))
    return writing


def shared(make, *tiers, slots=4, **options):
    """A store over a shared slab, and that slab."""
    store = make(*tiers, slots=slots, shared=True, **options)
    return store, store.slab


def test_after_the_end_nothing_is_begun_and_what_was_begun_can_still_be_given_back(make, tier):
    store = make(tier)
    first, second = begin(store, K0), begin(store, K1)
    store.close()
    assert begin(store, K2) is None
    store.commit([first])
    store.abort(second)
    assert store.held() == 0


def test_a_pin_says_how_far_its_chunk_has_come_without_waiting(make, tier):
    gate = Gated(fill(tier, K0))
    store, slab = shared(make, gate)
    (pin,) = store.pin([K0])
    assert store.state(pin) is PinState.COMING
    gate.read_gates[0].set()
    store.part(pin, 0)
    assert store.state(pin) is PinState.COMING
    assert slab.ready(pin.slot, tag_of(K0)) == 1
    gate.open_all()
    store.part(pin, PARTS - 1)
    store.release([pin])
    (pin,) = store.pin([K0])
    assert store.state(pin) is PinState.READY
    assert slab.ready(pin.slot, tag_of(K0)) == PARTS
    store.release([pin])


def test_a_failed_load_is_lost_to_its_pin_and_to_other_processes(make, tier):
    gate = Gated(Faulty(fill(tier, K0), lambda verb, key: OSError("gone") if verb == "read" else None))
    store, slab = shared(make, gate)
    (pin,) = store.pin([K0])
    gate.open_all()
    with pytest.raises(ChunkLost):
        store.part(pin, 0)
    assert store.state(pin) is PinState.LOST
    assert slab.ready(pin.slot, tag_of(K0)) == LOST
    assert store.held() == 1, "parts that had arrived may be in use"
    store.release([pin])
    assert store.held() == 0


def test_a_load_that_everybody_left_is_lost_at_once_and_back_if_somebody_returns(make, tier):
    """Only its thread said so, and that may hang in the tier."""
    gate = Gated(fill(tier, K0))
    store, slab = shared(make, gate)
    (pin,) = store.pin([K0])
    gate.read_gates[0].set()
    store.part(pin, 0)
    assert gate.reading.wait(60)
    store.release([pin], wait=False)
    assert slab.ready(pin.slot, tag_of(K0)) == LOST
    (again,) = store.pin([K0])
    assert again.slot == pin.slot
    assert slab.ready(pin.slot, tag_of(K0)) == 1
    gate.open_all()
    assert pin_bytes(store, again, PARTS - 1) == content(K0, PARTS - 1)
    store.release([again])


def test_leaving_a_load_that_nobody_began_gives_its_slot_back(make, tier):
    gate = Gated(fill(tier, K0, K1, K2))
    store = make(gate, load_threads=1)
    first = store.pin([K0])
    assert gate.reading.wait(60)
    second = store.pin([K1, K2])  # in the queue of the only thread
    assert store.held() == 3
    store.release([pin for pin in second if pin], wait=False)
    assert store.held() == 1
    gate.open_all()
    store.release([pin for pin in first if pin])


def test_a_slot_that_is_taken_for_another_chunk_loses_its_old_one_before_the_first_byte(make):
    """Whoever still read the old chunk saw a whole one under its label while the new one's bytes came in."""
    store, slab = shared(make, slots=1)
    put(store, K0)
    with store.pinned([K0]) as (pin,):
        slot = pin.slot
    assert slab.ready(slot, tag_of(K0)) == PARTS
    (writing,) = store.begin([meta_of(K1)])
    assert slab.ready(slot, tag_of(K0)) == LOST
    store.commit([writing])
    assert slab.ready(slot, tag_of(K1)) == PARTS
    assert slab.ready(slot, tag_of(K0)) == LOST


def test_what_is_forgotten_is_lost_to_those_who_read_it_in_other_processes(make, tier):
    store, slab = shared(make, tier)
    put(store, K0)
    (pin,) = store.pin([K0])
    store.forget(K0)
    assert slab.ready(pin.slot, tag_of(K0)) == LOST
    store.release([pin])
    assert store.held() == 0


# -- tiers that others share -----------------------------------------------------------------------------------------


def test_what_a_shared_tier_has_let_go_of_is_not_written_again_at_the_end(make):
    """A shutdown wrote the whole memory to a Redis that had evicted it, and so evicted what others needed."""
    tier = Shared()
    store = make(tier, slots=4)
    for key in (K0, K1):
        put(store, key)
    store.flush()
    tier.delete(K0)
    store.close()
    assert set(tier.records) == {K1}


def test_what_a_shared_tier_did_not_get_is_written_at_the_end(make):
    tier = Shared()
    failing = Faulty(
        tier, lambda verb, key: OSError("no") if verb == "write" and key == K0 and not tier.records else None
    )
    store = make(failing, slots=4)
    for key in (K0, K1):
        put(store, key)
        store.flush()
    assert set(tier.records) == {K1}
    store.close()
    assert set(tier.records) == {K0, K1}


def test_a_lookup_can_leave_out_what_takes_a_round_trip(make):
    tier = Shared()
    write_record(tier, K0)
    store = make(tier, slots=4)
    assert store.lookup([K0]) == ["shared"]
    assert store.lookup([K0], shared=False) == [None]


def test_a_file_that_is_missing_is_an_answer_to_reading_and_a_failure_of_writing(make, tmp_path):
    """A directory that was removed from under the tier made every write vanish without a word."""
    store = make(DiskTier(tmp_path / "tier", 1 << 20), slots=4)
    shutil.rmtree(tmp_path / "tier")
    put(store, K0)
    store.flush()
    assert store.stats().failed == {"disk": 1}


def write_record(tier, key):
    tier.write(meta_of(key), [stored(meta_of(key))])


def test_a_tier_that_hangs_holds_up_nobody_who_looks_after_pinned_chunks(make):
    """The slot of a pinned chunk is not reused while the tier that hangs still reads it."""
    gate = threading.Event()

    def hanging(verb, _):
        if verb == "write":
            gate.wait(60)

    tier = Faulty(DictTier(), hanging)
    store = make(tier, slots=4)
    put(store, K0)
    gate.set()
    store.flush()
    tier.inner.delete(K0)
    gate.clear()
    started = time.monotonic()
    with pytest.raises(TimeoutError):
        store.spread([K0], patience=0.2)
    assert time.monotonic() - started < 30
    assert store.held() == 1
    gate.set()
    eventually(lambda: store.held() == 0)
    assert tier.inner.contains([K0]) == [True]


def test_a_chunk_that_is_forgotten_while_it_is_spread_is_not_written_again(make, monkeypatch):
    """The chunk is forgotten, and deleted from the tier, between `spread`'s look at the tier and its order to write."""
    tier = DictTier()
    store = make(tier, slots=4)
    put(store, K0)
    store.flush()
    tier.delete(K0)
    write_again = Writer.write_again

    def forget_before(*ordered):
        store.forget(K0, wait=False)
        return write_again(*ordered)

    monkeypatch.setattr(Writer, "write_again", forget_before)
    store.spread([K0])
    store.flush()
    assert tier.contains([K0]) == [False]
    assert store.held() == 0


# -- integrity -------------------------------------------------------------------------------------------------------


def test_a_load_whose_readers_are_counted_wrongly_is_reported(make, monkeypatch):
    loads, run = [], loader.Loader.run
    monkeypatch.setattr(
        loader.Loader, "run", lambda self, given, client: (loads.extend(given), run(self, given, client))
    )
    gate = Gated(fill(DictTier(), K0))
    store = make(gate)
    pins = store.pin([K0])
    (load,) = loads
    load.readers = 2
    assert store.check_integrity() == [f"the load of {K0.hex()}: readers 1, counted as 2"]
    load.readers = 1
    gate.open_all()
    store.release(pins)


def test_a_load_that_has_ended_is_right_when_some_of_its_readers_have_left(make):
    """Earlier, a load that had ended still counted readers that had left, which was reported as a fault."""
    store = make(fill(DictTier(), K0))
    one, other = store.pin([K0]), store.pin([K0], ["dict"])
    assert store.part(one[0], PARTS - 1) is not None
    eventually(lambda: store.state(one[0]) is PinState.READY)
    store.release(one)
    assert store.check_integrity() == []
    store.release(other)


def test_a_pin_without_a_held_slot_is_reported(make):
    store = make()
    put(store, K0)
    (pin,) = store.pin([K0])
    state_of(store).host.free([pin.slot])
    assert store.check_integrity() == ["pins, loads, copies and writes hold slots 1 times, counted as 0"]
    state_of(store).host.hold(pin.slot)
    store.release([pin])


def test_a_write_queue_that_is_counted_wrongly_is_reported(make, tier):
    store = make(tier)
    queues = state_of(store).queues
    queues.done(tier, meta_of(K0), None, queued=True)
    assert store.check_integrity() == ["-1 chunks wait for tier dict; the limit is 2"]
    queues.enter(K0)


def test_a_disk_with_fewer_bytes_than_its_records_take_is_reported(make, tmp_path):
    disk = DiskTier(tmp_path, 1 << 20)
    store = make(disk)
    put(store, K0)
    store.flush()
    size, disk.bytes = disk.bytes, 0
    assert store.check_integrity() == [f"disk: the records take {size} bytes, counted as 0"]
    disk.bytes = size


EXITS = """
import atexit
from storage_fakes import PART_BYTES, PARTS, DictTier, key_of, put
from tier_wrappers import Faulty
from lmc.storage.memory.slab import Slab
from lmc.storage.store import Store

errors = {{"write": OSError("away")}}
store = Store(Slab(4, PARTS, PART_BYTES), [Faulty(DictTier(), lambda verb, key: errors.get(verb))])
for number in range(2):
    put(store, key_of(number))
store.flush()
errors.clear()
atexit.register(lambda: print("held", store.held()))
atexit.register(store.close)
{then}
"""


@pytest.mark.parametrize(("then", "late"), [("", 2), ("atexit.register(lambda: put(store, key_of(2)))", 3)])
def test_a_store_that_is_closed_when_its_process_exits_says_what_it_could_not_write(then, late):
    """As in a program that uses vLLM in its own process and ends. Python has stopped thread pools by then.

    A chunk that was stored after that made the close wait forever.
    """
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", EXITS.format(then=then)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120)
    text = f"{late} chunks were not written to tier dict: shut the engine down before its process exits"
    assert text in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == "held 0\n"
