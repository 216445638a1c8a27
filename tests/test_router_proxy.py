"""The router's proxy, before engines that echo: nothing is lost, changed or sent twice, and bad input goes nowhere."""

import io
import json
import socket
import time
from contextlib import contextmanager
from http.client import HTTPException

import pytest
from echo_engine import EchoEngine
from rich.console import Console
from router_house import SECONDS, house, served
from storage_fakes import Clock, eventually

from lmc.blend.markers import Markers
from lmc.commands.top import complete, top
from lmc.router.cut import MAX_CHARACTERS
from lmc.router.engines import BREAKER_FAILURES, FIRST_BREAKER_SECONDS, address

ASK = "/v1/completions"


@pytest.fixture(scope="module")
def two():
    with house(2) as built:
        yield built


@contextmanager
def waiting(built, wish):
    """A client that has sent a request and reads nothing."""
    with socket.create_connection(("127.0.0.1", built.router.port), SECONDS) as sending:
        body = json.dumps({"model": "echo", "stream": True, "prompt": "x", "echo": wish}).encode()
        sending.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        yield


def doc(name: str) -> str:
    return f"system # # document {name} {'x' * 400} # # question"


def test_an_answer_comes_back_byte_for_byte_and_says_where_from(two):
    answer = two.send(ASK, {"model": "echo", "stream": True, "prompt": "hello"})
    body = answer.read()
    assert answer.status == 200
    assert body.startswith(b'data: {"number": 0}\n\n')
    assert body.endswith(b"data: [DONE]\n\n")
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["x-lmc-engine"] in [one.url for one in two.engines]
    assert answer.headers["x-lmc-expected-tokens"] == "0"


def test_a_request_reaches_the_engine_as_it_was_sent(two):
    body = b'{ "model":"echo",  "prompt": "\\u00e4 # # \xc3\xa4", "temperature": 1e-3 }'
    sent = {"x-request-id": "mine-1", "authorization": "Bearer of-the-client", "x-other": "kept"}
    answer = two.send("/v1/completions?debug=%2F1", body, sent)
    assert answer.headers["x-request-id"] == "mine-1"
    engine = next(one for one in two.engines if one.url == answer.headers["x-lmc-engine"])
    seen = engine.application.seen[-1]
    assert seen["body"] == body
    assert seen["query"] == b"debug=%2F1"
    assert sent.items() <= seen["headers"].items()
    assert seen["headers"]["host"] == f"127.0.0.1:{engine.port}"
    assert "accept" not in seen["headers"], "nothing is added"


def test_a_document_is_sent_to_the_engine_that_has_it(two):
    for name in "abcdef":
        where = {two.send(ASK, {"model": "echo", "prompt": doc(name)}).headers["x-lmc-engine"] for _ in range(4)}
        assert len(where) == 1
    answer = two.send(ASK, {"model": "echo", "prompt": doc("a")})
    assert int(answer.headers["x-lmc-expected-tokens"]) > 90


@pytest.mark.parametrize("status", [502, 503, 504])
def test_another_engine_is_asked_if_the_first_is_not_up(status):
    with house(2) as built:
        first = built.send(ASK, {"model": "echo", "prompt": doc("a")}).headers["x-lmc-engine"]
        broken = next(one for one in built.engines if one.url == first)
        broken.application.refusing = status
        answer = built.send(ASK, {"model": "echo", "prompt": doc("a")})
        assert answer.status == 200
        assert answer.headers["x-lmc-engine"] != first
        assert built.numbers("retries_total") == 1


def test_without_another_engine_the_client_gets_the_answer_of_the_last_one():
    """Earlier, the client got 502 without the engine's reason and Retry-After, and an unsent retry was counted."""

    class Busy(EchoEngine):
        async def __call__(self, scope, receive, send):
            async def send_later(message):
                headers = [*message.get("headers", ()), (b"retry-after", b"7")]
                await send({**message, "headers": headers} if "headers" in message else message)

            await super().__call__(scope, receive, send_later)

    with served(Busy()) as first, served(Busy()) as second, house(0) as built:
        for retries, engine in enumerate((first, second)):
            engine.application.refusing = 503
            built.router.application.engines.add(address(engine.url, ["echo"]))
            answer = built.send(ASK, {"model": "echo", "prompt": "x"})
            assert (answer.status, answer.headers["retry-after"]) == (503, "7")
            assert json.loads(answer.read()) == {"error": {"message": "as asked"}}
            assert built.numbers("retries_total") == retries
        assert sorted(engine.breaker.failures for engine in built.router.application.engines) == [1, 2]


def test_other_errors_of_an_engine_are_the_clients(two):
    before = sum(len(one.seen) for one in two.echoes)
    status, found = two.ask(ASK, {"model": "echo", "prompt": "x", "echo": {"status": 400}})
    assert (status, found) == (400, {"error": {"message": "as asked"}})
    assert two.ask(ASK, {"model": "echo", "prompt": "x", "echo": {"status": 500}})[0] == 500
    assert sum(len(one.seen) for one in two.echoes) == before + 2


def test_an_answer_that_breaks_off_breaks_off_for_the_client():
    with house(2) as built:
        answer = built.send(
            ASK, {"model": "echo", "stream": True, "prompt": "x", "echo": {"break_after": 2, "pause": 0.05}}
        )
        assert answer.status == 200
        with pytest.raises((HTTPException, OSError)):
            answer.read()
        assert sum(len(one.seen) for one in built.echoes) == 1, "what has begun is not asked for again"
        eventually(lambda: built.numbers("broken_answers_total") == 1)


def test_an_engine_stops_when_the_client_leaves():
    with house(2) as built:
        ask = {"model": "echo", "stream": True, "prompt": "x", "echo": {"parts": 1000, "pause": 0.05}}
        answer = built.send(ASK, ask)
        answer.read(10)
        answer.close()
        built.connections[-1].close()
        eventually(lambda: sum(one.aborted for one in built.echoes) == 1)
        eventually(lambda: built.numbers("clients_left_total") == 1)
        eventually(lambda: built.numbers("engine_requests") == 0)


def test_an_engine_stops_when_the_client_leaves_before_the_first_byte():
    with house(1) as built:
        with waiting(built, {"delay": 60}):
            eventually(lambda: built.numbers("engine_requests") == 1)
        eventually(lambda: built.echoes[0].aborted == 1)
        eventually(lambda: built.numbers("engine_requests") == 0)


def test_an_engine_that_keeps_failing_is_left_alone_and_tried_again():
    clock = Clock()
    with house(1, clock=clock, health_seconds=1000.0) as built:
        built.echoes[0].refusing = 503
        for _ in range(BREAKER_FAILURES):
            assert built.ask(ASK, {"model": "echo", "prompt": "x"})[0] == 503
        seen = len(built.echoes[0].seen)
        answer = built.send(ASK, {"model": "echo", "prompt": "x"})
        assert answer.status == 503
        assert answer.headers["retry-after"] == "1"
        assert len(built.echoes[0].seen) == seen, "it was not asked"
        built.echoes[0].refusing = 0
        clock.now += FIRST_BREAKER_SECONDS
        assert built.ask(ASK, {"model": "echo", "prompt": "x"})[0] == 200
        assert built.numbers("engine_breaker") == 0


def test_too_many_requests_are_told_to_come_back():
    with house(1, max_requests=1) as built:
        with waiting(built, {"delay": 60}):
            eventually(lambda: built.numbers("engine_requests") == 1)
            answer = built.send(ASK, {"model": "echo", "prompt": "x"})
            assert (answer.status, answer.headers["retry-after"]) == (429, "1")
            assert "in flight" in json.loads(answer.read())["error"]["message"]
        eventually(lambda: built.ask(ASK, {"model": "echo", "prompt": "x"})[0] == 200)


BAD = {
    "no JSON": (b"{", 400, "not valid JSON"),
    "no object": (b"[1]", 400, "must be a JSON object"),
    "no text": (b"\xff\xfe{}", 400, "not valid JSON"),
    "nested": (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", 400, ""),
    "model no text": (b'{"model": 3}', 400, "must be strings"),
    "another model": (b'{"model": "other"}', 404, "there are: echo"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_answered_and_not_sent_on(two, name):
    body, status, words = BAD[name]
    before = sum(len(one.seen) for one in two.echoes)
    answered, found = two.ask(ASK, body)
    assert answered == status
    assert words in found["error"]["message"]
    assert sum(len(one.seen) for one in two.echoes) == before
    assert two.ask(ASK, {"model": "echo", "prompt": "x"})[0] == 200, "the next one is answered"


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_that_is_too_large_is_refused_while_it_is_read(chunked):
    with house(1, max_body=1 << 16) as built:
        with socket.create_connection(("127.0.0.1", built.router.port), SECONDS) as sending:
            length = b"transfer-encoding: chunked" if chunked else b"content-length: 50000000"
            sending.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n" + length + b"\r\n\r\n")
            for _ in range(40 if chunked else 0):
                sending.sendall(b"1000\r\n" + b"x" * 0x1000 + b"\r\n")
            assert b" 413 " in sending.recv(4096).split(b"\r\n")[0]
        assert built.ask(ASK, {"model": "echo", "prompt": "x"})[0] == 200
        assert len(built.echoes[0].seen) == 1


@pytest.mark.parametrize("path", ["/v1/../metrics", "/v1//x", "/v1/%2e%2e/x", "/v2/completions", "//other/v1/x"])
def test_paths_that_are_no_api_are_not_sent_on(two, path):
    before = sum(len(one.seen) for one in two.echoes)
    status, found = two.ask(path, {"model": "echo", "prompt": "x"})
    assert (status, found["error"]["message"]) == (404, "the router has no POST " + path.replace("%2e", "."))
    assert sum(len(one.seen) for one in two.echoes) == before


SMUGGLED = (
    [b"x-request-id: a\x0b b"], [b"x: a\x00b"], [b"x: a\rb"], [b"x y: a"], [b"x: 1\r\n b"], [b"content-length: 3"],
    [b"transfer-encoding: identity"], [b"transfer-encoding: chunked"],
)  # fmt: skip


@pytest.mark.parametrize("lines", SMUGGLED)
def test_a_header_cannot_be_smuggled_in(two, lines):
    """Nor a second length, by which an engine would take a part of the body for another request."""
    before, body = sum(len(one.seen) for one in two.echoes), b'{"model":"echo","prompt":"x"}'
    head = [b"POST /v1/completions HTTP/1.1", b"host: x", *lines, b"content-length: %d" % len(body)]
    with socket.create_connection(("127.0.0.1", two.router.port), SECONDS) as sending:
        sending.sendall(b"\r\n".join([*head, b"", body]))
        assert sending.recv(4096).split(b" ")[1] == b"400"
    assert sum(len(one.seen) for one in two.echoes) == before


def test_the_key_of_engines_replaces_that_of_clients():
    with house(1, api_key="of-the-engines") as built:
        built.ask(ASK, {"model": "echo", "prompt": "x"}, {"authorization": "Bearer of-the-client"})
        assert built.echoes[0].seen[-1]["headers"]["authorization"] == "Bearer of-the-engines"


def test_models_of_all_engines_are_listed(two):
    status, found = two.ask("/v1/models")
    assert (status, [one["id"] for one in found["data"]]) == (200, ["echo"])


def test_engines_come_and_go_while_the_router_runs(two):
    with served(EchoEngine(("third",))) as third:
        assert two.ask(ASK, {"model": "third", "prompt": "x"})[0] == 404
        assert two.ask("/engines", {"url": third.url, "models": ["third"]})[0] == 201
        assert two.ask(ASK, {"model": "third", "prompt": "x"})[0] == 200
        assert two.ask("/engines/drain", {"url": third.url})[1]["engines"][0]["draining"] is True
        assert two.ask(ASK, {"model": "third", "prompt": "x"})[0] == 503
        assert two.ask("/engines/drain", {"url": third.url, "drain": False})[0] == 200
        assert two.ask(ASK, {"model": "third", "prompt": "x"})[0] == 200
        assert two.ask("/engines", {"url": third.url}, method="DELETE") == (200, {"removed": third.url})
        assert two.ask("/engines", {"url": third.url}, method="DELETE")[0] == 400
        assert two.ask("/engines", {"url": "ftp://x"})[0] == 400
        more = {"url": third.url, "cache": "shared", "admin": "127.0.0.1:1", "kv_events": "tcp://127.0.0.1:2"}
        found = two.ask("/engines", more)[1]["engines"][0]
        assert {name: found[name] for name in more} == more | {"admin": "http://127.0.0.1:1"}
        assert two.ask("/engines", {"url": third.url, "admin": 3})[0] == 400
        assert two.ask("/engines", {"url": third.url}, method="DELETE")[0] == 200


def test_an_engine_that_went_down_is_found_again_and_its_memory_is_taken_for_empty():
    with house(1, health_seconds=0.1) as built:
        built.ask(ASK, {"model": "echo", "prompt": doc("a")})
        again = {"model": "echo", "prompt": doc("a")}
        assert int(built.send(ASK, again).headers["x-lmc-expected-tokens"]) > 0
        engine = built.engines[0]
        built.router.call(stop(engine))
        eventually(lambda: built.ask("/ready")[0] == 503)
        with served(EchoEngine(), port=engine.port):
            eventually(lambda: built.ask("/ready")[0] == 200)
            assert built.send(ASK, again).headers["x-lmc-expected-tokens"] == "0"


async def stop(engine) -> None:
    engine.server.should_exit = engine.server.force_exit = True


def test_administration_wants_its_token():
    with house(1, admin_token="secret", open_admin=False) as built:
        for path, method in (
            ("/engines", "GET"),
            ("/engines", "POST"),
            ("/lmc/explain", "POST"),
            ("/lmc/learn", "POST"),
        ):
            assert built.ask(path, {} if method == "POST" else None, method=method)[0] == 401
        assert built.ask("/engines", headers={"authorization": "Bearer secret"})[0] == 200
        assert [built.send(path).status for path in ("/health", "/ready", "/metrics", "/v1/models")] == [200] * 4
        assert built.ask(ASK, {"model": "echo", "prompt": "x"})[0] == 200
    with house(1, open_admin=False) as built:
        status, found = built.ask("/engines", headers={"host": "localhost"})
        assert (status, "needs LMC_ADMIN_TOKEN" in found["error"]["message"]) == (403, True)


def test_lmc_top_shows_what_each_engine_does(two):
    two.ask(
        ASK,
        {
            "model": "echo",
            "prompt": doc("top"),
            "echo": {"usage": {"prompt_tokens": 7, "prompt_tokens_details": {"cached_tokens": 5}}},
        },
    )
    console = Console(file=io.StringIO(), width=200)
    top(complete(f"127.0.0.1:{two.router.port}"), 1.0, True, console)
    lines = {line[:24].strip(): line[24:].split() for line in console.file.getvalue().splitlines()}
    assert all(one.url in console.file.getvalue() for one in two.engines)
    assert int(lines["requests"][0].replace(",", "")) == sum(map(int, lines["requests"][1:])) > 0
    assert lines["usable (now)"] == ["yes", "yes"]
    assert int(lines["tokens reported reused"][0]) >= 5


def test_an_explanation_shows_what_each_engine_would_do(two):
    where = two.send(ASK, {"model": "echo", "prompt": doc("z")}).headers["x-lmc-engine"]
    status, found = two.ask("/lmc/explain", {"model": "echo", "prompt": doc("z")})
    assert (status, found["engine"], found["why"]) == (200, where, "documents")
    by_engine = {one["engine"]: one for one in found["engines"]}
    assert by_engine[where]["documents"] == 1
    assert [one["documents"] for name, one in by_engine.items() if name != where] == [0]


@pytest.mark.parametrize(
    "policy", ["prefix_hash_trie", "cache_aware", "block_hash", "approx_lru", "precise", "documents"]
)
def test_an_explanation_has_a_score_of_each_engine(policy):
    with house(2, policy) as built:
        ask = {"model": "echo", "prompt": "x" * 2000}
        where = built.send(ASK, ask).headers["x-lmc-engine"]
        scores = {one["engine"]: one["score"] for one in built.ask("/lmc/explain", ask)[1]["engines"]}
        if policy == "precise":  # No engine has said anything.
            assert set(scores.values()) == {0}
        else:
            assert scores.pop(where) > 0
            assert set(scores.values()) == {0}


def test_an_explanation_has_the_exact_tokens_if_requests_have():
    ask = {"model": "echo", "prompt": "x" * 100}
    for exact, tokens in ((True, 100), (False, 25)):
        with house(1, exact_tokens=exact) as built:
            assert built.ask("/lmc/explain", ask)[1]["prompt"] == {"tokens": tokens, "exact": exact}
            assert len(built.echoes[0].seen) == exact


def test_no_engine_is_asked_for_the_tokens_of_a_prompt_that_none_takes():
    """Writing 22 MB of JSON for the question held up all other requests."""
    with house(1, exact_tokens=True) as built:
        ask = {"model": "echo", "prompt": "x" * (MAX_CHARACTERS + 1)}
        assert built.ask("/lmc/explain", ask)[1]["prompt"] == {"tokens": MAX_CHARACTERS // 4, "exact": False}
        assert not built.echoes[0].seen


def test_texts_are_learned_where_they_will_be_looked_for(two):
    status, found = two.ask(
        "/lmc/learn", {"texts": [f"text {'y' * 400}", f"other {'w' * 400}"], "cache_salt": "tenant"}
    )
    assert status == 200
    for text, placed in zip((f"text {'y' * 400}", f"other {'w' * 400}"), found["placed"], strict=True):
        ask = {"model": "echo", "prompt": f"s # # {text} # # q", "cache_salt": "tenant"}
        assert two.send(ASK, ask).headers["x-lmc-engine"] == placed["engine"]
    assert two.ask("/lmc/learn", {"texts": "x"})[0] == 400
    sent = [json.loads(seen["body"]) for one in two.echoes for seen in one.seen]
    assert any(one.get("kv_transfer_params") == {"lmc": {"learn": True}} for one in sent)


def test_prompts_are_cut_by_their_tokens_if_that_is_wanted():
    with house(2, exact_tokens=True) as built:
        built.router.application.policy.cutter.markers["echo"] = Markers(separators=(tuple(map(ord, " # # ")),))
        ask = {"model": "echo", "prompt": f"s # # {'d' * 100} # # q"}
        built.send(ASK, ask)
        answer = built.send(ASK, ask)
        assert int(answer.headers["x-lmc-expected-tokens"]) == 100, "a letter is a token of this engine"
        for one in built.echoes:
            one.refusing = 500
        assert built.ask(ASK, ask)[0] == 500, "the prompt is cut by its text if no engine says its tokens"


def test_tenants_are_kept_apart(two):
    ask = {"model": "echo", "prompt": doc("of one tenant"), "cache_salt": "a"}
    two.send(ASK, ask)
    assert int(two.send(ASK, ask).headers["x-lmc-expected-tokens"]) > 0
    assert two.send(ASK, {**ask, "cache_salt": "b"}).headers["x-lmc-expected-tokens"] == "0"
    assert two.send(ASK, {**ask, "cache_salt": ""}).headers["x-lmc-expected-tokens"] == "0"


def test_a_slow_client_holds_up_nobody_and_no_memory(two):
    with waiting(two, {"parts": 200_000}):
        began = time.monotonic()
        for _ in range(20):
            assert two.ask(ASK, {"model": "echo", "prompt": "x"})[0] == 200
        assert time.monotonic() - began < SECONDS
    eventually(lambda: two.numbers("engine_requests") == 0)
