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

from lmc.config import Settings
from lmc.redis_url import parse_redis_url
from lmc.service.command import serve

FOLDER = Path(__file__).parent.parent / "examples" / "deploy"
KUBERNETES = "1.31"
DOCUMENTS: list[dict[str, Any]] = list(yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text()))


def named(kind: str, name: str) -> dict[str, Any]:
    (found,) = [one for one in DOCUMENTS if one["kind"] == kind and one["metadata"]["name"] == name]
    return found


def container(name: str) -> dict[str, Any]:
    (found,) = named("Deployment", name)["spec"]["template"]["spec"]["containers"]
    return found


def test_the_linter_of_dockerfiles_has_nothing_to_say() -> None:
    linter = Path(sys.executable).parent / "hadolint"
    done = subprocess.run([linter, FOLDER / "Dockerfile"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("one", DOCUMENTS, ids=lambda one: f"{one['kind']} {one['metadata']['name']}")
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
