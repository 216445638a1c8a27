"""A tier in Redis: the contract, over every kind of connection, with real servers."""

import time
from collections.abc import Iterator

import pytest
from redis_servers import RedisCluster, RedisServer, Sentinels
from storage_fakes import key_of, memory, meta_of, stored
from tier_contract import K0, K1, TierContract, read, write

from lmc.remote import parse_remote
from lmc.shapes import MIB
from lmc.storage.redis import RedisTier
from lmc.storage.tier import Written
from lmc.storage.values import LARGEST, overlaps, value_sizes

pytest_plugins = ["redis_servers"]


class TestRedisTier(TierContract):
    """Over TCP."""

    @pytest.fixture
    def url(self, redis) -> str:
        return redis.tcp_url()

    @pytest.fixture
    def tier(self, redis, url) -> Iterator[RedisTier]:
        tier = RedisTier(parse_remote(url))
        tier.around = redis.client()  # type: ignore[attr-defined]
        yield tier
        tier.close()

    def raw_read(self, tier, key):
        header = tier.around.get(f"lmc:{{{key.hex()}}}")
        if header is None:
            assert not tier.around.keys("lmc:{" + key.hex() + "}:*"), "values were left behind"
            return None
        values = []
        while (value := tier.around.get(f"lmc:{{{key.hex()}}}:{len(values)}")) is not None:
            values.append(value)
        return header + b"".join(values)

    def raw_write(self, tier, key, blob):
        tier.around.set(f"lmc:{{{key.hex()}}}", blob[:4096])
        tier.around.set(f"lmc:{{{key.hex()}}}:0", blob[4096:])

    def meet(self, tier, key):
        read(tier, key)

    def tick(self):
        time.sleep(1.1)  # Redis counts idle time in seconds


class TestRedisTierOverUnixSocket(TestRedisTier):
    @pytest.fixture
    def url(self, redis) -> str:
        return redis.unix_url(db=0)
