"""The routing policies by name. Each is one file, and its class says where it comes from."""

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from lmc.errors import ConfigError
from lmc.router.policies.approx_lru import ApproximateLru
from lmc.router.policies.block_hash import BlockHash
from lmc.router.policies.cache_aware import LOG_OF_2025_06, PYTHON_ARGUMENTS, CacheAware
from lmc.router.policies.chwbl import BoundedLoads
from lmc.router.policies.documents import Documents
from lmc.router.policies.least_loaded import LeastLoaded
from lmc.router.policies.options import Plain, check
from lmc.router.policies.power_of_two import PowerOfTwo
from lmc.router.policies.precise import Precise
from lmc.router.policies.prefix_hash_trie import PrefixHashTrie
from lmc.router.policies.random_engine import RandomEngine
from lmc.router.policies.round_robin import RoundRobin
from lmc.router.policies.session import SessionAffinity
from lmc.router.policies.simhash import SimHash
from lmc.router.policy import Policy

POLICIES: dict[str, Callable[..., Policy]] = {
    "documents": Documents,
    "round_robin": RoundRobin,
    "random": RandomEngine,
    "least_loaded": LeastLoaded,
    "power_of_two": PowerOfTwo,
    "session": SessionAffinity,
    "prefix_hash_trie": PrefixHashTrie,
    "cache_aware": CacheAware,
    "simhash": SimHash,
    "chwbl": BoundedLoads,
    "block_hash": BlockHash,
    "approx_lru": ApproximateLru,
    "precise": Precise,
}


PRESETS: dict[str, dict[str, Mapping[str, Any]]] = {
    "cache_aware": {"python_arguments": PYTHON_ARGUMENTS, "log_of_2025_06": LOG_OF_2025_06},
}


def make(name: str, **options: Any) -> Policy:
    """Return a new policy; raise `ConfigError` for a policy or an option that there is not, or a wrong value."""
    if name not in POLICIES:
        raise ConfigError(f"there is no policy {name!r}; there are {', '.join(POLICIES)}")
    _known(name, options, inspect.signature(POLICIES[name]).parameters)
    return POLICIES[name](**options)


def from_command_line(name: str, options: Mapping[str, Any]) -> Policy:
    """Return a new policy. Its options may be a preset and its exceptions; what a command line cannot say is none."""
    given, presets = dict(options), PRESETS.get(name, {})
    signature = inspect.signature(POLICIES[name], eval_str=True).parameters if name in POLICIES else {}
    kinds = {option: kind for option, one in signature.items() if (kind := Plain.of(one.annotation)) is not None}
    if name in POLICIES:
        _known(name, given, [*kinds, *(("preset",) if presets else ())])
    preset = given.pop("preset", None)
    if preset is not None and preset not in presets:
        raise ConfigError(f"preset = {preset!r}: the policy {name} has {', '.join(presets)}")
    for option, value in given.items():
        if option in kinds:
            check(kinds[option].takes(value), option, value, kinds[option].words)
    return make(name, **{**presets.get(preset, {}), **given})


def _known(name: str, options: Iterable[str], known: Collection[str]) -> None:
    if unknown := [option for option in options if option not in known]:
        offered = f"its options are {', '.join(known)}" if known else "it has no options"
        raise ConfigError(f"the policy {name} has no option {', '.join(unknown)}; {offered}")
