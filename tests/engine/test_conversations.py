"""Conversations in a real engine: later turns go on from a blend, at any ratio, and are exact after idle steps."""

import itertools

import pytest
from amount import mostly_long
from lab import BLOCK, PROMPT, agree, answer, facts, words
from stepping import Steps

from lmc.blend.markers import Markers

HEADER = (1001, 1002, 1003)  # what the chat template of these conversations writes before an answer
TOKENS = [*PROMPT.tokens, *HEADER]


@pytest.fixture(
    scope="module", params=mostly_long(["llama", "gemma3mixed", "mistralwindow", "gptoss", "gemma4"], "llama")
)
def shared(request, models, shared_engine):
    lab = shared_engine(models(request.param))
    lab.setup.markers = Markers(separators=(), answers=(HEADER,))
    return lab


def later(tokens, said, seed=50):
    return [*tokens, *said, *words(40, seed), *HEADER]


def without_idle_time(lab) -> None:
    lab.lmc._backfill.cancel()


def wish(ratio=0.15, **more):
    return PROMPT.blend(strategy="union", ratio=ratio, **more)


@pytest.mark.parametrize("strategy", ["union", "query", "head", "deviation"])
def test_turns_that_go_on_from_a_blend_that_repairs_everything_are_exact(lab, strategy):
    """Their prompts, answers and questions lie where the engine has put them, turn after turn."""
    asked, tokens, blends = [], TOKENS, lab.numbers.get("blends", 0)
    for turn in range(4):
        out = lab.ask(tokens, PROMPT.blend(strategy=strategy, ratio=1.0), 40)
        without_idle_time(lab)
        asked.append((tokens, out))
        tokens = later(tokens, answer(out), turn)
    assert lab.numbers["blends"] == blends + 1
    assert all(facts(out)["continued_tokens"] for _, out in asked[1:])
    assert all(out.num_cached_tokens > len(before) - BLOCK for (before, _), (_, out) in itertools.pairwise(asked))
    wanted = [lab.vanilla(tokens, 40) for tokens, _ in asked]
    assert [agree(out, one) for (_, out), one in zip(asked, wanted, strict=True)] == [True] * 4


@pytest.mark.parametrize("change", [{"salt": "other"}, {"lmc": {"blend": False}}, {"lmc": {"ratio": 0.5}}])
def test_later_turns_of_others_do_not_go_on_from_it(lab, change):
    out = lab.ask(TOKENS, wish(), 40)
    without_idle_time(lab)
    tokens = later(TOKENS, answer(out))
    lmc = {**wish(), **change.get("lmc", {})}
    found = lab.ask(tokens, lmc, salt=change.get("salt"))
    assert "continued_tokens" not in facts(found)
    if change.get("salt") or not lmc.get("blend", True):
        assert agree(found, lab.vanilla(tokens))


def test_after_idle_steps_a_later_turn_is_what_it_would_be_without_lmc(lab):
    out = lab.ask(TOKENS, wish(), 40)
    tokens = later(TOKENS, answer(out))
    lab.settle()
    found = lab.ask(tokens, wish())
    assert found.num_cached_tokens >= len(TOKENS) + 39 - BLOCK
    assert facts(found) == {}
    plain = lab.ask(tokens, {"blend": False})
    assert plain.num_cached_tokens >= len(TOKENS) + 39 - BLOCK
    assert lab.numbers["backfills"] >= 1
    wanted = lab.vanilla(tokens)
    assert agree(found, wanted)
    assert agree(plain, wanted)


def test_a_turn_goes_on_where_half_of_the_blocks_were_evicted(lab):
    out = lab.ask(TOKENS, wish(1.0), 40)
    without_idle_time(lab)
    tokens = later(TOKENS, answer(out))
    free = lab.pool.get_num_free_blocks()
    # Blocks of the end are evicted first.
    used = len(TOKENS) // BLOCK // 2
    taken = lab.pool.get_new_blocks(free - used)
    lab.pool.free_blocks(taken)
    found = lab.ask(tokens, wish(1.0))
    assert found.num_cached_tokens > 0
    assert agree(found, lab.vanilla(tokens))


@pytest.mark.parametrize("event", ["preempt", "abort"])
def test_a_later_turn_that_is_preempted_or_aborted_holds_nothing_and_is_right(lab, event):
    out = lab.ask(TOKENS, wish(1.0), 40)
    without_idle_time(lab)
    tokens, steps = later(TOKENS, answer(out)), Steps(lab)
    name = steps.add(tokens, wish(1.0), 40)
    steps.until(lambda: name in steps.outputs and len(answer(steps.outputs[name])) >= 10)
    if event == "preempt":
        steps.preempt(name)
        steps.run()
        found = answer(steps.outputs[name])
    else:
        steps.abort(name)
        steps.run()
        found = answer(lab.ask(tokens, wish(1.0), 40))
    assert found == answer(lab.vanilla(tokens, 40))


def test_four_samples_and_retries_make_one_blend(lab):
    blends = lab.numbers.get("blends", 0)
    outs = lab.ask(TOKENS, wish(), 8, n=4, temperature=0.7)
    lab.ask(TOKENS, wish())
    assert len(outs.outputs) == 4
    assert lab.numbers["blends"] == blends + 1


def test_each_step_of_a_beam_search_goes_on_from_one_blend(lab):
    tokens, blends = PROMPT.tokens, lab.numbers.get("blends", 0)
    beams = [list(tokens)]
    for step in range(3):  # as `LLM.beam_search` asks
        outs = lab.ask_all([(beam, wish()) for beam in beams], 1, logprobs=4)
        beams = [[*beam, token] for beam, out in zip(beams, outs, strict=True) for token in out.outputs[0].logprobs[0]][
            :4
        ]
        assert lab.numbers["blends"] == blends + 1, step
