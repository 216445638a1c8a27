"""Decides whether lmc offloads a model's KV, or does nothing for the model. This depends on the model's KV cache.

Pages are offloaded if the blocks of all layers have the same number of tokens. vLLM's hybrid KV cache manager has a
block table for each group of layers, so that layers with a sliding window keep only their window. lmc leaves it on for
models with such layers, and switches it off for models and options that it does not support with several tables. Models
with linear or Mamba layers need that manager. With prefix caching, vLLM keeps the states of these layers at the ends of
blocks, in pages of their own ("align" mode), and lmc stores these.
"""

from collections.abc import Mapping
from typing import Any

from lmc.connectors.vllm import vllm_api

# Architectures whose blend at ratio 1 equals the engine's own prefill in lmc's tests, and with what it was tested
# (tests/engine/test_exact_and_blend.py: float32, CPU, logprobs within 1e-5). The names are those in configurations of
# models. Other architectures are blended, with a warning, if they pass the self-test at start.
TESTED = {
    "AfmoeForCausalLM": "windows with RoPE, full attention without",
    "ApertusForCausalLM": "llama3 RoPE",
    "ArceeForCausalLM": "plain RoPE (vLLM's transformers backend)",
    "BailingMoeForCausalLM": "plain RoPE",
    "BailingMoeV2ForCausalLM": "partial RoPE",
    "Cohere2ForCausalLM": "windows with RoPE, full attention without",
    "Cohere2MoeForCausalLM": "windows with RoPE, full attention without",
    "CohereForCausalLM": "plain, interleaved RoPE",
    "DeciLMForCausalLM": "layers without attention, different numbers of KV heads",
    "DeepseekV2ForCausalLM": "MLA, YaRN",
    "DeepseekV3ForCausalLM": "MLA, YaRN",
    "Dots1ForCausalLM": "plain RoPE (vLLM's transformers backend)",
    "Ernie4_5ForCausalLM": "plain, interleaved RoPE",
    "Ernie4_5_MoeForCausalLM": "plain, interleaved RoPE",
    "Exaone4ForCausalLM": "windows with RoPE, full attention without",
    "ExaoneForCausalLM": "plain RoPE",
    "ExaoneMoeForCausalLM": "windows with RoPE, full attention without",
    "Gemma2ForCausalLM": "windows, a soft cap of logits",
    "Gemma3ForCausalLM": "windows, and a RoPE for each kind of layer",
    "Gemma3nForCausalLM": "windows, AltUp, shared KV",
    "Gemma4ForCausalLM": "windows, two head sizes, proportional RoPE, shared KV",
    "GemmaForCausalLM": "plain RoPE",
    "Glm4ForCausalLM": "partial, interleaved RoPE",
    "Glm4MoeForCausalLM": "partial RoPE",
    "Glm4MoeLiteForCausalLM": "MLA, YaRN",
    "GptOssForCausalLM": "windows, attention sinks, YaRN",
    "GraniteForCausalLM": "plain RoPE",
    "GraniteMoeForCausalLM": "plain RoPE",
    "HYV3ForCausalLM": "plain RoPE",
    "HunYuanDenseV1ForCausalLM": "plain RoPE (vLLM's transformers backend)",
    "InternLM2ForCausalLM": "plain RoPE",
    "Llama4ForCausalLM": "chunks with RoPE, full attention without",
    "LlamaForCausalLM": "plain, llama3 and YaRN RoPE",
    "MiMoV2FlashForCausalLM": "windows with more KV heads and sinks, partial RoPE",
    "MiniMaxM2ForCausalLM": "partial RoPE",
    "Ministral3ForCausalLM": "YaRN, queries scaled by position",
    "MistralForCausalLM": "full attention, windows",
    "MixtralForCausalLM": "plain RoPE",
    "NemotronForCausalLM": "partial RoPE",
    "Olmo2ForCausalLM": "plain RoPE (vLLM's transformers backend)",
    "Olmo3ForCausalLM": "windows, YaRN (vLLM's transformers backend)",
    "OlmoeForCausalLM": "plain RoPE",
    "Phi3ForCausalLM": "plain RoPE and longrope",
    "Plamo3ForCausalLM": "windows, and a RoPE for each kind of layer",
    "Qwen2ForCausalLM": "plain RoPE",
    "Qwen2MoeForCausalLM": "plain RoPE",
    "Qwen2_5_VLForConditionalGeneration": "M-RoPE with text",
    "Qwen3ForCausalLM": "plain RoPE",
    "Qwen3MoeForCausalLM": "plain RoPE",
    "Qwen3VLForConditionalGeneration": "M-RoPE with text",
    "SeedOssForCausalLM": "plain RoPE (vLLM's transformers backend)",
    "SmolLM3ForCausalLM": "layers without RoPE (vLLM's transformers backend)",
    "StableLmForCausalLM": "partial RoPE",
    "Starcoder2ForCausalLM": "plain RoPE (vLLM's transformers backend)",
    "Step3p5ForCausalLM": "windows with more query heads, partial RoPE",
}

# Kinds of KV caches that lmc stores. Classes that are derived from these have other rules: with `RSWASpec`, the engine
# removes blocks in the middle of a table.
STORED = {"FullAttentionSpec", "MLAAttentionSpec", "SlidingWindowSpec", "ChunkedLocalAttentionSpec", "MambaSpec"}
WINDOWED = {"sliding_attention", "chunked_attention"}  # names of such layers in a model's configuration
WITHOUT_LAYERS = {"ngram", "ngram_gpu", "suffix"}  # ways to draft tokens that need no KV cache of their own
SUPPORTED = {"sliding_attention", "full_attention"}  # kinds of layers with which several block tables were tested
# Sizes of heads that a model's configuration gives for all layers and, with this prefix, for layers with a window
# (MiMo V2).
WINDOWED_PREFIX, SIZES = "swa_", ("num_key_value_heads", "head_dim", "v_head_dim")


def architectures_of(model: Any, language: Any) -> list[str]:
    """Return the names of a model's architecture: in its configuration, and of vLLM's class of its language model.

    Many architectures share a class of vLLM, and a multimodal model has a language model that is one by itself.
    `model` is the engine's model configuration.
    """
    return [*(getattr(model.hf_config, "architectures", None) or ()), type(language).__name__]


def use_one_table(config: Any) -> None:
    """Switch off the engine's hybrid KV cache manager if lmc needs one block table for all layers."""
    if not (_has_other_caches(config.model_config) or _may_have_several_tables(config)):
        config.scheduler_config.disable_hybrid_kv_cache_manager = True


def _has_other_caches(model: Any) -> bool:
    """Return whether some layers of a model have caches for which one block table for all layers is impossible.

    Without its hybrid KV cache manager, vLLM raises an error for states, for cross-attention (Whisper, which no
    connector supports), and for the buffers of layers that compress keys (DeepSeek V4.1).
    """
    kinds = set(getattr(model.hf_text_config, "layer_types", None) or ())
    compresses = getattr(model.hf_text_config, "compress_ratios", None)
    return bool(
        model.is_hybrid or model.is_attention_free or model.is_encoder_decoder or compresses
        or kinds - SUPPORTED - WINDOWED
    )  # fmt: skip


def _may_have_several_tables(config: Any) -> bool:
    """Return whether lmc supports several block tables for a model with sliding windows and with these options."""
    text = config.model_config.hf_text_config
    kinds = set(getattr(text, "layer_types", None) or ())
    # Layers of Gemma 4 have heads of two sizes, so their blocks would have different numbers of tokens.
    of_two_sizes = any(getattr(text, name, None) for name in ("global_head_dim", "is_heterogeneous")) or any(
        getattr(text, WINDOWED_PREFIX + name, None) not in (None, getattr(text, name, None)) for name in SIZES
    )
    drafts = config.speculative_config
    alone = config.parallel_config.pipeline_parallel_size == 1 and (drafts is None or drafts.method in WITHOUT_LAYERS)
    return kinds == SUPPORTED and not of_two_sizes and alone


def price_of_one_table(model: Any) -> str:
    """Return what one block table for all layers costs a model some of whose layers have a window; empty if nothing.

    `model` is the engine's model configuration.
    """
    kinds: list[str] = list(getattr(model.hf_text_config, "layer_types", None) or ())
    kinds = kinds[: len(kinds) - (getattr(model.hf_text_config, "num_kv_shared_layers", None) or 0)]
    windowed, longest = sum(kind in WINDOWED for kind in kinds), model.max_model_len
    windows = (getattr(model.hf_text_config, name, None) for name in ("sliding_window", "attention_chunk_size"))
    window = next(filter(None, windows), longest)
    if not 0 < windowed < len(kinds) or window >= longest:
        return ""
    times = len(kinds) / (len(kinds) - windowed + windowed * window / longest)
    return (
        f"with lmc, {windowed} of {len(kinds)} layers keep the KV of whole prompts instead of a window: a prompt of "
        f"{longest} tokens takes {times:.1f} times the KV cache that it takes without lmc (docs/models.md)"
    )


def objection(model: Any, kv_cache_config: Any) -> str:
    """Return why lmc does nothing for a model; an empty string if its KV is offloaded.

    `model` is the engine's model configuration, and `kv_cache_config` describes the caches of its layers.
    """
    groups = kv_cache_config.kv_cache_groups
    if not groups:
        return "it has no KV cache"
    if not model.is_prefix_caching_supported:
        return "its pooling needs every prompt token computed"
    specs = [spec for group in groups for spec in specs_of(group).values()]
    if reason := next(filter(None, map(_not_stored, specs)), ""):
        return reason
    known = (vllm_api.FullAttentionSpec, vllm_api.SlidingWindowSpec, vllm_api.MambaSpec)
    of_known_kinds = all(isinstance(spec, known) for spec in specs)
    if len(groups) > 1 and not (of_known_kinds and len({group.kv_cache_spec.block_size for group in groups}) == 1):
        return (
            f"its layers use {len(groups)} block tables whose blocks differ; start vLLM with "
            "--disable-hybrid-kv-cache-manager"
        )
    return ""


def _not_stored(spec: Any) -> str:
    """Return why the KV or the states of a layer are not stored; an empty string if they are."""
    state = "it has layers with a state (linear attention, Mamba), which lmc"
    if isinstance(spec, vllm_api.MambaSpec) and spec.mamba_cache_mode != "align":
        return f"{state} stores only with prefix caching"
    if isinstance(spec, vllm_api.MambaSpec) and spec.num_speculative_blocks:
        return f"{state} cannot store with speculative decoding"  # It moves blocks inside a block table.
    if type(spec).__name__ not in STORED:
        return f"it has layers of an unknown kind ({type(spec).__name__})"
    if getattr(spec, "non_causal", False):
        return "tokens of a prompt attend to later ones, so its KV does not serve other prompts with the same prefix"
    return ""


def describe_sharing_layers(config: Any, kv_cache_config: Any) -> None:
    """Add the layers that read the KV of other layers to the descriptions of the engine's caches.

    If all layers have one block table and their caches differ, vLLM 0.30 to 0.33 looks for them there, and would not
    start (Gemma 4 E2B and E4B).
    """
    layers = config.compilation_config.static_forward_context
    sources = {name: kv_source_of(layer) for name, layer in layers.items()}
    for group in kv_cache_config.kv_cache_groups:
        described = getattr(group.kv_cache_spec, "kv_cache_specs", {})
        described |= {name: described[source] for name, source in sources.items() if source in described}


def attentions_in(module: Any) -> list[Any]:
    """Return the attentions inside of a layer or a model, in their order there."""
    return [one for one in module.modules() if isinstance(one, (vllm_api.Attention, vllm_api.MLAAttention))]


def kv_source_of(layer: Any) -> str:
    """Return the name of another layer whose keys and values a layer reads; an empty string if it has its own."""
    return getattr(layer, "kv_sharing_target_layer_name", None) or ""


def groups_of(kv_cache_config: Any) -> Mapping[str, int]:
    """Return the number of the KV cache group of each layer, by the layer's name."""
    groups = enumerate(kv_cache_config.kv_cache_groups)
    return {name: number for number, group in groups for name in group.layer_names}


def windows_of(kv_cache_config: Any) -> tuple[int, ...]:
    """Return, by KV cache group, how many tokens a token sees; 0 if the engine keeps the blocks of whole prompts.

    A state is that after the token before, so layers with a state see two tokens.
    """
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    states = states_of(kv_cache_config)
    return tuple(
        2 if group in states else spec.sliding_window if isinstance(spec, vllm_api.SlidingWindowSpec) else 0
        for group, spec in enumerate(specs)
    )


def states_of(kv_cache_config: Any) -> frozenset[int]:
    """Return the KV cache groups whose pages are states after the last token of a block."""
    groups = enumerate(kv_cache_config.kv_cache_groups)
    return frozenset(number for number, group in groups if isinstance(group.kv_cache_spec, vllm_api.MambaSpec))


def specs_of(group: Any) -> dict[str, Any]:
    """Return the descriptions of the caches of a group's layers, by their names."""
    several = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    return dict(several) if several else dict.fromkeys(group.layer_names, group.kv_cache_spec)
