"""What the benchmarks share: a random model of a size, prompts of known documents, and the closing line of JSON."""

import json
import platform
import random
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lmc.blend.segments import join

SEPARATOR = (1, 2)
VOCABULARY = 4096


def random_llama(layers: int = 12, hidden: int = 768, dtype: torch.dtype = torch.float32) -> Any:
    """A Llama with random weights: 12 layers of 768 are about 100M parameters. Says nothing about quality, all about cost."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 128,
        max_position_embeddings=8192,
    )
    return LlamaForCausalLM(config).to(dtype).eval()


def tokens_of(count: int, seed: int) -> list[int]:
    """Random tokens that are no separators."""
    generator = random.Random(seed)
    return [generator.randrange(3, VOCABULARY) for _ in range(count)]


def prompt_of(documents: Sequence[Sequence[int]], order: Sequence[int], question: int = 24, seed: int = 0) -> list[int]:
    """System text, the documents in this order, and a question of `question` tokens."""
    return join(tokens_of(24, 1_000_000), [documents[i] for i in order], tokens_of(question, 2_000_000 + seed), SEPARATOR)


def median(run: Callable[[int], float], repeats: int) -> float:
    """The median of `run(0)` … `run(repeats - 1)`, after one run that does not count."""
    run(repeats)
    return statistics.median(run(i) for i in range(repeats))


def closing_line(result: dict[str, object], name: str | None = None) -> None:
    """Print the result as the last line; with a name, also keep it beside the benchmark with the machine's name."""
    if name:
        kept = {**result, "machine": machine()}
        path = Path(__file__).parent / "results" / f"{name}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(kept, indent=1) + "\n")
    print(json.dumps(result))


def machine() -> str:
    """Processor, cores and torch: what a number is worth nothing without."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        model = f"{names[0]}, {len(names)} cores" if names else model
    return f"{model}; torch {torch.__version__}"
