"""The command `lmc router`, and how it finds engines."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import tomllib
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path

import pytest
import typer
from echo_engine import EchoEngine, respond
from forked import Forked, command
from router_house import SECONDS, served
from storage_fakes import eventually
from typer.testing import CliRunner

from lmc.commands.cli import app
from lmc.errors import InputError
from lmc.router.arguments import OTHER_NAMES
from lmc.router.discovery import discovery, in_file, in_kubernetes
from lmc.router.engines import EnginePorts, Engines, address
from lmc.router.policies import POLICIES, from_command_line
from lmc.router.policy_types import Candidate, PromptRequest
from lmc.router.settings import RouterOptions


@contextmanager
def running(*options: str, real: bool = False, **variables: str):
    """The command in a process, which a shell starts if it is `real`; its port, and the file of its log."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LMC_")} | variables
    words = ["router", "--port", "0", *options]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        log.touch()
        if real:
            with log.open("ab") as file:
                process = subprocess.Popen([sys.executable, "-m", "lmc", *words], env=environment, stderr=file)
        else:
            process = Forked(command, *words, environment=environment, output=log)
        try:
            eventually(lambda: "listening at" in log.read_text() or process.poll() is not None)
            yield int(log.read_text().split("listening at 127.0.0.1:")[1].split(",")[0]), log
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(SECONDS) == 0


def get(port: int, path: str, body: object = None) -> tuple[int, object]:
    connection = HTTPConnection("127.0.0.1", port, timeout=SECONDS)
    try:
        connection.request("POST" if body else "GET", path, json.dumps(body) if body else None)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read() or b"null")
    except OSError:
        return 0, None
    finally:
        connection.close()


def refused(*arguments: str, **variables: str) -> str:
    result = CliRunner().invoke(app, ["router", *arguments], env=variables)
    assert result.exit_code == 2, result.output
    return result.output


def test_the_command_routes_and_ends(tmp_path):
    with served(EchoEngine()) as one, served(EchoEngine()) as other:
        file = tmp_path / "router.yaml"
        file.write_text(f"static-backends:\n  - {one.url}\n  - {other.url}/v1/\npolicy: round_robin\n")
        with running("--config", str(file), real=True, LMC_ROUTER_HEALTH_SECONDS="0.2") as (port, _):
            eventually(lambda: get(port, "/ready") == (200, {"engines": 2}))
            assert {get(port, "/v1/completions", {"model": "echo", "prompt": "x"})[0] for _ in range(4)} == {200}
            assert [len(one.application.seen), len(other.application.seen)] == [2, 2]


def test_the_command_line_comes_before_the_environment_and_the_file(tmp_path):
    file = tmp_path / "router.yaml"
    file.write_text("policy: random\nstatic-backends: http://127.0.0.1:1\n")
    with running("--config", str(file), LMC_ROUTER_POLICY="least_loaded"):
        pass
    assert "unknown policy" in refused("--config", str(file), LMC_ROUTER_POLICY="nonsense")
    assert "nonsense" in refused("--config", str(file), "--policy", "nonsense", LMC_ROUTER_POLICY="random")


WRONG = {
    "no engines": ((), "no engines: set --static-backends"),
    "no URL": (("--static-backends", "a:8000"), "'a:8000' is not the URL of an engine"),
    "models do not fit": (("--static-backends", "http://a", "--static-models", "m,n"), "--static-models has 2 items"),
    "caches do not fit": (("--static-backends", "http://a,http://b", "--static-caches", "m"), "--static-caches has 1"),
    "unknown policy": (("--static-backends", "http://a", "--policy", "best"), "best"),
    "an option of another policy": (("--static-backends", "http://a", "--cache-threshold", "0.5"), "cache_threshold"),
    "no option": (("--static-backends", "http://a", "--option", "seed"), "must be a name and a value"),
    "no discovery": (("--discovery", "consul:x"), "use file:"),
    "no file": (("--config", "/nowhere.yaml"), "cannot be read"),
    "the same engine twice": (("--static-backends", "http://a,http://a/v1/"), "http://a twice"),
    "a URL with a blank": (("--static-backends", "http://a b:8000"), "is not the URL of an engine"),
    "an option that is no YAML": (("--static-backends", "http://a", "--option", "stay={"), "a number or a word"),
    "an option with an impossible date": (
        ("--static-backends", "http://a", "--option", "stay=2024-99-99"),
        "a number or a word",
    ),
    "an option of the wrong kind": (("--static-backends", "http://a", "--option", "stay=long"), "use a number"),
    "an option that is no text": (("--static-backends", "http://a", "--option", "surcharge=[1]"), "use a number"),
    "an option for programs": (
        ("--static-backends", "http://a", "--policy", "precise", "--kv-events-port", "1", "--option", "clock=1"),
        "no option clock; its options are expected_secs, max_expected",
    ),
    "no preset": (
        ("--static-backends", "http://a", "--policy", "cache_aware", "--option", "preset=best"),
        "no preset 'best'; use python_arguments or log_of_2025_06",
    ),
    "no special string": (
        ("--static-backends", "http://a", "--special-string", " "),
        "--option special_string is empty",
    ),
    "no key": (("--static-backends", "http://a", "--api-key", "a\nb"), "--api-key is invalid"),
    "no events": (("--static-backends", "http://a", "--static-kv-events", "a:5557"), "use tcp://host:5557"),
    "no events for precise": (
        ("--static-backends", "http://a,http://b", "--policy", "precise", "--static-kv-events", "tcp://a:1"),
        "static_kv_events has 1 items",
    ),
    "engines without events": (
        ("--static-backends", "http://a,http://b", "--policy", "precise"),
        "--policy precise needs the KV events of http://a, http://b: start vLLM with --kv-events-config",
    ),
    "found engines without events": (
        ("--discovery", "dns:a:8000", "--policy", "precise"),
        "the KV events of the engines of --discovery dns:a:8000",
    ),
    "a policy of another router": (("--static-backends", "http://a", "--policy", "kvaware"), "use precise"),
    "a flag of another router": (("--kv-aware-threshold", "2000"), "no --kv-aware-threshold: use --policy precise"),
    "a misspelt flag": (("--static-backend", "http://a"), "did you mean --static-backends?"),
    "an argument": (("http://a",), "lmc router has no http://a"),
    "no number": (("--prefix-token-count", "many"), "'many' is not a number"),
    "no end": (("--prefix-token-count", "inf"), "'inf' is not a number above 0"),
    "nothing": (("--prefix-hash-load-factor", "0"), "'0' is not a number above 0: use --prefix-token-count 256 or"),
    "no way to find engines": (("--service-discovery", "consul"), "must be static or k8s"),
    "a wrong option of the router": (
        ("--static-backends", "http://a", "--option", "health_seconds=0"),
        "--option health_seconds=0 (command line) is invalid: input should be greater than or equal to 0.1",
    ),
    "a misspelt option of the router": (
        ("--static-backends", "http://a", "--option", "helth_seconds=1"),
        "no option helth_seconds (command line): did you mean health_seconds?",
    ),
    "a port out of range": (("--static-backends", "http://a", "--port", "70000"), "65535"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_work_is_an_error_that_says_what_would_be_right(name):
    arguments, words = WRONG[name]
    said = refused(*arguments)
    assert words in " ".join(said.split())
    assert said.startswith("Usage:") or (said.startswith("error: ") and said.count("\n") == 1)


def ran(monkeypatch, *arguments: str, **variables: str) -> tuple:
    """With what the command would run the router."""
    found = []
    monkeypatch.setattr("lmc.commands.router._run", lambda *given: found.append(given))
    result = CliRunner().invoke(app, ["router", *arguments], env=variables)
    assert result.exit_code == 0, result.output
    return found[0]


def chosen(monkeypatch, *arguments: str, **variables: str) -> tuple:
    """What the command would run: policy, options, engines and discovery."""
    options = []

    def making(name, given):
        options.append(given)
        return from_command_line(name, given)

    monkeypatch.setattr("lmc.commands.router.from_command_line", making)
    _, policy, _, engines, where, _, _ = ran(monkeypatch, *arguments, **variables)
    return policy, options[0], [one.url for one in engines], where


@pytest.mark.parametrize(("name", "policy"), OTHER_NAMES.items())
def test_names_of_other_routers_are_those_of_policies(monkeypatch, name, policy):
    assert chosen(monkeypatch, "--static-backends", "http://a", "--routing-logic", name)[0] == policy
    assert policy in POLICIES


@pytest.mark.parametrize("found", [("--kv-events-port", "5557"), ("--discovery", "file:/x")])
def test_engines_with_events_can_be_chosen_by_them(monkeypatch, found):
    engines = ("--discovery", "dns:a:8000") if "file:/x" not in found else ()
    assert chosen(monkeypatch, "--policy", "precise", *engines, *found)[0] == "precise"


def test_a_file_may_name_tokenizers_as_a_mapping(monkeypatch, tmp_path):
    file, mapping = tmp_path / "router.yaml", {"a/b": "/x", "c": "hub/y"}
    for tokenizers, wanted in (
        ("{a/b: /x, c: hub/y}", mapping), ("[a/b=/x, c=hub/y]", mapping), ("a/b=/x,c=hub/y", mapping),
        ("{'a,b=c': '/x,y', d: /z}", {"a,b=c": "/x,y", "d": "/z"}),
    ):  # fmt: skip
        file.write_text(f"static_backends: http://a\ntokenizers: {tokenizers}\n")
        assert ran(monkeypatch, "--config", str(file))[0].tokenizers == wanted
    file.write_text("static_backends: http://a\ntokenizers: {a: }\n")
    assert "use MODEL=DIRECTORY" in refused("--config", str(file))


def test_flags_of_other_routers_mean_what_they_mean_there(monkeypatch):
    sglang = ["--worker-urls", "http://a", "http://b", "--policy", "prefix_hash", "--prefix-token-count", "64"]
    assert chosen(monkeypatch, *sglang, "--prefix-hash-load-factor=1.5") == (
        "chwbl", {"prefix_characters": 256, "mean_load_factor": 1.5}, ["http://a", "http://b"], "",
    )  # fmt: skip
    stack = ["--service-discovery", "k8s", "--k8s-namespace", "ns", "--k8s-label-selector", "app=vllm"]
    assert chosen(monkeypatch, *stack, "--k8s-port", "80", "--routing-logic", "prefixaware") == (
        "prefix_hash_trie", {}, [], "kubernetes:ns/app=vllm:80",
    )  # fmt: skip


def test_options_of_a_policy_may_be_a_variable_or_in_the_file(monkeypatch, tmp_path):
    options = {"stay": 2, "surcharge": 0.5}
    variable = {"LMC_ROUTER_OPTION": "stay=2 surcharge=0.5"}
    assert chosen(monkeypatch, "--static-backends", "http://a", **variable)[1] == options
    file = tmp_path / "router.yaml"
    file.write_text("static-backends: http://a\noption: [stay=2, surcharge=0.5]\n")
    assert chosen(monkeypatch, "--config", str(file))[1] == options
    file.write_text("static-backends: http://a\noption: stay=2\n")
    assert chosen(monkeypatch, "--config", str(file))[1] == {"stay": 2}


def settings_of(monkeypatch, *arguments: str, **variables: str) -> tuple:
    """The settings with which the command would run, and what was given in an earlier form."""
    settings, *_, moved = ran(monkeypatch, "--static-backends", "http://a", *arguments, **variables)
    return settings, moved


def test_the_command_line_has_sixteen_options():
    context = CliRunner().invoke(app, ["router", "--help"])
    command = typer.main.get_command(app).commands["router"]
    assert len([one for one in command.params if one.name != "help"]) == 16
    assert all(f"--{one.name.replace('_', '-')}" in context.output for one in command.params)


def test_options_in_their_earlier_form_are_read_from_all_sources(monkeypatch, tmp_path):
    settings, moved = settings_of(monkeypatch, "--health-seconds", "2", "--exact-tokens", "--max-body-mib=1")
    assert (settings.health_seconds, settings.exact_tokens, settings.max_body) == (2.0, True, 1 << 20)
    assert moved == {"health_seconds": "2", "exact_tokens": "true", "max_body_mib": "1"}
    settings, moved = settings_of(monkeypatch, LMC_ROUTER_SESSION_KEY="x-user", LMC_ROUTER_MAX_HELD_MIB="")
    assert (settings.session_key, settings.max_held, moved) == ("x-user", 1024 << 20, {"session_key": "x-user"})
    file = tmp_path / "router.yaml"
    file.write_text("health-seconds: 3\nallowed-paths: [/v1/a, /v1/b]\nexact_tokens: true\n")
    settings, moved = settings_of(monkeypatch, "--config", str(file))
    assert (settings.health_seconds, settings.allowed_paths, settings.exact_tokens) == (3, {"/v1/a", "/v1/b"}, True)
    assert settings_of(monkeypatch, "--option", "health_seconds=4")[1] == {}


def test_later_sources_of_options_come_before_earlier_ones(monkeypatch, tmp_path):
    file = tmp_path / "router.yaml"
    file.write_text("option: health_seconds=1\nsession_key: file\n")
    given = "--config", str(file)
    assert settings_of(monkeypatch, *given)[0].health_seconds == 1
    assert settings_of(monkeypatch, *given, LMC_ROUTER_HEALTH_SECONDS="2")[0].health_seconds == 2
    assert (
        settings_of(monkeypatch, *given, "--health-seconds", "3", LMC_ROUTER_HEALTH_SECONDS="2")[0].health_seconds == 3
    )
    found = settings_of(monkeypatch, *given, "--option", "session_key=line", LMC_ROUTER_OPTION="session_key=variable")[
        0
    ]
    assert found.session_key == "line"


def test_a_special_string_is_that_of_the_router_and_of_the_policy(monkeypatch):
    arguments = "--static-backends", "http://a", "--option", "special_string= <doc> "
    settings, _, policy, *_ = ran(monkeypatch, *arguments)
    assert settings.special_string == policy.cutter.special_string == " <doc> "


def test_the_page_describes_every_option_of_the_router():
    page = (Path(__file__).parent.parent / "docs/router.md").read_text()
    assert [name for name in RouterOptions.model_fields if f"`{name}`" not in page] == []


def test_a_wrong_option_in_a_variable_is_an_error():
    assert "has no option stayy" in refused("--static-backends", "http://a", LMC_ROUTER_OPTION="stayy=2")


def test_presets_may_have_exceptions():
    """A quarter of the prompt is in the tree of the first engine."""
    for more, engine in (({"cache_threshold": 0.2}, "http://first"), ({}, "http://other")):
        policy = from_command_line("cache_aware", {"preset": "log_of_2025_06", **more})
        policy.sent(PromptRequest(text="x" * 25 + "a" * 75), "http://first")
        both = [Candidate("http://first"), Candidate("http://other")]
        assert policy.choose(PromptRequest(text="x" * 25 + "b" * 75), both).engine == engine


def test_an_error_names_the_source_of_an_option(tmp_path):
    file, engine = tmp_path / "router.yaml", ("--static-backends", "http://a")
    for text in ("option: health_seconds=0", "health-seconds: 0"):
        file.write_text(text)
        assert f"health_seconds=0 (YAML {file}) is invalid" in refused(*engine, "--config", str(file))
    assert "health_seconds=0 (environment) is invalid" in refused(*engine, LMC_ROUTER_OPTION="health_seconds=0")


def test_unknown_options_of_a_file_are_named(tmp_path):
    file = tmp_path / "router.yaml"
    file.write_text("polcy: documents\n")
    assert "unknown options polcy" in refused("--config", str(file))
    for text in ("port: 1\nport: 2", "static-backends: http://a\nstatic_backends: http://b"):
        file.write_text(text)
        assert "twice" in refused("--config", str(file))
    file.write_text("[1, 2]")
    assert "it must be a mapping such as 'policy: documents'" in refused("--config", str(file))


def test_a_misspelt_variable_is_an_error_and_those_of_a_kubernetes_service_are_none():
    assert "did you mean LMC_ROUTER_POLICY" in refused(LMC_ROUTER_POLCY="random")
    with served(EchoEngine()) as engine:
        of_service = {
            "LMC_ROUTER_PORT": "tcp://10.0.0.1:80", "LMC_ROUTER_SERVICE_HOST": "10.0.0.1",
            "LMC_ROUTER_PORT_80_TCP_ADDR": "10.0.0.1", "LMC_ROUTER_STATIC_BACKENDS": engine.url,
        }  # fmt: skip
        with running(**of_service) as (port, _):
            eventually(lambda: get(port, "/ready")[0] == 200)


def test_without_its_libraries_the_error_names_all_packages_of_the_router(monkeypatch):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    said = refused("--static-backends", "http://127.0.0.1:1")
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    packages = [re.split("[>=<]", one)[0] for one in project["optional-dependencies"]["router"]]
    assert said == f"error: lmc router needs uvicorn: pip install {' '.join(packages)}\n"


def test_a_port_that_is_taken_is_an_error():
    with served(EchoEngine()) as engine:
        assert "is the port in use" in refused("--static-backends", "http://a", "--port", str(engine.port))


def test_a_host_that_does_not_exist_has_no_port_in_use():
    said = refused("--static-backends", "http://a", "--host", "nohost.invalid")
    assert "--host nohost.invalid" in said
    assert said.endswith("; use another host or port\n")


@pytest.mark.parametrize("value", ["", " ", ",", " , "])
@pytest.mark.parametrize("name", ["client_tokens", "api_key"])
def test_a_secret_that_is_given_but_empty_does_not_open_the_router(monkeypatch, tmp_path, name, value):
    monkeypatch.setattr("lmc.commands.router._run", lambda *_: pytest.fail("the router runs"))
    flag, variable, file = f"--{name}".replace("_", "-"), f"LMC_ROUTER_{name.upper()}", tmp_path / "router.yaml"
    for line in (f"{name}: '{value}'", f"{name}:", f"{name}: []"):
        file.write_text(f"static_backends: http://a\n{line}\n")
        assert f"error: {flag} is empty" in refused("--config", str(file))
    assert f"error: {flag} is empty" in refused("--static-backends", "http://a", flag, value)
    assert f"error: {flag} is empty" in refused("--static-backends", "http://a", **{variable: value})


def test_a_secret_may_come_from_another_source_than_the_one_that_is_empty(monkeypatch):
    given = ran(monkeypatch, "--static-backends", "http://a", "--client-tokens", "one", LMC_ROUTER_CLIENT_TOKENS="")
    assert given[0].client_tokens == {"one"}


def test_an_administration_token_of_white_space_is_an_error(monkeypatch):
    monkeypatch.setattr("lmc.commands.router._run", lambda *_: pytest.fail("the router runs"))
    assert "admin_token (environment LMC_ADMIN_TOKEN)" in refused("--static-backends", "http://a", LMC_ADMIN_TOKEN=" ")


@pytest.mark.parametrize(
    ("arguments", "warns"),
    [
        (("--host", "0.0.0.0"), True),
        (("--host", "0.0.0.0", "--client-tokens", "one"), False),
        (("--host", "localhost"), False),
    ],
)
def test_a_router_that_admits_every_client_of_other_hosts_warns(monkeypatch, caplog, arguments, warns):
    ran(monkeypatch, "--static-backends", "http://a", *arguments)
    assert ("admits every client" in caplog.text) is warns


def test_a_key_is_not_shown():
    with running("--static-backends", "http://127.0.0.1:1", "--api-key", "very-secret") as (port, log):
        eventually(lambda: get(port, "/health")[0] == 200)
        assert "very-secret" not in str(get(port, "/engines"))
        assert "very-secret" not in log.read_text()


# -- discovery --------------------------------------------------------------------------------------------------------


def test_engines_of_a_file_come_and_go(tmp_path):
    file = tmp_path / "engines.yaml"
    with served(EchoEngine()) as one, served(EchoEngine(("second",))) as other:
        file.write_text(f"- {one.url}\n")
        with running("--discovery", f"file:{file}", "--health-seconds", "0.1") as (port, _):
            urls = lambda: {found["url"] for found in (get(port, "/engines")[1] or {}).get("engines", ())}  # noqa: E731
            eventually(lambda: urls() == {one.url})
            file.write_text(f"- {one.url}\n- url: {other.url}\n  models: [second]\n  cache: shared\n")
            eventually(lambda: urls() == {one.url, other.url})
            file.write_text("- {broken")
            eventually(lambda: get(port, "/v1/completions", {"model": "second", "prompt": "x"})[0] == 200)
            file.write_text(f"- {other.url}\n")
            eventually(lambda: urls() == {other.url})


@pytest.mark.parametrize(
    "text",
    [
        "- 3",
        "- {url: 3}",
        "- {address: http://a}",
        "- a:b",
        "- ftp://a",
        "- http://[::1",
        "{",
        "[" * 5_000,
        "- {url: http://a, models: m}",
        "- {url: http://a, models: 3}",
    ],
)
def test_a_file_that_names_no_engines_is_an_error(tmp_path, text):
    file = tmp_path / "engines.yaml"
    file.write_text(text)
    with pytest.raises(InputError, match=str(file)):
        in_file(file)


def test_what_a_file_says_of_an_engine_may_change(tmp_path):
    file = tmp_path / "engines.yaml"
    with served(EchoEngine()) as one:
        file.write_text(f"- {one.url}\n")
        with running("--discovery", f"file:{file}", "--health-seconds", "0.1", "--admin-port", "9") as (port, _):

            def engines(field):
                return [found[field] for found in (get(port, "/engines")[1] or {}).get("engines", ())]

            eventually(lambda: engines("admin") == ["http://127.0.0.1:9"])
            file.write_text(f"- url: {one.url}\n  admin: http://127.0.0.1:8\n  cache: shared\n  models: [echo, two]\n")
            eventually(lambda: engines("admin") == ["http://127.0.0.1:8"])
            assert (engines("cache"), engines("models")) == (["shared"], [["echo", "two"]])


def test_addresses_of_a_name_are_engines():
    found = asyncio.run(discovery("dns:localhost:8000")(None))
    assert "http://127.0.0.1:8000" in {one.url for one in found}


def test_engines_have_their_administration_and_their_events_at_the_same_ports():
    engines = Engines(EnginePorts(9180, 5557, 5558))
    given = engines.add(address("http://a:8000", admin="b:1", kv_events="tcp://c:2")).address
    assert (given.admin, given.kv_events) == ("http://b:1", "tcp://c:2")
    found = engines.add(address("http://[fd00::1]:8000")).address
    assert (found.admin, found.kv_events) == ("http://[fd00::1]:9180", "tcp://[fd00::1]:5557+tcp://[fd00::1]:5558")
    assert Engines().add(address("http://a")).address == address("http://a")


class Api:
    """What the API of a Kubernetes cluster answers."""

    def __init__(self) -> None:
        self.asked = []

    async def __call__(self, scope, receive, send):
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        self.asked.append((scope["path"], scope["query_string"].decode(), headers.get("authorization")))
        ready = {"conditions": [{"type": "Ready", "status": "True"}], "podIP": "10.0.0.1"}
        pods = [
            {"metadata": {"labels": {"lmc/cache": "c"}}, "spec": {"nodeName": "n1"}, "status": ready},
            {"metadata": {}, "spec": {}, "status": {**ready, "podIP": "10.0.0.2"}},
            {"metadata": {}, "spec": {}, "status": {**ready, "podIP": "fd00::3"}},
            {"metadata": {}, "spec": {}, "status": {**ready, "conditions": [{"type": "Ready", "status": "False"}]}},
            {"metadata": {"deletionTimestamp": "now"}, "spec": {}, "status": ready},
            {"metadata": {}, "spec": {}, "status": {"conditions": []}},
        ]
        await respond(send, 200, json.dumps({"items": pods}).encode())


def test_ready_pods_with_a_label_are_engines(tmp_path, monkeypatch):
    import aiohttp

    (tmp_path / "token").write_text("of the pod\n")
    with served(Api()) as api:
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(api.port))

        async def find():
            async with aiohttp.ClientSession() as session:
                return await in_kubernetes(session, "default", "app=vllm", 8000, tmp_path, scheme="http")

        found = asyncio.run(find())
    assert found == [
        address("http://10.0.0.1:8000", cache="c@n1"),
        address("http://10.0.0.2:8000"),
        address("http://[fd00::3]:8000"),
    ]
    assert api.application.asked == [
        ("/api/v1/namespaces/default/pods", "labelSelector=app%3Dvllm", "Bearer of the pod")
    ]


def test_the_api_of_a_cluster_may_have_an_ipv6_address(tmp_path, monkeypatch):
    """Kubernetes gives it without brackets, which made an invalid URL."""
    asked = []

    class Session:
        def get(self, url, **_):
            asked.append(str(url))
            raise InputError("as asked")

    (tmp_path / "token").write_text("of the pod\n")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "6443")
    with pytest.raises(InputError, match="as asked"):
        asyncio.run(in_kubernetes(Session(), "default", "app=vllm", 8000, tmp_path, scheme="http"))
    assert asked == ["http://[fd00::1]:6443/api/v1/namespaces/default/pods?labelSelector=app%3Dvllm"]


def test_kubernetes_is_asked_from_a_pod_only(monkeypatch):
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(InputError, match="runs in a pod"):
        asyncio.run(in_kubernetes(None, "default", "app=vllm", 8000))
