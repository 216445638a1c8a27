"""Parses the URL of a Redis. It makes no connection, and no password appears in a message or a repr."""

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple, NoReturn
from urllib.parse import parse_qsl, unquote, urlsplit

REDIS_PORT, SENTINEL_PORT = 6379, 26379
SCHEMES = MappingProxyType(
    {
        "redis": ("single", False),
        "rediss": ("single", True),
        "unix": ("unix", False),
        "redis-cluster": ("cluster", False),
        "rediss-cluster": ("cluster", True),
        "redis-sentinel": ("sentinel", False),
        "rediss-sentinel": ("sentinel", True),
    }
)
TLS_OPTIONS = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs", "ssl_check_hostname")
REQUIREMENTS = ("required", "optional", "none")


class Address(NamedTuple):
    """A host to connect to."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisURL:
    """The address of a Redis server, cluster, or group of sentinels."""

    kind: str  # "single", "unix", "cluster" or "sentinel"
    hosts: tuple[Address, ...] = ()
    path: str = ""
    db: int = 0
    service: str = ""  # the name by which sentinels know the master
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    tls: bool = False
    options: tuple[tuple[str, str | bool], ...] = ()  # of TLS, by redis-py's names

    def __str__(self) -> str:
        """Return the address without the login."""
        return f"Redis at {self.path or ', '.join(map(str, self.hosts))}"


def parse_redis_url(url: str) -> RedisURL:
    """Return what `url` names; raise `ValueError`, without the URL and its password, if it names no Redis."""
    try:
        split = urlsplit(url)
        kind, tls = SCHEMES[split.scheme]
        query = dict(parse_qsl(split.query, keep_blank_values=True, strict_parsing=bool(split.query)))
        login, _, places = split.netloc.rpartition("@")
        username, _, password = login.partition(":")
        db = query.pop("db", None)
        path, service = unquote(split.path), ""
        if kind == "unix":
            if places or not path.startswith("/"):
                raise ValueError("no path")
        else:
            names = [name for name in path.split("/") if name]
            if kind == "sentinel":
                service, names = names[0], names[1:]
            if names:
                db, names = names[0] if db is None else _refuse("two databases"), names[1:]
            if names or (kind == "cluster" and db not in (None, "0")):
                raise ValueError("a path that means nothing here")
            path = ""
        standard = SENTINEL_PORT if kind == "sentinel" else REDIS_PORT
        hosts = () if kind == "unix" else tuple(_address(place, standard) for place in places.split(","))
        if len(hosts) > 1 and kind == "single":
            raise ValueError("several hosts")
        return RedisURL(
            kind=kind,
            hosts=hosts,
            path=path,
            db=_whole(db or "0"),
            service=service,
            username=unquote(username) or None,
            password=unquote(password) or None,
            tls=tls,
            options=tuple((name, _option(name, value, tls)) for name, value in query.items()),
        )
    except (ValueError, KeyError, IndexError):
        raise ValueError("no URL of a Redis") from None


def _address(place: str, standard: int) -> Address:
    split = urlsplit(f"//{place}")
    if not split.hostname or split.path or split.query or split.username is not None:
        raise ValueError("no host")
    return Address(split.hostname, standard if split.port is None else split.port or _refuse("port 0"))


def _option(name: str, value: str, tls: bool) -> str | bool:
    if not tls or name not in TLS_OPTIONS or not value:
        raise ValueError("an option that means nothing here")
    if name == "ssl_check_hostname":
        return {"true": True, "false": False}[value.lower()]
    if name == "ssl_cert_reqs" and value not in REQUIREMENTS:
        raise ValueError("no requirement")
    return value


def _whole(text: str) -> int:
    if not text.isdecimal():
        raise ValueError("no number")
    return int(text)


def _refuse(why: str) -> NoReturn:
    raise ValueError(why)
