"""Turns of a conversation, retries and beams go on from what the engine has of a blend; idle steps make it exact."""

from types import SimpleNamespace

import pytest
from storage_fakes import lose
from test_vllm_scheduler import SlowToAnswer
from vllm_fakes import BLOCK, DOC_A, DOC_B, SEPARATOR, Lab, Request, hashes_of, learn, prompt, state_of

from lmc.blend.segments import Placement, Span
from lmc.connectors.vllm.messages import StepReport
from lmc.connectors.vllm.scheduler import admission, backfill, balance, follow_ups, isolation, scheduler
from lmc.connectors.vllm.scheduler.idle import MAX_PAUSE_SECONDS
from lmc.connectors.vllm.scheduler.isolation import OwnBlends, SaltedHashes, add_salt, set_hashes
from lmc.storage.cost_model import BlendOffer, CostModel

HEADER = (1, 2, 3)  # what the chat template writes before an answer
USER = (1, 8)  # and before a question
TOOL = (1, 9)  # and before the result of a tool
DOC_C = [400 + i for i in range(12)]
PIECES = [Placement(at=8, tokens=12, first=0)]
ANSWER = list(range(500, 511))
NEXT = [*USER, 80, 81, 82, 83, 84, 85, *HEADER]


@pytest.fixture
def lab(make) -> Lab:
    """A lab that knows three documents, and has a chat template."""
    lab = make(answers=(HEADER,), messages=(USER,), blocks=256, slots=32, settings={"load_policy": "always"})
    learn(lab, DOC_A, DOC_B, DOC_C)
    return lab


def chat(*documents: list[int]) -> list[int]:
    return [*prompt(*documents), *HEADER]


def approximate(lab: Lab) -> int:
    """How many blends workers have made."""
    return lab.scheduler.counts["blends"]


def later_turn(tokens: list[int]) -> list[int]:
    return [*tokens, *ANSWER, *NEXT]


def first_turn(lab: Lab, tokens: list[int], lmc: dict | None = None, **more: object) -> None:
    lab.serve("first", tokens, lmc, output=[*ANSWER, 9], **more)


SHARES = {"strategy": "head"}  # A blend that depends on no question is shared by all turns.


def test_a_later_turn_goes_on_from_the_blend_and_from_the_answer(lab: Lab) -> None:
    tokens = chat(DOC_A, DOC_B)
    first_turn(lab, tokens, SHARES)
    lab.drop_backfills()
    turn = later_turn(tokens)
    request = lab.arrive("second", turn, SHARES)
    cached = (len(tokens) + len(ANSWER)) // BLOCK * BLOCK
    assert lab.look(request) == cached
    assert lab.admit(request) == 0
    lab.compute(request, len(turn) - cached)
    exact = BLOCK  # of the system text
    assert lab.finish(request) == {"continued_tokens": cached - exact, "found_documents": {"separators": 2}}
    assert (approximate(lab), lab.scheduler.counts["blends_continued"]) == (1, 1)


def test_a_template_may_write_other_tokens_after_the_header_when_the_answer_is_history(lab: Lab) -> None:
    """As Qwen3 without thinking: empty thoughts begin the answer, and are not in the history."""
    first_turn(lab, [*chat(DOC_A, DOC_B), 60, 61], SHARES)
    lab.drop_backfills()
    request = lab.arrive("second", later_turn(chat(DOC_A, DOC_B)), SHARES)
    assert lab.look(request) == len(chat(DOC_A, DOC_B)) // BLOCK * BLOCK
    lab.finish(request)


def test_new_documents_of_a_later_turn_are_blended_after_the_earlier_blocks(lab: Lab) -> None:
    tokens = chat(DOC_A, DOC_B)
    first_turn(lab, tokens, SHARES)
    lab.drop_backfills()
    turn = [*tokens, *ANSWER, *USER, 90, 91, *DOC_C, 90, 91, 81, *HEADER]
    request = lab.arrive("second", turn, SHARES)
    local = lab.look(request)
    assert local == (len(tokens) + len(ANSWER)) // BLOCK * BLOCK
    lab.admit(request)
    (job,) = lab.step().loads
    assert (job.start, job.documents[0].at) == (local, len(tokens) + len(ANSWER) + 4)
    lab.compute(request, len(turn) - request.num_computed_tokens)
    lab.finish(request)
    lab.drop_backfills()
    again = lab.arrive("third", [*turn, *ANSWER, *NEXT], SHARES)
    assert lab.look(again) == len(turn) // BLOCK * BLOCK
    lab.finish(again)


@pytest.mark.parametrize(
    "change",
    [{"lmc": {"blend": False}}, {"lmc": {"ratio": 0.5}}, {"lmc": {"strategy": "none"}}, {"cache_salt": "other"}],
)
def test_nobody_else_goes_on_from_it(lab: Lab, change: dict) -> None:
    tokens = chat(DOC_A, DOC_B)
    first_turn(lab, tokens)
    lab.drop_backfills()
    request = lab.arrive("second", later_turn(tokens), change.get("lmc"), cache_salt=change.get("cache_salt"))
    assert lab.look(request) <= BLOCK
    lab.finish(request)


@pytest.fixture
def large(make) -> Lab:
    """A lab whose prompts may lack up to 20 tokens in the engine's cache without a look at their documents."""
    settings = {"load_policy": "always", "blend_min_tokens": 20}
    lab = make(answers=(HEADER,), messages=(USER,), blocks=256, slots=32, settings=settings)
    learn(lab, DOC_A, DOC_B, DOC_C)
    first_turn(lab, chat(DOC_A, DOC_B))
    lab.drop_backfills()
    return lab


def test_a_turn_that_the_engine_has_nearly_all_of_goes_on_without_a_look_at_its_documents(large: Lab) -> None:
    turn = later_turn(chat(DOC_A, DOC_C))
    large.serve("shared", chat(DOC_A, DOC_C), SHARES, output=[*ANSWER, 9])
    large.drop_backfills()
    request = large.arrive("second", turn, SHARES)
    state = state_of(large, request.request_id)
    assert (state.cached, state.documents, len(state.salts)) == (True, (), 1)
    cached = large.look(request)
    assert large.admit(request) == 0
    large.compute(request, len(turn) - cached)
    assert large.finish(request) == {"continued_tokens": cached - BLOCK}
    assert (approximate(large), large.scheduler.counts["blends_continued"]) == (2, 1)


@pytest.mark.parametrize(
    "change",
    [{"lmc": {"blend": False}}, {"lmc": {"ratio": 0.5}}, {"lmc": {"strategy": "none"}}, {"cache_salt": "other"}],
)
def test_nobody_else_goes_on_from_a_turn_that_the_engine_has_nearly_all_of(large: Lab, change: dict) -> None:
    request = large.arrive(
        "second", later_turn(chat(DOC_A, DOC_B)), change.get("lmc"), cache_salt=change.get("cache_salt")
    )
    assert not state_of(large, request.request_id).cached
    assert large.look(request) <= BLOCK
    large.finish(request)


def test_documents_whose_positions_a_request_gives_are_not_those_of_separators(large: Lab) -> None:
    turn = later_turn(chat(DOC_A, DOC_B))
    request = large.arrive("second", turn, {"documents": [[10, 20]]})
    assert not state_of(large, request.request_id).cached
    assert large.look(request) <= BLOCK
    large.finish(request)


def test_blocks_that_are_evicted_before_a_turn_is_scheduled_are_blended_again(large: Lab) -> None:
    turn = later_turn(chat(DOC_A, DOC_B))
    request = large.arrive("second", turn)
    assert state_of(large, request.request_id).cached
    large.forget_prefixes()
    large.wait(lambda: large.admit(request))
    (job,) = large.step().loads
    assert (len(job.documents) > 1, job.copied) == (True, ())
    large.compute(request, len(turn) - request.num_computed_tokens)
    large.finish(request)
    assert approximate(large) == 2


def test_a_new_document_among_the_few_tokens_that_the_engine_lacks_is_learned(large: Lab) -> None:
    new = [700 + i for i in range(6)]
    turn = [*chat(DOC_A, DOC_B), *ANSWER, 1, 8, 90, 91, *new, 90, 91, *HEADER]
    request = large.arrive("second", turn)
    assert not state_of(large, request.request_id).cached
    large.admit(request)
    large.compute(request, len(turn) - request.num_computed_tokens)
    assert large.finish(request)["unknown_documents"] == 1
    assert large.engine.learning


def test_another_question_about_documents_that_the_engine_has_exactly_is_served_without_a_look(large: Lab) -> None:
    """The separator after the last document is among the tokens that the engine lacks."""
    tokens = [*prompt(list(range(600, 620)), question=[70, 71, 72, 73]), *HEADER]
    large.serve("exact", tokens, {"blend": False})
    other = large.arrive("other", [*tokens[:-7], 80, 81, 82, 83, *HEADER])
    assert large.look(other) < len(tokens) - 7, "it ends inside of the separator"
    assert state_of(large, "other").cached
    assert large.admit(other) == 0
    large.compute(other, len(tokens) - other.num_computed_tokens)
    assert large.finish(other) is None


def test_a_prompt_that_the_engine_has_exactly_is_served_without_a_look(large: Lab) -> None:
    tokens = [*prompt(DOC_C, question=list(range(200, 225))), *HEADER]
    large.serve("exact", tokens, {"blend": False})
    for lmc in (None, {"blend": False}):
        request = large.arrive(f"again {lmc}", tokens, lmc)
        state = state_of(large, request.request_id)
        assert (state.cached, state.salts) == (True, ())
        assert large.admit(request) == 0
        large.compute(request, len(tokens) - request.num_computed_tokens)
        assert large.finish(request) is None


def test_another_question_does_not_go_on_from_it(lab: Lab) -> None:
    first_turn(lab, chat(DOC_A, DOC_B))
    lab.drop_backfills()
    request = lab.arrive("second", [*prompt(DOC_A, DOC_B, question=[70, 71, 72, 73, 79]), *HEADER])
    assert lab.look(request) == BLOCK
    lab.finish(request)


def test_tenants_go_on_from_their_own_blends(lab: Lab) -> None:
    learn(lab, DOC_A, DOC_B, cache_salt="one")
    tokens = chat(DOC_A, DOC_B)
    first_turn(lab, tokens, SHARES, cache_salt="one")
    lab.drop_backfills()
    own = lab.arrive("own", later_turn(tokens), SHARES, cache_salt="one")
    other = lab.arrive("other", later_turn(tokens), SHARES, cache_salt="two")
    assert lab.look(own) > len(tokens)
    assert lab.look(other) == 0
    for request in (own, other):
        lab.finish(request)


def test_a_turn_goes_on_from_the_blocks_that_are_left_and_blends_the_rest(lab: Lab) -> None:
    tokens = chat(DOC_A, DOC_B)
    first_turn(lab, tokens, SHARES)
    lab.drop_backfills()
    request = lab.arrive("second", later_turn(tokens), SHARES)
    kept = lab.look(request) // BLOCK // 2
    for block in lab.requests["first"].block_hashes[kept:]:
        lab.pool.cached.pop(block).block_hash = None
    lab.finish(request)
    again = lab.arrive("third", later_turn(tokens), SHARES)
    assert lab.look(again) == kept * BLOCK
    lab.admit(again)
    (job,) = lab.step().loads
    assert (job.start, job.documents[0].at) == (kept * BLOCK, kept * BLOCK)
    assert len(state_of(lab, "third").salts) == 2
    lab.compute(again, 1)
    lab.finish(again)
    assert approximate(lab) == 2


def blending_and_waiting(lab: Lab, tokens: list[int]) -> tuple[Request, Request]:
    """Two requests with one prompt: the first is being blended, and the second waits for it."""
    one, two = lab.arrive("one", tokens), lab.arrive("two", tokens)
    lab.workers.held_back = True
    lab.admit(one)
    lab.step()
    assert lab.admit(two) is None
    return one, two


def test_a_retry_while_the_blend_is_under_way_waits_for_it(lab: Lab) -> None:
    """As the children of n=2, which arrive before the first of them is blended."""
    tokens = chat(DOC_A, DOC_B)
    one, two = blending_and_waiting(lab, tokens)
    lab.workers.held_back = False
    lab.step()
    lab.compute(one, 1)
    assert lab.wait(lambda: lab.admit(two)) == 0
    assert two.num_computed_tokens == (len(tokens) - 1) // BLOCK * BLOCK
    lab.compute(two, len(tokens) - two.num_computed_tokens)
    for request in (one, two):
        lab.finish(request)
    assert approximate(lab) == 1


def test_a_sample_continues_in_the_step_in_which_the_first_one_begins(lab: Lab) -> None:
    """Earlier, the second sample was asked for two steps later, and began to decode after the others."""
    tokens = chat(DOC_A, DOC_B)
    one, two = blending_and_waiting(lab, tokens)
    lab.workers.held_back = False
    lab.step()
    assert one.running
    assert lab.admit(two) == 0
    assert two.num_computed_tokens == (len(tokens) - 1) // BLOCK * BLOCK
    lab.compute(one, 1)
    lab.compute(two, len(tokens) - two.num_computed_tokens)
    assert lab.finish(two)["continued_tokens"] > 0
    lab.finish(one)
    assert approximate(lab) == 1


def test_a_sample_takes_nothing_of_a_blend_that_was_forgotten_while_it_waited(lab: Lab) -> None:
    """The waiting sample's hashes are those of the blend, so the engine has found blocks that are not exact."""
    tokens = chat(DOC_A, DOC_B)
    one, two = blending_and_waiting(lab, tokens)
    exact = list(state_of(lab, "two").exact_hashes)
    lab.workers.held_back = False
    lab.step()
    lab.finish(one)  # It was aborted before the step in which it would have begun.
    assert lab.look(two) > BLOCK
    assert lab.admit(two) is None
    assert two.block_hashes == exact
    assert lab.look(two) == BLOCK, "the text before the documents, which is exact"
    assert lab.wait(lambda: lab.admit(two)) == len(tokens) - BLOCK, "it is blended by itself"
    lab.load(two)
    lab.compute(two, 1)
    lab.finish(two)
    lab.check()


def test_a_sample_that_waits_takes_no_approximate_blocks_when_lmc_is_off(lab: Lab) -> None:
    """Earlier, the waiting sample took the blocks of the blend, and its response did not say so."""
    one, two = blending_and_waiting(lab, chat(DOC_A, DOC_B))
    lab.scheduler.switch_off()
    lab.workers.held_back = False
    lab.step()
    assert lab.admit(two) == 0
    assert two.num_computed_tokens == BLOCK, "the text before the documents"
    for request in (one, two):
        lab.finish(request)


@pytest.mark.parametrize("event", ["reset", "abandoned"])
def test_a_sample_that_waits_has_its_own_hashes_again_after(lab: Lab, event: str) -> None:
    one, two = blending_and_waiting(lab, chat(DOC_A, DOC_B))
    exact = list(state_of(lab, "two").exact_hashes)
    assert two.block_hashes != exact
    if event == "reset":
        lab.scheduler.reset()
        assert two.block_hashes == exact
    else:
        lab.scheduler.abandon("two")
        assert lab.admit(two) == 0
        assert state_of(lab, "two").approximate == 0, "nothing of it is saved as exact"
    lab.workers.held_back = False
    lab.step()
    for request in (one, two):
        lab.finish(request)


def test_a_request_that_waits_for_a_blend_does_not_look_for_it_in_each_step(lab: Lab, monkeypatch) -> None:
    """A search reads all hashes of the prompt, and hundreds of requests may wait."""
    one, two = blending_and_waiting(lab, chat(DOC_A, DOC_B))
    searches, find = [], isolation.OwnBlends.find
    monkeypatch.setattr(isolation.OwnBlends, "find", lambda *of, **more: [searches.append(1), find(*of, **more)][1])
    assert [lab.admit(two) for _ in range(50)] == [None] * 50
    assert not searches
    lab.workers.held_back = False
    lab.step()
    lab.compute(one, 1)
    assert lab.wait(lambda: lab.admit(two)) == 0
    for request in (one, two):
        lab.finish(request)


def test_a_revision_whose_turn_has_not_come_looks_up_no_blocks(lab: Lab, monkeypatch) -> None:
    lab.serve("first", other_question(600))
    lab.drop_backfills()
    waits = lab.arrive("waits", other_question(601))
    with monkeypatch.context() as patched:
        patched.setattr(admission.Admission, "waits", lambda *_: True)
        patched.setattr(follow_ups.FollowUps, "_can_revise", None)
        assert lab.admit(waits) is None
    assert lab.wait(lambda: lab.admit(waits)) > 0
    ended(lab, waits)
    lab.check()


def test_a_retry_is_blended_by_itself_if_the_first_blend_is_lost(lab: Lab) -> None:
    tokens = chat(DOC_A, DOC_B)
    one, two = blending_and_waiting(lab, tokens)
    lab.finish(one)  # aborted
    lab.workers.held_back = False
    lab.step()
    assert lab.wait(lambda: lab.admit(two)) == len(tokens)
    lab.load(two)
    lab.compute(two, 1)
    lab.finish(two)


# -- revision ----------------------------------------------------------------------------------------------------------


def asked(lab: Lab) -> tuple[list[int], int]:
    """A conversation after its first turn, without idle time: the tokens of the second turn, and what is cached."""
    tokens = chat(DOC_A, DOC_B)
    first_turn(lab, tokens)
    lab.drop_backfills()
    return later_turn(tokens), (len(tokens) + len(ANSWER)) // BLOCK * BLOCK


def job_for(lab: Lab, name: str, turn: list[int]):
    request = lab.arrive(name, turn)
    lab.wait(lambda: lab.admit(request))
    (job,) = lab.step().loads
    return request, job


def ended(lab: Lab, request: Request) -> dict:
    lab.load(request)
    lab.compute(request, request.num_tokens - request.num_computed_tokens)
    return lab.finish(request)


@pytest.mark.parametrize("name", ["lab", "large"])
def test_a_later_turn_revises_the_blend_in_copies_of_its_blocks(request, name) -> None:
    lab = request.getfixturevalue(name)
    turn, cached = asked(lab) if name == "lab" else (later_turn(chat(DOC_A, DOC_B)), 0)
    cached = cached or (len(turn) - len(NEXT)) // BLOCK * BLOCK
    lab.scheduler.counts.clear()
    first = {block.block_id for block in lab.pool.blocks if block.block_hash is not None}
    asking, job = job_for(lab, "second", turn)
    assert (job.documents, job.copies, job.start, job.exact) == ((), (), BLOCK, BLOCK)
    sources, targets = zip(*job.copied, strict=True)
    assert len(sources) == cached // BLOCK - 1
    assert set(sources) <= first
    assert targets == job.tables[0][1 : cached // BLOCK]
    assert set(targets).isdisjoint(sources), "requests that share the first turn's blocks do not see a change"
    loose = [piece for piece in job.own if not piece.exact]
    found = [turn[at] for piece in loose for at in range(piece.at, piece.stop)]
    assert found == [*DOC_A, *DOC_B]
    assert [piece.first for piece in loose] == [0, 8, 0, 8, 16], "positions in their own documents"
    assert [piece.at for piece in job.own] == sorted(piece.at for piece in job.own)
    assert max(piece.stop for piece in job.own) == cached, "what follows is computed"
    assert job.policy == state_of(lab, "second").policy
    assert turn[job.question :] == NEXT, "the questions before have been asked"
    assert ended(lab, asking)["continued_tokens"] == cached - BLOCK
    assert lab.scheduler.counts["blends"] == lab.scheduler.counts["blends_continued"] == 1
    lab.check()


def test_what_a_revision_copies_is_one_of_the_sources_of_what_the_engine_takes_for_loaded(lab: Lab) -> None:
    """The engine reports all tokens as of an unknown source if the counts do not add up."""
    turn, cached = asked(lab)
    asking = lab.arrive("second", turn)
    tokens = lab.wait(lambda: lab.admit(asking))
    found = lab.scheduler.sources(asking, tokens)
    assert found == {"device": cached - BLOCK, "computed": tokens - (cached - BLOCK)}
    ended(lab, asking)


def test_each_turn_revises_the_blend_of_the_turn_before(lab: Lab) -> None:
    turn, _ = asked(lab)
    before: set[int] = set()
    for number in range(3):
        request, job = job_for(lab, f"turn {number}", turn)
        sources = {source for source, _ in job.copied}
        assert not before or sources <= before
        before = {block for table in job.tables for block in table}
        lab.load(request)
        lab.decode(request, [*ANSWER, 9])
        before |= set(lab.tables[request.request_id])
        lab.finish(request)
        lab.drop_backfills()
        turn = later_turn(turn)
    assert approximate(lab) == 4


def test_a_retry_of_a_later_turn_shares_its_revision(lab: Lab) -> None:
    turn, _ = asked(lab)
    request, _ = job_for(lab, "second", turn)
    ended(lab, request)
    again = lab.arrive("again", turn)
    assert lab.wait(lambda: lab.admit(again)) == 0
    assert lab.look(again) == (len(turn) - 1) // BLOCK * BLOCK
    lab.compute(again, len(turn) - again.num_computed_tokens)
    lab.finish(again)
    assert approximate(lab) == 2


def test_a_step_of_a_beam_search_revises_nothing(lab: Lab) -> None:
    tokens = chat(DOC_A, DOC_B)
    first_turn(lab, tokens)
    beam = lab.arrive("beam", [*tokens, *ANSWER, *range(700, 720)])
    assert lab.look(beam) > len(tokens)
    assert lab.admit(beam) == 0
    lab.compute(beam, beam.num_tokens - beam.num_computed_tokens)
    lab.finish(beam)


@pytest.mark.parametrize("separated", [False, True])
@pytest.mark.parametrize(("role", "blanks", "revised"), [((1, 9), 1, False), ((1, 9), 4, False), (USER, 1, True)])
def test_the_result_of_a_tool_asks_nothing(
    make, role: tuple[int, ...], blanks: int, revised: bool, separated: bool
) -> None:
    """An agent's turns would each be computed twice. A template may write white space after a message."""
    tokenizer = SimpleNamespace(decode=lambda tokens: "".join(" " if token == 4 else "word" for token in tokens))
    settings = {"load_policy": "always"}
    headers = {"answers": (HEADER,), "messages": (USER, (1, 9)), "results": ((1, 9),)}
    lab = make(blocks=256, slots=32, settings=settings, tokenizer=tokenizer, special=frozenset({5}), **headers)
    learn(lab, DOC_A, DOC_B, DOC_C)
    turn, _ = asked(lab)
    passages = [80, *SEPARATOR, 81, 82, *SEPARATOR, 83] if separated else [80, 81, 82, 83]
    turn = [*turn[: -len(NEXT)], *USER, 86, 5, *HEADER, 87, *role, *passages, 5, *[4] * blanks, *HEADER]
    request = lab.arrive("second", turn)
    assert (state_of(lab, "second").revision is not None) == revised
    lab.wait(lambda: lab.admit(request) is not None or None)
    assert len(lab.step().loads) == revised
    ended(lab, request)
    assert lab.scheduler.counts["blends"] == 1 + revised
    lab.drop_backfills()


def test_new_documents_of_a_later_turn_are_blended_with_the_revision(lab: Lab) -> None:
    turn, cached = asked(lab)
    turn = [*turn[: -len(NEXT)], *USER, 90, 91, *DOC_C, 90, 91, 81, *HEADER]
    request, job = job_for(lab, "second", turn)
    found = [turn[at] for piece in job.documents for at in range(piece.at, piece.stop)]
    assert found == DOC_C
    assert max(piece.stop for piece in job.own) == cached
    assert job.question > job.documents[0].at
    assert ended(lab, request)["continued_tokens"] == cached - job.own[0].at
    lab.drop_backfills()
    again, job = job_for(lab, "third", [*turn, *ANSWER, *NEXT])
    found = [turn[at] for piece in job.own if not piece.exact for at in range(piece.at, piece.stop)]
    assert found == [*DOC_A, *DOC_B, *DOC_C]
    ended(lab, again)


def test_a_turn_revises_the_blocks_that_are_left_and_blends_the_rest(lab: Lab) -> None:
    turn, cached = asked(lab)
    kept = cached // BLOCK // 2
    for at in range(kept, cached // BLOCK):
        lab.pool.cached.pop(lab.requests["first"].block_hashes[at]).block_hash = None
    request, job = job_for(lab, "second", turn)
    assert len(job.copied) == kept - 1
    assert max(piece.stop for piece in job.own) == job.documents[0].at == kept * BLOCK
    ended(lab, request)


def test_without_free_blocks_for_copies_a_turn_shares_the_blocks(lab: Lab) -> None:
    turn, cached = asked(lab)
    held = lab.pool.get_new_blocks(lab.pool.get_num_free_blocks() - 2 * cached // BLOCK)
    request = lab.arrive("second", turn)
    assert lab.wait(lambda: lab.admit(request)) == 0
    assert request.num_computed_tokens == cached
    lab.compute(request, len(turn) - cached)
    assert lab.finish(request)["continued_tokens"] == cached - BLOCK
    lab.pool.free_blocks(held)
    assert approximate(lab) == 1


def test_blocks_that_are_evicted_while_the_engine_allocates_are_computed(lab: Lab, monkeypatch) -> None:
    turn, _ = asked(lab)
    monkeypatch.setattr(follow_ups.FollowUps, "_can_revise", lambda *_: True)
    request = lab.arrive("second", turn)
    local = lab.look(request)
    tokens = lab.scheduler.claim(request, local)
    for block in list(lab.pool.cached.values())[local // BLOCK :]:
        lab.pool.cached.pop(block.block_hash, None)
        block.block_hash = None
    tables = lab.allocate(request, local, tokens)
    request.num_computed_tokens = local + tokens
    lab.loading.add(request.request_id)
    lab.scheduler.allocated(request, tables, tokens)
    lab.step()
    assert request.num_computed_tokens == local
    lab.compute(request, len(turn) - local)
    assert lab.right(request, len(turn))
    lab.finish(request)
    lab.check()


@pytest.mark.parametrize("event", ["abort", "failure"])
def test_a_revision_that_ends_early_holds_no_blocks(lab: Lab, event: str) -> None:
    turn, _ = asked(lab)
    request = lab.arrive("second", turn)
    lab.workers.held_back = True
    lab.wait(lambda: lab.admit(request))
    lab.step()
    assert state_of(lab, "second").copied
    lab.lose(request, event)
    lab.check()


def other_question(number: int) -> list[int]:
    return [*prompt(DOC_A, DOC_B, question=[70, 71, 72, 73, number]), *HEADER]


@pytest.mark.parametrize("name", ["lab", "large"])
def test_another_question_about_the_same_documents_revises_the_blend(request, name: str) -> None:
    lab = request.getfixturevalue(name)
    if name == "lab":
        asked(lab)
    first = {block.block_id for block in lab.pool.blocks if block.block_hash is not None}
    turn = other_question(600)
    asking, job = job_for(lab, "second", turn)
    shared = turn.index(600) // BLOCK * BLOCK
    sources, targets = zip(*job.copied, strict=True)
    assert set(sources) <= first
    assert set(targets).isdisjoint(sources)
    assert max(piece.stop for piece in job.own) == shared, "what follows is computed"
    assert [turn[at] for piece in job.own if not piece.exact for at in range(piece.at, piece.stop)] == [*DOC_A, *DOC_B]
    assert turn[job.question :] == turn[shared:]
    assert ended(lab, asking)["continued_tokens"] == shared - BLOCK
    again = lab.arrive("again", turn)
    assert lab.look(again) == len(turn) // BLOCK * BLOCK, "a retry shares what the revision has computed"
    lab.finish(again)
    lab.check()


@pytest.mark.parametrize(
    "change", [{"lmc": {"blend": False}}, {"lmc": {"ratio": 0.5}}, {"lmc": {"strategy": "head"}}, {"cache_salt": "x"}]
)
def test_another_question_of_somebody_else_does_not_revise_it(lab: Lab, change: dict) -> None:
    asked(lab)
    request = lab.arrive("second", other_question(600), change.get("lmc"), cache_salt=change.get("cache_salt"))
    assert state_of(lab, "second").revision is None
    lab.finish(request)


def test_another_question_about_given_documents_revises_only_a_blend_of_these(lab: Lab) -> None:
    asked(lab)
    tokens = other_question(600)
    start = tokens.index(DOC_B[0])
    request = lab.arrive("second", tokens, {"documents": [[start, start + len(DOC_B)]]})
    assert state_of(lab, "second").revision is None
    lab.finish(request)


def test_another_question_waits_for_the_blend_of_its_documents(lab: Lab) -> None:
    first = lab.arrive("first", chat(DOC_A, DOC_B))
    second = lab.arrive("second", other_question(600))
    assert lab.wait(lambda: lab.admit(first)) > 0
    assert lab.scheduler.claim(second, lab.look(second)) is None
    ended(lab, first)
    lab.drop_backfills()
    lab.wait(lambda: lab.admit(second))
    (job,) = lab.step().loads
    assert job.own
    ended(lab, second)
    lab.check()


def test_another_question_is_computed_without_free_blocks_for_copies(make) -> None:
    lab = make(blocks=256, slots=32)
    learn(lab, DOC_A, DOC_B)
    lab.serve("first", other_question(600))
    lab.drop_backfills()
    blocks = len(other_question(601)) // BLOCK
    held = lab.pool.get_new_blocks(lab.pool.get_num_free_blocks() - 2 * blocks + 4)
    request = lab.serve("second", other_question(601))
    lab.pool.free_blocks(held)
    assert (request.loaded, (request.facts or {}).get("note")) == (0, follow_ups.REPEATED)
    lab.check()


def test_idle_steps_compute_only_the_last_turn_of_a_revised_conversation(lab: Lab) -> None:
    tokens = chat(DOC_A, DOC_B)
    first_turn(lab, tokens)
    request, _ = job_for(lab, "second", later_turn(tokens))
    ended(lab, request)
    lab.settle()
    assert lab.scheduler.numbers()["backfills"] == 1
    plain = lab.arrive("plain", later_turn(tokens), {"blend": False})
    assert lab.look(plain) >= len(tokens)
    lab.finish(plain)


# -- backfill ----------------------------------------------------------------------------------------------------------


def test_idle_steps_compute_a_conversation_exactly(lab: Lab) -> None:
    tokens = chat(DOC_A, DOC_B)
    first_turn(lab, tokens)
    lab.settle()
    turn = later_turn(tokens)
    request = lab.arrive("second", turn)
    cached = (len(tokens) + len(ANSWER)) // BLOCK * BLOCK
    assert lab.look(request) == cached
    assert lab.admit(request) == 0
    assert lab.right(request, cached)
    lab.compute(request, len(turn) - cached)
    assert lab.right(request, len(turn))
    lab.finish(request)
    assert lab.scheduler.numbers()["backfills"] == 1
    plain = lab.arrive("plain", turn, {"blend": False})
    assert lab.look(plain) >= cached, "it is exact, so that everybody finds it"
    lab.finish(plain)


def test_idle_steps_do_not_compute_a_session_that_has_got_an_image(lab: Lab) -> None:
    """A backfill computes text: blocks of the image that were computed from its tokens were in the prefix cache."""
    tokens = chat(DOC_A, DOC_B)
    request = lab.arrive("session", tokens)
    lab.wait(lambda: lab.admit(request))
    lab.load(request)
    lab.decode(request, ANSWER)
    request.mm_features = ["image"]
    lab.decode(request, [7] * BLOCK)
    lab.finish(request)
    lab.settle()
    assert lab.scheduler.counts["blends"] == 1
    assert lab.scheduler.numbers()["backfills"] == 0
    lab.check()


def test_idle_steps_are_used_only_after_a_moment_of_rest(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs often send the next turn at once. It does not wait for a layer of the turn before."""
    monkeypatch.setattr(scheduler, "REST_SECONDS", 0.05)
    tokens = chat(DOC_A, DOC_B)
    first_turn(lab, tokens)
    for _ in range(5):
        plan = lab.step()
        assert not plan.rested
        assert not plan.backfill
    lab.now += 0.05
    plan = lab.step()
    assert plan.rested
    assert len(plan.backfill) == 1
    lab.finish(lab.arrive("second", later_turn(tokens)))


def test_another_question_about_the_same_documents_finds_them_exactly_after_idle_steps(make) -> None:
    """No chat template is needed. Without lmc, the engine's own cache would have them."""
    lab = make(settings={"load_policy": "always"})
    learn(lab, DOC_A, DOC_B)
    lab.serve("first", prompt(DOC_A, DOC_B))
    lab.settle()
    assert lab.scheduler.numbers()["backfills"] == 1
    tokens = prompt(DOC_A, DOC_B, question=[70, 71, 72, 73, 79])
    other = lab.arrive("other", tokens, {"blend": False})
    assert lab.look(other) > len(DOC_A) + len(DOC_B)
    assert lab.admit(other) == 0
    assert lab.right(other, lab.look(other))
    lab.finish(other)


def test_nothing_is_computed_again_where_no_turn_follows(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backfill, "TRIALS", 2)
    orders = [(DOC_A, DOC_B), (DOC_B, DOC_A), (DOC_C, DOC_A), (DOC_A, DOC_C), (DOC_B, DOC_C), (DOC_C, DOC_B)]
    for number, order in enumerate(orders[:5]):
        lab.serve(f"only {number}", chat(*order))
        lab.settle()
    assert lab.scheduler.numbers()["backfills"] == 2
    lab.finish(lab.arrive("follow", later_turn(chat(*orders[4]))))
    lab.serve("again", chat(*orders[5]))
    lab.settle()
    assert lab.scheduler.numbers()["backfills"] == 3


def test_the_request_that_ended_last_is_computed_exactly_first(lab: Lab) -> None:
    """On an engine that is seldom idle, a conversation that goes on always came last."""
    lab.serve("first", chat(DOC_A, DOC_B))
    lab.serve("second", chat(DOC_B, DOC_A))
    lab.workers.slow = True
    (job,) = lab.step().backfill
    assert job.tokens[: len(chat(DOC_B, DOC_A)) - 16] == tuple(chat(DOC_B, DOC_A))[:-16]
    lab.workers.slow = False


def test_a_backfill_goes_on_after_an_answer_that_takes_longer_than_a_few_seconds(lab: Lab) -> None:
    """Earlier, a backfill was given up after five seconds of other work, and the next turn revised the blend."""
    first_turn(lab, chat(DOC_A, DOC_B))
    lab.workers.slow = True
    lab.step()
    request = lab.arrive("busy", list(range(900, 940)), {"blend": False})
    lab.admit(request)
    lab.compute(request, 16)
    lab.now += 30
    assert not lab.compute(request, 24).cancel
    lab.finish(request)
    lab.workers.slow = False
    lab.settle()
    assert lab.scheduler.numbers()["backfills"] == 1


def test_requests_to_learn_are_no_blends_that_nothing_follows(make, monkeypatch: pytest.MonkeyPatch) -> None:
    """After sixteen documents had been learned, the turns of the first conversations were five times slower."""
    monkeypatch.setattr(backfill, "TRIALS", 1)
    options = {"blocks": 256, "slots": 64, "settings": {"load_policy": "always"}}
    lab = make(answers=(HEADER,), messages=(USER,), prefix=(1, 50, 51), **options)
    learn(lab, DOC_A, DOC_B)
    for token in range(5, 10):
        lab.serve(f"learn {token}", [token, *DOC_A[1:]], {"learn": True})
    lab.settle()
    assert lab.scheduler.numbers()["backfills"] == 0
    lab.serve("first", chat(DOC_A, DOC_B))
    lab.settle()
    assert lab.scheduler.numbers()["backfills"] == 1


def test_a_conversation_that_went_on_is_computed_exactly_however_few_do(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backfill, "TRIALS", 0)
    monkeypatch.setattr(backfill, "WORTHWHILE", 1.0)
    for number, order in enumerate([(DOC_A, DOC_B), (DOC_B, DOC_A), (DOC_C, DOC_A)]):
        lab.serve(f"only {number}", chat(*order))
        lab.settle()
    assert lab.scheduler.numbers()["backfills"] == 0
    lab.serve("second turn", later_turn(chat(DOC_C, DOC_A)))
    lab.settle()
    assert lab.scheduler.numbers()["backfills"] == 1


@pytest.mark.parametrize(("worthwhile", "more"), [(0.5, 1), (1.0, 0)])
@pytest.mark.parametrize("exact", [False, True], ids=["computed", "cached"])
def test_another_question_about_the_same_documents_counts_as_one_that_follows(
    make, exact: bool, worthwhile, more, monkeypatch
) -> None:
    """The gate of the backfill then stays open, also if the engine's cache has the documents already."""
    monkeypatch.setattr(backfill, "TRIALS", 1)
    monkeypatch.setattr(backfill, "WORTHWHILE", worthwhile)
    lab = make(blocks=256, slots=32)
    learn(lab, DOC_A, DOC_B, DOC_C)
    lab.serve("first", prompt(DOC_A, DOC_B))
    if exact:
        lab.settle()
    else:
        lab.drop_backfills()
    for number in (600, 601):  # The second one counts nothing: the first one has made the documents exact.
        lab.serve(f"{number}", prompt(DOC_A, DOC_B, question=[70, 71, 72, 73, number]))
    lab.settle()
    before = lab.scheduler.numbers()["backfills"]
    lab.serve("more", prompt(DOC_C, DOC_A))
    lab.settle()
    assert lab.scheduler.numbers()["backfills"] == before + more, "two blends, and one question"


@pytest.fixture
def weighing(make, monkeypatch: pytest.MonkeyPatch) -> Lab:
    """A lab in which blends are fast, as far as their own requests tell."""
    monkeypatch.setattr(CostModel, "against_blend", lambda *_: "")
    monkeypatch.setattr(CostModel, "in_prefill_tokens", lambda _, offer: offer.rows)
    lab = make(answers=(HEADER,), messages=(USER,), blocks=512, slots=64)
    learn(lab, DOC_A, DOC_B, DOC_C)
    return lab


@pytest.fixture
def agent(make, monkeypatch: pytest.MonkeyPatch) -> Lab:
    """A lab in which blends are fast, with long prompts that have results of tools."""
    monkeypatch.setattr(CostModel, "against_blend", lambda *_: "")
    monkeypatch.setattr(CostModel, "in_prefill_tokens", lambda _, offer: offer.rows)
    tokenizer = SimpleNamespace(decode=lambda tokens: "word" * len(tokens))
    headers = {"answers": (HEADER,), "messages": (USER, TOOL), "results": (TOOL,)}
    size = {"blocks": 2048, "slots": 512, "longest": 10_000, "batch_tokens": 2048}
    lab = make(tokenizer=tokenizer, **headers, **size)
    learn(lab, DOC_A, DOC_B, DOC_C)
    return lab


def conversation(lab: Lab, number: int, turns: int, *, idle: bool) -> str:
    """Serve a conversation with a system text of its own; return the note of its first turn."""
    turn = [*prompt(DOC_A, DOC_B, DOC_C, system=[5, 6, 7, 8, number]), *HEADER]
    why = ""
    for at in range(turns):
        request = lab.serve(f"{number}.{at}", turn, output=[*ANSWER, 9])
        turn = later_turn(turn)
        lab.settle() if idle else lab.drop_backfills()
        why = why if at else str((request.facts or {}).get("note", ""))
    return why


def test_another_question_is_computed_once_revisions_have_cost_half_of_prefill(weighing: Lab) -> None:
    """As without lmc, the next one then finds the documents in the engine's own cache."""
    requests = []
    for number in range(600, 605):
        requests.append(weighing.serve(f"{number}", other_question(number)))
        weighing.drop_backfills()
    assert [request.loaded > 0 for request in requests] == [True, True, True, False, False]
    assert [(request.facts or {}).get("note") for request in requests[2:]] == [None, follow_ups.REPEATED, None]
    request = weighing.arrive("last", other_question(605))
    assert weighing.look(request) > len(DOC_A) + len(DOC_B)
    weighing.finish(request)


def test_a_later_turn_is_computed_once_revisions_have_cost_half_of_prefill(weighing: Lab) -> None:
    """An agent of thirty turns computed each of them twice, because the first one had been blended."""
    turn, notes, made = chat(DOC_A, DOC_B, DOC_C), [], []
    for at in range(6):
        request = weighing.serve(f"{at}", turn, output=[*ANSWER, 9])
        notes.append((request.facts or {}).get("note"))
        made.append(weighing.scheduler.counts["blends"])
        turn = later_turn(turn)
        weighing.drop_backfills()
    assert made == [1, 2, 3, 3, 3, 3]
    assert notes == [None, None, None, follow_ups.REPEATED, None, None]
    plain = weighing.arrive("plain", turn, {"blend": False})
    assert weighing.look(plain) > len(turn) - len(NEXT) - BLOCK, "the last turns are exact, for every request"
    weighing.finish(plain)
    weighing.check()


def test_new_documents_are_blended_after_a_turn_that_was_computed(weighing: Lab) -> None:
    """Each of the earlier revisions had one more turn computed, although the engine had their documents exactly."""
    document = [700 + i for i in range(60)]
    learn(weighing, document)
    turn = chat(DOC_A, DOC_B, DOC_C)
    for at in range(4):
        weighing.serve(f"{at}", turn, output=[*ANSWER, 9])
        turn = later_turn(turn)
        weighing.drop_backfills()
    assert weighing.scheduler.counts["blends"] == 3, "the fourth turn is computed"
    turn = [*turn[: -len(NEXT)], *USER, *SEPARATOR, *document, *SEPARATOR, 81, *HEADER]
    request = weighing.serve("new document", turn)
    assert (request.facts or {}).get("note") is None
    assert weighing.scheduler.counts["blends"] == 4
    weighing.drop_backfills()
    weighing.check()


def test_turns_that_wait_together_revise_a_blend_only_as_long_as_it_pays(weighing: Lab) -> None:
    """All six turns plan a revision when they arrive, and not all of them make it."""
    first = chat(DOC_A, DOC_B, DOC_C)
    weighing.serve("first", first, output=[*ANSWER, 9])
    weighing.drop_backfills()
    turns = [[*first, *ANSWER, *USER, 80 + number, 81, 82, 83, 84, 85, *HEADER] for number in range(6)]
    requests = [weighing.arrive(f"{number}", turn) for number, turn in enumerate(turns)]
    assert all(state_of(weighing, request.request_id).revision is not None for request in requests)
    for request in requests:
        weighing.wait(lambda request=request: weighing.admit(request))
        ended(weighing, request)
        weighing.drop_backfills()
    assert weighing.scheduler.counts["blends"] == 3
    weighing.check()


@pytest.mark.parametrize("name", ["lab", "weighing"])
def test_samples_of_a_later_turn_share_one_revision(request: pytest.FixtureRequest, name: str) -> None:
    """With n=4, each sample revised the blend for itself, and took as many blocks as the whole prompt."""
    lab = request.getfixturevalue(name)
    first_turn(lab, chat(DOC_A, DOC_B))
    lab.drop_backfills()
    turn, free = later_turn(chat(DOC_A, DOC_B)), lab.pool.get_num_free_blocks()
    samples = [lab.arrive(f"sample {number}", turn) for number in range(4)]
    assert all(state_of(lab, sample.request_id).revision is not None for sample in samples)
    waiting = list(samples)
    for _ in range(1000):
        waiting = [sample for sample in waiting if lab.admit(sample) is None]
        lab.step()
        for sample in samples:
            loaded = sample not in waiting and not state_of(lab, sample.request_id).loading
            if loaded and (left := sample.num_tokens - sample.num_computed_tokens):
                lab.compute(sample, left)
        if not waiting:
            break
    assert not waiting
    assert approximate(lab) == 2, "the first turn, and one revision"
    assert free - lab.pool.get_num_free_blocks() < 2 * len(turn) // BLOCK
    for sample in samples:
        ended(lab, sample)
    lab.drop_backfills()


def test_branches_of_a_conversation_share_what_revisions_cost(weighing: Lab) -> None:
    first = chat(DOC_A, DOC_B, DOC_C)
    second = later_turn(first)
    other_second = [*first, *ANSWER, *USER, 86, 81, 82, 83, 84, 85, *HEADER]
    for name, turn in enumerate((first, second, later_turn(second), other_second)):
        weighing.serve(f"{name}", turn, output=[*ANSWER, 9])
        weighing.drop_backfills()
    assert weighing.scheduler.counts["blends"] == 3
    weighing.check()


def test_documents_that_are_blended_later_do_not_make_revisions_free_again(agent: Lab) -> None:
    """Results of tools with known documents came between the questions, and each question had all computed again."""
    documents = [[1000 * number + i for i in range(72)] for number in range(3, 6)]
    learn(agent, *documents)
    turn, costs = chat(DOC_A, DOC_B, DOC_C), []
    agent.serve("first", turn, output=[*ANSWER, 9])
    for at, document in enumerate(documents):
        agent.drop_backfills()
        turn = [*turn, *ANSWER, *TOOL, *document, 87, *HEADER]
        agent.serve(f"result {at}", turn, output=[*ANSWER, 9])
        agent.drop_backfills()
        turn = later_turn(turn)
        request = agent.arrive(f"question {at}", turn)
        revision = state_of(agent, request.request_id).revision
        costs.append(revision.blend.revisions if revision else None)
        agent.wait(lambda request=request: agent.admit(request))
        agent.load(request)
        agent.decode(request, [*ANSWER, 9])
        agent.finish(request)
    agent.drop_backfills()
    assert costs[0] is costs[1] is not None


def test_revisions_are_compared_with_what_they_spare(agent: Lab) -> None:
    """A long exact beginning made the revisions of one small document seem cheap for forty turns."""
    document = [10_000 + i for i in range(72)]
    learn(agent, document)
    beginning = [*range(3000, 6000), *HEADER]
    agent.serve("exact", beginning, output=[*ANSWER, 9])
    turn, made = [*beginning, *ANSWER, *USER, *SEPARATOR, *document, *SEPARATOR, 81, *HEADER], []
    for at in range(6):
        agent.serve(f"{at}", turn, output=[*ANSWER, 9])
        agent.drop_backfills()
        made.append(approximate(agent))
        turn = later_turn(turn)
    assert made[0] == 1
    assert made[-1] == made[-3] < 5, "later turns are exact"


def test_a_long_conversation_of_many_blends_is_hashed_once(make) -> None:
    """With a salt for each turn, vLLM's hashes were computed once for each, and for each blend that was evicted."""
    lab = make(answers=(HEADER,), messages=(USER,), blocks=512, slots=64, settings={"load_policy": "always"})
    documents = [[1000 * number + i for i in range(12)] for number in range(3, 15)]
    learn(lab, *documents)
    turn = chat(*documents[:2])
    for at, document in enumerate(documents[2:]):
        lab.serve(f"{at}", turn, SHARES, output=[*ANSWER, 9])
        lab.drop_backfills()
        turn = [*turn, *ANSWER, *USER, *SEPARATOR, *document, *SEPARATOR, 80, *HEADER]
    last = lab.arrive("last", turn, SHARES)
    assert len(state_of(lab, "last").salts) > 8
    before = last.hashed
    lab.wait(lambda: lab.admit(last) is not None or None)
    assert last.hashed - before <= len(last.block_hashes) // 4, "only of the new document"
    assert before < 2 * len(last.block_hashes)
    ended(lab, last)
    lab.drop_backfills()
    lab.forget_prefixes()
    evicted = lab.arrive("evicted", turn, SHARES)
    assert evicted.hashed == len(evicted.block_hashes), "no blend is tried of which the engine has nothing"
    lab.wait(lambda: lab.admit(evicted) is not None or None)
    ended(lab, evicted)
    lab.drop_backfills()


def test_prompts_are_computed_while_conversations_cost_more_with_blends_than_without(
    weighing: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that is never idle revised a blend in each turn: six turns took a third longer than in vLLM alone."""
    monkeypatch.setattr(balance, "FIRST_BLENDS", 3)
    monkeypatch.setattr(balance, "TRIAL_EVERY", 4)
    notes = [conversation(weighing, number, 6, idle=False) for number in range(600, 611)]
    skipped = follow_ups.UNPROFITABLE
    assert notes == ["", "", "", skipped, skipped, skipped, "", skipped, skipped, skipped, ""]
    counts = weighing.scheduler.counts
    assert counts["blends_skipped"] == 6
    assert counts["blends_continued"] == 5 * 2, "the later turns of blends that were made are served as before"
    weighing.drop_backfills()
    weighing.check()


def test_prompts_are_blended_while_conversations_cost_less_with_blends_than_without(
    weighing: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(balance, "FIRST_BLENDS", 1)
    for number in range(600, 604):
        assert conversation(weighing, number, 6, idle=True) == "", "idle steps compute the documents exactly"
        assert conversation(weighing, number + 10, 1, idle=False) == ""
    assert weighing.scheduler.counts["blends"] == 8


def test_other_questions_about_the_same_documents_count_as_what_blends_cost(
    weighing: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(balance, "FIRST_BLENDS", 1)
    for number, why in ((600, None), (601, follow_ups.UNPROFITABLE)):
        for question in range(610, 618):
            tokens = prompt(DOC_A, DOC_B, DOC_C, system=[5, 6, 7, 8, number], question=[70, 71, 72, 73, question])
            request = weighing.serve(f"{number}.{question}", tokens)
            weighing.drop_backfills()
            if question == 610:
                assert (request.facts or {}).get("note") == why


def test_a_turn_that_is_computed_instead_of_revised_counts_as_what_blends_cost(
    weighing: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(balance, "FIRST_BLENDS", 1)
    monkeypatch.setattr(CostModel, "against_blend", lambda _, offer, policy: "slow" if offer.revises else "")
    assert conversation(weighing, 600, 2, idle=False) == ""
    assert weighing.scheduler.counts["blends"] == 1
    assert conversation(weighing, 601, 1, idle=False) == follow_ups.UNPROFITABLE


def test_a_request_that_is_alone_is_blended_whatever_blends_among_others_have_cost(
    weighing: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After conversations at once on an engine that was never idle, single requests had no blends for a long time."""
    monkeypatch.setattr(balance, "FIRST_BLENDS", 1)
    other = weighing.arrive("other", list(range(3000, 3200)))
    weighing.admit(other)
    assert conversation(weighing, 600, 6, idle=False) == ""
    assert conversation(weighing, 601, 1, idle=False) == follow_ups.UNPROFITABLE
    weighing.finish(other)
    assert conversation(weighing, 602, 1, idle=False) == ""


def test_the_balance_counts_costs_only_if_there_are_any() -> None:
    """Blends whose savings are not known, and that nothing follows, were refused."""
    counted = balance.Balance()
    for _ in range(100):
        assert counted.allows_blend()
        counted.blended(-40)


def test_a_tenant_whose_blends_cost_more_than_they_save_refuses_those_of_no_other_tenant() -> None:
    counted = balance.Balances()
    for tenant, cost in (("never idle", 5000), ("idle", 0)):
        for _ in range(balance.FIRST_BLENDS):
            counted.blended(tenant, 1000)
            counted.followed(tenant, cost)
    assert not counted.allows_blend("never idle")
    assert all(counted.allows_blend("idle") for _ in range(100))


def test_tenants_of_one_blend_each_are_counted_together() -> None:
    """Where each user is a tenant, none has enough blends to count."""
    counted = balance.Balances()
    for number in range(balance.FIRST_BLENDS):
        assert counted.allows_blend(f"user {number}")
        counted.blended(f"user {number}", 1000)
        counted.followed(f"user {number}", 5000)
    assert not counted.allows_blend("another user")


@pytest.mark.parametrize("siblings", [1, 2, 4, 8, 16])
def test_a_refusal_ends_after_some_trials_that_pay(siblings: int) -> None:
    counted = balance.Balance()
    for _ in range(balance.FIRST_BLENDS):
        counted.blended(1000)
    for _ in range(2000):
        counted.followed(200)
    for _ in range(1000):
        allowed = counted.allows_blend()
        for _ in range(siblings - 1):
            counted.allows_blend()  # vLLM's cache has the prompt of a sibling, which is not blended.
        if allowed:
            counted.blended(1000)
    assert all(counted.allows_blend() for _ in range(100))


def test_what_was_measured_says_how_much_a_blend_costs() -> None:
    cost, offer = CostModel(), BlendOffer(rows=100, tokens=1000, length=1000)
    assert cost.in_prefill_tokens(offer) == 200, "a guess"
    for _ in range(3):
        cost.computed(1000, 1.0, 1000)
        cost.blended(offer, 0.3)
    assert cost.in_prefill_tokens(offer) == pytest.approx(300)


def test_requests_that_run_stop_a_backfill_that_holds_their_blocks(lab: Lab) -> None:
    first_turn(lab, chat(DOC_A, DOC_B))
    lab.workers.slow = True
    lab.step()
    free = lab.pool.get_num_free_blocks()
    request = lab.arrive("busy", list(range(900, 940)), {"blend": False})
    lab.admit(request)
    lab.compute(request, 16)
    lab.now += MAX_PAUSE_SECONDS + 1
    plan = lab.compute(request, 16)
    assert plan.cancel
    assert lab.pool.get_num_free_blocks() > free - 10
    lab.workers.slow = False
    lab.compute(request, 8)
    lab.finish(request)
    assert lab.scheduler.numbers()["backfills"] == 0


@pytest.mark.parametrize("slow", [False, True])
def test_a_later_turn_that_waited_for_a_slow_tier_goes_on_from_the_blend(make, slow: bool) -> None:
    """Earlier, a turn that had waited was blended anew, although the engine had the blocks of the blend."""
    settings = {"load_policy": "always"}
    lab = make(tier := SlowToAnswer(), answers=(HEADER,), messages=(USER,), blocks=256, slots=32, settings=settings)
    learn(lab, DOC_A, DOC_B)
    first_turn(lab, chat(DOC_A, DOC_B), SHARES)
    lab.drop_backfills()
    lose(lab.store, *lab.store.known_keys())
    tier.answers = not slow
    request = lab.arrive("second", later_turn(chat(DOC_A, DOC_B)), SHARES)
    assert (lab.admit(request) is None) == slow
    tier.answers = True
    if slow:
        lab.wait(lambda: lab.admit(request) is not None or None)
    assert ended(lab, request)["continued_tokens"] > len(DOC_A) + len(DOC_B)
    assert approximate(lab) == 1
    lab.drop_backfills()


def test_what_was_planned_before_a_reset_is_computed(lab: Lab) -> None:
    """Requests that waited went on from blends, and recorded blends, that were computed with other weights."""
    tokens = chat(DOC_A, DOC_B)
    first_turn(lab, tokens, SHARES)
    first_turn(lab, tokens)
    lab.drop_backfills()
    continues, revises = lab.arrive("continues", later_turn(tokens), SHARES), lab.arrive("revises", later_turn(tokens))
    assert state_of(lab, "continues").salts
    assert state_of(lab, "revises").revision is not None
    lab.scheduler.reset()
    for request in (continues, revises):
        lab.wait(lambda request=request: lab.admit(request) is not None or None)
        lab.compute(request, request.num_tokens - request.num_computed_tokens)
        assert request.block_hashes == hashes_of(request.all_token_ids)
        assert not (lab.finish(request) or {}).get("continued_tokens")
    assert not lab.scheduler.busy, "nothing is to be computed exactly"


def test_what_was_computed_before_a_reset_is_not_cached(lab: Lab) -> None:
    tokens = chat(DOC_A, DOC_B)
    first_turn(lab, tokens)
    lab.workers.slow = True
    lab.step()
    lab.scheduler.reset()
    lab.pool.forget()
    lab.workers.slow = False
    lab.settle()
    request = lab.arrive("second", later_turn(tokens), {"blend": False})
    assert lab.look(request) == 0
    lab.finish(request)


def test_a_request_that_has_no_blocks_stops_a_backfill(lab: Lab) -> None:
    first_turn(lab, chat(DOC_A, DOC_B))
    lab.workers.slow = True
    lab.step()
    assert not lab.step().cancel
    request = lab.arrive("waits", list(range(900, 940)), {"blend": False})
    assert lab.scheduler.claim(request, 0) == 0
    assert lab.step().cancel, "the engine could not schedule it"
    lab.workers.slow = False
    lab.finish(request)


def test_a_request_that_reads_no_prefix_cache_stops_a_backfill_that_holds_its_blocks(lab: Lab) -> None:
    """A request that reads no prefix cache has no claim. Earlier, it waited until the backfill had ended."""
    first_turn(lab, chat(DOC_A, DOC_B))
    lab.workers.slow = True
    lab.step()
    request = lab.arrive("waits", list(range(900, 940)), {"blend": False}, skip_reading_prefix_cache=True)
    assert lab.scheduler.claim(request, 0) == 0
    assert lab.step().cancel
    lab.workers.slow = False
    lab.finish(request)


def test_a_document_to_learn_does_not_stop_a_backfill(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """A document that waits for an idle step was taken for one that lacks blocks."""
    monkeypatch.setattr(scheduler, "REST_SECONDS", 0.05)
    first_turn(lab, chat(DOC_A, DOC_B))
    lab.workers.slow = True
    lab.now += 0.05
    lab.step()
    lab.serve("other", prompt(list(range(900, 912)), system=[3] * 5))
    assert not lab.step().cancel
    lab.workers.slow = False
    lab.now += 0.05
    lab.settle()
    assert lab.scheduler.numbers()["backfills"] == 1
    lab.engine.learning.clear()


def test_a_conversation_that_does_not_fit_is_dropped_and_holds_nothing(lab: Lab) -> None:
    first_turn(lab, chat(DOC_A, DOC_B))
    held = lab.pool.get_new_blocks(lab.pool.get_num_free_blocks() - 6)
    lab.step()
    assert not lab.scheduler.busy
    lab.pool.free_blocks(held)
    assert lab.scheduler.numbers()["backfills"] == 0


def test_aborted_requests_are_not_computed_again(lab: Lab) -> None:
    request = lab.arrive("gone", chat(DOC_A, DOC_B))
    lab.admit(request)
    lab.step()
    lab.compute(request, 1)
    request.aborted = True
    lab.finish(request)
    lab.settle()
    assert lab.scheduler.numbers()["backfills"] == 0


def test_a_report_that_is_read_again_after_an_error_counts_nothing_twice(make, monkeypatch: pytest.MonkeyPatch) -> None:
    """With two ranks, a job that one of them has ended would count as ended, and its slot would be read."""
    lab = make(ranks=2)
    ended: list[bool] = []
    job = lab.scheduler.pending.begin([], lambda *, failed: ended.append(failed))
    report = StepReport(done={job: 1}, blended={"unknown": {}})
    with pytest.raises(KeyError):
        lab.scheduler.reported(report, set())
    lab.scheduler.recover(report, set())
    assert not ended
    lab.scheduler.reported(StepReport(done={job: 1}), set())
    assert ended == [False]


# -- the table of blends -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("most", "blocks"), [(3, 1000), (1000, 12)])
def test_the_tenant_with_the_most_blends_loses_its_oldest_one(
    most: int, blocks: int, monkeypatch: pytest.MonkeyPatch, lab: Lab
) -> None:
    """Blends are limited by their number, and by the number of their hashes: each of these has 7 blocks."""
    monkeypatch.setattr(isolation, "MAX_BLENDS", most)
    blends, policy = OwnBlends(BLOCK, blocks), state_of_a_blend(lab).policy
    asked = {name: Request(name, [*chat(DOC_A), number]) for number, name in enumerate("abcd")}

    def found(name: str, tenant: str) -> bool:
        request = asked[name]
        given = {"prompt": request.prompt_token_ids, "hashes": request.block_hashes}
        return any(blends.find(tenant=tenant, documents=[Span(0, 99)], policy=policy, **given))

    for name, tenant in zip("abcd", ("busy", "other", "busy", "busy"), strict=True):
        request = asked[name]
        blends.add(
            request=name, tenant=tenant, prompt=request.prompt_token_ids, hashes=request.block_hashes,
            salted=request.block_hashes, end=len(request.prompt_token_ids), pieces=PIECES, policy=policy,
            salts=((1, b"salt"),), origin=(1, b"salt"), by_separators=True,
        )  # fmt: skip
    assert [found("a", "busy"), found("b", "other"), found("c", "busy"), found("d", "busy")] == [False, *[True] * 3]
    blends.forget("d", "busy")
    assert not found("d", "busy")
    blends.clear()
    assert not found("b", "other")


def state_of_a_blend(lab: Lab) -> object:
    lab.arrive("state", chat(DOC_A))
    state = state_of(lab, "state")
    lab.finish(lab.requests["state"])
    return state


def test_salts_are_set_and_taken_away_again() -> None:
    request = Request("one", list(range(40)))
    exact = list(request.block_hashes)
    for salt in ((2, b"one"), (5, b"two")):
        add_salt(request, salt)
    both = list(request.block_hashes)
    assert both[:2] == exact[:2]
    assert not set(both[2:]) & set(exact)
    set_hashes(request, both[:5])
    assert request.block_hashes[:5] == both[:5]
    assert request.block_hashes[5] != both[5]
    set_hashes(request, exact[:2])
    assert request.block_hashes == exact
    set_hashes(request, both[:6])
    assert request.block_hashes == both, "later blocks chain from the given ones"


def test_the_hashes_of_a_conversation_are_kept_once() -> None:
    first = SaltedHashes.of([b"a", b"b", b"c"], None)
    second = SaltedHashes.of([b"a", b"b", b"c", b"d"], first)
    other = SaltedHashes.of([b"a", b"x", b"y"], second)
    alone = SaltedHashes.of([b"z"], other)
    assert [one.new for one in (second, other, alone)] == [(b"d",), (b"x", b"y"), (b"z",)]
    assert [b"".join(one.whole()) for one in (first, second, other, alone)] == [b"abc", b"abcd", b"axy", b"z"]
    assert [len(one) for one in (first, second, other, alone)] == [3, 4, 3, 1]
    assert SaltedHashes.of([b"a", b"b"], second).new == (), "as much as it has of another"


def test_questions_about_the_same_documents_keep_no_hashes_of_each_other(lab: Lab) -> None:
    """Each one kept all earlier ones alive. After 3,000 requests, a prompt's first hashes were 3,000 steps away."""
    hashes = None
    for number in range(100):
        hashes = SaltedHashes.of([b"a", b"b", b"c", str(number).encode()], hashes)
        steps, earlier = 0, hashes.earlier
        while earlier is not None:
            steps, earlier = steps + 1, earlier.earlier
        assert steps <= 1
        assert hashes.whole() == [b"a", b"b", b"c", str(number).encode()]


# -- approximate KV stays apart from exact KV ------------------------------------------------------------------------


def revised(lab: Lab, turn: list[int]) -> tuple[Request, object]:
    """A request that revises a blend, and its job, after the load."""
    request = lab.arrive(f"revised {len(turn)}", turn)
    lab.look(request)
    assert state_of(lab, request.request_id).revision is not None
    lab.wait(lambda: lab.admit(request))
    (job,) = lab.step().loads
    lab.load(request)
    return request, job


def approximate_under_exact_hashes(lab: Lab, request: Request, job: object) -> list[int]:
    """The blocks of a prompt that are copies of approximate blocks, and have the hashes of exact ones."""
    exact, table = hashes_of(request.all_token_ids), lab.tables[request.request_id]
    return [at for at in (table.index(new) for _, new in job.copied) if request.block_hashes[at] == exact[at]]


def end(lab: Lab, request: Request) -> None:
    lab.compute(request, request.num_tokens - request.num_computed_tokens)
    lab.finish(request)
    lab.drop_backfills()
    lab.settle()


def exact_tokens(lab: Lab, tokens: list[int]) -> int:
    """How many tokens a request that does not allow blending finds in the engine's cache."""
    request = lab.arrive("exact", tokens, {"blend": False})
    local = lab.look(request)
    lab.finish(request)
    return local


def test_the_question_before_is_approximate_in_a_revision_for_another_document(lab: Lab) -> None:
    """Earlier, blocks of that question were copied and got exact hashes, in the engine's cache and in the store."""
    tokens = chat(DOC_A)
    first_turn(lab, tokens)
    lab.drop_backfills()
    lab.serve("exactly", [*prompt(DOC_A, question=[70, 71, 72, 73, 79]), *HEADER], {"blend": False})
    known = exact_tokens(lab, turn := [*tokens, *ANSWER, *USER, 90, 91, *DOC_C, 90, 91, 81, *HEADER])
    request, job = revised(lab, turn)
    assert not approximate_under_exact_hashes(lab, request, job)
    end(lab, request)
    assert exact_tokens(lab, turn) == known


def test_a_revision_after_a_turn_that_shared_blocks_knows_all_documents(lab: Lab) -> None:
    """A turn that had no blocks for copies was remembered without the documents of the turn before."""
    tokens = chat(DOC_A, DOC_B)
    first_turn(lab, tokens)
    lab.drop_backfills()
    second = [*tokens, *ANSWER, *USER, 90, 91, *DOC_C, 90, 91, 81, *HEADER]
    held = lab.pool.get_new_blocks(lab.pool.get_num_free_blocks() - 2 * (len(tokens) + len(ANSWER)) // BLOCK)
    shares = lab.arrive("shares", second)
    lab.wait(lambda: lab.admit(shares))
    lab.step()
    lab.load(shares)
    lab.pool.free_blocks(held)
    lab.decode(shares, [*ANSWER, 9])
    lab.finish(shares)
    lab.drop_backfills()
    third = [*second, *ANSWER, *NEXT]
    request, job = revised(lab, third)
    assert not approximate_under_exact_hashes(lab, request, job)
    assert sum(piece.tokens for piece in job.own if not piece.exact) == len(DOC_A) + len(DOC_B) + len(DOC_C)
    end(lab, request)
    assert exact_tokens(lab, third) <= BLOCK


def test_pages_that_are_loaded_exactly_are_not_overwritten_by_copies(lab: Lab) -> None:
    """The exact pages are in the store and not in the engine's cache: another engine has computed them."""
    tokens = chat(DOC_A, DOC_B)
    first_turn(lab, tokens)
    lab.drop_backfills()
    other = lab.serve("plain", [*prompt(DOC_A, DOC_C), *HEADER], {"blend": False})
    lab.drop_backfills()
    lab.settle()
    evict(lab, other.block_hashes[1:])
    request, job = revised(lab, later_turn(tokens))
    assert job.exact > job.start, "pages are loaded"
    assert lab.right(request, job.exact)
    assert not approximate_under_exact_hashes(lab, request, job)
    end(lab, request)


def evict(lab: Lab, hashes: list[bytes]) -> None:
    """Remove blocks from the engine's cache."""
    for one in hashes:
        block = lab.pool.cached.pop(one, None)
        if block is not None:
            block.block_hash = None


# -- work that is not done again -------------------------------------------------------------------------------------


def test_a_retry_continues_from_the_latest_blend_of_its_prompt(lab: Lab) -> None:
    """After the eviction of a part, each retry found the first blend again, and blended this part again."""
    tokens = chat(DOC_A, DOC_B)
    first = lab.serve("first", tokens, SHARES, output=[*ANSWER, 9])
    lab.drop_backfills()
    evict(lab, first.block_hashes[6:])
    local = []
    for retry in range(3):
        request = lab.arrive(f"retry {retry}", tokens, SHARES)
        local.append(lab.look(request))
        lab.wait(lambda request=request: lab.admit(request))
        lab.load(request)
        end(lab, request)
    assert local == [6 * BLOCK, *[len(tokens) // BLOCK * BLOCK] * 2]


def test_a_retry_continues_from_the_blend_of_which_most_is_left(lab: Lab) -> None:
    """Earlier, a retry continued from the first blocks of the longest blend, although a shorter blend was whole."""
    tokens = chat(DOC_A, DOC_B)
    first_turn(lab, tokens)
    lab.drop_backfills()
    turn = later_turn(tokens)
    request, _ = revised(lab, turn)
    end(lab, request)
    evict(lab, request.block_hashes[2:])
    assert request.block_hashes[1] in lab.pool.cached, "the first approximate block is left"
    again, job = revised(lab, turn)
    assert len(job.copied) == (len(tokens) + len(ANSWER)) // BLOCK - 1, "all blocks of the first turn"
    end(lab, again)


def test_a_retry_of_a_request_that_was_aborted_during_its_blend_is_blended(make) -> None:
    """Earlier, the retry counted as a repetition of a blend whose blocks the engine should have: it was not blended."""
    lab = make(answers=(HEADER,), messages=(USER,), blocks=256, slots=64)
    learn(lab, DOC_A, DOC_B)
    request = lab.arrive("one", chat(DOC_A, DOC_B))
    lab.workers.held_back = True
    assert lab.admit(request)
    lab.step()
    lab.lose(request, "abort")
    lab.drop_backfills()
    assert lab.serve("retry", chat(DOC_A, DOC_B)).loaded


def test_a_preempted_blend_continues_no_other_one(lab: Lab) -> None:
    request = lab.arrive("one", chat(DOC_A, DOC_B))
    lab.wait(lambda: lab.admit(request))
    lab.load(request)
    lab.decode(request, [500, 501])
    lab.preempt(request)
    lab.wait(lambda: lab.admit(request))
    lab.compute(request, request.num_tokens - request.num_computed_tokens)
    assert "continued_tokens" not in lab.finish(request)
    assert lab.scheduler.counts["blends_continued"] == 0
    lab.drop_backfills()


def test_a_preempted_request_that_was_computed_goes_on_exactly(make) -> None:
    """In the middle of its answer it went on with the approximate blocks of another request."""
    lab = make(answers=(HEADER,), messages=(USER,), blocks=256, slots=32, settings={"load_policy": "always"})
    tokens = chat(DOC_A, DOC_B)
    request = lab.arrive("one", tokens)
    lab.wait(lambda: lab.admit(request) is not None or None)
    lab.compute(request, len(tokens))
    request.append([500])
    lab.decode(request, [501, 502, 503, 504, 505])
    lab.step()
    lose(lab.store, *lab.store.known_keys())
    learn(lab, DOC_A, DOC_B)
    lab.preempt(request)
    lab.pool.forget()
    lab.serve("other", other_question(600), output=[*ANSWER, 9])
    lab.drop_backfills()
    assert approximate(lab) == 1
    lab.wait(lambda: lab.admit(request) is not None or None)
    assert not lab.step().loads
    assert not state_of(lab, "one").salts
    lab.compute(request, request.num_tokens - request.num_computed_tokens)
    lab.finish(request)
    lab.drop_backfills()


def test_a_revision_whose_copies_do_not_fit_shares_the_blocks(lab: Lab) -> None:
    """The engine also takes the cached blocks before the copies, which are free until then. The load failed."""
    tokens = [*prompt(DOC_A, DOC_B, system=list(range(600, 660))), *HEADER]
    first_turn(lab, tokens)
    lab.drop_backfills()
    lab.settle()
    turn = later_turn(tokens)
    request = lab.arrive("second", turn)
    lab.look(request)
    assert state_of(lab, "second").revision is not None
    free = -(-len(turn) // BLOCK) + 4  # The engine admits the request: it needs this number of blocks, without copies.
    empty = [block for block in lab.pool.free if block.block_hash is None]
    held = empty[: len(lab.pool.free) - free]
    for block in held:
        lab.pool.free.remove(block)
        block.ref_cnt = 1
    lab.wait(lambda: lab.admit(request))
    lab.step()
    assert lab.scheduler.counts["failed_loads"] == 0
    lab.compute(request, request.num_tokens - request.num_computed_tokens)
    assert lab.finish(request)["continued_tokens"] > 0
    lab.pool.free_blocks(held)
    lab.drop_backfills()
