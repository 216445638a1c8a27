"""Errors of lmc in vLLM's hooks are misses, are logged once, and switch lmc off if they go on."""

import pytest

from lmc.connectors.vllm.guard import MAX_ERRORS, HookGuard


def fail() -> int:
    raise RuntimeError("planted")


def test_an_error_gives_the_other_result_and_is_logged_once_with_its_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    guard, repaired = HookGuard(), []
    assert guard.run("claim", lambda: 5, 0) == 5
    assert guard.errors == {"claim": 0}, "a metric needs a value before the first error"
    for _ in range(3):
        assert guard.run("claim", fail, 0, lambda: repaired.append(1)) == 0
    assert (guard.errors, len(repaired), guard.off, guard.status) == ({"claim": 3}, 3, False, "ok")
    (record,) = caplog.records
    assert record.message == "lmc failed in claim; the request continues without lmc"
    assert record.exc_info is not None


def test_an_error_in_a_repair_is_counted_too() -> None:
    guard = HookGuard()
    assert guard.run("plan", fail, None, fail) is None
    assert guard.errors == {"plan": 1, "plan (repair)": 1}


def test_lmc_is_off_after_so_many_errors_of_any_hook_and_process(caplog: pytest.LogCaptureFixture) -> None:
    worker, scheduler = HookGuard(switches=False), HookGuard()
    for _ in range(MAX_ERRORS):
        worker.run("save", fail, None)
    assert not any("switched itself off" in record.message for record in caplog.records), (
        "it is not the worker's to say"
    )
    assert (worker.new_errors(), worker.new_errors()) == (MAX_ERRORS, 0)
    scheduler.add("worker", MAX_ERRORS)
    assert scheduler.off
    assert scheduler.status == f"off: {MAX_ERRORS} errors in worker; the log has the first of each"
    assert sum("switched itself off" in record.message for record in caplog.records) == 1


def test_where_other_ranks_would_wait_the_error_is_raised() -> None:
    guard = HookGuard(raises=True)
    with pytest.raises(RuntimeError):
        guard.run("work", fail, None)
    assert guard.errors == {"work": 1}
