"""The routing policies by name. A policy is imported when it is named.

The policies for a server are in this folder. Those in `published/` are other routers' policies, kept for comparison.
The docstring of each class names its source.
"""

import inspect
from collections.abc import Collection, Iterable, Mapping
from importlib import import_module
from types import UnionType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args, get_origin

from lmc.errors import ConfigError

if TYPE_CHECKING:
    from lmc.router.policies.base import Policy

POLICIES = {
    "documents": "documents.Documents",
    "precise": "precise.Precise",
    "round_robin": "simple.RoundRobin",
    "random": "simple.RandomEngine",
    "least_loaded": "simple.LeastLoaded",
    "power_of_two": "simple.PowerOfTwo",
    "session": "simple.SessionAffinity",
    "prefix_hash_trie": "published.prefix_hash_trie.PrefixHashTrie",
    "cache_aware": "published.cache_aware.CacheAware",
    "simhash": "published.simhash.SimHash",
    "chwbl": "published.chwbl.BoundedLoads",
    "block_hash": "published.block_hash.BlockHash",
    "approx_lru": "published.approx_lru.ApproximateLru",
}


def policy_class(name: str) -> "type[Policy]":
    """Import the class of a policy. Raises `ConfigError` if the name is unknown."""
    if name not in POLICIES:
        raise ConfigError(f"unknown policy {name!r}: use one of {', '.join(POLICIES)}")
    module, _, kind = POLICIES[name].rpartition(".")
    policy: type[Policy] = getattr(import_module(f"{__name__}.{module}"), kind)
    return policy


def make(name: str, **options: Any) -> "Policy":
    """Return a new policy. Raises `ConfigError` for an unknown policy or option, or an invalid value."""
    kind = policy_class(name)
    _check_names(name, options, inspect.signature(kind).parameters)
    return kind(**options)


def from_command_line(name: str, options: Mapping[str, Any]) -> "Policy":
    """Return a new policy from options that are numbers or words.

    The option `preset` names a set of values, which the other options override. Raises `ConfigError` as `make` does.
    """
    kind, values = policy_class(name), dict(options)
    parameters = inspect.signature(kind, eval_str=True).parameters.items()
    plain = {
        option: plain_option
        for option, parameter in parameters
        if (plain_option := PlainOption.of(parameter.annotation)) is not None
    }
    _check_names(name, values, [*plain, *(("preset",) if kind.presets else ())])
    preset = values.pop("preset", None)
    if preset is not None and preset not in kind.presets:
        raise ConfigError(f"the policy {name} has no preset {preset!r}; use {' or '.join(kind.presets)}")
    for option, value in values.items():
        if option in plain and not plain[option].takes(value):
            raise ConfigError(f"{option} = {value!r} is invalid: use {plain[option].words}")
    return make(name, **{**kind.presets.get(preset, {}), **values})


class PlainOption(NamedTuple):
    """The types of an option that a command line can express as a number or a word."""

    types: tuple[type, ...]

    @classmethod
    def of(cls, annotation: Any) -> "PlainOption | None":
        """Return the types of an annotated option; None if it takes any other type, such as a clock."""
        parts = get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
        kinds = tuple(type(get_args(part)[0]) if get_origin(part) is Literal else part for part in parts)
        return cls(kinds) if set(kinds) <= {int, float, str, type(None)} else None

    def takes(self, value: object) -> bool:
        """Return whether a value has one of these types; an integer is a valid float."""
        return type(value) in self.types or (type(value) is int and float in self.types)

    @property
    def words(self) -> str:
        """What the option takes, in words for an error."""
        return "a number" if float in self.types else "a whole number" if int in self.types else "a word"


def _check_names(policy: str, options: Iterable[str], names: Collection[str]) -> None:
    if unknown := [option for option in options if option not in names]:
        offered = f"its options are {', '.join(names)}" if names else "it has no options"
        raise ConfigError(f"the policy {policy} has no option {', '.join(unknown)}; {offered}")
