"""The planner: what of a prompt is taken from the store, decided from one snapshot alone."""

import copy
import itertools
from dataclasses import FrozenInstanceError, fields, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from storage_fakes import key_of, note_load

from lmc.blend.segments import Span
from lmc.engine.pieces import Piece
from lmc.engine.planner import DocumentMatch, Match, Plan, Planner, make_plan
from lmc.keys import RecordKind
from lmc.storage.cost_model import CostModel, LoadPolicy
from lmc.storage.places import MEMORY

N = 10  # tokens of a chunk
AUTO, ALWAYS = LoadPolicy.AUTO, LoadPolicy.ALWAYS


def run_of(*places, size=N):
    """Exact chunks of a prompt from its start on, one at each place; their keys are e0, e1, …"""
    return tuple(
        Piece.whole(RecordKind.PREFIX, key_of(f"e{i}"), size, size * i, size * i, place)
        for i, place in enumerate(places)
    )


def document(name, start, *places, last=N, exact=False, behind=0, learnable=True):
    """A document at `start` that was computed behind `behind` tokens; its keys are name0, name1, …

    Its last chunk has `last` tokens.
    """
    pieces = []
    for i, place in enumerate(places):
        tokens = last if i == len(places) - 1 else N
        key, at = key_of(f"{name}{i}"), start + N * i
        pieces.append(Piece.whole(RecordKind.DOCUMENT, key, tokens, at, behind + N * i, place, exact=exact))
    span = Span(start, pieces[-1].stop)
    return DocumentMatch(span=span, pieces=tuple(pieces), learnable=learnable)


def match(*documents, exact=(), prompt=100, **limits):
    return Match(**{"prompt": prompt, "exact_stop": prompt, "exact": tuple(exact), "documents": documents, **limits})


def where(pieces):
    """Key, position, tokens, tokens of the chunk that are left out before them, and original position."""
    return [(piece.key, piece.at, piece.tokens, piece.skip, piece.first) for piece in pieces]


def unknown(plan):
    return [document.span for document in plan.unknown]


def spans(pieces):
    return [(piece.at, piece.stop) for piece in pieces]


# -- the exact part ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("local", [0, 7])
def test_of_nothing_nothing_is_taken(local):
    given = match(local=local)
    assert make_plan(given) == Plan(match=given, reach=local, stop=local)


def test_the_run_from_the_start_is_taken_in_order():
    given = match(exact=run_of("host", "disk", "redis"))
    plan = make_plan(given)
    assert plan == Plan(match=given, exact=run_of("host", "disk", "redis"), reach=30, stop=30)
    assert (plan.pieces, plan.tokens, plan.approximate) == (plan.exact, 30, ())


def test_tokens_that_the_engine_has_itself_are_left_out():
    plan = make_plan(match(exact=run_of("host", "host", "host"), local=15))
    assert where(plan.exact) == [(key_of("e1"), 15, 5, 5, 15), (key_of("e2"), 20, 10, 0, 20)]
    assert (plan.reach, plan.stop, plan.tokens) == (30, 30, 15)


def test_a_run_that_the_engine_has_itself_brings_nothing():
    given = match(exact=run_of("host", "host"), local=20)
    assert make_plan(given) == Plan(match=given, reach=20, stop=20)


@pytest.mark.parametrize("change", [{"memory_only": True}, {"lost": frozenset({key_of("e0")})}])
def test_a_chunk_that_the_engine_has_itself_need_not_be_usable(change):
    """A chunk on a slow tier ended the run, though the engine had its tokens and the next chunks were in memory."""
    found = match(exact=run_of("disk", "host", "host"))
    assert spans(make_plan(replace(found, local=N, **change)).exact) == [(N, 2 * N), (2 * N, 3 * N)]


def test_nothing_is_taken_exactly_behind_the_exact_stop():
    plan = make_plan(match(exact=run_of("host", "host", "host"), exact_stop=14))
    assert where(plan.exact) == [(key_of("e0"), 0, 10, 0, 0), (key_of("e1"), 10, 4, 0, 10)]
    assert plan.reach == plan.stop == 14


def test_the_run_ends_before_a_chunk_that_did_not_come():
    plan = make_plan(match(exact=run_of("host", "disk", "host"), lost=frozenset({key_of("e1")})))
    assert spans(plan.exact) == [(0, 10)]
    assert plan.reach == 10


def test_a_run_ends_where_a_prompt_can_continue_if_the_last_state_did_not_come():
    first, inner, last = run_of("host", "host", "host")
    run = [first, replace(inner, ends=False), last]
    assert make_plan(match(exact=run)).reach == 3 * N
    assert make_plan(match(exact=run, lost=frozenset([last.key]))).reach == N
    assert make_plan(match(exact=run[1:], local=N, lost=frozenset([last.key]))).exact == ()


def test_without_loading_the_run_ends_before_the_first_chunk_on_a_tier():
    found = match(exact=run_of("host", "device", "disk", "host"))
    assert spans(make_plan(replace(found, memory_only=True)).exact) == [(0, 10), (10, 20)]
    assert make_plan(found).reach == 40


def test_a_document_at_the_start_is_exact_and_continues_the_run():
    """The run may end inside of one of the document's chunks, of which only the rest is taken."""
    found = match(document("a", 0, "host", "host", "host", exact=True), exact=run_of("host", "host", size=7))
    plan = make_plan(found)
    assert where(plan.exact) == [
        (key_of("e0"), 0, 7, 0, 0),
        (key_of("e1"), 7, 7, 0, 7),
        (key_of("a1"), 14, 6, 4, 14),
        (key_of("a2"), 20, 10, 0, 20),
    ]
    assert (plan.reach, plan.stop, plan.documents, plan.unknown) == (30, 30, (), ())


def test_a_document_at_the_start_needs_no_run_before_it():
    plan = make_plan(match(document("a", 0, "disk", "host", last=3, exact=True)))
    assert spans(plan.exact) == [(0, 10), (10, 13)]


def test_a_document_behind_the_tokens_that_it_was_learned_behind_continues_the_run():
    a = document("a", 4, "host", "host", exact=True, behind=4)
    plan = make_plan(match(a, exact=run_of("host", size=4)))
    assert where(plan.exact) == [
        (key_of("e0"), 0, 4, 0, 0),
        (key_of("a0"), 4, 10, 0, 4),
        (key_of("a1"), 14, 10, 0, 14),
    ]
    assert plan.reach == plan.stop == 24


def test_the_engine_s_own_tokens_may_stand_before_such_a_document():
    a = document("a", 4, "host", "host", exact=True, behind=4)
    plan = make_plan(match(a, local=4))
    assert spans(plan.exact) == [(4, 14), (14, 24)]
    assert spans(make_plan(match(a, local=16)).exact) == [(16, 24)]


def test_the_exact_part_ends_where_a_chunk_of_the_document_is_missing():
    """The chunk behind the gap is right for this prompt, but without other documents there is no blend to use it."""
    plan = make_plan(match(document("a", 0, "host", None, "host", exact=True)))
    assert spans(plan.pieces) == [(0, 10)]
    assert (plan.reach, plan.stop, plan.note) == (10, 10, "")
    assert unknown(plan) == [Span(0, 30)]


def test_an_exact_document_behind_a_gap_is_used_only_beside_others():
    a, b = document("a", 4, "host", exact=True, behind=4), document("b", 30, "host")
    assert make_plan(match(a)) == Plan(match=match(a))
    plan = make_plan(match(a, b))
    assert (spans(plan.exact), spans(plan.documents), spans(plan.approximate)) == ([], [(4, 14), (30, 40)], [(30, 40)])
    assert (plan.reach, plan.stop) == (0, 100)


def test_exact_documents_end_at_the_exact_stop_too():
    plan = make_plan(match(document("a", 0, "host", "host", exact=True), exact_stop=13))
    assert spans(plan.exact) == [(0, 10), (10, 13)]
    assert plan.documents == (), "what is behind it is no reason for a blend"


# -- documents behind it -------------------------------------------------------------------------------------------


def test_documents_are_taken_behind_the_exact_part():
    a, b = document("a", 25, "host", "disk", last=5), document("b", 60, "host")
    plan = make_plan(match(a, b, exact=run_of("host", "host")))
    assert spans(plan.exact) == [(0, 10), (10, 20)]
    assert plan.documents == plan.approximate == a.pieces + b.pieces
    assert (plan.reach, plan.tokens, plan.unknown, plan.note) == (20, 45, (), "")


def test_a_document_that_the_exact_part_covers_is_taken_only_behind_it():
    plan = make_plan(match(document("a", 5, "host", "host", "host"), exact=run_of("host", "host")))
    assert where(plan.documents) == [(key_of("a1"), 20, 5, 5, 15), (key_of("a2"), 25, 10, 0, 20)]
    assert plan.reach == 20


def test_a_document_that_the_engine_has_itself_is_not_taken():
    assert spans(make_plan(match(document("a", 5, "host", "host"), local=18)).documents) == [(18, 25)]
    given = match(document("a", 5, "host", "host"), local=25)
    assert make_plan(given) == Plan(match=given, reach=25, stop=25)


def test_no_document_is_taken_behind_the_prompt_s_last_but_one_token():
    found = match(document("a", 5, "host", "host"), document("b", 30, "host"))
    assert spans(make_plan(replace(found, prompt=19)).documents) == [(5, 15), (15, 18)]
    short = replace(found, prompt=6)
    assert make_plan(short) == Plan(match=short)


def test_a_blend_provides_the_whole_prompt_or_all_up_to_its_last_document():
    found = match(document("a", 5, "host"), document("b", 30, "host"), exact=run_of("host", size=3))
    assert make_plan(replace(found, whole_prompt=True)).stop == 100
    assert make_plan(replace(found, whole_prompt=False)).stop == 40
    assert make_plan(replace(found, whole_prompt=False, prompt=34)).stop == 33


def test_what_is_stored_of_a_document_is_used_and_the_document_is_to_be_learned():
    a, b = document("a", 5, "host", None, "disk", None), document("b", 60, "host")
    plan = make_plan(match(a, b))
    assert spans(plan.documents) == [(5, 15), (25, 35), (60, 70)]
    assert unknown(plan) == [Span(5, 45)]


def test_a_chunk_for_whose_positions_the_model_has_no_angles_is_not_taken():
    stored = document("a", 5, "host", "host", "host", behind=1)
    assert spans(make_plan(match(stored, positions=31)).documents) == [(5, 15), (15, 25), (25, 35)]
    assert spans(make_plan(match(stored, positions=30)).documents) == [(5, 15), (15, 25)]


def test_text_that_may_be_no_document_is_used_and_never_learned():
    plan = make_plan(match(document("a", 5, "host", None, learnable=False)))
    assert (spans(plan.documents), plan.unknown) == ([(5, 15)], ())


def test_a_document_of_which_nothing_is_stored_is_to_be_learned():
    given = match(document("a", 0, None, None, last=4), document("b", 20, None))
    assert make_plan(given) == Plan(match=given, unknown=given.documents)


def test_a_chunk_that_did_not_come_is_not_taken_again_and_its_document_is_to_be_learned():
    lost = frozenset({key_of("a1"), key_of("b0")})
    a, b = document("a", 0, "host", "host", exact=True), document("b", 30, "disk", "disk")
    plan = make_plan(match(a, b, lost=lost))
    assert (spans(plan.exact), spans(plan.documents)) == ([(0, 10)], [(40, 50)])
    assert plan.unknown == (a, b)


def test_without_loading_a_document_on_a_tier_is_not_taken_and_yet_known():
    found = match(document("a", 5, "host", "disk", "device"), document("b", 40, "redis"))
    plan = make_plan(replace(found, memory_only=True))
    assert (spans(plan.documents), plan.unknown) == ([(5, 15), (25, 35)], ())


# -- plans that are not what was asked for -------------------------------------------------------------------------


def test_too_few_tokens_of_documents_are_not_blended():
    found = match(document("a", 15, "host", "host", None), exact=run_of("host"))
    assert spans(make_plan(replace(found, min_tokens=20)).documents) == [(15, 25), (25, 35)]
    plan = make_plan(replace(found, min_tokens=21))
    assert plan.note == "20 tokens of stored documents are fewer than blend_min_tokens=21"
    assert (spans(plan.pieces), plan.stop, unknown(plan)) == ([(0, 10)], 10, [Span(15, 45)])


def test_only_tokens_that_are_used_and_that_a_blend_repairs_count():
    found = match(document("a", 4, "host", "host", exact=True, behind=4), document("b", 30, "host", "host"))
    assert make_plan(replace(found, min_tokens=21)).note.startswith("20 tokens")
    plan = make_plan(replace(found, min_tokens=20, local=31))  # The engine has one of the 20.
    assert (plan.documents, plan.stop, plan.note) == ((), 31, "")


@pytest.mark.parametrize("found", [match(), match(exact=run_of("host")), match(document("a", 0, "disk", exact=True))])
def test_a_prompt_without_approximate_documents_needs_no_note(found):
    plan = make_plan(replace(found, min_tokens=50, block_size=64, refused="blending is off"))
    assert plan.note == ""


def test_where_documents_are_refused_the_exact_part_is_taken_and_the_reason_is_given():
    a, b = document("a", 0, "host", exact=True), document("b", 20, "host", None)
    given = match(a, b, refused="blending is off", min_tokens=50)
    expected = Plan(match=given, exact=a.pieces, reach=10, stop=10, unknown=(b,), note="blending is off")
    assert make_plan(given) == expected


@pytest.mark.parametrize(
    ("at", "prompt", "blended"),
    [(31, 40, True), (32, 40, False), (36, 40, False), (32, 48, True), (46, 48, True), (48, 63, False), (48, 64, True)],
)
def test_approximate_kv_begins_in_a_block_that_the_prompt_fills(at, prompt, blended):
    plan = make_plan(match(document("a", at, "host", "host"), prompt=prompt, block_size=16))
    assert bool(plan.documents) == blended
    assert ("begin in the prompt's last block" in plan.note) != blended


def test_what_counts_is_where_approximate_kv_begins_behind_what_is_exact():
    block = {"prompt": 40, "block_size": 16}
    a, b = document("a", 4, "host", exact=True, behind=4), document("b", 26, "host", last=9)
    assert spans(make_plan(match(a, b, **block)).approximate) == [(26, 35)]
    assert "last block" in make_plan(match(a, b, local=32, **block)).note
    late = document("b", 33, "host", last=5)
    assert "last block" in make_plan(match(a, late, **block)).note, "the exact document is not what counts"


# -- loading or computing ------------------------------------------------------------------------------------------


class Listening(CostModel):
    """A cost model that keeps what it was asked, with a clock that stands still."""

    def __init__(self):
        super().__init__(lambda: 100.0)
        self.offers = []

    def choose(self, offer, policy):
        self.offers.append(offer)
        return super().choose(offer, policy)


def measured(byte):
    """A disk of which a byte takes so many seconds, and a model of which a token takes one."""
    cost = Listening()
    for _ in range(3):
        note_load(cost, "disk", records=1, opening=0.0, bytes=1000, reading=1000 * byte)
        cost.computed(100, 100.0, 100)
    return cost


def size_of(piece):
    return 100 * piece.stored


SLOW, FAST = 1.0, 0.0001
MIXED = match(document("b", 40, "disk", "host"), exact=run_of("host", "disk", "host"))


@pytest.mark.parametrize(("cost", "policy"), [(measured(FAST), AUTO), (Listening(), AUTO), (measured(SLOW), ALWAYS)])
def test_what_is_faster_loaded_or_not_known_or_always_to_be_loaded_is_in_the_plan(cost, policy):
    assert Planner(size_of, cost, policy).choose(MIXED) == make_plan(MIXED)


def test_what_is_faster_computed_is_left_out_and_the_plan_says_so():
    plan = Planner(size_of, measured(SLOW), AUTO).choose(MIXED)
    assert replace(plan, skipped=0, slow=(), note="") == make_plan(replace(MIXED, memory_only=True))
    assert [piece.place for piece in plan.slow] == ["disk", "disk"]
    assert (spans(plan.exact), spans(plan.documents)) == ([(0, 10)], [(50, 60)])
    assert plan.skipped == 30
    assert plan.note.startswith("stored tokens were computed, in about 30 s: loading them would take about 2e+03 s")


def test_a_plan_from_memory_that_takes_more_skips_nothing():
    """With the chunks on the tier too few tokens of documents were left for a blend, and `skipped` became negative."""
    documents = document("a", 0, *["host"] * 5), document("b", 50, "host", "host")
    found = match(*documents, exact=run_of(*["disk"] * 6))
    plan = Planner(size_of, measured(SLOW), AUTO).choose(replace(found, min_tokens=16))
    assert (plan.tokens, plan.skipped) == (70, 0)


def test_a_plan_from_memory_alone_is_the_whole_plan_whatever_loading_takes():
    found = match(document("a", 30, "device"), exact=run_of("host"))
    assert Planner(size_of, measured(SLOW), AUTO).choose(found) == make_plan(found)


def test_every_reason_is_given():
    """Without its chunks on tiers the plan may have too few tokens for a blend."""
    plan = Planner(size_of, measured(SLOW), AUTO).choose(replace(MIXED, min_tokens=11))
    assert (spans(plan.pieces), plan.skipped) == ([(0, 10)], 40)
    few, slow = plan.note.split("; ")
    assert few == "10 tokens of stored documents are fewer than blend_min_tokens=11"
    assert slow.startswith("stored tokens were computed")


def test_what_loading_would_bring_is_offered():
    """An exact chunk in memory is of no use without those before it; a document's chunk in memory is."""
    cost = measured(FAST)
    Planner(size_of, cost, AUTO).choose(replace(MIXED, ratio=0.15))
    (offer,) = cost.offers
    assert offer.records == [("disk", 1000), ("disk", 1000)]
    assert (offer.exact, offer.reused, offer.ratio, offer.prompt) == (20, 10, 0.15, 100)


def test_only_tokens_that_are_used_are_offered_but_whole_records():
    cost = measured(FAST)
    found = match(document("b", 40, "redis", last=8), exact=run_of("disk", "disk"))
    Planner(size_of, cost, AUTO).choose(replace(found, local=15, prompt=44))
    (offer,) = cost.offers
    assert offer.records == [("disk", 1000), ("redis", 800)]
    assert (offer.exact, offer.reused) == (5, 3)


def test_a_record_that_is_used_twice_is_loaded_once():
    cost = measured(FAST)
    plan = Planner(size_of, cost, AUTO).choose(match(document("a", 5, "disk"), document("a", 45, "disk")))
    assert spans(plan.documents) == [(5, 15), (45, 55)]
    (offer,) = cost.offers
    assert (offer.records, offer.reused) == ([("disk", 1000)], 20)


def test_a_match_lists_what_is_stored():
    found = match(document("a", 5, "disk", None), document("b", 45, None), exact=run_of("host"))
    assert [piece.key for piece in found.pieces] == [key_of("e0"), key_of("a0")]


# -- every plan ----------------------------------------------------------------------------------------------------

places = st.sampled_from(["device", "host", "disk", "redis", None])


@st.composite
def snapshots(draw):
    """A match: a run, and documents in order, of which some are exact and chunks of some are missing."""
    local = draw(st.integers(0, 25))
    exact, at = [], 0
    for i in range(draw(st.integers(0, 5))):
        tokens = draw(st.integers(1, N))
        place = draw(places.filter(bool))
        exact.append(Piece.whole(RecordKind.PREFIX, key_of(f"e{i}"), tokens, at, at, place))
        at += tokens
    documents, at = [], 0
    for name in "abcd"[: draw(st.integers(0, 4))]:
        at += draw(st.integers(0, 12))
        chunks = draw(st.lists(places, min_size=1, max_size=4))
        one = {"last": draw(st.integers(1, N)), "exact": draw(st.booleans()), "learnable": draw(st.booleans())}
        documents.append(document(name, at, *chunks, behind=draw(st.integers(0, 3)), **one))
        at = documents[-1].span.stop
    prompt = draw(st.integers(1, max(at, 40) + 10))
    found = Match(
        prompt=prompt, exact_stop=draw(st.integers(0, prompt)), exact=tuple(exact), documents=tuple(documents)
    )
    keys = [piece.key for piece in found.pieces]
    return replace(
        found,
        local=local,
        min_tokens=draw(st.sampled_from([0, 0, 5, 30])),
        whole_prompt=draw(st.booleans()),
        block_size=draw(st.sampled_from([1, 4, 16])),
        refused=draw(st.sampled_from(["", "", "", "off"])),
        memory_only=draw(st.booleans()),
        lost=draw(st.frozensets(st.sampled_from(keys), max_size=2)) if keys else frozenset(),
    )


def usable(piece, found):
    stored = piece.place in MEMORY if found.memory_only else piece.place is not None
    return stored and piece.key not in found.lost


def reach_of(found):
    """How far exact KV goes, token by token."""
    leading = []
    for piece in (one for one in found.exact if one.stop > found.local):
        if not usable(piece, found):
            break
        leading.append(piece)
    leading += [p for one in found.documents for p in one.pieces if p.exact and usable(p, found)]
    reach = found.local
    while reach < found.exact_stop and any(piece.at <= reach < piece.stop for piece in leading):
        reach += 1
    return reach


@settings(max_examples=200, deadline=None)
@given(snapshots())
def test_pieces_of_a_plan_lie_one_behind_the_other_where_they_may(found):
    plan = make_plan(found)
    pieces = plan.pieces
    assert all(one.stop <= other.at for one, other in itertools.pairwise(pieces))
    assert all(piece.tokens > 0 and piece.at >= found.local for piece in pieces)
    assert all(piece.stop <= found.exact_stop for piece in plan.exact)
    assert all(plan.reach <= piece.at and piece.stop < found.prompt for piece in plan.documents)
    borders = [found.local, *(piece.stop for piece in plan.exact)]
    assert [piece.at for piece in plan.exact] == borders[:-1]
    assert plan.reach == borders[-1]
    assert all(piece.exact for piece in plan.exact)
    assert plan.stop == plan.reach or plan.documents


@settings(max_examples=200, deadline=None)
@given(snapshots())
def test_each_piece_is_a_part_of_a_stored_chunk_that_may_be_used(found):
    everything = [*found.exact, *(piece for one in found.documents for piece in one.pieces)]
    for piece in make_plan(found).pieces:
        (source,) = [one for one in everything if one.key == piece.key]
        assert usable(source, found)
        moved = piece.at - source.at
        assert piece == replace(source, at=piece.at, tokens=piece.tokens, skip=moved, first=source.first + moved)
        assert moved >= 0
        assert piece.stop <= source.stop


@settings(max_examples=200, deadline=None)
@given(snapshots())
def test_a_plan_uses_everything_that_is_stored_or_says_why_not(found):
    plan = make_plan(found)
    assert plan.reach == reach_of(found)
    pieces = [piece for one in found.documents for piece in one.pieces if usable(piece, found)]
    room = range(plan.reach, max(plan.reach, found.prompt - 1))
    wanted = {at for piece in pieces for at in range(piece.at, piece.stop) if at in room}
    repaired = {at for piece in pieces if not piece.exact for at in range(piece.at, piece.stop) if at in room}
    taken = {at for piece in plan.documents for at in range(piece.at, piece.stop)}
    few = len(repaired) < found.min_tokens
    fills = bool(repaired) and (min(repaired) // found.block_size + 1) * found.block_size <= found.prompt
    assert taken == (wanted if fills and not few and not found.refused else set())
    if repaired:
        few_at_all = sum(piece.tokens for piece in pieces if not piece.exact) < found.min_tokens
        assert bool(plan.note) == (bool(found.refused) or few_at_all or not (few or fills))


@settings(max_examples=200, deadline=None)
@given(snapshots(), st.sampled_from([SLOW, FAST]))
def test_the_same_snapshot_gives_the_same_plan_and_is_not_changed(found, byte):
    before = copy.deepcopy(found)
    plans = [Planner(size_of, measured(byte), AUTO).choose(found) for _ in range(2)]
    assert plans[0] == plans[1]
    assert found == before


def test_nothing_of_a_plan_can_be_changed():
    found = match(document("a", 5, "host"), exact=run_of("host"))
    for one in (found, found.documents[0], found.exact[0], make_plan(found)):
        for field in fields(one):
            with pytest.raises(FrozenInstanceError):
                setattr(one, field.name, None)
            assert not isinstance(getattr(one, field.name), list | set | dict)


# -- a blend against prefill ----------------------------------------------------------------------------------------


def ten_bytes_each(piece: Piece) -> int:
    return 10 * piece.tokens


def test_what_a_blend_computes_counts_the_question_twice():
    a, b = document("a", 20, "host", "host"), document("b", 45, "disk")
    found = match(a, b, ratio=0.5, question_rows=12)
    plan = make_plan(found)
    reused = sum(piece.tokens for piece in plan.approximate)
    offer = Planner(ten_bytes_each, CostModel(), AUTO).blend_offer(plan)
    assert (offer.rows, offer.tokens, offer.length) == (100 - reused + reused / 2 + 12, 100, 100)
    assert offer.records == [("disk", 10 * N)]
    assert (
        Planner(ten_bytes_each, CostModel(), AUTO).blend_offer(make_plan(replace(found, question_rows=None))) is None
    ), "it is not asked"


def test_the_tokens_that_the_engine_has_are_not_prefilled():
    a = document("a", 20, "host", "host")
    offer = Planner(ten_bytes_each, CostModel(), AUTO).blend_offer(
        make_plan(match(a, local=24, ratio=0.5, question_rows=12))
    )
    assert (offer.tokens, offer.length) == (76, 124)


def test_without_a_blend_that_would_be_slow_the_exact_part_is_left_and_a_note_says_why():
    cost = CostModel()
    found = match(document("a", 20, "host", "host"), exact=run_of("host"), ratio=1.0, question_rows=12)
    plan = Planner(ten_bytes_each, cost, AUTO).choose(found)
    assert (plan.exact, plan.documents, plan.skipped) == (run_of("host"), (), 2 * N)
    assert plan.note == plan.match.refused
    assert plan.note.startswith("stored documents were computed: a blend would compute ")
    assert Planner(ten_bytes_each, cost, ALWAYS).choose(found).documents
    assert Planner(ten_bytes_each, cost, AUTO).choose(replace(found, question_rows=None)).documents, "it is not asked"
