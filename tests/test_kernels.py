"""The kernels in Triton, run by Triton's interpreter, give what those in torch give."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lmc.blend.kernels.choice import TORCH, kernels_of
from lmc.errors import ConfigError

TESTS, BENCH = Path(__file__).parent / "kernels", Path(__file__).parents[1] / "bench"
NUMPY_WARNS = "ignore:Conversion of an array with ndim > 0:DeprecationWarning"  # of what the interpreter does


def interpreted(*command: str, folder: Path = TESTS) -> None:
    """Triton decides when it is imported whether it interprets, so this is a process of its own."""
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    whole = [sys.executable, "-W", NUMPY_WARNS, *command]
    done = subprocess.run(whole, env=environment, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout[-5000:]}\n{done.stderr[-2000:]}"


def test_they_give_what_those_in_torch_give() -> None:
    interpreted("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-W", NUMPY_WARNS, str(TESTS))


def test_the_checks_for_a_gpu_run() -> None:
    interpreted("gpu_accept.py", "--smoke", folder=BENCH)


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
