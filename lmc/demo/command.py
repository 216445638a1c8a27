"""The command line of `lmc demo`. It imports its modules when it runs, so that `lmc --help` stays fast."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import Progress, TaskID
from rich.table import Table
from rich.text import Text

from lmc.demo import REAL, SHIPPED
from lmc.errors import InputError, needs_transformers
from lmc.small_files import check_writable, writing
from lmc.terminal import console, counted

if TYPE_CHECKING:
    from lmc.demo.outcome import Outcome

OTHER_FILE = "use --page and --json for other files"
MAX_SHOWN_ANSWERS = 20  # questions whose answers are printed


def demo(
    small: Annotated[
        bool, typer.Option("--small", help="use the small model of the wheel, over documents made for it")
    ] = False,
    model: Annotated[
        Path | None, typer.Option(help="directory or hub id of a Llama, Mistral, Qwen2 or Qwen3 model")
    ] = None,
    documents: Annotated[
        Path | None, typer.Option(help="directory of text files, as for lmc learn, or a JSONL file")
    ] = None,
    questions: Annotated[Path | None, typer.Option(help="JSON file of questions and answers")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="JSON file for all numbers")] = None,
    page: Annotated[Path, typer.Option(help="HTML file for the page with pictures")] = Path(".demo/demo.html"),
    cache: Annotated[Path, typer.Option(help="directory of the disk tier for the documents' KV")] = Path(".demo/cache"),
    limit: Annotated[int | None, typer.Option(min=1, help="maximum number of questions")] = None,
    large: Annotated[bool, typer.Option(help="also time a 100M model with random weights; with --small")] = True,
    seed: Annotated[int, typer.Option(help="random seed for the order of the documents")] = 1,
) -> None:
    """Ask questions over documents in new orders, in four modes, and show the cost and accuracy of each mode."""
    try:
        from lmc.demo.page import write_page
        from lmc.demo.questions import read_collection, sample
        from lmc.demo.run import demo_settings, run
    except ImportError as error:
        raise needs_transformers("the demo", error) from error
    for output in filter(None, (page, json_file)):
        check_writable(output, OTHER_FILE)
    data = SHIPPED if small else REAL
    collection = sample(read_collection(documents or data / "documents", questions or data / "questions.json"), limit)
    bar = Progress(console=Console(stderr=True), transient=True)
    tasks: dict[str, TaskID] = {}

    def progress(task: str, finished: int, total: int) -> None:
        if task not in tasks:
            tasks[task] = bar.add_task(task, total=total)
        bar.update(tasks[task], completed=finished)

    with bar:
        if model is None and not small:
            progress("conversion of the model, once", 0, 1)
            model = _pretrained()
            progress("conversion of the model, once", 1, 1)
        outcome = run(
            model or SHIPPED / "model",
            collection,
            demo_settings(cache),
            seed=seed,
            large=large and small,
            progress=progress,
        )
    try:
        with writing(str(page), OTHER_FILE):
            write_page(page, outcome)
        if json_file is not None:
            with writing(str(json_file), OTHER_FILE):
                json_file.write_text(outcome.json() + "\n", encoding="utf-8")
    finally:
        _show(outcome, page)


def _pretrained() -> Path:
    from lmc.demo.pretrained import smollm2

    try:
        return smollm2()
    except InputError as error:
        raise InputError(f"{error}; or run `lmc demo --small`, which needs no other packages") from error


def _show(outcome: "Outcome", page: Path) -> None:
    """Print the table, and the answers of at most `MAX_SHOWN_ANSWERS` questions."""
    columns, rows = outcome.table()
    table = Table(*columns)
    for row in rows:
        table.add_row(*map(Text, row))
    questions = outcome.asked if len(outcome.asked) <= MAX_SHOWN_ANSWERS else []
    answers = [
        Text("\n".join((f"{number:2}. {answered.title()}", *answered.lines())))
        for number, answered in enumerate(questions, 1)
    ]
    end = f"answers, and pictures of {counted(len(outcome.pictures), 'prompt')}: {page}"
    console().print(*answers, Text(outcome.heading()), table, Text(end), sep="\n")
