"""What `lmc config` promises, and what every command promises about errors."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from lmc.commands.cli import Commands, app
from lmc.config.settings import Settings
from lmc.config.sources import VARIABLES
from lmc.errors import CorruptRecord


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("LMC_", "LMCACHE_"))]:
        monkeypatch.delenv(name)


def rows(output: str) -> dict[str, list[str]]:
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in output.splitlines() if "│" in line]
    return {name: rest for name, *rest in cells}


def test_config_has_one_row_for_each_setting_with_value_and_origin() -> None:
    result = CliRunner().invoke(app, ["config"], env={"LMC_CHUNK_SIZE": "64", "LMC_ENABLE_BLENDING": "1"})
    assert result.exit_code == 0
    table = rows(result.stdout)
    assert list(table) == [*Settings.model_fields, *VARIABLES]
    assert table["chunk_size"] == ["64", "environment LMC_CHUNK_SIZE"]
    assert table["enable_blending"] == ["True", "environment LMC_ENABLE_BLENDING"]
    assert table["blend_special_str"] == ["' # # '", "default"]
    assert table["blend_recompute_ratios"] == ["0.15", "default"]


def test_long_paths_are_not_cut_where_there_is_no_terminal(tmp_path: Path) -> None:
    file = tmp_path / ("long-" * 40 + ".yaml")
    disk = "/disk" + "/very-long-name" * 20
    file.write_text(f"local_disk: {disk}")
    result = CliRunner().invoke(app, ["config"], env={"LMC_CONFIG_FILE": str(file), "COLUMNS": "80"})
    assert rows(result.stdout)["local_disk"] == [disk, f"YAML {file}"]


def test_a_value_is_printed_as_it_is_even_if_it_looks_like_markup() -> None:
    result = CliRunner().invoke(app, ["config"], env={"LMC_BLEND_SPECIAL_STR": "[red]:smile:[/red]"})
    assert rows(result.stdout)["blend_special_str"][0] == "'[red]:smile:[/red]'"


def test_a_config_error_is_one_line_on_stderr_and_exit_code_2() -> None:
    result = CliRunner().invoke(app, ["config"], env={"LMC_CHUNK_SIZE": "0"})
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr == (
        "error: chunk_size = '0' (environment LMC_CHUNK_SIZE) must be a whole number of tokens, at least 1\n"
    )


def test_a_password_is_never_printed() -> None:
    result = CliRunner().invoke(app, ["config"], env={"LMC_REMOTE_URL": "redis://lmc:hunter2@host:7000/1"})
    assert rows(result.stdout)["remote_url"] == ["'redis://***@host:7000/1'", "environment LMC_REMOTE_URL"]
    assert "hunter2" not in result.output
    result = CliRunner().invoke(app, ["config"], env={"LMC_REMOTE_URL": "redis//lmc:hunter2@host"})
    assert result.exit_code == 2
    assert "hunter2" not in result.output


def test_config_shows_the_variables_that_are_no_settings_and_no_token() -> None:
    given = {"LMC_ADMIN": "127.0.0.1:9180", "LMC_ADMIN_TOKEN": "hunter2", "LMC_LOG_LEVEL": "debug"}
    printed = CliRunner().invoke(app, ["config"], env=given).output
    table = rows(printed)
    assert table["admin"] == ["'127.0.0.1:9180'", "environment LMC_ADMIN"]
    assert table["admin_token"] == ["***", "environment LMC_ADMIN_TOKEN"]
    assert table["LMC_KERNELS"] == ["None", "default"]
    printed += CliRunner().invoke(app, ["config", "--json"], env=given).stdout
    found = json.loads(CliRunner().invoke(app, ["config", "--json"], env=given).stdout)
    assert found["LMC_LOG_LEVEL"] == {"value": "'debug'", "from": "environment"}
    assert "hunter2" not in printed


def test_any_error_of_lmc_in_any_command_is_one_line_and_exit_code_2() -> None:
    other = typer.Typer(cls=Commands)

    @other.callback()
    def root() -> None: ...

    @other.command()
    def check(path: str) -> None:
        raise CorruptRecord(f"{path}\nis torn")

    result = CliRunner().invoke(other, ["check", "a.safetensors"])
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", "error: a.safetensors is torn\n")


def test_a_bug_is_not_mistaken_for_an_error_of_lmc() -> None:
    other = typer.Typer(cls=Commands)

    @other.callback()
    def root() -> None: ...

    @other.command()
    def check() -> None:
        raise ZeroDivisionError

    assert isinstance(CliRunner().invoke(other, ["check"]).exception, ZeroDivisionError)


def test_config_says_why_an_engine_would_not_start() -> None:
    for name, value in {"LMC_DOCUMENT_EVENTS": "somewhere", "LMC_ADMIN": "0.0.0.0:9180"}.items():
        result = CliRunner().invoke(app, ["config"], env={name: value})
        assert (result.exit_code, f"{name} = {value}" in result.stderr) == (1, True)
    addresses = {"LMC_DOCUMENT_EVENTS": "tcp://*:5558", "LMC_ADMIN": "http://127.0.0.1:9180"}
    assert CliRunner().invoke(app, ["config"], env=addresses).exit_code == 0


def test_config_imports_nothing_that_loads_models() -> None:
    run = "from lmc.commands.cli import main\ntry: main()\nfinally: print(*sys.modules)"
    code = f"import sys; sys.argv[1:] = ['config']\n{run}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    *_, last = done.stdout.splitlines()
    assert "chunk_size" in done.stdout
    assert "lmc.config.settings" in last.split()
    assert {"torch", "numpy", "transformers", "vllm"}.isdisjoint(last.split())


def test_a_terminal_that_is_not_utf_8_gets_escapes_and_no_traceback(tmp_path: Path) -> None:
    program = [sys.executable, "-c", "from lmc.commands.cli import main; main()"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "LMC_LOCAL_DISK": "/tmp/Bücher…😀"}

    def printed(*words: str | Path) -> str:
        command = [*program, *map(str, words)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    assert "/tmp/B\\xfccher\\u2026\\U0001f600" in printed("config")
    assert json.loads(printed("config", "--json"))["local_disk"]["value"] == "/tmp/Bücher…😀"
    (tmp_path / "template").write_text("{% for m in messages %}Größe{{ m.content }}{% endfor %}")
    assert "Größe" in printed("template", "any", "--template", tmp_path / "template")


def test_ctrl_c_during_imports_leaves_no_traceback() -> None:
    program = (
        "import signal, sys; import lmc.__main__\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # A shell's background jobs ignore it.
        "class Interrupted:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name.startswith('lmc.commands'): signal.raise_signal(signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupted())\n"
        "lmc.__main__.main()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_the_entry_point_runs_as_a_process() -> None:
    command = [sys.executable, "-c", "from lmc.commands.cli import main; main()", "config"]
    root = Path(__file__).parent.parent
    done = subprocess.run(command, env={"LMC_CHNK_SIZE": "1"}, cwd=root, capture_output=True, check=False)
    assert done.returncode == 2
    assert done.stdout == b""
    assert done.stderr.decode().splitlines() == [
        "error: unknown setting LMC_CHNK_SIZE (environment LMC_CHNK_SIZE): did you mean LMC_CHUNK_SIZE?"
    ]


@pytest.mark.parametrize("words", [("config",), ("config", "--json"), ("--help",), ("--version",)], ids=" ".join)
def test_output_to_a_full_disk_is_an_error_of_one_line(words: tuple[str, ...]) -> None:
    command = [sys.executable, "-c", "from lmc.commands.cli import main; main()", *words]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, check=False)
    assert done.returncode == 2
    assert done.stderr.decode() == "error: cannot write the output: No space left on device\n"


@pytest.mark.parametrize("words", [("config",), ("config", "--json")], ids=" ".join)
def test_a_command_without_an_output_says_nothing(words: tuple[str, ...]) -> None:
    """Python has no standard output if whoever starts it has closed that, as some daemons do."""
    command = [sys.executable, "-c", "from lmc.commands.cli import main; main()", *words]
    done = subprocess.run(["sh", "-c", 'exec "$@" >&-', "sh", *command], stderr=subprocess.PIPE, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
