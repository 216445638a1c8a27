"""The checks for vLLM on a GPU run, and each of them passes on a CPU; times mean nothing there."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.long

BENCH = Path(__file__).parents[2] / "bench"
BACKEND = "CPU_ATTN"
BLENDS = [
    "blends at ratio 1 by all differ by",
    "document tokens reused by blends at ratio 1 by all",
    "blends at ratio 1 by union differ by",
    "document tokens reused by blends at ratio 1 by union",
    "the control, blind reuse, differs",
]
START = [
    "start: seconds until an engine with lmc has started",
    "start: the self-test passed",
    *(f"start: {what}" for what in ("exact hits differ by", "tokens of exact hits that differ")),
    "start: tokens loaded for exact hits",
    *(f"start: {what}" for what in BLENDS),
]
ANSWERS = [
    "the self-test passed, and this is the backend",
    "the kernels are those in Triton",
    "exact hits differ by",
    "tokens of exact hits that differ",
    "tokens loaded for exact hits",
    *BLENDS,
    "plain requests behind blends differ by",
    "plain requests behind blends, from lmc's chunks differ by",
    "requests aborted in the middle of a load or blend",
    "requests behind an abort differ by",
    "requests, blocks and chunks that are held behind the aborts",
    "requests preempted, as blocks are few",
    "requests among them differ by",
    "requests preempted while another one is blended",
    "these two differ by",
    "requests, blocks and chunks that are held behind the preemptions",
    "the kernels of another engine are those in torch",
    *(
        line
        for blend in ("blind reuse", "a blend at 0.15 by chance")
        for line in (
            f"document tokens reused by {blend}, in both engines",
            f"answers of both engines by {blend} differ by",
        )
    ),
]
OF_BOTH_KERNELS = [
    "the self-test passed",
    "the kernels are those in Triton",
    *ANSWERS[2:5],
    *BLENDS,
    *ANSWERS[-4:],
]
LARGE_STEPS = [*BLENDS, "rows in a call of the compiled model", "calls of the compiled model by blends"]
TIMES = [
    "the self-test of the large shape passed",
    "tokens per second of vLLM, of its second start",
    "tokens per second without hits",
    "tokens that were stored meanwhile",
    *(
        line
        for length in (192, 288)
        for line in (
            f"document tokens reused in a prompt of {length}",
            f"TTFT of {length} tokens: full prefill",
            f"TTFT of {length} tokens: blend at 0.15",
            f"a blend of {length} tokens is faster",
        )
    ),
    "tokens loaded by an exact hit of 288",
    "TTFT of 288 tokens: exact hit",
    "KV loaded by an exact hit of 288 tokens",
    "that, of one large page-locked copy",
]
GAPS = [
    f"steps of {step}: {line}"
    for step in (512, 64)
    for line in (
        "worst gap between tokens beside a prefill of vLLM alone, 192 tokens",
        "worst gap between tokens beside a prefill, 192 tokens",
        "worst gap between tokens beside a blend, 192 tokens",
        "the gap beside a blend",
        "the gap beside a blend, of vLLM without lmc",
        "the gap beside a prefill, of vLLM without lmc",
    )
]


def test_the_checks_for_vllm_on_a_gpu_run() -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("LMC_", "VLLM_"))}
    command = [sys.executable, "-m", "gpu.accept", "--smoke", "--tier", "B"]
    done = subprocess.run(command, cwd=BENCH, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout[-5000:]}\n{done.stderr[-3000:]}"
    found = json.loads(done.stdout.splitlines()[-1])
    fp8 = ["fp8"] if torch.cpu._is_avx512_supported() else []
    assert found["parts"] == ["start", BACKEND, "compiled", *fp8, "drafts", "times", "gaps", "small_steps"]
    assert found["short"] == []
    answers = [
        *START,
        *(f"{BACKEND}: {what}" for what in ANSWERS),
        *(f"{BACKEND}, steps of 512: {what}" for what in LARGE_STEPS),
        *(f"{BACKEND}, fp8: {what}" for what in OF_BOTH_KERNELS if fp8),
        *(f"{BACKEND}, EAGLE: {what}" for what in OF_BOTH_KERNELS),
    ]
    assert [line["what"] for line in found["lines"]] == [*answers, *TIMES, *GAPS]


def test_traces_are_made_inside_vllm(tmp_path: Path) -> None:
    """Each function that is watched exists, and is called."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("LMC_", "VLLM_"))}
    command = [sys.executable, "-m", "gpu.traces", "vllm", "--smoke", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=BENCH, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout[-5000:]}\n{done.stderr[-3000:]}"
    found = json.loads((tmp_path / "traces_vllm.json").read_text())
    parts = {"place a layer", "a layer", "rows of a pass", "write keys and values", "worker: a step"}
    assert parts <= found["clocked blend"]["parts"].keys()
    assert {f"lmc: {part}" for part in parts} <= found["traced blend"]["parts"].keys()
    assert {path.name for path in tmp_path.glob("*.gz")} == {
        f"vLLM_{name}.json.gz" for name in ("blend", "exact_hit", "full_prefill")
    }
