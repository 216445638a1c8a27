"""The change log: what has appeared in a place and what has left it, for readers who come at their own pace."""

import contextlib
import tempfile
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from storage_fakes import (
    PART_BYTES,
    PARTS,
    RECORD_BYTES,
    DictTier,
    Shared,
    get,
    key_of,
    meta_of,
    put,
    raw_record,
    state_of,
    stored,
)
from test_disk import path_of

from lmc.errors import ChunkLost
from lmc.keys import RecordKind
from lmc.storage.change_log import Amount, Change, ChangeLog, Chunk
from lmc.storage.memory.slab import Slab
from lmc.storage.store import Store
from lmc.storage.tiers.disk import DiskTier

K0, K1, K2, K3 = map(key_of, range(4))
KEYS = (K0, K1, K2, K3)


def chunk_of(key):
    return Chunk.of(meta_of(key))


def counted(log):
    return {place: (amount.chunks, amount.tokens) for place, amount in log.counts().items()}


def replayed(changes, start=None):
    """What is present after these changes, by place; empty places are left out."""
    there = {place: list(chunks) for place, chunks in (start or {}).items()}
    for change in changes:
        if change.appeared:
            there.setdefault(change.place, []).append(change.chunk)
        else:
            there[change.place].remove(change.chunk)
    return {place: chunks for place, chunks in there.items() if chunks}


def present(log):
    return {place: chunks for place, chunks in log.present()[1].items() if chunks}


def steps(log, number=0):
    """The changes after `number`, as keys, places and whether they appeared."""
    changes, complete = log.since(number)
    assert complete
    return [(change.chunk.key, change.place, change.appeared) for change in changes]


# -- the log -------------------------------------------------------------------------------------------------------


def test_a_change_says_which_chunk_came_or_went_and_where():
    log = ChangeLog()
    log.appeared("host", meta_of(K0))
    log.appeared("disk", meta_of(K0))
    log.left("host", K0)
    chunk = chunk_of(K0)
    changes = [Change(1, chunk, "host", True), Change(2, chunk, "disk", True), Change(3, chunk, "host", False)]
    assert log.since(0) == (changes, True)
    assert log.since(2) == (changes[2:], True)
    assert log.since(3) == ([], True)


def test_a_chunk_is_what_is_known_of_its_record():
    meta = replace(meta_of(K0), kind=RecordKind.PREFIX, tokens=7, namespace=b"n" * 32)
    assert Chunk.of(meta) == Chunk(K0, RecordKind.PREFIX, 7, b"n" * 32, "", "", meta.parts * meta.stored_part)


def test_what_models_and_tenants_have_is_counted_until_they_have_nothing():
    log = ChangeLog()
    for key, model, tenant in ((K0, "a", ""), (K1, "a", ""), (K2, "a", "t"), (K3, "b", "t")):
        log.appeared("host", replace(meta_of(key), model=model, tenant=tenant))
    size = meta_of(K0).parts * meta_of(K0).stored_part
    one, two = Amount(1, 16, size), Amount(2, 32, 2 * size)
    assert log.held() == {("host", "a", ""): two, ("host", "a", "t"): one, ("host", "b", "t"): one}
    assert log.held("t") == {("host", "a", "t"): one, ("host", "b", "t"): one}
    assert log.held("unknown") == {}
    log.left("host", K3)
    log.left("host", K0)
    assert log.held() == {("host", "a", ""): one, ("host", "a", "t"): one}


def test_a_chunk_that_appears_twice_is_one_change():
    """A chunk may be in two slots of a slab. One that has left appears anew."""
    log = ChangeLog()
    for _ in range(2):
        log.appeared("host", meta_of(K0))
    assert steps(log) == [(K0, "host", True)]
    log.left("host", K0)
    log.appeared("host", meta_of(K0))
    assert steps(log, 2) == [(K0, "host", True)]
    assert counted(log) == {"host": (1, 16)}


def test_a_chunk_that_was_not_there_does_not_leave():
    log = ChangeLog()
    log.left("host", K0)
    log.appeared("host", meta_of(K0))
    log.left("disk", K0)
    log.left("host", K1)
    log.left("host", K0)
    log.left("host", K0)
    assert steps(log) == [(K0, "host", True), (K0, "host", False)]


def test_chunks_and_tokens_are_counted_by_place():
    log = ChangeLog()
    for i, key in enumerate((K0, K1, K2), 1):
        log.appeared("host", replace(meta_of(key), tokens=i))
    log.appeared("disk", replace(meta_of(K0), tokens=1))
    log.left("host", K1)
    log.left("disk", K0)
    assert counted(log) == {"disk": (0, 0), "host": (2, 4)}


def test_a_log_that_reaches_back_far_enough_is_complete():
    log = ChangeLog(kept=3)
    for key in KEYS:
        log.appeared("host", meta_of(key))
    assert steps(log, 1) == [(K1, "host", True), (K2, "host", True), (K3, "host", True)]
    assert log.since(0) == ([], False), "the first change is not kept any more"


def test_what_was_returned_does_not_change_later():
    log = ChangeLog()
    log.appeared("host", meta_of(K0))
    (changes, _), (_, there) = log.since(0), log.present()
    log.left("host", K0)
    log.appeared("host", meta_of(K1))
    assert [change.number for change in changes] == [1]
    assert there == {"host": [chunk_of(K0)]}


operations = st.lists(st.tuples(st.booleans(), st.sampled_from(["device", "host", "disk"]), st.sampled_from(KEYS)))


def apply(log, operation):
    comes, place, key = operation
    if comes:
        log.appeared(place, replace(meta_of(key), tokens=1 + KEYS.index(key)))
    else:
        log.left(place, key)


@settings(deadline=None)
@given(operations)
def test_replaying_all_changes_gives_what_is_present(done):
    """A set for each place is the model. The numbers of the changes have no gaps."""
    log, model, count = ChangeLog(), {}, 0
    for operation in done:
        comes, place, key = operation
        there = model.setdefault(place, set())
        count += (key in there) != comes
        (there.add if comes else there.discard)(key)
        apply(log, operation)
    changes, complete = log.since(0)
    assert complete
    assert [change.number for change in changes] == list(range(1, count + 1))
    assert replayed(changes) == present(log)
    assert log.present()[0] == count
    keys = {place: {chunk.key for chunk in chunks} for place, chunks in present(log).items()}
    assert keys == {place: there for place, there in model.items() if there}
    counts = {place: found for place, found in counted(log).items() if any(found)}
    tokens = {place: sum(1 + KEYS.index(key) for key in there) for place, there in model.items()}
    assert counts == {place: (len(there), tokens[place]) for place, there in model.items() if there}


@settings(deadline=None)
@given(operations, st.integers(1, 5))
def test_every_reader_gets_all_changes_or_is_told_that_it_cannot(done, kept):
    log, all_of_them = ChangeLog(kept), ChangeLog()
    for operation in done:
        apply(log, operation)
        apply(all_of_them, operation)
    changes, _ = all_of_them.since(0)
    for number in range(len(changes) + 1):
        behind = len(changes) - number
        assert log.since(number) == ((changes[number:], True) if behind <= kept else ([], False))


@settings(deadline=None)
@given(st.lists(operations, max_size=5))
def test_a_reader_that_fell_behind_starts_again_from_what_is_present(rounds):
    log, number, there = ChangeLog(kept=2), 0, {}
    for done in rounds:
        for operation in done:
            apply(log, operation)
        changes, complete = log.since(number)
        if complete:
            number, there = number + len(changes), replayed(changes, there)
        else:
            number, there = log.present()
        assert {place: set(chunks) for place, chunks in there.items() if chunks} == {
            place: set(chunks) for place, chunks in present(log).items()
        }
        assert log.since(number) == ([], True)


# -- in a store ----------------------------------------------------------------------------------------------------


@pytest.fixture
def make():
    made = []

    def make_store(*tiers, slots=4, device=0):
        slab = Slab(device, PARTS, PART_BYTES) if device else None
        made.append(Store(Slab(slots, PARTS, PART_BYTES), tiers, device=slab))
        return made[-1]

    yield make_store
    for store in made:
        store.close()


@pytest.fixture
def disk(tmp_path):
    return partial(DiskTier, tmp_path, 100 * RECORD_BYTES)


def keys_in(store, place):
    return {chunk.key for chunk in present(store.changes).get(place, ())}


def filled(store, *keys):
    for key in keys:
        assert put(store, key)
        store.flush()
    return store


def test_a_slot_that_was_given_back_is_no_change(make):
    store = make()
    (reservation,) = store.begin([meta_of(K0)])
    assert steps(store.changes) == []
    store.abort(reservation)
    assert steps(store.changes) == []


def test_a_record_that_turns_out_to_be_corrupt_leaves_the_disk(make, disk, tmp_path):
    store = filled(make(disk(), slots=1), K0, K1)
    path = path_of(tmp_path, K0)
    blob = bytearray(path.read_bytes())
    blob[0] ^= 1
    path.write_bytes(blob)
    number, _ = store.changes.present()
    with store.pinned([K0]) as (pin,):
        assert pin is not None
    assert (K0, "disk", False) in steps(store.changes, number)
    assert keys_in(store, "disk") == {K1}


def test_a_record_whose_file_somebody_removed_leaves_the_disk_when_that_is_found(make, disk, tmp_path):
    store = filled(make(disk(), slots=1), K0, K1)
    path_of(tmp_path, K0).unlink()
    with store.pinned([K0]) as (pin,):
        assert pin is not None
    assert keys_in(store, "disk") == {K1}
    assert store.lookup([K0]) == [None]


def test_records_of_earlier_processes_are_in_the_log_after_their_headers_were_read(make, disk):
    filled(make(disk()), K0, K1).close()
    store = make(disk())
    assert present(store.changes) == {}
    assert [(place, meta.key) for place, meta, _ in store.records()] == [("disk", K1), ("disk", K0)]
    assert present(store.changes) == {"disk": [chunk_of(K1), chunk_of(K0)]}
    list(store.records())
    assert steps(store.changes) == [(K1, "disk", True), (K0, "disk", True)], "reading them again changes nothing"
    store.forget(K0)
    assert keys_in(store, "disk") == {K1}


def test_what_other_processes_keep_in_a_shared_tier_is_not_in_the_log(make):
    tier = Shared()
    tier.records[K0] = bytearray(raw_record(meta_of(K0)))
    store = make(tier)
    assert list(store.records()) == []
    assert get(store, K0)
    assert steps(store.changes) == [(K0, "host", True)]


def test_nothing_is_kept_of_tenants_whose_chunks_have_gone():
    """There is one for each session of an application that gives each its own salt."""
    log = ChangeLog()
    for number in range(100):
        log.appeared("host", replace(meta_of(K0), tenant=str(number)))
        log.left("host", K0)
    assert log.taken("host", model=meta_of(K0).model) == 0
    there = log._places["host"]
    assert (there.held, there.bytes_of_models, there.bytes_of_tenants) == ({}, {}, {})


actions = st.lists(st.tuples(st.sampled_from([put, put, get, Store.forget]), st.sampled_from(KEYS)), max_size=25)


@settings(max_examples=60, deadline=None)
@given(actions, st.sampled_from([0, 1, 2]), st.integers(1, 3), st.booleans())
def test_the_log_says_what_every_place_of_a_store_holds(done, device, slots, on_disk):
    with tempfile.TemporaryDirectory() as folder:
        tier = DiskTier(folder, 2 * RECORD_BYTES) if on_disk else DictTier()
        slab = Slab(device, PARTS, PART_BYTES) if device else None
        store = Store(Slab(slots, PARTS, PART_BYTES), [tier], device=slab)
        for action, key in done:
            # With a disk for two records, what is evicted to make room for a load may push its record out.
            with contextlib.suppress(ChunkLost):
                action(store, key)
            store.flush()
        for pool in state_of(store).pools.values():
            assert keys_in(store, pool.name) == set(pool.keys())
        assert keys_in(store, tier.name) == {entry.key for entry in tier.entries()}
        changes, complete = store.changes.since(0)
        assert complete
        assert replayed(changes) == present(store.changes)
        store.close()
        assert keys_in(store, tier.name) == {entry.key for entry in tier.entries()}


def test_a_record_that_is_evicted_while_headers_are_read_is_not_listed(tmp_path):
    """Earlier, such a record was listed until a restart, because its header was noted after its deletion."""
    tier = DiskTier(tmp_path, 1 << 20)
    for key in (K0, K1):
        tier.write(meta_of(key), [memoryview(stored(meta_of(key)))])
    store = Store(Slab(4, PARTS, PART_BYTES), [tier])
    found = store.records()
    assert next(found).meta.key == K1
    tier.delete(K1)
    tier.delete(K0)
    assert list(found) == []
    assert keys_in(store, "disk") == set()
    store.close()
