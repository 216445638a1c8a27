"""A circuit breaker: when it opens, when it closes, and that it learns from one who only says hello."""

import logging
import time

import pytest
from redis_servers import wait_until

from lmc.errors import TierUnusable
from lmc.storage.tiers import breaker
from lmc.storage.tiers.breaker import Breaker


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(breaker, "FIRST_PAUSE", 0.02)
    monkeypatch.setattr(breaker, "LONGEST_PAUSE", 0.2)


def made(meet=lambda: None) -> Breaker:
    return Breaker("a server", meet)


def test_three_failures_in_a_row_open_it_and_two_do_not(quick):
    one = made(lambda: (_ for _ in ()).throw(OSError("still away")))
    for _ in range(2):
        one.failed(OSError())
    assert one.usable
    one.worked()
    for _ in range(2):
        one.failed(OSError())
    assert one.usable, "they were not in a row"
    one.failed(OSError())
    assert not one.usable
    one.close(5)


def test_one_timeout_opens_it(quick):
    one = made(lambda: (_ for _ in ()).throw(OSError("still away")))
    one.failed(TimeoutError())
    assert not one.usable
    one.close(5)


def test_without_a_thread_that_would_try_again_it_stays_closed(quick, monkeypatch):
    """Earlier, a breaker that could not start its thread stayed open for ever, and its error was no `OSError`."""
    one = made()
    with monkeypatch.context() as patch:
        patch.setattr(
            "threading.Thread.start", lambda self: (_ for _ in ()).throw(RuntimeError("can't start new thread"))
        )
        one.failed(TimeoutError())
        assert one.usable
        one.close(5)
    other = made()
    other.failed(TimeoutError())
    wait_until(lambda: other.usable, "an answer")
    other.close(5)


def test_it_closes_by_itself_when_there_is_an_answer(quick, caplog):
    answers = [OSError("no"), TierUnusable("another password"), TierUnusable("another password"), None]

    def meet():
        answer = answers.pop(0)
        if answer is not None:
            raise answer

    one = made(meet)
    one.failed(TimeoutError("silence"))
    wait_until(lambda: one.usable, "an answer")
    one.close(5)  # Its thread writes the last line after that.
    levels = [record.levelno for record in caplog.records]
    assert levels == [logging.WARNING, logging.ERROR, logging.WARNING], "the same refusal is said once"


def test_one_that_greets_and_is_silent_again_is_left_alone_for_longer_each_time_and_not_talked_about(quick, caplog):
    """Earlier, a server that greets and is silent again cost the whole deadline and two log lines every half second."""
    one, away = made(), []
    for _ in range(4):
        started = time.monotonic()
        one.failed(TimeoutError("silence"))
        wait_until(lambda: one.usable, "a greeting")
        away.append(time.monotonic() - started)
    assert all(seconds >= least for seconds, least in zip(away, [0.02, 0.04, 0.08, 0.16], strict=True))
    assert len(caplog.records) == 2
    one.close(5)


def test_a_first_meeting_without_an_answer_is_no_error_and_a_refusal_is_one(quick):
    one = made(lambda: (_ for _ in ()).throw(OSError("nobody")))
    one.start()
    assert not one.usable
    one.close(5)
    with pytest.raises(TierUnusable):
        made(lambda: (_ for _ in ()).throw(TierUnusable("wrong password"))).start()
