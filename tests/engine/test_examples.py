"""The RAG program to start from runs, and shows what it says."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_rag_program_answers_right_where_blind_reuse_does_not():
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("LMC_", "VLLM_"))}
    environment |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "examples/rag_vllm.py"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    learned, _, *table = done.stdout.splitlines()
    assert learned == "24 of 24 documents learned"
    ways = ("blend", "blind reuse", "prefill")
    right = Counter(way for line in table for way in ways if way in line and " right " in line)
    assert right["blend"] == right["prefill"] == 8
    assert right["blind reuse"] < 8
