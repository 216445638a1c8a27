"""The numbers in the README's tables are those of `bench/results/`.

`data/tables/README.txt` has each row with measured numbers. Indented below a row stands where they come from:

    demo.json: models > small > blend          the place in `bench/results/`; a row has no other numbers
    demo.json: full > ttft / blend > ttft      the ratio of two of them
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from markdown_tables import table_rows

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
SCALES = 1, 100, 1000  # a share in percent, seconds in milliseconds


def sources() -> dict[str, list[str]]:
    """Return the rows with measured numbers, each with the places of its numbers."""
    found: dict[str, list[str]] = {}
    for line in (ROOT / "tests/data/tables/README.txt").read_text().splitlines():
        if line.startswith("    "):
            found[list(found)[-1]].append(line.strip())
        else:
            found[line] = []
    return found


def test_the_numbers_of_the_tables_are_those_that_were_kept() -> None:
    rows = table_rows(README)
    for row, places in sources().items():
        assert row in rows, f"the README has no such row: {row}"
        values = [value for place in places for value in results(place)]
        assert values, f"{places} have no numbers: {row}"
        for number in re.findall(r"\d+(?:\.\d+)?", " ".join(row.split(" | ")[1:])):
            digits = len(number.partition(".")[2])
            rounded = {round(value * scale, digits) for value in values for scale in SCALES}
            assert float(number) in rounded, f"{number} is not in {places}: {row}"


def results(line: str) -> Iterator[float]:
    """Return the numbers of a result file at the places that a line names."""
    name, _, places = line.partition(": ")
    kept = json.loads((ROOT / "bench/results" / name).read_text())
    for place in places.split("; "):
        ends = [list(leaves(at(kept, end.split(" > ")))) for end in place.split(" / ")]
        yield from ends[0] if len(ends) == 1 else (one / other for one in ends[0] for other in ends[1])


def at(kept: Any, path: list[str]) -> Any:
    """Return what stands at a path of keys."""
    return at(kept[path[0]], path[1:]) if path else kept


def leaves(kept: Any) -> Iterator[float]:
    """Return all numbers in a part of a result."""
    if isinstance(kept, dict | list):
        for one in kept.values() if isinstance(kept, dict) else kept:
            yield from leaves(one)
    elif isinstance(kept, int | float):
        yield float(kept)
