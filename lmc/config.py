"""The settings: one frozen value, which `Settings.load` makes once at start, and which is passed down from there.

Names are LMCache's where the meaning is the same, so that its YAML files and environments work unchanged. Sources, of
which later ones win, are: defaults, a YAML file (`LMC_CONFIG_FILE`, else `LMCACHE_CONFIG_FILE`), the environment
(`LMCACHE_*`, then `LMC_*`), and overrides (an engine's extra options). Settings that cannot work raise `ConfigError`
here, and not later. This module opens no file but the YAML, and knows no model and no device.
"""

import difflib
import json
import logging
import os
import re
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, Self, get_args

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, ValidationError

from lmc.errors import ConfigError
from lmc.lmcache_compat import IGNORED, INSTEAD
from lmc.redis_url import parse_redis_url

log = logging.getLogger(__name__)

CACHEBLEND: Mapping[str, object] = {  # `blend_preset: cacheblend` means the published method
    "blend_strategy": "deviation",
    "blend_check_layers": (1,),
    "blend_recompute_ratios": (0.15,),
    "blend_correction": "none",
    "blend_learn_prefix": "none",
}
SECRET = frozenset({"remote_url"})  # settings that may hold a password
CONFIG_FILES = ("LMC_CONFIG_FILE", "LMCACHE_CONFIG_FILE")
# Variables that begin like a setting's and belong to other parts of lmc, or to LMCache alone.
NO_SETTINGS = (
    *CONFIG_FILES, "LMC_LOG_*", "LMC_SERVER", "LMC_ADMIN*", "LMC_KERNELS", "LMC_ROUTER_*", "LMC_UNTESTED_VLLM",
    "LMC_CHECK_LOCKS", "LMCACHE_USE_EXPERIMENTAL", "LMCACHE_TRACK_USAGE", "LMCACHE_LOG_LEVEL",
)  # fmt: skip


def _number(value: object) -> object:
    if isinstance(value, bool):  # pydantic would read `chunk_size: yes` as 1
        raise ValueError("a number is wanted, not true or false")
    return value


def _optional(value: object) -> object:
    """Return None for the texts with which an environment says "not set"."""
    return None if isinstance(value, str) and value.strip().lower() in {"", "none", "null"} else value


def _items(value: object) -> object:
    """Return `1`, `"1,2"`, `"[1, 2]"` and `[1, 2]` as lists."""
    if isinstance(value, str):
        text = value.strip()
        return json.loads(text) if text.startswith("[") else [item.strip() for item in text.split(",")]
    return [value] if isinstance(value, int | float) else value


def _directory(value: object) -> object:
    if not isinstance(value, str | Path):
        return value
    text = str(value)
    path = os.path.expanduser(text.removeprefix("file://"))
    if re.match(r"(?!file://[/~])\w+:", text):  # file://kv names a host called kv; file:///kv is the directory
        raise ValueError("no scheme but file://")
    if path.startswith("~") or re.search(r",\s*(/|~|file:)", path):
        raise ValueError("nobody's home, or several directories")
    return Path(path)


def _redis(url: str) -> str:
    parse_redis_url(url)
    return url


def _rising(layers: tuple[int, ...]) -> tuple[int, ...]:
    if any(b <= a for a, b in pairwise(layers)):
        raise ValueError("not strictly increasing")
    return layers


def _falling(ratios: tuple[float, ...]) -> tuple[float, ...]:
    if any(b > a for a, b in pairwise(ratios)):
        raise ValueError("increasing")
    return ratios


Whole = Annotated[int, BeforeValidator(_number)]
Real = Annotated[float, BeforeValidator(_number), Field(allow_inf_nan=False)]
Layers = Annotated[tuple[Annotated[Whole, Field(ge=1)], ...], Field(min_length=1), AfterValidator(_rising)]
Ratios = Annotated[tuple[Annotated[Real, Field(ge=0, le=1)], ...], Field(min_length=1), AfterValidator(_falling)]
Thresholds = tuple[Annotated[Real, Field(ge=0)], ...]
CODEC_WANTED = "none (or naive, its other name), lz4 or planes"
# LMCache's name for "none" is "naive".
Codec = Annotated[Literal["none", "lz4", "planes"], BeforeValidator(lambda name: "none" if name == "naive" else name)]
Strategy = Literal["query", "deviation", "head", "union", "random", "all", "none"]


class Settings(BaseModel):
    """All settings. A field's description completes the error "… must be"."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    # What is stored
    chunk_size: Whole = Field(256, ge=1, description="a whole number of tokens, at least 1")
    save_unfull_chunk: bool = Field(True, description="true or false")
    save_decode_cache: bool = Field(True, description="true or false")

    # Where, and how much of it (a GB is 2**30 bytes)
    max_local_cpu_size: Real = Field(5.0, gt=0, description="a number of GB above 0")
    max_local_device_size: Real = Field(0.0, ge=0, description="a number of GB, or 0 for no slab on the accelerator")
    local_disk: Annotated[Path | None, BeforeValidator(_directory), BeforeValidator(_optional)] = Field(
        None, description="one directory, written as a path or as file:///path"
    )
    max_local_disk_size: Real = Field(10.0, ge=0, description="a number of GB")
    local_disk_serde: Codec = Field("none", description=CODEC_WANTED)
    remote_url: Annotated[Annotated[str, AfterValidator(_redis)] | None, BeforeValidator(_optional)] = Field(
        None,
        repr=False,
        description="redis://[user:password@]host[:port][/db], rediss:// for TLS, unix:///path[?db=0], "
        "redis-cluster://host:port,host:port or redis-sentinel://host:port,host:port/service[/db]; rediss-… with TLS",
    )
    remote_serde: Codec = Field("none", description=CODEC_WANTED)
    remote_deadline: Real = Field(0.5, gt=0, description="a number of seconds above 0")
    remote_ttl: Whole = Field(0, ge=0, description="a whole number of seconds, or 0 for chunks that stay until evicted")
    remote_prefix: str = Field(
        "lmc",
        pattern=r"^[\w.:-]+$",
        description="letters, digits and . : _ - that begin the names of our keys in Redis",
    )
    store_policy: Literal["write_through", "write_back"] = Field(
        "write_through", description="write_through or write_back"
    )
    load_policy: Literal["auto", "always", "never"] = Field(
        "auto", description="auto (load what is faster loaded than computed), always, or never from tiers below memory"
    )
    load_deadline: Real = Field(2.0, gt=0, description="a number of seconds above 0")

    # Blending
    enable_blending: bool = Field(False, description="true or false")
    blend_preset: Annotated[Literal["cacheblend"] | None, BeforeValidator(_optional)] = Field(
        None, description="cacheblend, or left out"
    )
    blend_special_str: str = Field(
        " # # ", pattern=r"\S", description="a separator with something other than spaces in it, such as ' # # '"
    )
    blend_strategy: Strategy = Field("union", description=f"one of {', '.join(get_args(Strategy))}")
    blend_check_layers: Annotated[Layers, BeforeValidator(_items)] = Field(
        (1,), description="increasing layer numbers from 1 on (re-rotated keys never deviate at layer 0)"
    )
    blend_recompute_ratios: Annotated[Ratios, BeforeValidator(_items)] = Field(
        (0.15,), description="a share from 0 to 1 for each check layer, none larger than the one before"
    )
    blend_thresholds: Annotated[Thresholds | None, BeforeValidator(_items), BeforeValidator(_optional)] = Field(
        None, description="a number from 0 on for each check layer, or left out"
    )
    blend_correction: Literal["shift", "none"] = Field(
        "shift", description="shift (other tokens change as recomputed ones of their document that are alike) or none"
    )
    blend_learn_prefix: Literal["primer", "sink", "none"] = Field(
        "primer", description="primer (documents are learned behind a neutral one), sink (the first token) or none"
    )
    blend_calibration: Literal["obey", "ignore"] = Field(
        "obey", description="obey (a model for which `lmc calibrate` said no is not blended) or ignore"
    )
    blend_min_tokens: Whole = Field(256, ge=0, description="a whole number of tokens from 0 on")
    blend_learn: bool = Field(True, description="true or false")

    _origins: dict[str, str] = PrivateAttr(default_factory=dict)

    def __init__(self, *sources: "Source", **arguments: object) -> None:
        """Make settings from `arguments` and then `sources`, of which the first that has a value wins."""
        given = ChainMap(_source(arguments, _plain(), "argument {}".format), *sources)
        if "blend_preset" in given and given["blend_preset"].value == "cacheblend":
            given.maps.append({name: Given(value, "preset cacheblend") for name, value in CACHEBLEND.items()})
        fields = Settings.model_fields
        try:
            super().__init__(**{name: given[name].value for name in fields if name in given})
        except ValidationError as error:
            bad = dict.fromkeys(str(problem["loc"][0]) for problem in error.errors(include_input=False))
            found = [f"{_described(name, *given[name])} must be {fields[name].description}" for name in bad]
            raise ConfigError("; ".join(found)) from None  # pydantic's own text adds types, and could add a password
        self._origins = {name: given[name].origin if name in given else "default" for name in fields}
        found = [
            f"{self._described(name)} contradicts {self._described(other)}: {why}"
            for name, other, why in _conflicts(self)
        ]
        if found:
            raise ConfigError("; ".join(found))
        ignored = [f"{name} ({given[name].origin}), as {why}" for name, why in IGNORED.items() if name in given]
        if ignored:
            log.warning("lmc has no use for these settings of LMCache, and ignores them: %s", "; ".join(ignored))

    @classmethod
    def load(cls, overrides: Mapping[str, object] | None = None, *, environ: Mapping[str, str] | None = None) -> Self:
        """Return the settings of this process: overrides before environment before YAML before defaults.

        Keys of `overrides` may start with `lmc.` or `lmcache.`; `environ` is by default `os.environ`. Raises
        `ConfigError`.
        """
        environ = os.environ if environ is None else environ
        dotted = {prefix + name: name for prefix in ("", "lmc.", "lmcache.") for name in _plain()}
        return cls(
            _source(overrides or {}, dotted, "override {}".format),
            _environment(environ, "LMC_"),
            _environment(environ, "LMCACHE_"),
            _yaml_file(environ),
        )

    def origin(self, name: str) -> str:
        """Return in words where the value of `name` came from; raise `KeyError` if there is no such setting."""
        return self._origins[name]

    def _described(self, name: str) -> str:
        return _described(name, getattr(self, name), self.origin(name))


def shown(name: str, value: object) -> str:
    """Return the value of a setting as a person may see it, without passwords."""
    if name in SECRET and value is not None:
        try:
            parse_redis_url(str(value))
        except ValueError:
            return "(not shown)"  # Any part of it may be a password.
    text = str(value) if isinstance(value, Path) else repr(list(value) if isinstance(value, tuple) else value)
    return re.sub(r"(?<=://)\S*@", "***@", text)


def _described(name: str, value: object, origin: str) -> str:
    return f"{name} = {shown(name, value)} ({origin})"


def _conflicts(settings: Settings) -> Iterator[tuple[str, str, str]]:
    """Return pairs of settings that cannot work together, and why."""
    if settings.enable_blending and not settings.save_unfull_chunk:
        yield "save_unfull_chunk", "enable_blending", "blending needs it; leave it out or set it to true"
    for name, value in CACHEBLEND.items():
        if settings.blend_preset and getattr(settings, name) != value:
            yield name, "blend_preset", f"the preset means {name} = {shown(name, value)}; leave one of the two out"
    if settings.local_disk and not settings.max_local_disk_size:
        yield "max_local_disk_size", "local_disk", "a disk tier needs more than 0 GB"
    ratios, thresholds = settings.blend_recompute_ratios, settings.blend_thresholds
    for name, values in (("blend_recompute_ratios", ratios), ("blend_thresholds", thresholds)):
        if values is not None and len(values) != len(settings.blend_check_layers):
            yield name, "blend_check_layers", "give one number for each check layer"
    if settings.blend_strategy != "deviation":
        if len(ratios) > 1:
            yield "blend_recompute_ratios", "blend_strategy", "only the strategy deviation takes several ratios"
        if thresholds is not None:
            yield "blend_thresholds", "blend_strategy", "only the strategy deviation takes thresholds"


class Given(NamedTuple):
    """A value as it was written, and where it was written."""

    value: object
    origin: str


Source = dict[str, Given]  # by the name of the setting


def _source(written: Mapping[str, object], spellings: Mapping[str, str], origin: Callable[[str], str]) -> Source:
    """Return one source of settings; raise `ConfigError` for keys that name no setting, or the same one twice."""
    unknown = [_unknown(key, spellings, origin(key)) for key in written if key not in spellings]
    if unknown:
        raise ConfigError("; ".join(unknown))
    found: Source = {}
    for key, value in written.items():
        name, entry = spellings[key], Given(value, origin(key))
        if name in found:  # as with "lmc.chunk_size" and "lmcache.chunk_size"
            twice = f"{_described(name, *found[name])} is set again"
            raise ConfigError(f"{twice}, to {shown(name, value)} ({entry.origin}): leave one of the two out")
        found[name] = entry
    return found


def _plain() -> dict[str, str]:
    return {name: name for name in (*Settings.model_fields, *IGNORED)}


def _environment(environ: Mapping[str, str], prefix: str) -> Source:
    found = {key: value for key, value in environ.items() if key.startswith(prefix)}
    written = {key: found[key] for key in found if not any(fnmatchcase(key, pattern) for pattern in NO_SETTINGS)}
    return _source(written, {prefix + name.upper(): name for name in _plain()}, "environment {}".format)


def _yaml_file(environ: Mapping[str, str]) -> Source:
    variable = next((name for name in CONFIG_FILES if environ.get(name)), None)
    if variable is None:
        return {}
    path = Path(os.path.expanduser(environ[variable]))
    origin = f"YAML {path}"
    try:
        document = yaml.safe_load(path.read_bytes())
    except OSError as error:
        wanted = "give the path of a readable YAML file, or unset the variable"
        raise ConfigError(f"{variable} = {path} (environment): {error.strerror}; {wanted}") from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date such as 2024-99-99
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or getattr(error, "reason", "a value that cannot be read")
        # The parser's own text quotes the line, which may hold a password.
        raise ConfigError(f"{origin}{where} (from {variable}) is no YAML: {problem}") from None
    if not isinstance(document, dict | None):
        kind = type(document).__name__
        raise ConfigError(f"{origin} (from {variable}) holds a {kind}; it must be a mapping such as 'chunk_size: 256'")
    return _source({str(key): value for key, value in (document or {}).items()}, _plain(), lambda _: origin)


def _unknown(key: str, spellings: Mapping[str, str], origin: str) -> str:
    """Return the error for a key that names no setting. It leaves out the value, which may be a password."""
    name = re.sub(r"^(lmcache|lmc)[._]", "", key.lower())
    instead = next((text for pattern, text in INSTEAD.items() if re.fullmatch(pattern, name)), None)
    if instead:
        return f"{key} ({origin}) is a setting of LMCache that lmc does not have: {instead}"
    near = difflib.get_close_matches(name, Settings.model_fields, n=1)
    if near:
        spelt = next(known for known, field in spellings.items() if field == near[0])
        return f"unknown setting {key} ({origin}): did you mean {spelt}?"
    return f"unknown setting {key} ({origin}): there are {', '.join(Settings.model_fields)}"
