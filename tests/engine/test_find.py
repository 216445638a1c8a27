"""Known documents are reused wherever they stand in a prompt, in whole and in part."""

import pytest
from lab import answer, distance, facts, words
from test_exact_and_blend import SAME

DOCUMENTS = [words(150, 1), words(300, 2), words(90, 4)]
# Parts begin and end inside chunks; chunks have 128 tokens.
PARTS = {
    "whole documents": [DOCUMENTS[2], words(9, 50), DOCUMENTS[0], words(1, 51), DOCUMENTS[1]],
    "parts": [DOCUMENTS[1][100:290], words(5, 52), DOCUMENTS[0][:149], DOCUMENTS[2][1:]],
    "one part twice": [DOCUMENTS[1][10:110], words(5, 53), DOCUMENTS[1][10:110]],
}
KNOWN = {"blend_find": "known"}


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def lab(request, models, shared_engine):
    return shared_engine(models(request.param), KNOWN)


def asked(lab, name):
    """A prompt with these parts and no separators, and what the engine alone answers."""
    parts = PARTS[name]
    tokens = [*words(37, 60), *(token for part in parts for token in part), *words(23, 61)]
    wanted = lab.vanilla(tokens)
    lab.learn(DOCUMENTS)
    lab.forget_pages()
    return tokens, sum(len(part) for part in parts if len(part) > 9), wanted


@pytest.mark.parametrize("strategy", ["union", "deviation", "head"])
@pytest.mark.parametrize("name", PARTS)
def test_at_ratio_1_found_documents_give_full_prefill(lab, name, strategy):
    tokens, reused, wanted = asked(lab, name)
    found = lab.ask(tokens, {"strategy": strategy, "ratio": 1.0})
    assert facts(found)["reused_tokens"] == reused
    assert facts(found)["found_documents"] == {"known": sum(len(part) > 9 for part in PARTS[name])}
    assert answer(found) == answer(wanted)
    assert distance(found, wanted) <= SAME
    lab.check()


@pytest.mark.parametrize("name", PARTS)
def test_the_stored_kv_is_used_and_recomputing_brings_it_nearer(lab, name):
    """The control: without recomputation the answer is another one."""
    tokens, _, wanted = asked(lab, name)
    blind = distance(lab.ask(tokens, {"strategy": "none"}), wanted)
    half = distance(lab.ask(tokens, {"strategy": "deviation", "ratio": 0.9}), wanted)
    assert blind > 100 * SAME
    assert half < blind


def test_the_first_document_of_a_prompt_is_exact_and_others_are_not(lab):
    """What begins a prompt as it was learned needs no recomputation."""
    tokens, _, wanted = [*DOCUMENTS[1], *words(40, 70)], 0, None
    wanted = lab.vanilla(tokens)
    lab.learn(DOCUMENTS)
    lab.forget_pages()
    found = lab.ask(tokens)
    assert facts(found)["exact_tokens"] == len(DOCUMENTS[1])
    assert distance(found, wanted) <= SAME
    lab.check()


def test_an_edited_document_at_the_beginning_is_not_exact(lab):
    """Earlier, tokens after the edit were taken for exact, and plain requests got KV of other texts."""
    tokens = [*DOCUMENTS[1], *words(40, 71)]
    tokens[40:44] = words(4, 72)
    wanted = lab.vanilla(tokens)
    lab.learn(DOCUMENTS)
    lab.forget_pages()
    blended = lab.ask(tokens, {"strategy": "none"})
    assert facts(blended)["reused_tokens"] > 0
    for _ in range(2):
        plain = lab.ask(tokens, {"blend": False})
        assert distance(plain, wanted) <= SAME
        lab.forget_prefixes()
    lab.check()
