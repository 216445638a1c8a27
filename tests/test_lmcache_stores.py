"""LMCache's published configurations of disks, file systems, Redis, Valkey, Mooncake and S3 with real servers.

Each is loaded as it was published, with other addresses. `test_config.py` reads all published configurations.
"""

import json
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from mooncake_servers import mooncake_store
from redis_servers import RedisCluster, RedisServer, Sentinels
from s3_servers import Proxy, make_bucket, s3_server
from storage_fakes import PART_BYTES, PARTS, expected, get, key_of, lose, put

from lmc.config.settings import Settings
from lmc.storage.memory.slab import Slab
from lmc.storage.store import Store
from lmc.storage.tiers.opening import open_tiers

KINDS = ("disk", "redis", "mooncake", "objects")
PUBLISHED = {
    entry["name"]: entry
    for entry in yaml.safe_load((Path(__file__).parent / "data/lmcache_configurations.yaml").read_text())
    if entry["needs"] in KINDS
}
USERS = [f"{name} on >example-password ~* &* +@all" for name in ("default", "example-user")]
Changes = dict[str, str]  # texts of a configuration, and what stands there instead


class HostAddressed(Proxy):
    """A proxy of HTTP for buckets whose name is the beginning of a host's name."""

    def serve(self, handler: Any) -> None:
        """Answer one request, whose target is a whole URL."""
        url = urlsplit(handler.path)
        bucket = str(url.hostname).partition(".")[0]
        handler.path = f"/{bucket}{url.path}" + (f"?{url.query}" if url.query else "")
        self.requests.append(f"{handler.headers['Authorization']} {url.hostname}")
        handler.headers.replace_header("Host", f"127.0.0.1:{self.behind}")
        super().serve(handler)


@pytest.fixture
def changes(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Changes]:
    """The addresses of servers that run, by the published ones, for the configuration `entry` of a test."""
    entry = request.node.callspec.params["entry"]
    guarded = "password" in str(entry)
    with ExitStack() as running:
        if entry["name"] == "redis-sentinel":
            sentinels = running.enter_context(Sentinels(tmp_path / "redis"))
            monkeypatch.setenv("REDIS_SERVICE_NAME", sentinels.service)  # LMCache's variable
            ports = zip((26379, 26380, 26381), sentinels.sentinels, strict=True)
            yield {f"localhost:{published}": f"{host}:{port}" for published, (host, port) in ports}
        elif entry["name"] == "valkey-cluster-nodes":
            lines = [f"user {user}" for user in USERS]
            cluster = running.enter_context(RedisCluster(tmp_path / "redis", password="example-password", extra=lines))
            hosts = ("10.0.0.5", "10.0.0.6", "10.0.0.7")
            yield {f"{name}:6379": f"{node.host}:{node.port}" for name, node in zip(hosts, cluster.nodes, strict=True)}
        elif entry["needs"] == "redis":
            server = running.enter_context(RedisServer(tmp_path / "redis", users=USERS if guarded else ()))
            published = ("10.0.0.5:6379", "localhost:6379", "localhost:65432")
            yield dict.fromkeys(published, f"{server.host}:{server.port}")
        elif entry["needs"] == "mooncake":
            pytest.importorskip("mooncake.store", exc_type=ImportError)
            store = running.enter_context(mooncake_store(over_http=True))
            addresses = dict.fromkeys(("127.0.0.1:50051", "localhost:50051"), f"127.0.0.1:{store.port}")
            sizes = {"3355443200": str(16 << 20), "1073741824": str(16 << 20)}
            yield {**addresses, **sizes, "127.0.0.1:8080": f"127.0.0.1:{store.metadata_port}"}
        elif "s3" in entry["name"]:
            port = running.enter_context(s3_server())
            make_bucket(port, "test-127")
            proxy = running.enter_context(closing(HostAddressed(port)))
            monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{proxy.port}")
            yield {}
            asked = [one.rpartition(" ") for one in proxy.requests if "Credential=" in one]
            assert {host for *_, host in asked} == {"test-127.cwlota.com"}
            assert all("Credential=example-access-key/" in login for login, *_ in asked)
            assert all("/US-WEST-04A/s3/" in login for login, *_ in asked)
        else:
            monkeypatch.setenv("HOME", str(tmp_path))
            monkeypatch.chdir(tmp_path)  # Some have a relative path.
            yield {path: f"{tmp_path}{path}" for path in ("/local/disk", "/local_disk/", "/tmp/lmcache-fs")}


@pytest.mark.parametrize("entry", PUBLISHED.values(), ids=PUBLISHED)
def test_a_chunk_comes_back_from_the_store_of_a_published_configuration(
    entry: dict[str, Any], changes: Changes, tmp_path: Path
) -> None:
    text = json.dumps(entry)
    for published, own in changes.items():
        text = text.replace(published, own)
    changed = json.loads(text)
    (tmp_path / "lmcache.yaml").write_text(yaml.safe_dump(changed.get("settings") or {}))
    environ = {"LMCACHE_CONFIG_FILE": str(tmp_path / "lmcache.yaml"), **changed.get("environment", {})}
    settings = Settings.load({"remote_deadline": 30}, environ=environ)
    place = entry["needs"] if entry["needs"] != "objects" or "s3" in entry["name"] else "directory"
    key = key_of(entry["name"])
    with closing(Store(Slab(4, PARTS, PART_BYTES), open_tiers(settings, 2))) as store:
        assert put(store, key)
        store.flush()
        lose(store, key)
        assert get(store, key) == expected(key)
        assert {name: count for name, count in store.stats().hits.items() if count} == {place: 1}
