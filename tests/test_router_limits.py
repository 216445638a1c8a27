"""What one client may take of the router: memory, time and files have limits, and nobody else waits for it."""

import asyncio
import json
import resource
import socket
import time
from contextlib import closing, contextmanager, suppress
from http.client import HTTPResponse
from types import SimpleNamespace

import pytest
from router_house import SECONDS, house, served
from storage_fakes import eventually
from uvicorn.config import WS_PROTOCOLS

from lmc.errors import ConfigError
from lmc.http import timeouts
from lmc.router import client
from lmc.router.connections import HEAD_BYTES, SPARE_FILES, allow_files, bounded_protocol

ASK = "/v1/completions"
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"


@contextmanager
def connected(built):
    with socket.create_connection(("127.0.0.1", built.router.port), SECONDS) as one:
        yield one


def said(connection) -> bytes:
    """All that comes until the connection is closed."""
    parts = []
    try:
        while part := connection.recv(65536):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


def short_once_answered(monkeypatch, seconds: float) -> None:
    """Shorten the timeout of heads when an answer begins, so that a slow machine cannot reach it before."""
    begin = client.Client.begin

    async def begin_and_shorten(self, status, headers):
        monkeypatch.setattr(timeouts, "HEAD_SECONDS", seconds)
        await begin(self, status, headers)

    monkeypatch.setattr(client.Client, "begin", begin_and_shorten)


def test_an_upload_that_stalls_ends(monkeypatch):
    """A thousand clients that sent a head and a byte held all places of the router for ever."""
    with house(1, max_requests=1) as built, connected(built) as stalled:
        stalled.sendall(HEAD + b"content-length: 100\r\n\r\n{")
        eventually(lambda: built.router.application.proxy.answering == 1)
        assert built.ask(ASK, {"model": "echo", "prompt": "x"})[0] == 429
        monkeypatch.setattr(client, "UPLOAD_SECONDS", 0.2)
        stalled.sendall(b'"')  # The timeout is computed again at each part.
        assert stalled.recv(4096).startswith(b"HTTP/1.1 408")
        eventually(lambda: built.ask(ASK, {"model": "echo", "prompt": "x"})[0] == 200)
        assert len(built.echoes[0].seen) == 1


def test_an_upload_that_goes_on_may_take_longer(monkeypatch):
    monkeypatch.setattr(client, "UPLOAD_SECONDS", 0.3)
    monkeypatch.setattr(client, "UPLOAD_RATE", 10 / SECONDS)  # Ten bytes extend the timeout by this long.
    body = b'{"model":"echo","prompt":"x"}'
    with house(1) as built, connected(built) as slow:
        slow.sendall(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body[:10])
        for part in (body[10:20], body[20:]):
            time.sleep(0.4)
            slow.sendall(part)
        assert slow.recv(4096).startswith(b"HTTP/1.1 200")


def test_all_bodies_together_have_a_limit():
    with house(1, max_held=1000) as built:
        large = {"model": "echo", "prompt": "x" * 900, "echo": {"delay": 60}}
        with connected(built) as waiting:
            body = json.dumps(large).encode()
            waiting.sendall(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
            eventually(lambda: built.numbers("engine_requests") == 1)
            answer = built.send(ASK, {"model": "echo", "prompt": "x" * 500})
            assert (answer.status, answer.headers["retry-after"]) == (503, "1")
            assert built.ask(ASK, {"model": "echo", "prompt": "x"})[0] == 200, "a small one has room"
        eventually(lambda: built.ask(ASK, {"model": "echo", "prompt": "x" * 900})[0] == 200)


@pytest.mark.parametrize("endless", [b"x-long: " + b"x" * 8 * HEAD_BYTES, b"a: b\r\n" * HEAD_BYTES])
def test_a_head_without_an_end_is_refused(endless):
    with house(1) as built, connected(built) as one:
        try:
            one.sendall(HEAD + endless)
        except OSError:
            return
        answered = said(one)
        assert not answered or answered.startswith(b"HTTP/1.1 431")
        assert built.ask(ASK, {"model": "echo", "prompt": "x"})[0] == 200


@pytest.mark.parametrize("endless", [b"x-long: " + b"x" * 8 * HEAD_BYTES, b"a: b\r\n" * HEAD_BYTES])
def test_trailers_without_an_end_are_refused(endless):
    """Earlier, trailers had no limit, and 90 MB of them stopped the router for half a minute."""
    with house(1) as built, connected(built) as one:
        one.sendall(HEAD + b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\n0\r\n")
        with suppress(OSError):
            one.sendall(endless)
            answered = said(one)
            assert not answered or answered.startswith(b"HTTP/1.1 431")
            assert not answered or b"invalid_request_error" in answered
        eventually(lambda: not built.router.application.proxy.answering)


UPGRADE = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAAP__\r\n"


@pytest.mark.parametrize("length", [b"content-length: %d\r\n\r\n", b"transfer-encoding: chunked\r\n\r\n%x\r\n"])
def test_the_body_of_a_request_for_an_upgrade_is_not_taken_for_another_request(length):
    """Java's client requests HTTP/2 so. The error was that of an empty body, and the body was answered, too."""
    body = b"GET /engines HTTP/1.1\r\nhost: localhost\r\n\r\n"
    with house(1) as built, connected(built) as one:
        one.sendall(HEAD + UPGRADE + length % len(body))
        answered = one.recv(4096)
        assert answered.startswith(b"HTTP/1.1 400")
        assert b"HttpClient.Version.HTTP_1_1" in answered
        one.sendall(body)
        one.shutdown(socket.SHUT_WR)
        assert said(one) == b""


def test_a_request_for_an_upgrade_without_a_body_is_answered_as_any_other():
    with house(1) as built, connected(built) as one:
        for _ in range(2):
            one.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n" + UPGRADE + b"\r\n")
            with closing(HTTPResponse(one)) as answer:
                answer.begin()
                assert (answer.status, answer.read()) == (200, b'{"status":"ok"}')


class WebSockets(asyncio.Protocol):
    """uvicorn's protocol for WebSockets, of which this process may have no library."""

    def __init__(self, **_: object) -> None:
        raise RuntimeError("the connection was upgraded")


@pytest.mark.parametrize(("path", "status"), [(b"/v1/realtime", b"404"), (b"/v1/completions", b"405")])
def test_a_request_for_a_websocket_is_refused_as_any_other(path, status, monkeypatch):
    """With a library for WebSockets, it was an internal error without a word."""
    monkeypatch.setitem(WS_PROTOCOLS, "auto", f"{__name__}:{WebSockets.__name__}")
    with house(1) as built, connected(built) as one:
        head = b"GET %s HTTP/1.1\r\nhost: x\r\nconnection: Upgrade\r\nupgrade: websocket\r\n" % path
        one.sendall(head + b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\nsec-websocket-version: 13\r\n\r\n")
        assert one.recv(4096).startswith(b"HTTP/1.1 " + status)


def test_trailers_are_not_headers():
    body = b'{"model":"echo","prompt":"x"}'
    with house(1) as built, connected(built) as one:
        one.sendall(HEAD + b"transfer-encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\nx-own: 1\r\n\r\n" % (len(body), body))
        assert one.recv(4096).startswith(b"HTTP/1.1 200")
        assert "x-own" not in built.echoes[0].seen[0]["headers"]


def test_a_whole_head_is_refused_if_its_headers_are_too_large():
    """A head that arrived in one piece could be as large as this piece."""
    with house(1) as built:
        body = json.dumps({"model": "echo", "prompt": "x" * HEAD_BYTES}).encode()
        for header, content, status in ((HEAD_BYTES // 2, body, b"200"), (HEAD_BYTES, b"", b"431")):
            with connected(built) as one:
                lines = b"x-long: %s\r\ncontent-length: %d\r\n\r\n" % (b"x" * header, len(content))
                one.sendall(HEAD + lines + content)
                assert one.recv(4096).startswith(b"HTTP/1.1 " + status)


@pytest.mark.parametrize(
    "begun", [b"", HEAD, HEAD + b"content-length: 29\r\n\r\n" + b'{"model":"echo","prompt":"x"}' + HEAD]
)
def test_a_head_that_does_not_come_ends_the_connection(begun, monkeypatch):
    requests = begun.count(b"content-length")
    if requests:
        short_once_answered(monkeypatch, 0.3)
    else:
        monkeypatch.setattr(timeouts, "HEAD_SECONDS", 0.3)
    with house(1) as built, connected(built) as silent:
        silent.sendall(begun)
        assert said(silent).count(b"HTTP/1.1 200") == requests


@pytest.mark.parametrize(
    ("header", "sent", "status"),
    [
        (b"", b"", 401),
        (b"authorization: Bearer one\r\n", b"{", 408),
        (b"authorization: Bearer one\r\n", b"x" * 2000, 413),
    ],
)
def test_a_connection_is_closed_if_its_body_goes_on_after_a_refusal(header, sent, status, monkeypatch):
    """One byte more stopped the only timeout that such a connection had."""
    short_once_answered(monkeypatch, 0.3)
    if status == 408:
        monkeypatch.setattr(client, "UPLOAD_SECONDS", 0.2)
    with house(1, client_tokens=frozenset({"one"}), max_body=1000) as built, connected(built) as refused:
        refused.sendall(HEAD + header + b"transfer-encoding: chunked\r\n\r\n%x\r\n" % (4 * HEAD_BYTES) + sent)
        assert refused.recv(4096).startswith(b"HTTP/1.1 %d" % status)
        refused.sendall(b"x")
        assert b"HTTP/1.1" not in said(refused), "the body is not a head"


def test_a_refused_body_may_end_and_another_request_follow():
    with house(1, client_tokens=frozenset({"one"})) as built, connected(built) as refused:
        refused.sendall(HEAD + b"content-length: %d\r\n\r\n" % (4 * HEAD_BYTES))
        statuses = []
        for more in (b"x" * 4 * HEAD_BYTES + b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n", b""):
            with closing(HTTPResponse(refused)) as answer:
                answer.begin()
                answer.read()
                statuses.append(answer.status)
            refused.sendall(more)
        assert statuses == [401, 200]


@pytest.mark.parametrize("ends", [True, False])
def test_a_client_that_reads_nothing_is_disconnected(ends, monkeypatch):
    """The end of an answer, and an error, were sent without a timeout, and a closed connection kept its buffer."""
    returned = []

    async def answer(scope, receive, send):
        monkeypatch.setattr(timeouts, "HEAD_SECONDS", 0.2)  # not before, or the request itself may be too late
        monkeypatch.setattr(timeouts, "UNREAD_SECONDS", 0.2)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": bytes(16 << 20), "more_body": not ends})
        if not ends:
            await send({"type": "http.response.body", "body": b""})
        returned.append(scope["path"])

    with served(answer, http=bounded_protocol()) as server, socket.socket() as unread:
        unread.connect(("127.0.0.1", server.port))
        unread.sendall(b"GET /large HTTP/1.1\r\nhost: x\r\n\r\n")
        eventually(lambda: returned == ["/large"])
        eventually(lambda: not server.server.server_state.connections)


def test_a_client_that_reads_slowly_is_not_disconnected():
    """The last part of a long listing may take some minutes."""
    calls, aborted, unread = [], [], [3 * timeouts.UNREAD_BYTES]

    connection = timeouts.TimedConnection()
    connection.loop = SimpleNamespace(call_later=lambda seconds, call, *given: calls.append((call, given)))
    connection.transport = SimpleNamespace(
        get_write_buffer_size=lambda: unread[0], abort=lambda: aborted.append(unread[0])
    )
    connection.pause_writing()
    for size in (2 * timeouts.UNREAD_BYTES, timeouts.UNREAD_BYTES, timeouts.UNREAD_BYTES):
        unread[0] = size
        call, given = calls.pop()
        call(*given)
        assert bool(aborted) != bool(calls)
    assert aborted == [timeouts.UNREAD_BYTES], "it has read nothing since the time before"


def test_a_body_that_is_larger_than_a_head_may_be_is_none_of_its_bytes():
    with house(1) as built:
        for _ in range(2):
            assert built.ask(ASK, {"model": "echo", "prompt": "x" * 4 * HEAD_BYTES})[0] == 200


def test_the_limit_of_open_files_is_raised_or_the_router_says_what_to_do(monkeypatch):
    limits = [(256, 4096)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, given: limits.append(given))
    allow_files(1000)
    assert limits[-1] == (4096, 4096)
    limits.append((10_000, resource.RLIM_INFINITY))
    allow_files(1000)
    assert len(limits) == 3, "it is enough"
    limits.append((256, 1024))
    with pytest.raises(ConfigError, match="use --max-requests 384"):
        allow_files(1000)
    allow_files((1024 - SPARE_FILES) // 2)
