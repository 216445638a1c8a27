"""What goes wrong beside the router: late health checks, clients that do not read, engines that change meanwhile."""

import asyncio
import json
import socket
import threading
import time
from http.client import HTTPConnection

import aiohttp
from echo_engine import EchoEngine, respond
from router_house import house, served
from storage_fakes import eventually

from lmc.blend.markers import Markers
from lmc.http import timeouts
from lmc.keys import tokens_digest
from lmc.router import discovery, document_tokens
from lmc.router import watch as watching
from lmc.router.application import Router
from lmc.router.connections import bounded_protocol
from lmc.router.document_index import ReportedDocument
from lmc.router.document_tokens import DocumentTokens
from lmc.router.engines import BREAKER_FAILURES, FAILED_CHECKS, Engine, EngineBreaker, Engines, address
from lmc.router.follow import Follower
from lmc.router.policies import make
from lmc.router.policy_types import Candidate, PromptRequest, Usage
from lmc.router.settings import RouterSettings
from lmc.router.visit import EngineFailed, Visit

ASK = "/v1/completions"
URL = "http://a:8000"


# -- engines ---------------------------------------------------------------------------------------------------------


class Slow(EchoEngine):
    """An engine whose health checks come late, while the parts of its responses come all the time."""

    late = False

    async def __call__(self, scope, receive, send):
        if scope["type"] == "http" and scope["path"] == "/health" and self.late:
            await asyncio.sleep(1.0)
        await super().__call__(scope, receive, send)


def test_an_answer_that_comes_is_not_given_up_because_health_checks_are_late(monkeypatch):
    monkeypatch.setattr(watching, "HEALTH_TIMEOUT", aiohttp.ClientTimeout(total=0.3))
    slow = Slow()
    with served(slow) as engine:
        known = Engines()
        known.add(address(engine.url))
        with served(
            Router(RouterSettings(health_seconds=0.05), make("documents"), known),
            lifespan=True, http=bounded_protocol(),
        ) as router:  # fmt: skip
            slow.late = True
            connection = HTTPConnection("127.0.0.1", router.port, timeout=60)
            asked = {"model": "echo", "prompt": "x", "stream": True, "echo": {"parts": 100, "pause": 0.03}}
            connection.request("POST", ASK, json.dumps(asked), {"content-type": "application/json"})
            said = connection.getresponse().read()
            connection.close()
    assert known[engine.url].failed_checks >= FAILED_CHECKS
    assert said.count(b"data: ") == 102
    assert said.endswith(b"[DONE]\n\n")


def test_a_request_that_waits_longer_than_checks_fail_is_given_up():
    async def run(before: bool) -> str:
        engine = Engine(address(URL), Candidate(URL), frozenset())
        visit = Visit(engine, None, engine.sent(1.0, streamed=True), trial=False, take_back=None)  # type: ignore[arg-type]
        answers = asyncio.Event()

        async def wait():
            async with visit.while_up():
                await answers.wait()
            return "answered"

        waiting = asyncio.create_task(wait()) if before else None
        await asyncio.sleep(0.01)
        for number in range(FAILED_CHECKS):
            engine.checked(up=False)
            if not number and waiting is None:
                waiting = asyncio.create_task(wait())
            await asyncio.sleep(0.01)
        assert waiting is not None
        answers.set()  # A request that was given up has ended before.
        try:
            return await waiting
        except EngineFailed as error:
            return str(error)

    assert asyncio.run(run(before=True)) == f"{URL}: it failed its health checks"
    assert asyncio.run(run(before=False)) == "answered"


def test_health_checks_that_pass_open_the_way_for_others_than_the_request_that_tries():
    """The response to the trial may take minutes. If others waited for it, the engine would be idle meanwhile."""
    breaker = EngineBreaker()
    for _ in range(BREAKER_FAILURES):
        breaker.failed(1.0)
    assert breaker.state(1.0) == "open"
    breaker.passed()
    assert breaker.state(1.0) == "half-open"
    assert breaker.sent()
    assert breaker.state(1.0) == "open"
    breaker.passed()
    assert breaker.state(1.0) == "closed"
    breaker.failed(1.0)
    assert breaker.state(1.0) == "open", "the next failure is enough"


def test_an_engine_that_has_not_said_its_models_gets_no_requests_that_others_can_answer():
    engines = Engines()
    known, new = engines.add(address(URL, ["chat"])), engines.add(address("http://b:8000"))
    assert [one.name for one in engines.candidates("chat")] == [URL]
    assert [one.name for one in engines.candidates("other")] == ["http://b:8000"], "nobody else may have it"
    known.healthy = False
    assert [one.name for one in engines.candidates("chat")] == ["http://b:8000"]
    new.models = frozenset({"chat"})
    known.healthy = True
    assert len(engines.candidates("chat")) == 2


def test_an_engine_that_was_removed_and_added_again_is_followed_anew():
    engines, policy, followed = Engines(), make("documents"), []

    async def follow(engine):
        followed.append(engine)
        policy.index.listed(engine.candidate.cache, [(ReportedDocument("", "d"), "CPU")], engine.url)
        await asyncio.Event().wait()

    class Answering(watching.Watch):
        async def _get(self, engine, path, *, json=False):
            return {"data": [{"id": "m"}]} if json else True

    async def run():
        watch = Answering(RouterSettings(), engines, policy, None, None, follow)
        new = address(URL, admin="http://a:9180")
        engines.add(new)
        await watch.look()
        await asyncio.sleep(0)
        engines.remove(URL)
        policy.forget(URL)
        assert not policy.index.is_reported(URL)
        engines.add(new)
        await watch.look()
        await asyncio.sleep(0)
        assert followed[-1] is engines[URL]
        assert policy.index.is_reported(URL)
        await watch.close()

    asyncio.run(run())


def test_what_an_engine_has_said_of_a_cache_is_forgotten_when_it_gets_another_one():
    policy, engines = make("documents"), Engines()
    engine = engines.add(address(URL, ["m"], cache="first", admin="http://a:9180"))
    facts = {
        "cache": "", "ratio": 0.15, "capacity": {"host": 1000}, "chunk_size": 16, "separators": [],
        "special_string": "", "document_events": "tcp://127.0.0.1:9",
    }  # fmt: skip

    class Answered(Follower):
        async def _ask(self, engine, path):
            if path == "/v1/routing":
                return facts
            return {"documents": [{"id": "d", "tenant": "", "digest": "d", "places": ["host"]}]}

    async def run():
        following = asyncio.create_task(Answered(policy, None, "", lambda *_: None).follow(engine))
        for _ in range(1000):
            await asyncio.sleep(0.001)
            if policy.index.is_reported("first"):
                break
        assert policy.index.reports("first")
        engines.add(address(URL, ["m"], cache="second", admin="http://a:9180"))
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        assert not policy.index.reports("first")

    asyncio.run(run())


def test_an_answer_that_ends_after_its_engine_has_gone_leaves_nothing():
    policy = make("documents")
    request = PromptRequest(text=" # # ".join(["s", "d" * 4000, "q"]), model="m")
    choice = policy.choose(request, [Candidate(URL)])
    policy.sent(request, URL)
    policy.forget(URL)
    policy.answered(request, choice._replace(assumed_tokens=10.0, assumed_prefix=10.0), Usage(1000, 500, None, {}))
    assert policy.index.sizes(URL) == {}
    assert len(policy.index) == 0


def test_a_lookup_in_kubernetes_that_is_not_answered_is_asked_again(tmp_path, monkeypatch):
    monkeypatch.setattr(discovery, "API_TIMEOUT", aiohttp.ClientTimeout(total=0.2))
    monkeypatch.setattr(watching, "LOOKUP_SECONDS", 0.3)
    pods = json.dumps(
        {
            "items": [
                {
                    "metadata": {"labels": {}},
                    "spec": {},
                    "status": {"podIP": "10.0.0.1", "conditions": [{"type": "Ready", "status": "True"}]},
                }
            ]
        }
    ).encode()
    asked, end = [], threading.Event()

    async def api(scope, receive, send):
        asked.append(scope["path"])
        while len(asked) == 1 and not end.is_set():
            await asyncio.sleep(0.01)
        await respond(send, 200, pods)

    (tmp_path / "token").write_text("t")

    async def run(port):
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(port))
        engines = Engines()

        def find(session):
            return discovery.in_kubernetes(session, "default", "app=vllm", 8000, account=tmp_path, scheme="http")

        async with aiohttp.ClientSession() as session:
            watch = watching.Watch(RouterSettings(), engines, make("documents"), session, find)
            while not len(engines):
                await watch.discover()
        assert len(asked) >= 2

    with served(api) as server:
        asyncio.run(asyncio.wait_for(run(server.port), 60))
        end.set()


# -- clients ---------------------------------------------------------------------------------------------------------


async def without_end(wish, usage, send, leaving):
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
    while not leaving.done():
        await send({"type": "http.response.body", "body": bytes(1 << 16), "more_body": True})
        await asyncio.sleep(0)  # A send to a closed connection returns at once, so that nothing else would run.


def test_a_client_that_does_not_read_loses_its_place(monkeypatch):
    monkeypatch.setattr(timeouts, "UNREAD_SECONDS", 0.5)
    body = json.dumps({"model": "echo", "prompt": "x", "stream": True}).encode()
    head = b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    with house(1, max_requests=1) as built:
        (echo,) = built.echoes
        echo.stream = without_end
        stalled = socket.create_connection(("127.0.0.1", built.router.port))
        try:
            stalled.sendall(head % (ASK.encode(), len(body)) + body)
            eventually(lambda: echo.seen)  # The request may be over when this is looked at.
            eventually(lambda: built.router.application.proxy.answering == 0)
            (engine,) = built.router.application.engines
            assert engine.candidate.load == 0
            assert engine.breaker.failures == 0, "it is not to blame"
            assert built.ask(ASK, {"model": "echo", "prompt": "x"})[0] == 200
            assert built.numbers("clients_left_total") == 1
        finally:
            stalled.close()


# -- documents that wait for their tokens ----------------------------------------------------------------------------


def waiting_for_tokens(markers: dict[str, Markers], special: list[str]) -> tuple[DocumentTokens, list[str]]:
    """The tokens of documents, and the texts that were tokenized: each has the tokens `[1, 2, 3]`."""
    asked = []

    async def tokenize(_, body):
        asked.append(body["prompt"].split(special[0].strip())[1])
        return [*markers["m"].separators[0], 1, 2, 3, *markers["m"].separators[0]]

    return DocumentTokens(tokenize, markers, lambda _: special[0]), asked


def look_up(known: DocumentTokens) -> None:
    """Request the tokens of all documents that wait for them."""

    async def run():
        running = asyncio.create_task(known.run())
        for _ in range(10):
            await asyncio.sleep(0)
        running.cancel()

    asyncio.run(run())


def test_documents_that_wait_for_their_tokens_take_a_bounded_amount_of_memory(monkeypatch):
    monkeypatch.setattr(document_tokens, "MAX_QUEUED_CHARACTERS", 1000)
    known, asked = waiting_for_tokens({"m": Markers(separators=((9,),))}, [" # # "])
    for number in range(50):
        assert known.find("m", f"{number:0100d}") is None
        assert known.find("m", f"{number:0100d}") is None, "it waits already"
    monkeypatch.setattr(document_tokens, "MAX_QUEUED_CHARACTERS", 1 << 20)
    for number in range(500):
        known.find("m", f"{number:0100d}", "greedy")
    known.find("m", "a text", "modest")
    monkeypatch.setattr(document_tokens, "MAX_CHARACTERS", 10)
    known.find("m", "more than ten letters", "another")
    look_up(known)
    assert asked[:10] == [f"{number:0100d}" for number in range(10)], "as many as have room"
    assert asked[10:] == [*(f"{number:0100d}" for number in range(10, 110)), "a text"], "100 of one tenant"


def test_the_tokens_of_documents_are_asked_for_again_when_a_model_is_cut_otherwise():
    markers, special = {"m": Markers(separators=((9,),))}, [" # # "]
    known, _ = waiting_for_tokens(markers, special)
    known.find("m", "a text")
    look_up(known)
    found = tokens_digest([1, 2, 3]), 3
    assert known.find("m", "a text") == found
    markers["m"] = Markers(separators=((9,),))
    assert known.find("m", "a text") == found, "nothing has changed"
    markers["m"] = Markers(separators=((8, 8),))
    assert known.find("m", "a text") is None
    markers["m"], special[0] = Markers(separators=((9,),)), "<sep>"
    assert known.find("m", "a text") is None


def test_the_time_of_a_client_begins_anew_with_each_part(monkeypatch):
    monkeypatch.setattr(timeouts, "UNREAD_SECONDS", 1.0)
    with house(1) as built:
        began = time.monotonic()
        answer = built.send(ASK, {"model": "echo", "prompt": "x", "stream": True, "echo": {"parts": 30, "pause": 0.05}})
        assert answer.read().endswith(b"[DONE]\n\n")
        assert time.monotonic() - began > 1.0
