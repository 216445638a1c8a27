"""From evidence to the tokens that are recomputed."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lmc.blend.strategies import HEAD_POSITIONS, STRATEGIES, Evidence, budget, by_deviation, highest

VECTORS = json.loads((Path(__file__).parent / "data" / "cacheblend.json").read_text())
OFFSETS = torch.tensor([0, 1, 2, 3, 0, 1, 2, 3, 4, 5])  # two documents, of 4 and 6 tokens


def evidence(**scores: list[float]) -> Evidence:
    return Evidence(
        computed_at=OFFSETS, **{name: torch.tensor(values, dtype=torch.float) for name, values in scores.items()}
    )


@pytest.mark.parametrize("case", VECTORS["cases"], ids=str)
def test_deviation_selects_as_published(case: dict) -> None:
    if "k" in case:
        assert budget(case["n"], case["ratio"]) == case["k"]
    else:
        scores = evidence(deviation=case["deviation"])
        assert by_deviation(scores, budget(10, case["ratio"])).tolist() == case["indices"]


def test_a_ratio_of_zero_selects_nothing_and_of_one_everything() -> None:
    assert budget(10, 0.0) == 0
    assert budget(10, 1.0) == 10
    assert budget(0, 0.5) == 0


def test_equal_scores_are_taken_in_order_of_position() -> None:
    assert by_deviation(evidence(deviation=[1] * 10), 3).tolist() == [0, 1, 2]


@given(st.lists(st.sampled_from([-1.0, 0.0, 0.5, 2.0, float("inf")]) | st.floats(width=32, allow_nan=False)), st.data())
def test_the_highest_scores_are_the_first_of_a_stable_sort(scores: list[float], data: st.DataObject) -> None:
    count = data.draw(st.integers(0, len(scores)))
    wanted = sorted(sorted(range(len(scores)), key=lambda index: -scores[index])[:count])
    assert highest(torch.tensor(scores), count).tolist() == wanted


@pytest.mark.parametrize("count", [1, 3, 5])
def test_as_many_are_chosen_if_scores_are_no_numbers(count: int) -> None:
    assert len(highest(torch.tensor([1.0, float("nan"), 3.0, float("nan"), float("nan"), 2.0]), count)) == count


def test_heads_are_the_first_tokens_of_every_document() -> None:
    assert STRATEGIES["head"](evidence(), 4).tolist() == [0, 1, 4, 5]


def test_the_query_strategy_takes_what_the_question_attends_to() -> None:
    assert STRATEGIES["query"](evidence(attention=[0, 0.1, 0, 0.9, 0, 0, 0, 0, 0, 0.5]), 2).tolist() == [3, 9]


def test_the_union_spends_a_fourth_on_heads_at_most_and_the_rest_on_the_question() -> None:
    offsets = torch.cat([torch.arange(30), torch.arange(30)])
    attention = torch.full((60,), 0.6)
    attention[[0, 15, 43]] = torch.tensor([0.9, 0.95, 0.95])
    scores = Evidence(computed_at=offsets, attention=attention)

    assert STRATEGIES["union"](scores, 1).tolist() == [0]
    assert STRATEGIES["union"](scores, 4).tolist() == [0, 1, 15, 43]
    heads = {*range(HEAD_POSITIONS), *range(30, 30 + HEAD_POSITIONS)}
    chosen = STRATEGIES["union"](scores, 8 * HEAD_POSITIONS).tolist()
    assert len(chosen) == 8 * HEAD_POSITIONS
    assert heads | {15, 43} <= set(chosen)


def test_the_union_reads_on_behind_what_the_question_finds_and_not_into_the_next_document() -> None:
    scores = evidence(attention=[0.1, 0.1, 0.1, 0.9, 0.8, 0.1, 0.1, 0.1, 0.1, 0.1])
    assert STRATEGIES["union"](scores, 3).tolist() == [3, 4, 5], "token 5 inherits from token 4"
    scores = evidence(attention=[0.1, 0.1, 0.1, 0.9, 0.2, 0.1, 0.1, 0.5, 0.1, 0.1])
    assert STRATEGIES["union"](scores, 3).tolist() == [3, 7, 8], "token 4 stands in another document than token 3"


@pytest.mark.parametrize("learned_behind", [0, 90])
def test_the_union_prefers_what_stands_earlier_in_its_document(learned_behind: int) -> None:
    computed_at = torch.cat([torch.arange(30), torch.arange(30)]) + learned_behind
    attention = torch.zeros(60)
    attention[[20, 34]] = torch.tensor([0.5, 0.45])
    scores = Evidence(computed_at=computed_at, learned_after=learned_behind, attention=attention)
    assert STRATEGIES["union"](scores, 1).tolist() == [34]
    attention[34] = 0.35
    assert STRATEGIES["union"](scores, 1).tolist() == [20]


def test_the_depth_of_a_part_is_that_in_its_document() -> None:
    """Without a document that is used from its start, the first token of a part counted as that of the document."""
    learned_after, attention = 93, 0.1 + 0.02 * torch.rand(300, generator=torch.Generator().manual_seed(0))
    part, start = learned_after + torch.arange(2000, 2300), learned_after + torch.arange(10)
    alone = Evidence(computed_at=part, learned_after=learned_after, attention=attention)
    beside = Evidence(
        computed_at=torch.cat((start, part)),
        learned_after=learned_after,
        attention=torch.cat((torch.zeros(10), attention)),
    )
    chosen = [STRATEGIES["union"](scores, 45) for scores in (alone, beside)]
    assert chosen[0].tolist() == (chosen[1] - len(start)).tolist()


def test_controls() -> None:
    assert STRATEGIES["none"](evidence(), 5).tolist() == []
    assert STRATEGIES["all"](evidence(), 5).tolist() == list(range(10))
    assert STRATEGIES["random"](evidence(), 5).tolist() == STRATEGIES["random"](evidence(), 5).tolist()
    assert len(STRATEGIES["random"](evidence(), 5)) == 5


@pytest.mark.parametrize("strategy", sorted(STRATEGIES))
def test_every_choice_is_ascending_and_unique(strategy: str) -> None:
    torch.manual_seed(0)
    scores = Evidence(computed_at=OFFSETS, deviation=torch.rand(10), attention=torch.rand(10))
    chosen = STRATEGIES[strategy](scores, 4).tolist()
    assert chosen == sorted(set(chosen))
