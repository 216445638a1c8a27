"""`lmc serve`: runs a cache server, which has one store for all engines of a host."""

import gc
import logging
import os
import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from lmc.errors import ConfigError, InputError, TierUnusable, need_msgspec
from lmc.http.address import ADDRESS, DOCUMENT_EVENTS, TOKEN, UNIX, host_and_port
from lmc.shapes import GIB, KIB
from lmc.storage.places import fastest_first, place_of
from lmc.terminal import console, counted, print_json

if TYPE_CHECKING:
    from lmc.config.settings import Settings
    from lmc.http.server import Certificate
    from lmc.server.server import CacheServer

log = logging.getLogger(__name__)

TAKEOVER_SECONDS = 600.0  # timeout for the end of the previous server
SWITCH_SECONDS = 5e-5  # thread switch interval of the interpreter; Python's default is 100 times longer


EventAddresses = Annotated[
    str | None,
    typer.Option(
        help="address where document events are published, such as tcp://*:5558, and after a comma the address for "
        "missed events; by default the setting document_events",
    ),
]
PageLocked = Annotated[
    bool,
    typer.Option(
        "--page-locked", help="let GPU workers page-lock the memory; all engines must have the same chunk layout"
    ),
]


def serve(
    socket: Annotated[
        Path | None, typer.Option(help="socket for engines (LMC_SERVER=unix://PATH); by default the setting server")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file with settings; replaces LMC_CONFIG_FILE")] = None,
    group: Annotated[str | None, typer.Option(help="group whose processes may also attach")] = None,
    memory: Annotated[
        Path | None,
        typer.Option(help="directory on tmpfs, such as /dev/shm/lmc, for memory that outlives the server"),
    ] = None,
    page_locked: PageLocked = False,
    takeover: Annotated[
        bool, typer.Option("--takeover", help="end the server at the same socket, and take over its memory")
    ] = False,
    http: Annotated[
        str | None,
        typer.Option(
            help="administration address: 127.0.0.1:9180 or unix:///run/lmc/admin.sock; by default the setting admin"
        ),
    ] = None,
    document_events: EventAddresses = None,
    tenants: Annotated[
        Path | None,
        typer.Option(help="YAML file with `cache_salt: token` lines; with its token, a tenant sees its own documents"),
    ] = None,
    certificate: Annotated[Path | None, typer.Option(help="PEM file with the certificate chain, for HTTPS")] = None,
    key: Annotated[Path | None, typer.Option(help="PEM file with the key of the certificate")] = None,
) -> None:
    """Run a cache server: memory, disk and remote tiers for all engines of this host, which attach with LMC_SERVER.

    Memory and tiers are those of the settings (max_local_cpu_size, local_disk, remote_url, ...). SIGTERM or
    Ctrl-C shuts the server down, after it has written chunks that are only in memory to the tiers. Engines continue
    without it. With --http, browsers, Prometheus and `lmc documents` can show its state; LMC_ADMIN_TOKEN protects it.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # Without a handler, process 1 in a container ignores it.
    need_msgspec()
    from lmc.config.settings import Settings
    from lmc.config.sources import read_mapping, set_up_log
    from lmc.server.server import CacheServer
    from lmc.storage.tiers.opening import described

    if config is not None:
        read_mapping(config, f"--config {config}", "chunk_size: 256")  # for an error that names the option
        os.environ["LMC_CONFIG_FILE"] = str(config)
    settings = Settings.load()
    # Errors name the option or the variable that an address comes from.
    http_name, events_name = "--http" if http else ADDRESS, "--document-events" if document_events else DOCUMENT_EVENTS
    http, document_events = http or settings.admin or "", document_events or settings.document_events or ""
    token = settings.admin_token or ""
    tenant_salts, tls = _checked(http, token, tenants, certificate, key, http_name)
    path, group_number = _path_of(socket, settings.server), _number_of(group)
    set_up_log()
    sys.setswitchinterval(SWITCH_SECONDS)
    _prepare(settings, http, http_name, document_events, events_name)
    if takeover:
        _take_over(path)
    memory_path = memory.absolute() if memory else None
    server = CacheServer(settings, path, group=group_number, memory=memory_path, page_locked=page_locked)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: server.stop())
    log.info("cache server listens at %s: %g GB of memory, %s", path, settings.max_local_cpu_size, described(settings))
    with ExitStack() as opened:
        opened.callback(_close, server)
        if document_events:
            opened.callback(_published(server, document_events, events_name))
        if http:
            opened.callback(_administered(server, http, token, tenant_salts, tls, http_name))
        # Without this, each full garbage collection would scan all imported objects, and block responses for 0.1 s.
        gc.collect()
        gc.freeze()
        server.serve()
    log.info("cache server stopped, and all chunks are written")


def _path_of(socket: Path | None, setting: Path | None) -> Path:
    """Return the socket to which engines attach. Raises `InputError` if neither option nor setting has one."""
    path = socket_at(socket) if socket is not None else setting
    if path is None:
        raise InputError("no socket for engines: set --socket /run/lmc.sock, or LMC_SERVER=unix:///run/lmc.sock")
    return path


def _take_over(path: Path) -> None:
    """Shut down the server that listens at a path, if there is one."""
    from lmc.server.client.connection import retire

    try:
        if path.exists():
            retire(path, TAKEOVER_SECONDS)
    except TierUnusable as error:
        log.warning("found no server to take over: %s", error)


def socket_at(path: Path) -> Path:
    """Return the path of a socket that is given as a path or as unix://PATH.

    Raises `InputError` for an HTTP address.
    """
    text = str(path)  # `Path` has turned unix:///path into unix:/path, and http://host into http:/host.
    if text.startswith(("http:/", "https:/")):
        text = text.replace("/", "//", 1)
        raise InputError(f"{text} is not a socket: use that of LMC_SERVER, or `lmc top URL` for a URL")
    return Path(text.removeprefix("unix:")) if text.startswith("unix:/") else path.absolute()


def show_status(path: Path, *, as_json: bool) -> None:
    """Print the status of a cache server. Raises `TierUnusable` if no server answers."""
    need_msgspec()
    import msgspec

    from lmc.server.client.connection import status

    server_status = status(socket_at(path))
    if as_json:
        print_json(msgspec.to_builtins(server_status, str_keys=True))
        return
    names = fastest_first({place for arena in server_status.arenas for place in arena.stats.present})
    table = Table("chunks of", "memory GiB", *(f"in {place_of(name).title}" for name in names), "tokens", "hits")
    for name in ("misses", "held", "no room"):
        table.add_column(name)
    for arena in server_status.arenas:
        present, stats = arena.stats.present, arena.stats
        table.add_row(
            f"{arena.parts} x {arena.part_bytes / KIB:g} KiB",
            f"{arena.memory / GIB:.3f}",
            *(str(present.get(name, (0, 0))[0]) for name in names),
            str(max((tokens for _, tokens in present.values()), default=0)),
            str(sum(stats.hits.values())),
            *map(str, (stats.misses, arena.held, stats.no_room)),
        )
    used = sum(arena.memory for arena in server_status.arenas)
    usage = f"lmc {server_status.version}: {used / GIB:.3f} of {server_status.memory / GIB:.3f} GiB in use"
    console().print(table, Text(f"{usage}, {counted(server_status.clients, 'connection')}"))


def faults_of_server(path: Path) -> list[str]:
    """Return the faults in the bookkeeping of a cache server. Raises `TierUnusable` if no server answers."""
    need_msgspec()
    from lmc.server.client.connection import check_integrity

    return check_integrity(socket_at(path))


def _close(server: "CacheServer") -> None:
    log.info("cache server is writing chunks to the tiers before it stops")
    server.close()


def _checked(
    address: str, token: str, tenants: Path | None, certificate: Path | None, key: Path | None, setting: str
) -> "tuple[dict[str, str], Certificate | None]":
    """Return the cache salts of tenants, by token, and the certificate.

    Raises `ConfigError` for invalid or incompatible options.
    """
    from lmc.http.server import Certificate

    if not address and (tenants or certificate or key):
        raise ConfigError("--tenants, --certificate and --key need --http")
    if (certificate is None) != (key is None):
        raise ConfigError("set both --certificate and --key, or neither")
    if tenants is not None and not token:
        raise ConfigError(f"--tenants needs a token for the server itself: set {TOKEN}")
    if address and not address.startswith(UNIX):
        host_and_port(address, token, setting)
    tls = Certificate(certificate, key) if certificate and key else None
    if tls:  # Check before a takeover: an error must not stop the old server.
        tls.check()
    salts = _tenants_in(tenants) if tenants else {}
    if token in salts:
        raise ConfigError(f"--tenants {tenants}: a tenant has the server's token; use different tokens")
    return salts, tls


def _administered(
    server: "CacheServer", address: str, token: str, tenants: dict[str, str], tls: "Certificate | None", setting: str
) -> Callable[[], None]:
    """Start the HTTP server, and return the function that stops it. Raises `ConfigError` if it cannot start."""
    from lmc.http.server import serve as serve_http
    from lmc.server.http_api import application
    from lmc.server.overview import Overview

    return serve_http(application(Overview(server), token, tenants), address, token, setting=setting, certificate=tls)


def _published(server: "CacheServer", address: str, setting: str) -> Callable[[], None]:
    """Start publishing document events, and return the function that stops it. Raises `ConfigError` on failure."""
    from lmc.background import Background
    from lmc.documents.events import DocumentEvents
    from lmc.documents.publisher import DocumentPublisher

    arenas = server.arenas
    events = DocumentEvents(arenas.changes, arenas.document, lambda _: None, Background())
    return DocumentPublisher(address, events, setting=setting).close


def _prepare(settings: "Settings", http: str, http_name: str, document_events: str, events_name: str) -> None:
    """Import the modules of the HTTP server, which takes seconds, and check packages and event addresses.

    A server that will be taken over runs meanwhile, and keeps running after an error. Raises `ConfigError` if a package
    is missing or an address is invalid.
    """
    from lmc.http.address import event_addresses
    from lmc.storage.tiers.opening import check_packages

    check_packages(settings)
    if document_events:
        event_addresses(document_events, events_name)
    try:
        if http:
            import uvicorn  # noqa: F401

            from lmc.server import http_api  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"{http_name} needs the package {error.name}: pip install fastapi uvicorn") from None


def _tenants_in(file: Path) -> dict[str, str]:
    """Return the cache salts in a file, by token. Raises `ConfigError` if the file is invalid."""
    from lmc.config.sources import read_mapping

    tokens = read_mapping(file, f"--tenants {file}", "cache_salt: token")
    valid = tokens and all(isinstance(text, str) and text.strip() for pair in tokens.items() for text in pair)
    if not valid or len(set(tokens.values())) < len(tokens):
        raise ConfigError(f"--tenants {file} must have a line `cache_salt: token` for each tenant, and no token twice")
    if spaced := [salt for salt, token in tokens.items() if token != token.strip()]:
        raise ConfigError(f"--tenants {file}: remove the white space around the token of {', '.join(spaced)}")
    return {token: salt for salt, token in tokens.items()}


def _number_of(group: str | None) -> int | None:
    """Return the id of a group. Raises `ConfigError` if this host has no such group."""
    import grp

    try:
        return None if group is None else grp.getgrnam(group).gr_gid
    except KeyError:
        raise ConfigError(f"--group {group}: this host has no such group") from None
