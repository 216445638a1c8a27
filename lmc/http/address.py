"""The address of the administration endpoint, and its token for programs that need no other setting.

An address is `host:port`, or `unix:///path` of a unix socket.
"""

import os
import re
from contextlib import suppress
from ipaddress import ip_address
from typing import TYPE_CHECKING

from lmc.errors import ConfigError

if TYPE_CHECKING:  # The settings import YAML, which `lmc --help` does not need.
    from lmc.config.settings import Settings

# The environment variables of three settings, as messages name them.
ADDRESS, TOKEN, DOCUMENT_EVENTS = "LMC_ADMIN", "LMC_ADMIN_TOKEN", "LMC_DOCUMENT_EVENTS"
DOCUMENT_TOPIC = "lmc.documents"  # ZeroMQ topic of document events
LOCAL, UNIX = ("127.0.0.1", "localhost", "::1"), "unix://"
LOCAL_URL = re.compile(r"http://(127\.[0-9.]+|localhost|\[::1\]):[0-9]{1,5}|unix:///[^?#\s]+")
LAST_PORT = 65535
EVENTS_HINT = "use an address such as tcp://*:5558"


def admin_token() -> str:
    """Return the setting `admin_token` without loading the other settings; empty if it is not set.

    Commands and the router need only this setting. Raises `ConfigError` for a settings file that cannot be read, and
    for a token of white space.
    """
    from lmc.config.sources import read_environment, read_yaml  # This imports YAML, which `lmc --help` does not need.

    sources = (read_environment(os.environ, ("admin_token",), "LMC_"), read_yaml(os.environ, ("admin_token",)))
    given = next((source.own["admin_token"] for source in sources if "admin_token" in source.own), None)
    token = str(given.value or "") if given else ""
    if given and token.isspace():
        raise ConfigError(f"admin_token ({given.origin}) has only white space: set a secret, or leave it out")
    return token.strip()  # Secret files often end with a newline.


def host_and_port(address: str, token: str, setting: str = ADDRESS) -> tuple[str, int]:
    """Return the host and port of a TCP address; errors name the `setting` that contains the address.

    Raises `ConfigError` if the address is invalid, or if other hosts can reach it and `token` is empty.
    """
    host, _, port = address.rpartition(":")
    if not port.isdecimal() or int(port) > LAST_PORT:
        raise ConfigError(
            f"{setting} = {address} must be an address such as 127.0.0.1:9180, or unix:///run/lmc/admin.sock"
        )
    host = host.strip("[]") or LOCAL[0]
    if not is_local(host) and not token:
        raise ConfigError(f"{setting} = {address} can be reached from other hosts: set {TOKEN} to a secret")
    return host, int(port)


def address_of_engine(address: str, number: int) -> str:
    """Return the ZeroMQ address of one of several engines.

    For engine number n > 0, the port is increased by n, and an address other than TCP gets the suffix `_n`.
    """
    if not number or not address:
        return address
    if not address.startswith("tcp://"):
        return f"{address}_{number}"
    host, _, port = address.rpartition(":")
    return f"{host}:{int(port) + number}"


def socket_path(address: str, engine: int = 0, setting: str = ADDRESS) -> str:
    """Return the path of a unix socket, with the engine's number at its end unless this is 0.

    Raises `ConfigError` if the address has no absolute path.
    """
    path = address.removeprefix(UNIX) + (str(engine) if engine else "")
    if not path.startswith("/"):
        raise ConfigError(f"{setting} = {address} must have the path of a socket, such as unix:///run/lmc/admin.sock")
    return path


def url_of(address: str, token: str, engine: int = 0) -> str:
    """Return the URL at which this host reaches the endpoint that listens at an address."""
    if address.startswith(UNIX):
        return UNIX + socket_path(address, engine)
    host, port = host_and_port(address, token)
    host = {"0.0.0.0": LOCAL[0], "::": LOCAL[2]}.get(host, host)
    return f"http://{host_in_url(host)}:{port + engine}"


def host_in_url(host: str) -> str:
    """Return a host as it stands in a URL: an IPv6 address is in brackets."""
    return f"[{host}]" if ":" in host else host


def is_local(host: str) -> bool:
    """Return whether only this host can reach what listens at a name or an IP address."""
    with suppress(ValueError):
        return ip_address(host).is_loopback
    return host in LOCAL


def is_local_url(url: str) -> bool:
    """Return whether a URL names an administration endpoint of this host: loopback or a unix socket."""
    found = LOCAL_URL.fullmatch(url)
    return found is not None and (found[1] is None or is_local(found[1].strip("[]")))


def event_addresses(address: str, setting: str = DOCUMENT_EVENTS) -> list[str]:
    """Return the address of events, and the address for requests for missed batches if there is one.

    Errors name the `setting` that contains the address. Raises `ConfigError` for invalid addresses, or if pyzmq or
    msgspec is not installed.
    """
    try:
        import msgspec  # noqa: F401
        import zmq  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"{setting} needs {error.name}: pip install pyzmq msgspec") from None
    addresses = [part for part in address.replace(" ", "").split(",") if part]
    valid = all(re.fullmatch(r"tcp://.+:\d+|(ipc|inproc)://.+", part) for part in addresses)
    if not valid or len(addresses) not in (1, 2):
        raise ConfigError(f"{setting} = {address} is not a ZeroMQ address: {EVENTS_HINT}")
    return addresses


def may_be_ipv6(address: str) -> bool:
    """Return whether a ZeroMQ socket needs the option `ipv6` for an address: an IPv6 host, or all interfaces.

    With this option, a host name would be resolved to an IPv6 address, where most publishers do not listen.
    """
    return address.startswith(("tcp://[", "tcp://*:"))


def check_addresses(settings: "Settings") -> None:
    """Raise `ConfigError` if an engine cannot start with the addresses of its settings.

    The setting `admin` may also be a URL, which commands use.
    """
    admin = settings.admin or ""
    if admin.startswith(UNIX):
        socket_path(admin)
    elif admin and not admin.startswith("http"):
        host_and_port(admin, settings.admin_token or "")
    if settings.document_events:
        event_addresses(settings.document_events)
