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

from lmc.errors import ConfigError, InputError
from lmc.router.engines import EngineAddress, address
from lmc.router.watch import Discovery

API_TIMEOUT = aiohttp.ClientTimeout(total=30.0)
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")  # directory of a pod's token
FIELDS = set(EngineAddress._fields)  # of an engine in a file
HINT = "use file:/path/engines.yaml, dns:host:port, or kubernetes:namespace/label=value:port"


def discovery(where: str) -> Discovery:
    """Return the function that finds engines at `where`. Raises `ConfigError` if `where` is invalid."""
    kind, _, rest = where.partition(":")
    if kind == "file" and rest:
        return lambda _: asyncio.to_thread(in_file, Path(rest.removeprefix("//")))
    place, _, port = rest.rpartition(":")
    if place and port.isdecimal():
        if kind == "dns":
            return lambda _: in_dns(place, int(port))
        namespace, _, labels = place.partition("/")
        if kind == "kubernetes" and namespace and labels:
            return lambda session: in_kubernetes(session, namespace, labels, int(port))
    raise ConfigError(f"--discovery {where} is invalid: {HINT}")


def in_file(path: Path) -> Collection[EngineAddress]:
    """Return the engines of a YAML file: a list of URLs, or of mappings of `FIELDS`. Raises `InputError`."""
    try:
        found = yaml.safe_load(path.read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise InputError(f"{path} cannot be read: {getattr(error, 'strerror', None) or 'it is not YAML'}") from None
    addresses = []
    for one in found if isinstance(found, list) else [found]:
        entry = {"url": one} if isinstance(one, str) else one
        if not isinstance(entry, dict) or not isinstance(entry.get("url"), str) or entry.keys() - FIELDS:
            raise InputError(f"{path} must be a list of URLs, or of mappings of {', '.join(sorted(FIELDS))}")
        models = [str(name) for name in entry.get("models") or ()]
        texts = (str(entry.get(name) or "") for name in ("cache", "admin", "kv_events"))
        addresses.append(address(entry["url"], models, *texts))
    return addresses


async def in_dns(host: str, port: int) -> Collection[EngineAddress]:
    """Return an engine for each address of a name, such as a headless service of Kubernetes."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    hosts = sorted({str(entry[4][0]) for entry in found})
    return [address(f"http://[{one}]:{port}" if ":" in one else f"http://{one}:{port}") for one in hosts]


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
    url = URL(f"{scheme}://{host}:{api}/api/v1/namespaces/{quote(namespace)}/{selected}", encoded=True)
    headers = {"authorization": f"Bearer {token}"}
    async with session.get(url, headers=headers, ssl=trusted, timeout=API_TIMEOUT) as answer:
        if answer.status != 200:
            raise InputError(f"the Kubernetes API answered {answer.status} {answer.reason}")
        pods = (await answer.json())["items"]
    found = []
    for pod in pods:
        status, labelled = pod.get("status", {}), pod.get("metadata", {}).get("labels", {})
        ready = any(one["type"] == "Ready" and one["status"] == "True" for one in status.get("conditions", ()))
        if ready and status.get("podIP") and not pod["metadata"].get("deletionTimestamp"):
            shared = labelled.get("lmc/cache", "")
            cache = f"{shared}@{pod['spec'].get('nodeName', '')}" if shared else ""
            found.append(address(f"http://{status['podIP']}:{port}", cache=cache))
    return found
