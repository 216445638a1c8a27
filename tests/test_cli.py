"""`lmc check`, `lmc stat` and `lmc demo` as a person would run them."""

import json
import os
from pathlib import Path

import pytest
from models import SEPARATOR, random_model, random_tokens
from typer.testing import CliRunner

from lmc.cli import app
from lmc.config import Settings
from lmc.connectors.transformers import CachedModel
from lmc.demo import begins

SMALL = Path(__file__).parent.parent / "examples" / "small_model"


def lmc(*words: str | Path) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [str(word) for word in words])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture
def tier(tmp_path: Path) -> Path:
    """A disk tier with five documents."""
    settings = Settings(chunk_size=16, max_local_cpu_size=0.02, local_disk=tmp_path / "tier")
    with CachedModel(random_model(), settings, SEPARATOR) as cached:
        for seed in range(5):
            cached.learn(random_tokens(16, seed))
    return tmp_path / "tier"


def test_a_sound_tier_checks_clean(tier: Path) -> None:
    code, out, _ = lmc("check", tier)
    assert code == 0
    assert "5 records, 0 wrong" in out


def test_a_flipped_bit_is_found_and_fix_removes_it(tier: Path) -> None:
    victim = sorted(tier.rglob("*.safetensors"))[2]
    blob = bytearray(victim.read_bytes())
    blob[-1] ^= 1
    victim.write_bytes(blob)

    code, out, _ = lmc("check", tier)
    assert code == 1
    assert str(victim) in out
    assert victim.exists()

    code, out, _ = lmc("check", tier, "--fix")
    assert code == 0
    assert "1 wrong, all removed" in out
    assert lmc("check", tier)[1].strip().endswith("4 records, 0 wrong")


def test_stat_counts_records(tier: Path) -> None:
    code, out, _ = lmc("stat", tier)
    assert code == 0
    assert " 5 " in out


@pytest.mark.parametrize("words", [["check"], ["stat"], ["check", "--fix"]])
def test_a_directory_that_is_no_tier_is_named_and_left_alone(words: list[str], tmp_path: Path) -> None:
    code, _, err = lmc(*words, tmp_path / "nowhere")
    assert code == 2
    assert "nowhere" in err
    assert not (tmp_path / "nowhere").exists()


def test_fix_refuses_a_tier_that_another_process_uses(tier: Path) -> None:
    settings = Settings(chunk_size=16, max_local_cpu_size=0.02, local_disk=tier)
    with CachedModel(random_model(), settings, SEPARATOR):
        assert lmc("check", tier)[0] == 0  # looking is allowed
        code, _, err = lmc("check", tier, "--fix")
    assert code == 2
    assert "in use by another process" in err


def run_demo(home: Path, *words: str | Path) -> tuple[int, str, str]:
    return lmc("demo", "--cache", home / "cache", "--page", home / "page.html", "--seed", "1", "--no-large", *words)


def test_the_demo_asks_in_four_ways_and_a_second_run_finds_its_documents(tmp_path: Path) -> None:
    code, out, err = run_demo(tmp_path, "--limit", "6", "--json", tmp_path / "demo.json")
    assert code == 0, err
    assert "24 documents were prefilled alone" in out
    assert all(f" {way} " in out for way in ("full", "exact", "reuse", "blend"))
    found = json.loads((tmp_path / "demo.json").read_text())
    (ways,) = found["models"].values()
    assert ways["blend"]["reused_tokens"] > 500
    assert ways["blend"]["computed_tokens"] < 0.4 * ways["full"]["computed_tokens"]
    assert ways["full"]["bytes"] == {}
    assert len(found["examples"]) == 6
    page = (tmp_path / "page.html").read_text()
    assert "{{" not in page
    assert "<canvas" not in page  # pictures are drawn by the script from data
    assert '"cells"' in page

    code, out, _ = run_demo(tmp_path, "--limit", "2")
    assert code == 0
    assert "24 documents were found on disk" in out


def test_an_answer_is_right_if_it_begins_with_the_wanted_words() -> None:
    assert begins(" Mara .", "Mara")
    assert begins("Mara", "mara")
    assert not begins("Marathon", "Mara")
    assert not begins("", "Mara")


def test_the_demo_takes_other_documents_and_plain_questions(tmp_path: Path) -> None:
    documents = tmp_path / "texts"
    documents.mkdir()
    for number, noun in enumerate(("goose", "lamp", "cart")):
        (documents / f"{number}.txt").write_text(
            f"owner of {noun} Mara . thin frost came from the hill side before dusk . " * 8
        )
    (tmp_path / "q.json").write_text(json.dumps([{"question": "owner of lamp", "answer": "Mara"}]))
    words = ("--model", SMALL / "model", "--documents", documents, "--questions", tmp_path / "q.json")
    code, out, err = run_demo(tmp_path, *words)
    assert code == 0, err
    assert "1 questions over 3 documents" in out


@pytest.mark.parametrize(
    ("questions", "message"),
    [
        ([], "has no questions"),
        ([{"answer": "Mara"}], "each question is"),
        ([{"question": "who", "answer": 7}], "needs an answer in text"),
        ([{"question": "who", "answer": None}], "needs an answer in text"),
        ([{"question": "who", "answer": ""}], "needs an answer in text"),
        ({"queries": []}, "each question is"),
    ],
)
def test_questions_that_cannot_be_asked_are_named(tmp_path: Path, questions: object, message: str) -> None:
    (tmp_path / "q.json").write_text(json.dumps(questions))
    code, _, err = run_demo(tmp_path, "--questions", tmp_path / "q.json")
    assert code == 2
    assert message in err


@pytest.mark.parametrize("content", [b"  \n", b"\xff\xfe\x00"])
def test_documents_without_text_are_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.txt").write_bytes(content)
    code, _, err = run_demo(tmp_path, "--documents", tmp_path)
    assert code == 2
    assert str(tmp_path) in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--documents", "nowhere"], "no .txt files with text in nowhere"),
        (["--questions", "nowhere.json"], "cannot read nowhere.json"),
        (["--questions", str(SMALL / "README.md")], "is no JSON"),
        (["--model", "/nowhere/at/all"], "there is no such directory"),
        (["--json", "/proc/nowhere.json"], "cannot write /proc/nowhere.json"),
        (["--model", "nowhere/at-all"], "cannot load a causal language model from nowhere/at-all"),
    ],
)
def test_wrong_input_is_one_clear_line(tmp_path: Path, words: list[str], message: str) -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    code, out, err = run_demo(tmp_path, *words)
    assert code == 2
    assert message in err
    assert out == ""
