"""Two engines that share a Redis: what one has stored the other loads, and no answer depends on whether Redis is
there.
"""

import sys
from pathlib import Path

import pytest
from lab import DOCUMENTS, PLAIN, PROMPT, agree, engine, facts
from stepping import poison

sys.path.append(str(Path(__file__).parent.parent))
from redis_servers import RedisServer, wait_until

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="module")
def wanted(models, server):
    """Answers without any cache; and another engine has left its chunks in Redis."""
    with engine(models("llama")) as lab:
        wanted = {len(tokens): lab.vanilla(tokens) for tokens in (PROMPT.tokens, PLAIN)}
    with engine(models("llama"), {"remote_url": server.tcp_url()}) as lab:
        lab.learn(DOCUMENTS)
        lab.ask(PLAIN)
        lab.check()
    return wanted


@pytest.fixture(scope="module")
def second(wanted, models, server):
    with engine(models("llama"), {"remote_url": server.tcp_url(), "remote_deadline": 1.0}) as lab:
        poison()
        yield lab


@pytest.fixture
def lab(second):
    yield second
    second.check()


def right(out, wanted, tokens) -> bool:
    return agree(out, wanted[len(tokens)])


def test_pages_of_the_other_engine_are_loaded(lab, wanted):
    """Whole chunks; the end of that prompt is stored together with what was generated, which nobody here has seen."""
    out = lab.ask(PLAIN)
    assert facts(out) == {"exact_tokens": 640, "tokens_from": {"redis": 640}}
    assert right(out, wanted, PLAIN)


def test_documents_that_the_other_engine_learned_are_blended(lab, wanted):
    out = lab.ask(PROMPT.tokens, PROMPT.blend(ratio=1.0))
    assert facts(out)["tokens_from"] == {"redis": sum(map(len, DOCUMENTS))}
    assert right(out, wanted, PROMPT.tokens)


def test_answers_stay_right_while_redis_is_away_and_after_it_came_back_empty(lab, wanted, server):
    redis = lab.tiers[-1]
    lab.forget_prefixes()
    lab.lmc.forget_all()  # of this engine's memory
    server.pause()
    assert right(lab.ask(PLAIN), wanted, PLAIN)
    assert not redis.usable
    server.kill()
    lab.forget_prefixes()
    assert right(lab.ask(PROMPT.tokens, PROMPT.blend(ratio=1.0)), wanted, PROMPT.tokens)
    server.restart()
    wait_until(lambda: redis.usable, "the breaker closes")
    lab.forget_prefixes()
    assert right(lab.ask(PLAIN), wanted, PLAIN)
    lab.check()
