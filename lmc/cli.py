"""The command `lmc`: each subcommand is a function with plain arguments; parsing is typer's.

A command raises what the library raises: `Commands` turns every `LmcError` into one line and exit code 2.
"""

import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress, TaskID
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

from lmc import top as tops
from lmc.config import Settings, shown
from lmc.errors import ConfigError, InputError, LmcError
from lmc.keys import ChunkKey
from lmc.looking import SHORT, Holding, Place, chosen, places, survey, total
from lmc.page import write_page
from lmc.questions import read_collection, sample
from lmc.shapes import GIB
from lmc.storage.tier import Tier

if TYPE_CHECKING:
    from lmc.demo import Outcome

SHIPPED = Path(__file__).parent.parent / "examples" / "small_model"  # in a clone
FAILED = 2  # the exit code of a command that lmc refused
UNCUT = 1 << 16  # columns: where nobody looks at the output, nothing has to fit

Directory = Annotated[
    Path | None, typer.Argument(help="a disk tier; without it local_disk and remote_url of the settings")
]


class Commands(TyperGroup):
    """All subcommands, and the one place that answers their errors."""

    def invoke(self, ctx: Any) -> Any:  # Any: typer's context class is click's, or since 0.29 a private copy of it
        """Run the chosen command."""
        try:
            return super().invoke(ctx)
        except LmcError as error:
            typer.echo(f"error: {' '.join(str(error).splitlines())}", err=True)
            raise typer.Exit(FAILED) from None


# No pretty tracebacks: they may print local variables, and a URL there may hold a password.
app = typer.Typer(cls=Commands, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def lmc() -> None:
    """Tiered KV cache offload and CacheBlend fusion."""


@app.command()
def config() -> None:
    """Show every setting, its effective value, and where that comes from."""
    console().print(settings_table(Settings.load()))


@app.command()
def check(
    directory: Directory = None,
    fix: Annotated[bool, typer.Option("--fix", help="remove what is wrong; nothing right is removed")] = False,
) -> None:
    """Verify every byte of a tier. Exit code 1 if something is wrong and was not mended."""
    unmended = False
    for place in places(directory):
        with place.opened(change=fix) as tier:
            records = sum(1 for _ in tier.entries())
            findings = tier.check(fix)
        for finding in findings:
            console().print(Text(f"{finding.where}: {finding.problem}{' (removed)' if finding.fixed else ''}"))
        mended = ", all removed" if fix and findings else ""
        console().print(Text(f"{place.name}: {records} records, {len(findings)} wrong{mended}"))
        unmended |= any(not finding.fixed for finding in findings)
    if unmended:
        raise typer.Exit(1)


@app.command()
def stat(directory: Directory = None) -> None:
    """What a tier holds, by namespace (model, its settings, tenant). Reads headers only."""
    for place in places(directory):
        with place.opened() as tier:
            found, unreadable = survey(tier)
        console().print(Text(place.name), holdings_table(found))
        if unreadable:
            console().print(f"{len(unreadable)} records have headers that cannot be read: see lmc check")


@app.command()
def clear(
    directory: Directory = None,
    namespace: Annotated[
        str | None, typer.Option(help="first digits of the namespace whose records go; lmc stat lists them")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="all records, of every namespace")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="do not ask")] = False,
) -> None:
    """Remove records from a tier: those of one namespace, or all. Other files stay."""
    if everything == (namespace is not None):
        raise InputError("say which records to remove: --namespace DIGITS, or --all")
    with ExitStack() as open_tiers:
        tiers = [(place, open_tiers.enter_context(place.opened(change=True))) for place in places(directory)]
        doomed = doomed_records(tiers, namespace)
        count = sum(map(len, doomed.values()))
        where = " and ".join(place.name for place, _ in tiers)
        if not yes:
            typer.confirm(f"Remove {count} records from {where}?", abort=True)
        removed = sum(tier.delete(key) for place, tier in tiers for key in doomed[place.name])
    console().print(Text(f"{removed} records removed from {where}"))


@app.command()
def top(
    url: Annotated[str, typer.Argument(help="where a vLLM server or serve_metrics shows its metrics")] = tops.URL,
    interval: Annotated[float, typer.Option(min=0.1, help="seconds between two looks")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="print the totals and end")] = False,
) -> None:
    """What a running store does: hits, bytes, seconds per GiB, failures, as rates per second."""
    tops.top(url, interval, once, console())


@app.command()
def demo(
    model: Annotated[
        Path | None, typer.Option(help="directory or hub id of a Llama, Mistral, Qwen2 or Qwen3 model")
    ] = None,
    documents: Annotated[Path | None, typer.Option(help="directory of .txt files")] = None,
    questions: Annotated[Path | None, typer.Option(help="JSON file of questions and answers")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="write all numbers here")] = None,
    page: Annotated[Path, typer.Option(help="the HTML page with pictures")] = Path(".demo/demo.html"),
    cache: Annotated[Path, typer.Option(help="disk tier of the documents' KV")] = Path(".demo/cache"),
    limit: Annotated[int | None, typer.Option(min=1, help="ask only so many questions")] = None,
    large: Annotated[bool, typer.Option(help="also time a 100M model with random weights")] = True,
    seed: Annotated[int | None, typer.Option(help="of the documents' orders; default: another one every time")] = None,
) -> None:
    """Ask questions over documents in ever new orders, in four ways, and show what each costs and gets right."""
    try:
        from lmc import demo as demos
    except ImportError as error:
        raise ConfigError(f"the demo needs {error.name}: pip install 'lmc[transformers]'") from error
    if not SHIPPED.is_dir() and not (model and documents and questions):
        raise InputError(
            "the small model is not in the wheel: run from a clone, or give --model, --documents and --questions"
        )
    for output in filter(None, (page, json_file)):
        writable(output)
    collection = read_collection(documents or SHIPPED / "documents", questions or SHIPPED / "questions.json")
    if limit is not None:
        collection = sample(collection, limit)
    bar = Progress(console=Console(stderr=True), transient=True)
    tasks: dict[str, TaskID] = {}

    def progress(what: str, done: int, of: int) -> None:
        if what not in tasks:
            tasks[what] = bar.add_task(what, total=of)
        bar.update(tasks[what], completed=done)

    with bar:
        outcome = demos.run(
            model or SHIPPED / "model",
            collection,
            demos.demo_settings(cache),
            seed=int(time.time()) if seed is None else seed,
            large=large,
            progress=progress,
        )
    show(outcome, page)
    if json_file is not None:
        json_file.write_text(outcome.json() + "\n")


def writable(output: Path) -> None:
    """Raise `InputError` now if a file could not be written later, after minutes of work."""
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.open("a").close()
    except OSError as error:
        raise InputError(f"cannot write {output}: {error.strerror}") from error


def show(outcome: "Outcome", page: Path) -> None:
    """Print the demo's table and write its page."""
    heading, (columns, rows) = outcome.heading(), outcome.table()
    table = Table(*columns)
    for row in rows:
        table.add_row(*map(Text, row))
    console().print(Text(heading), table, Text(f"pictures of {len(outcome.pictures)} prompts: {page}"), sep="\n")
    write_page(page, heading, columns, rows, outcome.pictures)


def doomed_records(tiers: Sequence[tuple[Place, Tier]], namespace: str | None) -> dict[str, list[ChunkKey]]:
    """By the name of the place: the keys of every record, or of those of one namespace; raise `InputError` if it is not one."""
    if namespace is None:
        return {place.name: [entry.key for entry in tier.entries()] for place, tier in tiers}
    found = {}
    for place, _ in tiers:
        with place.opened() as tier:  # the tier that changes things would also note a use of whatever it opens
            found[place.name] = survey(tier)[0]
    digest = chosen(namespace, chain.from_iterable(found.values()))
    return {name: there[digest].keys if digest in there else [] for name, there in found.items()}


def holdings_table(found: Mapping[bytes, Holding]) -> Table:
    """One row for each namespace, the largest first, and their total."""
    table = Table(
        "namespace",
        "records",
        "tokens",
        "GiB",
        "layers",
        "bytes a token",
        "codec",
        "least recently used",
        "most recently used",
    )
    rows = sorted(found.items(), key=lambda item: -item[1].bytes)
    for name, held in [*((digest.hex()[:SHORT], held) for digest, held in rows), ("total", total(found.values()))]:
        if name == "total":
            table.add_section()
        used = [datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC") for at in held.used] or ["-", "-"]
        table.add_row(
            name,
            str(len(held.keys)),
            str(held.tokens),
            f"{held.bytes / GIB:.3f}",
            ", ".join(map(str, sorted(held.layers))) or "-",
            f"{held.bytes / held.tokens:.0f}" if held.tokens else "-",
            ", ".join(sorted(held.codecs)) or "-",
            *used,
        )
    return table


def settings_table(settings: Settings) -> Table:
    """One row for each setting."""
    table = Table("setting", "value", "from")
    for column in table.columns:
        column.overflow = "fold"  # an ellipsis would cut paths
    for name in Settings.model_fields:
        row = (name, shown(name, getattr(settings, name)), settings.origin(name))
        table.add_row(*map(Text, row))  # Text: nothing in a value is markup
    return table


def console() -> Console:
    """Standard output: as wide as the terminal, or as the longest line where there is none."""
    return Console(width=None if sys.stdout.isatty() else UNCUT)


def main() -> None:
    """Entry point of the command `lmc`."""
    app()
