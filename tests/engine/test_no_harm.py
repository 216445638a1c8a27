"""Small parts of three benchmarks of the cost of lmc, with real engines and the shipped model."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]


def run(*command: str) -> dict[str, Any]:
    """Return the last line of a benchmark."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("LMC_", "VLLM_"))}
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_both_engines_get_the_same_traffic_and_lmc_finds_what_it_knows() -> None:
    workloads = "orders,conversation,nothing,cached,unknown,beam,n4"
    found = run(
        "bench/no_harm.py",
        "--model",
        "small",
        "--starts",
        "1",
        "--repeats",
        "1",
        "--seconds",
        "0",
        "--workloads",
        workloads,
    )
    by_workload = found["by_workload"]
    assert list(by_workload) == [f"small {name}" for name in workloads.split(",")]
    ratios = [one[name] for one in by_workload.values() for name in ("ttft", "throughput") if name in one]
    assert found["worst"] == min(ratios) > 0
    counts = {name.removeprefix("small "): one["counts"] for name, one in by_workload.items()}
    # lmc has found the documents, and blends unless its estimates say that computing is faster here.
    assert counts["orders"].get("blends", 0) + counts["orders"].get("blends_skipped", 0) == 1
    assert "blends" not in counts["nothing"]
    assert "blends" not in counts["unknown"]
    assert 1 <= counts["unknown"]["documents_learned"] <= 6
    assert counts["conversation"]["requests"] == 6
    assert "documents_learned" not in counts["conversation"]
    cached = by_workload["small conversation"]["plain"]["turns_cached"]
    assert cached[0] == 0
    assert cached[1:] == sorted(cached[1:])
    assert cached[1] > 1000


def test_one_engine_serves_with_and_without_a_connector() -> None:
    found = run("bench/vllm_steps.py", "--rounds", "1")
    assert list(found["by_workload"]) == ["small cached", "small new", "small burst", "small crowd"]
    for numbers in found["by_workload"].values():
        assert set(numbers["seconds"]) == {"none", "idle", "lmc"}
    ratios = [numbers[f"lmc_{name}"] for numbers in found["by_workload"].values() for name in ("ttft", "throughput")]
    assert found["worst"] == min(ratios) > 0


def test_ways_of_going_on_with_a_conversation_are_compared_with_full_prefill() -> None:
    found = run("bench/conversation.py", "--model", "small", "--conversations", "2")
    assert list(found["turns"]) == ["turn 2", "turn 3"]
    for ways in found["turns"].values():
        assert set(ways) == {"full", "goes on", "at once", "fresh", "blind"}
        assert (ways["full"]["kl"], ways["full"]["first"], ways["full"]["agreement16"]) == (0, 1, 1)
        assert ways["full"]["cached"] == 0
        assert ways["fresh"]["blended"] == ways["blind"]["blended"] == 1
        assert ways["fresh"]["reused"] == ways["blind"]["reused"] > 1000
        assert ways["blind"]["kl"] > 0
        assert ways["goes on"]["cached"] > 1000
