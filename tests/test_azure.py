"""The object tier in Azure Blob Storage, by Microsoft's emulator: `make azurite` installs it."""

from contextlib import closing

import pytest
from azure_servers import ENVIRONMENT, azure_url, azurite_server, find_azurite
from s3_servers import Proxy
from storage_fakes import eventually, meta_of, stored
from test_objects import (
    LARGE,
    ObjectContract,
    Objects,
    assert_missing_until_written_again,
    large,
    opened,
    raw_read,
)
from tier_contract import K0, K1, read, write

from lmc.config.remote_url import ObjectURL, parse_remote_url
from lmc.config.settings import Settings
from lmc.errors import TierUnusable
from lmc.storage.tiers.opening import object_store

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def azure():
    if find_azurite() is None:
        pytest.skip("run `make azurite`")
    with azurite_server() as port:
        yield port


@pytest.fixture(autouse=True)
def login(monkeypatch):
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def proxy(azure):
    with closing(Proxy(azure)) as proxy:
        yield proxy


def opened_by(url: str) -> Objects:
    remote = parse_remote_url(url)
    assert isinstance(remote, ObjectURL)
    return Objects(object_store(remote, 30), str(remote), deadline=30, lookup_seconds=30)


class TestInAzure(ObjectContract):
    @pytest.fixture
    def tier(self, azure, login, request):
        with closing(opened_by(azure_url(azure, request.node.name.encode().hex()[-60:]))) as tier:
            yield tier


def test_a_container_of_the_settings_is_opened(azure):
    with closing(opened(Settings(remote_url=azure_url(azure, "settings"), remote_deadline=30))) as tier:
        write(tier, K0)
        assert read(tier, K0) == bytes(stored(meta_of(K0)))
        assert [entry.key for entry in tier.entries()] == [K0]
        assert tier.check() == []


def test_a_container_that_does_not_exist_is_refused_at_the_start(azure):
    with pytest.raises(TierUnusable, match="Azure container nowhere/folder does not exist"):
        opened_by(azure_url(azure, "folder", "nowhere"))


def test_a_wrong_key_is_refused_at_the_start_and_not_shown(azure, monkeypatch):
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "d3Jvbmcga2V5")
    with pytest.raises(TierUnusable, match="refuses access") as refusal:
        opened_by(azure_url(azure, "folder"))
    assert "d3Jvbmcga2V5" not in str(refusal.value)


@pytest.mark.parametrize("mode", ["fail", "refuse", "cut"])
def test_a_storage_that_fails_costs_misses_until_it_works(proxy, mode):
    with closing(opened_by(azure_url(proxy.port, mode))) as tier:
        write(tier, K0)
        proxy.mode = mode
        for _ in range(3):
            if tier.usable:
                with pytest.raises(OSError, match="Azure container"):
                    read(tier, K0)
        assert tier.contains([K1]) == [False]
        proxy.mode = "pass"
        eventually(lambda: tier.usable)
        assert read(tier, K0) == bytes(stored(meta_of(K0)))


def test_a_large_record_is_uploaded_in_blocks_and_found_when_all_are_there(proxy, monkeypatch):
    large(monkeypatch)
    with closing(opened_by(azure_url(proxy.port, "large"))) as tier:
        assert_missing_until_written_again(tier, proxy, "comp=blocklist", "Azure container")
        assert len([request for request in proxy.requests if "comp=block&" in request]) >= 2 * 3
        assert len(raw_read(tier, K0)) == 4096 + LARGE.memory
