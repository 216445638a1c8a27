"""The demo on a pretrained model: its documents answer its questions, and its page says what was wrong."""

import itertools
import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from lmc.blend.markers import Markers
from lmc.blend.segments import split
from lmc.demo import REAL
from lmc.demo.outcome import Answer, Asked, Outcome, Picture
from lmc.demo.page import write_page
from lmc.demo.pretrained import smollm2
from lmc.demo.questions import (
    TOP,
    Collection,
    Example,
    Prompts,
    Question,
    Retriever,
    passages,
    read_collection,
    read_texts,
    sample,
)
from lmc.demo.run import ask, demo_settings, run
from lmc.keys import common_prefix

ROOT = Path(__file__).parents[1]
# Folders of real documents and questions: those of the demo, and those that only `bench/quality.py` asks.
REAL_TEXTS = pytest.mark.parametrize(
    "folder",
    [
        pytest.param(REAL, id="demo"),
        pytest.param(
            ROOT / "bench/texts/python",
            id="python",
            marks=pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not in the source distribution"),
        ),
    ],
)


@pytest.fixture(scope="module")
def collection() -> Collection:
    return collection_of(REAL)


def collection_of(folder: Path) -> Collection:
    return read_collection(folder / "documents", folder / "questions.json")


def words(text: str) -> str:
    return f" {' '.join(re.findall(r'[a-z0-9]+', text.lower()))} "


def test_passages_are_cut_at_a_fixed_size_without_overlap() -> None:
    text = " ".join(map(str, range(24)))
    assert [len(passage.split()) for passage in passages(text, 10)] == [10, 14], "a short rest joins the one before"
    assert [len(passage.split()) for passage in passages(f"{text} 24", 10)] == [10, 10, 5]
    assert " ".join(passages(text, 4)) == text
    assert list(passages("", 10)) == []
    assert list(passages("one\ntwo  three", 3)) == ["one\ntwo  three"], "line ends and blanks stay"


def test_text_without_blanks_is_cut_too() -> None:
    text = "文" * 100
    assert [len(passage) for passage in passages(text, 2)] == [40, 40, 20]
    assert "".join(passages(text, 2)) == text


def test_a_directory_that_is_called_as_a_text_is_none(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "b.txt").mkdir()
    assert read_texts(tmp_path) == {"a": "one"}


def test_texts_are_read_as_by_lmc_learn_and_those_that_cannot_be_are_named(tmp_path: Path, capsys) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone")
    (tmp_path / "latin1.md").write_bytes(b"caf\xe9")
    (tmp_path / "broken.md").symlink_to(tmp_path / "nowhere")
    assert read_texts(tmp_path) == {"a": "one"}
    named = capsys.readouterr().err
    assert "latin1.md: cannot read " in named
    assert "broken.md: it is a broken link" in named
    (tmp_path / "d.jsonl").write_text('{"text": "one"}')
    assert read_texts(tmp_path / "d.jsonl") == {"d.jsonl:1": "one"}


@REAL_TEXTS
def test_every_answer_stands_in_a_passage_that_bm25_finds(folder: Path) -> None:
    collection = collection_of(folder)
    assert len(collection.documents) >= 150
    assert len(collection.questions) >= 80
    assert len({question.question for question in collection.questions}) == len(collection.questions)
    retriever, found = Retriever(collection.documents), 0
    for question in collection.questions:
        assert question.answer
        assert question.document
        assert words(question.answer) in words(collection.documents[question.document]), question
        assert words(question.answer) not in words(question.question), question
        found += question.document in retriever.top(question.question, 6)
    assert found >= 0.95 * len(collection.questions)


@REAL_TEXTS
def test_every_document_has_a_licence_and_all_are_small(folder: Path) -> None:
    _, *sections = (folder / "LICENSES.md").read_text().split("\n## ")
    named = [name for section in sections for name in section.partition("\n")[0].split(", ")]
    assert sorted(named) == sorted(path.name for path in (folder / "documents").iterdir())
    # Texts that are not in the public domain have the text of their licence with its copyright line.
    licences = [
        re.findall(r"^- Licence: .+, `(.+)`\n- Copyright line: (.+)$", section, re.MULTILINE) for section in sections
    ]
    assert [len(found) for found in licences] == [int((folder / "licenses").is_dir())] * len(sections)
    for path, line in itertools.chain(*licences):
        assert line in (folder / path).read_text().splitlines()
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) <= 300_000


def test_the_demo_asks_the_questions_to_show_and_a_limit_draws_from_all_kinds(collection: Collection) -> None:
    shown = sample(collection, None).questions
    assert shown == [question for question in collection.questions if question.shown]
    assert 12 <= len(shown) <= 20
    assert {question.kind for question in sample(collection, 2).questions} == {"one passage", "two passages"}


def test_the_page_of_benchmarks_says_how_many_passages_and_questions_there_are(collection: Collection) -> None:
    told = re.search(
        r"into (\d+) passages, .* (\d+) of (\d+) hand-written questions .* over the (\w+) passages that BM25 finds",
        " ".join((ROOT / "docs/benchmarks.md").read_text().split()),
    )
    assert told is not None
    shown = sample(collection, None).questions
    counted = len(collection.documents), len(shown), len(collection.questions), {6: "six"}[TOP]
    assert told.groups() == tuple(map(str, counted))


def test_a_question_is_asked_over_the_six_passages_that_fit_best(collection: Collection) -> None:
    question, retriever = collection.questions[0], Retriever(collection.documents)
    order = Prompts(collection, Letters(), "#").example(question, 0).order
    assert sorted(order) == sorted(retriever.top(question.question, 6))


class Letters:
    """A tokenizer of one token for each letter, with a chat template."""

    def decode(self, tokens: list[int], **_: bool) -> str:
        return "".join(map(chr, tokens))

    chat_template = "system and user"

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [*([0] if add_special_tokens else []), *map(ord, text)]

    def apply_chat_template(self, chat: list[dict[str, str]], **_: bool) -> str:
        return "".join(f"<{part['role']}>{part['content']}" for part in chat) + "<assistant>"


@pytest.mark.parametrize(
    ("template", "wanted"),
    [
        ("system and user", "<system>Be short.<user>Here are the documents.#one#Question: Who?<assistant>It was"),
        ("user", "<user>Be short. Here are the documents.#one#Question: Who?<assistant>It was"),
        (None, "\0Be short.#one#Who? It was"),
    ],
)
def test_a_model_is_asked_in_its_chat_template_if_it_has_one(template: str | None, wanted: str) -> None:
    tokenizer = Letters()
    tokenizer.chat_template = template  # type: ignore[assignment]
    question = Question(question="Who?", answer="Ada", accepted=("Ada King",), lead="It was")
    prompts = Prompts(Collection(system="Be short.", documents={"a": "one"}, questions=[question]), tokenizer, "#")
    example = prompts.example(question, 0)
    assert "".join(map(chr, example.prompt)) == wanted
    assert example.accepted == ("Ada", "Ada King")


def test_a_separator_in_a_document_does_not_cut_it() -> None:
    """The demo ended with a traceback, because the prompt had more documents than were retrieved."""
    question = Question(question="Who?", answer="Ada", accepted=())
    documents = {"a": "one ## two", "b": "three"}
    prompts = Prompts(Collection(system="Be short.", documents=documents, questions=[question]), Letters(), "##")
    markers = Markers(separators=((35, 35),))
    example = prompts.example(question, 0)
    assert len(split(example.prompt, markers).documents) == len(example.order) == 2
    assert "one # # two" in "".join(map(chr, example.prompt))


def test_agreement_is_counted_up_to_the_first_difference() -> None:
    assert common_prefix([1, 2, 3], [1, 2, 4]) == 2
    assert common_prefix([1, 2], [1, 2, 4]) == 2
    assert common_prefix([5], [1]) == 0


def test_as_full_is_the_share_of_the_first_16_tokens_of_full_prefill_s_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"full": [*range(65, 85)], "reuse": [*range(65, 69), 90, *range(70, 85)], "blend": [*range(65, 81), 90, 90]}
    monkeypatch.setattr("lmc.demo.run.greedy_answer", lambda _cached, _prompt, done, _limit: said[done.how])
    report = SimpleNamespace(seconds=1.0, computed=[1], reused=0, exact=0)
    done = {how: SimpleNamespace(how=how, report=report) for how in said}
    example = Example(question=Question(question="?", answer="A"), order=(), answer="A", prompt=[1])
    asked = ask(None, example, done, Letters(), 20)  # type: ignore[arg-type]
    assert {how: way.agreement for how, way in asked.ways.items()} == {"full": 1.0, "reuse": 4 / 16, "blend": 1.0}


def answer(text: str, right: bool = True) -> Answer:
    return Answer(text=text, right=right, agreement=0.5, seconds=0.25, computed=7.0, reused=3)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (" D. Rutherford. It was", "D. Rutherford."),
        (" Mrs. Dashwood of Sussex! And", "Mrs. Dashwood of Sussex!"),
        (" 1828. It", "1828."),
        ("Alma . the", "Alma ."),
        (" the coast of", "the coast of …"),
    ],
)
def test_an_answer_is_shown_to_the_end_of_its_sentence(text: str, sentence: str) -> None:
    assert answer(text).sentence() == sentence


def test_the_page_and_the_printed_lines_mark_what_is_wrong(tmp_path) -> None:  # type: ignore[no-untyped-def]
    question = Question(question="Who <b>?", answer="Ada", lead="It was")
    asked = Asked(
        example=Example(question=question, order=("a",), answer="Ada", prompt=[1]),
        ways={"full": answer("Ada."), "reuse": answer("Bob & Co.", right=False)},
    )
    assert asked.title() == "Who <b>? → Ada"
    assert asked.lines() == ["    It was …", "    full   Ada.", "  ✗ reuse  Bob & Co."]
    facts = dict.fromkeys(("questions", "documents", "documents_retrieved", "documents_found", "threads"), 1)
    facts |= {"disk": "d", "strategy": "union", "ratio": 0.15, "seconds": 2.0, "learn_seconds": 1.0}  # type: ignore[dict-item]
    write_page(tmp_path / "page.html", Outcome(facts=facts, models={}, asked=[asked], pictures=[]))
    page = (tmp_path / "page.html").read_text()
    assert "{{" not in page
    assert "<b>Who &lt;b&gt;?</b><br>Ada" in page
    assert "<td><i>It was</i> Ada.<small>250 ms, 7 tokens computed, 50% as full</small></td>" in page
    assert "<td class='wrong'><i>It was</i> Bob &amp; Co." in page


def test_no_text_of_a_prompt_becomes_a_part_of_the_page(tmp_path) -> None:  # type: ignore[no-untyped-def]
    question = Question(question="What is {{DATA}}?", answer="{{BODY}}")
    asked = Asked(
        example=Example(question=question, order=("a",), answer="{{BODY}}", prompt=[1]),
        ways={"full": answer("{{DATA}}")},
    )
    facts = dict.fromkeys(("questions", "documents", "documents_retrieved", "documents_found", "threads"), 1)
    facts |= {"disk": "d", "strategy": "union", "ratio": 0.15, "seconds": 2.0, "learn_seconds": 1.0}  # type: ignore[dict-item]
    tokens = ["<img src=x onerror=alert(1)>", "<!--<script>", "</script>"]
    picture = Picture(title="", answered="", tokens=tokens, documents=[], deviation=[[0.0] * 3], recomputed=[[]])
    write_page(tmp_path / "page.html", Outcome(facts=facts, models={}, asked=[asked], pictures=[picture]))
    page = (tmp_path / "page.html").read_text()
    assert "What is {{DATA}}?" in page
    assert [token in page for token in tokens[:2]] == [False, False]
    (data,) = re.findall(r"^const pictures = (.*);$", page, re.M)
    assert json.loads(data)[0]["tokens"] == tokens


@pytest.mark.long
def test_the_pretrained_model_answers_real_questions_in_four_ways(collection: Collection, tmp_path) -> None:  # type: ignore[no-untyped-def]
    """Few and short passages, for time: with them all answers are right."""
    kept = {name: text for name, text in collection.documents.items() if name in ("jargon-041", "jargon-015")}
    asked = [question for question in collection.questions if question.document in kept][:2]
    few = replace(collection, documents=kept, questions=asked, answer_tokens=8)
    done: list[tuple[str, int, int]] = []
    outcome = run(
        smollm2(), few, demo_settings(tmp_path), seed=1, large=False, progress=lambda *step: done.append(step)
    )
    assert done[-1] == ("questions in four modes", 2, 2)
    ((name, rows),) = outcome.models.items()
    assert name.startswith("SmolLM2-135M-Instruct 13")
    assert rows["blend"]["reused_tokens"] > 0.7 * rows["full"]["prompt_tokens"]
    assert rows["exact"]["agreement"] == 1.0
    for one in outcome.asked:
        assert one.ways["full"].right
        assert one.ways["full"].text == one.ways["exact"].text
    assert outcome.pictures
    for picture in outcome.pictures:
        inside = [at for _, start, stop in picture.documents for at in range(start, stop)]
        for chosen in picture.data()["recomputed"]:
            assert len(chosen) == pytest.approx(0.15 * len(inside), abs=1)
            assert set(chosen) <= set(inside)
