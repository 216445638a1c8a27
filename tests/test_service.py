"""The cache server: leases, memory for several chunk layouts, a server that goes and comes, and broken clients."""

import errno
import itertools
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace

import msgspec
import pytest
import service_child
import torch
from amount import some
from forked import Forked
from models import SEPARATOR, random_model, random_tokens
from service_fakes import SIZES, Child, arena_of, attached, eventually, filled, put, serving
from storage_fakes import (
    PART_BYTES,
    PARTS,
    DictTier,
    content,
    expected,
    get,
    key_of,
    meta_of,
    pin_bytes,
    stored,
)
from tier_wrappers import Delayed, Faulty

from lmc.blend.segments import join
from lmc.config.settings import Settings
from lmc.connectors.transformers import CachedModel
from lmc.documents.known import KnownDocuments
from lmc.documents.server import FollowingEngine
from lmc.errors import ChunkLost, ConfigError, NoMemory, StorageError, TierUnusable
from lmc.keys import document_keys
from lmc.open_store import check_server
from lmc.server import arenas, messages
from lmc.server import server as servers
from lmc.server.channel import MAX_FRAME_BYTES, Channel
from lmc.server.client import remote_store
from lmc.server.client.connection import Gone, ServerConnection, retire, status
from lmc.server.client.remote_store import RemoteStore
from lmc.server.handshake import PROTOCOL, Attach, Hello
from lmc.server.lifelines import Lifelines
from lmc.server.messages import (
    MAX_KEPT_DOCUMENTS,
    MAX_KEYS,
    Abort,
    AnyRequest,
    Attached,
    Begin,
    Commit,
    CopiesOf,
    Described,
    Forget,
    HeldSlots,
    Introduce,
    Keep,
    Kept,
    KnownKeys,
    LookUp,
    Offered,
    Ping,
    PinKeys,
    Present,
    Records,
    Release,
    Since,
    Unanswered,
)
from lmc.server.server import CacheServer
from lmc.storage.chunk_layout import ChunkLayout
from lmc.storage.contract import PinState
from lmc.storage.memory.memory_files import locked
from lmc.storage.memory.slab import Slab
from lmc.storage.slots import Backing
from lmc.storage.store import Store
from lmc.storage.worker_parts import Parallelism

K0, K1, K2, K3, K4 = map(key_of, range(5))
CLOSED = "closed|reset|pipe"
OTHER = ChunkLayout(Parallelism((PARTS + 1,)), PART_BYTES, 1)


@pytest.fixture
def server(tmp_path):
    with serving(tmp_path, 4) as server:
        yield server


@pytest.fixture
def attach(server):
    """Attaches stores, and closes them at the end."""
    made = []

    def attach(sizes=SIZES, **options):
        made.append(attached(server, sizes, **options))
        return made[-1]

    yield attach
    for store in made:
        store.close()


@pytest.fixture
def connect(server):
    """Opens connections, and closes them at the end."""
    made = []

    def connect():
        made.append(ServerConnection(server.path, 10.0))
        made[-1].open(Attach(SIZES), msgspec.msgpack.Decoder(Attached))
        return made[-1]

    yield connect
    for connection in made:
        connection.close()
        for file in connection.files:
            os.close(file)


@pytest.fixture
def child(server):
    child = Child(server)
    yield child
    child.kill()


# -- several clients -------------------------------------------------------------------------------------------------


def test_a_chunk_of_one_client_is_read_by_another_from_the_same_memory(server, attach):
    one, other = attach(), attach()
    assert put(one, K0)
    assert other.lookup([K0, K1]) == ["host", None]
    assert get(other, K0) == expected(K0)
    assert not put(other, K0), "it is there already"
    one.slab.part(other.pin([K0])[0].slot, 0)[0] = 99
    assert get(other, K0)[0][0] == 99, "both have mapped the same bytes"


def test_a_client_does_not_store_what_another_one_is_storing(attach):
    one, other = attach(), attach()
    (reservation,) = one.begin([meta_of(K0)])
    assert other.begin([meta_of(K0)]) == [None]
    one.abort(reservation)
    assert one.held() == 0  # The answer comes after the server has done what it was told.
    assert put(other, K0)


def test_a_chunk_that_one_client_has_pinned_is_not_evicted_by_another(attach):
    one, other = attach(), attach()
    put(one, K0)
    (pin,) = one.pin([K0])
    for key in map(key_of, range(10, 30)):
        assert put(other, key)
    assert [pin_bytes(one, pin, part) for part in range(PARTS)] == expected(K0)
    one.release([pin])
    assert one.held() == 0  # The answer comes after the server has done what it was told.
    for key in map(key_of, range(30, 40)):
        put(other, key)
    assert one.lookup([K0]) == [None]


def test_a_reader_of_the_change_log_begins_again_when_another_server_answers(tmp_path):
    with serving(tmp_path, 4) as server:
        store = attached(server)
        put(store, K0)
        number, present = store.changes.present()
        assert [chunk.key for chunk in present["host"]] == [K0]
        put(store, K1)
        assert store.changes.since(0) == ([], False), "numbers are those of this server"
        (change,), complete = store.changes.since(number)
        assert (change.chunk.key, change.place, change.appeared, complete) == (K1, "host", True, True)
    eventually(lambda: store.attachment is None)
    assert store.changes.since(number) == ([], True), "nothing is known to have changed"
    with serving(tmp_path, 4):
        eventually(lambda: store.attachment is not None)
        assert store.changes.since(number) == ([], False)
        again, present = store.changes.present()
        assert present == {}
        assert again != number
        assert store.changes.since(again) == ([], True)
        store.close()


def test_what_is_there_is_told_to_a_client_that_comes_later(attach):
    one = attach()
    for key in (K0, K1):
        put(one, key)
    found = list(attach().records())
    assert {chunk.meta.key for chunk in found} == {K0, K1}
    assert {chunk.place for chunk in found} == {"host"}


# -- leases ----------------------------------------------------------------------------------------------------------


def test_pins_of_a_killed_client_are_given_back(server, attach, child):
    store = attach()
    put(store, K0)
    assert child.ask("pin 0") == "pinned"
    assert store.held() == 1
    child.kill()
    eventually(lambda: store.held() == 0)


@pytest.mark.parametrize("removed", [False, True])
def test_a_slot_of_a_killed_client_is_given_to_nobody_while_one_of_its_processes_lives(
    server, attach, child, caplog, removed
):
    """The worker of a killed engine writes late, into a slot that no other client has meanwhile.

    This holds if a program that cleans up has removed the lock file, too.
    """
    caplog.set_level("INFO")
    store = attach()
    worker = child.spawn(child.ask("begin 0"))
    for lifeline in (server.path.with_suffix(".d") / "clients").iterdir() if removed else ():
        lifeline.unlink()
    try:
        child.kill()
        eventually(lambda: "waiting for a client's processes to end" in caplog.text)
        eventually(lambda: server.clients == 3)  # two of ours, and the lease that waits
        assert store.lookup([K0]) == [None]
        for key in (K1, K2, K3, K4):
            put(store, key)
        assert store.held() == 1
        assert [get(store, key) for key in (K2, K3, K4)] == [expected(key) for key in (K2, K3, K4)]
    finally:
        worker.kill()
    eventually(lambda: server.clients == 2)
    assert put(store, K0)


def test_a_client_that_is_silent_loses_its_pins_and_its_chunks_are_lost_to_it(server, attach, child, monkeypatch):
    monkeypatch.setattr(servers, "CLIENT_TIMEOUT_SECONDS", 1.5)
    late = Child(server)
    store = attach()
    put(store, K0)
    assert late.ask("pin 0") == "pinned"
    assert late.ask("begin 1") == 1
    late.process.send_signal(signal.SIGSTOP)
    eventually(lambda: store.held() == 1)  # The reserved slot waits for the process.
    late.process.send_signal(signal.SIGCONT)
    assert late.ask("pin 0") == "missing", "it is not attached any more"
    late.kill()
    eventually(lambda: store.held() == 0)


def test_a_chunk_is_lost_for_a_reader_whose_lease_has_ended(server, attach):
    store = attach()
    put(store, K0)
    (pin,) = store.pin([K0])
    assert store.state(pin) is PinState.READY
    server.close()
    eventually(lambda: store.attachment is None)
    assert store.state(pin) is PinState.LOST
    with pytest.raises(ChunkLost):
        store.part(pin, 0)
    store.release([pin])


def test_no_lifeline_has_the_name_of_one_that_is_locked(tmp_path):
    """Every server in a container is process 1, also the one after it, while clients of the first one live."""
    older = Lifelines(tmp_path).new()
    file = locked(older)
    after = Lifelines(tmp_path)
    assert after.older == [older]
    assert after.new() != older
    os.close(file)


def test_a_client_that_does_not_see_its_lifeline_is_not_attached(server, tmp_path, monkeypatch):
    """The client's container has another directory at the same path. In a file there, the server would see no lock."""
    monkeypatch.setattr(server.lifelines, "new", lambda: tmp_path / "unseen")
    with pytest.raises(StorageError, match="No such file or directory"):
        attached(server)
    assert not (tmp_path / "unseen").exists()
    eventually(lambda: server.clients == 0)


# -- memory ----------------------------------------------------------------------------------------------------------


def test_layouts_share_the_budget_and_none_keeps_what_another_needs(tmp_path):
    """With memory for 12 small chunks, or 9 large ones."""
    with serving(tmp_path, 12) as server:
        small, large = attached(server), attached(server, OTHER)
        few, many = [key_of(i) for i in range(12)], [key_of(i) for i in range(100, 120)]
        assert filled(small, few[:-1]) == few[:-1]
        eventually(lambda: arena_of(server).store.empty_slots == 1)  # Its memory is taken ahead, by a thread.
        assert put(small, few[-1])
        assert small.lookup(few) == ["host"] * 12, "one layout may take everything"
        eventually(lambda: put(large, many[0]))
        for key in many:
            eventually(lambda key=key: put(large, key) or large.lookup([key]) == ["host"])
        held = server.arenas.budget.taken
        shares = {sizes.parts: taken for sizes, taken in held.items()}
        assert sum(shares.values()) <= server.arenas.budget.size
        assert shares[PARTS + 1] >= 0.35 * server.arenas.budget.size, "the new one gets about its half"
        left = [key for key in few if small.lookup([key]) == ["host"]]
        assert left
        assert left == few[-len(left) :], "what was used longest ago went first"
        for key in left:
            assert get(small, key) == expected(key)
        small.close()
        large.close()


def test_quarantined_slots_are_emptied_before_they_are_used(monkeypatch):
    """Earlier, they were emptied when one of them had a chunk, which was then read as zeros."""

    class All(Backing):
        quarantined, filled = [0, 1], lambda self, slot, meta: None
        claim, unclaim = lambda self, ahead=False: True, lambda self: None
        allocate = lambda self, slots: set()  # noqa: E731

    slab = Slab(2, PARTS, PART_BYTES, shared=True, sparse=True)
    store, begun = Store(slab, backing=All()), []
    monkeypatch.setattr(slab, "give_back", lambda slot: begun.append(store.begin([meta_of(K0)])[0]))
    store.end_quarantine()
    assert begun == [None, None]
    store.abort(*store.begin([meta_of(K0)]))
    store.close()


def test_memory_that_is_given_back_is_given_back_to_the_system(tmp_path):
    with serving(tmp_path, 8) as server:
        store = attached(server)
        for key in map(key_of, range(8)):
            put(store, key)
        file = arena_of(server).store.slab.file
        full = os.fstat(file).st_blocks
        assert arena_of(server).store.shrink(3) == 3
        assert os.fstat(file).st_blocks <= full - 3 * PARTS * PART_BYTES // 512
        store.close()


def test_a_client_cannot_cut_the_memory_of_all(server, attach):
    """The server, and every other client, would be killed at the next touch."""
    store = attach()
    put(store, K0)
    file = os.open(f"/proc/{os.getpid()}/fd/{arena_of(server).store.slab.file}", os.O_RDWR)
    try:
        with pytest.raises(PermissionError):
            os.ftruncate(file, 0)
        with pytest.raises(PermissionError):
            os.ftruncate(file, 1 << 40)
    finally:
        os.close(file)
    assert get(store, K0) == expected(K0)


def test_memory_is_taken_before_a_slot_is_handed_out(tmp_path):
    with serving(tmp_path, 64) as server:
        store, arena = attached(server), arena_of(server)
        put(store, K0)
        eventually(lambda: arena.store.empty_slots == 8)
        assert server.arenas.budget.taken[SIZES] == 9 * SIZES.slot_bytes
        there = os.fstat(arena.store.slab.file).st_blocks * 512
        assert there >= 9 * SIZES.slot_bytes
        keys = [key_of(i) for i in range(1, 64)]
        assert filled(store, keys) == keys, "what was taken ahead is a part of the budget"
        store.close()


def test_a_tmpfs_that_is_full_stores_nothing_and_kills_nobody(tmp_path, monkeypatch, caplog):
    with serving(tmp_path, 8) as server:
        store, arena = attached(server), arena_of(server)
        assert put(store, K0)
        eventually(lambda: arena.store.empty_slots == 1)
        monkeypatch.setattr(arena.store.slab, "take", lambda slot: False)
        assert len(filled(store, [key_of(i) for i in range(1, 8)])) == 7, "in the slots that are there"
        assert server.arenas.budget.taken[SIZES] == 2 * SIZES.slot_bytes
        assert caplog.text.count("the system ran out of memory") == 1
        store.close()


def test_nobody_waits_while_the_system_takes_memory_for_another_client(tmp_path, monkeypatch):
    """The first use of a chunk's pages takes milliseconds. Pins and stores of others waited for it behind the lock."""
    with serving(tmp_path, 32) as server:
        one, other, arena = attached(server), attached(server), arena_of(server)
        assert put(one, K0)
        eventually(lambda: arena.store.empty_slots == 4)  # taken ahead
        slow, going, begun, take = threading.Event(), threading.Event(), [], arena.store.slab.take

        def take_slowly(slot):
            if threading.current_thread().name != "lmc-ahead" and not slow.is_set():
                slow.set()
                assert going.wait(60)
            return take(slot)

        monkeypatch.setattr(arena.store.slab, "take", take_slowly)
        keys = [key_of(i) for i in range(1, 12)]  # more than are ready
        client = threading.Thread(target=lambda: begun.extend(one.begin([meta_of(key) for key in keys])))
        client.start()
        assert slow.wait(60)
        assert get(other, K0) == expected(K0)
        assert put(other, key_of(20))
        assert not begun
        going.set()
        client.join()
        assert [reservation.meta.key for reservation in begun] == keys
        assert len({reservation.slot for reservation in begun}) == len(keys)
        for reservation in begun:
            one.abort(reservation)
        assert one.held() == 0
        one.close()
        other.close()


def test_a_slot_whose_memory_was_not_taken_is_unused_again_and_costs_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("lmc.server.arena.NO_MEMORY_SECONDS", 0.0)
    tier = DictTier()
    tier.write(meta_of(K0), [stored(meta_of(K0))])
    with serving(tmp_path, 8, [tier]) as server:
        store, arena = attached(server), arena_of(server)
        take, arena.store.slab.take = arena.store.slab.take, lambda slot: False
        (pin,) = store.pin([K0])
        eventually(lambda: store.state(pin) is PinState.LOST)
        store.release([pin])
        eventually(lambda: store.held() == 0)
        assert server.arenas.budget.taken[SIZES] == 0
        arena.store.slab.take = take
        assert get(store, K0) == expected(K0), "it is loaded when there is memory again"
        store.close()


def test_an_arena_without_clients_keeps_nothing_that_others_want(tmp_path):
    with serving(tmp_path, 12) as server:
        idle = attached(server)
        filled(idle, [key_of(i) for i in range(12)])
        idle.close()
        eventually(lambda: not server.arenas.budget.users(SIZES))
        store, keys = attached(server, OTHER), [key_of(i) for i in range(100, 109)]

        def all_are_kept():  # Until memory has been reclaimed, a new chunk can evict one of the same arena.
            for key in keys:
                put(store, key)
            return store.lookup(keys) == ["host"] * 9

        eventually(all_are_kept)
        assert server.arenas.budget.taken[SIZES] == 0
        store.close()


def test_layouts_without_clients_make_room_for_others(tmp_path, monkeypatch):
    monkeypatch.setattr(arenas, "MAX_ARENAS", 3)
    sizes = [ChunkLayout(Parallelism((parts,)), PART_BYTES, 1) for parts in range(1, 6)]
    with serving(tmp_path, 100) as server:
        for one in sizes[:3]:
            store = attached(server, one)
            put(store, key_of(one.parts))
            store.close()
            eventually(lambda one=one: not server.arenas.budget.users(one))
        stores = [attached(server, one) for one in sizes[2:]]
        assert {arena.layout for arena in server.arenas.all()} == set(sizes[2:])
        assert stores[0].lookup([key_of(3)]) == ["host"], "it had been used last"
        assert server.arenas.changes.counts()["host"].chunks == 1
        with pytest.raises(StorageError, match=r"maximum number of chunk layouts \(3\)"):
            attached(server, sizes[0])
        for store in stores:
            store.close()


def test_a_server_whose_memory_is_page_locked_has_one_layout(tmp_path):
    with serving(tmp_path, 8, page_locked=True) as server:
        store = attached(server)
        assert store.slab.address.page_locked
        filled(store, [K0, K1])
        (arena,) = server.arenas.all()
        file = arena.store.slab.file
        said = r"maximum number of chunk layouts.*: start another server.*without --page-locked"
        with pytest.raises(StorageError, match=said):
            attached(server, OTHER)
        full = os.fstat(file).st_blocks
        assert arena.store.shrink(1) == 1
        assert os.fstat(file).st_blocks >= full, "a GPU would go on to use the pages that were there before"
        assert get(store, K1) == expected(K1)
        store.close()
        eventually(lambda: not server.arenas.budget.users(SIZES))
        other = attached(server, OTHER)
        assert [arena.layout for arena in server.arenas.all()] == [OTHER]
        assert other.lookup([K1]) == [None]
        other.close()


def test_writing_down_ends_while_another_client_stores(tmp_path):
    """Earlier, `flush` waited until nothing at all was queued."""
    slow = Delayed(DictTier(), per_write=0.05)
    with serving(tmp_path, 40, tiers=[slow]) as server:
        one, other, stores, ended = attached(server), attached(server), threading.Event(), threading.Event()

        def store():
            for number in itertools.count(100):
                if ended.is_set():
                    return
                put(other, key_of(number))
                stores.set()

        put(one, K0)  # before the other client has filled the queue
        thread = threading.Thread(target=store)
        thread.start()
        assert stores.wait(60)
        started = time.monotonic()
        one.flush()
        assert time.monotonic() - started < 20
        assert slow.inner.contains([K0]) == [True]
        ended.set()
        thread.join()
        one.close()
        other.close()


def test_a_layout_of_which_no_chunk_fits_is_refused_and_the_reason_reaches_the_client(server):
    with pytest.raises(StorageError, match=r"does not fit into.*raise max_local_cpu_size of the cache server"):
        attached(server, ChunkLayout(Parallelism((100,)), 1 << 20, 2))


def test_more_memory_than_there_is_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(arenas, "MEMORY_SECONDS", 0.1)
    with pytest.raises(NoMemory, match="max_local_cpu_size = 1e\\+06 GB"):
        CacheServer(Settings(max_local_cpu_size=1e6), tmp_path / "lmc.sock")
    with serving(tmp_path, 4):
        pass  # Nothing of the first one is in the way.


def test_more_memory_than_a_tmpfs_has_is_refused(tmp_path, monkeypatch, caplog):
    """A client that wrote into a slot for which the tmpfs has no page would be killed by the system."""
    caplog.set_level("INFO")
    monkeypatch.setattr(arenas, "MEMORY_SECONDS", 0.1)
    small = SimpleNamespace(f_bavail=1, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda path: small)
    with pytest.raises(NoMemory, match=r"0\.00 GiB of memory are available in .*/memory"):
        CacheServer(Settings(max_local_cpu_size=0.01), tmp_path / "lmc.sock", memory=tmp_path / "memory", tiers=[])
    assert caplog.messages.count("found only 0.00 of 0.01 GiB of memory; waiting up to 0.1 s for more") == 1


def test_chunks_of_all_layouts_go_to_the_same_disk(tmp_path):
    for first in (True, False):
        with serving(tmp_path, 8, None, local_disk=tmp_path / "disk") as server:
            for sizes, key in ((SIZES, K0), (OTHER, K1)):
                store, parts = attached(server, sizes), sizes.parts
                assert store.lookup([key]) == ([None] if first else ["disk"])
                if first:
                    put(store, key)
                    store.flush()
                assert {chunk.meta.key for chunk in store.records()} == {key}, "a client is told of its own layout"
                assert get(store, key) == expected(key, parts)
                store.close()


# -- a server that goes and comes ------------------------------------------------------------------------------------


def test_a_client_goes_on_without_the_server_and_attaches_again_when_it_holds_nothing(tmp_path, caplog):
    caplog.set_level("INFO")
    with serving(tmp_path, 4) as server:
        store = attached(server)
        put(store, K0)
        (pin,), (reservation,) = store.pin([K0]), store.begin([meta_of(K1)])
    eventually(lambda: store.attachment is None)
    assert store.lookup([K0]) == [None]
    assert (store.pin([K0]), store.begin([meta_of(K2)]), store.copies([K0]), store.known_keys()) == (
        [None],
        [None],
        [],
        set(),
    )
    with pytest.raises(StorageError, match="is unreachable"):
        store.forget(K0)
    assert set(store.stats().present.values()) <= {(0, 0)}, "metrics show that nothing is there"
    assert not any(store.stats().usable.values())
    store.view(reservation).fill_(7)  # as a worker does that has not heard of it
    with serving(tmp_path, 4) as server:
        time.sleep(2.5 * remote_store.BEAT_SECONDS)
        assert store.attachment is None, "a worker may still write into the old slab"
        store.commit([reservation])
        store.release([pin])
        eventually(lambda: store.attachment is not None)
        assert put(store, K0)
        assert get(store, K0) == expected(K0)
        store.close()
    assert sum("lost the cache server" in line for line in caplog.messages) == 1
    assert sum(line.endswith("sock is back") for line in caplog.messages) == 1


def test_a_server_that_hangs_is_left_within_the_deadline(server, attach, monkeypatch):
    store = attach()
    put(store, K0)
    store.attachment.quick.set_timeout(1.0)  # not before, or a slow machine may reach it in `put`
    hangs = threading.Event()
    monkeypatch.setattr(arena_of(server).store, "lookup", lambda *_, **__: hangs.wait(60))
    started = time.monotonic()
    assert store.lookup([K0]) == [None]
    assert time.monotonic() - started < 30
    hangs.set()


def test_an_answer_that_cannot_be_read_is_a_miss_and_the_client_attaches_again(server, attach, monkeypatch):
    """The error came out of `lookup`, and out of the thread that attaches again, which ended for ever."""
    store = attach()
    put(store, K0)
    with monkeypatch.context() as broken:
        broken.setattr(LookUp, "handle", lambda self, lease: 7)
        broken.setattr(Ping, "handle", lambda self, lease: "no beat")
        assert store.lookup([K0]) == [None]
        assert store.attachment is None
        time.sleep(2.5 * remote_store.BEAT_SECONDS)
    eventually(lambda: store.lookup([K0]) == ["host"])


def test_what_a_server_cannot_do_is_a_miss_and_is_said_once(server, attach, monkeypatch, caplog):
    store = attach()

    def failing(*_, **__):
        raise StorageError("no room for this")

    monkeypatch.setattr(arena_of(server).store, "lookup", failing)
    assert [store.lookup([K0]) for _ in range(3)] == [[None]] * 3
    assert caplog.text.count("sock failed: no room for this") == 1
    assert store.held() == 0, "the connection goes on"


def test_a_request_that_cannot_be_encoded_is_a_miss_and_the_connection_goes_on(attach, caplog):
    """The connection was closed in the middle of a request."""
    store = attach()
    put(store, K0)
    before = store.connection
    assert store.begin([replace(meta_of(K1), label="r\udce9sum\udce9")]) == [None]
    assert "a request cannot be encoded" in caplog.text
    assert store.lookup([K0]) == ["host"]
    assert store.connection == before


def test_a_store_that_is_closed_while_it_attaches_again_keeps_no_lease(tmp_path, monkeypatch, caplog):
    """The server that had come back kept the lease of a closed store until the process ended."""
    caplog.set_level("INFO")
    with serving(tmp_path, 4) as server:
        store = attached(server)
    eventually(lambda: store.attachment is None)
    attach, reached, gate = remote_store.Attachment.open, threading.Event(), threading.Event()
    held, closes = store.held, threading.Event()

    def attach_slowly(*given, **named):
        at = attach(*given, **named)
        reached.set()
        gate.wait(60)
        return at

    def held_at_the_end():
        closes.set()
        return held()

    monkeypatch.setattr(remote_store.Attachment, "open", attach_slowly)
    monkeypatch.setattr(store, "held", held_at_the_end)
    with serving(tmp_path, 4) as server:
        assert reached.wait(60)
        closing_it = threading.Thread(target=store.close)
        closing_it.start()
        assert closes.wait(60)
        time.sleep(0.2)  # It waits for the thread that attaches.
        gate.set()
        closing_it.join(60)
        assert not closing_it.is_alive()
        assert store.attachment is None
        eventually(lambda: server.clients == 0, seconds=20.0)
    assert not any(line.endswith("sock is back") for line in caplog.messages)


def test_a_client_that_has_too_many_open_files_attaches_when_it_has_fewer(tmp_path, monkeypatch):
    """The thread that attaches again ended, and nobody attached any more."""
    with serving(tmp_path, 4) as server:
        store = attached(server)
    eventually(lambda: store.attachment is None)
    tried = []

    def exhausted(*_):
        tried.append(time.monotonic())
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr("lmc.server.client.connection.socket.socket", exhausted)
        eventually(lambda: len(tried) > 1)
    with serving(tmp_path, 4):
        eventually(lambda: store.attachment is not None)
        store.close()


def test_without_a_server_the_error_says_what_to_do(tmp_path):
    with pytest.raises(TierUnusable, match=r"no cache server answers at .*: start it with `lmc serve --socket"):
        RemoteStore(tmp_path / "none.sock", SIZES, deadline=1.0)


def test_an_engine_waits_for_a_server_that_starts_at_the_same_time(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("lmc.server.client.connection.SERVER_POLL_SECONDS", 0.01)
    path = tmp_path / "lmc.sock"
    waiting = threading.Thread(target=check_server, args=(Settings(server=path),))
    waiting.start()
    eventually(lambda: "waiting up to 60 s" in caplog.text)
    with serving(tmp_path, 4):
        waiting.join(30)
        assert not waiting.is_alive()
    assert caplog.text.count("found no cache server") == 1


def test_an_engine_without_a_server_ends_before_it_loads_a_model(tmp_path, monkeypatch):
    monkeypatch.setattr("lmc.server.client.connection.SERVER_START_SECONDS", 0.0)
    with pytest.raises(TierUnusable, match=r"no cache server answers at .*none\.sock"):
        CachedModel.load("no such model", Settings(server=tmp_path / "none.sock"))
    check_server(Settings())


def test_a_second_server_at_the_same_socket_is_refused_and_a_dead_one_is_replaced(tmp_path, server):
    with pytest.raises(TierUnusable, match=r"already listens at"):
        CacheServer(Settings(max_local_cpu_size=0.01), server.path)
    path = tmp_path / "dead.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    CacheServer(Settings(max_local_cpu_size=0.01), path).close()
    assert not path.exists()


def test_the_socket_of_another_program_stays(tmp_path):
    """The server removed it, and the clients of the other program reached the server."""
    path = tmp_path / "other.sock"
    with socket.socket(socket.AF_UNIX) as other, socket.socket(socket.AF_UNIX) as client:
        other.bind(str(path))
        other.listen()
        with pytest.raises(TierUnusable, match=r"another program listens at .*: end it, or choose"):
            CacheServer(Settings(max_local_cpu_size=0.01), path)
        client.connect(str(path))
    assert [file.name for file in tmp_path.iterdir()] == ["other.sock"]


def test_the_socket_of_a_server_that_starts_while_another_one_ends_stays(tmp_path, monkeypatch):
    """The old server removed the new one's socket at the end."""
    path, ends = tmp_path / "lmc.sock", threading.Event()
    old = CacheServer(Settings(max_local_cpu_size=0.01), path, tiers=[])
    closes = old.arenas.close
    monkeypatch.setattr(old.arenas, "close", lambda: (ends.wait(60), closes()))
    thread = threading.Thread(target=old.close)
    thread.start()
    with pytest.raises(TierUnusable, match=r"already listens at"):
        CacheServer(Settings(max_local_cpu_size=0.01), path, tiers=[])
    ends.set()
    thread.join()
    new = CacheServer(Settings(max_local_cpu_size=0.01), path, tiers=[])
    assert path.exists()
    new.close()


def test_only_its_own_user_ends_a_server(server, monkeypatch):
    """A member of its group may attach, and no more."""
    peer = Channel.peer
    monkeypatch.setattr(Channel, "peer", lambda self: (peer(self)[0], os.getuid() + 1, {7}))
    monkeypatch.setattr(server, "_group", 7)
    assert status(server.path).clients == 0
    with pytest.raises(TierUnusable):
        retire(server.path, 1.0)
    assert not server.ends


def test_a_server_of_another_protocol_is_taken_over_and_ends_quietly(server, attach, monkeypatch, caplog):
    """An upgrade is what a takeover is for."""
    put(attach(), K0)
    monkeypatch.setattr("lmc.server.client.connection.PROTOCOL", PROTOCOL + 1)
    with pytest.raises(TierUnusable, match="did not end"):  # It is in this process.
        retire(server.path, 0.1)
    assert server.ends
    server.close()
    eventually(lambda: server.clients == 0)
    assert not [record for record in caplog.records if record.name == servers.__name__ and "closed" in record.message]


def test_a_server_in_another_container_is_not_taken_over(server, monkeypatch):
    """The system says 0 for a process that has no number here."""
    monkeypatch.setattr(Channel, "peer", lambda self: (0, os.getuid(), set()))
    with pytest.raises(TierUnusable, match="runs in another container"):
        retire(server.path, 1.0)
    assert status(server.path).clients == 0


def test_a_document_that_one_model_has_learned_is_blended_by_another_and_right_without_the_server(tmp_path):
    """Through transformers; the server goes while the second model is there."""
    documents = [random_tokens(40, i) for i in range(3)]
    ids = join(random_tokens(9, 70), documents, random_tokens(7, 80), SEPARATOR)
    with serving(tmp_path, 0, max_local_cpu_size=0.02) as server:
        given = {"server": server.path, "load_deadline": 30.0}
        settings = Settings(chunk_size=16, enable_blending=True, blend_min_tokens=0, **given)
        one, other = (CachedModel(random_model(), settings, SEPARATOR) for _ in range(2))
        for document in documents:
            one.learn(document)
        one.close()
        found = other.prefill(ids, "blend").report
        assert (found.reused, found.loaded.keys()) == (sum(map(len, documents)), {"host"})
    eventually(lambda: other.engine.store.attachment is None)
    assert other.prefill(ids, "blend").report.reused == 0
    assert torch.equal(other.prefill(ids, "blend").logits, other.prefill(ids, "full").logits)
    other.close()


# -- clients that are broken -----------------------------------------------------------------------------------------


def raw(server):
    """A connection that has sent nothing yet."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(str(server.path))
    connection.settimeout(30)
    return connection


def greeted(server, connection=None):
    """The channel of a client that has attached, over a connection that may be given."""
    channel = Channel(connection or raw(server))
    channel.send(msgspec.msgpack.encode(Hello(PROTOCOL, "test")))
    channel.receive()
    channel.send(msgspec.msgpack.encode(Attach(SIZES)))
    files = []
    channel.receive(files)
    for file in files:
        os.close(file)
    return channel


def test_another_protocol_is_refused_and_both_versions_are_named(server, monkeypatch):
    monkeypatch.setattr("lmc.server.client.connection.PROTOCOL", PROTOCOL + 1)
    with pytest.raises(
        ConfigError, match=rf"protocol {PROTOCOL}\).*protocol {PROTOCOL + 1}\): install the same version"
    ):
        ServerConnection(server.path, 10.0)


@pytest.mark.parametrize("question", [lambda lease: Release([lease]), lambda lease: Commit([lease]), Abort])
def test_a_client_cannot_give_back_what_another_one_holds(attach, connect, question):
    store = attach()
    put(store, K0)
    (pin,), (slot,) = store.pin([K0]), store.begin([meta_of(K1)])
    theirs = pin.lease if isinstance(question(0), Release) else slot.lease
    thief = connect()
    thief.send(question(theirs))
    with pytest.raises(Exception, match=CLOSED):
        thief.ask(HeldSlots())
    assert store.held() == 2
    assert pin_bytes(store, pin, 0) == content(K0, 0)
    assert store.lookup([K1]) == [None]
    store.release([pin])
    store.abort(slot)


def test_one_of_several_clients_leaves_some_slots_to_the_others(tmp_path):
    with serving(tmp_path, 16) as server:
        greedy = attached(server)
        begun = greedy.begin([meta_of(key_of(i)) for i in range(14)])
        for i in (14, 15):  # Memory for the last slots may be being taken ahead.
            eventually(lambda key=i: greedy.begin([meta_of(key_of(key))])[0])
        other = attached(server)
        for reservation in begun[:8]:
            greedy.abort(reservation)
        slots = greedy.begin([meta_of(key_of(i)) for i in range(20, 40)])
        assert sum(slot is not None for slot in slots) == 4, "with the eight that it has three quarters"
        assert other.begin([meta_of(key_of(i)) for i in range(50, 53)]) != [None] * 3
        (facts,) = [one for one in server.attached() if one["reserved"] == 12]
        assert facts["refused"] == 16
        greedy.close()
        other.close()


def test_a_client_pins_as_much_of_a_prompt_as_it_may_hold(tmp_path):
    """With a prompt of one chunk more, it pinned nothing."""
    with serving(tmp_path, 8) as server:
        one, keys = attached(server), [key_of(i) for i in range(7)]
        for key in keys:
            put(one, key)
        other = attached(server)
        pins = one.pin(keys)
        assert [pin is not None for pin in pins] == [True] * 6 + [False]
        assert [pin.key for pin in pins[:6]] == keys[:6]
        one.close()
        other.close()


def test_requests_that_are_too_long_for_a_message_are_sent_in_several(tmp_path):
    """An engine with 70,000 known documents lost its cache server when it listed them."""
    with serving(tmp_path, 4) as server:
        store = attached(server)
        put(store, K0)
        (pin,) = store.pin([K0])
        known, many = KnownDocuments(), MAX_KEYS + 10
        documents = [known.note(bytes(32), [i], document_keys(bytes(32), [i], 16)) for i in range(many)]
        keeper = store.keeper(FollowingEngine(known, lambda _: None, lambda: False, lambda: None))
        keeper.expire(documents[-1:], 100)
        for document in documents:
            document.expires = 0.0
        keeper.refresh(documents)
        assert [document.expires > 0 for document in documents] == [False] * (many - 1) + [True]
        assert store.lookup([K1] * MAX_KEYS + [K0]) == [None] * MAX_KEYS + ["host"]
        assert store.copies([K0] * many) == ["host"]
        assert store.copies([K0] * MAX_KEYS + [K1]) == []
        keeper.remove(documents[: MAX_KEPT_DOCUMENTS + 10])
        assert store.state(pin) is PinState.READY, "the lease has not ended"
        store.release([pin])
        store.close()


def test_a_long_listing_comes_in_several_messages(tmp_path, monkeypatch):
    monkeypatch.setattr(messages, "MAX_LISTED_CHUNKS", 2)
    with serving(tmp_path, 6) as server:
        store, keys = attached(server), [key_of(i) for i in range(5)]
        for key in keys:
            put(store, key)
        number, present = store.changes.present()
        assert [chunk.key for chunk in present["host"]] == keys
        assert store.changes.since(number) == ([], True)
        store.close()


def test_a_client_that_loads_much_holds_up_nobody_who_loads_little(tmp_path):
    many, tier = [key_of(i) for i in range(30)], DictTier()
    for key in (*many, K4):
        tier.write(meta_of(key), [memoryview(stored(meta_of(key)))])
    goes_on, reads = threading.Event(), []

    def wait_and_note(verb, key):
        if verb == "read":
            assert goes_on.wait(60)
            time.sleep(0.05)  # so that one thread does not read all while another one has no CPU
            reads.append(key)

    with serving(tmp_path, 100, tiers=[Faulty(tier, wait_and_note)]) as server:
        greedy, modest = attached(server), attached(server)
        held = greedy.pin(many)
        (pin,) = modest.pin([K4])
        goes_on.set()
        assert pin_bytes(modest, pin, PARTS - 1) == content(K4, PARTS - 1)
        for one in held:
            greedy.part(one, PARTS - 1)
        last = max(number for number, key in enumerate(reads) if key == K4)
        assert last < len(reads) / 3
        greedy.release(held)
        modest.release([pin])
        greedy.close()
        modest.close()


BROKEN = {
    "nothing": b"",
    "half a length": b"\x01\x00",
    "half a frame": struct.pack("<I", 100) + b"x",
    "a frame without an end": struct.pack("<I", MAX_FRAME_BYTES + 1) + b"x" * 100,
    "no message": struct.pack("<I", 3) + b"\xc1\xc1\xc1",
    "another message": struct.pack("<I", 7) + msgspec.msgpack.encode(["Nope"])[:7].ljust(7, b"\0"),
    "lists in lists": struct.pack("<I", 5000) + b"\x91" * 5000,
}  # fmt: skip


@pytest.mark.parametrize("sent", BROKEN.values(), ids=BROKEN)
@pytest.mark.parametrize("when", ["at the start", "later"])
def test_a_client_that_sends_nonsense_is_closed_and_nobody_else_notices(server, attach, sent, when):
    store = attach()
    put(store, K0)
    connection = raw(server)
    if when == "later":
        greeted(server, connection)
        connection.settimeout(30)
    connection.sendall(sent)
    connection.shutdown(socket.SHUT_WR)
    with suppress(ConnectionResetError):
        while connection.recv(1 << 16):
            pass  # until the server closes
    connection.close()
    assert get(store, K0) == expected(K0)
    eventually(lambda: server.clients == 2)


def is_told(frame):
    """Whether a frame is a message that has no answer."""
    try:
        return not msgspec.msgpack.decode(frame, type=AnyRequest).answered
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return False


def test_thousands_of_random_frames_do_nobody_else_harm(server, attach):
    store, dice = attach(), random.Random(5)
    put(store, K0)
    document = Described(bytes(32), bytes(40), [K0, K1], "a", "m", "t")
    questions = [
        LookUp([K0, K1], True), Unanswered([K0]), Release([1, 2]),
        PinKeys([K0, K1], ["host", None]), Begin([meta_of(K2)]), Commit([3]),
        Abort(4), Forget(K3, False, True), CopiesOf([K0]), Introduce("m", "t", 256), Keep([document], "pin"),
        Kept(["aa"]), Records(True), KnownKeys(), HeldSlots(), Since(0), Present(first=True),
        Ping([Offered(bytes(32), bytes(40))], [bytes(32)]),
    ]  # fmt: skip
    right = [msgspec.msgpack.encode(question) for question in questions]
    channel, sent = greeted(server), 0
    while sent < some(10_000, share=0.2):
        frame = bytearray(dice.choice(right))
        for _ in range(dice.randrange(4)):
            frame[dice.randrange(len(frame))] = dice.randrange(256)
        frame = bytes(frame[: dice.randrange(1, len(frame) + 1)])
        try:
            channel.send(frame)
            answered = is_told(frame) or channel.receive() is not None
        except (OSError, StorageError):
            answered = False
        sent += 1
        if not answered:
            channel.close()
            channel = greeted(server)
    channel.close()
    assert get(store, K0) == expected(K0)
    eventually(lambda: store.held() == 0)
    assert len(arena_of(server).store.known_keys()) == 1


@pytest.mark.parametrize(
    "wrong",
    [Release([1, 1]), Release([1, 77]), PinKeys([K0, K1], ["host"]), PinKeys([K0], ["host", None]),
     LookUp([K0] * (1 + (1 << 16)), True)],
    ids=["twice", "one that it does not have", "few places", "many places", "many keys"],
)  # fmt: skip
def test_questions_that_make_no_sense_end_the_connection_and_nothing_stays_held(attach, connect, wrong):
    store, connection = attach(), connect()
    put(store, K0)
    store.held()
    (pin,) = connection.ask(PinKeys([K0], None))
    if isinstance(wrong, Release):
        wrong = Release([pin.lease if lease == 1 else lease for lease in wrong.leases])
    with suppress(Gone):
        connection.send(wrong)
    with pytest.raises(Gone):
        connection.ask(HeldSlots())
    eventually(lambda: store.held() == 0)


@pytest.mark.parametrize(
    "sizes",
    [ChunkLayout(Parallelism(stages, ranks), part_bytes, item_bytes) for stages, ranks, part_bytes, item_bytes in
     [((), 1, 1, 2), ((0, 3), 1, 1, 2), ((-2,), -1, 1, 2), ((3,), 1, 0, 2), ((1,) * 5000, 1, 1, 2), ((3,), 1, 1, 3)]],
    ids=["no stage", "an empty stage", "negative", "no bytes", "many stages", "odd items"],
)  # fmt: skip
def test_impossible_sizes_are_refused(server, sizes):
    with pytest.raises(StorageError):
        attached(server, sizes)
    assert server.arenas.all() == []


@pytest.mark.parametrize("name", ["..x1-4096-1", "3.x1-4096-1", "3x0-4096-1", "3x1-0-1", "3x1-4096-3", "3x1-4096"])
def test_the_name_of_a_file_without_possible_sizes_has_none(name):
    """A server did not start over the memory of an earlier one, if such a file was there."""
    assert ChunkLayout.named(SIZES.name) == SIZES
    assert ChunkLayout.named(name) is None


def test_one_refused_chunk_takes_little_from_another_layout(tmp_path):
    """Half of the memory was taken for one chunk."""
    with serving(tmp_path, 100) as server:
        small, large = attached(server), attached(server, OTHER)
        filled(small, [key_of(i) for i in range(100)])
        eventually(lambda: put(large, key_of(500)))
        time.sleep(0.3)
        assert small.held() == 0
        taken = {sizes.parts: bytes_of for sizes, bytes_of in server.arenas.budget.taken.items()}
        assert taken[PARTS + 1] <= 0.15 * server.arenas.budget.size, "with what is taken ahead"
        small.close()
        large.close()


def test_the_slab_of_another_attachment_is_another_one(tmp_path):
    """Workers did not map the memory of a server that had come back, because its descriptor had the same number."""
    with serving(tmp_path, 4) as server:
        store = attached(server)
        before = store.slab.address
    eventually(lambda: store.slab is None)  # Memory of a server that has gone is not kept.
    with serving(tmp_path, 4):
        eventually(lambda: store.slab is not None)
        assert store.slab.address != before
        store.close()


def test_an_answer_that_came_too_late_is_not_taken_for_that_to_another_question(server, connect, monkeypatch):
    connection = connect()
    connection.set_timeout(0.2)
    store, goes_on = arena_of(server).store, threading.Event()
    monkeypatch.setattr(store, "lookup", lambda *_, **__: goes_on.wait(60) and ["late"])
    with pytest.raises(Gone):
        connection.ask(LookUp([K0], True))
    goes_on.set()
    eventually(lambda: server.clients == 0)  # It has answered, and then seen that the client has gone.
    with pytest.raises(Gone):
        connection.ask(HeldSlots())


def test_each_client_counts_its_own_hits_and_misses_and_together_they_are_those_of_the_server(server, attach):
    """Each had those of all clients, so that a sum over engines counted everything as often as there were engines."""
    one, other = attach(), attach()
    put(one, K0)
    for store in (one, other, other):
        assert get(store, K0) == expected(K0)
    assert get(one, K1) is None
    eventually(lambda: one.stats().misses == 1)
    eventually(lambda: other.stats().hits == {"host": 2})
    assert (one.stats().hits, other.stats().misses) == ({"host": 1}, 0)
    total = arena_of(server).store.stats()
    assert (total.hits, total.misses) == ({"host": 3}, 1)
    eventually(lambda: {store.stats().present["host"] for store in (one, other)} == {total.present["host"]})


def test_counts_only_grow_when_another_server_answers(tmp_path):
    with serving(tmp_path, 4) as server:
        store = attached(server)
        put(store, K0)
        get(store, K0)
        get(store, K1)
        eventually(lambda: store.stats().misses == 1)
        before = store.stats()
    eventually(lambda: store.attachment is None)
    with serving(tmp_path, 4):
        eventually(lambda: store.attachment is not None)
        get(store, K1)
        eventually(lambda: store.stats().misses == 2)
        assert store.stats().hits == before.hits == {"host": 1}
        store.close()


def test_a_server_goes_on_when_a_connection_cannot_be_accepted(server, attach, monkeypatch):
    accept, fails, failed = socket.socket.accept, iter([True]), []

    def accept_later(listener):
        if listener.getsockname() == str(server.path) and next(fails, False):
            failed.append(listener)
            raise OSError(24, "Too many open files")
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", accept_later)
    for _ in range(2):
        assert put(attach(), key_of(random.randrange(1 << 30)))
    assert failed


def test_a_connection_whose_process_cannot_be_told_is_closed(server, attach, monkeypatch):
    """Earlier, the connection stayed open until it was collected as garbage."""
    kept = []  # so that nothing is collected

    def gone(channel):
        kept.append(channel)
        raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))

    with monkeypatch.context() as patch:
        patch.setattr(Channel, "peer", gone)
        with raw(server) as connection:
            assert connection.recv(1) == b""
        assert len(kept) == 1
    monkeypatch.setattr(servers, "MAX_SESSIONS", 2)  # those of one client
    attach()


@pytest.mark.parametrize(
    "wrong",
    [{"parts": PARTS + 1}, {"part_bytes": 0}, {"part_bytes": PART_BYTES + 1}, {"key": b"k"}, {"tokens": 0},
     {"first": -1}, {"codec": "lz4"}, {"sizes": (1,)}, {"checksums": (1,)}],
    ids=lambda wrong: next(iter(wrong)),
)  # fmt: skip
def test_impossible_metadata_end_the_connection(attach, connect, wrong):
    connection = connect()
    with pytest.raises(Exception, match=CLOSED):
        connection.ask(Begin([replace(meta_of(K0), **wrong)]))
    assert put(attach(), K0)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else")
def test_other_users_may_not_attach(server, monkeypatch):
    assert server.path.stat().st_mode & 0o777 == 0o600
    server.path.chmod(0o666)
    for folder in server.path.parents:
        if folder.stat().st_mode & 0o5 != 0o5:
            folder.chmod(folder.stat().st_mode | 0o5)
    hello = msgspec.msgpack.encode(Hello(PROTOCOL, "test"))
    program = f"""
import os, socket
os.setgid(65534); os.setuid(65534)
connection = socket.socket(socket.AF_UNIX)
connection.connect({str(server.path)!r})
connection.settimeout(30)
try:
    connection.sendall({struct.pack("<I", len(hello)) + hello!r})
    print(connection.recv(1))
except OSError:
    print(b"")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "b''\n"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else")
def test_members_of_the_group_may_attach(tmp_path):
    """Also those for whom it is not the primary group; and their processes can map the memory."""
    group, made = 54321, CacheServer(Settings(max_local_cpu_size=0.01), tmp_path / "lmc.sock", group=54321, tiers=[])
    threading.Thread(target=made.serve, daemon=True).start()
    for folder in made.path.parents:
        if folder.stat().st_mode & 0o5 != 0o5:
            folder.chmod(folder.stat().st_mode | 0o5)
    try:
        assert Forked(service_child.attach_as_a_member, made.path, group).wait() == 0
    finally:
        made.close()
