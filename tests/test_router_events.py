"""Events of engines, as the router follows them: what is lost is asked for again, or the listing is read again."""

import asyncio
import itertools
import json
import time
from collections.abc import Callable
from contextlib import asynccontextmanager, closing, contextmanager
from unittest.mock import Mock

import msgspec
import pytest
import zmq
from echo_engine import respond
from hypothesis import given, settings
from hypothesis import strategies as st
from ports import free_port, has_ipv6
from router_house import SECONDS, served

from lmc.blend.markers import Markers
from lmc.documents.events import DocumentMoved
from lmc.documents.publisher import DocumentPublisher
from lmc.errors import ConfigError, InputError
from lmc.keys import tokens_digest
from lmc.router.document_index import DocumentIndex, ReportedDocument
from lmc.router.document_tokens import DocumentTokens
from lmc.router.engines import Engine, address
from lmc.router.event_stream import EventStream, Lost
from lmc.router.follow import DOCUMENT_TOPIC, Follower, decoded
from lmc.router.policies.documents import Documents
from lmc.router.policy_types import Candidate, PromptRequest
from lmc.router.requests import read


class Publisher:
    """Publishes numbered batches as vLLM does, and can lose some of them on the way."""

    def __init__(self, kept: int = 1000) -> None:
        self._context = zmq.Context()
        self._sending, self._answering = self._context.socket(zmq.PUB), self._context.socket(zmq.ROUTER)
        self.port = self._sending.bind_to_random_port("tcp://127.0.0.1")
        self.replay_port = self._answering.bind_to_random_port("tcp://127.0.0.1")
        self.number, self._kept, self._batches = 0, kept, []

    def publish(self, events: list[object], *, lost: bool = False) -> None:
        payload = msgspec.msgpack.encode([time.time(), events, 0])
        self._batches = [*self._batches, (self.number, payload)][-self._kept :] if self._kept else []
        if not lost:
            self._sending.send_multipart([DOCUMENT_TOPIC.encode(), self.number.to_bytes(8, "big"), payload])
        self.number += 1
        self.answer()

    def answer(self) -> None:
        """Answer those who ask for batches again."""
        while self._answering.poll(0):
            client, _, start = self._answering.recv_multipart()
            for number, payload in self._batches:
                if number >= int.from_bytes(start, "big"):
                    self._answering.send_multipart(
                        [client, b"", DOCUMENT_TOPIC.encode(), number.to_bytes(8, "big"), payload]
                    )
            self._answering.send_multipart([client, b"", b"", (-1).to_bytes(8, "big", signed=True), b""])

    def close(self) -> None:
        self._context.destroy(0)


@contextmanager
def publisher(kept: int = 1000):
    with closing(Publisher(kept)) as made:
        yield made


async def until(condition: Callable[[], object], publisher: Publisher) -> None:
    """Wait for a condition, while the publisher answers."""
    until = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < until
        publisher.answer()
        await asyncio.sleep(0.005)


def heard(schedule: list[bool], *, kept: int, replays: bool = True) -> list[list[object] | None]:
    """Return the events that a subscriber gets, and None for `Lost`; `schedule` says which batches are lost."""

    async def listen() -> list[list[object] | None]:
        found: list[list[object] | None] = []
        with publisher(kept) as sender:
            replay = f"tcp://127.0.0.1:{sender.replay_port}" if replays else ""
            stream = EventStream(f"tcp://127.0.0.1:{sender.port}", replay, DOCUMENT_TOPIC)

            following = asyncio.create_task(_take_all(stream.batches(), found))
            hellos = itertools.count()
            while len(found) < 2:  # A subscriber joins somewhere.
                hello = [{"n": f"hello {next(hellos)}"}]
                sender.publish(hello)
                await asyncio.sleep(0.01)
            await until(lambda: found[-1:] == [hello], sender)
            assert found[0] is None
            found.clear()
            for number, lost in enumerate(schedule):
                sender.publish([{"n": number}], lost=lost)
            sender.publish([{"n": "last"}])
            await until(lambda: found[-1:] == [[{"n": "last"}]], sender)
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
        return found

    return asyncio.run(listen())


@settings(max_examples=15, deadline=None)
@given(st.lists(st.booleans(), max_size=8))
def test_lost_batches_are_asked_for_again(schedule):
    found = heard(schedule, kept=1000)
    assert found == [[{"n": number}] for number in range(len(schedule))] + [[{"n": "last"}]]


def test_batches_that_cannot_be_had_again_are_reported():
    assert heard([False, True, True, True, False], kept=3) == [
        [{"n": 0}],
        None,
        [{"n": 3}],
        [{"n": 4}],
        [{"n": "last"}],
    ]
    assert heard([True], kept=1000, replays=False) == [None, [{"n": "last"}]]


def test_batches_that_are_lost_at_the_end_are_missed_when_it_has_been_quiet():
    async def listen():
        with publisher() as sender:
            addresses = f"tcp://127.0.0.1:{sender.port}", f"tcp://127.0.0.1:{sender.replay_port}"
            stream = EventStream(*addresses, DOCUMENT_TOPIC, quiet_seconds=0.05, replay_seconds=1.0).batches()
            assert isinstance(await anext(stream), Lost)
            coming = asyncio.create_task(anext(stream))
            while not coming.done():
                sender.publish([])
                await asyncio.sleep(0.01)
            found = []
            taking = asyncio.create_task(_take_all(stream, found))
            sender.publish([{"n": 1}], lost=True)
            sender.publish([{"n": 2}], lost=True)
            await until(lambda: found[-2:] == [[{"n": 1}], [{"n": 2}]], sender)
            taking.cancel()
            await asyncio.gather(taking, return_exceptions=True)

    asyncio.run(listen())


async def _take_all(stream, found) -> None:
    async for event in stream:
        events = None if isinstance(event, Lost) else list(decoded(event)[1])
        found.append(events)


def test_all_batches_that_there_are_come_first_if_that_is_wanted():
    async def listen(kept):
        with publisher(kept) as sender:
            for number in range(4):
                sender.publish([{"n": number}])
            addresses = f"tcp://127.0.0.1:{sender.port}", f"tcp://127.0.0.1:{sender.replay_port}"
            found = []
            taking = asyncio.create_task(
                _take_all(EventStream(*addresses, DOCUMENT_TOPIC, from_start=True).batches(), found)
            )
            await until(lambda: found[-1:] == [[{"n": 3}]], sender)
            taking.cancel()
            await asyncio.gather(taking, return_exceptions=True)
            return found

    assert asyncio.run(listen(10)) == [[{"n": number}] for number in range(4)]
    assert asyncio.run(listen(2)) == [None, [{"n": 2}], [{"n": 3}]]


def test_an_address_that_is_none_is_an_error():
    async def listen():
        await anext(EventStream("nowhere").batches())

    with pytest.raises(ConfigError, match="invalid ZeroMQ address"):
        asyncio.run(listen())


def test_a_publisher_that_was_started_anew_is_noticed():
    async def listen():
        with publisher() as sender:
            stream = EventStream(f"tcp://127.0.0.1:{sender.port}", "", DOCUMENT_TOPIC).batches()
            assert isinstance(await anext(stream), Lost)
            coming = asyncio.create_task(anext(stream))
            while not coming.done():
                sender.publish([])
                await asyncio.sleep(0.01)
            sender.number = 0
            sender.publish([{"n": "new"}])
            kinds = []
            while not (kinds and isinstance(kinds[-1], Lost)):
                kinds.append(await asyncio.wait_for(anext(stream), SECONDS))
            assert isinstance(await asyncio.wait_for(anext(stream), SECONDS), bytes)
            await stream.aclose()

    asyncio.run(listen())


@pytest.mark.parametrize(
    "payload", [b"", b"\xff", b"\x01", msgspec.msgpack.encode([]), msgspec.msgpack.encode(["x", []])]
)
def test_events_that_are_none_are_an_error_that_says_so(payload):
    with pytest.raises(ValueError, match=r"unreadable|could not convert"):
        decoded(payload)


# -- following an engine ----------------------------------------------------------------------------------------------


class AdminEndpoint:
    """What an engine's administration endpoint answers."""

    def __init__(self, events: str, *, finds: bool = False) -> None:
        self.events, self.documents, self.asked, self.finds = events, [], [], finds

    async def __call__(self, scope, receive, send):
        self.asked.append(scope["path"])
        routing = {
            "special_string": " <doc> ", "separators": [[9, 9]], "special": [1], "ratio": 0.3,
            "answers": [[1, 2]], "messages": [[1]],
            "cache": "", "blend_min_tokens": 256, "finds": self.finds,
            "capacity": {"host": 5000.0, "disk": 9000.0}, "chunk_size": 64, "document_events": self.events,
        }  # fmt: skip
        name = scope["path"].removeprefix("/v1/documents").strip("/")
        documents = [document for document in self.documents if name in ("", document.get("id"))]
        found = routing if scope["path"] == "/v1/routing" else {"documents": documents}
        await respond(send, 200, json.dumps(found).encode())


def listed(digest: str, *places: str) -> dict[str, object]:
    return {"id": digest, "tenant": "", "digest": digest, "places": places}


def event(kind: str, digest: str, medium: str = "CPU") -> dict[str, object]:
    return {"type": f"Document{kind}", "digest": digest, "document": "id", "medium": medium, "salt": "", "tenant": ""}


def test_an_engine_that_says_nothing_is_not_followed_again_and_again():
    async def follow():
        one = address("http://127.0.0.1:1", ["m"])
        follower = Follower(Documents(), None, "", lambda *_: None)
        following = asyncio.create_task(follower.follow(Engine(one, Candidate(one.url), one.models)))
        await asyncio.sleep(0.01)
        ended = following.done()
        following.cancel()
        return ended

    assert not asyncio.run(follow())


@pytest.mark.parametrize("replays", [True, False])
def test_the_index_follows_the_listing_and_the_events_of_an_engine(replays):
    policy, lags = Documents(), []

    async def follow(admin, sender):
        import aiohttp

        one = address("http://127.0.0.1:1", ["m"], admin=admin.url)
        engine = Engine(one, Candidate(one.url), one.models)
        async with aiohttp.ClientSession() as session:
            following = asyncio.create_task(
                Follower(policy, session, "", lambda _, lag: lags.append(lag)).follow(engine)
            )
            told = lambda: policy.index.reports(one.url)  # noqa: E731
            await until(lambda: told() == {ReportedDocument("", "d1"): {"CPU", "STORAGE"}}, sender)
            while ReportedDocument("", "d2") not in told():  # The subscriber joins somewhere.
                sender.publish([event("Stored", "d2")])
                await asyncio.sleep(0.01)
            sender.publish([event("Removed", "d1"), {"type": "Unknown"}, 3])
            await until(lambda: told().get(ReportedDocument("", "d1")) == {"STORAGE"}, sender)
            admin.application.documents = [listed("d3", "host"), listed("d4", "disk")]
            sender.publish([event("Stored", "d4", "STORAGE")], lost=True)
            sender.publish([event("Stored", "d3")])
            await until(lambda: {ReportedDocument("", "d3"), ReportedDocument("", "d4")} <= told().keys(), sender)
            assert (ReportedDocument("", "d2") in told()) == replays, "a listing takes the place of what was known"
            assert (policy.index.room(one.url), engine.candidate.ratio) == (9000, 0.3)
            assert engine.candidate.blend_min_tokens == 256
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)

    with publisher() as sender:
        replay = f",tcp://0.0.0.0:{sender.replay_port}" if replays else ""
        with served(AdminEndpoint(f"tcp://*:{sender.port}{replay}")) as admin:
            admin.application.documents = [listed("d1", "host", "disk", "elsewhere")]
            asyncio.run(follow(admin, sender))
    assert policy.cutter.special_string_of("m") == " <doc> "
    known = policy.cutter.markers["m"]
    assert known == Markers(separators=((9, 9),), special=frozenset({1}), answers=((1, 2),), messages=((1,),))
    assert all(lag >= 0 for lag in lags)


class Administration:
    """A session in which an engine's administration endpoint answers that it publishes at all interfaces."""

    def __init__(self, port: int) -> None:
        self.routing = {"cache": "", "ratio": 0.3, "capacity": {"host": 5000.0}, "chunk_size": 64,
                        "special_string": "", "separators": [], "document_events": f"tcp://*:{port}"}  # fmt: skip
        self.status, self._path = 200, ""

    @asynccontextmanager
    async def get(self, url, **_):
        self._path = url
        yield self

    async def read(self) -> bytes:
        return json.dumps(self.routing if self._path.endswith("/v1/routing") else {"documents": []}).encode()


@pytest.mark.parametrize(
    "host", ["127.0.0.1", pytest.param("[::1]", marks=pytest.mark.skipif(not has_ipv6(), reason="no IPv6"))]
)
def test_the_events_of_an_engine_arrive_over_ipv4_and_ipv6(host):
    """Earlier, the sockets took IPv4 alone, and an IPv6 engine was followed without ever receiving its events."""
    port, lags = free_port(), []

    async def follow():
        one = address("http://127.0.0.1:1", ["m"], admin=f"http://{host}:1")
        follower = Follower(Documents(), Administration(port), "", lambda _, lag: lags.append(lag))
        following = asyncio.create_task(follower.follow(Engine(one, Candidate(one.url), one.models)))
        until = time.monotonic() + SECONDS
        while not lags and time.monotonic() < until:
            await asyncio.sleep(0.01)
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)

    moves = Mock(take=Mock(return_value=[DocumentMoved(
        stored=True, medium="CPU", digest="d1", document="id", tokens=1, salt="", model="m", tenant=""
    )]))  # fmt: skip
    with closing(DocumentPublisher(f"tcp://*:{port}", moves)):
        asyncio.run(follow())
    assert lags


# -- tokens of documents ----------------------------------------------------------------------------------------------


def test_an_engine_is_asked_once_for_the_tokens_of_a_document():
    asked = []

    async def tokenize(model, asking):
        asked.append((model, asking["prompt"]))
        return [9, 9, *map(ord, asking["prompt"].removeprefix(" # #").removesuffix("# # ")), 9, 9]

    async def run():
        known = DocumentTokens(tokenize, {"m": Markers(separators=((9, 9),))}, lambda _: " # # ")
        running = asyncio.create_task(known.run())
        assert known.find("m", " ab ") is None
        assert known.find("other", " ab ") is None
        while known.find("m", " ab ") is None:
            await asyncio.sleep(0)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        return known.find("m", " ab ")

    assert asyncio.run(run()) == (tokens_digest(list(map(ord, " ab "))), 4)
    assert asked == [("m", " # # ab # # ")]


def test_an_error_leaves_no_question_behind():
    """The task is begun again after an error, and there would be one more with each."""

    async def tokenize(model, asking):
        raise RuntimeError("nobody has thought of this")

    async def run():
        known = DocumentTokens(tokenize, {"m": Markers(separators=((9, 9),))}, lambda _: " # # ")
        known.find("m", " ab ")
        with pytest.raises(ExceptionGroup):
            await known.run()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(run())


def test_a_document_is_known_by_its_text_while_no_engine_answers(monkeypatch):
    monkeypatch.setattr("lmc.router.document_tokens.LOOKUP_PAUSE_SECONDS", 0.0)
    asked = []

    async def tokenize(model, asking):
        asked.append(asking)
        raise InputError("nobody is there")

    async def run():
        policy = Documents()
        policy.cutter.markers["m"] = Markers(separators=((9, 9),))
        known = DocumentTokens(tokenize, policy.cutter.markers, policy.cutter.special_string_of)
        policy.cutter.find = known.find
        running = asyncio.create_task(known.run())
        request = PromptRequest(text="s # # text # # q", model="m")
        for _ in range(3):
            await asyncio.sleep(0.01)
            (document,) = policy.cutter.cut(request).documents
            assert document.digest == ""
        policy.index.note("a", policy.cutter.cut(request))
        assert policy.index.find("a", [document])[0].weight == 1
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(run())
    assert asked


def test_an_index_that_is_told_nothing_is_empty():
    assert DocumentIndex(10).reports("x") == {}
    assert not DocumentIndex(10).is_reported("x")


def test_engines_of_one_cache_are_believed_together():
    """An engine that was lost took with it what the other engines of its cache server went on to say."""
    index, one, other = DocumentIndex(1000), ReportedDocument("", "d1"), ReportedDocument("", "d2")
    index.listed("shared", [(one, "CPU")], "a")
    index.listed("shared", [(one, "CPU"), (other, "STORAGE")], "b")
    assert index.reports("shared") == {one: {"CPU"}, other: {"STORAGE"}}
    index.drop_reports("shared", "a")
    assert index.reports("shared") == {one: {"CPU"}, other: {"STORAGE"}}
    index.moved("shared", one, "CPU", stored=False, source="a")
    assert one in index.reports("shared"), "nobody has listed for it"
    index.moved("shared", one, "CPU", stored=False, source="b")
    assert index.reports("shared") == {other: {"STORAGE"}}
    assert index.is_reported("shared")
    assert index.sizes("shared")["documents reported"] == 1
    index.drop_reports("shared", "b")
    assert not index.is_reported("shared")


def test_the_special_string_is_that_of_the_engines():
    policy, learned = Documents(), {"m": " <doc> "}
    policy.cutter.special_strings.update(learned)
    body = msgspec.json.encode({"model": "m", "prompt": "s <doc> a <doc> b <doc> q # # x # # y"})
    request = read(body, {}, "", " # # ", learned).request
    assert len(policy.cutter.cut(request).documents) == 2
    other = read(body.replace(b'"m"', b'"n"'), {}, "", " # # ", learned).request
    assert len(policy.cutter.cut(other).documents) == 1
    chat = {"model": "m", "messages": [], "documents": [{"text": "a"}]}
    assert read(msgspec.json.encode(chat), {}, "", " # # ", learned).request.text == " <doc> a <doc> "
