"""Commands in a process of their own, because Triton decides when it is imported whether it interprets kernels."""

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent
NUMPY_WARNS = "ignore:Conversion of an array with ndim > 0:DeprecationWarning"  # of what the interpreter does
PYTEST = ("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-W", NUMPY_WARNS)


def run_apart(*command: str, folder: Path = TESTS, interpret: bool = True) -> str:
    """Run Python with a command, and return what it prints; fail with what it says if it fails."""
    environment = {**os.environ, "TRITON_INTERPRET": str(int(interpret)), "OMP_NUM_THREADS": "1"}
    whole = [sys.executable, "-W", NUMPY_WARNS, *command]
    done = subprocess.run(whole, env=environment, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout[-5000:]}\n{done.stderr[-2000:]}"
    return done.stdout
