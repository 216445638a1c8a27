"""Numbers in tables equal `bench/results/`, and generated pages equal what is generated now.

A file of `data/tables/` has the rows with measured numbers of one page. Their sources are indented below each row:

    demo.json: models > small > blend          the place in `bench/results/`; a row has no other numbers
    demo.json: full > ttft / blend > ttft      the ratio of two of them
"""

import json
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from markdown_tables import table_rows

from lmc.blend.canvas import Canvas
from lmc.commands.cli import app
from lmc.config.settings import Settings
from lmc.connectors.vllm.model_kinds import TESTED

ROOT = Path(__file__).parents[1]
PAGES = {
    "README": "README.md",
    "benchmarks": "docs/benchmarks.md",
    "scale": "docs/scale.md",
    "fusion": "docs/fusion.md",
    "your-rag-app": "docs/your-rag-app.md",
}
SCALES = 1, 100, 1000  # a share in percent, seconds in milliseconds


DOCUMENTS = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*.md")]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_files_that_a_document_names_exist(document: Path) -> None:
    text = document.read_text()
    links = re.findall(r"\]\((?!\w+:)([^)#\s]+)", text)
    assert [link for link in links if not (document.parent / link).exists()] == []
    folders = "lmc|blend|storage|connectors|tests|bench|examples|docs|tools"
    paths = re.findall(rf"`((?:{folders})/[\w./-]*(?:\.\w+|/))`", text)
    made = "bench/results/gpu_accept.json"  # which only a GPU makes
    assert [path for path in paths if not (ROOT / path).exists() and path != made] == []


def test_the_page_of_structure_names_what_its_files_define() -> None:
    page = (ROOT / "docs" / "structure.md").read_text()
    named = re.findall(r"`([\w.]+)`(?:,? (?:and|or) `([\w.]+)`)? in `([\w/]+\.py)`", page)
    assert [
        (name, file)
        for *names, file in named
        for name in filter(None, names)
        if not re.search(rf"(def|class) {(last := name.split('.')[-1])}\b|\b{last}(: .+)? =", (ROOT / file).read_text())
    ] == []


def test_every_decision_is_linked_from_another_page() -> None:
    pages = "".join(page.read_text() for page in DOCUMENTS if page.parent.name != "decisions")
    assert [page.name for page in (ROOT / "docs" / "decisions").glob("*.md") if page.name not in pages] == []


def test_ten_commands_lead_to_two_hosts_and_lmc_understands_them() -> None:
    """`tests/engine/test_two_hosts.py` runs them, before a release."""
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / "docs/two-hosts.md").read_text(), re.DOTALL)
    commands = [shlex.split(line, comments=True) for line in "".join(blocks).replace("\\\n", " ").splitlines()]
    assert len(commands) == 10
    (variables,) = (words for program, *words in commands if program == "export")
    environment = dict(word.split("=", 1) for word in variables)
    assert [remote.place for remote in Settings.load(environ=environment).remotes] == ["mooncake", "objects"]
    (packages,) = (words for program, *words in commands if program == "pip")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(packages[1].strip(".[]").split(",")) <= extras.keys()
    verbs = typer.main.get_command(app).commands
    for name, *words in (words for program, *words in commands if program == "lmc"):
        verbs[name].make_context(name, words)  # raises an error for an option that it does not have


def sources(name: str) -> dict[str, list[str]]:
    """Return the rows with measured numbers of a page, each with the sources of its numbers."""
    rows: dict[str, list[str]] = {}
    for line in (ROOT / f"tests/data/tables/{name}.txt").read_text().splitlines():
        if line.startswith("    "):
            rows[list(rows)[-1]].append(line.strip())
        else:
            rows[line] = []
    return rows


def test_the_settings_page_is_generated_from_the_settings() -> None:
    """Run `python tools/settings_page.py > docs/settings.md` after a change of `Settings`."""
    command = [sys.executable, ROOT / "tools/settings_page.py"]
    generated = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert (ROOT / "docs/settings.md").read_text() == generated


@pytest.mark.parametrize("name", PAGES)
def test_the_numbers_of_the_tables_are_those_that_were_kept(name: str) -> None:
    page = ROOT / PAGES[name]
    rows = table_rows(page.read_text())
    for row, places in sources(name).items():
        assert row in rows, f"{page.name} has no such row: {row}"
        values = [value for place in places for value in results(place)]
        assert values, f"{places} have no numbers: {row}"
        for number in re.findall(r"-?\d+(?:\.\d+)?", " ".join(row.split(" | ")[1:])):
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


def test_the_page_of_connectors_lists_all_methods_of_a_canvas() -> None:
    table = (ROOT / "docs" / "connectors.md").read_text().partition("| method |")[2].partition("\n\n")[0]
    listed = set(re.findall(r"`(\w+)`", " ".join(line.split("|")[1] for line in table.splitlines()[2:])))
    methods = {name for name, value in vars(Canvas).items() if callable(value) and not name.startswith("_")}
    assert methods <= listed <= methods | Canvas.__annotations__.keys()


def test_the_page_of_models_lists_the_architectures_that_were_tested() -> None:
    rows = dict(re.findall(r"^\| `(\w+)`(?: \([^)]*\))? \| (.*) \|$", (ROOT / "docs" / "models.md").read_text(), re.M))
    assert rows == TESTED
