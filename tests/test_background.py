"""Work beside an engine rests often enough while the engine runs, not at all while it is idle, and loses nothing."""

import pytest

from lmc import background
from lmc.background import RESTS, RUNNING_SECONDS, WORK_SECONDS, Background


class Clock:
    """A clock that only work and rest move."""

    def __init__(self) -> None:
        self.now, self.rests = 0.0, []

    def perf_counter(self) -> float:
        return self.now

    def thread_time(self) -> float:
        return self.now - sum(self.rests)

    def sleep(self, seconds: float) -> None:
        self.rests.append(seconds)
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(background, "time", clock)
    return clock


def test_it_rests_after_each_slice_of_work_while_the_engine_runs(clock: Clock) -> None:
    beside, found = Background(), []
    for item in beside.gently(range(40)):
        beside.stepped()
        found.append(item)
        clock.now += WORK_SECONDS / 4 + 1e-9
    assert found == list(range(40))
    assert len(clock.rests) == 10
    assert sum(clock.rests) == pytest.approx(RESTS * clock.thread_time())


def test_it_rests_longer_after_an_item_that_takes_longer(clock: Clock) -> None:
    beside = Background()
    for _ in beside.gently(range(2)):
        beside.stepped()
        clock.now += 0.003
    assert clock.rests == pytest.approx([RESTS * 0.003] * 2)


def test_it_does_not_rest_beside_an_engine_that_has_not_run_yet(clock: Clock) -> None:
    for _ in Background().gently(range(40)):
        clock.now += WORK_SECONDS
    assert clock.rests == []


def test_it_stops_to_rest_when_the_engine_has_made_no_step_for_a_while(clock: Clock) -> None:
    beside = Background()
    beside.stepped()
    clock.now += RUNNING_SECONDS
    for _ in beside.gently(range(40)):
        clock.now += WORK_SECONDS
    assert clock.rests == []


def test_short_work_does_not_rest_at_all(clock: Clock) -> None:
    beside = Background()
    beside.stepped()
    assert list(beside.gently(range(1000))) == list(range(1000))
    assert clock.rests == []


def test_an_item_that_is_not_wanted_is_not_made() -> None:
    items = iter(range(10))
    for item in Background().gently(items):
        if item == 3:
            break
    assert next(items) == 4
