"""The command line of `lmc demo`. What it needs is imported when it runs, so that `lmc --help` stays quick."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import Progress, TaskID
from rich.table import Table
from rich.text import Text

from lmc.demo import REAL, SHIPPED
from lmc.errors import InputError, needs_transformers
from lmc.terminal import console, counted

if TYPE_CHECKING:
    from lmc.demo.outcome import Outcome

FEW = 20  # questions whose answers are printed


def demo(
    small: Annotated[bool, typer.Option("--small", help="the small model, over documents made for it")] = False,
    model: Annotated[
        Path | None, typer.Option(help="directory or hub id of a Llama, Mistral, Qwen2 or Qwen3 model")
    ] = None,
    documents: Annotated[Path | None, typer.Option(help="directory of .txt and .md files")] = None,
    questions: Annotated[Path | None, typer.Option(help="JSON file of questions and answers")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="write all numbers here")] = None,
    page: Annotated[Path, typer.Option(help="the HTML page with pictures")] = Path(".demo/demo.html"),
    cache: Annotated[Path, typer.Option(help="disk tier of the documents' KV")] = Path(".demo/cache"),
    limit: Annotated[int | None, typer.Option(min=1, help="ask only so many questions")] = None,
    large: Annotated[bool, typer.Option(help="with --small: also time a 100M model with random weights")] = True,
    seed: Annotated[int, typer.Option(help="of the documents' orders")] = 1,
) -> None:
    """Ask questions over documents in ever new orders, in four ways, and show what each costs and gets right."""
    try:
        from lmc.demo.questions import read_collection, sample
        from lmc.demo.run import demo_settings, run
    except ImportError as error:
        raise needs_transformers("the demo", error) from error
    for output in filter(None, (page, json_file)):
        _check_writable(output)
    data = SHIPPED if small else REAL
    collection = sample(read_collection(documents or data / "documents", questions or data / "questions.json"), limit)
    bar = Progress(console=Console(stderr=True), transient=True)
    tasks: dict[str, TaskID] = {}

    def progress(what: str, done: int, of: int) -> None:
        if what not in tasks:
            tasks[what] = bar.add_task(what, total=of)
        bar.update(tasks[what], completed=done)

    with bar:
        if model is None and not small:
            progress("the model, which is converted once", 0, 1)
            model = _pretrained()
            progress("the model, which is converted once", 1, 1)
        outcome = run(
            model or SHIPPED / "model",
            collection,
            demo_settings(cache),
            seed=seed,
            large=large and small,
            progress=progress,
        )
    _show(outcome, page)
    if json_file is not None:
        json_file.write_text(outcome.json() + "\n")


def _pretrained() -> Path:
    from lmc.demo.pretrained import smollm2

    try:
        return smollm2()
    except InputError as error:
        raise InputError(f"{error}; or run `lmc demo --small`, which needs nothing more") from error


def _check_writable(output: Path) -> None:
    """Raise `InputError` now if a file could not be written later, after minutes of work."""
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.open("a").close()
    except OSError as error:
        raise InputError(f"cannot write {output}: {error.strerror}") from error


def _show(outcome: "Outcome", page: Path) -> None:
    """Print the table, and the answers if they are few; write the page."""
    from lmc.demo.page import write_page

    columns, rows = outcome.table()
    table = Table(*columns)
    for row in rows:
        table.add_row(*map(Text, row))
    shown = outcome.asked if len(outcome.asked) <= FEW else []
    answers = [
        Text("\n".join((f"{number:2}. {asked.title()}", *asked.lines()))) for number, asked in enumerate(shown, 1)
    ]
    end = f"answers, and pictures of {counted(len(outcome.pictures), 'prompt')}: {page}"
    console().print(*answers, Text(outcome.heading()), table, Text(end), sep="\n")
    write_page(page, outcome)
