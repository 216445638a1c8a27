"""The kernels with the version of Triton that vLLM brings, and the paged canvas with them."""

import pytest
from apart import PYTEST, run_apart


@pytest.mark.parametrize(
    "what",
    [
        ["kernels/test_paged_canvas.py", "kernels/test_memory.py"],
        [*(f"kernels/test_{name}.py" for name in ("place", "attention", "shift")), "-k", "float32 and NHD or weights"],
    ],
    ids=["canvas", "kernels"],
)  # fmt: skip
def test_in_the_interpreter(what):
    run_apart(*PYTEST, *what)


def test_they_compile():
    run_apart(*PYTEST, "test_kernels_compile.py", interpret=False)
