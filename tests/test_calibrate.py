"""`lmc calibrate`: what it finds, when it says no, and the settings that it prints."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from models import random_model
from transformers import AutoTokenizer
from typer.testing import CliRunner

from lmc.blend.markers import Markers
from lmc.blend.segments import join, split
from lmc.commands.calibrate.measure import BLIND, RATIOS, Measured, Measurement, Numbers
from lmc.commands.calibrate.prompts import (
    ANSWER_TOKENS,
    ASK,
    CalibrationPrompts,
    collect,
    questions_about,
    read_inputs,
)
from lmc.commands.calibrate.verdict import judge, reads_documents, report_of, table, yaml_lines
from lmc.commands.cli import app
from lmc.config.settings import Settings
from lmc.demo import SHIPPED
from lmc.small_files import check_writable

MODEL, DOCUMENTS, QUESTIONS = SHIPPED / "model", SHIPPED / "documents", SHIPPED / "questions.json"
BLENDING = Settings(enable_blending=True, max_local_cpu_size=0.02)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Each test has a cache directory of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def lmc(*words: str | Path) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["calibrate", *map(str, words)])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture(scope="module")
def random_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with random weights, and the tokenizer of the shipped one."""
    folder = tmp_path_factory.mktemp("random")
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    random_model(vocab_size=len(tokenizer), max_position_embeddings=2048).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


# -- the verdict -----------------------------------------------------------------------------------------------------


def measured(same: dict[float, float], *, gain: float = 2.0, seconds: float = 0.5) -> Measured:
    """Ten prompts, at each ratio with a share of the same tokens; full prefill takes a second."""
    found = Measured(full=[1.0] * 10, gains=[gain - 0.1, gain + 0.1] * 5, tokens=[1000] * 10)
    for ratio in (BLIND, *RATIOS):
        share = same.get(ratio, 0.0)
        found.ways[ratio] = Numbers(same=[share] * 10, first=[True] * 10, kl=[1 - share] * 10, seconds=[seconds] * 10)
    return found


def test_the_smallest_ratio_that_reaches_the_target_is_chosen() -> None:
    shares = {0.05: 0.9, 0.1: 0.97, 0.15: 0.98, 0.3: 0.99, 0.5: 1.0}
    assert judge(measured(shares), 0.98).ratio == 0.15
    assert judge(measured(shares), 0.95).ratio == 0.1
    assert judge(measured(shares), 1.0).ratio == 0.5


def test_a_ratio_that_is_good_by_luck_is_not_chosen() -> None:
    assert judge(measured({0.05: 0.99, 0.1: 0.9, 0.15: 0.99, 0.3: 0.99, 0.5: 1.0}), 0.98).ratio == 0.15


def test_first_tokens_must_agree_as_well() -> None:
    found = measured(dict.fromkeys(RATIOS, 0.99))
    for ratio in (0.05, 0.1):
        found.ways[ratio].first[:3] = [False] * 3
    assert judge(found, 0.98).ratio == 0.15


def test_one_first_token_of_ten_may_differ_by_chance() -> None:
    found = measured(dict.fromkeys(RATIOS, 1.0))
    found.ways[0.05].first[0] = False
    assert found.ways[0.05].agreement == pytest.approx(0.9 + 0.3 / 10**0.5)
    assert judge(found, 0.98).ratio == 0.05


def test_the_answer_is_no_if_no_ratio_is_good_enough() -> None:
    verdict = judge(measured({0.3: 0.9, 0.5: 0.97}), 0.98)
    assert verdict.ratio is None
    assert verdict.reason == (
        "no ratio reaches an agreement of 98.0%: at 0.5 97.0% of tokens and 100% of first tokens agree with "
        "full prefill"
    )


def test_the_answer_is_no_if_no_time_is_gained() -> None:
    verdict = judge(measured(dict.fromkeys(RATIOS, 1.0), seconds=0.95), 0.98)
    assert verdict.ratio is None
    assert verdict.reason == "ratio 0.05 reaches 98.0%, but saves no time: its TTFT is 95% of full prefill's"
    assert judge(measured(dict.fromkeys(RATIOS, 1.0), seconds=0.9), 0.98).ratio == 0.05


def test_the_answer_is_no_if_the_model_does_not_read_the_documents() -> None:
    verdict = judge(measured(dict.fromkeys(RATIOS, 1.0), gain=0.05), 0.98)
    assert verdict.ratio is None
    assert "does not use the documents" in verdict.reason


@pytest.mark.parametrize(
    ("gains", "reads"),
    [([2.0, 3.0, 2.5, 2.2], True), ([5.0, -5.0, 4.0, -2.0], False), ([0.02, 0.03, 0.02, 0.03], False), ([9.0], False)],
)
def test_a_model_reads_documents_if_they_help_clearly(gains: list[float], reads: bool) -> None:
    assert reads_documents(gains) == reads


def test_the_yaml_lines_are_settings_that_mean_the_calibrated_ones(tmp_path: Path) -> None:
    for given in (Settings(), Settings(blend_method="cacheblend")):
        file = tmp_path / "lmc.yaml"
        file.write_text(yaml_lines(given, 0.3))
        read = Settings.load(environ={"LMC_CONFIG_FILE": str(file)})
        assert read.enable_blending
        assert (read.blend_method, read.blend_recompute_ratios) == (given.blend_method, 0.3)


def test_the_table_has_full_prefill_blind_reuse_and_every_ratio() -> None:
    columns, rows = table(measured({BLIND: 0.5, 0.05: 0.75}))
    assert [row[0] for row in rows] == ["full prefill", "blind reuse", *(f"blend {ratio:g}" for ratio in RATIOS)]
    assert dict(zip(columns, rows[2], strict=True)) == {
        "mode": "blend 0.05",
        "TTFT ms": "500",
        "speed-up": "2.0",
        "same tokens": "75.0%",
        "same first token": "100%",
        "KL": "0.2500",
        "gap closed": "50%",
    }


@pytest.mark.parametrize(("seconds", "count"), [(10.0, 21), (1.0, 64), (100.0, 8)])
def test_as_many_prompts_are_measured_as_a_few_minutes_allow(
    seconds: float, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The least number of prompts is measured however long that takes."""
    clock = SimpleNamespace(now=0.0, perf_counter=lambda: clock.now)

    def measure(_: Measurement, prompt: int, number: int, found: Measured) -> None:
        clock.now += seconds
        found.full.append(seconds)

    monkeypatch.setattr("lmc.commands.calibrate.measure.time", clock)
    monkeypatch.setattr(Measurement, "_warm_up", lambda self, prompt: None)
    monkeypatch.setattr(Measurement, "_measure", measure)
    shown: list[tuple[int, int]] = []
    measurement = Measurement(SimpleNamespace(settings=BLENDING), SimpleNamespace(prompt=int))
    found = measurement.run(None, lambda done, of: shown.append((done, of)))
    assert len(found.full) == count
    assert shown[-1] == (count, count)


# -- prompts ---------------------------------------------------------------------------------------------------------


def test_long_texts_are_cut_between_words_and_nothing_is_lost(tmp_path: Path) -> None:
    text = "\n".join(f"owner of goose is the old miller {number} ." for number in range(100))
    (tmp_path / "a.txt").write_text(text)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    documents = list(collect(read_inputs(tmp_path, None), tokenizer, 2048).documents.values())
    assert "\n".join(documents).split() == text.split()
    assert all("\n" in document for document in documents)
    lengths = [len(tokenizer.encode(document, add_special_tokens=False)) for document in documents]
    assert len(lengths) > 3
    assert all(150 < length < 310 for length in lengths)


def test_a_made_question_is_a_sentence_without_its_second_half() -> None:
    text = "The first sentence of this short text has ten words. Too short. # 1 | 2 | 3 | 4 | 5 | 6 | 7 | 8 | 9 | 10"
    (question,) = questions_about({"a 1": text})
    assert question.question == f"{ASK}The first sentence of this"
    assert (question.lead, question.answer) == ("The first sentence of this", "short text has ten words.")


def test_a_prompt_holds_the_documents_between_separators_and_ends_with_the_known_half(tmp_path: Path) -> None:
    sentence = "owner of goose is the old miller who came here before dusk"
    for number in range(8):
        (tmp_path / f"{number}.md").write_text(
            f"{sentence} {number} .\n" + "thin frost came from the hill side .\n" * 9
        )
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    tokenizer.chat_template = "<{{ messages[0]['content'] }}>"
    collection = collect(read_inputs(tmp_path, None), tokenizer, 2048)
    prompts = CalibrationPrompts(collection, tokenizer, " # # ")
    prompt = prompts.prompt(0)
    separator = tuple(tokenizer.encode(" # # ", add_special_tokens=False))
    parts = split(prompt.tokens, Markers(separators=(separator,)))
    assert len(parts.documents) == 6
    known = tokenizer.encode(collection.questions[0].lead, add_special_tokens=False)
    rest = len(known) - 1  # Its first token may be joined with the end of the template.
    assert prompt.tokens[-rest:] == prompt.bare[-rest:] == known[1:]
    assert prompt.bare == join(
        prompt.tokens[: parts.system.stop], (), prompt.tokens[parts.question.start :], list(separator)
    )
    assert 0 < len(prompt.right) <= ANSWER_TOKENS
    assert prompts.prompt(0) == prompt, "the same every time"


# -- the report ------------------------------------------------------------------------------------------------------


def test_the_report_says_what_was_measured_and_with_which_settings() -> None:
    found = measured(dict.fromkeys(RATIOS, 0.99))
    report = report_of("a", found, judge(found, 0.98), 0.98, Settings())
    said = {name: report[name] for name in ("model", "worth_it", "ratio", "agreement", "speed_up", "prompts")}
    assert said == {
        "model": "a", "worth_it": True, "ratio": 0.05, "agreement": 0.99, "speed_up": 2.0, "prompts": 10,
    }  # fmt: skip
    assert report["settings"] == {"blend_method": "union"}


# -- the command -----------------------------------------------------------------------------------------------------


def test_the_small_model_is_worth_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path) -> None:
    """TTFT is not asserted, as the machine may be busy: the verdict may be that saves no time."""
    monkeypatch.setenv("LMC_MAX_LOCAL_CPU_SIZE", "0.3")
    file = tmp_path / "report.json"
    given = ("--documents", DOCUMENTS, "--questions", QUESTIONS, "--prompts", "3", "--report", file)
    code, out, err = lmc(MODEL, *given)
    assert "3 prompts of 1" in out, err
    report = json.loads(file.read_text())
    assert report["worth_it"] == (code == 0)
    assert not (cache / "lmc" / "calibrations.json").exists(), "nothing is kept that turns anything off"
    if code == 0:
        assert "enable_blending: true" in out
    else:
        assert code == 1
        assert "saves no time" in report["reason"]
        assert "Blending is not worth it for this model: " in out


@pytest.mark.parametrize(
    ("shares", "code", "said"),
    [({0.15: 0.899, 0.3: 0.9, 0.5: 1.0}, 0, "is worth it at ratio 0.3"), ({0.5: 0.899}, 1, "is not worth it")],
)
def test_without_a_target_blends_have_to_agree_at_90_percent(
    shares: dict[float, float], code: int, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("lmc.commands.calibrate.command._measure", lambda *_: measured(shares))
    file = tmp_path / "report.json"
    found, out, _ = lmc(MODEL, "--documents", DOCUMENTS, "--report", file)
    assert found == code
    assert said in out
    assert ("enable_blending: true" in out) == (code == 0)
    report = json.loads(file.read_text())
    assert (report["target"], report["worth_it"]) == (0.9, code == 0)


def test_random_weights_are_not_worth_it(random_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMC_MAX_LOCAL_CPU_SIZE", "0.3")
    for questions in (["--questions", QUESTIONS], []):
        code, out, _ = lmc(random_checkpoint, "--documents", DOCUMENTS, "--prompts", "4", *questions)
        assert code == 1
        assert "Blending is not worth it for this model: the model does not use the documents" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["/nowhere/at/all", "--documents", DOCUMENTS], "the directory does not exist"),
        ([MODEL, "--documents", "nowhere"], "nowhere does not exist: use a directory of text files"),
        ([MODEL, "--documents", MODEL], "has no documents with text: not read: "),
        ([DOCUMENTS, "--documents", DOCUMENTS], "cannot load a causal language model from "),
        (
            [MODEL, "--documents", DOCUMENTS, "--agreement", "1.5"],
            "invalid --agreement 1.5: use a number above 0 and at most 1",
        ),
        (
            [MODEL, "--documents", DOCUMENTS, "--agreement", "nan"],
            "invalid --agreement nan: use a number above 0 and at most 1",
        ),
        ([MODEL, "--documents", DOCUMENTS, "--questions", "nowhere.json"], "cannot read nowhere.json"),
    ],
)
def test_wrong_inputs_are_answered_in_one_line(words: list[str | Path], message: str) -> None:
    code, _, err = lmc(*words)
    assert code == 2
    assert message in err
    assert err.count("\n") == 1


def test_documents_without_a_sentence_need_questions(tmp_path: Path) -> None:
    (tmp_path / "numbers.txt").write_text("1 2 3 4 5 6 7 8 9 10 11 12")
    code, _, err = lmc(MODEL, "--documents", tmp_path)
    assert code == 2
    assert "the documents have no sentence of 8 to 40 words to make questions of: use --questions" in err


def test_documents_that_are_too_short_to_be_blended_are_named(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("owner of goose is the old miller who came here before dusk .")
    code, _, err = lmc(MODEL, "--documents", tmp_path)
    assert code == 2
    assert "prompts over these documents are not blended" in err
    assert "blend_min_tokens" in err


def test_a_report_that_cannot_be_written_is_named_before_a_measurement_of_minutes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("lmc.commands.calibrate.command._measure", lambda *_: pytest.fail("measured"))
    code, out, err = lmc(MODEL, "--documents", DOCUMENTS, "--report", "/proc/nowhere/report.json")
    assert (code, out) == (2, "")
    assert "cannot write /proc/nowhere/report.json" in err
    file = tmp_path / "new" / "report.json"
    check_writable(file, "")
    assert not file.exists(), "nothing empty is left"


def test_the_result_is_shown_even_if_its_report_cannot_be_written_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmc.commands.calibrate.command._measure", lambda *_: measured({0.5: 0.1}))
    monkeypatch.setattr("lmc.small_files.check_writable", lambda *_: None)
    code, out, err = lmc(MODEL, "--documents", DOCUMENTS, "--report", "/proc/nowhere/report.json")
    assert code == 2
    assert "Blending is not worth it" in out
    assert "cannot write /proc/nowhere/report.json" in err


def test_a_report_is_written_even_if_its_result_cannot_be_shown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def failing(*_: object) -> None:
        raise UnicodeEncodeError("ascii", "…", 0, 1, "ordinal not in range")

    monkeypatch.setattr("lmc.commands.calibrate.command._measure", lambda *_: measured({0.5: 0.1}))
    monkeypatch.setattr("lmc.commands.calibrate.command._show", failing)
    with pytest.raises(UnicodeEncodeError):
        lmc(MODEL, "--documents", DOCUMENTS, "--report", tmp_path / "report.json")
    assert json.loads((tmp_path / "report.json").read_text())["worth_it"] is False


def test_separators_in_a_document_do_not_stop_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMC_MAX_LOCAL_CPU_SIZE", "0.3")
    text = "owner of goose Mara . thin frost came from the hill side # # before dusk . " * 8
    for number, word in enumerate(("mill", "inn", "farm", "forge", "forest", "market")):
        (tmp_path / f"{number}.txt").write_text(f"notes from the {word} : {text}")
    (tmp_path / "q.json").write_text(json.dumps([{"question": "owner of lamp", "answer": "Mara"}]))
    code, _, err = lmc(MODEL, "--documents", tmp_path, "--questions", tmp_path / "q.json", "--prompts", "2")
    assert code in (0, 1), err
