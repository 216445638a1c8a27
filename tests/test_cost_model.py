"""What loading and computing are expected to take, and the choice between them."""

import itertools
import threading

import pytest
from storage_fakes import (
    PART_BYTES,
    PARTS,
    Clock,
    DictTier,
    computing,
    eventually,
    get,
    key_of,
    note_load,
    opening,
    put,
    reading,
)
from tier_wrappers import Delayed, Faulty
from vllm_fakes import Lab

from lmc.connectors.vllm.scheduler.prefill_pace import EngineStep, PrefillPace
from lmc.errors import ChunkLost
from lmc.storage.cost_model import (
    BLEND_TRIAL_CHOICES,
    ENOUGH,
    LEAST_TOKENS,
    MAX_SURVEYS,
    SURVEY_EVERY,
    TRIAL_CHOICES,
    TRIAL_SECONDS,
    BlendOffer,
    Choice,
    CostModel,
    LoadPolicy,
    LoadTiming,
    Offer,
    Rate,
    Spent,
)
from lmc.storage.memory.slab import Slab
from lmc.storage.store import Store

AUTO = LoadPolicy.AUTO


def wanted(tier: str = "disk", *, records: int = 4, bytes: int = 4000, exact: int = 100, **more: object) -> Offer:
    values: dict = {"reused": 0, "ratio": 0.0, "prompt": 100, **more}
    return Offer(records=[(tier, bytes // records)] * records, exact=exact, **values)


def measured(byte: float, *, record: float = 0.0, token: float = 0.01, clock: Clock | None = None) -> CostModel:
    """CostModel that have seen three loads of a disk and three prefills of 100 tokens, all alike."""
    cost = CostModel(clock or Clock(100.0))
    for _ in range(3):
        load(cost, byte, record=record)
        cost.computed(100, 100 * token, 100)
    return cost


def load(cost: CostModel, byte: float, *, tier: str = "disk", record: float = 0.0, bytes: int = 1000) -> None:
    note_load(cost, tier, records=2, opening=2 * record, bytes=bytes, reading=byte * bytes)


def loads(cost: CostModel, offer: Offer | None = None) -> bool:
    return cost.choose(offer or wanted(), AUTO).load


# -- a rate ------------------------------------------------------------------------------------------------------------


def test_nothing_is_estimated_before_three_observations() -> None:
    rate = Rate()
    for _ in range(2):
        rate.add(4.0, 2)
        assert rate.value is None
    rate.add(4.0, 2)
    assert rate.value == 2.0


@pytest.mark.parametrize("outlier", [1000.0, 0.001])
@pytest.mark.parametrize("place", range(6))
def test_one_outlier_changes_nothing(outlier: float, place: int) -> None:
    rate = Rate()
    for i in range(6):
        rate.add(outlier if i == place else 2.0, 1)
    assert rate.value == pytest.approx(2.0)


def test_a_change_is_followed_within_a_few_observations() -> None:
    rate = Rate()
    for _ in range(20):
        rate.add(1.0, 1)
    found = []
    for _ in range(8):
        rate.add(10.0, 1)
        found.append(rate.value)
    assert found[0] == pytest.approx(1.0)
    assert found == sorted(found)
    assert found[-1] == pytest.approx(10.0, rel=0.1)


def test_large_observations_count_for_more_than_small_ones() -> None:
    """A record of a few kilobytes takes a read's latency: a byte of it costs a hundred times what it costs in bulk."""
    rate = Rate()
    for _ in range(4):
        rate.add(1.0, 1_000_000)
    for _ in range(4):
        rate.add(0.01, 100)
    assert rate.value == pytest.approx(1e-6, rel=0.05)


def test_an_optimistic_rate_is_that_of_the_last_time_if_it_was_faster() -> None:
    rate = Rate()
    for _ in range(5):
        rate.add(10.0, 1)
    rate.add(0.1, 1)
    assert rate.value == pytest.approx(10.0)
    assert rate.optimistic == pytest.approx(0.1)


# -- the choice --------------------------------------------------------------------------------------------------------


def test_what_was_not_measured_is_loaded() -> None:
    cost = CostModel(Clock(100.0))
    assert cost.choose(wanted(), AUTO) == Choice(load=True)
    for _ in range(3):
        load(cost, 1.0)
    assert loads(cost), "the time of computing is unknown"
    for _ in range(2):
        cost.computed(100, 0.001, 100)
        assert loads(cost)
    cost.computed(100, 0.001, 100)
    assert not loads(cost)
    assert loads(cost, wanted("redis")), "this tier was never read"


def test_the_first_load_of_a_tier_is_a_guess_which_counts_if_it_is_clearly_slower() -> None:
    """Until then, each of three requests waited for a tier of 10 MB/s longer than for computing."""
    for byte, taken in ((0.00037, True), (0.00038, False)):
        cost = CostModel(Clock(100.0))
        for _ in range(3):
            cost.computed(100, 1.0, 100)
        load(cost, byte)
        assert loads(cost) == taken
    load(cost, 0.0001)
    assert loads(cost), "the first one had to connect"


def test_what_is_faster_loaded_is_loaded_and_what_is_faster_computed_is_not() -> None:
    assert measured(0.0001).choose(wanted(), AUTO) == Choice(
        load=True, loading=pytest.approx(0.4), computing=pytest.approx(1.0)
    )
    choice = measured(0.001).choose(wanted(), AUTO)
    assert choice == Choice(load=False, loading=pytest.approx(4.0), computing=pytest.approx(1.0))
    assert "about 1 s: loading them would take about 4 s" in choice.why


def test_what_takes_as_long_either_way_is_loaded() -> None:
    assert loads(measured(0.00024))
    assert not loads(measured(0.00026))


def test_records_cost_by_themselves() -> None:
    cost = measured(0.0001, record=0.2)
    assert not loads(cost, wanted(records=4))
    assert loads(cost, wanted(records=2))


def test_tiers_of_one_request_add_up() -> None:
    cost = measured(0.0001)
    for _ in range(3):
        load(cost, 0.001, tier="redis")
    both = Offer(records=[("disk", 4000), ("redis", 500)], exact=100, reused=0, ratio=0.0, prompt=100)
    assert cost.choose(both, AUTO).loading == pytest.approx(0.9)


def test_a_blend_spares_what_it_does_not_compute_anew() -> None:
    offer = wanted(exact=10, reused=200, ratio=0.15)
    assert offer.saved == pytest.approx(10 + 170)
    assert measured(0.0001).choose(offer, AUTO).computing == pytest.approx(1.8)
    assert not loads(measured(0.0001), wanted(exact=0, reused=100, ratio=1.0)), "a load that spares nothing"


def test_the_cost_of_a_token_is_interpolated_between_the_lengths_of_measured_prompts() -> None:
    """With one pace from 2048 to 4095 tokens, that of long prompts made blends of shorter ones look fast."""
    cost = CostModel(Clock(100.0))
    for length, token in ((40, 0.01), (600, 0.02), (5000, 0.1)):
        for _ in range(3):
            cost.computed(length, length * token, length)
            load(cost, 1.0)
    found = {n: cost.choose(wanted(prompt=n, exact=1), AUTO).computing for n in (10, 40, 500, 600, 1023, 4000, 90000)}
    assert found == {
        10: pytest.approx(0.01),
        40: pytest.approx(0.01),
        500: pytest.approx(0.01 + 0.01 * 460 / 560),
        600: pytest.approx(0.02),
        1023: pytest.approx(0.02 + 0.08 * 423 / 4400),
        4000: pytest.approx(0.02 + 0.08 * 3400 / 4400),
        90000: pytest.approx(0.1),
    }


def test_computing_a_few_tokens_says_nothing() -> None:
    cost = measured(0.001)
    for _ in range(9):
        cost.computed(5, 100.0, 100)
    assert cost.choose(wanted(), AUTO).computing == pytest.approx(1.0)


def test_the_policy_always_loads_from_a_slow_tier() -> None:
    slow = measured(1.0)
    for _ in range(3):
        assert slow.choose(wanted(), LoadPolicy.ALWAYS).load
    nothing = Offer(records=[], exact=0, reused=0, ratio=0.0, prompt=10)
    assert measured(1.0).choose(nothing, AUTO).load


# -- trials ------------------------------------------------------------------------------------------------------------


def test_a_slow_tier_is_tried_after_so_many_choices_and_so_many_seconds() -> None:
    assert (TRIAL_CHOICES, TRIAL_SECONDS) == (8, 10.0)
    clock = Clock(100.0)
    cost = measured(1.0, clock=clock)
    assert [loads(cost) for _ in range(20)] == [False] * 20, "however many requests come in a moment"
    clock.now += 9.9
    assert not loads(cost)
    clock.now += 0.1
    assert [loads(cost) for _ in range(3)] == [True, False, False], "one load, and the next count begins"
    clock.now += 1000
    assert [loads(cost) for _ in range(15)] == [False] * 14 + [True], "however long ago that was, after twice as many"


def test_a_tier_that_stays_slow_is_tried_less_and_less_often_and_one_that_was_fast_as_often_as_at_first() -> None:
    clock = Clock(100.0)
    cost, choices = measured(1.0, clock=clock), []
    for _ in range(1000):
        clock.now += 10
        choices.append(loads(cost))
    trials = [at for at, choice in enumerate(choices) if choice]
    assert [later - at for at, later in itertools.pairwise(trials)] == [17, 33, 65, 129, 257, 257]
    load(cost, 0.0001)
    assert loads(cost)
    for _ in range(3):
        load(cost, 1.0)
    assert [loads(cost) for _ in range(8)] == [False] * 8
    clock.now += 10
    assert loads(cost)


def test_a_tier_that_is_fast_again_is_found_by_one_trial() -> None:
    clock = Clock(100.0)
    cost = measured(1.0, clock=clock)
    for _ in range(20):
        load(cost, 1.0)
        assert not loads(cost)
    clock.now += 10
    assert loads(cost)
    load(cost, 0.0001)
    for _ in range(20):
        assert loads(cost)
        load(cost, 0.0001)
    assert cost.choose(wanted(), AUTO).loading == pytest.approx(0.4, rel=0.1)


def test_a_trial_that_happened_to_be_fast_is_followed_by_one_more_and_no_others() -> None:
    clock = Clock(100.0)
    cost = measured(1.0, clock=clock)
    load(cost, 0.0001)
    assert loads(cost)
    load(cost, 1.0)
    assert not loads(cost)


def test_tiers_are_tried_by_themselves() -> None:
    clock = Clock(100.0)
    cost = measured(1.0, clock=clock)
    for _ in range(3):
        load(cost, 1.0, tier="redis")
    for _ in range(8):
        assert not loads(cost)
    clock.now += 10
    assert not loads(cost, wanted("redis"))
    assert loads(cost)
    assert not loads(cost, wanted("redis"))


# -- what a batch took -------------------------------------------------------------------------------------------------


def seen(cost: CostModel, tier: str) -> tuple[float, float]:
    """The newest seconds per record and per byte."""
    return opening(cost)[tier].newest, reading(cost)[tier].newest


def took(spent: Spent, tier: str, seconds: float, bytes: int) -> None:
    spent[tier, "reading"], spent[tier, "bytes"] = seconds, bytes


def test_a_batch_takes_from_its_first_thread_s_begin_to_its_last_one_s_end() -> None:
    clock = Clock(100.0)
    cost = CostModel(clock)
    batch = LoadTiming(cost, 2)
    one = batch.begin()
    clock.now += 1
    two = batch.begin()
    for mine in (one, two):
        took(mine, "disk", 4.0, 500)
        mine["disk", "records"], mine["disk", "opening"] = 1, 1.0
    clock.now += 5
    batch.end(one)
    assert not reading(cost)
    clock.now += 4
    batch.end(two)
    assert seen(cost, "disk") == (pytest.approx(1.0), pytest.approx(0.008))  # 10 s: a fifth of them opening two


def test_the_time_of_a_batch_is_shared_out_to_its_tiers() -> None:
    clock = Clock(100.0)
    cost = CostModel(clock)
    batch = LoadTiming(cost, 1)
    mine = batch.begin()
    took(mine, "disk", 1.0, 100)
    took(mine, "redis", 3.0, 100)
    clock.now += 8
    batch.end(mine)
    assert (reading(cost)["disk"].newest, reading(cost)["redis"].newest) == (0.02, 0.06)


def test_a_batch_that_read_nothing_says_nothing() -> None:
    cost = CostModel(Clock(100.0))
    batch = LoadTiming(cost, 2)
    batch.end(batch.begin())
    batch.end(batch.begin())
    assert not reading(cost)
    assert not opening(cost)


def store_over(tier: object) -> Store:
    slab = Slab.of_size(4.5 * PARTS * PART_BYTES, PARTS, PART_BYTES)
    return Store(slab, [tier])  # type: ignore[list-item]


def test_a_store_measures_its_loads() -> None:
    """Two threads, four records: what took one thread 0.12 s takes both together half of that, or more on a busy
    machine.
    """
    tier = DictTier()
    filling = store_over(tier)
    for i in range(4):
        put(filling, key_of(i))
    filling.close()
    store = store_over(Delayed(tier, per_part=0.01))
    cost = store.cost
    with store.pinned([key_of(i) for i in range(4)]) as pins:
        for pin in pins:
            assert pin is not None
            store.part(pin, PARTS - 1)
    eventually(lambda: reading(cost)["dict"].newest)
    batch_seconds = reading(cost)["dict"].newest * 4 * PARTS * PART_BYTES
    assert batch_seconds >= 2 * PARTS * 0.01 * 0.99
    store.close()


def test_a_tier_that_fails_is_no_measure_of_its_speed() -> None:
    tier = DictTier()
    filling = store_over(tier)
    put(filling, key_of(1))
    filling.close()
    store = store_over(Faulty(tier, lambda verb, key: OSError("gone") if verb == "read" else None))
    with pytest.raises(ChunkLost):
        get(store, key_of(1))
    eventually(lambda: opening(store.cost)["dict"].newest)
    assert reading(store.cost)["dict"].value is None
    store.close()


def test_any_thread_may_measure_and_choose() -> None:
    cost = CostModel()

    def work() -> None:
        for _ in range(300):
            load(cost, 0.5)
            cost.computed(100, 1.0, 100)
            cost.choose(wanted(), AUTO)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    choice = cost.choose(wanted(), LoadPolicy("auto"))
    assert (choice.loading, choice.computing) == (pytest.approx(2000.0), pytest.approx(1.0))


# -- the engine's own prefilling ---------------------------------------------------------------------------------------


def steps(*given: tuple[float, int, int], alone: bool = True, cached: int = 0) -> dict[int, float]:
    """Seconds per token by power of two, from steps of one request: (when, tokens of a prompt, tokens decoded).

    Its first `cached` tokens are in the engine's cache.
    """
    cost, position = CostModel(Clock(100.0)), cached
    pace = PrefillPace(cost)
    for at, prompts, decoded in given:
        pace.add(
            EngineStep(
                at=at,
                alone=alone,
                requests=frozenset({"one"}),
                tokens=prompts + decoded,
                prompts=prompts,
                reach=prompts * (2 * position + prompts),
            )
        )
        position += prompts
    return {power: rate.newest for power, rate in computing(cost).items()}


def test_full_steps_one_after_the_other_are_measured_whether_planned_ahead_or_not() -> None:
    planned_after = [(0, 1000, 0), (1, 1000, 0), (2, 1000, 0), (3, 1000, 0)]
    planned_ahead = [(0, 1000, 0), (0.001, 1000, 0), (1, 1000, 0), (2, 1000, 0)]
    for given in (planned_after, planned_ahead):
        assert list(steps(*given).values()) == [pytest.approx(0.001, rel=0.01)] * 2


def test_a_prompt_alone_is_measured_whether_planned_ahead_or_not() -> None:
    assert steps((0, 1000, 0), (1, 0, 1), (1.02, 0, 1)) == {10: pytest.approx(0.00102)}
    assert steps((0, 1000, 0), (0.001, 0, 1), (1, 0, 1)) == {10: pytest.approx(0.001)}


@pytest.mark.parametrize(
    "given",
    [
        [(0, 1000, 0), (1, 0, 1)],  # and then nobody knows for how long there was nothing to do
        [(0, 500, 500), (1, 500, 500), (2, 500, 500)],
        [(0, 1000, 0), (1, 500, 0), (2, 500, 0)],
        [(0, 0, 1), (1, 0, 1), (2, 0, 1)],
        [(0, 0, 0), (1, 0, 0), (2, 0, 0)],
    ],
)
def test_steps_that_could_mean_something_else_are_no_measure(given: list[tuple[float, int, int]]) -> None:
    assert steps(*given) == {}


def test_few_tokens_after_a_cached_prompt_are_no_measure_of_long_prompts() -> None:
    """Few tokens are mostly fixed cost. Earlier, prefill of a conversation's length looked three times as slow."""
    one_turn = (0, 100, 0), (1, 0, 1), (1.01, 0, 1)
    assert steps(*one_turn, cached=1000) == {}
    assert steps(*one_turn, cached=101) == {}
    assert list(steps(*one_turn, cached=100)) == [(100 + 200).bit_length()]


def test_steps_beside_our_own_computing_are_no_measure() -> None:
    assert steps((0, 1000, 0), (1, 1000, 0), (2, 1000, 0), alone=False) == {}


def test_a_step_deep_in_a_prompt_is_filed_under_the_length_that_costs_as_much() -> None:
    """Tokens 2000 to 3000 have 2500 before them on average: as many as those of a prompt of 5000."""
    found = steps(*[(float(i), 1000, 0) for i in range(5)])
    assert set(found) == {n.bit_length() for n in (3000, 5000, 7000)}


def test_time_in_which_the_engine_idled_is_no_measure() -> None:
    cost = CostModel(Clock(100.0))
    pace = PrefillPace(cost)
    for at, name in ((0, "one"), (1, "one"), (500, "two"), (501, "two")):
        tokens = 1000 if at in (0, 500) else 1
        prompts = tokens if tokens > 1 else 0
        pace.add(
            EngineStep(
                at=at, alone=True, requests=frozenset({name}), tokens=tokens, prompts=prompts, reach=prompts * prompts
            )
        )
    assert not computing(cost)


def test_the_scheduler_s_steps_are_watched() -> None:
    lab = Lab(blocks=600, settings={"enable_blending": False}, blends=False)
    request = lab.arrive("one", list(range(1000, 2600)))
    lab.admit(request)
    for lab.now in (0.0, 1.0, 2.0, 3.0):
        lab.compute(request, 400)
    lab.now = 4.0
    lab.decode(request, [1, 2])
    rates = computing(lab.store.cost)
    assert {rate.newest for rate in rates.values()} >= {1 / 400}
    lab.finish(request)
    lab.check()
    lab.scheduler.close()


# -- blends against prefill ------------------------------------------------------------------------------------------


def blend_of(rows: float, tokens: int = 1000, length: int = 1000, **more: object) -> BlendOffer:
    return BlendOffer(rows=rows, tokens=tokens, length=length, **more)


def weighed(*, prefill: float = 1.0, blend: float | None = None, clock: Clock | None = None) -> CostModel:
    """Prefill of 1000 tokens took `prefill` seconds three times, a blend of 200 rows took `blend`."""
    cost = CostModel(clock or Clock(100.0))
    for _ in range(3):
        cost.computed(1000, prefill, 1000)
        if blend is not None:
            cost.blended(blend_of(200), blend)
    return cost


def is_blended(cost: CostModel, offer: BlendOffer, policy: LoadPolicy = AUTO) -> bool:
    return not cost.against_blend(offer, policy)


def test_a_blend_is_made_if_it_was_faster_and_left_out_if_it_was_slower() -> None:
    assert is_blended(weighed(blend=0.9), blend_of(200))
    for blend in (0.95, 1.1):  # Saving little is not worth an approximation.
        cost = weighed(blend=blend)
        why = f"prefill takes about 1 s, and a blend about {blend} s"
        assert cost.against_blend(blend_of(200), AUTO) == why
    assert is_blended(cost, blend_of(200), LoadPolicy.ALWAYS)


def test_a_blend_that_computes_as_much_as_prefill_is_not_made_even_where_nothing_was_measured() -> None:
    """As long instructions after the last document, which go through the layers twice."""
    cost = CostModel(Clock(100.0))
    assert is_blended(cost, blend_of(750))
    assert cost.against_blend(blend_of(950), AUTO) == "a blend would compute 950 tokens, and prefill computes 1000"


@pytest.mark.parametrize("measured", [0, ENOUGH])
def test_a_size_whose_blends_compute_nearly_as_much_as_prefill_is_measured_now_and_then(measured: int) -> None:
    cost = CostModel(Clock(100.0))
    for _ in range(measured):
        cost.computed(1000, 1.0, 1000)
    why = "a blend would compute 800 of 1000 tokens, which is probably not faster"
    made = [cost.against_blend(blend_of(800), AUTO) for _ in range(2 * SURVEY_EVERY)]
    assert made == [*[why] * (SURVEY_EVERY - 1), ""] * 2
    assert is_blended(cost, blend_of(740))
    for _ in range(ENOUGH):
        cost.computed(1000, 1.0, 1000)
        cost.blended(blend_of(800), 0.5)
    assert is_blended(cost, blend_of(800))


def test_a_blend_after_a_cached_prefix_is_compared_with_prefills_after_cached_prefixes() -> None:
    """Attention to a long prefix was counted as in whole prompts, so that an agent's turns were not blended."""
    turn, cost = blend_of(150, tokens=240, length=2 * 4500 - 240), CostModel(Clock(100.0))
    for _ in range(ENOUGH):
        cost.computed(4000, 16.0, 4000)
        cost.blended(turn, 1.2)
    assert cost.against_blend(turn, AUTO) == "prefill takes about 0.96 s, and a blend about 1.2 s"
    for _ in range(ENOUGH):
        cost.continued(LEAST_TOKENS - 1, 60.0, turn.length)
        cost.continued(250, 2.0, turn.length)
    assert is_blended(cost, turn)
    assert cost.in_prefill_tokens(turn) == pytest.approx(1.2 / 0.008)
    whole = blend_of(700, tokens=4380, length=4380)
    for _ in range(ENOUGH):
        cost.blended(whole, 17.0)
    assert cost.against_blend(whole, AUTO) == "prefill takes about 17.5 s, and a blend about 17 s", "as before"
    assert cost.prefill_pace() == pytest.approx(0.004)


def test_the_pace_of_prefill_is_that_of_short_prompts() -> None:
    cost = CostModel(Clock(100.0))
    assert cost.prefill_pace() is None
    for length, pace in ((8000, 0.004), (500, 0.001)):
        for _ in range(ENOUGH):
            cost.computed(length, pace * length, length)
    assert cost.prefill_pace() == pytest.approx(0.001)


def test_what_the_engine_has_itself_counts() -> None:
    """Ten tokens are left to prefill: no blend is as fast."""
    assert not is_blended(weighed(blend=0.1), blend_of(10, tokens=10))


def test_until_prefill_was_measured_one_of_several_prompts_is_computed() -> None:
    cost = CostModel(Clock(100.0))
    made = [is_blended(cost, blend_of(200)) for _ in range(3 * SURVEY_EVERY)]
    assert [at for at, blended in enumerate(made, 1) if not blended] == [SURVEY_EVERY * n for n in (1, 2, 3)]
    for _ in range(SURVEY_EVERY * MAX_SURVEYS):
        is_blended(cost, blend_of(200))
    assert all(is_blended(cost, blend_of(200)) for _ in range(3 * SURVEY_EVERY)), "it goes on for a while only"


def test_no_later_turn_is_computed_to_measure_prefill() -> None:
    """Without lmc the engine would have the turns before: one in eight turns took ten times as long as the others."""
    cost = CostModel(Clock(100.0))
    assert all(is_blended(cost, blend_of(200, revises=True)) for _ in range(3 * SURVEY_EVERY))


def test_slow_blends_of_long_prompts_are_compared_with_prefills_of_shorter_ones() -> None:
    """Two dozen blends were slower before prefill at their length was measured: one in eight was computed."""
    cost = weighed()  # a prefill of 1000 tokens takes 1 s, and one of 3000 tokens 4 s
    long = blend_of(2000, tokens=3000, length=3000)
    for _ in range(ENOUGH):
        assert is_blended(cost, long)
        cost.blended(long, 5.0)
    assert is_blended(cost, blend_of(2000, tokens=3000, length=3000, revises=True))
    why = "prefill takes about 3 s, and a blend about 5 s"
    assert cost.against_blend(long, AUTO) == why
    for _ in range(ENOUGH):
        cost.computed(3000, 4.0, 3000)
    assert cost.against_blend(long, AUTO) == why.replace("3 s", "4 s")
    cost.blended(long, 3.0)
    for _ in range(ENOUGH):
        cost.computed(3000, 8.0, 3000)
    assert is_blended(cost, long), "what was measured at this length counts"


def test_a_blend_that_was_slower_is_tried_again_less_and_less_often() -> None:
    cost, made = weighed(blend=2.0), []
    for at in range(3 * BLEND_TRIAL_CHOICES + 2):
        if is_blended(cost, blend_of(200)):
            made.append(at)
            cost.blended(blend_of(200), 2.0)
    assert made == [BLEND_TRIAL_CHOICES, 3 * BLEND_TRIAL_CHOICES + 1]
    assert not is_blended(cost, blend_of(200))


def test_trials_that_were_not_measured_do_not_count() -> None:
    """On an engine that always computes something else, good blends were refused nearly for ever."""
    cost = weighed(blend=2.0)
    made = [is_blended(cost, blend_of(200)) for _ in range(10 * (BLEND_TRIAL_CHOICES + 1))]
    assert sum(made) == 10


def test_one_trial_that_is_fast_is_enough() -> None:
    """The first blends may have waited for kernels to be compiled."""
    cost = weighed(blend=5.0)
    while not is_blended(cost, blend_of(200)):
        pass
    cost.blended(blend_of(200), 0.5)
    assert all(is_blended(cost, blend_of(200)) for _ in range(10))


def test_loading_and_blending_overlap() -> None:
    cost = weighed(blend=0.5)
    for _ in range(3):
        load(cost, 0.001)
    assert is_blended(cost, blend_of(200, records=[("disk", 900)]))
    assert not is_blended(cost, blend_of(200, records=[("disk", 1100)]))


def test_blends_of_another_size_say_nothing() -> None:
    cost = weighed(blend=2.0)
    assert not is_blended(cost, blend_of(200))
    assert is_blended(cost, blend_of(20))


def test_choices_in_a_snapshot_count_in_nothing_else():
    """Each explanation of a prompt brought the next trial of a slow blend nearer."""
    cost = CostModel()
    copied = cost.snapshot()
    made = [is_blended(copied, blend_of(200)) for _ in range(SURVEY_EVERY)]
    assert made[-1] is False
    assert [is_blended(cost, blend_of(200)) for _ in range(SURVEY_EVERY)] == made
    cost.computed(1000, 1.0, 1000)
    assert is_blended(copied, blend_of(200)), "it knows nothing of later measurements"
