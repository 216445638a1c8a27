"""The kernels with the version of Triton that vLLM brings, and the paged canvas with them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
NUMPY_WARNS = "ignore:Conversion of an array with ndim > 0:DeprecationWarning"  # of what the interpreter does


def run(*what: str, interpret: str) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": interpret, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-W", NUMPY_WARNS, *what]
    done = subprocess.run(command, env=environment, cwd=TESTS, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-5000:]


@pytest.mark.parametrize(
    "what",
    [
        ["kernels/test_paged_canvas.py"],
        [*(f"kernels/test_{name}.py" for name in ("place", "attention", "shift")), "-k", "float32 and NHD or weights"],
    ],
    ids=["canvas", "kernels"],
)  # fmt: skip
def test_in_the_interpreter(what):
    run(*what, interpret="1")


def test_they_compile():
    run("test_kernels_compile.py", "-k", "90", interpret="0")
