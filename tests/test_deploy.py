"""The examples of a deployment say what the settings understand. They are linted, and not built or applied here."""

import configparser
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from lmc.commands.cli import stat
from lmc.commands.serve import serve
from lmc.config.redis_url import parse_redis_url
from lmc.config.settings import Settings

FOLDER = Path(__file__).parent.parent / "examples" / "deploy"
KUBERNETES = "1.31"
DOCUMENTS: list[dict[str, Any]] = list(yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text()))
SERVED: list[dict[str, Any]] = list(yaml.safe_load_all((FOLDER / "lmc-serve.yaml").read_text()))
COMPOSE: dict[str, Any] = yaml.safe_load((FOLDER / "compose.yaml").read_text())
STOP_SECONDS = 60  # at least, for a server that writes down what is in memory only


def named(kind: str, name: str, documents: list[dict[str, Any]] = DOCUMENTS) -> dict[str, Any]:
    (found,) = [one for one in documents if one["kind"] == kind and one["metadata"]["name"] == name]
    return found


def pod(kind: str, name: str) -> dict[str, Any]:
    """Return a pod of the example with a cache server."""
    found: dict[str, Any] = named(kind, name, SERVED)["spec"]["template"]["spec"]
    return found


def mounts(one: dict[str, Any]) -> dict[str, str]:
    """Return the directories of the node that a pod's container has, by their paths there."""
    (inside,) = one["containers"]
    volumes = {volume["name"]: volume.get("hostPath", {}).get("path") for volume in one["volumes"]}
    found = {mount["mountPath"]: volumes[mount["name"]] for mount in inside["volumeMounts"]}
    return {path: there for path, there in found.items() if there}


def served(command: list[str]) -> dict[str, str]:
    """Return the options of a command that starts a cache server."""
    assert command[:2] == ["lmc", "serve"]
    options = dict(zip(command[2::2], command[3::2], strict=True))
    assert {option.removeprefix("--") for option in options} <= inspect.signature(serve).parameters.keys()
    return options


def is_checked(command: list[str], socket: str) -> bool:
    """Return whether a command asks the server at a socket how it is."""
    known = "server" in inspect.signature(stat).parameters
    return known and command == ["lmc", "stat", "--server", socket]


def container(name: str) -> dict[str, Any]:
    (found,) = named("Deployment", name)["spec"]["template"]["spec"]["containers"]
    return found


def test_the_linter_of_dockerfiles_has_nothing_to_say() -> None:
    linter = Path(sys.executable).parent / "hadolint"
    done = subprocess.run([linter, FOLDER / "Dockerfile"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("one", DOCUMENTS + SERVED, ids=lambda one: f"{one['kind']} {one['metadata']['name']}")
def test_the_objects_are_what_kubernetes_says_they_are(one: dict[str, Any]) -> None:
    kubernetes_validate.validate(one, KUBERNETES, strict=True)


def test_the_variables_of_the_pod_are_settings() -> None:
    given = {one["name"]: one.get("value", "") for one in container("lmc")["env"]}
    services = [one["metadata"]["name"].upper().replace("-", "_") for one in DOCUMENTS if one["kind"] == "Service"]
    assert len(services) == 2
    for name in services:  # what Kubernetes adds
        given |= {f"{name}_SERVICE_HOST": "10.0.0.7", f"{name}_SERVICE_PORT": "80", f"{name}_PORT": "tcp://10.0.0.7:80"}
    given = {key: value.replace("$(REDIS_PASSWORD)", "hunter2") for key, value in given.items()}
    settings = Settings.load(environ=given)
    assert settings.enable_blending
    assert str(settings.local_disk) == container("lmc")["volumeMounts"][0]["mountPath"]
    url = parse_redis_url(str(settings.remote_url))
    assert (url.hosts[0].host, url.password) == ("lmc-redis", "hunter2")


@pytest.mark.parametrize("name", ["lmc", "lmc-redis"])
def test_services_lead_to_pods_and_volumes_exist(name: str) -> None:
    deployment = named("Deployment", name)["spec"]
    labels = deployment["template"]["metadata"]["labels"]
    assert deployment["selector"]["matchLabels"] == named("Service", name)["spec"]["selector"] == labels
    pod = deployment["template"]["spec"]
    mounted = {mount["name"] for mount in container(name).get("volumeMounts", [])}
    assert mounted == {volume["name"] for volume in pod.get("volumes", [])}
    claims = [
        volume["persistentVolumeClaim"]["claimName"]
        for volume in pod.get("volumes", [])
        if "persistentVolumeClaim" in volume
    ]
    for claim in claims:
        named("PersistentVolumeClaim", claim)


def test_the_image_starts_the_connector_with_settings_that_are_understood() -> None:
    text = (FOLDER / "Dockerfile").read_text().replace("\\\n", " ")
    (variables,) = re.findall(r"^ENV (.*)$", text, re.M)
    settings = Settings.load(environ=dict(pair.split("=", 1) for pair in variables.split()))
    assert str(settings.local_disk) in re.findall(r"^VOLUME (\S+)$", text, re.M)
    (entry,) = re.findall(r"^ENTRYPOINT (\[.*\])$", text, re.M)
    words = json.loads(entry)
    assert words[:2] == ["vllm", "serve"]
    assert json.loads(words[-1])["kv_connector"] == "LMCConnector"
    known = {"ARG", "FROM", "COPY", "RUN", "ENV", "VOLUME", "ENTRYPOINT"}
    assert {line.split()[0] for line in text.splitlines() if line.strip() and not line.startswith("#")} == known


def test_the_unit_for_systemd_starts_a_cache_server_that_there_is() -> None:
    unit = configparser.ConfigParser()
    unit.optionxform = str  # type: ignore[assignment]
    unit.read(FOLDER / "lmc.service")
    service = unit["Service"]
    settings = Settings.load(environ=dict(one.split("=") for one in service["Environment"].split()))
    assert settings.local_disk == Path("/var") / "cache" / service["CacheDirectory"]
    program, command, *options = service["ExecStart"].split()
    assert (Path(program).name, command) == ("lmc", "serve")
    known = inspect.signature(serve).parameters
    assert {option.removeprefix("--") for option in options[::2]} == {"socket", "memory"} <= known.keys()
    assert Path(options[1]).parent == Path("/run") / service["RuntimeDirectory"]


def test_engines_of_a_node_find_its_server_and_their_lifelines_at_the_same_paths() -> None:
    server, engine = pod("DaemonSet", "lmc-serve"), pod("Deployment", "vllm")
    (inside,), (vllm,) = server["containers"], engine["containers"]
    options = served(inside["command"])
    given = {one["name"]: one["value"] for one in vllm["env"]}
    settings = Settings.load(environ=given)
    assert settings.enable_blending
    assert str(settings.server) == options["--socket"]
    for path in (str(Path(options["--socket"]).parent), options["--memory"]):
        assert mounts(server)[path] == mounts(engine)[path]
    assert mounts(server)[options["--memory"]].startswith("/dev/shm/"), "memory is on tmpfs"
    own = Settings.load(environ={one["name"]: one["value"] for one in inside["env"]})
    assert str(own.local_disk) in mounts(server)
    gib = [float(one["resources"]["limits"]["memory"].removesuffix("Gi")) for one in (inside, vllm)]
    assert gib[0] > own.max_local_cpu_size > gib[1], "the server takes all of the memory, and it counts for nobody else"
    assert is_checked(inside["readinessProbe"]["exec"]["command"], options["--socket"])
    assert server["terminationGracePeriodSeconds"] >= STOP_SECONDS
    assert f"lmc stat --server {options['--socket']}" in engine["initContainers"][0]["command"][-1]


@pytest.mark.parametrize("documents", [DOCUMENTS, SERVED], ids=["kubernetes.yaml", "lmc-serve.yaml"])
def test_no_engine_gets_variables_of_vllm_from_the_name_of_a_service(documents: list[dict[str, Any]]) -> None:
    """A vLLM whose VLLM_PORT is the address of a Service, as Kubernetes sets it, ends at its start."""
    services = [one["metadata"]["name"] for one in documents if one["kind"] == "Service"]
    for one in documents:
        pod = one.get("spec", {}).get("template", {}).get("spec", {})
        for inside in pod.get("containers", []):
            if inside["image"] == "vllm-lmc" and "command" not in inside and pod.get("enableServiceLinks", True):
                assert not [name for name in services if name.startswith("vllm")]


def test_no_service_has_a_name_from_which_kubernetes_makes_variables_of_ours() -> None:
    names = [one["metadata"]["name"] for one in SERVED if one["kind"] == "Service"]
    assert names
    assert not [name for name in names if name.startswith("lmc")]


def test_containers_of_a_host_find_the_server_and_their_lifelines_at_the_same_paths() -> None:
    services = dict(COMPOSE["services"])
    server = services.pop("lmc")
    options, own = served(server["entrypoint"]), Settings.load(environ=server["environment"])
    assert len(services) == 2
    for engine in (*services.values(), server):
        assert f"run:{Path(options['--socket']).parent}" in engine["volumes"]
        assert engine["ipc"] == "host", "so that they have one /dev/shm"
        assert {volume.split(":")[0] for volume in engine["volumes"]} <= COMPOSE["volumes"].keys()
    for engine in services.values():
        settings = Settings.load(environ=engine["environment"])
        assert str(settings.server) == options["--socket"]
        assert engine["depends_on"] == {"lmc": {"condition": "service_healthy"}}
    assert options["--memory"].startswith("/dev/shm/")
    assert f"disk:{own.local_disk}" in server["volumes"]
    cmd, *check = server["healthcheck"]["test"]
    assert cmd == "CMD"
    assert is_checked(check, options["--socket"])
    assert 60 * int(server["stop_grace_period"].removesuffix("m")) >= STOP_SECONDS
