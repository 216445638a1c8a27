"""What is evicted: the order alone against a plain model, and the share of documents in memory and on the disk."""

from dataclasses import replace
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st
from storage_fakes import PART_BYTES, PARTS, RECORD_BYTES, DictTier, get, key_of, meta_of, put, stored
from test_disk import used

from lmc.keys import RecordKind
from lmc.storage.eviction import EvictionClass, EvictionOrder
from lmc.storage.memory.slab import Slab
from lmc.storage.store import Store
from lmc.storage.tiers.disk import DiskTier
from lmc.storage.tiers.tier import Written

OTHER, DOCUMENT, PINNED = EvictionClass
PAGES = [key_of(f"pages {i}") for i in range(12)]
DOCUMENTS = [key_of(f"document {i}") for i in range(12)]


@given(
    share=st.integers(0, 6),
    steps=st.lists(
        st.tuples(st.sampled_from(["add", "touch", "evict"]), st.integers(0, 7), st.sampled_from(EvictionClass))
    ),
)
def test_the_order_is_that_of_a_list_that_is_searched(share, steps):
    order, model = EvictionOrder(share), []  # entries with their eviction_class, used longest ago first
    for step, entry, eviction_class in steps:
        there = next((item for item in model if item[0] == entry), None)
        if step == "add" and there is None:
            order.insert(entry, eviction_class)
            order.release(entry)
            model.append((entry, eviction_class))
        elif step == "touch" and there:
            order.touch(entry)
            model.remove(there)
            model.append(there)
        elif step == "evict":
            wanted = first_of(model, share)
            assert order.first() == (wanted and wanted[0])
            if wanted:
                model.remove(wanted)
                order.remove(wanted[0])
        assert list(order) == [item[0] for item in model]
        assert list(order.faults(lambda _: False)) == []


def first_of(model, share):
    pinned = sum(eviction_class is PINNED for _, eviction_class in model)
    documents = pinned + sum(eviction_class is DOCUMENT for _, eviction_class in model)
    allowed = {OTHER} | ({DOCUMENT} if documents > share else set()) | ({PINNED} if pinned > share else set())
    may = [item for item in model if item[1] in allowed]
    return next(iter(may), None) or next((item for item in model if item[1] is DOCUMENT), None)


def document(key):
    return replace(meta_of(key), kind=RecordKind.DOCUMENT)


def put_document(store, key):
    (reservation,) = store.begin([document(key)])
    if reservation is not None:
        store.commit([reservation])
    return reservation is not None


@pytest.fixture
def store():
    made = Store(Slab(6, PARTS, PART_BYTES), document_share=0.5)
    yield made
    made.close()
    assert made.held() == 0
    assert made.check_integrity() == []


def there(store, keys):
    return [key for key, place in zip(keys, store.lookup(keys), strict=True) if place]


def test_other_chunks_leave_documents_their_share_of_memory(store):
    for key in DOCUMENTS[:4]:
        assert put_document(store, key)
    for key in PAGES:
        assert put(store, key)
    assert there(store, DOCUMENTS) == DOCUMENTS[1:4]  # the share is three of six slots
    assert there(store, PAGES) == PAGES[-3:]
    assert store.stats().document_evictions == {"host": 1}


def test_documents_take_what_others_do_not_need(store):
    for key in DOCUMENTS[:8]:
        assert put_document(store, key)
    assert there(store, DOCUMENTS) == DOCUMENTS[2:8]


def test_without_a_share_the_one_used_longest_ago_is_evicted():
    store = Store(Slab(4, PARTS, PART_BYTES))
    for key in DOCUMENTS[:2]:
        put_document(store, key)
    for key in PAGES[:4]:
        put(store, key)
    assert there(store, DOCUMENTS) == []
    store.close()


def test_pinned_documents_stay_and_others_go(store):
    for key in DOCUMENTS[:6]:
        put_document(store, key)
    store.protect(DOCUMENTS[:3], pinned=True)
    for key in chain(PAGES[:6], DOCUMENTS[6:]):
        put_document(store, key)
    assert there(store, DOCUMENTS[:3]) == DOCUMENTS[:3]
    store.protect(DOCUMENTS[:3], pinned=False)
    for key in DOCUMENTS[3:9]:
        put_document(store, key)
    assert there(store, DOCUMENTS[:3]) == []


def test_a_chunk_that_is_pinned_before_it_comes_stays(store):
    store.protect([DOCUMENTS[0]], pinned=True)
    put_document(store, DOCUMENTS[0])
    for key in PAGES:
        put(store, key)
    assert there(store, DOCUMENTS) == DOCUMENTS[:1]


def test_pins_beyond_the_share_are_evicted_so_that_requests_find_room(store):
    for key in DOCUMENTS[:6]:
        put_document(store, key)
    store.protect(DOCUMENTS[:6], pinned=True)
    for key in PAGES[:3]:
        assert put(store, key)
    assert len(there(store, DOCUMENTS[:6])) == 3
    for key in PAGES[3:]:
        assert put(store, key)
    assert len(there(store, DOCUMENTS[:6])) == 3


def test_when_all_other_slots_are_held_a_pinned_document_is_not_evicted(store):
    for key in DOCUMENTS[:3]:
        put_document(store, key)
    store.protect(DOCUMENTS[:3], pinned=True)
    for key in PAGES[:3]:
        put(store, key)
    pins = store.pin(PAGES[:3])
    assert not put(store, PAGES[4])
    assert store.stats().no_room == 1
    store.release([pin for pin in pins if pin])
    assert put(store, PAGES[4])
    assert there(store, DOCUMENTS) == DOCUMENTS[:3]


def test_a_forgotten_document_leaves_nothing_in_the_share(store):
    for key in DOCUMENTS[:6]:
        put_document(store, key)
    store.protect(DOCUMENTS[:3], pinned=True)
    for key in DOCUMENTS[:6]:
        store.forget(key)
    assert store.check_integrity() == []
    for key in PAGES[:6]:
        assert put(store, key)
    assert there(store, PAGES) == PAGES[:6]


# -- on the disk -----------------------------------------------------------------------------------------------------


def disk_of(root, records=6, share=0.5):
    return DiskTier(root, records * RECORD_BYTES, document_share=share)


def write(tier, key, kind=RecordKind.PAGES):
    meta = replace(meta_of(key), kind=kind)
    return tier.write(meta, [stored(meta)])


def on_disk(tier, keys):
    return [key for key, present in zip(keys, tier.contains(keys), strict=True) if present]


def test_other_records_leave_documents_their_share_of_the_disk_also_after_a_restart(tmp_path, caplog):
    tier = disk_of(tmp_path)
    for key in DOCUMENTS[:4]:
        write(tier, key, RecordKind.DOCUMENT)
    for key in PAGES[:6]:
        write(tier, key, RecordKind.PAGES)
    assert on_disk(tier, DOCUMENTS) == DOCUMENTS[1:4]
    assert tier.document_evictions == 1
    assert caplog.text.count("documents are evicted from it: raise max_local_disk_size") == 1
    tier.close()
    tier = disk_of(tmp_path)
    assert len(list(tier.headers())) == 6  # The kinds are in the headers.
    for key in PAGES[6:]:
        assert write(tier, key, RecordKind.PAGES) is Written.STORED
    assert on_disk(tier, DOCUMENTS) == DOCUMENTS[1:4]
    assert tier.faults() == []
    assert tier.bytes == used(tmp_path)
    tier.close()


def test_pinned_records_stay_on_the_disk(tmp_path):
    tier = disk_of(tmp_path)
    for key in DOCUMENTS[:3]:
        write(tier, key, RecordKind.DOCUMENT)
    tier.protect(DOCUMENTS[:2], pinned=True)
    for key in DOCUMENTS[3:]:
        assert write(tier, key, RecordKind.DOCUMENT) is Written.STORED
    assert on_disk(tier, DOCUMENTS) == [*DOCUMENTS[:2], *DOCUMENTS[8:]]
    tier.delete(DOCUMENTS[0])
    write(tier, DOCUMENTS[0], RecordKind.DOCUMENT)
    for key in PAGES:
        write(tier, key)
    assert on_disk(tier, DOCUMENTS[:2]) == DOCUMENTS[:2]
    tier.protect(DOCUMENTS[:2], pinned=False)
    assert tier.faults() == []
    tier.close()


def test_the_order_of_use_survives_that_kinds_are_read(tmp_path):
    tier = disk_of(tmp_path, share=0.0)
    for pages, text in zip(PAGES[:3], DOCUMENTS[:3], strict=True):
        write(tier, pages)
        write(tier, text, RecordKind.DOCUMENT)
    tier.close()
    tier = disk_of(tmp_path, share=0.0)
    list(tier.headers())
    write(tier, PAGES[5])
    write(tier, PAGES[6])
    assert on_disk(tier, [*PAGES[:3], *DOCUMENTS[:3]]) == [*PAGES[1:3], *DOCUMENTS[1:3]]
    tier.close()


def test_what_memory_serves_stays_on_the_disk(tmp_path):
    """A document that is always in memory was never read from the disk, and went first there."""
    store = Store(Slab(1, PARTS, PART_BYTES), [disk := disk_of(tmp_path, 2)])
    for key in PAGES[:2]:
        put(store, key)
        store.flush()
    put(store, PAGES[0])
    for _ in range(3):
        assert get(store, PAGES[0]) is not None
    disk.write(meta_of(PAGES[2]), [stored(meta_of(PAGES[2]))])
    assert disk.contains(PAGES[:3]) == [True, False, True]
    store.close()


# -- chunks that a tier has lost -------------------------------------------------------------------------------------


def test_spread_writes_again_what_a_tier_has_dropped(tmp_path):
    remote = DictTier()
    remote.shared = True
    store = Store(Slab(2, PARTS, PART_BYTES), [disk_of(tmp_path, 20), remote])
    for key in DOCUMENTS[:4]:
        put(store, key)
        store.flush()
    for key in DOCUMENTS[:3]:
        remote.delete(key)
    assert store.spread([*DOCUMENTS[:4], PAGES[0]]) == [PAGES[0]]
    assert remote.contains(DOCUMENTS[:4]) == [True] * 4
    assert store.held() == 0
    assert get(store, DOCUMENTS[0]) is not None
    store.close()


def test_spread_leaves_out_a_tier_that_is_away(tmp_path):
    remote = DictTier()
    remote.usable = False
    store = Store(Slab(2, PARTS, PART_BYTES), [remote, disk_of(tmp_path, 20)])
    put(store, DOCUMENTS[0])
    store.flush()
    assert store.spread(DOCUMENTS[:1]) == []
    assert remote.records == {}
    store.close()
