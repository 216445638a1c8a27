"""Everything that lmc uses of vLLM, and the verified versions of vLLM. No other module imports vLLM.

    0.30 to 0.33    tested (see `make test-long`)
    newer           used if it fulfils lmc's contract (`contract.py`), with a warning at start
    older, or a newer one that lacks something      lmc does nothing and logs what is missing; vLLM serves without lmc

Differences between versions are detected by the names that a version has, not by its number.
"""

import importlib
import logging
import re
from collections.abc import Callable, Mapping
from typing import Any

from lmc.errors import ConfigError

log = logging.getLogger(__name__)

OLDEST, NEWEST = (0, 30), (0, 33)

_NAMES = {  # by module
    "vllm.config": "CUDAGraphMode VllmConfig set_current_vllm_config",
    "vllm.distributed": "get_pp_group get_tensor_model_parallel_rank get_tp_group",
    "vllm.distributed.kv_events": "BlockRemoved BlockStored",
    "vllm.distributed.kv_transfer": "get_kv_transfer_group",
    "vllm.distributed.kv_transfer.kv_connector.factory": "KVConnectorFactory",
    "vllm.distributed.kv_transfer.kv_connector.v1.base": "KVConnectorBase_V1 KVConnectorHandshakeMetadata "
    "KVConnectorMetadata KVConnectorRole KVConnectorWorkerMetadata SupportsHMA",
    "vllm.distributed.kv_transfer.kv_connector.v1.metrics": "KVConnectorPromMetrics KVConnectorStats",
    "vllm.forward_context": "set_forward_context",
    "vllm.lora.layers": "LoRAMapping",
    "vllm.model_executor.layers.attention": "Attention MLAAttention",
    "vllm.tokenizers": "cached_tokenizer_from_config",
    "vllm.tracing": "extract_trace_context instrument_manual",
    "vllm.utils.hashing": "get_hash_fn_by_name",
    "vllm.v1.attention.backend": "CommonAttentionMetadata",
    "vllm.v1.core.kv_cache_utils": "generate_block_hash_extra_keys get_request_block_hasher maybe_convert_block_hash "
    "to_event_extra_keys",
    "vllm.v1.kv_cache_interface": "FullAttentionSpec MambaSpec SlidingWindowSpec",
    "vllm.v1.metrics.cache_hit_source": "CacheHitSource",
    "vllm.v1.worker.worker_base": "WorkerWrapperBase",
}
USED = {name: module for module, names in _NAMES.items() for name in names.split()}  # the module of each name

# Substitutes for names that some versions lack. Before 0.31, events contain the extra keys unchanged.
SUBSTITUTES: Mapping[str, Callable[..., Any]] = {"to_event_extra_keys": list}
# Names that lmc uses only in versions that have them.
LATER = frozenset({"CacheHitSource", "LoRAMapping"})


def installed_version() -> str:
    """Return the version that vLLM reports."""
    return str(importlib.import_module("vllm").__version__)


def parsed_version(version: str) -> tuple[int, int] | None:
    """Return the major and the minor number of a version; None if it has none, as in some builds from source."""
    match = re.match(r"(\d+)\.(\d+)(?!\d)", version)
    return (int(match[1]), int(match[2])) if match else None


def warn_if_untested() -> None:
    """Log a warning if lmc was not tested with this version of vLLM."""
    version = installed_version()
    number = parsed_version(version)
    if number is None or not OLDEST <= number <= NEWEST:
        log.warning("lmc was tested with vLLM %s to %s, but not with %s", _text(OLDEST), _text(NEWEST), version)


def _text(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


def __getattr__(name: str) -> Any:
    """Import a name of vLLM on first use. Raises `ConfigError` if this vLLM does not have the name."""
    if name not in USED:
        raise AttributeError(name)
    try:
        return getattr(importlib.import_module(USED[name]), name)
    except (ImportError, AttributeError) as error:
        if name in SUBSTITUTES:
            return SUBSTITUTES[name]
        raise ConfigError(f"this vLLM has no {USED[name]}.{name}, which lmc needs: {error}") from error
