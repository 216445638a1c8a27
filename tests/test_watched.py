"""Which requests a step looks at."""

import gc
import weakref

import pytest

from lmc.connectors.vllm.scheduler.request_state import RequestState, Role
from lmc.connectors.vllm.scheduler.watched import WatchedRequests

ONE = {"one": 1}


class Request:
    """As vLLM's, as far as it matters here."""

    def __init__(self, name):
        self.request_id = name


def state_of(name):
    return RequestState(request=Request(name), role=Role.EXACT)


def resting(tokens, most=1):
    """A request that rests, and what watches it."""
    watched, state = WatchedRequests(most), state_of("one")
    watched.add(state)
    assert watched.begin_step(ONE) == [state]
    watched.rest(state, tokens)
    assert not list(watched)
    return watched, state


@pytest.mark.parametrize(
    ("tokens", "most", "step"), [(8, 1, 8), (8, 3, 3), (9, 3, 3), (1, 4, 1), (0, 1, 1), (-3, 1, 1)]
)
def test_a_resting_request_is_watched_again_in_the_step_that_may_compute_the_tokens(tokens, most, step):
    watched, state = resting(tokens, most)
    seen = [watched.begin_step(ONE) for _ in range(step)]
    assert seen == [[]] * (step - 1) + [[state]]


def test_a_request_without_a_further_chunk_is_not_watched_again():
    watched, _ = resting(float("inf"))
    assert not any(watched.begin_step(ONE) for _ in range(1000))


def test_a_watched_request_is_looked_at_only_in_steps_that_compute_it():
    watched, one, two = WatchedRequests(1), state_of("one"), state_of("two")
    watched.add(one)
    watched.add(two)
    assert watched.begin_step({"two": 1, "other": 1}) == [two]
    assert list(watched) == [one, two]


def test_a_request_that_has_ended_is_not_watched_again():
    watched, state = resting(3)
    watched.remove(state)
    assert not any(watched.begin_step(ONE) for _ in range(5))


def test_a_request_of_the_same_name_does_not_end_the_rest_of_the_other_early():
    watched, state = resting(3)
    watched.remove(state)
    later = state_of("one")
    watched.add(later)
    assert watched.begin_step(ONE) == [later]
    watched.rest(later, 4)
    assert [bool(watched.begin_step(ONE)) for _ in range(4)] == [False, False, False, True]


def test_a_preempted_request_is_watched_and_then_rests_as_long_as_its_new_chunk_takes():
    watched, state = resting(3)
    watched.add(state)
    assert watched.begin_step(ONE) == [state]
    watched.rest(state, 4)
    assert [bool(watched.begin_step(ONE)) for _ in range(4)] == [False, False, False, True]


def test_a_resting_request_that_got_more_input_is_watched():
    """The engine asks no hook about a session that gets more input."""
    watched, state = resting(100, most=2)
    state.decodes, state.saving.next_at = True, 500
    assert not watched.begin_step({"one": 2})
    assert watched.begin_step({"one": 3}) == [state]
    assert (state.decodes, state.saving.next_at) == (False, 0)


def test_ended_requests_are_not_kept():
    """Some have images."""
    watched, state = resting(1000)
    request = weakref.ref(state.request)
    watched.remove(state)
    del state
    gc.collect()
    assert request() is None
