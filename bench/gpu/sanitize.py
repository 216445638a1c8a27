"""Each kernel once, on small tensors with odd sizes, for compute-sanitizer, which makes kernels many times slower.

    cd bench && PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python -m gpu.sanitize

Each tensor then has its own memory, so that every access outside of one is found. `--tool racecheck` finds races in
shared memory.
"""

import os
from collections.abc import Callable
from typing import Any

import torch

from gpu.interpreter import mend_interpreter
from gpu.kernels import MEASURED, SMOKE, Sizes, scattered
from gpu.report import Report

ODD = Sizes(documents=3, tokens=131, context=1187, rows=(37, 301))


class Once(Report):
    """A report that runs work once instead of timing it."""

    def milliseconds(self, work: Callable[[], Any]) -> float:
        """Run some work once."""
        work()
        self.wait()
        return 1.0


class Untimed:
    """What the checks need of `gpu.kernels.Speed`."""

    memory = products = 1.0

    def __call__(self, what: str, moved: int, work: Callable[[], Any], least: float | None = None) -> None:
        """Run some work once."""
        work()


def main() -> None:
    """Run every kernel."""
    mend_interpreter()
    os.environ.setdefault("LMC_KERNELS", "triton")  # in Triton's interpreter on a CPU
    cuda = torch.cuda.is_available()
    report = Once(torch.device("cuda" if cuda else "cpu"), not cuda, "small tensors")
    sizes = ODD if cuda else SMOKE
    with torch.inference_mode():
        for name, work in MEASURED.items():
            with report.part(name):
                work(report, sizes, sizes.dtypes[0], Untimed())  # type: ignore[arg-type]
        with report.part("scattered"):
            scattered(report, sizes)
    report.wait()
    report.end()


if __name__ == "__main__":
    main()
