"""Small multimodal models with random weights in a real engine. `test_multimodal.py` runs this with `vision.py`."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from lab import DOCUMENTS, SAME, SIZES, check_at_ratio_1, distance, engine, facts, words
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers

SIDE, PATCH = 56, 14  # pixels
# Words of the tokenizer. Those of images are outside of the random tokens that documents consist of.
WORDS = dict(enumerate(("<pad>", "<bos>", "<eos>", "<unk>", "\n", "\n\n", "\n\n\n", "\n\n\n\n", "#")))
MROPE = {"rope_type": "default", "rope_theta": 10000.0}
VISION = {
    "intermediate_size": 64,
    "depth": 2,
    "num_heads": 2,
    "patch_size": PATCH,
    "out_hidden_size": SIZES["hidden_size"],
}
QWEN_TOKENS = {1020: "<|image_pad|>", 1021: "<|video_pad|>", 1022: "<|vision_start|>", 1023: "<|vision_end|>"}
QWEN_IDS = {"image_token_id": 1020, "video_token_id": 1021, "vision_start_token_id": 1022, "vision_end_token_id": 1023}
QWEN_PATCHES = {"patch_size": PATCH, "temporal_patch_size": 2, "merge_size": 2}
IMAGE = [1022, 1020, 1023]  # an image in a prompt of Qwen's


def qwen_processor(kind: Any, videos: Any) -> Any:
    """Return a processor of prompts with images and videos."""
    return kind(
        image_processor=transformers.Qwen2VLImageProcessor(**QWEN_PATCHES),
        tokenizer=tokenizer(QWEN_TOKENS),
        video_processor=videos(**QWEN_PATCHES),
    )


def qwen3vl() -> tuple[Any, Any]:
    """M-RoPE whose sections take turns."""
    rope = {**MROPE, "mrope_section": [6, 5, 5], "mrope_interleaved": True}
    config = transformers.Qwen3VLConfig(
        text_config={**SIZES, "head_dim": 32, "rope_parameters": rope},
        vision_config={**VISION, "hidden_size": 64, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
        **QWEN_IDS,
    )
    processor = qwen_processor(transformers.Qwen3VLProcessor, transformers.Qwen3VLVideoProcessor)
    return transformers.Qwen3VLForConditionalGeneration(config), processor


def qwen25vl() -> tuple[Any, Any]:
    """M-RoPE whose sections stand one after another."""
    config = transformers.Qwen2_5_VLConfig(
        text_config={**SIZES, "rope_parameters": {**MROPE, "mrope_section": [4, 6, 6]}},
        vision_config={**VISION, "hidden_size": 64, "fullatt_block_indexes": [1]},
        **QWEN_IDS,
    )
    processor = qwen_processor(transformers.Qwen2_5_VLProcessor, transformers.Qwen2VLVideoProcessor)
    return transformers.Qwen2_5_VLForConditionalGeneration(config), processor


def gemma3() -> tuple[Any, Any]:
    """Windows, and a language model whose architecture is known by itself."""
    config = transformers.Gemma3Config(
        text_config={
            **SIZES, "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 128,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
        vision_config={
            "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
            "image_size": SIDE, "patch_size": PATCH,
        },
        mm_tokens_per_image=4, image_token_index=1020, boi_token_index=1021, eoi_token_index=1022,
    )  # fmt: skip
    names = {1020: "<image>", 1021: "<begin>", 1022: "<end>"}
    own = {"image_token": "<image>", "boi_token": "<begin>", "eoi_token": "<end>"}
    processor = transformers.Gemma3Processor(
        image_processor=transformers.Gemma3ImageProcessor(size={"height": SIDE, "width": SIDE}),
        tokenizer=tokenizer(names, extra_special_tokens=own),
        image_seq_length=4,
    )
    return transformers.Gemma3ForConditionalGeneration(config), processor


MODELS = {model.__name__: model for model in (qwen3vl, qwen25vl, gemma3)}


def tokenizer(special: dict[int, str], **more: Any) -> Any:
    """Return a tokenizer that splits text at white space, with a word for each token."""
    known = {**WORDS, **special}
    by_word = Tokenizer(models.WordLevel({known.get(i, f"w{i}"): i for i in range(1024)}, unk_token="<unk>"))
    by_word.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    more = more or {"additional_special_tokens": list(special.values())}
    names = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=by_word, **names, **more)


def image(seed: int) -> Image.Image:
    """A random image."""
    return Image.fromarray(np.random.RandomState(seed).randint(0, 255, (SIDE, SIDE, 3), dtype=np.uint8))


@pytest.fixture(scope="module", params=MODELS)
def lab(request, tmp_path_factory):
    path: Path = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    for part in MODELS[request.param]():
        part.save_pretrained(path)
    limits = {"image": 0} if request.param == "gemma3" else {"image": 1, "video": 0}
    with engine(path, skip_tokenizer_init=False, limit_mm_per_prompt=limits) as lab:
        lab.name = request.param
        yield lab


@pytest.mark.parametrize("strategy", ["union", "deviation"])
def test_at_ratio_1_a_prompt_of_text_is_full_prefill(lab, strategy):
    check_at_ratio_1(lab, strategy)


def test_prompts_with_images_are_served_exactly(lab):
    """The tokens after an image have other positions, and another image means other KV."""
    if lab.name == "gemma3":
        pytest.skip("transformers' and vLLM's names of the weights of its vision model differ")
    tokens = words(37, 0) + IMAGE + DOCUMENTS[0] + DOCUMENTS[1] + words(30, 5)

    def ask(seed: int, lmc: dict[str, Any] | None = None) -> Any:
        prompt = {"prompt_token_ids": tokens, "multi_modal_data": {"image": image(seed)}}
        (found,) = lab.llm.generate([prompt], [lab.parameters(lmc)], use_tqdm=False)
        lab.forget_prefixes()
        return found

    wanted = []
    for seed in (1, 2):
        lab.forget()
        wanted.append(ask(seed, {"blend": False}))
    lab.forget()
    assert distance(*wanted) > 100 * SAME, "the control: images matter"
    lab.learn(DOCUMENTS)
    for again in (False, True):
        for seed in (1, 2):
            found = ask(seed)
            assert facts(found).get("exact_tokens", 0) >= 384 * again
            assert distance(found, wanted[seed - 1]) <= SAME
    start = len(words(37, 0)) + len(IMAGE)
    found = ask(1, {"documents": [[start, start + len(DOCUMENTS[0])]]})
    assert "multimodal" in facts(found)["note"]
    assert distance(found, wanted[0]) <= SAME
    lab.check()
