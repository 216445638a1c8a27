"""`lmc serve`: one store for all engines of a host."""

import logging
import os
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from lmc.errors import ConfigError, InputError, TierUnusable
from lmc.shapes import GIB
from lmc.storage.places import fastest_first, place_of
from lmc.terminal import console, counted, print_json

log = logging.getLogger(__name__)

KIB = 1 << 10
TAKEOVER_SECONDS = 600.0  # for which a server that is to end is waited for
SWITCH_SECONDS = 5e-5  # for which a thread keeps the interpreter while others wait; Python's default is 100 times that


def serve(
    socket: Annotated[
        Path | None, typer.Option(help="where engines attach, as LMC_SERVER=unix://PATH says; by default that setting")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="a YAML file of settings, instead of LMC_CONFIG_FILE")] = None,
    group: Annotated[str | None, typer.Option(help="a group whose processes may attach, too")] = None,
    memory: Annotated[
        Path | None,
        typer.Option(help="a directory on tmpfs, such as /dev/shm/lmc, for memory that outlives the server"),
    ] = None,
    takeover: Annotated[bool, typer.Option("--takeover", help="end the server that runs there, and go on")] = False,
) -> None:
    """Run a cache server: memory, disk and Redis for all engines of this host, which attach with LMC_SERVER.

    Memory and tiers are those of the settings (max_local_cpu_size, local_disk, remote_url, ...). The server ends with
    SIGTERM or Ctrl-C, after it has written down what is in memory only. Engines go on without it.
    """
    if config is not None:
        os.environ["LMC_CONFIG_FILE"] = str(config)
    from lmc.config import Settings
    from lmc.engine.tiers import described
    from lmc.service.attachment import retire
    from lmc.service.server import CacheServer

    settings = Settings.load()
    path = socket.absolute() if socket is not None else settings.server
    if path is None:
        raise InputError("say where engines attach: --socket /run/lmc.sock, or LMC_SERVER=unix:///run/lmc.sock")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    sys.setswitchinterval(SWITCH_SECONDS)
    if takeover and path.exists():
        try:
            retire(path, TAKEOVER_SECONDS)
        except TierUnusable as error:
            log.warning("no server is taken over: %s", error)
    server = CacheServer(settings, path, group=_number_of(group), memory=memory.absolute() if memory else None)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: server.stop())
    log.info(
        "the cache server listens at %s: %g GB of memory, %s", path, settings.max_local_cpu_size, described(settings)
    )
    try:
        server.serve()
    finally:
        log.info("the cache server ends, and writes down what is in memory only")
        server.close()
    log.info("the cache server has ended, and everything is written")


def show_status(path: Path, *, as_json: bool) -> None:
    """Print what a cache server has and does; raise `TierUnusable` if there is none."""
    import msgspec

    from lmc.service.attachment import status

    found = status(path)
    if as_json:
        print_json(msgspec.to_builtins(found, str_keys=True))
        return
    names = fastest_first({place for arena in found.arenas for place in arena.stats.present})
    table = Table("chunks of", "memory GiB", *(f"in {place_of(name).title}" for name in names), "tokens", "hits")
    for name in ("misses", "held", "no room"):
        table.add_column(name)
    for arena in found.arenas:
        present, stats = arena.stats.present, arena.stats
        table.add_row(
            f"{arena.parts} x {arena.part_bytes / KIB:g} KiB",
            f"{arena.memory / GIB:.3f}",
            *(str(present.get(name, (0, 0))[0]) for name in names),
            str(max((tokens for _, tokens in present.values()), default=0)),
            str(sum(stats.hits.values())),
            *map(str, (stats.misses, arena.held, stats.no_room)),
        )
    used = sum(arena.memory for arena in found.arenas)
    said = f"lmc {found.version}: {used / GIB:.3f} of {found.memory / GIB:.3f} GiB in use"
    console().print(table, Text(f"{said}, {counted(found.clients, 'connection')}"))


def _number_of(group: str | None) -> int | None:
    """Return the number of a group; raise `ConfigError` if there is none of this name."""
    import grp

    try:
        return None if group is None else grp.getgrnam(group).gr_gid
    except KeyError:
        raise ConfigError(f"--group {group}: this host has no such group") from None
