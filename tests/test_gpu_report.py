"""The lines of `bench/gpu/accept.py` are kept part by part, so that a machine can be used for minutes at a time."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

BENCH = Path(__file__).parents[1] / "bench"
Kept = Callable[[], dict[str, Any]]


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], Any]:
    """A function to a report of a device, which is kept in a temporary folder."""
    monkeypatch.setattr(sys, "path", [str(BENCH), *sys.path])
    import common
    from gpu import report

    for module in (common, report):
        monkeypatch.setattr(module, "kept_path", lambda name: tmp_path / f"{name}.json")
    return lambda device: report.Report(torch.device("cpu"), False, device, "gpu_accept")


def measure(report: Any, part: str, *numbers: float) -> None:
    with report.measuring(part):
        for number in numbers:
            report.line(part, number, "", most=1.0)


def kept(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "gpu_accept.json").read_text())
    return found


def test_each_part_is_kept_when_it_ends(report, tmp_path: Path) -> None:
    one = report("H100")
    measure(one, "copies", 0.5)
    assert (kept(tmp_path)["parts"], kept(tmp_path)["short"]) == (["copies"], [])
    with one.measuring("kernels"):
        one.line("a kernel", 0.1, "")
        raise ValueError("wrong")
    found = kept(tmp_path)
    assert found["parts"] == ["copies", "kernels"]
    assert found["short"] == ["kernels: ValueError: wrong"]
    with pytest.raises(SystemExit, match="1"):
        one.end()


def test_a_part_that_is_measured_again_takes_the_place_of_the_earlier_one(report, tmp_path: Path) -> None:
    first = report("H100")
    measure(first, "copies", 2.0, 3.0)
    measure(first, "kernels", 0.5)
    again = report("H100")
    again.continued()
    measure(again, "copies", 0.7)
    found = kept(tmp_path)
    assert [(line["part"], line["found"]) for line in found["lines"]] == [("kernels", 0.5), ("copies", 0.7)]
    assert (found["device"], found["short"]) == ("H100", [])


def test_lines_of_another_device_are_not_mixed_with_ours(report, tmp_path: Path) -> None:
    measure(report("H100"), "copies", 0.5)
    other = report("H200")
    other.continued()
    measure(other, "kernels", 0.5)
    assert kept(tmp_path)["parts"] == ["kernels"]


@pytest.mark.parametrize("part", ["moving", "layouts", "corrections", "scores", "limits", "MLA"])
def test_the_checks_of_kernels_take_the_odd_sizes_of_the_sanitizer(report, monkeypatch, part: str) -> None:
    """Only a GPU has these sizes. The pages of MLA were too few for their last, partly filled block.

    On a GPU, an index behind the pages is an error of CUDA, after which nothing else runs in the process.
    """
    from dataclasses import replace

    from gpu.kernels import MEASURED
    from gpu.sanitize import ODD, Once, Untimed

    monkeypatch.setenv("LMC_KERNELS", "torch")
    sizes, once = replace(ODD, heads=2, dim=32, dtypes=(torch.float32,)), Once(torch.device("cpu"), True, "CPU")
    torch.manual_seed(0)
    with torch.inference_mode(), once.measuring(part):
        MEASURED[part](once, sizes, sizes.dtypes[0], Untimed())  # type: ignore[arg-type]
    assert once.result()["short"] == []


def test_ranges_that_a_trace_mirrors_on_the_gpu_are_no_work(report) -> None:
    """torch surrounds each compiled graph with a range. On the GPU, it covers the gaps between the graph's kernels."""
    from gpu.phases import shown

    def event(name: str, start: float, stop: float, *, on_gpu: bool = True, range_: bool = False) -> Any:
        kind = torch.autograd.DeviceType.CUDA if on_gpu else torch.autograd.DeviceType.CPU
        time = SimpleNamespace(start=start, end=stop)
        return SimpleNamespace(name=name, time_range=time, device_type=kind, is_user_annotation=range_)

    graph, part = "## Call CompiledFxGraph abc ##", "lmc: a layer"
    ranges = [event(name, 0, 1000, on_gpu=on_gpu, range_=True) for name in (graph, part) for on_gpu in (False, True)]
    found = shown("a blend", [*ranges, event("_attend", 100, 300), event("_place", 800, 900)])
    assert (found["compute_ms"], found["idle"]["over_100us_ms"], found["operations"]) == (0.3, 0.5, 2)
    assert found["kernels"].keys() == {"_attend", "_place"}
    assert found["parts"].keys() == {part}
    assert found["longest_gaps"][0]["host_was_in"] == part
