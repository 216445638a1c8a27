"""The kernels compile for the GPUs of the A100 (sm_80) and the H100 (sm_90), without spills, onto tensor cores."""

import re
import subprocess
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from lmc.blend.kernels import attention_triton, place_triton, shift_triton  # noqa: E402
from lmc.blend.kernels.attention_triton import tile  # noqa: E402

BINARIES = Path(triton.__file__).parent / "backends/nvidia/bin"
# An 8B Llama: 8 KV heads of 128 in pages of 16 tokens, each of which 4 query heads read.
HEADS = {"HEADS": 8, "D": 128, "WIDE": 128}
HALVES = {"HALF": 64, "PADDED": 64, "INTERLEAVED": False}
ATTENTION = {"GROUP": 4, "SIZE": 16, "PAGED": True}
POINTERS = {
    "positions": "*i64", "slots": "*i64", "table": "*i32", "tiles": "*i32", "present": "*i1", "cos": "*fp32",
    "sin": "*fp32", "log_sums": "*fp32", "paid": "*fp32", "changed": "*fp32", "magnitude": "*fp32",
    "changes": "*fp32", "weights": "*fp32", "rows": "*fp32", "examples": "*fp32", "means": "*fp32",
    "inverses": "*fp32", "documents": "*i32", "spans": "*i32",
}  # fmt: skip
NOBODY_HIDES = {"present": None, "log_sums": None}
SCALARS = {"factor": "fp32", "share": "fp32"}


def compiled(kernel, capability: int, dtype: str, warps: int, constants: dict) -> bytes:
    """Compile a kernel for a GPU, and return its binary.

    Strides and sizes are divisible by 16, as those of real models are.
    """
    signature, aligned = {}, {}
    for i, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        kind = POINTERS.get(name) or SCALARS.get(name)
        if kind is None:
            is_tensor = name in ("query", "keys", "values", "out", "stored", "old_keys", "old_values")
            kind = f"*{dtype}" if is_tensor else "i64" if name.endswith(("_block", "_kind")) else "i32"
        if kernel.__module__ == shift_triton.__name__ and name == "out":
            kind = "*fp32"
        signature[name] = kind
        if name != "tokens" and name != "count" and name not in SCALARS:
            aligned[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(source, target=target, options={"num_warps": warps, "enable_fp_fusion": True}).asm["cubin"]


def resources(cubin: bytes, folder: Path) -> tuple[dict[str, int], str]:
    """Return registers, stack and shared memory of a kernel, and its machine code."""
    file = folder / "kernel.cubin"
    file.write_bytes(cubin)
    usage, code = (
        subprocess.run([BINARIES / "cuobjdump", flag, file], capture_output=True, text=True, check=True).stdout
        for flag in ("-res-usage", "-sass")
    )
    return {name: int(count) for name, count in re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", usage)}, code


CASES = {
    f"{kernel.__name__}-{'-'.join(map(str, more.values()))}": (kernel, more | constants, registers, products)
    for kernel, constants, variants, registers, products in (
        (
            attention_triton._attend, HEADS | ATTENTION,
            [
                {"BM": rows, "BN": keys, "PRESENT": hides, "LOG_SUMS": hides} | ({} if hides else NOBODY_HIDES)
                for hides in (False, True)
                for rows, keys, _ in (tile(count, 8, hides=hides) for count in (256, 65536))
            ],
            255, True,
        ),
        (
            attention_triton._paid, HEADS | ATTENTION | {"BT": 64, "BN": 64},
            [{"OVER_ALL": over_all} for over_all in (False, True)], 255, True,
        ),
        (place_triton._place, HEADS | HALVES | {"BT": 16}, [{}], 96, False),
        (place_triton._gather, HEADS | {"BT": 16}, [{}], 96, False),
        (place_triton._deviation, HEADS | {"BT": 16}, [{}], 128, False),
        (shift_triton._rotated, HEADS | HALVES | {"BT": 16}, [{}, {"size": 1}], 96, False),
        (shift_triton._mean, {"DIMS": 1024, "BT": 32, "BD": 32}, [{}], 96, False),
        (
            shift_triton._alike, {"DIMS": 1024, "MOST": 64, "BD": 32, "SHARED": 0.3},
            [{"BT": 64, "OWN": True}, {"BT": 32, "OWN": False}], 255, False,
        ),
        (shift_triton._changes, HEADS | HALVES | {"BT": 16}, [{}], 128, False),
        (shift_triton._correct, HEADS | HALVES | {"BT": 32, "MOST": 64}, [{}], 255, False),
    )
    for more in variants
}  # fmt: skip


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("case", CASES)
def test_it_compiles_without_spills(case: str, capability: int, tmp_path: Path) -> None:
    kernel, constants, registers, products = CASES[case]
    warps = 8 if constants.get("BM") == 128 or kernel is shift_triton._correct else 4
    found, code = resources(compiled(kernel, capability, "bf16", warps, constants), tmp_path)
    assert found["STACK"] == 0
    assert found["REG"] <= registers
    if products:  # on tensor cores
        assert ("HGMMA" if capability == 90 else "HMMA") in code
