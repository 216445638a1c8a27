"""What fails inside of a cache server leaves nothing held, ends no thread that others need, and is said."""

import asyncio
import errno
import fcntl
import logging
import os
import socket
import threading
from array import array
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing

import pytest
from service_fakes import SIZES, Child, attached, eventually, filled, put, serving
from storage_fakes import NAMESPACE, PART_BYTES, PARTS, DictTier, ended, key_of, meta_of, stored, threads_named
from test_cli import lmc

from lmc.config.settings import Settings
from lmc.documents.keeper import PinnedShare
from lmc.errors import StorageError, TierUnusable
from lmc.server import arenas, lifelines, own_files
from lmc.server.arena import ArenaBacking
from lmc.server.http_api import MAX_SUBSCRIBERS, application
from lmc.server.journal import Journal
from lmc.server.messages import Described, Keep
from lmc.server.overview import Overview
from lmc.server.server import CacheServer
from lmc.storage.chunk_layout import ChunkLayout
from lmc.storage.contract import PinState
from lmc.storage.memory.slab import Slab
from lmc.storage.slots import Backing
from lmc.storage.store import Store
from lmc.storage.tiers.disk import UNBOUNDED, DiskTier
from lmc.storage.worker_parts import Parallelism

OTHER, THIRD = (ChunkLayout(Parallelism((PARTS + more,)), PART_BYTES, 1) for more in (1, 2))


def refused(number):
    raise OSError(number, os.strerror(number))


class Scarce(Backing):
    """Memory of which the system lacks some when it is asked first; the second time fails, and then there is enough."""

    quarantined, asked = (), 0

    def __init__(self):
        pass

    def claim(self, ahead=False):
        return True

    def unclaim(self):
        pass

    def allocate(self, slots):
        self.asked += 1
        if self.asked == 2:
            raise RuntimeError("can't start new thread")
        return set(slots[:1]) if self.asked == 1 else set()

    def filled(self, slot, meta):
        pass


def test_chunks_that_have_memory_are_given_up_when_memory_for_the_others_fails():
    store = Store(Slab(8, PARTS, PART_BYTES, shared=True, sparse=True), [], backing=Scarce())
    metas = [meta_of(key_of(number)) for number in range(3)]
    with pytest.raises(RuntimeError, match="new thread"):
        store.begin(metas)
    assert store.held() == 0
    assert None not in store.begin(metas)  # Otherwise these chunks would still be said to be written.
    store.close()


def test_loads_that_fail_do_not_hold_up_those_behind_them(tmp_path, monkeypatch):
    tier, keys = DictTier(), [key_of(number) for number in range(600)]
    for key in keys:
        tier.write(meta_of(key), [stored(meta_of(key))])
    with serving(tmp_path, 4096, [tier]) as server:
        store = attached(server)
        real, failures = ArenaBacking.allocate, [1, 1]

        def allocate(backing, slots):
            if failures and threading.current_thread().name.startswith("lmc-load"):
                raise RuntimeError(f"can't start new thread {failures.pop()}")
            return real(backing, slots)

        monkeypatch.setattr(ArenaBacking, "allocate", allocate)
        pins = store.pin(keys)
        eventually(lambda: all(store.state(pin) is not PinState.COMING for pin in pins))
        states = Counter(store.state(pin) for pin in pins)
        assert states[PinState.READY] > 0
        assert states[PinState.LOST] > 0
        store.release(pins)
        store.close()


def test_a_client_that_cannot_be_taken_hears_why_and_counts_no_more(tmp_path, monkeypatch):
    with serving(tmp_path, 8) as server:
        with monkeypatch.context() as full:
            full.setattr(server.lifelines, "new", lambda: refused(errno.ENOSPC))
            for _ in range(3):
                with pytest.raises((StorageError, TierUnusable), match="No space left"):
                    attached(server)
        eventually(lambda: server.clients == 0)
        assert server.arenas.budget.users(SIZES) == 0


def test_a_lease_ends_although_there_are_too_many_open_files_for_a_moment(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(lifelines, "LOCK_RETRY_SECONDS", 0.01)
    with serving(tmp_path, 8) as server:
        child = Child(server)
        assert child.ask("begin 1") == 0
        real, failures = type(tmp_path).open, [1, 1]

        def opened(path, *args, **named):
            if path.parent.name == "clients" and failures:
                refused(failures.pop() and errno.EMFILE)
            return real(path, *args, **named)

        monkeypatch.setattr(type(tmp_path), "open", opened)
        child.kill()
        eventually(lambda: server.clients == 0)
        assert failures == []
        assert [record.message for record in caplog.records if "Too many open files" in record.message] == [
            "cannot check whether a client has ended ([Errno 24] Too many open files): its slots stay unused"
        ]
        two = attached(server)
        assert two.held() == 0
        assert put(two, key_of(1))
        two.close()


def test_memory_moves_on_when_an_arena_is_being_closed_or_fails(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(arenas, "MAX_ARENAS", 2)
    with serving(tmp_path, 12) as server:
        first = attached(server)
        assert len(filled(first, [key_of(number) for number in range(12)])) == 12
        (arena,) = server.arenas.all()
        first.close()
        eventually(lambda: not server.arenas.budget.users(SIZES))
        second = attached(server, OTHER)
        closing, go, real = threading.Event(), threading.Event(), arena.close

        def slowly():
            closing.set()
            assert go.wait(60)
            real()

        arena.close = slowly
        third = []
        thread = threading.Thread(target=lambda: third.append(attached(server, THIRD, deadline=60.0)))
        thread.start()
        assert closing.wait(60)
        put(second, key_of(1))  # It wants memory, which only the arena has that is being closed.
        go.set()
        thread.join(60)
        (other,) = (one for one in server.arenas.all() if one.layout == OTHER)
        filled(second, [key_of(number) for number in range(12)])
        with monkeypatch.context() as patch:
            patch.setattr(other.store, "shrink", lambda slots: refused(errno.EIO))
            assert not all(put(*third, key_of(number)) for number in range(12)), "the other arena has the memory"
            eventually(lambda: "reclaiming memory from a chunk layout failed" in caplog.text)
        assert threads_named("lmc-memory")
        assert min(server.arenas.budget.taken.values()) >= 0
        eventually(lambda: all(put(*third, key_of(number)) for number in range(20, 23)))
        for one in (second, *third):
            one.close()


def test_a_server_that_is_closed_while_memory_moves_ends(tmp_path):
    """The thread that moves memory cleared the event with which the close had just woken it, and waited for ever."""
    with serving(tmp_path, 12) as server:
        budget, (thread,) = server.arenas.budget, threads_named("lmc-memory")
        closing, woken = threading.Thread(target=server.close), threading.Event()

        class ClosedMeanwhile(threading.Event):
            def set(self):
                super().set()
                woken.set()

            def clear(self):
                closing.start()
                assert woken.wait(60)
                super().clear()

        waited_for, budget.refused = budget.refused, ClosedMeanwhile()
        threading.Event.set(budget.refused)
        waited_for.set()
        ended(thread)
        ended(closing)


@pytest.mark.parametrize("fails", [False, True])
def test_others_attach_while_an_arena_is_being_closed(tmp_path, monkeypatch, fails):
    """The server closed an arena that nobody used under the lock that each attaching client takes.

    Closing writes to tiers, so all engines that came meanwhile were refused when their deadline had passed.
    """
    monkeypatch.setattr(arenas, "MAX_ARENAS", 2)
    with serving(tmp_path, 12) as server, ThreadPoolExecutor(2) as pool:
        attached(server).close()
        eventually(lambda: not server.arenas.budget.users(SIZES))
        (leaving,) = server.arenas.all()
        second = attached(server, OTHER)
        closing, go, close = threading.Event(), threading.Event(), leaving.close

        def slowly():
            closing.set()
            assert go.wait(60)
            close()
            if fails:
                raise StorageError("it cannot be closed")

        leaving.close = slowly
        third = pool.submit(attached, server, THIRD, deadline=60.0)
        assert closing.wait(60)
        again = pool.submit(attached, server, OTHER, deadline=60.0)
        again.result(20).close()
        with pytest.raises(StorageError, match=r"maximum number of chunk layouts \(2\)"):
            attached(server, ChunkLayout(Parallelism((1,)), PART_BYTES, 1), deadline=60.0)
        assert not third.done()
        go.set()
        if fails:
            with pytest.raises(StorageError, match="cannot be closed"):
                third.result(60)
        else:
            third.result(60).close()
            assert {arena.layout for arena in server.arenas.all()} == {OTHER, THIRD}
            eventually(lambda: not server.arenas.budget.users(THIRD))
        attached(server, SIZES, deadline=60.0).close()  # It is made anew.
        assert leaving not in server.arenas.all()
        second.close()


def test_a_layout_that_was_forgotten_gives_nothing_back(tmp_path):
    with serving(tmp_path, 8) as server:
        server.arenas.budget.count(OTHER, -3)
        assert server.arenas.budget.taken[OTHER] == 0


def test_a_server_that_ends_opens_no_arena(tmp_path):
    with serving(tmp_path, 8) as server:
        server.close()
        with pytest.raises(StorageError, match="the cache server is shutting down"):
            server.arenas.open(SIZES)


def test_pins_of_an_arena_that_was_closed_take_no_room(tmp_path, monkeypatch):
    share = PinnedShare()
    monkeypatch.setattr(arenas, "MAX_ARENAS", 1)
    monkeypatch.setattr(arenas, "PinnedShare", lambda: share)
    with serving(tmp_path, 16, document_share=0.5) as server:
        one = attached(server)
        keys = filled(one, [key_of(number) for number in range(3)])
        document = Described(NAMESPACE, array("I", range(3)).tobytes(), keys, "doc", "m", "")
        one.ask_slowly(Keep([document], "pin"), None)
        assert share.take(0.0) > 0
        one.close()
        eventually(lambda: not server.arenas.budget.users(SIZES))
        attached(server, OTHER).close()
        assert share.take(0.0) == pytest.approx(0)


def test_the_journal_does_not_take_memory_that_was_given_back(tmp_path):
    slab = Slab(4, PARTS, 1 << 16, shared=True, sparse=True)
    journal = Journal(tmp_path / "journal", slab)
    journal.restore()
    slab.label(0, key_of(1), PARTS)
    before = os.fstat(slab.file).st_blocks
    journal.filled(0, meta_of(key_of(1), PARTS, 1 << 16))
    journal.close()
    assert (tmp_path / "journal").read_bytes(), "its checksums were computed"
    assert os.fstat(slab.file).st_blocks == before


def test_no_more_subscribers_are_taken_than_there_may_be(tmp_path):
    scope = {
        "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "method": "GET",
        "path": "/v1/events", "raw_path": b"/v1/events", "query_string": b"", "root_path": "", "scheme": "http",
        "headers": [(b"host", b"localhost")], "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80),
    }  # fmt: skip

    async def ask(app, statuses):
        received = asyncio.Event()

        async def receive():
            if received.is_set():
                await asyncio.sleep(600)
            received.set()
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message):
            if message["type"] == "http.response.start":
                statuses.append(message["status"])

        await app(scope, receive, send)

    async def many(of):
        app, statuses = application(of, "", {}), []
        asking = [asyncio.create_task(ask(app, statuses)) for _ in range(3 * MAX_SUBSCRIBERS)]
        while len(statuses) < len(asking):
            await asyncio.sleep(0.01)
        assert Counter(statuses) == {200: MAX_SUBSCRIBERS, 503: 2 * MAX_SUBSCRIBERS}
        assert of.subscribers == MAX_SUBSCRIBERS
        for one in asking:
            one.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        assert of.subscribers == 0

    with serving(tmp_path, 8) as server:
        logging.getLogger("asyncio").setLevel(logging.ERROR)
        asyncio.run(many(Overview(server)))


# -- a start that is refused -------------------------------------------------------------------------------------------


def below(folder):
    return sorted(folder.rglob("*"))


@pytest.mark.parametrize("before", ["nothing", "a server", "a server and its memory"])
@pytest.mark.parametrize("why", ["address", "memory", "disk"])
def test_a_start_that_is_refused_leaves_nothing_of_its_own_and_all_that_was_there(tmp_path, monkeypatch, before, why):
    """Earlier, a refused start left a lock beside the socket, and a directory for clients."""
    monkeypatch.setattr(arenas, "MEMORY_SECONDS", 0.0)
    monkeypatch.setenv("LMC_MAX_LOCAL_CPU_SIZE", "0.001" if why != "memory" else "1e9")
    path, memory = tmp_path / "lmc.sock", tmp_path / "new" / "memory"
    if before != "nothing":
        kept = memory if "memory" in before else None
        with serving(tmp_path, 0, memory=kept, max_local_cpu_size=0.001) as server:
            attached(server).close()
            eventually(lambda: not any(path.parent.name == "clients" for path in below(tmp_path)))
    with ExitStack() as opened:
        taken = opened.enter_context(socket.create_server(("127.0.0.1", 0)))
        if why == "disk":
            opened.callback(DiskTier(tmp_path / "disk", UNBOUNDED).close)
            monkeypatch.setenv("LMC_LOCAL_DISK", str(tmp_path / "disk"))
        there = below(tmp_path)
        http = [] if why != "address" else ["--http", f"127.0.0.1:{taken.getsockname()[1]}"]
        assert lmc("serve", "--socket", path, "--memory", memory, *http)[0] == 2
        assert below(tmp_path) == there


def test_a_second_server_takes_nothing_from_the_first_one_when_it_is_refused(tmp_path):
    memory = tmp_path / "memory"
    with serving(tmp_path, 8, memory=memory) as server:
        client = attached(server)
        there = below(tmp_path)
        for path in (server.path, tmp_path / "other.sock"):
            with pytest.raises(TierUnusable, match=r"listens at|uses the memory"):
                CacheServer(Settings(max_local_cpu_size=0.001), path, memory=memory)
        assert below(tmp_path) == there
        with closing(client), closing(attached(server)) as other:
            assert put(client, key_of(1))
            assert other.lookup([key_of(1)]) == ["host"]


def test_a_socket_that_cannot_be_given_to_its_group_does_not_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "chown", lambda *_: refused(errno.EPERM))
    with pytest.raises(TierUnusable, match="not permitted"):
        CacheServer(Settings(max_local_cpu_size=0.001), tmp_path / "lmc.sock", group=os.getgid())
    assert below(tmp_path) == []


def test_a_lock_that_a_refused_start_has_removed_is_not_taken_for_one(tmp_path, monkeypatch):
    """A server had opened the file when it was removed, and would have had a lock that nobody else sees."""
    monkeypatch.setattr(own_files, "SOCKET_LOCK_SECONDS", 0.05)
    path, real, others = tmp_path / "lmc.sock", fcntl.flock, []
    first = own_files.OwnFiles(path, None, None)

    def late(file, how):
        if not others:
            others.append(first)
            first.close()
            others.append(own_files.OwnFiles(path, None, None))
        real(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with pytest.raises(TierUnusable, match=r"already listens at"):
        own_files.OwnFiles(path, None, None)
    assert path.exists()
    others[1].close()
    assert below(tmp_path) == []
