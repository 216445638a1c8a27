"""What the benchmarks share: prompts of known documents, medians, and the closing line of JSON."""

import argparse
import json
import platform
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from lmc.blend.segments import join
from lmc.demo import SEPARATOR, random_tokens


def parser(doc: str | None, name: str) -> argparse.ArgumentParser:
    """Arguments that every benchmark has; and one thread, which every benchmark runs on."""
    torch.set_num_threads(1)
    options = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--keep", action="store_true", help=f"write bench/results/{name}.json")
    return options


def prompt_of(documents: Sequence[Sequence[int]], order: Sequence[int], question: int = 24, seed: int = 0) -> list[int]:
    """System text, the documents in this order, and a question of `question` tokens."""
    return join(
        random_tokens(24, 1_000_000),
        [documents[i] for i in order],
        random_tokens(question, 2_000_000 + seed),
        SEPARATOR,
    )


def median(run: Callable[[int], float], repeats: int) -> float:
    """The median of `run(0)` … `run(repeats - 1)`, after one run that does not count."""
    run(repeats)
    return statistics.median(run(i) for i in range(repeats))


def closing_line(result: dict[str, object], name: str | None = None) -> None:
    """Print the result as the last line; with a name, also keep it beside the benchmark with the machine's name."""
    if name:
        kept = {**result, "machine": machine()}
        path = Path(__file__).parent / "results" / f"{name}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(kept, indent=1) + "\n")
    print(json.dumps(result))


def machine() -> str:
    """Processor, cores and torch: what a number is worth nothing without."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [
            line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")
        ]
        model = f"{names[0]}, {len(names)} cores" if names else model
    return f"{model}; torch {torch.__version__}"
