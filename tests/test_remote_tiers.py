"""Several remote tiers behind one store: a Redis that is near, and a directory that hosts share."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from redis_servers import RedisServer
from storage_fakes import PART_BYTES, PARTS, expected, get, key_of, lose, put

from lmc.config.settings import Settings
from lmc.config.sources import shown
from lmc.errors import ConfigError
from lmc.storage.memory.slab import Slab
from lmc.storage.store import Store
from lmc.storage.tiers.opening import described, open_tiers

pytest_plugins = ["redis_servers"]
KEYS = [key_of(number) for number in range(3)]


@pytest.fixture
def settings(redis: RedisServer, tmp_path: Path) -> Settings:
    """A Redis first, and then a directory."""
    return Settings(remote_url=[redis.tcp_url(), f"file://{tmp_path}/pool"], remote_deadline=30)


@pytest.fixture
def store(settings: Settings) -> Iterator[Store]:
    """Chunks are in both, and not in memory."""
    store = Store(Slab(8, PARTS, PART_BYTES), open_tiers(settings, 2))
    for key in KEYS:
        put(store, key)
        store.flush()
    lose(store, *KEYS)
    yield store
    store.close()


def test_a_chunk_is_written_to_all_and_found_in_the_nearest(store: Store, redis: RedisServer, tmp_path: Path) -> None:
    assert len(list((tmp_path / "pool").rglob("*.safetensors"))) == len(KEYS)
    assert store.lookup(KEYS) == ["redis"] * 3
    redis.fresh()
    assert store.lookup(KEYS) == ["directory"] * 3
    assert get(store, KEYS[0]) == expected(KEYS[0])


def test_another_host_finds_what_one_has_stored(store: Store, settings: Settings, redis: RedisServer) -> None:
    other = Store(Slab(8, PARTS, PART_BYTES), open_tiers(settings, 2))
    assert get(other, KEYS[0]) == expected(KEYS[0])
    redis.fresh()
    assert get(other, KEYS[1]) == expected(KEYS[1])
    other.close()


def test_while_one_is_away_the_other_serves(store: Store, redis: RedisServer) -> None:
    redis.kill()
    assert [get(store, key) for key in KEYS] == [expected(key) for key in KEYS]
    put(store, key_of(9))
    store.flush()
    lose(store, key_of(9))
    assert get(store, key_of(9)) == expected(key_of(9))


def test_all_are_named_without_passwords(tmp_path: Path) -> None:
    both = Settings.load(environ={"LMC_REMOTE_URL": f"redis://:hunter2@near:1 file://{tmp_path}/pool"})
    assert described(both) == f"no disk, Redis at near:1, shared directory {tmp_path}/pool"


@pytest.mark.parametrize(
    "urls",
    [
        ["redis://a", "s3://bucket/kv", "file:///pool"],
        "redis://a s3://bucket/kv file:///pool",
        ["redis://a", " s3://bucket/kv\nfile:///pool "],
    ],
)
def test_a_list_and_a_text_say_the_same(urls: object) -> None:
    found = Settings.load({"remote_url": urls}, environ={})
    assert [remote.place for remote in found.remotes] == ["redis", "objects", "directory"]


def test_nodes_of_one_cluster_are_one_url() -> None:
    (remote,) = Settings(remote_url="redis-cluster://a:1, b:2").remotes
    assert str(remote) == "Redis at a:1, b:2"


@pytest.mark.parametrize("nothing", [[], "", None, ["none"]])
def test_an_empty_list_is_no_remote_tier(nothing: object) -> None:
    assert Settings(remote_url=nothing).remotes == []


@pytest.mark.parametrize(
    ("urls", "why"),
    [
        (["redis://:hunter2@a", "redis://:hunter2@b"], "two remote tiers of one kind: Redis at a:6379 and Redis at b"),
        (["s3://a/kv", "gs://b/kv"], "two remote tiers of one kind: S3 bucket a/kv and Google Cloud Storage bucket b"),
        (["redis://:hunter2@a", "file://kv"], "a shared directory is written as file:///path"),
        (["redis://:hunter2@a", "hf3fs://x"], "hf3fs:// is not supported yet"),
        (["redis://:hunter2@a/b/c", "file:///kv"], "(argument remote_url) must be redis://"),
    ],
)
def test_what_is_wrong_is_said_without_passwords(urls: list[str], why: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Settings(remote_url=urls)
    assert why in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_a_login_for_one_store_is_given_to_no_other() -> None:
    """LMCache's `extra_config` has one login, for its one store."""
    login = {"username": "u", "password": "hunter2"}
    urls = ["redis://a", "s3://b/kv", "mooncake://c"]
    found = Settings.load({"remote_url": urls, "extra_config": login | {"protocol": "rdma"}}, environ={})
    assert str(found.remote_url).split() == ["redis://u:hunter2@a", "s3://b/kv", "mooncake://c?protocol=rdma"]
    assert "hunter2" not in repr(found) + shown("remote_url", found.remote_url)


@pytest.mark.parametrize("more", [{}, {"username": "u"}])
def test_a_list_of_one_is_one(more: dict[str, str]) -> None:
    found = Settings.load({"remote_url": ["redis://a"], "extra_config": more}, environ={})
    assert [str(remote) for remote in found.remotes] == ["Redis at a:6379"]


def test_a_password_of_a_metadata_server_is_not_shown() -> None:
    more = {"metadata_server": "etcd://root:hunter2@e:2379"}
    found = Settings.load({"remote_url": "mooncakestore://h:1/", "extra_config": more}, environ={})
    (remote,) = found.remotes
    assert remote.metadata_server == "etcd://root:hunter2@e:2379"
    assert "hunter2" not in repr(found) + repr(remote) + shown("remote_url", found.remote_url)
