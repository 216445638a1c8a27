"""Who may ask the router what: tokens of clients, paths that are sent on, responses that one engine has, and forms."""

import json
import re
import socket
import timeit
import tomllib
from pathlib import Path

import pytest
from router_house import house

from lmc.router.engines import address
from lmc.router.forms import MAX_FIELD_BYTES, MAX_PART_HEADER_BYTES, read_form
from lmc.router.requests import MAX_RESPONSES, ResponseHomes, read, response_of
from lmc.router.settings import RouterSettings

ASK = "/v1/completions"
ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def two():
    with house(2) as built:
        yield built


# -- who may ask ------------------------------------------------------------------------------------------------------


def test_clients_have_tokens_of_their_own_which_no_engine_sees():
    with house(1, client_tokens=frozenset(("first", "second"))) as built:
        asked = {"model": "echo", "prompt": "x"}
        for given in ({}, {"authorization": "Bearer third"}, {"authorization": "Basic first"}, {"authorization": "é"}):
            for path, body in ((ASK, asked), ("/v1/models", None), ("/v1/responses/resp_1", None)):
                status, found = built.ask(path, body, given)
                assert (status, found["error"]["type"]) == (401, "authentication_error")
        assert not built.echoes[0].seen
        for token in ("first", "second"):
            assert built.ask(ASK, asked, {"authorization": f"Bearer {token}"})[0] == 200
            assert built.ask("/v1/models", headers={"authorization": f"bearer {token}"})[0] == 200
        assert all("authorization" not in seen["headers"] for seen in built.echoes[0].seen)
        assert {built.send(path).status for path in ("/health", "/ready")} == {200}


@pytest.mark.parametrize(
    "settings",
    [
        {"client_tokens": frozenset(("first",))},
        {"admin_token": "secret", "open_admin": False},
        {"client_tokens": frozenset(("first",)), "admin_token": "secret"},
    ],
    ids=["clients", "administration", "both"],
)
def test_clients_do_not_get_to_know_the_addresses_of_engines(settings):
    """Each answer named the address of an engine in a header, and so did metrics that needed no token."""
    client, admin = {"authorization": "Bearer first"}, {"authorization": "Bearer secret"}
    if "client_tokens" not in settings:
        client = {}
    with house(2, "round_robin", **settings) as built:
        asked, urls = {"model": "echo", "prompt": "x"}, {one.url for one in built.engines}
        names = {built.send(ASK, asked, client).headers["x-lmc-engine"] for _ in urls}
        assert len(names) == 2
        assert not names & urls
        text = built.send("/metrics", headers=client).read().decode()
        for one in built.engines:
            assert str(one.port) not in text
        assert all(f'lmc_router_requests_total{{engine="{name}"' in text for name in names)
        if "client_tokens" in settings:
            assert built.send("/metrics").status == 401
            assert built.send("/metrics", headers={"authorization": "Bearer another"}).status == 401
        if "admin_token" in settings:
            listed = built.ask("/engines", headers=admin)[1]["engines"]
            assert {(one["name"], one["url"]) for one in listed} == {
                (RouterSettings(**settings).name_of(url), url) for url in urls
            }, "after a restart, too"
            assert names == {one["name"] for one in listed}
            assert built.send("/metrics", headers=admin).status == 200
            gone = listed[0]
            built.ask("/engines", {"url": gone["url"]}, admin, method="DELETE")
            assert gone["name"] not in built.send("/metrics", headers=admin).read().decode()


def test_an_engine_that_has_failed_is_not_named_to_clients_with_tokens():
    """The error of an engine that could not be reached had its host and port."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]  # where nobody answers when it is closed
    client, asked = {"authorization": "Bearer first"}, {"model": "echo", "prompt": "x"}
    for tokens, named in ((frozenset(("first",)), False), (frozenset[str](), True)):
        with house(1, "round_robin", client_tokens=tokens, attempts=1, health_seconds=1000.0) as built:
            added = built.router.application.engines.add(address(f"http://127.0.0.1:{port}", ["echo"]))
            added.healthy = True
            found = [built.ask(ASK, asked, client) for _ in range(2)]
            (refused,) = [answer for status, answer in found if status != 200]
            assert (str(port) in json.dumps(refused)) == named
            assert "all attempts failed" in refused["error"]["message"]


def test_without_any_token_engines_are_called_by_their_addresses(two):
    assert two.send(ASK, {"model": "echo", "prompt": "x"}).headers["x-lmc-engine"] in {one.url for one in two.engines}
    assert RouterSettings().name_of("http://a:8000") == "http://a:8000"


def test_engines_get_their_own_key_behind_clients_with_tokens():
    with house(1, client_tokens=frozenset(("first",)), api_key="of-the-engines") as built:
        built.ask(ASK, {"model": "echo", "prompt": "x"}, {"authorization": "Bearer first"})
        assert built.echoes[0].seen[-1]["headers"]["authorization"] == "Bearer of-the-engines"


@pytest.mark.parametrize(
    "path",
    [
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
        "/v1/files",
        "/sleep",
        "/reset_prefix_cache",
        "/v1/%63ompletions",
    ],
)
def test_what_administers_an_engine_is_not_sent_on(two, path):
    before = sum(len(one.seen) for one in two.echoes)
    status, found = two.ask(path, {"model": "echo", "prompt": "x"})
    assert status == 404
    assert "the router has no POST" in found["error"]["message"]
    assert sum(len(one.seen) for one in two.echoes) == before


def test_other_paths_of_engines_may_be_allowed():
    with house(1, allowed_paths=frozenset(("/v1/load_lora_adapter",))) as built:
        assert built.ask("/v1/load_lora_adapter", {"model": "echo"})[0] == 200
        assert built.ask("/v1/unload_lora_adapter", {"model": "echo"})[0] == 404
        assert built.ask("/v1/load_lora_adapter")[0] == 405, "a GET"


# -- responses --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_is_asked_of_the_engine_that_has_made_it(two, stream):
    for number in range(4):
        made, text = f"resp_{stream}{number}", f"{number} " * 400
        ask = {"model": "echo", "input": text, "stream": stream, "echo": {"id": made}}
        answer = two.send("/v1/responses", ask)
        home = answer.headers["x-lmc-engine"]
        answer.read()
        engine = next(one.application for one in two.engines if one.url == home)
        for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel")):
            assert two.send(f"/v1/responses/{made}{path}", method=method).headers["x-lmc-engine"] == home
            seen = engine.seen[-1]
            assert (seen["method"], seen["path"], seen["body"]) == (method, f"/v1/responses/{made}{path}", b"")
        next_one = {"model": "echo", "input": "and then?", "previous_response_id": made}
        assert two.send("/v1/responses", next_one).headers["x-lmc-engine"] == home
    status, found = two.ask("/v1/responses/resp_unknown")
    assert (status, "unknown response" in found["error"]["message"]) == (404, True)
    two.ask("/engines/drain", {"url": home})
    assert two.send(f"/v1/responses/{made}").headers["x-lmc-engine"] == home, "it has to end before the engine does"
    assert two.ask("/v1/responses", next_one)[0] == 503
    two.ask("/engines/drain", {"url": home, "drain": False})


def test_responses_are_remembered_up_to_a_number():
    homes = ResponseHomes()
    for number in range(MAX_RESPONSES + 1):
        homes.note(b'{"id": "resp_%d"}' % number, "a")
    assert (homes.engine_of("resp_0"), homes.engine_of("resp_1")) == ("", "a")
    homes.note(b'{"id": "chat-1"}', "a")
    assert homes.engine_of("chat-1") == ""


def test_paths_of_responses_are_known():
    assert response_of("/v1/responses/resp_1") == response_of("/v1/responses/resp_1/cancel") == "resp_1"
    assert {response_of(f"/v1/responses{rest}") for rest in ("", "/", "/a/b", "/a/../b", "/é", "/" + "x" * 200)} == {""}


# -- forms ------------------------------------------------------------------------------------------------------------


def form(model: str, file: bytes = b"\x00\xff\r\nsound") -> tuple[bytes, dict[str, str]]:
    parts = [
        b'content-disposition: form-data; name="file"; filename="model"\r\ncontent-type: audio/wav\r\n\r\n' + file,
        b'content-disposition: form-data; name="model"\r\n\r\n' + model.encode(),
        b'content-disposition: form-data; name="stream"\r\n\r\ntrue',
    ]
    body = b"".join(b"--edge\r\n" + part + b"\r\n" for part in parts) + b"--edge--\r\n"
    return body, {"content-type": "multipart/form-data; boundary=edge"}


def test_a_form_passes_through(two):
    body, headers = form("echo")
    answer = two.send("/v1/audio/transcriptions", body, headers)
    assert answer.status == 200
    engine = next(one.application for one in two.engines if one.url == answer.headers["x-lmc-engine"])
    assert engine.seen[-1]["body"] == body
    assert engine.seen[-1]["headers"]["content-type"] == headers["content-type"]
    assert two.ask("/v1/audio/transcriptions", *form("other"))[0] == 404


def test_a_form_has_a_model_and_may_be_streamed():
    body, headers = form("whisper")
    found = read(body, headers, "x-session-id", " # # ")
    assert (found.request.model, found.stream) == ("whisper", True)
    assert read(b"", headers, "x-session-id", " # # ").request.model == ""


@pytest.mark.parametrize("before", [b"", b"a preamble\r\n"])
@pytest.mark.parametrize("boundary", ["edge", '"edge"', '"edge"; charset=utf-8', "EDGE"])
def test_a_form_is_read_by_its_boundary(before, boundary):
    """The model was found anywhere in the body, also in a file."""
    body = form("whisper", b'sound\r\ncontent-disposition: form-data; name="model"\r\n\r\nother\r\n')[0]
    headers = {"content-type": f"multipart/form-data; boundary={boundary}"}
    found = read(before + body, headers, "x-session-id", " # # ")
    is_known = boundary != "EDGE"
    assert (found.request.model, found.stream) == (("whisper", True) if is_known else ("", False))


@pytest.mark.parametrize(
    "header",
    [
        b"Content-Disposition: form-data; name=model",
        b'content-type: text/plain\r\ncontent-disposition:form-data;name="model"',
        b'content-disposition: form-data; filename="x;y"; NAME="model"',
    ],
)  # fmt: skip
def test_headers_of_a_form_have_several_forms(header):
    body = b"--x\r\n" + header + b"\r\n\r\nwhisper\r\n--x--\r\n"
    assert read_form(body, "multipart/form-data; boundary=x", ["model"]).fields == {"model": "whisper"}


@pytest.mark.parametrize(
    "body",
    [
        b"", b"--x", b"--x--", b"--x\r\n", b"--x\r\n\r\n", b"--x\r\nname=model\r\n\r\nm", b"no parts",
        b"--x\r\na: b\r\n\r\nm\r\n--x--", b'--x\r\ncontent-disposition: form-data; name="file"\r\n\r\nm\r\n--x--',
        b'--x\r\ncontent-disposition: x; name="model"\r\n\r\n' + b"m" * (MAX_FIELD_BYTES + 1) + b"\r\n--x--",
        b"--x\r\na: " + b"b" * MAX_PART_HEADER_BYTES + b'\r\ncontent-disposition: x; name="model"\r\n\r\nm\r\n--x--',
    ],
)  # fmt: skip
def test_a_form_without_a_model_has_none(body):
    assert read_form(body, "multipart/form-data; boundary=x", ["model"]).fields == {}
    assert read_form(body, "multipart/form-data", ["model"]).fields == {}


def test_equal_files_have_equal_digests_whatever_the_boundary_is():
    body, headers = form("whisper")
    other = body.replace(b"edge", b"another"), {"content-type": "multipart/form-data; boundary=another"}
    first, second = (read(*given, "x-session-id", " # # ").request.text for given in ((body, headers), other))
    assert first == second
    assert read(form("whisper", b"other sound")[0], headers, "x-session-id", " # # ").request.text != first


@pytest.mark.parametrize("line", [b"name=model\r\n", b"--x\r\n", b"\r\n--x", b';name="', b"\r\n", b"; "])
@pytest.mark.parametrize("begin", [b"--x\r\n", b"--x\r\ncontent-disposition: form-data"])
def test_the_time_to_read_a_form_is_linear_in_its_size(begin, line):
    """256 KiB of such lines held up all requests for half a minute."""

    def seconds(count: int) -> float:
        return min(timeit.repeat(lambda: read_form(body(count), "boundary=x", ["model"]), number=1, repeat=3))

    def body(count: int) -> bytes:
        return begin + line * count

    assert seconds(20_000) < 20 * seconds(1000) + 0.5, "four hundred times as long if it is quadratic"


# -- installation -----------------------------------------------------------------------------------------------------


def test_what_the_router_needs_without_torch_is_what_the_page_says():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = [*project["dependencies"], *project["optional-dependencies"]["router"]]
    names = {re.split(r"[>=<\[; ]", one)[0] for one in needed} - {"torch"}
    page = (ROOT / "docs/router.md").read_text().replace("\\\n", " ")
    line = re.search(r"^pip install (numpy .*)$", page, re.MULTILINE)
    assert set(line[1].split()) == names
