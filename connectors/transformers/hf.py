"""Adapters to the transformers library: its caches, its forward call, and the loading of models."""

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils.logging import disable_progress_bar

from lmc.blend.canvas import KV
from lmc.engine.identity import checkpoint_files, identity_of_files, identity_of_parameters
from lmc.errors import InputError, UnsupportedModel
from lmc.shapes import KVShape

MISSING = "the directory does not exist"
ATTENTION_KINDS = {"full_attention", "sliding_attention", "chunked_attention"}  # layers with KV of all tokens
STATE_KINDS = {"linear_attention", "conv", "hybrid", "hybrid_sliding", "mamba"}


def _is_missing(name: str | Path) -> bool:
    """Return whether a name must be a directory, because it cannot be a hub id, but the directory does not exist."""
    path = Path(name)
    return not path.is_dir() and (path.is_absolute() or len(path.parts) > 2)


def _message(name: str | Path, error: Exception) -> str:
    """Return the library's error as one line; it also says if the directory does not exist."""
    first = str(error).splitlines()[0]
    return first if Path(name).is_dir() else f"{MISSING}, and the hub reports: {first}"


def load(name: str | Path) -> tuple[Any, Any]:
    """Load model and tokenizer from a directory or a hub id. Raises `UnsupportedModel` if that is not possible."""
    if _is_missing(name):
        raise UnsupportedModel(f"cannot load a causal language model from {name}: {MISSING}")
    disable_progress_bar()  # The library's progress bar would appear in the middle of lmc's own.
    try:
        model = AutoModelForCausalLM.from_pretrained(str(name), dtype="auto")
        return model.eval(), AutoTokenizer.from_pretrained(str(name))
    except (OSError, ValueError, SafetensorError) as error:
        raise UnsupportedModel(f"cannot load a causal language model from {name}: {_message(name, error)}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What a model's configuration says about its KV."""

    shape: KVShape
    kept: str  # what a layer keeps of a token, in words
    positions: int  # 0 if it is unknown
    architectures: Sequence[str]  # such as LlamaForCausalLM; of a multimodal model, also that of its text model
    unblended: str  # why vLLM with lmc cannot blend documents, as far as the configuration says; empty if it may


KV_DTYPES: dict[str, torch.dtype | None] = {  # by names that vLLM and torch have; None is the model's dtype
    "auto": None, "bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32,
    "fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2,
    "float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2,
}  # fmt: skip


def model_facts(name: str | Path, dtype: str | None = None) -> ModelFacts:
    """Return the sizes of a model's KV from its configuration alone, with the model's own dtype or another dtype.

    Of a multimodal model, the text model counts. Raises `InputError` if the configuration lacks the sizes, if lmc does
    not store the model's KV, or if the dtype does not exist.
    """
    if dtype and dtype not in KV_DTYPES:
        raise InputError(f"invalid dtype {dtype}: use one of {', '.join(KV_DTYPES)}")
    torch_dtype = KV_DTYPES[dtype] if dtype else None
    if _is_missing(name):
        raise InputError(f"cannot read a model's configuration in {name}: {MISSING}")
    try:
        whole = AutoConfig.from_pretrained(str(name))
        config = whole.get_text_config(decoder=True)
        architecture = (whole.architectures or ["a model without an architecture"])[0]
        if whole.is_encoder_decoder or architecture.endswith("ForMaskedLM"):
            raise InputError(f"lmc stores nothing of {name}: {architecture} is not a causal language model")
        kinds = set(getattr(config, "layer_types", None) or ())
        if states := sorted(kinds & STATE_KINDS):
            raise InputError(
                f"documents of {name} cannot be blended: it has layers with a state ({', '.join(states)}). In vLLM, "
                "equal prefixes of prompts are reused, and their size depends on the engine's blocks"
            )
        if others := sorted(kinds - ATTENTION_KINDS):
            raise InputError(f"lmc does not know the sizes of the layers of {name}: {', '.join(others)}")
        shape = shape_of(config, torch_dtype or config.dtype or whole.dtype or torch.bfloat16)
        kept = f"with {shape.kv_heads} KV heads of {shape.head_dim}"
        if is_latent(config):
            kept = f"with MLA, {sum(shape.dims)} values each instead of {_by_heads(config)} for all heads"
    except (OSError, ValueError, AttributeError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"cannot read the sizes of the model {name}: {_message(name, error)}") from error
    return ModelFacts(
        shape=shape,
        kept=kept,
        positions=max_positions(config),
        architectures=[architecture, *filter(None, [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)])],
        unblended=_unblended(config),
    )


def max_positions(config: Any) -> int:
    """Return the length of a text model's longest prompt, from its configuration; 0 if it is unknown.

    YaRN may be enabled by RoPE parameters alone. Then `max_position_embeddings` is still the original length.
    """
    positions = getattr(config, "max_position_embeddings", None) or 0
    parameters = getattr(config, "rope_parameters", None) or {}
    by_kind = [rope for rope in parameters.values() if isinstance(rope, Mapping)]  # of kinds of layers
    yarn = [rope for rope in (parameters, *by_kind) if rope.get("rope_type", rope.get("type")) == "yarn"]
    originals = [(rope.get("original_max_position_embeddings") or positions, rope.get("factor") or 1) for rope in yarn]
    return max([positions, *(int(original * factor) for original, factor in originals)])


def is_latent(config: Any) -> bool:
    """Return whether the layers of a model keep latent vectors instead of keys and values for each head (MLA)."""
    return bool(getattr(config, "kv_lora_rank", None))


def shape_of(config: Any, dtype: torch.dtype) -> KVShape:
    """Return the shape of a token's KV, from the configuration of a text model.

    Layers that read the KV of others keep none. If layers differ, the shape is that of the largest, which records have.
    """
    layers = config.num_hidden_layers - (getattr(config, "num_kv_shared_layers", None) or 0)
    if is_latent(config):
        dims = {"head_dim": config.qk_rope_head_dim, "value_dim": config.kv_lora_rank}
        return KVShape(layers=layers, kv_heads=1, dtype=dtype, **dims)
    of_layers = config.per_layer_config if getattr(config, "is_heterogeneous", False) else [config]
    sizes = list(map(_heads_of, of_layers))
    if dim := getattr(config, "global_head_dim", None):  # Gemma 4 before transformers 5.19
        sizes.append((getattr(config, "num_global_key_value_heads", None) or sizes[0][0], dim))
    kv_heads, head_dim = max(sizes, key=math.prod)
    return KVShape(layers=layers, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype)


def _heads_of(config: Any) -> tuple[int, int]:
    """Return the number of KV heads and their size, from the configuration of a layer."""
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or _falcon_kv_heads(config) or heads
    return kv_heads, getattr(config, "head_dim", None) or config.hidden_size // heads


def _by_heads(config: Any) -> int:
    """Return how many numbers the keys and values of all heads of a layer with MLA have."""
    of_head: int = config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim
    return of_head * int(config.num_attention_heads)


def _falcon_kv_heads(config: Any) -> int | None:
    """Return the number of KV heads as Falcon's configurations give it; None for other models."""
    if getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False):
        return 1
    return getattr(config, "num_kv_heads", None)


def _unblended(config: Any) -> str:
    """Return why vLLM with lmc cannot blend a model, as far as its configuration says; empty if it may be blended."""
    settings = (config, getattr(config, "attn_config", None))  # those of Falcon, and of MPT
    if config.model_type == "bloom" or any(getattr(one, "alibi", False) for one in settings):
        return "its attention has ALiBi"
    return ""


def tokenizer_of(name: str | Path) -> Any:
    """Return a model's tokenizer. Raises `InputError` if it cannot be read."""
    if _is_missing(name):
        raise InputError(f"cannot read the tokenizer of {name}: {MISSING}")
    try:
        return AutoTokenizer.from_pretrained(str(name))
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read the tokenizer of {name}: {_message(name, error)}") from error


def chat_template(name: str | Path) -> str:
    """Return a model's chat template. Raises `InputError` if it cannot be read, or if there is not exactly one."""
    template = tokenizer_of(name).chat_template
    if not isinstance(template, str):
        raise InputError(f"{name} has no chat template, or several: use --template")
    return template


def cache_argument(model: Any) -> str:
    """Return the name of the model's cache argument: `past_key_values` before transformers 5.24."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def forward(model: Any, tokens: Sequence[int], cache: DynamicCache, logits: int = 1, **options: Any) -> Any:
    """Run the model on tokens that follow the tokens in `cache`, and append their KV to the cache.

    The logits of the last `logits` tokens are computed; with 0, those of all tokens. `options` are passed to the model.
    """
    ids = torch.tensor([list(tokens)], device=model.device)
    with torch.inference_mode():
        return model(input_ids=ids, use_cache=True, logits_to_keep=logits, **{cache_argument(model): cache}, **options)


def prefilled(model: Any, tokens: Sequence[int], cache: DynamicCache | None = None) -> DynamicCache:
    """Append the KV of these tokens to a cache, and return the cache; without a cache, create one."""
    cache = DynamicCache() if cache is None else cache
    forward(model, tokens, cache)
    return cache


def identity(model: Any, checkpoint: str | Path | None) -> str:
    """Return the model's identity, from the files of its unchanged checkpoint, or from its bytes in memory."""
    files = checkpoint_files(checkpoint) if checkpoint is not None else []
    if files:
        return identity_of_files(files)
    return identity_of_parameters(model.config.to_dict(), model.named_parameters())


def rows_of(cache: DynamicCache, *, latent: bool = False) -> list[KV]:
    """Return views `[T, H, D]` of a transformers cache `[1, H, T, D]`.

    For models with MLA, the cache has latent vectors as keys and rotated keys as values; lmc has them reversed.
    """
    rows = [(layer.keys[0].transpose(0, 1), layer.values[0].transpose(0, 1)) for layer in cache.layers]
    return [(values, keys) for keys, values in rows] if latent else rows


def cache_of(kv: Sequence[KV], *, latent: bool = False) -> DynamicCache:
    """Return a transformers cache around `[H, T, D]` tensors, without the copy that `update` would make.

    `latent` is as in `rows_of`.
    """
    cache = DynamicCache()
    for keys, values in ((values, keys) for keys, values in kv) if latent else kv:
        layer = DynamicLayer()
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys[None], values[None]
        cache.layers.append(layer)
    return cache
