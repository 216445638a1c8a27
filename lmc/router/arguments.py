"""What the arguments of `lmc router` mean: the addresses of engines, options of policies, and flags of other routers.

A wrong one is an error of one line, which says what would be right.
"""

import difflib
import importlib.util
import json
import math
import re
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from lmc.errors import ConfigError, InputError
from lmc.router.engines import EngineAddress, Engines, address
from lmc.router.settings import RouterSettings

# The names that other routers have for a policy of ours.
OTHER_NAMES = {
    "roundrobin": "round_robin", "prefixaware": "prefix_hash_trie", "prefix-aware": "prefix_hash_trie",
    "least-loaded": "least_loaded", "power-of-two": "power_of_two", "cache-aware": "cache_aware",
    "prefix_hash": "chwbl", "consistent_hashing": "session",
}  # fmt: skip
NO_POLICIES = {
    "kvaware": "take precise, which follows the engines' KV events, or documents",
    "disaggregated_prefill": "lmc router does not divide prefill and decoding between engines",
    "priority": "lmc router knows no priorities; the engines do",
}
NO_FLAGS = {
    "--kv-aware-threshold": "take --policy precise or documents, which need no threshold",
    "--lmcache-controller-port": "there is no controller: engines say by LMC_ADMIN what they have",
    "--static-aliases": "give the engines --served-model-name",
    "--static-backend-health-checks": "/health of engines is always asked (--health-seconds)",
    "--engine-stats-interval": "/health of engines is asked every --health-seconds",
    "--request-timeout-secs": "take --answer-seconds",
    "--max-payload-size": "take --max-body-mib",
    "--max-concurrent-requests": "take --max-requests",
    "--log-stats": "read /metrics, or use `lmc top`",
    "--request-rewriter": "lmc router changes nothing in requests",
    "--dynamic-config-yaml": "take --discovery file:PATH, which is read again and again",
    "--dynamic-config-json": "take --discovery file:PATH, which is read again and again",
}
LETTERS = 4  # of a token, as they are counted where another router counts tokens


class OtherFlags(NamedTuple):
    """What flags of other routers say."""

    backends: str
    discovery: str
    options: dict[str, Any]  # of the policy


def other_flags(arguments: Sequence[str], known: Collection[str]) -> OtherFlags:
    """Return what flags say that `lmc router` does not have itself, beside those that are `known`.

    Raises `ConfigError` for those that mean nothing here.
    """
    given = _grouped(arguments)
    ours: dict[str, Callable[[list[str]], Any]] = {
        "--worker-urls": ",".join, "--service-discovery": "".join, "--k8s-port": "".join, "--k8s-namespace": "".join,
        "--k8s-label-selector": "".join, "--prefix-token-count": _number, "--prefix-hash-load-factor": _number,
    }  # fmt: skip
    for flag in given.keys() - ours.keys():
        near = difflib.get_close_matches(flag, [*known, *ours], 1)
        hint = NO_FLAGS.get(flag) or (f"did you mean {near[0]}?" if near else "`lmc router --help` shows all options")
        raise ConfigError(f"lmc router has no {flag}: {hint}")
    found = {flag: ours[flag](values) for flag, values in given.items()}
    options = {}
    if tokens := found.get("--prefix-token-count"):
        options["prefix_characters"] = math.ceil(tokens * LETTERS)
    if factor := found.get("--prefix-hash-load-factor"):
        options["mean_load_factor"] = factor
    return OtherFlags(found.get("--worker-urls", ""), _kubernetes(found), options)


def _grouped(arguments: Sequence[str]) -> dict[str, list[str]]:
    given, flag = dict[str, list[str]](), "argument"
    for argument in arguments:
        if argument.startswith("-"):
            flag, equals, value = argument.partition("=")
            given[flag] = [value] if equals else []
        else:
            given.setdefault(flag if given else argument, []).append(argument)
    return given


def _number(values: list[str]) -> float:
    with suppress(ValueError):
        if 0 < (found := float("".join(values))) < float("inf"):
            return found
    hint = "give --prefix-token-count 256 or --prefix-hash-load-factor 1.25, for example"
    raise ConfigError(f"{' '.join(values)!r} is no number above 0: {hint}")


def _kubernetes(found: dict[str, Any]) -> str:
    """Return what production-stack's flags for Kubernetes are as `--discovery`."""
    if found.get("--service-discovery", "static") == "static":
        return ""
    labels = found.get("--k8s-label-selector")
    if found["--service-discovery"] != "k8s" or not labels:
        raise ConfigError("--service-discovery is static or k8s, and k8s needs --k8s-label-selector app=vllm")
    return f"kubernetes:{found.get('--k8s-namespace', 'default')}/{labels}:{found.get('--k8s-port', 8000)}"


def policy_name(given: str) -> str:
    """Return the name of a policy, which other routers may call otherwise; raise `ConfigError` if it has none here."""
    if given in NO_POLICIES:
        raise ConfigError(f"--policy {given}: {NO_POLICIES[given]}")
    return OTHER_NAMES.get(given, given)


def written_options(written: Sequence[str]) -> dict[str, Any]:
    """Return the values of options `name=value`; raise `ConfigError` for anything else."""
    import yaml

    found = {}
    for option in written:
        name, equals, value = option.partition("=")
        if not equals or not name.strip():
            raise ConfigError(f"--option {option} must be a name and a value, such as --option seed=1")
        try:
            found[name.strip().replace("-", "_")] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise ConfigError(f"--option {option}: the value must be a number or a word, such as 0.5") from None
    return found


def addresses(backends: str, models: str, caches: str, admins: str, kv_events: str) -> list[EngineAddress]:
    """Return the engines that the command line names; raise `ConfigError` if the lists do not fit together."""
    urls, columns = items(backends), []
    listed = {
        "--static-models": models,
        "--static-caches": caches,
        "--static-admins": admins,
        "--static-kv-events": kv_events,
    }
    for flag, text in listed.items():
        column = items(text)
        if column and len(column) != len(urls):
            raise ConfigError(
                f"{flag} has {len(column)} items, and --static-backends has {len(urls)}: give one for each"
            )
        columns.append(column or [""] * len(urls))
    try:
        found = [
            address(url, [model] if model else [], *others) for url, model, *others in zip(urls, *columns, strict=True)
        ]
    except InputError as error:
        raise ConfigError(f"--static-backends: {error}") from None
    names = [one.url for one in found]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ConfigError(f"--static-backends has {', '.join(sorted(twice))} twice: name each engine once")
    return found


def check_kv_events(policy: str, engines: Engines, where: str) -> None:
    """Raise `ConfigError` for `precise` if nothing will say what engines have: those given, or those found `where`."""
    silent = [one.url for one in engines if not one.address.kv_events]
    if where and not engines.ports.kv_events and not where.startswith("file:"):  # A file can name each address.
        silent.append(f"the engines of --discovery {where}")
    if policy == "precise" and silent:
        wanted = "start vLLM with --kv-events-config, and give --kv-events-port 5557 or --static-kv-events tcp://…"
        raise ConfigError(f"--policy precise needs the KV events of {', '.join(silent)}: {wanted}")


def checked(settings: RouterSettings, token_name: str) -> RouterSettings:
    """Return settings that can work; raise `ConfigError` otherwise. No secret is in the message."""
    if not settings.special_string.strip():
        raise ConfigError("--special-string is empty: give the blend_special_str of the engines, such as ' # # '")
    secrets = [("--api-key", settings.api_key), (token_name, settings.admin_token)]
    for name, secret in [*secrets, *(("--client-tokens", token) for token in settings.client_tokens)]:
        if not (secret.isascii() and secret.isprintable()) or secret != secret.strip():
            raise ConfigError(f"{name} cannot be sent: it may have no blanks around it, no line ends, and ASCII only")
    if settings.tokenizers and importlib.util.find_spec("transformers") is None:
        raise ConfigError("--tokenizers needs transformers: pip install transformers")
    for path in settings.allowed_paths:
        if not re.fullmatch(r"(/[\w.-]+)+", path):
            raise ConfigError(f"--allowed-paths {path}: give paths of engines, such as /v1/load_lora_adapter")
    return settings


def paths_of_models(text: str) -> dict[str, str]:
    """Return paths of tokenizers by model, from `MODEL=DIRECTORY,…` or JSON; raise `ConfigError` for anything else."""
    found, pairs = {}, [item.partition("=")[::2] for item in items(text)]
    if text.startswith("{"):
        with suppress(ValueError):
            pairs = list(json.loads(text).items())
    for model, path in pairs:
        if not model.strip() or not isinstance(path, str) or not path.strip():
            hint = "give MODEL=DIRECTORY, with the name that clients give the model"
            raise ConfigError(f"--tokenizers {model}={path or ''}: {hint}")
        found[model.strip()] = path.strip()
    return found


def items(text: str) -> list[str]:
    """Return what stands between commas."""
    return [item.strip() for item in text.split(",") if item.strip()]
