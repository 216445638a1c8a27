"""Models with random weights, for measurements of cost but not of quality.

`machine` describes the computer, because measured times depend on it.
"""

import platform
import random
from pathlib import Path
from typing import Any

import torch

VOCABULARY, SEPARATOR = 4096, (1, 2)


def machine() -> str:
    """Return the processor, the number of cores and the version of torch."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [
            line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")
        ]
        model = f"{names[0]}, {len(names)} cores" if names else model
    return f"{model}; torch {torch.__version__}"


def random_llama(layers: int, hidden: int, heads: int = 0, kv_heads: int = 0) -> Any:
    """Return a Llama with random weights. 12 layers with a hidden size of 768 have about 100M parameters.

    Without `heads` and `kv_heads`, a head has 64 dimensions, and two heads share a KV head.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads or hidden // 64,
        num_key_value_heads=kv_heads or hidden // 128,
        max_position_embeddings=8192,
    )
    return LlamaForCausalLM(config).eval()


def random_tokens(count: int, seed: int) -> list[int]:
    """Return random tokens other than `SEPARATOR`."""
    generator = random.Random(seed)
    return [generator.randrange(1 + max(SEPARATOR), VOCABULARY) for _ in range(count)]
