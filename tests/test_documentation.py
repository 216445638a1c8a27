"""Every sentence of the README and of the page about vLLM is held by a test, which a file in `data/sentences` names.

It has each sentence, and each row of a table, in the order of the page. Indented below it stand

    test_blender.py::test_ratio_one            a test that fails if the sentence is not true any more
    demo.json: models > small > blend          where its numbers stand in `bench/results`; a row has no others
    demo.json: full > ttft / blend > ttft      the ratio of two of them
    (whom it is for)                           why no test can find it wrong
"""

import ast
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from sentences import sentences

ROOT = Path(__file__).parents[1]
PAGES = {page.stem: page for page in (ROOT / "README.md", ROOT / "examples/serve_vllm.md")}
SCALES = 1, 100, 1000  # a share in percent, seconds in milliseconds


def noted(page: str) -> dict[str, list[str]]:
    """Return what the file about a page has below each sentence."""
    found: dict[str, list[str]] = {}
    for line in (ROOT / "tests/data/sentences" / f"{page}.txt").read_text().splitlines():
        if line.startswith("    "):
            found[list(found)[-1]].append(line.strip())
        else:
            found[line] = []
    return found


def lines(shape: str) -> list[tuple[str, str]]:
    """Return the lines of this shape, each with its sentence."""
    pairs = [(line, sentence) for page in PAGES for sentence, below in noted(page).items() for line in below]
    return [(line, sentence) for line, sentence in pairs if re.match(shape, line)]


@pytest.mark.parametrize("page", PAGES)
def test_every_sentence_is_noted(page: str) -> None:
    written, known = sentences(PAGES[page].read_text()), noted(page)
    assert [one for one in written if one not in known] == [], "name a test that holds it in tests/data/sentences"
    assert list(known) == list(dict.fromkeys(written)), "these are not on the page any more, or in another order"
    assert [one for one, below in known.items() if not below] == []


def test_each_line_is_a_test_a_result_or_a_reason() -> None:
    known = r"[\w/]+\.py::test_\w+$|\w+\.json: .+|\(.+\)$"
    assert [line for line, _ in lines("") if not re.match(known, line)] == []


def test_the_tests_are_there() -> None:
    for line, sentence in lines(r"[\w/]+\.py::"):
        file, _, name = line.partition("::")
        assert name in functions_of(ROOT / "tests" / file), f"there is no test {line}: {sentence}"


def test_the_numbers_of_the_tables_are_those_that_were_kept() -> None:
    for line, sentence in lines(r"\w+\.json: "):
        values = list(results(line))
        assert values, f"{line} has no numbers: {sentence}"
        for number in re.findall(r"\d+(?:\.\d+)?", " ".join(sentence.split(" | ")[1:])):
            digits = len(number.partition(".")[2])
            rounded = {round(value * scale, digits) for value in values for scale in SCALES}
            assert float(number) in rounded, f"{number} is not in {line}: {sentence}"


@cache
def functions_of(file: Path) -> set[str]:
    """Return the names of the functions of a file with tests."""
    return {node.name for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef)}


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
