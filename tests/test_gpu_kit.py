"""What brings vLLM to a GPU's machine: libraries keep what that GPU runs, and parts are checked before their use."""

import json
import os
import random
import shutil
import struct
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parents[1] / "bench"
PTX, CODE = 1, 2


@pytest.fixture(autouse=True)
def on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(BENCH), *sys.path])


def entry(kind: int, capability: int, code: bytes) -> bytes:
    """An entry of a fat binary, with a header of 64 bytes."""
    header = struct.pack("<HHIQ", kind, 0x101, 64, len(code)) + bytes(12) + struct.pack("<I", capability)
    return header + bytes(64 - len(header)) + code


def fat_binary(*entries: bytes) -> bytes:
    """A fat binary, with a header of 16 bytes."""
    body = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def library(*sections: tuple[str, bytes]) -> bytes:
    """An ELF file of 64 bits with these sections, each beside others."""
    names, at, body, rows = b"\0", 64, b"", []
    for name, data in sections:
        rows.append(struct.pack("<IIQQQQIIQQ", len(names), 1, 0, 0, at + len(body), len(data), 0, 0, 1, 0))
        names += name.encode() + b"\0"
        body += data
    rows.append(struct.pack("<IIQQQQIIQQ", len(names), 3, 0, 0, at + len(body), len(names) + 10, 0, 0, 1, 0))
    body += names + b".shstrtab\0"
    header = b"\x7fELF\x02\x01" + bytes(34) + struct.pack("<Q", at + len(body)) + bytes(10)
    header += struct.pack("<HHH", 64, len(rows), len(rows) - 1)
    return header + bytes(64 - len(header)) + body + b"".join(rows)


def codes_of(data: bytes) -> list[list[tuple[int, int, bytes]]]:
    """The kind, the capability and the code of each entry of each fat binary."""
    from gpu.thin import fat_binaries

    return [
        [(one.kind, one.capability, data[one.at + 64 : one.at + one.size]) for one in binary.entries]
        for binary in fat_binaries(data)
    ]


ENTRIES: dict[str, Any] = {
    "80": entry(CODE, 80, b"for 8.0 " * 9),
    "90": entry(CODE, 90, b"for 9.0 " * 7),
    "100": entry(CODE, 100, b"for 10.0"),
    "ptx75": entry(PTX, 75, b"text 7.5"),
    "ptx80": entry(PTX, 80, b"text 8.0" * 3),
    "ptx120": entry(PTX, 120, b"text12.0"),
}


@pytest.mark.parametrize(
    ("there", "capability", "kept"),
    [
        (["80", "90", "100"], 90, ["90"]),
        (["80", "90", "ptx120"], 89, ["80"]),  # code for 8.0 runs on 8.9
        (["80", "ptx75", "ptx80", "ptx120"], 90, ["ptx80"]),
        (["100", "80"], 75, ["100"]),  # nothing runs there: the smallest one
    ],
)
def test_a_library_keeps_what_a_gpu_runs(there: list[str], capability: int, kept: list[str]) -> None:
    from gpu.thin import thinned

    first, second = (fat_binary(*(ENTRIES[name] for name in names)) for names in (there, ["90", "80"]))
    whole = library(
        (".text", b"machine code"), (".nv_fatbin", first + bytes(8) + second), (".symtab", b"names"), (".data", b"data")
    )
    small = thinned(whole, capability)
    assert len(small) == len(whole)
    for data in (b"machine code", b"data", b".symtab"):
        assert small.index(data) == whole.index(data)
    assert b"names" not in small
    wanted = codes_of(library((".nv_fatbin", fat_binary(*(ENTRIES[name] for name in kept)))))
    assert codes_of(small)[0] == wanted[0]
    assert len(codes_of(small)[1]) == 1
    assert small.index(second[:4], small.index(first[:4]) + 1) == whole.index(second), "each stays where it was"


def test_what_is_no_library_is_refused() -> None:
    from gpu.thin import thinned

    with pytest.raises(ValueError, match="not an ELF file"):
        thinned(b"text", 90)


@pytest.fixture
def kit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A kit of two small wheels."""
    from gpu import pack

    wheels = tmp_path / "wheels"
    wheels.mkdir()
    so = library((".nv_fatbin", fat_binary(ENTRIES["80"], ENTRIES["90"])))
    contents = {
        "vllm-1.0-cp38-abi3-manylinux_2_28_x86_64.whl": {
            "vllm/__init__.py": b"version = 1",
            "vllm/_C_stable_libtorch.abi3.so": so,
            "vllm/_moe_C.abi3.so": so,
            "vllm/third_party/deep_gemm/kernel.py": b"",
            "vllm-1.0.dist-info/METADATA": b"Name: vllm",
        },
        "other_one-2.0-py3-none-any.whl": {"other_one.py": b"", "other_one.so": so},
        "unwanted-2.0-py3-none-any.whl": {"unwanted.py": b""},
    }
    for name, files in contents.items():
        with zipfile.ZipFile(wheels / name, "w") as wheel:
            for path, data in files.items():
                wheel.writestr(path, data)
    monkeypatch.setattr(pack, "PART", 100)
    pack.build(tmp_path / "kit", wheels, ["vllm==1.0", "other-one"], 90)
    return tmp_path / "kit"


def test_a_kit_is_cut_into_parts_and_unpacked(kit: Path, tmp_path: Path) -> None:
    from gpu.pack import unpack

    parts = json.loads((kit / "parts.json").read_text())
    assert {part["archive"] for part in parts.values()} == {"libraries", "python"}
    assert len(parts) > 2
    assert max(part["bytes"] for part in parts.values()) <= 100
    assert unpack(kit, tmp_path / "site") == []
    found = {str(path.relative_to(tmp_path / "site")) for path in (tmp_path / "site").rglob("*") if path.is_file()}
    assert found == {
        "vllm/__init__.py", "vllm/_C_stable_libtorch.abi3.so", "vllm-1.0.dist-info/METADATA", "other_one.py",
        "other_one.so", "lmc-0.1.0.dist-info/METADATA", "lmc-0.1.0.dist-info/entry_points.txt",
    }  # fmt: skip
    thin = (tmp_path / "site/vllm/_C_stable_libtorch.abi3.so").read_bytes()
    assert [one[1] for one in codes_of(thin)[0]] == [90]


@pytest.mark.parametrize("damage", ["missing", "changed"])
def test_an_archive_with_a_bad_part_is_left_out_and_named(kit: Path, tmp_path: Path, damage: str) -> None:
    from gpu.pack import unpack

    part = kit / "libraries.part0"
    part.unlink() if damage == "missing" else part.write_bytes(b"x" * part.stat().st_size)
    assert unpack(kit, tmp_path / "site") == ["libraries.part0"]
    assert (tmp_path / "site/vllm/__init__.py").exists()
    assert not (tmp_path / "site/vllm/_C_stable_libtorch.abi3.so").exists()


def test_vllm_finds_the_plugin_in_an_unpacked_kit(kit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib.metadata import entry_points

    from gpu.pack import unpack

    unpack(kit, tmp_path / "site")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site")])
    (plugin,) = entry_points(group="vllm.general_plugins", name="lmc")
    assert plugin.value == "lmc.connectors.vllm.plugin:register"


def test_each_version_of_python_has_wheels_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kit for Python 3.12 got the wheels of 3.11 that were there, and nothing could be imported."""
    from gpu import pack

    used = list[tuple[Path, str]]()
    monkeypatch.setattr(pack, "download", lambda wheels, wanted, python: used.append((wheels, python)))
    monkeypatch.setattr(pack, "build", lambda kit, wheels, wanted, capability: used.append((wheels, "")))
    for python in ("3.11", "3.12"):
        monkeypatch.setattr(sys, "argv", ["pack", "build", "--wheels", str(tmp_path), "--python", python])
        pack.main()
    assert used == [
        (tmp_path / "3.11", "3.11"), (tmp_path / "3.11", ""), (tmp_path / "3.12", "3.12"), (tmp_path / "3.12", "")
    ]  # fmt: skip


@pytest.fixture
def go(tmp_path: Path) -> Any:
    """A function that runs the script for parts of a machine, with a folder of caches; it returns what was printed."""
    (tmp_path / "bench/gpu").mkdir(parents=True)
    shutil.copy(BENCH / "gpu/go.sh", tmp_path / "bench/gpu")

    def run(cache: str, *parts: str, **environment: str) -> str:
        folders = {"OUT": tmp_path / "out", "SITE": tmp_path / "site", "CACHE": tmp_path / cache, "HOME": tmp_path}
        given = {**os.environ, **{name: str(folder) for name, folder in folders.items()}, **environment}
        script = tmp_path / "bench/gpu/go.sh"
        return subprocess.run(["bash", script, *parts], env=given, capture_output=True, text=True, check=True).stdout

    return run


def test_what_was_compiled_comes_back_in_small_files_and_is_there_on_the_next_machine(go: Any, tmp_path: Path) -> None:
    """Parts of 25 MiB were over what one file may have that comes back."""
    compiled = random.Random(0).randbytes(20 << 20)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache/kernel").write_bytes(compiled)
    assert "=== caches: status 0" in go("cache", "caches:60")
    parts = sorted((tmp_path / "out").glob("caches.part-*"))
    assert len(parts) == 2
    assert max(part.stat().st_size for part in parts) < 16 << 20
    (tmp_path / "build/gpu/kit").mkdir(parents=True)
    for part in parts:
        part.rename(tmp_path / "build/gpu/kit" / part.name)
    go("next cache", "caches:60")
    assert (tmp_path / "next cache/kernel").read_bytes() == compiled


def test_caches_that_take_too_long_are_ended_and_leave_no_cut_off_files(go: Any, tmp_path: Path) -> None:
    """Earlier, packing the caches had no time limit, and took the time of the whole command."""
    (tmp_path / "slow").mkdir()
    (tmp_path / "slow/tar").write_text("#!/bin/sh\necho begun\nsleep 60\n")
    (tmp_path / "slow/tar").chmod(0o755)
    said = go("cache", "caches:1", PATH=f"{tmp_path}/slow:{os.environ['PATH']}")
    assert "=== caches: status 124" in said
    assert not list((tmp_path / "out").glob("caches.part-*"))
