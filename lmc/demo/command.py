"""The command line of `lmc demo`. What it needs is imported when it runs, so that `lmc --help` stays quick."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import Progress, TaskID
from rich.table import Table
from rich.text import Text

from lmc.demo import SHIPPED
from lmc.errors import ConfigError, InputError
from lmc.terminal import console

if TYPE_CHECKING:
    from lmc.demo.run import Outcome


def demo(
    model: Annotated[
        Path | None, typer.Option(help="directory or hub id of a Llama, Mistral, Qwen2 or Qwen3 model")
    ] = None,
    documents: Annotated[Path | None, typer.Option(help="directory of .txt and .md files")] = None,
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
        from lmc.demo.questions import read_collection, sample
        from lmc.demo.run import demo_settings, run
    except ImportError as error:
        raise ConfigError(f"the demo needs {error.name}: pip install 'lmc[transformers]'") from error
    for output in filter(None, (page, json_file)):
        _check_writable(output)
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
        outcome = run(
            model or SHIPPED / "model",
            collection,
            demo_settings(cache),
            seed=int(time.time()) if seed is None else seed,
            large=large,
            progress=progress,
        )
    _show(outcome, page)
    if json_file is not None:
        json_file.write_text(outcome.json() + "\n")


def _check_writable(output: Path) -> None:
    """Raise `InputError` now if a file could not be written later, after minutes of work."""
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.open("a").close()
    except OSError as error:
        raise InputError(f"cannot write {output}: {error.strerror}") from error


def _show(outcome: "Outcome", page: Path) -> None:
    """Print the table and write the page."""
    from lmc.demo.page import write_page

    heading, (columns, rows) = outcome.heading(), outcome.table()
    table = Table(*columns)
    for row in rows:
        table.add_row(*map(Text, row))
    console().print(Text(heading), table, Text(f"pictures of {len(outcome.pictures)} prompts: {page}"), sep="\n")
    write_page(page, heading, columns, rows, outcome.pictures)
