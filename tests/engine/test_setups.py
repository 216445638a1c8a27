"""Engines that cannot be blended: it says so once at the start, exact offload goes on, and requests are told."""

import logging
from pathlib import Path

import pytest
from lab import Prompt, answer, distance, engine, facts, words
from stepping import poison

SAME = 1e-5  # logprobs, float32
DOCUMENTS = [words(150, 1), words(300, 2)]
PROMPT = Prompt(DOCUMENTS)
PLAIN = words(700, 9)
OFF = "blending is off; the log of the engine's start says why"
# Family, engine options, the reason that is logged
ENGINES = {
    "sliding windows": ("gemma3", {}, "Gemma3ForCausalLM has not been proven"),
    "quantised KV": ("llama", {"kv_cache_dtype": "fp8"}, "its KV cache is quantised"),
    "LoRA": ("llama", {"enable_lora": True, "max_lora_rank": 8}, "LoRA is enabled"),
}


FLAGS = set(Path("/proc/cpuinfo").read_text().split())


class Said(logging.Handler):
    """What lmc has logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.fixture(scope="module", params=ENGINES, ids=lambda name: name.replace(" ", "-"))
def lab(request, models):
    family, options, reason = ENGINES[request.param]
    if "kv_cache_dtype" in options and not {"avx512f", "amx_tile"} & FLAGS:
        pytest.skip("vLLM's CPU build has fp8 KV caches on processors with AVX-512 or AMX only")
    said = Said()
    logging.getLogger("lmc").addHandler(said)
    with engine(models(family), None, **options) as found:
        found.said, found.reason = said.lines, reason
        yield found
    logging.getLogger("lmc").removeHandler(said)


def test_the_log_says_why_it_does_not_blend(lab):
    assert [line for line in lab.said if line.startswith(f"blending is off: {lab.reason}")]


def test_pages_are_loaded_again_exactly(lab):
    wanted = lab.vanilla(PLAIN)
    lab.ask(PLAIN)
    lab.forget_prefixes()
    poison()
    found = lab.ask(PLAIN)
    assert facts(found)["exact_tokens"] == 672
    assert answer(found) == answer(wanted)
    assert distance(found, wanted) <= SAME
    lab.check()


def test_who_asks_for_a_blend_is_served_exactly_and_told(lab):
    wanted = lab.vanilla(PROMPT.tokens)
    assert facts(lab.ask(DOCUMENTS[0], {"learn": True}, 1)) == {"note": OFF}
    found = lab.ask(PROMPT.tokens, PROMPT.blend(strategy="none"))
    assert facts(found) == {"note": OFF}
    assert answer(found) == answer(wanted)
    assert distance(found, wanted) <= SAME
    lab.check()
