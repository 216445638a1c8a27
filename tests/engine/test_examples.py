"""The RAG program to start from, and the trial without a GPU of docs/serve.md, run and show what they say."""

import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import httpx
import pytest
from ports import free_port

from lmc.demo import SHIPPED

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
START_SECONDS = 240
MODES = ("blend", "blind reuse", "prefill")


def rag_program(*arguments):
    """Run `examples/rag_vllm.py`; return its first line, and mode, verdict and number of reused tokens of each row."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("LMC_", "VLLM_"))}
    environment |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"}
    environment["LMC_LOAD_POLICY"] = "always"  # Whether a blend is faster depends on the model and the machine.
    command = [sys.executable, "examples/rag_vllm.py", *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    learned, _, _, *table = done.stdout.splitlines()
    return learned, [re.search(rf"({'|'.join(MODES)}) .*(right|wrong) +[\d.]+ +(\d+)", line).groups() for line in table]


def test_the_rag_program_answers_right_where_blind_reuse_does_not():
    learned, rows = rag_program(*(SHIPPED / name for name in ("model", "documents", "questions.json")))
    assert learned == "24 of 24 documents learned"
    right = Counter(mode for mode, verdict, _ in rows if verdict == "right")
    assert right["blend"] == right["prefill"] == 8
    assert right["blind reuse"] < 8


def test_the_rag_program_reuses_documents_for_every_question_with_its_default_model():
    """Earlier, the store had room for half of the documents, and modes found each other's prompts in vLLM's cache."""
    learned, rows = rag_program()
    assert learned == "218 of 218 documents learned"
    assert [mode for mode, _, _ in rows] == [*MODES] * 8
    assert [int(reused) > 500 for _, _, reused in rows] == [True, True, False] * 8


def test_the_trial_without_a_gpu_ends_with_a_reused_answer(tmp_path):
    """Both blocks of the page are run as they stand, at another port, in the environment that they make."""
    (section,) = re.findall(r"^### A trial without a GPU\n(.*?)^##", (ROOT / "docs/serve.md").read_text(), re.S | re.M)
    server, client = re.findall(r"```bash\n(.*?)```", section, re.S)
    made, *server = server.splitlines()
    assert made.startswith("make .venv-vllm/ready && . .venv-vllm/bin/activate ")
    assert "$(ENGINE)/ready:" in (ROOT / "Makefile").read_text()
    entered, *client = client.splitlines()
    assert entered == ". .venv-vllm/bin/activate"
    client[-1] += " http://localhost:8000"  # which the program takes by itself
    port, log = str(free_port()), tmp_path / "server.log"
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("LMC_", "VLLM_"))}
    environment |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "HF_HUB_OFFLINE": "1"}
    environment |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}  # beside other tests
    commands = ["\n".join(lines).replace("8000", port) for lines in (server, client)]
    with log.open("w") as written:
        process = subprocess.Popen(
            ["bash", "-ec", commands[0]], cwd=ROOT, env=environment, stdout=written, stderr=written, process_group=0
        )
    try:
        until = time.monotonic() + START_SECONDS
        while not _answers(f"http://localhost:{port}/health"):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < until, log.read_text()
            time.sleep(0.5)
        done = subprocess.run(
            ["bash", "-ec", commands[1]],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(60)
    assert done.returncode == 0, done.stderr
    assert "24 documents learned in" in done.stdout
    answer, facts = done.stdout.splitlines()[-2:]
    assert "goose" in answer
    assert "unknown_documents" not in facts
    reused, fresh = (int(number) for number in re.findall(r"'(?:reused|fresh)_tokens': (\d+)", facts))
    assert 1100 < reused < reused + fresh < 1250


def _answers(url):
    try:
        return httpx.get(url).is_success
    except httpx.TransportError:
        return False
