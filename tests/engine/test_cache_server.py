"""Two engines over one cache server: what one has stored the other uses, from the same memory; and the server goes."""

import time

import pytest
from lab import DOCUMENTS, PLAIN, PROMPT, agree, answer, engine, facts, words
from other_engine import OtherEngine


@pytest.fixture(scope="module")
def wanted(models):
    """Answers without any cache."""
    with engine(models("llama")) as lab:
        return {len(tokens): lab.vanilla(tokens) for tokens in (PROMPT.tokens, PLAIN)}


@pytest.fixture(scope="module")
def first(wanted, models, server):
    with engine(models("llama"), {"server": server.address}) as lab:
        yield lab


@pytest.fixture(scope="module")
def second(first, models, server):
    other = OtherEngine(models("llama"), server)
    yield other
    other.close()


def eventually(condition, lab):
    """Wait until a condition holds; the engine makes steps meanwhile, as one that has requests does."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        lab.ask(words(5, 77), count=1)
        time.sleep(0.05)


def right(out, wanted, tokens) -> bool:
    return agree(out, wanted[len(tokens)])


def test_documents_that_one_engine_has_learned_are_blended_by_the_other_from_memory(first, second, wanted):
    first.learn(DOCUMENTS)
    first.store.flush()
    held = len(first.store.known_keys())
    out = second.ask(PROMPT.tokens, PROMPT.blend(ratio=1.0))
    assert out["facts"]["tokens_from"] == {"host": sum(map(len, DOCUMENTS))}
    assert out["answer"] == answer(wanted[len(PROMPT.tokens)])
    documents = {key for document in DOCUMENTS for key in first.document_keys(document)}
    assert documents <= first.store.known_keys()
    assert held == len(documents), "there is one copy of each"


def test_pages_that_one_engine_has_computed_are_loaded_by_the_other(first, second, wanted):
    out = second.ask(PLAIN)
    assert out["answer"] == answer(wanted[len(PLAIN)])
    found = first.ask(PLAIN)
    assert facts(found)["tokens_from"] == {"host": 640}
    assert right(found, wanted, PLAIN)


def test_an_engine_that_is_killed_leaves_nothing_held(first, models, server):
    third = OtherEngine(models("llama"), server)
    third.ask(words(300, 55))
    third.process.kill()
    eventually(lambda: first.store.held() == 0, first)
    third.close()


def test_answers_are_right_while_the_server_is_away_and_hits_come_back_with_it(first, second, wanted, server):
    server.kill()
    first.forget_prefixes()
    started = time.monotonic()
    out = first.ask(PROMPT.tokens, PROMPT.blend(ratio=1.0))
    assert right(out, wanted, PROMPT.tokens)
    assert not facts(out).get("tokens_from")
    assert time.monotonic() - started < 30
    assert second.ask(PLAIN)["answer"] == answer(wanted[len(PLAIN)])
    server.start()
    back = time.monotonic()
    eventually(lambda: first.store.attachment is not None, first)
    assert time.monotonic() - back < 30
    first.learn(DOCUMENTS)
    eventually(lambda: first.store.lookup(first.document_keys(DOCUMENTS[0])) == ["host", "host"], first)
    deadline = time.monotonic() + 60
    while (out := second.ask(PROMPT.tokens, PROMPT.blend(ratio=1.0)))["facts"].get("tokens_from", {}) != {
        "host": sum(map(len, DOCUMENTS))
    }:
        assert time.monotonic() < deadline, out
    assert out["answer"] == answer(wanted[len(PROMPT.tokens)])
    first.check_idle()
    assert server.stop() == 0


def test_the_log_says_where_the_chunks_are(first, caplog):
    assert "of the cache server at" in first.connector._summary(first.connector._scheduler.engine, blends=True)
