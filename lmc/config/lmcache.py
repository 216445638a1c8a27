"""How lmc handles LMCache settings that it does not have, for users who migrate from LMCache.

Most of them change nothing that a user would miss: lmc ignores them with one warning. A setting that turns on a feature
missing in lmc is rejected with an alternative. Names are regular expressions that match a whole name.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import parse_qsl, quote, urlencode

from lmc.config.mooncake_url import OPTIONS as MOONCAKE_OPTIONS
from lmc.config.mooncake_url import SCHEMES as MOONCAKE_SCHEMES
from lmc.config.remote_url import STORES

# Names in older versions of LMCache, for settings that lmc has.
ALIASES: Mapping[str, str] = {
    "max_local_cache_size": "max_local_cpu_size",
    "blend_recompute_ratio": "blend_recompute_ratios",
    "blend_separator": "blend_special_str",
}
# Names in `extra_config` for the parts of the URL of a bucket.
S3_NAMES = {
    "user": "aws_access_key_id",
    "password": "aws_secret_access_key",
    "region": "s3_region",
    "prefix": "s3_file_prefix",
    "disable_tls": "disable_tls",
    "s3_express": "s3_enable_s3express",
}
REDIS = r"rediss?\b|unix\b|valkeys?\b|resp\b"  # the beginnings of schemes that are a Redis
LOSSY = ("cachegen", "kivi")  # codecs that lose precision
ON = {"true", "1", "yes", "on"}  # values of a switch, in small letters
NESTED = "extra_config"  # a mapping of further settings
PLUGINS, PLUGIN = "remote_storage_plugins", "remote_storage_plugin"  # a list of names; the beginning of their settings

_SYNCHRONOUS = "a lookup is answered at once from memory and never waited for"
_UP_FRONT = "memory is taken once at start, all of max_local_cpu_size"
_NO_PORT = "no port is opened for it; `lmc config`, `lmc stat` and /metrics show what there is"
IGNORED: Mapping[str, str] = {
    r"remote_serde: \w+": "it loses precision, which lmc never does; planes makes records smaller without loss",
    "local_cpu": "all chunks pass through memory; max_local_cpu_size says how much of it is used",
    "local_device": "chunks are kept in memory; for a slab on the accelerator set max_local_device_size",
    "use_layerwise|(enable_)?async_loading|pipelined_backend": "loading always runs layer by layer, beside computing",
    "cache_policy|cost_aware_.*|hit_miss_ratio|priority_limit": "the least recently used chunk is evicted first",
    "pre_caching_hash_algorithm": "keys are sha256, the same in every process; PYTHONHASHSEED is not needed",
    "min_retrieve_tokens|retrieve_buffer_size": "exact hits have no such bound; for blending there is blend_min_tokens",
    "save_only_first_rank|save_chunk_meta|force_store_wait|discard_partial_chunks": "the model decides what is saved",
    "lookup_.*|external_lookup_client|enable_scheduler_bypass_lookup|.*chunk_lookup.*": _SYNCHRONOUS,
    "blocking_timeout_secs|transfer_timeout": "remote_deadline is how long a remote store may take to answer, "
    "load_deadline how long a tier may",
    "master_server_address": "remote_url names the master of a Mooncake Store",
    "storage_root_dir|mooncake_.*|use_exists_sync": "Mooncake places records by its own rules",
    "pin_.*": "a pin ends with the request that holds it, so none has to be timed out",
    "reserve_local_cpu_size|enable_lazy_memory_allocator|lazy_memory_.*": _UP_FRONT,
    "local_cpu_use_hugepages": "the kernel's own page policy holds",
    "numa_mode": "memory lies where the starting process may allocate; numactl binds that process",
    "local_disk_path_sharding|gds_path_sharding": "one directory serves all devices",
    "use_odirect|disk_io_threads|use_gpu_connector_v3|.*_num_threads": "the store sizes its own threads and I/O",
    "retrieve_locations|store_location": "device, memory, disk, remote tiers are asked in that order, and written to",
    "internal_api_server.*|run_script_api_enabled|script_allowed_imports": _NO_PORT,
    "enable_kv_events": "the engine's own switch for KV events counts",
    "py_enable_gc|gc_.*": "the garbage collector is left as it is",
    "(enable_)?chunk_statistics.*|audit_.*|extra_trace.*|health_.*": "lmc's own metrics count chunks (lmc top)",
    ".*hidden_state.*": "only keys and values are stored",
    "use_experimental|track_usage": "it is about LMCache itself",
    "log_level": "LMC_LOG_LEVEL sets the level of lmc's log",
    "rpc_port": "the scheduler and its workers exchange messages through vLLM, without a port",
    "skip_last_n_tokens": "vLLM always computes the last token of a prompt, and all others may come from the store",
    "use_native|engine_id": "LMCConnector is the only implementation, and needs no id",
    "blend_add_special_in_precomp|enable_sparse": "a document is learned as it stands in prompts",
    "blend_check_layers|blend_thresholds": "blend_method: cacheblend compares keys at layer 1, without a threshold",
    "save_unfull_chunk": "the tokens after the last full chunk are always stored",
}


@dataclass(frozen=True, slots=True)
class Feature:
    """A feature that LMCache has and lmc does not have."""

    title: str
    settings: str  # regular expression for all settings of the feature
    switches: tuple[str, ...]  # settings that turn the feature on, unless their value is empty or false
    instead: str


_SHARED = "hosts share chunks through Redis or an object store: set remote_url"
FEATURES = (
    Feature("sharing between peers (P2P)", ".*p2p.*", ("enable_p2p",), _SHARED),
    Feature(
        "disaggregated prefill (PD)",
        "enable_pd|pd_.*|enable_xpyd|nixl_role",
        ("enable_pd", "enable_xpyd", "nixl_role"),
        "on one host, two engines on one `lmc serve` do that without settings (examples/prefill_decode.py); between "
        "hosts, vLLM has connectors for it",
    ),
    Feature(
        "NIXL",
        "enable_nixl.*|nixl_.*|transfer_channel|maru_.*",
        ("enable_nixl", "enable_nixl_storage", "maru_path"),
        "as a pool, set remote_url to a Mooncake Store (mooncake://master:50051) or a bucket (s3://bucket/prefix); to "
        "move KV from one GPU to another, run vLLM's NixlConnector and LMCConnector in a MultiConnector, where lmc "
        "stores prefixes and blends nothing",
    ),
    Feature(
        "GPUDirect storage",
        "gds_.*|use_gds|cufile_.*|weka_path",
        ("gds_path", "weka_path"),
        "local_disk reads with direct I/O into memory: set it to the directory",
    ),
    Feature(
        "a controller",
        "enable_controller|controller_.*|(lmcache_)?(instance_id|worker_.*)|distributed_url|lookup_url",
        ("enable_controller",),
        f"LMC_ADMIN and `lmc serve --http` answer what each store has, `lmc router` finds engines by it, and {_SHARED}",
    ),
    Feature(
        "a server for several engines",
        "mp_.*",
        ("mp_host",),
        "start `lmc serve` on the host, and set server to its socket (unix:///run/lmc.sock)",
    ),
    Feature(
        "plug-ins",
        "(remote_)?storage_plugins?.*|external_backends?|(runtime_)?plugin_.*",
        ("storage_plugins", "remote_storage_plugins", "external_backends", "runtime_plugin_locations"),
        "the tiers are memory, disk, and Redis or an object store: set local_disk or remote_url",
    ),
    Feature(
        "settings from a server",
        "remote_config_url|app_id",
        ("remote_config_url",),
        "settings come from this host's YAML and environment",
    ),
)


def ignored(name: str) -> str | None:
    """Return why lmc ignores a setting of LMCache; None for all other settings."""
    return next((why for pattern, why in IGNORED.items() if re.fullmatch(pattern, name)), None)


def feature_of(name: str) -> Feature | None:
    """Return the missing feature that a setting of LMCache belongs to, or None."""
    return next((feature for feature in FEATURES if re.fullmatch(feature.settings, name)), None)


def is_on(value: object) -> bool:
    """Return whether the value of a switch turns it on."""
    return str(value).strip().lower() not in {"", "none", "null", "false", "0", "no", "off", "[]", "{}"}


def login_names(url: object) -> dict[str, str]:
    """Return the names of the settings in `extra_config` for the parts of a remote URL."""
    if _is_s3(url):
        return S3_NAMES
    if _is_mooncake(url):
        return {name: name for name in MOONCAKE_OPTIONS}
    if str(url).strip().lower().startswith("valkey"):
        return {name: f"valkey_{name}" for name in ("username", "password", "database", "mode")}
    return {name: name for name in ("username", "password", "database")}


def with_login(url: str, more: Mapping[str, object]) -> str:
    """Return the URL of a remote store with the login, and what else is part of it, from LMCache's `extra_config`."""
    if _is_s3(url):
        return _with_bucket(url, {part: more[name] for part, name in S3_NAMES.items() if more.get(name)})
    if _is_mooncake(url):
        return _with_options(url, {name: more[name] for name in MOONCAKE_OPTIONS if more.get(name)})
    scheme, mark, rest = url.partition("://")
    given = {part: more.get(name) for part, name in login_names(url).items()}
    if scheme.lower() == "valkey" and given["mode"] == "cluster":
        scheme = "valkey-cluster"
    if not mark or "@" in rest:
        return f"{scheme}{mark}{rest}"
    database = f"/{given['database']}" if given["database"] and "/" not in rest else ""
    return f"{scheme}://{_login(given['username'], given['password'])}{rest}{database}"


def plugin_urls(plugins: object, more: Mapping[str, object]) -> list[str]:
    """Return the URLs of LMCache's own plug-ins for remote stores, such as `fs` or `fs.first`, from `extra_config`.

    The list is empty if a plug-in is not one of these, or has no address.
    """
    names = plugins if isinstance(plugins, list) else re.findall(r"[\w.-]+", str(plugins))
    urls = []
    for name in map(str, names):
        start = f"{PLUGIN}.{name.lower()}."
        given = {key.removeprefix(start): value for key, value in more.items() if key.startswith(start)}
        kind, path, master = name.partition(".")[0], given.get("base_path"), given.get("master_server_address")
        if kind == "fs" and path and "," not in str(path):  # LMCache divides chunks between several directories.
            urls.append(f"file://{quote(str(path))}")
        elif kind == "mooncakestore" and master:
            options = {option: given[option] for option in MOONCAKE_OPTIONS if given.get(option)}
            urls.append(_with_options(f"{kind}://{master}", options))
        else:
            return []
    return urls


def _is_s3(url: object) -> bool:
    return str(url).strip().lower().startswith("s3://")


def _is_mooncake(url: object) -> bool:
    return str(url).strip().lower().startswith(tuple(f"{scheme}://" for scheme in MOONCAKE_SCHEMES))


def _with_options(url: str, given: Mapping[str, object]) -> str:
    """Return the URL of a Mooncake Store with options that it does not have yet."""
    address, _, query = url.strip().partition("?")
    before = dict(parse_qsl(query))
    return f"{address}?{urlencode(dict(given) | before, safe=':/@,')}"


def _with_bucket(url: str, given: Mapping[str, object]) -> str:
    """Return the URL of a bucket. LMCache writes the address under which a bucket is a host instead of its name."""
    address, mark, query = url.strip()[len("s3://") :].partition("?")
    host, _, path = address.partition("/")
    path = "".join(f"/{part}" for part in (path.strip("/"), str(given.get("prefix", "")).strip("/")) if part)
    if not given or "@" in host or mark:
        return f"s3://{host}{path}{mark}{query}" if "prefix" in given else url
    options = {"region": given["region"]} if "region" in given else {}
    bucket, dot, _ = host.partition(".")
    if dot:
        http = "http" if is_on(given.get("disable_tls")) else "https"
        options |= {"endpoint": f"{http}://{host}", "virtual_hosted_style_request": "true"}
    if is_on(given.get("s3_express")):
        options["s3_express"] = "true"
    query = f"?{urlencode(options)}" if options else ""
    return f"s3://{_login(given.get('user'), given.get('password'))}{bucket}{path}{query}"


def _login(user: object, password: object) -> str:
    """Return the part of a URL before the host; empty without a user and a password."""
    words = (quote(str(word or ""), safe="") for word in (user, password))
    return ":".join(words) + "@" if user or password else ""


def other_store(url: object) -> str:
    """Return why lmc does not support a remote store; empty if the URL's scheme is supported."""
    scheme = re.match(r"\s*([a-z][\w+.-]*)://", str(url), re.IGNORECASE)
    if not scheme or scheme[1].lower() in (*STORES, *MOONCAKE_SCHEMES) or re.match(REDIS, scheme[1].lower()):
        return ""
    near = {
        "lm": ". For the engines of one host, `lmc serve` is one store (server: unix:///run/lmc.sock)",
    }.get(scheme[1].lower(), "")
    there = (
        "Redis (redis://…), Mooncake (mooncake://…), object stores (s3://…, gs://…, az://…) and shared directories "
        "(file:///…) are"
    )
    return f"{scheme[1]}:// is not supported yet; {there}{near}. Remove it, or name one of these"
