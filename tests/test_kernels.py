"""The kernels in Triton, run by Triton's interpreter, give what those in torch give."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from apart import PYTEST, TESTS, run_apart

from lmc.blend.kernels.choice import TORCH, kernels_of
from lmc.errors import ConfigError

BENCH = TESTS.parent / "bench"
# `conftest.py` of the kernels' tests makes the interpreter faster.
SMOKE = """
import runpy, sys
sys.path.insert(0, sys.argv.pop(1))
import conftest
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""
without_vllm = pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed")


def test_they_give_what_those_in_torch_give() -> None:
    pytest.importorskip("triton")
    run_apart(*PYTEST, "kernels")


@without_vllm
def test_the_checks_for_a_gpu_run() -> None:
    pytest.importorskip("triton")
    said = run_apart("-c", SMOKE, str(TESTS / "kernels"), "gpu.accept", "--smoke", folder=BENCH).splitlines()
    found = json.loads(said[-1])
    assert (found["parts"], found["short"]) == (["copies", "kernels", "scattered", "models", "answers"], [])
    assert any(line.startswith("Tier B was left out, because vLLM is not installed") for line in said)


@pytest.mark.long
@without_vllm
def test_the_sweep_ends_with_lines_of_the_table() -> None:
    pytest.importorskip("triton")
    said = run_apart("-c", SMOKE, str(TESTS / "kernels"), "gpu.sweep", "--smoke", folder=BENCH)
    assert "failed" not in said
    assert [line.split(":")[0].strip() for line in said.splitlines() if "fastest" in line] == [
        'fastest "few rows"',
        'fastest "many rows"',
    ]


@pytest.mark.long
@without_vllm
def test_each_kernel_runs_for_the_sanitizer() -> None:
    pytest.importorskip("triton")
    said = run_apart("-c", SMOKE, str(TESTS / "kernels"), "gpu.sanitize", folder=BENCH)
    assert json.loads(said.splitlines()[-1])["short"] == []


@without_vllm
def test_traces_are_made_of_the_transformers_connector(tmp_path: Path) -> None:
    """Each function that is watched exists, and is called."""
    command = [sys.executable, "-m", "gpu.traces", "transformers", "--smoke", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=BENCH, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "traces_transformers.json").read_text())
    parts = {"place a layer", "find the parts of a layer", "a layer", "plan", "choose tokens", "correction: apply"}
    assert parts <= found["clocked blend"]["parts"].keys()
    assert {path.name for path in tmp_path.glob("*.gz")} == {"blend.json.gz", "full_prefill.json.gz"}


@pytest.mark.long
@without_vllm
def test_the_checks_inside_vllm_say_what_they_need() -> None:
    command = [sys.executable, "-m", "gpu.accept", "--smoke", "--tier", "B"]
    done = subprocess.run(command, cwd=BENCH, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("tier B needs vLLM, which is not installed in this Python: pip install")


def test_a_gpu_has_them_launched_on_itself_whatever_the_current_one_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton launches on the current GPU, and the memory is another one's."""
    entered: list[torch.device] = []

    @contextmanager
    def device(wanted: torch.device) -> Iterator[None]:
        entered.append(wanted)
        yield
        entered.clear()

    def operation(*given: int, **named: int) -> tuple[object, ...]:
        return *entered, given, named

    monkeypatch.setattr(torch.cuda, "device", device)
    second = torch.device("cuda", 1)
    found = TORCH._replace(place=operation, in_pages=True).on(second)
    assert found.place(3, size=4) == (second, (3,), {"size": 4})
    assert entered == []
    assert found.in_pages

    pytest.importorskip("triton")
    monkeypatch.setenv("LMC_KERNELS", "triton")
    assert all(one.args[0] == second for one in kernels_of(second)[:-1])


@pytest.mark.parametrize(
    ("capability", "plain", "quantised"), [((7, 5), False, False), ((8, 0), True, False), ((8, 9), True, True)]
)
def test_those_in_triton_are_for_gpus_that_have_their_types(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], plain: bool, quantised: bool
) -> None:
    """No GPU before 8.9 converts numbers of fp8_e4m3."""
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.delenv("LMC_KERNELS", raising=False)
    gpu = torch.device("cuda", 0)
    assert kernels_of(gpu).in_pages is plain
    assert kernels_of(gpu, quantised=True).in_pages is quantised


def test_a_cpu_has_those_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    for choice in ("", "auto", "torch"):
        monkeypatch.setenv("LMC_KERNELS", choice)
        assert kernels_of(cpu) is TORCH
    monkeypatch.setenv("LMC_KERNELS", "triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ConfigError, match="LMC_KERNELS = triton needs"):
        kernels_of(cpu)
    monkeypatch.setenv("LMC_KERNELS", "cuda")
    with pytest.raises(ConfigError, match="LMC_KERNELS = cuda: use one of auto, triton, torch"):
        kernels_of(cpu)
