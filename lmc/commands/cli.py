"""The command `lmc`. Typer parses the arguments; each subcommand is a function.

A command raises the library's errors, and `Commands` turns every `LmcError` into a line and exit code 2. A command
imports its modules when it runs, so that `lmc --help` does not wait for torch.
"""

import errno
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

from lmc import __version__
from lmc.commands import top as tops
from lmc.commands.administration import SHOWN_TENANT_DIGITS, documents, explain
from lmc.commands.calibrate.command import calibrate
from lmc.commands.learn.command import learn
from lmc.commands.learn.size import size
from lmc.commands.router import router
from lmc.commands.serve import faults_of_server, serve, show_status
from lmc.demo.command import demo
from lmc.errors import ConfigError, InputError, LmcError
from lmc.http.address import check_addresses
from lmc.terminal import AsJson, console, counted, escape_in_output, print_json, printable, seconds_of, to_minute

if TYPE_CHECKING:
    from lmc.commands.inspect import Holdings, TierLocation
    from lmc.config.settings import Settings
    from lmc.keys import ChunkKey
    from lmc.storage.tiers.record import RecordMeta
    from lmc.storage.tiers.tier import Entry, ListedTier

USES = "oldest use, UTC", "latest use, UTC"  # columns
WIDE_COLUMNS = 110  # width of a terminal that has room for date and time in one line
MANY_GIB = 1000  # A table with at least this many GiB has no fractions of GiB.
FAILED = 2  # exit code after an `LmcError` or a wrong command line
# click's UsageError. Since typer 0.29 it comes from typer's private copy of click, which has no types.
USAGE_ERROR: Any = typer.BadParameter.__mro__[1]

Directory = Annotated[
    Path | None, typer.Argument(help="directory of a disk tier; by default the settings local_disk and remote_url")
]


class Commands(TyperGroup):
    """All subcommands, with the handling of their errors."""

    # Any: typer's context class is click's, or since typer 0.29 a private copy of it.
    def make_context(self, *arguments: Any, **named: Any) -> Any:
        """Parse the arguments before the subcommand."""
        with _errors_in_one_line():
            return super().make_context(*arguments, **named)

    def invoke(self, ctx: Any) -> Any:
        """Run the subcommand, and report its errors."""
        try:
            with _errors_in_one_line():
                result = super().invoke(ctx)
                if sys.stdout is not None:  # None if the parent process has closed it
                    sys.stdout.flush()
                return result
        except LmcError as error:
            lines = str(error).splitlines()
            # A ConfigError has one line per wrong setting.
            for line in lines if isinstance(error, ConfigError) else [" ".join(lines)]:
                typer.echo(f"error: {line}", err=True)
            raise typer.Exit(FAILED) from None


@contextmanager
def _errors_in_one_line() -> Iterator[None]:
    """Report a wrong command line or a full disk in one line, and exit with `FAILED`."""
    try:
        yield
    except USAGE_ERROR as error:
        context = getattr(error, "ctx", None)
        if context is None or type(error).__name__ == "NoArgsIsHelpError":  # The latter shows the help.
            raise
        message = " ".join(error.format_message().split())
        end = "" if message.endswith((".", "?")) else "."
        typer.echo(f"error: {message}{end} See {context.command_path} --help", err=True)
        raise typer.Exit(FAILED) from None
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        typer.echo(f"error: cannot write {error.filename or 'the output'}: {error.strerror}", err=True)
        if error.filename is None:  # Python flushes stdout at exit, and would fail again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(FAILED) from None


# No pretty tracebacks: they may print local variables, such as a URL with a password.
app = typer.Typer(cls=Commands, no_args_is_help=True, pretty_exceptions_enable=False)


def _show_version(requested: bool) -> None:
    if requested:
        typer.echo(f"lmc {__version__}")
        raise typer.Exit


@app.callback()
def lmc(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="show the version and exit")
    ] = False,
) -> None:
    """Tiered KV cache offload and CacheBlend fusion."""


@app.command()
def config(as_json: AsJson = False) -> None:
    """Show every setting and environment variable, with its value and the value's source."""
    from lmc.config.settings import Settings
    from lmc.config.sources import log_level

    settings = Settings.load()
    if as_json:
        print_json({row[0]: {"value": row[1], "from": row[2]} for row in setting_rows(settings)})
    else:
        console().print(settings_table(settings))
    log_level(0)  # warns of an unknown level
    try:
        check_addresses(settings)
    except ConfigError as error:
        typer.echo(f"an engine would not start with these settings: {error}", err=True)
        raise typer.Exit(1) from None


@app.command()
def check(
    directory: Directory = None,
    fix: Annotated[bool, typer.Option("--fix", help="remove invalid records; valid records stay")] = False,
    server: Annotated[Path | None, typer.Option(help="socket of a cache server: check its bookkeeping instead")] = None,
    as_json: AsJson = False,
) -> None:
    """Verify every byte of a tier, or the bookkeeping of a running cache server.

    Exit code 1 if an invalid record or a fault remains.
    """
    if server is not None:
        if fix or directory is not None:
            raise InputError("--server checks a running cache server: use it without --fix and without a directory")
        faults = faults_of_server(server)
        if as_json:
            print_json(faults)
        else:
            console().print(Text("\n".join([*faults, f"{server}: {counted(len(faults), 'fault')}"])))
        if faults:
            raise typer.Exit(1)
        return
    from lmc.commands.inspect import tier_locations

    unfixed, results = False, []
    for location in tier_locations(directory):
        with location.opened(change=fix) as tier:
            records = sum(1 for _ in tier.entries())
            findings = tier.check(fix)
        results.append(
            {"place": location.name, "records": records, "findings": [asdict(finding) for finding in findings]}
        )
        unfixed |= any(not finding.fixed for finding in findings)
        if as_json:
            continue
        for finding in findings:
            console().print(Text(f"{finding.where}: {finding.problem}{' (removed)' if finding.fixed else ''}"))
        removed = ", all removed" if findings and all(finding.fixed for finding in findings) else ""
        console().print(Text(f"{location.name}: {records} records, {counted(len(findings), 'problem')}{removed}"))
    if as_json:
        print_json(results)
    if unfixed:
        raise typer.Exit(1)


@app.command()
def stat(
    directory: Directory = None,
    server: Annotated[Path | None, typer.Option(help="socket of a cache server, to show its status instead")] = None,
    as_json: AsJson = False,
) -> None:
    """Show the records of a tier by namespace (model, settings, tenant), or the status of a cache server.

    Only headers of records are read.
    """
    if server is not None:
        show_status(server, as_json=as_json)
        return
    from lmc.commands.inspect import survey, tier_locations

    if as_json:
        print_json([holdings_summary(location.name, *survey(location)) for location in tier_locations(directory)])
        return
    for location in tier_locations(directory):
        holdings, unreadable = survey(location)
        out = console()
        out.print(Text(location.name), holdings_table(holdings, narrow=out.width < WIDE_COLUMNS))
        if any(meta.model or meta.tenant for records in holdings.values() for _, meta in records):
            console().print(owners_table(holdings))
        if unreadable:
            console().print(f"{unreadable} records have unreadable headers: run lmc check")


@app.command()
def clear(
    directory: Directory = None,
    namespace: Annotated[
        str | None,
        typer.Option(help="remove the records of the namespace with these first digits; lmc stat lists them"),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="remove the records of all namespaces")] = False,
    unused_for: Annotated[
        str | None, typer.Option(metavar="TIME", help="remove records not used for this time, such as 30d")
    ] = None,
    keep: Annotated[
        float | None,
        typer.Option(min=0, metavar="GIB", help="remove the least recently used records of each tier beyond this size"),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="remove without confirmation")] = False,
) -> None:
    """Remove records from a tier: those of one namespace, old ones, or all. Other files stay.

    --namespace and --all remove pins, too. --unused-for and --keep leave the records of documents that are pinned on
    the disk. Buckets and shared directories only know when a record was written, and that counts as its use.
    """
    from lmc.commands.inspect import old_records, tier_locations
    from lmc.documents.kept import forget_kept
    from lmc.storage.tiers.disk import DiskTier

    if [everything, *(given is not None for given in (namespace, unused_for, keep))].count(True) != 1:
        raise InputError("set the records to remove: --namespace DIGITS, --unused-for TIME, --keep GIB, or --all")
    unused_seconds = None if unused_for is None else seconds_of(unused_for)
    with ExitStack() as open_tiers:
        tiers = [
            (location, open_tiers.enter_context(location.opened(change=True))) for location in tier_locations(directory)
        ]
        by_age = unused_for is not None or keep is not None
        if by_age:
            doomed, owner = old_records(tiers, unused_seconds, keep), ""
        else:
            doomed, owner = doomed_records(tiers, namespace)
        count = sum(map(len, doomed.values()))
        names = " and ".join(location.name for location, _ in tiers)
        if not yes:
            typer.confirm(printable(f"Remove {counted(count, 'record')}{owner} from {names}?"), abort=True)
        for location, tier in tiers:
            if isinstance(tier, DiskTier) and not by_age:  # Otherwise pinned documents would be learned again.
                forget_kept(tier.root, {key.hex() for key in doomed[location.name]}, namespace or "")
        removed = sum(tier.delete(key) for location, tier in tiers for key in doomed[location.name])
    console().print(Text(f"removed {counted(removed, 'record')} from {names}"))


@app.command()
def top(
    url: Annotated[str, typer.Argument(help="metrics URL of a vLLM server, cache server or router")] = tops.METRICS_URL,
    interval: Annotated[float, typer.Option(min=0.1, max=86400, help="seconds between two updates")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="print the totals and exit")] = False,
    as_json: AsJson = False,
) -> None:
    """Show the activity of a running store: hits, bytes, seconds per GiB, failures, as rates per second.

    The address may be HOST:PORT. With --json, the totals since the start are printed once.
    """
    url = tops.complete(url)
    if as_json:
        numbers = tops.fetch(url).since(None)
        print_json(
            [{"name": name, "labels": list(labels), "value": n} for (name, labels), n in sorted(numbers.items())]
        )
    else:
        tops.top(url, interval, once, console())


@app.command()
def template(
    model: Annotated[str, typer.Argument(help="directory or hub id of a model with a chat template")],
    file: Annotated[
        Path | None, typer.Option("--template", help="file with a chat template to extend, instead of the model's")
    ] = None,
) -> None:
    """Print a chat template that puts the `documents` of a request between separators: vllm serve --chat-template."""
    from lmc.commands.chat_template import with_documents
    from lmc.config.settings import Settings
    from lmc.documents.sources import read_text

    if file is not None:
        text = read_text(file)
    else:
        try:
            from lmc.connectors.transformers.hf import chat_template

            text = chat_template(model)
        except (OSError, ImportError) as error:
            raise InputError(f"cannot read a chat template of {model}: {error}") from None
    typer.echo(with_documents(text, Settings.load().blend_special_str).encode(), nl=False)  # vLLM reads UTF-8.


app.command(name="demo")(demo)
app.command(name="calibrate")(calibrate)
app.command(name="learn")(learn)
app.command(name="size")(size)
app.command(name="serve")(serve)
# `lmc.router.arguments` reads the flags of other routers and of earlier versions.
router_context = {"ignore_unknown_options": True, "allow_extra_args": True, "auto_envvar_prefix": "LMC_ROUTER"}
app.command(name="router", context_settings=router_context)(router)
app.command(name="explain")(explain)
app.add_typer(documents, name="documents")


def doomed_records(
    tiers: "Sequence[tuple[TierLocation, ListedTier]]", namespace: str | None
) -> "tuple[dict[str, list[ChunkKey]], str]":
    """Return the keys of the records of one namespace, or of all records, by the name of the tier, and their owner.

    The owner is the namespace's model and tenant as text after a number of records, or empty. Raises `InputError` if
    `namespace` does not match exactly one namespace.
    """
    from lmc.commands.inspect import find_namespace, survey

    if namespace is None:
        return {location.name: [entry.key for entry in tier.entries()] for location, tier in tiers}, ""
    # `survey` opens tiers read-only. A tier that is open for changes would record a use of each record that it reads.
    holdings = {location.name: survey(location)[0] for location, _ in tiers}
    digest = find_namespace(namespace, chain.from_iterable(holdings.values()))
    of_location = {name: records.get(digest, []) for name, records in holdings.items()}
    summary = _summary([*chain.from_iterable(of_location.values())])
    owner = f" of {summary['model']}" if summary["model"] else ""
    owner += f" for tenant {summary['tenant'][:SHOWN_TENANT_DIGITS]}" if summary["tenant"] else ""
    return {name: [entry.key for entry, _ in records] for name, records in of_location.items()}, owner


def holdings_table(holdings: "Holdings", *, narrow: bool = False) -> Table:
    """Return a table with one row per namespace, the largest first, and their total.

    With `narrow`, it fits into 80 columns. Numbers that do not fit into the terminal end with an ellipsis.
    """
    from lmc.shapes import GIB

    def broken(text: str) -> str:  # into two lines
        return text.replace(" ", "\n", 1) if narrow else text

    table = Table(padding=0)
    columns = "namespace", "records", "tokens", "GiB", "layers", "bytes a token", "codec", *USES
    for column in columns:
        wraps = column in ("layers", "codec")
        table.add_column(broken(column), no_wrap=not wraps, overflow="fold" if wraps else "ellipsis")
    for name, row in [*_by_size(holdings), ("total", _summary([*chain.from_iterable(holdings.values())]))]:
        if name == "total":
            table.add_section()
        table.add_row(
            name,
            str(row["records"]),
            str(row["tokens"]),
            f"{row['bytes'] / GIB:.{3 if row['bytes'] < MANY_GIB * GIB else 0}f}",
            ", ".join(map(str, row["layers"])) or "-",
            f"{row['bytes'] / row['tokens']:.0f}" if row["tokens"] else "-",
            ", ".join(row["codecs"]) or "-",
            *([broken(to_minute(used)) for used in row["used"]] or "--"),
        )
    return table


def owners_table(holdings: "Holdings") -> Table:
    """Return a table with the model and the tenant of each namespace, in the order of `holdings_table`."""
    table = Table("namespace", "tenant", "model", padding=0)
    table.columns[-1].overflow = "fold"
    for name, row in _by_size(holdings):
        table.add_row(name, Text(row["tenant"][:SHOWN_TENANT_DIGITS] or "-"), Text(printable(row["model"]) or "-"))
    return table


def _by_size(holdings: "Holdings") -> list[tuple[str, dict[str, Any]]]:
    """Return the first digits and the summary of each namespace, the largest first."""
    from lmc.commands.inspect import NAMESPACE_DIGITS

    rows = [(digest.hex()[:NAMESPACE_DIGITS], _summary(records)) for digest, records in holdings.items()]
    return sorted(rows, key=lambda row: -row[1]["bytes"])


def holdings_summary(location: str, holdings: "Holdings", unreadable: int) -> dict[str, Any]:
    """Return the contents of `holdings_table` as plain data, with whole digests and times in seconds since 1970."""
    namespaces = {digest.hex(): _summary(records) for digest, records in holdings.items()}
    return {"place": location, "namespaces": namespaces, "unreadable": unreadable}


def _summary(records: "Sequence[tuple[Entry, RecordMeta]]") -> dict[str, Any]:
    times = [entry.used for entry, _ in records if entry.used]
    return {
        "model": ", ".join(sorted({meta.model for _, meta in records if meta.model})),
        "tenant": ", ".join(sorted({meta.tenant for _, meta in records if meta.tenant})),
        "records": len(records),
        "tokens": sum(meta.tokens for _, meta in records),
        "bytes": sum(entry.bytes for entry, _ in records),
        "layers": sorted({meta.parts for _, meta in records}),
        "codecs": sorted({meta.codec for _, meta in records}),
        "used": [min(times), max(times)] if times else [],
    }


def setting_rows(settings: "Settings") -> list[tuple[str, str, str]]:
    """Return the name of each setting and variable, its value as text, and the value's source."""
    from lmc.config.sources import VARIABLES, shown, shown_variable

    names = type(settings).model_fields
    rows = [(name, shown(name, getattr(settings, name)), settings.origin(name)) for name in names]
    return [*rows, *((name, *shown_variable(name)) for name in VARIABLES)]


def settings_table(settings: "Settings") -> Table:
    """Return a table with one row per setting and variable."""
    table = Table("setting", "value", "from")
    for column in table.columns:
        column.overflow = "fold"  # An ellipsis would cut paths.
    for row in setting_rows(settings):
        table.add_row(*map(Text, row))  # Text: values must not be read as markup.
    return table


def main() -> None:
    """Run the command `lmc`."""
    escape_in_output()
    app()
