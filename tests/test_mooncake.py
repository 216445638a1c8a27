"""The Mooncake tier: the contract with a real master and a real host with memory, and what can go wrong with them."""

import math
import re
import socket
import sys
import threading
import time
from concurrent.futures import Future
from contextlib import closing, suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from urllib.request import urlopen

import pytest
import yaml
from mooncake_servers import MooncakeStore, mooncake_store
from storage_fakes import (
    PART_BYTES,
    PARTS,
    content,
    eventually,
    get,
    key_of,
    lose,
    memory,
    meta_of,
    own_seconds,
    put,
    stored,
)
from tier_contract import K0, K1, K2, ListedContract, read, write
from typer.testing import CliRunner

from lmc.commands import inspect
from lmc.commands.cli import app
from lmc.config.mooncake_url import parse_mooncake_url
from lmc.config.settings import Settings
from lmc.errors import ChunkLost, ConfigError, TierUnusable
from lmc.keys import FORMAT, RecordKind
from lmc.storage.memory.slab import Slab
from lmc.storage.store import Store
from lmc.storage.tiers import breaker, opening
from lmc.storage.tiers.opening import check_packages, open_remote, open_tiers
from lmc.storage.tiers.tier import Written

try:
    from lmc.storage.tiers.mooncake import MooncakeTier, client
    from lmc.storage.tiers.mooncake import tier as mooncake_tier
except ImportError as error:
    pytest.skip(f"no Mooncake ({error}): apt-get install libibverbs1 libnl-3-200", allow_module_level=True)

KEYS = [key_of(number) for number in range(30)]
NETWORK = SimpleNamespace(register_buffer=lambda *_: 0, unregister_buffer=lambda *_: 0)
PROMPT = 1.0  # deadline of tests in which something does not respond, in seconds


@pytest.fixture(scope="module")
def shared() -> MooncakeStore:
    """A store for tests that leave it as it is."""
    with mooncake_store(512 << 20) as store:
        yield store


@pytest.fixture
def own() -> MooncakeStore:
    """A store of the test's own."""
    with mooncake_store() as store:
        yield store


def tier_of(store: MooncakeStore, deadline: float = 30, prefix: str = "lmc", **options: object) -> MooncakeTier:
    return MooncakeTier(parse_mooncake_url(store.url(**options)), deadline=deadline, prefix=prefix)


@pytest.fixture(scope="module")
def shared_tier(shared: MooncakeStore):
    """To sign off takes Mooncake's client a second."""
    with closing(tier_of(shared)) as tier:
        yield tier


@pytest.fixture
def tier(shared_tier: MooncakeTier) -> MooncakeTier:
    """A tier without records."""
    library(shared_tier).remove_all(True)
    shared_tier.corrupt = 0
    return shared_tier


def found(tier: MooncakeTier, key) -> bool:
    """Whether a lookup finds a record; one that fails does not."""
    try:
        return tier.contains([key])[0]
    except OSError:
        return False


def client_of(tier: MooncakeTier) -> client.MooncakeClient:
    """What makes a tier's requests."""
    return tier._client


def library(tier: MooncakeTier):
    """Mooncake's own client."""
    return client_of(tier)._store


def name_of(key) -> str:
    """The name of a record in Mooncake."""
    return f"lmc/{FORMAT}/{key.hex()}"


def buffers_in_use(tier: MooncakeTier) -> int:
    return client_of(tier).buffers.in_use


class TestContract(ListedContract):
    @pytest.fixture
    def tier(self, tier):
        return tier

    def raw_read(self, tier, key):
        return library(tier).get(name_of(key)) or None

    def raw_write(self, tier, key, blob):
        if not blob:
            pytest.skip("a Mooncake store has no empty objects")
        library(tier).remove(name_of(key), True)
        assert library(tier).put(name_of(key), blob) == 0

    def test_entries_list_sizes_with_the_least_recently_used_first(self, tier):
        """Mooncake does not tell when objects were used."""
        for key in (K0, K1, K2):
            write(tier, key)
        assert {(entry.key, entry.bytes) for entry in tier.entries()} == {
            (key, 4096 + PARTS * PART_BYTES) for key in (K0, K1, K2)
        }


# -- from the settings -----------------------------------------------------------------------------------------------


def test_a_store_of_the_settings_is_opened(shared, caplog):
    settings = Settings(remote_url=shared.url(), remote_deadline=30, remote_ttl=60, remote_prefix="of-settings")
    (remote,) = settings.remotes
    with closing(open_remote(settings, remote)) as tier:
        write(tier, K0)
        assert read(tier, K0) == bytes(stored(meta_of(K0)))
    assert f"remote_ttl = 60 has no effect in Mooncake store at 127.0.0.1:{shared.port}: Mooncake evicts" in caplog.text


def test_a_published_configuration_of_lmcache_says_where_the_store_is():
    every = yaml.safe_load((Path(__file__).parent / "data/lmcache_configurations.yaml").read_text())
    (written,) = (entry["settings"] for entry in every if entry["name"] == "mooncake")
    (url,) = Settings.load(written, environ={}).remotes
    assert (url.master, url.port, url.local_hostname) == ("127.0.0.1", 50051, "localhost")
    assert (url.metadata_server, url.protocol) == ("http://127.0.0.1:8080/metadata", "tcp")
    assert (url.global_segment_size, url.local_buffer_size) == (3355443200, 1 << 30)


def test_hosts_may_find_each_other_by_a_metadata_server():
    with mooncake_store(over_http=True) as store, closing(tier_of(store)) as tier:
        write(tier, K0)
        assert read(tier, K0) == bytes(stored(meta_of(K0)))


def test_a_process_may_give_memory_of_its_own():
    store = MooncakeStore()
    store.start_master()
    try:
        with closing(tier_of(store, global_segment_size="64mb")) as tier:
            write(tier, K0)
            assert read(tier, K0) == bytes(stored(meta_of(K0)))
    finally:
        store.stop_master()


def test_a_missing_package_is_named(monkeypatch):
    settings = Settings(remote_url="mooncake://master")
    monkeypatch.setitem(sys.modules, "lmc.storage.tiers.mooncake", None)
    with pytest.raises(ConfigError, match="pip install mooncake-transfer-engine"):
        check_packages(settings)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("mooncake://", "a Mooncake store is written as mooncake://master:50051"),
        ("mooncake://user:hunter2@master", "a Mooncake store is written as mooncake://master:50051"),
        ("mooncake://master:port", "a Mooncake store is written as mooncake://master:50051"),
        ("mooncakestore://master:1/kv", "a Mooncake store is written as mooncake://master:50051"),
        ("mooncake://master?replicas=2", "unknown options of a Mooncake store: replicas; there are admin_port, device"),
        ("mooncake://master?replica_num=two", "replica_num of a Mooncake store is a whole number, or a size such as"),
    ],
)
def test_what_is_wrong_with_the_url_is_said(url, why):
    with pytest.raises(ConfigError) as caught:
        Settings(remote_url=url)
    assert why in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_options_of_the_url_are_understood():
    url = parse_mooncake_url("mooncakestore://kv:1/?device=mlx5_0,mlx5_1&protocol=rdma&global_segment_size=4GB")
    assert (url.device_name, url.protocol, url.global_segment_size) == ("mlx5_0,mlx5_1", "rdma", 4 << 30)


# -- several processes and threads -----------------------------------------------------------------------------------


def test_another_process_finds_what_one_has_written(tier, shared):
    write(tier, K0)
    with closing(tier_of(shared)) as other:
        assert other.contains([K1, K0]) == [False, True]
        assert read(other, K0) == bytes(stored(meta_of(K0)))


def test_parts_that_are_larger_than_a_buffer_are_read(tier):
    meta = meta_of(K0, 3, client.BUFFER_BYTES + 8192)
    assert tier.write(meta, [stored(meta)]) is Written.STORED
    reader = tier.open(K0)
    into = memory(2 * meta.stored_part)
    reader.request(0, 2)
    reader.read(0, 2, [into])
    reader.close()
    assert bytes(into) == bytes(stored(meta))[: 2 * meta.stored_part]


def test_headers_that_are_longer_than_usual_are_requested_together_from_then_on(tier, monkeypatch):
    """As with tensor parallelism: a chunk has a part for each layer and rank."""
    asked, heads = [], client.MooncakeClient.heads

    def asking(self, names, size):
        asked.append((len(names), size))
        return heads(self, names, size)

    monkeypatch.setattr(client.MooncakeClient, "heads", asking)
    monkeypatch.setattr(tier, "_head_bytes", mooncake_tier.HEAD_BYTES)  # and as before for other tests afterwards
    for key in (K0, K1):
        meta = meta_of(key, 300, 4096)
        assert tier.write(meta, [stored(meta)]) is Written.STORED
    assert read(tier, K0) == bytes(stored(meta_of(K0, 300, 4096)))
    assert asked[0] == (1, mooncake_tier.HEAD_BYTES)
    asked.clear()
    tier.announce([K0, K1])
    assert read(tier, K1) == bytes(stored(meta_of(K1, 300, 4096)))
    ((names, size),) = asked
    assert names == 2
    assert mooncake_tier.HEAD_BYTES < size <= client.BUFFER_BYTES // mooncake_tier.HEADS
    eventually(lambda: buffers_in_use(tier) == 0)


def test_threads_read_at_once_and_give_all_buffers_back(tier, monkeypatch):
    monkeypatch.setattr(client, "BUFFERS", 4)
    for key in KEYS:
        write(tier, key)
    wrong = []

    def work() -> None:
        for _ in range(3):
            tier.announce(KEYS)
            readers = [tier.open(key) for key in KEYS]
            for reader in readers:
                reader.request(0, PARTS)
            for key, reader in zip(KEYS, readers, strict=True):
                into = memory(PARTS * PART_BYTES)
                reader.read(0, PARTS, [into])
                if bytes(into) != b"".join(content(key, part) for part in range(PARTS)):
                    wrong.append(key)
                reader.close()

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert buffers_in_use(tier) == 0


def test_what_was_announced_or_requested_and_not_read_is_given_back(tier):
    write(tier, K0)
    tier.announce([K0, K1])
    reader = tier.open(K0)
    reader.request(0, PARTS)
    reader.close()
    eventually(lambda: buffers_in_use(tier) == 0)
    assert tier.open(K1) is None


# -- what goes wrong -------------------------------------------------------------------------------------------------


def test_a_master_that_is_away_at_the_start_is_used_later(caplog):
    store = MooncakeStore()
    try:
        with closing(tier_of(store)) as tier:
            assert "no answer from Mooncake store at 127.0.0.1" in caplog.text
            assert tier.contains([K0]) == [False]
            assert tier.open(K0) is None
            assert tier.write(meta_of(K0), [stored(meta_of(K0))]) is Written.REFUSED
            store.start()
            eventually(lambda: tier.usable)
            # Until its host has registered, the store has no memory.
            eventually(lambda: tier.write(meta_of(K0), [stored(meta_of(K0))]) is Written.STORED)
            assert read(tier, K0) == bytes(stored(meta_of(K0)))
    finally:
        store.stop()


def test_a_server_that_accepts_connections_and_never_answers_does_not_stop_other_threads(monkeypatch, caplog):
    """To set a client up took minutes, in which no other thread of the process could run."""
    monkeypatch.setattr(client, "SETUP_SECONDS", 3.0)
    ticks, stopped = [0.0], threading.Event()

    def tick() -> None:
        while not stopped.wait(0.05):
            ticks.append(own_seconds(less_pauses=False))  # A call that holds the GIL looks like a pause.

    ticking = threading.Thread(target=tick)
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:
        ticking.start()
        with closing(MooncakeTier(parse_mooncake_url(f"mooncake://127.0.0.1:{silent.getsockname()[1]}"))) as tier:
            assert not tier.usable
    stopped.set()
    ticking.join()
    assert "a client is not set up in 3 s" in caplog.text
    assert max(later - earlier for earlier, later in pairwise(ticks[1:])) < 2


def test_why_a_client_is_not_set_up_is_said(own, monkeypatch, caplog):
    monkeypatch.setattr(client, "SETUP_SECONDS", 3.0)
    with closing(tier_of(own, protocol="pigeon")) as tier:
        assert not tier.usable
    assert re.search(r"a client is not set up in 3 s: \w+", caplog.text), caplog.text


@pytest.mark.parametrize(
    ("code", "seconds", "at_rest"), [(-704, 0.0, True), (-704, 20.0, False), (-800, 0.0, False), (-200, 0.0, True)]
)
def test_a_buffer_that_a_failed_call_may_still_use_is_not_used_again(code, seconds, at_rest):
    buffers, call = client.Buffers(), Future()
    buffer = buffers.take(NETWORK, 100)
    call.set_exception(client.Failed("store", code, time.monotonic() - seconds))
    buffers.give_back(buffer, call)
    assert (buffers.take(NETWORK, 100) is buffer) == at_rest
    assert buffers.busy == (1 if at_rest else 2)


def test_memory_of_failed_calls_has_a_bound(monkeypatch):
    monkeypatch.setattr(client, "BUFFERS", 2)
    buffers = client.Buffers()
    for _ in range(3):
        call = Future()
        call.set_exception(RuntimeError("unknown"))
        buffers.give_back(buffers.take(NETWORK, 100), call)
    with pytest.raises(OSError, match="may still use their memory"):
        buffers.take(NETWORK, 100)


class Connected(client.MooncakeClient):
    """A client over a library that is set up."""

    def __init__(self, library, deadline: float) -> None:
        super().__init__(parse_mooncake_url("mooncake://127.0.0.1:1"), deadline)
        self._store = library


def test_a_client_does_not_sign_off_while_a_question_is_in_flight(monkeypatch):
    """Mooncake's client may end the process if it is closed during a call, also one that was given up."""
    monkeypatch.setattr(client, "STOP_SECONDS", 0.1)
    asked, answers, closed = threading.Event(), threading.Event(), []

    def exist(names):
        asked.set()
        answers.wait()
        return [0]

    for waits in (True, False):
        one = Connected(SimpleNamespace(batch_is_exist=exist, close=lambda waits=waits: closed.append(waits)), 0.01)
        if not waits:
            answers.set()
        with suppress(TimeoutError):
            one.exist(["name"], 0.01 if waits else 30)
        assert asked.wait(30)
        one.close(responds=True)
    assert closed == [False]


def test_a_master_that_dies_is_left_alone_until_it_is_back(own):
    """A request of Mooncake's client without a master answers -900, which is not a hit, or takes seconds."""
    with closing(tier_of(own, PROMPT)) as tier:
        write(tier, K0)
        own.stop_master()
        eventually(lambda: not found(tier, K0) and not tier.usable)
        assert tier.contains([K0]) == [False]
        own.start_master()
        eventually(lambda: tier.usable)
        # The master knows no objects, and gets the memory again when its host registers anew.
        eventually(lambda: tier.write(meta_of(K1), [stored(meta_of(K1))]) is Written.STORED)
        assert read(tier, K1) == bytes(stored(meta_of(K1)))


def test_a_master_that_does_not_respond_costs_a_lookup_its_deadline_once(own):
    with closing(tier_of(own, PROMPT)) as tier:
        write(tier, K0)
        eventually(lambda: found(tier, K0))  # A request that took too long on a busy machine has closed it.
        with own.paused(own.master):
            began = own_seconds()
            with pytest.raises(TimeoutError):
                tier.contains([K0])
            assert tier.contains([K0]) == [False]
            assert own_seconds() - began < 2 * PROMPT
        eventually(lambda: tier.usable)
        assert tier.contains([K0]) == [True]


def test_a_host_that_does_not_respond_costs_a_load_its_deadline_and_is_a_miss(own):
    """Mooncake waits for 30 s, and may write into the memory of the call until then. A slot would be overwritten."""
    store = Store(Slab(4, PARTS, PART_BYTES), [tier_of(own, PROMPT)])
    try:
        for key in KEYS[:2]:
            put(store, key)
            store.flush()
        lose(store, *KEYS[:2])
        with own.paused(own.member):
            began = own_seconds()
            with pytest.raises(ChunkLost):
                get(store, KEYS[0])
            assert get(store, KEYS[1]) is None
            assert own_seconds() - began < 3 * PROMPT
    finally:
        store.close()


def test_records_of_a_host_that_died_are_misses(own):
    with closing(tier_of(own, 5)) as tier:
        for key in KEYS[:3]:
            write(tier, key)
        own.stop_member()
        for key in KEYS[:3]:
            try:
                assert read(tier, key) in (None, bytes(stored(meta_of(key))))
            except OSError:
                continue


def test_a_store_without_memory_is_read_and_writing_pauses(own, caplog, monkeypatch):
    monkeypatch.setattr(mooncake_tier, "PAUSE_SECONDS", 3600.0)
    with closing(tier_of(own)) as tier:
        write(tier, K0)
        large = meta_of(K1, 1, 128 << 20)
        assert tier.write(large, [memory(large.stored_part)]) is Written.REFUSED
        assert "has no memory left: give it more hosts or a larger global_segment_size" in caplog.text
        assert tier.write(meta_of(K2), [stored(meta_of(K2))]) is Written.REFUSED
        assert read(tier, K0) in (bytes(stored(meta_of(K0))), None), "Mooncake evicts, or not"
        monkeypatch.setattr(breaker, "time", SimpleNamespace(monotonic=lambda: math.inf))  # The pause is over.
        eventually(lambda: tier.write(meta_of(K2), [stored(meta_of(K2))]) is Written.STORED)


@pytest.mark.parametrize(("soft_pin", "count"), [(1, 2), (0, 0)])
def test_documents_have_soft_pins_if_the_url_says_so(own, soft_pin, count):
    with closing(tier_of(own, soft_pin=soft_pin)) as tier:
        for key, kind in ((K0, RecordKind.DOCUMENT), (K1, RecordKind.PAGES), (K2, RecordKind.DOCUMENT)):
            meta = replace(meta_of(key), kind=kind)
            assert tier.write(meta, [stored(meta)]) is Written.STORED
        with urlopen(f"http://127.0.0.1:{own.admin_port}/metrics", timeout=30) as metrics:
            assert f"\nmaster_soft_pin_key_count {count}\n" in metrics.read().decode()


@pytest.mark.parametrize("code", [-900, -1])
def test_a_negative_code_is_an_error_and_no_hit(shared, monkeypatch, code):
    tier = tier_of(shared)

    class Lying:
        def __getattr__(self, name):
            answers = {"batch_is_exist": [code], "register_buffer": 0}
            return lambda *_: answers.get(name, code)

    monkeypatch.setattr(client_of(tier), "_store", Lying())
    with pytest.raises(OSError, match=f"error {code}"):
        tier.contains([K0])
    with pytest.raises(OSError, match=f"error {code}"):
        tier.open(K0)
    with pytest.raises(OSError, match=f"error {code}"):
        tier.write(meta_of(K1), [stored(meta_of(K1))])
    with pytest.raises(OSError, match=f"error {code}"):
        client_of(tier).size("a name")
    tier.close()


def test_a_command_gives_no_memory(monkeypatch):
    """Memory that a command gives would take records of engines, and lose them when the command ends."""
    opened = []
    monkeypatch.setattr(opening, "open_remote", lambda _, remote, **given: opened.append(remote))
    monkeypatch.setenv("LMC_REMOTE_URL", "mooncake://master?global_segment_size=64gb")
    (place,) = inspect.tier_locations(None)
    place.open(False)
    assert [remote.global_segment_size for remote in opened] == [0]


def test_a_wrong_port_of_the_list_is_named(shared):
    with closing(tier_of(shared, admin_port=1)) as tier, pytest.raises(OSError, match="is admin_port right"):
        list(tier.entries())


def test_a_damaged_record_is_a_miss_for_the_store(tier):
    store = Store(Slab(4, PARTS, PART_BYTES), [tier])
    put(store, K0)
    store.flush()
    lose(store, K0)
    name = name_of(K0)
    blob = bytearray(library(tier).get(name))
    blob[5000] ^= 1
    library(tier).remove(name, True)
    library(tier).put(name, bytes(blob))
    with pytest.raises(ChunkLost):
        get(store, K0)
    assert tier.corrupt == 1
    assert tier.contains([K0]) == [False]


def test_remote_tiers_are_asked_in_their_order(shared, tmp_path):
    settings = Settings(remote_url=[shared.url(), f"file://{tmp_path}/pool"], remote_deadline=30, remote_prefix="both")
    store = Store(Slab(4, PARTS, PART_BYTES), open_tiers(settings, 2))
    put(store, K0)
    store.flush()
    lose(store, K0)
    assert store.lookup([K0]) == ["mooncake"]
    assert store.copies([K0]) == []
    store.close()


def test_a_tier_that_is_unusable_for_good_says_so(monkeypatch):
    monkeypatch.setattr(MooncakeTier, "_greet", lambda _: (_ for _ in ()).throw(TierUnusable("refused")))
    with pytest.raises(TierUnusable, match="refused"):
        MooncakeTier(parse_mooncake_url("mooncake://master"))


def test_the_commands_read_check_and_clear_it(tier, shared, monkeypatch):
    monkeypatch.setenv("LMC_REMOTE_URL", shared.url())
    monkeypatch.setenv("LMC_REMOTE_DEADLINE", "30")
    for key in (K0, K1):
        write(tier, key)
    said = {words: CliRunner().invoke(app, words.split()) for words in ("stat", "check", "clear --all --yes")}
    assert [result.exit_code for result in said.values()] == [0, 0, 0], said
    assert "1970" not in said["stat"].output, "Mooncake does not tell when records were used"
    assert "2 records, 0 problems" in said["check"].output
    assert "removed 2 records from Mooncake store at" in said["clear --all --yes"].output
    assert tier.contains([K0, K1]) == [False, False]
