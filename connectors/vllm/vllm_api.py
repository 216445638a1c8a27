"""Everything that lmc uses of vLLM, and for which versions of vLLM that was verified. No other module imports vLLM.

    supported   vLLM 0.32: all tests in `tests/engine/` run against an unmodified 0.32.0
    refused     every other version, with an error at start that says what to install
    untested    with `LMC_UNTESTED_VLLM=1` any version is tried; the self-test still decides whether prompts are blended

A new minor version of vLLM is supported after the names in `USED` have been checked and the engine tests pass.
"""

import importlib
import logging
import os
from typing import Any

from lmc.errors import ConfigError

log = logging.getLogger(__name__)

SUPPORTED = (0, 32)
OVERRIDE = "LMC_UNTESTED_VLLM"

USED = {
    "CUDAGraphMode": "vllm.config",
    "VllmConfig": "vllm.config",
    "set_current_vllm_config": "vllm.config",
    "get_pp_group": "vllm.distributed",
    "get_tensor_model_parallel_rank": "vllm.distributed",
    "get_tp_group": "vllm.distributed",
    "BlockRemoved": "vllm.distributed.kv_events",
    "BlockStored": "vllm.distributed.kv_events",
    "KVConnectorFactory": "vllm.distributed.kv_transfer.kv_connector.factory",
    "KVConnectorBase_V1": "vllm.distributed.kv_transfer.kv_connector.v1.base",
    "KVConnectorHandshakeMetadata": "vllm.distributed.kv_transfer.kv_connector.v1.base",
    "KVConnectorMetadata": "vllm.distributed.kv_transfer.kv_connector.v1.base",
    "KVConnectorRole": "vllm.distributed.kv_transfer.kv_connector.v1.base",
    "KVConnectorWorkerMetadata": "vllm.distributed.kv_transfer.kv_connector.v1.base",
    "SupportsHMA": "vllm.distributed.kv_transfer.kv_connector.v1.base",
    "KVConnectorPromMetrics": "vllm.distributed.kv_transfer.kv_connector.v1.metrics",
    "KVConnectorStats": "vllm.distributed.kv_transfer.kv_connector.v1.metrics",
    "get_kv_transfer_group": "vllm.distributed.kv_transfer",
    "set_forward_context": "vllm.forward_context",
    "Attention": "vllm.model_executor.layers.attention",
    "cached_tokenizer_from_config": "vllm.tokenizers",
    "extract_trace_context": "vllm.tracing",
    "instrument_manual": "vllm.tracing",
    "CommonAttentionMetadata": "vllm.v1.attention.backend",
    "generate_block_hash_extra_keys": "vllm.v1.core.kv_cache_utils",
    "get_hash_fn_by_name": "vllm.utils.hashing",
    "get_request_block_hasher": "vllm.v1.core.kv_cache_utils",
    "maybe_convert_block_hash": "vllm.v1.core.kv_cache_utils",
    "to_event_extra_keys": "vllm.v1.core.kv_cache_utils",
    "AttentionSpec": "vllm.v1.kv_cache_interface",
    "CacheHitSource": "vllm.v1.metrics.cache_hit_source",
    "WorkerWrapperBase": "vllm.v1.worker.worker_base",
}


def check_version() -> None:
    """Raise `ConfigError` for a version of vLLM with which lmc was not verified."""
    version = importlib.import_module("vllm").__version__
    found = tuple(int(number) if number.isdecimal() else -1 for number in version.split(".")[:2])
    if found == SUPPORTED:
        return
    wanted = ".".join(map(str, SUPPORTED))
    if os.environ.get(OVERRIDE) != "1":
        raise ConfigError(
            f"lmc works with vLLM {wanted}, and this is vLLM {version}: install 'vllm=={wanted}.*'. To try this "
            f"version nevertheless, set {OVERRIDE}=1"
        )
    log.warning("lmc was not verified with vLLM %s, only with %s (%s=1)", version, wanted, OVERRIDE)


def __getattr__(name: str) -> Any:
    """Import a name of vLLM when it is first used; raise `ConfigError` if this vLLM does not have it."""
    if name not in USED:
        raise AttributeError(name)
    try:
        return getattr(importlib.import_module(USED[name]), name)
    except (ImportError, AttributeError) as error:
        check_version()
        raise ConfigError(f"this vLLM has no {USED[name]}.{name}, which lmc needs: {error}") from error
