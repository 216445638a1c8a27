"""`bench/no_harm.py` and `bench/conversation.py`: what they ask, and what they make of the answers.

`tests/engine/test_no_harm.py` runs both with real engines.
"""

import math
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from amount import mostly_long

from lmc.blend.segments import split
from lmc.blend.strategies import STRATEGIES
from lmc.keys import common_prefix

BENCH = Path(__file__).parents[1] / "bench"
QUESTION = "Who wrote it?"


@pytest.fixture
def imports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the modules of `bench` importable; the strategy that they add goes again."""
    monkeypatch.syspath_prepend(BENCH)
    monkeypatch.setitem(STRATEGIES, "oracle", STRATEGIES["none"])
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.fixture
def no_harm(imports: None) -> ModuleType:
    import no_harm

    return no_harm


@pytest.fixture
def conversation(imports: None) -> ModuleType:
    import conversation

    return conversation


@pytest.fixture(params=mostly_long(["small", "smollm2"], "small"))
def chats(request: pytest.FixtureRequest, imports: None) -> Any:
    from chat_tokens import ChatTokens

    return ChatTokens.of(request.param)


def starts_of(no_harm: ModuleType, *seconds: tuple[float, float]) -> list[Any]:
    """Return starts of one round each, in which both engines took so long."""
    rounds = [{"plain": {"seconds": plain}, "lmc": {"seconds": ours}} for plain, ours in seconds]
    return [no_harm.Start({"beam": [one]}, {"beam": Counter(requests=1)}) for one in rounds]


def test_a_ratio_is_above_one_where_lmc_is_faster(no_harm: ModuleType) -> None:
    found = no_harm.summary(starts_of(no_harm, (3.0, 2.0)))["beam"]
    assert (found["throughput"], found["plain"], found["lmc"]) == (1.5, {"seconds": 3.0}, {"seconds": 2.0})
    assert "ttft" not in found, "it was not measured"


def test_ratios_are_the_medians_of_starts_and_not_of_all_seconds(no_harm: ModuleType) -> None:
    found = no_harm.summary(starts_of(no_harm, (1.0, 2.0), (10.0, 10.0), (100.0, 50.0)))["beam"]
    assert (found["throughput"], found["throughput_of_starts"]) == (1.0, [0.5, 2.0])
    assert found["counts"] == {"requests": 3}


def test_rounds_of_a_start_become_one_by_the_median_of_their_ratios(no_harm: ModuleType) -> None:
    """A machine that is slower in one round is slower for both engines."""
    measured = ((1.0, 1.0), (3.0, 6.0), (1.0, 30.0))
    rounds = [{"plain": {"ttft": plain}, "lmc": {"ttft": ours}} for plain, ours in measured]
    assert no_harm.summary([no_harm.Start({"one": rounds}, {"one": Counter()})])["one"]["ttft"] == 0.5


def test_turns_of_a_conversation_are_compared_one_by_one(no_harm: ModuleType) -> None:
    sides = {"plain": [4.0, 1.0, 1.0], "lmc": [2.0, 1.0, 4.0]}
    measured = {side: {"ttft": sum(turns[1:]), "turns_ttft": turns} for side, turns in sides.items()}
    start = no_harm.Start({"conversation": [measured]}, {"conversation": Counter()})
    found = no_harm.summary([start])["conversation"]
    assert found["turns"] == [2.0, 1.0, 0.25]
    assert found["ttft"] == 0.4


def test_a_second_engine_without_lmc_shows_the_noise(no_harm: ModuleType) -> None:
    measured = {"plain": {"ttft": 1.0}, "lmc": {"ttft": 1.0}, "plain again": {"ttft": 0.8}}
    start = no_harm.Start({"one": [measured]}, {"one": Counter()})
    assert no_harm.summary([start])["one"]["ttft_of_vllm_twice"] == 1.25


def test_the_worst_is_the_smallest_ratio_of_what_counts(no_harm: ModuleType) -> None:
    found = {
        "small orders": {"ttft": 3.0, "throughput": 0.98},
        "small beam": {"throughput": 1.2},
        "smollm2 other_question": {"ttft": 0.1, "throughput": 0.2},
    }
    assert no_harm.worst_of(found, no_harm.SHOWN) == (0.98, "throughput of small orders")
    assert no_harm.worst_of(found) == (0.1, "ttft of smollm2 other_question")


def test_traffic_is_what_it_is_said_to_be(no_harm: ModuleType, chats: Any) -> None:
    traffic = no_harm.Traffic(chats, 0)
    learned = {tuple(tokens) for tokens in traffic.documents()}

    def documents(prompt: list[int]) -> list[bool]:
        """Return for each document of a prompt whether it was learned."""
        spans = split(prompt, chats.markers).documents
        return [tuple(prompt[span.start : span.stop]) in learned for span in spans]

    assert documents(traffic.known()) == [True] * 6
    assert documents(traffic.one()) == [True]
    assert documents(traffic.unknown()) == [False] * 6
    assert documents(traffic.nothing()) == []
    first, *others = traffic.same_documents(4)
    spans = split(first, chats.markers).documents
    assert all(common_prefix(first, prompt) >= spans[-1].stop for prompt in others)
    assert len({tuple(prompt) for prompt in [first, *others]}) == 4
    for share in (0.3, 1, 2):
        segments = split(traffic.known(share), chats.markers)
        assert len(segments.documents) == 6
        instructions = len(segments.question) / sum(map(len, segments.documents))
        assert share * 0.7 < instructions < share * 1.5 + 0.1
    for prompt in (traffic.known(2), traffic.nothing(), traffic.one()):
        assert len(prompt) < no_harm.ROOM["max_model_len"] - no_harm.COUNT


def test_turns_put_together_are_the_tokens_of_the_whole_chat(chats: Any) -> None:
    documents = list(chats.collection.documents.values())[:6]
    answer = chats.document("the answer")
    prompt = [*chats.first(documents, QUESTION), *answer, *chats.next("And who reads it?")]
    whole = chats.tokenizer.decode(prompt)
    assert chats.tokenizer.encode(whole, add_special_tokens=False) == prompt
    assert whole.index(QUESTION) < whole.index("the answer") < whole.index("And who reads it?")
    found = split(prompt, chats.markers).documents
    assert [prompt[span.start : span.stop] for span in found] == [chats.document(text) for text in documents]


def test_later_turns_ask_about_other_documents_that_stand_in_the_prompt(conversation: ModuleType, chats: Any) -> None:
    texts = chats.collection.documents
    for documents, questions in conversation.conversations(chats, 5):
        about = [texts[question.document] for question in questions]
        assert len(set(documents)) == 6
        assert len(set(about)) == 3
        assert set(about) <= set(documents)


def test_divergence_counts_unlikely_tokens_together(conversation: ModuleType) -> None:
    half, quarter = math.log(0.5), math.log(0.25)
    full = {1: half, 2: quarter}
    assert conversation.divergence(full, dict(full), 1) == pytest.approx(0)
    swapped = {1: quarter, 2: half}
    assert conversation.divergence(full, swapped, 1) == pytest.approx(0.25 * math.log(2))
    # Token 2 has no logprob in the other way, where it counts as the least likely one that has.
    missing = {1: half, 3: math.log(0.05)}
    expected = 0.25 * math.log(0.25 / 0.05) + 0.25 * math.log(0.25 / 0.45)
    assert conversation.divergence(full, missing, 1) == pytest.approx(expected)


def test_agreement_ends_at_the_first_token_that_differs(conversation: ModuleType) -> None:
    def said(*tokens: int) -> list[dict[int, float]]:
        return [{token: math.log(0.9), 100 + token: math.log(0.1)} for token in tokens]

    answer = list(range(16))
    full = said(*answer)
    found = conversation.compared(full, said(*answer[:4], 50, *answer[5:]), answer)
    assert (found["first"], found["agreement8"], found["agreement16"]) == (1, 0.5, 0.25)
    assert found["kl_first"] == 0 < found["kl"]
    assert conversation.compared(full, full, answer)["agreement16"] == 1
