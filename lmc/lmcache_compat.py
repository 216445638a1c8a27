"""Answers to settings of LMCache that lmc does not have, for those who move over."""

from collections.abc import Mapping

# Accepted with one warning, because lmc always does what they ask for.
IGNORED: Mapping[str, str] = {
    "local_cpu": "all chunks pass through memory; max_local_cpu_size says how much of it is used",
    "local_device": "chunks are kept in memory; for a slab on the accelerator set max_local_device_size",
    "use_layerwise": "loading always runs layer by layer",
}

_NO_PEERS = "hosts share chunks through Redis; set remote_url, and remove it"
_NO_TRANSPORT = "bytes move between device, memory, disk and Redis without a transport library; remove it"
_SYNCHRONOUS = "a lookup is answered at once from memory and never waited for; remove it"
_UP_FRONT = "memory is taken once at start, all of max_local_cpu_size; remove it"
# Refused, with what to do instead. Names are regular expressions, of which the first that matches all of it counts.
INSTEAD: Mapping[str, str] = {
    "extra_config": "every setting stands at the top level; move the ones that lmc has there and remove the rest",
    "cache_policy": "the least recently used chunk is evicted first; remove it",
    "pre_caching_hash_algorithm": "keys are sha256, the same in every process; remove it, and PYTHONHASHSEED with it",
    "min_retrieve_tokens": "exact hits have no lower bound; for blending set blend_min_tokens",
    "save_only_first_rank": "what is saved follows from the model; remove it",
    "lookup_.*|external_lookup_client|enable_scheduler_bypass_lookup": _SYNCHRONOUS,
    "blocking_timeout_secs": "set remote_deadline, the seconds that Redis has to answer, and load_deadline, "
    "those for which a request of vLLM waits for a tier",
    "enable_async_loading": "loading always runs beside computing, layer by layer; remove it",
    "pin_.*": "a pin ends with the request that holds it, so none has to be timed out; remove it",
    "reserve_local_cpu_size|enable_lazy_memory_allocator|lazy_memory_.*": _UP_FRONT,
    "local_cpu_use_hugepages": "the kernel's own page policy holds; remove it",
    "numa_mode": "memory lies where the starting process may allocate; bind that process with numactl, and remove it",
    "local_disk_path_sharding": "one directory serves all devices; set local_disk, and remove it",
    "use_odirect": "direct I/O is used where the file system has it; remove it",
    "disk_io_threads": "the store sizes its own threads; remove it",
    "retrieve_locations": "device, memory, disk and Redis are asked in that order; remove it",
    "store_location": "chunks go through memory to local_disk and remote_url, where set; remove it",
    "remote_storage_plugins": "the remote store is Redis; set remote_url, and remove it",
    "storage_plugins": "the tiers are memory, disk and Redis; set local_disk or remote_url, and remove it",
    "gds_.*|use_gds": "the disk tier reads with direct I/O into pinned memory; set local_disk, and remove it",
    "nixl_.*|enable_nixl|maru_.*|transfer_channel": _NO_TRANSPORT,
    ".*p2p.*|enable_pd|pd_.*|mp_host|mp_port": _NO_PEERS,
    "enable_controller|controller_.*|.*instance_id|.*worker_(ports|ids)": _NO_PEERS,
    "remote_config_url": "settings come from this host's YAML and environment; remove it",
    "internal_api_server.*": "no port is opened for it; `lmc config` shows the settings, and remove it",
    "enable_kv_events": "the engine's own switch for KV events counts; remove it",
    "py_enable_gc": "the garbage collector is left as it is; remove it",
}
