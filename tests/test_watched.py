"""Which requests a step looks at."""

from types import SimpleNamespace

import pytest

from lmc.connectors.vllm.scheduler.request_state import RequestState, Role
from lmc.connectors.vllm.scheduler.watched import WatchedRequests


def state_of(name):
    return RequestState(request=SimpleNamespace(request_id=name), role=Role.EXACT)


@pytest.fixture
def watched():
    return WatchedRequests()


@pytest.mark.parametrize(
    ("tokens", "most", "step"), [(8, 1, 8), (8, 3, 3), (9, 3, 3), (1, 4, 1), (0, 1, 1), (-3, 1, 1)]
)
def test_a_resting_request_is_watched_again_in_the_step_that_may_compute_the_tokens(watched, tokens, most, step):
    state = state_of("one")
    watched.add(state)
    assert watched.begin_step({"one"}) == [state]
    watched.rest(state, tokens, most)
    assert not list(watched)
    seen = [watched.begin_step({"one"}) for _ in range(step)]
    assert seen == [[]] * (step - 1) + [[state]]


def test_a_request_without_a_further_chunk_is_not_watched_again(watched):
    state = state_of("one")
    watched.add(state)
    watched.begin_step({"one"})
    watched.rest(state, float("inf"), 1)
    assert not any(watched.begin_step({"one"}) for _ in range(1000))


def test_a_watched_request_is_looked_at_only_in_steps_that_compute_it(watched):
    one, two = state_of("one"), state_of("two")
    watched.add(one)
    watched.add(two)
    assert watched.begin_step({"two", "other"}) == [two]
    assert list(watched) == [one, two]


def test_a_request_that_has_ended_is_not_watched_again(watched):
    state = state_of("one")
    watched.add(state)
    watched.begin_step({"one"})
    watched.rest(state, 3, 1)
    watched.remove(state)
    assert not any(watched.begin_step({"one"}) for _ in range(5))


def test_a_preempted_request_is_watched_and_then_rests_as_long_as_its_new_chunk_takes(watched):
    state = state_of("one")
    watched.add(state)
    watched.begin_step({"one"})
    watched.rest(state, 3, 1)
    watched.add(state)
    assert watched.begin_step({"one"}) == [state]
    watched.rest(state, 4, 1)
    assert [bool(watched.begin_step({"one"})) for _ in range(4)] == [False, False, False, True]
