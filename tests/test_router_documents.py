"""The `documents` policy: prompts are cut as engines cut them, and go to the engine that has least to do for them."""

import hashlib
import time
from array import array
from collections import Counter
from math import ceil

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmc.blend.markers import Markers
from lmc.errors import InputError
from lmc.keys import tenant_of
from lmc.router.cut import (
    BLOCK_CHARACTERS,
    MAX_CHARACTERS,
    MAX_DOCUMENTS,
    MAX_SCOPES,
    MAX_TOKENS,
    MIN_RATE,
    ROLE,
    CutDocument,
    Cutter,
)
from lmc.router.document_index import COMING, LEARNING_SECONDS, DocumentIndex, DocumentState, ReportedDocument
from lmc.router.fair_lru import FairLru
from lmc.router.kv_index import CacheSource
from lmc.router.policies.documents import STAY, Documents
from lmc.router.policy_types import Candidate, PromptRequest, RoutingChoice, Usage
from lmc.router.requests import MAX_PARTS, prompt_text, read
from lmc.router.visit import usage

SEPARATOR = " # # "
TEXTS = {name: f"{name} " * 100 for name in ("one", "two", "three", "four", "a longer one")}


def prompt(*names: str, question: str = "why?") -> PromptRequest:
    return PromptRequest(text=SEPARATOR.join(["system", *(TEXTS[name] for name in names), question]))


def engines(count: int = 2, **fields) -> list[Candidate]:
    return [Candidate(f"http://{number}", **fields) for number in range(count)]


def found_in(index: DocumentIndex, cache: str, document: CutDocument, *tenant: str) -> DocumentState:
    return index.find(cache, [document], *tenant)[0]


# -- cutting ----------------------------------------------------------------------------------------------------------


def test_a_prompt_is_cut_at_the_special_string_and_white_space_around_a_document_does_not_count():
    first, second = (
        Cutter().cut(PromptRequest(text=text)).documents for text in ("s # # a b # # c # # q", "t# #\na b # #c# #")
    )
    assert [one.key for one in first] == [one.key for one in second]
    assert len({one.key for one in first}) == 2


@pytest.mark.parametrize("text", ["no separator", "one # # only", " # #  # # ", ""])
def test_a_prompt_without_documents_has_none(text):
    assert Cutter().cut(PromptRequest(text=text)).documents == ()


def test_a_text_that_reaches_into_another_message_is_no_document():
    chat = [{"role": "user", "content": "a # # b # # c"}, {"role": "user", "content": "d # # e # # f"}]
    text = prompt_text({"messages": chat}, SEPARATOR)
    found = Cutter().cut(PromptRequest(text=text)).documents
    assert [one.key for one in found] == [
        one.key for one in Cutter().cut(PromptRequest(text="x # # b # # e # # y")).documents
    ]


def test_what_the_model_has_said_is_no_document():
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b # # c # # d"}]
    assert Cutter().cut(PromptRequest(text=prompt_text({"messages": chat}, SEPARATOR))).documents == ()


def test_documents_of_a_chat_request_are_documents():
    asked = {
        "messages": [{"role": "user", "content": "why?"}],
        "documents": [{"text": "a"}, {"text": " b "}, 3, {"x": 1}],
    }
    text = prompt_text(asked, SEPARATOR)
    assert text.startswith(" # # a # # b # # " + ROLE)
    assert len(Cutter().cut(PromptRequest(text=text)).documents) == 2


def test_documents_that_a_request_names_are_found_in_its_text():
    body = (
        b'{"prompt": "read alpha and beta", "kv_transfer_params": {"lmc": {"documents": ["alpha", "beta", "gamma"]}}}'
    )
    request = read(body, {}, "x-session-id", SEPARATOR).request
    assert [round(4 * one.stop) for one in Cutter().cut(request).documents] == [10, 19]


def test_an_engine_is_asked_for_the_tokens_of_the_documents_of_a_chat_too():
    """vLLM's /tokenize knows no `documents`: the tokens of a chat had none, and nothing of it was found again."""
    asked = {"model": "m", "messages": [], "documents": [{"text": "a"}], "chat_template_kwargs": {"x": 1}, "user": "u"}
    found = read(msgspec.json.encode(asked), {}, "x-session-id", SEPARATOR).tokenize
    assert found == {
        "model": "m", "messages": [], "chat_template_kwargs": {"x": 1, "documents": [{"text": "a"}]},
    }  # fmt: skip
    del asked["documents"]
    found = read(msgspec.json.encode(asked), {}, "x-session-id", SEPARATOR).tokenize
    assert found["chat_template_kwargs"] == {"x": 1}


def test_documents_that_a_request_names_are_kept_when_its_tokens_are_known():
    cutter = Cutter(markers={"m": Markers(separators=((9, 9),))})
    request = PromptRequest(text="read alpha and beta", model="m", tokens=[1] * 38, documents=("alpha", "beta"))
    assert [(one.tokens, one.stop) for one in cutter.cut(request).documents] == [(10, 20), (8, 38)]


def test_tokens_are_cut_as_an_engine_cuts_them_and_have_its_digest():
    tokens = [1, 9, 9, 5, 6, 7, 9, 9, 5, 9, 9, 4]
    cutter = Cutter(markers={"m": Markers(separators=((9, 9),))})
    cut = cutter.cut(PromptRequest(text="", model="m", tokens=tokens))
    assert [(one.tokens, one.stop) for one in cut.documents] == [(3, 6), (1, 9)]
    assert cut.documents[0].digest == hashlib.sha256(array("I", [5, 6, 7]).tobytes()).hexdigest()
    assert cut.tokens == len(tokens)
    assert cutter.cut(PromptRequest(text="", model="other", tokens=tokens)).documents == ()


def test_a_document_whose_tokens_are_known_has_their_number_and_digest():
    cutter = Cutter(find=lambda model, text, _: ("d", 7) if (model, text) == ("m", " a b ") else None)
    one, other = cutter.cut(PromptRequest(text="s # # a b # # c d # # q", model="m")).documents
    assert (one.tokens, one.digest) == (7, "d")
    assert (other.tokens, other.digest) == (3 / 4, "")


def test_blocks_are_equal_as_far_as_prompts_are():
    same = "x" * (3 * BLOCK_CHARACTERS)
    one, other = (Cutter().cut(PromptRequest(text=text)).blocks for text in (same + "a" * 600, same + "b" * 600))
    assert one[:3] == other[:3]
    assert one[3] != other[3]
    assert Cutter().cut(PromptRequest(text=same, salt="t")).blocks[0] != one[0]


def test_the_letters_of_a_token_are_learned_from_answers():
    cutter = Cutter()
    for _ in range(200):
        cutter.counted("m", 2000, 1000)
    assert cutter.characters_per_token("m") == pytest.approx(2, rel=0.01)
    cutter.counted("m", 0, 10)
    assert cutter.characters_per_token("m") == pytest.approx(2, rel=0.01)
    assert cutter.characters_per_token("another tenant") == 4


def test_what_is_no_text_does_not_spoil_the_letters_of_a_token():
    cutter = Cutter()
    for _ in range(200):
        cutter.counted("m", 10, 100_000)
    assert cutter.characters_per_token("m") >= MIN_RATE
    for number in range(MAX_SCOPES + 10):
        cutter.counted(f"tenant {number}", 2000, 1000)
    assert len(cutter.rates) == MAX_SCOPES
    policy, asked = (
        Documents(),
        {"model": "m", "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]},
    )
    asked["messages"][0]["content"].append({"type": "image_url", "image_url": {"url": "data:" + "A" * 10_000}})
    request = read(msgspec.json.encode(asked), {}, "x-session-id", SEPARATOR).request
    assert len(request.text) < 100, "an image has no letters"
    policy.answered(request, RoutingChoice("a", "documents"), Usage(prompt_tokens=5000))
    assert not policy.cutter.rates


def test_no_more_of_a_prompt_is_cut_than_any_engine_takes():
    """32 MiB of separators once made millions of documents, while all other requests waited."""
    began = time.thread_time()
    asked = read(msgspec.json.encode({"prompt": "a b " * 2_000_000}), {}, "x-session-id", SEPARATOR)
    assert len(asked.request.text) == MAX_CHARACTERS
    assert asked.tokens == 2_000_000
    many = Cutter().cut(PromptRequest(text="# # a " * 2_000_000))
    assert len(many.documents) == MAX_DOCUMENTS
    assert len(many.blocks) <= MAX_CHARACTERS / BLOCK_CHARACTERS
    names = tuple(f"name {number}" for number in range(100_000))
    Cutter().cut(PromptRequest(text="name of nobody " * 1_000_000, documents=names))
    tokens = [1, 9, 9] * 1_000_000
    cut = Cutter(markers={"m": Markers(separators=((9, 9),))}).cut(PromptRequest(text="", model="m", tokens=tokens))
    assert len(cut.documents) == MAX_DOCUMENTS
    assert cut.tokens == len(tokens)
    assert time.thread_time() - began < 20


@pytest.mark.parametrize(
    ("asked", "letters"),
    [
        ({"messages": [{"role": "u", "content": "x"}] * 150_000}, 4 * MAX_PARTS),
        ({"messages": [{"role": "u", "content": [{"type": "text", "text": "x"}] * 150_000}]}, 3 + MAX_PARTS),
        ({"prompt": ["x"] * 150_000}, 2 * MAX_PARTS),
        ({"prompt": [7] * (MAX_TOKENS + 1)}, 0),
    ],
)
def test_no_more_messages_and_tokens_are_looked_at_than_anybody_sends(asked, letters):
    """22 MB of messages of one letter, or of tokens, held up all other requests for up to half a second."""
    request = read(msgspec.json.encode(asked), {}, "x-session-id", SEPARATOR).request
    assert len(request.text) == letters
    assert len(request.tokens or ()) == (0 if letters else MAX_TOKENS)


@pytest.mark.parametrize(
    "body", [b"[" + b"[]," * 1_000_001 + b"[]]", b"[" + b"{}," * 1_000_001 + b"{}]", b"[" + b"1," * 4_000_001 + b"1]"]
)
def test_a_body_of_very_many_small_values_is_refused(body):
    with pytest.raises(InputError, match="exceeds 4000000 values"):
        read(body, {}, "x-session-id", SEPARATOR)


@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_any_body_is_read_or_refused(body):
    from lmc.errors import InputError

    try:
        request = read(body, {}, "x-session-id", SEPARATOR).request
    except InputError:
        return
    Cutter().cut(request)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.just(SEPARATOR.join("abc")),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "text", "x"]), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(
    st.dictionaries(
        st.sampled_from(
            ["messages", "prompt", "input", "instructions", "documents", "prompt_token_ids", "kv_transfer_params"]
        ),
        values,
    )
)
def test_no_request_of_strange_values_breaks_the_cutter(asked):
    import json

    from lmc.errors import InputError

    try:
        request = read(json.dumps(asked).encode(), {}, "x-session-id", SEPARATOR).request
    except InputError:
        return
    cut = Cutter().cut(request)
    assert all(one.tokens > 0 for one in cut.documents)


# -- the index --------------------------------------------------------------------------------------------------------


def test_what_an_engine_was_sent_is_taken_to_be_there_until_others_take_its_room():
    index, cutter = DocumentIndex(250), Cutter()
    cut = cutter.cut(prompt("one", "two"))  # 100 tokens each
    index.note("a", cut)
    assert [found_in(index, "a", one).weight for one in cut.documents] == [1, 1]
    assert [found_in(index, "b", one).weight for one in cut.documents] == [0, 0]
    index.note("a", cutter.cut(prompt("three")))
    assert [found_in(index, "a", one).weight for one in cut.documents] == [0, 1]
    index.resize("a", 110)
    assert [found_in(index, "a", one).weight for one in cut.documents] == [0, 0]
    index.resize("a", 300, 128)  # tokens of a chunk
    index.note("a", cut)
    assert index.room("a") == 300 - 2 * 128
    index.forget("a")
    assert len(index) == 0


def test_the_end_of_an_answer_says_what_was_reused():
    facts = b'"kv_transfer_params": {"lmc": {"tokens_from": {"host": 60, "disk": 20}, "reused_tokens": 70}}}'
    whole = b'{"usage": {"prompt_tokens":100,"prompt_tokens_details":{"cached_tokens":80}}, ' + facts
    assert usage(whole) == Usage(100, 80, 70, {"host": 60, "disk": 20})
    assert usage(rb'"text": "\"cached_tokens\": 9, \"tokens_from\": {}"') == Usage()
    assert usage(b'"tokens_from": {"host": "many"}') == Usage()
    assert usage(b'{"lmc": {"unknown_documents": 6}}') == Usage(document_tokens=0)


def sent_and_answered(policy: Documents, request: PromptRequest, said: Usage, times: int = 1) -> None:
    for _ in range(times):
        choice = policy.choose(request, engines(1))
        policy.sent(request, choice.engine)
        policy.answered(request, choice, said)


@pytest.mark.parametrize("said", [Usage(cached_tokens=0), Usage(document_tokens=0, cached_tokens=40)])
def test_an_engine_whose_answers_say_that_documents_are_not_there_is_not_believed_to_have_them(said, monkeypatch):
    monkeypatch.setattr("lmc.router.document_index.LEARNING_SECONDS", 0.0)
    policy, asked = Documents(), prompt("one", "two")
    sent_and_answered(policy, asked, Usage())
    assert policy.choose(prompt("two", "one"), engines(1)).expected_tokens == pytest.approx(200, rel=0.01)
    for text in range(60):  # Other beginnings: only documents are the same.
        other = prompt("one", "two", question=f"{text}?")
        sent_and_answered(policy, PromptRequest(text=f"{text} {other.text}"), said)
    assert policy.choose(prompt("two", "one"), engines(1)).expected_tokens < 2
    of_another_tenant = PromptRequest(text=asked.text, salt="t")
    policy.sent(of_another_tenant, "http://0")
    later = PromptRequest(text="x" + prompt("two", "one").text, salt="t")
    assert policy.choose(later, engines(1)).expected_tokens == pytest.approx(200, rel=0.01), (
        "tenants do not steer each other"
    )
    for text in range(60):
        other = prompt("one", "two", question=f"{text}?")
        sent_and_answered(policy, PromptRequest(text=f"again {text} {other.text}"), Usage(document_tokens=200))
    assert policy.choose(prompt("two", "one"), engines(1)).expected_tokens > 190, "it is believed again"


def test_answers_say_in_which_place_documents_are(monkeypatch):
    monkeypatch.setattr("lmc.router.document_index.LEARNING_SECONDS", 0.0)
    policy, asked = Documents(), prompt("one", "two")
    sent_and_answered(policy, asked, Usage())
    in_memory = policy.choose(prompt("two", "one"), engines(1)).cost
    for text in range(60):
        said = Usage(document_tokens=200, places={"disk": 200})
        sent_and_answered(policy, PromptRequest(text=f"{text} {asked.text}"), said)
    on_disk = policy.choose(prompt("two", "one"), engines(1))
    assert on_disk.expected_tokens == pytest.approx(200, rel=0.01)
    assert on_disk.cost == pytest.approx(in_memory + 0.3 * 0.85 * 200, rel=0.01)


HISTORY = "what was said before " * 400  # 2,100 tokens


def expected_of_history(policy: Documents, engine: str = "http://0", **fields) -> float:
    return policy.choose(PromptRequest(text=f"{HISTORY} a question", **fields), [Candidate(engine)]).expected_tokens


def test_an_engine_whose_answers_say_that_beginnings_are_not_there_is_not_believed_to_have_them(monkeypatch):
    """An engine without prefix caching was expected to reuse all beginnings that it was ever sent."""
    monkeypatch.setattr("lmc.router.document_index.LEARNING_SECONDS", 0.0)
    policy, asked = Documents(), PromptRequest(text=f"{HISTORY} first")
    for other in (PromptRequest(text=asked.text, salt="t"), asked):
        policy.sent(other, "http://other")
        policy.sent(other, "http://0")
    believed = expected_of_history(policy)
    assert believed == pytest.approx(2100, rel=0.1)
    sent_and_answered(policy, asked, Usage(), times=60)
    assert expected_of_history(policy) == believed, "who says nothing teaches nothing"
    sent_and_answered(policy, asked, Usage(cached_tokens=0), times=60)
    assert expected_of_history(policy) < believed / 100
    full = policy.choose(PromptRequest(text=HISTORY), engines(1))
    assert full.cost == pytest.approx(len(HISTORY) / 4, rel=0.01)
    assert expected_of_history(policy, salt="t") == believed, "tenants do not steer each other"
    assert expected_of_history(policy, "http://other") == believed
    sent_and_answered(policy, asked, Usage(cached_tokens=2100), times=60)
    assert expected_of_history(policy) > believed * 0.99, "it is believed again"


def test_what_was_reused_of_documents_says_nothing_about_beginnings(monkeypatch):
    monkeypatch.setattr("lmc.router.document_index.LEARNING_SECONDS", 0.0)
    policy = Documents()
    asked = PromptRequest(text=HISTORY + prompt("one", "two").text)
    said = Usage(cached_tokens=200, document_tokens=200)
    sent_and_answered(policy, asked, said, times=60)
    assert expected_of_history(policy) < 20
    assert policy.choose(prompt("two", "one"), engines(1)).expected_tokens == pytest.approx(200, rel=0.01)
    again = policy.choose(asked, engines(1))
    assert again.expected_tokens == pytest.approx(200, rel=0.1), "as documents, if not as a part of the beginning"
    assert again.prefix_tokens > 2000


def test_a_burst_of_equal_beginnings_says_nothing_about_an_engine():
    policy, asked = Documents(), PromptRequest(text=f"{HISTORY} first")
    sent_and_answered(policy, asked, Usage(cached_tokens=0), times=20)  # None of them was computed yet.
    assert expected_of_history(policy) == pytest.approx(2100, rel=0.1)


def test_a_conversation_stays_where_it_is_though_beginnings_are_not_there(monkeypatch):
    monkeypatch.setattr("lmc.router.document_index.LEARNING_SECONDS", 0.0)
    policy, (a, b) = Documents(), engines()
    policy.sent(PromptRequest(text=HISTORY), b.name)
    for turn in range(60):
        asked = PromptRequest(text=f"{HISTORY} turn {turn}")
        choice = policy.choose(asked, [a, b])
        assert (choice.engine, choice.why) == (b.name, "conversation")
        policy.sent(asked, b.name)
        policy.answered(asked, choice, Usage(cached_tokens=0))
    assert choice.expected_tokens < 20


def test_a_burst_of_new_documents_says_nothing_about_an_engine():
    policy, asked = Documents(), prompt("one", "two")
    choices = []
    for number in range(20):
        request = PromptRequest(text=f"{number} {asked.text}")
        choices.append((request, policy.choose(request, engines(1))))
        policy.sent(request, "http://0")
    for request, choice in choices:  # None of them found what was on its way.
        policy.answered(request, choice, Usage(cached_tokens=0))
    assert policy.choose(prompt("two", "one"), engines(1)).expected_tokens == pytest.approx(200, rel=0.01)


def test_an_empty_prompt_is_sent_somewhere():
    policy = Documents()
    choice = policy.choose(PromptRequest(text="", tokens=[]), engines(2))
    assert (choice.expected_tokens, choice.cost) == (0, 1)


def test_answers_change_nothing_where_events_say_what_is_there():
    index, (one,) = DocumentIndex(1000), Cutter().cut(prompt("one")).documents
    index.listed("a", [])
    index.answered("a", "", 100, 0, {})
    index.drop_reports("a")
    index.note("a", Cutter().cut(prompt("one")))
    assert found_in(index, "a", one).certainty == 1


def test_events_say_where_documents_are():
    now = [0.0]
    index = DocumentIndex(1000, clock=lambda: now[0])
    digests = {TEXTS["one"].strip(): ("d1", 100), TEXTS["two"].strip(): ("d2", 100)}
    cutter = Cutter(find=lambda _, text, __: digests.get(text.strip()))
    one, two = cutter.cut(prompt("one", "two")).documents
    index.moved("a", ReportedDocument("", "d1"), "CPU", stored=True)
    assert found_in(index, "a", one).weight == 0, "without a listing, nobody knows what else is there"
    index.listed("a", [(ReportedDocument("", "d1"), "STORAGE")])
    assert (found_in(index, "a", one).weight, found_in(index, "a", two).weight) == (0.7, 0)
    assert found_in(index, "a", one, tenant_of("other")).weight == 0
    index.moved("a", ReportedDocument("", "d1"), "CPU", stored=True)
    index.moved("a", ReportedDocument("", "d2"), "CPU", stored=True)
    assert (found_in(index, "a", one).weight, found_in(index, "a", two).weight) == (1, 1)
    index.moved("a", ReportedDocument("", "d2"), "CPU", stored=False)
    assert found_in(index, "a", two).weight == 0


def test_a_document_that_was_sent_is_on_its_way_until_it_should_have_been_learned():
    now = [100.0]
    index = DocumentIndex(1000, clock=lambda: now[0])
    cutter = Cutter(find=lambda _, text, __: ("d", 100) if text.strip() == TEXTS["two"].strip() else None)
    cut = cutter.cut(prompt("two", "three"))
    known, unknown = cut.documents
    index.listed("a", [])
    index.note("a", cut)
    assert found_in(index, "a", known) == COMING
    assert found_in(index, "a", unknown).weight == 1, "events cannot name it"
    now[0] += LEARNING_SECONDS
    index.note("a", cut)
    assert (found_in(index, "a", known).weight, found_in(index, "a", unknown).weight) == (0, 1), (
        "it was not, for whatever reason"
    )
    index.moved("a", ReportedDocument("", "d"), "CPU", stored=True)
    assert found_in(index, "a", known).weight == 1
    index.moved("a", ReportedDocument("", "d"), "CPU", stored=False)
    assert found_in(index, "a", known).weight == 0
    now[0] += 1
    index.note("a", cut)
    assert found_in(index, "a", known) == COMING, "it is learned again"
    index.moved("a", ReportedDocument("", "d"), "CPU", stored=True)
    now[0] += 1
    index.moved("a", ReportedDocument("", "d"), "CPU", stored=False)
    assert not found_in(index, "a", known).is_coming, "it was, and has left again"
    index.drop_reports("a")
    assert index.reports("a") == {}
    assert found_in(index, "a", known).weight == 1, "it was sent there"


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 9), st.integers(1, 60)), max_size=60))
def test_the_index_keeps_no_more_than_fits(schedule):
    index, cutter, sent = DocumentIndex(100), Cutter(), {}
    for cache, name, words in schedule:
        cut = cutter.cut(PromptRequest(text=SEPARATOR.join(["s", f"{name} " * words, "q"])))
        index.note(cache, cut)
        sent |= {document.key: document for document in cut.documents}
        for one in "ab":
            states = zip(sent.values(), index.find(one, list(sent.values())), strict=True)
            tokens = [ceil(document.tokens) for document, state in states if state.is_stored]
            assert sum(tokens) <= 100
            assert index.room(one) == pytest.approx(100 - sum(tokens))


def test_a_tenant_displaces_its_own_documents_and_not_those_of_another():
    index, cutter = DocumentIndex(500), Cutter()
    mine = cutter.cut(PromptRequest(text=prompt("one", "two").text, salt="mine"))
    index.note("a", mine)
    for number in range(100):
        flood = PromptRequest(text=SEPARATOR.join(["s", f"{number} " * 200, "q"]), salt="another")
        index.note("a", cutter.cut(flood))
    assert [found_in(index, "a", one, mine.tenant).weight for one in mine.documents] == [1, 1]
    assert index.room("a") >= 0


def test_a_tenant_displaces_its_own_conversations():
    policy, (a, b) = Documents(conversations=10), engines()
    policy.sent(PromptRequest(text="x", salt="mine", session="s"), b.name)
    for number in range(100):
        policy.sent(PromptRequest(text="x", salt="another", session=str(number)), a.name)
    assert policy.choose(PromptRequest(text="y", salt="mine", session="s"), [a, b])[:2] == (b.name, "conversation")


@given(
    st.integers(1, 40),
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 6), st.integers(1, 9), st.booleans()), max_size=60),
)
def test_who_has_most_gives_room_to_others(room, schedule):
    table, model = FairLru(room), {}
    for owner, key, weight, goes in schedule:
        if goes:
            table.drop(owner, key)
            model.get(owner, {}).pop(key, None)
            continue
        table.put(owner, key, weight, key)
        of = model.setdefault(owner, {})
        of.pop(key, None)
        of[key] = weight
        while sum(sum(of.values()) for of in model.values()) > room:
            of = model[max(model, key=lambda one: (sum(model[one].values()), -ord(one)))]
            del of[next(iter(of))]
    assert {(owner, key) for owner, of in model.items() for key in of} == {
        (owner, key) for owner in "abc" for key in range(7) if table.get(owner, key) is not None
    }
    assert table.room == room - sum(sum(of.values()) for of in model.values())


# -- choices ----------------------------------------------------------------------------------------------------------


def test_kv_events_say_which_beginnings_an_engine_has():
    policy, (a, b), now = Documents(), engines(), [0.0]
    policy.index = DocumentIndex(1e6, clock=lambda: now[0])
    request = PromptRequest(text="x" * 4096, model="m", salt="t", tokens=[7] * 1024)
    policy.choose(request, [a, b])
    policy.sent(request, a.name)
    for name, blocks in ((a.name, 2), (b.name, 32)):
        tokens = request.tokens[: 16 * blocks]
        policy.blocks.stored(
            CacheSource(name), range(blocks), None, tokens, 16, extra_keys=[["t"]] + [None] * (blocks - 1)
        )
    assert policy.scores(request, [a, b]) == {a.name: 1023, b.name: 512}, "it was sent a moment ago"
    now[0] += LEARNING_SECONDS + 1
    assert policy.scores(request, [a, b]) == {a.name: 32, b.name: 512}
    assert [offer.assumed_prefix for offer in policy.offers(request, [a, b])] == [0, 0], "nothing is assumed"
    assert policy.choose(request, [a, b]).engine == b.name
    other = PromptRequest(text="x" * 4096, model="m", salt="other", tokens=request.tokens)
    assert set(policy.scores(other, [a, b]).values()) == {0}
    unknown = PromptRequest(text="y" * 4096, model="m", salt="t")
    assert set(policy.scores(unknown, [a, b]).values()) == {0}, "its tokens are not known"
    policy.forget(b.name)
    assert policy.blocks.count(b.name) == 0


def test_a_request_goes_where_most_of_its_documents_are():
    policy, (a, b) = Documents(), engines()
    policy.choose(prompt("one"), [a, b])
    policy.sent(prompt("one", "two"), a.name)
    policy.sent(prompt("three"), b.name)
    choice = policy.choose(prompt("three", "two", "one"), [b, a])
    assert (choice.engine, choice.why) == (a.name, "documents")
    assert choice.expected_tokens == pytest.approx(sum(len(TEXTS[name].strip()) / 4 for name in ("one", "two")))


def test_a_queue_that_costs_more_than_computing_sends_a_document_to_a_second_engine():
    policy, (a, b) = Documents(), engines()
    policy.sent(prompt("one", "two"), a.name)
    request = prompt("one", "two")
    assert policy.choose(request, [a, b]).engine == a.name
    a.backlog = 10_000.0
    choice = policy.choose(request, [a, b])
    assert (choice.engine, choice.expected_tokens) == (b.name, 0)
    policy.sent(request, b.name)
    assert policy.choose(request, [a, b]).expected_tokens > 0, "now both have it"


def test_engines_of_one_cache_server_have_the_same_documents():
    policy, (a, b) = Documents(), engines(cache="shared")
    policy.choose(prompt("one"), [a, b])
    policy.sent(prompt("one", "two"), a.name)
    a.backlog = 10.0
    choice = policy.choose(prompt("one", "two"), [a, b])
    assert (choice.engine, choice.why) == (b.name, "documents")
    policy.forget(a.name)
    assert len(policy.index), "the other one still has it"
    policy.forget(b.name)
    assert not len(policy.index)


def test_new_documents_spread_and_every_router_sends_them_to_the_same_engine():
    many = engines(8)
    names = [f"document {number} {'x' * 400}" for number in range(400)]
    requests = [PromptRequest(text=SEPARATOR.join(["s", name, "q"])) for name in names]
    chosen = [Documents().choose(one, many).engine for one in requests]
    assert [Documents().choose(one, many[::-1]).engine for one in requests] == chosen
    counts = [chosen.count(one.name) for one in many]
    assert min(counts) > 25
    assert max(counts) < 80
    fewer = [Documents().choose(one, many[1:]).engine for one in requests]
    moved = [before for before, after in zip(chosen, fewer, strict=True) if before != after]
    assert set(moved) == {many[0].name}, "only those of the engine that has gone"


def test_new_documents_go_where_there_is_room_for_them():
    (a, b), mixed = engines(), prompt("one", "four", "a longer one")
    chosen = []
    for tokens, displacement in ((500.0, 0.6), (500.0, 0.0), (10_000.0, 0.6)):
        policy = Documents(cache_tokens=tokens, displacement=displacement)
        policy.sent(prompt("two", "one", "three"), a.name)
        assert policy.offers(mixed, [a, b])[0].documents == 1
        chosen.append(policy.choose(mixed, [a, b]).engine)
    assert chosen == [b.name, a.name, a.name]


def test_an_engine_with_more_than_its_share_of_requests_is_spared():
    policy, (a, b) = Documents(), engines()
    policy.sent(prompt("one"), a.name)
    long = PromptRequest(text=SEPARATOR.join(["s", TEXTS["one"], "x" * 4000]))
    assert policy.choose(long, [a, b]).engine == a.name
    a.load = 100
    assert policy.choose(long, [a, b]).engine == b.name


def test_a_conversation_stays_unless_another_engine_is_much_cheaper():
    policy, (a, b) = Documents(surcharge=0), engines()
    request = PromptRequest(text="hello " * 100, session="s")
    policy.sent(request, b.name)
    a.backlog, b.backlog = 0.0, (STAY - 1) * len(request.text) / 4 - 1
    other = PromptRequest(text="hello " * 100 + "more", session="s")
    fresh = PromptRequest(text="other " * 100 + "more", session="s")
    assert policy.choose(fresh, [a, b])[:2] == (b.name, "conversation")
    assert policy.choose(other, [a, b]).engine == b.name
    b.backlog += 10_000
    assert policy.choose(fresh, [a, b]).engine == a.name
    assert policy.choose(PromptRequest(text="other " * 100, session="t"), [a, b]).why == "least time"


def test_a_beginning_that_all_engines_have_is_a_conversation_at_none_of_them():
    policy, (a, b) = Documents(), engines()
    system = "one system text " * 300
    for engine in (a, b):
        policy.sent(PromptRequest(text=f"{system} first"), engine.name)
    for first, other in ((a, b), (b, a)):
        first.backlog, other.backlog = 10.0, 0.0
        assert policy.choose(PromptRequest(text=f"{system} second"), [a, b]).engine == other.name


def test_a_new_conversation_goes_where_the_beginnings_are_oldest():
    policy, (a, b) = Documents(cache_tokens=2 * 10 * BLOCK_CHARACTERS / 4), engines()
    for number in range(40):
        policy.sent(PromptRequest(text=f"{number} " * 300), (b if number < 20 else a).name)
    assert policy.index.oldest("http://a third") < policy.index.oldest(b.name) < policy.index.oldest(a.name)
    for number in range(8):
        assert policy.choose(PromptRequest(text=f"new {number} " * 100), [a, b]).engine == b.name
    for number in range(20):
        policy.sent(PromptRequest(text=f"later {number} " * 100), b.name)
    assert policy.choose(PromptRequest(text="newer " * 100), [a, b]).engine == a.name


@pytest.mark.parametrize("by_tokens", [False, True])
def test_short_prompts_go_to_the_engine_with_the_fewest_requests(by_tokens):
    """Short prompts have no blocks. Earlier, all of them had one hash, so the order of engines was always the same."""
    policy, candidates = Documents(), [Candidate(f"http://{number}") for number in range(8)]

    def short(number: int) -> PromptRequest:
        return PromptRequest(text="", tokens=[number] * 20) if by_tokens else PromptRequest(text=f"short {number}")

    by_name = {candidate.name: candidate for candidate in candidates}
    for number in range(64):
        by_name[policy.choose(short(number), candidates).engine].load += 1
    assert [candidate.load for candidate in candidates] == [8] * 8
    places = Counter(policy.choose(short(number), candidates).engine for number in range(64))
    assert len(places) == 8, "idle engines are chosen by a hash of the prompt"
    assert len({policy.choose(short(1), candidates[at:] + candidates[:at]).engine for at in range(8)}) == 1


def test_equal_forms_go_to_the_same_idle_engine():
    policy, candidates = Documents(), [Candidate(f"http://{number}") for number in range(8)]
    places = []
    for boundary in (b"one", b"another"):
        for file in (b"first", b"second", b"third", b"fourth"):
            part = b'\r\ncontent-disposition: form-data; name="file"; filename="a.wav"\r\n\r\n' + file + b"\r\n--"
            headers = {"content-type": f"multipart/form-data; boundary={boundary.decode()}"}
            form = read(b"--" + boundary + part + boundary + b"--\r\n", headers, "x-session-id", SEPARATOR)
            places.append(policy.choose(form.request, candidates).engine)
    assert places[:4] == places[4:]
    assert len(set(places)) > 1


def test_an_engine_reuses_no_documents_that_are_too_few_for_a_blend():
    policy, (some, all_of_them) = Documents(surcharge=0), engines(blend_min_tokens=150)
    policy.sent(prompt("one"), some.name)
    policy.sent(prompt("one", "two"), all_of_them.name)
    for _ in range(2):
        choice = policy.choose(prompt("two", "one"), [some, all_of_them])
        assert choice.engine == all_of_them.name
        assert choice.expected_tokens == pytest.approx(200, rel=0.01)
        all_of_them.backlog = 100.0
    too_few = policy.choose(prompt("three", "one"), [some])
    assert (too_few.expected_tokens, too_few.assumed_tokens, too_few.why) == (0, 0, "least time")


def test_documents_that_an_engine_will_have_soon_draw_prompts_and_are_not_expected_in_this_one():
    policy, (a, b) = Documents(), engines()
    policy.cutter.find = lambda _, text, __: (text.strip()[:3], 100)
    for engine in (a, b):
        policy.index.listed(engine.name, [])
    asked = prompt("one", "two")
    policy.sent(asked, b.name)
    later = PromptRequest(text=f"another {prompt('two', 'one').text}")
    choice = policy.choose(later, [a, b])
    assert (choice.engine, choice.expected_tokens) == (b.name, 0)
    assert choice.cost == pytest.approx(len(later.text) / 4)
    for one in ("one", "two"):
        policy.index.moved(b.name, ReportedDocument(tenant_of(""), one), "CPU", stored=True)
    policy.sent(later, a.name)
    a.backlog = 1.0  # Otherwise the engine that will have them soon is as good.
    choice = policy.choose(PromptRequest(text=f"a third {later.text}"), [a, b])
    assert (choice.engine, choice.expected_tokens) == (b.name, 200)


def test_an_engine_that_computes_more_of_a_document_again_is_slower():
    policy, careful, quick = Documents(), Candidate("careful", ratio=1.0), Candidate("quick", ratio=0.1)
    policy.sent(prompt("one"), "careful")
    policy.sent(prompt("one"), "quick")
    assert policy.choose(prompt("two", "one"), [careful, quick]).engine == "quick"
    seconds = {offer.candidate.name: offer.seconds for offer in policy.offers(prompt("two", "one"), [careful, quick])}
    assert seconds["quick"] < seconds["careful"]
    equal = Documents(ratio=0.5)
    equal.sent(prompt("one"), "careful")
    equal.sent(prompt("one"), "quick")
    assert len({offer.seconds for offer in equal.offers(prompt("two", "one"), [careful, quick])}) == 1


def test_a_faster_engine_gets_more():
    policy, (a, b) = Documents(), engines()
    a.backlog, a.rate, b.backlog, b.rate = 1000.0, 4.0, 500.0, 1.0
    assert policy.choose(prompt("one"), [a, b]).engine == a.name
