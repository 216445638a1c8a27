"""`lmc learn`: documents from files and lines, by a model or a server; a run that was interrupted goes on."""

import io
import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from amount import some
from forked import Forked, command
from http_stub import http_stub
from rich.console import Console
from service_fakes import serving
from test_cli import lmc, without_torch
from test_turn_headers import ADDED, tokenizer_of
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from lmc.commands.learn.learners import ModelLearner, Retention, ServerLearner, Stored
from lmc.commands.learn.manifest import Manifest
from lmc.commands.learn.run import LearnRun, parts_of
from lmc.config.settings import Settings
from lmc.connectors.transformers import CachedModel
from lmc.demo import SHIPPED
from lmc.documents.escaped import PROBE, as_json, escapes_tool_results
from lmc.documents.kept import FILE, KeptDocuments
from lmc.documents.sources import Corpus, Document, read_documents
from lmc.errors import InputError
from lmc.http.client import PAGE, Unreachable
from lmc.http.prompts import plain_chat
from lmc.rag import messages
from lmc.terminal import seconds_of

MODEL = SHIPPED / "model"
TEXTS = {path.name: path.read_text().strip() for path in sorted((SHIPPED / "documents").glob("*.txt"))}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("LMC_MAX_LOCAL_CPU_SIZE", "0.05")


# -- sources ----------------------------------------------------------------------------------------------------------


def test_a_directory_is_read_with_all_below_it(tmp_path: Path) -> None:
    for name, text in {"a.txt": " one\n", "below/b.md": "two", "c.pdf": "no text", "empty.txt": " \n"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert read_documents(str(tmp_path)).documents == [Document("a.txt", "one"), Document("below/b.md", "two")]


def test_lines_of_json_are_read_from_a_file_and_from_standard_input(tmp_path: Path, monkeypatch) -> None:
    lines = '{"id": 7, "text": " one\\n"}\n\n{"id": "b", "text": "two\\u2028three", "more": 1}\n'
    (tmp_path / "d.jsonl").write_text(lines)
    found = [Document("7", "one"), Document("b", "two\u2028three")]
    assert read_documents(str(tmp_path / "d.jsonl")).documents == found
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines.encode())))
    assert read_documents("-").documents == found
    (tmp_path / "e.jsonl").write_text('{"key": "a", "body": "one"}')
    assert read_documents(str(tmp_path / "e.jsonl"), "key", "body").documents == [Document("a", "one")]


def test_a_source_without_documents_is_refused_with_the_cause(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    with pytest.raises(InputError, match=r'^standard input has no documents with text: use an object such as {"id":'):
        read_documents("-")
    (tmp_path / "elsewhere").symlink_to(tmp_path)
    with pytest.raises(InputError, match=r"text: no file matches --glob \*\.md; not read: 1 linked folder"):
        read_documents(str(tmp_path), patterns=["*.md"])


def test_a_pipe_is_read_as_a_file() -> None:
    """`lmc learn <(…)` did not find its source. A pipe can be read only once."""
    reading, writing = os.pipe()
    with open(writing, "w") as file:
        file.write('{"id": "a", "text": "one"}\n{"id": "b", "text": "two"}\n')
    with open(reading):
        assert read_documents(f"/dev/fd/{reading}").documents == [Document("a", "one"), Document("b", "two")]


def test_a_file_whose_name_is_no_unicode_is_a_document_with_a_name_that_can_be_sent(tmp_path: Path) -> None:
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.txt")).write_text("one")
    found = [Document("\\xff.txt", "one")]
    for source in (tmp_path, next(tmp_path.iterdir())):
        assert read_documents(str(source)).documents == found


@pytest.mark.parametrize("name", ["app.py", "notes", "d.data"])
def test_a_named_file_is_a_text_unless_it_begins_like_json(tmp_path: Path, name: str) -> None:
    """A program was read as JSON, and each of its lines was an error of a paragraph."""
    (tmp_path / name).write_text("import json\n")
    assert read_documents(str(tmp_path / name)).documents == [Document(name, "import json")]
    (tmp_path / name).write_text('\n{"id": "a", "text": "one"}\n{"id": "b", "text": "two"}')
    assert read_documents(str(tmp_path / name)).documents == [Document("a", "one"), Document("b", "two")]


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("nothing\nnothing", "line 2: it is not valid JSON"),
        ("a text", "name the file of a single text with .txt or .md at the end"),
        ("[1]", 'entry 1: it is not a JSON object: use an object such as {"id": "a", "text": "…"} on each line'),
        ('{"name": "a", "body": "one"}', "it has no 'text': use --text to choose from name, body"),
        ('{"id": "a", "text": 3}', "entry 1: 'text' must be a text"),
        ('{"id": "a", "text": null}', "entry 1: it has no 'text'"),
        ('{"id": [1], "text": "one"}', "entry 1: 'id' must be a text or a whole number"),
        ('{"id": "\\ud800", "text": "one"}', "entry 1: 'id' must be a text or a whole number"),
        ('{"id": "a", "text": " "}', "has no documents with text"),
    ],
)
def test_a_source_that_is_wrong_is_refused_with_its_place(tmp_path: Path, lines: str, said: str) -> None:
    (tmp_path / "d.jsonl").write_text(lines)
    code, _, err = lmc("learn", tmp_path / "d.jsonl", "--url", "http://localhost:1")
    assert code == 2
    assert said in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere", "--url", "http://localhost:1"], "nowhere does not exist"),
        ([SHIPPED / "documents"], "--url of a vLLM server with lmc, or --model"),
        ([SHIPPED / "documents", "--url", "a", "--model", "b"], "--url of a vLLM server with lmc, or --model"),
        ([SHIPPED / "documents", "--model", MODEL], "--local-disk DIRECTORY"),
        ([SHIPPED / "documents", "--url", "localhost:1"], "Use the address of a vLLM server"),
        (
            [SHIPPED / "documents", "--url", "http://localhost:1"],
            "no server answers at http://localhost:1 (Connection refused): is it running?",
        ),
        (["nowhere.md/a", "--url", "http://localhost:1"], "nowhere.md/a does not exist"),
    ],
)
def test_wrong_words_are_answered_with_the_right_ones(words: list[Any], said: str) -> None:
    code, _, err = lmc("learn", *words)
    assert code == 2
    assert said in err
    assert err.count("\n") == 1


def test_an_empty_directory_is_said_to_have_no_documents(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no documents with text"):
        read_documents(str(tmp_path))


def test_files_as_they_are_in_the_wild_are_read_or_named(tmp_path: Path) -> None:
    """One file that cannot be read stopped everything; other endings were left out without a word."""
    files = {
        "a.txt": b"\xef\xbb\xbfwith a mark", "b.TXT": b"upper", "c.markdown": b"# c", "d.rst": b"d\n=", "f.csv": b"x,y",
        "e.HTML": b"<p>e</p>", "latin1.txt": "café".encode("latin-1"), "broken.md": b"\xf0\x9f", "g.pdf": b"%PDF",
        "h.json": b"[]", "LICENSE": b"text", "blank.txt": b" \n", ".hidden.txt": b"no", ".git/config.md": b"no",
        "node_modules/x/README.md": b"no", "below/again.md": b" upper\n", "crlf.txt": b"one\r\ntwo",
        "utf16.txt": "text".encode("utf-16"),
    }  # fmt: skip
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    (tmp_path / "gone.md").symlink_to(tmp_path / "nowhere")
    (tmp_path / "linked").symlink_to(tmp_path / "below")
    (tmp_path / "folder.txt").mkdir()
    corpus = read_documents(str(tmp_path))
    assert [(document.id, document.text) for document in corpus.documents] == [
        ("a.txt", "with a mark"),
        ("b.TXT", "upper"),
        ("c.markdown", "# c"),
        ("crlf.txt", "one\ntwo"),
        ("d.rst", "d\n="),
        ("e.HTML", "<p>e</p>"),
        ("f.csv", "x,y"),
    ]
    assert corpus.skipped.keys() == {"latin1.txt", "utf16.txt", "broken.md", "gone.md"}
    assert "as UTF-8 text" in corpus.skipped["latin1.txt"]
    unread, repeated = corpus.notes
    for kind in ("1 .pdf file", "1 .json file", "1 other file", "1 linked folder"):
        assert kind in unread
    assert "below/again.md (as b.TXT)" in repeated
    assert [document.also for document in corpus.documents if document.also] == [("below/again.md",)]


def test_files_of_a_folder_that_may_not_be_entered_are_named() -> None:
    """Names of files in such a folder can be listed. Earlier, the first one ended the command with a traceback."""
    folder, user = Path(tempfile.mkdtemp()), os.geteuid()  # not tmp_path, which only its owner can enter
    try:
        folder.chmod(0o755)
        (folder / "a.txt").write_text("a")
        (folder / "shut").mkdir()
        (folder / "shut" / "b.txt").write_text("b")
        (folder / "shut").chmod(0o444)
        if user == 0:
            os.seteuid(65534)
        corpus = read_documents(str(folder))
    finally:
        os.seteuid(user)
        (folder / "shut").chmod(0o755)
        shutil.rmtree(folder)
    assert [document.id for document in corpus.documents] == ["a.txt"]
    assert corpus.skipped == {"shut/b.txt": "Permission denied"}


def test_json_as_it_is_in_the_wild_is_read_or_its_lines_are_named(tmp_path: Path) -> None:
    def entry(text: str | None, source: str) -> dict[str, Any]:
        return {"id": None, "page_content": text, "metadata": {"source": source}}

    entries = [entry("one", "a.pdf"), entry("two", "a.pdf"), entry(None, "b.pdf"), entry("three", "b.pdf"), 7]
    (tmp_path / "d.jsonl").write_text("\ufeff" + "\n".join([*map(json.dumps, entries), "{"]))
    (tmp_path / "d.json").write_text(json.dumps(entries, indent=1))
    (tmp_path / "one.json").write_text(json.dumps(entries[0], indent=1))
    numbered = [("1", "one"), ("2", "two"), ("4", "three")]
    for name, label, skipped in (("d.jsonl", "line", [3, 5, 6]), ("d.json", "entry", [3, 5])):
        corpus = read_documents(str(tmp_path / name), text_field="page_content")
        assert corpus.documents == [Document(f"{name}:{number}", text) for number, text in numbered]
        assert list(corpus.skipped) == [f"{name}, {label} {number}" for number in skipped]
        named = read_documents(str(tmp_path / name), "metadata.source", "page_content").documents
        assert [document.id for document in named] == ["a.pdf", "a.pdf (2)", "b.pdf"]
    (one,) = read_documents(str(tmp_path / "one.json"), text_field="page_content").documents
    assert one.text == "one"
    assert "it has no 'key': use --id" in lmc("size", MODEL, "--documents", tmp_path / "d.json", "--id", "key")[2]


def test_a_glob_chooses_files_of_a_directory(tmp_path: Path) -> None:
    for name, text in {"a.md": "a", "b.log": "b", "below/c.jsonl": '{"text": "c"}', ".d.log": "d"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    corpus = read_documents(str(tmp_path), patterns=["**/*.log", "below/*"])
    assert corpus.documents == [Document("b.log", "b"), Document("below/c.jsonl:1", "c")]
    assert (corpus.skipped, corpus.notes) == ({}, [])
    (tmp_path / "other/below/deep").mkdir(parents=True)
    for name in ("other/below/e.md", "other/below/deep/f.md"):
        (tmp_path / name).write_text(name)

    def found(*patterns: str) -> list[str]:
        return [document.id for document in read_documents(str(tmp_path), patterns=patterns).documents]

    assert found("below/*") == ["below/c.jsonl:1"]
    assert found("other/**/*.md") == ["other/below/deep/f.md", "other/below/e.md"]
    assert found("*.md") == ["a.md", "other/below/deep/f.md", "other/below/e.md"]
    assert found("**") == ["a.md", "b.log", "below/c.jsonl:1", "other/below/deep/f.md", "other/below/e.md"]
    with pytest.raises(InputError, match="--glob is empty"):
        found("")
    with pytest.raises(InputError, match="leave --glob out"):
        read_documents(str(tmp_path / "a.md"), patterns=["*"])


# -- a model in this process ------------------------------------------------------------------------------------------


def test_documents_that_a_model_has_learned_are_found_in_a_prompt(tmp_path: Path) -> None:
    words = "learn", SHIPPED / "documents", "--model", MODEL, "--local-disk", tmp_path / "disk"
    code, out, _ = lmc(*words)
    assert code == 0
    assert f"{len(TEXTS)} documents learned in" in out

    settings = Settings.load({"enable_blending": True, "local_disk": tmp_path / "disk", "blend_min_tokens": 0})
    cached, tokenizer = CachedModel.load(MODEL, settings)
    with cached:
        chosen = list(TEXTS.values())[3:9]
        content = messages("", chosen, "who owns it ?", intro="name one owner")[0]["content"]
        done = cached.prefill(tokenizer.encode(content), "blend")
        assert done.report.unknown == 0
        assert done.report.reused > 0

    code, out, _ = lmc(*words)
    assert (code, f"{len(TEXTS)} of {len(TEXTS)} documents were learned before" in out) == (0, True)


def test_what_cannot_be_read_or_learned_is_named_and_all_else_is_learned(tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "good.txt").write_text("owner of lamp Tara .")
    (texts / "latin1.txt").write_bytes(b"caf\xe9")
    special = AutoTokenizer.from_pretrained(MODEL).all_special_tokens[0]
    (texts / "special.txt").write_text(f"owner {special} of lamp")
    (texts / "long.txt").write_text("\n".join(f"owner of lamp Tara {number} ." for number in range(700)))
    words = "learn", texts, "--model", MODEL, "--local-disk", tmp_path / "disk"
    code, out, _ = lmc(*words)
    assert (code, "1 document learned" in out) == (1, True)
    assert "latin1.txt was not learned: cannot read " in out
    assert "special.txt was not learned: it contains special tokens of the model" in out
    assert re.search(r"long.txt was not learned: .* has \d+ tokens, and --split cuts it into parts", out)
    code, out, _ = lmc("learn", texts, "--url", "http://127.0.0.1:9", "--dry-run")
    assert (code, "latin1.txt was not learned" in out) == (1, True)

    found = json.loads(lmc(*words, "--split", "--json")[1])
    assert found["failed"].keys() == {"latin1.txt", "special.txt"}
    assert found["learned"] > 1
    size = json.loads(lmc("size", MODEL, "--documents", texts, "--json")[1])
    assert (size["documents"], size["skipped"].keys()) == (1, {"latin1.txt", "special.txt", "long.txt"})
    size = json.loads(lmc("size", MODEL, "--documents", texts, "--split", "--json")[1])
    assert (size["documents"], size["skipped"].keys()) == (found["learned"] + 1, {"latin1.txt", "special.txt"})


def test_a_long_text_is_cut_between_paragraphs_lines_and_words_and_nothing_is_lost() -> None:
    def words(text: str) -> int:
        return len(text.split())

    text = "\n\n".join(f"title {number}\n" + "a few words " * 10 for number in range(9))
    parts = parts_of(text, 50, words)
    assert " ".join(parts).split() == text.split()
    assert all(words(part) <= 50 and part.startswith("title ") for part in parts)
    assert parts_of("文" * 100, 30, len) == ["文" * 25] * 4
    assert parts_of("short", 30, len) == ["short"]


def test_a_changed_document_is_learned_and_a_dry_run_learns_nothing(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    for name in ("a.txt", "b.txt"):
        (tmp_path / "texts" / name).write_text(f"{name} is a document of the mill and of the inn")
    words = "learn", tmp_path / "texts", "--model", MODEL, "--local-disk", tmp_path / "disk", "--json"
    assert json.loads(lmc(*words, "--dry-run")[1])["would_learn"] == 2
    away = "learn", tmp_path / "texts", "--url", "http://127.0.0.1:9", "--dry-run"
    code, out, _ = lmc(*away)
    assert (code, "2 documents with" in out) == (0, True)
    assert "could not check whether the documents fit: no server answers" in out
    assert lmc("learn", tmp_path / "texts", "--url", "", "--model", "")[2].startswith("error: set either --url")
    assert not (tmp_path / "disk").exists()
    assert json.loads(lmc(*words)[1])["learned"] == 2
    (tmp_path / "texts" / "b.txt").write_text("another text")
    found = json.loads(lmc(*words)[1])
    assert (found["before"], found["learned"]) == (1, 1)
    assert json.loads(lmc(*words, "--again")[1])["learned"] == 2
    assert json.loads(lmc(*words)[1])["before"] == 2


def test_a_document_that_cannot_be_learned_is_named_and_the_others_are_learned(tmp_path: Path) -> None:
    lines = [{"id": "long", "text": "owner of lamp Tara . " * 2000}, {"id": "short", "text": "owner of lamp Tara ."}]
    (tmp_path / "d.jsonl").write_text("\n".join(map(json.dumps, lines)))
    code, out, _ = lmc("learn", tmp_path / "d.jsonl", "--model", MODEL, "--local-disk", tmp_path / "disk")
    assert code == 1
    assert "1 document learned" in out
    assert "long was not learned: the document has" in out


def test_what_a_full_disk_has_dropped_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMC_MAX_LOCAL_DISK_SIZE", "0.01")
    words = "learn", SHIPPED / "documents", "--model", MODEL, "--local-disk", tmp_path / "disk"
    code, out, _ = lmc(*words)
    assert code == 0
    assert "chunks were evicted during the run, because the tiers are full: raise max_local_disk_size" in out
    assert json.loads(lmc(*words, "--again", "--json")[1])["dropped"] > 0


def test_what_no_tier_keeps_is_not_said_to_be_learned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The documents were in memory when the command ended, and were noted as learned."""
    monkeypatch.setenv("LMC_REMOTE_URL", "redis://127.0.0.1:1")
    words = "learn", SHIPPED / "documents", "--model", MODEL, "--manifest", tmp_path / "learned.sqlite"
    code, out, err = lmc(*words)
    assert (code, "cannot store documents: redis cannot be written" in err) == (2, True)
    assert "learned in" not in out
    assert names_in(tmp_path / "learned.sqlite") == []
    monkeypatch.setenv("LMC_LOCAL_DISK", str(tmp_path / "disk"))
    assert "24 documents learned in" in lmc(*words)[1]


def test_what_a_lost_cache_server_does_not_have_is_not_said_to_be_learned(tmp_path: Path) -> None:
    """The run went on, noted the documents as learned, and ended with exit code 0."""
    one, two = (Document(name, TEXTS[name]) for name in sorted(TEXTS)[:2])
    with Manifest(tmp_path / "m") as manifest:
        with serving(tmp_path, 0, max_local_cpu_size=0.02) as server:
            settings = Settings(chunk_size=16, enable_blending=True, server=server.path, load_deadline=30.0)
            learner = ModelLearner(str(MODEL), settings)
            assert LearnRun(Corpus([one]), manifest, Retention()).learn(learner, 1).learned == 1
        with pytest.raises(Unreachable, match="lost the cache server"):
            LearnRun(Corpus([two]), manifest, Retention()).learn(learner, 1)
        learner.close()
        assert [manifest.has(document) for document in (one, two)] == [True, False]


def test_documents_are_pinned_and_limited_in_time_also_if_they_were_learned_before(tmp_path: Path) -> None:
    lines = [{"id": f"notes/{i}", "text": f"notes {i} from the inn : owner of lamp Tara . " * 5} for i in range(3)]
    (tmp_path / "d.jsonl").write_text("\n".join(map(json.dumps, lines)))
    words = "learn", tmp_path / "d.jsonl", "--model", MODEL, "--local-disk", tmp_path / "disk"
    _, out, _ = lmc(*words)
    assert "tokens stored now: memory" in out
    assert not (tmp_path / "disk" / FILE).exists()
    found = json.loads(lmc(*words, "--pin", "--ttl", "2h", "--json")[1])
    assert (found["before"], found["learned"]) == (3, 0)
    assert wanted(tmp_path) == [(f"notes/{i}", True, True) for i in range(3)]

    shutil.rmtree(tmp_path / "disk")
    found = json.loads(lmc(*words, "--pin", "--json")[1])
    assert (found["before"], found["learned"], found["held"]["disk"] > 0) == (0, 3, True)
    assert sorted(wanted(tmp_path)) == [(f"notes/{i}", True, False) for i in range(3)]


def test_an_administration_at_all_addresses_is_that_of_the_server_s_host(server: Any, tmp_path: Path) -> None:
    """`lmc learn` for another host asked the engine of its own host, whose LMC_ADMIN was set."""
    (tmp_path / "a.txt").write_text("a text")
    for admin in ("0.0.0.0:1", "http://0.0.0.0:1", "[::]:1"):
        said = lmc("learn", tmp_path, "--url", server.url, "--admin", admin, "--pin")[2]
        assert f"no server answers at {server.url.rpartition(':')[0]}:1 " in " ".join(said.split())


def test_an_invalid_address_of_an_administration_is_named(server: Any, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a text")
    code, _, said = lmc("learn", tmp_path, "--url", server.url, "--admin", "[::1", "--pin")
    assert (code, "no server answers at http://[::1 (Invalid IPv6 URL)" in " ".join(said.split())) == (2, True)


def test_documents_that_were_stored_already_are_told(tmp_path: Path) -> None:
    """A second host that shares a tier computes nothing, and its operator should see that."""
    (tmp_path / "d.jsonl").write_text(json.dumps({"text": "notes from the inn : owner of lamp Tara . " * 5}))
    words = "learn", tmp_path / "d.jsonl", "--model", MODEL, "--local-disk", tmp_path / "disk"
    assert "already stored" not in lmc(*words)[1]
    assert "; 1 document was already stored" in lmc(*words, "--again")[1]
    assert json.loads(lmc(*words, "--again", "--json")[1])["found"] == 1
    assert "invalid time 'soon'" in lmc(*words, "--ttl", "soon")[2]


def test_pins_go_when_everything_is_cleared(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text(json.dumps({"id": "a", "text": "owner of lamp Tara . " * 5}))
    words = "learn", tmp_path / "d.jsonl", "--model", MODEL, "--local-disk", tmp_path / "disk", "--pin"
    assert "1 document was pinned and set to expire after 7d" in lmc(*words, "--ttl", "7d")[1]
    assert "1 document was pinned and set to expire after 70 s" in lmc(*words, "--ttl", "70")[1]
    assert (tmp_path / "disk" / FILE).exists()
    assert lmc("clear", tmp_path / "disk", "--all", "--yes")[0] == 0
    assert not (tmp_path / "disk" / FILE).exists()


def wanted(folder: Path) -> list[tuple[str, bool, bool]]:
    kept = KeptDocuments(folder / "disk").read()
    return sorted((one.name, one.pinned, one.expires > time.time()) for one in kept)


def test_there_has_to_be_room_for_pins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMC_MAX_LOCAL_DISK_SIZE", "0.01")
    monkeypatch.setenv("LMC_MAX_LOCAL_CPU_SIZE", "0.01")
    words = "learn", SHIPPED / "documents", "--model", MODEL, "--local-disk", tmp_path / "disk"
    code, out, err = lmc(*words, "--pin")
    assert (code, "pin quota exceeded" in err) == (2, True)
    assert "at most" in out
    assert "may be pinned. Raise max_local_disk_size" in out
    assert "fit: the first will be evicted. Raise max_local_disk_size" in lmc(*words)[1]
    _, out, err = lmc(*words, "--again", "--json")
    (note,) = json.loads(out)["notes"]
    assert "fit: the first will be evicted" in note
    assert note in err


def test_documents_with_a_separator_are_named(tmp_path: Path) -> None:
    """Comments in configuration files often have one, and were not found in prompts without any word."""
    (tmp_path / "a.txt").write_text("# # Uncomment this: owner of lamp Tara .")
    (tmp_path / "b.txt").write_text("# Comment: owner of lamp Tara .")
    words = "learn", tmp_path, "--glob", "*.txt", "--model", MODEL, "--local-disk", tmp_path / "disk", "--json"
    for more in (["--dry-run"], []):
        (note,) = json.loads(lmc(*words, *more)[1])["notes"]
        assert note.startswith("1 document with the separator '# #', such as a.txt: it is learned as '##'")
        assert "LMC_BLEND_SPECIAL_STR" in note


# -- texts as JSON strings --------------------------------------------------------------------------------------------


def test_texts_are_also_learned_as_json_strings_and_a_run_without_the_option_changes_nothing(tmp_path: Path) -> None:
    lines = [{"id": "a", "text": 'owner of "lamp"\nTara .'}, {"id": "b", "text": "owner of flask Kai ."}]
    (tmp_path / "d.jsonl").write_text("\n".join(map(json.dumps, lines)))
    words = ["learn", tmp_path / "d.jsonl", "--model", MODEL, "--local-disk", tmp_path / "disk"]
    words += ["--manifest", tmp_path / "learned.sqlite", "--json"]

    def run(*more: str) -> tuple[int, int]:
        found = json.loads(lmc(*words, *more)[1])
        assert found["failed"] == {}
        return found["before"], found["learned"]

    def files() -> list[Path]:
        return sorted((tmp_path / "disk").rglob("*.safetensors"))

    assert run() == (0, 2)
    assert run("--escaped") == (2, 1)  # The text of b has nothing to escape.
    learned = files()
    assert (len(learned), run(), run("--no-escaped"), run("--escaped")) == (3, (2, 0), (2, 0), (3, 0))
    assert files() == learned
    assert names_in(tmp_path / "learned.sqlite") == ["a", "a (as JSON)", "b"]
    settings = Settings.load({"enable_blending": True, "local_disk": tmp_path / "disk"})
    cached, tokenizer = CachedModel.load(MODEL, settings)
    with cached:
        (document,) = (one for one in cached.engine.known.list() if one.name == "a (as JSON)")
        assert r"owner of \"lamp\"\nTara ." in tokenizer.decode(document.tokens.tolist())
    (tmp_path / "d.jsonl").write_text(json.dumps(lines[0] | {"text": 'owner of "mug"\nTara .'}))
    assert run("--escaped") == (0, 2)


def test_files_with_the_same_text_are_one_document_that_has_all_of_their_names(tmp_path: Path) -> None:
    """The second file was left out: nothing had its name, so `documents show` and `remove` did not find it."""
    texts = {"a.txt": 'owner of "lamp"\nTara .', "b.txt": "owner of flask Kai .", "c/a.txt": 'owner of "lamp"\nTara .'}
    words = ["learn", tmp_path / "texts", "--model", MODEL, "--local-disk", tmp_path / "disk", "--escaped"]
    words += ["--manifest", tmp_path / "learned.sqlite", "--json"]

    def learned() -> int:
        return int(json.loads(lmc(*words)[1])["learned"])

    def names() -> list[list[str]]:
        settings = Settings.load({"enable_blending": True, "local_disk": tmp_path / "disk"})
        with CachedModel.load(MODEL, settings)[0] as cached:
            cached.engine.recall.wait()
            return sorted(document.names for document in cached.engine.known.list())

    for name, text in texts.items():
        (tmp_path / "texts" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "texts" / name).write_text(text)
    assert (learned(), learned()) == (3, 0)
    assert names() == [["a.txt", "c/a.txt"], ["a.txt (as JSON)", "c/a.txt (as JSON)"], ["b.txt"]]
    (tmp_path / "texts" / "d.txt").write_text(texts["b.txt"])
    assert (learned(), learned()) == (1, 0), "the server does not have this name yet"


LLAMA_3_1 = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content | tojson if m.role == 'tool' else m.content }}{% endfor %}"
)


@pytest.mark.parametrize(("family", "escapes"), [*((name, name.startswith("openai")) for name in ADDED), ("", True)])
def test_chat_templates_that_write_results_of_tools_as_json_strings_are_known(family: str, escapes: bool) -> None:
    tokenizer = tokenizer_of(family or "plain text")
    if not family:
        tokenizer.chat_template = LLAMA_3_1
    assert escapes_tool_results(lambda chat: tokenizer.apply_chat_template(plain_chat(chat), tokenize=False)) == escapes


@pytest.mark.parametrize(
    ("prompt", "options", "learned"),
    [
        (as_json(PROBE), [], 2),
        (as_json(PROBE), ["--no-escaped"], 1),
        (PROBE, [], 1),
        (PROBE, ["--escaped"], 2),
        ("", [], 1),
    ],
)
def test_a_server_is_asked_whether_its_template_writes_json_strings(
    server: Any, tmp_path: Path, prompt: str, options: list[str], learned: int
) -> None:
    server.answers["/v1/completions"] = 200, {"kv_transfer_params": {"lmc": {"learned": True, "documents": ["0a"]}}}
    if prompt:  # Without an answer, nothing is learned in addition.
        server.answers["/v1/chat/completions"] = 200, {"prompt_token_ids": [1, 2]}
        server.answers["/detokenize"] = 200, {"prompt": f"<tool>{prompt}</tool>"}
    (tmp_path / "a.txt").write_text("a\ntext")
    _, out, _ = lmc("learn", tmp_path, "--url", server.url, *options)
    assert f"{learned} document{'s' * (learned - 1)} learned" in out
    assert ("--no-escaped leaves that out" in out) == (learned == 2 and not options)


# -- lmc size ---------------------------------------------------------------------------------------------------------


def test_sizes_are_those_of_what_is_learned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = "size", MODEL, "--documents", SHIPPED / "documents", "--dtype", "float32"
    said = json.loads(lmc(*whole, "--json")[1])
    assert lmc("learn", SHIPPED / "documents", "--model", MODEL, "--local-disk", tmp_path / "disk")[0] == 0
    there = [path.stat().st_size for path in (tmp_path / "disk/records").rglob("*.safetensors")]
    assert (said["documents"], said["on_disk"], said["slots"]) == (len(TEXTS), sum(there), len(there))
    monkeypatch.setenv("LMC_LOCAL_DISK", str(tmp_path / "disk"))
    monkeypatch.setenv("LMC_MAX_LOCAL_DISK_SIZE", "1")
    code, out, _ = lmc(*whole)
    assert code == 0
    assert f"disk, 1 GB: {(1 << 30) * len(TEXTS) // sum(there)} such documents" in out
    index = [f"{said[name] * 1e6 / len(TEXTS) / (1 << 30):.1f} GB" for name in ("index", "disk_index")]
    assert f"index of 1000000 such documents: {index[0]} of memory, {index[1]} on a disk" in out
    half = json.loads(lmc("size", MODEL, "--dtype", "bfloat16", "--json")[1])["token"]
    assert half * 2 == said["token"]
    assert json.loads(lmc("size", MODEL, "--json")[1])["token"] == half, "as vLLM serves it"
    narrowed = "the model has float32: use --dtype float32 if vLLM gets this option, too"
    assert narrowed in " ".join(lmc("size", MODEL)[1].split())


def test_what_size_cannot_read_is_said(tmp_path: Path) -> None:
    assert "cannot read the sizes of the model" in lmc("size", tmp_path)[2]
    assert "model nowhere: the directory does not exist, and the hub reports: " in lmc("size", "nowhere")[2]
    for name in ("int9", "bool", "complex64", "int8", "float64"):
        assert f"invalid dtype {name}: use one of auto, bfloat16," in lmc("size", MODEL, "--dtype", name)[2]
    half = json.loads(lmc("size", MODEL, "--dtype", "bfloat16", "--json")[1])["token"]
    for name in ("fp8", "fp8_e4m3", "fp8_e5m2", "float8_e4m3fn"):
        assert json.loads(lmc("size", MODEL, "--dtype", name, "--json")[1])["token"] * 2 == half
    assert lmc("size", MODEL, "--dtype", "auto") == lmc("size", MODEL)
    assert "does not exist" in lmc("size", MODEL, "--documents", tmp_path / "none")[2]


@pytest.mark.parametrize(
    ("config", "token", "said"),
    [
        # 576 values of 2 bytes in each of 61 layers
        (
            {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "num_hidden_layers": 61},
            70272,
            "documents can be blended by vLLM with lmc (DeepseekV3ForCausalLM)",
        ),
        (
            {
                "model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"],
                "text_config": {"num_hidden_layers": 34, "num_key_value_heads": 4, "head_dim": 256},
            },
            34 * 2 * 4 * 256 * 2,
            "documents can be blended by vLLM with lmc (Gemma3ForConditionalGeneration)",  # as its language model
        ),
        (  # vLLM has no layers of its own for this one.
            {
                "model_type": "olmo3", "architectures": ["Olmo3ForCausalLM"], "num_hidden_layers": 32,
                "num_attention_heads": 32, "num_key_value_heads": 32, "hidden_size": 4096,
            },
            524288,
            "documents can be blended by vLLM with lmc (Olmo3ForCausalLM)",
        ),
        (  # Every sixth layer has larger heads, and the last ones keep nothing.
            {
                "model_type": "gemma4_text", "architectures": ["Gemma4ForCausalLM"], "num_hidden_layers": 42,
                "num_kv_shared_layers": 18, "num_key_value_heads": 2, "head_dim": 256, "global_head_dim": 512,
                "layer_types": ["full_attention" if layer % 6 == 5 else "sliding_attention" for layer in range(42)],
            },
            24 * 2 * 2 * 512 * 2,
            "documents can be blended by vLLM with lmc (Gemma4ForCausalLM)",
        ),
        (
            {
                "model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 4096,
                "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096,
            },
            131072,
            "documents can be blended by vLLM with lmc (MistralForCausalLM)",
        ),
        (
            {
                "model_type": "falcon", "architectures": ["FalconForCausalLM"], "num_hidden_layers": 32,
                "num_attention_heads": 71, "hidden_size": 4544, "multi_query": True,
            },
            8192,
            "(FalconForCausalLM), if the model passes the self-test",
        ),
        (
            {
                "model_type": "falcon", "architectures": ["FalconForCausalLM"], "num_hidden_layers": 60,
                "num_attention_heads": 128, "hidden_size": 8192, "num_kv_heads": 8, "new_decoder_architecture": True,
            },
            122880,
            "(FalconForCausalLM), if the model passes the self-test",
        ),
        (
            {
                "model_type": "bloom", "architectures": ["BloomForCausalLM"], "n_layer": 30, "n_head": 32,
                "hidden_size": 4096,
            },
            30 * 2 * 4096 * 2,
            "documents cannot be blended, and only equal prefixes of prompts are reused: its attention has ALiBi",
        ),
        (
            {
                "model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 32,
                "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096,
            },
            131072,
            "documents can be blended by vLLM with lmc (LlamaForCausalLM)",
        ),
    ],
)  # fmt: skip
def test_sizes_of_popular_models_are_those_of_their_kv(
    tmp_path: Path, config: dict[str, Any], token: int, said: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    code, out, _ = lmc("size", tmp_path)
    assert (code, f"{token} bytes a token" in out, said in out) == (0, True, True), out
    assert ("self-test" in out) == ("self-test" in said)
    # 128 heads with keys of 192 and values of 128 numbers
    assert ("576 values each instead of 40960 for all heads" in out) == (config["model_type"] == "deepseek_v3")


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True},
        {"model_type": "whisper", "architectures": ["WhisperForConditionalGeneration"], "is_encoder_decoder": True},
        {"model_type": "bert", "architectures": ["BertForMaskedLM"]},
    ],
    ids=lambda config: config["model_type"],
)
def test_a_model_that_is_not_causal_is_not_served(tmp_path: Path, config: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, _, err = lmc("size", tmp_path)
    assert (code, "is not a causal language model" in err) == (2, True)


def test_a_text_of_which_the_tokenizer_makes_no_tokens_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tokenizer without a vocabulary ended `lmc size` with a division by zero."""
    monkeypatch.setattr(PreTrainedTokenizerFast, "encode", lambda *_, **__: [])
    code, out, _ = lmc("size", MODEL, "--documents", SHIPPED / "documents")
    assert (code, "makes no tokens of it" in out) == (0, True)


def test_a_model_with_a_state_is_not_served(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "jamba", "architectures": ["JambaForCausalLM"]}))
    code, _, err = lmc("size", tmp_path)
    assert (code, "it has layers with a state (" in err) == (2, True)


def test_times() -> None:
    assert [seconds_of(text) for text in ("90", "1.5s", "30m", "12h", "7d")] == [90, 1.5, 1800, 43200, 604800]
    for text in ("", "0", "-1h", "1w", "h"):
        with pytest.raises(InputError, match="invalid time"):
            seconds_of(text)


def test_after_kill_nothing_is_lost_and_nothing_is_learned_twice(tmp_path: Path) -> None:
    count = some(200, share=0.3)
    lines = [{"id": str(i), "text": f"notes {i} from the inn : owner of lamp Tara . " * 5} for i in range(count)]
    (tmp_path / "d.jsonl").write_text("\n".join(map(json.dumps, lines)))
    manifest = tmp_path / "manifest.sqlite"
    words = ["learn", str(tmp_path / "d.jsonl"), "--model", str(MODEL), "--local-disk", str(tmp_path / "disk")]
    words += ["--manifest", str(manifest), "--json"]
    assert Forked(killed_when_learned, count // 5, *words).wait() == -signal.SIGKILL
    before = names_in(manifest)
    assert len(before) == count // 5
    # What was being written is in "disk/tmp", and the next start removes it.
    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "disk/records").rglob("*.safetensors")}
    assert len(written) >= len(before)

    found = json.loads(lmc(*words)[1])
    assert all(path.stat().st_mtime_ns == at for path, at in written.items()), "nothing is written twice"
    assert found["before"] == len(before)
    assert found["learned"] == count - len(before)
    assert sorted(names_in(manifest), key=int) == [str(i) for i in range(count)]
    again = json.loads(lmc(*words, "--again")[1])
    assert again["learned"] == count
    assert lmc("check", tmp_path / "disk")[1].strip().endswith(f"{count} records, 0 problems")


def killed_when_learned(count: int, *words: str) -> None:
    """Run a command, and kill this process when so many documents are in the manifest."""
    added, real = 0, Manifest.add

    def add(self: Manifest, document: Document, ids: Sequence[str]) -> None:
        nonlocal added
        real(self, document, ids)
        added += 1
        if added == count:
            os.kill(os.getpid(), signal.SIGKILL)

    Manifest.add = add  # type: ignore[method-assign]
    command(*words)


def names_in(manifest: Path) -> list[str]:
    with closing(sqlite3.connect(f"file:{manifest}?mode=ro", uri=True)) as database:
        return [name for (name,) in database.execute("SELECT id FROM learned ORDER BY id")]


def test_a_manifest_tells_texts_and_survives_a_kill_in_a_commit(tmp_path: Path) -> None:
    one, two, three = (Document(name, name) for name in ("one", "two", "three"))
    with Manifest(tmp_path / "m") as manifest:
        manifest.add(one, [])
    script = """
import os, sqlite3, sys
database = sqlite3.connect(sys.argv[1], isolation_level=None)
database.executescript("PRAGMA cache_size = 1; PRAGMA cache_spill = 1; BEGIN; DELETE FROM learned")
for number in range(500):
    database.execute("INSERT INTO learned VALUES (?, ?, '[]')", (str(number), "x" * 1000))
os._exit(9)
"""
    assert subprocess.run([sys.executable, "-c", script, tmp_path / "m"], check=False).returncode == 9
    assert (tmp_path / "m-journal").exists()
    with Manifest(tmp_path / "m") as manifest:
        assert [manifest.has(document) for document in (one, two, three)] == [True, False, False]
        manifest.add(three, [])
    with Manifest(tmp_path / "m") as manifest:
        assert [manifest.has(document) for document in (one, two, three)] == [True, False, True]
        assert not manifest.has(Document("one", "another text"))


def test_two_runs_may_create_a_manifest_at_once(tmp_path: Path) -> None:
    """Earlier, one of the two runs was refused, as the database was locked for a moment."""

    def create(number: int) -> bool:
        with Manifest(tmp_path / str(number // 8)) as manifest:
            manifest.add(Document(str(number), "a"), [])
            return manifest.has(Document(str(number), "a"))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(create, range(160)))
    assert [len(names_in(tmp_path / str(file))) for file in range(20)] == [8] * 20


def test_a_manifest_that_is_damaged_is_named(tmp_path: Path) -> None:
    with Manifest(tmp_path / "m") as manifest:
        manifest.add(Document("one", "one"), [])
    blob = (tmp_path / "m").read_bytes()
    (tmp_path / "m").write_bytes(blob[:100] + b"\xff" * (len(blob) - 100))
    said = f"cannot use the manifest {tmp_path / 'm'}: database disk image is malformed"
    with pytest.raises(InputError, match=said), Manifest(tmp_path / "m") as manifest:
        manifest.has(Document("one", "one"))


def test_a_database_of_another_program_stays_as_it_is(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "a")) as database, database:
        database.execute("CREATE TABLE notes (text)")
    before = (tmp_path / "a").read_bytes()
    with pytest.raises(InputError, match="is not a manifest of lmc learn; use --manifest for another file"):
        Manifest(tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == before


@pytest.mark.parametrize("content", ["notes\n", "notes", '{"id": "a", "text": "one"}\n', "[1]\n", '{"url": "a"}'])
def test_a_file_that_is_not_a_manifest_stays_as_it_is(tmp_path: Path, content: str) -> None:
    """Earlier, `lmc learn` appended to a file that is not a manifest, or emptied it with --again."""
    (tmp_path / "a").write_text(content)
    with pytest.raises(InputError, match="is not a manifest of lmc learn; use --manifest for another file"):
        Manifest(tmp_path / "a")
    assert (tmp_path / "a").read_text() == content


def test_a_manifest_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """The error was that of standard output."""
    with pytest.raises(InputError, match=f"cannot write the manifest {tmp_path}: Is a directory; use --manifest"):
        Manifest(tmp_path)
    with Manifest(tmp_path / "m") as manifest:
        with closing(sqlite3.connect(tmp_path / "m")) as other:
            other.execute("CREATE TRIGGER full BEFORE INSERT ON learned BEGIN SELECT RAISE(ABORT, 'disk is full'); END")
        reason = f"cannot use the manifest {tmp_path / 'm'}: disk is full; use --manifest for another file"
        with pytest.raises(InputError, match=reason):
            manifest.add(Document("one", "one"), [])
        assert not manifest.has(Document("one", "one"))


def test_an_interrupted_run_says_how_to_go_on_and_what_it_waits_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    begun, told = threading.Event(), threading.Event()

    class Slow:
        def learn(self, document: Document) -> Stored:
            if document.id == "slow":
                begun.set()
                assert told.wait(60)
                return Stored([])
            assert begun.wait(60)
            raise KeyboardInterrupt

    class Pool(ThreadPoolExecutor):
        def shutdown(self, *arguments: Any, **named: Any) -> None:
            told.set()
            super().shutdown(*arguments, **named)

    monkeypatch.setattr("lmc.commands.learn.run.ThreadPoolExecutor", Pool)
    documents = [Document("slow", "one"), Document("fast", "two")]
    with Manifest(tmp_path / "learned.sqlite") as manifest, pytest.raises(KeyboardInterrupt):
        LearnRun(Corpus(documents), manifest, Retention(pinned=False, ttl=None)).learn(Slow(), 2)  # type: ignore[arg-type]
    said = "0 of 2 documents were learned; run the same command again to continue; waiting for 1 document in flight"
    assert capfd.readouterr().err == f"{said}, until Ctrl-C\n"


def test_a_second_interruption_leaves_the_documents_in_flight(tmp_path: Path) -> None:
    program = """if True:
        import os, signal, sys, threading
        from pathlib import Path
        from lmc.commands.learn import manifest, run
        from lmc.documents.sources import Corpus, Document

        class Hanging:
            def learn(self, document):
                if document.id == "slow":
                    begun.set()
                    threading.Event().wait()
                begun.wait()
                raise KeyboardInterrupt

        class Pool(run.ThreadPoolExecutor):
            def shutdown(self, *arguments, **named):
                threading.Timer(0.1, os.kill, [os.getpid(), signal.SIGINT]).start()
                super().shutdown(*arguments, **named)

        signal.signal(signal.SIGINT, signal.default_int_handler)  # A background job begins with SIGINT ignored.
        begun, run.ThreadPoolExecutor = threading.Event(), Pool
        documents = Corpus([Document("slow", "one"), Document("fast", "two")])
        with manifest.Manifest(Path(sys.argv[1])) as learned:
            run.LearnRun(documents, learned, run.Retention(False, None)).learn(Hanging(), 2)
    """
    command = [sys.executable, "-c", program, str(tmp_path / "m")]
    ended = subprocess.run(command, timeout=60, capture_output=True, check=False)
    assert ended.returncode == 130, ended.stderr


def test_to_learn_again_forgets_nothing_before_something_is_learned(tmp_path: Path) -> None:
    """The server may not even be there."""
    one, two, other = (Document(name, name) for name in ("one", "two", "other"))
    with Manifest(tmp_path / "m") as manifest:
        manifest.add(one, [])
        manifest.add(other, ["id"])
    with Manifest(tmp_path / "m") as manifest:
        manifest.forget([one, two])
        assert not manifest.has(one)
    with Manifest(tmp_path / "m") as manifest:
        assert manifest.has(one)
        manifest.forget([one, two])
        manifest.add(two, [])
    with Manifest(tmp_path / "m") as manifest:
        assert [manifest.has(document) for document in (one, two, other)] == [False, True, True]
        assert manifest.ids(other) == ["id"]


# -- a server ---------------------------------------------------------------------------------------------------------
# That a vLLM server learns is shown by tests/engine/test_chat.py. Here are answers that are hard to get from one.


@pytest.fixture
def server() -> Iterator[Any]:
    """A server that answers what the test says, by path."""
    with http_stub() as found:
        found.answers["/v1/models"] = 200, {"data": [{"id": "m"}]}
        yield found


def test_what_the_server_has_lost_is_learned_again(server: Any, tmp_path: Path) -> None:
    """The manifest alone said that all was learned."""
    server.answers["/v1/completions"] = 200, {"kv_transfer_params": {"lmc": {"learned": True, "documents": ["0a"]}}}
    (tmp_path / "12345678.txt").write_text("a text")
    words = "learn", tmp_path, "--url", server.url, "--admin", server.url
    code, out, _ = lmc(*words)
    assert (code, "1 document learned" in out) == (0, True)
    code, out, _ = lmc(*words)  # There is no endpoint that could say what is there.
    assert "1 of 1 document was learned before" in out
    assert "could not check whether the server still has them" in out
    again = "learning 1 document again that the server no longer has"
    for held, learned in ((20, "0 documents learned"), (0, "1 document learned")):
        server.answers["/metrics"] = 200, f'lmc:chunk_tokens{{place="host"}} {held}'
        code, out, _ = lmc(*words)
        assert (code, learned in out) == (0, True)
        assert (again in out, "was learned before" in out) == (held == 0, held > 0)
    del server.answers["/metrics"]
    address = f"/v1/documents?limit={PAGE}"
    server.answers[address] = 400, {"error": "limit is above 100000"}
    assert "limit is above 100000" in lmc(*words)[1].replace("\n", " "), "not that it does not respond"
    server.answers[address] = 200, {"documents": [{"id": "0a", "places": ["host"]}]}
    assert "could not check" not in lmc(*words)[1]
    for gone in ([], [{"id": "0a", "places": []}]):
        server.answers[address] = 200, {"documents": gone}
        assert "1 document learned" in lmc(*words)[1]


def test_without_administration_some_documents_are_sent_again(server: Any, tmp_path: Path) -> None:
    """After a restart without a disk and one other request, 0 documents were learned, and the exit code was 0."""
    learned: dict[str, Any] = {"learned": True, "documents": ["0a"], "computed_documents": 1}
    server.answers["/v1/completions"] = 200, {"kv_transfer_params": {"lmc": learned}}
    server.answers["/metrics"] = 200, 'lmc:chunk_tokens{place="host"} 20'
    for name in "abcdefgh":
        (tmp_path / f"{name}.txt").write_text(f"text {name}")
    words = "learn", tmp_path, "--url", server.url, "--admin", server.url
    assert "8 documents learned" in lmc(*words)[1]
    assert "8 documents learned" in lmc(*words)[1], "they are not stored any more"
    del learned["computed_documents"]
    assert "0 documents learned" in lmc(*words)[1]


def test_another_model_at_the_same_address_has_learned_nothing(server: Any, tmp_path: Path) -> None:
    server.answers["/v1/completions"] = 200, {"kv_transfer_params": {"lmc": {"learned": True, "documents": ["0a"]}}}
    (tmp_path / "a.txt").write_text("a text")
    for root, learned in (("one", 1), ("one", 0), ("two", 1), ("one", 0)):
        server.answers["/v1/models"] = 200, {"data": [{"id": "m", "root": root}]}
        assert json.loads(lmc("learn", tmp_path, "--url", server.url, "--json")[1])["learned"] == learned


def test_a_server_that_shuts_down_is_left(tmp_path: Path) -> None:
    """The server waits for its connections. Earlier, the command waited for the server's responses, for ten minutes."""
    program = """if True:
        import sys, threading
        from pathlib import Path
        from lmc.commands.learn import manifest, run
        from lmc.documents.sources import Corpus, Document

        class Stopping:
            def learn(self, document):
                threading.Event().wait()

            def has_stopped(self):
                return True

        run.SILENT_SECONDS = 0.1
        with manifest.Manifest(Path(sys.argv[1])) as learned:
            run.LearnRun(Corpus([Document("a", "one")]), learned, run.Retention(False, None)).learn(Stopping(), 2)
    """
    command = [sys.executable, "-c", program, str(tmp_path / "m")]
    ended = subprocess.run(command, timeout=60, capture_output=True, check=False, text=True)
    assert ended.returncode == 2
    assert "0 of 1 document was learned; run the same command again to continue" in ended.stderr
    assert "the server is shutting down" in ended.stderr


def test_a_server_that_listens_has_not_stopped() -> None:
    with http_stub((200, {"data": [{"id": "m"}]})) as server:
        learner = ServerLearner(server.url, " # # ")
        assert not learner.has_stopped()
    assert learner.has_stopped()


def test_line_ends_are_those_of_python_or_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\r\ntwo")
    assert read_documents(str(tmp_path)).documents == [Document("a.txt", "one\ntwo")]
    assert read_documents(str(tmp_path), keeps_crlf=True).documents == [Document("a.txt", "one\r\ntwo")]


def test_the_variable_lmc_admin_names_the_endpoint_that_is_asked(server: Any, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("LMC_ADMIN", server.url)
    server.answers["/v1/completions"] = 200, {"kv_transfer_params": {"lmc": {"learned": True, "documents": ["0a"]}}}
    server.answers[f"/v1/documents?limit={PAGE}"] = 200, {"documents": []}
    (tmp_path / "a.txt").write_text("a text")
    for _ in range(2):
        assert "1 document learned" in lmc("learn", tmp_path, "--url", server.url)[1]


def test_documents_are_sent_to_a_server_without_torch(server: Any, tmp_path: Path) -> None:
    """The import of torch takes seconds."""
    server.answers["/v1/completions"] = 200, {"kv_transfer_params": {"lmc": {"learned": True, "documents": ["0a"]}}}
    (tmp_path / "a.txt").write_text("a text")
    code, out, err = without_torch("learn", tmp_path, "--url", server.url, "--admin", server.url)
    assert (code, "1 document learned" in out) == (0, True), err


def test_a_terminal_is_shown_how_many_documents_are_learned(server: Any, tmp_path: Path, monkeypatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(
        "lmc.commands.learn.run.console", lambda **_: Console(file=screen, force_terminal=True, width=80)
    )
    monkeypatch.setenv("TERM", "xterm")
    server.answers["/v1/completions"] = 200, {"kv_transfer_params": {"lmc": {"learned": True}}}
    for name in ("a.txt", "b.txt", "c.txt"):
        (tmp_path / name).write_text(f"the text of {name}")
    assert lmc("learn", tmp_path, "--url", server.url)[0] == 0
    assert "learning" in screen.getvalue()
    assert "3/3" in screen.getvalue()


@pytest.mark.parametrize(
    ("tokens", "tier", "too_many"), [(400, "host", False), (1000, "host", True), (1000, "redis", False)]
)
def test_before_anything_is_learned_a_server_is_asked_whether_it_fits(
    server: Any, tmp_path: Path, tokens: int, tier: str, too_many: bool
) -> None:
    """Redis, or the disk of a cache server, stores what memory has evicted."""
    usable = f'lmc:tier_usable{{tier="{tier}"}} 1\n'
    server.answers |= {
        "/metrics": (200, f'lmc:capacity_tokens{{place="host"}} 500\n{usable}'),
        "/tokenize": (200, {"count": tokens}),
        "/v1/completions": (503, {}),
    }
    (tmp_path / "a.txt").write_text("a text")
    code, out, _ = lmc("learn", tmp_path, "--url", server.url)
    assert code == 2
    said = f"these documents have about {tokens} tokens, and at most 500 fit: the first will be evicted"
    assert (said in out) == too_many


def test_the_room_of_a_cache_server_is_known_only_without_other_tiers(tmp_path: Path) -> None:
    for number, disk in enumerate((None, tmp_path / "disk")):
        (tmp_path / str(number)).mkdir()
        with serving(tmp_path / str(number), 0, None, max_local_cpu_size=0.02, local_disk=disk) as server:
            settings = Settings(chunk_size=16, enable_blending=True, server=server.path, load_deadline=30.0)
            learner = ModelLearner(str(MODEL), settings)
            assert learner.capacity().keys() == (set() if disk else {"host"})
            learner.close()


def test_a_server_is_asked_for_its_longest_prompt_before_texts_are_cut(server: Any, tmp_path: Path) -> None:
    server.answers["/v1/models"] = 200, {"data": [{"id": "m", "max_model_len": 164}]}
    server.answers["/v1/completions"] = 200, {"kv_transfer_params": {"lmc": {"learned": True, "documents": ["0a"]}}}
    server.answers["/tokenize"] = 200, {"count": 101}
    (tmp_path / "a.txt").write_text("word " * 38)
    (tmp_path / "b.txt").write_text("short")
    found = json.loads(lmc("learn", tmp_path, "--url", server.url, "--split", "--json")[1])
    assert (found["learned"], found["failed"]) == (3, {})
    server.answers["/v1/completions"] = 400, {"error": {"message": "too long"}}
    _, out, _ = lmc("learn", tmp_path, "--url", server.url, "--again")
    assert "a.txt was not learned: too long; it has 101 tokens, and --split cuts it into parts of at most 100" in out
    assert "b.txt was not learned: too long\n" in out


def test_documents_are_sent_as_messages_if_that_is_wanted(server: Any, tmp_path: Path) -> None:
    server.answers["/v1/chat/completions"] = (
        200,
        {"kv_transfer_params": {"lmc": {"learned": True, "documents": ["0a"]}}},
    )
    (tmp_path / "a.txt").write_text("a text")
    code, out, _ = lmc("learn", tmp_path, "--url", server.url, "--chat")
    assert (code, "1 document learned" in out) == (0, True)
    assert "--chat needs a server" in lmc("learn", tmp_path, "--model", MODEL, "--local-disk", "d", "--chat")[2]


def test_pins_need_the_administration_endpoint(server: Any, tmp_path: Path) -> None:
    server.answers["/v1/completions"] = 200, {"kv_transfer_params": {"lmc": {"learned": True, "documents": ["0a"]}}}
    (tmp_path / "a.txt").write_text("a text")
    code, _, err = lmc("learn", tmp_path, "--url", server.url, "--pin", "--admin", "127.0.0.1:9")
    assert (code, "LMC_ADMIN" in err) == (2, True)


@pytest.mark.parametrize(
    ("answer", "code", "said"),
    [
        ((200, {"kv_transfer_params": {"lmc": {"learned": True}}}), 0, "1 document learned"),
        ((200, {"kv_transfer_params": {"lmc": {"note": "no room"}}}), 1, "a was not learned: no room"),
        ((400, {"error": {"message": "too long"}}), 1, "a was not learned: too long"),
        ((200, {}), 2, "responded without lmc: start it with LMCConnector"),
        ((401, {}), 2, "answered 401 Unauthorized; set OPENAI_API_KEY to the server's key"),
        ((503, {}), 2, "answered 503"),
    ],
)
def test_what_a_server_says_decides(server: Any, tmp_path: Path, answer: tuple, code: int, said: str) -> None:
    server.answers["/v1/completions"] = answer
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "a").with_suffix(".txt").write_text("a text")
    found, out, err = lmc("learn", tmp_path / "a", "--url", f"{server.url}/v1/")
    assert found == code
    assert said.replace("a was", "a.txt was") in out + err
