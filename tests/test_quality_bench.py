"""`bench/quality.py` measures ways on prompts, continues a run that was stopped, and draws a page."""

import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from lmc.blend.strategies import STRATEGIES

pytestmark = pytest.mark.long

BENCH = Path(__file__).parents[1] / "bench"


def run(folder: Path, *arguments: str) -> tuple[str, list[dict]]:
    """Return what a run prints, and the lines that it has written so far."""
    paths = ["--rows", str(folder / "rows.jsonl"), "--page", str(folder / "page.html")]
    command = [sys.executable, BENCH / "quality.py", "--tasks", "small", *arguments, *paths]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout, [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("quality")


@pytest.fixture(scope="module")
def first(folder: Path) -> tuple[str, list[dict]]:
    return run(folder, "--prompts", "3", "--ratios", "0.15,1")


def test_a_blend_of_all_tokens_is_full_prefill(first: tuple[str, list[dict]]) -> None:
    for row in first[1]:
        everything = row["ways"]["union+primer+shift 1"]
        assert everything["kl"] < 1e-6
        assert everything["agreement"] == everything["charged"] == 1
        assert everything["said"] == row["ways"]["full"]["said"]


def test_blind_reuse_computes_nothing_and_differs(first: tuple[str, list[dict]]) -> None:
    blind = [row["ways"]["blind"] for row in first[1]]
    assert all(way["charged"] == 0 for way in blind)
    assert max(way["kl"] for way in blind) > 0.01


@pytest.fixture
def quality(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the modules of `bench/quality` importable; the strategy that they add goes again."""
    monkeypatch.syspath_prepend(BENCH)
    monkeypatch.setitem(STRATEGIES, "oracle", STRATEGIES["none"])


def test_no_word_of_the_made_prompts_is_one_with_which_the_default_was_chosen(quality: None) -> None:
    from quality.tasks import DEVELOPMENT, HELD_OUT

    for field in fields(HELD_OUT):
        kept, used = (getattr(words, field.name) for words in (HELD_OUT, DEVELOPMENT))
        if field.name == "people":
            kept, used = ([name for name, _pronoun in people] for people in (kept, used))
        assert not set(kept) & set(used), field.name


def test_facts_stand_first_in_their_documents_or_inside_of_them(quality: None) -> None:
    from quality.tasks import HELD_OUT, MAIN, Draw

    for name, make in MAIN.items():
        first, inside = (make(Draw(HELD_OUT, name, 6, 10, inside=place)) for place in (False, True))
        assert (inside.question, inside.answer) == (first.question, first.answer)
        for one, other in zip(first.documents, inside.documents, strict=True):
            assert sorted(other.split()) == sorted(one.split()), "the same sentences in another order"
            says_something = not one.startswith(HELD_OUT.fillers)
            assert other.startswith(HELD_OUT.fillers)
            assert other.endswith(HELD_OUT.fillers)
            assert (one != other) == says_something


def test_gap_closed_is_the_share_of_the_kl_of_blind_reuse_that_a_way_removes(quality: None) -> None:
    from quality.rows import summary

    def row(task: str, kl: float, blind: float) -> dict:
        ways = {"full": 0.0, "blind": blind, "blend": kl}
        measured = {"right": 1, "first": 1, "agreement": 1.0, "charged": 0.0}
        return {"task": task, "variant": "v", "tokens": 9, "ways": {way: measured | {"kl": ways[way]} for way in ways}}

    one, other = [row("scope", 0.5, 2.0), row("scope", 0.5, 0.0)], [row("update", 0.0, 1.0)]
    found = summary({"one": one, "other": other})
    closed = {name: [group["ways"][way]["closed"] for way in ("blind", "blend")] for name, group in found.items()}
    assert closed == {"one": [0, 0.5], "other": [0, 1], "mean of main tasks (v)": [0, 0.75]}


def test_a_run_is_continued_where_it_was_stopped(folder: Path, first: tuple[str, list[dict]]) -> None:
    _, rows = run(folder, "--prompts", "4", "--ratios", "0.15,1")
    assert rows[:3] == first[1]
    assert len({row["key"] for row in rows}) == len(rows) == 4
    _, rows = run(folder, "--prompts", "4", "--ratios", "0.15,0.5,1")
    assert [list(row["ways"]) for row in rows[4:]] == [["full", "union+primer+shift 0.5"]] * 4
    printed, again = run(folder, "--prompts", "4", "--ratios", "0.15,0.5,1")
    assert again == rows
    assert "union+primer+shift 0.5 " in printed


def test_rows_of_other_code_are_not_used(tmp_path: Path, first: tuple[str, list[dict]]) -> None:
    lines = [json.dumps({**row, "code": "another"}) + "\n" for row in first[1]]
    (tmp_path / "rows.jsonl").write_text("".join(lines))
    printed, rows = run(tmp_path, "--prompts", "1", "--ratios", "0.15")
    assert "3 lines of" in printed
    assert len(rows) == 4


def test_the_page_has_plots_tables_and_the_chosen_tokens(folder: Path, first: tuple[str, list[dict]]) -> None:
    page = (folder / "page.html").read_text()
    assert "<polyline" in page
    assert "<td>union+primer+shift 0.15</td>" in page
    prompts = json.loads(page.split("const prompts = ", 1)[1].split(";\n", 1)[0])
    chosen = prompts[0]["chosen"]["union+primer+shift 1"]
    inside = [at for start, stop in prompts[0]["documents"] for at in range(start, stop)]
    assert chosen == [[0, inside]]
    assert "</script>" not in json.dumps(prompts).replace("</", "<\\/")
