"""Small draft models with random weights: EAGLE and EAGLE-3 heads, and models with an MTP module."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from lab import SIZES, make_model
from safetensors.torch import load_file, save_file

DRAFTED = 3  # tokens at once
AUX_LAYERS = [1, 2, 3]  # whose states EAGLE-3 reads
PROJECTED_TWICE = ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight")


def with_drafts(kind: str, folder: Path) -> tuple[Path, dict[str, Any]]:
    """A model, and what the engine needs to know of the one that drafts for it."""
    if kind in ("eagle", "eagle3"):
        head = {"method": kind, "model": str(_head(kind, folder))}
        return make_model("llama", folder), {**head, "num_speculative_tokens": DRAFTED}
    if kind == "draft_model":
        alone = {"method": kind, "model": str(make_model("draft", folder))}
        return make_model("llama", folder), {**alone, "num_speculative_tokens": DRAFTED}
    return _with_module(kind, folder), {"method": "mtp", "num_speculative_tokens": DRAFTED}


def _head(kind: str, folder: Path) -> Path:
    path = folder / kind
    if path.exists():
        return path
    torch.manual_seed(5)
    config = transformers.LlamaConfig(**{**SIZES, "head_dim": 32, "num_hidden_layers": 1})
    width, weights, prefix = config.hidden_size, {}, "model.layers.0."
    layer = {
        name.removeprefix(prefix): weight
        for name, weight in transformers.LlamaForCausalLM(config).state_dict().items()
        if name.startswith(prefix)
    }
    if kind == "eagle":
        del layer["input_layernorm.weight"]
        weights = {f"layers.0.{name}": weight for name, weight in layer.items()}
        weights["fc.weight"] = torch.randn(width, 2 * width) * 0.1
    else:
        layer |= {name: torch.randn(len(layer[name]), 2 * width) * 0.02 for name in PROJECTED_TWICE}
        weights = {f"midlayer.{name}": weight for name, weight in layer.items()}
        weights |= {name: torch.ones(width) for name in ("midlayer.hidden_norm.weight", "norm.weight")}
        weights["fc.weight"] = torch.randn(width, len(AUX_LAYERS) * width) * 0.1
        weights["lm_head.weight"] = torch.randn(config.vocab_size, width) * 0.02
        config.eagle_config = {"eagle_aux_hidden_state_layer_ids": AUX_LAYERS}
    config.architectures = ["LlamaForCausalLM" if kind == "eagle" else "LlamaForCausalLMEagle3"]
    config.save_pretrained(path)
    save_file({name: weight.contiguous() for name, weight in weights.items()}, path / "model.safetensors")
    return path


def _with_module(family: str, folder: Path) -> Path:
    """The model of a family, with a module that is as its last layer."""
    path = make_model(family, folder / "mtp")
    weights, last = load_file(path / "model.safetensors"), SIZES["num_hidden_layers"] - 1
    width, before, after = SIZES["hidden_size"], f"model.layers.{last}.", f"model.layers.{last + 1}."
    if any(name.startswith(after) for name in weights):
        return path
    torch.manual_seed(6)
    config = json.loads((path / "config.json").read_text())
    added = {after + name.removeprefix(before): weight for name, weight in weights.items() if name.startswith(before)}
    added |= {f"{after}{name}.weight": torch.ones(width) for name in ("enorm", "hnorm", "shared_head.norm")}
    added[f"{after}eh_proj.weight"] = torch.randn(width, 2 * width) * 0.1
    added[f"{after}embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
    added[f"{after}shared_head.head.weight"] = weights["lm_head.weight"].clone()
    save_file({**weights, **{name: weight.clone() for name, weight in added.items()}}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    return path
