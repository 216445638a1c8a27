"""The routing policies by name. Each is one file, and its class says where it comes from."""

import inspect
from collections.abc import Callable
from typing import Any

from lmc.errors import ConfigError
from lmc.router.policies.approx_lru import ApproximateLru
from lmc.router.policies.block_hash import BlockHash
from lmc.router.policies.cache_aware import CacheAware
from lmc.router.policies.chwbl import BoundedLoads
from lmc.router.policies.documents import Documents
from lmc.router.policies.least_loaded import LeastLoaded
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


def make(name: str, **options: Any) -> Policy:
    """Return a new policy; raise `ConfigError` for a policy or an option that there is not, or a wrong value."""
    if name not in POLICIES:
        raise ConfigError(f"there is no policy {name!r}; there are {', '.join(POLICIES)}")
    known = inspect.signature(POLICIES[name]).parameters
    if unknown := [option for option in options if option not in known]:
        offered = f"its options are {', '.join(known)}" if known else "it has no options"
        raise ConfigError(f"the policy {name} has no option {', '.join(unknown)}; {offered}")
    return POLICIES[name](**options)
