"""Lines with a number and its expected value, for all parts of `accept.py`."""

import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from common import closing_line, keep, kept_path

from lmc.connectors.vllm.worker.streams import seconds_of

REPEATS = 15
CACHE = 256 << 20  # bytes, more than the cache of any GPU
BUSY = 4_000_000  # cycles, some 2 ms, in which the host issues what is measured
# Units of what a clock has measured.
TIMED = ("ms", "GB/s", "TFLOP/s", "of copies", "of memory", "of best", "of vLLM", "of prefill", "times")


@dataclass
class Report:
    """The lines that were measured, part by part."""

    device: torch.device
    smoke: bool
    name: str  # of the device
    kept: str = ""  # name of the result that is kept after each part; empty to keep nothing
    lines: list[dict[str, Any]] = field(default_factory=list)
    _part: str = ""

    def continued(self) -> None:
        """Take over the lines of the result that was kept, if it is of the same device."""
        path = kept_path(self.kept)
        found = json.loads(path.read_text()) if path.exists() else {}
        if found.get("device") == self.name:
            self.lines = found["lines"]

    @contextmanager
    def measuring(self, part: str) -> Iterator[None]:
        """A part, whose lines take the place of earlier ones. The result is kept as far as it is known."""
        self._part = part
        self.drop_part()
        started = time.monotonic()
        with self.part(part):
            yield
        print(f"-- {part}: {time.monotonic() - started:.0f} s\n", flush=True)
        self.save()

    def drop_part(self) -> None:
        """Drop the lines of the part that is being measured."""
        self.lines = [line for line in self.lines if line["part"] != self._part]

    def save(self) -> None:
        """Write the lines that are known to the result that is kept."""
        if self.kept:
            keep(self.result(), self.kept)

    def line(
        self, what: str, found: float, unit: str, *, least: float | None = None, most: float | None = None
    ) -> None:
        """Record a number, and whether it is as expected. Times on a CPU have no meaning."""
        timed = unit in TIMED and self.smoke
        right = timed or ((least is None or found >= least) and (most is None or found <= most))
        limits = (("≥", least), ("≤", most))
        wanted = ", ".join(f"{sign} {limit}" for sign, limit in limits if limit is not None)
        rounded = float(f"{found:.5g}")
        self.lines.append(
            {"part": self._part, "what": what, "found": rounded, "unit": unit, "wanted": wanted, "right": right}
        )
        print(f"{'' if right else 'FALLS SHORT: '}{what:66} {found:12.4g} {unit:10} {wanted}", flush=True)

    def milliseconds(self, work: Callable[[], Any]) -> float:
        """Return the median time of some work.

        A GPU finds nothing in its cache of what the last round left there, and is kept busy until the work has been
        issued, so that its own time is measured and not that of the launches.
        """
        times = []
        cuda = self.device.type == "cuda"
        other = torch.empty(CACHE if cuda else 0, dtype=torch.uint8, device=self.device)
        for _ in range(1 if self.smoke else REPEATS + 2):
            self.wait()
            if cuda:
                other.zero_()
                torch.cuda._sleep(BUSY)
                times.append(1000 * seconds_of(work))
            else:
                started = time.perf_counter()
                work()
                times.append(1000 * (time.perf_counter() - started))
        return statistics.median(times[2:] or times)

    def host_milliseconds(self, work: Callable[[], Any]) -> float:
        """Return the median time in which the host issues some work, without waiting for it."""
        times = []
        for _ in range(1 if self.smoke else REPEATS):
            self.wait()
            started = time.perf_counter()
            work()
            times.append(1000 * (time.perf_counter() - started))
        self.wait()
        return statistics.median(times)

    def wait(self) -> None:
        """Wait for the end of all issued work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    @contextmanager
    def part(self, what: str) -> Iterator[None]:
        """Some of the lines: an error is noted as a line that falls short, and the other parts still run."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever it is, it is in the result
            traceback.print_exc()
            self.line(f"{what}: {type(error).__name__}: {error}"[:300], 1, "errors", most=0)

    def result(self) -> dict[str, Any]:
        """Return all lines, also those of parts that were measured earlier."""
        return {
            "bench": "gpu_accept",
            "device": self.name,
            "parts": list(dict.fromkeys(line["part"] for line in self.lines)),
            "lines": self.lines,
            "short": [line["what"] for line in self.lines if not line["right"]],
        }

    def end(self) -> NoReturn:
        """Print all lines as JSON, and end with status 1 if one falls short."""
        result = self.result()
        closing_line(result)
        sys.exit(1 if result["short"] else 0)
