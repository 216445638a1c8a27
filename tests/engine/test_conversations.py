"""Conversations in a real engine: later turns go on from a blend, at any ratio, and are exact after idle steps."""

import itertools
from dataclasses import replace

import pytest
from amount import mostly_long
from lab import BLOCK, PROMPT, agree, answer, facts, words
from stepping import Steps

from lmc.blend.markers import Markers
from lmc.connectors.vllm.scheduler import follow_ups, jobs, scheduler

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


def wish(ratio=0.15, **more):
    return PROMPT.blend(strategy="union", ratio=ratio, **more)


@pytest.mark.parametrize("strategy", ["union", "query", "head", "deviation"])
def test_turns_that_go_on_from_a_blend_that_repairs_everything_are_exact(lab, strategy):
    """Prompts, answers and questions are in the blocks where the engine has put them, turn after turn."""
    asked, tokens, blends = [], TOKENS, lab.numbers.get("blends", 0)
    for turn in range(4):
        out = lab.ask(tokens, PROMPT.blend(strategy=strategy, ratio=1.0), 40)
        lab.drop_backfills()
        asked.append((tokens, out))
        tokens = later(tokens, answer(out), turn)
    assert lab.numbers["blends"] == blends + 1
    assert all(facts(out)["continued_tokens"] for _, out in asked[1:])
    assert all(out.num_cached_tokens > len(before) - BLOCK for (before, _), (_, out) in itertools.pairwise(asked))
    wanted = [lab.vanilla(tokens, 40) for tokens, _ in asked]
    assert [agree(out, one) for (_, out), one in zip(asked, wanted, strict=True)] == [True] * 4


@pytest.fixture
def revise(lab, monkeypatch):
    """A function to revise blends with a ratio, also where every token was recomputed."""

    def revise(ratio):
        if lab.is_windowed:
            pytest.skip("layers with a window have only their last blocks in the cache")

        def job_of(*given, **named):
            job = jobs.job_of(*given, **named)
            return replace(job, policy=replace(job.policy, ratio=ratio)) if job.own else job

        monkeypatch.setattr(follow_ups, "depends_on_question", lambda policy: True)
        monkeypatch.setattr(scheduler, "job_of", job_of)

    return revise


@pytest.mark.parametrize("ratio", [1.0, 0.1])
def test_turns_that_revise_an_exact_blend_are_exact(lab, revise, ratio):
    """With ratio 1, a revision recomputes copies of all reused blocks; with 0.1, a tenth of the tokens."""
    revise(ratio)
    turns, tokens, blends = [], TOKENS, lab.numbers.get("blends", 0)
    for turn in range(4):
        out = lab.ask(tokens, wish(1.0), 40)
        lab.drop_backfills()
        turns.append((tokens, out))
        tokens = later(tokens, answer(out), turn)
    assert lab.numbers["blends"] == blends + 4
    for tokens, out in turns[1:]:
        assert facts(out)["continued_tokens"] > 600
        assert facts(out)["charged_budget"] == pytest.approx(ratio, abs=0.1)
        assert out.num_cached_tokens > len(tokens) - 100
    assert [agree(out, lab.vanilla(tokens, 40)) for tokens, out in turns] == [True] * 4


def test_a_turn_that_revises_changes_nothing_for_others(lab, revise):
    """Not for a retry of the first turn, nor for plain requests."""
    revise(0.15)
    out = lab.ask(TOKENS, wish(), 40)
    lab.drop_backfills()
    tokens = later(TOKENS, answer(out))
    second = lab.ask(tokens, wish(), 40)
    assert facts(second)["continued_tokens"] > 600
    lab.drop_backfills()
    again = lab.ask(TOKENS, wish(), 40)
    assert agree(again, out), "its blocks are as they were"
    assert again.num_cached_tokens >= len(TOKENS) - BLOCK
    assert agree(lab.ask(tokens, wish(), 40), second), "and a retry of the second turn shares the revision"
    for prompt in (TOKENS, tokens):
        assert agree(lab.ask(prompt, {"blend": False}), lab.vanilla(prompt))


@pytest.mark.parametrize("ratio", [1.0, 0.1])
def test_other_questions_about_the_same_documents_revise_an_exact_blend_and_are_exact(lab, revise, ratio):
    revise(ratio)
    documents = PROMPT.tokens[: PROMPT.spans[-1][1]]
    prompts = [TOKENS, *([*documents, *words(40, seed), *HEADER] for seed in (60, 61))]
    found = [lab.ask(tokens, wish(1.0), 40) for tokens in prompts]
    lab.drop_backfills()
    for out in found[1:]:
        assert facts(out)["continued_tokens"] > 600
        assert facts(out)["charged_budget"] == pytest.approx(ratio, abs=0.1)
    assert [agree(out, lab.vanilla(tokens, 40)) for tokens, out in zip(prompts, found, strict=True)] == [True] * 3
    again = lab.ask(TOKENS, wish(1.0), 40)
    assert agree(again, found[0]), "the blocks of the first question are as they were"


@pytest.mark.parametrize("change", [{"salt": "other"}, {"lmc": {"blend": False}}, {"lmc": {"ratio": 0.5}}])
def test_later_turns_of_others_do_not_go_on_from_it(lab, change):
    out = lab.ask(TOKENS, wish(), 40)
    lab.drop_backfills()
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
    assert set(facts(found)) == {"found_documents"}, "nothing is loaded or blended"
    plain = lab.ask(tokens, {"blend": False})
    assert plain.num_cached_tokens >= len(TOKENS) + 39 - BLOCK
    assert lab.numbers["backfills"] >= 1
    wanted = lab.vanilla(tokens)
    assert agree(found, wanted)
    assert agree(plain, wanted)


WAYS = pytest.mark.parametrize("revises", [False, True], ids=["shares", "revises"])


@WAYS
def test_a_turn_goes_on_where_half_of_the_blocks_were_evicted(lab, revise, revises):
    if revises:
        revise(1.0)
    out = lab.ask(TOKENS, wish(1.0), 40)
    lab.drop_backfills()
    tokens = later(TOKENS, answer(out))
    free = lab.pool.get_num_free_blocks()
    # Blocks of the end are evicted first.
    used = len(TOKENS) // BLOCK // 2
    taken = lab.pool.get_new_blocks(free - used)
    lab.pool.free_blocks(taken)
    found = lab.ask(tokens, wish(1.0))
    assert found.num_cached_tokens > 0
    assert agree(found, lab.vanilla(tokens))


@WAYS
@pytest.mark.parametrize("event", ["preempt", "abort"])
def test_a_later_turn_that_is_preempted_or_aborted_holds_nothing_and_is_right(lab, revise, revises, event):
    if revises:
        revise(1.0)
    out = lab.ask(TOKENS, wish(1.0), 40)
    lab.drop_backfills()
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


def test_samples_of_a_later_turn_share_one_revision(lab):
    """Earlier, each sample revised the blend, in copies of all its blocks."""
    if lab.is_windowed:
        pytest.skip("layers with a window have only their last blocks in the cache")
    tokens = later(TOKENS, answer(lab.ask(TOKENS, wish(), 40)))
    lab.drop_backfills()
    blends = lab.numbers["blends"]
    lab.ask(tokens, wish(), 8, n=4, temperature=0.7)
    lab.drop_backfills()
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
