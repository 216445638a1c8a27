"""Fair shares: of models by their weights, of tenants within their models, and none for those who do not come back."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from storage_fakes import PART_BYTES, PARTS, get, key_of, meta_of

from lmc.storage.eviction import SHARES_EVENTS, EvictionClass, EvictionOrder, FairShares
from lmc.storage.memory.slab import Slab
from lmc.storage.store import Store

SLOTS = 40


class Weights(dict):
    """By model, or by model and tenant."""

    def of_model(self, model):
        return self.get(model, 1.0)

    def of_tenant(self, model, tenant):
        return self.get((model, tenant), 1.0)


class House:
    """A store whose chunks have owners."""

    def __init__(self, weights=(), slots=SLOTS):
        self.weights = Weights(weights)
        self.fair = FairShares(self.weights)
        self.store = Store(Slab(slots, PARTS, PART_BYTES), fair=self.fair)
        self.stored = Counter()

    def put(self, owner, count=1):
        for _ in range(count):
            key = key_of(f"{owner} {self.stored[owner]}")
            self.stored[owner] += 1
            model, tenant = owner
            (slot,) = self.store.begin([replace(meta_of(key), model=model, tenant=tenant)])
            self.store.commit([slot])

    def use(self, owner, numbers):
        for number in numbers:
            get(self.store, key_of(f"{owner} {number}"))

    def has(self, owner):
        keys = [key_of(f"{owner} {number}") for number in range(self.stored[owner])]
        return [number for number, place in enumerate(self.store.lookup(keys)) if place]


@pytest.fixture
def house():
    made = []

    def house(*given, **named):
        made.append(House(*given, **named))
        return made[-1]

    yield house
    for one in made:
        one.store.close()
        assert one.store.check_integrity() == []


A, B, C = ("m", "a"), ("m", "b"), ("n", "")


def test_one_owner_alone_has_everything_and_loses_what_it_used_longest_ago(house):
    one = house()
    one.put(A, SLOTS + 5)
    assert one.has(A) == list(range(5, SLOTS + 5))


def test_a_flood_of_one_tenant_leaves_another_one_its_share(house):
    one = house()
    one.put(B, SLOTS // 2)
    for _ in range(20):
        one.put(A, 20)
        one.use(B, range(SLOTS // 2))
    assert len(one.has(B)) == SLOTS // 2
    assert len(one.has(A)) == SLOTS // 2


def test_models_have_equal_shares_however_many_tenants_they_have(house):
    one = house()
    one.put(C, SLOTS // 2)
    for number in range(400):
        one.put(("m", f"tenant {number % 7}"))
        if number % 10 == 0:
            one.use(C, range(SLOTS // 2))
    assert len(one.has(C)) == SLOTS // 2


def test_shares_follow_weights(house):
    one = house({"n": 3.0})
    for number in range(600):
        one.put(A)
        one.put(C)
        if number % 3 == 0:
            one.use(C, one.has(C)[:1])
    assert len(one.has(C)) == pytest.approx(30, abs=2)
    assert len(one.has(A)) == pytest.approx(10, abs=2)


def test_who_does_not_come_back_keeps_nothing(house):
    one = house()
    one.put(B, SLOTS // 2)
    one.put(A, 8 * SLOTS + 4 * SHARES_EVENTS)
    assert one.has(B) == []


def test_weights_that_change_count_at_once(house):
    one = house()
    for _ in range(100):
        one.put(A)
        one.put(B)
    assert len(one.has(B)) == pytest.approx(SLOTS / 2, abs=1)
    one.weights["m", "b"] = 9.0
    one.fair.change()
    for _ in range(100):
        one.put(A)
        one.put(B)
    assert len(one.has(B)) == pytest.approx(36, abs=2)


def add(order, entry, eviction_class, owner):
    order.insert(entry, eviction_class, owner=owner)
    order.release(entry)


def test_documents_keep_their_share_of_an_owner_that_has_too_much():
    order = EvictionOrder(4, fair=FairShares(Weights()))
    for entry in range(4):
        add(order, f"document {entry}", EvictionClass.DOCUMENT, A)
    for owner, name in ((B, "b"), (A, "a")):
        add(order, name, EvictionClass.OTHER, owner)
    assert order.first() == "a", "b is older, and its owner has less than its share"


@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["put", "touch", "evict", "move"]), st.integers(0, 12), st.sampled_from([A, B, C]))
    )
)
def test_the_queues_of_owners_agree_with_those_of_all(steps):
    order, there = EvictionOrder(3, fair=FairShares(Weights())), {}
    for step, entry, owner in steps:
        if step == "put" and entry not in there:
            there[entry] = owner
            add(order, entry, EvictionClass.OTHER, owner)
        elif step == "touch" and entry in there:
            order.touch(entry)
        elif step == "move" and entry in there:
            order.reclassify(entry, EvictionClass.DOCUMENT)
        elif step == "evict" and (first := order.first()) is not None:
            del there[first]
            order.remove(first)
        assert sorted(order) == sorted(there)
        for whose in (A, B, C):
            own = [one for one in order if there[one] == whose]
            assert list(order.owned_by(lambda one, whose=whose: one == whose)) == own, "the oldest comes first"
        assert list(order.faults(lambda _: False)) == []
