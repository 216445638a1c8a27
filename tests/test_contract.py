"""The contract between engines and a store: handles are plain data, and both drivers fulfil it."""

import inspect
import itertools
import pickle
from contextlib import ExitStack, suppress
from dataclasses import fields, is_dataclass
from enum import Enum
from types import UnionType
from typing import get_args, get_origin

import pytest
from service_fakes import attached, serving
from storage_fakes import (
    PART_BYTES,
    PARTS,
    DictTier,
    Gated,
    as_tensor,
    content,
    eventually,
    expected,
    get,
    key_of,
    meta_of,
    pin_bytes,
    put,
    raw_record,
)

from lmc.errors import ChunkLost
from lmc.keys import RecordKind
from lmc.server.client.remote_store import RemoteStore
from lmc.storage import loader
from lmc.storage.contract import ChunkStore, Pin, PinState, Reservation
from lmc.storage.memory.slab import Slab, tag_of
from lmc.storage.store import Store
from lmc.storage.tiers.record import RecordMeta

K0, K1, K2 = map(key_of, range(3))


@pytest.fixture(autouse=True)
def part_by_part(monkeypatch):
    """Parts are small here; they are read one by one all the same, as large ones are."""
    monkeypatch.setattr(loader, "READ_AHEAD_BYTES", 1)


@pytest.fixture
def tier():
    tier = Gated(DictTier())
    yield tier
    tier.open_all()


@pytest.fixture(params=["in this process", "in a cache server"])
def store(tier, request, tmp_path):
    """A store whose tier has K0, and reads it part by part when the test says so."""
    tier.records[K0] = bytearray(raw_record(meta_of(K0)))
    with ExitStack() as opened:
        if request.param == "in this process":
            store = Store(Slab(4, PARTS, PART_BYTES), [tier])
        else:
            server = opened.enter_context(serving(tmp_path, 4, [tier]))
            store = attached(server)
        yield store
        tier.open_all()
        eventually(lambda: store.held() == 0)
        store.close()


@pytest.fixture
def with_device():
    """A store whose chunks are on the device first."""
    device = Slab(2, PARTS, PART_BYTES)
    store = Store(Slab(4, PARTS, PART_BYTES), device=device)
    yield store
    store.close()
    assert store.held() == 0


def pickled(handle):
    """The handle as another process would send it back; the one that the store gave out is gone then."""
    again = pickle.loads(pickle.dumps(handle))
    assert again == handle
    assert again is not handle
    return again


def keep(store, key):
    """Put a chunk into memory, and wait until the writers have let go of its slot."""
    assert put(store, key)
    store.flush()


def pinned(store, key):
    (pin,) = store.pin([key])
    return pickled(pin)


def begun(store, key):
    return pickled(store.begin([meta_of(key)])[0])


def is_plain(value):
    """Numbers, texts, bytes, members of enumerations, and tuples and frozen dataclasses of these."""
    if is_dataclass(value):
        assert type(value).__dataclass_params__.frozen
        return all(is_plain(getattr(value, field.name)) for field in fields(value))
    if isinstance(value, tuple):
        return all(map(is_plain, value))
    return value is None or isinstance(value, Enum) or type(value) in (int, str, bytes)


# -- pins ----------------------------------------------------------------------------------------------------------


def test_handles_are_plain_data(store):
    (coming,), (put_one,) = store.pin([K0]), store.begin([meta_of(K1)])
    assert is_plain(coming)
    assert is_plain(put_one)
    store.abort(put_one)
    store.release([coming], wait=False)


def test_a_reservation_keeps_everything_that_is_known_of_its_record():
    meta = RecordMeta(
        key=K0, namespace=b"n" * 32, tokens=3, first=4, parts=2, part_bytes=5, codec="x", kind=RecordKind.PAGES,
        label="l", model="m", tenant="t", sizes=(1, 2), checksums=(3, 4),
    )  # fmt: skip
    again = pickled(Reservation(meta, 1, "host", 2))
    for field in fields(meta):
        assert getattr(again.meta, field.name) == getattr(meta, field.name) != field.default, field.name
    assert again.meta.kind is RecordKind.PAGES


def test_a_pin_says_what_it_holds_and_where_it_was_found(store):
    keep(store, K1)
    ready, coming = store.pin([K1, K0])
    assert ready == Pin(K1, ready.slot, tag_of(K1), "host", "host", PinState.READY, ready.lease)
    assert coming == Pin(K0, coming.slot, tag_of(K0), "host", "dict", PinState.COMING, coming.lease)
    assert ready.slot != coming.slot
    store.release([ready, coming], wait=False)


def test_an_unpickled_pin_of_a_chunk_in_memory_is_read_and_released(store):
    keep(store, K1)
    pin = pinned(store, K1)
    assert (store.state(pin), store.arrived(pin)) == (PinState.READY, PARTS)
    assert [pin_bytes(store, pin, part) for part in range(PARTS)] == expected(K1)
    assert store.held() == 1
    store.release([pin])
    assert store.held() == 0


def test_an_unpickled_pin_follows_the_load_of_its_chunk(store, tier):
    """What it said when it was made does not count any more."""
    pin = pinned(store, K0)
    assert tier.reading.wait(60)
    assert (store.state(pin), store.arrived(pin)) == (PinState.COMING, 0)
    tier.read_gates[0].set()
    assert pin_bytes(store, pin, 0) == content(K0, 0)
    assert (store.state(pin), store.arrived(pin)) == (PinState.COMING, 1)
    tier.open_all()
    assert pin_bytes(store, pin, PARTS - 1) == content(K0, PARTS - 1)
    store.release([pinned(store, K0), pin])
    assert store.lookup([K0]) == ["host"]


def test_an_unpickled_pin_of_a_chunk_that_is_lost_says_so(store, tier):
    tier.records[K0][-1] ^= 1
    pin = pinned(store, K0)
    tier.read_gates[0].set()
    assert pin_bytes(store, pin, 0) == content(K0, 0)
    tier.open_all()
    with pytest.raises(ChunkLost) as caught:
        store.part(pin, PARTS - 1)
    assert caught.value.keys == [K0]
    assert store.state(pin) is PinState.LOST
    store.release([pin])


def test_an_unpickled_pin_on_the_device_is_read_there(with_device):
    keep(with_device, K1)
    pin = pinned(with_device, K1)
    assert (pin.level, pin.place) == ("device", "device")
    assert [pin_bytes(with_device, pin, part) for part in range(PARTS)] == expected(K1)
    with_device.release([pin])
    with_device.flush()


def test_each_of_several_pins_has_its_own_state(store, tier):
    keep(store, K1)
    coming, ready, joined = (pinned(store, key) for key in (K0, K1, K0))
    assert tier.reading.wait(60)
    assert [store.state(pin) for pin in (ready, coming, joined)] == [PinState.READY, PinState.COMING, PinState.COMING]
    assert [store.arrived(pin) for pin in (coming, ready, joined)] == [0, PARTS, 0]
    tier.open_all()
    store.release([coming])
    assert pin_bytes(store, joined, 1) == content(K0, 1), "somebody still waits for it"
    store.release([ready, joined])


def test_an_old_pin_does_not_release_a_new_one(store):
    """Whatever the store says to the second release, the chunk stays held for the new pin."""
    keep(store, K1)
    old = pinned(store, K1)
    store.release([old])
    new = pinned(store, K1)
    with suppress(KeyError):
        store.release([old])
    assert store.held() == 1
    store.release([new])


# -- reservations --------------------------------------------------------------------------------------------------


def test_an_unpickled_reservation_is_filled_and_committed(store):
    reservation = begun(store, K1)
    for part in range(PARTS):
        store.view(reservation)[part, :PART_BYTES] = as_tensor(content(K1, part))
    assert store.lookup([K1]) == [None]
    store.commit([reservation])
    assert get(store, K1) == expected(K1)
    store.flush()


def test_an_unpickled_reservation_is_aborted(store):
    reservation = begun(store, K1)
    assert store.begin([meta_of(K1)]) == [None], "somebody writes it"
    assert store.held() == 1
    store.abort(reservation)
    assert (store.held(), store.lookup([K1])) == (0, [None])
    keep(store, K1)


def test_an_unpickled_reservation_of_the_device_is_committed_there(with_device):
    reservation = begun(with_device, K1)
    assert reservation.level == "device"
    with_device.view(reservation).fill_(7)
    with_device.commit([reservation])
    assert with_device.lookup([K1]) == ["device"]
    with_device.flush()


def test_no_lease_is_given_twice(store, tier):
    tier.open_all()
    leases = []
    for key in (K1, K2, K1):
        (reservation,) = store.begin([meta_of(key)])
        if reservation is not None:
            leases.append(reservation.lease)
            store.abort(reservation)
            keep(store, key)
        pins = store.pin([key, key, K0])
        store.release(pins[1:])
        again = store.pin([K0, key])
        leases += [pin.lease for pin in (*pins, *again)]
        store.release([pins[0], *again])
    store.flush()
    assert len(leases) == len(set(leases)) == 17


# -- the driver in the same process --------------------------------------------------------------------------------

METHODS = {name: method for name, method in vars(ChunkStore).items() if inspect.isfunction(method) and name[0] != "_"}


def test_the_contract_is_all_that_engines_need():
    """A method that is added to it is a method that a service has to serve."""
    assert set(METHODS) == {
        "lookup", "unanswered", "pin", "state", "arrived", "part", "release", "begin", "view", "commit", "abort",
        "forget", "stats", "copies", "pinned", "records", "known_keys", "held", "trim", "flush", "close",
    }  # fmt: skip


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("driver", [Store, RemoteStore])
def test_the_store_takes_what_the_contract_says(name, driver):
    """Any call that is right by the contract is right for the store, and has the same meaning."""
    wanted, found = (inspect.signature(getattr(one, name)).parameters for one in (ChunkStore, driver))
    for one, other in itertools.zip_longest(wanted.values(), found.values()):
        assert other is not None, f"the store has no {one}"
        if one is None:
            assert other.default is not other.empty, f"the contract has no {other}"
        else:
            assert (other.name, other.kind, other.default) == (one.name, one.kind, one.default)


def test_the_store_has_what_the_contract_says(store):
    for name, kind in ChunkStore.__annotations__.items():
        assert isinstance(
            getattr(store, name), get_args(kind)[0] if isinstance(kind, UnionType) else get_origin(kind) or kind
        )
