"""Parses the URL of a Redis. It opens no connection, and no password appears in a message or a repr."""

import os
import re
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit

REDIS_PORT, SENTINEL_PORT = 6379, 26379
KINDS = {"redis": "single", "unix": "unix", "redis-cluster": "cluster", "redis-sentinel": "sentinel"}  # by URL scheme
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
    options: tuple[tuple[str, str | bool], ...] = ()  # TLS options with redis-py's names
    place: ClassVar[str] = "redis"  # the name of the tier; see `lmc.storage.places`

    def __str__(self) -> str:
        """Return the address without the login."""
        return f"Redis at {self.path or ', '.join(map(str, self.hosts))}"


def parse_redis_url(url: str) -> RedisURL:
    """Return the parsed URL of a Redis.

    Raises `ValueError` for an invalid URL. The message contains neither the URL nor its password.
    """
    try:
        split = urlsplit(url)
        scheme = re.sub("^(valkey|resp)", "redis", split.scheme)  # Valkey speaks the protocol of Redis.
        tls = scheme.startswith("rediss")
        kind = KINDS[scheme.replace("rediss", "redis")]
        login, _, places = split.netloc.rpartition("@")
        username, _, password = login.partition(":")
        path = unquote(split.path)
        query = parse_qsl(split.query, keep_blank_values=True, strict_parsing=bool(split.query))
        names = [name for name in path.split("/") if name and kind != "unix"]
        service = _service(names) if kind == "sentinel" else ""
        (db,) = [*names, *(value for name, value in query if name == "db")] or ["0"]
        standard = SENTINEL_PORT if kind == "sentinel" else REDIS_PORT
        hosts = () if kind == "unix" else tuple(_address(place.strip(), standard) for place in places.split(","))
        if len(hosts) > 1 and split.scheme.startswith("valkey"):
            kind = "cluster"
        if kind == "unix" and (places or not path.startswith("/")):
            raise ValueError("no path")
        if not db.isdecimal() or (kind == "cluster" and db != "0") or (kind == "single" and len(hosts) > 1):
            raise ValueError("no database, or none that a cluster has, or several hosts")
        return RedisURL(
            kind=kind,
            hosts=hosts,
            path=path if kind == "unix" else "",
            db=int(db),
            service=service,
            username=unquote(username) or None,
            password=unquote(password) or None,
            tls=tls,
            options=tuple((name, _option(name, value, tls)) for name, value in query if name != "db"),
        )
    except (ValueError, KeyError, IndexError):
        raise ValueError("no URL of a Redis") from None


def _service(names: list[str]) -> str:
    """Remove a master's name from the parts of a path and return it.

    Without one, the default is LMCache's environment variable `REDIS_SERVICE_NAME`, else `redismaster`.
    """
    if names and not names[0].isdecimal():
        return names.pop(0)
    return os.environ.get("REDIS_SERVICE_NAME") or "redismaster"


def _address(place: str, standard: int) -> Address:
    split = urlsplit(f"//{place}")
    port = standard if split.port is None else split.port
    if not split.hostname or not port or split.path or split.query or split.username is not None:
        raise ValueError("no host")
    return Address(split.hostname, port)


def _option(name: str, value: str, tls: bool) -> str | bool:
    if not tls or name not in TLS_OPTIONS or not value or (name == "ssl_cert_reqs" and value not in REQUIREMENTS):
        raise ValueError("an option that means nothing here")
    return {"true": True, "false": False}[value.lower()] if name == "ssl_check_hostname" else value
