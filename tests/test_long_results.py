"""The sums that `make test-long` keeps are those of pytest's reports."""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

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
    runs = ElementTree.Element("testsuites")
    for name, text, code in (("test_some", TESTS, 1), ("test_others", "def test_that_passes(): pass\n", 0)):
        (tmp_path / f"{name}.py").write_text(text)
        command = [sys.executable, "-m", "pytest", f"{name}.py", f"--junitxml={tmp_path}/part.xml"]
        command += ["-p", "no:cacheprovider", "-p", "no:hypothesispytest", "-p", "no:anyio"]
        assert subprocess.run(command, cwd=tmp_path, capture_output=True, check=False).returncode == code
        runs.extend(ElementTree.parse(tmp_path / "part.xml").getroot())
    ElementTree.ElementTree(runs).write(tmp_path / "fast.xml")
    monkeypatch.syspath_prepend(str(BENCH))
    monkeypatch.setattr(sys, "argv", ["long_tests.py", str(tmp_path)])
    long_tests = importlib.import_module("long_tests")
    assert long_tests.main() == 1
    counted = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (counted["passed"], counted["failed"], counted["skipped"]) == (2, 3, 1)
    assert counted["files"] == {"fast": 2}
    assert "engine-first" in counted["missing"]
    assert "fast" not in counted["missing"]
    sums, _ = long_tests.read(tmp_path / "fast.xml")
    assert sums["runs"] == 2
    assert sums["first_start"] < sums["last_start"]
