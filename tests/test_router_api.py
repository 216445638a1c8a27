"""The router offers what an engine offers: its models, version and pings, pages of other origins, and its errors."""

import json
import socket
from contextlib import contextmanager

import pytest
from echo_engine import EchoEngine
from router_house import SECONDS, house, served
from starlette.middleware.cors import CORSMiddleware
from storage_fakes import eventually

from lmc.router import client
from lmc.router.engines import address
from lmc.router.requests import COMPUTING

ASK, CHAT = "/v1/completions", "/v1/chat/completions"
PAGE = "https://page.example"
PROMPT = {"model": "echo", "prompt": "x"}


@pytest.fixture(scope="module")
def one():
    with house(1) as built:
        yield built


# -- models, version and pings ----------------------------------------------------------------------------------------


def test_models_are_listed_as_an_engine_lists_them():
    with house(1, health_seconds=0.1) as built:
        card = {"object": "model", "created": 5, "owned_by": "vllm", "root": "/models/x", "parent": None,
                "max_model_len": 4096, "permission": [{"id": "modelperm-1"}]}  # fmt: skip
        built.echoes[0].card, built.echoes[0].models = card, ("zebra", "adapter")
        listing = [{"id": name, **card} for name in ("zebra", "adapter")]
        eventually(lambda: built.ask("/v1/models") == (200, {"object": "list", "data": listing}))


def test_a_model_of_two_engines_is_listed_once_with_the_length_that_both_take():
    with house(2, health_seconds=0.1) as built:
        first, second = built.echoes
        first.card, second.card = {"max_model_len": 4096, "root": "a"}, {"max_model_len": 2048, "root": "b"}
        second.models = ("echo", "other")
        expected = [("echo", 2048, "a"), ("other", 2048, "b")]

        def listing() -> list[tuple[str, int, str]]:
            models = built.ask("/v1/models")[1]["data"]
            return [(model["id"], model.get("max_model_len"), model.get("root")) for model in models]

        eventually(lambda: listing() == expected)
        second.healthy = False
        eventually(lambda: listing() == [("echo", 4096, "a")])


def test_models_that_the_settings_name_are_listed_as_the_engine_lists_them():
    with house(0, health_seconds=0.1) as built, served(EchoEngine(("echo", "other"))) as engine:
        engine.application.card = {"max_model_len": 8}
        built.router.application.engines.add(address(engine.url, ["echo", "alias"]))

        def listing() -> dict[str, int | None]:
            return {model["id"]: model.get("max_model_len") for model in built.ask("/v1/models")[1]["data"]}

        eventually(lambda: listing() == {"echo": 8, "alias": None})


def test_the_version_is_that_of_an_engine(one):
    assert one.ask("/version") == (200, {"version": "0.32.0"})
    with house(0) as built:
        assert is_error(built, 503, "/version")


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_ping_is_answered_while_an_engine_is_usable(method):
    with house(1, health_seconds=0.1) as built:
        answer = built.send("/ping", method=method)
        assert (answer.status, answer.read()) == (200, b"")
        built.echoes[0].healthy = False
        eventually(lambda: built.send("/ping", method=method).status == 503)


def test_version_and_pings_need_no_token_as_in_vllm():
    with house(1, client_tokens=frozenset(("first",))) as built:
        assert [built.send(path).status for path in ("/version", "/ping", "/v1/models")] == [200, 200, 401]


# -- paths and bodies -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [ASK, CHAT, "/v1/embeddings", "/v1/responses/render", "/cohere/v2/chat"])
def test_a_slash_at_the_end_of_a_path_does_not_matter(one, path):
    assert path in COMPUTING
    assert one.ask(f"{path}/?debug=1", PROMPT)[0] == 200
    assert (one.echoes[0].seen[-1]["path"], one.echoes[0].seen[-1]["query"]) == (path, b"debug=1")
    assert one.ask("/v1/models/") == one.ask("/v1/models")
    assert one.ask("/engines/") == one.ask("/engines")
    assert one.ask(f"{path}%2F", PROMPT)[0] == one.ask(f"{path}//", PROMPT)[0] == 404


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_a_body_may_have_a_byte_order_mark_and_each_encoding_of_json(one, encoding):
    """PowerShell and .NET write such bodies, which the router called invalid JSON and vLLM reads."""
    body = json.dumps(PROMPT | {"user": "Ωmega 😀"}, ensure_ascii=False).encode(encoding)
    assert json.loads(body), "vLLM reads it so"
    assert one.ask(ASK, body)[0] == 200
    assert one.echoes[0].seen[-1]["body"] == body
    assert one.ask("/lmc/explain", body)[0] == 200


@pytest.mark.parametrize("body", [b"\xff\xfe{\x00", b"\xff\xfe\x00\xd8{\x00", b"\xff\xfe{", b"\x00\x00"])
def test_a_body_that_is_cut_in_its_encoding_is_refused(one, body):
    code, said = one.ask(ASK, body)
    assert (code, "request body is not valid JSON" in json.dumps(said)) == (400, True)


# -- web pages of other origins ---------------------------------------------------------------------------------------


@contextmanager
def before_pages(**settings):
    """A router before an engine that allows web pages of one origin."""
    engine = CORSMiddleware(EchoEngine(), allow_origins=[PAGE], allow_methods=["*"], allow_headers=["*"])
    with served(engine) as allowing, house(0, **settings) as built:
        added = built.router.application.engines.add(address(allowing.url, ["echo"]))
        added.healthy = True
        yield built


def preflight(built, path: str, origin: str = PAGE, **headers: str):
    given = {"origin": origin, "access-control-request-method": "POST", **headers}
    return built.send(path, headers=given, method="OPTIONS")


@pytest.mark.parametrize("path", [ASK, f"{CHAT}/", "/v1/models"])
def test_a_page_may_send_what_the_engine_allows(path):
    with before_pages(client_tokens=frozenset(("first",))) as built:
        answer = preflight(built, path, **{"access-control-request-headers": "authorization,content-type"})
        assert answer.status == 200
        assert answer.headers["access-control-allow-origin"] == PAGE
        assert answer.headers["access-control-allow-headers"] == "authorization,content-type"
        assert "POST" in answer.headers["access-control-allow-methods"]
        refused = preflight(built, path, "https://other.example")
        assert refused.status == 400
        assert "access-control-allow-origin" not in refused.headers


def test_a_token_in_a_preflight_ends_at_the_router():
    """Browsers send none there, and the router does not check it."""
    with house(1, client_tokens=frozenset(("first",))) as built:
        assert preflight(built, ASK, authorization="Bearer first").status == 200
        assert "authorization" not in built.echoes[0].seen[-1]["headers"]


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [(ASK, PROMPT, 200), ("/v1/models", None, 200), (ASK, b"{", 400), (ASK, None, 405), ("/v1/none", None, 404)],
)
def test_a_page_may_read_answers_and_errors_if_the_engine_allows_it(path, body, status):
    with before_pages() as built:
        for origin in (PAGE, "https://other.example", PAGE):
            answer = built.send(path, body, {"origin": origin})
            allowed = answer.headers.get_all("access-control-allow-origin")
            assert (answer.status, allowed) == (status, [PAGE] if origin == PAGE else None)


def test_no_page_may_administer_the_router():
    with before_pages() as built:
        assert preflight(built, "/engines").status == 405
        assert "access-control-allow-origin" not in built.send("/engines", headers={"origin": PAGE}).headers


def test_a_preflight_without_an_engine_is_an_error():
    with house(0) as built:
        assert preflight(built, ASK).status == 503
        assert preflight(built, "/v1/load_lora_adapter").status == 404


# -- errors -----------------------------------------------------------------------------------------------------------


def is_error(built, status: int, path: str, body=None, headers=None, method=None) -> bool:
    """Whether an answer has a status and OpenAI's error object."""
    answered, found = built.ask(path, body, headers, method)
    error = found["error"]
    assert isinstance(error["message"], str)
    assert isinstance(error["type"], str)
    assert error.keys() == {"message", "type", "param", "code"}
    assert (answered, error["code"]) == (status, status)
    return True


@pytest.mark.parametrize(
    ("status", "path", "body", "method"),
    [
        (404, "/v1/none", None, "GET"), (404, "/v1/none", {}, "POST"), (404, "/lmc/none", None, "GET"),
        (405, ASK, None, "GET"), (405, ASK, None, "OPTIONS"), (405, "/health", {}, "POST"),
        (405, "/engines", {}, "PATCH"), (405, "/v1/responses/resp_1", {}, "PUT"), (400, ASK, b"{", "POST"),
        (400, "/lmc/explain", b"{", "POST"), (400, "/engines", {"url": "x"}, "POST"),
        (400, "/engines", {"url": "http://[::1"}, "POST"),
        (400, "/engines", {"url": "http://a", "admin": "[::1"}, "POST"),
        (404, ASK, {"model": "no"}, "POST"), (413, ASK, b"x" * (1 << 17), "POST"),
        (413, "/engines", b"x" * (17 << 20), "POST"),
    ],
)  # fmt: skip
def test_every_error_is_an_error_of_openai(status, path, body, method):
    with house(1, max_body=1 << 16) as built:
        assert is_error(built, status, path, body, method=method)


def test_the_path_of_an_error_is_named_also_if_it_is_only_a_slash(one):
    assert one.ask("/")[1]["error"]["message"] == "the router has no GET /"


def test_a_path_with_another_method_names_the_methods_that_it_takes(one):
    assert one.send(ASK, method="DELETE").headers["allow"] == "POST"
    assert one.send("/v1/responses/resp_1", method="PUT").headers["allow"] == "GET, POST, DELETE"
    assert "GET" in one.send("/health", {}).headers["allow"]


def test_errors_of_administration_are_errors_of_openai():
    with house(1, admin_token="secret", open_admin=False) as built:
        assert is_error(built, 401, "/engines")
        assert is_error(built, 401, "/lmc/explain", {})
    with house(1, open_admin=False) as built:
        assert is_error(built, 403, "/engines")


def raw(built, sent: bytes) -> tuple[int, dict]:
    with socket.create_connection(("127.0.0.1", built.router.port), SECONDS) as connection:
        connection.sendall(sent)
        parts = []
        while part := connection.recv(65536):
            parts.append(part)
    head, _, body = b"".join(parts).partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)


def test_errors_of_connections_are_errors_of_openai(one, monkeypatch):
    monkeypatch.setattr(client, "UPLOAD_SECONDS", 0.1)
    slow = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 9\r\n\r\n{"
    for status, sent in ((408, slow), (400, b"not HTTP\r\n\r\n")):
        answered, found = raw(one, sent)
        assert (answered, found["error"]["code"]) == (status, status)
