"""Text that a tenant's prompts repeat after other beginnings is learned, and reused from the third prompt on."""

from pathlib import Path

import pytest
from lab import answer, distance, facts
from test_exact_and_blend import SAME
from transformers import AutoTokenizer

from lmc.demo import SHIPPED
from lmc.demo.questions import read_collection

SETTINGS = {"blend_find": "repeated", "blend_min_tokens": 64}
COUNTED = "repeated_documents", "documents_learned", "repeated_tokens"


@pytest.fixture(scope="module")
def texts():
    """The documents of the small model: several hundred tokens each."""
    return list(read_collection(SHIPPED / "documents", SHIPPED / "questions.json").documents.values())


@pytest.fixture(scope="module")
def encode():
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED / "model")
    return lambda text: tokenizer.encode(text, add_special_tokens=False)


@pytest.fixture
def lab(shared_engine):
    """An engine with a tokenizer, in which nothing is known of earlier tests."""
    lab = shared_engine(Path(SHIPPED / "model"), SETTINGS, skip_tokenizer_init=False)
    lab.forget()
    lab.connector.reset_cache()
    return lab


def prompt(texts, numbers, beginning):
    """Documents as an application joins them, with other texts before and after them."""
    documents = "\n\n".join(f"[{place}] {texts[number]}" for place, number in enumerate(numbers))
    return f"{texts[beginning]}\n\n{documents}\n\nWhat is different here? {texts[beginning + 8]}"


def counted(lab):
    numbers = lab.numbers
    return [numbers.get(name, 0) for name in COUNTED]


def gained(lab, before):
    return [now - then for now, then in zip(counted(lab), before, strict=True)]


def ask(lab, tokens, lmc=None, **more):
    out = lab.ask(tokens, lmc, **more)
    lab.settle()
    return out


def test_the_third_prompt_reuses_what_the_second_repeats(lab, texts, encode):
    first, second, third = (encode(prompt(texts, (1, 2, 3), beginning)) for beginning in (5, 6, 7))
    wanted = lab.vanilla(third)
    before = counted(lab)
    ask(lab, first)
    assert gained(lab, before) == [0, 0, 0]
    ask(lab, second)
    learned = gained(lab, before)
    assert learned[0] == learned[1] >= 1
    lab.forget_prefixes()
    lab.forget_pages()
    found = ask(lab, third, {"strategy": "deviation", "ratio": 1.0})
    there = sum(len(encode(texts[number])) for number in (1, 2, 3))
    assert facts(found)["reused_tokens"] >= 0.9 * there
    assert gained(lab, before)[2] == facts(found)["reused_tokens"]
    assert answer(found) == answer(wanted)
    assert distance(found, wanted) <= SAME
    assert {document.name for document in lab.lmc.engine.known.list()} == {"(repeated)"}
    lab.check()


def test_repeated_text_that_was_evicted_is_learned_again(lab, texts, encode):
    """Earlier, evicted text was found in every prompt and counted as known, so it was never learned again."""
    for beginning in (5, 6):
        ask(lab, encode(prompt(texts, (1, 2, 3), beginning)))
    engine = lab.lmc.engine
    for document in engine.known.list():
        for key in document.keys:
            engine.store.forget(key)
    lab.forget_prefixes()
    lab.forget_pages()
    before = counted(lab)
    assert "reused_tokens" not in (facts(ask(lab, encode(prompt(texts, (1, 2, 3), 8)))) or {})
    learned = gained(lab, before)
    assert learned[0] == 0, "the text was known before"
    assert learned[1] >= 1
    lab.forget_prefixes()
    lab.forget_pages()
    there = sum(len(encode(texts[number])) for number in (1, 2, 3))
    found = facts(ask(lab, encode(prompt(texts, (1, 2, 3), 9))))
    assert found["reused_tokens"] >= 0.9 * there
    assert found["found_documents"].keys() == {"repeated"}
    lab.check()


def test_a_tenant_learns_nothing_from_the_prompts_of_another(lab, texts, encode):
    before = counted(lab)
    for beginning, salt in ((5, "one"), (6, "other"), (7, None)):
        ask(lab, encode(prompt(texts, (1, 2, 3), beginning)), salt=salt)
    assert gained(lab, before) == [0, 0, 0]
    ask(lab, encode(prompt(texts, (1, 2, 3), 8)), salt="one")
    assert gained(lab, before)[0] >= 1
    ask(lab, encode(prompt(texts, (1, 2, 3), 9)), salt="other")
    lab.forget_prefixes()
    assert "found_documents" not in (facts(ask(lab, encode(prompt(texts, (1, 2, 3), 4)))) or {})


def test_prompts_that_come_once_are_not_learned(lab, texts, encode):
    before, stored = counted(lab), len(lab.lmc.engine.known.list())
    for beginning in range(8):
        ask(lab, encode(prompt(texts, (beginning + 16,), beginning)))
    assert gained(lab, before) == [0, 0, 0]
    assert len(lab.lmc.engine.known.list()) == stored


def test_turns_of_a_conversation_and_the_models_answers_are_not_learned(lab, texts, encode):
    before = counted(lab)
    tokens = encode(prompt(texts, (1,), 5))
    said = []
    for turn in range(3):
        out = ask(lab, tokens, count=100)
        said += answer(out)
        tokens = [*tokens, *answer(out), *encode(f" {texts[10 + turn]} ")]
    assert gained(lab, before)[0] == 0
    for beginning in (6, 7, 8):
        ask(lab, [*encode(texts[beginning]), *said, *encode(f" {texts[beginning + 10]}")])
    assert gained(lab, before)[0] == 0


@pytest.mark.parametrize("wish", [{"learn": False}, {"blend": False}, {"documents": [[4, 100]]}], ids=str)
def test_a_request_may_forbid_it(lab, texts, encode, wish):
    before = counted(lab)
    for beginning in (5, 6, 7):
        ask(lab, encode(prompt(texts, (1, 2, 3), beginning)), wish)
    assert gained(lab, before)[0] == 0
