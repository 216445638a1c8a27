"""What the benchmarks share: prompts of known documents, arguments, and the closing line of JSON."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch

from lmc.blend.segments import join
from lmc.demo.random_model import SEPARATOR, machine, random_tokens


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


def closing_line(result: dict[str, object], name: str | None = None, also: dict[str, object] | None = None) -> None:
    """Print the result as the last line; with a name, keep it and what is `also` known in `bench/results`."""
    if name:
        keep({**result, **(also or {})}, name)
    print(json.dumps(result))


def keep(result: dict[str, object], name: str) -> None:
    """Write a result to `bench/results`, with the machine's name."""
    path = kept_path(name)
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({**result, "machine": machine()}, indent=1) + "\n")


def kept_path(name: str) -> Path:
    """Return the file of a result that is kept."""
    return Path(__file__).parent / "results" / f"{name}.json"
