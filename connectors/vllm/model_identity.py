"""The identity of the model that vLLM has loaded; see `lmc.engine.identity`."""

from pathlib import Path
from typing import Any

from lmc.connectors.vllm.model_kinds import windows_of
from lmc.engine.identity import checkpoint_files, identity_of_files, identity_of_parameters


def files_of(config: Any) -> list[Path]:
    """Return the checkpoint's files on this host; none if the weights are not on this host, or are random (`dummy`)."""
    if config.load_config.load_format == "dummy":
        return []
    return checkpoint_files(config.model_config.model, config.model_config.revision)


def model_identity(config: Any, weights: list[str]) -> str:
    """Return the model's identity from the checkpoint's files; without files, from the ranks' digests `weights`."""
    model, files = config.model_config, files_of(config)
    also = [repr(model.hf_overrides)] if model.hf_overrides else []
    if model.quantization and not getattr(model.hf_config, "quantization_config", None):
        also.append(str(model.quantization))  # The files do not show a quantisation at load time.
    if "longrope" in str(model.hf_config.to_dict()):
        also.append(str(model.max_model_len))  # A model with LongRoPE has a second table of angles, for long prompts.
    if files:
        return identity_of_files(files, also)
    return identity_of_parameters(model.hf_config.to_dict(), (), [*also, *weights])


def weights_in_memory(config: Any, model: Any | None) -> str:
    """Return the digest of this rank's parameters; an empty string if the checkpoint's files identify the model.

    A checkpoint also has the scales of a quantised KV cache, which vLLM keeps as buffers.
    """
    if model is None or files_of(config):
        return ""
    scales = [(name, one) for name, one in model.named_buffers() if name.endswith(("._k_scale", "._v_scale"))]
    return identity_of_parameters({}, [*sorted(model.named_parameters()), *sorted(scales)])


def layout_of(config: Any, kv_cache_config: Any, pages: str) -> str:
    """Return everything on which the bytes in a page depend; `pages` describes the memory layout of the pages."""
    layers = config.compilation_config.static_forward_context
    backends = {
        f"{layers[name].attn_backend.get_name()}/{getattr(layers[name], 'isa', '')}"
        for group in kv_cache_config.kv_cache_groups
        for name in group.layer_names
        if name in layers and hasattr(layers[name], "attn_backend")
    }
    numbers = f"{config.cache_config.cache_dtype} {config.model_config.dtype}"
    windows = windows_of(kv_cache_config)
    if any(windows):  # Pages that no token after a chunk sees are not stored.
        numbers += f" windows {windows}"
    return f"{','.join(sorted(backends))} {pages} {numbers}{_draft(config)}"


def _draft(config: Any) -> str:
    """Return the identity of the draft model, because some of its layers may be in the cache, too.

    With pages of a different draft model, fewer drafted tokens would be accepted. Returns an empty string if there is
    no separate draft model.
    """
    draft = config.speculative_config and config.speculative_config.draft_model_config
    if not draft or draft.model == config.model_config.model:
        return ""
    files = checkpoint_files(draft.model, draft.revision)
    return f" drafted by {identity_of_files(files) if files else draft.model}"
