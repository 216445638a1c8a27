"""Small random models of every supported family and RoPE, and prompts over them."""

import random
from typing import Any

import torch
from transformers import (
    Cohere2Config,
    Cohere2ForCausalLM,
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Exaone4Config,
    Exaone4ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Glm4Config,
    Glm4ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

VOCABULARY = 97
SEPARATOR = (1, 2)
FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
WINDOW = {"sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"] * 2}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 48,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 24,
    "v_head_dim": 20,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 2,
}
# Families with more than one kind of layer, or with something that the others do not have.
OTHERS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "gemma2": (
        Gemma2Config,
        Gemma2ForCausalLM,
        {
            **WINDOW,
            "query_pre_attn_scalar": 16,
            "attn_logit_softcapping": 2.0,  # so low that it changes attention
            "attn_implementation": "eager",  # transformers 5.20 uses SDPA by default, which ignores the soft cap
        },
    ),
    "gemma3": (
        Gemma3TextConfig,
        Gemma3ForCausalLM,
        {
            **WINDOW,
            "query_pre_attn_scalar": 16,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
                "full_attention": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
            },
        },
    ),
    "gptoss": (GptOssConfig, GptOssForCausalLM, {**WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "cohere2": (Cohere2Config, Cohere2ForCausalLM, WINDOW),
    "exaone4": (Exaone4Config, Exaone4ForCausalLM, WINDOW),
    "granite": (
        GraniteConfig,
        GraniteForCausalLM,
        {"embedding_multiplier": 2.0, "logits_scaling": 2.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2},
    ),
    "glm4": (
        Glm4Config,
        Glm4ForCausalLM,
        {
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
            "pad_token_id": 0,
        },
    ),
    "deepseek2": (DeepseekV2Config, DeepseekV2ForCausalLM, {**LATENT, "q_lora_rank": None, "topk_method": "greedy"}),
    "deepseek3": (DeepseekV3Config, DeepseekV3ForCausalLM, {**LATENT, "q_lora_rank": 32}),
    "mistral with a window": (MistralConfig, MistralForCausalLM, {"sliding_window": 20}),
    "qwen3moe": (
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
}
ROPES: dict[str, dict[str, Any]] = {
    "plain": {"rope_type": "default", "rope_theta": 10000.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 256},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
}


def random_model(family: str = "llama", rope: str = "plain", layers: int = 4, seed: int = 0, **options: Any) -> Any:
    """A model with weights large enough that attention is far from uniform."""
    config_type, model_type, *own = (FAMILIES | OTHERS)[family]
    values: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 1024,
        "rope_parameters": ROPES[rope],
        "initializer_range": 0.15,
        **(own[0] if own else {}),
        **options,
    }
    torch.manual_seed(seed)
    return model_type(config_type(**values)).eval()


def random_tokens(count: int, seed: int) -> list[int]:
    """Tokens that are no separators."""
    generator = random.Random(seed)
    return [generator.randrange(3, VOCABULARY) for _ in range(count)]
