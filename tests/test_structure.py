"""The shape of the code base: arrows, lengths, public names."""

import ast
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOUNDATION = {"lmc", "lmc.shapes", "lmc.keys", "lmc.errors", "lmc.config", "lmc.instead", "lmc.remote"}
# Who may import whom, beside the foundation.
ALLOWED = {
    "storage": {"lmc.storage"},
    "blend": {"lmc.blend"},
    "connectors": {"lmc.connectors", "lmc.blend", "lmc.engine", "lmc.metrics", "lmc.storage"},
}
SOURCES = [path for folder in ("lmc", *ALLOWED) for path in sorted((ROOT / folder).rglob("*.py"))]


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


@pytest.mark.parametrize("folder", sorted(ALLOWED))
def test_arrows_point_one_way(folder: str) -> None:
    for path in (ROOT / folder).rglob("*.py"):
        ours = {name for name in imports(path) if name.split(".")[0] == "lmc"} - FOUNDATION
        stray = {name for name in ours if not any(name == ok or name.startswith(ok + ".") for ok in ALLOWED[folder])}
        assert not stray, f"{path.name} imports {stray}"


def test_the_engine_knows_no_model_and_the_foundation_knows_nobody() -> None:
    assert {
        name for name in imports(ROOT / "lmc/engine.py") if name.startswith(("lmc.blend", "lmc.connectors"))
    } == set()
    for name in ("shapes", "keys", "errors", "config"):
        assert {found for found in imports(ROOT / f"lmc/{name}.py") if found.startswith("lmc.")} <= FOUNDATION


def test_only_connectors_and_the_demo_import_an_engine() -> None:
    for path in SOURCES:
        engines = {name for name in imports(path) if name.split(".")[0] in ("transformers", "vllm")}
        assert not engines or path.is_relative_to(ROOT / "connectors") or path.name == "demo.py", path


def test_top_folders_are_reached_through_links() -> None:
    for folder in ALLOWED:
        assert os.readlink(ROOT / "lmc" / folder) == f"../{folder}"


def test_no_module_and_no_function_is_too_long_to_read() -> None:
    for path in SOURCES:
        text = path.read_text()
        assert text.count("\n") <= 400, f"{path} has {text.count(chr(10))} lines"
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno is not None
                assert node.end_lineno - node.lineno <= 60, f"{path.name}: {node.name}"


def test_every_module_is_in_the_map() -> None:
    page = (ROOT / "docs/structure.md").read_text()
    for path in SOURCES:
        if path.name != "__init__.py":
            assert f"`{path.relative_to(ROOT)}`" in page, path


def test_public_names_are_frozen() -> None:
    """Adding one edits this test."""
    import lmc.connectors.transformers as connector
    from lmc.engine import CacheEngine

    methods = {name for name in vars(connector.CachedModel) if not name.startswith("_")}
    assert methods == {"load", "close", "learn", "learn_pending", "knows", "keep", "prefill", "generate"}
    assert {name for name in vars(CacheEngine) if not name.startswith("_")} == {
        "keys", "lookup", "find_prefix", "find_document", "layers", "retrieve", "store", "fits", "close",
    }  # fmt: skip


def shell_commands() -> list[str]:
    blocks = re.findall(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    lines = [line.split("  #")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def test_the_readme_begins_with_the_two_commands() -> None:
    assert shell_commands()[:2] == ["make demo", "make test"]


@pytest.mark.parametrize(
    "command", [c for c in shell_commands() if c.split()[0] not in ("make", "pip", "source", "vllm")]
)
def test_commands_of_the_readme_run(command: str, readme_home: Path) -> None:
    words = shlex.split(command)
    while "=" in words[0]:
        words.pop(0)
    if words[0] == "python":
        words[0] = sys.executable
        words[1] = str(ROOT / words[1])
    if words[0] == "lmc":
        words[:1] = [sys.executable, "-c", "from lmc.cli import main; main()"]
        if words[3:4] == ["demo"]:
            words += ["--limit", "3", "--no-large"]
    variables = dict(re.findall(r"(\w+)=(\S+)", command)) if "=" in command.split(maxsplit=1)[0] else {}
    done = subprocess.run(
        words,
        cwd=readme_home,
        env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.fixture(scope="module")
def readme_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the README's commands run, one after the other."""
    return tmp_path_factory.mktemp("readme")
