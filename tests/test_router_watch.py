"""How the router looks after engines: breakers, health checks and lookups, none of which ends or waits for another."""

import asyncio
import json
import logging
import socketserver
import ssl
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from http.client import HTTPException

import aiohttp
import pytest
from aiohttp.client_reqrep import ConnectionKey
from echo_engine import EchoEngine
from http_stub import http_stub
from router_house import house, served
from storage_fakes import eventually

from lmc.errors import ConfigError
from lmc.router import watch as watching
from lmc.router.engines import (
    BREAKER_FAILURES,
    FIRST_BREAKER_SECONDS,
    MAX_ERRORS,
    Engine,
    EngineBreaker,
    Engines,
    address,
    has_ended,
)
from lmc.router.kv_index import CacheSource
from lmc.router.policies import make
from lmc.router.policy_types import Candidate, RoutingChoice
from lmc.router.proxy import IDLE_CONNECTION_SECONDS
from lmc.router.settings import RouterSettings
from lmc.router.visit import EngineFailed, Visit
from lmc.router.watch import Watch, cause_of, keep_up


@asynccontextmanager
async def looking(engines, discovery=None, follow=None):
    async with aiohttp.ClientSession() as session:
        watch = Watch(RouterSettings(health_seconds=0.02), engines, make("round_robin"), session, discovery, follow)
        tasks = await watch.open()
        try:
            yield watch
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await watch.close()


async def until(condition):
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.005)


# -- breakers ---------------------------------------------------------------------------------------------------------


def test_requests_that_fail_at_once_open_a_breaker_for_its_first_pause():
    """Fifty requests were on their way when an engine ended. Each doubled the pause, to its longest."""
    breaker = EngineBreaker()
    for _ in range(50):
        breaker.failed(100.0)
    assert breaker.state(100.0 + FIRST_BREAKER_SECONDS - 0.01) == "open"
    assert breaker.state(100.0 + FIRST_BREAKER_SECONDS) == "half-open"


def test_only_the_request_that_tries_doubles_the_pause():
    breaker = EngineBreaker()
    for _ in range(BREAKER_FAILURES):
        breaker.failed(0.0)
    assert breaker.sent(), "it tries"
    assert breaker.state(FIRST_BREAKER_SECONDS) == "open", "one at a time"
    breaker.ended(trial=False)  # an older request
    assert breaker.state(FIRST_BREAKER_SECONDS) == "open"
    breaker.failed(FIRST_BREAKER_SECONDS, trial=True)
    breaker.ended(trial=True)
    breaker.failed(FIRST_BREAKER_SECONDS + 1)
    assert breaker.state(3 * FIRST_BREAKER_SECONDS - 0.01) == "open"
    assert breaker.state(3 * FIRST_BREAKER_SECONDS) == "half-open"
    breaker.succeeded()
    assert (breaker.state(0.0), breaker.sent()) == ("closed", False)


def test_a_health_check_that_passes_lets_one_request_try():
    breaker = EngineBreaker()
    for _ in range(BREAKER_FAILURES):
        breaker.failed(0.0)
    breaker.passed()
    assert breaker.state(0.0) == "half-open"
    breaker.sent()
    assert breaker.state(0.0) == "open"


def test_answers_500_open_a_breaker_if_other_engines_answer():
    now = [0.0]
    engines = Engines(clock=lambda: now[0])
    broken, other, stranger = (
        engines.add(address(f"http://{name}", [model])) for name, model in (("a", "m"), ("b", "m"), ("c", "n"))
    )

    def answer(engine, *, error=True):
        now[0] += 0.01
        engines.note_answer(engine, "m", error=error, trial=engine.breaker.sent())
        return engine.breaker.state(now[0])

    answer(other, error=False)
    assert {answer(broken) for _ in range(2 * MAX_ERRORS)} == {"closed"}, "no other engine has answered meanwhile"
    answer(stranger, error=False)
    assert answer(broken) == "closed", "it has another model"
    answer(broken, error=False)
    assert {answer(broken) for _ in range(MAX_ERRORS - 1)} == {"closed"}
    answer(other, error=False)
    assert answer(broken) == "open"
    now[0] += FIRST_BREAKER_SECONDS
    assert answer(broken) == "open", "the trial"
    now[0] += FIRST_BREAKER_SECONDS
    assert broken.breaker.state(now[0]) == "open", "for twice as long"
    now[0] += FIRST_BREAKER_SECONDS
    assert answer(broken, error=False) == "closed"
    assert answer(broken) == "closed"


def test_an_engine_that_answers_500_to_everything_gets_no_more_requests():
    """Earlier, such an engine was always idle, because it answered at once, and got most requests."""
    with house(2, "round_robin", health_seconds=1000.0) as built:
        built.echoes[0].refusing = 500
        statuses = [built.ask("/v1/completions", {"model": "echo", "prompt": "x"})[0] for _ in range(2 * MAX_ERRORS)]
        assert sorted(statuses) == [200] * MAX_ERRORS + [500] * MAX_ERRORS
        breakers = {engine["url"]: engine["breaker"] for engine in built.ask("/engines")[1]["engines"]}
        assert breakers[built.engines[0].url] != "closed"
        assert breakers[built.engines[1].url] == "closed"


def test_what_was_noted_about_a_request_is_taken_back_after_an_error():
    ask = {"model": "echo", "prompt": f"s # # {'x' * 400} # # q"}
    with house(1) as built:
        assert built.ask("/v1/completions", {**ask, "echo": {"status": 500}})[0] == 500
        assert built.ask("/lmc/explain", ask)[1]["engines"][0]["documents"] == 0


class Dead(EchoEngine):
    """A vLLM whose computing process has ended."""

    async def _answer(self, scope, body, receive, send):
        self.seen.append({})
        message = "EngineCore encountered an issue. See stack trace (above) for the root cause."
        error = {"message": message, "type": "InternalServerError", "param": None, "code": 500}
        content = json.dumps({"error": error}).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
        await send({"type": "http.response.start", "status": 500, "headers": headers})
        for part in (content[:20], content[20:]):
            await asyncio.sleep(0.01)
            await send({"type": "http.response.body", "body": part, "more_body": part == content[:20]})


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_goes_to_another_engine_if_the_process_that_computes_has_ended(stream):
    """vLLM answers this with 500, and the client got it."""
    with house(2, "round_robin") as built:
        dead, other = built.echoes
        dead.__class__ = Dead
        ask = {"model": "echo", "prompt": "x", "stream": stream}
        assert [built.send("/v1/completions", ask).status for _ in range(2)] == [200, 200]
        assert len(other.seen) == 2
        assert built.numbers("retries_total") == len(dead.seen) > 0
        other.__class__ = Dead
        status, answer = built.ask("/v1/completions", ask)
        assert (status, answer["error"]["type"]) == (500, "InternalServerError"), "the model has one engine"


def test_an_engine_that_is_back_gets_requests_at_its_next_health_check():
    with house(1, health_seconds=0.1) as built:
        engine = built.router.application.engines[built.engines[0].url]
        engine.breaker.failures, engine.breaker.until = BREAKER_FAILURES, float("inf")
        eventually(lambda: built.ask("/v1/completions", {"model": "echo", "prompt": "x"})[0] == 200)


# -- tasks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [KeyError("x"), ConfigError("say it better")])
def test_a_task_goes_on_after_an_error_and_says_it_once(caplog, error):
    caplog.set_level(logging.WARNING)
    calls = []

    async def work():
        calls.append(0)
        if len(calls) < 4:
            raise error

    async def run():
        task = keep_up(work, "counting", pause=0.0)
        await until(lambda: len(calls) > 5)
        assert not task.done()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())
    assert "counting" in caplog.text
    assert caplog.text.count("Traceback") == isinstance(error, KeyError)


def test_an_error_ends_neither_health_checks_nor_lookups(monkeypatch, caplog):
    """An unexpected exception ended the one loop of both, and nobody was told."""
    calls = []

    async def find(_):
        calls.append(0)
        if len(calls) < 3:
            raise RuntimeError("unexpected")
        return [address("http://127.0.0.1:1")]

    class Odd(Watch):
        async def _look_at(self, engine):
            calls.append(engine.url)
            raise RuntimeError("unexpected, too")

    monkeypatch.setattr("test_router_watch.Watch", Odd)

    async def run():
        engines = Engines()
        async with looking(engines, find):
            await until(lambda: len(engines) and calls.count("http://127.0.0.1:1") > 3)

    asyncio.run(run())
    assert caplog.text.count("lookup of the engines failed") == 2
    assert "check of the engines failed" in caplog.text


def test_an_engine_is_followed_again_after_an_error():
    followed = []

    async def follow(engine):
        followed.append(engine.url)
        raise RuntimeError("unexpected")

    async def run(url):
        engines = Engines()
        engines.add(address(url, ["echo"], admin="127.0.0.1:1"))
        async with looking(engines, follow=follow):
            await until(lambda: len(followed) > 2)

    with pytest.MonkeyPatch.context() as patch, served(EchoEngine()) as engine:
        patch.setattr(watching, "TASK_RETRY_SECONDS", 0.01)
        asyncio.run(run(engine.url))


def test_an_engine_that_comes_without_an_address_of_its_events_is_warned_about(caplog):
    """The policy `precise` can never choose it for what it has, and nothing said so."""
    with (
        caplog.at_level(logging.WARNING),
        house(1, "precise", health_seconds=0.02) as built,
        served(EchoEngine()) as new,
    ):
        eventually(lambda: f"{built.engines[0].url} has no address for KV events" in caplog.text)
        assert built.ask("/engines", {"url": new.url})[0] == 201
        eventually(
            lambda: f"{new.url} has no address for KV events, so no prompt matches there: set kv_events" in caplog.text
        )
        assert built.ask("/engines", {"url": new.url, "kv_events": "tcp://127.0.0.1:1"})[0] == 201
        with served(EchoEngine()) as last:  # By its warning, the other one has been looked at again.
            assert built.ask("/engines", {"url": last.url})[0] == 201
            eventually(lambda: f"{last.url} has no address for KV events" in caplog.text)
    assert caplog.text.count("no address for KV events") == 3, "once for each, and no more when there is one"


def test_a_lookup_that_takes_long_holds_up_no_health_check(monkeypatch):
    monkeypatch.setattr(watching, "LOOKUP_SECONDS", 0.01)
    lookups, answered = [], asyncio.Event()

    async def find(_):
        lookups.append(0)
        await answered.wait()
        return [address("http://127.0.0.1:1")]

    async def run(echo, url):
        engines = Engines()
        engines.add(address(url))
        async with looking(engines, find):
            echo.healthy = False
            await until(lambda: not engines[url].healthy)
            echo.healthy = True
            await until(lambda: engines[url].healthy)
            assert len(lookups) == 1, "the same one goes on"
            answered.set()
            await until(lambda: len(engines) == 2)

    with served(EchoEngine()) as engine:
        asyncio.run(run(engine.application, engine.url))


def test_an_engine_keeps_its_place_for_some_lookups_that_miss_it():
    """A name server that left out an engine once made the router forget all that the engine had."""
    urls = [f"http://127.0.0.1:{port}" for port in (1, 2)]
    found = [address(url) for url in urls]

    async def find(_):
        return list(found)

    async def run():
        engines = Engines()
        async with aiohttp.ClientSession() as session:
            watch = Watch(RouterSettings(), engines, make("round_robin"), session, find)
            await watch.discover()
            one = found.pop()
            for _ in range(watching.MAX_MISSED_LOOKUPS - 1):
                await watch.discover()
                assert [engine.missing for engine in engines] == [False, True]
                assert [candidate.name for candidate in engines.candidates("")] == urls[:1]
            found.append(one)
            await watch.discover()
            assert len(engines.candidates("")) == 2
            found.clear()
            await watch.discover()
            assert len(engines.candidates("")) == 2, "there are no others"
            for _ in range(watching.MAX_MISSED_LOOKUPS - 1):
                await watch.discover()
            assert not len(engines)

    asyncio.run(run())


# -- what is known of an engine that does not answer ------------------------------------------------------------------


def test_only_a_refused_connection_means_that_an_engine_has_ended():
    import errno

    assert has_ended(OSError(errno.ECONNREFUSED, "refused"))
    for other in (aiohttp.ConnectionTimeoutError(), aiohttp.ServerDisconnectedError(), OSError(errno.EHOSTUNREACH, "")):
        assert not has_ended(other)


def test_an_engine_that_was_late_keeps_what_it_has():
    document = {"model": "echo", "prompt": f"s # # {'x' * 400} # # q"}
    with house(1, health_seconds=0.1) as built:
        built.ask("/v1/completions", document)
        built.echoes[0].healthy = False
        eventually(lambda: built.ask("/ready")[0] == 503)
        built.echoes[0].healthy = True
        eventually(lambda: built.ask("/ready")[0] == 200)
        assert int(built.send("/v1/completions", document).headers["x-lmc-expected-tokens"]) > 90


def test_a_request_does_not_wait_for_an_engine_that_hangs():
    """Earlier, the request was held for `answer_seconds`, ten minutes, although the health checks had failed."""
    ask = {"model": "echo", "prompt": "x", "echo": {"delay": 60}}
    with house(2, health_seconds=0.1) as built, ThreadPoolExecutor(1) as beside:
        waiting = beside.submit(built.ask, "/v1/completions", ask)
        eventually(lambda: sum(len(one.seen) for one in built.echoes) == 1)
        hanging = next(one for one in built.echoes if one.seen)
        other = next(one for one in built.echoes if not one.seen)
        other.hurried, hanging.healthy = True, False
        assert waiting.result(30)[0] == 200
        assert len(other.seen) == 1
        eventually(lambda: hanging.aborted == 1)  # The engine notices it a moment after the answer.


def test_a_stream_ends_with_an_engine_that_hangs():
    ask = {"model": "echo", "prompt": "x", "stream": True, "echo": {"pause": 60}}
    with house(1, health_seconds=0.1) as built:
        answer = built.send("/v1/completions", ask)
        assert answer.read(5) == b"data:"
        built.echoes[0].healthy = False
        with pytest.raises((HTTPException, OSError)):
            answer.read()


def test_a_request_that_an_engine_is_silent_about_is_not_sent_to_another_one():
    with house(2, answer_seconds=0.2) as built:
        status, found = built.ask("/v1/completions", {"model": "echo", "prompt": "x", "echo": {"delay": 60}})
        assert status == 504
        assert "timed out" in found["error"]["message"]
        assert sum(len(one.seen) for one in built.echoes) == 1


class InvalidChunks(socketserver.BaseRequestHandler):
    """An engine whose answers have an invalid chunk when their first part has been read."""

    def handle(self):
        if b" /v1/completions " in self.request.recv(1 << 16):
            self.request.sendall(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n")
            self.server.read.wait()
            self.request.sendall(b"zz\r\n")
        else:
            self.request.sendall(b'HTTP/1.1 200 OK\r\ncontent-length: 11\r\n\r\n{"data":[]}')


def test_an_answer_with_an_invalid_chunk_ends_as_if_nothing_more_came():
    """aiohttp reports no such chunk after the first part of an answer, and the client waited for ever."""
    with house(0, answer_seconds=0.2) as built, socketserver.ThreadingTCPServer(("", 0), InvalidChunks) as engine:
        engine.read, engine.daemon_threads = threading.Event(), True
        threading.Thread(target=engine.serve_forever, args=(0.01,), daemon=True).start()
        built.known.add(address(f"http://127.0.0.1:{engine.server_address[1]}", ["echo"]))
        answer = built.send("/v1/completions", {"model": "echo", "prompt": "x"})
        assert answer.read(3) == b"abc"
        engine.read.set()
        with pytest.raises(HTTPException):
            answer.read()
        built.rest()
        assert built.numbers("broken_answers_total") == 1
        engine.shutdown()


def test_an_engine_is_not_taken_to_have_what_it_has_refused():
    ask = {"model": "echo", "prompt": f"s # # {'x' * 400} # # q"}
    with house(2) as built:
        where = built.ask("/lmc/explain", ask)[1]["engine"]
        next(one for one in built.engines if one.url == where).application.refusing = 503
        assert built.send("/v1/completions", ask).headers["x-lmc-engine"] != where
        found = {one["engine"]: one["documents"] for one in built.ask("/lmc/explain", ask)[1]["engines"]}
        assert found.pop(where) == 0
        assert list(found.values()) == [1]


def warned(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


async def look_twice(url: str, **settings) -> Engines:
    """Check an engine twice, and return it."""
    engines = Engines()
    engines.add(address(url))
    async with aiohttp.ClientSession() as session:
        watch = Watch(RouterSettings(**settings), engines, make("round_robin"), session)
        for _ in range(2):
            await watch.look()
        await watch.close()
    return engines


@pytest.mark.parametrize(("key", "words"), [("", "set --api-key"), ("secret", "check the key in --api-key")])
def test_an_engine_that_needs_a_key_is_warned_about_once(caplog, key, words):
    """Every five seconds, the log had "'NoneType' object is not subscriptable"."""
    with http_stub((401, {"error": "Unauthorized"})) as stub:
        stub.answers["/health"] = (200, "")
        asyncio.run(look_twice(stub.url, api_key=key))
    (warning,) = warned(caplog)
    assert stub.url in warning
    assert "401" in warning
    assert words in warning
    assert "secret" not in warning


def test_a_failed_health_check_has_a_cause_which_is_logged_once(caplog):
    with http_stub((500, {})) as stub:
        engines = asyncio.run(look_twice(stub.url))
    (warning,) = warned(caplog)
    assert warning.endswith("it answered /health with 500")
    assert not engines[stub.url].healthy
    caplog.clear()
    engines = asyncio.run(look_twice(stub.url))
    (warning,) = warned(caplog)
    assert warning.endswith("it refused the connection")
    assert engines[stub.url].gone


def test_another_cause_is_logged_too(caplog):
    caplog.set_level(logging.INFO)

    async def look(stub):
        engines = Engines()
        engines.add(address(stub.url, ["m"]))
        async with aiohttp.ClientSession() as session:
            watch = Watch(RouterSettings(), engines, make("round_robin"), session)
            for status in (500, 500, 404, 200, 200, 404):
                stub.answers["/health"] = (status, "")
                await watch.look()
            await watch.close()

    with http_stub() as stub:
        asyncio.run(look(stub))
    health = [record.getMessage() for record in caplog.records if "health check" in record.getMessage()]
    assert [text.rpartition(" ")[2] for text in health] == ["500", "404", "check", "404"]


def test_a_certificate_that_is_not_trusted_is_the_cause(tmp_path, caplog):
    pair = str(tmp_path / "chain.pem"), str(tmp_path / "key.pem")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=DNS:localhost", "-out", pair[0], "-keyout", pair[1]],
        check=True, capture_output=True,
    )  # fmt: skip
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*pair)

    async def run():
        server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0, ssl=context)
        async with server:
            await look_twice(f"https://localhost:{server.sockets[0].getsockname()[1]}")

    asyncio.run(run())
    (warning,) = warned(caplog)
    assert "certificate is not trusted (self-signed certificate)" in warning
    assert "SSL_CERT_FILE" in warning


def test_causes_of_failed_requests_are_clauses():
    key = ConnectionKey("nowhere", 80, False, True, None, None, None)
    assert cause_of(aiohttp.ClientConnectorDNSError(key, OSError(-2, "unknown"))) == "its host name was not resolved"
    assert cause_of(TimeoutError()) == "it did not answer within 5 s"
    assert cause_of(aiohttp.ServerDisconnectedError()) == "it closed the connection without an answer"
    assert cause_of(aiohttp.ClientPayloadError()) == "ClientPayloadError"
    assert cause_of(OSError(5, "Input/output error")) == "Input/output error"


@pytest.mark.parametrize(("answered", "silent", "taken"), [(False, False, 1), (True, False, 0), (False, True, 0)])
def test_what_was_noted_is_taken_back_however_long_the_failure_took(answered, silent, taken):
    """An engine that said 503 after the time that its prompt should have taken was taken to have the prompt."""
    engine = Engine(address("http://a"), Candidate("http://a"), frozenset())
    back = []
    choice, prefill = RoutingChoice(engine.url, "least loaded"), engine.sent(1.0, streamed=False)
    visit = Visit(engine, choice, prefill, trial=False, take_back=lambda: back.append(0))
    engine.begun(prefill)
    visit.answered = answered
    visit.failed(1.0, EngineFailed(engine, aiohttp.SocketTimeoutError() if silent else "503"))
    assert len(back) == taken


def test_a_router_without_engines_says_so():
    with house(0) as built:
        status, found = built.ask("/v1/completions", {"model": "echo", "prompt": "x"})
        assert status == 503
        assert "has no engines" in found["error"]["message"]


def test_an_idle_connection_is_closed_before_the_engine_does():
    assert IDLE_CONNECTION_SECONDS < 5.0, "uvicorn's time, and vLLM's"
    with house(1) as built:
        assert built.router.application.proxy.session.connector._keepalive_timeout == IDLE_CONNECTION_SECONDS


# -- metrics ----------------------------------------------------------------------------------------------------------


def test_what_is_assumed_of_an_engine_is_expected_less_if_its_answers_say_that_nothing_was_reused(monkeypatch):
    monkeypatch.setattr("lmc.router.document_index.LEARNING_SECONDS", 0.0)
    document, usage = "x" * 4000, {"prompt_tokens": 1000, "prompt_tokens_details": {"cached_tokens": 0}}
    with house(1) as built:
        for number in range(30):
            ask = {"model": "echo", "prompt": f"{number} # # {document} # # q", "echo": {"usage": usage}}
            assert built.ask("/v1/completions", ask)[0] == 200
        ask = {"model": "echo", "prompt": f"another # # {document} # # q"}
        (engine,) = built.ask("/lmc/explain", ask)[1]["engines"]
        assert engine["assumed_tokens"] == pytest.approx(1000, rel=0.02)
        assert engine["expected_tokens"] < 100


def test_metrics_say_what_the_index_has_of_each_engine_and_from_whom():
    ask = {"model": "echo", "prompt": f"s # # {'x' * 4000} # # q"}
    with house(1) as built:
        built.ask("/v1/completions", ask)
        url = built.engines[0].url
        assert built.numbers(f'engine_index_entries{{engine="{url}",kind="documents sent"}}') == 1
        assert built.numbers("engine_told") == 0
        assert built.ask("/lmc/explain", ask)[1]["engines"][0]["known_by"] == "history"
        call_soon = built.router.loop.call_soon_threadsafe
        call_soon(built.router.application.policy.index.listed, built.engines[0].url, [], built.engines[0].url)
        eventually(lambda: built.numbers("engine_told") == 1)
        assert built.ask("/lmc/explain", ask)[1]["engines"][0]["known_by"] == "events"
    with house(1, "precise") as built:
        index = built.router.application.policy.index
        index.stored(CacheSource(built.engines[0].url), [1], None, [1] * 4, 4)
        index.stored(CacheSource(built.engines[0].url), [3], 2, [1] * 4, 4)
        assert built.numbers("engine_index_entries") == built.numbers("index_entries") == 1
        assert (built.numbers("index_unplaced"), built.numbers("index_unreadable")) == (1, 0)


def test_the_metrics_of_an_engine_go_with_it():
    with house(2, "round_robin") as built:
        for number in range(6):
            built.ask("/v1/completions", {"model": "echo", "prompt": f"{number} " * 99})
        gone, stays = (one.url for one in built.engines)
        assert gone in built.send("/metrics").read().decode()
        built.ask("/engines", {"url": gone}, method="DELETE")
        text = built.send("/metrics").read().decode()
        assert gone not in text
        assert f'lmc_router_requests_total{{engine="{stays}"' in text
