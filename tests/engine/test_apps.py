"""Applications as they are: documents learned from files are reused in the prompts that RAG libraries build."""

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import transformers
from http_engine import HttpEngine

from lmc.demo.pretrained import smollm2

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
CLIENT = ROOT / ".venv-rag/bin/python"  # `make .venv-rag/ready`
QWEN3 = ROOT / "build/tokenizers/qwen3"  # `make tokenizers`
SERVE = (
    "export LMC_ENABLE_BLENDING=true LMC_MAX_LOCAL_CPU_SIZE=2 LMC_LOAD_POLICY=always VLLM_CPU_KVCACHE_SPACE=1\n"
    "vllm serve MODEL --port 8000 --max-model-len 8192 --kv-transfer-config "
    '\'{"kv_connector": "LMCConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}\''
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Passages of prose, code, tables and several languages, a file each."""
    sys.path.insert(0, str(ROOT / "bench"))
    import find

    folder = tmp_path_factory.mktemp("documents")
    for kind, passages in find.passages(random.Random(5)).items():
        for number, text in enumerate(passages[:4]):
            (folder / f"{kind}-{number}.txt").write_text(f"{text}\n")
    return folder


def qwen3(path: Path) -> Path:
    """A small model with random weights and Qwen3's tokenizer and chat template."""
    config = transformers.Qwen3Config(
        vocab_size=151936, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=8192, tie_word_embeddings=True,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(QWEN3 / name, path / name)
    return path


@pytest.mark.parametrize("model", ["qwen3", "smollm2"])
def test_documents_learned_from_files_are_reused_in_prompts_of_rag_libraries(model, folder, tmp_path):
    if not (CLIENT.exists() and QWEN3.exists()):
        pytest.skip("run `make .venv-rag/ready tokenizers`")
    weights = qwen3(tmp_path / "qwen3") if model == "qwen3" else smollm2()
    server = HttpEngine(tmp_path, SERVE.replace("MODEL", f"MODEL --model {weights}"))
    try:
        server.wait()
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        learn = [sys.executable, "-m", "lmc", "learn", folder, "--url", server.url]
        assert "32 documents learned" in subprocess.check_output(learn, text=True, env=environment)
        asked = subprocess.check_output(
            [CLIENT, Path(__file__).with_name("rag_client.py"), server.url, folder], text=True
        )
    finally:
        server.close()
    found = {name: counts["reused"] / counts["tokens"] for name, counts in json.loads(asked).items()}
    assert len(found) == 7
    assert min(found.values()) >= 0.97, found
