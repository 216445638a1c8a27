"""Headers and errors of the router: what is meant for one connection ends there, and every error is answered."""

import json
import socket

import pytest
from echo_engine import EchoEngine, respond
from router_house import SECONDS, house, served
from storage_fakes import eventually

from lmc.router.client import read_headers, sent_back, sent_on

ASK = "/v1/completions"


@pytest.fixture(scope="module")
def one():
    with house(1) as built:
        yield built


def raw(built, *headers: bytes) -> tuple[int, bytes]:
    """Send a request with such headers, and return the status and the headers of the answer."""
    body = b'{"model":"echo","prompt":"x"}'
    with socket.create_connection(("127.0.0.1", built.router.port), SECONDS) as sending:
        lines = [b"POST /v1/completions HTTP/1.1", b"host: x", *headers, b"content-length: %d" % len(body), b"", body]
        sending.sendall(b"\r\n".join(lines))
        head = sending.recv(65536).partition(b"\r\n\r\n")[0]
    return int(head.split()[1]), head.lower()


def test_headers_that_connection_names_end_at_the_router(one):
    status, _ = raw(one, b"Connection: keep-alive, X-Hop", b"X-Hop: secret", b"X-Kept: yes", b"proxy-connection: x")
    seen = one.echoes[0].seen[-1]["headers"]
    assert status == 200
    assert seen["x-kept"] == "yes"
    assert not {"x-hop", "proxy-connection"} & seen.keys()
    answered = sent_back([(b"Connection", b"x-hop"), (b"X-Hop", b"1"), (b"X-Kept", b"1")], "id", "http://a", 0.4)
    assert answered == [
        (b"x-kept", b"1"), (b"x-request-id", b"id"), (b"x-lmc-engine", b"http://a"), (b"x-lmc-expected-tokens", b"0"),
    ]  # fmt: skip


@pytest.mark.parametrize("value", ["schön".encode(), "schön".encode("latin-1"), b"\xff\xfe", "日本".encode()])
def test_headers_that_are_not_ascii_go_on(one, value):
    status, _ = raw(one, b"X-Name: " + value, b"X-Session-Id: " + value)
    assert status == 200
    seen = one.echoes[0].seen[-1]["headers"]["x-name"]
    assert seen == read_headers([(b"x-name", value)])[0][1]
    if value == "schön".encode():
        assert seen.encode() == value, "byte for byte"


def test_a_request_has_one_id(one):
    _, head = raw(one, b"X-Request-Id: first", b"X-Request-Id: second")
    assert head.count(b"x-request-id") == 1
    assert b"x-request-id: first" in head
    headers = sent_on([("x-request-id", "a"), ("x-request-id", "b")], {})
    assert headers.getall("x-request-id") == ["a"]
    for odd in ("a b", "ä", "x" * 200, ""):
        (made,) = sent_on([("x-request-id", odd)], {}).getall("x-request-id")
        assert made.isalnum()
        assert made != odd
    answered = sent_back([(b"X-Request-Id", b"of the engine")], "mine", "http://a", 0)
    assert [value for name, value in answered if name == b"x-request-id"] == [b"mine"]


@pytest.mark.parametrize("path", [ASK, "/lmc/explain"])
def test_what_nobody_expected_is_answered_and_logged(path, caplog):
    with house(1) as built:

        def choose(*_):
            raise ZeroDivisionError("nobody has thought of this")

        built.router.application.policy.choose = choose
        status, found = built.ask(path, {"model": "echo", "prompt": "x"})
        assert status == 500
        assert "log" in json.dumps(found)
        assert "nobody has thought of this" in caplog.text
        assert "Traceback" in caplog.text
        eventually(lambda: built.router.application.proxy.answering == 0)


def test_a_model_that_nobody_has_is_answered_as_vllm_does(one):
    status, found = one.ask(ASK, {"model": "other", "prompt": "x"})
    error = found["error"]
    assert (status, error["type"], error["param"], error["code"]) == (404, "NotFoundError", "model", 404)
    assert error["message"].startswith("The model `other` does not exist")


def test_a_model_is_not_called_unknown_while_an_engine_has_not_said_its_models():
    class Slow(EchoEngine):
        async def __call__(self, scope, receive, send):
            if scope.get("path") == "/v1/models":
                await respond(send, 500, b"{}")
            else:
                await super().__call__(scope, receive, send)

    with house(1) as built, served(Slow()) as slow:
        built.ask("/engines", {"url": slow.url})
        assert built.ask(ASK, {"model": "other", "prompt": "x"})[0] == 200, "it may have it"
        built.ask("/engines/drain", {"url": slow.url})
        assert built.ask(ASK, {"model": "other", "prompt": "x"})[0] == 503


def test_an_adapter_that_is_loaded_later_becomes_known():
    with house(1, health_seconds=0.1) as built:
        assert built.ask(ASK, {"model": "adapter", "prompt": "x"})[0] == 404
        built.echoes[0].models = ("echo", "adapter")
        eventually(lambda: built.ask(ASK, {"model": "adapter", "prompt": "x"})[0] == 200)
        built.echoes[0].models = ("echo",)
        eventually(lambda: built.ask(ASK, {"model": "adapter", "prompt": "x"})[0] == 404)
