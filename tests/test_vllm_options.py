"""What a request may wish for: everything that cannot be meant is an `InputError` that names it."""

import pytest

from lmc.blend.segments import Span
from lmc.blend.strategies import RecomputePolicy
from lmc.config.settings import Settings
from lmc.connectors.vllm.scheduler.request_options import Options
from lmc.errors import InputError

NAN, INFINITY, HUGE = float("nan"), float("inf"), 10**5000
DEEP = []
for _ in range(5000):
    DEEP = [DEEP]


def named(value):
    """The names of parameters whose text nobody can write."""
    return {id(HUGE): "huge", id(DEEP): "deep"}.get(id(value), type(value).__name__)


def test_without_wishes_the_settings_decide():
    assert Options.read(None, 10) == Options.read({}, 10) == Options()
    policy = Options().policy(Settings(blend_method="query", blend_recompute_ratios=0.2))
    assert (policy.strategy, policy.ratio, policy.correction) == ("query", 0.2, "shift")


@pytest.mark.parametrize("strategy", ["union", "query", "head"])
def test_the_others_are_corrected_but_not_with_deviation_and_not_with_cacheblend(strategy):
    assert Options(strategy=strategy).policy(Settings()).correction == "shift"
    assert Options(strategy=strategy).policy(Settings(blend_method="cacheblend")).correction == "none"
    assert Options(strategy="deviation").policy(Settings(blend_method=strategy)).correction == "none"


def test_every_wish_is_read():
    given = {"blend": True, "learn": False, "strategy": "head", "ratio": 1, "documents": [[0, 3], (3, 10)]}
    assert Options.read(given, 10) == Options(
        learn=False, strategy="head", ratio=1, documents=(Span(0, 3), Span(3, 10))
    )
    assert Options.read({"learn": True, "ratio": None, "strategy": None, "documents": None}, 10) == Options(learn=True)
    assert Options.read({"documents": []}, 10).documents == ()


@pytest.mark.parametrize("given", [[], "blend", 1, True, 0, False, "", b"", DEEP, HUGE], ids=named)
def test_wishes_must_be_an_object(given):
    with pytest.raises(InputError, match=r"kv_transfer_params\['lmc'\] must be an object"):
        Options.read(given, 10)


@pytest.mark.parametrize("name", ["Blend", "ratios", "", 3, None, ("a", 1), HUGE, "x" * 100_000], ids=named)
def test_an_unknown_wish_is_named_beside_the_known(name):
    with pytest.raises(InputError, match=r"has no .*; there are blend, learn, name, strategy, ratio, doc") as caught:
        Options.read({name: 1, "other": 2}, 10)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("name", ["blend", "learn"])
@pytest.mark.parametrize("value", [0, 1, "true", [], {}, NAN, HUGE, DEEP], ids=named)
def test_a_switch_is_true_or_false(name, value):
    with pytest.raises(InputError, match=f"lmc.{name} must be true or false"):
        Options.read({name: value}, 10)


@pytest.mark.parametrize(
    "value", [True, False, "0.5", -0.1, 1.0001, 2, NAN, INFINITY, -INFINITY, HUGE, [0.1], {}, 1j], ids=named
)
def test_a_ratio_is_a_number_from_0_to_1(value):
    with pytest.raises(InputError, match=r"lmc\.ratio must be between 0 and 1"):
        Options.read({"ratio": value}, 10)


@pytest.mark.parametrize(
    "value", ["Query", "", 0, False, 1, ["query"], {"query": 1}, {}, [], HUGE, DEEP, "x" * 100_000], ids=named
)
def test_a_strategy_is_one_of_ours(value):
    """A list was unhashable inside the policy, and empty ones meant the settings'."""
    with pytest.raises(InputError, match=r"lmc\.strategy must be one of deviation, .*none, not") as caught:
        Options.read({"strategy": value}, 10)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("value", ["[[0, 3]]", 3, {"start": 0}, True, b"\x00\x03", {0, 3}, HUGE], ids=named)
def test_documents_are_a_list(value):
    with pytest.raises(InputError, match=r"lmc.documents must be a list of \[start, stop\]"):
        Options.read({"documents": value}, 10)


@pytest.mark.parametrize(
    "pair",
    [3, b"\x00\x03", [0], [0, 1, 2], [], [0, True], [False, 3], [0.0, 3], [0, "3"], [None, 3], {0: 3}, DEEP],
    ids=named,
)
def test_a_document_is_a_pair_of_whole_numbers(pair):
    with pytest.raises(InputError, match=r"lmc.documents: .* is invalid: use \[start, stop\]") as caught:
        Options.read({"documents": [pair]}, 10)
    assert len(str(caught.value)) < 500


def test_facts_of_an_earlier_response_are_no_options():
    """A proxy sends the parameters of a prefill engine's response to the decode engine, which refused to blend."""
    response = {"tokens_from": {"host": 690}, "reused_tokens": 690, "strategy": "union", "charged_budget": 0.15}
    assert Options.read({**response, "note": "a note", "found_documents": 2}, 9) == Options()
    assert Options.read({"learned": True, "documents": ["ab" * 32]}, 9) == Options()
    assert Options.read({**response, "blend": False}, 9) == Options(blend=False)
    with pytest.raises(InputError, match="has no 'retio'"):
        Options.read({**response, "retio": 1}, 9)


def test_many_unknown_wishes_are_named_in_part():
    """The note of 20,000 names was kept, and sent back."""
    with pytest.raises(InputError) as refused:
        Options.read({f"wish {number}" * 20: 1 for number in range(20_000)}, 9)
    assert len(str(refused.value)) < 1000


def test_documents_may_be_texts() -> None:
    assert Options.read({"documents": ["one text", "another"]}, 10).documents == ("one text", "another")
    with pytest.raises(InputError, match=r"is invalid: use \[start, stop\]"):
        Options.read({"documents": ["one text", [0, 3]]}, 10)


@pytest.mark.parametrize("pair", [[-1, 3], [3, 3], [4, 3], [0, 11], [10, 11], [0, HUGE], [-HUGE, 3]], ids=named)
def test_a_document_is_inside_the_prompt(pair):
    with pytest.raises(InputError, match="is not inside the prompt of 10 tokens"):
        Options.read({"documents": [pair]}, 10)


def test_texts_with_half_of_a_character_are_refused():
    """JSON can escape one. Tokenizers raised an error in a hook of vLLM, and ten such requests switched lmc off."""
    with pytest.raises(InputError, match=r"lmc.documents: 'a.*ud800' is not valid Unicode"):
        Options.read({"documents": ["one text", "a \ud800"]}, 10)


@pytest.mark.parametrize("pairs", [[[0, 4], [3, 5]], [[5, 6], [0, 2]], [[0, 4], [0, 4]]], ids=named)
def test_documents_are_in_order_and_apart(pairs):
    with pytest.raises(InputError, match="overlaps what comes before it"):
        Options.read({"documents": pairs}, 10)


def test_a_document_to_learn_has_no_documents():
    with pytest.raises(InputError, match=r"lmc\.learn and lmc\.documents"):
        Options.read({"learn": True, "documents": [[0, 3]]}, 10)


def test_cacheblend_is_deviation_without_a_correction_and_a_request_may_change_strategy_and_ratio():
    settings = Settings(blend_method="cacheblend", blend_recompute_ratios=0.3)
    assert Options().policy(settings) == RecomputePolicy(strategy="deviation", ratio=0.3)
    assert Options(ratio=0.5).policy(settings) == RecomputePolicy(strategy="deviation", ratio=0.5)
    assert Options(strategy="union").policy(settings) == RecomputePolicy(strategy="union", ratio=0.3)


def test_deviation_can_be_requested_where_the_settings_have_another_method():
    policy = Options(strategy="deviation", ratio=0.0).policy(Settings())
    assert policy == RecomputePolicy(strategy="deviation", ratio=0.0)
