"""The sums that `make test-long` keeps are those of pytest's reports."""

import json
import subprocess
import sys
from pathlib import Path

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


def test_outcomes_are_counted_by_run_and_file_and_a_missing_report_is_named(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "test_others.py").write_text("def test_that_passes(): pass\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--junitxml={tmp_path}/fast.xml"]
    assert subprocess.run(command, cwd=tmp_path, capture_output=True, check=False).returncode == 1
    script = [sys.executable, BENCH / "long_tests.py", tmp_path]
    done = subprocess.run(script, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    counted = json.loads(done.stdout.splitlines()[-1])
    assert (counted["passed"], counted["failed"], counted["skipped"]) == (2, 3, 1)
    assert counted["files"] == {"fast": 2}
    assert "engine-first" in counted["missing"]
    assert "fast" not in counted["missing"]
