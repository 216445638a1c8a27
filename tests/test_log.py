"""lmc's log: where it goes beside vLLM's, and the level that `LMC_LOG_LEVEL` gives it. `test_vllm_scheduler.py` has
the lines for requests.
"""

import io
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from service_process import ServerProcess
from typer.testing import CliRunner

from lmc.commands.cli import app
from lmc.connectors.vllm.plugin import join_log


@contextmanager
def logs() -> Iterator[io.StringIO]:
    """What vLLM's log has, at INFO; nobody has set up one for lmc.

    It is no fixture, because pytest adds handlers of its own between fixtures and tests.
    """
    ours, theirs, stream = logging.getLogger("lmc"), logging.getLogger("vllm"), io.StringIO()
    before, handler = (ours.level, ours.propagate, list(ours.handlers), theirs.level), logging.StreamHandler(stream)
    ours.propagate, ours.handlers[:] = False, []
    handler.setLevel(logging.INFO)
    theirs.addHandler(handler)
    theirs.setLevel(logging.INFO)
    try:
        yield stream
    finally:
        theirs.removeHandler(handler)
        level, ours.propagate, ours.handlers[:], of_vllm = before
        ours.setLevel(level)
        theirs.setLevel(of_vllm)


def say() -> None:
    log = logging.getLogger("lmc.test_log")
    log.debug("detail")
    log.info("fact")
    log.warning("trouble")


@pytest.mark.parametrize(
    ("level", "said"),
    [
        ("", ["fact", "trouble"]),  # vLLM's level
        ("DEBUG", ["detail", "fact", "trouble"]),
        ("debug", ["detail", "fact", "trouble"]),
        ("WARNING", ["trouble"]),
        ("CRITICAL", []),
    ],
)
def test_lmc_log_level_says_what_of_lmc_is_in_vllm_s_log(
    monkeypatch: pytest.MonkeyPatch, level: str, said: list[str]
) -> None:
    monkeypatch.setenv("LMC_LOG_LEVEL", level)
    with logs() as written:
        join_log()
        say()
    assert written.getvalue().split() == said


def test_a_level_that_there_is_not_is_said_and_vllm_s_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMC_LOG_LEVEL", "LOUD")
    with logs() as written:
        join_log()
        say()
    warned, *said = written.getvalue().splitlines()
    assert warned.startswith("LMC_LOG_LEVEL = LOUD is not a log level; use one of CRITICAL, ")
    assert said == ["fact", "trouble"]


def test_a_log_that_an_application_has_set_up_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMC_LOG_LEVEL", "DEBUG")
    with logs() as written:
        own = io.StringIO()
        logging.getLogger("lmc").addHandler(logging.StreamHandler(own))
        logging.getLogger("lmc").setLevel(logging.WARNING)
        join_log()
        say()
    assert (own.getvalue().split(), written.getvalue()) == (["trouble"], "")


def test_a_cache_server_and_a_router_have_that_level_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    levels: list[int] = []
    monkeypatch.setattr(logging, "basicConfig", lambda **options: levels.append(options["level"]))
    monkeypatch.delenv("LMC_SERVER", raising=False)
    for level in ("WARNING", ""):
        result = CliRunner().invoke(app, ["router", "--port", "0"], env={"LMC_LOG_LEVEL": level})
        assert result.exit_code == 2  # It has no engines.
    assert levels == [logging.WARNING, logging.INFO]
    server = ServerProcess(tmp_path, max_local_cpu_size=0.01, log_level="LOUD")
    server.kill()
    assert "LMC_LOG_LEVEL = LOUD is not a log level" in server.log
