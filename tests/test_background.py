"""Work beside an engine rests often enough, and loses nothing."""

import pytest

from lmc import background
from lmc.background import gently


class Clock:
    """A clock that only work and rest move."""

    def __init__(self) -> None:
        self.now, self.rests = 0.0, []

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.rests.append(self.now)
        self.now += seconds


def test_it_rests_after_each_slice_of_work(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(background, "time", clock)
    found = []
    for item in gently(range(40)):
        found.append(item)
        clock.now += background.WORK_SECONDS / 4 + 1e-9
    assert found == list(range(40))
    assert len(clock.rests) == 10


def test_short_work_does_not_rest_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(background, "time", clock)
    assert list(gently(range(1000))) == list(range(1000))
    assert clock.rests == []


def test_an_item_that_is_not_wanted_is_not_made() -> None:
    items = iter(range(10))
    for item in gently(items):
        if item == 3:
            break
    assert next(items) == 4
