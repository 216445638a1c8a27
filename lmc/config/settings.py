"""The settings: one frozen value that `Settings.load` makes once at start and passes down.

A field's name is the key in YAML, and in capitals after `LMC_` the environment variable. Names are LMCache's where the
meaning is the same, so its YAML files and environments work unchanged. The sources are, in rising priority: defaults, a
YAML file (`LMC_CONFIG_FILE`, else `LMCACHE_CONFIG_FILE`), the environment (`LMCACHE_*`, then `LMC_*`), and overrides
(an engine's extra options). Invalid settings raise `ConfigError` here, at the start. This module opens only the YAML
file, and is independent of model and device.
"""

import logging
import os
import re
from collections import ChainMap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, ValidationError

from lmc.config.lmcache import FEATURES, ON, feature_of, ignored, is_on, other_store
from lmc.config.remote_url import RemoteURL, parse_remote_urls, split_urls, why_wrong
from lmc.config.sources import (
    REMOVED,
    Given,
    Source,
    read_environment,
    read_overrides,
    read_yaml,
    shown,
    shown_foreign,
)
from lmc.errors import ConfigError
from lmc.keys import UNIT_SECONDS

log = logging.getLogger(__name__)


def _number(value: object) -> object:
    if isinstance(value, bool):  # pydantic would read `chunk_size: yes` as 1
        raise ValueError("use a number, not true or false")
    return value


def _optional(value: object) -> object:
    """Return None for the texts that mean "not set" in an environment variable."""
    return None if isinstance(value, str) and value.strip().lower() in {"", "none", "null"} else value


def _token(value: object) -> object:
    """Return a token without white space around it, because secret files often end with a newline."""
    if isinstance(value, str) and value.isspace():
        raise ValueError("white space only")
    return (value.strip() or None) if isinstance(value, str) else value


def _seconds(value: object) -> object:
    """Return the seconds of a text such as 90s, 30m, 12h or 7d."""
    match = re.fullmatch(r"(\d+)([smhd])", value.strip()) if isinstance(value, str) else None
    return int(match[1]) * UNIT_SECONDS[match[2]] if match else value


def _only(value: object) -> object:
    """Return the number in LMCache's list of one, which may be text: 0.15 for `[0.15]` and `"[0.15]"`."""
    if isinstance(value, str):
        return value.strip().removeprefix("[").removesuffix("]")
    return value[0] if isinstance(value, list | tuple) and len(value) == 1 else value


def _directory(value: object) -> object:
    if not isinstance(value, str | Path):
        return value
    text = str(value)
    path = os.path.expanduser(text.removeprefix("file://"))  # As in LMCache, file://kv is the relative path kv.
    if re.match(r"(?!file://)\w+:", text):
        raise ValueError("no scheme but file://")
    if path.startswith("~") or re.search(r",\s*(/|~|file:)", path):
        raise ValueError("an unknown user, or several directories")
    return Path(path)


def _socket(value: object) -> object:
    if not isinstance(value, str | Path):
        return value
    path = Path(str(value).removeprefix("unix://"))
    if not path.is_absolute():
        raise ValueError("no absolute path")
    return path


def _urls(value: object) -> object:
    """Return the URLs of a list as one text."""
    return _optional(" ".join(split_urls(value)) if isinstance(value, list | tuple) else value)


def _remotes(urls: str) -> str:
    parse_remote_urls(urls)
    return urls


Whole = Annotated[int, BeforeValidator(_number)]
Real = Annotated[float, BeforeValidator(_number), Field(allow_inf_nan=False)]
OTHER_CODECS = {"None": "none", "naive": "none", "lz4": "planes"}  # naive is LMCache's name for the codec none
Codec = Annotated[Literal["none", "planes"], BeforeValidator(lambda name: OTHER_CODECS.get(str(name), name))]

KERNELS = ("auto", "triton", "torch")  # values of LMC_KERNELS


class Settings(BaseModel):
    """All settings. A field's description completes the error "… must be"."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    # What is stored
    chunk_size: Whole = Field(256, ge=1, description="a whole number of tokens, at least 1")
    save_decode_cache: bool = Field(True, description="true or false")

    # Where chunks are stored, and how much memory or disk they may use (1 GB = 2**30 bytes)
    server: Annotated[Path | None, BeforeValidator(_socket), BeforeValidator(_optional)] = Field(
        None, description="the socket of a cache server (`lmc serve`): unix:///run/lmc.sock, or an absolute path"
    )
    max_local_cpu_size: Real = Field(5.0, gt=0, description="a number of GB above 0")
    max_local_device_size: Real = Field(0.0, ge=0, description="a number of GB, or 0 for no slab on the accelerator")
    local_disk: Annotated[Path | None, BeforeValidator(_directory), BeforeValidator(_optional)] = Field(
        None, description="one directory, written as a path or as file:///path"
    )
    max_local_disk_size: Real = Field(10.0, ge=0, description="a number of GB")
    remote_url: Annotated[Annotated[str, AfterValidator(_remotes)] | None, BeforeValidator(_urls)] = Field(
        None,
        repr=False,
        description="redis://[user:password@]host[:port][/db], rediss:// for TLS, unix:///path[?db=0], "
        "redis-cluster://host:port,host:port or redis-sentinel://host:port,host:port/service[/db]; rediss-… with TLS; "
        "mooncake://master:port; s3://bucket/prefix, gs://bucket/prefix, az://container/prefix, or "
        "file:///directory that hosts share, with credentials from the environment; or several of these, the nearest "
        "first",
    )
    remote_serde: Codec = Field("none", description="none (or naive, its other name) or planes")
    remote_deadline: Real = Field(0.5, gt=0, description="a number of seconds above 0")
    remote_ttl: Annotated[Whole, BeforeValidator(_seconds)] = Field(
        0,
        ge=0,
        description="a whole number of seconds, or a time such as 7d; 0 for chunks that stay until evicted",
    )
    remote_prefix: str = Field(
        "lmc",
        pattern=r"^[\w.:-]+$",
        description="letters, digits and . : _ - that begin the names of our keys in Redis or in a bucket",
    )
    encryption_key: Annotated[str | None, BeforeValidator(_token)] = Field(
        None, repr=False, description="a key of 32 bytes in base64, or the path of a file of keys"
    )
    document_share: Real = Field(
        0.5, ge=0, le=1, description="the share of memory and of the disk, from 0 to 1, that belongs to documents"
    )
    max_document_index_size: Real = Field(1.0, gt=0, description="a number of GB above 0")
    load_policy: Literal["auto", "always"] = Field(
        "auto", description="auto or always; to load nothing, leave local_disk and remote_url out"
    )
    load_deadline: Real = Field(2.0, gt=0, description="a number of seconds above 0")

    # Blending
    enable_blending: bool = Field(False, description="true or false")
    blend_special_str: str = Field(
        " # # ", pattern=r"\S", description="a separator with something other than spaces in it, such as ' # # '"
    )
    blend_method: Literal["union", "query", "head", "cacheblend"] = Field(
        "union", description="union, query, head or cacheblend"
    )
    blend_recompute_ratios: Annotated[Real, BeforeValidator(_only)] = Field(
        0.15, ge=0, le=1, description="one share from 0 to 1, as a number or a list of one"
    )
    blend_min_tokens: Whole = Field(256, ge=0, description="a whole number of tokens from 0 on")
    blend_learn: bool = Field(True, description="true or false")
    blend_find: Literal["known", "repeated", "separators"] = Field("known", description="known, repeated or separators")
    blend_min_run: Whole = Field(64, ge=48, description="a whole number of tokens from 48 on")

    # Administration
    admin: Annotated[str | None, BeforeValidator(_optional)] = Field(
        None, description="the address where an engine is administered: 127.0.0.1:9180, or unix:///run/lmc/admin.sock"
    )
    admin_token: Annotated[str | None, BeforeValidator(_token)] = Field(
        None, repr=False, description="text other than white space, in YAML between quotes if it has digits only"
    )
    document_events: Annotated[str | None, BeforeValidator(_optional)] = Field(
        None, description="the address where events of documents are published, such as tcp://*:5558"
    )

    _origins: dict[str, str] = PrivateAttr(default_factory=dict)

    def __init__(self, *sources: Source, **arguments: object) -> None:
        """Make settings from `arguments` and `sources`; the first source with a value wins, after `arguments`.

        Raises `ConfigError` with all errors at once.
        """
        fields = Settings.model_fields
        every = [read_overrides(arguments, fields, "argument"), *sources]
        given = ChainMap(*(source.own for source in every))
        foreign = dict(ChainMap(*(source.foreign for source in every)))
        problems = [problem for source in every for problem in source.problems] + list(_missing_features(foreign))
        try:
            super().__init__(**{name: given[name].value for name in fields if name in given})
        except ValidationError as error:
            # The text of pydantic adds types, and may contain a password.
            bad = dict.fromkeys(str(problem["loc"][0]) for problem in error.errors(include_input=False))
            problems += [_wrong_value(name, *given[name]) for name in bad]
        if not problems:
            self._origins = {name: given[name].origin if name in given else "default" for name in fields}
            problems = [
                f"{self._described(name)} contradicts {self._described(other)}: {why}"
                for name, other, why in _conflicts(self)
            ]
        if problems:
            raise ConfigError("\n".join(problems))
        removed = dict(ChainMap(*(source.removed for source in every)))
        removed |= {
            f"{name}: {entry.value}": entry for name, entry in given.items() if f"{name}: {entry.value}" in REMOVED
        }
        for name, entry in removed.items():
            log.warning("%s (%s) %s", name, entry.origin, REMOVED[name])
        if foreign:
            names = [f"{name} ({entry.origin}), as {_unused(name)}" for name, entry in foreign.items()]
            log.warning("lmc has no use for these settings of LMCache, and ignores them: %s", "; ".join(names))

    @classmethod
    def load(cls, overrides: Mapping[str, object] | None = None, *, environ: Mapping[str, str] | None = None) -> Self:
        """Return the settings of this process: overrides win over the environment, YAML and defaults, in this order.

        Keys of `overrides` may start with `lmc.` or `lmcache.`; the default of `environ` is `os.environ`.
        Raises `ConfigError`.
        """
        environ, names = os.environ if environ is None else environ, cls.model_fields
        return cls(
            read_overrides(overrides or {}, names),
            read_environment(environ, names, "LMC_"),
            read_environment(environ, names, "LMCACHE_"),
            read_yaml(environ, names),
            Source(problems=list(_wrong_variables(environ))),
        )

    @property
    def finds_known(self) -> bool:
        """Whether known documents are found anywhere in a prompt."""
        return self.enable_blending and self.blend_find != "separators"

    @property
    def remotes(self) -> list[RemoteURL]:
        """The addresses of the remote tiers, nearest first."""
        return parse_remote_urls(self.remote_url) if self.remote_url else []

    def origin(self, name: str) -> str:
        """Return the source of a setting's value as text; raise `KeyError` for an unknown setting."""
        return self._origins[name]

    def _described(self, name: str) -> str:
        return _described(name, getattr(self, name), self.origin(name))


def _described(name: str, value: object, origin: str) -> str:
    return f"{name} = {shown(name, value)} ({origin})"


def _conflicts(settings: Settings) -> Iterator[tuple[str, str, str]]:
    """Yield pairs of settings that contradict each other, with the reason."""
    if settings.server and settings.max_local_device_size:
        yield "max_local_device_size", "server", "a cache server keeps chunks in host memory; leave one of the two out"
    if settings.server and settings.encryption_key:
        yield "encryption_key", "server", "the cache server encrypts; give the key to it alone"
    if settings.local_disk and not settings.max_local_disk_size:
        yield "max_local_disk_size", "local_disk", "a disk tier needs more than 0 GB"


def _wrong_variables(environ: Mapping[str, str]) -> Iterator[str]:
    """Yield an error for each environment variable that is not a setting and has an invalid value."""
    kernels, checks = environ.get("LMC_KERNELS") or KERNELS[0], environ.get("LMC_CHECK_INTEGRITY")
    if kernels not in KERNELS:
        yield f"invalid LMC_KERNELS = {kernels}: use one of {', '.join(KERNELS)}"
    if is_on(checks) and str(checks).strip().lower() not in ON:
        yield f"invalid LMC_CHECK_INTEGRITY = {checks}: use true or false"


def _wrong_value(name: str, value: object, origin: str) -> str:
    if name == "remote_url" and (
        why := "; ".join(filter(None, map(other_store, split_urls(value)))) or why_wrong(value)
    ):
        return f"remote_url ({origin}): {why}"
    return f"{_described(name, value, origin)} must be {Settings.model_fields[name].description}"


def _missing_features(foreign: Mapping[str, Given]) -> Iterator[str]:
    """Yield an error for each feature of LMCache that is turned on and missing in lmc."""
    for feature in FEATURES:
        if any(name in foreign and is_on(foreign[name].value) for name in feature.switches):
            names = [name for name in foreign if feature_of(name) is feature]
            values = ", ".join(f"{name} = {shown_foreign(name, foreign[name].value)}" for name in names)
            where = ", ".join(dict.fromkeys(foreign[name].origin for name in names))
            yield f"lmc does not have {feature.title}, as LMCache does: {feature.instead}. Remove {values} ({where})"


def _unused(name: str) -> str:
    feature = feature_of(name)
    off = f"{feature.title} is not turned on" if feature else "lmc does not know it"
    return ignored(name) or off
