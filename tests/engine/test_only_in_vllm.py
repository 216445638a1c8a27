"""Models that vLLM has and transformers does not, or not in this form: their random weights are made in the engine."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from amount import mostly_long
from lab import SIZES, check_at_ratio_1, engine
from stepping import check_pages_are_loaded_again
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "num_shared_experts": 1,
    "norm_topk_prob": True,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
MIXED = ["full_attention", "sliding_attention"] * 2


def block(group: int | None, *, feeds_forward: bool = True) -> dict[str, Any]:
    """A layer of Nemotron: with heads of queries for each KV head, or without attention."""
    ffn = {"no_op": not feeds_forward, "replace_with_linear": False, "ffn_mult": 2.0}
    return {
        "attention": {"no_op": group is None, "replace_with_linear": False, "n_heads_in_group": group},
        "ffn": ffn,
    }


ARCHITECTURES = {
    "DeciLMForCausalLM": {  # some layers have no attention, and the others different numbers of heads
        "num_hidden_layers": 7,
        "block_configs": [block(2), block(None), block(4), block(2, feeds_forward=False), *[block(None)] * 2, block(2)],
    },
    "ExaoneForCausalLM": {  # its layers are in `transformer.h`
        "num_layers": 4,
        "layer_norm_epsilon": 1e-5,
        "activation_function": "silu",
    },
    "BailingMoeV2ForCausalLM": {
        **EXPERTS,
        "use_bias": False,
        "use_qkv_bias": False,
        "use_qk_norm": True,
        "partial_rotary_factor": 0.5,
        "embedding_dropout": 0.0,
        "score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
    },
    "InternLM2ForCausalLM": {},  # its forward pass asks for the tensors of an earlier pipeline stage
    "BailingMoeForCausalLM": {  # its layers call positions `position_ids`
        **EXPERTS,
        "use_bias": False,
        "use_qkv_bias": False,
        "embedding_dropout": 0.0,
        "score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
    },
    "HYV3ForCausalLM": {"expert_hidden_dim": 128, "route_norm": True, "qk_norm": True, **EXPERTS},  # layers get `idx`
    "MiniMaxM2ForCausalLM": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "scoring_func": "softmax",  # Routers of vLLM's CPU build do not know the sigmoid of the real model.
        "use_qk_norm": True,
        "rotary_dim": 16,
    },
    "Plamo3ForCausalLM": {  # its layers are in a module of their own
        "sliding_window": 128,
        "interleaved_sliding_window": [None, 128] * 2,
        "layer_types": MIXED,
        "rope_local_theta": 10000.0,
    },
    "Step3p5ForCausalLM": {  # its layers with a window have more heads of queries, and the model keeps no configuration
        **EXPERTS,
        "model_type": "step3p5",
        "rope_parameters": None,
        "rope_theta": [500000.0, 10000.0] * 2,
        "partial_rotary_factors": [0.5, 1.0] * 2,
        "sliding_window": 128,
        "layer_types": MIXED,
        "num_attention_groups": 4,
        "attention_other_setting": {
            "attention_type": "sliding_attention",
            "num_attention_heads": 16,
            "num_attention_groups": 4,
            "head_dim": 32,
        },
        "use_head_wise_attn_gate": True,
        "moe_layers_enum": "3",
        "moe_num_experts": 4,
        "moe_top_k": 2,
        "share_expert_dim": 128,
    },
    "MiMoV2FlashForCausalLM": {  # its layers with a window have more heads of keys than the others
        **EXPERTS,
        "n_routed_experts": 4,
        "n_shared_experts": None,
        "sliding_window": 128,
        "sliding_window_size": 128,
        "layer_types": MIXED,
        "hybrid_layer_pattern": [0, 1] * 2,
        "moe_layer_freq": [0, 1, 1, 1],
        "v_head_dim": 32,
        "num_key_value_heads": 2,
        "swa_num_attention_heads": 8,
        "swa_num_key_value_heads": 4,
        "swa_head_dim": 32,
        "swa_v_head_dim": 32,
        "add_swa_attention_sink_bias": True,
        "layernorm_epsilon": 1e-5,
        "rope_theta": 50000.0,
        "swa_rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "scoring_func": "sigmoid",
    },
}


@pytest.fixture(params=mostly_long(ARCHITECTURES))
def lab(request, tmp_path, monkeypatch):
    plain = {"rope_type": "default", "rope_theta": 10000.0}
    config = transformers.LlamaConfig(
        **{**SIZES, "head_dim": 32, "rope_parameters": plain, **ARCHITECTURES[request.param]}
    )
    config.save_pretrained(tmp_path)
    saved, own = tmp_path / "config.json", ARCHITECTURES[request.param]
    saved.write_text(json.dumps(json.loads(saved.read_text()) | own | {"architectures": [request.param]}))
    monkeypatch.setattr(DummyModelLoader, "load_weights", lambda self, model, model_config: randomise(model))
    options = {"hf_overrides": with_blocks} if hasattr(config, "block_configs") else {}
    with engine(tmp_path, load_format="dummy", **options) as lab:
        yield lab


def with_blocks(config: Any) -> Any:
    """Make objects of the descriptions of layers, as the code in the repositories of such models does."""
    blocks = json.dumps(getattr(config, "block_configs", None))
    config.block_configs = json.loads(blocks, object_hook=lambda fields: SimpleNamespace(**fields))
    return config


def randomise(model: torch.nn.Module) -> None:
    """Make random weights, and norms of about 1. vLLM's own random weights are so small that all answers are equal."""
    generator = torch.Generator().manual_seed(0)
    for name, weight in model.state_dict().items():
        noise = torch.randn(weight.shape, generator=generator) * 0.03
        is_norm = weight.dim() == 1 and ("norm" in name or "ln_" in name) and "bias" not in name
        weight.copy_(noise + 1 if is_norm else noise)


def test_pages_and_documents_are_what_the_engine_computes(lab):
    check_pages_are_loaded_again(lab)
    lab.forget()
    for strategy in ("union", "deviation"):
        check_at_ratio_1(lab, strategy)
        lab.forget()
