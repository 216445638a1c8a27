"""The command line of `lmc calibrate`. It imports its modules when it runs, so that `lmc --help` stays fast."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from lmc.errors import InputError, needs_transformers
from lmc.terminal import console

if TYPE_CHECKING:
    from lmc.commands.calibrate.measure import Measured
    from lmc.commands.calibrate.verdict import Verdict
    from lmc.config.settings import Settings

OTHER_REPORT = "use --report for another file"
NOT_WORTH_IT = 1  # the exit code if blending is not worth it


def calibrate(
    model: Annotated[str, typer.Argument(help="directory or hub id of a Llama, Mistral, Qwen2 or Qwen3 model")],
    documents: Annotated[Path, typer.Option(help="directory of text files, as for lmc learn, or a JSONL file")],
    questions: Annotated[
        Path | None, typer.Option(help="JSON file of questions and answers; default: made from the documents")
    ] = None,
    agreement: Annotated[
        float, typer.Option(help="share of tokens, and of first tokens, for which blends must agree with full prefill")
    ] = 0.9,
    prompts: Annotated[
        int | None, typer.Option(min=2, help="number of prompts; default: as many as 4 minutes allow")
    ] = None,
    report: Annotated[Path | None, typer.Option(help="JSON file for the verdict and its numbers")] = None,
) -> None:
    """Measure whether blending is worth it for a model and documents. Exit code: 0 if it is, 1 if not."""
    try:
        import lmc.connectors.transformers
        import lmc.demo.questions  # noqa: F401
    except ImportError as error:
        raise needs_transformers("lmc calibrate", error) from error
    from lmc.commands.calibrate.verdict import judge, report_of
    from lmc.small_files import check_writable, replace_text, writing

    if not 0 < agreement <= 1:
        raise InputError(f"invalid --agreement {agreement:g}: use a number above 0 and at most 1")
    if report is not None:
        check_writable(report, OTHER_REPORT)
    settings = calibration_settings()
    measured = _measure(model, documents, questions, settings, prompts)
    verdict = judge(measured, agreement)
    try:
        if report is not None:
            content = json.dumps(report_of(model, measured, verdict, agreement, settings), indent=1)
            with writing(str(report), OTHER_REPORT):
                replace_text(report, f"{content}\n")
    finally:
        _show(model, measured, verdict, settings)
    if verdict.ratio is None:
        raise typer.Exit(NOT_WORTH_IT)


def calibration_settings() -> "Settings":
    """Return the user's settings with blending, but without tiers and cache server, so that nothing is left there."""
    from lmc.config.settings import Settings

    alone = {"local_disk": None, "remote_url": None, "server": None}
    return Settings.load({"enable_blending": True, **alone})


def _measure(
    model: str, documents: Path, questions: Path | None, settings: "Settings", prompts: int | None
) -> "Measured":
    """Load the model, make the prompts, and return the measured numbers."""
    from lmc.commands.calibrate.measure import Measurement
    from lmc.commands.calibrate.prompts import CalibrationPrompts, collect, read_inputs
    from lmc.connectors.transformers import CachedModel

    inputs = read_inputs(documents, questions)  # before the model is loaded, which may take minutes
    cached, tokenizer = CachedModel.load(model, settings)
    with cached, Progress(console=Console(stderr=True), transient=True) as bar:
        collection = collect(inputs, tokenizer, cached.layers.positions)
        calibration_prompts = CalibrationPrompts(collection, tokenizer, settings.blend_special_str)
        task = bar.add_task("prompts in all modes", total=None)
        measurement = Measurement(cached, calibration_prompts)
        return measurement.run(prompts, lambda done, total: bar.update(task, completed=done, total=total))


def _show(model: str, measured: "Measured", verdict: "Verdict", settings: "Settings") -> None:
    """Print a heading, the table, the verdict, and the lines for a YAML file."""
    from lmc.commands.calibrate.measure import BLIND
    from lmc.commands.calibrate.verdict import heading, table, yaml_lines

    columns, rows = table(measured)
    shown = Table(*columns)
    for row in rows:
        shown.add_row(*map(Text, row))
    console().print(Text(heading(model, measured, settings)), shown, sep="\n")
    if verdict.ratio is None:
        console().print(Text(f"Blending is not worth it for this model: {verdict.reason}."))
        return
    console().print(Text(f"Blending is worth it at ratio {verdict.ratio:g}: {verdict.reason}."))
    if measured.ways[BLIND].agreement >= measured.ways[verdict.ratio].agreement:
        note = "Blind reuse agrees equally well: these questions do not need attention between documents."
        console().print(Text(note))
    console().print(Text(f"\n{yaml_lines(settings, verdict.ratio)}"))
