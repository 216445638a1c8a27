"""Chat completions of a real server, whose documents were learned from files: a small part of `bench/chat.py`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lmc.demo.pretrained import smollm2

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]


def test_documents_of_chats_are_reused_from_the_first_request_on_and_no_conversation_is_learned() -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("LMC_", "VLLM_"))}
    command = [sys.executable, "bench/chat.py", str(smollm2()), "--documents", "12", "--requests", "5"]
    done = subprocess.run(
        [*command, "--questions", "1"], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["learned"] == found["documents"] >= 12
    assert found["requests"] >= 5
    assert found["least reused"] > 0.99
    assert found["chunks stored"] == found["chunks of documents"]
    assert (found["documents not found"], found["strange documents"]) == (0, 0)
    assert found["right"]["chat"] == found["right"]["completions"]
