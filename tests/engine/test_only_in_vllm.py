"""Models that vLLM has and transformers does not, or not in this form: their random weights are made in the engine."""

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
ARCHITECTURES = {
    "InternLM2ForCausalLM": {},  # its forward pass asks for the tensors of an earlier pipeline stage
    "BailingMoeForCausalLM": {  # its layers call positions `position_ids`
        **EXPERTS,
        "use_bias": False,
        "use_qkv_bias": False,
        "embedding_dropout": 0.0,
        "score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
    },
    "Plamo3ForCausalLM": {  # its layers are in a module of their own
        "sliding_window": 128,
        "interleaved_sliding_window": [None, 128] * 2,
        "layer_types": MIXED,
        "rope_local_theta": 10000.0,
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
    config.architectures = [request.param]
    config.save_pretrained(tmp_path)
    monkeypatch.setattr(DummyModelLoader, "load_weights", lambda self, model, model_config: randomise(model))
    with engine(tmp_path, load_format="dummy") as lab:
        yield lab


def randomise(model: torch.nn.Module) -> None:
    """Make random weights, and norms of about 1. vLLM's own random weights are so small that all answers are equal."""
    generator = torch.Generator().manual_seed(0)
    for name, weight in model.state_dict().items():
        noise = torch.randn(weight.shape, generator=generator) * 0.03
        is_norm = weight.dim() == 1 and "norm" in name and "bias" not in name
        weight.copy_(noise + 1 if is_norm else noise)


def test_pages_and_documents_are_what_the_engine_computes(lab):
    check_pages_are_loaded_again(lab)
    lab.forget()
    for strategy in ("union", "deviation"):
        check_at_ratio_1(lab, strategy)
        lab.forget()
