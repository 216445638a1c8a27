"""Models with random weights: they say nothing about quality, and all about cost.

`machine` describes the computer, without which a time means nothing.
"""

import platform
import random
from pathlib import Path
from typing import Any

import torch

VOCABULARY, SEPARATOR = 4096, (1, 2)


def machine() -> str:
    """Processor, cores and torch: what a number is worth nothing without."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [
            line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")
        ]
        model = f"{names[0]}, {len(names)} cores" if names else model
    return f"{model}; torch {torch.__version__}"


def random_llama(layers: int, hidden: int, heads: int = 0, kv_heads: int = 0) -> Any:
    """A Llama with random weights (12 layers of 768 are about 100M): says nothing about quality, all about cost.

    Without a number of heads, they have 64 dimensions, and two of them share a KV head.
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
    """Tokens that are no `SEPARATOR`, for models with random weights."""
    generator = random.Random(seed)
    return [generator.randrange(1 + max(SEPARATOR), VOCABULARY) for _ in range(count)]
