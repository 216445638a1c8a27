"""What lmc 0.1.0 has left on a disk or in Redis is ignored without harm, and said once."""

import logging
import shutil
from pathlib import Path

import pytest
from models import SEPARATOR, random_model, random_tokens
from redis_servers import RedisServer

from lmc.config import Settings
from lmc.connectors.transformers import CachedModel
from lmc.redis_url import parse_redis_url
from lmc.storage.disk import UNBOUNDED, DiskTier
from lmc.storage.redis import RedisTier

OLD = Path(__file__).parent / "data" / "disk_of_0.1.0"  # three records, written by lmc 0.1.0


@pytest.fixture
def old_disk(tmp_path: Path) -> Path:
    return Path(shutil.copytree(OLD, tmp_path / "disk"))


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "0.1.0" in record.getMessage()]


def cached_model(disk: Path) -> CachedModel:
    settings = Settings(
        enable_blending=True, chunk_size=32, local_disk=str(disk), max_local_cpu_size=0.01, blend_min_tokens=0
    )
    return CachedModel(random_model(layers=1), settings, SEPARATOR)


def test_old_records_on_a_disk_are_counted_in_one_line_and_not_used(
    old_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), cached_model(old_disk) as cached:
        assert not cached.knows(random_tokens(30, 1)), "it was learned by 0.1.0 under another name"
        report = cached.prefill(random_tokens(40, 2), "exact").report
        assert (report.exact, report.reused) == (0, 0)
        assert cached.learn(random_tokens(30, 1)) == 1
    (line,) = said(caplog)
    assert line.startswith("3 records on the disk tier were written by lmc 0.1.0")
    assert "lmc clear" in line
    with cached_model(old_disk) as cached:
        assert cached.knows(random_tokens(30, 1))


def test_old_records_are_right_evictable_and_removed_by_clear(old_disk: Path) -> None:
    tier = DiskTier(old_disk, UNBOUNDED)
    assert tier.check() == []
    keys = [entry.key for entry in tier.entries()]
    assert len(keys) == 3
    assert all(tier.delete(key) for key in keys)
    tier.close()
    assert not list(old_disk.rglob("*.safetensors"))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory):
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


def test_a_new_redis_is_no_matter_of_a_message(server, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            RedisTier(parse_redis_url(server.tcp_url()), prefix="new").close()
    assert said(caplog) == []


def test_a_redis_that_was_used_by_the_old_one_is_told_once(server, caplog: pytest.LogCaptureFixture) -> None:
    server.client().set("old:format", "1")  # 0.1.0 wrote this, and no name of its naming
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            RedisTier(parse_redis_url(server.tcp_url()), prefix="old").close()
    (line,) = said(caplog)
    assert "under the prefix old" in line
    assert "lmc clear" in line
