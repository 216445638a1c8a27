"""The address of the administration endpoint, and its token for programs that need no other setting.

An address is `host:port`, or `unix:///path` of a unix socket.
"""

import os
import re

from lmc.errors import ConfigError

# The environment variables of three settings, as messages name them.
ADDRESS, TOKEN, DOCUMENT_EVENTS = "LMC_ADMIN", "LMC_ADMIN_TOKEN", "LMC_DOCUMENT_EVENTS"
DOCUMENT_TOPIC = "lmc.documents"  # ZeroMQ topic of document events
LOCAL, UNIX = ("127.0.0.1", "localhost", "::1"), "unix://"
LOCAL_URL = re.compile(r"http://(127\.0\.0\.1|localhost|\[::1\]):[0-9]{1,5}|unix:///[^?#\s]+")
LAST_PORT = 65535


def admin_token() -> str:
    """Return the setting `admin_token` without loading the other settings; empty if it is not set.

    Commands and the router need only this setting. Raises `ConfigError` for a settings file that cannot be read.
    """
    from lmc.config.sources import read_environment, read_yaml  # This imports YAML, which `lmc --help` does not need.

    sources = (read_environment(os.environ, ("admin_token",), "LMC_"), read_yaml(os.environ, ("admin_token",)))
    token = next((source.own["admin_token"].value for source in sources if "admin_token" in source.own), None)
    return str(token or "").strip()  # Secret files often end with a newline.


def host_and_port(address: str, token: str, setting: str = ADDRESS) -> tuple[str, int]:
    """Return the host and port of a TCP address; errors name the `setting` that contains the address.

    Raises `ConfigError` if the address is invalid, or if other hosts can reach it and `token` is empty.
    """
    host, _, port = address.rpartition(":")
    if not port.isdecimal() or int(port) > LAST_PORT:
        raise ConfigError(f"{setting} = {address} must be an address such as 127.0.0.1:9180, or unix:///run/lmc.sock")
    host = host.strip("[]") or LOCAL[0]
    if host not in LOCAL and not token:
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
        raise ConfigError(f"{setting} = {address} must have the path of a socket, such as unix:///run/lmc.sock")
    return path


def url_of(address: str, token: str, engine: int = 0) -> str:
    """Return the URL at which this host reaches the endpoint that listens at an address."""
    if address.startswith(UNIX):
        return UNIX + socket_path(address, engine)
    host, port = host_and_port(address, token)
    host = {"0.0.0.0": LOCAL[0], "::": LOCAL[2]}.get(host, host)
    return f"http://[{host}]:{port + engine}" if ":" in host else f"http://{host}:{port + engine}"


def is_local_url(url: str) -> bool:
    """Return whether a URL names an administration endpoint of this host: loopback or a unix socket."""
    return LOCAL_URL.fullmatch(url) is not None


def refusal(address: str, token: str) -> str:
    """Return why an engine cannot start with this address; empty if it can, or if the address is a URL for commands."""
    if address.startswith("http"):
        return ""
    try:
        if address.startswith(UNIX):
            socket_path(address)
        elif address:
            host_and_port(address, token)
    except ConfigError as error:
        return str(error)
    return ""
