"""Document events of a cache server over ZeroMQ: whoever follows them, as the router does, knows what is there."""

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from unittest.mock import Mock

import msgspec
import pytest
import test_cli
import zmq
from ports import free_port
from service_process import ServerProcess
from storage_fakes import eventually, key_of, meta_of
from test_keeper import RECORD, A, B, C, engine_of, learn

from lmc.background import Background
from lmc.documents import publisher as document_publisher
from lmc.documents.events import DocumentEvents
from lmc.documents.known import KnownDocuments
from lmc.documents.publisher import DOCUMENT_TOPIC, DocumentPublisher
from lmc.errors import ConfigError
from lmc.keys import RecordKind, tenant_of, tokens_digest
from lmc.router.event_stream import EventStream, Lost
from lmc.router.follow import decoded
from lmc.shapes import GIB
from lmc.storage.change_log import ChangeLog

SECONDS = 30.0


class Follower:
    """Knows where documents are, by their tenants and the digests of their tokens."""

    def __init__(self, address: str, replay: str) -> None:
        self.there: dict[tuple[str, str], set[str]] = {}
        self._stream = EventStream(address, replay, DOCUMENT_TOPIC, from_start=True)

    async def follow(self) -> None:
        async for event in self._stream.batches():
            for moved in () if isinstance(event, Lost) else decoded(event)[1]:
                assert moved["model"] == ""  # Engines of tests do not name theirs.
                media = self.there.setdefault((moved["tenant"], moved["digest"]), set())
                (media.add if moved["type"] == "DocumentStored" else media.discard)(moved["medium"])

    async def until(self, condition: Callable[[], object]) -> None:
        until = time.monotonic() + SECONDS
        while not condition():
            assert time.monotonic() < until, self.there
            await asyncio.sleep(0.02)


def test_a_subscriber_that_comes_late_knows_what_engines_store_and_what_leaves(tmp_path):
    address, replay = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
    settings = {"max_local_cpu_size": 4 * RECORD / GIB, "local_disk": tmp_path / "disk"}
    server = ServerProcess(tmp_path, "--document-events", f"{address},{replay}", forked=True, **settings)

    async def run() -> None:
        follower = Follower(address, replay)
        following = asyncio.create_task(follower.follow())
        a, b, c = (("", tokens_digest(A)), (tenant_of("t"), tokens_digest(B)), ("", tokens_digest(C)))
        await follower.until(lambda: follower.there.keys() >= {a, b})
        learn(engine, C)
        await follower.until(lambda: c in follower.there)
        await follower.until(lambda: all("STORAGE" in media for media in follower.there.values()))
        (known,) = [one for one in engine.known.list() if list(one.tokens) == list(C)]
        engine.keeper.remove([known])
        await follower.until(lambda: follower.there[c] == set())
        assert all(follower.there[one] for one in (a, b)), "the others are still there"
        following.cancel()

    try:
        with closing(engine_of(server=server.path)) as engine:
            learn(engine, A)
            learn(engine, B, "t")
            asyncio.run(run())
    finally:
        assert server.stop() == 0


def test_batches_are_sent_again_to_any_client(tmp_path):
    address, replay = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/again"

    class Moves:
        def __init__(self) -> None:
            self.left = [[event] for event in "abc"]

        def take(self) -> list[str]:
            return self.left.pop(0) if self.left else []

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lmc.documents.publisher._message", lambda moved: {"type": moved})
        publisher = DocumentPublisher(f"{address}, {replay}", Moves())
        context = zmq.Context.instance()
        with closing(publisher), context.socket(zmq.REQ) as asking:
            asking.linger = 0
            asking.connect(replay)
            until = time.monotonic() + SECONDS
            found = []
            while len(found) < 2:
                assert time.monotonic() < until
                asking.send((1).to_bytes(8, "big"))
                assert asking.poll(1000 * SECONDS)
                first = asking.recv_multipart()
                if first[1] != (-1).to_bytes(8, "big", signed=True):
                    found.append(first)
                    break
            topic, number, payload = found[0]
            assert (topic, int.from_bytes(number, "big")) == (DOCUMENT_TOPIC.encode(), 1)
            sent, events, engine = msgspec.msgpack.decode(payload)
            assert (events, engine) == ([{"type": "b"}], 0)
            assert abs(time.time() - sent) < SECONDS


@pytest.mark.parametrize(("number", "size", "first"), [(3, 1 << 30, 7), (1 << 30, 2500, 8)])
def test_the_batches_that_can_be_requested_again_are_bounded_by_number_and_size(
    tmp_path, monkeypatch, number, size, first
):
    """Ten thousand batches of a thousand documents took two gibibytes."""
    address, replay = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/again"
    monkeypatch.setattr(document_publisher, "MAX_REPLAY_BATCHES", number)
    monkeypatch.setattr(document_publisher, "MAX_REPLAY_BYTES", size)
    monkeypatch.setattr(document_publisher, "MAX_BATCH_EVENTS", 1)
    monkeypatch.setattr(document_publisher, "_message", lambda moved: {"type": moved})
    moves = Mock(take=Mock(side_effect=[["x" * 1000] * 10, *([[]] * 10_000)]))
    with closing(DocumentPublisher(f"{address},{replay}", moves)), zmq.Context.instance().socket(zmq.DEALER) as asking:
        asking.linger = 0
        asking.connect(replay)
        eventually(lambda: moves.take.call_count > 1)
        asking.send_multipart([b"", bytes(8)])
        numbers = []
        while numbers[-1:] != [-1]:
            assert asking.poll(1000 * SECONDS)
            numbers.append(int.from_bytes(asking.recv_multipart()[2], "big", signed=True))
        assert numbers == [*range(first, 10), -1]


@pytest.mark.parametrize("fails", ["while changes are read", "while events are encoded"])
@pytest.mark.parametrize("again", [True, False])
def test_a_reader_notices_events_that_an_error_has_lost(tmp_path, monkeypatch, again, fails):
    """An error after changes had been taken lost their events, and the next batch had the next number.

    Now a number is missing, also if nothing changes afterwards, and everything that is there is announced again.
    """
    monkeypatch.setattr("lmc.documents.publisher.ERROR_PAUSE_SECONDS", 0.05)
    addresses = [f"ipc://{tmp_path}/events", *([f"ipc://{tmp_path}/again"] if again else [])]
    log, known, broken, turn = ChangeLog(), KnownDocuments(), threading.Event(), threading.Lock()

    def salt_of(_):
        if fails == "while changes are read" and broken.is_set():
            broken.clear()
            raise ValueError("it failed once")
        return ""

    class Events(DocumentEvents):
        def take(self):
            with turn:
                moved = super().take()
            if moved and fails == "while events are encoded" and broken.is_set():
                broken.clear()
                return [None, *moved]  # None cannot be encoded.
            return moved

    def appeared(name):
        known.note(bytes(32), [1, ord(name)], [key_of(name)])
        log.appeared("host", replace(meta_of(key_of(name)), kind=RecordKind.DOCUMENT))

    async def read(stream, seen):
        async for event in stream.batches():
            seen.append("lost" if isinstance(event, Lost) else {one["document"] for one in decoded(event)[1]})

    async def run():
        seen = []
        reading = asyncio.create_task(read(EventStream(*addresses, topic=DOCUMENT_TOPIC, quiet_seconds=0.2), seen))
        ids = [key_of(name).hex() for name in "abc"]
        while not any(isinstance(one, set) and one for one in seen):  # A subscription takes a moment.
            assert not reading.done()
            log.left("host", key_of("a"))
            appeared("a")
            await asyncio.sleep(0.05)
        before = len(seen)
        with turn:  # The error comes with this change, and not with what was left of the others.
            broken.set()
            appeared("b")
        until = time.monotonic() + SECONDS
        while set(ids[:2]) not in seen:
            assert time.monotonic() < until, seen
            await asyncio.sleep(0.02)
        assert "lost" in seen[before : seen.index(set(ids[:2]))]
        assert not broken.is_set()
        appeared("c")
        while {ids[2]} not in seen:
            assert time.monotonic() < until, seen
            await asyncio.sleep(0.02)
        assert seen[before:].count("lost") == 1
        reading.cancel()

    with closing(DocumentPublisher(",".join(addresses), Events(log, known.get, salt_of, Background()))):
        asyncio.run(run())


def test_something_that_is_no_question_is_not_answered_and_the_next_one_is(tmp_path):
    publisher = DocumentPublisher(f"ipc://{tmp_path}/events,ipc://{tmp_path}/again", type("No", (), {"take": list})())
    with closing(publisher), zmq.Context.instance().socket(zmq.DEALER) as asking:
        asking.linger = 0
        asking.connect(f"ipc://{tmp_path}/again")
        asking.send_multipart([b"what"])
        asking.send_multipart([b"", b"short"])
        asking.send_multipart([b"", bytes(8)])
        assert asking.poll(1000 * SECONDS)
        assert asking.recv_multipart() == [b"", b"", (-1).to_bytes(8, "big", signed=True), b""]


@pytest.mark.parametrize("address", ["tcp://*:none", "5558", "tcp://*:1,tcp://*:2,tcp://*:3", ","])
def test_an_address_that_is_none_is_refused(address):
    with pytest.raises(ConfigError, match="is not a ZeroMQ address: use an address such as"):
        DocumentPublisher(address, None)


def test_an_address_that_is_taken_is_refused_by_the_server(tmp_path):
    address = f"tcp://127.0.0.1:{free_port()}"
    with zmq.Context.instance().socket(zmq.PUB) as taken:
        taken.bind(address)
        words = "serve", "--socket", tmp_path / "lmc.sock", "--document-events", address
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("LMC_MAX_LOCAL_CPU_SIZE", "0.001")
            code, _, err = test_cli.lmc(*words)
    assert (code, f"cannot listen at --document-events = {address} (Address already in use" in err) == (2, True)
