"""What transformers' objects are in lmc's terms: a cache as rows of KV, a model as a fingerprint, a name as model and tokenizer."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.utils.logging import disable_progress_bar

from lmc.engine import LayerKV
from lmc.errors import UnsupportedModel


def load(name: str | Path) -> tuple[Any, Any]:
    """Model and tokenizer of a directory or a hub's id; raise `UnsupportedModel` if there is none."""
    path = Path(name)
    if not path.is_dir() and (path.is_absolute() or len(path.parts) > 2):  # what a hub's id cannot be
        raise UnsupportedModel(f"cannot load a causal language model from {name}: there is no such directory")
    disable_progress_bar()  # its own bar for loading weights, in the middle of ours
    try:
        model = AutoModelForCausalLM.from_pretrained(str(name), dtype="auto")
        return model.eval(), AutoTokenizer.from_pretrained(str(name))
    except (OSError, ValueError, SafetensorError) as error:
        first = str(error).splitlines()[0]
        raise UnsupportedModel(f"cannot load a causal language model from {name}: {first}") from error


def forward(model: Any, tokens: Sequence[int], cache: DynamicCache) -> Any:
    """The model's own forward behind what `cache` holds; logits of the last token only."""
    ids = torch.tensor([list(tokens)], device=model.device)
    with torch.inference_mode():
        return model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)


# What of a config changes KV and does not show in the weights.
KV_FIELDS = (
    "model_type", "hidden_act", "rms_norm_eps", "num_attention_heads", "num_key_value_heads", "head_dim", "rope_parameters",
    "sliding_window", "use_sliding_window", "max_window_layers", "layer_types", "attention_bias", "mlp_bias",
)  # fmt: skip


def fingerprint(model: Any) -> str:
    """The same for the same weights, wherever they were loaded from, and another if a single bit differs."""
    config = {name: getattr(model.config, name, None) for name in KV_FIELDS}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for name, weight in model.named_parameters():
        raw = weight.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
        # xxh3 over the bytes: 0.5 GB in 0.1 s, where sha256 would take 0.3 s. Nobody attacks with his own weights.
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode() + xxhash.xxh3_128_digest(raw))
    return digest.hexdigest()


def rows_of(cache: DynamicCache) -> list[LayerKV]:
    """Views `[T, H, D]` of a transformers cache `[1, H, T, D]`."""
    return [(layer.keys[0].transpose(0, 1), layer.values[0].transpose(0, 1)) for layer in cache.layers]


def cache_of(kv: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> DynamicCache:
    """A transformers cache around `[H, T, D]` tensors, without the copy that `update` would make."""
    cache = DynamicCache()
    for keys, values in kv:
        layer = DynamicLayer()
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys[None], values[None]
        cache.layers.append(layer)
    return cache
