"""The kernels compile for the A100 (sm_80), H100 (sm_90), B200 (sm_100) and RTX 50 (sm_120), without spills."""

import re
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from amount import cases

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from lmc.blend.kernels import attention_triton, place_triton, shift_triton  # noqa: E402
from lmc.blend.kernels.attention_triton import FEWEST, LOG2_E, scored, tile  # noqa: E402
from lmc.blend.kernels.place_triton import CHANGING, padded  # noqa: E402
from lmc.blend.kernels.shift_triton import corrected, corrected_values  # noqa: E402
from lmc.blend.kernels.tuning import tuning_for  # noqa: E402

# Every kernel by its name without the first underscore.
kernels = SimpleNamespace(
    **{
        name[1:]: kernel
        for module in (attention_triton, place_triton, shift_triton)
        for name, kernel in vars(module).items()
        if name.startswith("_") and isinstance(kernel, triton.runtime.JITFunction)
    }
)
BINARIES = Path(triton.__file__).parent / "backends/nvidia/bin"
# An 8B Llama: 8 KV heads of 128 in pages of 16 tokens, each of which 4 query heads read.
ITEMSIZES = {"bf16": 2, "fp16": 2, "fp32": 4}
# What programs are compiled to for sm_80 has to run on the smaller GPUs of 8.6, 8.9 and 12.0 as well.
SHARED = {80: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}


def heads(dim: int) -> dict[str, Any]:
    """Eight KV heads of a dimension."""
    return {"HEADS": 8, "D": dim, "WIDE": padded(dim)}


def values(dim: int) -> dict[str, Any]:
    """Values of a dimension."""
    return {"V": dim, "WIDE_V": padded(dim)}


def halves(dim: int) -> dict[str, Any]:
    """RoPE over all of a head."""
    return {"HALF": dim // 2, "PADDED": padded(dim // 2), "INTERLEAVED": False}


HEADS, HALVES, VALUES = heads(128), halves(128), values(128)
# MLA as in DeepSeek V3: one KV head, whose rotated key has 64 numbers and whose latent value has 512.
LATENT = heads(64) | values(512) | halves(64) | {"HEADS": 1, "INTERLEAVED": True}
UNROTATED = {"HALF": 0, "PADDED": 16}  # a layer without positions
POINTERS = {
    "positions": "*i64", "slots": "*i64", "table": "*i32", "tiles": "*i32", "present": "*i1", "cos": "*fp32",
    "sin": "*fp32", "log_sums": "*fp32", "paid": "*fp32", "changed": "*fp32",
    "changes": "*fp32", "weights": "*fp32", "rows": "*fp32", "examples": "*fp32", "means": "*fp32",
    "parts": "*fp32", "part_sums": "*fp32",
    "inverses": "*fp32", "documents": "*i32", "spans": "*i32",
}  # fmt: skip
SCALARS = {
    "factor": "fp32", "share": "fp32", "limit": "i32", "scale": "fp32", "key_scale": "fp32", "value_scale": "fp32"
}  # fmt: skip
TENSORS = (  # of the model's dtype
    "query", "keys", "values", "out", "out_keys", "out_values", "stored", "stored_keys", "stored_values", "old_keys",
    "old_values", "sinks",
)  # fmt: skip
IN_PAGES = ("keys", "values", "stored_keys", "stored_values", "out_keys", "out_values")  # as they are in the cache
OF_64_ROWS = {90: "HGMMA", 100: "UTCHMMA"}  # instructions that multiply 64 rows or more, by capability
STRIDE = re.compile("_(block|head|token|kind)$")
# Tensors that always begin at a multiple of 16 bytes, so that Triton may compile for that, and why.
WHOLE, ROWS = "a tensor of its own", "rows of a head, whose numbers are a multiple of 16 bytes"
ALIGNED = {
    "query": ROWS, "keys": ROWS, "values": ROWS, "stored": ROWS, "stored_keys": ROWS, "stored_values": ROWS,
    "old_keys": ROWS, "old_values": ROWS, "changes": ROWS, "out": WHOLE, "out_keys": WHOLE, "out_values": WHOLE,
    "table": WHOLE, "tiles": WHOLE, "documents": WHOLE, "spans": WHOLE, "parts": WHOLE, "part_sums": WHOLE,
    "changed": WHOLE, "weights": WHOLE, "rows": WHOLE, "examples": WHOLE, "means": WHOLE, "inverses": WHOLE,
    "cos": "rows of half a head in float32", "sin": "rows of half a head in float32",
}  # fmt: skip


class Case(NamedTuple):
    """A kernel as it is compiled."""

    kernel: Any
    constants: dict[str, Any]
    dtype: str
    warps: int
    stages: int
    registers: int  # at most
    products: bool  # of queries and keys, on tensor cores
    cache: str = ""  # the type of the numbers in a quantised cache


def compiled(case: Case, capability: int) -> Any:
    """Compile a kernel for a GPU.

    Strides and sizes are divisible by 16, as those of real models are.
    """
    kernel, constants, dtype, warps, stages, *_, cache = case
    signature, aligned = {}, {}
    for i, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        kind = POINTERS.get(name) or SCALARS.get(name)
        if kind is None:
            held = cache if cache and name in IN_PAGES else dtype
            kind = f"*{held}" if name in TENSORS else "i64" if name.endswith(("_block", "_kind")) else "i32"
        if kernel.__module__ == shift_triton.__name__ and name == "out":
            kind = "*fp32"
        signature[name] = kind
        parameter = kernel.params[i]
        changes = parameter.do_not_specialize or (kind[0] == "*" and parameter.do_not_specialize_on_alignment)
        if not changes and name not in SCALARS:
            aligned[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    target = GPUTarget("cuda", capability, 32)
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}
    return triton.compile(source, target=target, options=options)


def resources(kernel: Any, folder: Path) -> tuple[dict[str, int], str]:
    """Return registers, stack and shared memory of a kernel, and its machine code."""
    file = folder / "kernel.cubin"
    file.write_bytes(kernel.asm["cubin"])
    usage, code = (
        subprocess.run([BINARIES / "cuobjdump", flag, file], capture_output=True, text=True, check=True).stdout
        for flag in ("-res-usage", "-sass")
    )
    found = {name: int(count) for name, count in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    return found | {"SHARED": kernel.metadata.shared}, code  # which is asked for at each launch


def spilled(case: Case) -> int:
    """How many bytes a thread may spill."""
    return 128 if case.dtype == "fp32" and case.constants["WIDE"] > 128 else 0


# Programs of which one Triton spills 8 bytes: 3.8 the first, 3.9 the second.
SPILLED_ONCE = {
    (90, "_paid-shared-bf16-128-7-in one block"),
    (100, "_attend-64-64-hides-sums-chunk-bf16-128-4-fp8"),
}


# kernel, constants, variants, most registers, whether it computes products on tensor cores
OTHERS = (
    (
        kernels.join, {"QUERIES": 32, "D": 128, "WIDE": 128, "BT": FEWEST},
        [{"LOG_SUMS": True}, {"LOG_SUMS": False, "log_sums": None}], 96, False,
    ),
    (kernels.place, HEADS | HALVES | VALUES | {"BT": 16, "LARGEST": 0.0}, [{}, UNROTATED, LATENT], 128, False),
    (kernels.gather, HEADS | VALUES | {"BT": 16}, [{}, heads(64) | values(512)], 128, False),
    (kernels.deviation, HEADS | {"BT": 16}, [{}], 128, False),
    (kernels.rotated, HEADS | HALVES | {"BT": 16}, [{}, UNROTATED], 96, False),
    (kernels.mean, {"DIMS": 1024, "BT": 32, "BD": 32}, [{}], 96, False),
    (
        kernels.alike, {"DIMS": 1024, "MOST": 64, "BD": 32, "SHARED": 0.3},
        [{"BT": 64, "OWN": True}, {"BT": 32, "OWN": False}], 255, False,
    ),
    (kernels.invert, {"MOST": 64}, [{}], 255, False),
    (kernels.changes, HEADS | HALVES | VALUES | {"BT": 16}, [{}, UNROTATED, LATENT], 192, False),
    (
        kernels.correct, HEADS | HALVES | VALUES | {"BT": 32, "MOST": 64, "LARGEST": 0.0},
        [
            {}, UNROTATED | {"BT": corrected(128, 128, 0)},
            {"HALF": 32, "PADDED": 32, "BT": corrected(128, 128, 32)}, {"INTERLEAVED": True},
            *(
                heads(dim) | halves(dim) | corrected_values(dim) | {"BT": corrected(dim, dim, dim // 2)}
                for dim in (64, 256)
            ),
            LATENT | corrected_values(512) | {"BT": corrected(64, 512, 32)},
        ], 255, False,
    ),
)  # fmt: skip


def warps_of(kernel: Any, constants: dict[str, Any]) -> int:
    """Warps of a program that is not one of attention."""
    return 8 if kernel is kernels.correct or constants.get("OWN") else 4


def attention_cases(
    capability: int, dtype: str, dim: int, group: int, value_dim: int = 0, *, paged: bool, quantised: bool = False
) -> Iterator[tuple[str, Case]]:
    """Attention as it is launched for few and for many rows, with and without hidden tokens, and scores.

    Values of another dimension are latent, so that they are keys as well.
    """
    constants = heads(dim) | values(value_dim or dim) | {"GROUP": group, "SIZE": 16, "PAGED": True}
    constants |= {"LIMIT": 0, "CAP": 0.0}
    constants["LATENT"], dim = value_dim > 0, dim + value_dim
    plain, itemsize, tuning = {"SINKS": False, "sinks": None}, ITEMSIZES[dtype], tuning_for(capability)
    cap = {"CAP": 50 * LOG2_E.value}
    if not paged:
        constants |= {"SIZE": 1, "PAGED": False, "table": None}
    # As in gpt-oss, in Llama 4, and in both kinds of layers of Gemma 2.
    limits = {
        "": (0, plain), "-window": (1, {"SINKS": True}), "-chunk": (2, plain),
        "-capped": (0, plain | cap), "-window-capped": (1, plain | cap),
    }  # fmt: skip
    for limit, (number, others) in limits.items() if paged and not value_dim else [("", limits[""])]:
        tiles = {
            (tile(tuning, tokens, 8, group, dim, itemsize, hides=hides, limited=number > 0, quantised=quantised), hides)
            for hides in (False, True)
            for tokens in (64, 16384)
        }
        for (rows, keys, warps, stages), hides in sorted(tiles):
            shape = {"BM": rows, "BN": keys, "PRESENT": hides, "LIMIT": number}
            all_of_it = constants | others | shape | ({} if hides else {"present": None})
            for sums in (True, False) if rows <= 64 and not hides else (hides,):  # Programs of a few rows share keys.
                more = {"LOG_SUMS": sums} | ({} if sums else {"log_sums": None})
                name = f"_attend-{rows}-{keys}-{'hides' if hides else 'whole'}-{'sums' if sums else 'alone'}{limit}"
                yield name, Case(kernels.attend, all_of_it | more, dtype, warps, stages, 255, True)
    some, keys, warps, stages = scored(tuning, dim, itemsize, quantised=quantised)
    for over_all in (False, True) if (dtype, dim, group, paged) == ("bf16", 128, 4, True) else (False,):
        more = {"BT": some, "BN": keys, "OVER_ALL": over_all, "SHARED": False}
        yield f"_paid-{over_all}", Case(kernels.paid, constants | more, dtype, warps, stages, 255, True)
    more = {"BT": FEWEST, "BN": keys, "OVER_ALL": False, "SHARED": True}
    yield "_paid-shared", Case(kernels.paid, constants | more, dtype, warps, stages, 255, False)
    if paged and not value_dim:
        yield "_paid-shared-capped", Case(kernels.paid, constants | more | cap, dtype, warps, stages, 255, False)


# Numbers of a head, and query heads for each KV head. transformers has a prompt in one block, vLLM in pages.
SHAPES = [
    ("bf16", 128, 4), ("bf16", 128, 1), ("bf16", 64, 8), ("bf16", 96, 4), ("bf16", 256, 4),
    ("bf16", 64, 3), ("bf16", 80, 3), ("bf16", 128, 7),
    ("fp16", 128, 4), ("fp32", 64, 1), ("fp32", 96, 8), ("fp32", 128, 4), ("fp32", 256, 4),
    ("bf16", 512, 8),  # Gemma 4
    ("bf16", 64, 16, 512),  # MLA, which has no backend for 4 bytes on GPUs
]  # fmt: skip
IN_ONE_BLOCK = [("bf16", 128, 4), ("bf16", 128, 7), ("bf16", 64, 3), ("fp32", 64, 3)]
Served = Sequence[tuple[bool, Sequence[tuple[Any, ...]]]]
# In pages and in one block, by capability. A program is as large for the last two as for those before them.
EVERY, SERVED = ((True, SHAPES), (False, IN_ONE_BLOCK)), ((True, [SHAPES[0], ("bf16", 64, 8), SHAPES[-1]]),)
CAPABILITIES = {80: EVERY, 90: EVERY, 100: SERVED, 120: SERVED}
QUANTISED = 89, 90, 100, 120  # GPUs that convert fp8_e4m3


def cases_for(capability: int, served: Served, *, quantised: bool = False) -> Iterator[tuple[str, Case]]:
    """Every kernel, and attention of the shapes that are `served`."""
    for kernel, constants, variants, registers, products in OTHERS:
        for more in variants:
            name = f"{kernel.__name__}-{'-'.join(map(str, more.values()))}"
            yield name, Case(kernel, constants | more, "bf16", warps_of(kernel, more), 3, registers, products)
    for paged, shapes in served:
        for shape in shapes:
            for name, case in attention_cases(capability, *shape, paged=paged, quantised=quantised):
                yield f"{name}-{'-'.join(map(str, shape))}{'' if paged else '-in one block'}", case


def in_8_bits(case: Case) -> Case:
    """The same over pages in fp8_e4m3."""
    constants = case.constants | ({"LARGEST": 448.0} if "LARGEST" in case.constants else {})
    if case.kernel is kernels.correct and constants["INTERLEAVED"]:
        sizes = constants["D"], constants["V"], constants["HALF"]
        constants |= {"BT": corrected(*sizes, scattered=True)}
    return case._replace(cache="fp8e4nv", constants=constants)


CASES = {
    (capability, name): case
    for capability, served in CAPABILITIES.items()
    for name, case in cases_for(capability, served)
} | {
    (capability, f"{name}-fp8"): in_8_bits(case)
    for capability in QUANTISED
    for name, case in cases_for(capability, SERVED, quantised=True)
    if set(IN_PAGES).intersection(case.kernel.arg_names) and not case.constants.get("CAP")
}


def shown(capability: int, name: str) -> bool:
    """Whether a case is compiled for each commit: each kernel once, and attention of one shape in pages."""
    kernel = name.partition("-")[0]
    first = next(one for _, one in CASES if one.partition("-")[0] == kernel)
    attends = kernel in ("_attend", "_paid") and name.endswith("-bf16-128-4")
    return capability == 80 and (name == first or attends)


@pytest.mark.parametrize(("capability", "name"), cases(CASES, *(one for one in CASES if shown(*one))))
def test_it_compiles_without_spills(name: str, capability: int, tmp_path: Path) -> None:
    """Heads of 256 numbers of 4 bytes are an exception: no size of a program has room for three parts of them."""
    case = CASES[capability, name]
    found, code = resources(compiled(case, capability), tmp_path)
    assert found["STACK"] <= (8 if (capability, name) in SPILLED_ONCE else spilled(case))
    assert found["REG"] <= case.registers
    assert found["SHARED"] <= SHARED[capability]
    if case.products and case.dtype != "fp32":
        rows = case.constants.get("BM", case.constants.get("BT"))
        assert (OF_64_ROWS.get(capability, "HMMA") if rows >= 64 else "HMMA") in code


@pytest.mark.parametrize("kernel", {case.kernel.__name__: case.kernel for case in CASES.values()}.values())
def test_it_is_not_compiled_again_for_another_length(kernel: Any) -> None:
    """The first request with a prompt of whole blocks would wait for that."""
    changing = [one for one in kernel.params if one.name in ("tokens", "count", "shares", "size", "limit")]
    assert changing or kernel in (kernels.mean, kernels.alike, kernels.invert, kernels.correct)
    assert all(one.do_not_specialize for one in changing)
    pointers = {one.name: one for one in kernel.params if one.name in {*POINTERS, *TENSORS}}
    others = {one.name for one in kernel.params if not one.is_constexpr} - pointers.keys()
    others -= {one.name for one in changing} | SCALARS.keys()
    assert all(map(STRIDE.search, others)), "a new argument: is it a tensor, or does it change from prompt to prompt?"
    specialized = {name for name, one in pointers.items() if not one.do_not_specialize_on_alignment}
    assert specialized <= ALIGNED.keys(), "say why it always begins at a multiple of 16 bytes, or add it to CHANGING"
    assert not ALIGNED.keys() & CHANGING["do_not_specialize_on_alignment"]
