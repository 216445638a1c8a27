"""The sources of settings: overrides, the environment, a YAML file.

Errors are collected instead of raised, so that a user sees all of them at once.
"""

import difflib
import logging
import os
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from lmc.config.lmcache import (
    ALIASES,
    LOSSY,
    NESTED,
    PLUGIN,
    PLUGINS,
    feature_of,
    ignored,
    is_on,
    login_names,
    plugin_urls,
    with_login,
)
from lmc.config.remote_url import parse_remote_urls, split_urls
from lmc.errors import ConfigError

log = logging.getLogger(__name__)

CONFIG_FILES = ("LMC_CONFIG_FILE", "LMCACHE_CONFIG_FILE")
# Environment variables that are not settings; `lmc config` shows them after the settings.
VARIABLES = ("LMC_CHECK_INTEGRITY", "LMC_CONFIG_FILE", "LMC_KERNELS", "LMC_LOG_LEVEL")
# All environment variables with a setting's prefix that belong to other parts of lmc, or only to LMCache.
NO_SETTINGS = (
    *CONFIG_FILES, *VARIABLES, "LMC_ROUTER_*",  # `lmc router` checks these names
    "LMCACHE_USE_EXPERIMENTAL", "LMCACHE_TRACK_USAGE",
)  # fmt: skip
# Settings that earlier versions of lmc had, by name or by name and value, and the warning if one is given.
REMOVED: Mapping[str, str] = {
    "store_policy": "has no effect any more: a new chunk is written to every tier at once",
    "local_disk_serde": "has no effect any more: records on the disk are written as they are in memory",
    "blend_calibration": "has no effect any more: `lmc calibrate` prints settings, and turns nothing off",
    "blend_correction": "has no effect any more: it is a part of blend_method",
    "blend_learn_prefix": "has no effect any more: it is a part of blend_method",
    "log_requests": "has no effect any more: LMC_LOG_LEVEL=DEBUG logs a line for each request",
    "blend_preset": "is read as blend_method",
    "blend_strategy": "is read as blend_method; for deviation, this is cacheblend, which learns documents alone",
    # Both codecs are lossless. The codec planes makes records smaller, and lz4 alone does not.
    "remote_serde: lz4": "is read as planes; records in the codec lz4 are not used any more",
}
# Settings that earlier versions of lmc had, by name, and the settings that now have their values.
RENAMED: Mapping[str, str] = {"blend_preset": "blend_method", "blend_strategy": "blend_method"}
# Environment variables that Kubernetes sets in every pod for a Service whose name begins with lmc, and their values.
_ADDRESS, _NUMBER = r"[0-9a-fA-F.:]+", r"\d+"
OF_SERVICES = {
    r".*_SERVICE_HOST": _ADDRESS,
    r".*_SERVICE_PORT(_\w+)?": _NUMBER,
    r"\w*_PORT(_\d+_(TCP|UDP|SCTP))?": rf"(tcp|udp|sctp)://\[?{_ADDRESS}\]?:\d+",
    r".*_PORT_\d+_(TCP|UDP|SCTP)_PROTO": "tcp|udp|sctp",
    r".*_PORT_\d+_(TCP|UDP|SCTP)_PORT": _NUMBER,
    r".*_PORT_\d+_(TCP|UDP|SCTP)_ADDR": _ADDRESS,
}


# The errors of a text that is not YAML. A date such as 2024-99-99 raises ValueError, and deep nesting RecursionError.
YAML_ERRORS = (yaml.YAMLError, ValueError, RecursionError)


class Given(NamedTuple):
    """A value as written in a source, and the source."""

    value: object
    origin: str


class KeyTwice(yaml.YAMLError):
    """A mapping in YAML has a key twice."""


class UniqueKeys(yaml.SafeLoader):
    """Loads YAML as `yaml.safe_load` does, but raises `KeyTwice` instead of using the last value of a key."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Read a mapping."""
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if isinstance(key, yaml.ScalarNode) and key.value in lines:
                raise KeyTwice(f"{key.value} twice, in lines {lines[key.value]} and {line}: leave one of the two out")
            if isinstance(key, yaml.ScalarNode):
                lines[key.value] = line
        return node


@dataclass(slots=True)
class Source:
    """One source of settings."""

    own: dict[str, Given] = field(default_factory=dict)  # settings of lmc, by name
    foreign: dict[str, Given] = field(default_factory=dict)  # settings of LMCache that lmc does not have
    removed: dict[str, Given] = field(default_factory=dict)  # settings that earlier versions of lmc had
    problems: list[str] = field(default_factory=list)  # error messages, without values that may be passwords

    def read(self, written: Mapping[str, object], spellings: Mapping[str, str], origin: Callable[[str], str]) -> None:
        """Add the values that a source contains; `spellings` maps the source's spellings to lmc's setting names."""
        nested = []
        for key, value in written.items():
            entry, bare = Given(value, origin(key)), _bare(key)
            name = spellings.get(key) or self._alias(bare, spellings.values())
            if name == "remote_serde" and value in LOSSY:
                name, bare = None, f"remote_serde: {value}"
            if bare == "local_device" and str(value).startswith("file://") and "local_disk" in spellings.values():
                name = "local_disk"  # The first versions of LMCache had the disk in `local_device`.
            if name is None and bare == NESTED:
                nested.append(entry)
            elif name is None and bare in REMOVED:
                self.removed[bare] = entry
            elif name is None and (feature_of(bare) or ignored(bare)):
                self.foreign[bare] = entry
            elif name is None:
                self.problems.append(_unknown(key, spellings, entry.origin))
            elif name in self.own:  # for example by both "lmc.chunk_size" and "lmcache.chunk_size"
                before = self.own[name]
                twice = f"{name} = {shown(name, before.value)} ({before.origin}) is set again"
                self.problems.append(f"{twice}, to {shown(name, value)} ({entry.origin}): leave one of the two out")
            else:
                self.own[name] = self._translated(bare, entry)
        for entry in nested:  # Settings of the top level win over nested settings.
            self._read_nested(entry, set(spellings.values()))

    def _alias(self, bare: str, names: Collection[str]) -> str | None:
        name = ALIASES.get(bare) or RENAMED.get(bare)
        return name if name in names else None

    def _translated(self, bare: str, entry: Given) -> Given:
        """Return the value of a setting under its present name, and remember that it was given under an earlier one."""
        if bare not in RENAMED:
            return entry
        self.removed[bare] = entry
        return entry._replace(value="cacheblend") if entry.value == "deviation" else entry

    def _read_nested(self, given: Given, names: Collection[str]) -> None:
        """Add LMCache's nested mapping of settings. Settings that lmc does not know are ignored with a warning."""
        try:  # A text may be JSON, which is also valid YAML.
            nested = yaml.load(given.value, UniqueKeys) if isinstance(given.value, str) else given.value
        except KeyTwice as error:
            self.problems.append(f"{NESTED} ({given.origin}) has {error}")
            return
        except YAML_ERRORS:
            nested = given.value
        if not isinstance(nested, Mapping | None):
            self.problems.append(f"{NESTED} ({given.origin}) must be a mapping of settings")
            return
        origin = f"{given.origin}, in {NESTED}"
        more = {_bare(str(key)): value for key, value in (nested or {}).items()}
        if PLUGINS in self.foreign and (urls := plugin_urls(self.foreign[PLUGINS].value, more)):
            before = split_urls(self.own["remote_url"].value) if "remote_url" in self.own else []
            self.own["remote_url"] = Given([*before, *urls], self.foreign.pop(PLUGINS).origin)
            more = {bare: value for bare, value in more.items() if not bare.startswith(f"{PLUGIN}.")}
        if "remote_url" in self.own:
            value, where = self.own["remote_url"]
            urls = split_urls(value)
            self.own["remote_url"] = Given(" ".join(with_login(url, more) for url in urls), where)
            for name in [name for url in urls for name in login_names(url).values()]:
                more.pop(name, None)
        for bare, value in more.items():
            entry = Given(value, origin)
            own = bare if bare in names else self._alias(bare, names)
            if own:
                self.own.setdefault(own, self._translated(bare, entry))
            else:
                (self.removed if bare in REMOVED else self.foreign).setdefault(bare, entry)


SECRETS = ("admin_token", "encryption_key")  # settings whose values are not shown


def shown(name: str, value: object) -> str:
    """Return the value of a setting as text without passwords."""
    if name in SECRETS and value is not None:
        return "***"
    if name == "remote_url" and value is not None:  # A URL may contain a password.
        try:
            parse_remote_urls(" ".join(split_urls(value)))
        except ValueError:
            return "(not shown)"  # Any part of an invalid URL may be a password.
    text = str(value) if isinstance(value, Path) else repr(list(value) if isinstance(value, tuple) else value)
    return _without_login(text)


def shown_variable(name: str) -> tuple[str, str]:
    """Return the value of an environment variable as text, and its source, "environment" or "default"."""
    value = os.environ.get(name)
    if value is None:
        return "None", "default"
    return repr(value), "environment"


def shown_foreign(name: str, value: object) -> str:
    """Return the value of a setting of LMCache as text without anything that may be a password or a key."""
    secret = isinstance(value, Mapping | list) or re.search("passw|secret|token|key|credential", name)
    return "…" if secret else _without_login(repr(value))


def _without_login(text: str) -> str:
    """Return a text with the logins of URLs masked, also of URLs that are quoted in the query of another one."""
    text = re.sub(r"(?<=://)\S*@", "***@", text)
    return re.sub(r"((?::|%3A)(?:/|%2F){2})[^\s/?&]*%40", r"\1***%40", text, flags=re.IGNORECASE)


def log_level(default: int) -> int:
    """Return the log level from the environment (`LMC_LOG_LEVEL=DEBUG`), else the default."""
    name, known = os.environ.get("LMC_LOG_LEVEL", ""), logging.getLevelNamesMapping()
    if name and name.upper() not in known:
        log.warning("LMC_LOG_LEVEL = %s is not a log level; use one of %s", name, ", ".join(known))
    return known.get(name.upper(), default)


def set_up_log() -> None:
    """Log events of this process to standard error, from the level in `LMC_LOG_LEVEL` on, or else INFO."""
    logging.basicConfig(level=log_level(logging.INFO), format="%(asctime)s %(levelname)s %(message)s")


def checks_integrity() -> bool:
    """Return whether the environment (`LMC_CHECK_INTEGRITY=true`) requests regular checks of the bookkeeping."""
    return is_on(os.environ.get("LMC_CHECK_INTEGRITY"))


def read_overrides(written: Mapping[str, object], names: Collection[str], kind: str = "override") -> Source:
    """Return the settings that a program passes; their names may begin with `lmc.` or `lmcache.`."""
    found = Source()
    spellings = {prefix + name: name for prefix in ("", "lmc.", "lmcache.") for name in names}
    found.read(written, spellings, lambda key: f"{kind} {key}")
    return found


def read_environment(environ: Mapping[str, str], names: Collection[str], prefix: str) -> Source:
    """Return the settings from environment variables that begin with `prefix`."""
    found, spellings = Source(), {prefix + name.upper(): name for name in names}
    written = {
        key: value
        for key, value in environ.items()
        if key.startswith(prefix) and (key in spellings or not (_is_no_setting(key) or is_of_a_service(key, value)))
    }
    found.read(written, spellings, "environment {}".format)
    return found


def read_yaml(environ: Mapping[str, str], names: Collection[str]) -> Source:
    """Return the settings of the YAML file that the environment names.

    Raises `ConfigError` if the file cannot be read.
    """
    variable = next((name for name in CONFIG_FILES if environ.get(name)), None)
    if variable is None:
        return Source()
    path, found = Path(os.path.expanduser(environ[variable])), Source()
    document = read_mapping(path, f"YAML {path} (from {variable})", "chunk_size: 256")
    written = {str(key): value for key, value in document.items()}
    found.read(written, {name: name for name in names}, lambda _: f"YAML {path}")
    return found


def read_mapping(path: Path, given: str, example: str) -> dict[Any, Any]:
    """Return the mapping in a YAML file, which is empty for an empty file.

    Raises `ConfigError`, which begins with `given`, and has an `example` of a line if there is no mapping.
    """
    try:
        document = yaml.load(path.read_bytes(), UniqueKeys)
    except OSError as error:
        raise ConfigError(f"{given} cannot be read: {error.strerror}") from error
    except KeyTwice as error:
        raise ConfigError(f"{given} has {error}") from None
    except YAML_ERRORS as error:
        mark = getattr(error, "problem_mark", None)
        where = f" in line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or getattr(error, "reason", "a value that cannot be read")
        # The parser's message quotes the line, which may contain a password.
        raise ConfigError(f"{given} is not YAML: {problem}{where}") from None
    if not isinstance(document, dict | None):
        raise ConfigError(f"{given} holds a {type(document).__name__}; it must be a mapping such as '{example}'")
    return document or {}


def _is_no_setting(key: str) -> bool:
    return any(fnmatchcase(key, pattern) for pattern in NO_SETTINGS)


def is_of_a_service(key: str, value: str) -> bool:
    """Return whether Kubernetes has set a variable for a Service whose name looks like the prefix of a setting."""
    return any(re.fullmatch(name, key) and re.fullmatch(shape, value) for name, shape in OF_SERVICES.items())


def _bare(key: str) -> str:
    return re.sub(r"^(lmcache|lmc)[._]", "", key.lower())


def _unknown(key: str, spellings: Mapping[str, str], origin: str) -> str:
    """Return the error for an unknown key. It omits the value, which may be a password."""
    variable = next(iter(difflib.get_close_matches(key, VARIABLES, n=1, cutoff=0.85)), "")
    near = difflib.get_close_matches(_bare(key), list(spellings.values()), n=1)
    if spelt := variable or next((known for known, name in spellings.items() if name in near), ""):
        return f"unknown setting {key} ({origin}): did you mean {spelt}?"
    return f"unknown setting {key} ({origin}): `lmc config` lists all that there are"
