"""Finds the engines in a file, in DNS, or among the pods of a Kubernetes cluster."""

import asyncio
import os
import socket
import ssl
from collections.abc import Collection
from pathlib import Path
from urllib.parse import quote

import aiohttp
import yaml
from yarl import URL

from lmc.config.sources import YAML_ERRORS
from lmc.errors import ConfigError, InputError
from lmc.http.address import host_in_url
from lmc.router.engines import EngineAddress, address
from lmc.router.watch import Discovery

API_TIMEOUT = aiohttp.ClientTimeout(total=30.0)
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")  # directory of a pod's token
ENGINE_FIELDS = set(EngineAddress._fields)  # of an engine in a file
DISCOVERY_HINT = "use file:/path/engines.yaml, dns:host:port, or kubernetes:namespace/label=value:port"


def discovery(source: str) -> Discovery:
    """Return the function that finds engines in a `source`. Raises `ConfigError` if it is invalid."""
    kind, _, rest = source.partition(":")
    if kind == "file" and rest:
        return lambda _: asyncio.to_thread(in_file, Path(rest.removeprefix("//")))
    target, _, port = rest.rpartition(":")
    if target and port.isdecimal():
        if kind == "dns":
            return lambda _: in_dns(target, int(port))
        namespace, _, labels = target.partition("/")
        if kind == "kubernetes" and namespace and labels:
            return lambda session: in_kubernetes(session, namespace, labels, int(port))
    raise ConfigError(f"--discovery {source} is invalid: {DISCOVERY_HINT}")


def in_file(path: Path) -> Collection[EngineAddress]:
    """Return the engines of a YAML file: a list of URLs, or of mappings of `ENGINE_FIELDS`. Raises `InputError`."""
    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, *YAML_ERRORS) as error:
        raise InputError(f"{path} cannot be read: {getattr(error, 'strerror', None) or 'it is not YAML'}") from None
    addresses = []
    for item in content if isinstance(content, list) else [content]:
        entry = {"url": item} if isinstance(item, str) else item
        if not isinstance(entry, dict) or not isinstance(entry.get("url"), str) or entry.keys() - ENGINE_FIELDS:
            raise InputError(f"{path} must be a list of URLs, or of mappings of {', '.join(sorted(ENGINE_FIELDS))}")
        models = entry.get("models") or []
        if not isinstance(models, list):
            raise InputError(f"{path}: the models of {entry['url']} must be a list, such as [model]")
        texts = (str(entry.get(name) or "") for name in ("cache", "admin", "kv_events"))
        try:
            addresses.append(address(entry["url"], [*map(str, models)], *texts))
        except InputError as error:
            raise InputError(f"{path}: {error}") from None
    return addresses


async def in_dns(host: str, port: int) -> Collection[EngineAddress]:
    """Return an engine for each address of a name, such as a headless service of Kubernetes."""
    infos = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    hosts = sorted({str(entry[4][0]) for entry in infos})
    return [address(f"http://{host_in_url(address_text)}:{port}") for address_text in hosts]


async def in_kubernetes(
    session: aiohttp.ClientSession,
    namespace: str,
    labels: str,
    port: int,
    account: Path = ACCOUNT,
    scheme: str = "https",
) -> Collection[EngineAddress]:
    """Return the ready pods with the given labels. Pods on one node with the same label `lmc/cache` share a cache."""
    host, api = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        raise InputError("--discovery kubernetes:… needs a router that runs in a pod")
    token = (account / "token").read_text().strip()
    trusted = ssl.create_default_context(cafile=str(account / "ca.crt")) if scheme == "https" else True
    selected = f"pods?labelSelector={quote(labels, safe='')}"
    url = URL(f"{scheme}://{host_in_url(host)}:{api}/api/v1/namespaces/{quote(namespace)}/{selected}", encoded=True)
    headers = {"authorization": f"Bearer {token}"}
    async with session.get(url, headers=headers, ssl=trusted, timeout=API_TIMEOUT) as response:
        if response.status != 200:
            raise InputError(f"the Kubernetes API answered {response.status} {response.reason}")
        pods = (await response.json())["items"]
    engines = []
    for pod in pods:
        status, labelled = pod.get("status", {}), pod.get("metadata", {}).get("labels", {})
        ready = any(
            condition["type"] == "Ready" and condition["status"] == "True" for condition in status.get("conditions", ())
        )
        if ready and status.get("podIP") and not pod["metadata"].get("deletionTimestamp"):
            shared = labelled.get("lmc/cache", "")
            cache = f"{shared}@{pod['spec'].get('nodeName', '')}" if shared else ""
            engines.append(address(f"http://{host_in_url(status['podIP'])}:{port}", cache=cache))
    return engines
