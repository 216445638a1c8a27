"""`lmc check`, `lmc stat`, `lmc clear` and `lmc demo` as a person would run them."""

import errno
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from array import array
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from models import SEPARATOR, random_model, random_tokens
from rich.console import Console
from storage_fakes import Broken, DictTier, key_of, meta_of, stored
from typer.testing import CliRunner

from lmc import __version__
from lmc.commands.cli import app, holdings_table
from lmc.config.settings import Settings
from lmc.connectors.transformers import CachedModel, hf
from lmc.demo import SHIPPED as SMALL
from lmc.demo.run import begins
from lmc.documents.kept import FILE, KeptDocuments
from lmc.documents.known import KnownDocument
from lmc.storage.tiers import opening as engine_tiers
from lmc.storage.tiers.disk import UNBOUNDED, DiskTier
from lmc.storage.tiers.tier import Entry

SIGNALS = signal.SIGTERM, signal.SIGINT


def lmc(*words: str | Path) -> tuple[int, str, str]:
    interval, handlers = sys.getswitchinterval(), {number: signal.getsignal(number) for number in SIGNALS}
    try:
        result = CliRunner().invoke(app, [str(word) for word in words])
    finally:  # A server, which owns its process, sets both.
        sys.setswitchinterval(interval)
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def without_torch(*words: str | Path, **variables: str) -> tuple[int, str, str]:
    """Run a command in a process of its own, in which torch cannot be imported."""
    program = "import sys; sys.modules['torch'] = None; from lmc.commands.cli import main; main()"
    command = [sys.executable, "-c", program, *map(str, words)]
    done = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def tier(tmp_path: Path) -> Path:
    """A disk tier with five documents."""
    settings = Settings(chunk_size=16, max_local_cpu_size=0.02, local_disk=tmp_path / "tier")
    with CachedModel(random_model(), settings, SEPARATOR) as cached:
        for seed in range(5):
            cached.learn(random_tokens(16, seed))
    return tmp_path / "tier"


def test_a_flipped_bit_is_found_and_fix_removes_it(tier: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    victim = sorted(tier.rglob("*.safetensors"))[2]
    blob = bytearray(victim.read_bytes())
    blob[-1] ^= 1
    victim.write_bytes(blob)

    code, out, _ = lmc("check", tier)
    assert code == 1
    assert str(victim) in out
    assert victim.exists()

    with monkeypatch.context() as patch:  # It was said to be removed when it could not be.
        patch.setattr(Path, "unlink", Mock(side_effect=OSError(errno.EROFS, "Read-only file system")))
        code, out, _ = lmc("check", tier, "--fix")
    assert code == 1
    assert out.strip().endswith("5 records, 1 problem")

    code, out, _ = lmc("check", tier, "--fix")
    assert code == 0
    assert "1 problem, all removed" in out
    assert lmc("check", tier)[1].strip().endswith("4 records, 0 problems")


def test_programs_get_json(tier: Path) -> None:
    (place,) = json.loads(lmc("stat", tier, "--json")[1])
    (held,) = place["namespaces"].values()
    assert (held["records"], held["tokens"], place["unreadable"]) == (5, 80, 0)
    assert json.loads(lmc("check", tier, "--json")[1]) == [{"place": f"disk tier {tier}", "records": 5, "findings": []}]
    victim = sorted(tier.rglob("*.safetensors"))[0]
    victim.write_bytes(b"nothing")
    code, out, _ = lmc("check", tier, "--json")
    (finding,) = json.loads(out)[0]["findings"]
    assert (code, finding["where"], finding["fixed"]) == (1, str(victim), False)
    assert json.loads(lmc("stat", tier, "--json")[1])[0]["unreadable"] == 1
    assert json.loads(lmc("config", "--json")[1])["chunk_size"] == {"value": "256", "from": "default"}


def test_the_command_says_its_version_and_runs_as_a_module() -> None:
    assert lmc("--version")[1] == f"lmc {__version__}\n"
    done = subprocess.run([sys.executable, "-m", "lmc", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"lmc {__version__}\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["lern"], "No such command 'lern'. Did you mean 'learn', 'clear'? See lmc --help"),
        (["--versoin"], "No such option: --versoin (Possible options: --version). See lmc --help"),
        (["learn", "--modle", "x"], "No such option: --modle (Possible options: --model). See lmc learn --help"),
        (["learn"], "Missing argument 'source'. See lmc learn --help"),
        (["documents", "lst"], "No such command 'lst'. Did you mean 'list'? See lmc documents --help"),
        (["config", "more"], "Got unexpected extra argument(s) (more). See lmc config --help"),
    ],
)
def test_wrong_words_are_one_line_that_says_where_the_right_ones_are(words: list[str], said: str) -> None:
    result = CliRunner().invoke(app, words, prog_name="lmc")
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", f"error: {said}\n")


def test_without_words_there_is_the_help() -> None:
    for words in ([], ["documents"]):
        result = CliRunner().invoke(app, words, prog_name="lmc")
        assert result.exit_code == 2
        assert "Usage: lmc" in result.output
        assert "error:" not in result.output


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("lmc documents ", {"list", "show", "pin", "unpin", "remove"}),
        ("lmc l", {"learn"}),
        ("lmc top --j", {"--json"}),
        ("lmc learn --t", {"--text", "--ttl"}),
    ],
)
def test_a_shell_completes_commands_and_options(typed: str, offered: set[str]) -> None:
    shell = {"_LMC_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" "))}
    result = CliRunner().invoke(app, [], prog_name="lmc", env=shell)
    assert (result.exit_code, set(result.stdout.split())) == (0, offered)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_of_completion_is_shown_for_a_shell(shell: str) -> None:
    result = CliRunner().invoke(app, [], prog_name="lmc", env={"_LMC_COMPLETE": f"source_{shell}"})
    assert result.exit_code == 0
    assert f"_LMC_COMPLETE=complete_{shell}" in result.stdout
    assert "--show-completion" in lmc("--help")[1]


def test_a_template_is_printed_for_a_server(tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text("{{ messages[0].content }}")
    code, out, _ = lmc("template", SMALL / "model", "--template", tmp_path / "own.jinja")
    assert code == 0
    assert out.startswith("{%- if documents %}")
    assert out.endswith("{%- endif %}\n{{ messages[0].content }}")
    shutil.copytree(SMALL / "model", tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text("{{ messages[-1].content }}")
    code, out, _ = lmc("template", tmp_path / "model")
    assert (code, out.startswith("{%- if documents %}")) == (0, True)
    assert out.endswith("{%- endif %}\n{{ messages[-1].content }}")
    code, _, err = lmc("template", SMALL / "model")
    assert (code, "has no chat template" in err) == (2, True)
    assert lmc("template", SMALL / "model", "--template", tmp_path / "none")[0] == 2


def test_help_imports_nothing_heavy() -> None:
    run = "from lmc.commands.cli import main\ntry: main()\nfinally: print(*sys.modules)"
    code = f"import sys; sys.argv[1:] = ['--help']\n{run}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {"torch", "numpy", "pydantic", "transformers", "yaml"}.isdisjoint(done.stdout.split())


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


# -- what tiers hold, by namespace -----------------------------------------------------------------------------------

ONE, TWO, NEAR = bytes.fromhex("a1" * 32), bytes.fromhex("b2" * 32), bytes.fromhex("a1ff" * 16)


def fill(root: Path, *records: tuple[int, bytes]) -> list[Path]:
    """Records of 16 tokens by number and namespace; where each is."""
    tier = DiskTier(root, UNBOUNDED)
    paths = []
    for number, namespace in records:
        meta = replace(meta_of(key_of(number)), namespace=namespace)
        tier.write(meta, [stored(meta)])
        paths += root.rglob(f"{meta.key.hex()}.safetensors")
    tier.close()
    return paths


def rows(out: str) -> list[list[str]]:
    """The cells of the tables in `out`."""
    lines = [[cell.strip() for cell in re.split("[│┃]", line)[1:-1]] for line in out.splitlines()]
    return [cells for cells in lines if cells]


@pytest.fixture
def unset(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in [name for name in os.environ if name.startswith(("LMC_", "LMCACHE_"))]:
        monkeypatch.delenv(name)
    return monkeypatch


def test_stat_has_a_row_for_each_namespace_and_the_total(tmp_path: Path) -> None:
    fill(tmp_path, (0, ONE), (1, TWO), (2, TWO))
    code, out, _ = lmc("stat", tmp_path)
    assert code == 0
    found = [(row[:7], row[7] <= row[8]) for row in rows(out)[1:]]
    assert found == [
        (["b2" * 6, "2", "32", "0.000", "3", "1024", "none"], True),
        (["a1" * 6, "1", "16", "0.000", "3", "1024", "none"], True),
        (["total", "3", "48", "0.000", "3", "1024", "none"], True),
    ]


def test_stat_reads_no_part_and_changes_nothing(tmp_path: Path) -> None:
    paths = fill(tmp_path, (0, ONE), (1, TWO))
    paths[0].write_bytes(paths[0].read_bytes()[:4096] + bytes(3 * 4096))
    paths[1].write_bytes(b"garbage")
    before = [(path.read_bytes(), path.stat().st_mtime_ns) for path in paths]
    code, out, _ = lmc("stat", tmp_path)
    assert code == 0
    assert rows(out)[-1][:2] == ["total", "1"]
    assert "1 records have unreadable headers" in out
    assert [(path.read_bytes(), path.stat().st_mtime_ns) for path in paths] == before


def test_stat_of_an_empty_tier_is_a_total_of_nothing(tmp_path: Path) -> None:
    fill(tmp_path)
    code, out, _ = lmc("stat", tmp_path)
    assert code == 0
    assert rows(out)[1:] == [["total", "0", "0", "0.000", "-", "-", "-", "-", "-"]]


def test_the_contents_of_a_tier_fit_into_80_columns() -> None:
    """Namespaces were cut, and times had no month and day."""
    meta = replace(meta_of(key_of(1)), tokens=2_345_678, parts=32, codec="planes")
    records = [(Entry(key=meta.key, bytes=123 << 30, used=used), meta) for used in (1.79e9, 1.8e9)]
    screen = io.StringIO()
    Console(file=screen, width=80).print(holdings_table({bytes(range(32)): records, bytes(32): records}, narrow=True))
    lines = screen.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    for shown, count in {
        "000102030405": 1,
        "000000000000": 1,
        "9382712": 1,
        "2026-09-21": 3,
        "2027-01-15": 3,
        "14:13": 3,
        "08:00": 3,
        "UTC": 2,
    }.items():
        assert screen.getvalue().count(shown) == count, shown


def test_numbers_that_do_not_fit_into_a_terminal_end_with_a_sign() -> None:
    meta = replace(meta_of(key_of(1)), tokens=316_049_152, parts=32)
    records = [(Entry(key=meta.key, bytes=40_000 << 30, used=1.79e9), meta)]
    screen = io.StringIO()
    Console(file=screen, width=48).print(holdings_table({bytes(32): records}, narrow=True))
    for cells in rows(screen.getvalue())[2:]:
        for number in filter(str.strip, cells[1:4]):
            assert number in ("1", "316049152", "40000") or number.endswith("…"), number


def test_stat_and_clear_say_whose_records_a_namespace_has(tmp_path: Path) -> None:
    fill(tmp_path, (0, ONE))
    with closing(DiskTier(tmp_path, UNBOUNDED)) as tier:
        meta = replace(meta_of(key_of(1)), namespace=TWO, model="Qwen/Qwen3-8B", tenant="0123456789abcdef")
        tier.write(meta, [stored(meta)])
    assert ["b2" * 6, "012345", "Qwen/Qwen3-8B"] in rows(lmc("stat", tmp_path)[1])
    namespaces = json.loads(lmc("stat", tmp_path, "--json")[1])[0]["namespaces"]
    assert [namespaces[name.hex()]["model"] for name in (ONE, TWO)] == ["", "Qwen/Qwen3-8B"]
    assert namespaces[TWO.hex()]["tenant"] == "0123456789abcdef"
    code, out, _ = lmc("clear", tmp_path, "--namespace", "b2")  # Nobody confirms it.
    assert (code, "Remove 1 record of Qwen/Qwen3-8B for tenant 012345 from" in out) == (1, True)


def test_clear_removes_exactly_the_records_of_one_namespace(tmp_path: Path) -> None:
    paths = fill(tmp_path, (0, ONE), (1, TWO), (2, TWO), (3, NEAR))
    foreign = [tmp_path / "notes.txt", tmp_path / "records" / "model.safetensors", paths[1].with_name("x.safetensors")]
    for path in foreign:
        path.write_bytes(paths[1].read_bytes())
    used = [path.stat().st_mtime_ns for path in (paths[0], paths[3])]
    code, out, err = lmc("clear", tmp_path, "--namespace", "B2", "--yes")
    assert (code, err) == (0, "")
    assert "removed 2 records" in out
    assert [path.exists() for path in (*paths, *foreign)] == [True, False, False, True, True, True, True]
    assert [path.stat().st_mtime_ns for path in (paths[0], paths[3])] == used, "the others were not used"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--namespace", "a1"], f"2 namespaces start with a1: {ONE.hex()}, {NEAR.hex()}; use more digits"),
        (["--namespace", "c3"], "no namespace starts with c3: use one of a1a1a1a1a1a1, a1ffa1ffa1ff, b2b2b2b2b2b2"),
        (["--namespace", ""], "use the first hex digits"),
        (["--namespace", "../x"], "use the first hex digits"),
        ([], "set the records to remove: --namespace DIGITS, --unused-for TIME, --keep GIB, or --all"),
        (["--unused-for", "1d", "--keep", "1"], "set the records to remove"),
        (["--unused-for", "long"], "invalid time 'long': use a number of seconds"),
        (["--all", "--namespace", "b2"], "set the records to remove"),
    ],
)
def test_clear_refuses_what_is_not_exactly_one_namespace(tmp_path: Path, words: list[str], message: str) -> None:
    paths = fill(tmp_path, (0, ONE), (1, TWO), (2, NEAR))
    code, _, err = lmc("clear", tmp_path, "--yes", *words)
    assert code == 2
    assert message in err
    assert all(path.exists() for path in paths)


def test_a_server_leaves_a_file_at_its_address_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Earlier, the error said that the address was in use."""
    monkeypatch.setenv("LMC_MAX_LOCAL_CPU_SIZE", "0.001")
    (tmp_path / "notes.txt").write_text("important")
    code, _, err = lmc("serve", "--socket", tmp_path / "notes.txt")
    assert (code, "it is not a socket; remove it, or choose another path" in err) == (2, True)
    assert (tmp_path / "notes.txt").read_text() == "important"


def test_clear_asks_before_it_removes(tmp_path: Path) -> None:
    paths = fill(tmp_path, (0, ONE), (1, TWO))
    for answer in ("n\n", ""):
        result = CliRunner().invoke(app, ["clear", str(tmp_path), "--all"], input=answer)
        assert result.exit_code == 1
        assert f"Remove 2 records from disk tier {tmp_path}?" in result.stdout
        assert all(path.exists() for path in paths)
    result = CliRunner().invoke(app, ["clear", str(tmp_path), "--all"], input="y\n")
    assert result.exit_code == 0
    assert not any(path.exists() for path in paths)


def test_clear_all_removes_unreadable_records_too_and_the_tier_works_on(tmp_path: Path) -> None:
    paths = fill(tmp_path, (0, ONE), (1, TWO))
    paths[0].write_bytes(b"garbage")
    assert lmc("clear", tmp_path, "--all", "--yes")[0] == 0
    assert not any(path.exists() for path in paths)
    assert fill(tmp_path, (0, ONE)) == [paths[0]]


def test_clear_removes_the_oldest_records_of_a_shared_directory(tmp_path: Path, unset: pytest.MonkeyPatch) -> None:
    """No process evicts there, and a directory has no lifecycle rules as a bucket has."""
    pytest.importorskip("obstore")
    unset.setenv("LMC_REMOTE_URL", f"file://{tmp_path}")
    settings = Settings.load()
    with closing(engine_tiers.open_remote(settings, settings.remotes[0])) as tier:
        for number in range(4):
            meta = meta_of(key_of(number))
            tier.write(meta, [stored(meta)])
    paths = [next(tmp_path.rglob(f"{key_of(number).hex()}*")) for number in range(4)]
    now, size = time.time(), paths[0].stat().st_size
    for days, path in zip((1, 30, 10, 20), paths, strict=True):
        os.utime(path, (now, now - days * 86400))
    assert "removed 0 records" in lmc("clear", "--unused-for", "31d", "--yes")[1]
    assert "removed 1 record from" in lmc("clear", "--unused-for", "25d", "--yes")[1]
    assert [path.exists() for path in paths] == [True, False, True, True]
    code, out, err = lmc("clear", "--keep", f"{1.5 * size / (1 << 30):.12f}", "--yes")
    assert (code, err, "removed 2 records" in out) == (0, "", True)
    assert [path.exists() for path in paths] == [True, False, False, False]


def test_clear_by_size_leaves_pinned_documents_on_all_tiers(tmp_path: Path, unset: pytest.MonkeyPatch) -> None:
    paths = fill(tmp_path, *((number, ONE) for number in range(5)))
    kept_documents = (
        ("", [key_of(0), key_of(1)], True),
        ("", [key_of(2)], False),
        ("", [key_of(3)], True),
        ("1.0x2-3-4", [key_of(2)], False),
        ("1.0x2-3-4", [key_of(4)], False),
    )
    for layout, keys, pinned in kept_documents:
        document = KnownDocument(bytes(32), array("I", [1]), tuple(keys), pinned=pinned, expires=5.0)
        KeptDocuments(tmp_path, layout).write([document])
    directory = tmp_path / "shared"
    unset.setenv("LMC_LOCAL_DISK", str(tmp_path))
    unset.setenv("LMC_REMOTE_URL", f"file://{directory}")
    settings = Settings.load()
    with closing(engine_tiers.open_remote(settings, settings.remotes[0])) as tier:
        for number in (0, 2):
            meta = meta_of(key_of(number))
            tier.write(meta, [stored(meta)])
    kept = (tmp_path / FILE).read_bytes()
    assert "removed 3 records" in lmc("clear", "--keep", "0", "--yes")[1]
    assert [path.exists() for path in paths] == [True, True, False, True, False]
    assert [path.name[:64] for path in directory.rglob("*.safetensors")] == [key_of(0).hex()]
    assert (tmp_path / FILE).read_bytes() == kept, "no pin is lost"


@pytest.mark.parametrize("words", [["--all"], ["--keep", "0"]])
def test_clear_removes_nothing_if_the_pins_cannot_be_read(tmp_path: Path, words: list[str]) -> None:
    """Earlier, the command removed all records, and ended with a traceback."""
    (path,) = fill(tmp_path, (1, ONE))
    (tmp_path / FILE).write_bytes(b"no database" * 1000)
    code, _, err = lmc("clear", tmp_path, *words, "--yes")
    assert code == 2
    assert f"cannot use the pins in {tmp_path / FILE} (file is not a database): remove the file to give them up" in err
    assert path.exists()


@pytest.mark.parametrize("words", [["--unused-for", "1s"], ["--keep", "1"]])
def test_clear_by_age_refuses_stores_that_evict_by_themselves(words: list[str], unset: pytest.MonkeyPatch) -> None:
    """To list the records of Redis counts as a use of each."""
    unset.setattr(engine_tiers, "open_remote", lambda settings, url, create=True: DictTier())
    unset.setenv("LMC_REMOTE_URL", "redis://cache:6379")
    code, _, err = lmc("clear", *words, "--yes")
    assert (code, "Redis at cache:6379 evicts by itself" in err) == (2, True)


def test_clear_refuses_a_tier_that_another_process_uses(tmp_path: Path) -> None:
    paths = fill(tmp_path, (0, ONE))
    owner = DiskTier(tmp_path, UNBOUNDED)
    assert lmc("stat", tmp_path)[0] == 0
    code, _, err = lmc("clear", tmp_path, "--all", "--yes")
    owner.close()
    assert code == 2
    assert "in use by another process" in err
    assert paths[0].exists()


def test_an_interval_for_which_nobody_can_sleep_is_refused() -> None:
    code, _, err = lmc("top", "--interval", "1e30", "127.0.0.1:1")
    assert (code, "'--interval'" in err) == (2, True)


@pytest.mark.parametrize("words", [["stat", "--server"], ["serve", "--socket"]], ids=lambda words: words[0])
def test_without_its_package_a_cache_server_is_an_error_of_one_line(
    tmp_path: Path, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "msgspec", None)
    code, _, err = lmc(*words, tmp_path / "lmc.sock")
    assert (code, err) == (2, "error: a cache server needs the package msgspec: pip install msgspec\n")


@pytest.mark.parametrize("words", [["check"], ["stat"], ["clear", "--all", "--yes"]])
def test_without_a_directory_the_settings_say_where(
    tmp_path: Path, words: list[str], unset: pytest.MonkeyPatch
) -> None:
    code, _, err = lmc(*words)
    assert code == 2
    assert "pass the directory of a disk tier, or set local_disk or remote_url" in err
    fill(tmp_path, (0, ONE))
    unset.setenv("LMC_LOCAL_DISK", str(tmp_path))
    code, out, _ = lmc(*words)
    assert code == 0
    assert f"disk tier {tmp_path}" in out


def test_disk_and_remote_of_the_settings_are_both_looked_at_and_cleared(
    tmp_path: Path, unset: pytest.MonkeyPatch
) -> None:
    fill(tmp_path, (0, ONE), (1, TWO))
    remote = DictTier()
    for number, namespace in ((0, ONE), (2, ONE), (3, NEAR)):
        meta = replace(meta_of(key_of(number)), namespace=namespace)
        remote.write(meta, [stored(meta)])
    unset.setattr(engine_tiers, "open_remote", lambda settings, url, create=True: remote)
    unset.setenv("LMC_LOCAL_DISK", str(tmp_path))
    unset.setenv("LMC_REMOTE_URL", "redis://somebody:secret@cache:6380/1")

    code, out, _ = lmc("stat")
    assert code == 0
    assert [row[:2] for row in rows(out) if row[0] == "total"] == [["total", "2"], ["total", "3"]]
    assert "Redis at cache:6380" in out
    assert "secret" not in out
    assert "Redis at cache:6380: 3 records, 0 problems" in lmc("check")[1]

    code, _, err = lmc("clear", "--namespace", "a1", "--yes")  # one of the two is only in Redis
    assert code == 2
    assert "2 namespaces start with a1" in err
    code, out, _ = lmc("clear", "--namespace", "a1a1", "--yes")
    assert code == 0
    assert "removed 3 records" in out
    assert list(remote.records) == [key_of(3)]
    assert [row[0] for row in rows(lmc("stat", tmp_path)[1])[1:]] == ["b2" * 6, "total"]


@pytest.mark.parametrize("words", [["check"], ["stat"], ["clear", "--all", "--yes"]])
def test_a_remote_that_fails_is_one_clear_line(words: list[str], unset: pytest.MonkeyPatch) -> None:
    unset.setattr(
        engine_tiers, "open_remote", lambda settings, url, create=True: Broken(lambda: ConnectionError("refused"))
    )
    unset.setenv("LMC_REMOTE_URL", "redis://cache")
    code, _, err = lmc(*words)
    assert code == 2
    assert "error: Redis at cache:6379: refused" in err


def test_a_remote_that_does_not_answer_is_not_an_empty_one(unset: pytest.MonkeyPatch) -> None:
    away = DictTier()
    away.usable = False
    unset.setattr(engine_tiers, "open_remote", lambda settings, url, create=True: away)
    unset.setenv("LMC_REMOTE_URL", "redis://cache")
    code, _, err = lmc("stat")
    assert code == 2
    assert "Redis at cache:6379 does not respond" in err


def run_demo(home: Path, *words: str | Path) -> tuple[int, str, str]:
    fixed = ("--small", "--cache", home / "cache", "--page", home / "page.html", "--seed", "1", "--no-large")
    return lmc("demo", *fixed, *words)


def test_the_demo_asks_in_four_ways_and_a_second_run_finds_its_documents(tmp_path: Path) -> None:
    code, out, err = run_demo(tmp_path, "--limit", "3", "--json", tmp_path / "demo.json")
    assert code == 0, err
    assert all(f" {way} " in out for way in ("full", "exact", "reuse", "blend"))
    found = json.loads((tmp_path / "demo.json").read_text())
    (ways,) = found["models"].values()
    assert ways["blend"]["reused_tokens"] > 500
    assert ways["blend"]["computed_tokens"] < 0.4 * ways["full"]["computed_tokens"]
    assert ways["full"]["bytes"] == {}
    assert len(found["examples"]) == 3
    learned = len({name for example in found["examples"] for name in example["order"]})
    assert f"{learned} documents were prefilled alone" in out
    page = (tmp_path / "page.html").read_text()
    assert "{{" not in page
    assert "<canvas" not in page  # pictures are drawn by the script from data
    assert '"cells"' in page

    code, out, _ = run_demo(tmp_path, "--limit", "3")
    assert code == 0
    assert f"{learned} documents were already on disk" in out
    assert "prefilled alone" not in out


@pytest.mark.parametrize("option", ["--json", "--page"])
def test_a_file_of_the_demo_for_which_a_disk_has_no_room_is_named(tmp_path: Path, option: str) -> None:
    code, _, err = run_demo(tmp_path, "--limit", "1", option, "/dev/full")
    named = "cannot write /dev/full: No space left on device; use --page and --json for other files"
    assert (code, named in err) == (2, True)


def test_an_answer_is_right_if_it_begins_with_the_wanted_words() -> None:
    assert begins(" Mara .", "Mara")
    assert begins("Mara", "mara")
    assert begins(" the Bristol Zoo.", "Bristol zoo", "Bristol")
    assert begins("June 14, 1966", "June 14")
    assert begins("the", "the")
    assert not begins("Marathon", "Mara")
    assert not begins("", "Mara")
    assert not begins("It was Mara", "Mara")


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
    assert "1 question over 3 documents" in out
    assert " 1. owner of lamp → Mara" in out


def test_the_demo_takes_the_id_of_a_model_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    for loader in (hf.AutoModelForCausalLM, hf.AutoTokenizer):
        load = loader.from_pretrained

        def from_pretrained(name: str, *, load: Callable[..., object] = load, **options: object) -> object:
            asked.append(name)
            return load(SMALL / "model", **options)

        monkeypatch.setattr(loader, "from_pretrained", from_pretrained)
    code, out, err = run_demo(tmp_path, "--model", "owner/name", "--limit", "1")
    assert code == 0, err
    assert asked == ["owner/name", "owner/name"]
    assert "1 question over" in out


@pytest.mark.parametrize(
    ("questions", "message"),
    [
        ([], "has no questions"),
        ([{"answer": "Mara"}], "has an invalid question"),
        ([{"question": "who", "answer": 7}], "needs an answer in text"),
        ([{"question": "who", "answer": None}], "needs an answer in text"),
        ([{"question": "who", "answer": ""}], "needs an answer in text"),
        ({"queries": []}, "has an invalid question"),
        ("[" * 100_000, "is not valid JSON"),
    ],
)
def test_questions_that_cannot_be_asked_are_named(tmp_path: Path, questions: object, message: str) -> None:
    (tmp_path / "q.json").write_text(questions if isinstance(questions, str) else json.dumps(questions))
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
        (["--documents", "nowhere"], "nowhere does not exist: use a directory of text files"),
        (["--questions", "nowhere.json"], "cannot read nowhere.json"),
        (["--questions", str(SMALL / "documents" / "inn-01.txt")], "is not valid JSON"),
        (["--model", "/nowhere/at/all"], "the directory does not exist"),
        (["--json", "/proc/nowhere.json"], "cannot write /proc/nowhere.json"),
        (["--model", "nowhere/at-all"], "cannot load a causal language model from nowhere/at-all"),
    ],
)
def test_wrong_input_is_one_clear_line(tmp_path: Path, words: list[str], message: str) -> None:
    code, out, err = run_demo(tmp_path, *words)
    assert code == 2
    assert message in err
    assert out == ""


@pytest.mark.parametrize(
    ("address", "token", "said"),
    [
        ("0.0.0.0:9180", "", "can be reached from other hosts: set LMC_ADMIN_TOKEN to a secret"),
        ("0.0.0.0:9180", "hunter2", ""),
        ("127.0.0.1:9180", "", ""),
        ("127.0.0.2:9180", "", ""),  # It is a host of its own in a trial with several.
        ("127.0.0.1.example.com:9180", "", "can be reached from other hosts: set LMC_ADMIN_TOKEN to a secret"),
        ("http://10.0.0.7:9180", "", ""),  # for commands, which ask an engine elsewhere
        ("unix://lmc.sock", "", "must have the path of a socket"),
        ("unix:///run/lmc.sock", "", ""),
        ("9180x", "", "must be an address such as 127.0.0.1:9180"),
    ],
)
def test_config_says_if_no_engine_would_start_with_its_administration_address(monkeypatch, address, token, said):
    monkeypatch.setenv("LMC_ADMIN", address)
    monkeypatch.setenv("LMC_ADMIN_TOKEN", token)
    code, out, err = lmc("config")
    assert code == bool(said)
    assert address in out
    assert (said in err) if said else not err
