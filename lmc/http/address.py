"""The address of the administration endpoint, and its token for programs that need no other setting."""

import os
import re

from lmc.errors import ConfigError

# The variables of three settings, as messages name them.
ADDRESS, TOKEN, DOCUMENT_EVENTS = "LMC_ADMIN", "LMC_ADMIN_TOKEN", "LMC_DOCUMENT_EVENTS"
LOCAL, UNIX = ("127.0.0.1", "localhost", "::1"), "unix://"
LOCAL_URL = re.compile(r"http://(127\.0\.0\.1|localhost|\[::1\]):[0-9]{1,5}|unix:///[^?#\s]+")
LAST_PORT = 65535


def admin_token() -> str:
    """Return the setting `admin_token`, which commands and the router need without the others; empty if there is none.

    Raises `ConfigError` for a file of settings that cannot be read.
    """
    from lmc.config.sources import read_environment, read_yaml  # They read YAML, which `lmc --help` does not need.

    sources = (read_environment(os.environ, ("admin_token",), "LMC_"), read_yaml(os.environ, ("admin_token",)))
    token = next((source.own["admin_token"].value for source in sources if "admin_token" in source.own), None)
    return str(token or "").strip()  # Files of secrets often end with a new line.


def host_and_port(address: str, token: str, setting: str = ADDRESS) -> tuple[str, int]:
    """Return where an endpoint listens for TCP; `setting` is what gave the address.

    Raises `ConfigError` if the address is none, or can be reached from other hosts without a token.
    """
    host, _, port = address.rpartition(":")
    if not port.isdecimal() or int(port) > LAST_PORT:
        raise ConfigError(f"{setting} = {address} must be an address such as 127.0.0.1:9180, or unix:///run/lmc.sock")
    host = host.strip("[]") or LOCAL[0]
    if host not in LOCAL and not token:
        raise ConfigError(f"{setting} = {address} can be reached from other hosts: set {TOKEN} to a secret")
    return host, int(port)


def address_of_engine(address: str, number: int) -> str:
    """Return an address of ZeroMQ for one of several engines: number n has the port + n, or a name of its own."""
    if not number or not address:
        return address
    if not address.startswith("tcp://"):
        return f"{address}_{number}"
    host, _, port = address.rpartition(":")
    return f"{host}:{int(port) + number}"


def socket_path(address: str, engine: int = 0, setting: str = ADDRESS) -> str:
    """Return the path of a unix socket, with an engine's number if that is not 0.

    Raises `ConfigError` if the address has no path.
    """
    path = address.removeprefix(UNIX) + (str(engine) if engine else "")
    if not path.startswith("/"):
        raise ConfigError(f"{setting} = {address} must have the path of a socket, such as unix:///run/lmc.sock")
    return path


def url_of(address: str, token: str, engine: int = 0) -> str:
    """Return where an endpoint is asked from this host, which listens at an address that it could have."""
    if address.startswith(UNIX):
        return UNIX + socket_path(address, engine)
    host, port = host_and_port(address, token)
    host = {"0.0.0.0": LOCAL[0], "::": LOCAL[2]}.get(host, host)
    return f"http://[{host}]:{port + engine}" if ":" in host else f"http://{host}:{port + engine}"


def is_local_url(url: str) -> bool:
    """Return whether a URL names an administration endpoint that only this host can have: loopback or a unix socket."""
    return LOCAL_URL.fullmatch(url) is not None


def refusal(address: str, token: str) -> str:
    """Return why an engine would not start with this address; empty if it would, or if it is a URL for commands."""
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
