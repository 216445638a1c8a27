"""Where the time of some work goes: the host's time by part, and what the GPU did, from a trace.

The parts are functions of lmc, which `Phases.watch` wraps once. What they note depends on the mode: nothing, clocks, or
ranges of torch's profiler, which makes the host slower. So the host's times come from a run without it.
"""

import functools
import gzip
import itertools
import json
import shutil
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

Facts = dict[str, Any]
PREFIX = "lmc: "  # of the names of ranges
LONGEST = 12  # gaps that are told
KERNELS = 40


class Phases:
    """The parts of some work, by the functions that do them."""

    def __init__(self) -> None:
        self._mode = ""  # or "clock", or "trace"
        self._seconds: defaultdict[str, float] = defaultdict(float)  # of each part, without the parts inside of it
        self._calls: Counter[str] = Counter()
        self._inside = 0.0  # seconds of parts inside of the one that runs

    def watch(self, owner: Any, name: str, part: str) -> None:
        """Note the calls of `owner.name`. With the part "kernel", the first argument that is a function names it."""
        original = getattr(owner, name)

        @functools.wraps(original)
        def watched(*arguments: Any, **named: Any) -> Any:
            if not self._mode:
                return original(*arguments, **named)
            label = part
            if part == "kernel":
                label += " " + next(one.__name__ for one in arguments if hasattr(one, "__name__"))
            if self._mode == "trace":
                with torch.profiler.record_function(PREFIX + label):
                    return original(*arguments, **named)
            started, outside, self._inside = time.perf_counter(), self._inside, 0.0
            try:
                return original(*arguments, **named)
            finally:
                took = time.perf_counter() - started
                self._seconds[label] += took - self._inside
                self._calls[label] += 1
                self._inside = outside + took

        setattr(owner, name, watched)

    def clocked(self, what: str, work: Callable[[], Any], rounds: int = 3) -> Facts:
        """Return the host's milliseconds of the whole, and the mean of each part."""
        self._seconds.clear()
        self._calls.clear()
        self._mode, whole = "clock", []
        for _ in range(rounds):
            started = time.perf_counter()
            work()
            whole.append(1000 * (time.perf_counter() - started))
        self._mode = ""
        parts = {
            part: {"host_ms": 1000 * seconds / rounds, "calls": self._calls[part] / rounds}
            for part, seconds in sorted(self._seconds.items(), key=lambda item: -item[1])
        }
        rest = sum(whole) / rounds - sum(one["host_ms"] for one in parts.values())
        print(f"\n{what}: {min(whole):.2f} ms at best, of which the host spends")
        for part, one in parts.items():
            print(f"  {part:44} {one['host_ms']:9.3f} ms {one['calls']:7.0f} calls")
        print(f"  {'elsewhere':44} {rest:9.3f} ms", flush=True)
        return {"what": what, "ms": whole, "parts": parts, "elsewhere_ms": rest}

    def traced(self, what: str, work: Callable[[], Any], folder: Path) -> Facts:
        """Trace some work; return what the GPU did, and leave the trace in a folder, to be opened by Perfetto."""
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._mode = "trace"
        with torch.profiler.profile(activities=activities) as profile:
            work()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
        self._mode = ""
        raw = folder / f"{what.replace(' ', '_')}.json"
        profile.export_chrome_trace(str(raw))
        with raw.open("rb") as source, gzip.open(f"{raw}.gz", "wb", compresslevel=6) as target:
            shutil.copyfileobj(source, target)
        raw.unlink()
        return shown(what, profile.events())


def joined(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return spans of time as spans that do not overlap."""
    found: list[tuple[float, float]] = []
    for start, stop in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], stop)
        else:
            found.append((start, stop))
    return found


def shown(what: str, events: Sequence[Any]) -> Facts:
    """Print and return what a trace says. The profiler's times are in microseconds."""
    cuda = torch.autograd.DeviceType.CUDA
    # Ranges of the host are mirrored on the GPU, where they are no work: lmc's, and those around compiled graphs.
    device = [event for event in events if event.device_type == cuda and not event.is_user_annotation]
    host = [event for event in events if event.device_type != cuda]
    ranges = [event for event in host if event.name.startswith(PREFIX)]
    waits = Counter(event.name for event in host if "ynchronize" in event.name or event.name == "aten::item")
    calls = Counter(event.name for event in host if event.name.startswith("cu") and "ynchronize" not in event.name)
    found: Facts = {
        "what": what,
        "waits": dict(waits.most_common(8)),
        "driver_calls": dict(calls.most_common(12)),
        "parts": _totals(ranges),
        "kernels": dict(list(_totals(device).items())[:KERNELS]),
        **(_gpu(device, ranges) if device else {}),
    }
    print(f"\ntrace of {what}:")
    for key in ("span_ms", "compute_ms", "copies_ms", "operations", "idle", "waits", "driver_calls"):
        if key in found:
            print(f"  {key:14} {json.dumps(found[key])}")
    for name, one in found["kernels"].items():
        print(f"  GPU {one['ms']:8.3f} ms {one['calls']:6} calls of {name[:90]}")
    for one in found.get("longest_gaps", ()):
        print(f"  idle {one['us']:8.0f} us at {one['at_ms']:8.2f} ms, while the host was in {one['host_was_in']}")
    return found


def _totals(events: Iterable[Any]) -> Facts:
    """Return the number and the milliseconds of events by their names, the longest first."""
    found: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    for event in events:
        found[event.name][0] += 1
        found[event.name][1] += (event.time_range.end - event.time_range.start) / 1e3
    ordered = sorted(found.items(), key=lambda item: -item[1][1])
    return {name[:110]: {"calls": calls, "ms": ms} for name, (calls, ms) in ordered}


def _gpu(device: Sequence[Any], ranges: Sequence[Any]) -> Facts:
    """Return how long the GPU computed and copied, and where it was idle."""
    begin = min(event.time_range.start for event in device)
    end = max(event.time_range.end for event in device)

    def spans(*, copies: bool) -> list[tuple[float, float]]:
        return joined(
            (event.time_range.start, event.time_range.end) for event in device if ("emcpy" in event.name) == copies
        )

    computes = spans(copies=False)
    gaps = sorted(((after[0] - before[1], before[1]) for before, after in itertools.pairwise(computes)), reverse=True)

    def in_part(at: float, stop: float) -> str:
        over = [one for one in ranges if one.time_range.start <= stop and one.time_range.end >= at]
        return str(min(over, key=lambda one: one.time_range.end - one.time_range.start).name) if over else "?"

    return {
        "span_ms": (end - begin) / 1e3,
        "compute_ms": sum(stop - start for start, stop in computes) / 1e3,
        "copies_ms": sum(stop - start for start, stop in spans(copies=True)) / 1e3,
        "operations": len(device),
        "idle": {
            "over_100us_ms": sum(gap for gap, _ in gaps if gap > 100) / 1e3,
            "of_5_to_100us_ms": sum(gap for gap, _ in gaps if 5 < gap <= 100) / 1e3,
            "below_5us_ms": sum(gap for gap, _ in gaps if gap <= 5) / 1e3,
        },
        "longest_gaps": [
            {"us": gap, "at_ms": (at - begin) / 1e3, "host_was_in": in_part(at, at + gap)} for gap, at in gaps[:LONGEST]
        ],
    }
