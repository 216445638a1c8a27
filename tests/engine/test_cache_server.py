"""Two engines over one cache server: what one has stored the other uses, from the same memory; and the server goes."""

import os
import time
from pathlib import Path

import pytest
from lab import DOCUMENTS, PLAIN, PROMPT, Prompt, agree, answer, engine, facts, words
from other_engine import OtherEngine

from lmc.server.client.connection import status

pytestmark = pytest.mark.long

RATIOS = 0.0, 0.15, 1.0


@pytest.fixture(scope="module")
def wanted(models):
    """Answers without any cache, and, under their ratios, those of blends by one engine with a store of its own."""
    with engine(models("llama")) as lab:
        plain = {len(tokens): lab.vanilla(tokens) for tokens in (PROMPT.tokens, PLAIN)}
        lab.learn(DOCUMENTS)
        blends = {}
        for ratio in RATIOS:
            lab.forget_prefixes()
            blends[ratio] = lab.ask(PROMPT.tokens, PROMPT.blend(ratio=ratio))
        return plain | blends


@pytest.fixture(scope="module")
def conversations(models):
    """By ratio: a prompt, the next turn, and the answers of one engine with empty caches for each of them.

    The next turn is answered by a blend and by prefill.
    """
    with engine(models("llama")) as lab:
        found = {}
        for number, ratio in enumerate(RATIOS):
            prompt, answers = Prompt(DOCUMENTS, seed=2000 + 10 * number), []
            tokens = prompt.tokens
            for _ in range(2):
                lab.forget()
                lab.learn(DOCUMENTS)
                answers.append(answer(lab.ask(tokens, prompt.blend(ratio=ratio))))
                turn, tokens = tokens, [*tokens, *answers[0], *words(40, 50)]
            found[ratio] = prompt, turn, [*answers, answer(lab.vanilla(turn))]
        return found


@pytest.fixture(scope="module")
def first(wanted, conversations, models, server):
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


def maps_of(process):
    """What a process has mapped, with the inodes of files."""
    return Path(f"/proc/{process}/maps").read_text()


def eventually_alone(condition):
    """Wait until a condition holds; the engines are idle meanwhile."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def right(out, wanted, tokens) -> bool:
    return agree(out, wanted[len(tokens)])


def test_documents_that_one_engine_has_learned_are_blended_by_the_other_from_memory(first, second, wanted, server):
    first.learn(DOCUMENTS)
    first.store.flush()
    held = len(first.store.known_keys())
    before = status(server.path).arenas[0].stats.present["host"]
    for ratio in RATIOS:
        out = second.ask(PROMPT.tokens, PROMPT.blend(ratio=ratio))
        assert out["facts"]["reused_tokens"] == sum(map(len, DOCUMENTS))
        assert out["answer"] == answer(wanted[ratio]), "as from one engine alone"
    assert answer(wanted[1.0]) == answer(wanted[len(PROMPT.tokens)])
    found = [chunk.meta for chunk in first.store.records()]
    assert len({meta.key for meta in found}) == len(found) >= before[0], "there is one copy of each chunk"
    documents = {key for document in DOCUMENTS for key in first.document_keys(document)}
    assert documents <= first.store.known_keys()
    assert held == len(documents), "there is one copy of each"


@pytest.mark.parametrize("ratio", RATIOS)
def test_a_conversation_that_one_engine_has_begun_is_blended_anew_by_the_other(first, second, conversations, ratio):
    """The blend of the first turn stays in its engine: the store has exact prefixes and documents."""
    prompt, turn, answers = conversations[ratio]
    first.learn(DOCUMENTS)
    begun = first.ask(prompt.tokens, prompt.blend(ratio=ratio))
    first.drop_backfills()  # Otherwise the other engine may load the first turn exactly.
    blended, plain = (second.ask(turn, lmc) for lmc in (prompt.blend(ratio=ratio), {"blend": False}))
    assert [answer(begun), blended["answer"], plain["answer"]] == answers
    assert blended["facts"]["reused_tokens"] == sum(map(len, DOCUMENTS))
    assert "continued_tokens" not in blended["facts"]
    assert plain["facts"] == {}
    assert ratio or blended["answer"] != plain["answer"], "the control: blind reuse is seen in the answer"


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
    first.check_idle()  # In this process, the last blocks of a request are saved in the next step.
    memory = f" {os.fstat(first.store.attachment.quick.files[0]).st_ino} "
    assert memory in maps_of(os.getpid())
    assert memory in maps_of(second.process.pid)
    server.kill()
    eventually_alone(lambda: memory not in maps_of(os.getpid()) + maps_of(second.process.pid))
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
    eventually_alone(lambda: first.store.held() == 0)  # The other engine saves behind its answer, and counts, too.
    first.check_idle()
    assert server.stop() == 0
