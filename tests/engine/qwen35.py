"""Qwen3.5 in a process of its own, started by `test_states.py`: its module in vLLM needs torchvision (`vision.py`)."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from lab import FAMILIES, SIZES, agree, facts, launch
from multimodal import MROPE, QWEN_IDS, VISION, qwen_processor
from test_starts import started, without_lmc
from test_states import CHUNK, LONG, OPTIONS
from vllm import LLM, SamplingParams

SHORT = LONG[:700]


def vision_language_model(path: Path) -> Path:
    """A small model of the architecture that checkpoints name, which also takes images."""
    _, options = FAMILIES["qwen35"]
    rope = {**MROPE, "mrope_section": [3, 3, 2], "mrope_interleaved": True, "partial_rotary_factor": 0.25}
    config = transformers.Qwen3_5Config(
        text_config={**SIZES, **options, "rope_parameters": rope},
        vision_config={**VISION, "hidden_size": 64, "num_position_embeddings": 16},
        **QWEN_IDS,
    )
    torch.manual_seed(0)
    transformers.Qwen3_5ForConditionalGeneration(config).save_pretrained(path)
    qwen_processor(transformers.Qwen3VLProcessor, transformers.Qwen3VLVideoProcessor).save_pretrained(path)
    return path


@pytest.mark.parametrize("kind", ["text", "vision"])
def test_it_starts_answers_as_without_lmc_and_continues_from_stored_states(models, tmp_path, kind):
    model = models("qwen35") if kind == "text" else vision_language_model(tmp_path)
    options = OPTIONS if kind == "text" else {**OPTIONS, "limit_mm_per_prompt": {"image": 0, "video": 0}}
    options = {**options, "skip_tokenizer_init": kind == "text"}

    def asked(llm: LLM) -> list[Any]:
        wanted = SamplingParams(max_tokens=8, temperature=0, detokenize=False, ignore_eos=True, logprobs=1)
        prompts = [{"prompt_token_ids": tokens} for tokens in (SHORT, LONG)]
        first, again = (llm.generate(prompts, wanted, use_tqdm=False) for _ in range(2))
        llm.generate([{"prompt_token_ids": LONG[:5]}], wanted, use_tqdm=False)  # The last blocks are saved meanwhile.
        assert llm.reset_prefix_cache()
        return [*first, *again, *llm.generate(prompts, wanted, use_tqdm=False)]

    with started(lambda: without_lmc(model, block_size=32, **options)) as llm:
        wanted = asked(llm)
    with started(lambda: launch(model, {"chunk_size": CHUNK}, **options)) as llm:
        found = asked(llm)
    assert all(map(agree, found[:4], wanted[:4]))
    assert [out.num_cached_tokens for out in found[:4]] == [out.num_cached_tokens for out in wanted[:4]]
    assert [facts(out)["exact_tokens"] for out in found[4:]] == [576, 1728]
    assert all(map(agree, found[4:], wanted[2:4])), "as from the states in the engine's own cache"
