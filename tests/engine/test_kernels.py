"""The kernels with the version of Triton that vLLM brings, and the paged canvas with them."""

import pytest
from apart import PYTEST, run_apart

CANVAS = ["kernels/test_paged_canvas.py", "kernels/test_memory.py"]
KERNELS = [*(f"kernels/test_{name}.py" for name in ("place", "attention", "shift")), "-k", "float32 and NHD or weights"]


@pytest.mark.parametrize(
    "what", [pytest.param(CANVAS, id="canvas"), pytest.param(KERNELS, id="kernels", marks=pytest.mark.long)]
)
def test_in_the_interpreter(what):
    run_apart(*PYTEST, *what)


@pytest.mark.long
def test_they_compile():
    run_apart(*PYTEST, "test_kernels_compile.py", interpret=False)
