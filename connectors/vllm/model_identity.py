"""The identity of the model that vLLM has loaded; see `lmc.engine.identity`."""

from pathlib import Path
from typing import Any

from lmc.engine.identity import checkpoint_files, identity_of_files, identity_of_parameters


def files_of(config: Any) -> list[Path]:
    """Return the checkpoint's files on this host; none if the weights are elsewhere, or random (`dummy`)."""
    if config.load_config.load_format == "dummy":
        return []
    return checkpoint_files(config.model_config.model, config.model_config.revision)


def model_identity(config: Any, weights: list[str]) -> str:
    """Return the identity of the checkpoint, or, without its files, of the `weights` that the ranks have in memory."""
    model, files = config.model_config, files_of(config)
    also = [repr(model.hf_overrides)] if model.hf_overrides else []
    if model.quantization and not getattr(model.hf_config, "quantization_config", None):
        also.append(str(model.quantization))  # The files do not say that it is quantised when it is loaded.
    if "longrope" in str(model.hf_config.to_dict()):
        also.append(str(model.max_model_len))  # It has a second table of angles, for long prompts.
    if files:
        return identity_of_files(files, also)
    return identity_of_parameters(model.hf_config.to_dict(), (), [*also, *weights])


def weights_in_memory(config: Any, model: Any | None) -> str:
    """Return the digest of this rank's parameters, or nothing if the checkpoint's files identify the model."""
    if model is None or files_of(config):
        return ""
    return identity_of_parameters({}, sorted(model.named_parameters()))


def layout_of(config: Any, kv_cache_config: Any, pages: str) -> str:
    """Return everything on which the bytes in a page depend; `pages` is how they lie in memory."""
    layers = config.compilation_config.static_forward_context
    found = {
        f"{layers[name].attn_backend.get_name()}/{getattr(layers[name], 'isa', '')}"
        for group in kv_cache_config.kv_cache_groups
        for name in group.layer_names
        if name in layers and hasattr(layers[name], "attn_backend")
    }
    numbers = f"{config.cache_config.cache_dtype} {config.model_config.dtype}"
    return f"{','.join(sorted(found))} {pages} {numbers}{_draft(config)}"


def _draft(config: Any) -> str:
    """Return the identity of the model that drafts tokens, some of whose layers may be in the cache, too.

    With another one's pages, fewer of its tokens would be accepted. It is nothing if no other model drafts.
    """
    draft = config.speculative_config and config.speculative_config.draft_model_config
    if not draft or draft.model == config.model_config.model:
        return ""
    files = checkpoint_files(draft.model, draft.revision)
    return f" drafted by {identity_of_files(files) if files else draft.model}"
