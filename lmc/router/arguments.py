"""Reads the arguments of `lmc router`: engine addresses, options, and flags of other routers and earlier versions.

An invalid argument is a `ConfigError` of one line that says what is valid.
"""

import difflib
import importlib.util
import inspect
import json
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from pydantic import ValidationError

from lmc.config.sources import YAML_ERRORS, Given
from lmc.errors import ConfigError, InputError
from lmc.http.address import TOKEN
from lmc.router.engines import EngineAddress, Engines, address
from lmc.router.policies import policy_class
from lmc.router.policies.base import Policy
from lmc.router.settings import RouterOptions, RouterSettings

# Other routers' names of our policies.
OTHER_NAMES = {
    "roundrobin": "round_robin", "prefixaware": "prefix_hash_trie", "prefix-aware": "prefix_hash_trie",
    "least-loaded": "least_loaded", "power-of-two": "power_of_two", "cache-aware": "cache_aware",
    "prefix_hash": "chwbl", "consistent_hashing": "session",
}  # fmt: skip
POLICY_HINTS = {
    "kvaware": "use precise, which follows the engines' KV events, or documents",
    "disaggregated_prefill": "lmc router does not split prefill and decoding between engines",
    "priority": "lmc router has no priorities; the engines do",
}
FLAG_HINTS = {
    "--kv-aware-threshold": "use --policy precise or documents, which need no threshold",
    "--lmcache-controller-port": "there is no controller: engines report their documents at LMC_ADMIN",
    "--static-aliases": "set --served-model-name of the engines",
    "--static-backend-health-checks": "the router always requests /health (--option health_seconds=5)",
    "--engine-stats-interval": "the router requests /health every --option health_seconds=5",
    "--request-timeout-secs": "use --answer-seconds",
    "--max-payload-size": "use --option max_body_mib=32",
    "--max-concurrent-requests": "use --max-requests",
    "--log-stats": "read /metrics, or use `lmc top`",
    "--request-rewriter": "lmc router never changes requests",
    "--dynamic-config-yaml": "use --discovery file:PATH, which is read periodically",
    "--dynamic-config-json": "use --discovery file:PATH, which is read periodically",
}
TOKEN_CHARACTERS = 4  # characters that count as one token where another router counts tokens
# Options that had a flag, a variable and a name in the file of their own, before --option took them.
FORMER_FLAGS = frozenset(RouterOptions.model_fields) | {
    "cache_tokens", "ratio", "cache_threshold", "balance_abs_threshold", "balance_rel_threshold",
    "eviction_interval_secs", "max_tree_size",
}  # fmt: skip


class OtherFlags(NamedTuple):
    """The values of flags that `lmc router` reads but does not show in its help."""

    backends: str  # --worker-urls
    discovery: str  # --service-discovery and the flags of Kubernetes
    options: dict[str, Any]  # of the policy
    moved: dict[str, str]  # by name, flags of earlier versions


def other_flags(arguments: Sequence[str], known_flags: Collection[str]) -> OtherFlags:
    """Read flags of other routers and of earlier versions. `known_flags` has the flags of the help, for hints.

    Raises `ConfigError` for any other flag, with a hint.
    """
    words_of = _grouped(arguments)
    moved = {name: " ".join(words_of.pop(flag)) or "true" for flag, name in _moved_flags().items() if flag in words_of}
    readers: dict[str, Callable[[list[str]], Any]] = {
        "--worker-urls": ",".join, "--service-discovery": "".join, "--k8s-port": "".join, "--k8s-namespace": "".join,
        "--k8s-label-selector": "".join, "--prefix-token-count": _number, "--prefix-hash-load-factor": _number,
    }  # fmt: skip
    for flag in words_of.keys() - readers.keys():
        near = difflib.get_close_matches(flag, [*known_flags, *readers], 1)
        hint = FLAG_HINTS.get(flag) or (f"did you mean {near[0]}?" if near else "`lmc router --help` shows all options")
        raise ConfigError(f"lmc router has no {flag}: {hint}")
    values = {flag: readers[flag](words) for flag, words in words_of.items()}
    options = {}
    if tokens := values.get("--prefix-token-count"):
        options["prefix_characters"] = math.ceil(tokens * TOKEN_CHARACTERS)
    if factor := values.get("--prefix-hash-load-factor"):
        options["mean_load_factor"] = factor
    return OtherFlags(values.get("--worker-urls", ""), _kubernetes(values), options, moved)


def _moved_flags() -> dict[str, str]:
    return {f"--{name}".replace("_", "-"): name for name in sorted(FORMER_FLAGS)}


def _grouped(arguments: Sequence[str]) -> dict[str, list[str]]:
    """Return the values after each flag."""
    words_of, flag = dict[str, list[str]](), "argument"
    for argument in arguments:
        if argument.startswith("-"):
            flag, equals, value = argument.partition("=")
            words_of[flag] = [value] if equals else []
        else:
            words_of.setdefault(flag if words_of else argument, []).append(argument)
    return words_of


def _number(values: list[str]) -> float:
    with suppress(ValueError):
        if 0 < (number := float("".join(values))) < float("inf"):
            return number
    hint = "use --prefix-token-count 256 or --prefix-hash-load-factor 1.25, for example"
    raise ConfigError(f"{' '.join(values)!r} is not a number above 0: {hint}")


def _kubernetes(values: dict[str, Any]) -> str:
    """Return production-stack's flags for Kubernetes in the form of `--discovery`."""
    if values.get("--service-discovery", "static") == "static":
        return ""
    labels = values.get("--k8s-label-selector")
    if values["--service-discovery"] != "k8s" or not labels:
        raise ConfigError("--service-discovery must be static or k8s, and k8s needs --k8s-label-selector app=vllm")
    return f"kubernetes:{values.get('--k8s-namespace', 'default')}/{labels}:{values.get('--k8s-port', 8000)}"


def policy_name(name: str) -> str:
    """Return our name of a policy. Raises `ConfigError` for policies of other routers that lmc does not have."""
    if name in POLICY_HINTS:
        raise ConfigError(f"--policy {name}: {POLICY_HINTS[name]}")
    return OTHER_NAMES.get(name, name)


def written_options(texts: Sequence[str]) -> dict[str, str]:
    """Return the texts of options `name=value`, by name. Raises `ConfigError` for anything else."""
    options = {}
    for option in texts:
        name, equals, value = option.partition("=")
        if not equals or not name.strip():
            raise ConfigError(f"--option {option} must be a name and a value, such as --option seed=1")
        options[name.strip().replace("-", "_")] = value
    return options


def router_options(given: Mapping[str, Given]) -> RouterOptions:
    """Return the router's own options among those given. Raises `ConfigError` for an invalid value."""
    try:
        known = given.keys() & RouterOptions.model_fields.keys()
        return RouterOptions.model_validate({name: given[name].value for name in known})
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        value, origin = given[name]
        raise ConfigError(f"--option {name}={value} ({origin}) is invalid: {first['msg'].lower()}") from None


def policy_options(policy: str, given: Mapping[str, Given]) -> dict[str, Any]:
    """Return the policy's options among those given. Raises `ConfigError` for a misspelt option of the router."""
    import yaml

    options, names = {}, inspect.signature(policy_class(policy)).parameters
    for name in given.keys() - RouterOptions.model_fields.keys():
        value, origin = given[name]
        near = difflib.get_close_matches(name, [*names, *RouterOptions.model_fields], 1, cutoff=0.8)
        if name not in names and near and near[0] not in names:
            raise ConfigError(f"lmc router has no option {name} ({origin}): did you mean {near[0]}?")
        try:
            options[name] = yaml.safe_load(value) if isinstance(value, str) else value
        except YAML_ERRORS:
            raise ConfigError(
                f"--option {name}={value} ({origin}): the value must be a number or a word, such as 0.5"
            ) from None
    return options


def addresses(backends: str, models: str, caches: str, admins: str, kv_events: str) -> list[EngineAddress]:
    """Return the engines of the command line. Raises `ConfigError` if the lists differ in length."""
    urls, columns = items(backends), []
    texts = {
        "--static-models": models,
        "--static-caches": caches,
        "--static-admins": admins,
        "--option static_kv_events": kv_events,
    }
    for flag, text in texts.items():
        column = items(text)
        if column and len(column) != len(urls):
            raise ConfigError(
                f"{flag} has {len(column)} items, and --static-backends has {len(urls)}: both need one item per engine"
            )
        columns.append(column or [""] * len(urls))
    try:
        engines = [
            address(url, [model] if model else [], *endpoints)
            for url, model, *endpoints in zip(urls, *columns, strict=True)
        ]
    except InputError as error:
        raise ConfigError(f"--static-backends: {error}") from None
    names = [engine.url for engine in engines]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ConfigError(f"--static-backends has {', '.join(sorted(twice))} twice: list each engine once")
    return engines


def check_kv_events(name: str, policy: Policy, engines: Engines, source: str) -> None:
    """Raise `ConfigError` if the policy needs KV events and an engine has no address for them."""
    if not policy.needs.kv_events:
        return
    silent = [engine.url for engine in engines if not engine.address.kv_events]
    if source and not engines.ports.kv_events and not source.startswith("file:"):  # A file may have each address.
        silent.append(f"the engines of --discovery {source}")
    if silent:
        hint = "start vLLM with --kv-events-config, and set --option kv_events_port=5557 or static_kv_events=tcp://…"
        raise ConfigError(f"--policy {name} needs the KV events of {', '.join(silent)}: {hint}")


def checked(settings: RouterSettings) -> RouterSettings:
    """Return the settings if they are valid. Raises `ConfigError` otherwise; its message shows no secret."""
    if not settings.special_string.strip():
        raise ConfigError("--option special_string is empty: set the blend_special_str of the engines, such as ' # # '")
    secrets = [("--api-key", settings.api_key), (TOKEN, settings.admin_token)]
    for name, secret in [*secrets, *(("--client-tokens", token) for token in settings.client_tokens)]:
        if not (secret.isascii() and secret.isprintable()) or secret != secret.strip():
            raise ConfigError(f"{name} is invalid: use printable ASCII characters without spaces around them")
    if settings.tokenizers and importlib.util.find_spec("transformers") is None:
        raise ConfigError("--tokenizers needs transformers: pip install transformers")
    for path in settings.allowed_paths:
        if not re.fullmatch(r"(/[\w.-]+)+", path):
            raise ConfigError(
                f"--option allowed_paths={path} is invalid: set paths of engines, such as /v1/load_lora_adapter"
            )
    return settings


def paths_of_models(text: str) -> dict[str, str]:
    """Return the paths of tokenizers by model, from `MODEL=DIRECTORY,…` or JSON. Raises `ConfigError` for others."""
    paths, pairs = {}, [item.partition("=")[::2] for item in items(text)]
    if text.startswith("{"):
        with suppress(ValueError):
            pairs = list(json.loads(text).items())
    for model, path in pairs:
        if not model.strip() or not isinstance(path, str) or not path.strip():
            hint = "use MODEL=DIRECTORY, with the model name that clients use"
            raise ConfigError(f"--tokenizers {model}={path or ''}: {hint}")
        paths[model.strip()] = path.strip()
    return paths


def items(text: str) -> list[str]:
    """Return the comma-separated items of a text."""
    return [item.strip() for item in text.split(",") if item.strip()]
