"""The sums that `make test-long` keeps are those of pytest's reports."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parent.parent / "bench"
TESTS = """
import pytest

def test_that_passes(): pass

@pytest.mark.parametrize("number", range(2))
def test_that_fails(number): assert number < 0

@pytest.fixture
def broken(): raise ValueError

def test_that_has_no_fixture(broken): pass

class TestInAClass:
    @pytest.mark.skip
    def test_that_is_skipped(self): pass
"""


def test_outcomes_are_counted_by_run_and_file_and_a_missing_report_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "test_others.py").write_text("def test_that_passes(): pass\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:hypothesispytest", "-p", "no:anyio"]
    command.append(f"--junitxml={tmp_path}/fast.xml")
    assert subprocess.run(command, cwd=tmp_path, capture_output=True, check=False).returncode == 1
    monkeypatch.syspath_prepend(str(BENCH))
    monkeypatch.setattr(sys, "argv", ["long_tests.py", str(tmp_path)])
    assert importlib.import_module("long_tests").main() == 1
    counted = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (counted["passed"], counted["failed"], counted["skipped"]) == (2, 3, 1)
    assert counted["files"] == {"fast": 2}
    assert "engine-first" in counted["missing"]
    assert "fast" not in counted["missing"]
