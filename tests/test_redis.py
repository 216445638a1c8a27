"""A tier in Redis: the contract, over every kind of connection, with real servers."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from redis_servers import RedisCluster, RedisServer
from storage_fakes import key_of, memory, meta_of, stored
from tier_contract import K0, K1, K2, ListedContract, read, write

from lmc.config.redis_url import parse_redis_url
from lmc.errors import CorruptRecord, TierUnusable
from lmc.shapes import MIB
from lmc.storage.tiers.redis import RedisTier
from lmc.storage.tiers.redis.layout import LARGEST, overlaps, value_sizes
from lmc.storage.tiers.tier import Written

pytest_plugins = ["redis_servers"]


class TestRedisTier(ListedContract):
    """Over TCP."""

    @pytest.fixture
    def url(self, redis) -> str:
        return redis.tcp_url()

    @pytest.fixture
    def tier(self, redis, url) -> Iterator[RedisTier]:
        tier = RedisTier(parse_redis_url(url))
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
        try:
            read(tier, key)
        except FileNotFoundError as error:  # a value is missing altogether: as if Redis had evicted it
            raise CorruptRecord from error

    def tick(self, tier):
        """Put the last uses a minute back, since Redis counts whole seconds."""
        for name in (f"lmc:{{{key.hex()}}}" for key in (K0, K1, K2)):
            if (idle := tier.around.object("idletime", name)) is not None:
                tier.around.restore(name, 0, tier.around.dump(name), replace=True, idletime=idle + 60)


class TestRedisTierOverUnixSocket(TestRedisTier):
    @pytest.fixture
    def url(self, redis) -> str:
        return redis.unix_url(db=0)


class TestRedisTierInValkey(TestRedisTier):
    @pytest.fixture
    def redis(self, valkey):
        return valkey

    @pytest.fixture
    def url(self, redis) -> str:
        return redis.tcp_url().replace("redis://", "valkey://")

    def test_the_server_is_a_valkey(self, redis):
        """The tests above would pass with a Redis, too."""
        assert redis.client().info("server")["server_name"] == "valkey"


@pytest.fixture(scope="module")
def tls_server(tmp_path_factory):
    with RedisServer(tmp_path_factory.mktemp("tls"), tls=True, password="s3cret") as server:
        yield server


FEW_RIGHTS = "~lmc:* +@read +@write +@scripting +@connection +cluster|slots"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    users = [f"user few on >s3cret {FEW_RIGHTS}", "user reader on >s3cret ~* +@read +@connection +cluster|slots"]
    with RedisCluster(tmp_path_factory.mktemp("cluster"), password="s3cret", extra=users) as cluster:
        yield cluster


def url_of(cluster: RedisCluster, user: str) -> str:
    return cluster.url().replace("://:", f"://{user}:")


class TestRedisTierOverTls(TestRedisTier):
    @pytest.fixture
    def redis(self, tls_server):
        tls_server.client().flushall()
        return tls_server

    @pytest.fixture
    def url(self, redis) -> str:
        return f"{redis.tls_url()}?ssl_ca_certs={redis.ca}"


class TestRedisTierOnACluster(TestRedisTier):
    @pytest.fixture
    def redis(self, cluster):
        cluster.client().flushall(target_nodes="primaries")
        return cluster

    @pytest.fixture
    def url(self, redis) -> str:
        return redis.url()

    def raw_read(self, tier, key):
        header = tier.around.get(f"lmc:{{{key.hex()}}}")
        if header is None:
            return None
        return header + (tier.around.get(f"lmc:{{{key.hex()}}}:0") or b"")

    def test_chunks_lie_on_all_nodes_and_each_on_one(self, tier, redis):
        for i in range(30):
            write(tier, key_of(i))
        assert tier.contains([key_of(i) for i in range(31)]) == [True] * 30 + [False]
        assert {redis.node_of(f"lmc:{{{key_of(i).hex()}}}").port for i in range(30)} == {n.port for n in redis.nodes}
        assert len(list(tier.entries())) == 30
        assert tier.check() == []


# -- how records lie in values ---------------------------------------------------------------------------------------


def test_values_fill_what_the_allocator_gives():
    """A value of 1 MiB and its header would take 1.25 MiB."""
    assert value_sizes(100) == (100,)
    assert value_sizes(MIB) == (MIB - 64, 64)
    assert value_sizes(4 * MIB) == (LARGEST, 64)
    assert value_sizes(32 * MIB) == (*[LARGEST] * 8, 512)
    assert value_sizes(3 * MIB + 400_000) == (3 * MIB + 400_000,), "half a MiB more is the next class: little is lost"
    for total in (1, 5_000_000, 7 * MIB, 12_345_678):
        assert sum(value_sizes(total)) == total
        assert max(value_sizes(total)) <= LARGEST


def test_a_range_is_cut_where_values_end():
    assert overlaps((10, 10, 5), 0, 25) == [(0, 0, 10), (1, 0, 10), (2, 0, 5)]
    assert overlaps((10, 10, 5), 8, 21) == [(0, 8, 2), (1, 0, 10), (2, 0, 1)]
    assert overlaps((10, 10, 5), 12, 13) == [(1, 2, 1)]


@pytest.mark.parametrize(("parts", "part_bytes"), [(7, 700_000), (3, 5 * MIB), (40, 4096), (2, 4 * MIB)])
def test_parts_may_straddle_values(redis, parts, part_bytes):
    tier, meta = RedisTier(parse_redis_url(redis.tcp_url()), deadline=5), meta_of(K0, parts, part_bytes)
    whole = stored(meta)
    assert tier.write(meta, [whole]) is Written.STORED
    assert read(tier, K0) == bytes(whole)
    reader = tier.open(K0)
    part = memory(meta.stored_part)
    for wanted in reversed(range(parts)):
        reader.read(wanted, 1, [part])
        assert part == whole[wanted * meta.stored_part : (wanted + 1) * meta.stored_part]
    reader.close()
    biggest = max(redis.client().memory_usage(f"lmc:{{{K0.hex()}}}:{i}") for i in range(len(value_sizes(len(whole)))))
    assert biggest <= 4 * MIB + 200
    assert tier.delete(K0)
    assert redis.client().keys("lmc:{*") == []
    tier.close()


# -- reading ahead ---------------------------------------------------------------------------------------------------


def test_what_was_asked_for_early_comes_in_any_order(redis):
    """Replies come in the order of asking: what is in the way of another is thrown away, and asked for again."""
    tier = RedisTier(parse_redis_url(redis.tcp_url()), deadline=5)
    for key in (K0, K1):
        write(tier, key)
    first, second = tier.open(K0), tier.open(K1)
    into = memory(4096)
    for reader in (first, second):
        reader.request(0, 1)
    for reader in (first, second):
        reader.request(1, 1)
    for reader, key, part in [(second, K1, 1), (first, K0, 0), (first, K0, 1), (second, K1, 0), (first, K0, 2)]:
        reader.read(part, 1, [into])
        assert into == stored(meta_of(key))[part * 4096 : (part + 1) * 4096]
    second.request(2, 1)
    second.close()  # its answer is on its way
    assert tier.contains([K0, key_of("none")]) == [True, False]
    first.request(0, 2)
    assert read(tier, K1) == bytes(stored(meta_of(K1)))
    first.close()
    tier.close()


def test_no_more_than_a_window_is_on_its_way(redis):
    """What was asked for lies in the server's memory until it is read."""
    tier, meta = RedisTier(parse_redis_url(redis.tcp_url()), deadline=5), meta_of(K0, 30, 2 * MIB)
    whole = stored(meta)
    tier.write(meta, [whole])
    reader = tier.open(K0)
    for part in range(30):
        reader.request(part, 1)
    time.sleep(0.2)
    held = sum(int(client["omem"]) for client in redis.client().client_list())
    assert held <= 20 * MIB
    into = memory(2 * MIB)
    for part in range(30):
        reader.read(part, 1, [into])
        assert into == whole[part * 2 * MIB : (part + 1) * 2 * MIB]
    reader.close()
    tier.close()


# -- several writers -------------------------------------------------------------------------------------------------


def test_two_writers_of_one_chunk_never_mix(redis):
    """Each has its own version of the bytes; whichever is found is one of them as a whole."""
    url = parse_redis_url(redis.tcp_url())
    tiers = [RedisTier(url, deadline=5) for _ in range(2)]
    for i in range(20):
        meta = meta_of(key_of(i), 6, MIB)
        versions = [stored(meta, version) for version in range(2)]
        barrier = threading.Barrier(2)

        def write_one(which, meta=meta, versions=versions, barrier=barrier):
            barrier.wait()
            return tiers[which].write(meta, [versions[which]])

        with ThreadPoolExecutor(2) as pool:
            outcomes = set(pool.map(write_one, range(2)))
        assert outcomes == {Written.STORED, Written.PRESENT}
        assert read(tiers[0], meta.key) in [bytes(version) for version in versions]
        tiers[1].delete(meta.key)
    assert redis.client().keys("lmc:{*") == []
    for tier in tiers:
        tier.close()


def test_values_of_an_unfinished_write_expire_and_are_never_seen(redis):
    tier = RedisTier(parse_redis_url(redis.tcp_url()), deadline=5)
    meta = meta_of(K0, 3, 2 * MIB)

    class DiedError(Exception):
        pass

    def views():
        yield stored(meta)[: 2 * MIB]
        yield stored(meta)[2 * MIB : 4 * MIB]
        raise DiedError

    class Dying(list):
        def __iter__(self):
            return views()

    with pytest.raises(DiedError):
        tier.write(meta, Dying())
    write(tier, K1)
    assert tier.contains([K0]) == [False]
    assert tier.open(K0) is None
    left = [name for name in redis.client().keys("*") if K0.hex().encode() in name]
    assert all(0 < redis.client().ttl(name) <= 60 for name in left)
    assert tier.check() == []
    tier.close()


def test_a_time_to_live_ends_a_record_as_a_whole(redis):
    tier = RedisTier(parse_redis_url(redis.tcp_url()), ttl=100)
    write(tier, K0)
    client, header = redis.client(), f"lmc:{{{K0.hex()}}}"
    assert 90 < client.ttl(header) <= 100
    assert client.ttl(header) < client.ttl(f"{header}:0") <= 160, (
        "the values outlive the header, so that it never promises too much"
    )
    tier.close()


def test_without_a_time_to_live_nothing_expires(redis):
    tier = RedisTier(parse_redis_url(redis.tcp_url()))
    write(tier, K0)
    assert {redis.client().ttl(name) for name in redis.client().keys("lmc:*")} == {-1}
    tier.close()


def test_prefixes_and_databases_keep_users_apart(redis):
    tiers = [
        RedisTier(parse_redis_url(redis.tcp_url(db=db)), prefix=prefix)
        for db, prefix in [(0, "lmc"), (0, "team.a"), (3, "lmc")]
    ]
    write(tiers[0], K0)
    assert [tier.contains([K0]) for tier in tiers] == [[True], [False], [False]]
    assert [len(list(tier.entries())) for tier in tiers] == [1, 0, 0]
    for tier in tiers:
        tier.close()


def test_a_value_without_its_record_is_found_and_removed(redis):
    tier = RedisTier(parse_redis_url(redis.tcp_url()))
    write(tier, K0)
    redis.client().delete(f"lmc:{{{K0.hex()}}}")
    assert [finding.problem for finding in tier.check()] == ["a value without a record"]
    assert [finding.fixed for finding in tier.check(fix=True)] == [True]
    assert redis.client().keys("lmc:{*") == []
    tier.close()


# -- starting --------------------------------------------------------------------------------------------------------


def do_everything(tier):
    write(tier, K0)
    assert read(tier, K0) == bytes(stored(meta_of(K0)))
    assert [entry.key for entry in tier.entries()] == [K0]
    assert tier.check() == []
    assert tier.delete(K0)
    tier.close()


def test_a_user_with_few_rights_is_enough(tmp_path):
    rights = "~team:* +@read +@write +@scripting +@connection"
    with RedisServer(tmp_path, users=[f"lmc on >s3cret {rights}"]) as server:
        do_everything(RedisTier(parse_redis_url(server.tcp_url(user="lmc", password="s3cret")), prefix="team"))


def test_a_check_says_what_its_user_may_not_remove(tmp_path):
    """A record was said to be removed that stayed, and a value ended the check with an error."""
    rights = "~team:* +@read +@write +@scripting +@connection -unlink"
    with RedisServer(tmp_path, users=[f"lmc on >s3cret {rights}"]) as server:
        tier = RedisTier(parse_redis_url(server.tcp_url(user="lmc", password="s3cret")), prefix="team")
        around = server.client()
        around.set(f"team:{{{K0.hex()}}}", b"no header")
        around.set(f"team:{{{K1.hex()}}}:0", b"a value without a record")
        assert [finding.fixed for finding in tier.check(fix=True)] == [False, False]
        tier.close()


def test_a_user_without_one_of_these_rights_is_refused_at_the_start(tmp_path):
    rights = ["~team:*", "+@read", "+@write", "+@scripting", "+@connection"]
    rest = [" ".join(right for right in rights if right != missing) for missing in rights]
    with RedisServer(tmp_path, users=[f"user{i} on >s3cret {fewer}" for i, fewer in enumerate(rest)]) as server:
        for number in range(len(rights)):
            with pytest.raises(TierUnusable, match="no permissions"):
                RedisTier(parse_redis_url(server.tcp_url(user=f"user{number}", password="s3cret")), prefix="team")


def test_a_cluster_that_has_no_slots_yet_is_waited_for(tmp_path):
    """Nodes start before somebody makes a cluster of them: redis-py raised an IndexError."""
    with RedisServer(tmp_path, extra=["cluster-enabled yes", "cluster-node-timeout 1000"]) as server:
        tier = RedisTier(parse_redis_url(f"redis-cluster://{server.host}:{server.port}"))
        assert not tier.usable
        assert tier.contains([K0]) == [False]
        assert tier.open(K0) is None
        tier.close()


def test_a_user_without_the_right_to_write_is_refused_by_a_cluster_at_the_start(cluster):
    """Only single servers were refused; a cluster was said to be away, and was asked again and again."""
    cluster.client().flushall(target_nodes="primaries")
    before = set(threading.enumerate())
    with pytest.raises(TierUnusable, match="NOPERM"):
        RedisTier(parse_redis_url(url_of(cluster, "reader")))
    assert not [thread.name for thread in set(threading.enumerate()) - before if thread.name.startswith("lmc-")]


def test_a_user_with_few_rights_is_enough_on_a_cluster(cluster):
    cluster.client().flushall(target_nodes="primaries")
    tier = RedisTier(parse_redis_url(url_of(cluster, "few")))
    assert tier.usable
    do_everything(tier)
