"""Tenants share a disk and a Redis, and nothing else: no chunk, no key, no file that others can read, no password in
what is said.
"""

import contextlib
import logging
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
from forked import Forked
from models import SEPARATOR, random_model, random_tokens
from redis_servers import RedisServer, servers_of, wait_until
from storage_fakes import key_of, meta_of, stored, tiers_of
from test_redis_faults import say_no_secret
from typer.testing import CliRunner

from lmc.blend.segments import join
from lmc.commands.cli import app
from lmc.config.redis_url import parse_redis_url
from lmc.config.settings import Settings
from lmc.connectors.transformers import CachedModel
from lmc.engine import Match
from lmc.errors import ConfigError, LmcError
from lmc.keys import ChunkKey, RecordKind, exact_keys
from lmc.storage.tiers.redis import RedisTier

pytest_plugins = ["redis_servers"]

TENANTS = ("alice", "bob")
SYSTEM = random_tokens(20, 70)
DOCUMENTS = [random_tokens(20 + 9 * i, i) for i in range(4)]
PROMPT = join(SYSTEM, DOCUMENTS[:3], random_tokens(7, 80), SEPARATOR)


def settings(url: str, directory: Path | None = None, **changes: object) -> Settings:
    values = {"chunk_size": 16, "max_local_cpu_size": 0.02, "enable_blending": True, "blend_min_tokens": 0, **changes}
    return Settings(**values, remote_url=url, local_disk=directory)  # type: ignore[arg-type]


class Served(CachedModel):
    """The model of one tenant."""

    def __init__(self, given: Settings, salt: str) -> None:
        super().__init__(random_model(), given, SEPARATOR, cache_salt=salt)
        self.salt = salt


def served(url: str, salt: str, directory: Path | None = None) -> Served:
    return Served(settings(url, directory), salt)


def use(cached: Served) -> None:
    """Documents are learned, a prompt is blended, and another is stored as exact."""
    for document in DOCUMENTS:
        cached.learn(document)
    cached.prefill(PROMPT, "blend")
    cached.prefill(PROMPT, "exact")


def finds(cached: Served) -> list[str]:
    """What there is of the tokens that every tenant here uses, whole or in part."""
    engine = cached.engine
    found = [f"document {i}" for i, tokens in enumerate(DOCUMENTS) if cached.knows(tokens)]
    asked = [key for keys in keys_of(cached, (*DOCUMENTS, SYSTEM, PROMPT)) for key in keys]
    found += [place for place in engine.store.lookup(asked) if place is not None]
    whole = Match(prompt=len(PROMPT), exact_stop=len(PROMPT))
    prefix = engine.look(whole, engine.token_chain(PROMPT, cached.salt)).exact
    return found + ["prefix"] * bool(prefix)


def keys_of(cached: Served, texts: Iterable[list[int]]) -> list[set[ChunkKey]]:
    """All keys that this tenant's chunks of these tokens have: as documents, and as prefixes."""
    engine, found, salt = cached.engine, [set(), set()], cached.salt
    for tokens in texts:
        found[0].update(engine.document_keys(tokens, engine.namespace(RecordKind.DOCUMENT, salt)))
        found[1].update(exact_keys(engine.namespace(RecordKind.PREFIX, salt), tokens, engine.chunk_size))
    return found


def on_disk(directory: Path) -> set[str]:
    return {path.stem for path in (directory / "records").rglob("*.safetensors")}


def in_redis(redis: RedisServer) -> set[str]:
    return {name.decode()[5:69] for name in redis.client().keys("lmc:{*")}


@pytest.fixture
def loose_umask() -> Iterator[None]:
    """Nothing that is made here is private by luck."""
    before = os.umask(0)
    yield
    os.umask(before)


def test_tenants_have_no_key_in_common_though_their_tokens_are_the_same(tmp_path, redis):
    disk, remote = [], []
    for salt in TENANTS:
        before = (on_disk(tmp_path), in_redis(redis))
        with served(redis.tcp_url(), salt, tmp_path) as cached:
            use(cached)
        disk.append(on_disk(tmp_path) - before[0])
        remote.append(in_redis(redis) - before[1])
        assert before[0] <= on_disk(tmp_path)
    # A tenant who stored a key that another has would have found it there, and brought no new one.
    assert len(disk[0]) == len(disk[1]) == len(remote[0]) == len(remote[1]) > len(DOCUMENTS)
    assert disk[0].isdisjoint(disk[1])
    assert remote[0].isdisjoint(remote[1])
    assert disk == remote


def test_who_knows_a_tenants_tokens_but_not_its_salt_finds_nothing(tmp_path, redis):
    with served(redis.tcp_url(), "alice", tmp_path) as cached:
        use(cached)
        assert "prefix" in finds(cached)
    for salt in ("bob", "", "Alice", "alice ", "alice\0"):
        with served(redis.tcp_url(), salt, tmp_path) as cached:
            assert finds(cached) == []
            assert cached.prefill(PROMPT, "exact").report.exact == 0
            report = cached.prefill(PROMPT, "blend").report
            assert report.reused == 0
    with served(redis.tcp_url(), "alice", tmp_path) as cached:
        assert {"prefix", "disk", *(f"document {i}" for i in range(4))} == set(finds(cached))


def test_keys_of_two_tenants_and_of_the_two_kinds_never_meet(redis):
    with served(redis.tcp_url(), "alice") as alice, served(redis.tcp_url(), "bob") as bob:
        every = [keys for cached in (alice, bob) for keys in keys_of(cached, (*DOCUMENTS, PROMPT))]
    assert len(set().union(*every)) == sum(map(len, every))


def use_as(url: str, salt: str) -> None:
    with served(url, salt) as cached:
        use(cached)


def test_two_processes_with_one_salt_find_each_others_chunks_in_redis(redis):
    for salt in ("alice", ""):
        assert Forked(use_as, redis.tcp_url(), salt).wait() == 0
    with served(redis.tcp_url(), "bob") as cached:
        assert finds(cached) == []
    with served(redis.tcp_url(), "alice") as cached:
        assert all(cached.knows(document) for document in DOCUMENTS)
        assert cached.learn(DOCUMENTS[0]) == 0
        report = cached.prefill(PROMPT, "exact").report
        assert report.exact >= len(PROMPT) - 16
        assert report.loaded["redis"] > 0
        wanted = cached.prefill(PROMPT, "full").logits
        assert (cached.prefill(PROMPT, "exact").logits - wanted).abs().max() <= 1e-4
        assert cached.prefill(PROMPT, "blend").report.unknown == 0


def test_installations_with_prefixes_of_their_own_share_a_redis_and_no_chunk(redis):
    found = []
    for prefix in ("one", "two", "one"):
        own = settings(redis.tcp_url(), remote_prefix=prefix, remote_ttl=100)
        with Served(own, "") as cached:
            found.append(bool(finds(cached)))
            use(cached)
    assert found == [False, False, True]
    names = redis.client().keys()
    assert {name.partition(b":")[0] for name in names} == {b"one", b"two"}
    headers = [name for name in names if b":{" in name and name.endswith(b"}")]
    assert len(headers) > 2 * len(DOCUMENTS)
    assert [name for name in headers if not 0 < redis.client().ttl(name) <= 100] == []


@pytest.mark.usefixtures("loose_umask")
def test_no_other_user_of_the_machine_reads_a_file_or_a_folder_of_ours(tmp_path, redis):
    directory = tmp_path / "deep" / "tier"
    with served(redis.tcp_url(), "alice", directory) as cached:
        use(cached)
        seen = modes(directory)
    assert len(seen) > len(DOCUMENTS) + 3
    for path, mode in {**seen, **modes(directory)}.items():
        assert mode in (0o600, 0o700), (path, oct(mode))
    assert {stat.S_IMODE(path.stat().st_mode) for path in directory.rglob("*") if path.is_file()} == {0o600}
    assert {stat.S_IMODE(path.stat().st_mode) for path in (directory, *directory.rglob("*")) if path.is_dir()} == {
        0o700
    }


def modes(directory: Path) -> dict[Path, int]:
    seen = {}
    for path in (directory, *directory.rglob("*")):
        with contextlib.suppress(FileNotFoundError):  # written aside, and renamed meanwhile
            seen[path] = stat.S_IMODE(path.lstat().st_mode)
    return seen


# -- passwords: `hunter2` and `correct-horse` are the right ones here, `wrong-guess` is not ---------------------------


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    users = ["writer on >correct-horse ~* +@all"]
    with RedisServer(tmp_path_factory.mktemp("guarded"), password="hunter2", users=users) as server:
        yield server


URLS: dict[str, Callable[[RedisServer], str]] = {
    "tcp": lambda s: s.tcp_url(),
    "unix": lambda s: s.unix_url(),
    "user": lambda s: s.tcp_url(user="writer", password="correct-horse"),
    "quoted": lambda s: s.tcp_url().replace("hunter2", "%68unter2"),
}


@pytest.mark.parametrize("kind", URLS)
def test_nothing_that_can_be_printed_shows_a_password(guarded, caplog, kind):
    url = URLS[kind](guarded)
    ours, remote = settings(url), parse_redis_url(url)
    tier = RedisTier(remote, deadline=5)
    try:
        things = [
            ours,
            remote,
            tier,
            *servers_of(tier),
            Settings.model_fields,
            ours.origin("remote_url"),
        ]
        said = " ".join(text for thing in things for text in (repr(thing), str(thing), f"{thing}"))
    finally:
        tier.close()
    assert [secret for secret in ("hunter2", "correct-horse", "%68unter2") if secret in said] == []
    with pytest.raises(ConfigError) as caught:
        settings(url, blend_min_tokens=-1, remote_deadline=-1, remote_serde="zip")
    say_no_secret(caplog, caught.value)


@pytest.mark.parametrize(
    "url",
    ["redis://:hunter2@", "redis:///hunter2@x:1/2/3", "redis://:hunter2@a,b", "hunter2", "redis://u:hunter2@h:port"],
)
def test_a_url_that_is_none_is_not_quoted(caplog, url):
    with caplog.at_level(logging.DEBUG), pytest.raises(ConfigError) as caught:
        settings(url)
    say_no_secret(caplog, caught.value)


@pytest.mark.parametrize("good", [True, False], ids=["good", "bad"])
def test_the_settings_are_listed_without_the_password(monkeypatch, tmp_path, good):
    for name in [name for name in os.environ if name.startswith(("LMC_", "LMCACHE_"))]:
        monkeypatch.delenv(name)
    url = "redis://writer:hunter2@127.0.0.1:6379/" + ("0" if good else "zero")
    file = tmp_path / "lmc.yaml"
    file.write_text(f"remote_url: {url}\n")
    for environ in ({"LMC_REMOTE_URL": url}, {"LMC_CONFIG_FILE": str(file)}):
        result = CliRunner().invoke(app, ["config"], env=environ)
        assert result.exit_code == (0 if good else 2)
        assert "remote_url" in result.output
        assert "hunter2" not in result.output


def test_a_whole_session_with_failures_logs_no_password_at_any_level(tmp_path, caplog):
    """Everything that any library says at DEBUG, from start to end, with a server that is killed, paused, and closed to
    us.
    """
    with RedisServer(tmp_path, password="hunter2") as server, caplog.at_level(logging.DEBUG):
        with CachedModel(random_model(), settings(server.tcp_url(), remote_deadline=0.3), SEPARATOR) as cached:
            (tier,) = tiers_of(cached.engine.store)
            use(cached)
            server.pause()
            use(cached)
            assert cached.engine.store.lookup([key_of(0)]) == [None]
            server.resume()
            wait_until(lambda: tier.usable, "a tier that is usable again")
            server.ask("CONFIG", "SET", "requirepass", "correct-horse")
            server.password = "correct-horse"
            server.ask("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            for number in range(5):
                cached.engine.store.lookup([key_of(number)])
            wait_until(lambda: "ERROR" in [record.levelname for record in caplog.records], "a trial that was refused")
            server.kill()
            use(cached)
        server.restart()
        server.password = "hunter2"
        with pytest.raises(LmcError) as caught:
            CachedModel(random_model(), settings(server.tcp_url(password="wrong-guess")), SEPARATOR)
        say_no_secret(caplog, caught.value)
    assert len(caplog.records) > 3


@pytest.mark.parametrize("away", ["killed", "paused", "closed to us"])
def test_no_error_of_a_tier_has_a_password_in_its_chain(tmp_path, caplog, away):
    with RedisServer(tmp_path, password="hunter2") as server, caplog.at_level(logging.DEBUG):
        tier = RedisTier(parse_redis_url(server.tcp_url()), deadline=0.3)
        assert tier.contains([key_of(0)]) == [False]
        if away == "killed":
            server.kill()
        elif away == "paused":
            server.pause()
        else:
            server.ask("CONFIG", "SET", "requirepass", "correct-horse")
            server.password = "correct-horse"
            server.ask("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        verbs: list[Callable[[], object]] = [
            lambda: tier.contains([key_of(0)]),
            lambda: tier.open(key_of(0)),
            lambda: tier.write(meta_of(key_of(0)), [stored(meta_of(key_of(0)))]),
            lambda: tier.delete(key_of(0)),
            lambda: list(tier.entries()),
            tier.check,
        ]
        failed = 0
        for verb in verbs:
            try:
                verb()
            except OSError as error:
                failed += 1
                say_no_secret(caplog, error)
        assert failed >= 1
        if away == "paused":
            server.resume()
        tier.close()
        say_no_secret(caplog)
