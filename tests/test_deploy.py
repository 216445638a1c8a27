"""The examples of a deployment say what the settings understand. They are linted, and not built or applied here."""

import configparser
import inspect
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from lmc import __version__
from lmc.commands.cli import stat
from lmc.commands.serve import serve
from lmc.config.redis_url import parse_redis_url
from lmc.config.settings import Settings

FOLDER = Path(__file__).parent.parent / "examples" / "deploy"
KUBERNETES = "1.31"
DOCUMENTS: list[dict[str, Any]] = list(yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text()))
SERVED: list[dict[str, Any]] = list(yaml.safe_load_all((FOLDER / "lmc-serve.yaml").read_text()))
COMPOSE: dict[str, Any] = yaml.safe_load((FOLDER / "compose.yaml").read_text())
IMAGE = f"REGISTRY/vllm-lmc:{__version__}"
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


FLAGS = {"--page-locked"}  # options without a value


def served(command: list[str]) -> dict[str, str]:
    """Return the options of a command that starts a cache server."""
    assert command[:2] == ["lmc", "serve"]
    words = [word for word in command[2:] if word not in FLAGS]
    options = dict(zip(words[::2], words[1::2], strict=True)) | dict.fromkeys(FLAGS & {*command}, "")
    names = {option.removeprefix("--").replace("-", "_") for option in options}
    assert names <= inspect.signature(serve).parameters.keys()
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


def pods() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name and the specification of each pod of the examples."""
    for one in DOCUMENTS + SERVED:
        if template := one["spec"].get("template"):
            yield one["metadata"]["name"], template["spec"]


def seconds(probe: dict[str, Any]) -> int:
    """Return after how many seconds a probe has failed."""
    return int(probe["periodSeconds"] * probe.get("failureThreshold", 3))


def test_images_can_be_pulled_and_are_those_of_this_version() -> None:
    images = [inside for _, one in pods() for inside in (*one["containers"], *one.get("initContainers", []))]
    ours = [inside for inside in images if "vllm-lmc" in inside["image"]]
    assert {inside["image"] for inside in ours} == {IMAGE}
    assert {inside["imagePullPolicy"] for inside in ours} == {"IfNotPresent"}
    assert {one["image"] for one in COMPOSE["services"].values()} == {IMAGE.removeprefix("REGISTRY/")}
    comments = "".join((FOLDER / name).read_text() for name in ("Dockerfile", "compose.yaml", "kubernetes.yaml"))
    assert set(re.findall(r"vllm-lmc:(\S+)", comments)) == {__version__}


def test_a_pod_that_hangs_gets_no_requests_and_is_started_again() -> None:
    for name, one in pods():
        if name != "lmc-serve":  # which writes to its tiers before it ends
            (inside,) = one["containers"]
            assert seconds(inside["readinessProbe"]) <= 30, name
            assert seconds(inside["livenessProbe"]) <= 60, name
            is_engine = inside["image"] == IMAGE
            assert not is_engine or seconds(inside["startupProbe"]) >= 600, "loading a model takes minutes"


def test_a_stop_lets_requests_end() -> None:
    words = json.loads(
        re.findall(r"^ENTRYPOINT (\[.*\])$", (FOLDER / "Dockerfile").read_text().replace("\\\n", ""), re.M)[0]
    )
    grace = int(words[words.index("--shutdown-timeout") + 1])
    engines = [one for _, one in pods() if one["containers"][0]["image"] == IMAGE]
    assert all(one["terminationGracePeriodSeconds"] > grace for one in engines)
    assert {one["stop_grace_period"] for one in COMPOSE["services"].values()} == {"1m", "5m"}
    assert "--stop-timeout 60" in (FOLDER / "Dockerfile").read_text()


def test_pods_for_gpus_run_on_nodes_with_their_taint_and_servers_on_no_others() -> None:
    for name, one in pods():
        tolerated = {toleration["key"] for toleration in one.get("tolerations", [])}
        assert ("nvidia.com/gpu" in tolerated) == (name != "lmc-redis")
    assert pod("DaemonSet", "lmc-serve")["nodeSelector"] == {"nvidia.com/gpu.present": "true"}


def test_engines_keep_the_models_that_they_have_downloaded() -> None:
    for name, one in pods():
        (inside,) = one["containers"]
        if "command" not in inside and inside["image"] == IMAGE:
            (home,) = (given["value"] for given in inside["env"] if given["name"] == "HF_HOME")
            assert home in {mount["mountPath"] for mount in inside["volumeMounts"]}, name
    for name, service in COMPOSE["services"].items():
        home = service["environment"].get("HF_HOME")
        assert (f"models:{home}" in service["volumes"]) == (name != "lmc")


@pytest.mark.parametrize(("failures", "code"), [(3, 0), (1000, 1)])
def test_an_engine_waits_for_its_server_and_not_for_ever(tmp_path: Path, failures: int, code: int) -> None:
    """Run the command of the container that waits, with an `lmc` that fails some times."""
    done = run_with(tmp_path, pod("Deployment", "vllm")["initContainers"][0]["command"], failures)
    assert done.returncode == code
    assert ("kubectl get pods" in done.stderr) == bool(code)


@pytest.mark.parametrize(("failures", "alive", "code"), [(3, True, 0), (3, False, 1), (0, True, 0)])
def test_a_unit_after_the_server_waits_until_it_answers(tmp_path: Path, failures: int, alive: bool, code: int) -> None:
    (line,) = re.findall(r"^ExecStartPost=(.*)$", (FOLDER / "lmc.service").read_text().replace("\\\n", ""), re.M)
    command = shlex.split(line.replace("/opt/lmc/bin/", ""))
    process = os.getpid() if alive else 2**22 + 1  # above the largest number of a process
    assert run_with(tmp_path, command, failures, MAINPID=str(process)).returncode == code


def run_with(folder: Path, command: list[str], failures: int, **variables: str) -> "subprocess.CompletedProcess[str]":
    """Run a command with an `lmc` that fails some times, and a `sleep` that does not wait."""
    counter = f'echo >> "{folder}/calls"; [ $(wc -l < "{folder}/calls") -gt {failures} ]'
    for name, script in (("lmc", counter), ("sleep", "true")):
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", **variables}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=60)


@pytest.mark.parametrize("documents", [DOCUMENTS, SERVED], ids=["kubernetes.yaml", "lmc-serve.yaml"])
def test_no_engine_gets_variables_of_vllm_from_the_name_of_a_service(documents: list[dict[str, Any]]) -> None:
    """A vLLM whose VLLM_PORT is the address of a Service, as Kubernetes sets it, ends at its start."""
    services = [one["metadata"]["name"] for one in documents if one["kind"] == "Service"]
    for one in documents:
        pod = one.get("spec", {}).get("template", {}).get("spec", {})
        for inside in pod.get("containers", []):
            if inside["image"] == IMAGE and "command" not in inside and pod.get("enableServiceLinks", True):
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
        assert engine["ulimits"]["memlock"] == -1 or "--page-locked" not in options
    assert options["--memory"].startswith("/dev/shm/")
    assert f"disk:{own.local_disk}" in server["volumes"]
    cmd, *check = server["healthcheck"]["test"]
    assert cmd == "CMD"
    assert is_checked(check, options["--socket"])
    assert 60 * int(server["stop_grace_period"].removesuffix("m")) >= STOP_SECONDS
