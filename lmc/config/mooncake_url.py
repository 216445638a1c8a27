"""Parses the URL of a Mooncake Store. It opens no connection. The options have the names of Mooncake's own settings."""

import re
from dataclasses import dataclass, field, fields
from typing import ClassVar
from urllib.parse import parse_qsl, urlsplit

SCHEMES = ("mooncake", "mooncakestore")  # the second is LMCache's
UNITS = {"": 1, "kb": 1 << 10, "mb": 1 << 20, "gb": 1 << 30}
MASTER_PORT = 50051
WRITTEN = "a Mooncake store is written as mooncake://master:50051?protocol=tcp"


@dataclass(frozen=True, slots=True, kw_only=True)
class MooncakeURL:
    """The address of the master of a Mooncake Store, and how this process takes part."""

    master: str
    port: int = MASTER_PORT
    protocol: str = "tcp"  # or "rdma"
    device_name: str = ""  # network devices for RDMA, with commas
    metadata_server: str = field(default="P2PHANDSHAKE", repr=False)  # It may have a password.
    local_hostname: str = ""  # the name or address of this host for the others; empty for that on the way to the master
    global_segment_size: int = 0  # bytes of memory that this process gives to the store
    local_buffer_size: int = 16 << 20
    replica_num: int = 1  # hosts that keep a copy of a record
    soft_pin: int = 0  # With 1, the store evicts records of documents after all others.
    admin_port: int = 9003  # of the master's own HTTP server, which lists the records
    place: ClassVar[str] = "mooncake"  # the name of the tier; see `lmc.storage.places`

    @property
    def master_address(self) -> str:
        """The master's host and port."""
        return f"{self.master}:{self.port}"

    def __str__(self) -> str:
        return f"Mooncake store at {self.master_address}"


OPTIONS = {one.name: one.type for one in fields(MooncakeURL) if one.name not in ("master", "port")}


def parse_mooncake_url(url: str) -> MooncakeURL:
    """Return the parsed URL of a Mooncake Store.

    Raises `ValueError` for an invalid URL. The message does not contain the URL.
    """
    split = urlsplit(url.strip())
    if not split.hostname or "@" in split.netloc or split.path not in ("", "/"):
        raise ValueError(WRITTEN)
    given = dict(parse_qsl(split.query, keep_blank_values=True))
    given = {{"device": "device_name"}.get(name, name): value for name, value in given.items()}  # LMCache's name
    if unknown := sorted(given.keys() - OPTIONS.keys()):
        known = ", ".join(sorted(OPTIONS))
        raise ValueError(f"unknown options of a Mooncake store: {', '.join(unknown)}; there are {known}")
    try:
        port = split.port or MASTER_PORT
    except ValueError:
        raise ValueError(WRITTEN) from None
    options = {name: _size(name, value) if OPTIONS[name] is int else value for name, value in given.items()}
    return MooncakeURL(master=split.hostname, port=port, **options)  # type: ignore[arg-type]


def _size(name: str, value: str) -> int:
    number = re.fullmatch(r"([0-9]+)\s*(kb|mb|gb|)", value.strip().lower())
    if not number:
        raise ValueError(f"{name} of a Mooncake store is a whole number, or a size such as 4gb")
    return int(number[1]) * UNITS[number[2]]
