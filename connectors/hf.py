"""What transformers' objects are in lmc's terms: a cache as rows of KV, a model as a fingerprint, a name as model and tokenizer."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.utils.logging import disable_progress_bar

from lmc.engine import LayerKV
from lmc.errors import UnsupportedModel


def load(name: str | Path) -> tuple[Any, Any]:
    """Model and tokenizer of a directory or a hub's id; raise `UnsupportedModel` if there is none."""
    disable_progress_bar()  # its own bar for loading weights, in the middle of ours
    try:
        model = AutoModelForCausalLM.from_pretrained(str(name), dtype="auto")
        return model.eval(), AutoTokenizer.from_pretrained(str(name))
    except (OSError, ValueError) as error:
        first = str(error).splitlines()[0]
        raise UnsupportedModel(f"cannot load a causal language model from {name}: {first}") from error


def fingerprint(model: Any) -> str:
    """Config and a few values of every weight: the same model loaded from elsewhere has the same, a fine-tuned one has another."""
    config = {k: v for k, v in model.config.to_dict().items() if not k.startswith("_") and k != "transformers_version"}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for name, weight in model.named_parameters():
        flat = weight.detach().flatten()
        sample = flat[:: max(1, flat.numel() // 16)][:16].float().cpu()
        digest.update(name.encode() + sample.numpy().tobytes())
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
