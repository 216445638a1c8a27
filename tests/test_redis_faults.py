"""Redis fails in every way it has, in the middle of reads and writes: nothing wrong is read, every read ends, nobody
waits for long.
"""

import contextlib
import logging
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import redis as redis_py
from models import SEPARATOR, random_model, random_tokens
from ports import free_port
from redis_servers import RedisCluster, RedisServer, Sentinels, servers_of, wait_until
from storage_fakes import as_tensor, content, key_of, memory, meta_of, own_seconds, stored, tiers_of, writing

from lmc.blend.segments import join
from lmc.blend.strategies import RecomputePolicy as Repair
from lmc.config.redis_url import parse_redis_url
from lmc.config.settings import Settings
from lmc.connectors.transformers import CachedModel
from lmc.errors import ChunkLost, CorruptRecord, TierUnusable
from lmc.keys import ChunkKey
from lmc.storage.memory.slab import Slab
from lmc.storage.store import Store
from lmc.storage.tiers import breaker
from lmc.storage.tiers.opening import open_remote
from lmc.storage.tiers.redis import RedisTier, resp
from lmc.storage.tiers.redis import tier as redis_tier
from lmc.storage.tiers.redis.connections import Server
from lmc.storage.tiers.tier import Written

pytest_plugins = ["redis_servers"]

DEADLINE = 1.0
LIMIT = 2.5  # seconds, without those in which this process had no CPU: the deadline, and room for the work itself
PARTS, PART_BYTES = 3, 64 << 10
KEYS = [key_of(i) for i in range(60)]
SECRETS = ("hunter2", "wrong-guess", "correct-horse")


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    own_seconds()  # The thread that it starts is not one of a test.
    before = set(threading.enumerate())
    yield
    wait_until(lambda: set(threading.enumerate()) <= before, "the end of every thread")


@pytest.fixture(autouse=True)
def soon_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(breaker, "LONGEST_PAUSE", 1.0)


class Traffic:
    """Threads that store and read chunks through a small slab, and compare every byte."""

    def __init__(self, store: Store, keys: Sequence[ChunkKey], threads: int = 3) -> None:
        self.right = self.lost = 0  # reads from Redis
        self.wrong: list[ChunkKey] = []
        self.longest = 0.0  # seconds that a lookup or a read took
        self._store, self._keys = store, keys
        self._over = threading.Event()
        self._bytes = {key: [content(key, part, PART_BYTES) for part in range(PARTS)] for key in keys}
        self._starved = (
            time.monotonic() - own_seconds()
        )  # seconds in which threads of this process had no CPU, as of a moment ago
        self._pool = ThreadPoolExecutor(threads + 1)
        self._pool.submit(self._watch)
        self._running = [self._pool.submit(self._run, seed) for seed in range(threads)]

    def flows(self) -> None:
        """Wait until chunks were written to Redis, and read from there, since now."""
        read, written = self.right + 10, self._written() + 3
        wait_until(lambda: (self.right >= read and self._written() >= written) or not self._busy(), "reads and writes")
        assert self._busy()

    def stop(self) -> None:
        self._over.set()
        for thread in self._running:
            thread.result(60)
        self._pool.shutdown()

    def _busy(self) -> bool:
        return not any(thread.done() for thread in self._running)

    def _written(self) -> int:
        return self._store.stats().writes.get("redis", 0)

    def _run(self, seed: int) -> None:
        dice = random.Random(seed)
        while not self._over.is_set():
            key = dice.choice(self._keys)
            step = dice.choices((self._look, self._read, None), (2, 10, 1))[0]
            if step is None:
                self._store.forget(key)  # so that there is always something to be written
            else:
                self._timed(step, key)

    def _watch(self) -> None:
        while not self._over.wait(0.05):  # To ask the kernel takes longer than most steps.
            self._starved = time.monotonic() - own_seconds()

    def _timed(self, step: Callable[[ChunkKey], None], key: ChunkKey) -> None:
        began, starved = time.monotonic(), self._starved
        step(key)
        self.longest = max(self.longest, time.monotonic() - began - (self._starved - starved))

    def _look(self, key: ChunkKey) -> None:
        self._store.lookup([key, *self._keys[:5]])

    def _read(self, key: ChunkKey) -> None:
        with self._store.pinned([key]) as (pin,):
            if pin is not None:
                try:
                    parts = [self._store.part(pin, part)[:PART_BYTES].numpy().tobytes() for part in range(PARTS)]
                except ChunkLost:
                    self.lost += 1
                    return
                if parts != self._bytes[key]:
                    self.wrong.append(key)
                elif pin.place == "redis":
                    self.right += 1
                return
        with writing(self._store, meta_of(key, PARTS, PART_BYTES)) as slot:
            if slot is not None:
                for part, blob in enumerate(self._bytes[key]):
                    slot[part, :PART_BYTES] = as_tensor(blob)


@contextlib.contextmanager
def traffic(url: str, keys: Sequence[ChunkKey] = KEYS) -> Iterator[tuple[Traffic, Store, RedisTier]]:
    """Reads and writes that flow before the block, are right all through it, and leave nothing behind."""
    tier = RedisTier(parse_redis_url(url), deadline=DEADLINE)
    store = Store(Slab(8, PARTS, PART_BYTES), [tier])
    busy = Traffic(store, keys)
    try:
        busy.flows()
        yield busy, store, tier
    finally:
        busy.stop()
        began = own_seconds()
        store.close()
        took = own_seconds() - began
    assert busy.wrong == []
    assert busy.longest < LIMIT
    assert took < LIMIT
    assert store.held() == 0
    assert store.check_integrity() == []


def tier_of(url: str, **options: float) -> RedisTier:
    return RedisTier(parse_redis_url(url), **{"deadline": DEADLINE, **options})  # type: ignore[arg-type]


def write(tier: RedisTier, *keys: ChunkKey) -> None:
    for key in keys:
        assert tier.write(meta_of(key), [stored(meta_of(key))]) is Written.STORED


def read(tier: RedisTier, key: ChunkKey) -> bytes | None:
    reader = tier.open(key)
    if reader is None:
        return None
    with contextlib.closing(reader):
        into = memory(reader.meta.offset(reader.meta.parts))
        reader.read(0, reader.meta.parts, [into])
        return bytes(into)


def right(key: ChunkKey) -> bytes:
    return bytes(stored(meta_of(key)))


def takes(tier: RedisTier, key: ChunkKey) -> bool:
    """Whether a record that is not there can be stored now."""
    with contextlib.suppress(OSError):
        tier.delete(key)
        return tier.write(meta_of(key), [stored(meta_of(key))]) is Written.STORED
    return False


def back(tier: RedisTier) -> None:
    wait_until(lambda: tier.usable, "a tier that is usable again")


@pytest.fixture(scope="module")
def three_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisCluster]:
    """A cluster with a password, for tests that leave every node running."""
    with RedisCluster(tmp_path_factory.mktemp("cluster"), password="hunter2") as cluster:
        yield cluster


# -- under load ------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["redis", "valkey"])
def server(request):
    """A Redis, and a Valkey."""
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize(("away", "again"), [("kill", "restart"), ("pause", "resume")])
def test_a_server_that_goes_away_under_load_costs_misses_and_is_used_again_when_it_is_back(server, away, again):
    with traffic(server.tcp_url()) as (busy, store, tier):
        getattr(server, away)()
        wait_until(lambda: not tier.usable, "an open breaker")
        for _ in range(5):
            time.sleep(0.05)  # memory alone serves meanwhile
            assert not tier.usable
        getattr(server, again)()
        back(tier)
        busy.flows()
    assert store.stats().failed["redis"] >= 1


@pytest.mark.parametrize("away", ["kill", "pause"])
def test_a_store_is_closed_in_time_though_its_server_never_comes_back(redis, away):
    with traffic(redis.unix_url()):
        getattr(redis, away)()  # and at once the end


def test_a_server_that_is_restarted_empty_has_everything_written_again(redis):
    with traffic(redis.tcp_url()) as (busy, _, tier):
        for _ in range(3):
            redis.restart()
            back(tier)
            busy.flows()


def test_connections_that_are_killed_under_load_are_made_again(redis):
    with traffic(redis.tcp_url()) as (busy, _, tier):
        for _ in range(20):
            redis.ask("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            time.sleep(0.02)
        back(tier)
        busy.flows()


def test_a_full_server_is_read_from_and_written_to_again_when_there_is_room(server, monkeypatch, caplog):
    monkeypatch.setattr("lmc.storage.tiers.redis.tier.PAUSE_SECONDS", 0.3)
    with traffic(server.tcp_url()) as (busy, store, tier):
        used = int(server.client().info("memory")["used_memory"])
        server.ask("CONFIG", "SET", "maxmemory", used)
        try:
            wait_until(lambda: "storing there pauses" in caplog.text, "a refusal")
            seen = busy.right
            wait_until(lambda: busy.right > seen + 20, "reads from a full server")
            assert tier.usable, "a full server is no reason not to read from it"
        finally:
            server.ask("CONFIG", "SET", "maxmemory", 0)
        busy.flows()
    assert caplog.text.count("storing there pauses") == 1
    assert store.stats().corrupt.get("redis", 0) == 0


def test_a_full_server_at_start_is_good_to_read_from(redis):
    with contextlib.closing(tier_of(redis.tcp_url())) as tier:
        write(tier, KEYS[0])
    redis.ask("DEL", "lmc:format")
    redis.ask("CONFIG", "SET", "maxmemory", 1)
    try:
        with contextlib.closing(tier_of(redis.tcp_url())) as tier:
            assert read(tier, KEYS[0]) == right(KEYS[0])
            assert tier.write(meta_of(KEYS[1]), [stored(meta_of(KEYS[1]))]) is Written.REFUSED
            assert tier.usable
    finally:
        redis.ask("CONFIG", "SET", "maxmemory", 0)


def test_a_server_that_evicts_headers_and_values_under_load_costs_misses(tmp_path):
    with (
        RedisServer(tmp_path, maxmemory="3mb", policy="allkeys-lru") as server,
        traffic(server.tcp_url()) as (busy, _, tier),
    ):
        around = server.client()
        wait_until(lambda: around.info("stats")["evicted_keys"] > 30, "evictions")
        busy.flows()
        assert tier.usable


def test_values_that_vanish_one_by_one_cost_misses(redis):
    """As a server does that evicts: a header whose values are gone, values whose header is gone, asides of a write."""
    dice = random.Random(7)
    around = redis.client()
    with traffic(redis.tcp_url()) as (busy, _, tier):
        for _ in range(60):
            names = around.keys("lmc:{*")
            if names:
                around.unlink(*dice.sample(names, min(3, len(names))))
            time.sleep(0.01)
        assert tier.usable
        busy.flows()


def test_sentinels_name_another_master_under_load(tmp_path):
    with Sentinels(tmp_path) as group, traffic(group.url()) as (busy, _, tier):
        group.failover()
        back(tier)
        busy.flows()


def test_a_cluster_that_loses_a_node_misses_that_nodes_chunks_and_no_others(three_nodes):
    with traffic(three_nodes.url()) as (busy, store, tier):
        owner = {key: three_nodes.node_of(b"lmc:{%s}" % key.hex().encode()) for key in KEYS}
        dead = three_nodes.kill(1)
        try:
            wait_until(lambda: any(not server.usable for server in servers_of(tier)), "an open breaker")
            assert tier.usable, "there are two more"
            busy.flows()
            found = store.lookup(KEYS)
            places = zip(KEYS, found, strict=True)
            assert [key for key, place in places if place == "redis" and owner[key] is dead] == []
            assert "redis" in found
        finally:
            dead.restart()
            three_nodes.wait_ok()
        wait_until(lambda: all(server.usable for server in servers_of(tier)), "all nodes")
        elsewhere = dead.client()
        wait_until(lambda: elsewhere.keys("lmc:{*"), "chunks on the node that is back")
        busy.flows()
    three_nodes.client().flushall(target_nodes="primaries")


def test_a_cluster_whose_replica_takes_over_serves_all_chunks_again(tmp_path):
    with RedisCluster(tmp_path, replicas=1) as cluster, traffic(cluster.url()) as (busy, _, tier):
        heir = cluster.failover(1)
        around = heir.client()
        wait_until(
            lambda: (
                all(server.usable for server in servers_of(tier))
                and any(str(heir.port) in server.name for server in servers_of(tier))
            ),
            "a map with the heir in it",
        )
        around.flushall()
        wait_until(lambda: around.keys("lmc:{*"), "chunks on the heir")
        busy.flows()


def test_a_cluster_that_refuses_every_question_is_left_alone_and_said_to_be_down_once_in_a_while(tmp_path, caplog):
    """Earlier, nodes that greet and refuse every question were declared well again twice a second.

    Each time, two lines were logged. A question that was sent was counted as an answer, so that refusals were never
    three in a row.
    """
    with RedisCluster(tmp_path, full_coverage=True) as cluster:
        tier, alone = tier_of(cluster.url()), tier_of(cluster.url())
        store = Store(Slab(4, PARTS, PART_BYTES), [tier])
        assert store.lookup(KEYS) == [None] * len(KEYS)
        cluster.kill(0)
        for node in cluster.nodes[1:]:
            wait_until(lambda node=node: b"cluster_state:fail" in node.ask("CLUSTER", "INFO"), "a cluster that is down")
        with contextlib.closing(alone):
            for _ in range(breaker.FAILURES):
                with contextlib.suppress(OSError):
                    alone.contains(KEYS)
            assert not alone.usable
        caplog.clear()
        over = time.monotonic() + 3
        while time.monotonic() < over:
            assert store.lookup(KEYS) == [None] * len(KEYS)
            time.sleep(0.01)
        store.close()
        said = [record.getMessage() for record in caplog.records if str(cluster.nodes[1].port) in record.getMessage()]
        assert len(said) <= 4, said


@contextlib.contextmanager
def busy_with_a_script(redis: RedisServer) -> Iterator[None]:
    """Every command is refused with BUSY."""
    redis.ask("CONFIG", "SET", "lua-time-limit", 10)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(redis.ask, "EVAL", "while true do end", 0)
        wait_until(lambda: refuses(redis), "a server that is busy")
        try:
            yield
        finally:
            redis.ask("SCRIPT", "KILL")
            assert isinstance(running.exception(10), redis_py.ResponseError)


def refuses(redis: RedisServer) -> bool:
    try:
        redis.ask("EXISTS", "a")
    except redis_py.ResponseError:
        return True
    return False


def test_a_server_that_is_busy_with_a_script_costs_misses_and_no_record(redis):
    """BUSY is no refusal of ours: it left `contains` as what the store does not know, and made a good value a corrupt
    one.
    """
    with contextlib.closing(tier_of(redis.tcp_url())) as tier:
        store = Store(Slab(4, 3, 4096), [tier])
        write(tier, KEYS[0])
        reader = tier.open(KEYS[0])
        with busy_with_a_script(redis):
            for _ in range(breaker.FAILURES - 1):
                assert store.lookup(KEYS) == [None] * len(KEYS)
            with pytest.raises(OSError, match=r"BUSY|away"):
                reader.read(0, 3, [memory(3 * 4096)])
            assert store.lookup(KEYS) == [None] * len(KEYS)
            assert tier.corrupt == 0
        reader.close()
        back(tier)
        assert read(tier, KEYS[0]) == right(KEYS[0])
        store.close()


def test_a_server_that_is_busy_at_start_joins_later(redis):
    with busy_with_a_script(redis):
        tier = tier_of(redis.tcp_url())
    with contextlib.closing(tier):
        back(tier)
        write(tier, KEYS[0])


def test_a_server_that_takes_no_writes_for_now_is_good_to_read_from(redis):
    """As one that cannot save a snapshot, or whose replicas are away: at start it was refused for good."""
    with contextlib.closing(tier_of(redis.tcp_url())) as tier:
        write(tier, KEYS[0])
    redis.ask("CONFIG", "SET", "min-replicas-to-write", 1)
    try:
        with contextlib.closing(tier_of(redis.tcp_url())) as tier:
            assert read(tier, KEYS[0]) == right(KEYS[0])
            for key in KEYS[1:6]:
                with contextlib.suppress(OSError):
                    assert tier.write(meta_of(key), [stored(meta_of(key))]) is Written.REFUSED
            assert tier.usable
            assert read(tier, KEYS[0]) == right(KEYS[0])
    finally:
        redis.ask("CONFIG", "SET", "min-replicas-to-write", 0)


def test_a_server_with_no_connection_left_costs_misses_and_takes_us_when_there_is_one(redis):
    with contextlib.closing(tier_of(redis.tcp_url())) as tier:
        redis.ask("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        redis.ask("CONFIG", "SET", "maxclients", 1)
        time.sleep(0.1)
        try:
            with socket.create_connection((redis.host, redis.port)):
                for _ in range(breaker.FAILURES):
                    with pytest.raises(OSError, match="Redis at"):
                        tier.contains(KEYS)
                assert not tier.usable
                late = tier_of(redis.tcp_url())
                assert not late.usable
        finally:
            wait_until(lambda: redis.ask("CONFIG", "SET", "maxclients", 1000), "room for more")
        back(tier)
        back(late)
        late.close()
        write(tier, KEYS[0])


# -- how long anybody waits --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("away", "failures"), [("kill", breaker.FAILURES), ("pause", 1)])
def test_one_timeout_or_three_other_failures_are_enough(redis, away, failures):
    with contextlib.closing(tier_of(redis.tcp_url())) as tier:
        write(tier, KEYS[0])
        getattr(redis, away)()
        failed = 0
        began = own_seconds()
        while tier.usable:
            with pytest.raises(OSError, match="Redis at"):
                tier.contains(KEYS)
            failed += 1
        assert own_seconds() - began < LIMIT
        assert failed == failures


@pytest.mark.parametrize(("given", "seconds"), [({}, 0.5), ({"remote_deadline": 2.0}, 2.0)])
def test_the_kernel_waits_for_each_piece_as_long_as_the_setting_says(redis, given, seconds):
    settings = Settings(remote_url=redis.tcp_url(), **given)
    (remote,) = settings.remotes
    with contextlib.closing(open_remote(settings, remote)) as tier:
        (server,) = servers_of(tier)
        with server.connection() as connection:
            assert connection.call("PING") == b"PONG"
            for limit in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                whole, micro = struct.unpack("@ll", connection._sock.getsockopt(socket.SOL_SOCKET, limit, 16))
                assert whole + micro / 1e6 == pytest.approx(seconds, abs=0.02)  # in the kernel's ticks
    assert resp.PIECE == 256 << 10


def test_three_slow_lookups_in_a_row_are_enough(redis, monkeypatch):
    """Answers that come in time, but take most of it; the first two in a row are followed by a quick one."""
    monkeypatch.setattr(breaker, "FIRST_PAUSE", 60.0)
    clock = SimpleNamespace(now=0.0, step=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr("lmc.storage.tiers.redis.connections.time", clock)
    original = redis_tier.Connection.collect

    def collect(connection, count):
        clock.now += clock.step
        return original(connection, count)

    monkeypatch.setattr(redis_tier.Connection, "collect", collect)
    with contextlib.closing(tier_of(redis.tcp_url())) as tier:
        for clock.step in (0.6, 0.6, 0.2, 0.6, 0.6, 0.6):
            assert tier.usable
            assert tier.contains(KEYS[:1]) == [False]
        assert not tier.usable


def test_nobody_asks_a_server_that_does_not_answer(redis):
    """A paused server accepts connections, as a stopped process does: each caller would wait for a whole deadline."""
    tier = tier_of(redis.tcp_url())
    store = Store(Slab(4, PARTS, PART_BYTES), [tier])
    redis.pause()
    assert store.lookup(KEYS) == [None] * len(KEYS)
    assert not tier.usable
    began = own_seconds()
    for _ in range(100):
        assert store.lookup(KEYS[:1]) == [None]
    assert own_seconds() - began < DEADLINE / 2
    store.close()


def test_a_read_that_is_under_way_ends_when_the_server_falls_silent(redis):
    with contextlib.closing(tier_of(redis.tcp_url())) as tier:
        write(tier, KEYS[0])
        reader = tier.open(KEYS[0])
        redis.pause()
        began = own_seconds()
        with pytest.raises(TimeoutError):
            reader.read(0, 3, [memory(3 * 4096)])
        assert own_seconds() - began < LIMIT
        reader.close()
        redis.resume()
        back(tier)
        assert read(tier, KEYS[0]) == right(KEYS[0])


@contextlib.contextmanager
def silent(cluster: RedisCluster) -> Iterator[None]:
    """No node answers inside."""
    for node in cluster.nodes:
        node.pause()
    try:
        yield
    finally:
        for node in cluster.nodes:
            node.resume()
        cluster.wait_ok()


def open_all(tier: RedisTier) -> None:
    """As a load does it: headers of all nodes are asked for at the same time."""
    tier.announce(KEYS)
    for key in KEYS:
        with contextlib.suppress(OSError):
            assert tier.open(key) is None


def test_a_cluster_that_falls_silent_as_a_whole_costs_one_deadline_and_not_one_for_each_node(three_nodes):
    """The nodes are asked at the same time, but were waited for one after the other, each for a whole deadline.

    A thread that is new has its connections still to be made, which a silent node accepts and never greets. Headers
    that were not answered are not asked for again. What was asked of one node while another kept us waiting has had its
    time.
    """
    looking, new, opening, new_opening, reading = tiers = [tier_of(three_nodes.url()) for _ in range(5)]
    looking.contains(KEYS)
    opening.announce(KEYS)
    stored_keys = [key_of(f"silent {i}") for i in range(20)]
    write(reading, *stored_keys)
    readers = [reading.open(key) for key in stored_keys]

    def look(tier: RedisTier) -> None:
        with pytest.raises(OSError, match="Redis at"):
            tier.contains(KEYS)

    def read_all() -> None:
        for act in (lambda reader: reader.request(0, 1), lambda reader: reader.read(0, 1, [memory(4096)])):
            for reader in readers:
                with contextlib.suppress(OSError):
                    act(reader)

    acts: dict[str, Callable[[], object]] = {
        "a lookup": lambda: look(looking),
        "a lookup of a new thread": lambda: look(new),
        "records opened": lambda: open_all(opening),
        "records opened by a new thread": lambda: open_all(new_opening),
        "reads under way": read_all,
        "the end": lambda: [tier.close() for tier in tiers[:2]],
    }
    took = {}
    with silent(three_nodes):
        for name, act in acts.items():
            began = own_seconds()
            act()
            took[name] = own_seconds() - began
    for reader in readers:
        reader.close()
    for tier in tiers[2:]:
        tier.close()
    three_nodes.client().flushall(target_nodes="primaries")
    assert {name: seconds for name, seconds in took.items() if seconds >= LIMIT} == {}


def test_a_cluster_that_is_silent_at_start_joins_later_or_is_closed_in_time(three_nodes, caplog):
    with silent(three_nodes):
        tier, other = tier_of(three_nodes.url(), deadline=1.0), tier_of(three_nodes.url())
        assert not tier.usable
        assert tier.contains(KEYS) == [False] * len(KEYS)
        assert tier.open(KEYS[0]) is None
        time.sleep(breaker.FIRST_PAUSE * 1.5)  # a trial is under way
        began = own_seconds()
        other.close()
        assert own_seconds() - began < LIMIT
    with contextlib.closing(tier):
        back(tier)
        # On a busy machine, a node may have missed a deadline again, and has a breaker of its own.
        wait_until(lambda: takes(tier, KEYS[0]), "a node that takes a record")
        assert read(tier, KEYS[0]) == right(KEYS[0])
    assert caplog.records[0].levelname == "WARNING"
    say_no_secret(caplog)


def test_connections_that_were_cut_while_nobody_used_them_are_not_even_a_failure(redis):
    tier = tier_of(redis.tcp_url())
    store = Store(Slab(4, PARTS, PART_BYTES), [tier])
    assert store.lookup(KEYS) == [None] * len(KEYS)
    for _ in range(5):
        redis.ask("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        time.sleep(0.05)  # for the kernel to hear of it
        assert store.lookup(KEYS) == [None] * len(KEYS)
    assert store.stats().failed == {}
    store.close()


def test_a_server_that_has_left_the_cluster_gives_its_connections_back(redis):
    """Threads kept theirs, and a pool has only so many for whoever comes back under the same name."""
    pool = redis_py.ConnectionPool(host=redis.host, port=redis.port, max_connections=1)
    server = Server("a node", pool, DEADLINE, lambda connection: None)
    with server.connection() as connection:
        assert connection.call("PING") == b"PONG"
    with pytest.raises(redis_py.ConnectionError, match="Too many connections"):
        pool.get_connection()
    server.retire()
    pool.release(pool.get_connection())
    with pytest.raises(OSError, match="away"), server.connection():
        pass


def test_threads_that_have_ended_leave_no_connection(redis):
    """A server that answers every request in a thread of its own would run out of connections."""
    with contextlib.closing(tier_of(redis.tcp_url())) as tier:
        for _ in range(30):
            thread = threading.Thread(target=tier.contains, args=(KEYS[:1],))
            thread.start()
            thread.join()
        ours = [client for client in redis.client().client_list() if client["name"] == "lmc"]
        assert len(ours) < 10


# -- what is seen at once ---------------------------------------------------------------------------------------------


def test_a_value_that_is_evicted_just_before_its_record_is_finished_makes_no_half_record_visible(redis):
    """The header was set though a value was gone; the writer removed it afterwards, but not if it was killed between
    the two.
    """
    header = b"lmc:{%s}" % KEYS[0].hex().encode()
    around = redis.client()
    original = redis_tier.Connection.put

    def put(connection, blob):
        if b"__metadata__" not in blob:
            original(connection, blob)
            return
        connection.flush()
        wait_until(lambda: around.keys(header + b":*"), "a value aside")
        around.unlink(*around.keys(header + b":*"))
        original(connection, blob)
        connection.flush()
        with contextlib.suppress(TimeoutError):
            wait_until(lambda: around.get(header), "a header", 0.5)
        raise KeyboardInterrupt  # here the writer ends

    with contextlib.closing(tier_of(redis.tcp_url())) as tier, pytest.MonkeyPatch.context() as patch:
        patch.setattr(redis_tier.Connection, "put", put)
        with pytest.raises(KeyboardInterrupt):
            tier.write(meta_of(KEYS[0]), [stored(meta_of(KEYS[0]))])
    assert around.get(header) is None


def test_forgetting_what_is_not_there_is_one_question(redis):
    """A thousand names of values that might have been there were removed too: 1.7 ms, and 20 where others were at
    work.
    """
    with contextlib.closing(tier_of(redis.tcp_url())) as tier:
        tier.contains(KEYS)
        before = redis.client().info("stats")["total_net_input_bytes"]
        assert not tier.delete(KEYS[0])
        assert redis.client().info("stats")["total_net_input_bytes"] - before < 10_000


def test_a_record_that_has_lost_a_value_is_gone_as_a_whole(redis):
    with contextlib.closing(tier_of(redis.tcp_url())) as tier:
        write(tier, *KEYS[:2])
        around = redis.client()
        around.unlink(b"lmc:{%s}:0" % KEYS[0].hex().encode())
        with pytest.raises(FileNotFoundError):
            read(tier, KEYS[0])
        assert around.keys(b"lmc:{%s}*" % KEYS[0].hex().encode()) == []
        assert read(tier, KEYS[1]) == right(KEYS[1])


def test_a_reader_that_meets_a_value_too_long_takes_nothing_from_its_neighbours(redis):
    """The connection was cut in the middle of that value, with others' values on it; they were misses, and a failure of
    the server.
    """
    with contextlib.closing(tier_of(redis.tcp_url())) as tier:
        write(tier, *KEYS[:3])
        redis.ask("APPEND", b"lmc:{%s}:0" % KEYS[1].hex().encode(), bytes(100_000))
        readers = [tier.open(key) for key in KEYS[:3]]
        for reader in readers:
            reader.request(0, 3)
        into = [memory(3 * 4096) for _ in readers]
        readers[0].read(0, 3, [into[0]])
        with pytest.raises(CorruptRecord):
            readers[1].read(0, 3, [into[1]])
        readers[2].read(0, 3, [into[2]])
        assert [bytes(view) for view in (into[0], into[2])] == [right(KEYS[0]), right(KEYS[2])]
        for reader in readers:
            reader.close()


# -- start -------------------------------------------------------------------------------------------------------------


def test_a_server_that_is_not_there_at_start_is_a_warning_and_joins_later(tmp_path, caplog):
    port = free_port()
    began = own_seconds()
    with contextlib.closing(tier_of(f"redis://:hunter2@127.0.0.1:{port}")) as tier:
        assert own_seconds() - began < LIMIT
        assert not tier.usable
        (warning,) = caplog.records
        assert warning.levelname == "WARNING"
        away = f"no answer from Redis at 127.0.0.1:{port} (Connection refused)"
        assert warning.getMessage() == f"lmc: {away}; its chunks are misses until it answers"
        assert tier.open(KEYS[0]) is None
        assert tier.contains(KEYS) == [False] * len(KEYS)
        assert tier.write(meta_of(KEYS[0]), [stored(meta_of(KEYS[0]))]) is Written.REFUSED
        with RedisServer(tmp_path, port=port, password="hunter2"):
            back(tier)
            write(tier, KEYS[0])
            assert read(tier, KEYS[0]) == right(KEYS[0])
    say_no_secret(caplog)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A server with a password, users with too few rights, and TLS."""
    users = [
        "reader on >correct-horse ~* +@read +@connection",
        "narrow on >correct-horse ~other:* +@all",
        "off off >correct-horse ~* +@all",
    ]
    folder = tmp_path_factory.mktemp("guarded")
    with RedisServer(folder, password="hunter2", users=users, tls=True, databases=4) as server:
        yield server


REFUSED: dict[str, Callable[[RedisServer], str]] = {
    "wrong password": lambda s: s.tcp_url(password="wrong-guess"),
    "no password": lambda s: f"redis://{s.host}:{s.port}",
    "unknown user": lambda s: s.tcp_url(user="nobody", password="wrong-guess"),
    "wrong password of a user": lambda s: s.tcp_url(user="reader", password="wrong-guess"),
    "user switched off": lambda s: s.tcp_url(user="off", password="correct-horse"),
    "no permission to SET": lambda s: s.tcp_url(user="reader", password="correct-horse"),
    "no permission for our keys": lambda s: s.tcp_url(user="narrow", password="correct-horse"),
    "no such database": lambda s: s.tcp_url(db=99),
    "no such database by the socket": lambda s: s.unix_url(db=99),
    "unknown CA": lambda s: s.tls_url(),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_waiting_does_not_mend_is_refused_at_start_without_a_password_in_it(guarded, caplog, why):
    with caplog.at_level(logging.DEBUG), pytest.raises(TierUnusable) as caught:
        tier_of(REFUSED[why](guarded))
    assert str(guarded.socket) in str(caught.value) or guarded.host in str(caught.value)
    say_no_secret(caplog, caught.value)


def test_the_ca_in_the_url_is_trusted(guarded):
    with contextlib.closing(tier_of(f"{guarded.tls_url()}?ssl_ca_certs={guarded.ca}")) as tier:
        write(tier, KEYS[0])
        assert read(tier, KEYS[0]) == right(KEYS[0])


@pytest.mark.parametrize("format", ["other", "list"])
def test_another_format_under_our_prefix_is_refused_by_name(redis, caplog, format):
    redis.ask(*(("SET", "lmc:format", "999") if format == "other" else ("LPUSH", "lmc:format", "1")))
    with pytest.raises(TierUnusable, match=r"lmc:format|WRONGTYPE"):
        tier_of(redis.tcp_url())
    assert redis.client().keys() == [b"lmc:format"]
    with contextlib.closing(RedisTier(parse_redis_url(redis.tcp_url()), prefix="mine")) as tier:
        write(tier, KEYS[0])


def test_a_cluster_refuses_a_wrong_password(three_nodes, caplog):
    with caplog.at_level(logging.DEBUG), pytest.raises(TierUnusable) as caught:
        tier_of(three_nodes.url().replace("hunter2", "wrong-guess"))
    say_no_secret(caplog, caught.value)


def test_a_cluster_refuses_another_format_under_our_prefix(three_nodes):
    """A cluster's nodes were never asked for the format: two versions of lmc would have shared their keys."""
    around = three_nodes.client()
    around.set("lmc:format", "999")
    try:
        with pytest.raises(TierUnusable, match="lmc:format"):
            tier_of(three_nodes.url()).close()
    finally:
        around.delete("lmc:format")


def test_a_password_that_becomes_wrong_costs_misses_until_it_is_right_again(tmp_path, caplog):
    with RedisServer(tmp_path, password="hunter2") as server:
        tier = tier_of(server.tcp_url())
        store = Store(Slab(4, 3, 4096), [tier])
        with caplog.at_level(logging.DEBUG):
            write(tier, KEYS[0])
            change_password(server, "correct-horse")
            for _ in range(breaker.FAILURES):
                assert store.lookup(KEYS[:1]) == [None]
            assert not tier.usable
            wait_until(lambda: "ERROR" in [record.levelname for record in caplog.records], "a trial that was refused")
            assert store.lookup(KEYS[:1]) == [None]
            change_password(server, "hunter2")
            back(tier)
            assert store.lookup(KEYS[:1]) == ["redis"]
            assert read(tier, KEYS[0]) == right(KEYS[0])
            store.close()
        say_no_secret(caplog)


def change_password(server: RedisServer, password: str) -> None:
    server.ask("CONFIG", "SET", "requirepass", password)
    server.password = password
    server.ask("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")  # those that are logged in stay so
    time.sleep(0.1)


def say_no_secret(caplog: pytest.LogCaptureFixture, error: BaseException | None = None) -> None:
    said = [caplog.text, *(record.getMessage() for record in caplog.records)]
    chain = [error] if error is not None else []
    while chain:
        one = chain.pop()
        said += [str(one), repr(one), repr(vars(one))]
        chain += [next_one for next_one in (one.__cause__, one.__context__) if next_one is not None]
    assert [secret for secret in SECRETS for text in said if secret in text] == []


# -- a model ---------------------------------------------------------------------------------------------------------

DOCUMENTS = [random_tokens(20 + 5 * i, i) for i in range(6)]
CHUNK = 4 * 2 * 16 * 2 * 16 * 4  # layers, keys and values, tokens, heads, numbers, bytes
EVERYTHING = Repair(strategy="query", ratio=1.0)


def prompts(count: int) -> list[list[int]]:
    dice = random.Random(5)
    system = random_tokens(9, 70)
    picks = [dice.sample(DOCUMENTS, 3) for _ in range(count)]
    return [join(system, pick, random_tokens(7, 80 + i), SEPARATOR) for i, pick in enumerate(picks)]


def test_a_models_answers_are_right_whatever_happens_to_redis_meanwhile(redis):
    """Documents learned into Redis, room for a prompt's chunks in memory: every prompt reads from there, or
    computes.
    """
    values = {
        "chunk_size": 16,
        "enable_blending": True,
        "blend_min_tokens": 0,
        "max_local_cpu_size": 13.5 * CHUNK / 2**30,
    }
    settings = Settings(**values, remote_url=redis.tcp_url(), remote_deadline=DEADLINE)  # type: ignore[arg-type]
    asked = prompts(12)
    with CachedModel(random_model(), settings, SEPARATOR) as cached:
        (tier,) = tiers_of(cached.engine.store)
        wanted = [cached.prefill(ids, "full").logits for ids in asked]
        for document in DOCUMENTS:
            cached.learn(document)
        over, longest, loaded = threading.Event(), [0.0], [0]

        def serve() -> int:
            turns = 0
            while not over.is_set() or turns < len(asked):
                number = turns % len(asked)
                began = own_seconds()
                done = cached.prefill(asked[number], ("blend", "exact")[turns % 2], policy=EVERYTHING)
                longest[0] = max(longest[0], own_seconds() - began)
                loaded[0] += done.report.loaded.get("redis", 0) > 0
                assert (done.logits - wanted[number]).abs().max() <= 1e-4
                turns += 1
            return turns

        with ThreadPoolExecutor(1) as pool:
            serving = pool.submit(serve)

            def served(more: int = 3) -> None:
                seen = loaded[0]
                wait_until(lambda: loaded[0] >= seen + more or serving.done(), "prompts that read from Redis")

            try:
                served()
                for away, again in [
                    ("pause", "resume"),
                    ("kill", "restart"),
                    ("fresh", "resume"),
                    ("restart", "resume"),
                ]:
                    getattr(redis, away)()
                    if away in ("pause", "kill"):
                        wait_until(lambda: not tier.usable or serving.done(), "an open breaker")
                    getattr(redis, again)()
                    back(tier)
                    served()
            finally:
                over.set()
            assert serving.result(60) >= len(asked)
        assert longest[0] < LIMIT
        cached.engine.store.flush()  # what was computed while Redis was away may still be on its way
        assert cached.engine.store.held() == 0
        assert cached.engine.store.check_integrity() == []
